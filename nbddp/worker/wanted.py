"""In the fork server: the modules of ``nbddp.preload``, imported once. A rank asks here what is wrong with them."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading

import torch

# On multiprocessing's list of what it imports. It would end the server for anything but an ImportError; no module has
# such a name, so it passes over it, and the import is ours.
_WANTED = re.compile(r"nbddp\.preload:([\w.]+)")  # forkserver.WANTED_PREFIX

trouble = ""  # why no rank can be forked with them


def import_all() -> None:
    """Import what the kernel asked for. What cannot be imported is left to the ranks, who say so if they need it."""
    global trouble
    for name in _WANTED.findall(" ".join(sys.orig_argv)):
        before = set(threading.enumerate())
        with contextlib.suppress(BaseException):  # sys.exit(), too
            importlib.import_module(name)
        if set(threading.enumerate()) - before:
            trouble = f"{name} starts a thread when it is imported"
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            trouble = f"{name} initialises CUDA when it is imported"
        if trouble:
            return
