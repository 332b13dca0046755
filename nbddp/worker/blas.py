"""Threads of numpy's OpenBLAS in a rank: found in the fork server, set in the rank.

OpenBLAS reads OMP_NUM_THREADS when it is loaded, and ``torch.set_num_threads`` does not reach it (torch 2.13): each
rank would compute numpy's products with all cores.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

# numpy's wheels, scipy's, and a system's own build name it differently. Those ending in _ and _64_ are Fortran's.
_NAMES = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")]
_ITS_OWN = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")

_setters: list[Callable[[int], Any]] = []


def find() -> None:
    """Look for the copies of OpenBLAS that are loaded."""
    if not os.path.exists("/proc/self/maps"):
        return
    with open("/proc/self/maps") as maps:
        paths = set(re.findall(r"/\S*openblas\S*", maps.read()))
    for path in sorted(filter(os.path.exists, paths)):
        library = ctypes.CDLL(path)
        _setters.extend(getattr(library, name) for name in _NAMES if hasattr(library, name))


def set_num_threads(threads: int, environ: Mapping[str, str]) -> None:
    """As OMP_NUM_THREADS would have had it, unless OpenBLAS has variables of its own."""
    if not any(name in environ for name in _ITS_OWN):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for setter in _setters:
            setter(min(threads, cores))
