"""Measures the memory of a rank that has trained one step: private, proportional, and of all started processes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from tests.benchmarks.kernel import WORK, Kernel, Stamps, stamps
from tests.benchmarks.measure import Table
from tests.benchmarks.peers import DEBUG_LAUNCHER, MP_SPAWN, NBDDP_SILENT, Peer
from tests.benchmarks.settings import Settings

RANKS = (1, 2, 4, 8, 16)


def measure(settings: Settings) -> list[Table]:
    """While all ranks stay; a figure for each rank. One round: memory does not vary as time does."""
    counts = settings.ranks or RANKS
    private, share, all_of_it = (
        Table(title, columns=counts, unit="MB", scale=1e-6, corner="ranks")
        for title in (
            "Private memory of a rank (USS)",
            "Proportional memory of a rank (PSS)",
            "Proportional memory of all processes but the kernel, the fork server included",
        )
    )
    for table in (private, share, all_of_it):
        settings.keep(table)
    peers = [peer for peer in (NBDDP_SILENT, MP_SPAWN, DEBUG_LAUNCHER) if peer in settings.peers]
    with stamps() as file:
        for ranks in counts:
            for peer in peers:
                try:
                    own, proportional, whole = _look(peer, ranks, file)
                except Exception as error:  # a peer's
                    private.fail(peer.name, error, ranks)
                    continue
                for table, values in ((private, own), (share, proportional), (all_of_it, [whole])):
                    for value in values:
                        table.add(peer.name, value, ranks)
    for table in (private, share, all_of_it):
        settings.show(table)
    return [private, share, all_of_it]


def _look(peer: Peer, ranks: int, file: Stamps) -> tuple[list[float], list[float], float]:
    file.clear()
    with Kernel() as kernel:
        kernel.cell(WORK)
        kernel.cell(peer.imports)
        begun = kernel.begin(peer.cell("hold", repr(file.path), nprocs=ranks))
        file.wait_for(ranks, timeout_s=120.0)
        whole = sum(map(_pss, kernel.started()))
        Path(file.path + ".go").touch()
        kernel.end_of(begun)
    lines = [words for _, words in file.lines()]
    return [float(words[1]) for words in lines], [float(words[2]) for words in lines], whole


def _pss(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(process.memory_full_info().pss)
    return 0.0
