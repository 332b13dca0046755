"""A fork server of our own, the standard library's, with torch already imported; and the processes forked from it."""

import contextlib
import fcntl
import importlib.util
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import connection, context, forkserver, popen_forkserver, process, reduction, util
from pathlib import Path
from typing import Any

from nbddp.errors import LaunchError
from nbddp.worker import tracked

_preloaded = ["nbddp.process.preloaded"]
# Read when Python, a C library or torch starts, so that a rank that is forked later cannot change them.
_READ_AT_START = re.compile(
    r"(PYTHON(?!UNBUFFERED)|LD_|MALLOC_|GLIBC_|(OMP_|MKL_)(?!NUM_THREADS)|KMP_|OPENBLAS_"
    r"|TORCH(?!INDUCTOR_CACHE_DIR|_DISTRIBUTED_DEBUG|_NCCL_)|PYTORCH|ATEN_|LC_ALL|LANG)"
)

lock = threading.RLock()  # held while a machine's ranks are sent for, so that all come from one server
_server: forkserver.ForkServer | None = None
_ready: int | None = None  # the pid of the server that has forked a process: what it imports takes seconds
_began_with: dict[str, str] = {}


def running(environ: Mapping[str, str] = os.environ) -> forkserver.ForkServer:
    """Return the server, started if it does not run, or if what it read at its start differs in this environment."""
    global _server, _began_with
    with lock, _inherited(now := _read_at_start(environ)):
        temporary_folder()
        if now != _began_with or not _is_usable():
            shut_down()
        if _server is None:
            _server, _began_with = forkserver.ForkServer(), now
            _server.set_forkserver_preload(_preloaded)
            _ensure_running(_server)
        return _server


def start_early() -> None:
    """Start it before a run needs it: it imports torch while the notebook does. What fails here, the run says."""
    with contextlib.suppress(OSError):
        running()


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if _READ_AT_START.match(name)}


@contextlib.contextmanager
def _inherited(wanted: Mapping[str, str]) -> Iterator[None]:
    """Let a process started now inherit these values. ``os.environ``, which other threads may read, is left alone."""
    here = _read_at_start(os.environ)
    changed = {name for name in here.keys() | wanted.keys() if here.get(name) != wanted.get(name)}
    _put(changed, wanted)
    try:
        yield
    finally:
        _put(changed, here)


def _put(names: set[str], values: Mapping[str, str]) -> None:
    for name in names:
        if name in values:
            os.putenv(name, values[name])
        else:
            os.unsetenv(name)


def _is_usable() -> bool:
    """Whether it runs, also again after its end; not if the user has waited for it (os.wait), or its socket is gone."""
    with contextlib.suppress(ChildProcessError):
        if _server is not None:
            _ensure_running(_server)
            return os.path.exists(_server._forkserver_address)  # type: ignore[attr-defined]
    return False


def _ensure_running(server: forkserver.ForkServer) -> None:
    """Without the standard library's side effect, after which the user could not set a start method any more."""
    default: Any = context._default_context
    before = default._actual_context
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # multiprocessing reads it; IPython's reset() removes it
    try:
        server.ensure_running()
    finally:
        default._actual_context = before


def temporary_folder() -> str:
    """Return multiprocessing's folder for sockets; made again if a cleaner of /tmp has removed it."""
    folder = util.get_temp_dir()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def use_own_folder() -> None:
    """Have multiprocessing's folder in one that's locked, and remove those that killed processes of Ray have left.

    Ray kills the fork server, too, which would have removed it.
    """
    for folder in Path(tempfile.gettempdir()).glob("nb-*"):
        with contextlib.suppress(OSError):
            if _locked(folder):
                for run in folder.glob("r-*"):
                    tracked.remove_rest(str(run))
                shutil.rmtree(folder, ignore_errors=True)
    own = tempfile.mkdtemp(prefix="nb-")
    _locked(own)
    process.current_process()._config["tempdir"] = own  # type: ignore[attr-defined]


def _locked(folder: str | os.PathLike[str]) -> bool:
    """Lock a folder as long as this process lives. Returns False if another process has."""
    fd = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    os.close(fd)
    return False


