"""Kernel side. Metrics as columns, progress and throughput: the numbers of a run, without any drawing."""

from __future__ import annotations

import csv
import heapq
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbddp import wire

if TYPE_CHECKING:
    import pandas as pd

    from nbddp.panel.picture import Picture

_RECORD_DTYPE = np.dtype(
    [("kind", "u1"), ("op", "u1"), ("id", "<u2"), ("weight", "<f4"), ("step", "<i8"), ("value", "<f8"), ("time", "<f8")]
)
_RATE_WINDOW_S = 5.0
_BEFORE_ALL = -(2**63)  # a step
_COMBINE: dict[int, Callable[[list[float]], float]] = {
    wire.REDUCE_SUM: lambda values: sum(values),
    wire.REDUCE_MIN: min,
    wire.REDUCE_MAX: max,
}


class Series(NamedTuple):
    """One metric: ``steps, values = history["loss"]``.

    Attributes:
        steps: int64, shape (n,), in the order in which they were logged.
        values: float64, shape (n,).
    """

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


class Spread(NamedTuple):
    """A metric's lowest and highest value over the ranks, at the steps that they share.

    Attributes:
        steps: int64, shape (n,).
        low, high: float64, shape (n,).
    """

    steps: npt.NDArray[np.int64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


class _Column:
    """Growing steps, values and times of one metric on one rank."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.times = array("d")

    def extend(self, records: npt.NDArray[Any]) -> None:
        self.steps.frombytes(np.ascontiguousarray(records["step"]).tobytes())
        self.values.frombytes(np.ascontiguousarray(records["value"]).tobytes())
        self.times.frombytes(np.ascontiguousarray(records["time"]).tobytes())

    def append(self, step: int, value: float, at: float) -> None:
        self.steps.append(step)
        self.values.append(value)
        self.times.append(at)

    def series(self, start: int = 0, stop: int | None = None) -> Series:
        steps, values = self.steps[start:stop], self.values[start:stop]
        return Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))

    def __len__(self) -> int:
        return len(self.steps)


class _Combined:
    """A metric with ``reduce=``: one point per step, once every rank has logged it or gone past it."""

    def __init__(self, op: int, world_size: int) -> None:
        self.op = op
        self.column = _Column()
        # By rank: the step it logged last, and how often its steps have begun again or stood still.
        self._at = [(0, _BEFORE_ALL)] * world_size
        self._order: list[tuple[int, int]] = []  # a heap of the steps that wait: one rank may be ahead
        self._waiting: dict[tuple[int, int], dict[int, tuple[float, float, float]]] = {}  # by rank: value, weight, time

    def add(self, rank: int, step: int, value: float, weight: float, at: float) -> None:
        round_, last = self._at[rank]
        self._at[rank] = key = (round_ + 1 if step <= last else round_, step)
        if key not in self._waiting:
            heapq.heappush(self._order, key)
        self._waiting.setdefault(key, {})[rank] = (value, weight, at)
        while self._order and self._is_complete(self._order[0]):
            self._emit(heapq.heappop(self._order))

    def restart(self) -> None:
        """The ranks begin again: what they had not logged together, they will log again."""
        self._waiting.clear()
        self._order.clear()
        self._at = [(max(self._at)[0] + 1, _BEFORE_ALL)] * len(self._at)

    def settle(self) -> None:
        """The run is over: a step that not every rank reached is combined from those that did."""
        for key in sorted(self._waiting):
            self._emit(key)

    def _is_complete(self, key: tuple[int, int]) -> bool:
        values = self._waiting[key]
        return all(rank in values or at > key for rank, at in enumerate(self._at))

    def _emit(self, key: tuple[int, int]) -> None:
        points = self._waiting.pop(key).values()
        values = [value for value, _, _ in points]
        if self.op == wire.REDUCE_MEAN:
            total = sum(weight for _, weight, _ in points)
            value = sum(v * w for v, w, _ in points) / total if total else float("nan")
        else:
            value = _COMBINE[self.op](values)
        self.column.append(key[1], value, max(at for _, _, at in points))


@dataclass
class Bar:
    """One ``progress()`` loop of one rank.

    Attributes:
        desc: what an item is, "" when the user did not say.
        total: number of items, None when not known.
        done: items finished.
        rate: items per second over the last seconds, None before there are two reports.
    """

    desc: str
    total: int | None = None
    done: int = 0
    rate: float | None = None
    _seen: list[tuple[float, int]] = field(default_factory=list, repr=False)

    def update(self, total: int | None, done: int, at: float) -> None:
        if done < self.done:  # the same loop again, one level further in
            self._seen.clear()
        self.total, self.done = total, done
        self.rate = _rate(self._seen, at, done) or self.rate

    @property
    def seconds_left(self) -> float | None:
        """By the present rate, or None when total or rate is not known."""
        if self.total is None or not self.rate:
            return None
        return max(0.0, (self.total - self.done) / self.rate)


@dataclass
class RankProgress:
    """How far one rank is.

    Attributes:
        step: the highest step it has logged, -1 before the first.
        advanced_at: unix time of its last record.
        step_seconds: mean time between its steps of late, None while unknown.
        bars: its open and last progress loops, outermost first.
    """

    step: int = -1
    advanced_at: float = 0.0
    step_seconds: float | None = None
    samples: int = 0
    samples_per_second: float | None = None
    bars: list[Bar] = field(default_factory=list)
    _steps_seen: list[tuple[float, int]] = field(default_factory=list, repr=False)
    _samples_seen: list[tuple[float, int]] = field(default_factory=list, repr=False)

    def saw_step(self, step: int, at: float) -> None:
        self.advanced_at = max(self.advanced_at, at)
        if step > self.step:
            self.step = step
            rate = _rate(self._steps_seen, at, step)
            self.step_seconds = 1 / rate if rate else self.step_seconds

    def saw_samples(self, samples: int, at: float) -> None:
        self.advanced_at = max(self.advanced_at, at)
        self.samples = samples
        self.samples_per_second = _rate(self._samples_seen, at, samples) or self.samples_per_second

    def saw_bar(self, level: int, desc: str, total: int | None, done: int, at: float) -> None:
        self.advanced_at = max(self.advanced_at, at)
        if level < len(self.bars) and self.bars[level].desc == desc:
            self.bars[level].update(total, done, at)
            return
        # Another loop on this level: what was inside the old one is over.
        self.bars[level:] = [Bar(desc)]
        self.bars[-1].update(total, done, at)


class _RankReader:
    """The raw bytes of one rank's metrics pipe, back into names and records."""

    def __init__(self) -> None:
        self._rest = b""
        self._names: dict[int, str] = {}
        self._pieces: dict[int, bytes] = {}

    def feed(self, data: bytes) -> npt.NDArray[Any]:
        data = self._rest + data
        whole = len(data) // wire.RECORD.size * wire.RECORD.size
        self._rest = data[whole:]
        records: npt.NDArray[Any] = np.frombuffer(data, dtype=_RECORD_DTYPE, count=whole // wire.RECORD.size)
        for i in np.flatnonzero(records["kind"] == wire.KIND_NAME):
            self._define(data[i * wire.RECORD.size : (i + 1) * wire.RECORD.size])
        return records

    def name(self, ident: int) -> str:
        return self._names[ident]

    def _define(self, record: bytes) -> None:
        _, more, ident, piece = wire.NAME_PIECE.unpack(record)
        text = self._pieces.pop(ident, b"") + piece
        if more:
            self._pieces[ident] = text
        else:
            self._names[ident] = text.rstrip(b"\0").decode("utf-8", "replace")


class History:
    """The metrics of one run, as columns.

    ``history["loss"]`` is the metric's ``Series``: with ``reduce=`` combined over the ranks, else rank
    0's values (the lowest rank's that logged it). All methods may be called while the run goes on.
    """

    def __init__(self, world_size: int = 1) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._readers: dict[int, _RankReader] = {}
        self._columns: dict[str, dict[int, _Column]] = {}  # name, rank
        self._combined: dict[str, _Combined] = {}
        self.ranks = [RankProgress() for _ in range(world_size)]

    # ------------------------------------------------------------------ for the user

    @property
    def names(self) -> list[str]:
        """The metrics logged so far, in the order of their first appearance."""
        with self._lock:
            return list(self._columns)

    def __getitem__(self, name: str) -> Series:
        """The metric's steps and values. Raises KeyError, naming what there is, for an unknown one."""
        with self._lock:
            return self._main_column(name).series()

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        """The number of metrics."""
        return len(self._columns)

    def __repr__(self) -> str:
        shown = [f"{name}: {len(self[name].steps)} points" for name in self.names]
        return f"History({', '.join(shown) or 'nothing logged'})"

    def by_rank(self, name: str) -> dict[int, Series]:
        """The values that each rank logged under this name."""
        with self._lock:
            self._main_column(name)
            return {rank: column.series() for rank, column in sorted(self._columns[name].items())}

    def latest(self) -> dict[str, float]:
        """The newest value of each metric."""
        with self._lock:
            newest = {name: self._main_column(name).values for name in self._columns}
            return {name: values[-1] for name, values in newest.items() if values}

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
        """The lowest and highest value over the ranks; empty when one rank alone logs this metric."""
        return self.new_spread(name, 0)[0]

    def plot(self) -> Picture:
        """The curves as a picture that shows itself: ``.svg`` is its text, ``.figure()`` one of matplotlib."""
        from nbddp.panel.picture import Picture

        return Picture(self)

    # ------------------------------------------------------------------ for a view, which has seen a part already

    def counts(self) -> dict[str, int]:
        """Of each metric, how many points there are: on every rank and combined."""
        with self._lock:
            return {
                name: sum(map(len, columns.values()))
                + (len(self._combined[name].column) if name in self._combined else 0)
                for name, columns in self._columns.items()
            }

    def new_points(self, name: str, start: int, stop: int | None = None) -> tuple[int, Series]:
        """The points from this one on, and whose they are: a rank's, or -1 when combined over the ranks.

        When that differs from the last time, the points counted so far were another rank's.
        """
        with self._lock:
            origin = -1 if name in self._combined else min(self._columns[name])
            return origin, self._main_column(name).series(start, stop)

    def new_spread(self, name: str, start: int, stop: int | None = None) -> tuple[Spread, int]:
        """The spread from this position on, and the position after it."""
        with self._lock:
            columns = list(self._columns[name].values())
            stop = min(map(len, columns)) if stop is None else stop
            if len(columns) < 2 or stop <= start:
                return Spread(np.empty(0, np.int64), np.empty(0), np.empty(0)), start
            parts = [column.series(start, stop) for column in columns]
        values = np.stack([part.values for part in parts])
        same = np.logical_and.reduce([part.steps == parts[0].steps for part in parts])
        return Spread(parts[0].steps[same], values[:, same].min(0), values[:, same].max(0)), stop

    # ------------------------------------------------------------------ for the run

    def feed(self, rank: int, data: bytes) -> None:
        """Take in bytes of that rank's metrics pipe, cut anywhere."""
        with self._lock:
            reader = self._readers.setdefault(rank, _RankReader())
            records = reader.feed(data)
            metrics = records[records["kind"] == wire.KIND_METRIC]
            for ident in dict.fromkeys(metrics["id"].tolist()):
                self._add(rank, reader.name(ident), metrics[metrics["id"] == ident])
            for record in records[records["kind"] > wire.KIND_METRIC]:
                self._add_progress(self.ranks[rank], reader.name(int(record["id"])), record)

    def restart(self, reason: str = "") -> None:
        """The ranks begin again, in new processes, after this failure."""
        with self._lock:
            self._readers.clear()
            self.ranks[:] = [RankProgress() for _ in self.ranks]
            for combined in self._combined.values():
                combined.restart()

    def settle(self) -> None:
        """The run is over: nothing more will be fed."""
        with self._lock:
            for combined in self._combined.values():
                combined.settle()

    def _add(self, rank: int, name: str, records: npt.NDArray[Any]) -> None:
        self._columns.setdefault(name, {}).setdefault(rank, _Column()).extend(records)
        op = int(records["op"][0])
        if op != wire.REDUCE_NONE:
            combined = self._combined.setdefault(name, _Combined(op, self._world_size))
            for record in records.tolist():
                _, _, _, weight, step, value, at = record
                combined.add(rank, step, value, weight, at)
        progress = self.ranks[rank]
        newest = int(records["step"].argmax())
        progress.saw_step(int(records["step"][newest]), float(records["time"][newest]))

    def _add_progress(self, progress: RankProgress, name: str, record: Any) -> None:
        at = float(record["time"])
        if record["kind"] == wire.KIND_SAMPLES:
            progress.saw_samples(int(record["value"]), at)
        elif record["kind"] == wire.KIND_PROGRESS:
            total = int(record["step"])
            progress.saw_bar(int(record["weight"]), name, None if total < 0 else total, int(record["value"]), at)

    def _main_column(self, name: str) -> _Column:
        if name in self._combined:
            return self._combined[name].column
        if name not in self._columns:
            raise KeyError(f"no metric {name!r} was logged; there is: {', '.join(self._columns) or 'none'}")
        by_rank = self._columns[name]
        return by_rank[min(by_rank)]


def _rate(seen: list[tuple[float, int]], at: float, count: int) -> float | None:
    """Counts per second over the last seconds; ``seen`` is the caller's memory."""
    seen.append((at, count))
    while len(seen) > 2 and at - seen[1][0] > _RATE_WINDOW_S:
        seen.pop(0)
    while len(seen) > 64:  # thin out, keeping the window's ends
        del seen[1]
    elapsed = at - seen[0][0]
    return (count - seen[0][1]) / elapsed if elapsed > 0 else None
