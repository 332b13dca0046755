"""Imports the modules of ``nbddp.preload``, once for all ranks."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Sequence

import torch


def import_all(path: list[str], modules: Sequence[str]) -> str:
    """Import the modules. Returns the reason why no rank can be forked afterwards, or "".

    A module that cannot be imported is skipped; a rank that needs it raises the error.

    Args:
        path: the notebook kernel's ``sys.path``.
    """
    sys.path[:] = path
    reason = ""
    for name in modules:
        before = set(threading.enumerate())
        with contextlib.suppress(BaseException):  # also sys.exit()
            importlib.import_module(name)
        if set(threading.enumerate()) - before:
            reason = f"{name} starts a thread when it is imported"
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            reason = f"{name} initialises CUDA when it is imported"
        if reason:
            break
    sys.stdout.flush()  # otherwise every rank would write the buffered output again
    sys.stderr.flush()
    return reason
