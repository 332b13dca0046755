"""What an interrupt of the cell does while nbddp works: a request, or a KeyboardInterrupt when it's done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

_MOST_HELD = 2


@contextlib.contextmanager
def interrupts_to(callback: Callable[[], None]) -> Iterator[None]:
    """Have an interrupt of the cell call this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: callback())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Raise it afterwards: a process half made would leave its files. The third one comes at once."""
    came = 0

    def note() -> None:
        nonlocal came
        came += 1
        if came > _MOST_HELD:
            raise KeyboardInterrupt

    with interrupts_to(note):
        yield
    if came:
        raise KeyboardInterrupt
