"""What interrupting the cell does while nbddp works: it's a request, or a KeyboardInterrupt when the work is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interrupts_to(callback: Callable[[], None]) -> Iterator[None]:
    """Call this when the cell is interrupted."""
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
    """Raise KeyboardInterrupt only afterwards, however often it comes: a process half made would stay."""
    came: list[None] = []  # an Event is not reentrant
    try:
        with interrupts_to(lambda: came.append(None)):
            yield
    finally:
        if came:
            raise KeyboardInterrupt
