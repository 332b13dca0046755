"""The notebook kernel's end of a rank's channel: reads messages without blocking, whatever the rank has written."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from nbddp import wire

_MAX_NBYTES = 1 << 20  # of one message; large data travel in a block
_INCOMPLETE_S = 5.0  # messages are written at once: data that are incomplete for this long are not a message
_READ_BYTES = 64 << 10
_MESSAGES = (  # of a worker
    wire.Ready,
    wire.Raised,
    wire.Regrouped,
    wire.Asks,
    wire.GoesOn,
    *wire.REPORTS,
)


class Garbled(Exception):
    """The data on the channel were not written by nbddp's worker."""


def open_channel() -> tuple[Channel, Connection]:
    """Open a channel. Returns the kernel's end and the worker's end."""
    kernel_end, worker_end = socket.socketpair()
    return Channel(kernel_end), Connection(worker_end.detach())


class Channel:
    """The kernel's end. The worker's end is a ``Connection``; any code in the rank can write to its file descriptor."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = bytearray()
        self._last_read = 0.0

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def is_incomplete(self) -> bool:
        """Whether a part of a message has arrived."""
        return bool(self._buffer)

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send a message, and file descriptors with it. Raises OSError if the worker has closed its end."""
        data = wire.encode(message)
        data = wire.LENGTH.pack(len(data)) + data
        sent = socket.send_fds(self._end, [data], fds) if fds else 0
        self._end.sendall(data[sent:])

    def receive(self) -> wire.Message | None:
        """Return the next message if all of it has arrived.

        Raises:
            Garbled: something else has arrived.
            EOFError, OSError: the other end is closed, and all has been read.
        """
        while (data := self._next()) is None:
            if not self._read():
                if self._buffer and time.monotonic() > self._last_read + _INCOMPLETE_S:
                    raise Garbled
                return None
        try:
            message: object = wire.decode(data)
        except Exception as error:  # whatever unpickling foreign data raises
            raise Garbled from error
        if not isinstance(message, _MESSAGES):
            raise Garbled
        return message

    def _read(self) -> bool:
        """Read without blocking. Returns whether there were data."""
        try:
            data = self._end.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not data:
            raise EOFError
        self._buffer += data
        self._last_read = time.monotonic()
        return True

    def _next(self) -> bytes | None:
        """Return the bytes of the next message if all of them are in the buffer."""
        if len(self._buffer) < wire.LENGTH.size:
            return None
        (length,) = wire.LENGTH.unpack_from(self._buffer)
        if not 0 <= length <= _MAX_NBYTES:
            raise Garbled
        end = wire.LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[wire.LENGTH.size : end])
        del self._buffer[:end]
        return data

    def close(self) -> None:
        self._end.close()
