"""Growing columns of numbers: what one rank logged under one name, or the values combined over the ranks."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Series(NamedTuple):
    """One metric: ``steps, values = history["loss"]``.

    Attributes:
        steps: int64, shape (n,), in the order in which they were logged.
        values: float64, shape (n,).
    """

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def __repr__(self) -> str:
        if not len(self.steps):
            return "Series(no points)"
        ends = [f"{self.values[i]:.6g} at step {self.steps[i]}" for i in (0, -1)[: len(self.steps)]]
        return f"Series({len(self.steps):,} point{'s' * (len(self.steps) > 1)}: {' … '.join(ends)})"


class Table:
    """Columns that grow together; the first holds steps.

    Args:
        types: a letter per column: ``q`` int64, ``d`` float64, ``B`` uint8.
    """

    def __init__(self, types: str) -> None:
        self._columns = tuple(array(kind) for kind in types)

    def extend(self, *columns: npt.NDArray[Any]) -> None:
        for mine, new in zip(self._columns, columns, strict=True):
            mine.frombytes(new.astype(mine.typecode, copy=False).tobytes())

    def columns(self, start: int = 0, stop: int | None = None) -> tuple[npt.NDArray[Any], ...]:
        """A copy of these rows."""
        # No view may outlive this call: an array cannot grow while a view of its memory exists.
        return tuple(_view(column)[start:stop].copy() for column in self._columns)

    def take(self, index: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """These rows of one column."""
        return _view(self._columns[index])[rows]

    def drop_from(self, step: int) -> bool:
        """Drop the rows from this step on. Returns whether there were any.

        Steps may start again with every epoch: only the last stretch of rising steps is searched.
        """
        steps = _view(self._columns[0])
        falls = np.flatnonzero(steps[1:] < steps[:-1])
        start = int(falls[-1]) + 1 if len(falls) else 0
        kept = start + int(np.searchsorted(steps[start:], step))
        del steps  # an array cannot shrink while a view of its memory exists
        if kept == len(self):
            return False
        for column in self._columns:
            del column[kept:]
        return True

    def __len__(self) -> int:
        return len(self._columns[0])


class Column:
    """Everything that one rank logged under one name.

    Attributes:
        attempt_start: the first row logged since the last restart.
        cuts: how often rows were removed; rows that were read before a cut may be outdated.
    """

    def __init__(self) -> None:
        self._table = Table("qddBd")  # steps, values, weights, 1 where log() counted the step, times
        self.attempt_start = 0
        self.cuts = 0
        self._restarted = False  # and nothing was logged since

    def extend(self, records: npt.NDArray[Any]) -> None:
        if self._restarted:
            self._restarted = False
            self.cuts += self._table.drop_from(int(records["step"][0]))
            self.attempt_start = len(self)
        self._table.extend(*(records[name] for name in ("step", "value", "weight", "counted", "time")))

    def restart(self) -> None:
        """The function starts again: the steps that it repeats will replace the old ones."""
        self._restarted = True
        self.attempt_start = len(self)

    def series(self, start: int = 0, stop: int | None = None) -> Series:
        return Series(*self._table.columns(start, stop)[:2])

    def times(self, start: int) -> npt.NDArray[np.float64]:
        """When the rows from ``start`` on were logged, in seconds since 1970."""
        return self._table.columns(start)[4]

    def keys(self, start: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The steps from row ``start`` on, and whether log() counted each of them."""
        steps, _, _, counted, _ = self._table.columns(start)
        return steps, counted.astype(bool)

    def steps(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._table.take(0, rows)

    def values(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return self._table.take(1, rows)

    def weights(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return self._table.take(2, rows)

    def times_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return self._table.take(4, rows)

    def __len__(self) -> int:
        return len(self._table)


def _view(numbers: array[Any]) -> npt.NDArray[Any]:
    """The same memory as a numpy array. Drop the view before the array grows or shrinks."""
    return np.frombuffer(numbers, dtype=numbers.typecode)
