"""``History``: the metrics of a run, its restarts, and the progress of each rank, without any drawing."""

from __future__ import annotations

import csv
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

import numpy.typing as npt

from nbddp import doors, wire
from nbddp.history import metrics_file
from nbddp.history.album import Album
from nbddp.history.columns import Series
from nbddp.history.combine import Counts, Spread
from nbddp.history.finite import Broken
from nbddp.history.metric import Metric
from nbddp.history.progress import Bar, RankProgress
from nbddp.history.records import RankReader

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Bar", "Counts", "Cursor", "History", "RankProgress", "Restart", "Series", "Spread"]


MAX_METRICS = 1_000  # kept per run; with more, the panel makes the page unresponsive


@dataclass(frozen=True)
class Restart:
    """All ranks started again after a failure.

    Attributes:
        step: the first step that the lowest rank logged afterwards; None if none was logged.
        reason: the failure, e.g. "RankDied: rank 2 of 4 was killed by SIGKILL".
    """

    step: int | None
    reason: str


class Cursor(NamedTuple):
    """How much of a metric a view has read.

    Attributes:
        version: changes when points that were already read become invalid.
        points: number of the metric's points that were read.
        spread: number of the spread's points that were read.
    """

    version: tuple[int, ...] = ()
    points: int = 0
    spread: int = 0


