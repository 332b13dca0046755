"""Listens on one address of this host, and answers each connection on a thread of its own, until it is closed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from nbddp.latch import start_thread


class Listener(contextlib.AbstractContextManager["Listener"]):
    """A listening socket on a port that the system chooses.

    Attributes:
        port: its port.
    """

    def __init__(self, address: str, answer: Callable[[socket.socket], None], backlog: int, name: str) -> None:
        """
        Args:
            answer: called with each connection, on a thread of its own; an OSError of it is ignored.
            name: of the threads.
        """
        self._answer = answer
        self._name = name
        self._listener = socket.create_server((address, 0), backlog=max(backlog, 1))
        self._open: list[socket.socket] = [self._listener]
        self._lock = threading.Lock()
        self.port: int = self._listener.getsockname()[1]
        start_thread(self._accept, name, lambda _: None)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no longer, and end all connections."""
        with self._lock:
            opened, self._open = self._open, []
        for each in opened:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # ends a wait on another thread
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with self._lock:
                    if not self._open:
                        connection.close()
                        return
                    self._open.append(connection)
                start_thread(lambda one=connection: self._serve(one), self._name, lambda _: None)  # type: ignore[misc]

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self._answer(connection)
