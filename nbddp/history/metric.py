"""One metric: the columns of all ranks that logged it, and their combined values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nbddp import wire
from nbddp.history.columns import Column, Series
from nbddp.history.combine import CombinedPoints, Counts, Spread
from nbddp.history.finite import FiniteCheck


@dataclass
class Metric:
    """One metric: its values on each rank, the values combined over the ranks, and their spread.

    Attributes:
        positions: by rank, how many other names that rank had logged before this one.
        changes: a counter that grows with every change.
        finite: where its values are NaN or infinite.
    """

    columns: dict[int, Column] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    changes: int = 0
    finite: FiniteCheck = field(default_factory=FiniteCheck)
    _ops: dict[int, list[int]] = field(default_factory=dict)  # by rank: each reduce= that it used, in order
    _combined: CombinedPoints = field(default_factory=CombinedPoints)
    _over: bool = False
    _broken_off: bool = False

    @property
    def op(self) -> int:
        """The lowest rank's first ``reduce=``, which counts for the whole run."""
        return self._ops[min(self._ops)][0]

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: metrics in the order of the lowest rank, whichever rank's bytes arrived first."""
        rank = min(self.positions)
        return rank, self.positions[rank]

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when points that were already handed out have changed."""
        return *((-1, 0) if self.op else (min(self.columns), self._lowest.cuts)), self._combined.version

    def add(self, rank: int, records: npt.NDArray[Any]) -> None:
        self.changes += 1
        self.columns.setdefault(rank, Column()).extend(records)
        self.finite.add(rank, records)
        ops = self._ops.setdefault(rank, [])
        if len(ops) != 1 or (records["op"] != ops[0]).any():
            ops += [op for op in dict.fromkeys(records["op"].tolist()) if op not in ops]

    def catch_up(self, world_size: int) -> None:
        """Combine the values that were added; call it before any of the reading methods below."""
        if self._over:
            self._combined.close(self.columns, self.op, world_size, broken_off=self._broken_off)
        else:
            self._combined.catch_up(self.columns, self.op, world_size)

    def series(self, start: int = 0, stop: int | None = None) -> Series:
        """The combined values; without ``reduce=`` those of the lowest rank that logged the metric."""
        if not self.op:
            return self._lowest.series(start, stop)
        return Series(*self._combined.series.columns(start, stop)[:2])

    def times(self, start: int = 0) -> npt.NDArray[np.float64]:
        """When the points of :meth:`series` were logged, in seconds since 1970; of several ranks, by the lowest."""
        return self._combined.series.columns(start)[2] if self.op else self._lowest.times(start)

    def spread(self, start: int = 0, stop: int | None = None) -> Spread:
        return Spread(*self._combined.spread.columns(start, stop))

    def counts(self) -> Counts:
        return Counts(*self._combined.counts.columns())

    def notices(self) -> list[str]:
        """Warnings about the values, each a line without the metric's name."""
        return [text for text in (self._reduce_notice(), self._counts_notice()) if text]

    def restart(self, world_size: int) -> None:
        self._combined.close(self.columns, self.op, world_size, broken_off=True)
        self._combined.restart()
        self.finite.clear()
        for column in self.columns.values():
            column.restart()

    def resize(self, world_size: int) -> None:
        self.changes += 1
        # The columns of ranks that are gone are kept where no remaining rank logged the metric.
        self.columns = {rank: c for rank, c in self.columns.items() if rank < world_size} or self.columns

    def settle(self, *, broken_off: bool) -> None:
        self.changes += 1
        self._over, self._broken_off = True, broken_off

    @property
    def _lowest(self) -> Column:
        return self.columns[min(self.columns)]

    def _reduce_notice(self) -> str:
        first = min(self._ops)
        for rank, (op, *later) in sorted(self._ops.items()):
            if op != self.op:
                return (
                    f"rank {first} logged it with reduce={_quoted(self.op)}, rank {rank} with reduce={_quoted(op)}; "
                    f"rank {first}'s counts for the whole run"
                )
            if later:
                return (
                    f"rank {rank} logged it with reduce={_quoted(op)} and later with reduce={_quoted(later[0])}; "
                    "the first counts for the whole run"
                )
        return ""

    def _counts_notice(self) -> str:
        steps, ranks, of = self.counts()
        fewer = ranks < of
        number, left_out = int(fewer.sum()), len(steps) - len(self._combined.series)
        if not number:
            return ""
        low, high, most = int(ranks[fewer].min()), int(ranks[fewer].max()), int(of[fewer].max())
        logged_by = f"only {low if low == high else f'{low} to {high}'} of {most} ranks"
        name = str(wire.REDUCE_NAMES[self.op])
        result = {"min": "the minimum", "max": "the maximum"}.get(name, f"the {name}")
        if number == len(steps) and low == high:
            return f"{logged_by} logged it; {result} is over {'that rank' if low == 1 else 'those ranks'}"
        part = f"{number:,} of {len(steps):,} steps were logged by {logged_by} (the first is step {steps[fewer][0]})"
        if not left_out:
            return f"{part}; there {result} is over the ranks that logged it"
        return f"{part}; the sums leave out {'these steps' if left_out == number else f'{left_out:,} of them'}"


def _quoted(op: int) -> str:
    return repr(wire.REDUCE_NAMES[op])
