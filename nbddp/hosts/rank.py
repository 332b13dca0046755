"""One rank on another host, as its host's agent reports it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from nbddp import payload, wire
from nbddp.hosts.frames import Header
from nbddp.hosts.host import Host
from nbddp.launch.interface import RankBase
from nbddp.launch.output import RankOutput
from nbddp.payload.block import write_piece

_LOST_EXIT = 255
_ADDRESS = ("kind", "rank")
_SAID: dict[str, Any] = {"asks": wire.Asks, "goes on": wire.GoesOn}  # by the rank's debugger
_TOLD = {wire.Look: "look", wire.HoldTimeouts: "hold timeouts"}
_REPORTS: dict[str, Any] = {kind.__name__: kind for kind in wire.REPORTS}


class RemoteRank(RankBase):
    """One rank on another host."""

    def __init__(self, rank: int, host: Host, output: RankOutput) -> None:
        super().__init__(rank, output, host.name)
        self.pid = 0  # on its host
        self._host = host
        self._lock = threading.Lock()
        self._metrics = bytearray()
        self._result = payload.open_block(f"result-{rank}")

    def read_metrics(self) -> bytes:
        """Return the metric records that have arrived since the last call."""
        with self._lock:
            data = bytes(self._metrics)
            self._metrics.clear()
            return data

    def unpack_result(self, nbytes: int, known: Sequence[Any]) -> payload.Unpacked:
        """Unpickle the rank's result, which is as trusted as its host: the user has logged in there."""
        return payload.unpack(self._result, nbytes, known=known)

    def receive(self, header: Header, body: bytes, offset_s: float) -> None:
        """Process a frame about this rank; ``offset_s`` is added to its host's times to get ours."""
        kind = header["kind"]
        if self.lost:
            return
        if kind == "metrics":
            with self._lock:
                self._metrics += body
            self._logged += len(body)
        elif kind == "output":
            with contextlib.suppress(OSError):  # the disk is full: lost, as the rank's own writes would be
                while body:
                    body = body[os.write(self.output.fileno(), body) :]
        elif kind == "result":
            write_piece(self._result, body, header["at"], header["nbytes"])
        elif kind == "state":
            self.ready, self.called = header["ready"], header["called"]
        elif kind == "report":
            fields = {name: value for name, value in header.items() if name not in (*_ADDRESS, "type")}
            self.report = _REPORTS[header["type"]](**{**fields, "at": fields["at"] + offset_s})
        elif kind in _SAID:
            self.said.append(_SAID[kind](**{name: value for name, value in header.items() if name not in _ADDRESS}))
        elif kind == "exit":
            self.orphaned, self.out_of_memory = header["orphaned"], header["out_of_memory"]
            self.exited_at, self.exitcode = header["at"] + offset_s, header["exitcode"]

    def answer(self, line: str | None) -> None:
        """Answer the debugger of the rank, which has asked; None: nobody can."""
        self._host.send({"kind": "answer", "rank": self.rank, "line": line})

    def tell_debugger(self, message: wire.Look | wire.HoldTimeouts) -> None:
        """Send a message to the rank while it is in its function."""
        self._host.send({"kind": _TOLD[type(message)], "rank": self.rank})

    def mark_lost(self, why: str) -> None:
        """Mark a living rank as lost, since its host can no longer report on it."""
        if self.alive:
            self.lost, self.exited_at, self.exitcode = why, time.monotonic(), _LOST_EXIT

    def close(self) -> None:
        """Close its file descriptors."""
        os.close(self._result)
