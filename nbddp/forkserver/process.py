"""Starts a rank's process: forked from our fork server, or spawned as a new interpreter."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import popen_forkserver, popen_spawn_posix, process, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from multiprocessing.forkserver import read_signed
from typing import Any

from nbddp import fds
from nbddp.forkserver import server
from nbddp.forkserver.server_process import ForkServer, ServerDied

_FDS_PER_START = 8  # two pipes, subprocess's own, and duplicates
_ERRORS_OF_FORK = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE}  # any other is about the run's folder


def _close_fds(*fds: int) -> None:
    """The finalizer of a process object, like multiprocessing's."""
    for fd in fds:
        os.close(fd)


class _ForkPopen(popen_forkserver.Popen):
    """The standard library's Popen, but from our server, and without a copy of the user's ``__main__``."""

    _fds: list[int]
    _server: ForkServer  # kept alive, because it reports the exit code

    def _launch(self, process_obj: Any) -> None:
        job = _pickled(process_obj, self)
        try:
            self._start(process_obj, job)
        except ServerDied:  # try once more with a new server
            server.replace(self._server)
            self._start(process_obj, job)

    def _start(self, process_obj: Any, job: bytes) -> None:
        self._server, folder = server.running(), process_obj.folder
        light = not self._server.has_imported() and process_obj.is_light()
        self.sentinel, writer = self._server.start_process(folder, self._fds, light=light)
        # The writer is the child's sentinel for this process: it stays open for as long as the Popen object lives.
        self.finalizer = util.Finalize(self, _close_fds, (self.sentinel, writer))
        try:
            with self._server.reporting_its_death():
                with contextlib.suppress(BrokenPipeError):  # no process has come of it; the number says why
                    while job:
                        job = job[os.write(writer, job) :]
                self.pid = read_signed(self.sentinel)
        except ServerDied:
            self.finalizer()
            raise
        if self.pid < 0:
            self.finalizer()
            about = [] if -self.pid in _ERRORS_OF_FORK or not folder else [folder]
            raise OSError(-self.pid, f"{os.strerror(-self.pid)}, in the fork server", *about)


class ForkedProcess(process.BaseProcess):
    """A process forked from our server.

    Attributes:
        folder: its run's folder, which the server makes, and removes when this process is killed; "" for none.
        is_light: returns whether it can do without the modules that the server imports last.
    """

    def __init__(self, *, folder: str = "", is_light: Callable[[], bool] = lambda: False, **what: Any) -> None:
        super().__init__(**what)
        self.folder = folder
        self.is_light = is_light

    @staticmethod
    def _Popen(process_obj: Any) -> _ForkPopen:  # noqa: N802 (multiprocessing's name)
        return _ForkPopen(process_obj)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced({**self.__dict__, "is_light": None})


def _reduced(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Reduce a process object to one of multiprocessing's own class, because a rank must not import this module."""
    # Without the start method: processes that the rank starts use the rank's default.
    return object.__new__, (process.BaseProcess,), {**attributes, "_start_method": None}


def _pickled(process_obj: Any, popen: Any) -> bytes:
    """The data that the new process reads first: for ``multiprocessing.spawn.prepare``, and the process object.

    Not with ``get_preparation_data``, which would fix the kernel's default start method, and have the child run the
    user's script again.
    """
    preparation = {
        "name": process_obj.name,
        "authkey": process.current_process().authkey,
        "sys_path": import_path(),
        "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
    }
    buffer = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation, buffer)
        reduction.dump(process_obj, buffer)
    finally:
        set_spawning_popen(None)
    return buffer.getvalue()


def import_path() -> list[str]:
    """The ``sys.path`` of a rank: this process's without the entries that Python ignores."""
    return [part or os.getcwd() for part in sys.path if isinstance(part, str)]


class _SpawnPopen(popen_spawn_posix.Popen):
    """The standard library's Popen, but with a given environment and without a copy of the user's ``__main__``."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        tracker_fd: Any = resource_tracker.getfd()
        data = _pickled(process_obj, self)
        with fds.reserve(_FDS_PER_START):
            self.sentinel, child_w = os.pipe()
            child_r, parent_w = os.pipe()
        # parent_w is the child's sentinel for this process: it stays open for as long as the Popen object lives.
        self.finalizer = util.Finalize(self, _close_fds, (self.sentinel, parent_w))
        try:
            started = subprocess.Popen(
                spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r),
                executable=spawn.get_executable(),
                env=process_obj.environ,
                pass_fds=[*self._fds, tracker_fd, child_r, child_w],
                restore_signals=False,
            )
            started.returncode = 0  # multiprocessing waits for the process, so subprocess must not
            self.pid = started.pid
        finally:
            os.close(child_r)
            os.close(child_w)
        with open(parent_w, "wb", closefd=False) as pipe:
            pipe.write(data)


class SpawnedProcess(process.BaseProcess):
    """A spawned process, which has the given environment from its first instruction on."""

    def __init__(self, *, environ: Mapping[str, str], **what: Any) -> None:
        super().__init__(**what)
        self.environ = environ

    @staticmethod
    def _Popen(process_obj: Any) -> _SpawnPopen:  # noqa: N802 (multiprocessing's name)
        return _SpawnPopen(process_obj)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced({**self.__dict__, "environ": None})
