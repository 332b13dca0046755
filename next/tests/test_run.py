"""A ``Run`` as a ``Future``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Iterator

import pytest

import nbddp
from tests.support import Cells, start, wait_until

SLEEPS = """
    import time
    def train(seconds):
        time.sleep(seconds)
        return "slept"
"""


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_result_waits_for_rank_0s_value(cell: Cells) -> None:
    going = start(cell(SLEEPS).train, 0.2)
    assert not going.done()
    with pytest.raises(TimeoutError, match="still"):
        going.result(timeout=0.01)
    assert going.result() == "slept"
    assert (going.done(), going.exception()) == (True, None)


def test_a_run_has_the_methods_of_a_future() -> None:
    mine = {"result", "exception", "done", "cancel"}
    assert mine <= set(dir(concurrent.futures.Future)) & set(dir(nbddp.Run))


def test_runs_can_be_listed_on_another_thread_while_runs_come_and_go(often: None) -> None:
    kept = [nbddp.Run("kept", 1) for _ in range(30)]
    over, listed = threading.Event(), []

    def list_them() -> None:
        while not over.is_set():
            listed.append([run.name for run in nbddp.runs()].count("kept"))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        listing = pool.submit(list_them)
        for _ in range(500):
            nbddp.Run("passing", 1)
        wait_until(lambda: listed)
        over.set()
        listing.result()
    assert set(listed) == {len(kept)}
    for run in (*kept, nbddp.last_run()):
        run._end("finished")


def test_a_run_ends_although_an_event_loop_that_waited_for_it_is_closed() -> None:
    run, answers = nbddp.Run("train", 1), []

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run, 0.01)  # type: ignore[arg-type]

    async def wait() -> None:
        threading.Timer(0.01, run._end, ["finished"]).start()
        answers.append(await run)

    asyncio.run(give_up())
    asyncio.run(wait())
    assert (answers, run.state, run.done()) == ([run], "finished", True)
