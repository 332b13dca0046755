"""Steps per second in real kernels: nbddp with panel and ``log`` at every step, beside torchrun without logging.

All are there at once and train in turn, for a second each: a machine whose speed drifts by a tenth within minutes
shows a hundredth between neighbours.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from dataclasses import replace

from tests.benchmarks import work
from tests.benchmarks.kernel import CellFailed, Stamps, prepared, stamps
from tests.benchmarks.measure import Table
from tests.benchmarks.peers import NBDDP, NBDDP_SILENT, TORCHRUN
from tests.benchmarks.settings import Settings

STEPS = {"mlp": 400, "cnn": 60, "gpt": 40}  # of a turn
TURNS = 12  # per round
RANKS = (2, 1)  # of two cores, two ranks leave none to the notebook
WAYS = [
    (replace(TORCHRUN, name="torchrun, no logging"), False),
    (replace(NBDDP, name="nbddp, log at every step, panel"), True),
    (replace(NBDDP_SILENT, name="nbddp, log at every step"), True),
    (replace(NBDDP_SILENT, name="nbddp, no logging"), False),
]
_LIMIT_S = 3600.0


def measure(settings: Settings) -> list[Table]:
    """In turn, and the ratio of each turn to the one of torchrun before it."""
    tables = []
    for ranks in settings.ranks or RANKS:
        table = Table(f"Training, {ranks} rank{'s' * (ranks != 1)}", columns=list(STEPS), unit="steps/s", scale=1)
        settings.keep(table)
        for model, steps in STEPS.items():
            with stamps() as file:
                _train(table, model, max(2, int(steps * settings.steps)), settings.rounds * TURNS, ranks, file)
        settings.show(table)
        tables.append(table)
    return tables


def _train(table: Table, model: str, steps: int, turns: int, ranks: int, file: Stamps) -> None:
    with contextlib.ExitStack() as stack:
        begun = []
        for me, (peer, log) in enumerate(WAYS):
            kernel = stack.enter_context(prepared(peer, ranks))
            args = (repr(model), str(steps), str(turns), repr(file.path), str(log), str(me), str(len(WAYS)))
            begun.append((kernel, kernel.begin(peer.cell("train", *args, nprocs=ranks))))
        file.wait_for(len(WAYS))
        time.sleep(1.0)
        work.give(file.path, 0)
        for kernel, cell in begun:
            if error := kernel.end_of(cell, _LIMIT_S).error:
                raise CellFailed(error)
    figures = [
        [float(words[3]) for _, words in file.lines() if words[1] == str(me) and words[2] != "-1"]
        for me in range(len(WAYS))
    ]
    for (peer, _), values in zip(WAYS, figures):
        if len(values) != turns:
            raise CellFailed(f"{peer.name} came to {len(values)} of {turns} turns")
        for value in values:
            table.add(peer.name, value, model)
    for (peer, _), values in list(zip(WAYS, figures))[1:]:
        ratio, low, high = _between([ours / theirs for ours, theirs in zip(values, figures[0])])
        told = f"{ratio:.3f} (95 % of such medians: {low:.3f}-{high:.3f})"
        table.notes.append(f"{model}, {peer.name}: turn by turn {told} × {WAYS[0][0].name}  ")


def _between(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and where 95 % of the medians of samples drawn from these lie (bootstrap)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[49], medians[1949]
