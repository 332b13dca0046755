"""A rank that stays: it takes one call of its session after the other, until the notebook kernel lets it leave."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nbddp import wire
from nbddp.worker import debugger, group_sockets, process_group, regroup

ENDS = b"E"  # on the socket of a rank that stays: the file descriptors of the next call
FREE = b"F"  # release this rank from a collective whose other ranks will not come
_ENDS_OF_A_CALL = 4


class Ends:
    """What the notebook kernel hands over while a call goes on, received by a thread of its own."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._received: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="nbddp-session", daemon=True).start()

    def of_the_next_call(self) -> list[int]:
        """Wait for the file descriptors of the next call: metrics, output, payload and result."""
        return self._received.get()

    def _receive(self) -> None:
        while True:
            kind, fds, _, _ = socket.recv_fds(self._socket, 1, _ENDS_OF_A_CALL)
            if not kind:
                return
            if kind == FREE:
                group_sockets.shut()
                process_group.abort_nccl()
            else:
                for fd in fds:
                    os.set_inheritable(fd, False)
                self._received.put(fds)


def serve(channel: Connection, job: wire.Job, ends: Ends, call: Callable[[wire.Job, list[int]], wire.Message]) -> None:
    """Take calls until the notebook kernel ends the session."""
    while True:
        try:
            message = debugger.receive(channel)
        except (EOFError, OSError):
            return
        if isinstance(message, wire.NextCall):
            next_job = dataclasses.replace(job, **vars(message))
            channel.send_bytes(wire.encode(call(next_job, ends.of_the_next_call())))
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
