"""In the fork server, once. What every rank needs is imported here, and forked from here."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import glob
import os
import shutil
import time
from multiprocessing import forkserver, reduction
from socket import socket

import torch._dynamo  # noqa: F401 - 1 s at the first torch.optim.Optimizer otherwise, in every rank of every run

import nbddp.worker.data
import nbddp.worker.entry
import nbddp.worker.snapshot  # noqa: F401
from nbddp import leftovers
from nbddp.worker import blas, counted, detach, heap, hugepages, reaper, wanted

_STARTED_BY = os.getppid()
_PARENT_GONE_S = 1.0


def _remove_files_of_a_dead_kernel() -> None:
    """multiprocessing leaves this to the kernel's own exit, which a SIGKILL does not let happen."""
    address = getattr(forkserver._forkserver, "_forkserver_address", None)
    deadline = time.monotonic() + _PARENT_GONE_S
    while os.getppid() == _STARTED_BY and time.monotonic() < deadline:
        time.sleep(0.01)  # a dying process closes its pipes, which is what ends us, before its children see it dead
    if os.getppid() == _STARTED_BY or not isinstance(address, str):
        return
    reaper.end_all()
    folder = os.path.dirname(address)
    with contextlib.suppress(OSError):
        os.unlink(address)
    while not _remove_runs(folder) and time.monotonic() < deadline + _PARENT_GONE_S:
        time.sleep(0.01)  # a rank's last child may have had time for one more socket


def _remove_runs(folder: str) -> bool:
    """What the kernel's runs left; then the folder, if it was theirs alone. Returns whether no run is left."""
    for run in _runs_in(folder):
        leftovers.remove(leftovers.mark_of(run), run, (), segments=True)
        shutil.rmtree(run, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not _runs_in(folder)


def _runs_in(folder: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), "r[0-9a-f]*"))  # forkserver.RUN_PREFIX


def _outlive_a_kernel_out_of_files() -> None:
    """A client that connects and then has no fd left to send would end the server, and all runs with it."""
    original, server = reduction.recvfds, os.getpid()

    @functools.wraps(original)
    def recvfds(sock: socket, size: int) -> list[int]:
        try:
            return original(sock, size)
        except EOFError as error:
            if os.getpid() != server:
                raise
            raise ConnectionAbortedError(errno.ECONNABORTED, "nothing was sent") from error  # which it passes over

    reduction.recvfds = recvfds


wanted.import_all()
if not wanted.trouble:  # else the watch ends this server with the kernel: a thread of theirs might keep it
    detach.all_is_imported()
    reaper.watch_ranks()  # which would end the watch, a child that is not a rank
counted.end()
blas.find()
_outlive_a_kernel_out_of_files()
atexit.register(_remove_files_of_a_dead_kernel)
# Ranks share these pages for as long as the collector does not touch them.
gc.collect()
gc.freeze()
hugepages.collapse()
heap.keep_what_is_freed()
detach.said_all()
