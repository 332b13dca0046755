"""Waits for threads and starts them where a KeyboardInterrupt may arrive between any two instructions.

``threading.Event``, ``Condition`` and ``Thread.start`` are Python code around a lock: an interrupt in the middle leaves
the lock taken, and the other thread can then never signal that it is done. A raw lock's ``with`` is one instruction.
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

# A signal does not end the sleep in a lock if it arrives between Python's last check and the sleep, or on another
# thread. It is handled after the sleep, which is therefore short.
_WAIT_SLICE_S = 0.1

T = TypeVar("T")


class Latch:
    """Like an Event that is never cleared, but an interrupt of one waiting thread does not affect the others."""

    def __init__(self) -> None:
        self.is_open = False
        self._waiting: list[_thread.LockType] = []  # a lock for each waiter alone

    def open(self) -> None:
        """Release all present and future waiters."""
        self.is_open = True
        self.nudge()

    def nudge(self) -> None:
        """Have the present waiters look at their ``or_when`` again."""
        for lock in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # not taken: nudged before, or its waiter was interrupted
                lock.release()

    def wait(self, timeout_s: float | None = None, or_when: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the latch is open, at most ``timeout_s``. Returns whether it is open.

        Args:
            or_when: ends the wait when it returns true; see :meth:`nudge`.
        """
        mine = _thread.allocate_lock()
        mine.acquire()
        self._waiting.append(mine)  # before the check of is_open: open() sets is_open before it reads the list
        try:
            deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
            while not self.is_open and not or_when() and (left := deadline - time.monotonic()) > 0:
                mine.acquire(timeout=min(left, _WAIT_SLICE_S))
        finally:
            self._waiting.remove(mine)
        return self.is_open


class Once:
    """A task that runs once, however many threads ask for it.

    After an interrupt nothing shows whether a call of :func:`start_thread` has worked, so it is called again. The
    thread that comes first does the work.
    """

    def __init__(self) -> None:
        self._tokens = [None]

    @property
    def claimed(self) -> bool:
        """Whether a thread has claimed it."""
        return not self._tokens

    def claim(self) -> bool:
        """Return True to the first caller, which does the work, and False to all others."""
        try:
            self._tokens.pop()  # one instruction: no two threads can both succeed
        except IndexError:
            return False
        return True


def start_thread(target: Callable[[], None], name: str, refused: Callable[[RuntimeError], None]) -> None:
    """Start a daemon thread without waiting for its start; call ``refused`` if the system has no thread left."""
    thread = threading.Thread(target=target, name=name, daemon=True)

    def start() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            refused(error)

    try:
        _thread.start_new_thread(start, ())  # on the new thread, no interrupt can arrive during thread.start()
    except RuntimeError as error:
        refused(error)


class StayingThread:
    """A daemon thread that calls one function after the other; a new thread for each would take 0.6 to 1.3 ms to start.

    The first call starts it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start = Once()

    def call(self, work: Callable[[], None], refused: Callable[[RuntimeError], None]) -> None:
        """Call ``work`` without waiting for it; call ``refused`` if the system has no thread left."""
        self._work.put(work)
        if not self._start.claimed:
            start_thread(self._serve, self._name, refused)

    def end(self) -> None:
        """Let the thread end when it has called everything, and wait for that if it has begun and is another one."""
        self._work.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        if not self._start.claim():
            return
        self._thread = threading.current_thread()
        while (work := self._work.get()) is not None:
            work()
            del work  # it keeps a run alive


def uninterrupted(work: Callable[[], None], name: str) -> None:
    """Call ``work`` on another thread, where no interrupt can stop it halfway; an interrupt here ends only the wait.

    Raises:
        Exception: what ``work`` raises.
    """
    done = Latch()
    raised: list[Exception] = []

    def do() -> None:
        try:
            work()
        except Exception as error:  # for the waiting thread
            raised.append(error)
        finally:
            done.open()

    start_thread(do, name, lambda _: do())
    done.wait()
    if raised:
        raise raised.pop()


class Abandoned(Exception):
    """The wait for a thread was given up."""


def aside(work: Callable[[], T], name: str, give_up: Callable[[], bool]) -> T:
    """Call ``work`` on another thread, and stop waiting for it when ``give_up()`` is true.

    Raises:
        Abandoned: the wait was given up. Otherwise what ``work`` raises.
    """
    done = Latch()
    returned: list[T] = []
    raised: list[BaseException] = []

    def do() -> None:
        try:
            returned.append(work())
        except BaseException as error:  # for the waiting thread
            raised.append(error)
        finally:
            done.open()

    try:
        threading.Thread(target=do, name=name, daemon=True).start()
    except RuntimeError:  # the system has no thread left
        do()
    while not done.wait(_WAIT_SLICE_S):
        if give_up():
            raise Abandoned
    if raised:
        raise raised.pop()
    return returned.pop()
