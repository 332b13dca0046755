"""Figures of sessions: a cell, the memory, and a failure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.kernel import CellFailed, Kernel, kept
from benchmarks.measure import Sizes, Table
from benchmarks.ways import SESSIONS, Way

CELLS = 20  # of a turn
FAILS_WITHIN_S = 20.0  # a way whose other ranks wait forever isn't waited for any longer
BEGIN = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)"
ASSIGN = "x = 1"
REDUCE = "dist.all_reduce(t)"
FAIL = "if rank == 1:\n    raise ValueError('on purpose')\ndist.all_reduce(t)"


def cell(table: Table, sizes: Sizes, ways: Sequence[Way] = SESSIONS) -> None:
    """``x = 1`` on all ranks, above ``x = 1`` in a plain kernel."""
    figure = f"overhead of x = 1 in a session of {sizes.ranks} ranks"
    with Kernel() as plain, kept(lambda way: way.prepared(sizes.ranks, BEGIN)) as kernels:

        def turn(way: Way) -> None:
            kernel, source = kernels(way), way.cell(ASSIGN, sizes.ranks)
            pairs = [(kernel.cell(source).seconds, plain.cell(ASSIGN).seconds) for _ in range(CELLS)]
            table.add(figure, way.name, statistics.median(there - here for there, here in pairs))

        table.turns(figure, sizes.rounds, ways, turn)


def memory(table: Table, sizes: Sizes, ways: Sequence[Way] = SESSIONS) -> None:
    """All processes below the kernel; pages that several share are divided among them."""
    figure = f"memory of a session of {sizes.ranks} ranks"

    def turn(way: Way) -> None:
        with way.prepared(sizes.ranks, BEGIN) as kernel:
            kernel.cell(way.cell(ASSIGN, sizes.ranks))
            nbytes = sum(process.memory_full_info().pss for process in kernel.started())
            table.add(figure, way.name, nbytes, "B")

    table.turns(figure, sizes.rounds, ways, turn, "B")


def failure(table: Table, sizes: Sizes, ways: Sequence[Way] = SESSIONS) -> None:
    """One rank raises while the others wait in an all-reduce; then the next all-reduce."""
    error = f"one of {sizes.ranks} ranks of a session raises, until the error"
    works = "the next cell, with an all-reduce"
    with kept(lambda way: way.prepared(sizes.ranks, BEGIN)) as kernels:

        def turn(way: Way) -> None:
            kernel = kernels(way)
            failed = kernel.try_cell(way.cell(FAIL, sizes.ranks), FAILS_WITHIN_S)
            if not failed.error:
                raise CellFailed("no error")
            table.add(error, way.name, failed.seconds)
            table.add(works, way.name, kernel.cell(way.cell(REDUCE, sizes.ranks)).seconds)

        table.turns(error, sizes.rounds, ways, turn)
