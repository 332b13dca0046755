"""One fork server process: starts it, sends it requests for ranks, and kills it when nothing refers to it any more.

multiprocessing's own fork server is one per process and shared with the user's code, which decides what it imports, and
its socket has a name in a folder for temporary files. Ours can be reached only through a socket pair.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker, spawn, util
from typing import Any

from nbddp import fds, versions
from nbddp.forkserver.inside import LIGHT
from nbddp.text import plain

IMPORTS = ["nbddp.forkserver.inside.imports"]
# In parts of at most 0.35 s, each of which torch._dynamo imports: a request waits for one part. Without torch._dynamo,
# the first torch.optim.Optimizer takes 1 s, in every rank of every run.
LATER = (
    "sympy",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
)
_SHOWN_LINES = 5  # of the server's stderr, in an error
_SHOWN_CHARS = 300  # of each line
_MAX_STDERR_NBYTES = 1 << 20
_CONNECTION_ERRORS = {errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE}  # the server has just ended
_REPORT_BYTES = 1 << 10
_LAST_WORDS_S = 1.0
_POLL_S = 0.002
_FDS_PER_START = 8  # a socket pair, two pipes, a duplicate


class ServerDied(EOFError):
    """A server ended before it had started a process.

    Attributes:
        modules: the modules of :func:`preload` that it imported first.
    """

    def __init__(self, modules: tuple[str, ...], last_output: str = "") -> None:
        super().__init__("the fork server ended" + (f"; its last output was:\n{last_output}" if last_output else ""))
        self.modules = modules


class _Child:
    """A server's process. It is waited for only once, because its pid may be another process's afterwards."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._reaped = False

    def has_ended(self) -> bool:
        if not self._reaped:
            try:
                self._reaped = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            except ChildProcessError:  # other code has waited for it
                self._reaped = True
        return self._reaped

    def kill(self) -> None:
        """Kill the server and what its modules have started, since it leads a process group once it has begun."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.kill(self.pid, signal.SIGKILL)


_servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()
_killed: collections.deque[_Child] = collections.deque()  # not waited for yet


class ForkServer:
    """One server process. It ends when nothing refers to this object any more: no rank of the server, and no thread.

    Attributes:
        modules: the modules of :func:`preload` that it has imported.
        began: when it was started, monotonic.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        """Start it without waiting for its imports. Raises OSError."""
        self.modules = modules
        self.began = time.monotonic()
        self._importing: tuple[str, float] | None = ("torch", self.began)
        self._reading = threading.Lock()
        self._stderr: int | None = None
        with fds.reserve(_FDS_PER_START), contextlib.ExitStack() as theirs, contextlib.ExitStack() as unless_started:
            with contextlib.suppress(AttributeError):  # this system has no memfd
                self._stderr = os.memfd_create("nbddp-server-stderr")  # the server's stderr while it imports
                unless_started.callback(os.close, self._stderr)
            ours, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            theirs.callback(their_end.close)
            self._requests = ours.detach()
            unless_started.callback(os.close, self._requests)
            alive, self._alive = os.pipe()
            theirs.callback(os.close, alive)
            unless_started.callback(os.close, self._alive)
            self._child = _Child(self._start(their_end.fileno(), alive))
            unless_started.pop_all()
        self._release = weakref.finalize(
            self, _release, os.getpid(), self._child, self._requests, self._alive, self._stderr
        )
        self._release.atexit = False  # when this process ends, the server ends by itself
        _servers.add(self)

    def _start(self, requests: int, alive: int) -> int:
        path = [part for part in sys.path if isinstance(part, str)]  # Python ignores other entries
        arguments = (requests, alive, self._stderr, path, self.modules, tuple(IMPORTS), LATER)
        call = f"from nbddp.forkserver.inside import serve\nserve.main(*{arguments!r})"
        program = f"# the fork server of nbddp\n{versions.import_source()}\n{call}"
        exe, flags = spawn.get_executable(), util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        handed = [fd for fd in (requests, alive, self._stderr) if fd is not None]
        start: Any = util.spawnv_passfds
        pid: int = start(exe, [exe, *flags, "-c", program], handed)
        return pid

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._child.pid

    def is_running(self) -> bool:
        """Is the server running? Only the process that started it can know."""
        return self._release.alive and not self._child.has_ended()

    def is_ready(self, timeout_s: float) -> bool:
        """Wait until it has made all its imports, at most ``timeout_s``. A server that has ended counts as ready."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        while not self.has_imported() and self.is_running():
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return not self.is_running()
        return True

    def has_imported(self) -> bool:
        """Return whether it has made all its imports."""
        return self.importing() is None

    def importing(self) -> tuple[str, float] | None:
        """Return what it imports, and since when (monotonic); None when it has made all its imports."""
        if self._importing is None:  # which is final
            return None
        with self._reading, contextlib.suppress(OSError):  # no report is left, or the server has ended
            if not self._release.alive:
                return None
            with socket.socket(fileno=os.dup(self._requests)) as reports:
                while report := reports.recv(_REPORT_BYTES, socket.MSG_DONTWAIT):
                    began, _, what = report.decode("utf-8", "ignore").partition(" ")
                    self._importing = (what, float(began)) if what else None
        return self._importing

    def start_process(self, folder: str, handed: Sequence[int], *, light: bool = False) -> tuple[int, int]:
        """Request a new process. Returns a fd to read its pid and exit code from, and one to write its job to.

        Args:
            folder: its run's folder, which the server makes, and removes when this process is killed; "" for none.
            handed: fds that the new process gets.
            light: it needs none of ``LATER``, and is not to wait for these imports.

        Raises:
            ServerDied: the server has ended. OSError: this process may not open more files.
        """
        with fds.reserve(_FDS_PER_START), contextlib.ExitStack() as theirs, contextlib.ExitStack() as unless_sent:
            sentinel, status = os.pipe()
            theirs.callback(os.close, status)
            unless_sent.callback(os.close, sentinel)
            job, writer = os.pipe()
            theirs.callback(os.close, job)
            unless_sent.callback(os.close, writer)
            tracker: Any = resource_tracker.getfd()
            with self.reporting_its_death(), socket.socket(fileno=os.dup(self._requests)) as requests:
                socket.send_fds(requests, [LIGHT * light, os.fsencode(folder)], [status, job, tracker, *handed])
            unless_sent.pop_all()
        return sentinel, writer

    @contextlib.contextmanager
    def reporting_its_death(self) -> Iterator[None]:
        """Raise ServerDied if communication with the server, or with a process that it starts, finds its end closed."""
        try:
            yield
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _CONNECTION_ERRORS:
                raise
            raise ServerDied(self.modules, self._last_output()) from error

    def disown(self) -> None:
        """In a fork of the process that started the server: close the fds by which the server sees that one's end."""
        if released := self._release.detach():
            _close_all(*released[2][2:])

    def _last_output(self) -> str:
        """The last lines of the server's stderr, if it ended while it imported; copies everything to our own stderr."""
        if self._stderr is None:
            return ""
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._child.has_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # it closes its end before it prints the traceback
        output = os.pread(self._stderr, _MAX_STDERR_NBYTES, max(0, os.fstat(self._stderr).st_size - _MAX_STDERR_NBYTES))
        os.ftruncate(self._stderr, 0)
        with contextlib.suppress(OSError):  # this process may have no stderr
            os.write(2, output)
        lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
        return "\n".join(plain(line[:_SHOWN_CHARS]) for line in lines[-_SHOWN_LINES:])


def _release(owner: int, child: _Child, *held: int | None) -> None:
    if owner == os.getpid():
        child.kill()  # none of its ranks lives, so it has nothing to clean up
        _killed.append(child)
    _close_all(*held)


def _close_all(*held: int | None) -> None:
    for fd in held:
        if fd is not None:
            os.close(fd)


def reap_killed() -> bool:
    """Wait for the servers that were killed and have ended by now. Returns whether others are left."""
    for _ in range(len(_killed)):
        with contextlib.suppress(IndexError):  # another thread took the last one
            child = _killed.popleft()
            if not child.has_ended():
                _killed.append(child)
    return bool(_killed)


def disown_all() -> None:
    """In a fork of the notebook kernel, which owns the servers: hold nothing of them open, and wait for none."""
    for server in list(_servers):
        server.disown()
    _killed.clear()
