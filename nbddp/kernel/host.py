"""Kernel side. One host, from the login to the end of its pipe: what it has said, what it is sent, when it is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

from nbddp import frames
from nbddp.errors import LaunchError, plain
from nbddp.frames import Head
from nbddp.kernel.greeting import check_clock, check_facts
from nbddp.kernel.login import advice_on
from nbddp.payload import Packed
from nbddp.versions import difference
from nbddp.waiting import Latch, start_thread

HELLO_S = 120.0  # a first import of torch over a network file system takes a minute
SETTLE_S = 0.2
_GONE_S = 2.0  # for our threads, once the process is gone
_LAST_WORDS_S = 0.5
_LAST_BYTES = 16 << 10
_FROM_TORCH = re.compile(r"\[[IWEF]\d+ ")  # its warnings, of the agents that look for each other
_STEERS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colours, cursor moves and the like, for a terminal
_READ_BYTES = 1 << 20


class Host:
    """One host, from the login to the end of its pipe.

    Attributes:
        facts: what it has told of itself.
        lost: why nothing more can be heard of it; "" while it is there.
        offset_s: from its monotonic clock to ours.
        listener: gets what it tells of its ranks, on this host's thread; ``lost`` among them.
    """

    def __init__(self, name: str, command: Sequence[str], heartbeat_s: float) -> None:
        self.name = name
        self.facts: Head = {}
        self.lost = ""
        self.offset_s = float("inf")
        self.listener: Callable[[Host, Head, bytes], None] | None = None
        self._heartbeat_s = heartbeat_s
        self._heard_at = time.monotonic()
        self._suspected_at = float("inf")
        self._greeting_bytes = 0  # of its stderr: what its login shell said
        self._greeted = Latch()
        self._prepared: object = None
        self._payload: frames.BlockFrames | None = None
        self._process, self._stderr = self._log_in(command)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out, self._in = self._process.stdin, self._process.stdout
        for pipe in (self._out, self._in):
            frames.widen(pipe.fileno())
        beat_s = heartbeat_s * frames.BEATS
        self._sender = frames.Sender(self._out.fileno(), beat_s, lambda: {"kind": "beat"}, f"nbddp-to-{name}")
        self._heard_all = Latch()
        start_thread(self._read, f"nbddp-from-{name}", self._cannot_listen)

    def _log_in(self, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        with contextlib.ExitStack() as unless_started:
            try:
                stderr = unless_started.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    start_new_session=True,  # an interrupt of the notebook is not for it
                    bufsize=0,
                )
            except (OSError, ValueError) as error:  # the second: a zero byte in a word
                full = isinstance(error, OSError) and error.errno == errno.EMFILE
                advice = "; raise the limit of open files (ulimit -n)" if full else ""
                raise LaunchError(f"{self.name}: {command[0]} cannot be started: {error}{advice}") from error
            unless_started.pop_all()
        return process, stderr

    def greet(self, deadline: float) -> None:
        """Wait for its first words, compare versions, and say welcome.

        Raises:
            LaunchError: names the host, the cause and the remedy.
        """
        self._greeted.wait(max(0.0, deadline - time.monotonic()))
        if not self.facts:
            why = self.lost or self._with_advice(f"no answer within {HELLO_S:.0f} s", self._said())
            raise LaunchError(f"{self.name}: {why}")
        there, here = difference(self.facts["versions"])
        if there:
            raise LaunchError(
                f"{self.name} has {plain(there)}, this notebook {here}. What is pickled on one side must be read on "
                "the other: install the same versions on both"
            )
        self.send({"kind": "welcome", "heartbeat": self._heartbeat_s})

    def has(self, packed: Packed) -> bool:
        """Has it had this payload?"""
        return packed is self._prepared

    def send(self, head: Head) -> None:
        """Queue an order; a host that is lost gets none."""
        if not self.lost:
            self._sender.send(head)

    def send_payload(self, block: int, packed: Packed, then: Sequence[Head]) -> None:
        """Queue it, and the orders that need it; it is read from the block when it is its turn."""
        if not self.lost:
            self._payload = frames.BlockFrames(block, packed.nbytes, then=then, kind="payload")
            self._prepared = packed
            self._sender.send_all(self._payload)

    def drop_payload(self) -> bool:
        """What has not been sent yet is not wanted any more. Returns whether the orders after it were not."""
        payload, self._payload = self._payload, None
        if payload is None or not payload.drop():
            return False
        self._prepared = None
        return True

    def end_run(self) -> None:
        """No further round: neither side keeps the run's data."""
        self._prepared = None
        self.send({"kind": "over"})

    def look_for_silence(self) -> bool:
        """Give it up if nothing has come for the heartbeat's time. Returns whether it is under suspicion.

        Two looks: if it was this process that stood still, what the host has said meanwhile is yet to be read.
        """
        now = time.monotonic()
        silent_s = now - self._heard_at
        if self.lost or silent_s < self._heartbeat_s - SETTLE_S:
            self._suspected_at = float("inf")
        elif self._suspected_at > now:
            self._suspected_at = now
        elif now - self._suspected_at > SETTLE_S:
            self.give_up(f"nothing was heard of it for {silent_s:.0f} s")
        return not self.lost and self._suspected_at <= now

    def give_up(self, why: str) -> None:
        """It counts as lost from now on; its agent ends with its pipe."""
        self._lose(why)
        self._process.kill()

    def close(self, deadline: float) -> None:
        """End the login, of which it has been told goodbye; until the deadline it may do so itself."""
        if not self.lost:
            self._sender.close(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
        self._lose("its login was ended")
        self._process.kill()
        self._process.wait()
        self._sender.close(_GONE_S)  # its write fails now: only then may the number of its file be another's
        self.disown()
        self._heard_all.wait(_GONE_S)
        self._in.close()
        self._stderr.close()

    def disown(self) -> None:
        """Close our end of its stdin."""
        with contextlib.suppress(OSError):
            self._out.close()

    # ------------------------------------------------------------------ on its own thread

    def _read(self) -> None:
        parser = frames.Parser(after_mark=True)
        try:
            self._read_all(parser)
            self._lose(self._last_words(parser.noise) if not self.facts else "its connection ended" + self._how())
        except OSError as error:
            self._lose(f"this machine could not take in what it said ({error})")
        except Exception as error:  # a deaf host is a lost one
            self._lose(f"it said what this nbddp does not understand ({type(error).__name__}: {error})")
        finally:
            self._process.kill()  # its ranks shall not go on for nobody
            self._heard_all.open()

    def _read_all(self, parser: frames.Parser) -> None:
        while data := self._read_some():
            self._heard_at = time.monotonic()
            for head, body in parser.feed(data):
                self._take(head, body)

    def _read_some(self) -> bytes:
        with contextlib.suppress(OSError):
            return os.read(self._in.fileno(), _READ_BYTES)
        return b""

    def _cannot_listen(self, error: RuntimeError) -> None:
        self._lose(str(error))
        self._heard_all.open()

    def _take(self, head: Head, body: bytes) -> None:
        if "now" in head:  # the quickest of its frames tells its clock best
            check_clock(head)
            self.offset_s = min(self.offset_s, time.monotonic() - head["now"])
        if head["kind"] == "hello":
            check_facts(head)
            self.facts = head
            self._greeting_bytes = os.fstat(self._stderr.fileno()).st_size
            self._greeted.open()
        elif head["kind"] != "beat" and self.listener is not None:
            self.listener(self, head, body)

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = why
            self._greeted.open()
            if self.listener is not None:
                self.listener(self, {"kind": "lost"}, b"")

    def _how(self) -> str:
        self._wait_for_its_end()
        code = self._process.returncode
        if code is not None and code < 0:
            return f", killed by {signal.Signals(-code).name}"
        said = [line for line in self._said() if not _FROM_TORCH.match(line)]
        return f": {said[-1]}" if said else ""

    def _wait_for_its_end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)

    def _last_words(self, noise: bytes) -> str:
        self._wait_for_its_end()
        said = self._said() or _lines(noise)
        code = self._process.returncode
        ended = "its login closed its output" if code is None else f"its login ended with exit code {code}"
        return self._with_advice(ended, said)

    def _with_advice(self, what: str, said: list[str]) -> str:
        """What has happened, its last line, and what to do about that."""
        # Not as the cause: nobody can tell an error from a greeting.
        last = f"{what}; the last it said: {said[-1].strip()}" if said else what
        advice = advice_on(self.name, "\n".join(said))
        return f"{advice} ({last})" if advice else last

    def _said(self) -> list[str]:
        with contextlib.suppress(ValueError, OSError):
            size = os.fstat(self._stderr.fileno()).st_size
            start = max(self._greeting_bytes, size - _LAST_BYTES)
            return _lines(os.pread(self._stderr.fileno(), _LAST_BYTES, start))
        return []


def _lines(said: bytes) -> list[str]:
    """Those with words in them, as any terminal can show them."""
    text = _STEERS.sub("", said.decode("utf-8", "replace"))
    lines = [plain(line.replace("\t", " ")).strip() for line in text.splitlines()]
    return [line for line in lines if line]
