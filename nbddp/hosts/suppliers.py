"""What gives a cluster its hosts: names that are reached by a command, or an allocation that a scheduler grants.

    supplier.open()              the names of the hosts; may wait until a scheduler grants them
    supplier.command(name)       the command line of a login, also of another one after a loss
    supplier.close()             gives the hosts back

Everything else, such as the rendezvous, restarts and the panel, knows no supplier.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

from nbddp.errors import LaunchError
from nbddp.hosts import ray_login
from nbddp.hosts.login import SRUN, slurm_nodes
from nbddp.latch import Latch, start_thread
from nbddp.panel.waiting import WaitingLine
from nbddp.text import duration, plain

CHAIN_FROM = 4  # hosts; below, a payload leaves the notebook as often as there are hosts
# Bash and sh end at the end of this stdin, and with them salloc, which gives the allocation back.
_HOLD = 'echo "nbddp $SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat >/dev/null'
_SHOWN_AFTER_S = 2.0
_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 10.0
_LAST_BYTES = 16 << 10

Command = Callable[[str], Sequence[str]]


class Supplier(Protocol):
    """Gives a cluster its hosts.

    Attributes:
        chain_from: the number of hosts from which on a large payload goes from host to host.
    """

    chain_from: int

    def open(self) -> list[str]:
        """Return the names of the hosts, in the order of the ranks. Raises LaunchError."""

    def template(self) -> tuple[str, ...]:
        """Return the launcher of these hosts, with ``{host}`` in one of its words."""

    def close(self) -> None:
        """Give the hosts back."""

    def disown(self) -> None:
        """In a process forked from the notebook kernel: hold nothing of the hosts."""


class Named:
    """Hosts that are there: the user has named them."""

    chain_from = CHAIN_FROM

    def __init__(self, names: Any, template: Sequence[str]) -> None:
        """
        Args:
            names: not checked yet.
        """
        self._names = names
        self._template = tuple(template)

    def open(self) -> list[str]:
        """Return the names."""
        return self._names  # type: ignore[no-any-return]

    def template(self) -> tuple[str, ...]:
        """Return the launcher: ssh, or the user's."""
        return self._template

    def close(self) -> None:
        """Do nothing: they are the user's."""

    def disown(self) -> None:
        """Do nothing."""


class _Held:
    """Hosts that a process of this machine holds for as long as its stdin, which the notebook has, is open.

    So the hosts are given back however the notebook ends.
    """

    chain_from = CHAIN_FROM

    def __init__(self, command: Sequence[str], what: str) -> None:
        """
        Args:
            what: is waited for.
        """
        self._command = command
        self._what = what
        self._process: subprocess.Popen[bytes] | None = None
        self._granted = Latch()
        self._first_line = b""

    def granted(self) -> str:
        """Start the process and wait for its first line. Raises LaunchError: there is none."""
        with tempfile.TemporaryFile() as log:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # an interrupt of the notebook ends the wait below
                )
            except OSError as error:
                raise LaunchError(f"{self._command[0]} cannot be started: {error}") from error
            start_thread(self._read_first_line, "nbddp-granted", lambda _: self._read_first_line())
            self._wait(log)
            if not self._first_line:
                self.close()
                raise LaunchError(f"no hosts were granted: {_last_line(log) or 'no reason was given'}")
        return self._first_line.decode("utf-8", "replace")

    def close(self) -> None:
        """Give the hosts back, or the place in the queue."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        if not self._granted.is_open:
            process.terminate()  # salloc cancels its request
        try:
            process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._granted.wait(_CLOSE_TIMEOUT_S)
        process.stdout.close()

    def disown(self) -> None:
        """Close the pipe that holds the hosts."""
        if self._process is not None and self._process.stdin is not None:
            os.close(self._process.stdin.fileno())

    def _read_first_line(self) -> None:
        process = self._process
        if process is not None and process.stdout is not None:
            self._first_line = process.stdout.readline()
        self._granted.open()

    def _wait(self, log: BinaryIO) -> None:
        """Wait for the answer, and show that it takes long. An interrupt cancels the request."""
        began, line = time.monotonic(), WaitingLine()
        try:
            while not self._granted.wait(_POLL_S):
                if time.monotonic() - began > _SHOWN_AFTER_S:
                    line.show(self._what, duration(time.monotonic() - began), _last_line(log))
            line.end(self._what, duration(time.monotonic() - began))
        except BaseException:
            self.close()
            raise


class Allocated(_Held):
    """Nodes that Slurm allocates for this cluster, by ``salloc``, and gets back at its end."""

    def __init__(self, nodes: int, gpus_per_node: int | None, time_limit: str | None, words: Sequence[str]) -> None:
        self._gpus = [f"--gpus-per-node={gpus_per_node}"] * (gpus_per_node is not None)
        limit = [f"--time={time_limit}"] * (time_limit is not None)
        command = ["salloc", f"--nodes={nodes}", *self._gpus, *limit, *words, "sh", "-c", _HOLD]
        super().__init__(command, f"{_count(nodes)} of Slurm")
        self._job = ""

    def open(self) -> list[str]:
        """Wait until Slurm grants the nodes. Raises LaunchError: it does not."""
        _, self._job, nodes = self.granted().split()
        return slurm_nodes(nodes)

    def template(self) -> tuple[str, ...]:
        """Return ``srun`` in this allocation."""
        return (SRUN[0], f"--jobid={self._job}", *self._gpus, *SRUN[1:])


class OnRay(_Held):
    """Nodes that Ray reserves by a placement group; a process of its own is connected to Ray."""

    chain_from = 2  # all that the notebook sends passes through that process

    def __init__(self, nodes: int, gpus_per_node: int | None, address: str | None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError("cluster('ray') needs Ray: pip install 'nbddp[ray]', here and on all nodes")
        self._folder = tempfile.mkdtemp(prefix="nbddp-ray-")
        relay = [sys.executable, "-m", "nbddp.hosts.ray_relay", self._folder]
        super().__init__([*relay, str(nodes), str(gpus_per_node or 0), address or ""], f"{_count(nodes)} of Ray")

    def open(self) -> list[str]:
        """Wait until Ray has reserved the nodes. Raises LaunchError: there is no Ray."""
        names: list[str] = json.loads(self.granted())
        return names

    def template(self) -> tuple[str, ...]:
        """Return the command that connects a login to the process that is connected to Ray."""
        return (sys.executable, "-S", ray_login.__file__, os.path.join(self._folder, ray_login.SOCKET), "{host}")

    def close(self) -> None:
        """Give the nodes back."""
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _count(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes != 1)}"


def _last_line(log: BinaryIO) -> str:
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode("utf-8", "replace")
    lines = [plain(line).strip().removeprefix("salloc: ") for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")
