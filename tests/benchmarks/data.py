"""Measures sending the notebook's data to the ranks, and a result back."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import psutil

from tests.benchmarks.kernel import CellFailed, Kernel, prepared
from tests.benchmarks.measure import LeftOut, Table
from tests.benchmarks.peers import NBDDP, Peer
from tests.benchmarks.settings import Settings

MIB = 1 << 20
INTO = (  # kind, ranks, MiB
    ("tensor", 4, (1, 32, 1024, 4096)),
    ("tensor", 1, (1024,)),
    ("tensor", 8, (1024,)),
    ("numpy array", 4, (1, 1024)),
    ("pandas frame", 4, (1, 1024)),
)
BACK = (("tensor", (1 << 10, MIB, 32 * MIB, 1024 * MIB)), ("numpy array", (1 << 10, MIB, 32 * MIB, 1024 * MIB)))
MAKE = {
    "tensor": "torch.rand({nbytes} // 4)",
    "numpy array": "numpy.random.default_rng(0).random({nbytes} // 8)",
    "pandas frame": "pandas.DataFrame(numpy.random.default_rng(0).random(({nbytes} // 64, 8)), columns=[*'abcdefgh'])",
}
COPY = {"tensor": "data.clone()", "numpy array": "data.copy()", "pandas frame": "data.copy()"}
IMPORTS = "import os, time, numpy, pandas, torch"
ALONE = "nbddp, the copy into the block alone"
PRELOADED = dataclasses.replace(
    NBDDP, name="nbddp, pandas preloaded", imports=NBDDP.imports + "; nbddp.preload('pandas')"
)
_SHARE = 0.7  # of the free memory may be used
_LIMIT_S = 60.0


def into(settings: Settings) -> list[Table]:
    """Every rank reads a byte of every page of it; the run less a run without data, beside a copy in the kernel."""
    tables = []
    cases = [case for case in INTO if settings.ranks is None or case[1] in settings.ranks]
    for kind, ranks, mib in cases:
        sizes = settings.nbytes or [m * MIB for m in mib]
        columns = [_size(nbytes) for nbytes in sizes]
        which = f"{kind} to {ranks} rank{'s' * (ranks != 1)}"
        cost = Table(f"A {which}: the run, less a run without", columns, corner="size")
        peak = Table(
            f"A {which}: new memory at the peak", columns, unit="GiB", scale=1 / 2**30, corner="size", ratios=False
        )
        for table in (cost, peak):
            settings.keep(table)
        more = [PRELOADED] if kind == "pandas frame" and NBDDP in settings.peers else []
        with _kernels([*settings.peers, *more], ranks, cost) as kernels:
            for nbytes, column in zip(sizes, columns):
                for _ in range(settings.rounds):
                    _round(kernels, kind, nbytes, ranks, cost, peak, column)
        for table in (cost, peak):
            settings.show(table)
            tables.append(table)
    return tables


@contextlib.contextmanager
def _kernels(peers: Sequence[Peer], ranks: int, table: Table) -> Iterator[dict[Peer, Kernel]]:
    with contextlib.ExitStack() as stack:
        found = {}
        for peer in peers:
            if not peer.takes_data:
                continue
            try:
                kernel = stack.enter_context(prepared(peer, ranks))
                kernel.cell(IMPORTS)
            except Exception as error:  # a peer's
                for column in table.columns:
                    table.fail(peer.name, error, column)
            else:
                found[peer] = kernel
        yield found


def _round(
    kernels: dict[Peer, Kernel], kind: str, nbytes: int, ranks: int, cost: Table, peak: Table, column: str
) -> None:
    """New data for each candidate: some leave it in shared memory, where the next run finds it."""
    for index, (peer, kernel) in enumerate(kernels.items()):
        if cost.failed(peer.name, column):
            continue
        try:
            _check_memory(peer, nbytes, ranks)
            kernel.cell(f"data = {MAKE[kind].format(nbytes=nbytes)}")
            if index == 0:
                cost.add(COPY[kind].replace("data", kind.split()[-1]), _copy_seconds(kernel, kind), column)
                cost.add(ALONE, _block_seconds(kernel, nbytes), column)
            empty = kernel.cell(peer.cell("together", nprocs=ranks)).seconds
            with _Peak() as used:
                run = kernel.end_of(kernel.begin(peer.cell("touch", "data", nprocs=ranks)), _LIMIT_S)
            if run.error:
                raise CellFailed(run.error)
            cost.add(peer.name, run.seconds - empty, column)  # around nothing, it may be below zero
            peak.add(peer.name, used.nbytes, column)
        except Exception as error:  # a peer's
            cost.fail(peer.name, error, column)
        with contextlib.suppress(CellFailed):
            kernel.cell("data = done = None")


def _copy_seconds(kernel: Kernel, kind: str) -> float:
    timed = f"began = time.perf_counter(); copy = {COPY[kind]}; print(time.perf_counter() - began); del copy"
    return float(kernel.cell(timed).shown)


def _block_seconds(kernel: Kernel, nbytes: int) -> float:
    """Without the ranks' page faults and the block's end."""
    kernel.cell(f"from nbddp import payload; block = payload.open_block('benchmark', {nbytes})")
    timed = "began = time.perf_counter(); payload.pack(data, block); print(time.perf_counter() - began)"
    seconds = float(kernel.cell(timed).shown)
    kernel.cell("os.close(block)")
    return seconds


def _check_memory(peer: Peer, nbytes: int, ranks: int) -> None:
    copies = {"never": 0, "once": 1, "per rank": 2 * ranks}[peer.copies]
    needed = nbytes * (2 + copies)
    if needed > _SHARE * psutil.virtual_memory().available:
        raise LeftOut(f"left out: may need {needed / 2**30:.0f} GiB")


class _Peak:
    """The most memory that this machine used, more than before: looked at 100 times a second."""

    def __enter__(self) -> _Peak:
        self.nbytes = 0.0
        self._before = psutil.virtual_memory().available
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self.nbytes = max(self.nbytes, float(self._before - psutil.virtual_memory().available))


def back(settings: Settings) -> list[Table]:
    """One rank makes and returns it; less a run that makes and drops it."""
    tables = []
    peers = [peer for peer in settings.peers if peer.result]
    for kind, default in BACK:
        sizes = settings.nbytes or default
        table = Table(
            f"A {kind} back from a rank: the run, less a run without", [_size(n) for n in sizes], corner="size"
        )
        settings.keep(table)
        with _kernels(peers, 1, table) as kernels:
            for nbytes in sizes:
                for _ in range(settings.rounds):
                    _round_back(kernels, kind, nbytes, table)
        settings.show(table)
        tables.append(table)
    return tables


def _round_back(kernels: dict[Peer, Kernel], kind: str, nbytes: int, table: Table) -> None:
    column = _size(nbytes)
    for index, (peer, kernel) in enumerate(kernels.items()):
        if table.failed(peer.name, column):
            continue
        made = f"make({kind.split()[0]!r}, {nbytes})"
        try:
            _check_memory(peer, nbytes, 1)
            if index == 0:
                kernel.cell(f"data = {made}")
                table.add(COPY[kind].replace("data", kind.split()[-1]), _copy_seconds(kernel, kind), column)
                kernel.cell("data = None")
            dropped = peer.cell("make_and_drop", repr(kind.split()[0]), str(nbytes), nprocs=1)
            returned = peer.cell("make", repr(kind.split()[0]), str(nbytes), nprocs=1, how="result")
            without = kernel.cell(dropped).seconds
            run = kernel.end_of(kernel.begin(returned), _LIMIT_S)
            if run.error:
                raise CellFailed(run.error)
            kernel.cell(f"assert value.nbytes == {nbytes // 4 * 4}; value = None")
            table.add(peer.name, run.seconds - without, column)
        except Exception as error:  # a peer's
            table.fail(peer.name, error, column)


def _size(nbytes: int) -> str:
    for unit, text in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {text}"
    return f"{nbytes} B"
