"""Kernel side. One rank on another host, as that host tells of it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from nbddp import payload, wire
from nbddp.block import write_piece
from nbddp.frames import Head
from nbddp.kernel.crew import Rank
from nbddp.kernel.host import Host
from nbddp.kernel.output import RankOutput

_LOST_EXIT = 255
_REPORTS: dict[str, Any] = {"Finished": wire.Finished, "Failed": wire.Failed, "Exited": wire.Exited}


class FarWorker(Rank):
    """One rank on another host."""

    def __init__(self, rank: int, host: Host, output: RankOutput) -> None:
        super().__init__(rank, output, host.name)
        self.pid = 0  # there
        self._lock = threading.Lock()
        self._metrics = bytearray()
        self._result = payload.open_block(f"result-{rank}")

    def read_metrics(self) -> bytes:
        """The metric records that have come."""
        with self._lock:
            data = bytes(self._metrics)
            self._metrics.clear()
            return data

    def unpack_result(self, nbytes: int, known: Sequence[Any]) -> payload.Unpacked:
        """The object that it left; its host is one that the user logged in to."""
        return payload.unpack(self._result, nbytes, known=known)

    def take(self, head: Head, body: bytes, offset_s: float) -> None:
        """News of it; ``offset_s``: from its host's clock to ours."""
        kind = head["kind"]
        if self.lost:
            return
        if kind == "metrics":
            with self._lock:
                self._metrics += body
            self._logged += len(body)
        elif kind == "output":
            self._print(body)
        elif kind == "result":
            write_piece(self._result, body, head["at"], head["nbytes"])
        elif kind == "state":
            self.ready, self.called = head["ready"], head["called"]
        elif kind == "report":
            said = {name: value for name, value in head.items() if name not in ("kind", "type", "rank")}
            self.report = _REPORTS[head["type"]](**{**said, "at": said["at"] + offset_s})
        elif kind == "exit":
            self.orphaned, self.out_of_memory = head["orphaned"], head["out_of_memory"]
            self.exited_at, self.exitcode = head["at"] + offset_s, head["exitcode"]

    def lose(self, why: str) -> None:
        """Nothing more can be heard of it."""
        if self.alive:
            self.lost, self.exited_at, self.exitcode = why, time.monotonic(), _LOST_EXIT

    def close(self) -> None:
        """Close its file descriptors."""
        os.close(self._result)

    def _print(self, body: bytes) -> None:
        with contextlib.suppress(OSError):  # the disk is full: lost, as the rank's own writes would be
            while body:
                body = body[os.write(self.output.fileno(), body) :]
