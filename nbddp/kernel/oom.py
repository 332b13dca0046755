"""Kernel side. Has the machine's or container's OOM killer been at work?"""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def kills() -> int:
    """How many processes of this process's memory cgroup it has killed so far; 0 where nothing tells.

    Source: Linux' ``memory.events`` (cgroup v2) and ``memory.oom_control`` (v1), field ``oom_kill``.
    """
    try:
        lines = _CGROUPS.read_text().splitlines()
    except OSError:
        return 0
    return max((_count(file) for line in lines for file in _counters(line)), default=0)


def _counters(line: str) -> list[Path]:
    _, controllers, path = line.split(":", 2)
    relative = path.lstrip("/")
    if controllers == "":
        return [_MOUNT / relative / "memory.events"]
    if "memory" in controllers.split(","):
        # Inside a container the path is the host's, and its own group is mounted at the top.
        return [_MOUNT / "memory" / relative / "memory.oom_control", _MOUNT / "memory" / "memory.oom_control"]
    return []


def _count(file: Path) -> int:
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("oom_kill", 0))
