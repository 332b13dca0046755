"""Notes where a metric stops being finite, rank by rank, while its records arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Broken(NamedTuple):
    """A metric whose newest values are NaN or infinite.

    Attributes:
        step: the first of these values' steps, on the rank where it is lowest.
        ranks: the ranks whose newest value is NaN or infinite, in order.
    """

    name: str
    step: int
    value: float
    ranks: list[int]


@dataclass
class FiniteCheck:
    """What is not finite in one metric. Reads each record once.

    Attributes:
        since: by rank, the step and the value from which on no value is finite.
        first_nan: by rank, the step of its first NaN.
    """

    since: dict[int, tuple[int, float]] = field(default_factory=dict)
    first_nan: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, records: npt.NDArray[Any]) -> None:
        steps, values = records["step"], records["value"]
        nans = np.flatnonzero(np.isnan(values))
        if len(nans):
            self.first_nan.setdefault(rank, int(steps[nans[0]]))
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite):
            self.since.pop(rank, None)
        start = int(finite[-1]) + 1 if len(finite) else 0
        if start < len(values):
            self.since.setdefault(rank, (int(steps[start]), float(values[start])))

    def clear(self) -> None:
        """The ranks start again."""
        self.since.clear()
        self.first_nan.clear()

    def broken(self, name: str) -> Broken | None:
        if not self.since:
            return None
        step, value = min(self.since.values(), key=lambda since: since[0])
        return Broken(name, step, value, sorted(self.since))

    def nan(self, name: str) -> Broken | None:
        """The metric's first NaN, even if finite values have followed."""
        if not self.first_nan:
            return None
        step = min(self.first_nan.values())
        return Broken(name, step, math.nan, sorted(rank for rank, at in self.first_nan.items() if at == step))
