"""The fork server that ranks come from: one per notebook kernel or host's agent, with torch already imported."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import reduction, util

from nbddp.errors import LaunchError
from nbddp.forkserver import server_process
from nbddp.forkserver.server_process import ForkServer as ForkServer
from nbddp.forkserver.server_process import ServerDied as ServerDied

_SHUTDOWN_S = 5.0
_POLL_S = 0.01
_FOLDER_PREFIX = "nb-"
_MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103  # bytes (sun_path, less its zero)
_RUN_FOLDER_CHARS = len("/nb-12345678")
_MULTIPROCESSING_FOLDER_CHARS = len("/pymp-12345678")  # its folder for sockets
_SOCKET_CHARS = len("/listener-12345678")


class UnfitServer(Exception):
    """No rank of this run can be forked from this server.

    Attributes:
        preloaded: why, if the reason is a preloaded module; otherwise "".
        outdated: what has another value in the server than in the run and counts when a process starts or imports.
    """

    def __init__(self, preloaded: str = "", outdated: Sequence[str] = ()) -> None:
        super().__init__(preloaded or ", ".join(outdated))
        self.preloaded = preloaded
        self.outdated = tuple(outdated)


class _Current:
    """The server that ranks come from. It is replaced if it has died, or if other imports are needed."""

    def __init__(self) -> None:
        self.modules: tuple[str, ...] = ()  # of preload()
        self._lock = threading.Lock()
        self.server: ForkServer | None = None

    def add(self, modules: Iterable[str]) -> None:
        """Have the next process come from a server that has also imported these modules."""
        with self._lock:
            self.modules = tuple(dict.fromkeys([*self.modules, *modules]))

    def running(self) -> ForkServer:
        """The server, started if it is not running. Raises OSError."""
        reap()
        with self._lock:
            server = self.server
            if server is None or server.modules != self.modules or not server.is_running():
                self.server = None  # the old server ends before another begins, unless it has ranks
                server = self.server = ForkServer(self.modules)
            return server

    def replace(self, dead: ForkServer) -> None:
        """Have the next process come from another server."""
        with self._lock:
            if self.server is dead:
                self.server = None

    def forget_dead(self) -> None:
        """Release a server that has ended."""
        with self._lock:
            if self.server is not None and not self.server.is_running():
                self.server = None

    def renew(self, older_than: float) -> None:
        """Have the next process come from a server that began after that monotonic time."""
        with self._lock:
            if self.server is not None and self.server.began < older_than:
                self.server = None


_current = _Current()


def reap() -> bool:
    """Release servers that have ended: no zombie and no open file remain. Returns whether killed ones still run."""
    _current.forget_dead()
    return server_process.reap_killed()


def _disown() -> None:
    """Called in a fork of the notebook kernel, which owns the servers."""
    global _current
    modules = _current.modules
    server_process.disown_all()
    _current = _Current()
    _current.modules = modules


os.register_at_fork(after_in_child=_disown)


_unfit = False


def available() -> bool:
    """Does this platform support a fork server, and can ranks be forked from it?"""
    return bool(reduction.HAVE_SEND_HANDLE) and sys.platform != "win32" and not _unfit


def preload(modules: Sequence[str]) -> None:
    """Start a server that has also imported these modules, for all later ranks. Raises OSError, LaunchError."""
    check_folder("forkserver", {})
    _current.add(modules)
    _current.running()


def start_method_if_unfit(*, preloaded: str) -> str:
    """The start method of later ranks after no rank could be forked.

    Args:
        preloaded: the reason, if it is a module of :func:`preload`: then all of these modules are given up. "":
            something else that the server imports has initialised CUDA, as it would in a new server.
    """
    global _unfit
    if preloaded:
        _current.modules = ()
        return "forkserver"
    _unfit = True
    return "spawn"


def start_method_if_outdated(names: Sequence[str], environ: Mapping[str, str], *, since: float) -> str:
    """The start method of a run's ranks if the server has used other values of these variables than the run has.

    Args:
        names: of environment variables, or of other state that a process inherits when it starts.
        environ: the ranks' environment.
        since: a monotonic time before which that server began.
    """
    if any(os.environ.get(name) != environ.get(name) for name in names):
        return "spawn"  # the values come from env=, so only this run has them
    _current.renew(since)
    return "forkserver"


def running() -> ForkServer:
    """The server that ranks come from, started if it is not running. Raises OSError."""
    return _current.running()


def replace(dead: ForkServer) -> None:
    """Have the next process come from another server than this one, which has died."""
    _current.replace(dead)


def shut_down() -> None:
    """Shut the server down, unless one of its processes lives, and wait for its end; a later run starts a new one."""
    _current.renew(older_than=float("inf"))
    deadline = time.monotonic() + _SHUTDOWN_S
    while reap() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def warm() -> None:
    """Start the server in the background if the platform supports it and it is not running; it then imports torch."""
    if available() and not _excess("forkserver", {}):
        _current.running()


def importing() -> tuple[str, float] | None:
    """What the server imports, and since when (monotonic); None if it has made all its imports, or does not run."""
    server = _current.server
    return server.importing() if server is not None and server.is_running() else None


def pid() -> int | None:
    """The server's pid; None if it has not been started."""
    server = _current.server
    return server.pid if server is not None else None


@contextlib.contextmanager
def run_folder() -> Iterator[str]:
    """Yield the path of a folder for the sockets of the ranks' multiprocessing, and remove the folder at the end.

    The server makes the folder when it starts the first rank, and removes it if this process is killed: so the folder
    is known to the process that removes it before it exists.
    """
    base = os.path.abspath(_base("forkserver", os.environ))
    if not os.access(base, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "TMPDIR is not a folder that files can be made in", base)
    folder = os.path.join(base, _FOLDER_PREFIX + secrets.token_hex(4))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_folder(start_method: str, environ: Mapping[str, str]) -> None:
    """Check that the path of the folder for temporary files is short enough for the ranks' sockets.

    Args:
        environ: the ranks' environment.

    Raises:
        LaunchError: the path is too long.
    """
    if excess := _excess(start_method, environ):
        base = _base(start_method, environ)
        length = len(os.fsencode(base))
        raise LaunchError(
            f"TMPDIR is {length} characters long, but DataLoader workers create sockets in it, and the system limits "
            f"their paths: it may have at most {length - excess}. Set TMPDIR to a shorter folder, e.g. /tmp, before "
            f"the notebook starts ({base})"
        )


def _excess(start_method: str, environ: Mapping[str, str]) -> int:
    """By how many bytes the path of the folder for temporary files is too long; 0 if it is not."""
    inside = _RUN_FOLDER_CHARS if start_method == "forkserver" else _MULTIPROCESSING_FOLDER_CHARS
    return max(0, len(os.fsencode(_base(start_method, environ))) + inside + _SOCKET_CHARS - _MAX_SOCKET_PATH)


def _base(start_method: str, environ: Mapping[str, str]) -> str:
    """The folder for temporary files: this process's for forked ranks; a spawned rank uses its own environment."""
    if hasattr(util, "_get_base_temp_dir"):  # Python 3.14, which avoids a long TMPDIR
        return str(util._get_base_temp_dir(tempfile))
    given = environ.get("TMPDIR", "")
    if start_method == "spawn" and os.path.isdir(given):
        return os.path.abspath(given)
    return tempfile.gettempdir()
