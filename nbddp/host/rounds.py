"""Host side. Where the agents of one round meet: torchelastic's plug-in point, led by the kernel over its pipe.

torchelastic's stock rendezvous keeps its state as pickles in a store that anybody may write to, and counts restarts
on each host for itself; here the kernel says when a round begins and ends, so round and count are the same everywhere.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from typing import TYPE_CHECKING

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from nbddp.frames import Head
from nbddp.kernel.rendezvous import host_store, listen

if TYPE_CHECKING:
    from nbddp.host.service import Pipe

_REACH_S = 15.0
_TRY_S = 0.5  # between two looks at what the kernel says
_NAP_S = 0.05


class Ended(Exception):
    """The kernel has ended a round before it began here."""


class Rounds(RendezvousHandler):
    """torchelastic's plug-in point: where the agents of one round meet. The kernel says when, and who is first."""

    def __init__(self, pipe: Pipe) -> None:
        self.round: Head = {}
        self.ended = False
        self.store: tuple[str, int] = ("", 0)
        self._pipe = pipe
        self._hosted: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round to begin; the agent of group rank 0 hosts its store, on one address."""
        self._hosted = None  # each round has its own, so that nobody reads what a dead rank left
        self.round, self.ended = self._next("round"), False
        return self._meet()

    def give_up(self, error: Exception) -> None:
        """This round cannot begin here: tell the kernel, and wait until it has ended it."""
        if not isinstance(error, Ended):
            self._pipe.send({"kind": "cannot start", "why": f"its agent cannot meet the others: {_first_line(error)}"})
            self._next("end")
        self._pipe.send({"kind": "ended", "round": self.round["number"]})

    def _meet(self) -> RendezvousInfo:
        group_rank, size = self.round["group_rank"], self.round["group_size"]
        address = self.round["address"]
        store: Store
        if group_rank == 0:
            store = self._hosted = host_store(listen(address, self.round["world_size"]), self.round["world_size"])
            port = self._hosted.port
            self._pipe.send({"kind": "store", "address": address, "port": port})
        else:
            where = self._next("store")
            address, port = where["address"], where["port"]
            self._try_to_reach(address, port)
            store = HashStore()  # the agents have nothing to say to each other: the kernel tells them their ranks
        self.store = (address, port)
        return RendezvousInfo(store, group_rank, size, RendezvousStoreInfo(master_addr=address, master_port=port))

    def _try_to_reach(self, address: str, port: int) -> None:
        """For the ranks, which would try for minutes."""
        deadline = time.monotonic() + _REACH_S
        while True:
            try:
                socket.create_connection((address, port), timeout=_TRY_S).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    why = f"{address}, port {port}, cannot be reached from there; is there a firewall? ({error})"
                    raise OSError(why) from error
            self._raise_if_ended()
            time.sleep(_NAP_S)

    def _raise_if_ended(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if self._pipe.orders.get_nowait()["kind"] == "end":
                    raise Ended

    def _next(self, kind: str) -> Head:
        """The kernel's next order of this kind; raises as torchelastic's loop knows it when the run is over."""
        while True:
            order = self._pipe.orders.get()
            if order["kind"] == "over":
                raise RendezvousGracefulExitError("the run is over")
            if order["kind"] == kind:
                return order
            if order["kind"] == "end":
                raise Ended

    def num_nodes_waiting(self) -> int:
        """More than none is torchelastic's word for: this round is over, come to the next."""
        return int(self.ended)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "nbddp"

    def get_run_id(self) -> str:
        return str(self.round.get("run_id", ""))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
