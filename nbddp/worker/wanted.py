"""In the fork server: the modules of ``nbddp.preload``, imported once. A rank asks here what is wrong with them."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading

import torch

from nbddp.worker import asked

trouble = ""  # why no rank can be forked with them


def import_all() -> None:
    """Import what the kernel asked for. What cannot be imported is left to the ranks, who say so if they need it."""
    global trouble
    if not asked.modules:
        return
    sys.path[:] = asked.path
    for name in asked.modules:
        before = set(threading.enumerate())
        with contextlib.suppress(BaseException):  # sys.exit(), too
            importlib.import_module(name)
        if set(threading.enumerate()) - before:
            trouble = f"{name} starts a thread when it is imported"
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            trouble = f"{name} initialises CUDA when it is imported"
        if trouble:
            break
    sys.stdout.flush()  # else every rank would write it once more
    sys.stderr.flush()
