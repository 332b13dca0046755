"""Kernel side. One metric's values as columns: of one rank, and combined over the ranks."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nbddp import wire

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


class Column:
    """Growing steps, values and times of one metric on one rank.

    Attributes:
        cuts: how often points were taken away again: what was read before may not hold any more.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.times = array("d")
        self.cuts = 0
        self._resumes = False

    def extend(self, records: npt.NDArray[Any]) -> None:
        if self._resumes:
            self._resume_at(int(records["step"][0]))
        self.steps.frombytes(records["step"].tobytes())
        self.values.frombytes(records["value"].tobytes())
        self.times.frombytes(records["time"].tobytes())

    def append(self, step: int, value: float, at: float) -> None:
        if self._resumes:
            self._resume_at(step)
        self.steps.append(step)
        self.values.append(value)
        self.times.append(at)

    def restart(self) -> None:
        """The function begins again: the steps that it repeats will take the place of the old ones."""
        self._resumes = True

    def series(self, start: int = 0, stop: int | None = None) -> Series:
        # No view of an array may outlive a call: while there is one the array cannot grow.
        return Series(view(self.steps)[start:stop].copy(), view(self.values)[start:stop].copy())

    def _resume_at(self, step: int) -> None:
        self._resumes = False
        kept = self._count_before(step)
        if kept < len(self):
            self.cuts += 1
            del self.steps[kept:], self.values[kept:], self.times[kept:]

    def _count_before(self, step: int) -> int:
        """Up to this step, looked for where steps rise for the last time: they may begin anew with every epoch."""
        steps = view(self.steps)
        falls = np.flatnonzero(steps[1:] < steps[:-1])
        start = int(falls[-1]) + 1 if len(falls) else 0
        return start + int(np.searchsorted(steps[start:], step))

    def __len__(self) -> int:
        return len(self.steps)


def view(numbers: array[Any]) -> npt.NDArray[Any]:
    """The same memory as numpy sees it; drop it before the array grows."""
    return np.frombuffer(numbers, dtype=np.int64 if numbers.typecode == "q" else np.float64)


class Combined:
    """A metric with ``reduce=``: one point per step, once every rank has logged it or gone past it."""

    def __init__(self, op: int, world_size: int) -> None:
        self.op = op
        self.column = Column()
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

    def resize(self, world_size: int) -> None:
        """There are so many ranks now; they have just begun again."""
        self._at = [self._at[0]] * world_size

    def restart(self) -> None:
        """The ranks begin again: what they had not logged together, they will log again."""
        self._waiting.clear()
        self._order.clear()
        self._at = [(max(self._at)[0] + 1, _BEFORE_ALL)] * len(self._at)
        self.column.restart()

    def settle(self) -> None:
        """The run is over: a step that not every rank reached is combined from those that did."""
        self._order.clear()
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
