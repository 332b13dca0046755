"""In the fork server, first. A session of its own, no CUDA driver before the fork, and an eye on who started it.

Nor does Python look for garbage in all that was imported so far, again and again: the import takes 0.8 of the time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import socket
import sys
import threading

from nbddp.worker import counted

_LOOK_MS = 100
_RARELY = 1000  # the young generation is looked at as usual: else the server is 7 MB larger

# What ends the notebook's process group leaves the server, which then cleans up.
os.setsid()
counted.begin()
# What asks torch.cuda.is_available() while it is imported must not initialise the driver: no fork survives that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_thresholds = gc.get_threshold()
gc.set_threshold(_thresholds[0], _RARELY, _RARELY)


def _watch(listener: int, alive: int) -> None:
    """While torch is imported, which takes seconds or a minute, the server itself does not look.

    And to the end of one that is of no use (``wanted.trouble``), which by itself might wait for a thread.
    """
    poll = select.poll()
    poll.register(alive, 0)  # that nobody holds its other end is told in any case
    while not _imported.is_set():
        if poll.poll(_LOOK_MS):
            _remove_socket(listener)
            os._exit(1)


def _remove_socket(listener: int) -> None:
    """And multiprocessing's folder for it, if nothing else is there."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(listener)) as server:
        os.unlink(server.getsockname())
        os.rmdir(os.path.dirname(server.getsockname()))


def all_is_imported() -> None:
    """End the watch, for a fork must not find a thread; and collect garbage as usual."""
    gc.set_threshold(*_thresholds)
    _imported.set()
    if _watcher is not None:
        _watcher.join()


_imported = threading.Event()
_watcher: threading.Thread | None = None
# ``main(listener, alive, ...)``, as multiprocessing has started this process.
if _fds := re.search(r"main\((\d+), (\d+)", " ".join(sys.orig_argv)):
    _watcher = threading.Thread(target=_watch, args=[int(fd) for fd in _fds.groups()], daemon=True)
    _watcher.start()
