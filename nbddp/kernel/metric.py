"""Kernel side. All that was logged under one name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from nbddp import wire
from nbddp.kernel.columns import Column, Series
from nbddp.kernel.pairs import Counts, Pairs, Spread


@dataclass
class Metric:
    """One name: its values on each rank, what they make over the ranks, and their spread.

    Attributes:
        numbers: by rank, how many other names that rank had logged before this one.
        changes: grows with every change.
    """

    columns: dict[int, Column] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    changes: int = 0
    _ops: dict[int, list[int]] = field(default_factory=dict)  # by rank, the different ones in their order
    _pairs: Pairs = field(default_factory=Pairs)
    _over: bool = False
    _broken_off: bool = False

    @property
    def op(self) -> int:
        """The first of the lowest rank: it counts for the whole run."""
        return self._ops[min(self._ops)][0]

    @property
    def order(self) -> tuple[int, int]:
        """Sorts metrics as the lowest rank has logged them, whoever's bytes came first."""
        rank = min(self.numbers)
        return rank, self.numbers[rank]

    @property
    def version(self) -> tuple[int, ...]:
        """Another one when points that were handed out have changed."""
        return *((-1, 0) if self.op else (min(self.columns), self._lowest.cuts)), self._pairs.version

    def add(self, rank: int, records: npt.NDArray[Any]) -> None:
        self.changes += 1
        self.columns.setdefault(rank, Column()).extend(records)
        ops = self._ops.setdefault(rank, [])
        if len(ops) != 1 or (records["op"] != ops[0]).any():
            ops += [op for op in dict.fromkeys(records["op"].tolist()) if op not in ops]

    def catch_up(self, world_size: int) -> None:
        """Take in what was added, before any of the reading methods below."""
        if self._over:
            self._pairs.close(self.columns, self.op, world_size, broken_off=self._broken_off)
        else:
            self._pairs.catch_up(self.columns, self.op, world_size)

    def series(self, start: int = 0, stop: int | None = None) -> Series:
        """Combined, or the lowest rank's that logged it."""
        return Series(*self._pairs.series.columns(start, stop)) if self.op else self._lowest.series(start, stop)

    def spread(self, start: int = 0, stop: int | None = None) -> Spread:
        return Spread(*self._pairs.spread.columns(start, stop))

    def counts(self) -> Counts:
        return Counts(*self._pairs.counts.columns())

    def notices(self) -> list[str]:
        """What a reader of the values has to know, each a line without the name."""
        return [text for text in (self._reduce_notice(), self._counts_notice()) if text]

    def restart(self, world_size: int) -> None:
        self._pairs.close(self.columns, self.op, world_size, broken_off=True)
        self._pairs.restart()
        for column in self.columns.values():
            column.restart()

    def resize(self, world_size: int) -> None:
        self.changes += 1
        # What ranks alone have logged that are not among those that go on stays.
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
                    f"rank {first} logged it with reduce={_name(self.op)}, rank {rank} with reduce={_name(op)}; "
                    f"rank {first}'s counts for the whole run"
                )
            if later:
                return (
                    f"rank {rank} logged it with reduce={_name(op)} and later with reduce={_name(later[0])}; "
                    "the first counts for the whole run"
                )
        return ""

    def _counts_notice(self) -> str:
        steps, ranks, of = self.counts()
        fewer = ranks < of
        number, left_out = int(fewer.sum()), len(steps) - len(self._pairs.series)
        if not number:
            return ""
        low, high, most = int(ranks[fewer].min()), int(ranks[fewer].max()), int(of[fewer].max())
        who = f"only {low if low == high else f'{low} to {high}'} of {most} ranks"
        if number == len(steps) and low == high:
            return f"{who} logged it; {_what(self.op)} is over {'that rank' if low == 1 else 'those ranks'}"
        many = f"{number:,} of {len(steps):,} steps were logged by {who} (the first is step {steps[fewer][0]})"
        if not left_out:
            return f"{many}; there {_what(self.op)} is over the ranks that logged it"
        return f"{many}; the sums leave out {'these steps' if left_out == number else f'{left_out:,} of them'}"


def _name(op: int) -> str:
    return repr(wire.REDUCE_NAMES[op])


def _what(op: int) -> str:
    return {"min": "the minimum", "max": "the maximum"}.get(name := str(wire.REDUCE_NAMES[op]), f"the {name}")
