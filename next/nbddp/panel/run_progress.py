"""How far a run is, in numbers for every view."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbddp.history.history import History
from nbddp.history.progress import Bar
from nbddp.panel.charts import capital


@dataclass(frozen=True)
class Progress:
    """None: not known.

    Attributes:
        step, steps: the last step that every rank has logged, and how many there will be.
        loops: name, done, total of the slowest rank's open progress() loops that count something else, outermost first.
    """

    step: int | None
    steps: int | None
    loops: list[tuple[str, int, int | None]]
    fraction: float | None
    left: float | None
    throughput: float | None


def progress(history: History) -> Progress:
    slowest = min(history.ranks, key=lambda rank: (_done(rank.bars), rank.step) if rank.bars else (float("inf"), 0))
    bars = slowest.bars
    step = min((rank.step for rank in history.ranks if rank.step >= 0), default=None)
    throughput = sum(rank.samples_per_second or 0.0 for rank in history.ranks) or None
    if not bars:
        return Progress(step, None, [], None, None, throughput)
    outer, inner = bars[0], bars[-1]
    loops = [(capital(bar.desc) or "Progress", bar.done, bar.total) for bar in bars]
    if re.search("epoch|round", outer.desc, re.I) and outer.total:
        loops[0] = (loops[0][0], min(outer.done + 1, outer.total), outer.total)  # the present epoch
    before, steps = 0, inner.total
    if len(bars) == 2 and inner.total:
        before, steps = outer.done * inner.total, (outer.total or 0) * inner.total or None
    # log() counts what the inner loop counts? At the end of an epoch that loop's items may be in both loops.
    if step is not None and min(abs(step + 1 - done) for done in (before, before + inner.done)) <= max(2, 0.02 * step):
        del loops[-1]
    else:
        steps, loops = None, [loop for loop in loops if loop[0] != "Step"]  # one meaning of "Step": what log() counts
    fraction = min(1.0, _done(bars) / outer.total) if outer.total else None
    left = outer.seconds_left
    if len(bars) == 2 and outer.total and inner.total and inner.rate:
        left = max(0.0, ((outer.total - outer.done) * inner.total - inner.done) / inner.rate)
    return Progress(step, steps, loops, fraction, left, throughput)


def _done(bars: list[Bar]) -> float:
    """How many items of the outermost loop are done, with a part of the present one."""
    inner = bars[1] if len(bars) > 1 else None
    within = inner.done / inner.total if inner and inner.total else 0.0
    return bars[0].done + (within if within < 1 else 0.0)
