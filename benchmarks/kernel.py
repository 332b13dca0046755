"""A real kernel, driven as a front end drives it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

HERE = Path(__file__).parent.parent  # of this package, and of nbddp
LIMIT_S = 300.0  # of one cell; the first run on Ray is slow on a busy machine


class CellFailed(Exception):
    """The cell raised an error, or didn't end in time."""


@dataclass
class Cell:
    """What a cell did.

    Attributes:
        seconds: from the request until the kernel was idle.
        frames: bytes of each message to a widget.
    """

    seconds: float = 0.0
    shown: str = ""
    error: str = ""
    frames: list[int] = field(default_factory=list)


class Kernel(contextlib.ExitStack):
    """One notebook's kernel, in an empty folder, with these variables. Leaving it ends all that was started from it."""

    def __init__(self, **environ: str) -> None:
        super().__init__()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="nbb-", dir="/tmp")))
        env = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(env={**env, **environ}, cwd=str(self.folder), **silent)
        self.callback(self._end)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LIMIT_S)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def started(self) -> list[psutil.Process]:
        """Return the processes that hang below the kernel."""
        return self.process.children(recursive=True)

    def cell(self, source: str) -> Cell:
        """Run a cell that must not fail."""
        done = self.try_cell(source)
        if done.error:
            raise CellFailed(done.error)
        return done

    def try_cell(self, source: str, limit_s: float = LIMIT_S) -> Cell:
        """Run a cell to its end."""
        began = time.monotonic()
        number, cell = self.begin(source), Cell()
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=max(0.01, began + limit_s - time.monotonic()))
            except queue.Empty:
                raise CellFailed(f"still running after {limit_s:.0f} s") from None
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_msg":  # also of other threads
                cell.frames.append(len(json.dumps(content)) + sum(map(len, message["buffers"])))
            if message["parent_header"].get("msg_id") != number:
                continue
            if kind == "stream":
                cell.shown += content["text"]
            elif kind == "error":
                cell.error = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                cell.seconds = time.monotonic() - began
                return cell

    def begin(self, source: str) -> str:
        """Start a cell, as JupyterLab does: a cell without an id would get no panel. Returns the request's id."""
        content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False}
        request = self._client.session.msg("execute_request", content, metadata={"cellId": str(uuid.uuid4())})
        self._client.shell_channel.send(request)
        return str(request["header"]["msg_id"])

    def _end(self) -> None:
        started = self.started()  # nothing if it was killed
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
        for process in psutil.wait_procs(started, timeout=5.0)[1]:
            process.kill()


@contextlib.contextmanager
def kept(opened: Callable[[Any], Kernel]) -> Iterator[Callable[[Any], Kernel]]:
    """Give the kernel of each way, which is opened at the way's first turn."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda way: stack.enter_context(opened(way)))
