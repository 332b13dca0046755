"""A driver from outside: its folder, mounts, limits and processes, and the messages to and from it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.faults.pace import Patience

_START_S = 90.0
_LOOK_S = 0.1
_MEMORY_BYTES = 2 << 30
_CGROUPS = Path("/sys/fs/cgroup")


class Hangs(Exception):
    """The kernel does not answer; the text holds its stacks."""


class DriverKernel:
    """A driver process, in a folder and if this machine allows in a mount namespace of its own.

    Args:
        sort: ``shared``, ``small`` (64 kB of /dev/shm, 8 MB of TMPDIR, 4 MB for snapshots) or ``limited``.
    """

    def __init__(self, sort: str) -> None:
        self.sort = sort
        self.mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self.folder = Path(tempfile.mkdtemp(prefix="nbf-", dir="/tmp"))
        for name in ("tmp", "snapshots"):
            (self.folder / name).mkdir()
        self._said = open(self.folder / "said", "wb")  # noqa: SIM115 (closed with the kernel)
        self._said_before = 0
        self._cgroup = _make_cgroup() if sort == "limited" else None
        self._commands, their_commands = socket.socketpair()
        self._control, their_control = socket.socketpair()
        self._lines: dict[socket.socket, bytes] = {self._commands: b"", self._control: b""}
        fds = (their_commands.fileno(), their_control.fileno())
        self._process = subprocess.Popen(
            self._command(fds),
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            start_new_session=True,
            env={**os.environ, "NBDDP_FAULTS": self.mark, "TMPDIR": str(self.folder / "tmp")},
        )
        their_commands.close(), their_control.close()
        self._is_ready = False

    def wait_until_ready(self) -> None:
        if not self._is_ready:
            self.read(_START_S)
            self._is_ready = True

    def _command(self, fds: tuple[int, int]) -> list[str]:
        driver = [sys.executable, "-m", "tests.faults.driver", *map(str, fds), str(self.folder)]
        first = []
        if self._cgroup is not None:
            first.append(f"echo $$ > {self._cgroup}/cgroup.procs")
        if may_mount():
            size = "64k" if self.sort == "small" else "2g"
            first.append(f"mount -t tmpfs -o size={size} tmpfs /dev/shm")
            if self.sort == "small":
                first.append(f"mount -t tmpfs -o size=8m tmpfs {self.folder}/tmp")
                first.append(f"mount -t tmpfs -o size=4m tmpfs {self.folder}/snapshots")
        shell = ["sh", "-c", " && ".join([*first, 'exec "$@"']), "sh", *driver]
        return ["unshare", "-m", *shell] if may_mount() else shell

    @property
    def pid(self) -> int:
        return self._process.pid

    def seen(self, name: str) -> Path:
        """A folder of this kernel as it sees it itself."""
        return Path(f"/proc/{self.pid}/root{self.folder}/{name}")

    # ------------------------------------------------------------------ talk

    def tell(self, **command: Any) -> None:
        self._commands.sendall(json.dumps(command).encode() + b"\n")

    def has_answered(self, timeout_s: float = 0.0) -> bool:
        """Is there a reply to read?"""
        return bool(self._lines[self._commands] or select.select([self._commands], [], [], max(0.0, timeout_s))[0])

    def read(self, timeout_s: float) -> dict[str, Any]:
        return self._read(self._commands, timeout_s)

    def ask(self, what: str, timeout_s: float = 20.0, **arguments: Any) -> dict[str, Any]:
        """Of the thread that answers while a run is under way."""
        self._control.sendall(json.dumps({"ask": what, **arguments}).encode() + b"\n")
        return self._read(self._control, timeout_s)

    def _read(self, channel: socket.socket, timeout_s: float) -> dict[str, Any]:
        patience = Patience(timeout_s)
        while b"\n" not in self._lines[channel]:
            if not select.select([channel], [], [], _LOOK_S)[0]:
                if patience.is_over():
                    raise Hangs(f"no answer within {timeout_s:.0f} s\n{self._stacks()}")
                continue
            data = channel.recv(1 << 16)
            if not data:
                raise Hangs(f"the kernel is gone: {self._process.wait(5)}\n{self.said()}")
            self._lines[channel] += data
        line, _, self._lines[channel] = self._lines[channel].partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def said(self) -> str:
        """What it has printed since the last call: a kernel has nothing to say here."""
        with open(self.folder / "said", "rb") as file:
            file.seek(self._said_before)
            data = file.read()
        self._said_before += len(data)
        return data.decode("utf-8", "replace")

    def _stacks(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)
        processes = [f"{p.pid} {p.status()} {' '.join(p.cmdline())[:100]}" for p in self.processes()]
        return self.said() + "\nits processes:\n" + "\n".join(processes)

    # ------------------------------------------------------------------ its processes

    def processes(self) -> list[psutil.Process]:
        """All that it has started, directly or not, and itself."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and self.owns(int(entry)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(entry)))
        return found

    def owns(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                return self.mark.encode() in file.read()
        return False

    def fork_server(self) -> int | None:
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                if "the fork server of nbddp" in " ".join(child.cmdline()):
                    return child.pid
        return None

    def strangers(self) -> list[str]:
        """Processes of it that should not be: all but itself, its fork server and its resource tracker."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                kept = "the fork server of nbddp" in command or "multiprocessing.resource_tracker" in command
                if process.pid != self.pid and not (kept and process.ppid() == self.pid):
                    found.append(f"{process.pid} {process.status()} ppid {process.ppid()} {command[:200]}")
        return found

    def zombies(self) -> list[str]:
        found = []
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() == psutil.STATUS_ZOMBIE:
                    found.append(f"{child.pid} zombie")
        return found

    def sockets(self) -> list[str]:
        """Of multiprocessing, in its temporary folder."""
        return sorted(name for name in _files(self.seen("tmp")) if os.path.basename(name).startswith("listener-"))

    # ------------------------------------------------------------------ the end

    def kill(self) -> None:
        """SIGKILL to the kernel alone, as the OOM killer does."""
        self._process.kill()
        self._process.wait(10)

    def left(self) -> list[str]:
        """What is left of a kernel that is gone."""
        files = [name for name in _files(self.folder / "tmp") if "torchinductor" not in name]  # of all processes
        return [*self.strangers(), *files]

    def close(self) -> None:
        """End it and what it has left, whatever state it is in."""
        if self._process.poll() is None:
            self.kill()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for channel in self._lines:
            channel.close()
        self._said.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._cgroup is not None:
            _remove_cgroup(self._cgroup)


def _files(folder: Path) -> list[str]:
    """All files and folders below it, while others remove them."""
    return [
        os.path.relpath(os.path.join(where, name), folder)
        for where, folders, files in os.walk(folder)
        for name in (*folders, *files)
    ]


@cache
def may_mount() -> bool:
    """May this process have mounts of its own (root, or CAP_SYS_ADMIN)?"""
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"]
    return subprocess.run(probe, capture_output=True).returncode == 0


@cache
def may_limit_memory() -> bool:
    """May this process make a memory cgroup inside its own?"""
    try:
        _remove_cgroup(_make_cgroup())
    except (OSError, StopIteration):
        return False
    return True


def _make_cgroup() -> Path:
    """Below our own; Linux' cgroup v2 (``memory.max``) or v1."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    above = _CGROUPS / "memory" if v1 is not None else _CGROUPS
    path = v1 if v1 is not None else next(path for number, _, path in lines if number == "0")
    group = above / path.lstrip("/") / f"nbf-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        limit = group / ("memory.limit_in_bytes" if v1 is not None else "memory.max")
        limit.write_text(str(_MEMORY_BYTES))
    except OSError:
        group.rmdir()
        raise
    return group


def _remove_cgroup(group: Path) -> None:
    deadline = time.monotonic() + 5
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
