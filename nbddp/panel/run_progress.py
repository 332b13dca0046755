"""How far a run is, which of its ranks lag, and what is odd about its numbers, for every view."""

import re
import statistics
import time
from dataclasses import dataclass

from nbddp.history.history import History
from nbddp.history.progress import Bar
from nbddp.panel import numbers
from nbddp.panel.charts import capital
from nbddp.panel.status import Status
from nbddp.text import plain, ranks_text

_REPORT_S = 0.3  # a loop tells its progress some times a second, log() at once
_SILENT_S, _SILENT_STEPS = 5.0, 10  # a rank is silent if both have passed
_SLOW = 1.5  # times the usual step time
_BEHIND_S = 1.0  # ranks report at slightly different times
_MAX_NOTICES = 3


@dataclass(frozen=True)
class Progress:
    """None: not known.

    Attributes:
        step, steps: the last step that every rank has logged, and how many there will be.
        loops: name, done, total of the slowest rank's open progress() loops that count something else, outermost first;
            an inner loop's over all items of the outer one.
        left: seconds.
        throughput: samples per second.
        postfix: what the loops show next to them, by name.
    """

    step: int | None
    steps: int | None
    loops: list[tuple[str, int, int | None]]
    fraction: float | None
    left: float | None
    throughput: float | None
    postfix: dict[str, str]


def progress(history: History) -> Progress:
    slowest = min(history.ranks, key=lambda rank: (_done(rank.bars), rank.step) if rank.bars else (float("inf"), 0))
    bars = slowest.bars
    step = min((rank.step for rank in history.ranks if rank.step >= 0), default=None)
    throughput = sum(rank.samples_per_second or 0.0 for rank in history.ranks) or None
    if not bars:
        return Progress(step, None, [], None, None, throughput, {})
    outer, inner = bars[0], bars[-1]
    loops = [(plain(capital(bar.desc)), bar.done, bar.total) for bar in bars]
    if epochs := re.search("epoch|round", outer.desc, re.I):
        loops[0] = (loops[0][0], min(outer.done + 1, outer.total or outer.done + 1), outer.total)  # the present one
    done, steps = inner.done, inner.total
    if len(bars) == 2 and inner.total:
        done += outer.done * inner.total
        steps = outer.total * inner.total if outer.total else None
        loops[-1] = (loops[-1][0], done, steps)
    if len(bars) == 1 and epochs:
        steps = None
    elif step is not None and abs(step + 1 - done) <= max(2, 0.02 * step, _REPORT_S * (inner.rate or 0.0)):
        del loops[-1]  # it counts what log() counts
    elif step is not None:
        steps, loops = None, [loop for loop in loops if loop[0] != "Step"]  # one meaning of "Step": what log() counts
    fraction = min(1.0, _done(bars) / outer.total) if outer.total else None
    left = outer.seconds_left
    if len(bars) == 2 and outer.total and inner.total and inner.rate:
        left = max(0.0, ((outer.total - outer.done) * inner.total - inner.done) / inner.rate)
    loops = [(name or ("Step" if step is None else "Progress"), count, total) for name, count, total in loops]
    postfix = {plain(name): plain(text) for bar in bars for name, text in bar.postfix.items()}
    return Progress(step, steps, loops, fraction, left, throughput, postfix)


def _done(bars: list[Bar]) -> float:
    """How many items of the outermost loop are done, with a part of the present one."""
    inner = bars[1] if len(bars) > 1 else None
    return bars[0].done + (inner.done / inner.total if inner and inner.total else 0.0)


def lagging(history: History, status: Status, now: float | None = None) -> dict[int, str]:
    """By rank: "silent for 6 s", "50 steps behind", "slow". ``now``: unix time."""
    now = time.time() if now is None else now
    times = [rank.step_seconds for rank in history.ranks if rank.step_seconds]
    usual = statistics.median_low(times) if len(times) > 1 else float("inf")
    furthest = max(rank.step for rank in history.ranks)
    found = {}
    for rank in status.ranks:
        done = history.ranks[rank.rank]
        if rank.state != "running" or rank.waits or not done.advanced_at:  # one that logs nothing isn't stuck
            continue
        step_s, silent = done.step_seconds or 0.0, now - (done.arrived_at or done.advanced_at)
        if silent > max(_SILENT_S, _SILENT_STEPS * step_s):
            found[rank.rank] = f"silent for {silent:.0f} s"
        elif done.step >= 0 and (furthest - done.step) * step_s > _BEHIND_S:
            found[rank.rank] = f"{(n := furthest - done.step):,} step{'s' * (n > 1)} behind"
        elif step_s > _SLOW * usual:
            found[rank.rank] = "slow"
    return found


def notices(history: History) -> list[str]:
    """Metrics that are NaN or infinite, and those that not all ranks have logged alike; a line each, three of both."""
    broken = [
        f"{name} has been {numbers.metric(value)} since step {step:,} on {ranks_text(ranks)}"
        for name, (step, value, ranks) in history.broken.items()
    ]
    found = []
    for lines, rest in ((broken, "with NaN or infinite values"), (history.notices, "in run.history.notices")):
        found += [plain(line) for line in lines[:_MAX_NOTICES]]
        if len(lines) > _MAX_NOTICES:
            found.append(f"and {len(lines) - _MAX_NOTICES:,} more {rest}")
    return found
