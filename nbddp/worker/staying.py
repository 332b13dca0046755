"""A rank that stays: it takes one call of its session after the other, until the notebook kernel lets it leave."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nbddp import wire
from nbddp.worker import debugger, group_sockets, process_group, regroup

RELEASE = b"R"  # from a collective whose other ranks will not come
_FDS_OF_A_CALL = 4


def obey(fd: int) -> None:
    """From now on, release this rank from its collective, on a thread, whenever ``RELEASE`` arrives on the socket."""
    threading.Thread(target=_obey, args=(socket.socket(fileno=fd),), name="nbddp-session", daemon=True).start()


def _obey(orders: socket.socket) -> None:
    while orders.recv(1):
        group_sockets.shut()
        process_group.abort_nccl()


class _Calls:
    """The rank's end of its channel between the calls, which come with file descriptors.

    Attributes:
        fds: for metrics, output, payload and result of the call that was received last.
    """

    def __init__(self, channel: Connection) -> None:
        self.fds: list[int] = []
        self._socket = socket.socket(fileno=os.dup(channel.fileno()))

    def recv_bytes(self) -> bytes:
        """Receive a message, as ``Connection.recv_bytes``. Raises EOFError, OSError."""
        (length,) = wire.LENGTH.unpack(self._read(wire.LENGTH.size))
        return self._read(length)

    def _read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            more, fds, _, _ = socket.recv_fds(self._socket, nbytes - len(data), _FDS_OF_A_CALL)
            if not more:
                raise EOFError
            if fds:
                self.fds = fds
            data += more
        return data


def serve(channel: Connection, job: wire.Job, call: Callable[[wire.Job, list[int]], wire.Message]) -> None:
    """Take calls until the notebook kernel ends the session."""
    calls = _Calls(channel)
    while True:
        try:
            message = debugger.receive(calls)
        except (EOFError, OSError):
            return
        if isinstance(message, wire.NextCall):
            for fd in calls.fds:
                os.set_inheritable(fd, False)
            next_job = dataclasses.replace(job, **vars(message))
            channel.send_bytes(wire.encode(call(next_job, calls.fds)))
        elif isinstance(message, wire.Regroup):
            channel.send_bytes(wire.encode(regroup.join_group(job, message.number)))
        elif isinstance(message, wire.Leave):
            return


# ---------------------------------------------------------------------------- interrupts

_AGAIN_S = 0.5  # by then a KeyboardInterrupt has left the user's code, unless something there holds it back
_allowed_from = float("inf")  # a monotonic time: from then on an interrupt is raised


def allow_interrupts() -> None:
    """From now on SIGINT raises KeyboardInterrupt; one that follows closely is ignored, lest it hit the report."""
    global _allowed_from
    _allowed_from = 0.0
    signal.signal(signal.SIGINT, _interrupt)


def refuse_interrupts() -> None:
    """Ignore SIGINT until the next call."""
    global _allowed_from
    _allowed_from = float("inf")


def _interrupt(_number: int, _frame: Any) -> None:
    global _allowed_from
    now = time.monotonic()
    if now >= _allowed_from:
        _allowed_from = now + _AGAIN_S
        raise KeyboardInterrupt
