"""The control pipe to the notebook kernel: a thread reads orders, the main thread carries them out.

When the pipe ends, or nothing arrives for the heartbeat timeout, the notebook kernel counts as gone. This process then
exits at once, and the dead man's switch of each rank that it has started ends that rank.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import time
from collections.abc import Callable
from typing import Any

from nbddp.agent import chain
from nbddp.agent.incoming import Incoming
from nbddp.hosts import frames
from nbddp.hosts.frames import Header
from nbddp.latch import start_thread

_FIRST_TIMEOUT_S = 120.0  # until the notebook kernel answers the first frame: it waits for slower hosts
_FIRST_BEAT_S = 0.2
_ENDING_BEAT_S = 0.5
_SUGGESTED_FACTOR = 4  # of a longer heartbeat timeout, in the message after a timeout
_READ_BYTES = 1 << 20
_CLOSE_S = 5.0


class ControlPipe:
    """Both directions of the control pipe.

    Attributes:
        orders: orders that have arrived and are not carried out yet.
        wake: called on another thread whenever an order arrives.
    """

    def __init__(self, orders: int, answers: int) -> None:
        self.orders: queue.SimpleQueue[Header] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        self._incoming: Incoming | None = None
        self._link: chain.Link | None = None
        self._fd = orders
        self._timeout_s = _FIRST_TIMEOUT_S
        self._beat_s = _FIRST_BEAT_S
        os.write(answers, frames.MARK)
        beat: Callable[[], Header] = lambda: {"kind": "beat", "now": time.monotonic()}  # noqa: E731
        self._sender = frames.Sender(answers, _FIRST_BEAT_S, beat, "nbddp-answers")
        self.send, self.send_all, self.send_first = self._sender.send, self._sender.send_all, self._sender.send_first
        start_thread(self._read, "nbddp-orders", _raise)

    def drop_output(self) -> None:
        """Drop output that the notebook kernel has not received yet, except the newest of each rank."""
        self._sender.drop_first("output")

    @property
    def block(self) -> int:
        """File descriptor of the payload, as far as it has arrived; -1 before the first piece."""
        return self._incoming.fd if self._incoming is not None else -1

    @property
    def backlog(self) -> int:
        """Bytes that are queued for the notebook kernel."""
        return self._sender.backlog

    def close(self) -> None:
        """Send what is queued."""
        self._sender.close(_CLOSE_S)

    def _read(self) -> None:
        parser = frames.Parser()
        try:
            while self._wait_for_data() and (data := os.read(self._fd, _READ_BYTES)):
                for header, body in parser.feed(data):
                    self._receive(header, body)
        except Exception as error:  # no memory for the payload, or not an order of this nbddp
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)  # an agent that cannot read orders is of no use

    def _wait_for_data(self) -> bool:
        # In two waits: after a suspension of the machine that both sides run on, the first one is over at once, and the
        # notebook's next beat is still to come.
        settle_s = min(self._beat_s, frames.SETTLE_S)
        for wait_s in (self._timeout_s - settle_s, settle_s):
            if select.select([self._fd], [], [], wait_s)[0]:
                return True
        os.set_blocking(sys.stderr.fileno(), False)  # if nobody reads stderr, the message must not keep the ranks alive
        print(
            f"the notebook sent nothing for {self._timeout_s:.0f} s (it was busy in one long call, suspended, or cut "
            f"off); nbddp.cluster(hosts, heartbeat={_SUGGESTED_FACTOR * self._timeout_s:.0f}) waits longer",
            file=sys.stderr,
            flush=True,
        )
        return False

    def _receive(self, header: Header, body: bytes) -> None:
        if header["kind"] == "welcome":
            self._timeout_s = float(header["heartbeat"])
            self._beat_s = self._sender.beat_s = self._timeout_s * frames.BEATS
        elif header["kind"] == "payload":
            if header["at"] == 0:
                self._incoming = Incoming(header["nbytes"])
            assert self._incoming is not None
            self._incoming.write(body, header["at"])
        elif header["kind"] == "chain":
            self._leave_chain()
            self._incoming = Incoming(header["nbytes"])
            self._link = chain.Link(header, self._incoming, self.send_first)
        elif header["kind"] == "chain over":
            self._leave_chain()
        elif header["kind"] in chain.KINDS:
            if self._link is not None and self._link.number == header["number"]:
                self._link.carry_out(header, body)
        elif header["kind"] != "beat":
            if header["kind"] == "over" and self._incoming is not None:  # here, before the next payload is written
                self._incoming.empty()
            # While ranks are ended, frequent beats show the notebook kernel that this process is not what hangs.
            if header["kind"] in ("end", "round"):
                self._sender.beat_s = min(self._beat_s, _ENDING_BEAT_S) if header["kind"] == "end" else self._beat_s
                self._sender.wake()
            self.orders.put(header)
            self.wake()

    def _leave_chain(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _raise(error: RuntimeError) -> Any:
    raise error
