"""One metric: a row per point, a column per rank. Aligned when values arrive, combined when they are read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# Of one metric and rank. place: what a value pairs by within its lap; NaN if log() has counted the steps.
RECORD = np.dtype([("time", "f8"), ("step", "i8"), ("place", "f8"), ("weight", "f8"), ("value", "f8")])


class Series(NamedTuple):
    """One metric: ``steps, values = history["loss"]``."""

    steps: np.ndarray
    values: np.ndarray

    def __repr__(self) -> str:
        count = len(self.steps)
        ends = " … ".join(f"{self.values[i]:g} at step {self.steps[i]}" for i in sorted({0, count - 1}) if count)
        return f"Series({count or 'no'} point{'s' * (count != 1)}{': ' * bool(ends)}{ends})"


class Points(NamedTuple):
    """The points of a metric: its value, and the lowest and highest value over the ranks."""

    steps: np.ndarray
    times: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Spread(NamedTuple):
    """The lowest and highest value over the ranks."""

    steps: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass
class Generation:
    """All ranks, from one start to the next.

    Attributes:
        first_steps: that each rank logged.
        broken_off: not every rank has reached the last points; None while it runs.
    """

    reason: str
    world_size: int
    first_steps: dict[int, int] = field(default_factory=dict)
    broken_off: bool | None = None


_OVER_RANKS = ("step", "time", "combined", "low", "high")  # columns of a block, in the order of ``Points``


class Columns:
    """Arrays that grow together."""

    def __init__(self, **columns: np.ndarray) -> None:
        self._arrays = columns
        self.size = len(next(iter(columns.values())))

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name][: self.size]

    def insert(self, at: np.ndarray) -> np.ndarray:
        """Insert a zero row before each of these rows (ascending). Returns where the new rows are."""
        old, first = self.size, int(at[0])
        self.size += len(at)
        for name, array in self._arrays.items():
            if self.size > len(array):
                grown = np.zeros((max(self.size, 2 * len(array), 64), *array.shape[1:]), array.dtype)
                grown[:old] = array[:old]
                self._arrays[name] = array = grown
            if first < old:
                array[first : self.size] = np.insert(array[first:old], at - first, 0, axis=0)
        return at + np.arange(len(at))


class Block:
    """What the ranks logged under one name between two restarts.

    A value's key tells its point: how often the rank's steps have gone back ("laps"), and its place, which is its step,
    or its number on the rank where log() counts the steps. Keys ascend on every rank, so a rank's values are merged
    into the rows like a sorted list. The same step again replaces the value. A key is a complex number, which numpy
    sorts by its real part, then by its imaginary part.

    Weights are stored with a minus: 0.0 is a value that was not logged, -0.0 one with weight 0.

    What a row is over the ranks (combined, low, high, and how many have logged it) is computed when somebody reads it.

    Attributes:
        first_steps: by rank, from which step on it repeats the blocks before; also those that are no longer there.
        kept: how many rows a later generation has not repeated; None before a later one.
        taken: how many points log_to= has got.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.first_steps: dict[int, int] = {}
        self.kept: int | None = None
        self.taken = 0
        self.ranks: list[int] = []
        by_rank, one = np.empty((0, 0)), np.empty(0)
        columns = dict.fromkeys(_OVER_RANKS, one) | {"step": one.astype(int), "logged": one.astype(int)}
        self.rows = Columns(key=one.astype(complex), **columns, value=by_rank, weight=by_rank)
        # By rank: lap and place of its last key, how many values were counted, and a row that is not after its last.
        self._at: dict[int, tuple[int, float, int, int]] = {}
        self._op: str | None = None
        self._current = 0  # how many rows are combined with that op, and have not changed since

    def add(self, rank: int, records: np.ndarray) -> None:
        column = self._column(rank)
        lap, place, count, start = self._at.get(rank, (0, -np.inf, 0, 0))
        counted = np.isnan(records["place"])
        places = np.where(counted, count + np.cumsum(counted) - 1, records["place"])
        laps = lap + np.cumsum(places < np.append(place, places[:-1]))
        at = start + self._rows_of(laps + 1j * places, start)
        self._at[rank] = int(laps[-1]), float(places[-1]), count + int(counted.sum()), int(at[-1])
        self._current = min(self._current, int(at[0]))
        self.rows["value"][at, column] = records["value"]
        self.rows["weight"][at, column] = -records["weight"]
        mine = ~np.signbit(self.rows["weight"][at, :column]).any(1)  # the lowest rank's step and time count
        for name in ("step", "time"):
            self.rows[name][at[mine]] = records[name][mine]

    def complete(self) -> int:
        """How many rows all ranks that log this metric have passed."""
        lap, place = min(at[:2] for at in self._at.values())
        return int(np.searchsorted(self.rows["key"], complex(lap, place), "right"))

    def repeat_from(self, step: int) -> None:
        """A later generation logs this step again: only the last lap is searched for it."""
        keys = self.rows["key"]
        start = int(np.searchsorted(keys, complex(keys[-1].real, -np.inf)))
        again = np.flatnonzero(self.rows["step"][start:] >= step)
        self.kept = min(start + int(again[0]) if len(again) else self.rows.size, self.size(None))

    def size(self, op: str | None) -> int:
        """How many rows are shown. Values with an ``op`` wait for the other ranks."""
        size = self.rows.size if self.kept is None else self.kept
        if op is None:
            return size
        if self.generation.broken_off is None:
            return self.complete() if len(self.ranks) >= self.generation.world_size else 0
        return min(size, self.complete()) if self.generation.broken_off else size

    def points(self, op: str | None, size: int | None = None) -> Points:
        """The rows combined over the ranks with an ``op``, else the lowest rank's."""
        rows, logged = self.over_ranks(self.size(op) if size is None else size, op)
        if op not in ("sum", None):
            return rows
        kept = logged == len(self.ranks) if op == "sum" else np.signbit(self.rows["weight"][: len(logged), 0])
        return rows if kept.all() else Points(*(column[kept] for column in rows))

    def take(self, op: str | None) -> Points:
        """The points that are new since the last call and will not change any more."""
        size = self.size(op)
        if self.generation.broken_off is None:
            size = min(self.complete() - 1, size)  # the last complete row may still be replaced
            if op is None and self.ranks[0] != 0:
                size = 0  # rank 0 may still log it, and then its values count
        points = self.points(op, size)
        start, self.taken = self.taken, max(len(points.steps), self.taken)
        return Points(*(column[start:] for column in points))

    def spread(self, op: str | None) -> Spread:
        """Of the rows that all of its ranks have logged; at the end, that two have logged."""
        broken_off = self.generation.broken_off
        rows, logged = self.over_ranks(min(self.size(None), self.complete()) if broken_off else self.size(None), op)
        kept = logged >= max(2, len(self.ranks) if broken_off is None else 2)
        return Spread(*(column[kept] for column in (rows.steps, rows.low, rows.high)))

    def over_ranks(self, size: int, op: str | None) -> tuple[Points, np.ndarray]:
        """What the first rows are over the ranks, also if they are no points; and how many ranks have logged each."""
        if op != self._op:
            self._op, self._current = op, 0
        if size > self._current:
            self._combine(slice(self._current, size), op)
            self._current = size
        return Points(*(self.rows[name][:size] for name in _OVER_RANKS)), self.rows["logged"][:size]

    def by_rank(self, rank: int, rows: slice) -> np.ndarray:
        """That rank's records."""
        column = self.ranks.index(rank)
        there = np.signbit(self.rows["weight"][rows, column])
        found = np.empty(int(there.sum()), RECORD)
        for name in ("time", "step"):
            found[name] = self.rows[name][rows][there]
        found["place"] = self.rows["key"].imag[rows][there]
        found["weight"] = -self.rows["weight"][rows, column][there]
        found["value"] = self.rows["value"][rows, column][there]
        return found

    def _combine(self, rows: slice, op: str | None) -> None:
        values, weights = self.rows["value"][rows], -self.rows["weight"][rows]
        there = np.signbit(self.rows["weight"][rows])  # which ranks have logged them
        low = np.minimum.reduce(np.where(there, values, np.inf), axis=1)
        high = np.maximum.reduce(np.where(there, values, -np.inf), axis=1)
        with np.errstate(all="ignore"):
            if op == "mean":
                combined = (np.where(there, values, 0.0) * weights).sum(1) / weights.sum(1)
            elif op == "sum":
                combined = np.where(there, values, 0.0).sum(1)
            else:
                combined = {None: values[:, 0], "min": low, "max": high}[op]
        for name, column in {"combined": combined, "low": low, "high": high, "logged": there.sum(1)}.items():
            self.rows[name][rows] = column

    def _column(self, rank: int) -> int:
        if rank not in self.ranks:
            at = sum(each < rank for each in self.ranks)
            self.ranks.insert(at, rank)
            columns = {name: self.rows[name] for name in ("key", "logged", *_OVER_RANKS)}
            columns |= {name: np.insert(self.rows[name], at, 0.0, axis=1) for name in ("value", "weight")}
            self.rows, self._current = Columns(**columns), 0
        return self.ranks.index(rank)

    def _rows_of(self, keys: np.ndarray, start: int) -> np.ndarray:
        """The row of each key (ascending), counted from ``start``; a key without one gets a row."""
        known = self.rows["key"][start:]
        wanted = keys[np.append(True, keys[1:] != keys[:-1])]
        at = np.searchsorted(known, wanted)
        missing = at == np.searchsorted(known, wanted, "right")
        if missing.any():
            new = self.rows.insert(start + at[missing])
            self.rows["key"][new] = wanted[missing]
        return np.searchsorted(self.rows["key"][start:], keys)


