"""One host, from the login to the end of its pipe: frames to and from its agent, and how its loss is noticed."""

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

from nbddp import fds
from nbddp.errors import LaunchError
from nbddp.hosts import frames
from nbddp.hosts.frames import Header
from nbddp.hosts.greeting import check_clock, check_facts
from nbddp.hosts.login import advice_for, silent_login
from nbddp.hosts.transfers import Transfer
from nbddp.latch import Latch, start_thread
from nbddp.payload import Packed
from nbddp.text import plain
from nbddp.versions import difference

HELLO_S = 120.0  # a first import of torch over a network file system takes a minute
_THREADS_TIMEOUT_S = 2.0  # for this host's threads to end, after the process has ended
_EXIT_TIMEOUT_S = 0.5  # from the end of the pipe to the end of the process
_LAST_BYTES = 16 << 10
_TORCH_LOG = re.compile(r"\[[IWEF]\d+ ")  # torch's warnings while the agents connect to each other
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colours, cursor moves and other terminal escapes
_READ_BYTES = 1 << 20


class Host:
    """One host, from the login to the end of its pipe.

    Attributes:
        facts: what it sent in its first frame.
        lost: why nothing more arrives from it; "" while it is there.
        beat_s: each side sends something at least this often.
        offset_s: add this to its monotonic times to get ours.
        sending, receiving: the payload and the last large result, or None.
        listener: called on this host's thread with each frame about its ranks, and with a frame ``lost``.
        when_lost: called once, on any thread, when the host is lost.
    """

    def __init__(self, name: str, command: Sequence[str], heartbeat_s: float) -> None:
        self.name = name
        self.facts: Header = {}
        self.lost = ""
        self.offset_s = float("inf")
        self.listener: Callable[[Host, Header, bytes], None] | None = None
        self.when_lost: Callable[[], None] = lambda: None
        self._heartbeat_s = heartbeat_s
        self._received_at = time.monotonic()
        self._suspected_at = float("inf")
        self._greeting_nbytes = 0  # of its stderr, from its login shell
        self._facts_or_lost = Latch()
        self._sent_payload: Packed | None = None
        self._payload: frames.BlockFrames | None = None
        self.sending: Transfer | None = None
        self.receiving: Transfer | None = None
        self._process, self._stderr = self._log_in(command)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out, self._in = self._process.stdin, self._process.stdout
        for pipe in (self._out, self._in):
            fds.widen(pipe.fileno())
        self.beat_s = heartbeat_s * frames.BEATS
        self._sender = frames.Sender(self._out.fileno(), self.beat_s, lambda: {"kind": "beat"}, f"nbddp-to-{name}")
        self._reader_over = Latch()
        start_thread(self._read, f"nbddp-from-{name}", self._has_no_reader)

    def _log_in(self, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        with contextlib.ExitStack() as unless_started:
            try:
                stderr = unless_started.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    start_new_session=True,  # so that an interrupt of the notebook does not reach it
                    bufsize=0,
                )
            except (OSError, ValueError) as error:  # ValueError: a zero byte in a word
                full = isinstance(error, OSError) and error.errno == errno.EMFILE
                advice = "; raise the limit of open files (ulimit -n)" if full else ""
                raise LaunchError(f"{self.name}: {command[0]} cannot be started: {error}{advice}") from error
            unless_started.pop_all()
        return process, stderr

    def has_answered(self, timeout_s: float) -> bool:
        """Return whether it has sent its facts, or is lost, within this time."""
        return self._facts_or_lost.wait(timeout_s)

    def greet(self, waited_s: float) -> None:
        """Compare versions, and send ``welcome``.

        Args:
            waited_s: how long it had time to answer.

        Raises:
            LaunchError: names the host, the cause and the remedy.
        """
        if not self.facts:
            why = self.lost or self._with_advice(f"no answer within {waited_s:.0f} s", self._stderr_lines())
            raise LaunchError(f"{self.name}: {why}")
        theirs, ours = difference(self.facts["versions"])
        if theirs:
            raise LaunchError(
                f"{self.name} has {plain(theirs)}, this notebook {ours}. Objects pickled on one side are unpickled on "
                "the other: install the same versions on both"
            )
        self.send({"kind": "welcome", "heartbeat": self._heartbeat_s})

    def has(self, packed: Packed) -> bool:
        """Return whether this payload was sent to the host, for an earlier round."""
        return packed is self._sent_payload

    def send(self, order: Header) -> None:
        """Queue an order, unless the host is lost."""
        if not self.lost:
            self._sender.send(order)

    def send_payload(self, block: int, packed: Packed, then: Sequence[Header]) -> None:
        """Queue the payload, read from the block as it is sent, and the orders that need it."""
        if not self.lost:
            pieces = frames.BlockFrames(block, packed.nbytes, then=then, kind="payload")
            self.expect_payload(packed)
            self._sent_payload = packed
            self._send_block(pieces)

    def send_pieces(self, block: int, packed: Packed, start: int, number: int) -> None:
        """Queue the payload's pieces from the offset ``start`` on, for the chain of this number."""
        if not self.lost:
            end = {"kind": "pieces end", "number": number}
            pieces = frames.BlockFrames(block, packed.nbytes, then=[end], start=start, kind="piece", number=number)
            self._send_block(pieces)

    def _send_block(self, pieces: frames.BlockFrames) -> None:
        self._payload = pieces
        pieces.progress = self.note_arrived
        self._sender.send_all(pieces)

    def expect_payload(self, packed: Packed) -> None:
        """Note that a payload is on its way to the host, from here or from another host."""
        self._sent_payload = None
        self.sending = Transfer(f"sending {{}} to {self.name}", packed.nbytes)

    def note_arrived(self, nbytes: int) -> None:
        """Note how much of the payload has been sent, or has arrived there from another host."""
        if self.sending is not None:
            self.sending.done = nbytes

    def note_received(self, packed: Packed) -> None:
        """Note that this payload has arrived there, and that the orders that need it are sent."""
        self._sent_payload, self.sending = packed, None

    def cancel_payload(self) -> bool:
        """Send no more of the payload. Returns whether the orders that need it are cancelled with it."""
        payload, self._payload, self.sending = self._payload, None, None
        if payload is None or not payload.drop():
            return False
        self._sent_payload = None
        return True

    def end_run(self) -> None:
        """End the run: neither side keeps its data."""
        self._sent_payload = self.sending = self.receiving = None
        self.send({"kind": "over"})

    def check_heartbeat(self) -> bool:
        """Give up a host that has sent nothing for the heartbeat timeout. Returns whether it is under suspicion.

        It is suspected first, for a moment: after a suspension of this process its frames are still to be read; after
        one of both sides, as on one machine, they are still to be sent.
        """
        now = time.monotonic()
        silent_s = now - self._received_at
        settle_s = min(self.beat_s, frames.SETTLE_S)
        if self.lost or silent_s < self._heartbeat_s - settle_s:
            self._suspected_at = float("inf")
        elif self._suspected_at > now or self._suspected_at < self._received_at:
            self._suspected_at = now
        elif now - self._suspected_at > settle_s:
            self.give_up(f"it sent nothing for {silent_s:.0f} s")
        return not self.lost and self._suspected_at <= now

    def silent_s(self, since: float) -> float:
        """Return for how long nothing has arrived from it, counted from this monotonic time on."""
        return time.monotonic() - max(since, self._received_at)

    def give_up(self, why: str) -> None:
        """Mark the host as lost and end the login; its agent ends with its pipe."""
        self._mark_lost(why)
        self._process.kill()

    def close(self, deadline: float) -> None:
        """End the login, after an order ``bye``; until the deadline, the host may end it itself."""
        if not self.lost:
            self._sender.close(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
        self._mark_lost("its login was ended")
        self._process.kill()
        self._process.wait()
        self._sender.close(_THREADS_TIMEOUT_S)  # its write fails now; the fd must not be reused before
        self.close_stdin()
        self._reader_over.wait(_THREADS_TIMEOUT_S)
        self._in.close()
        self._stderr.close()

    def close_stdin(self) -> None:
        """Close our end of its stdin."""
        with contextlib.suppress(OSError):
            self._out.close()

    # ------------------------------------------------------------------ on the reader thread

    def _read(self) -> None:
        parser = frames.Parser(after_mark=True)
        try:
            while data := self._read_some():
                self._received_at = time.monotonic()
                for header, body in parser.feed(data):
                    self._receive(header, body)
            self._mark_lost(self._end_text(parser.noise))
        except OSError as error:
            self._mark_lost(f"this machine could not store what it sent ({error})")
        except Exception as error:  # a host whose frames cannot be read is lost
            self._mark_lost(f"this nbddp does not understand what it sent ({type(error).__name__}: {error})")
        finally:
            self._process.kill()  # ends the ranks there, whose results nobody can receive
            self._reader_over.open()

    def _read_some(self) -> bytes:
        with contextlib.suppress(OSError):
            return os.read(self._in.fileno(), _READ_BYTES)
        return b""

    def _has_no_reader(self, error: RuntimeError) -> None:
        self._mark_lost(str(error))
        self._reader_over.open()

    def _receive(self, header: Header, body: bytes) -> None:
        if "now" in header:  # the frame that was sent fastest gives the best estimate of the host's clock
            check_clock(header)
            self.offset_s = min(self.offset_s, time.monotonic() - header["now"])
        if header["kind"] == "hello":
            check_facts(header)
            self.facts = header
            self._greeting_nbytes = os.fstat(self._stderr.fileno()).st_size
            self._facts_or_lost.open()
            return
        if header["kind"] == "result":
            if header["at"] == 0:
                self.receiving = Transfer(f"receiving {{}} from {self.name}", header["nbytes"])
            if self.receiving is not None:
                self.receiving.done = header["at"] + len(body)
        if header["kind"] != "beat" and self.listener is not None:
            self.listener(self, header, body)

    def _mark_lost(self, why: str) -> None:
        if not self.lost:
            self.lost = why
            self._facts_or_lost.open()
            if self.listener is not None:
                self.listener(self, {"kind": "lost"}, b"")
            self.when_lost()

    def _end_text(self, noise: bytes) -> str:
        """Return how the login or, after the first frame, the connection ended; ``noise`` came before that frame."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_EXIT_TIMEOUT_S)
        if not self.facts:
            ended = "its login closed its output" if code is None else f"its login ended with exit code {code}"
            return self._with_advice(ended, self._stderr_lines() or _lines(noise))
        if code is not None and code < 0:
            return f"its connection ended, killed by {signal.Signals(-code).name}"
        lines = [line for line in self._stderr_lines() if not _TORCH_LOG.match(line)]
        return f"its connection ended: {lines[-1]}" if lines else "its connection ended"

    def _with_advice(self, what: str, lines: list[str]) -> str:
        """Return what has happened, the last line of output, and advice on it."""
        # Not called the cause, since a greeting cannot be told from an error.
        last = f"{what}; its last output: {lines[-1].strip()}" if lines else what
        advice = advice_for(self.name, "\n".join(lines)) or ("" if lines else silent_login(self.name, what))
        return f"{advice} ({last})" if advice else last

    def _stderr_lines(self) -> list[str]:
        with contextlib.suppress(ValueError, OSError):
            size = os.fstat(self._stderr.fileno()).st_size
            start = max(self._greeting_nbytes, size - _LAST_BYTES)
            return _lines(os.pread(self._stderr.fileno(), _LAST_BYTES, start))
        return []


def _lines(output: bytes) -> list[str]:
    """Return the lines that are not blank, without terminal escapes."""
    text = _ESCAPES.sub("", output.decode("utf-8", "replace"))
    lines = [plain(line.replace("\t", " ")).strip() for line in text.splitlines()]
    return [line for line in lines if line]
