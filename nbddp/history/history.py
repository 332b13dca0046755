"""``History``: the metrics of a run, its restarts and the progress of each rank. It draws nothing."""

from __future__ import annotations

import collections
import csv
import io
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np

from nbddp.errors import NbddpError
from nbddp.files import new_file
from nbddp.history.notices import notices
from nbddp.history.points import RECORD, Generation, Metric, Points, Series, Spread
from nbddp.history.progress import RankProgress
from nbddp.history.records import AUTOLOG, Start, checked, read
from nbddp.text import in_a_line

MAX_METRICS = 1_000  # a page with more charts no longer answers
_CHUNK = 10_000


@dataclass(frozen=True)
class Restart:
    """All ranks started again after a failure.

    Attributes:
        step: the first step that the lowest rank logged afterwards; None if none was logged.
        reason: the failure, e.g. "RankDied: rank 2 of 4 was killed by SIGKILL".
    """

    step: int | None
    reason: str


class Broken(NamedTuple):
    """A metric whose newest values are NaN or infinite on some ranks: since which step, and the first such value."""

    step: int
    value: float
    ranks: list[int]


class History(Mapping[str, Series]):
    """The metrics of one run: ``steps, values = history["loss"]``.

    With ``reduce=`` a metric is combined over the ranks, else it's rank 0's (the lowest rank's that logged it). Steps
    that are repeated after a restart replace the old ones. All methods may be called while the run goes on.

    Which values belong together: without ``step=``, the n-th value of each rank under this name; with ``step=``, those
    of the same step (if a rank's steps go back, as in each epoch, those of the same epoch). A point has the lowest
    rank's step, and appears once every rank has gone beyond it. ``"mean"``, ``"min"`` and ``"max"`` are over the ranks
    that logged it; a ``"sum"`` leaves out points that some ranks skipped. Where a run failed or was stopped, the last
    points of a metric with ``reduce=``, which not every rank had reached, are left out. NaN on one rank gives NaN.

    Attributes:
        ranks: the progress of each rank.
        snapshots: the last step before each snapshot, by path.
        first_nan: the first NaN that arrived: metric, step, rank.
    """

    def __init__(self, world_size: int = 1) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, Metric] = {}
        self._left_out: set[str] = set()
        self._named: dict[int, dict[str, None]] = collections.defaultdict(dict)  # by rank, in its order
        self._generations = [Generation("", world_size)]
        self.ranks = [RankProgress() for _ in range(world_size)]
        self.snapshots: dict[str, int | None] = {}
        self.first_nan: tuple[str, int, int] | None = None
        self._broken: dict[str, dict[int, tuple[int, float]]] = {}  # by rank: step and value

    # ------------------------------------------------------------------ for the user

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """What :meth:`save` or the ranks of a job wrote (``python -m nbddp job.nbddp --metrics PATH``).

        While the job runs: what it has logged so far. A job that was started again continues its files.

        Raises:
            NbddpError: there is no such file, it is damaged, or nbddp has not written it.
        """
        try:
            generations = read(path)
            history = cls(generations[0][0][0].world_size)
            for number, generation in enumerate(generations):
                first = generation[0][0]
                if number:
                    history.restart(first.reason, first.world_size)
                for rank, (start, data) in sorted(generation.items()):
                    if start.first_step is not None:
                        history._generations[-1].first_steps[rank] = start.first_step
                    records = checked(data)
                    while chunk := list(itertools.islice(records, _CHUNK)):
                        history.add(rank, chunk)
            history.settle(broken_off=first.broken_off)
        except Exception as error:  # the file may hold anything
            raise NbddpError(f"{os.fspath(path)} cannot be read as metrics: {in_a_line(error)}") from error
        return history

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all metrics to a file, for :meth:`load`. Raises NbddpError if it cannot be written."""
        with new_file(path) as file, self._lock:
            broken_off = self._generations[-1].broken_off is not False
            for began, generation in enumerate(self._generations):
                for rank in range(generation.world_size):
                    first = generation.first_steps.get(rank)
                    file.write(Start(rank, generation.world_size, began, generation.reason, broken_off, first).head())
                    for name in self._names():
                        for block in self._metrics[name].blocks:
                            if block.generation is generation and rank in block.ranks:
                                rows = block.by_rank(rank, slice(None))  # repeated ones, too: load() repeats them again
                                ops = self._metrics[name].ops[rank]
                                file.write(msgpack.packb({"name": name, "ops": ops, "rows": rows.tobytes()}))

    @property
    def nbytes(self) -> int:
        """The memory of its arrays."""
        with self._lock:
            return sum(block.nbytes for metric in self._metrics.values() for block in metric.blocks)

    @property
    def restarts(self) -> list[Restart]:
        """Every restart of all ranks, in order."""
        found: list[Restart] = []
        step = None
        with self._lock:
            for generation in reversed(self._generations[1:]):
                step = generation.first_steps[min(generation.first_steps)] if generation.first_steps else step
                found.insert(0, Restart(step, generation.reason))
        return found

    @property
    def broken(self) -> dict[str, Broken]:
        """The metrics that are NaN or infinite now, by name: since which step, the value there, on which ranks."""
        with self._lock:
            found = {name: self._broken[name] for name in self._names() if self._broken.get(name)}
            return {name: Broken(*min(since.values()), sorted(since)) for name, since in found.items()}

    @property
    def notices(self) -> list[str]:
        """What the ranks have not logged alike, a line each.

        ``"loss: 2 of 50 steps were logged by only 3 of 4 ranks (the first is step 7); there the mean is over the ranks
        that logged it"``
        """
        with self._lock:
            found = [f"{name}: {text}" for name in self._names() for text in notices(self._metrics[name])]
            left_out = len(self._left_out)
        if left_out:
            more = "1 more name was" if left_out == 1 else f"{left_out:,} more names were"
            limit = f"only the first {MAX_METRICS:,} metrics are kept; {more} logged"
            found.insert(0, f"{limit}. Is a step or a sample part of a name?")
        return found

    def __getitem__(self, name: str) -> Series:
        points = self.points(name)
        return Series(points.steps, points.values)

    def __contains__(self, name: object) -> bool:
        return name in self._metrics

    def __iter__(self) -> Iterator[str]:
        """Rank 0's metrics in its order, then those of the other ranks."""
        with self._lock:
            return iter(self._names())

    def __len__(self) -> int:
        return len(self._metrics)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        shown = [f"{name}: {len(series.steps)} points" for name, series in self.items()]
        return f"History({', '.join(shown) or 'nothing logged'})"

    def points(self, name: str) -> Points:
        """Steps, times (unix seconds), values, and the lowest and highest value over the ranks."""
        with self._lock:
            return self._metric(name).points()

    def by_rank(self, name: str) -> dict[int, Series]:
        """The values that each rank logged under this name, at the steps of the metric's points."""
        with self._lock:
            return self._metric(name).by_rank()

    def spread(self, name: str) -> Spread:
        """The lowest and highest value over the ranks, of the steps that every rank with this metric has logged.

        When the run is over, of those that two ranks have logged.
        """
        with self._lock:
            return self._metric(name).spread()

    def latest(self) -> dict[str, float]:
        """The newest value of each metric."""
        with self._lock:
            names = self._names()
            return {name: value for name in names if (value := self._metrics[name].latest()) is not None}

    def to_pandas(self) -> Any:
        """A DataFrame with one row per step and one column per metric (NaN for a missing value)."""
        import pandas

        columns = {name: pandas.Series(values, index=steps) for name, (steps, values) in self.items()}
        columns = {name: column[~column.index.duplicated(keep="last")] for name, column in columns.items()}
        return pandas.DataFrame(columns).sort_index().rename_axis("step")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """One line per step, one column per metric; a missing value is an empty field.

        A metric named ``step`` is the column ``step.1``. Raises NbddpError if the file cannot be written.
        """
        rows: dict[int, dict[str, float]] = {}
        names = list(self)
        for name in names:
            for step, value in zip(*(column.tolist() for column in self[name])):
                rows.setdefault(step, {})[name] = value
        with new_file(path) as file:
            writer = csv.writer(text := io.TextIOWrapper(file, "utf-8", newline=""))
            writer.writerow(["step", *("step.1" if name == "step" else name for name in names)])
            writer.writerows([step, *(rows[step].get(name, "") for name in names)] for step in sorted(rows))
            text.detach()

    # ------------------------------------------------------------------ for the run

    def add(self, rank: int, records: Iterable[Any]) -> None:
        """Add decoded records of that rank's metrics file."""
        logged: dict[Any, tuple[dict[str | None, None], list[Any]]] = collections.defaultdict(lambda: ({}, []))
        with self._lock:
            self.ranks[rank].arrived_at = time.time()
            for record in records:
                if isinstance(record, dict):
                    self._add_other(rank, record)
                    continue
                at, step, counted, reduce, weight, values = record
                place = np.nan if counted else step
                heard = reduce == AUTOLOG
                for name, value in values.items():
                    ops, rows = logged[name, heard]
                    ops[None if heard else reduce] = None
                    rows.append((at, step, place, weight, value))
            for (name, heard), (ops, rows) in logged.items():
                self._add(rank, name, ops, np.array(rows, RECORD), heard=heard)

    def take(self) -> dict[str, Points]:
        """The points that are new since the last call and will not change any more, for log_to=."""
        with self._lock:
            return {name: self._metrics[name].take() for name in self._names()}

    def restart(self, reason: str = "", world_size: int | None = None) -> None:
        """The ranks start again, in new processes: the steps that they repeat replace the old ones."""
        with self._lock:
            self._generations[-1].broken_off = True
            world_size = world_size or self._generations[-1].world_size
            self._generations.append(Generation(reason, world_size))
            self._broken.clear()
            self.ranks = [rank.after_restart() for rank in self.ranks]
            self.ranks += [RankProgress() for _ in range(world_size - len(self.ranks))]

    def settle(self, *, broken_off: bool = False) -> None:
        """The run is over; ``broken_off``: leave out the last points, which not every rank had reached."""
        with self._lock:
            self._generations[-1].broken_off = broken_off

    def _add(self, rank: int, name: str, ops: Iterable[str | None], rows: np.ndarray, *, heard: bool = False) -> None:
        known = self._metrics.get(name)
        if heard and known is not None and not known.heard:
            return
        generation = self._generations[-1]
        generation.first_steps.setdefault(rank, int(rows["step"][0]))
        newest = int(rows["step"].argmax())
        self.ranks[rank].add_step(int(rows["step"][newest]), float(rows["time"][newest]))
        if self.first_nan is None and len(nan := np.flatnonzero(np.isnan(rows["value"]))):
            self.first_nan = name, int(rows["step"][nan[0]]), rank
        if known is None and len(self._metrics) == MAX_METRICS:
            self._left_out.add(name)
            return
        finite, since = np.flatnonzero(np.isfinite(rows["value"])), self._broken.setdefault(name, {})
        start = int(finite[-1]) + 1 if len(finite) else 0
        if start:
            since.pop(rank, None)
        if start < len(rows):
            since.setdefault(rank, (int(rows["step"][start]), float(rows["value"][start])))
        self._named[rank][name] = None
        if known is None or known.heard != heard:
            known = self._metrics[name] = Metric(heard=heard)
        known.add(rank, ops, rows, generation)

    def _add_other(self, rank: int, record: dict[str, Any]) -> None:
        if bar := record.get("bar"):
            level, name, done, total = bar
            self.ranks[rank].add_bar(level, name, total, done, record["time"])
        elif "samples" in record:
            self.ranks[rank].add_samples(record["samples"], record["time"])
        elif "saved" in record:
            self.snapshots[record["saved"]] = record["step"]
        elif "rows" in record:
            self._add(rank, record["name"], record["ops"], np.frombuffer(record["rows"], RECORD))

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for rank in sorted(self._named) for name in self._named[rank]))

    def _metric(self, name: str) -> Metric:
        if name not in self._metrics:
            raise KeyError(f"no metric {name!r} was logged; the metrics are: {', '.join(self._names()) or 'none'}")
        return self._metrics[name]
