"""Summarises a run in numbers and words for every view: names of metrics, progress, restarts, hangs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nbddp.history.finite import Broken
from nbddp.history.history import Bar, History, RankProgress
from nbddp.panel import numbers
from nbddp.panel.view import Status
from nbddp.text import first_line, ranks_text
from nbddp.text import plain as plain

_STAGE = "train|training|val|valid|validation|test|eval|dev"
_STAGE_FIRST = re.compile(rf"(?P<stage>{_STAGE})[/_.\- ]+(?P<rest>.+)", re.IGNORECASE)
_STAGE_LAST = re.compile(rf"(?P<rest>.+?)[/_.\- ]+(?P<stage>{_STAGE})", re.IGNORECASE)
_TQDM = re.compile(r"(?<!\d)(\d{1,15})/(\d{1,15}) \[[\d:]+<([\d:]{1,12}|\?)[,\]]")  # 76/100 [00:07<00:02, 10.1it/s]
_TQDM_CHARS = 2_000  # of the end of an output
_EPOCHS = re.compile(r"epoch|\brounds?\b", re.IGNORECASE)
_LABEL_CHARS = 120  # of a loop
_MAX_NOTICES = 3
_REPORT_INTERVAL_S = 0.3  # a loop reports its progress a few times a second, log() at once
_TITLES = {"acc": "Accuracy", "lr": "Learning rate", "ppl": "Perplexity"}


@dataclass(frozen=True)
class Metric:
    """How a metric is shown.

    Attributes:
        family: metrics of one family share a chart: "loss".
        title: of the chart: "Loss".
        label: of the line: "train".
        tile: the metric's name outside its chart: "Train loss".
    """

    name: str
    family: str
    title: str
    label: str
    tile: str


def describe(name: str) -> Metric:
    """How to show a metric: ``train/loss``, ``Loss/val``, ``val loss`` and ``loss`` are all of the family ``loss``."""
    shown = plain(name)
    before, last = _parted(shown)
    title = _TITLES.get(last.lower(), _capital(last.replace("_", " ")))
    tile = _capital(f"{before.replace('/', ' ')} {last.replace('_', ' ')}".strip())
    return Metric(name, last.lower(), title, before or last, _TITLES.get(shown.lower(), tile))


def _parted(name: str) -> tuple[str, str]:
    """The label within the chart, "" for none, and the chart's name: ``("gan val", "loss")`` of ``gan/loss_val``."""
    stage = _STAGE_FIRST.fullmatch(name) or _STAGE_LAST.fullmatch(name)
    before, _, last = (stage["rest"] if stage else name).rpartition("/")
    inner = None if stage else _STAGE_FIRST.fullmatch(last) or _STAGE_LAST.fullmatch(last)
    if inner:
        stage, last = inner, inner["rest"]
    parts = (before, stage["stage"] if stage else "")
    return "/".join(filter(None, parts[::-1] if stage and stage.start("stage") == 0 and not inner else parts)), last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Progress:
    """The progress of the run. None: not known.

    Attributes:
        step, steps, step_label: number and total of the inner loop's steps over all epochs, and the loop's name.
        outer, outers, outer_label: the present epoch, counted from 1, the number of epochs, and the loop's name.
        fraction: of the whole run, 0 to 1.
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
    """The progress by the slowest rank's ``progress()`` loops; without any, by its last step."""
    first = slowest(history)
    bars = list(first.bars)
    rates = [rank.samples_per_second for rank in history.ranks]
    throughput = sum(rate for rate in rates if rate) or None
    left = seconds_left(bars)
    if not bars:
        return Progress(step=first.step if first.step >= 0 else None, throughput=throughput)
    if len(bars) == 1 and not counts_epochs(bars[0]):
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
            # Between the inner loop's end and the next epoch, a finished inner loop must not count twice.
            within = 0.0 if inner.done == inner.total and over else inner.done / inner.total
            step = min(outer.done * inner.total + inner.done, (outer.total or outer.done + 1) * inner.total)
            steps = outer.total * inner.total if outer.total else None
        step = _caught_up(step, inner, first.step)
    done_epochs = min(outer.done + within, float(outer.total)) if outer.total else 0.0
    return Progress(
        step,
        steps,
        label,
        outer=current,
        outers=outer.total,
        outer_label=_label(outer, "Epoch"),
        fraction=_share(done_epochs, outer.total),
        left=left,
        throughput=throughput,
    )


def slowest(history: History) -> RankProgress:
    """The rank with the most left to do, of those that report progress; rank 0 before the first report."""
    with_bars = [rank for rank in history.ranks if rank.bars]
    if with_bars:
        return min(with_bars, key=lambda rank: (_done(rank.bars), rank.step))
    return min((rank for rank in history.ranks if rank.step >= 0), key=lambda rank: rank.step, default=history.ranks[0])


def _done(bars: list[Bar]) -> float:
    """How many items of the outermost loop are done, with a part of the present item."""
    outer, inner = bars[0].done, bars[1] if len(bars) > 1 else None
    within = inner.done / inner.total if inner and inner.total else 0.0
    return outer + (within if within < 1 else 0.0)


