"""A rank's end of its channel: a thread reads it, also while the rank waits in a collective, and a thread writes it."""

import contextlib
import dataclasses
import errno
import os
import pdb
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from nbddp.messages import Answer, Asks, Defined, Envelope, Leave, Misses
from nbddp.payload import Block
from nbddp.worker import redirect


def enveloped(message: Any, printed: int = 0) -> tuple[Envelope, Block | None]:
    """Take the block out of a message: it follows over the channel."""
    if (block := getattr(message, "block", None)) is None:
        return Envelope(message, None, printed), None
    return Envelope(dataclasses.replace(message, block=None), block.nbytes, printed), block


def send_block(channel: Connection, block: Block) -> None:
    """Send it after its message.

    Not by multiprocessing's ``send_handle``: since Python 3.14 it waits for a reply, and other messages arrive here.
    """
    with _socket(channel) as end:
        socket.send_fds(end, [b"b"], [block.fd])


def with_block(channel: Connection, envelope: Envelope) -> Envelope:
    """Receive the block that follows a message."""
    if envelope.nbytes is None:
        return envelope
    with _socket(channel) as end:
        data, fds, _, _ = socket.recv_fds(end, 1, 1)
    if not data:
        raise EOFError
    if not fds:
        raise OSError(errno.EMFILE, "too many open files")
    os.set_inheritable(fds[0], False)
    block = Block(fds[0], envelope.nbytes)
    return dataclasses.replace(envelope, message=dataclasses.replace(envelope.message, block=block))


def _socket(channel: Connection) -> socket.socket:
    """Return its socket. With this type, Python leaves its flags alone, also after ``socket.setdefaulttimeout()``."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=os.dup(channel.fileno()))


class Line:
    """Takes orders and tells what happens.

    Attributes:
        orders: None: the rank should leave.
        at_once: what to do on the reading thread, by the class of the message.
    """

    def __init__(self, channel: Connection) -> None:
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel = channel
        self._outbox: queue.SimpleQueue[tuple[bytes, Block | None, threading.Event]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._definitions: queue.SimpleQueue[Defined] = queue.SimpleQueue()
        self.at_once: dict[type, Callable[[Any], None]] = {Answer: self._answers.put, Defined: self._definitions.put}
        self._pid = os.getpid()
        for work in (self._listen, self._send):
            threading.Thread(target=work, name="nbddp-line", daemon=True).start()

    def tell(self, message: Any) -> None:
        """Send a message, and then a report's block. What the rank prints from now on comes after it."""
        if os.getpid() != self._pid:  # a child of the rank; a kernel drops it, too
            return
        redirect.flush()
        sent, (envelope, block) = threading.Event(), enveloped(message, os.fstat(1).st_size)
        self._outbox.put((bytes(ForkingPickler.dumps(envelope)), block, sent))  # raises here, if at all
        if threading.current_thread() is threading.main_thread():
            sent.wait()

    def ask(self, prompt: object = "", stream: object = None, *, hidden: bool = False, **_: object) -> str:
        """Replace ``getpass()``, and ``input()``, which pdb, %debug and %pdb call: so this is the debugger, too."""
        if os.getpid() != self._pid:
            raise EOFError(
                "a child process of a rank, such as a DataLoader worker, can't read input: use num_workers=0"
            )
        self.tell(Asks(str(prompt), _debuggers_line(), hidden))
        redirect.forget_printed()  # up to here, the prompt shows where ranks differ
        if (line := self._answers.get().line) is None:
            raise EOFError("no interactive input here")
        return line

    def definition(self, name: str) -> Block | None:
        """Ask the notebook for its class or function of this name. Only the rank's main thread gets any."""
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return None
        self.tell(Misses(name))
        while (found := self._definitions.get()).name != name:
            pass  # an interrupt ended the wait for that one
        block: Block | None = found.block
        return block

    def _send(self) -> None:
        """Send, on a thread: an interrupt of the main thread could leave half a message on the channel."""
        while True:
            pickled, block, sent = self._outbox.get()
            with contextlib.suppress(OSError):  # the notebook has closed it, and kills this rank
                self._channel.send_bytes(pickled)
                if block is not None:
                    send_block(self._channel, block)
                    block.close()
            sent.set()

    def _listen(self) -> None:
        while True:
            try:
                message = with_block(self._channel, self._channel.recv()).message
            except (EOFError, OSError):  # the notebook kernel has ended
                os.killpg(0, signal.SIGKILL)
            if isinstance(message, Leave):
                return self.orders.put(None)
            if act := self.at_once.get(type(message)):
                with contextlib.suppress(OSError):  # of an answer: the disk is full, or too many files are open
                    act(message)
            else:
                self.orders.put(message)


def _debuggers_line() -> int:
    """Return the line at which a debugger asks; 0 if none does."""
    for frame, _ in traceback.walk_stack(None):
        if isinstance(asking := frame.f_locals.get("self"), pdb.Pdb):
            return asking.stack[asking.curindex][1]
    return 0
