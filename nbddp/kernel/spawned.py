"""Kernel side. A process started by spawn, a new interpreter: how it is started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from multiprocessing import popen_spawn_posix, process, resource_tracker, spawn, util
from typing import Any

from nbddp.kernel import forked
from nbddp.kernel.room import room_for

_FDS_OF_A_START = 8  # two pipes, subprocess's own, and duplicates


class _Popen(popen_spawn_posix.Popen):
    """As the standard library's, but with an environment of its own and without a copy of the user's ``__main__``."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        tracker_fd: Any = resource_tracker.getfd()
        data = forked.pickled(process_obj, self)
        with room_for(_FDS_OF_A_START):
            self.sentinel, child_w = os.pipe()
            child_r, parent_w = os.pipe()
        # The child's sentinel for this process is parent_w: it stays open for as long as the Popen object lives.
        self.finalizer = util.Finalize(self, forked.close_fds, (self.sentinel, parent_w))
        try:
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
            self.pid = _start(command, process_obj.environ, [*self._fds, tracker_fd, child_r, child_w])
        finally:
            os.close(child_r)
            os.close(child_w)
        with open(parent_w, "wb", closefd=False) as pipe:
            pipe.write(data)


def _start(command: list[str], environ: Mapping[str, str], fds: list[int]) -> int:
    executable = spawn.get_executable()
    started = subprocess.Popen(command, executable=executable, env=environ, pass_fds=fds, restore_signals=False)
    started.returncode = 0  # multiprocessing waits for it; subprocess need not
    return started.pid


class SpawnedProcess(process.BaseProcess):
    """A process started by spawn, which has that environment from its first instruction on."""

    def __init__(self, *, environ: Mapping[str, str], **what: Any) -> None:
        super().__init__(**what)
        self.environ = environ

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 (multiprocessing's name)
        return _Popen(process_obj)

    def __reduce__(self) -> tuple[Any, ...]:
        return forked.as_multiprocessings_own({**self.__dict__, "environ": None})
