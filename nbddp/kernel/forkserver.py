"""Kernel side. The fork server that ranks come from: one per kernel, with torch already imported.

multiprocessing's own fork server is one per process and shared with the user's code; this is a second
instance of the same class, so that neither changes what the other's children find imported.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, process, reduction, util
from typing import Any

from nbddp import copies
from nbddp.errors import LaunchError, plain
from nbddp.kernel.room import room_for

RUN_PREFIX = "r"  # see nbddp.worker.preload
_LAST_LINES = 5
_MOST_SAID = 1 << 20  # bytes
_MOST_LINE = 300  # characters
_DIED = (EOFError, BrokenPipeError, ConnectionResetError)  # what asking a server raises that dies just then
_FDS_OF_A_START = 8  # a socket, two pipes, a duplicate
_MOST_NAME = 107 if sys.platform == "linux" else 103  # bytes of a socket's path (sun_path, less its zero)
_OF_MULTIPROCESSING = len("/pymp-12345678")  # its folder for sockets
_OF_A_RUN = len("/rff")  # with up to 256 at once
_OF_A_SOCKET = len("/listener-12345678")
PRELOAD = ["nbddp.worker.detach", "nbddp.worker.preload"]
_ASKED = "nbddp.worker.asked"


_paths = threading.Lock()


class ServerDied(EOFError):
    """A server ended before it had started a process.

    Attributes:
        wanted: the modules of :func:`preload` that it imported first.
    """

    def __init__(self, wanted: tuple[str, ...], said: str = "") -> None:
        super().__init__("the fork server ended" + (f"; the last it said:\n{said}" if said else ""))
        self.wanted = wanted


class _Imports(list[str]):
    """What a server imports. multiprocessing writes it into the server's program, which first imports our own copy.

    The server finds modules by a ``sys.path`` of its own (until Python 3.13), or by the kernel's as it is now. For an
    error that is no ImportError it would end: what the user wants is left to ``nbddp.worker.wanted``.
    """

    def __init__(self, wanted: Sequence[str], memory: str, mark: str) -> None:
        super().__init__(PRELOAD)
        self._told = list(wanted), memory, mark

    def __repr__(self) -> str:
        path = [part for part in sys.path if isinstance(part, str)]
        told = f"__import__({_ASKED!r}, fromlist=[None]).note({path!r}, *{self._told!r})"
        return f"exec({copies.import_source()!r}) or {told} or {super().__repr__()}"


_servers: weakref.WeakSet[_ForkServer] = weakref.WeakSet()


class _ForkServer(forkserver.ForkServer):
    """One server. It ends when nobody holds this object any more: no process that came from it, no thread that asks."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        super().__init__()
        self.owner = os.getpid()
        self.wanted = wanted
        self.began = 0.0  # when the process was started, monotonic
        self.in_use = threading.Lock()  # held while it is started or spoken to
        self.said, mark = None, f"nbddp-said-{os.urandom(8).hex()}"
        with contextlib.suppress(OSError, AttributeError):  # no descriptor is left, or the system has no such files
            self.said = os.memfd_create(mark)  # its stderr while it imports
        # multiprocessing hands over no other file: the server opens it through /proc.
        memory = f"/proc/{self.owner}/fd/{self.said}" if self.said is not None else ""
        self.set_forkserver_preload(_Imports(wanted, memory, mark))
        weakref.finalize(self, _end, vars(self)).atexit = False  # with this process it ends by itself
        _servers.add(self)

    def ensure_running(self) -> None:
        """As the standard library's, but remembers when."""
        before, now = vars(self)["_forkserver_pid"], time.monotonic()
        self._ensure_running()
        if vars(self)["_forkserver_pid"] != before:
            self.began = now

    def last_words(self) -> str:
        """The last lines of what it said while it imported, if that has ended it; all goes to our own stderr."""
        if self.said is None:
            return ""
        said = os.pread(self.said, _MOST_SAID, max(0, os.fstat(self.said).st_size - _MOST_SAID))
        os.ftruncate(self.said, 0)
        with contextlib.suppress(OSError):  # there may be none
            os.write(2, said)
        lines = [plain(line[:_MOST_LINE]) for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
        return "\n".join(lines[-_LAST_LINES:])

    def bury(self) -> None:
        """Forget a process that has died: no zombie of it is left, and no pipe or socket that led to it."""
        mine = vars(self)
        if self.owner != os.getpid() or not self.in_use.acquire(blocking=False):
            return
        try:
            if mine["_forkserver_pid"] is not None and _is_reaped(mine["_forkserver_pid"]):
                _unlink_socket(mine["_forkserver_address"])
                os.close(mine["_forkserver_alive_fd"])
                mine.update(_forkserver_address=None, _forkserver_alive_fd=None, _forkserver_pid=None)
        finally:
            self.in_use.release()

    def _ensure_running(self) -> None:
        """The standard library writes ``sys.path`` into a program: a ``Path`` in it is no Python there."""
        if all(isinstance(part, str) for part in sys.path):
            return super().ensure_running()
        with _paths:
            path = sys.path
            sys.path = [part for part in path if isinstance(part, str)]  # Python itself passes over the others
            try:
                return super().ensure_running()
            finally:
                sys.path = path


def _end(server: dict[str, Any]) -> None:
    if server["said"] is not None:
        os.close(server["said"])
    if server["owner"] != os.getpid() or server["_forkserver_pid"] is None:
        return
    _unlink_socket(server["_forkserver_address"])  # first: a server at its end removes the folder, if it is empty
    os.close(server["_forkserver_alive_fd"])
    _ended.append(server["_forkserver_pid"])


_ended: collections.deque[int] = collections.deque()  # pids of servers that are to be waited for


class _Server:
    """The one that ranks come from: anew where it cannot be reached, and when something else is to be imported."""

    def __init__(self) -> None:
        self.wanted: tuple[str, ...] = ()  # modules, beside our own
        self._lock = threading.Lock()
        self._current: Any = None

    def want(self, modules: Iterable[str]) -> None:
        """Have the next process come from a server that has imported these, too."""
        with self._lock:
            self.wanted = tuple(dict.fromkeys([*self.wanted, *modules]))

    def get(self) -> Any:
        with self._lock:
            current = self._current
            if current is None or current.wanted != self.wanted:
                self._current = _ForkServer(self.wanted)
            return self._current

    def running(self) -> Any:
        """It, started."""
        reap()
        server = self.get()
        with server.in_use, _no_trace_of_a_restart(server):
            server.ensure_running()
        return server

    def connect(self, fds: list[int]) -> tuple[Any, tuple[int, int]]:
        """See :func:`connect`."""
        self.private_folder()
        server = self.running()
        try:
            return server, self._ask(server, fds)
        except (FileNotFoundError, ConnectionRefusedError):
            self._give_up(server)
            server = self.running()
            return server, self._ask(server, fds)

    def _ask(self, server: Any, fds: list[int]) -> tuple[int, int]:
        # It may have been killed since it was looked at.
        with server.in_use, room_for(_FDS_OF_A_START), _no_trace_of_a_restart(server), telling_of_its_death(server):
            return server.connect_to_new_process(fds)  # type: ignore[no-any-return]

    def private_folder(self) -> str:
        """multiprocessing's folder for sockets, there and ours alone: systems clean /tmp of what is old."""
        folder = util.get_temp_dir()
        if _is_private(folder):
            return folder
        self._give_up(self._current)  # its socket is gone, or no longer its own
        with contextlib.suppress(FileExistsError):
            os.makedirs(folder, mode=0o700)
        if not _is_private(folder):
            process.current_process()._config["tempdir"] = None  # type: ignore[attr-defined]  # a new one is made
        return util.get_temp_dir()

    def _give_up(self, server: Any) -> None:
        """Leave a server that cannot be reached any more."""
        with self._lock:
            if server is self._current:  # else another thread has
                self._current = None

    def renew(self, older_than: float) -> None:
        """Have the next process come from a server that began after that time."""
        with self._lock:
            if self._current is not None and self._current.began < older_than:
                self._current = None

    def pid(self) -> int | None:
        """The running server's pid, or None before the first start."""
        current = self._current
        return current._forkserver_pid if current is not None else None


@contextlib.contextmanager
def telling_of_its_death(server: Any) -> Iterator[None]:
    """Around what is said to a server, or to a process that it starts. Raises ServerDied."""
    try:
        yield
    except _DIED as error:
        raise ServerDied(server.wanted, server.last_words()) from error


def reap() -> None:
    """Leave nothing of a server that has ended, whoever ended it."""
    for server in list(_servers):
        server.bury()
    for _ in range(len(_ended)):
        with contextlib.suppress(IndexError):  # another thread has it
            pid = _ended.popleft()
            if not _is_reaped(pid):
                _ended.append(pid)


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _is_private(folder: str) -> bool:
    """Is it still ours? In a shared /tmp, anybody can make a folder of the same name once ours was cleaned away."""
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


_server = _Server()


def _disown() -> None:
    """In a process forked from the kernel: the server is the kernel's, and ends with that."""
    global _server
    current, wanted = _server._current, _server.wanted
    _server = _Server()
    _server.wanted = wanted
    if current is not None and current._forkserver_alive_fd is not None:
        with contextlib.suppress(OSError):  # another thread was closing it
            os.close(current._forkserver_alive_fd)


os.register_at_fork(after_in_child=_disown)


_unfit = False


def available() -> bool:
    """Has this platform a fork server, and can ranks come from it?"""
    return bool(reduction.HAVE_SEND_HANDLE) and sys.platform != "win32" and not _unfit


def preload(modules: Sequence[str]) -> None:
    """Have later ranks come from a server that has imported these, too, and start it. Raises OSError, LaunchError."""
    check_folder("forkserver", {})
    _server.want(modules)
    _server.private_folder()
    _server.running()


def method_without(*, preloaded: str) -> str:
    """No rank can be forked: how they start from now on.

    Args:
        preloaded: what is wrong with a module of :func:`preload`: then all of those are given up. "": something else
            that the server imports initialised CUDA, and so would a new one.
    """
    global _unfit
    if preloaded:
        _server.wanted = ()
        return "forkserver"
    _unfit = True
    return "spawn"


def method_with(names: Sequence[str], environ: Mapping[str, str], *, since: float) -> str:
    """A server has values of these variables that have counted, and a run other ones: how its ranks start.

    Args:
        names: of variables, or of what else is inherited at a process's start.
        environ: the ranks'.
        since: monotonic time, before which the server began that had them.
    """
    if any(os.environ.get(name) != environ.get(name) for name in names):
        return "spawn"  # env= has them: they are this run's alone
    _server.renew(since)
    return "forkserver"


def _unfix_default_method(before: str | None) -> None:
    if before is None and multiprocessing.get_start_method(allow_none=True) is not None:
        multiprocessing.set_start_method(None, force=True)


def connect(fds: list[int]) -> tuple[Any, tuple[int, int]]:
    """A new process, given ``fds``: whom to hold while it lives, the fds of its exit code and of its input.

    Raises:
        ServerDied: the server ended meanwhile. OSError: none can be started.
    """
    return _server.connect(fds)


def warm() -> None:
    """Start the server, if there can be one and it is not running. Returns at once; it imports torch meanwhile."""
    if available() and not _excess("forkserver", {}):
        _server.running()


@contextlib.contextmanager
def _no_trace_of_a_restart(server: Any) -> Iterator[None]:
    """multiprocessing starts a server anew that was killed: it leaves the old one's socket, and fixes the method."""
    before, method = server._forkserver_address, multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        if before is None or before != server._forkserver_address:  # else a method that has changed is the user's
            _unlink_socket(before)
            _unfix_default_method(method)


def pid() -> int | None:
    """The server's pid, or None when it has not been started."""
    return _server.pid()


@contextlib.contextmanager
def folder_of_a_run() -> Iterator[str]:
    """Beside the server's socket, where the ranks' multiprocessing leaves sockets when it is killed."""
    # The server removes it when the kernel is killed.
    folder = _new_folder(_server.private_folder())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder(parent: str) -> str:
    """With a name as short as can be, since a socket's path is limited."""
    for number in itertools.count():
        path = os.path.join(parent, f"{RUN_PREFIX}{number:x}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            return path
    raise AssertionError


def check_folder(start_method: str, environ: Mapping[str, str]) -> None:
    """See that the ranks' sockets can have names in the folder for temporary files.

    Args:
        environ: the ranks'.

    Raises:
        LaunchError: it is too long for that.
    """
    if excess := _excess(start_method, environ):
        base = _base(start_method, environ)
        length = len(os.fsencode(base))
        raise LaunchError(
            f"TMPDIR is {length} characters long, and sockets of DataLoader workers lie in it, whose names the system "
            f"limits: at most {length - excess}. Set TMPDIR to a shorter folder, e.g. /tmp, before the notebook "
            f"starts ({base})"
        )


def _excess(start_method: str, environ: Mapping[str, str]) -> int:
    """By how many bytes the folder for temporary files is too long; 0 where it is not."""
    longest = len(os.fsencode(_base(start_method, environ))) + _OF_MULTIPROCESSING + _OF_A_SOCKET
    return max(0, longest + _OF_A_RUN * (start_method == "forkserver") - _MOST_NAME)


def _base(start_method: str, environ: Mapping[str, str]) -> str:
    """Where multiprocessing makes its folder: here for all ranks that are forked; each spawned one makes its own."""
    if hasattr(util, "_get_base_temp_dir"):  # Python 3.14, which avoids a long TMPDIR
        return str(util._get_base_temp_dir(tempfile))
    given = environ.get("TMPDIR", "")
    if start_method == "spawn" and os.path.isdir(given):
        return os.path.abspath(given)
    made = process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    return os.path.dirname(made) if made else tempfile.gettempdir()


def _unlink_socket(address: str | None) -> None:
    if address is not None:
        with contextlib.suppress(OSError, ValueError):  # in some Pythons it has no file
            os.unlink(address)
