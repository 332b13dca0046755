"""The fork server's program: it imports what every rank needs, then forks a rank for each request.

Requests come through a socket pair, whose other end belongs to the notebook kernel or a host's agent. There is no name
that another process could connect to.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, spawn, util
from multiprocessing.forkserver import write_signed
from typing import NoReturn

from nbddp.forkserver.inside import LIGHT, reaper
from nbddp.forkserver.inside.stages import Stages
from nbddp.worker import dead_man_switch, inherited, leftovers

_REQUEST_BYTES = 1 << 10
_MAX_FDS = 253  # Linux's SCM_MAX_FD
_REPORT_CHARS = 200
# How long the rest is left for a first request that follows soon: cells that import nbddp and torch, and start a run.
_FIRST_REQUEST_S = 0.4
_QUIET_S = 1.0  # after the last rank's end: of cells that run one after the other, none waits for a part of the rest
_UNTIL_STEP_S = 10.0  # of ranks that go on for long, so that the later ones start as fast as any
_CLEANUP_S = 1.0
_POLL_S = 0.01


def main(
    requests: int,
    alive: int,
    stderr: int | None,
    path: list[str],
    modules: Sequence[str],
    imports: Sequence[str],
    later: Sequence[str],
) -> None:
    """Be the fork server until the notebook kernel ends.

    Args:
        requests: this end of the socket pair.
        alive: a pipe whose other end closes when the notebook kernel ends.
        stderr: a file in memory that replaces stderr during the imports; None: stderr is not replaced.
        path: the notebook kernel's ``sys.path``, for ``modules``.
        modules: the modules of ``nbddp.preload``.
        imports: nbddp's own modules.
        later: modules that not every run needs.
    """
    os.setsid()  # a signal to the notebook's process group does not reach the server, which then cleans up
    # A signal and not a thread, because an import in C holds the GIL for seconds.
    dead_man_switch.kill_on_hangup(alive, os.getpid())
    if dead_man_switch.has_hung_up(alive):  # the notebook kernel ended before the switch was armed
        os._exit(1)
    inherited.forked = True
    with socket.socket(fileno=requests) as requested:
        stages = Stages(stderr, later, functools.partial(_report, requested))
        stages.first(path, modules, imports)
        if not inherited.unfit:  # a thread of an unfit module might keep this process alive: the signal must end it
            dead_man_switch.disarm(alive)
        util._close_stdin()  # type: ignore[attr-defined]
        _Server(requested, alive, stages).serve()
    # Kill this process and what its modules have started. Not sys.exit(): libraries' messages from the interpreter's
    # shutdown would appear in the notebook (torch 2.15's bindings, nanobind, list 27 leaked objects).
    os.killpg(0, signal.SIGKILL)


def _report(requested: socket.socket, importing: str) -> None:
    """Tell the notebook kernel what is imported from now on; "" when all is done."""
    with contextlib.suppress(OSError):  # the notebook kernel has ended, or reads none of it
        requested.send(f"{time.monotonic()} {importing}"[:_REPORT_CHARS].encode(), socket.MSG_DONTWAIT)


class _Server:
    """Forks ranks, reports their pids and exit codes, and cleans up when the notebook kernel is killed."""

    def __init__(self, requests: socket.socket, alive: int, stages: Stages) -> None:
        self._requests = requests
        self._stages = stages
        self._alive = alive
        self._ranks: dict[int, int] = {}  # from pid to the pipe for its exit code
        self._folders: set[str] = set()  # the folders of runs
        self._next_step_at = time.monotonic() + _FIRST_REQUEST_S
        self._child_ended, wake = os.pipe()
        for fd in (self._child_ended, wake):
            os.set_blocking(fd, False)
        self._wake = wake
        self._handlers = {
            signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None),  # a handler, so that it wakes poll()
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        }
        signal.set_wakeup_fd(wake)
        reaper.become_subreaper_of_ranks()

    def serve(self) -> None:
        """Serve until the notebook kernel ends. The kernel kills a server that it no longer needs."""
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(self._child_ended, select.POLLIN)
        poll.register(self._alive, 0)  # POLLHUP is always reported
        while True:
            ready = dict(poll.poll(self._timeout_ms()))
            if ready.get(self._requests.fileno(), 0) & select.POLLIN:
                self._fork(*self._receive())
            elif self._child_ended in ready:
                os.read(self._child_ended, 1 << 16)
                self._report_exit_codes()
            elif self._alive in ready:
                return self._clean_up()
            else:
                self._take_a_step()

    def _timeout_ms(self) -> float | None:
        """Return how long to wait for a request before something that is left is done; None: forever."""
        if self._stages.over:
            return None
        if self._ranks:
            return _UNTIL_STEP_S * 1000
        return max(0.0, self._next_step_at - time.monotonic()) * 1000

    def _take_a_step(self) -> None:
        if self._ranks or any(map(os.path.isdir, self._folders)):  # to clean up after them comes before a quick end
            self._stages.next_step()
        else:
            dead_man_switch.kill_on_hangup(self._alive, os.getpid())
            if not dead_man_switch.has_hung_up(self._alive):
                self._stages.next_step()
            dead_man_switch.disarm(self._alive)
        if self._stages.over:
            _report(self._requests, "")

    def _receive(self) -> tuple[bytes, list[int]]:
        """A request, and file descriptors: for the rank's pid and exit code, its job, and others."""
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        request, fds, flags, _ = socket.recv_fds(self._requests, _REQUEST_BYTES, _MAX_FDS, flags)
        if flags & socket.MSG_CTRUNC:  # this process may not open more files
            _answer(fds[:1], -errno.EMFILE)
            _close(fds)
            return self._receive()
        return request, list(fds)

    def _fork(self, request: bytes, fds: list[int]) -> None:
        """Fork a rank. The request is the folder of its run, behind ``LIGHT`` if it needs nothing that is left."""
        status, job, *rest = fds
        light, folder = request.startswith(LIGHT), os.fsdecode(request.removeprefix(LIGHT))
        if not light:
            self._stages.import_all()
        try:
            self._make(folder)
            pid = os.fork()
        except OSError as error:
            _answer([status], -(error.errno or errno.EAGAIN))
            return _close(fds)
        if pid == 0:
            self._be_a_rank(status, job, rest)
        self._ranks[pid] = status
        _answer([status], pid)
        return _close([job, *rest])

    def _make(self, folder: str) -> None:
        """Make the folder of a run whose first rank is starting, and forget the folders of runs that are over."""
        if folder and folder not in self._folders:
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                found = os.lstat(folder)
                is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
                if not is_ours:  # else another server of this notebook kernel made it
                    raise
            self._folders = {folder, *filter(os.path.isdir, self._folders)}

    def _be_a_rank(self, status: int, job: int, rest: list[int]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._requests.close()
            _close([self._alive, self._child_ended, self._wake, status, *self._ranks.values()])
            resource_tracker._resource_tracker._fd, *handed = rest  # type: ignore[attr-defined]
            forkserver._forkserver._inherited_fds = handed  # type: ignore[attr-defined]
            code = spawn._main(job, os.dup(job))
        except Exception:  # the rank could not begin; nothing is above this frame
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _report_exit_codes(self) -> None:
        while ended := reaper.next_ended(self._ranks):
            pid, status = ended
            fd = self._ranks.pop(pid, None)
            if fd is not None:
                _answer([fd], os.waitstatus_to_exitcode(status))
                os.close(fd)
                self._next_step_at = time.monotonic() + _QUIET_S

    def _clean_up(self) -> None:
        """Kill the remaining processes of a notebook kernel that was killed, and remove their files."""
        reaper.kill_all()
        deadline = time.monotonic() + _CLEANUP_S
        while self._folders and time.monotonic() < deadline:
            for folder in self._folders:
                leftovers.remove(leftovers.mark_of(folder), folder, (), segments=True)
                shutil.rmtree(folder, ignore_errors=True)
            # A rank's last child may have created another socket.
            self._folders = {folder for folder in self._folders if os.path.isdir(folder)}
            time.sleep(_POLL_S)


def _answer(fds: list[int], number: int) -> None:
    for fd in fds:
        with contextlib.suppress(BrokenPipeError):  # no process waits for it any more
            write_signed(fd, number)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
