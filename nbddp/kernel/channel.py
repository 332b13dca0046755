"""Kernel side. Our end of a rank's channel: reads without waiting, whatever was written to the other end."""

from __future__ import annotations

import socket
import struct
import time
from multiprocessing.connection import Connection

from nbddp import wire

_LENGTH = struct.Struct("!i")  # before each message, as multiprocessing's Connection writes it (Python 3.8 to 3.14)
_MOST_NBYTES = 1 << 20  # of one message; what is large travels in a block
_REST_S = 5.0  # a message is written at once: what is half for so long is none
_READ_BYTES = 64 << 10


_MESSAGES = (wire.Ready, wire.Called, wire.Finished, wire.Raised, wire.Failed, wire.Exited)  # a worker's


class Garbled(Exception):
    """What has come is not of the worker's making."""


def open_channel() -> tuple[Channel, Connection]:
    """Our end and the worker's."""
    ours, theirs = socket.socketpair()
    return Channel(ours), Connection(theirs.detach())


class Channel:
    """Our end. The worker's is a ``Connection``, of whose descriptor anything in the rank may be writing to."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._come = bytearray()
        self._last = 0.0

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: wire.Message) -> None:
        """Raises OSError if nobody is there."""
        data = wire.encode(message)
        self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> wire.Message | None:
        """The next message, if it has come.

        Raises:
            Garbled: something else has. EOFError, OSError: the other end is closed, and all has been read.
        """
        while (data := self._next()) is None:
            if not self._read():
                if self._come and time.monotonic() > self._last + _REST_S:
                    raise Garbled
                return None
        return _decoded(data)

    def _read(self) -> bool:
        """Returns whether there was something."""
        try:
            data = self._end.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not data:
            raise EOFError
        self._come += data
        self._last = time.monotonic()
        return True

    def _next(self) -> bytes | None:
        """The next message's bytes, if they are all here."""
        if len(self._come) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._come)
        if not 0 <= length <= _MOST_NBYTES:
            raise Garbled
        end = _LENGTH.size + length
        if len(self._come) < end:
            return None
        data = bytes(self._come[_LENGTH.size : end])
        del self._come[:end]
        return data

    def close(self) -> None:
        self._end.close()


def _decoded(data: bytes) -> wire.Message:
    try:
        message: object = wire.decode(data)
    except Exception as error:  # whatever unpickling something else raises
        raise Garbled from error
    if isinstance(message, _MESSAGES):
        return message
    raise Garbled
