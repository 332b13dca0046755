"""Kernel side. All that was logged under one name."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from nbddp import wire
from nbddp.kernel.band import Band
from nbddp.kernel.columns import Column, Combined


class Metric:
    """One name: its values on each rank, combined, and their band.

    Attributes:
        changes: grows with every change.
    """

    def __init__(self) -> None:
        self.columns: dict[int, Column] = {}
        self.combined: Combined | None = None
        self.changes = 0
        self._band = Band()

    @property
    def main(self) -> Column:
        """The metric's values: combined, or the lowest rank's that logged it."""
        return self.combined.column if self.combined else self.columns[min(self.columns)]

    @property
    def version(self) -> tuple[int, ...]:
        """Another one when points that were handed out have changed."""
        return -1 if self.combined else min(self.columns), self.main.cuts, self._band.version

    def band(self, *, over: bool) -> Band:
        self._band.catch_up(self.columns, over=over)
        return self._band

    def add(self, rank: int, records: npt.NDArray[Any], world_size: int) -> None:
        self.changes += 1
        self.columns.setdefault(rank, Column()).extend(records)
        op = int(records["op"][0])
        if op == wire.REDUCE_NONE:
            return
        self.combined = self.combined or Combined(op, world_size)
        for _, _, _, weight, step, value, at in records.tolist():
            self.combined.add(rank, step, value, weight, at)

    def restart(self) -> None:
        for column in self.columns.values():
            column.restart()
        if self.combined:
            self.combined.restart()

    def resize(self, world_size: int) -> None:
        self.changes += 1
        # What ranks alone have logged that are not among those that go on stays.
        self.columns = {rank: c for rank, c in self.columns.items() if rank < world_size} or self.columns
        if self.combined:
            self.combined.resize(world_size)

    def settle(self) -> None:
        self.changes += 1
        if self.combined:
            self.combined.settle()
