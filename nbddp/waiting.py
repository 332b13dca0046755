"""Both sides. Waiting and starting threads where a KeyboardInterrupt may come between any two instructions.

``threading.Event``, ``Condition`` and ``Thread.start`` are Python code around a lock: an interrupt in the middle leaves
it taken, and the thread that is waited for can never say that it is done. A raw lock's ``with`` is one instruction.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

# A signal between Python's last look for one and the lock's sleep, or one that another thread is given, wakes nobody:
# it is seen after the sleep.
_NAP_S = 0.1

T = TypeVar("T")


class Latch:
    """Opens once, like an Event that is never cleared; an interrupt of a thread that waits harms no other."""

    def __init__(self) -> None:
        self.is_open = False
        self._waiting: list[_thread.LockType] = []  # a lock per waiter, which no other waiter takes

    def open(self) -> None:
        """Let all waiters go on, now and later."""
        self.is_open = True
        for lock in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # never taken: its waiter was interrupted before
                lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is open, or so long. Returns whether it is."""
        mine = _thread.allocate_lock()
        mine.acquire()
        self._waiting.append(mine)  # and only then look: open() does it the other way round
        try:
            deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
            while not self.is_open and (left := deadline - time.monotonic()) > 0:
                mine.acquire(timeout=min(left, _NAP_S))
        finally:
            self._waiting.remove(mine)
        return self.is_open


def start_thread(target: Callable[[], None], name: str, refused: Callable[[RuntimeError], None]) -> None:
    """Start a daemon thread, without waiting until it says that it has; ``refused`` if the system has none to give."""
    thread = threading.Thread(target=target, name=name, daemon=True)

    def start() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            refused(error)

    try:
        _thread.start_new_thread(start, ())  # there, no interrupt can come in the middle
    except RuntimeError as error:
        refused(error)


def uninterrupted(work: Callable[[], None], name: str) -> None:
    """Do it where no interrupt comes in the middle, on a thread of its own; one here ends only the wait for it.

    Raises:
        Exception: what ``work`` raises.
    """
    done = Latch()
    raised: list[Exception] = []

    def do() -> None:
        try:
            work()
        except Exception as error:  # for whoever waits
            raised.append(error)
        finally:
            done.open()

    start_thread(do, name, lambda _: do())
    done.wait()
    if raised:
        raise raised.pop()


class Abandoned(Exception):
    """Nobody waits any more for what a thread does."""


def aside(work: Callable[[], T], name: str, give_up: Callable[[], bool]) -> T:
    """Do it on a thread of its own, and leave that behind when ``give_up`` says so.

    Raises:
        Abandoned: it has been left behind. Otherwise what ``work`` raises.
    """
    done = Latch()
    came: list[T] = []
    raised: list[BaseException] = []

    def do() -> None:
        try:
            came.append(work())
        except BaseException as error:  # for whoever waits
            raised.append(error)
        finally:
            done.open()

    try:
        threading.Thread(target=do, name=name, daemon=True).start()
    except RuntimeError:  # the system has none to give
        do()
    while not done.wait(_NAP_S):
        if give_up():
            raise Abandoned
    if raised:
        raise raised.pop()
    return came.pop()
