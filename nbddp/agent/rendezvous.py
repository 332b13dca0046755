"""The rendezvous of the agents of one round: a torchelastic handler that the notebook kernel leads over its pipe.

torchelastic's own rendezvous pickles its state into a store that anybody may write to, and counts restarts on each host
separately. Here the notebook kernel decides when a round begins and ends, so round and count are the same on all hosts.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import time

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from nbddp.agent import network
from nbddp.agent.pipe import ControlPipe
from nbddp.hosts.frames import Header
from nbddp.launch.rendezvous import host_store, listen

_CONNECT_TIMEOUT_S = 15.0
_ATTEMPT_TIMEOUT_S = 0.5  # one attempt to connect, between two looks at the orders
_POLL_S = 0.05


class RoundEnded(Exception):
    """The notebook kernel has ended a round before it began on this host."""


class KernelRendezvous(RendezvousHandler):
    """torchelastic's rendezvous handler: the notebook kernel says when a round begins, and which ranks each host has.

    Attributes:
        round: the order that began the current round.
        ended: whether that round is over.
        store: address and port of the round's store.
    """

    def __init__(self, pipe: ControlPipe) -> None:
        self.round: Header = {}
        self.ended = False
        self.store: tuple[str, int] = ("", 0)
        self._pipe = pipe
        self._hosted: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round to begin; the agent with group rank 0 hosts its store, on one address."""
        self._hosted = None  # each round has a new store, so that no rank reads the keys of a dead rank
        self.round, self.ended = self._next("round"), False
        group_rank, size = self.round["group_rank"], self.round["group_size"]
        address = self.round["address"]
        if self.round["look_token"]:
            self._look(address, size)
        store: Store
        if group_rank == 0:
            store = self._hosted = host_store(listen(address, self.round["world_size"]), self.round["world_size"])
            port = self._hosted.port
            self._pipe.send({"kind": "store", "address": address, "port": port})
        else:
            order = self._next("store")
            address, port = order["address"], order["port"]
            self._check_connection(address, port)
            store = HashStore()  # the agents exchange nothing: the notebook kernel assigns the ranks
        self.store = (address, port)
        return RendezvousInfo(store, group_rank, size, RendezvousStoreInfo(master_addr=address, master_port=port))

    def _look(self, address: str, size: int) -> None:
        """Let the other hosts reach this one, try to reach them, and report; the notebook kernel judges.

        Raises:
            RoundEnded: a host cannot reach another one, or the round ends for another reason.
        """
        token = self.round["look_token"]
        with network.listen(address, token, size) as listener:
            self._pipe.send({"kind": "listens", "port": listener.port})
            peers = [(name, host, port, rate) for name, host, port, rate in self._next("peers")["peers"]]
            links, failed = network.look(peers, token)
            self._pipe.send({"kind": "looked", "links": links, "failed": failed})
            self._next("begin")

    def give_up(self, error: Exception) -> None:
        """Report to the notebook kernel that this round cannot begin here, and wait until it has ended the round."""
        if not isinstance(error, RoundEnded):
            first_line = str(error).partition("\n")[0]
            self._pipe.send({"kind": "cannot start", "why": f"the rendezvous of its agent failed: {first_line}"})
            self._next("end")
        self._pipe.send({"kind": "ended", "round": self.round["number"]})

    def _check_connection(self, address: str, port: int) -> None:
        """Raise OSError if the store cannot be reached within 15 s; the ranks would try for minutes."""
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        while True:
            try:
                socket.create_connection((address, port), timeout=_ATTEMPT_TIMEOUT_S).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    why = f"it cannot reach {address}, port {port}; is there a firewall? ({error})"
                    raise OSError(why) from error
            with contextlib.suppress(queue.Empty):
                while self._pipe.orders.get_nowait()["kind"] != "end":
                    pass
                raise RoundEnded
            time.sleep(_POLL_S)

    def _next(self, kind: str) -> Header:
        """Return the next order of this kind.

        Raises:
            RoundEnded: the round ends first. RendezvousGracefulExitError: the run does, which ends torchelastic's loop.
        """
        while True:
            order = self._pipe.orders.get()
            if order["kind"] == "over":
                raise RendezvousGracefulExitError("the run is over")
            if order["kind"] == kind:
                return order
            if order["kind"] == "end":
                raise RoundEnded

    def num_nodes_waiting(self) -> int:
        """Return 1 when this round is over: torchelastic then goes to the next rendezvous."""
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
