"""Sets the number of threads of numpy's OpenBLAS in a rank; the fork server finds the libraries.

OpenBLAS reads OMP_NUM_THREADS when it is loaded, and ``torch.set_num_threads`` does not change it (torch 2.13), so
each rank would compute numpy's matrix products with all cores.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping

# The wheels of numpy and scipy and the system's builds use different names. Those ending in _ and _64_ are Fortran's.
_NAMES = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")]
_OPENBLAS_ENVIRON = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
_VARIABLES = ("blas_server_avail", "blas_num_threads", "blas_cpu_number")

_libraries: list[ctypes.CDLL] = []


def find() -> None:
    """Find the loaded copies of OpenBLAS."""
    if not os.path.exists("/proc/self/maps"):
        return
    with open("/proc/self/maps") as maps:
        paths = set(re.findall(r"/\S*openblas\S*", maps.read()))
    _libraries.extend(ctypes.CDLL(path) for path in sorted(filter(os.path.exists, paths)))


def set_num_threads(threads: int, environ: Mapping[str, str]) -> None:
    """Set the number as OMP_NUM_THREADS would have, unless a variable of OpenBLAS itself is set."""
    if not any(name in environ for name in _OPENBLAS_ENVIRON):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for library in _libraries:
            _set(library, min(threads, cores))


def _set(library: ctypes.CDLL, threads: int) -> None:
    """Set OpenBLAS's variables if it runs no threads yet, as after a fork; otherwise call its function.

    The function starts threads at once, which spin for 25 ms each before they sleep: half of a rank's start. The
    variables say how many threads the first product starts that uses several (OpenBLAS 0.3).
    """
    try:
        running, *numbers = (ctypes.c_int.in_dll(library, name) for name in _VARIABLES)
    except ValueError:  # built without threads, or another version
        running = ctypes.c_int(1)
    if not running.value:
        for number in numbers:
            number.value = threads
        return
    for name in _NAMES:
        if hasattr(library, name):
            getattr(library, name)(threads)
