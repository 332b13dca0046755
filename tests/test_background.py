"""``wait=False``: several runs at once, awaited and looked at."""

import asyncio
import time
from pathlib import Path

import pytest

import nbddp
from nbddp.kernel import crew
from tests.support import OUR_FILES, Cells, run, start, wait_until


def test_wait_false_returns_at_once_and_wait_and_result_give_the_values(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import os, time, nbddp
        def train():
            while not os.path.exists("go"): time.sleep(0.01)
            return nbddp.rank()
    """)
    going = run(names.train, wait=False)
    assert (going.state in ("starting", "running"), going.done()) == (True, False)
    for wait in (going.wait, going.result):
        with pytest.raises(TimeoutError, match="still"):
            wait(timeout=0.05)
    with pytest.raises(nbddp.NbddpError, match=r"call wait\(\) first$"):
        _ = going.values
    (in_folder / "go").touch()
    assert going.result() == 0
    assert going.wait(20) is going.wait() is going
    assert (going.state, going.values, going.done(), going.exception()) == ("finished", [0, 1], True, None)


def test_twenty_launches_at_once_do_not_collide(cell: Cells) -> None:
    """Port 29500 is taken: the second launch of every other launcher."""
    names = cell("""
        import os, torch, torch.distributed as dist
        def train(i):
            x = torch.tensor([float(i)])
            dist.all_reduce(x)
            return x.item(), dist.get_world_size(), os.environ["MASTER_PORT"]
    """)
    values = [going.wait(150).values for going in [run(names.train, i, wait=False, timeout=150) for i in range(20)]]
    assert [value[0][:2] for value in values] == [(2.0 * i, 2) for i in range(20)]
    assert len({value[0][2] for value in values}) == 20


def test_awaiting_runs_gives_their_values_and_raises_their_errors(cell: Cells) -> None:
    names = cell("import time\ndef train(x): time.sleep(0.05); return x\ndef bad(): raise ValueError('b')")

    async def main() -> tuple[list[object], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        first, second = run(names.train, 1, wait=False), run(names.train, 2, wait=False)
        done = await asyncio.gather(first, second)  # type: ignore[call-overload]
        with pytest.raises(nbddp.RankError, match="ValueError: b"):
            await run(names.bad, wait=False)
        again = await first
        ticking.cancel()
        return [r.value for r in (*done, again)], ticks

    values, ticks = asyncio.run(main())
    assert values == [1, 2, 1]
    with pytest.raises(nbddp.RankError, match="ValueError: b"):
        _ = nbddp.last_run().value
    assert ticks > 3  # the event loop went on meanwhile


def test_stacks_show_where_each_rank_is(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import collections, itertools, nbddp, time
        def wait_here(): time.sleep(1000)  # rank 1 is here
        def in_c(): collections.deque(itertools.count(), maxlen=0)  # rank 2 holds the GIL here
        def train():
            open(f"rank-{nbddp.rank()}", "w").close()
            if nbddp.rank() == 1: wait_here()
            if nbddp.rank() == 2: in_c()
            nbddp.barrier()  # rank 0 waits for the others
    """)
    going = start(names.train, nprocs=3)
    wait_until(lambda: len(list(in_folder.iterdir())) == 3)
    where = "rank 0 is waiting in barrier (train, line 9); rank 1 is in wait_here, line 3; rank 2 is in in_c, line 4"
    wait_until(lambda: going.stacks().startswith(where), what=going.stacks)
    text = going.stacks()
    summary, *parts = text.split("\n\n")
    assert summary == where
    assert parts[0].startswith("rank 0")
    marks = ("rank 0", "# rank 0 waits"), ("in wait_here", "# rank 1 is"), ("in in_c", "# rank 2 holds")
    assert [[mark in part for mark in each] for part, each in zip(parts, marks, strict=True)] == [[True, True]] * 3
    assert "multiprocessing" not in text
    assert not OUR_FILES.search(text)
    assert going.state == "running"  # looking changes nothing
    going.stop(0)
    assert "no rank is running" in going.stacks()


def test_threads_that_a_function_has_left_are_not_waited_for_long(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    names = cell("""
        import threading, time
        def leaves():
            threading.Thread(target=time.sleep, args=(30,)).start()
            return 7
    """)
    started = start(names.leaves)
    wait_until(lambda: all(rank.report for rank, _, _ in started._parts))
    began = time.monotonic()
    started.stop()
    assert time.monotonic() < began + 5
    assert started.values == [7, 7]
    monkeypatch.setattr(crew, "_LEAVE_S", 0.5)
    assert run(names.leaves).values == [7, 7]
    assert time.monotonic() < began + 25
