"""Kernel side. Numbers as growing columns: what one rank logged under one name, or what it makes over the ranks."""

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


class Table:
    """Columns that grow together; the first holds steps.

    Args:
        types: of each column: ``q`` int64, ``d`` float64, ``B`` uint8.
    """

    def __init__(self, types: str) -> None:
        self._columns = tuple(array(kind) for kind in types)

    def extend(self, *columns: npt.NDArray[Any]) -> None:
        for mine, new in zip(self._columns, columns, strict=True):
            mine.frombytes(new.astype(mine.typecode, copy=False).tobytes())

    def columns(self, start: int = 0, stop: int | None = None) -> tuple[npt.NDArray[Any], ...]:
        """A copy of these rows."""
        # No view of an array may outlive a call: while there is one the array cannot grow.
        return tuple(_view(column)[start:stop].copy() for column in self._columns)

    def picked(self, index: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """These rows of one column."""
        return _view(self._columns[index])[rows]

    def cut(self, step: int) -> bool:
        """Drop the rows from this step on. Returns whether there were any.

        Steps may begin again with every epoch: only the last stretch in which they rise is looked at.
        """
        steps = _view(self._columns[0])
        falls = np.flatnonzero(steps[1:] < steps[:-1])
        start = int(falls[-1]) + 1 if len(falls) else 0
        kept = start + int(np.searchsorted(steps[start:], step))
        del steps
        return self.keep(kept)

    def keep(self, rows: int) -> bool:
        """Drop all but the first so many rows. Returns whether there were more."""
        if rows >= len(self):
            return False
        for column in self._columns:
            del column[rows:]
        return True

    def __len__(self) -> int:
        return len(self._columns[0])


class Column:
    """All that one rank logged under one name.

    Attributes:
        begin: where what it logged since the last restart begins.
        cuts: how often points were taken away again: what was read before may not hold any more.
    """

    def __init__(self) -> None:
        self._table = Table("qddB")  # steps, values, weights, 1 where log() counted the step
        self.begin = 0
        self.cuts = 0
        self._resumes = False

    def extend(self, records: npt.NDArray[Any]) -> None:
        if self._resumes:
            self._resumes = False
            self.cuts += self._table.cut(int(records["step"][0]))
            self.begin = len(self)
        self._table.extend(records["step"], records["value"], records["weight"], records["counted"])

    def restart(self) -> None:
        """The function begins again: the steps that it repeats will take the place of the old ones."""
        self._resumes = True
        self.begin = len(self)

    def series(self, start: int = 0, stop: int | None = None) -> Series:
        return Series(*self._table.columns(start, stop)[:2])

    def keys(self, start: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """From this row on, the steps, and where log() counted them."""
        steps, _, _, counted = self._table.columns(start)
        return steps, counted.astype(bool)

    def steps(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._table.picked(0, rows)

    def values(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return self._table.picked(1, rows)

    def weights(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return self._table.picked(2, rows)

    def __len__(self) -> int:
        return len(self._table)


def _view(numbers: array[Any]) -> npt.NDArray[Any]:
    """The same memory as numpy sees it; drop it before the array grows."""
    return np.frombuffer(numbers, dtype=numbers.typecode)
