"""Kernel side. What a panel says of a run in numbers and words, without drawing: progress, families, ranks."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

from nbddp.errors import first_line
from nbddp.errors import plain as plain
from nbddp.kernel.history import Bar, History, RankProgress
from nbddp.panel.view import RankStatus, Status

_STALLED_S = 5.0  # no sign of life for so long, and for ten of its steps
_STALLED_STEPS = 10
_SLOW = 1.5  # times the median step time
_BEHIND_S = 1.0  # ranks report a little apart; so many seconds' worth of steps is more than that
_STAGE = re.compile(r"(train|training|val|valid|validation|test|eval|dev)[_.\-](.+)", re.IGNORECASE)
_ROUNDS = re.compile(r"epoch|\brounds?\b", re.IGNORECASE)
_WORST_FIRST = ("failed", "stopped", "starting", "running", "finished")
_NAME_CHARS = 255  # of a host
_LABEL_CHARS = 120  # of a loop
_NOTICES = 3
_LOST = "lost"  # in the place of a host: its ranks were on one that is not there any more
_STEPS_UNTOLD_S = 0.3  # a loop tells how far it is a few times a second, log() at once
_TITLES = {"acc": "Accuracy", "lr": "Learning rate", "ppl": "Perplexity"}


@dataclass(frozen=True)
class Metric:
    """How a metric is shown.

    Attributes:
        family: metrics of one family share a chart: "loss".
        title: the chart's: "Loss".
        label: the line's: "train".
        tile: its name by itself: "Train loss".
    """

    name: str
    family: str
    title: str
    label: str
    tile: str


def describe(name: str) -> Metric:
    """``train/loss``, ``train_loss`` and ``loss`` are all of the family ``loss``."""
    shown = plain(name)
    before, _, last = shown.rpartition("/")
    stage = _STAGE.fullmatch(last)
    if stage:
        before, last = f"{before}/{stage[1]}" if before else stage[1], stage[2]
    title = _TITLES.get(last.lower(), _capital(last.replace("_", " ")))
    tile = f"{before.replace('/', ' ')} {last.replace('_', ' ')}".strip()
    return Metric(name, last.lower(), title, before or last, _TITLES.get(shown.lower(), _capital(tile)))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Progress:
    """How far the run is. None: not known.

    Attributes:
        step, steps, step_label: of the innermost loop over all rounds of the outer one, and its name.
        outer, outers, outer_label: the round it is in, counted from 1.
        fraction: of the whole, 0 to 1.
        left: seconds.
        throughput: samples per second over all ranks.
    """

    step: int | None = None
    steps: int | None = None
    step_label: str = "Step"
    outer: int | None = None
    outers: int | None = None
    outer_label: str = "Epoch"
    fraction: float | None = None
    left: float | None = None
    throughput: float | None = None


def progress(history: History, *, over: bool = False) -> Progress:
    """By rank 0's loops; without any, its last step."""
    first = history.ranks[0]
    bars = list(first.bars)
    rates = [rank.samples_per_second for rank in history.ranks]
    throughput = sum(rate for rate in rates if rate) or None
    left = seconds_left(bars)
    if not bars:
        return Progress(step=first.step if first.step >= 0 else None, throughput=throughput)
    if len(bars) == 1 and not counts_rounds(bars[0]):
        done, total = _caught_up(bars[0].done, bars[0], first.step), bars[0].total
        return Progress(
            done, total, _label(bars[0], "Step"), fraction=_share(done, total), left=left, throughput=throughput
        )
    outer, inner = bars[0], bars[1] if len(bars) > 1 else None
    current = min(outer.done + 1, outer.total or outer.done + 1)
    step, steps, label = first.step if first.step >= 0 else None, None, "Step"
    within = 0.0
    if inner is not None:
        label = _label(inner, "Step")
        step = inner.done
        if inner.total:
            # Between the end of the inner loop and the outer one's next round it counts once.
            within = 0.0 if inner.done == inner.total and over else inner.done / inner.total
            step = min(outer.done * inner.total + inner.done, (outer.total or outer.done + 1) * inner.total)
            steps = outer.total * inner.total if outer.total else None
        step = _caught_up(step, inner, first.step)
    done_rounds = min(outer.done + within, float(outer.total)) if outer.total else 0.0
    return Progress(
        step,
        steps,
        label,
        outer=current,
        outers=outer.total,
        outer_label=_label(outer, "Epoch"),
        fraction=_share(done_rounds, outer.total),
        left=left,
        throughput=throughput,
    )


def _caught_up(step: int, bar: Bar, logged: int) -> int:
    """A loop's step, or what log() has told since, if that counts the same."""
    ahead = logged - step
    return logged if 0 < ahead <= 1 + (bar.rate or 0.0) * _STEPS_UNTOLD_S else step


def counts_rounds(bar: Bar) -> bool:
    """Are its items epochs, by its name, rather than steps?"""
    return _ROUNDS.search(bar.desc) is not None


def _label(bar: Bar, otherwise: str) -> str:
    return plain(_capital(bar.desc[:_LABEL_CHARS])) or otherwise


def _share(done: float, total: int | None) -> float | None:
    return min(1.0, done / total) if total else None


def seconds_left(bars: list[Bar]) -> float | None:
    """Of the whole run: the inner bar counts as a part of the outer one's item."""
    if not bars:
        return None
    outer = bars[0]
    if len(bars) > 1 and outer.total:
        inner = bars[1]
        if inner.rate and inner.total:
            items = (outer.total - outer.done) * inner.total - inner.done
            return max(0.0, items / inner.rate)
    return outer.seconds_left


