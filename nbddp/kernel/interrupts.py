"""What interrupting the cell does while nbddp works: it's a request, or a KeyboardInterrupt when the work is done."""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

_POLL_S = 0.1


@contextlib.contextmanager
def interrupts_to(callback: Callable[[], None]) -> Iterator[None]:
    """Call this when the cell is interrupted. It replaces one around it; off the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: callback()) or signal.SIG_DFL  # None: not set by Python
    try:
        yield
    finally:
        try:
            signal.signal(signal.SIGINT, before)
        except BaseException:  # the callback's: signal() handles what has just come first
            signal.signal(signal.SIGINT, before)
            raise


@contextlib.contextmanager
def interrupts_held(callback: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise KeyboardInterrupt only afterwards, however often it comes: a process half made would stay.

    Args:
        callback: is called at once.
    """
    came: list[None] = []  # an Event is not reentrant

    def note() -> None:
        came.append(None)
        callback()

    try:
        with interrupts_to(note):
            yield
    finally:
        if came:
            raise KeyboardInterrupt


class Latch:
    """A ``threading.Event`` whose wait may be interrupted at any moment: an Event's lock would stay taken."""

    def __init__(self) -> None:
        self._is_set = False
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._news.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it was set in time."""
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=min(left, _POLL_S))
                self._news.put(None)  # for the others; they look again if an interrupt comes in between
        return self._is_set