class Picture(Protocol):
    """Curves as a picture that a notebook displays by itself."""

    @property
    def svg(self) -> str:
        """The picture as the text of an SVG file."""

    def figure(self) -> Any:
        """The same curves as a ``matplotlib.figure.Figure``, which you can modify."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]: ...


class History(Mapping[str, Series]):
    """The metrics of one run, as columns.

    ``history["loss"]`` is the metric's ``Series``: with ``reduce=`` combined over the ranks, otherwise rank 0's values
    (those of the lowest rank that logged it). Steps that are repeated after a restart replace the old ones. All methods
    may be called while the run goes on.

    Which values are combined: without ``step=``, the n-th value that each rank logged under this name, whatever else
    the ranks logged; with ``step=``, the values of the same step (if a rank logs a step several times, its k-th value
    and the k-th of the others). A point has the lowest rank's step, points are in the order in which that rank logged
    them, and values are combined in the order of the ranks: two runs that log the same values have bitwise equal
    histories. NaN on one rank gives NaN in ``"min"`` and ``"max"`` too, as in numpy.

    A point appears once every rank has logged it. Points that some ranks never logged appear when the run is over:
    ``"mean"``, ``"min"`` and ``"max"`` are then over the ranks that logged them, and a ``"sum"`` leaves out points that
    not all ranks with this metric have logged. ``counts`` has the number of ranks for each step, ``notices`` describes
    the differences. If a run failed or was stopped, the last points, which not every rank had reached, are left out.

    A ``Mapping`` from names to ``Series``: ``keys()``, ``items()``, ``get``, ``len``, iteration and ``dict(history)``.

    The first ``reduce=`` with which the lowest rank logged a metric counts for the whole run; a different one is
    listed in ``notices``.

    Attributes:
        figures: what the ranks have shown with :func:`nbddp.show`.
    """

    def __init__(self, world_size: int = 1) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._readers: dict[int, RankReader] = {}
        self._metrics: dict[str, Metric] = {}
        self._restarts: list[Restart] = []
        self._open_restarts = 0  # index of the first restart whose step may still change
        self._restart_step_by: int | None = None  # the rank that logged the restarts' step; None: none has yet
        self._names_left_out: set[str] = set()  # names beyond MAX_METRICS
        self._names_logged: dict[int, int] = {}  # number of names by rank
        self.ranks = [RankProgress() for _ in range(world_size)]
        self.figures = Album()
        self.over = False  # no more bytes will be fed
        self._snapshots: dict[str, int] = {}
        self.snapshots = 0  # how many rank 0 has written

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """The metrics of a job that ran without a notebook: ``python -m nbddp job.nbddp --metrics PATH``.

        While the job still runs: the metrics written so far. A job that was started again continues the same
        files (one per rank: PATH, PATH.rank1, ...); the steps that it repeated have replaced the old ones.

        Raises:
            NbddpError: one of the files is not a metrics file, is damaged, or was written by another version of nbddp.
                The message names the file.
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
        """The metrics logged so far: first rank 0's, in the order in which rank 0 logged them, then the others."""
        with self._lock:
            return self._names()

    @property
    def restarts(self) -> list[Restart]:
        """Every restart of all ranks, in order, with its step and its reason."""
        with self._lock:
            return list(self._restarts)

    def __getitem__(self, name: str) -> Series:
        """The metric's steps and values. Raises KeyError for an unknown name; the message lists the known names."""
        with self._lock:
            return self._metric(name).series()

    __eq__, __hash__ = object.__eq__, object.__hash__  # by identity: Mapping would compare the arrays

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

        Includes the steps that ``history[name]`` leaves out of a sum. Empty for a metric without ``reduce=``.
        """
        with self._lock:
            return self._metric(name).counts()

    @property
    def notices(self) -> list[str]:
        """Warnings about metrics that not all ranks logged alike, a line each.

        ``"loss: 2 of 50 steps were logged by only 3 of 4 ranks (the first is step 7); there the mean is over the ranks
        that logged it"``
        """
        with self._lock:
            notices = [f"{name}: {text}" for name in self._names() for text in self._metric(name).notices()]
            left_out = len(self._names_left_out)
        if left_out:
            more = "1 more name was" if left_out == 1 else f"{left_out:,} more names were"
            limit = f"only the first {MAX_METRICS:,} metrics are kept; {more} logged"
            notices.insert(0, f"{limit}. Is a step or a sample part of a name?")
        return notices

    def latest(self) -> dict[str, float]:
        """The newest value of each metric."""
        with self._lock:
            newest = {name: self._metric(name).series(-1).values.tolist() for name in self._names()}
            return {name: values[0] for name, values in newest.items() if values}

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with one row per step and one column per metric (NaN for a missing value)."""
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
        """Write a CSV file: one line per step, one column per metric; a missing value is an empty field."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            self.write_csv(file)

    def write_csv(self, file: TextIO) -> None:
        """Write the same to a text file that was opened with ``newline=""``."""
        names = self.names
        rows: dict[int, dict[str, float]] = {}
        for name in names:
            steps, values = self[name]
            for step, value in zip(steps.tolist(), values.tolist()):
                rows.setdefault(step, {})[name] = value
        writer = csv.writer(file)
        writer.writerow(["step", *names])
        writer.writerows([step, *(rows[step].get(name, "") for name in names)] for step in sorted(rows))

    def spread(self, name: str) -> Spread:
        """The lowest and highest value over the ranks; empty if only one rank logs this metric.

        A step appears once every rank that logs this metric has logged it; when the run is over, two ranks are enough.
        """
        with self._lock:
            return self._metric(name).spread()

    def plot(self, *names: str, log: bool = False) -> Picture:
        """The curves as a picture that a notebook displays: also ``.svg`` as text, ``.figure()`` for matplotlib.

        Args:
            names: the metrics to draw. Default: all.
            log: True: a logarithmic axis for the values; values that are not positive are left out.

        Raises:
            KeyError: no metric of this name was logged.
        """
        for name in names:
            self[name]
        picture: Picture = doors.picture_of(self, names, log)
        return picture

    def _repr_html_(self) -> str | None:
        """The curves, in a notebook."""
        return self.plot()._repr_mimebundle_()["text/html"] if self.names else None

    # ------------------------------------------------------------------ for a view, which reads in pieces

    def changes(self) -> dict[str, int]:
        """By metric, a counter that grows whenever the metric changes."""
        with self._lock:
            return {name: metric.changes for name, metric in self._metrics.items()}

    def broken(self) -> list[Broken]:
        """The metrics whose newest values are NaN or infinite on some rank, in the order of ``names``."""
        with self._lock:
            if not any(metric.finite.since for metric in self._metrics.values()):
                return []
            return [found for name in self._names() if (found := self._metrics[name].finite.broken(name))]

    def first_nan(self) -> Broken | None:
        """The NaN with the lowest step since the last restart; None if there was none."""
        with self._lock:
            found = [nan for name, metric in self._metrics.items() if (nan := metric.finite.nan(name))]
        return min(found, key=lambda nan: nan.step, default=None)

    def new_points(self, name: str, cursor: Cursor) -> tuple[Series, Spread, Cursor]:
        """The points of the metric and its spread after the cursor, and the cursor after these points.

        If the returned version differs from the cursor's, the points read before are invalid (the values are now
        another rank's, steps were repeated, a rank has joined the spread), and all points are returned.
        """
        with self._lock:
            metric = self._metric(name)
            if metric.version != cursor.version:
                cursor = Cursor(metric.version)
            series, spread = metric.series(cursor.points), metric.spread(cursor.spread)
        points, spread_points = cursor.points + len(series.steps), cursor.spread + len(spread.steps)
        return series, spread, Cursor(cursor.version, points, spread_points)

    def timed_points(self, cursors: Mapping[str, Cursor]) -> dict[str, tuple[Series, npt.NDArray[Any], Cursor]]:
        """The points of every metric after its cursor, all at one moment, and when they were logged (unix seconds).

        For the cursors see :meth:`new_points`; a metric without one is read from its start.
        """
        found = {}
        with self._lock:
            for name in self._names():
                metric, cursor = self._metric(name), cursors.get(name, Cursor())
                start = cursor.points if metric.version == cursor.version else 0
                series, times = metric.series(start), metric.times(start)
                found[name] = series, times, Cursor(metric.version, start + len(times))
        return found

    def points_up_to(self, name: str, cursor: Cursor) -> tuple[Series, Spread]:
        """The points of the metric and its spread that were read before the cursor."""
        with self._lock:
            metric = self._metric(name)
            return metric.series(0, cursor.points), metric.spread(0, cursor.spread)

    # ------------------------------------------------------------------ for the run

    def feed(self, rank: int, data: bytes, arrived_at: float = 0.0) -> None:
        """Add bytes from that rank's metrics pipe; the bytes may be cut anywhere.

        Args:
            arrived_at: unix time by this machine's clock; the ranks of other hosts have theirs.
        """
        with self._lock:
            self.ranks[rank].arrived_at = arrived_at
            reader = self._readers.setdefault(rank, RankReader())
            records = reader.feed(data)
            for shown in reader.shown(records):
                self.figures.add(shown)
            metrics = records[records["kind"] == wire.KIND_METRIC]
            if len(metrics):
                self._mark_restarts(rank, int(metrics["step"][0]))
            for ident in dict.fromkeys(metrics["id"].tolist()):
                self._add(rank, reader.name(ident), metrics[metrics["id"] == ident])
            for record in records[(records["kind"] > wire.KIND_METRIC) & (records["kind"] < wire.KIND_SHOWN)]:
                self._add_progress(self.ranks[rank], reader.name(int(record["id"])), record)

    def take_snapshots(self) -> dict[str, int]:
        """Return the snapshots that rank 0 has written since the last call: the last step, by path."""
        with self._lock:
            taken, self._snapshots = self._snapshots, {}
            return taken

    def restart(self, reason: str = "") -> None:
        """The ranks start again, in new processes, after this failure."""
        with self._lock:
            if self._restart_step_by is not None:
                self._open_restarts, self._restart_step_by = len(self._restarts), None
            self._restarts.append(Restart(None, reason))
            for rank in self._readers:  # only these have logged anything
                self.ranks[rank] = self.ranks[rank].after_restart()
            self._readers.clear()
            self.figures.restart()
            for metric in self._metrics.values():
                metric.restart(self._world_size)

    def resize(self, world_size: int) -> None:
        """Set the number of ranks after a restart that left out a lost host; no point waits for its ranks."""
        with self._lock:
            if world_size == self._world_size:
                return
            self._world_size = world_size
            self.ranks += [RankProgress() for _ in range(world_size - len(self.ranks))]
            for metric in self._metrics.values():
                metric.resize(world_size)

    def settle(self, *, broken_off: bool = False) -> None:
        """The run is over, and no more bytes will be fed.

        Args:
            broken_off: the run did not reach its end: leave out the last points, which not every rank had reached.
        """
        with self._lock:
            self.over = True
            for metric in self._metrics.values():
                metric.settle(broken_off=broken_off)

    def _mark_restarts(self, rank: int, step: int) -> None:
        if self._restart_step_by is None or rank < self._restart_step_by:
            self._restart_step_by = rank
            first = self._open_restarts
            self._restarts[first:] = [Restart(step, restart.reason) for restart in self._restarts[first:]]

    def _add(self, rank: int, name: str, records: npt.NDArray[Any]) -> None:
        if name in self._metrics or len(self._metrics) < MAX_METRICS:
            metric = self._metrics.setdefault(name, Metric())
            if rank not in metric.positions:
                metric.positions[rank] = self._names_logged.get(rank, 0)
                self._names_logged[rank] = metric.positions[rank] + 1
            metric.add(rank, records)
        else:
            self._names_left_out.add(name)
        newest = int(records["step"].argmax())
        self.ranks[rank].add_step(int(records["step"][newest]), float(records["time"][newest]))

    def _add_progress(self, progress: RankProgress, name: str, record: Any) -> None:
        at = float(record["time"])
        if record["kind"] == wire.KIND_SAMPLES:
            progress.add_samples(int(record["value"]), at)
        elif record["kind"] == wire.KIND_PROGRESS:
            total = int(record["step"])
            progress.add_bar(int(record["weight"]), name, None if total < 0 else total, int(record["value"]), at)
        elif record["kind"] == wire.KIND_SAVED:
            self._snapshots[name] = int(record["step"])
            self.snapshots += 1

    def _metric(self, name: str) -> Metric:
        if name not in self._metrics:
            raise KeyError(f"no metric {name!r} was logged; the metrics are: {', '.join(self._names()) or 'none'}")
        self._metrics[name].catch_up(self._world_size)
        return self._metrics[name]

    def _names(self) -> list[str]:
        return sorted(self._metrics, key=lambda name: self._metrics[name].order)
