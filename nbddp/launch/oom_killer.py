"""Reads how often the OOM killer of the machine or container has killed a process."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CGROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def kills() -> int:
    """Return how many processes of this process's memory cgroup the OOM killer has killed; 0 where that is not known.

    Source: Linux' ``memory.events`` (cgroup v2) and ``memory.oom_control`` (v1), field ``oom_kill``.
    """
    try:
        lines = _CGROUPS.read_text().splitlines()
    except OSError:
        return 0
    counts = [0]
    for file in (file for line in lines for file in _count_files(line)):
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split() for line in file.read_text().splitlines())
            counts.append(int(fields.get("oom_kill", 0)))
    return max(counts)


def _count_files(line: str) -> list[Path]:
    """Return the files that have the count, for one line of ``/proc/self/cgroup``."""
    _, controllers, path = line.split(":", 2)
    relative = path.lstrip("/")
    if controllers == "":
        return [_MOUNT / relative / "memory.events"]
    if "memory" in controllers.split(","):
        # Inside a container this path is the host's, and the container's own group is mounted at the top.
        return [_MOUNT / "memory" / relative / "memory.oom_control", _MOUNT / "memory" / "memory.oom_control"]
    return []
