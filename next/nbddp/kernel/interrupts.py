"""What an interrupt of the cell does while nbddp works: a request, or a KeyboardInterrupt when it's done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


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
    """Raise KeyboardInterrupt only afterwards, however often it comes: a process half made would stay."""
    came = threading.Event()
    with interrupts_to(came.set):
        yield
    if came.is_set():
        raise KeyboardInterrupt