def from_output(tails: Iterable[str]) -> Progress | None:
    """The progress by the bars that tqdm writes, of the rank that is furthest behind; None if no rank writes any.

    Args:
        tails: the end of each rank's output.
    """
    found = [bars[-1] for tail in tails if (bars := _TQDM.findall(tail[-_TQDM_CHARS:]))]
    if not found:
        return None
    done, total, left = min(found, key=lambda bar: int(bar[0]) / max(1, int(bar[1])))
    return Progress(int(done), int(total), fraction=_share(int(done), int(total)), left=_seconds(left))


def _seconds(clock: str) -> float | None:
    """The seconds of tqdm's ``1:02:03`` or ``00:07``; None for ``?``."""
    if "?" in clock:
        return None
    return float(sum(int(part) * 60**power for power, part in enumerate(reversed(clock.split(":")))))


def _caught_up(step: int, bar: Bar, logged: int) -> int:
    """A loop's step; the last logged step instead, if it is so close that log() seems to count the same steps."""
    ahead = logged - step
    return logged if 0 < ahead <= 1 + (bar.rate or 0.0) * _REPORT_INTERVAL_S else step


def counts_epochs(bar: Bar) -> bool:
    """Whether the loop's items are epochs rather than steps, by the loop's name."""
    return _EPOCHS.search(bar.desc) is not None


def _label(bar: Bar, otherwise: str) -> str:
    return plain(_capital(bar.desc[:_LABEL_CHARS])) or otherwise


def _share(done: float, total: int | None) -> float | None:
    return min(1.0, done / total) if total else None


def seconds_left(bars: list[Bar]) -> float | None:
    """Until the end of the whole run: the inner loop is a part of one item of the outer loop."""
    if not bars:
        return None
    outer = bars[0]
    if len(bars) > 1 and outer.total:
        inner = bars[1]
        if inner.rate and inner.total:
            items = (outer.total - outer.done) * inner.total - inner.done
            return max(0.0, items / inner.rate)
    return outer.seconds_left


# ---------------------------------------------------------------------------- restarts, notices and hangs


@dataclass(frozen=True)
class Mark:
    """A dashed line on the curves: a restart, or the step from which on a metric is NaN or infinite.

    Attributes:
        label: "restart 2", "NaN from step 60".
        text: the same with the reason or the ranks.
        family: of the only chart with this mark; "" for all charts.
    """

    step: int
    label: str
    text: str
    family: str = ""


def marks(history: History) -> list[Mark]:
    """The restarts, then one mark per family with a metric that is NaN or infinite."""
    return [*_restart_marks(history), *_broken_marks(history.broken())]


def _broken_marks(broken: list[Broken]) -> list[Mark]:
    by_family: dict[str, Mark] = {}
    for each in broken:
        family = describe(each.name).family
        if family not in by_family or each.step < by_family[family].step:
            label = f"{numbers.metric(each.value)} from step {each.step:,}"
            by_family[family] = Mark(each.step, label, broken_text(each), family)
    return list(by_family.values())


def broken_text(broken: Broken) -> str:
    """``train/loss is NaN from step 60 on rank 1``."""
    since = f"{numbers.metric(broken.value)} from step {broken.step:,}"
    return plain(f"{broken.name} is {since} on {ranks_text(broken.ranks)}")


def _restart_marks(history: History) -> list[Mark]:
    """One per step at which the ranks restarted. A restart without a logged step after it has no mark yet."""
    by_step: dict[int, list[tuple[int, str]]] = {}
    for number, restart in enumerate(history.restarts, 1):
        if restart.step is not None:
            by_step.setdefault(restart.step, []).append((number, plain(first_line(restart.reason))))
    found = []
    for step, restarts in by_step.items():
        first, last = restarts[0][0], restarts[-1][0]
        label = f"restart {first}" if first == last else f"restarts {first} to {last}"
        found.append(Mark(step, label, "; ".join(f"restart {number}: {reason}" for number, reason in restarts)))
    return found


def restart_text(status: Status) -> str:
    """``restarted 1 of 3 after RankDied: rank 2 of 4 was killed by SIGKILL``; "" before the first."""
    if not status.restarts:
        return ""
    return plain(f"restarted {status.restarts:,} of {status.max_restarts:,} after {status.restart_reason}")


def notices(history: History) -> list[str]:
    """The first metrics that are NaN or infinite, and the first that not all ranks logged alike, a line each."""
    broken = history.broken()
    lines = [broken_text(each) for each in broken[:_MAX_NOTICES]]
    if len(broken) > _MAX_NOTICES:
        lines.append(f"… and {len(broken) - _MAX_NOTICES:,} more metrics are NaN or infinite")
    found = [plain(text) for text in history.notices]
    rest = len(found) - _MAX_NOTICES
    more = [f"… and {rest:,} more, in run.history.notices"] if rest > 0 else []
    return [*lines, *found[:_MAX_NOTICES], *more]


def restart_count(status: Status) -> str:
    """``1 restart``, ``2 restarts``; "" without any."""
    return f"{status.restarts:,} restart{'s' * (status.restarts != 1)}" if status.restarts else ""


def hang_lines(status: Status, limit: int) -> list[str]:
    """The report about a run that hangs, cut to ``limit`` characters: a summary in the first line, then the stacks."""
    text = status.hang.strip("\n")
    cut = [*text[:limit].split("\n"), f"… and {len(text) - limit:,} more characters"] if len(text) > limit else None
    return [plain(line.expandtabs()) for line in cut or text.split("\n")] if text else []
