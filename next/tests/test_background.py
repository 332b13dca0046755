"""``wait=False``: several runs at once, awaited, stopped, inspected and found again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import nbddp
from tests.support import Cells, run


def test_wait_false_returns_at_once_and_wait_gives_the_value(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import os, time, nbddp
        def train():
            while not os.path.exists("go"):
                time.sleep(0.01)
            return nbddp.rank()
    """)
    going = run(names.train, wait=False)
    assert going.state in ("starting", "running")
    with pytest.raises(TimeoutError, match="still"):
        going.wait(0.05)
    (in_folder / "go").touch()
    assert going.wait(20) is going
    assert (going.state, going.values) == ("finished", [0, 1])
    assert going.wait() is going


def test_twenty_launches_at_once_do_not_collide(cell: Cells) -> None:
    """Port 29500 is taken: the second launch of every other launcher."""
    names = cell("""
        import os, torch, torch.distributed as dist
        def train(i):
            x = torch.tensor([float(i)])
            dist.all_reduce(x)
            return x.item(), dist.get_world_size(), os.environ["MASTER_PORT"]
    """)
    runs = [run(names.train, i, wait=False, timeout=150) for i in range(20)]
    values = [going.wait(150).values for going in runs]
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
    assert ticks > 3  # the event loop went on meanwhile
