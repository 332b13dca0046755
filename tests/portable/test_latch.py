"""Latches and thread starts under an impatient user's interrupts, which may come in the middle of a lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from nbddp import latch as latches
from nbddp.latch import Latch

TRIALS = 1000
NUMBER = signal.SIGUSR2


class Interrupted(BaseException):
    """As KeyboardInterrupt, which pytest keeps for itself."""


def start_thread(target: Callable[[], object], name: str) -> None:
    latches.start_thread(lambda: target() and None, name, refused=pytest.fail)  # type: ignore[arg-type]


# Another process: a thread sends while it holds the GIL, and so never in the middle of what the main thread does.
SENDER = "import os, sys, time\nwhile True:\n    os.kill(int(sys.argv[1]), int(sys.argv[2]))\n    time.sleep(2e-5)"


class Impatience:
    """While ``lasts``, signals from outside raise wherever the main thread waits or starts a thread."""

    def __init__(self) -> None:
        self.lasts = False
        self.raised = 0

    def raises(self, _number: int, frame: FrameType | None) -> None:
        file = frame.f_code.co_filename if frame is not None else ""
        if self.lasts and file.endswith(("/latch.py", "/threading.py")):
            self.raised += 1
            raise Interrupted


@pytest.fixture
def impatience() -> Iterator[Impatience]:
    impatience = Impatience()
    before = signal.signal(NUMBER, impatience.raises)
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(os.getpid()), str(int(NUMBER))])
    time.sleep(0.2)
    yield impatience
    impatience.lasts = False
    sender.kill()
    sender.wait()
    signal.signal(NUMBER, before)


def test_an_interrupted_waiter_does_not_block_the_thread_that_opens(impatience: Impatience) -> None:
    for trial in range(TRIALS):
        latch, opened = Latch(), Latch()

        def open_it(latch: Latch = latch, opened: Latch = opened, after: float = (trial % 10) * 1e-4) -> None:
            time.sleep(after)
            latch.open()
            opened.open()

        start_thread(open_it, "opener")
        impatience.lasts = True
        while not latch.is_open:
            try:
                latch.wait(0.0002)
            except Interrupted:
                continue
        impatience.lasts = False
        assert opened.wait(30), f"the opener hangs, in trial {trial}"
    assert impatience.raised > TRIALS / 2


def test_a_thread_whose_start_returned_runs_despite_interrupts(impatience: Impatience) -> None:
    for trial in range(TRIALS):
        ran = Latch()
        started = impatience.lasts = True
        try:
            start_thread(ran.open, "runner")
        except Interrupted:
            started = False
        impatience.lasts = False
        if started:
            assert ran.wait(30), f"it does not run, in trial {trial}"


def test_a_latch_waits_up_to_its_timeout_and_opens_for_all_waiters() -> None:
    latch, through = Latch(), []
    began = time.monotonic()
    assert not latch.wait(0.05)
    assert 0.05 <= time.monotonic() - began < 10
    for _ in range(5):
        start_thread(lambda: through.append(latch.wait(30)), "waiter")
    time.sleep(0.05)
    assert through == []
    latch.open()
    deadline = time.monotonic() + 20
    while len(through) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert through == [True] * 5
    assert latch.wait(0)
    assert not latch._waiting


def test_a_signal_that_wakes_no_thread_is_handled_within_10_s() -> None:
    """It came just before the lock's sleep, or the system gave it to another thread: the sleep goes on."""
    latch, heard = Latch(), []

    def raises(_number: int, _frame: FrameType | None) -> None:
        heard.append(time.monotonic())
        raise Interrupted

    before = signal.signal(NUMBER, raises)

    def signal_this_thread() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), NUMBER)

    start_thread(signal_this_thread, "sender")
    began = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            latch.wait(20)
    finally:
        signal.signal(NUMBER, before)
    assert heard[0] - began < 10


def test_a_thread_that_stays_does_everything_in_order_and_then_ends() -> None:
    thread = latches.StayingThread("stays")
    done: list[tuple[int, threading.Thread]] = []
    for number in range(20):
        thread.call(lambda number=number: done.append((number, threading.current_thread())), pytest.fail)
    last = Latch()
    thread.call(last.open, pytest.fail)
    assert last.wait(20)
    thread.end()
    assert [number for number, _ in done] == list(range(20))
    [only] = {worker for _, worker in done}
    assert only.name == "stays"
    assert not only.is_alive()


def test_a_thread_that_stays_keeps_nothing_of_its_last_work() -> None:
    class Work:
        def __call__(self) -> None:
            called.open()

    thread, called, work = latches.StayingThread("stays"), Latch(), Work()
    kept = weakref.ref(work)
    thread.call(work, pytest.fail)
    assert called.wait(20)
    del work
    deadline = time.monotonic() + 20
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert kept() is None
    thread.end()


def test_a_thread_that_stays_can_end_itself() -> None:
    thread, over = latches.StayingThread("stays"), Latch()

    def end() -> None:
        thread.end()
        over.open()

    thread.call(end, pytest.fail)
    assert over.wait(20)


def test_where_the_system_has_no_thread_a_thread_that_stays_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise RuntimeError("can't start new thread")

    thread, refused = latches.StayingThread("stays"), list[RuntimeError]()
    with monkeypatch.context() as patch:
        patch.setattr(latches._thread, "start_new_thread", refuse)
        thread.call(lambda: None, refused.append)
        assert [str(error) for error in refused] == ["can't start new thread"]
    done = Latch()
    thread.call(done.open, pytest.fail)  # there is one again
    assert done.wait(20)
    thread.end()


def test_what_is_to_be_done_once_is_done_by_one_of_many_threads() -> None:
    for _ in range(50):
        once, begin, claimed = latches.Once(), threading.Barrier(8), list[bool]()

        def claim(once: latches.Once = once, begin: threading.Barrier = begin, claimed: list[bool] = claimed) -> None:
            begin.wait(20)
            claimed.append(once.claim())

        threads = [threading.Thread(target=claim) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(claimed) == [False] * 7 + [True]
        assert once.claimed
