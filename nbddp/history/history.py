"""``History``: the metrics of a run, its restarts and the progress of each rank. It draws nothing."""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from nbddp.errors import NbddpError
from nbddp.files import new_file
from nbddp.history.points import Metric, Points, Series, Spread
from nbddp.history.progress import RankProgress
from nbddp.history.recording import MAX_METRICS, Recording
from nbddp.history.records import Start, checked, read
from nbddp.text import in_a_line

_CHUNK = 10_000


@dataclass(frozen=True)
class Restart:
    """All ranks were restarted after a failure.

    Attributes:
        step: the first step that the lowest rank logged afterwards; None if none was logged.
        reason: the failure, e.g. "RankDied: rank 2 of 4 was killed by SIGKILL".
    """

    step: int | None
    reason: str


class Broken(NamedTuple):
    """A metric whose latest values are NaN or infinite on some ranks: since which step, and the first such value."""

    step: int
    value: float
    ranks: list[int]


class History(Mapping[str, Series]):
    """The metrics of one run: ``steps, values = history["loss"]``.

    With ``reduce=``, a metric is combined over the ranks; otherwise, the lowest rank that logged it counts. Steps
    that are repeated after a restart replace the old ones. All methods may be called while the run is active.

    Which values belong together: without ``step=``, the n-th value of each rank under this name; with ``step=``, those
    of the same step (if a rank's steps go back, as in each epoch, those of the same epoch). A point has the lowest
    rank's step, and appears once every rank has passed it. ``"mean"``, ``"min"``, and ``"max"`` are over the ranks
    that logged it; a ``"sum"`` leaves out points that some ranks skipped. Where a run failed or was stopped, the last
    points of a metric with ``reduce=``, which not every rank had reached, are left out. NaN on one rank gives NaN.
    """

    def __init__(self, recording: Recording | None = None) -> None:
        self._recording = recording or Recording()

    @property
    def ranks(self) -> list[RankProgress]:
        """The progress of each rank."""
        return self._recording.ranks

    @property
    def snapshots(self) -> dict[str, int | None]:
        """The last step before each snapshot, by path."""
        return self._recording.snapshots

    @property
    def first_nan(self) -> tuple[str, int, int] | None:
        """The first NaN that arrived: metric, step, rank."""
        return self._recording.first_nan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Load what :meth:`save` or the ranks of a job wrote (``python -m nbddp job.nbddp --metrics FILE``).

        While the job is running, this is what it has logged so far. A restarted job appends to its files.

        Raises:
            NbddpError: there is no such file, it's damaged, or it wasn't written by nbddp.
        """
        try:
            generations = read(path)
            recording = Recording(generations[0][0][0].world_size)
            for number, generation in enumerate(generations):
                first = generation[0][0]
                if number:
                    recording.restart(first.reason, first.world_size)
                for rank, (start, data) in sorted(generation.items()):
                    if start.first_step is not None:
                        recording.generations[-1].first_steps[rank] = start.first_step
                    records = checked(data)
                    while chunk := list(itertools.islice(records, _CHUNK)):
                        recording.add(rank, chunk)
            recording.settle(broken_off=first.broken_off)
            recording.metrics = {name: each for name, each in recording.metrics.items() if each.blocks}
        except Exception as error:  # the file may hold anything
            raise NbddpError(f"{os.fspath(path)} can't be read as metrics: {in_a_line(error)}") from error
        return cls(recording)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all metrics to a file, for :meth:`load`. Raises NbddpError if it can't be written."""
        recording = self._recording
        with new_file(path) as file, recording.lock:
            broken_off = recording.generations[-1].broken_off is not False
            # In order, with the ops of ranks whose points have all been repeated, too.
            ops = [(name, list(recording.metrics[name].ops.items())) for name in recording.names()]
            metrics = msgpack.packb({"metrics": ops})
            for began, generation in enumerate(recording.generations):
                for rank in range(generation.world_size):
                    first = generation.first_steps.get(rank)
                    head = Start(rank, generation.world_size, began, generation.reason, broken_off, first).head()
                    file.write(head + (b"" if began or rank else metrics))
                    for name in recording.names():
                        for block in recording.metrics[name].blocks:
                            if block.generation is generation and rank in block.ranks:
                                rows = block.by_rank(rank, slice(None))  # repeated ones, too: load() repeats them again
                                record = {"ops": recording.metrics[name].ops[rank], "first": block.first_steps[rank]}
                                file.write(msgpack.packb({"name": name, **record, "rows": rows.tobytes()}))

    @property
    def restarts(self) -> list[Restart]:
        """Every restart of all ranks, in order."""
        found: list[Restart] = []
        step = None
        with self._recording.lock:
            for generation in reversed(self._recording.generations[1:]):
                step = generation.first_steps[min(generation.first_steps)] if generation.first_steps else step
                found.insert(0, Restart(step, generation.reason))
        return found

    @property
    def broken(self) -> dict[str, Broken]:
        """The metrics that are NaN or infinite now, by name: since which step, the value there, on which ranks."""
        with self._recording.lock:
            broken = self._recording.broken
            found = {name: broken[name] for name in self._recording.names() if broken.get(name)}
            return {name: Broken(*min(since.values()), sorted(since)) for name, since in found.items()}

    @property
    def notices(self) -> list[str]:
        """What the ranks have logged differently, one line each.

        ``"loss: 2 of 50 steps were logged by only 3 of 4 ranks (the first is step 7); for these, the mean is over the
        ranks that logged it"``
        """
        with self._recording.lock:
            metrics, names = self._recording.metrics, self._recording.names()
            found = [f"{name}: {text}" for name in names for text in _logged_differently(metrics[name])]
            left_out = len(self._recording.left_out)
        if left_out:
            more = "1 more name was" if left_out == 1 else f"{left_out:,} more names were"
            limit = f"only the first {MAX_METRICS:,} metrics are kept"
            found.insert(0, f"{limit}; {more} logged. Do the names include a step?")
        return found

    def __getitem__(self, name: str) -> Series:
        points = self.points(name)
        return Series(points.steps, points.values)

    def __contains__(self, name: object) -> bool:
        return name in self._recording.metrics

    def __iter__(self) -> Iterator[str]:
        """Rank 0's metrics in its order, then those of the other ranks."""
        with self._recording.lock:
            return iter(self._recording.names())

    def __len__(self) -> int:
        return len(self._recording.metrics)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        shown = [f"{name}: {(n := len(series.steps))} point{'s' * (n != 1)}" for name, series in self.items()]
        return f"History({', '.join(shown) or 'nothing logged'})"

    def points(self, name: str) -> Points:
        """Steps, times (Unix seconds), values, and the lowest and highest value over the ranks."""
        with self._recording.lock:
            return self._recording.metric(name).points()

    def by_rank(self, name: str) -> dict[int, Series]:
        """The values that each rank logged under this name, at the steps of the metric's points."""
        with self._recording.lock:
            return self._recording.metric(name).by_rank()

    def spread(self, name: str) -> Spread:
        """The lowest and highest value over the ranks, for the steps that every rank with this metric has logged.

        Once the run is over, for the steps that at least two ranks have logged.
        """
        with self._recording.lock:
            return self._recording.metric(name).spread()

    def latest(self) -> dict[str, float]:
        """The latest value of each metric."""
        with self._recording.lock:
            names = self._recording.names()
            return {name: value for name in names if (value := self._recording.metrics[name].latest()) is not None}

    def to_pandas(self) -> Any:
        """A DataFrame with one row per step and one column per metric (NaN for a missing value)."""
        import pandas

        columns = {name: pandas.Series(values, index=steps) for name, (steps, values) in self.items()}
        columns = {name: column[~column.index.duplicated(keep="last")] for name, column in columns.items()}
        return pandas.DataFrame(columns).sort_index().rename_axis("step")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV file: a line per step, a column per metric; a missing value is an empty field.

        A metric named ``step`` is the column ``step.1``. Raises NbddpError if the file can't be written.
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


