"""Kernel side. The fork server that ranks come from: one per kernel, with torch already imported.

multiprocessing's own fork server is one per process and shared with the user's code; this is a second
instance of the same class, so that neither changes what the other's children find imported.
"""

from __future__ import annotations

import collections
import contextlib
import io
import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import forkserver, popen_forkserver, process, reduction, util
from multiprocessing.context import set_spawning_popen
from typing import Any

RUN_PREFIX = "r-"  # see nbddp.worker.preload
WANTED_PREFIX = "nbddp.preload:"  # see nbddp.worker.wanted
_DIED = (EOFError, BrokenPipeError, ConnectionResetError)  # what asking a server raises that dies just then
_FDS_OF_A_START = 8  # a socket, two pipes, a duplicate
_OPENING_S = 0.2
PRELOAD = ["nbddp.worker.detach", "nbddp.worker.preload"]


_paths = threading.Lock()


class ServerDied(EOFError):
    """A server ended while it was asked for a process.

    Attributes:
        wanted: the modules of :func:`preload` that it imported first.
    """

    def __init__(self, wanted: tuple[str, ...]) -> None:
        super().__init__("the fork server ended")
        self.wanted = wanted


class _ForkServer(forkserver.ForkServer):
    """One server. It ends when nobody holds this object any more: no process that came from it, no thread that asks."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        super().__init__()
        self.owner = os.getpid()
        self.wanted = wanted
        self.set_forkserver_preload([*PRELOAD, *(WANTED_PREFIX + name for name in wanted)])
        weakref.finalize(self, _end, vars(self)).atexit = False  # with this process it ends by itself

    def ensure_running(self) -> None:
        """As the standard library's, which writes ``sys.path`` into a program: a ``Path`` in it is no Python there."""
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
    if server["owner"] != os.getpid() or server["_forkserver_pid"] is None:
        return
    _unlink_socket(server["_forkserver_address"])  # first: a server at its end removes the folder, if it is empty
    os.close(server["_forkserver_alive_fd"])
    _ended.append(server["_forkserver_pid"])


_ended: collections.deque[int] = collections.deque()  # pids of servers that are to be waited for


class _Server:
    """The one that ranks come from: anew where it can no longer be reached, in a fork of the kernel, and when
    something else is to be imported."""

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
            if current is None or (current.owner, current.wanted) != (os.getpid(), self.wanted):
                self._current = _ForkServer(self.wanted)
            return self._current

    def running(self) -> Any:
        """It, started."""
        reap()
        server = self.get()
        with _no_trace_of_a_restart(server):
            server.ensure_running()
        return server

    def connect(self, fds: list[int]) -> tuple[Any, tuple[int, int]]:
        """A new process: whom to hold while it lives, the fds of its exit code and of its input."""
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
        with room_for(_FDS_OF_A_START), _no_trace_of_a_restart(server):
            try:
                return server.connect_to_new_process(fds)  # type: ignore[no-any-return]
            except _DIED as error:
                raise ServerDied(server.wanted) from error

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

    def pid(self) -> int | None:
        """The running server's pid, or None before the first start."""
        current = self._current
        return current._forkserver_pid if current is not None and current.owner == os.getpid() else None


def reap() -> None:
    """Leave no zombie of a server that has ended."""
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
    if current is not None and current._forkserver_alive_fd is not None:
        os.close(current._forkserver_alive_fd)
    _server = _Server()
    _server.wanted = wanted


os.register_at_fork(after_in_child=_disown)


_unfit = False


def available() -> bool:
    """Has this platform a fork server, and can ranks come from it?"""
    return bool(reduction.HAVE_SEND_HANDLE) and sys.platform != "win32" and not _unfit


def preload(modules: Sequence[str]) -> None:
    """Have later ranks come from a server that has imported these, too, and start it. Raises OSError."""
    _server.want(modules)
    _server.private_folder()
    warm()


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


@contextlib.contextmanager
def default_method_untouched() -> Iterator[None]:
    """multiprocessing fixes the process's default start method when it starts a server or spawns; undo that."""
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        _unfix_default_method(before)


def _unfix_default_method(before: str | None) -> None:
    if before is None and multiprocessing.get_start_method(allow_none=True) is not None:
        multiprocessing.set_start_method(None, force=True)


def warm() -> None:
    """Start the server if it is not running. Returns at once; it imports torch meanwhile."""
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
    # The server removes it when the kernel is killed. Short: a socket's path has 108 bytes.
    folder = tempfile.mkdtemp(prefix=RUN_PREFIX, dir=_server.private_folder())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unlink_socket(address: str | None) -> None:
    if address is not None:
        with contextlib.suppress(OSError, ValueError):  # in some Pythons it has no file
            os.unlink(address)


_opening = threading.Lock()


@contextlib.contextmanager
def room_for(fds: int) -> Iterator[None]:
    """Have so many files to open, or raise OSError; one of our threads at a time, so that none takes another's.

    Who opens may wait for something else, too (a store for a DNS server): nobody waits long for that.
    """
    alone = _opening.acquire(timeout=_OPENING_S)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(fds):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        if alone:
            _opening.release()


def _close_fds(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


class _Popen(popen_forkserver.Popen):
    _fds: list[int]
    _server: Any  # the exit code comes from it: it must not end before

    def _launch(self, process_obj: Any) -> None:
        """As in the standard library, but from our server, and without a copy of the user's ``__main__``."""
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(_preparation(process_obj.name), buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        try:
            self._ask_server(buffer)
        except ServerDied:  # under our hands: a new one is started
            self._ask_server(buffer)

    def _ask_server(self, process_data: io.BytesIO) -> None:
        self._server, (self.sentinel, writer) = _server.connect(self._fds)
        try:
            self._hand_over(writer, process_data)
        except _DIED as error:
            if self.finalizer is not None:
                self.finalizer()
            raise ServerDied(self._server.wanted) from error

    def _hand_over(self, writer: int, process_data: io.BytesIO) -> None:
        with open(writer, "wb") as pipe:
            try:
                kept = os.dup(writer)
            except OSError:
                os.close(self.sentinel)
                raise
            # The child's sentinel for this process: it stays open for as long as the Popen object lives.
            self.finalizer = util.Finalize(self, _close_fds, (kept, self.sentinel))
            pipe.write(process_data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class WorkerProcess(process.BaseProcess):
    """A process forked from our server."""

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 (multiprocessing's name)
        return _Popen(process_obj)

    def __reduce__(self) -> tuple[Any, ...]:
        # The worker is told of multiprocessing's class: it must not import the kernel side.
        # No start method: what the rank itself starts uses the platform's own default.
        return object.__new__, (process.BaseProcess,), {**self.__dict__, "_start_method": None}


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
