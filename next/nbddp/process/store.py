"""A store for the ranks, on a socket that this process has bound: nobody can take its port in between."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import TCPStore


class Store:
    """A store for that many ranks. Its address is known before :meth:`open`, which takes 2 ms while the ranks start."""

    def __init__(self, size: int, host: str = "127.0.0.1") -> None:
        self._listening = socket.create_server((host, 0), backlog=max(128, size))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._store: TCPStore | None = None

    def open(self) -> None:
        """Serve it, from now on."""
        self._store = TCPStore(
            *self.address,
            is_master=True,
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=self._listening.detach(),
        )

    def close(self) -> None:
        """End it."""
        self._store = None
        self._listening.close()