def remove_own_folder() -> None:
    """Remove it; this process starts no ranks any more."""
    shutil.rmtree(temporary_folder(), ignore_errors=True)


def preload(*modules: str) -> None:
    """Have the fork server import these modules, once for all ranks: ``nbddp.preload("pandas")``.

    The next run starts a new server. Don't preload a module that starts threads, initializes CUDA, or reads ``RANK``
    when it's imported (ultralytics).
    """
    for name in modules:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise LaunchError(f"preload(): there is no module {name}")
    _preloaded[:0] = [name for name in modules if name not in _preloaded]  # ours last: it makes the server ready
    shut_down()


def shut_down() -> None:
    """End the server when its last rank has ended; the next run starts another one."""
    global _server
    with lock:
        server, _server = _server, None
    if server is None:
        return

    def stop() -> None:
        with contextlib.suppress(OSError):  # its socket has been removed, or it has been waited for
            server._stop()  # type: ignore[attr-defined]

    threading.Thread(target=stop, name="nbddp-server", daemon=True).start()  # it waits for the last rank


def give_up() -> None:
    """Kill a server that still imports what it should: who waits for the first process gets ProcessLookupError."""
    pid: int | None = getattr(_server, "_forkserver_pid", None)  # None while it's being started
    if pid is not None and pid != _ready:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class _Forked(popen_forkserver.Popen):
    """The standard library's, but from our server, and without a copy of the user's ``__main__``."""

    _number: int | None = None

    def _launch(self, process_obj: Any) -> None:
        self._reading = threading.RLock()  # the number, and then the exit code
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            path = [part or os.getcwd() for part in sys.path if isinstance(part, str)]
            reduction.dump({"name": process_obj.name, "authkey": process_obj.authkey, "sys_path": path}, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        server = running(process_obj.environ)
        self.sentinel, writer = server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        _ours.update((self.sentinel, writer))
        self.finalizer = util.Finalize(self, _close, (self.sentinel, writer))
        with open(writer, "wb", closefd=False) as pipe:
            pipe.write(data.getbuffer())

    @property
    def pid(self) -> int:  # type: ignore[override]
        """Read when it's first needed, so that the next process is sent for while this one is forked."""
        global _ready
        with self._reading:
            if self._number is None:
                try:
                    self._number = int(forkserver.read_signed(self.sentinel))
                    _ready = getattr(_server, "_forkserver_pid", None)
                except EOFError:
                    raise ProcessLookupError("the fork server has ended") from None
            return self._number

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None while it runs. multiprocessing asks all processes whenever it starts another."""
        if not self._reading.acquire(blocking=flag != os.WNOHANG):
            return None  # its pid is being read
        try:
            if self._number is None and flag == os.WNOHANG and not connection.wait([self.sentinel], 0):
                return None
            with contextlib.suppress(ProcessLookupError):
                _ = self.pid  # comes before the exit code
            return super().poll(flag)
        finally:
            self._reading.release()


class ForkedProcess(process.BaseProcess):
    """A process forked from our server. It is killed with its children when this process ends or closes it.

    Attributes:
        environ: its environment, as far as Python or torch read it when they start.
    """

    _Popen = _Forked  # start() makes one
    pid: int  # of a process that has been started
    environ: Mapping[str, str] = os.environ

    def __reduce__(self) -> tuple[Any, ...]:  # a rank is a plain process of multiprocessing
        return object.__new__, (process.BaseProcess,), {**self.__dict__, "_start_method": None, "environ": None}


_ours: set[int] = set()  # ends that a fork of this process must not hold open, or ranks would not see this one's end


def _close(*fds: int) -> None:
    for fd in fds:
        _ours.discard(fd)
        os.close(fd)


def _disown() -> None:
    global _server
    alive = [_server._forkserver_alive_fd] if _server is not None and _server._forkserver_alive_fd is not None else []  # type: ignore[attr-defined]
    _server = None
    _close(*_ours, *alive)


os.register_at_fork(after_in_child=_disown)
