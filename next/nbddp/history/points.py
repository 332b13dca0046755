"""One metric: a row per point, a column per rank. Aligned when values arrive, combined when they are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

_STEP_BITS = 44  # of a key; the bits above count how often a rank's steps went back ("laps")
_ZERO = 1 << _STEP_BITS - 1  # of steps, which may be negative
_NEVER = -1 << 62
RECORD = np.dtype(
    [("time", "f8"), ("step", "i8"), ("counted", "i1"), ("weight", "f8"), ("value", "f8")]
)  # of one metric


class Series(NamedTuple):
    """One metric: ``steps, values = history["loss"]``."""

    steps: np.ndarray
    values: np.ndarray


class Points(NamedTuple):
    """The points of a metric: its value, and the lowest and highest value over the ranks."""

    steps: np.ndarray
    times: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Columns:
    """Arrays that grow together."""

    def __init__(self, **columns: np.ndarray) -> None:
        self._arrays = columns
        self.size = len(next(iter(columns.values())))

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name][: self.size]

    def resize(self, size: int) -> None:
        """New rows are zero."""
        for name, old in self._arrays.items():
            if size > len(old):
                self._arrays[name] = np.zeros((max(size, 2 * len(old), 64), *old.shape[1:]), old.dtype)
                self._arrays[name][: self.size] = old[: self.size]
            self._arrays[name][self.size : size] = 0
        self.size = size

    def insert(self, at: np.ndarray) -> np.ndarray:
        """Insert a zero row before each of these rows (ascending). Returns where the new rows are."""
        old, first = self.size, int(at[0])
        new = at + np.arange(len(at))
        self.resize(old + len(at))
        if first < old:
            moved = np.ones(self.size - first, bool)
            moved[new - first] = False
            for array in self._arrays.values():
                tail = array[first:old].copy()
                array[first : self.size] = 0
                array[first : self.size][moved] = tail
        return new


class Block:
    """What the ranks logged under one name between two restarts.

    A value's key tells its point: where log() counted the steps, the value's number on its rank, else the step. Keys
    ascend on every rank (a step that goes back begins a lap), so a rank's values are merged into the rows like a sorted
    list. A value with weight 0 was not logged. The same step again replaces the value.
    """

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.rows = Columns(key=_ints(), step=_ints(), time=_floats(), value=_floats(0, 0), weight=_floats(0, 0))
        self._at: dict[
            int, tuple[int, int, int, int]
        ] = {}  # by rank: last key, lap, counted values, and at least its row
        self._forget()

    def add(self, rank: int, records: np.ndarray) -> None:
        column = self._column(rank)
        last, lap, count, start = self._at.get(rank, (_NEVER, 0, 0, 0))
        counted = records["counted"] != 0
        place = np.where(counted, count + np.cumsum(counted) - 1, records["step"]) + _ZERO
        laps = lap + np.cumsum(place < np.append(last - (lap << _STEP_BITS), place[:-1]))
        keys = (laps << _STEP_BITS) + place
        at = start + self._rows_of(keys, start)
        self._at[rank] = int(keys[-1]), int(laps[-1]), count + int(counted.sum()), int(at[-1])
        self.rows["value"][at, column] = records["value"]
        self.rows["weight"][at, column] = records["weight"]
        mine = ~(self.rows["weight"][at, :column] > 0).any(1)  # no lower rank has logged it: its step and time count
        for name in ("step", "time"):
            self.rows[name][at[mine]] = records[name][mine]

    def complete(self, ranks: int) -> int:
        """How many rows this many ranks have passed; 0 if fewer have logged anything."""
        passed = min((at[0] for at in self._at.values()), default=_NEVER) if len(self._at) >= ranks else _NEVER
        return int(np.searchsorted(self.rows["key"], passed, "right"))

    def size_before(self, step: int) -> int:
        """How many rows stay if this step is logged again after a restart: only the last lap is searched."""
        keys = self.rows["key"]
        start = int(np.searchsorted(keys, keys[-1] >> _STEP_BITS << _STEP_BITS)) if len(keys) else 0
        return start + int(np.searchsorted(self.rows["step"][start:], step))

    def cut(self, size: int) -> None:
        self.rows.resize(size)
        self._forget()

    def _forget(self) -> None:
        self._combined = Columns(steps=_ints(), times=_floats(), values=_floats(), low=_floats(), high=_floats())
        self._settled = self._points = 0  # rows whose points do not change any more, and how many points they are

    def points(self, op: str | None, size: int) -> Points:
        """The first ``size`` rows combined over the ranks. Only what has changed since the last call is computed."""
        fresh = combine(self.rows, slice(self._settled, size), op)
        self._combined.resize(self._points + len(fresh.steps))
        for name, column in zip(Points._fields, fresh):
            self._combined[name][self._points :] = column
        settled = min(self.complete(1) - 1, size)  # the last complete row may still be replaced
        if settled > self._settled:
            self._points += len(combine(self.rows, slice(self._settled, settled), op).steps)
            self._settled = settled
        return Points(*(self._combined[name] for name in Points._fields))

    def _column(self, rank: int) -> int:
        if rank not in self.ranks:
            at = sum(each < rank for each in self.ranks)
            self.ranks.insert(at, rank)
            columns = {name: self.rows[name] for name in ("key", "step", "time")}
            columns |= {name: np.insert(self.rows[name], at, 0.0, axis=1) for name in ("value", "weight")}
            self.rows = Columns(**columns)
            self._forget()
        return self.ranks.index(rank)

    def _rows_of(self, keys: np.ndarray, start: int) -> np.ndarray:
        """The row of each key, counted from ``start``; a key without a row gets one, nearly always at the end."""
        known = self.rows["key"][start:]
        wanted = np.unique(keys)
        at = np.searchsorted(known, wanted)
        missing = at == len(known)
        missing[~missing] = known[at[~missing]] != wanted[~missing]
        if missing.any():
            new = self.rows.insert(start + at[missing])
            self.rows["key"][new] = wanted[missing]
        return np.searchsorted(self.rows["key"][start:], keys)


def combine(rows: Columns, part: slice, op: str | None) -> Points:
    """The points of these rows: over the ranks with an ``op``, else the lowest rank's."""
    values, weights = rows["value"][part], rows["weight"][part]
    there = weights > 0
    low = np.minimum.reduce(np.where(there, values, np.inf), axis=1)
    high = np.maximum.reduce(np.where(there, values, -np.inf), axis=1)
    kept: Any = slice(None)
    with np.errstate(all="ignore"):
        if op == "mean":
            value = (np.where(there, values, 0.0) * weights).sum(1) / weights.sum(1)
        elif op == "sum":
            value, kept = np.where(there, values, 0.0).sum(1), there.all(1)  # a part of the ranks is not the sum
        elif op is None:
            value, kept = values[:, 0], there[:, 0]
        else:
            value = low if op == "min" else high
    return Points(*(column[kept] for column in (rows["step"][part], rows["time"][part], value, low, high)))


