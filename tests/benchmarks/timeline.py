"""Measures where the time of a warm run goes, from Shift-Enter to the idle kernel."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict

from tests.benchmarks import trace
from tests.benchmarks.kernel import WORK, Cell, Kernel, Stamps, stamps
from tests.benchmarks.measure import Table
from tests.benchmarks.peers import NBDDP_SILENT
from tests.benchmarks.settings import Settings

RANKS = 4
COLUMNS = ("first begins", "last ends", "one takes", "how many")


def measure(settings: Settings) -> list[Table]:
    """Medians over rounds, in ms since Shift-Enter; rows in the order in which they begin."""
    tables = []
    for ranks in settings.ranks or (RANKS,):
        with stamps() as file:
            rounds = _rounds(ranks, settings.rounds, file)
        tables.append(_table(ranks, rounds))
        settings.show(tables[-1])
    return tables


def _rounds(ranks: int, count: int, file: Stamps) -> list[dict[str, list[float]]]:
    """Of each round and label: the figures of COLUMNS."""
    os.environ[trace.FILE] = file.path + ".trace"
    try:
        kernel = Kernel()
    finally:
        del os.environ[trace.FILE]
    with kernel:
        kernel.cell("import nbddp.kernel.runner\nfrom tests.benchmarks import trace")
        kernel.cell("trace.in_kernel()")
        for source in (WORK, NBDDP_SILENT.imports):
            kernel.cell(source)
        rounds = []
        for index in range(count + 2):
            run = kernel.begin(NBDDP_SILENT.cell("all_reduce", repr(file.path), nprocs=ranks))
            done = kernel.end_of(run)
            kernel.cell("trace.write()")
            if index >= 2:  # the first two are cold
                rounds.append(_figures(file.path + ".trace", done, file.last()))
            os.unlink(file.path + ".trace")
            file.clear()
        return rounds


def _figures(path: str, cell: Cell, reduced: float) -> dict[str, list[float]]:
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with open(path) as file:
        for line in file:
            began, ended, label = line.rstrip("\n").split(" ", 2)
            spans[label].append((float(began) - cell.began, float(ended) - cell.began))
    spans["rank: the last is through the all-reduce"] = [(reduced - cell.began, reduced - cell.began)]
    spans["cell is over"] = [(cell.seconds, cell.seconds)]
    return {
        label: [
            min(began for began, _ in found),
            max(ended for _, ended in found),
            statistics.median(ended - began for began, ended in found),
            len(found) / 1e3,
        ]
        for label, found in spans.items()
    }


def _table(ranks: int, rounds: list[dict[str, list[float]]]) -> Table:
    table = Table(f"Timeline of a warm run, {ranks} ranks", COLUMNS, corner="since Shift-Enter", ratios=False)
    labels = {label for figures in rounds for label in figures}

    def begins(label: str) -> float:
        return statistics.median(figures[label][0] for figures in rounds if label in figures)

    for label in sorted(labels, key=begins):
        for figures in rounds:
            for column, value in zip(COLUMNS, figures.get(label, ())):
                table.add(label, value, column)
    return table