class Metric:
    """One metric over all generations.

    Attributes:
        heard: only autolog has written it.
        ops: by rank, with which ``reduce=`` it was logged.
        blocks: one for each generation that has logged it, without those that a later one has repeated wholly.
    """

    def __init__(self, *, heard: bool = False, ops: dict[int, list[str | None]] | None = None) -> None:
        self.heard = heard
        self.ops = ops or {}
        self.blocks: list[Block] = []

    @property
    def op(self) -> str | None:
        return self.ops[min(self.ops)][0]

    def add(self, rank: int, ops: Iterable[str | None], rows: np.ndarray, generation: Generation, first: int) -> None:
        """Add what a rank has logged. ``first`` is the step of its first value in this generation."""
        known = self.ops.setdefault(rank, [])
        known += [op for op in ops if op not in known]
        if not self.blocks or self.blocks[-1].generation is not generation:
            self.blocks.append(Block(generation))
        block = self.blocks[-1]
        if rank not in block.ranks:
            block.first_steps[rank] = self._repeat_from(first)
        block.add(rank, rows)

    def points(self) -> Points:
        return Points(*_joined([block.points(self.op) for block in self.blocks]))

    def take(self) -> Points:
        return Points(*_joined([block.take(self.op) for block in self.blocks]))

    def latest(self) -> float | None:
        """The newest value, without a copy of all."""
        parts = (block.points(self.op).values for block in reversed(self.blocks))
        return next((float(values[-1]) for values in parts if len(values)), None)

    def spread(self) -> Spread:
        return Spread(*_joined([block.spread(self.op) for block in self.blocks]))

    def counts(self) -> Iterator[np.ndarray]:
        """Steps, also those that a sum leaves out; how many ranks have logged each, and of how many."""
        parts = []
        for block in self.blocks:
            rows, logged = block.over_ranks(block.size(self.op), self.op)
            parts.append((rows.steps, logged, np.full_like(logged, block.generation.world_size)))
        return _joined(parts)

    def by_rank(self) -> dict[int, Series]:
        found = {}
        for rank in sorted({rank for block in self.blocks for rank in block.ranks}):
            blocks = [block for block in self.blocks if rank in block.ranks]
            records = np.concatenate([block.by_rank(rank, slice(block.size(None))) for block in blocks])
            found[rank] = Series(records["step"].copy(), records["value"].copy())
        return found

    def _repeat_from(self, step: int) -> int:
        """Leave out what the generations before had from this step on, and return from which step in all.

        That's a smaller one if a generation is left out wholly that had repeated more of those before it.
        """
        first = step
        while len(self.blocks) > 1:
            self.blocks[-2].repeat_from(step)
            if self.blocks[-2].kept:
                break
            first = min(first, *self.blocks[-2].first_steps.values())
            del self.blocks[-2]
        return first


def _joined(parts: Iterable[tuple[np.ndarray, ...]]) -> Iterator[np.ndarray]:
    """New arrays."""
    return (np.concatenate(columns) for columns in zip(*parts))
