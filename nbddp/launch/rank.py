"""One rank on this machine: controls its process, receives its messages, notices its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Container, Sequence
from multiprocessing.connection import wait
from typing import Any

import psutil

from nbddp import payload, versions, wire
from nbddp.forkserver.process import ForkedProcess
from nbddp.launch import dumps, oom_killer
from nbddp.launch.channel import Channel, Garbled
from nbddp.launch.interface import RankBase
from nbddp.launch.output import RankOutput
from nbddp.payload import huge_pages
from nbddp.worker import debugger, staying
from nbddp.worker.output import STACKS_SIGNAL

_KILL_TIMEOUT_S = 2.0  # a process in an uninterruptible disk wait may take longer
_REAP_TIMEOUT_S = 0.1  # after the sentinel has reported the process's end
_POLL_S = 0.002
_PICKLE_TIMEOUT_S = 10.0  # an exception may grow forever while it is pickled
_READ_BYTES = 256 << 10
_MAX_STACKS_BYTES = 1 << 20
_GARBLED = (
    "RuntimeError: something in this rank wrote to a file descriptor that it had not opened. It is nbddp's own, and "
    "the rank's reports can no longer be read"
)
_UNKNOWN_EXIT = 255  # multiprocessing's, when the fork server died before the process


class LocalRank(RankBase):
    """One rank on this machine.

    Attributes:
        spawned: the process was not forked from a fork server.
    """

    def __init__(
        self,
        rank: int,
        process: Any,
        channel: Channel,
        output: RankOutput,
        fds: dict[str, int],
        release: socket.socket | None = None,
    ) -> None:
        super().__init__(rank, output)
        self.regrouped: wire.Regrouped | None = None
        self._release = release  # of a rank that stays: from a collective
        self._dismissed = False
        self._raised: wire.Raised | None = None
        self._pickle_deadline = float("inf")
        self.spawned = not isinstance(process, ForkedProcess)
        self._oom_kills = oom_killer.kills()
        self._process = process
        self._channel: Channel | None = channel
        self._fds = fds
        try:
            self._identity: psutil.Process | None = psutil.Process(process.pid)
            self._identity.create_time()  # stored: later it shows whether the pid is still this process
        except psutil.NoSuchProcess:
            self._identity = None

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the rank's session and process group."""
        return int(self._process.pid)

    @property
    def called(self) -> bool:
        """Whether the function has been called."""
        if self._raised is not None and self._raised.phase in ("setup", "unpack"):
            return False  # what it raised is in the block
        fd = self._fds.get("result")
        return fd is not None and payload.was_called(fd)

    @property
    def changes_unseen(self) -> bool:
        """Whether something can have happened that no file descriptor shows: a time limit, or the end of the process.

        Its children may hold a spawned process's sentinel.
        """
        may_have_ended = self.alive and (self.spawned or self.orphaned)
        is_pickling = self._raised is not None and self.report is None
        return may_have_ended or is_pickling or (self._channel is not None and self._channel.is_incomplete)

    @property
    def result_fd(self) -> int:
        """The file descriptor of the block that holds the rank's result."""
        return self._fds["result"]

    def waitables(self) -> list[Any]:
        """Return the objects that become readable when this rank reports or ends."""
        sentinel = self._process.sentinel if self.alive and not self.orphaned else None
        return [x for x in (self._channel, sentinel) if x is not None]

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send a message, and file descriptors with it; it is lost if the rank has ended."""
        with contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.send(message, fds)

    def begin(self, call: wire.NextCall, output: RankOutput, fds: dict[str, int], workers_fds: Sequence[int]) -> None:
        """Begin the next call of a rank that stays and has reported.

        Args:
            fds: this side's ends, which the rank object closes.
            workers_fds: the rank's ends of metrics, output, payload and result, which the caller closes.
        """
        self.close_call()
        self._fds |= fds
        self.output = output
        self.report, self._raised, self._pickle_deadline = None, None, float("inf")
        self._logged = 0
        self.send(call, workers_fds)

    def free(self) -> None:
        """Release a rank that stays from a collective whose other ranks will not come."""
        if self._release is not None:
            with contextlib.suppress(OSError):
                self._release.send(staying.RELEASE, socket.MSG_DONTWAIT)

    def regroup(self, number: int) -> None:
        """Have a rank that stays join the process group of this number; ``regrouped`` is its answer."""
        self.regrouped = None
        self.send(wire.Regroup(number))

    def close_call(self) -> None:
        """Close the ends of a call that is over."""
        for name in ("metrics", "result"):
            if name in self._fds:
                os.close(self._fds.pop(name))

    def dismiss(self) -> None:
        """Let the rank exit; a second call has no effect."""
        if not self._dismissed:
            self._dismissed = True
            self.send(wire.Leave())

    def update(self, readable: Container[int]) -> None:
        """Receive the rank's messages, and notice its end.

        Args:
            readable: the file descriptors of those :meth:`waitables` that have become readable.
        """
        # The exit first: messages that the rank sent before its exit are then certainly in the channel.
        # Not by the sentinel of a spawned process, which the children that it forked keep open.
        if self.alive and (self.spawned or self.orphaned or self._process.sentinel in readable):
            self._check_exit()
        while (message := self._next_message()) is not None:
            self._handle(message)
        if self.report is None and self._raised is not None:
            if time.monotonic() > self._pickle_deadline:
                self.kill()
            if not self.alive:  # it has not pickled its exception; its stand-in becomes the report
                self.report = wire.Failed(**vars(self._raised))

    def _next_message(self) -> wire.Message | None:
        if self._channel is None:
            return None
        try:
            return self._channel.receive()
        except (EOFError, OSError, Garbled) as error:
            self._channel.close()
            self._channel = None
            garbled = isinstance(error, Garbled)
        return wire.Failed(0, time.monotonic(), "call", _GARBLED) if garbled else None

    def _check_exit(self) -> None:
        exitcode = self._process.exitcode
        if exitcode == _UNKNOWN_EXIT and self._identity is not None and _is_alive(self._identity):
            self.orphaned = True
        elif exitcode is not None:
            if exitcode < 0:
                # faulthandler has written the place of a crash to another file than the rank's output.
                size = os.fstat(self._fds["stacks"]).st_size
                if crash := dumps.crash(self.stacks_since(max(0, size - _MAX_STACKS_BYTES))):
                    self.output.append(crash)
            self.exitcode, self.exited_at = exitcode, time.monotonic()
            self.out_of_memory = exitcode == -signal.SIGKILL and oom_killer.kills() != self._oom_kills

    def _handle(self, message: wire.Message) -> None:
        if isinstance(message, wire.Ready):
            self.ready = True
            if difference := versions.difference_of_copies(versions.package_folder(), message.copy):
                self.report = wire.Failed(0, time.monotonic(), "setup", difference)
        elif isinstance(message, wire.Raised):
            self._raised, self._pickle_deadline = message, time.monotonic() + _PICKLE_TIMEOUT_S
        elif isinstance(message, wire.Regrouped):
            self.regrouped = message
        elif isinstance(message, (wire.Asks, wire.GoesOn)):
            self.said.append(message)
        elif isinstance(message, wire.REPORTS):
            self.report = self.report or message

    def read_metrics(self) -> bytes:
        """Return metric records from the rank's pipe, at most 256 KiB, so that each rank gets its turn."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fds["metrics"], _READ_BYTES)
            self._logged += len(data)
            return data
        return b""

    def unpack_result(self, nbytes: int, known: Sequence[Any]) -> payload.Unpacked:
        """Unpack the object in the rank's result block."""
        if nbytes >= huge_pages.FROM_NBYTES:
            huge_pages.begin()  # for the next run: the size of this block was not known when it was opened
        return payload.unpack(self._fds["result"], nbytes, known=known)

    def answer(self, line: str | None) -> None:
        """Answer the debugger of the rank, which has asked; None: nobody can."""
        self.send(wire.Answer(line))

    def tell_debugger(self, message: wire.Look | wire.HoldTimeouts) -> None:
        """Send a message to the rank while it is in its function."""
        if self.called and self.report is None:
            self.send(message)
            self._signal(debugger.SIGNAL)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the rank's main thread; children such as DataLoader workers get no signal."""
        self._signal(signal.SIGINT)

    def request_stacks(self) -> int | None:
        """Have the rank write the Python stacks of all its threads.

        Returns:
            the argument for :meth:`stacks_since`; None if the user's code has removed the handler, as far as the system
            says so: the signal would kill the rank.
        """
        if not _catches(self.pid, STACKS_SIGNAL):
            return None
        before = os.fstat(self._fds["stacks"]).st_size
        self._signal(STACKS_SIGNAL)
        return before

    def stacks_since(self, before: int) -> str:
        """Return the stacks that the rank has written since; "" if it does not answer, for example when stopped."""
        return os.pread(self._fds["stacks"], _MAX_STACKS_BYTES, before).decode("utf-8", "replace")

    def kill(self) -> None:
        """Send SIGKILL to the rank and to its whole process group."""
        if self.alive:
            self._signal(signal.SIGKILL)
        self._kill_group()

    def end(self) -> None:
        """Kill the rank and its process group, and wait until they have ended."""
        self.kill()
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        if self.alive and wait([self._process.sentinel], _KILL_TIMEOUT_S):
            self.update([self._process.sentinel])
        while self._kill_group() and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # the rank's children are not children of this process, so it cannot wait for them

    def close(self) -> None:
        """Close all file descriptors."""
        if self._channel is not None:
            self._channel.close()
        if self._release is not None:
            self._release.close()
        while self._fds:
            _, fd = self._fds.popitem()
            os.close(fd)
        # Takes the process off multiprocessing's list of children. Not join(0): a spawned rank that was just killed
        # may not be reaped yet, and close() would then leave its pipes open.
        self._process.join(_REAP_TIMEOUT_S)
        # Closes the sentinel, which pulls the dead man's switch of any process that is left.
        with contextlib.suppress(ValueError):  # "still running": its fork server, which would know, has ended
            self._process.close()

    def disown(self) -> None:
        """In a process forked from the kernel: close the file descriptors of the rank, which belongs to the kernel."""
        if self._channel is not None:
            self._channel.close()
        if self._release is not None:
            self._release.close()
        # multiprocessing's finalizer has the sentinels, and does nothing in a fork (Python 3.10 to 3.14).
        for fd in getattr(self._process._popen.finalizer, "_args", ()):
            os.close(fd)

    def _signal(self, number: int) -> None:
        if self._identity is not None and self.exitcode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._identity.send_signal(number)  # checks that the pid is still the process that was started

    def _kill_group(self) -> bool:
        """Send SIGKILL to the rank's process group. Returns whether a member was alive."""
        is_ours = self._identity is not None and self._identity.is_running()  # compares the start times
        if not is_ours and psutil.pid_exists(self.pid):
            return False  # the pid, and so the number of the group, now belongs to a later process
        try:
            # No other process gets the pid, which is the number of the group, while the group has a member.
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return any(_is_alive(process, group=self.pid) for process in psutil.process_iter())


def _is_alive(process: psutil.Process, group: int | None = None) -> bool:
    """Return whether the process is alive, not a zombie, and a member of the process group, if one is given."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        in_group = group is None or os.getpgid(process.pid) == group
        return in_group and process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal; true where the system does not say."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        if found := re.search(r"^SigCgt:\s*([0-9a-f]+)$", status.read(), re.MULTILINE):
            return bool(int(found[1], 16) >> (number - 1) & 1)
    return True
