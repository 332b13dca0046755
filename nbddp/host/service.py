"""Host side. The control pipe: a thread hears the kernel's orders, the main thread carries them out.

When the pipe ends, or nothing has come for the heartbeat's time, there is no kernel any more: this process
ends at once, and with it, by their dead-man's switch, every rank that it has started.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import time
from collections.abc import Callable
from typing import Any

from nbddp import frames, payload
from nbddp.block import write_piece
from nbddp.frames import Head
from nbddp.host.agent import run_agent
from nbddp.host.facts import facts
from nbddp.waiting import start_thread

_FIRST_S = 120.0  # for the kernel's answer to our first frame: other hosts may be slow
_FIRST_BEAT_S = 0.2
_LONGER = 4  # times the heartbeat, where that is too short
_READ_BYTES = 1 << 20
_LAST_WORDS_S = 5.0


class Pipe:
    """Both directions of the control pipe.

    Attributes:
        orders: what the kernel has said and nobody has taken yet.
        wake: called, on another thread, whenever there is a new order.
        block: the fd of the payload, as far as it has come; -1 before the first.
    """

    def __init__(self, orders: int, answers: int) -> None:
        self.orders: queue.SimpleQueue[Head] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        self.block = -1
        self._fd = orders
        self._silence_s = _FIRST_S
        os.write(answers, frames.MARK)
        self._sender = frames.Sender(answers, _FIRST_BEAT_S, _beat, "nbddp-answers")
        self.send, self.send_all, self.send_first = self._sender.send, self._sender.send_all, self._sender.send_first
        start_thread(self._hear, "nbddp-orders", _cannot_start)

    @property
    def backlog(self) -> int:
        """Bytes that wait for the kernel to read them."""
        return self._sender.backlog

    def close(self) -> None:
        """Send what waits."""
        self._sender.close(_LAST_WORDS_S)

    def _hear(self) -> None:
        try:
            self._hear_all()
        except Exception as error:  # no room for the payload, or no order of this nbddp: deaf is as good as gone
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)

    def _hear_all(self) -> None:
        parser = frames.Parser()
        while self._is_spoken_to() and (data := os.read(self._fd, _READ_BYTES)):
            for head, body in parser.feed(data):
                self._take(head, body)

    def _is_spoken_to(self) -> bool:
        if select.select([self._fd], [], [], self._silence_s)[0]:
            return True
        os.set_blocking(2, False)  # nobody may read it, and the ranks shall not live on for that
        print(
            f"nothing came from the notebook for {self._silence_s:.0f} s (it was busy in one long call, asleep, or cut "
            f"off); nbddp.cluster(hosts, heartbeat={_LONGER * self._silence_s:.0f}) waits longer",
            file=sys.stderr,
            flush=True,
        )
        return False

    def _take(self, head: Head, body: bytes) -> None:
        if head["kind"] == "welcome":
            self._silence_s = float(head["heartbeat"])
            self._sender.beat_s = self._silence_s * frames.BEATS
        elif head["kind"] == "payload":
            if self.block < 0:  # not before: it would be too early for huge pages
                self.block = payload.open_block("payload")
            write_piece(self.block, body, head["at"], head["nbytes"])
        elif head["kind"] != "beat":
            if head["kind"] == "over" and self.block >= 0:  # here, so that it comes before the next payload
                os.ftruncate(self.block, 0)
            self.orders.put(head)
            self.wake()


def serve(orders: int, answers: int) -> None:
    """Do what the kernel says until it says goodbye."""
    pipe = Pipe(orders, answers)
    pipe.send(facts())
    while True:
        order = pipe.orders.get()
        if order["kind"] == "run":
            run_agent(order, pipe)
        elif order["kind"] == "bye":
            pipe.close()
            return


def _beat() -> Head:
    return {"kind": "beat", "now": time.monotonic()}


def _cannot_start(error: RuntimeError) -> Any:
    raise error
