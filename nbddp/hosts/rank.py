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
        self._called = False
        self._host = host
        self.regrouped: wire.Regrouped | None = None  # of a session's rank
        self._lock = threading.Lock()
        self._metrics = bytearray()
        self._result = payload.open_block(f"result-{rank}")
        self._in_call = True  # False between the calls of a session

    @property
    def called(self) -> bool:
        """Whether its host has reported that the function was called."""
        return self._called

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
        if kind in ("metrics", "output", "result"):
            with self._lock:
                if self._in_call:
                    self._store(header, body)
        elif kind == "state":
            self.ready, self._called = header["ready"], header["called"]
        elif kind == "report":
            fields = {name: value for name, value in header.items() if name not in (*_ADDRESS, "type")}
            self.report = _REPORTS[header["type"]](**{**fields, "at": fields["at"] + offset_s})
        elif kind == "regrouped":
            self.regrouped = wire.Regrouped(tuple(header["void"]), header["models"], header["error"])
        elif kind in _SAID:
            self.said.append(_SAID[kind](**{name: value for name, value in header.items() if name not in _ADDRESS}))
        elif kind == "exit":
            self.orphaned, self.out_of_memory = header["orphaned"], header["out_of_memory"]
            self.exited_at, self.exitcode = header["at"] + offset_s, header["exitcode"]

    def _store(self, header: Header, body: bytes) -> None:
        if header["kind"] == "metrics":
            self._metrics += body
            self._logged += len(body)
        elif header["kind"] == "result":
            write_piece(self._result, body, header["at"], header["nbytes"])
        else:
            with contextlib.suppress(OSError):  # the disk is full: lost, as the rank's own writes would be
                while body:
                    body = body[os.write(self.output.fileno(), body) :]

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
        self.close_call()

    # ------------------------------------------------------------------ of a session

    def begin(self, output: RankOutput, *, is_new: bool) -> None:
        """Begin the next call of a session; ``is_new``: in a new process, since the last one has ended."""
        self.close_call()
        if is_new:
            super().__init__(self.rank, output, self.host)
        with self._lock:
            self._metrics.clear()
            self._result, self._in_call = payload.open_block(f"result-{self.rank}"), True
            self.output = output
            self._called, self.report, self._logged = False, None, 0

    def give_back(self) -> None:
        """Report a call that never began."""
        self.report = self.report or wire.Failed(0, time.monotonic(), "call", "KeyboardInterrupt")

    def close_call(self) -> None:
        """Close what belongs to a call that is over; what the rank prints from here on is lost."""
        with self._lock:
            if self._in_call:
                self._in_call = False
                os.close(self._result)

    def free(self) -> None:
        """Release the rank from a collective whose other ranks will not come."""
        self._order("free")

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in its main thread."""
        self._order("interrupt")

    def dismiss(self) -> None:
        """Let the rank exit."""
        self._order("dismiss")

    def kill(self) -> None:
        """End the rank and its children at once."""
        self._order("kill")

    def end(self) -> None:
        """Kill the rank if it lives."""
        if self.alive:
            self.kill()

    def regroup(self, number: int) -> None:
        """Have the rank join the process group of this number; ``regrouped`` is its answer."""
        self.regrouped = None
        self._order("regroup", number)

    def _order(self, what: str, *arguments: int) -> None:
        self._host.send({"kind": "rank", "rank": self.rank, "do": what, "arguments": arguments})
