"""The rank's end of the debugger's talk with the notebook kernel, and of all messages after the first."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Connection
from typing import Protocol

from nbddp import wire
from nbddp.worker import group_timeouts


class Channel(Protocol):
    """What messages come from: a ``Connection``, or something like it."""

    def recv_bytes(self) -> bytes: ...


class Talk:
    """Sends what the debugger says, and receives the answers.

    Attributes:
        nobody_answers: nobody can answer in this call.
    """

    def __init__(self, channel: Connection) -> None:
        self.nobody_answers = False
        self._channel = channel
        self._reading = threading.Lock()  # held by the thread that reads the channel: no other takes its messages

    def receive(self, channel: Channel) -> wire.Message:
        """Receive a message between two calls, when no thread of the last one reads any more.

        The kernel lets a thread go that has been left at the prompt.

        Args:
            channel: the channel itself, or what reads from it the file descriptors that come with a call, too.
        """
        with self._reading:
            return wire.decode(channel.recv_bytes())

    def arrived(self) -> list[wire.Message]:
        """Return the messages that have arrived, unless a thread reads them at the prompt."""
        messages: list[wire.Message] = []
        if self._reading.acquire(blocking=False):
            try:
                while self._channel.poll():
                    messages.append(wire.decode(self._channel.recv_bytes()))
            finally:
                self._reading.release()
        return messages

    def ask(self, asks: wire.Asks) -> str | None:
        """Ask the notebook for a line; None: nobody can answer.

        Raises:
            EOFError, OSError: the notebook kernel has ended.
        """
        with self._reading:
            self.send(asks)
            while True:
                self._channel.poll(None)  # an interrupt that arrives here leaves the channel as it is
                message = wire.decode(self._channel.recv_bytes())
                if isinstance(message, wire.HoldTimeouts):
                    group_timeouts.hold()
                elif isinstance(message, wire.Answer):
                    self.nobody_answers = message.line is None
                    return message.line

    def send(self, message: wire.Message) -> None:
        """Send a message; it is lost if the notebook kernel has ended."""
        with contextlib.suppress(OSError):
            self._channel.send_bytes(wire.encode(message))