class Metric:
    """One metric over all attempts."""

    def __init__(self, op: str | None) -> None:
        self.op = op
        self.over = False
        self.blocks: list[Block] = [Block()]

    def add(self, rank: int, records: np.ndarray) -> None:
        if rank not in self.blocks[-1].ranks:
            self._repeat_from(int(records["step"][0]))
        self.blocks[-1].add(rank, records)

    def restart(self, world_size: int) -> None:
        """The ranks start again: the points that not all of them had reached are left out."""
        block = self.blocks[-1]
        if block.ranks:
            if self.op or len(block.ranks) > 1:
                block.cut(block.complete(world_size if self.op else 2))
            self.blocks.append(Block())

    def points(self, world_size: int) -> Points:
        parts = [block.points(self.op, self._shown(block, world_size)) for block in self.blocks if block.ranks]
        return parts[0] if len(parts) == 1 else Points(*(np.concatenate(columns) for columns in zip(*parts)))

    def by_rank(self, rank: int) -> Series:
        parts = [(block.rows, block.ranks.index(rank)) for block in self.blocks if rank in block.ranks]
        there = [rows["weight"][:, column] > 0 for rows, column in parts]
        steps = [rows["step"][kept] for (rows, _), kept in zip(parts, there)]
        return Series(np.concatenate(steps), np.concatenate([r["value"][k, c] for (r, c), k in zip(parts, there)]))

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for block in self.blocks for rank in block.ranks})

    def _shown(self, block: Block, world_size: int) -> int:
        waits = self.op and not self.over and block is self.blocks[-1]
        return block.complete(world_size) if waits else block.rows.size

    def _repeat_from(self, step: int) -> None:
        """Drop what the attempts before had from this step on."""
        while len(self.blocks) > 1:
            before = self.blocks[-2]
            if kept := before.size_before(step):
                return before.cut(kept) if kept < before.rows.size else None
            del self.blocks[-2]


def _ints(*shape: int) -> np.ndarray:
    return np.empty(shape or 0, np.int64)


def _floats(*shape: int) -> np.ndarray:
    return np.empty(shape or 0, np.float64)
