"""Hosts the rendezvous store of a run's ranks, on a port that no other process can take."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from nbddp import fds
from nbddp.latch import start_thread
from nbddp.worker.user_stores import ON_SOCKET

HOST = "127.0.0.1"
PREFIX = "nbddp"
_FDS_OF_A_STORE = 16
_OPEN_TIMEOUT = datetime.timedelta(seconds=10)  # of the client in this process


@dataclass(frozen=True)
class Rendezvous:
    """The stores through which the ranks find each other.

    Attributes:
        file: an fd of the ready-made group's store, a file without a name; None where a rank cannot reopen it.
        port: the port of the store for groups that the function makes (``env://``), and for all groups without a file.
        prefix: the prefix of the ready-made group's keys.
    """

    file: int | None
    port: int
    prefix: str = PREFIX

    def environ(self) -> dict[str, str]:
        """Return torchrun's environment variables for the store."""
        return {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


@contextlib.contextmanager
def open_rendezvous(world_size: int) -> Iterator[Rendezvous]:
    """Host the run's stores in this process: a file, and a ``TCPStore`` on loopback only.

    The kernel binds port 0 and passes the listening socket on, so the port is never in use by another process; a plain
    ``TCPStore`` would listen on all interfaces. The ready-made group uses the file where it can, because torch's
    ``TCPStore`` looks up the name of 127.0.0.1 over IPv6, which no hosts file has, and so waits for a DNS server: 5 s
    for each lost answer (torch 2.13).
    """
    with fds.reserve(_FDS_OF_A_STORE + world_size):
        store = _BackgroundStore(world_size)
    file = os.memfd_create("nbddp-store") if os.path.isdir("/proc/self/fd") and hasattr(os, "memfd_create") else None
    try:
        yield Rendezvous(file, store.port)
    finally:
        if file is not None:
            os.close(file)
        store.close()


def listen(address: str, world_size: int) -> socket.socket:
    """Return a listening socket for a store, on a port that the system chooses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(max(128, 2 * world_size))
    except OSError:
        listener.close()
        raise
    return listener


def host_store(listener: socket.socket, world_size: int) -> TCPStore:
    """Return a ``TCPStore`` on that socket; the store closes the socket, also if it fails. Raises DistError."""
    address, port = listener.getsockname()
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=_OPEN_TIMEOUT,
        **ON_SOCKET,
    )


class _BackgroundStore:
    """A ``TCPStore`` that opens on a thread, because its constructor is also a client and may wait for a DNS server.

    Ranks can connect at once, since the socket listens.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._closed = False
        self._store: TCPStore | None = None
        self._listener = listen(HOST, world_size)
        self.port: int = self._listener.getsockname()[1]
        start_thread(self._open, "nbddp-store", lambda _: self._open())

    def _open(self) -> None:
        try:
            with fds.reserve(_FDS_OF_A_STORE):  # without free fds, its client would retry for minutes
                store = host_store(self._listener, self._world_size)
        except (DistError, OSError):
            self._listener.close()  # so a rank that connects is refused, and reports that
            return
        with self._lock:
            self._store = None if self._closed else store

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._store = None
