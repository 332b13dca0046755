"""What a process inherits from the one that starts it, beside its environment: read on one side, set on the other.

A rank from the fork server inherits what that had when it began. A plain child of the notebook has what the notebook
has now, and so shall the rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import tempfile
import time
from dataclasses import dataclass
from typing import Any

_LIMITS = {name: getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")}
_NICE, _CORES = "the nice value", "the CPU affinity"
_FROM_THE_START = "RLIMIT_STACK"  # it decides where the stack lies, and how large those of threads are


@dataclass(frozen=True)
class ProcessState:
    """Of the calling thread: on Linux each has a nice value and an affinity of its own, which its children inherit.

    Attributes:
        limits: soft and hard resource limits, by their names in the module ``resource``.
        affinity: numbers of the cores that it may run on; None where the system does not tell.
    """

    umask: int
    nice: int
    limits: tuple[tuple[str, int, int], ...]
    affinity: tuple[int, ...] | None


def present() -> ProcessState:
    """What a child has that this thread starts now."""
    return ProcessState(umask(), _nice(), _limits(), _affinity())


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def _limits() -> tuple[tuple[str, int, int], ...]:
    return tuple((name, *resource.getrlimit(number)) for name, number in _LIMITS.items())


def _affinity() -> tuple[int, ...] | None:
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def umask() -> int:
    """This process's, read without setting it: another thread may be making a file."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        if found := re.search(r"^Umask:\s*([0-7]+)$", status.read(), re.MULTILINE):
            return int(found[1], 8)
    with tempfile.TemporaryDirectory(prefix="nbddp-") as folder:  # not Linux
        path = os.path.join(folder, "umask")
        os.mkdir(path)
        return ~os.stat(path).st_mode & 0o777


def become(state: ProcessState, *, forked: bool) -> list[str]:
    """Have that state, and the time zone and the folder for temporary files of the environment.

    Args:
        forked: was this process once another one, with another state?

    Returns:
        what could not be had: an unprivileged process cannot lower its nice value, nor raise a hard limit.
    """
    time.tzset()
    tempfile.tempdir = None  # looked for again when it is needed
    os.umask(state.umask)
    refused = []
    for name, value in _differing(state):
        if forked and name == _FROM_THE_START:
            refused.append(name)
        try:
            _set(name, value)
        except (OSError, ValueError):
            refused.append(name)
    return refused


def _differing(state: ProcessState) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [(name, limit) for name, *limit in set(state.limits) - set(_limits())]
    if state.nice != _nice():
        found.append((_NICE, state.nice))
    if state.affinity != _affinity():
        found.append((_CORES, state.affinity))
    return found


def _set(name: str, value: Any) -> None:
    if name == _NICE:
        os.setpriority(os.PRIO_PROCESS, 0, value)
    elif name == _CORES:
        os.sched_setaffinity(0, value)
    else:
        resource.setrlimit(_LIMITS[name], value)
