"""A store for the ranks, on a socket that this process has bound: nobody can take its port in between."""

import os
import socket

from torch._C._distributed_c10d import TCPStore


class Store:
    """A store for that many ranks. Its address is known before :meth:`open`, which takes 2 ms while the ranks start.

    Attributes:
        free_port: nobody listens there, and nobody gets it by chance: it's for a store that the user's programs open.
    """

    def __init__(self, size: int, host: str = "127.0.0.1") -> None:
        self._listening = socket.create_server((host, 0), backlog=max(128, size))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._kept_free = socket.socket()
        self._kept_free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept_free.bind((host, 0))
        self.free_port: int = self._kept_free.getsockname()[1]
        self._store: TCPStore | None = None

    def open(self) -> None:
        """Serve it, from now on."""
        self._store = TCPStore(
            *self.address,
            is_master=True,
            wait_for_workers=False,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch reads it: some builds have no libuv
            master_listen_fd=self._listening.detach(),
        )

    def close(self) -> None:
        """End it."""
        self._store = None
        self._listening.close()
        self._kept_free.close()
