"""From Shift-Enter to the first all-reduce and to the cell's end, in real kernels; each candidate in its own.

In a common one, nbddp would pay for the pages that the forks of others left to be copied.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from tests.benchmarks.kernel import WORK, Kernel, Stamps, prepared, stamps
from tests.benchmarks.measure import LeftOut, Table
from tests.benchmarks.peers import Peer
from tests.benchmarks.settings import Settings

RANKS = 4
GROWTH = (1, 2, 4, 8, 16, 32)
THINK_S = 3.0  # between the imports and the first run
TOO_LONG_S = 12.0  # a candidate that takes this long is not tried with more ranks


def cold(settings: Settings) -> list[Table]:
    """A new kernel each time: imports and first run without a pause, of two kinds; and after a think time."""
    ranks = (settings.ranks or [RANKS])[0]
    at_once = _table(f"Start in a new kernel, {ranks} ranks, imports and first run in one cell", "first all-reduce")
    step = _table(f"The same with DistributedDataParallel and SGD, {ranks} ranks", "first step")
    after = _table(f"First run in a new kernel, {ranks} ranks, {THINK_S:.0f} s after the imports", "first all-reduce")
    tables = [at_once, step, after]
    for table in tables:
        settings.keep(table)
    with stamps() as file:
        for _ in range(settings.rounds):
            for peer in settings.peers:
                _try(at_once, peer, lambda peer=peer: _first_run(peer, "all_reduce", ranks, file, 0.0))
                _try(step, peer, lambda peer=peer: _first_run(peer, "train_one_step", ranks, file, 0.0))
                _try(after, peer, lambda peer=peer: _first_run(peer, "all_reduce", ranks, file, THINK_S))
    for table in tables:
        settings.show(table)
    return tables


def _table(title: str, first: str) -> Table:
    return Table(title, columns=(first, "cell's end"), unit="s", scale=1)


def _try(table: Table, peer: Peer, figures: Callable[[], tuple[float, float]]) -> None:
    if table.failed(peer.name, table.columns[0]):
        return
    try:
        for column, value in zip(table.columns, figures()):
            table.add(peer.name, value, column)
    except Exception as error:  # a peer's: the others' figures shall not be lost with it
        table.fail(peer.name, error, table.columns[0])


def _first_run(peer: Peer, function: str, ranks: int, file: Stamps, think_s: float) -> tuple[float, float]:
    file.clear()
    with Kernel() as kernel:
        run = peer.cell(function, repr(file.path), nprocs=ranks)
        began = time.monotonic()
        # Cells of their own where the run is a cell magic, sent without a pause.
        for source in (peer.imports, WORK):
            kernel.cell(source)
        if think_s:
            time.sleep(think_s)
            began = time.monotonic()
        if setup := peer.setup(ranks):
            kernel.cell(setup)
        done = kernel.cell(run)
        return file.last() - began, done.ended - began


def warm(settings: Settings) -> list[Table]:
    """Second and later runs, by number of ranks."""
    counts = settings.ranks or GROWTH
    first = _by_ranks("Warm, from Shift-Enter to the first all-reduce", counts)
    whole = _by_ranks("Warm, from Shift-Enter to the cell's end", counts)
    work = _by_ranks("Warm, CPU time of all processes", counts)
    for table in (first, whole, work):
        settings.keep(table)
    with stamps() as file:
        for ranks in counts:
            _warm_with(settings, ranks, file, first, whole, work)
    tables = [first, whole, work, *([_growth(whole, counts)] if len(counts) > 1 else [])]
    for table in tables:
        settings.show(table)
    return tables


def _by_ranks(title: str, counts: Sequence[int]) -> Table:
    return Table(title, columns=counts, corner="ranks")


def _warm_with(settings: Settings, ranks: int, file: Stamps, first: Table, whole: Table, work: Table) -> None:
    with contextlib.ExitStack() as stack:
        warmed = dict(_warmed(settings.peers, ranks, stack, whole))
        for _ in range(settings.rounds):
            for peer, kernel in warmed.items():
                if whole.failed(peer.name, ranks):
                    continue
                file.clear()
                try:
                    before = kernel.cpu_seconds()
                    done = kernel.cell(peer.cell("all_reduce", repr(file.path), nprocs=ranks))
                    work.add(peer.name, kernel.cpu_seconds() - before, ranks)
                    first.add(peer.name, file.last() - done.began, ranks)
                    whole.add(peer.name, done.seconds, ranks)
                except Exception as error:  # a peer's
                    whole.fail(peer.name, error, ranks)


def _warmed(
    peers: Sequence[Peer], ranks: int, stack: contextlib.ExitStack, table: Table
) -> Iterator[tuple[Peer, Kernel]]:
    """A kernel for each candidate that is not too slow for so many ranks, one run behind it."""
    for peer in peers:
        slowest = max((table.median(peer.name, column) or 0.0 for column in table.columns), default=0.0)
        try:
            if slowest > TOO_LONG_S:
                raise LeftOut("-")
            kernel = stack.enter_context(prepared(peer, ranks))
        except Exception as error:  # a peer's
            table.fail(peer.name, error, ranks)
        else:
            yield peer, kernel


def _growth(whole: Table, counts: Sequence[int]) -> Table:
    """What each rank more costs, from one number of ranks to the next: equal figures are a straight line."""
    steps = [(few, many) for few, many in itertools.pairwise(counts)]
    table = Table(
        "Cell's end, for each rank more", [f"{few} to {many}" for few, many in steps], corner="ranks", ratios=False
    )
    for name in whole.values:
        for few, many in steps:
            before, after = whole.median(name, few), whole.median(name, many)
            if before is not None and after is not None:
                table.add(name, (after - before) / (many - few), f"{few} to {many}")
    return table
