"""Kernel side. The store that a run's ranks meet at, on a port that nobody else can have."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import TCPStore  # type: ignore[attr-defined]

HOST = "127.0.0.1"
PREFIX = "nbddp"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet: ``env://`` in user code finds the same store, without our prefix."""

    port: int
    prefix: str = PREFIX

    def environ(self) -> dict[str, str]:
        """torchrun's variables for the store."""
        return {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


@contextlib.contextmanager
def open_rendezvous(world_size: int) -> Iterator[Rendezvous]:
    """Host the run's ``TCPStore`` in this process, on loopback only.

    The kernel binds port 0 and hands the listening socket over, so no port is guessed and none is
    ever in use; a plain ``TCPStore`` would listen on all interfaces.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((HOST, 0))
        listener.listen(max(128, 2 * world_size))
        port = listener.getsockname()[1]
        store = TCPStore(
            HOST, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno()
        )
        listener.detach()  # the store closes it
    try:
        yield Rendezvous(port)
    finally:
        del store