@dataclass(frozen=True)
class Row:
    """A line of the table of ranks; ``note`` is "" or what is wrong with it: "slow", "behind", "stalled 12 s"."""

    rank: int
    device: str
    state: str
    note: str
    step: int | None
    step_seconds: float | None
    memory_bytes: int | None
    gpu_bytes: int | None
    gpu_total: int | None
    host: str


def rows(status: Status, history: History, now: float) -> list[Row]:
    """One per rank. ``now``: unix time."""
    ranks = history.ranks
    times = [rank.step_seconds for rank in ranks if rank.step_seconds]
    usual = statistics.median_low(times) if len(times) > 1 else None
    furthest = max((rank.step for rank in ranks), default=-1)
    return [_row(rank, ranks[rank.rank], usual, furthest, now) for rank in status.ranks]


def _row(rank: RankStatus, progress: RankProgress, usual: float | None, furthest: int, now: float) -> Row:
    note = _note(progress, usual, furthest, now) if rank.state == "running" else ""
    return Row(
        rank=rank.rank,
        device=plain(rank.device),
        state=rank.state,
        note=note,
        step=progress.step if progress.step >= 0 else None,
        step_seconds=progress.step_seconds,
        memory_bytes=rank.memory_bytes,
        gpu_bytes=rank.gpu_bytes,
        gpu_total=rank.gpu_total,
        host=_shown_host(rank),
    )


def _note(progress: RankProgress, usual: float | None, furthest: int, now: float) -> str:
    if not progress.advanced_at:
        return ""  # a rank that logs nothing is not stuck
    silent = now - progress.advanced_at
    if silent > max(_STALLED_S, _STALLED_STEPS * (progress.step_seconds or 0.0)):
        return f"silent for {silent:.0f} s"
    if progress.step >= 0 and (furthest - progress.step) * (progress.step_seconds or 0.0) > _BEHIND_S:
        return f"{furthest - progress.step:,} steps behind"
    if usual and progress.step_seconds and progress.step_seconds > _SLOW * usual:
        return "slow"
    return ""


# ---------------------------------------------------------------------------- hosts


@dataclass(frozen=True)
class Host:
    """A heading in the table of ranks, and the ranks under it.

    Attributes:
        ranks: that are there, in order.
        state: the worst of theirs.
        step: the lowest of theirs, None before the first.
        note: what is wrong with its ranks: "rank 3 silent for 12 s, and 1 more"; "" for nothing.
    """

    name: str
    ranks: list[int]
    state: str
    step: int | None
    note: str


def hosts(rows: list[Row]) -> list[Host]:
    """Of a run on several, in the order of their ranks; none where all is on one machine."""
    found: dict[str, list[Row]] = {}
    if any(row.host for row in rows):
        for row in rows:
            found.setdefault(row.host, []).append(row)
    return [_host(name, there) for name, there in found.items()]


def _host(name: str, rows: list[Row]) -> Host:
    steps = [row.step for row in rows if row.step is not None]
    noted = [f"rank {row.rank} {row.note}" for row in rows if row.note]
    note = f"{noted[0]}, and {len(noted) - 1} more" if len(noted) > 1 else "".join(noted)
    worst = min((row.state for row in rows), key=_WORST_FIRST.index)
    return Host(name or _LOST, [row.rank for row in rows], worst, min(steps, default=None), note)


def on_host(status: Status, rank: int | None) -> str:
    """``rank 3 on gpu2``; "" of a run on one machine."""
    host = next((_shown_host(each) for each in status.ranks if each.rank == rank), "")
    return f"rank {rank} on {host}" if host else ""


def _shown_host(rank: RankStatus) -> str:
    return plain(rank.host)[:_NAME_CHARS]


# ---------------------------------------------------------------------------- restarts, and a run that stands still


@dataclass(frozen=True)
class Mark:
    """Where on the curves the ranks have begun again: "restart 2", and in full with its reason."""

    step: int
    label: str
    text: str


def marks(history: History) -> list[Mark]:
    """One per step at which there was a restart; those after which nothing was logged have no place yet."""
    by_step: dict[int, list[tuple[int, str]]] = {}
    for number, restart in enumerate(history.restarts, 1):
        if restart.step is not None:
            by_step.setdefault(restart.step, []).append((number, plain(first_line(restart.reason))))
    return [_mark(step, found) for step, found in by_step.items()]


def _mark(step: int, found: list[tuple[int, str]]) -> Mark:
    numbers = [str(number) for number, _ in found]
    label = f"restart {numbers[0]}" if len(numbers) == 1 else f"restarts {numbers[0]} to {numbers[-1]}"
    return Mark(step, label, "; ".join(f"restart {number}: {reason}" for number, reason in found))


def restart_text(status: Status) -> str:
    """``restarted 1 of 3 after RankDied: rank 2 of 4 was killed by SIGKILL``; "" before the first."""
    if not status.restarts:
        return ""
    return plain(f"restarted {status.restarts:,} of {status.max_restarts:,} after {status.restart_reason}")


def notices(history: History) -> list[str]:
    """Metrics that not all ranks logged alike, a line each; only a few of them."""
    found = [plain(text) for text in history.notices]
    rest = len(found) - _NOTICES
    return [*found[:_NOTICES], f"… and {rest:,} more, in run.history.notices"] if rest > 0 else found


def restart_count(status: Status) -> str:
    """``1 restart``, ``2 restarts``; "" without any."""
    return f"{status.restarts:,} restart{'s' * (status.restarts != 1)}" if status.restarts else ""


def hang_lines(status: Status, limit: int) -> list[str]:
    """What tells of a run that stands still, line by line; the first sums up. Cut after so many characters."""
    text = status.hang.strip("\n")
    cut = [*text[:limit].split("\n"), f"… and {len(text) - limit:,} characters more"] if len(text) > limit else None
    return [plain(line.expandtabs()) for line in cut or text.split("\n")] if text else []
