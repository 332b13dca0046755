"""Kernel side. A process forked from our server: how it is started."""

from __future__ import annotations

import io
import os
import sys
from multiprocessing import popen_forkserver, process, reduction, util
from multiprocessing.context import set_spawning_popen
from multiprocessing.forkserver import read_signed
from typing import Any

from nbddp.kernel import forkserver


def close_fds(*fds: int) -> None:
    """As multiprocessing's finalizer of a process object."""
    for fd in fds:
        os.close(fd)


class _Popen(popen_forkserver.Popen):
    """As the standard library's, but from our server, and without a copy of the user's ``__main__``."""

    _fds: list[int]
    _server: Any  # the exit code comes from it: it must not end before

    def _launch(self, process_obj: Any) -> None:
        data = pickled(process_obj, self)
        try:
            self._ask_server(data)
        except forkserver.ServerDied:  # under our hands: a new one is started
            self._ask_server(data)

    def _ask_server(self, process_data: bytes) -> None:
        self._server, (self.sentinel, writer) = forkserver.connect(self._fds)
        try:
            with forkserver.telling_of_its_death(self._server):
                self._hand_over(writer, process_data)
        except forkserver.ServerDied:
            if self.finalizer is not None:
                self.finalizer()
            raise

    def _hand_over(self, writer: int, process_data: bytes) -> None:
        with open(writer, "wb") as pipe:
            try:
                kept = os.dup(writer)
            except OSError:
                os.close(self.sentinel)
                raise
            # The child's sentinel for this process: it stays open for as long as the Popen object lives.
            self.finalizer = util.Finalize(self, close_fds, (kept, self.sentinel))
            pipe.write(process_data)
        self.pid = read_signed(self.sentinel)


class WorkerProcess(process.BaseProcess):
    """A process forked from our server."""

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 (multiprocessing's name)
        return _Popen(process_obj)

    def __reduce__(self) -> tuple[Any, ...]:
        return as_multiprocessings_own(self.__dict__)


def as_multiprocessings_own(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """How a process object is pickled. The worker is told of multiprocessing's class: it must not import this side."""
    # No start method: what the rank itself starts uses its own default.
    return object.__new__, (process.BaseProcess,), {**attributes, "_start_method": None}


def pickled(process_obj: Any, popen: Any) -> bytes:
    """What the new process reads first: how to prepare itself, and the process object."""
    buffer = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(_preparation(process_obj.name), buffer)
        reduction.dump(process_obj, buffer)
    finally:
        set_spawning_popen(None)
    return buffer.getvalue()


def import_path() -> list[str]:
    """Where a rank finds modules: ``sys.path`` without what Python does not look at."""
    return [part or os.getcwd() for part in sys.path if isinstance(part, str)]


def _preparation(name: str) -> dict[str, Any]:
    """What ``multiprocessing.spawn.prepare`` needs in a rank.

    Its own ``get_preparation_data`` also fixes the kernel's default start method for good, and has
    the child run the user's script again.
    """
    return {
        "name": name,
        "authkey": process.current_process().authkey,
        "sys_path": import_path(),
        "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
    }
