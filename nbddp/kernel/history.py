"""Kernel side. The numbers of a run, without any drawing: metrics, restarts, and how far each rank is."""

from __future__ import annotations

import csv
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from nbddp import wire
from nbddp.kernel import metrics_file
from nbddp.kernel.columns import Series
from nbddp.kernel.metric import Metric
from nbddp.kernel.pairs import Counts, Spread
from nbddp.kernel.progress import Bar, RankProgress
from nbddp.kernel.records import RankReader

if TYPE_CHECKING:
    import pandas as pd

    from nbddp.panel.picture import Picture

__all__ = ["Bar", "Counts", "History", "RankProgress", "Restart", "Seen", "Series", "Spread"]


MOST_NAMES = 1_000  # of metrics that are kept; a page with more stands still


@dataclass(frozen=True)
class Restart:
    """All ranks began again after a failure.

    Attributes:
        step: the first that the lowest rank logged afterwards, None while nothing has been.
        reason: the failure, "RankDied: rank 2 of 4 was killed by SIGKILL".
    """

    step: int | None
    reason: str


class Seen(NamedTuple):
    """How much of a metric a view has.

    Attributes:
        version: what was seen holds as long as this is the same.
        points: of the metric.
        spread: of its band.
    """

    version: tuple[int, ...] = ()
    points: int = 0
    spread: int = 0


