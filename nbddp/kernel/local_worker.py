"""Kernel side. One rank on this machine: the process, what it says, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

import psutil

from nbddp import copies, payload, wire
from nbddp.kernel import forked, oom, stacks
from nbddp.kernel.channel import Channel, Garbled
from nbddp.kernel.crew import Rank
from nbddp.kernel.output import RankOutput
from nbddp.worker.output import STACKS_SIGNAL

_GONE_S = 2.0  # after a SIGKILL; a process in an uninterruptible disk wait may take longer
_REAPED_S = 0.1  # once its sentinel says that it is dead
_NAP_S = 0.002
_PICKLED_S = 10.0  # an exception, which may not end to grow while it is
_READ_BYTES = 256 << 10
_MOST_STACKS = 1 << 20
_GARBLED = (
    "RuntimeError: something in this rank wrote to a file descriptor that it had not opened: it is nbddp's own, and "
    "what the rank reports cannot be read any more"
)
_UNKNOWN_EXIT = 255  # multiprocessing's, when the fork server died before the process


class Worker(Rank):
    """One rank on this machine.

    Attributes:
        spawned: it does not come from a fork server.
    """

    def __init__(self, rank: int, process: Any, channel: Channel, output: RankOutput, fds: dict[str, int]) -> None:
        super().__init__(rank, output)
        self._dismissed = False
        self._raised: wire.Raised | None = None
        self._pickled_by = float("inf")  # monotonic
        self.spawned = not isinstance(process, forked.WorkerProcess)
        self._oom_kills = oom.kills()
        self._process = process
        self._channel: Channel | None = channel
        self._fds = fds
        try:
            self._identity: psutil.Process | None = psutil.Process(process.pid)
            self._identity.create_time()  # now: what makes the pid its own, see _signal
        except psutil.NoSuchProcess:
            self._identity = None

    @property
    def pid(self) -> int:
        """Its process id, which is also its session's and process group's."""
        return int(self._process.pid)

    @property
    def result_fd(self) -> int:
        """Of the block that it leaves its result in."""
        return self._fds["result"]

    @property
    def _runs(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._identity is not None and self._identity.is_running() and not _is_zombie(self._identity)
        return False

    def waitables(self) -> list[Any]:
        """What becomes readable when there is news of this rank."""
        sentinel = self._process.sentinel if self.alive and not self.orphaned else None
        return [x for x in (self._channel, sentinel) if x is not None]

    def send(self, message: wire.Message) -> None:
        """Give it a message; a rank that is gone already has none to read."""
        with contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.send(message)

    def dismiss(self) -> None:
        """Let it leave, once."""
        if not self._dismissed:
            self._dismissed = True
            self.send(wire.Leave())

    def hear(self) -> None:
        """Take in what it has said, and whether it has ended."""
        # Its exit first: a message that it sent before that is then certainly in the channel.
        # A spawned one is asked for itself: children that it forked keep its sentinel's pipe open.
        if self.alive and (self.spawned or self.orphaned or wait([self._process.sentinel], 0)):
            self._hear_of_its_end()
        while (message := self._next_message()) is not None:
            self._take(message)
        self._make_do_without_its_exception()

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

    def _make_do_without_its_exception(self) -> None:
        """One that ended while it pickled it, or takes too long: what stands for it is its last word."""
        if self.report is None and self._raised is not None:
            if time.monotonic() > self._pickled_by:
                self.kill()
            if not self.alive:
                self.report = wire.Failed(**vars(self._raised))

    def _hear_of_its_end(self) -> None:
        exitcode = self._process.exitcode
        if exitcode == _UNKNOWN_EXIT and self._runs:
            self.orphaned = True
        elif exitcode is not None:
            if exitcode < 0:
                self._print_crash()
            self.exitcode, self.exited_at = exitcode, time.monotonic()
            self.out_of_memory = exitcode == -signal.SIGKILL and oom.kills() != self._oom_kills

    def _print_crash(self) -> None:
        """Where it crashed, if it did, after all else that it printed; faulthandler has written it beside."""
        size = os.fstat(self._fds["stacks"]).st_size
        if crash := stacks.crash(self.stacks_since(max(0, size - _MOST_STACKS))):
            self.output.append(crash)

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.Ready):
            self.ready = True
            if difference := copies.difference(copies.folder(), message.copy):
                self.report = wire.Failed(0, time.monotonic(), "setup", difference)
        elif isinstance(message, wire.Called):
            self.called = True
        elif isinstance(message, wire.Raised):
            self._raised, self._pickled_by = message, time.monotonic() + _PICKLED_S
        elif isinstance(message, (wire.Finished, wire.Failed, wire.Exited)):
            self.report = self.report or message

    def read_metrics(self) -> bytes:
        """The metric records in its pipe, at most 256 KiB of them: one rank shall not keep us from the others."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fds["metrics"], _READ_BYTES)
            self._logged += len(data)
            return data
        return b""

    def unpack_result(self, nbytes: int, known: Sequence[Any]) -> payload.Unpacked:
        """The object that it left in its result block."""
        return payload.unpack(self._fds["result"], nbytes, known=known)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in its main thread. Not in its children: DataLoader workers follow it."""
        self._signal(signal.SIGINT)

    def ask_for_stacks(self) -> int:
        """Have it write the Python stacks of all its threads. Returns what :meth:`stacks_since` needs to read them."""
        before = os.fstat(self._fds["stacks"]).st_size
        self._signal(STACKS_SIGNAL)
        return before

    def stacks_since(self, before: int) -> str:
        """What it has written of them; "" from one that does not answer (it is stopped, say)."""
        return os.pread(self._fds["stacks"], _MOST_STACKS, before).decode("utf-8", "replace")

    def kill(self) -> None:
        """SIGKILL to it and to all that it started."""
        if self.alive:
            self._signal(signal.SIGKILL)
        self._kill_session()

    def end(self) -> None:
        """Kill what is left of it, see that it is gone, and close everything of it."""
        self.kill()
        deadline = time.monotonic() + _GONE_S
        if self.alive and wait([self._process.sentinel], _GONE_S):
            self.hear()
        while self._kill_session() and time.monotonic() < deadline:
            time.sleep(_NAP_S)  # grandchildren are no children of ours: their end cannot be waited for

    def close(self) -> None:
        """Close its file descriptors."""
        if self._channel is not None:
            self._channel.close()
        for fd in self._fds.values():
            os.close(fd)
        # Takes it off multiprocessing's list of children. Not join(0): a spawned rank that was just killed may not
        # be reaped yet, and would keep its pipes for as long as the Run lives.
        self._process.join(_REAPED_S)
        self._close_process()

    def disown(self) -> None:
        """Close what a fork of the kernel inherited; the rank is not its own."""
        if self._channel is not None:
            self._channel.close()
        # The sentinels. multiprocessing's finalizer holds them, and does nothing in a fork (Python 3.10 to 3.14).
        for fd in getattr(self._process._popen.finalizer, "_args", ()):
            os.close(fd)

    def _close_process(self) -> None:
        # Closes the sentinel, and so pulls the switch on whatever might still be there.
        with contextlib.suppress(ValueError):  # "still running": its fork server is gone, and cannot tell
            self._process.close()

    def _signal(self, number: int) -> None:
        if self._identity is not None and self.exitcode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._identity.send_signal(number)  # checks that the pid is still the process we started

    def _kill_session(self) -> bool:
        """SIGKILL to the rank's process group. Returns whether anything of it was alive."""
        if self._pid_is_anothers():
            return False
        try:
            # Its number is the rank's pid, which nobody else gets while the group has a member.
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return any(_alive_in_group(self.pid))

    def _pid_is_anothers(self) -> bool:
        """Is the rank's pid, and so its group's number, that of a process which started later?"""
        ours = self._identity is not None and self._identity.is_running()  # compares the start times
        return not ours and psutil.pid_exists(self.pid)


def _alive_in_group(group: int) -> Iterator[bool]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and not _is_zombie(process):
                yield True


def _is_zombie(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_ZOMBIE)
