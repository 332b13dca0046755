"""What gives a cluster its hosts: names that are reached by a command, or an allocation that a scheduler grants.

    supplier.open()              the names of the hosts; may wait until a scheduler grants them
    supplier.command(name)       the command line of a login, also of another one after a loss
    supplier.close()             gives the hosts back

Everything else, such as the rendezvous, restarts and the panel, knows no supplier.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

from nbddp.errors import LaunchError
from nbddp.hosts.login import SRUN, slurm_nodes
from nbddp.latch import Latch, start_thread
from nbddp.text import plain

# Bash and sh end at the end of this stdin, and with them salloc, which gives the allocation back.
_HOLD = 'echo "nbddp $SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat >/dev/null'
_SHOWN_AFTER_S = 2.0
_SHOWN_EVERY_S = 10.0
_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 10.0
_LAST_BYTES = 16 << 10

Command = Callable[[str], Sequence[str]]


class Supplier(Protocol):
    """Gives a cluster its hosts."""

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


class Allocated:
    """Nodes that Slurm allocates for this cluster, by ``salloc``, and gets back at its end.

    ``salloc`` holds the allocation as long as its command runs. That command ends with its stdin, which this process
    holds: so the nodes are given back however the notebook ends.
    """

    def __init__(self, nodes: int, gpus_per_node: int | None, time_limit: str | None, words: Sequence[str]) -> None:
        gpus = [f"--gpus-per-node={gpus_per_node}"] * (gpus_per_node is not None)
        limit = [f"--time={time_limit}"] * (time_limit is not None)
        self._gpus = gpus
        self._nodes = nodes
        self._command = ["salloc", f"--nodes={nodes}", *gpus, *limit, *words, "sh", "-c", _HOLD]
        self._job = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._granted = Latch()
        self._first_line = b""

    def open(self) -> list[str]:
        """Wait until Slurm grants the nodes. Raises LaunchError: it does not."""
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
                raise LaunchError(f"salloc cannot be started: {error}; nodes= needs a login node of Slurm") from error
            start_thread(self._read_first_line, "nbddp-salloc", lambda _: self._read_first_line())
            self._wait(log)
            words = self._first_line.decode("utf-8", "replace").split()
            if len(words) != 3 or words[0] != "nbddp":
                self.close()
                raise LaunchError(f"Slurm granted no nodes: {_last_line(log) or 'salloc ended without a word'}")
        _, self._job, nodes = words
        return slurm_nodes(nodes)

    def template(self) -> tuple[str, ...]:
        """Return ``srun`` in this allocation."""
        return (SRUN[0], f"--jobid={self._job}", *self._gpus, *SRUN[1:])

    def close(self) -> None:
        """Give the nodes back, or the place in the queue."""
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
        """Close the pipe that holds the allocation."""
        if self._process is not None and self._process.stdin is not None:
            os.close(self._process.stdin.fileno())

    def _read_first_line(self) -> None:
        process = self._process
        if process is not None and process.stdout is not None:
            self._first_line = process.stdout.readline()
        self._granted.open()

    def _wait(self, log: BinaryIO) -> None:
        """Wait for the answer, and show that it takes long. An interrupt cancels the request."""
        began = shown_at = time.monotonic()
        shown = ""
        try:
            while not self._granted.wait(_POLL_S):
                now, line = time.monotonic(), _last_line(log)
                if now - began > _SHOWN_AFTER_S and (line != shown or now - shown_at > _SHOWN_EVERY_S):
                    shown, shown_at = line, now
                    what = f"waiting for {self._nodes} node{'s' * (self._nodes != 1)} of Slurm, {now - began:.0f} s"
                    print(f"{what}: {line}" if line else what, flush=True)
        except BaseException:
            self.close()
            raise


def _last_line(log: BinaryIO) -> str:
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode("utf-8", "replace")
    lines = [plain(line).strip().removeprefix("salloc: ") for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")
