"""A real kernel, driven as a front end drives it, with the arrival time of every message."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from jupyter_client.manager import KernelManager

from tests.benchmarks import work
from tests.benchmarks.peers import Peer

ROOT = Path(__file__).parents[2]
START_S = 60.0
LIMIT_S = 120.0  # of one cell
_GONE_S = 5.0
WORK = Path(work.__file__).read_text()
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"


class CellFailed(Exception):
    """The cell raised, or did not end in time."""


class StillRunning(CellFailed):
    """The cell did not end in time."""


@dataclass
class Cell:
    """A cell that was run; times are monotonic.

    Attributes:
        began: when the request was sent.
        error_at: when its traceback came, or None.
        ended: when the kernel was idle again.
    """

    began: float
    error_at: float | None = None
    ended: float = 0.0
    shown: str = ""
    error: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Kernel:
    """One notebook's kernel. Leaving it ends all that was started from it."""

    def __init__(self) -> None:
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        env["PYTHONWARNINGS"] = "ignore"
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles what it installs; so is our clone after one kernel
        env["PATH"] = os.pathsep.join(
            [os.path.dirname(sys.executable), env.get("PATH", "")]
        )  # nbdistributed's "python"
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(env=env, cwd=str(ROOT), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_S)
        self._seen: set[psutil.Process] = set()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def cell(self, source: str, timeout_s: float = LIMIT_S) -> Cell:
        """Run a cell that must not fail."""
        done = self.end_of(self.begin(source), timeout_s)
        if done.error:
            raise CellFailed(done.error)
        return done

    def begin(self, source: str) -> tuple[str, Cell]:
        """Send a cell."""
        began = time.monotonic()
        return self._client.execute(textwrap.dedent(source), allow_stdin=False), Cell(began)

    def end_of(self, begun: tuple[str, Cell], timeout_s: float = LIMIT_S) -> Cell:
        """Read until that cell is over."""
        message_id, cell = begun
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise StillRunning(f"not over within {timeout_s:.0f} s") from None
            now = time.monotonic()
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                cell.shown += content["text"]
            elif kind == "error":
                cell.error, cell.error_at = f"{content['ename']}: {content['evalue']}", now
            elif kind == "status" and content["execution_state"] == "idle":
                cell.ended = now
                return cell

    def started(self) -> set[psutil.Process]:
        """All that was started from this kernel and is alive, but multiprocessing's tracker of names."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen |= set(self.process.children(recursive=True))
        return {process for process in self._seen if _is_alive(process) and not _is_tracker(process)}

    def cpu_seconds(self) -> float:
        """CPU time of the kernel and of all that it started, also of what is gone; in steps of 10 ms."""
        total = 0.0
        for process in {self.process, *self.process.children(recursive=True)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
        return total

    def interrupt(self) -> None:
        """As Jupyter does: the kernel's whole process group."""
        os.killpg(os.getpgid(self.process.pid), signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to the kernel alone, as the OOM killer does."""
        self.process.kill()

    def close(self) -> None:
        """End the kernel and, by their ids, the processes that were started from it."""
        self.started()
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
        psutil.wait_procs([process for process in self._seen if _is_alive(process)], timeout=0.3)
        left = [process for process in self._seen if _is_alive(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # checks that the id is still that process's
        psutil.wait_procs(left, timeout=_GONE_S)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return _RESOURCE_TRACKER in " ".join(process.cmdline())
    return False


@contextlib.contextmanager
def prepared(peer: Peer, ranks: int) -> Iterator[Kernel]:
    """A kernel for that candidate, one run behind it."""
    with Kernel() as kernel:
        for source in (WORK, peer.imports, peer.setup(ranks), peer.cell("together", nprocs=ranks)):
            kernel.cell(source)
        yield kernel


class Stamps:
    """The file that ranks write times to."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "stamps")

    def clear(self) -> None:
        for path in (self.path, self.path + ".go"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def lines(self) -> list[tuple[float, list[str]]]:
        """Time and words of each line so far, the process's id first among the words."""
        try:
            text = Path(self.path).read_text()
        except FileNotFoundError:
            return []
        split = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [(float(words[0]), words[1:]) for words in split]

    def last(self) -> float:
        """When the last rank wrote."""
        if not self.lines():
            raise CellFailed("no rank came so far")
        return max(at for at, _ in self.lines())

    def wait_for(self, count: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.lines()) < count:
            if time.monotonic() > deadline:
                raise CellFailed(f"only {len(self.lines())} of {count} ranks were there after {timeout_s:.0f} s")
            time.sleep(0.005)


@contextlib.contextmanager
def stamps() -> Iterator[Stamps]:
    with tempfile.TemporaryDirectory(prefix="nbb-", dir="/tmp") as folder:
        yield Stamps(folder)
