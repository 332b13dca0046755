"""Kernel side. The store that a run's ranks meet at, on a port that nobody else can have."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from nbddp.kernel.room import room_for
from nbddp.waiting import start_thread

HOST = "127.0.0.1"
PREFIX = "nbddp"
_FDS_OF_A_STORE = 16
_OPEN_S = datetime.timedelta(seconds=10)  # of this process's own client; the ranks have theirs


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet.

    Attributes:
        file: an fd of the ready-made group's store, a file without a name; None where a rank cannot open it anew.
        port: of the store for a group of the function's own (``env://``), and for all where there is no file.
        prefix: of the ready-made group's keys.
    """

    file: int | None
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
    """Host the run's stores in this process: a file, and a ``TCPStore`` on loopback only.

    The kernel binds port 0 and hands the listening socket over, so no port is guessed and none is
    ever in use; a plain ``TCPStore`` would listen on all interfaces. The groups do without it where they can:
    torch's clients and server ask the system for the name of 127.0.0.1, over IPv6, which no hosts file tells, and so
    wait for a DNS server: 5 s for each lost answer (torch 2.13).
    """
    with room_for(_FDS_OF_A_STORE + world_size):
        store = _Store(world_size)
    file = os.memfd_create("nbddp-store") if os.path.isdir("/proc/self/fd") and hasattr(os, "memfd_create") else None
    try:
        yield Rendezvous(file, store.port)
    finally:
        if file is not None:
            os.close(file)
        store.close()


def listen(address: str, world_size: int) -> socket.socket:
    """A socket for a store, on a port that the system chooses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(max(128, 2 * world_size))
    except OSError:
        listener.close()
        raise
    return listener


def host_store(listener: socket.socket, world_size: int) -> TCPStore:
    """A ``TCPStore`` on that socket, which it closes; so do we if there is none. Raises DistError."""
    with listener:
        address, port = listener.getsockname()
        store = TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
            timeout=_OPEN_S,
        )
        listener.detach()
    return store


class _Store:
    """A ``TCPStore`` that opens on a thread of its own: its constructor is a client, too, which may wait as told above.

    Ranks may connect at once: the socket listens.
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
            with room_for(_FDS_OF_A_STORE):  # without, its client would try for minutes
                store = host_store(self._listener, self._world_size)
        except (DistError, OSError):
            self._listener.close()  # who would use it is refused, and says so
            return
        with self._lock:
            self._store = None if self._closed else store

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._store = None
