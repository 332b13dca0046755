"""In the fork server, first. A session of its own, no CUDA driver before the fork, and an eye on who started it.

Nor does Python look for garbage in all that was imported so far, again and again: the import takes 0.8 of the time.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import select
import signal
import socket
import sys
from multiprocessing import util

from nbddp.worker import asked, counted

_RARELY = 1000  # the young generation is looked at as usual: else the server is 7 MB larger


def _end_at_once() -> None:
    """Nothing is left to be done: what libraries say while the interpreter is taken apart would stand in the notebook.

    torch 2.15's own bindings (nanobind) name 27 objects there as leaked.
    """
    util._exit_function()  # type: ignore[attr-defined]  # multiprocessing's, registered before this one
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# First: what comes later is called earlier. Ranks have no exit handlers of the server's.
atexit.register(_end_at_once)
# What ends the notebook's process group leaves the server, which then cleans up.
os.setsid()
counted.begin()
# What asks torch.cuda.is_available() while it is imported must not initialise the driver: no fork survives that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_thresholds = gc.get_threshold()
gc.set_threshold(_thresholds[0], _RARELY, _RARELY)


def _watch(listener: int, alive: int, done: int, server: int) -> None:
    """In a process of its own: end the server when the kernel does, whatever it is about.

    A thread would need the GIL, which an import in C holds for seconds; a signal by the system would leave the socket.
    """
    poll = select.poll()
    poll.register(alive, 0)  # that nobody holds its other end is told in any case
    poll.register(done, 0)
    if done not in dict(poll.poll()) and os.getppid() == server:
        os.kill(server, signal.SIGKILL)
        _remove_socket(listener)


def _remove_socket(listener: int) -> None:
    """And multiprocessing's folder for it, if nothing else is there."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(listener)) as server:
        os.unlink(server.getsockname())
        os.rmdir(os.path.dirname(server.getsockname()))


def _start_watch(listener: int, alive: int) -> tuple[int, int]:
    """Returns the watch's pid, and what is closed to end it: also by the server's own end."""
    server = os.getpid()
    done_r, done_w = os.pipe()
    pid = os.fork()
    if pid:
        os.close(done_r)
        return pid, done_w
    try:
        os.close(done_w)
        _watch(listener, alive, done_r, server)
    finally:
        os._exit(0)


def _write_into(path: str, mark: str) -> int | None:
    """Have this process's stderr go to the kernel's memory. Returns a descriptor of where it went before."""
    try:
        if mark not in os.readlink(path):
            return None
        memory = os.open(path, os.O_RDWR | os.O_APPEND)
    except OSError:  # /proc may be closed to us
        return None
    if mark not in os.readlink(f"/proc/self/fd/{memory}"):  # the kernel wants us no more: by now it is another file
        os.close(memory)
        return None
    os.ftruncate(memory, 0)
    before = os.dup(2)
    os.dup2(memory, 2)
    os.close(memory)
    return before


def said_all() -> None:
    """Have stderr go again where it went before, and what was said meanwhile, too."""
    if _stderr is None:
        return
    sys.stderr.flush()
    memory = os.dup(2)
    os.dup2(_stderr, 2)
    os.close(_stderr)
    with contextlib.suppress(OSError), open(memory, "r+b", buffering=0) as said:
        said.seek(0)
        os.write(2, said.read())
        said.truncate(0)


def all_is_imported() -> None:
    """End the watch: from here on the server itself looks. And collect garbage as usual."""
    gc.set_threshold(*_thresholds)
    if _watcher is not None:
        pid, done = _watcher
        os.close(done)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


_stderr = _write_into(asked.memory, asked.mark) if asked.memory else None
_watcher: tuple[int, int] | None = None
# ``main(listener, alive, ...)``, as multiprocessing has started this process.
if _fds := re.search(r"main\((\d+), (\d+)", " ".join(sys.orig_argv)):
    _watcher = _start_watch(*map(int, _fds.groups()))