def _logged_differently(metric: Metric) -> Iterator[str]:
    """Yield where the ranks have logged this metric differently, without its name."""
    first, op = min(metric.ops), metric.op
    if others := [(rank, each) for rank, ops in sorted(metric.ops.items()) for each in ops if each != op]:
        rank, other = others[0]
        who, used = ("later", "the first") if rank == first else (f"rank {rank}", f"rank {first}'s")
        both = f"rank {first} logged it with reduce={op!r} and {who} with reduce={other!r}"
        yield f"{both}; {used} is used for the whole run"
    if op is None:
        return
    steps, ranks, of = metric.counts()
    fewer = ranks < of
    if not fewer.any():
        return
    low, high, most = ranks[fewer].min(), ranks[fewer].max(), of[fewer].max()
    logged_by = f"only {low if low == high else f'{low} to {high}'} of {most} ranks"
    result = {"min": "the minimum", "max": "the maximum"}.get(op, f"the {op}")
    if fewer.all() and low == high:
        yield f"{logged_by} logged it; {result} is over {'that rank' if low == 1 else 'those ranks'}"
        return
    were, these = ("was", "this one") if fewer.sum() == 1 else ("were", "these")
    number, left_out = int(fewer.sum()), len(steps) - len(metric.points().steps)
    part = f"{number:,} of {len(steps):,} steps {were} logged by {logged_by} (the first is step {steps[fewer][0]})"
    if left_out:
        yield f"{part}; the sums leave out {these if left_out == number else f'{left_out:,} of them'}"
    else:
        yield f"{part}; for {these}, {result} is over the ranks that logged it"
