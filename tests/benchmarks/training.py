"""Steps per second in a real kernel: nbddp with panel and ``log`` at every step, beside torchrun without logging."""

from __future__ import annotations

from dataclasses import replace

from tests.benchmarks.kernel import WORK, Kernel, Stamps, stamps
from tests.benchmarks.measure import Table, in_turn
from tests.benchmarks.peers import NBDDP, NBDDP_SILENT, TORCHRUN, Peer
from tests.benchmarks.settings import Settings

STEPS = {"mlp": 10_000, "cnn": 1_200, "gpt": 1_000}  # some 20 s: what happens once weighs as in real training
RANKS = (2, 1)  # of two cores, two ranks leave none to the notebook
WAYS = [
    (replace(TORCHRUN, name="torchrun, no logging"), False),
    (replace(NBDDP, name="nbddp, log at every step, panel"), True),
    (replace(NBDDP_SILENT, name="nbddp, log at every step"), True),
    (replace(NBDDP_SILENT, name="nbddp, no logging"), False),
]
_LIMIT_S = 600.0


def measure(settings: Settings) -> list[Table]:
    """In turn, so that a machine's drift meets all."""
    tables = []
    for ranks in settings.ranks or RANKS:
        table = Table(f"Training, {ranks} rank{'s' * (ranks != 1)}", columns=list(STEPS), unit="steps/s", scale=1)
        settings.keep(table)
        with stamps() as file:
            for model, steps in STEPS.items():
                ways = {
                    peer.name: lambda peer=peer, log=log, model=model, steps=steps: _train(  # type: ignore[misc]
                        peer, model, max(5, int(steps * settings.steps)), ranks, file, log=log
                    )
                    for peer, log in WAYS
                }
                in_turn(table, settings.rounds, ways, model)
        settings.show(table)
        tables.append(table)
    return tables


def _train(peer: Peer, model: str, steps: int, ranks: int, file: Stamps, *, log: bool) -> float:
    """In a kernel of its own. The slowest rank's figure."""
    file.clear()
    with Kernel() as kernel:
        kernel.cell(WORK)
        kernel.cell(peer.imports)
        kernel.cell(peer.cell("together", nprocs=ranks))
        kernel.cell(peer.cell("train", repr(model), str(steps), repr(file.path), str(log), nprocs=ranks), _LIMIT_S)
    figures = [float(words[1]) for _, words in file.lines()]
    if len(figures) != ranks:
        raise RuntimeError(f"{len(figures)} of {ranks} ranks came to the end")
    return min(figures)
