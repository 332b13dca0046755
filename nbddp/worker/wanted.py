"""In the fork server: the modules of ``nbddp.preload``, imported once. A rank asks here what is wrong with them."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
import threading
from typing import Any

import torch

# Before the names on multiprocessing's list of what it imports. It would end the server for anything but an
# ImportError; no module is called so, it passes over them, and the import is ours.
_PREFIX = "nbddp.preload:"  # forkserver.WANTED_PREFIX

trouble = ""  # why no rank can be forked with them


def import_all() -> None:
    """Import what the kernel asked for. What cannot be imported is left to the ranks, who say so if they need it."""
    global trouble
    if _PREFIX not in sys.orig_argv[-1]:
        return
    names, path = _order(sys.orig_argv[-1])
    sys.path[:] = path
    for name in names:
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


def _order(source: str) -> tuple[list[str], list[str]]:
    """From multiprocessing's ``main(fd, fd, ... or [names], **{...})``: our names, and the kernel's ``sys.path``."""
    call: Any = ast.parse(source).body[-1]
    names = next(node for node in ast.walk(call.value.args[2]) if isinstance(node, ast.List))
    imports, told = ast.literal_eval(names), ast.literal_eval(call.value.keywords[-1].value)
    return [name.removeprefix(_PREFIX) for name in imports if name.startswith(_PREFIX)], told["sys_path"]
