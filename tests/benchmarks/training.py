"""Steps per second in real kernels: nbddp with panel and ``log`` at every step, beside torchrun without logging.

All are there at once and train in turn, for a second each: a machine whose speed drifts by a tenth within minutes
shows a hundredth between neighbours.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.benchmarks import work
from tests.benchmarks.kernel import Cell, CellFailed, Kernel, Stamps, StillRunning, prepared, stamps
from tests.benchmarks.measure import Table
from tests.benchmarks.peers import NBDDP, NBDDP_SILENT, TORCHRUN, Peer
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
_FIRST_TURN_S = 240.0  # with torch.compile


def measure(settings: Settings) -> list[Table]:
    """In turn, and the ratio of each turn to the one of torchrun before it."""
    tables = []
    for ranks in settings.ranks or RANKS:
        table = Table(f"Training, {ranks} rank{'s' * (ranks != 1)}", columns=list(STEPS), unit="steps/s", scale=1)
        settings.keep(table)
        for model, steps in STEPS.items():
            with stamps() as file:
                in_turn(table, model, max(2, int(steps * settings.steps)), settings.rounds * TURNS, ranks, file, WAYS)
        settings.show(table)
        tables.append(table)
    return tables


def in_turn(
    table: Table, model: str, steps: int, turns: int, ranks: int, file: Stamps, ways: Sequence[tuple[Peer, bool]]
) -> dict[str, float]:
    """Train in all ways, in turn. Returns the ratio to the first way, by way: the median over the turns."""
    with contextlib.ExitStack() as stack:
        begun = []
        for me, (peer, log) in enumerate(ways):
            kernel = stack.enter_context(prepared(peer, ranks))
            args = (repr(model), str(steps), str(turns), repr(file.path), str(log), str(me), str(len(ways)))
            begun.append((kernel, kernel.begin(peer.cell("train", *args, nprocs=ranks))))
        _wait_for_first_turns(begun, file)
        time.sleep(1.0)
        work.give(file.path, 0)
        for kernel, cell in begun:
            if error := kernel.end_of(cell, _LIMIT_S).error:
                raise CellFailed(error)
    figures = [
        [float(words[3]) for _, words in file.lines() if words[1] == str(me) and words[2] != "-1"]
        for me in range(len(ways))
    ]
    for (peer, _), values in zip(ways, figures):
        if len(values) != turns:
            raise CellFailed(f"{peer.name} came to {len(values)} of {turns} turns")
        for value in values:
            table.add(peer.name, value, model)
    return {peer.name: _compare(table, model, peer, values, figures[0]) for (peer, _), values in zip(ways, figures)}


def _wait_for_first_turns(begun: Sequence[tuple[Kernel, tuple[str, Cell]]], file: Stamps) -> None:
    """Until every way is ready for its turn; a cell that has ended before has failed."""
    deadline = time.monotonic() + _FIRST_TURN_S
    while len(file.lines()) < len(begun):
        for kernel, cell in begun:
            with contextlib.suppress(StillRunning):
                raise CellFailed(f"a cell ended before its turn: {kernel.end_of(cell, 0.05).error}")
        if time.monotonic() > deadline:
            raise CellFailed(f"only {len(file.lines())} of {len(begun)} were ready after {_FIRST_TURN_S:.0f} s")


def _compare(table: Table, model: str, peer: Peer, values: list[float], first: list[float]) -> float:
    ratio, low, high = _between([ours / theirs for ours, theirs in zip(values, first)])
    if values is not first:
        told = f"{ratio:.3f} (95 % of such medians: {low:.3f}-{high:.3f})"
        table.notes.append(f"{model}, {peer.name}: turn by turn {told} × {next(iter(table.values))}  ")
    return ratio


def _between(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and where 95 % of the medians of samples drawn from these lie (bootstrap)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[49], medians[1949]
