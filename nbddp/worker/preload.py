"""In the fork server, once. What every rank needs is imported here, and forked from here."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import time
from multiprocessing import forkserver

import torch._dynamo  # noqa: F401 - 1 s at the first torch.optim.Optimizer otherwise, in every rank of every run

import nbddp.worker.data
import nbddp.worker.entry
import nbddp.worker.snapshot  # noqa: F401
from nbddp.worker import hugepages

_STARTED_BY = os.getppid()
_PARENT_GONE_S = 1.0


def _remove_socket_of_a_dead_kernel() -> None:
    """multiprocessing leaves this to the kernel's own exit, which a SIGKILL does not let happen."""
    address = getattr(forkserver._forkserver, "_forkserver_address", None)
    deadline = time.monotonic() + _PARENT_GONE_S
    while os.getppid() == _STARTED_BY and time.monotonic() < deadline:
        time.sleep(0.01)  # a dying process closes its pipes, which is what ends us, before its children see it dead
    if os.getppid() == _STARTED_BY or not isinstance(address, str):
        return
    with contextlib.suppress(OSError):
        os.unlink(address)
        os.rmdir(os.path.dirname(address))


atexit.register(_remove_socket_of_a_dead_kernel)
# Ranks share these pages for as long as the collector does not touch them.
gc.collect()
gc.freeze()
hugepages.collapse()
