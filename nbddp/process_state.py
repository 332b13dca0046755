"""Reads the state that a process inherits from its parent beside the environment, and sets it in another process.

A rank inherits the state of the fork server, which may be outdated. It must have the notebook's present state, as a
plain child process of the notebook would.
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
_FIXED_AT_START = "RLIMIT_STACK"  # read when a program starts: for the stack's address and the size of threads' stacks


@dataclass(frozen=True)
class ProcessState:
    """The state of the calling thread: on Linux, child processes inherit a thread's own nice value and CPU affinity.

    Attributes:
        limits: name in the module ``resource``, soft and hard limit.
        affinity: numbers of the cores that the thread may run on; None where the system does not report them.
    """

    umask: int
    nice: int
    limits: tuple[tuple[str, int, int], ...]
    affinity: tuple[int, ...] | None


def present() -> ProcessState:
    """The state that a child would have if this thread started it now."""
    return ProcessState(umask(), _nice(), _limits(), _affinity())


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def _limits() -> tuple[tuple[str, int, int], ...]:
    return tuple((name, *resource.getrlimit(number)) for name, number in _LIMITS.items())


def _affinity() -> tuple[int, ...] | None:
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def umask() -> int:
    """This process's umask, read without setting it: another thread may be creating a file."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        if found := re.search(r"^Umask:\s*([0-7]+)$", status.read(), re.MULTILINE):
            return int(found[1], 8)
    with tempfile.TemporaryDirectory(prefix="nbddp-") as folder:  # not Linux
        path = os.path.join(folder, "umask")
        os.mkdir(path)
        return ~os.stat(path).st_mode & 0o777


def become(state: ProcessState, *, forked: bool) -> list[str]:
    """Set this process's state, and reread the time zone and the temporary folder from the environment.

    Args:
        forked: this process comes from a fork server, whose state may differ.

    Returns:
        the names of what could not be set: an unprivileged process cannot lower its nice value or raise a hard limit.
    """
    time.tzset()
    tempfile.tempdir = None  # determined again when it is needed
    os.umask(state.umask)
    refused = []
    for name, value in _differing(state):
        if forked and name == _FIXED_AT_START:
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
