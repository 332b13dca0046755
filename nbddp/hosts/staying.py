"""The ranks of a session on several hosts; the counterpart of ``kernel.site.StayingCrew``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nbddp import wire
from nbddp.hosts.crew import RemoteCrew
from nbddp.hosts.frames import Header
from nbddp.hosts.host import Host
from nbddp.launch.output import RankOutput, open_output
from nbddp.payload import Packed

_POLL_S = 0.5


class RemoteStayingCrew(RemoteCrew):
    """The ranks of a session on several hosts; see ``launch.interface.StayingCrew``."""

    returns_within_s = 10.0  # their reports may come over a slow connection, after much output
    open_output = staticmethod(open_output)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._calls = 0
        self._in_call: dict[str, Host] = {}  # hosts that have not yet sent all of the call

    def launch(self, packed: Packed, outputs: Sequence[RankOutput], restart_count: int) -> None:
        """Start all ranks, with the first call."""
        super().launch(packed, outputs, restart_count)
        self._in_call = {host.name: host for host in self._hosts}

    def begin_call(
        self,
        call: wire.NextCall,
        data: tuple[Packed, int],
        outputs: Sequence[RankOutput],
        ranks: Sequence[int],
        again: Sequence[int],
        group: int,
    ) -> None:
        """Send a call's payload to the hosts of its ranks, and begin the call there."""
        orders = []
        self._calls += 1
        for host in self._hosts:
            here = self._ranks_of[host.name]
            for rank in (*ranks, *again):
                if rank in here:
                    self._by_rank[rank].begin(outputs[rank], is_new=rank in again)
            order: Header = {
                "kind": "next call",
                "number": self._calls,
                "ranks": [rank for rank in ranks if rank in here],
                "again": [rank for rank in again if rank in here],
                "group": group,
                **vars(call),
            }
            if order["ranks"] or order["again"]:
                self._in_call[host.name] = host
                orders.append((host, [order]))
        self._send_payload([host for host, _ in orders], data, orders)

    def cancel_upload(self) -> None:
        """Send no more of the payload: the call does not begin on hosts that have not received all of it."""
        for host in self._drop_payload():
            self._in_call.pop(host.name, None)
            for rank in self._ranks_of[host.name]:
                self._by_rank[rank].give_back()

    def end_call(self) -> None:
        """Wait until all that the ranks have printed and logged in this call has arrived."""
        asked_at = time.monotonic()
        self._drop_payload()  # it has been sent; its block is not needed any more
        for host in self._in_call.values():
            host.send({"kind": "end call", "number": self._calls})
        while waiting := [host for host in self._in_call.values() if not host.lost]:
            self.watch(_POLL_S)
            self.give_up_silent(waiting, asked_at, "when a call was over")
        self._in_call.clear()

    def _receive(self, host: Host, header: Header, body: bytes) -> None:
        if header["kind"] == "call ended" and header["number"] == self._calls:
            self._in_call.pop(host.name, None)
        super()._receive(host, header, body)

    def close(self) -> None:
        """Close all file descriptors; the hosts are ready for another session or run."""
        super().close()
        for host in self._hosts:
            host.end_run()
