"""A run without processes for a view to show, also in a kernel behind a real browser."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from nbddp import wire
from nbddp.history.history import History
from nbddp.panel.view import Earlier, RankStatus, Status


class Rank:
    """One rank's side of a history."""

    def __init__(self, history: History, rank: int = 0) -> None:
        self._history, self._rank, self._ids = history, rank, {}

    def log(self, name: str, steps: Iterable[int], values: Iterable[float], op: int = 0, at: float = 1.0) -> None:
        pack, ident = wire.RECORD.pack, self._id(name)
        records = [pack(wire.KIND_METRIC, op, ident, False, 1.0, s, v, at) for s, v in zip(steps, values)]
        self._history.feed(self._rank, b"".join(records))

    def bar(self, level: int, desc: str, total: int, done: int, at: float = 1.0) -> None:
        ident = self._id(desc)
        record = wire.RECORD.pack(wire.KIND_PROGRESS, 0, ident, False, level, total, done, at)
        self._history.feed(self._rank, record)

    def _id(self, name: str) -> int:
        if name not in self._ids:
            self._ids[name] = len(self._ids)
            data = name.encode()
            size = wire.NAME_PIECE_BYTES
            pieces = [data[i : i + size] for i in range(0, len(data), size)]
            for i, piece in enumerate(pieces):
                more = int(i + 1 < len(pieces))
                record = wire.NAME_PIECE.pack(wire.KIND_NAME, more, self._ids[name], piece)
                self._history.feed(self._rank, record)
        return self._ids[name]


@dataclasses.dataclass
class FakeRun:
    """A run as a view sees it, without processes."""

    history: History = dataclasses.field(default_factory=History)
    now: Status = dataclasses.field(default_factory=lambda: status("running"))
    printed: dict[int, str] = dataclasses.field(default_factory=dict)
    stops: int = 0
    earlier: Earlier | None = None

    def status(self) -> Status:
        return self.now

    def output(self, rank: int, position: int, limit: int) -> tuple[str, int, bool]:
        text = self.printed.get(rank, "")[position : position + limit]
        return text, position + len(text), True

    def stop(self) -> None:
        self.stops += 1


def status(state: str, ranks: int = 1, hosts: Iterable[str] = (), **more: Any) -> Status:
    """``hosts``: of each rank, in order; without them all are on one machine."""
    where = dict(enumerate(hosts))
    rows = tuple(RankStatus(rank, "cpu", state, host=where.get(rank, "")) for rank in range(ranks))
    options: dict[str, Any] = {"name": "train", "summary": "1 process · gloo", "notice": "", "seconds": 38.2}
    return Status(state=state, ranks=rows, **(options | more))