class History:
    """The metrics of one run, as columns.

    ``history["loss"]`` is the metric's ``Series``: with ``reduce=`` combined over the ranks, else rank
    0's values (the lowest rank's that logged it). Steps that are repeated after a restart take the place
    of the old ones. All methods may be called while the run goes on.

    Which values are combined: without ``step=``, the n-th that one rank logged under this name and the n-th of
    the others, whatever else they logged; with ``step=``, those of the same step (when a rank logs a step several
    times, its k-th value and the k-th of the others). The point's step is the lowest rank's, points are in the order
    in which that rank logged them, and values are combined in the order of the ranks, so that a run which logs the
    same has the same history to the bit. NaN on one rank is NaN in ``"min"`` and ``"max"`` too, as in numpy.

    A point appears once every rank has logged it. Points that some ranks never logged come when the run is over:
    ``"mean"``, ``"min"`` and ``"max"`` are then over the ranks that did, and a ``"sum"`` leaves out what not all of
    the ranks that log this metric have logged. ``counts`` has the number of ranks of every step, ``notices`` says it
    in words. The end of a run that failed or was stopped is left out where not every rank had come to it.

    The first ``reduce=`` with which the lowest rank logged a metric counts for the whole run; a different one is
    among the ``notices``.
    """

    def __init__(self, world_size: int = 1) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._readers: dict[int, RankReader] = {}
        self._metrics: dict[str, Metric] = {}
        self._restarts: list[Restart] = []
        self._unmarked = 0  # the first of the restarts since which nothing, or what follows, was logged
        self._marked_by: int | None = None  # the rank whose first step those have
        self._left_out: set[str] = set()  # names beyond those that are kept
        self._numbers: dict[int, int] = {}  # by rank, of the names that it has logged
        self.ranks = [RankProgress() for _ in range(world_size)]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """The metrics of a job that ran without a notebook: ``python -m nbddp job.nbddp --metrics PATH``.

        It may still run: this is what it has written so far. A job that was started again goes on in the same
        files (one per rank: PATH, PATH.rank1, ...); the steps that it repeated have taken the place of the old ones.

        Raises:
            NbddpError: there is something else in one of the files, it is damaged, or another version of nbddp wrote
                it; names the file.
        """
        attempts = metrics_file.read(path)
        history = cls(attempts[0].world_size)
        for number, attempt in enumerate(attempts):
            if number:
                history.restart(attempt.reason)
                history.resize(attempt.world_size)
            for rank, data in attempt.pieces():
                history.feed(rank, data)
        history.settle()
        return history

    # ------------------------------------------------------------------ for the user

    @property
    def names(self) -> list[str]:
        """The metrics logged so far: rank 0's in the order in which it logged them first, then the other ranks'."""
        with self._lock:
            return self._names()

    @property
    def restarts(self) -> list[Restart]:
        """How often all ranks have begun again, and where."""
        with self._lock:
            return list(self._restarts)

    def __getitem__(self, name: str) -> Series:
        """The metric's steps and values. Raises KeyError, naming what there is, for an unknown one."""
        with self._lock:
            return self._metric(name).series()

    def __contains__(self, name: object) -> bool:
        return name in self._metrics

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        """The number of metrics."""
        return len(self._metrics)

    def __repr__(self) -> str:
        shown = [f"{name}: {len(self[name].steps)} points" for name in self.names]
        return f"History({', '.join(shown) or 'nothing logged'})"

    def by_rank(self, name: str) -> dict[int, Series]:
        """The values that each rank logged under this name."""
        with self._lock:
            return {rank: column.series() for rank, column in sorted(self._metric(name).columns.items())}

    def counts(self, name: str) -> Counts:
        """How many ranks have logged each step of a metric with ``reduce=``: ``steps, ranks, of = ...``.

        Has the steps that ``history[name]`` leaves out of a sum, too. Empty for a metric without ``reduce=``.
        """
        with self._lock:
            return self._metric(name).counts()

    @property
    def notices(self) -> list[str]:
        """What a reader of the values has to know, a line each: metrics that not all ranks logged alike.

        ``"loss: 2 of 50 steps were logged by only 3 of 4 ranks (the first is step 7); there the mean is over the ranks
        that logged it"``
        """
        with self._lock:
            many = [_left_out_text(len(self._left_out))] if self._left_out else []
            return many + [f"{name}: {text}" for name in self._names() for text in self._metric(name).notices()]

    def latest(self) -> dict[str, float]:
        """The newest value of each metric."""
        with self._lock:
            newest = {name: self._metric(name).series(-1).values.tolist() for name in self._names()}
            return {name: values[0] for name, values in newest.items() if values}

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with one row per step and one column per metric (NaN where it has no value)."""
        import pandas

        columns = {}
        for name in self.names:
            steps, values = self[name]
            series = pandas.Series(values, index=steps)
            columns[name] = series[~series.index.duplicated(keep="last")]
        frame = pandas.DataFrame(columns).sort_index()
        frame.index.name = "step"
        return frame

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line per step and one column per metric; an empty field where it has no value."""
        names = self.names
        rows: dict[int, dict[str, float]] = {}
        for name in names:
            steps, values = self[name]
            for step, value in zip(steps.tolist(), values.tolist()):
                rows.setdefault(step, {})[name] = value
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *names])
            writer.writerows([step, *(rows[step].get(name, "") for name in names)] for step in sorted(rows))

    def spread(self, name: str) -> Spread:
        """The lowest and highest value over the ranks; empty when one rank alone logs this metric.

        A step is in it once every rank that logs this metric has logged it; when the run is over, with two of them.
        """
        with self._lock:
            return self._metric(name).spread()

    def plot(self) -> Picture:
        """The curves as a picture that shows itself: ``.svg`` is its text, ``.figure()`` one of matplotlib."""
        from nbddp.panel.picture import Picture

        return Picture(self)

    # ------------------------------------------------------------------ for a view, which has seen a part already

    def changes(self) -> dict[str, int]:
        """Of each metric, a number that is another one when there is something new."""
        with self._lock:
            return {name: metric.changes for name, metric in self._metrics.items()}

    def new_points(self, name: str, seen: Seen) -> tuple[Series, Spread, Seen]:
        """What a view has not seen, of the metric and its band, and what it has seen with that.

        When the version differs from the one before, what the view had does not hold any more (another rank's
        values count, steps were repeated, a rank has joined the band), and this is all from the beginning.
        """
        with self._lock:
            metric = self._metric(name)
            if metric.version != seen.version:
                seen = Seen(metric.version)
            series, spread = metric.series(seen.points), metric.spread(seen.spread)
        return series, spread, Seen(seen.version, seen.points + len(series.steps), seen.spread + len(spread.steps))

    def seen_points(self, name: str, seen: Seen) -> tuple[Series, Spread]:
        """So much of the metric and its band as a view has seen."""
        with self._lock:
            metric = self._metric(name)
            return metric.series(0, seen.points), metric.spread(0, seen.spread)

    # ------------------------------------------------------------------ for the run

    def feed(self, rank: int, data: bytes) -> None:
        """Take in bytes of that rank's metrics pipe, cut anywhere."""
        with self._lock:
            reader = self._readers.setdefault(rank, RankReader())
            records = reader.feed(data)
            metrics = records[records["kind"] == wire.KIND_METRIC]
            if len(metrics):
                self._mark_restarts(rank, int(metrics["step"][0]))
            for ident in dict.fromkeys(metrics["id"].tolist()):
                self._add(rank, reader.name(ident), metrics[metrics["id"] == ident])
            for record in records[records["kind"] > wire.KIND_METRIC]:
                self._add_progress(self.ranks[rank], reader.name(int(record["id"])), record)

    def restart(self, reason: str = "") -> None:
        """The ranks begin again, in new processes, after this failure."""
        with self._lock:
            if self._marked_by is not None:
                self._unmarked, self._marked_by = len(self._restarts), None
            self._restarts.append(Restart(None, reason))
            for rank in self._readers:  # the others are as new
                self.ranks[rank] = RankProgress()
            self._readers.clear()
            for metric in self._metrics.values():
                metric.restart(self._world_size)

    def resize(self, world_size: int) -> None:
        """There are so many ranks now, after a restart without the host of some: nobody waits for those."""
        with self._lock:
            if world_size == self._world_size:
                return
            self._world_size = world_size
            self.ranks += [RankProgress() for _ in range(world_size - len(self.ranks))]
            for metric in self._metrics.values():
                metric.resize(world_size)

    def settle(self, *, broken_off: bool = False) -> None:
        """The run is over: nothing more will be fed.

        Args:
            broken_off: before its end; what not every rank had come to is left out.
        """
        with self._lock:
            for metric in self._metrics.values():
                metric.settle(broken_off=broken_off)

    def _mark_restarts(self, rank: int, step: int) -> None:
        if self._marked_by is None or rank < self._marked_by:
            self._marked_by = rank
            self._restarts[self._unmarked :] = [Restart(step, r.reason) for r in self._restarts[self._unmarked :]]

    def _add(self, rank: int, name: str, records: npt.NDArray[Any]) -> None:
        if name in self._metrics or len(self._metrics) < MOST_NAMES:
            self._add_to_metric(rank, name, records)
        else:
            self._left_out.add(name)
        newest = int(records["step"].argmax())
        self.ranks[rank].saw_step(int(records["step"][newest]), float(records["time"][newest]))

    def _add_to_metric(self, rank: int, name: str, records: npt.NDArray[Any]) -> None:
        metric = self._metrics.setdefault(name, Metric())
        if rank not in metric.numbers:
            metric.numbers[rank] = self._numbers.get(rank, 0)
            self._numbers[rank] = metric.numbers[rank] + 1
        metric.add(rank, records)

    def _add_progress(self, progress: RankProgress, name: str, record: Any) -> None:
        at = float(record["time"])
        if record["kind"] == wire.KIND_SAMPLES:
            progress.saw_samples(int(record["value"]), at)
        elif record["kind"] == wire.KIND_PROGRESS:
            total = int(record["step"])
            progress.saw_bar(int(record["weight"]), name, None if total < 0 else total, int(record["value"]), at)

    def _metric(self, name: str) -> Metric:
        if name not in self._metrics:
            raise KeyError(f"no metric {name!r} was logged; there is: {', '.join(self._names()) or 'none'}")
        self._metrics[name].catch_up(self._world_size)
        return self._metrics[name]

    def _names(self) -> list[str]:
        return sorted(self._metrics, key=lambda name: self._metrics[name].order)


def _left_out_text(count: int) -> str:
    names = "1 more name was" if count == 1 else f"{count:,} more names were"
    return f"only the first {MOST_NAMES:,} metrics are kept; {names} logged. Is a name made from a step or a sample?"
