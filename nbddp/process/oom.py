"""Reads how often Linux's OOM killer has killed a process of this machine, or of the container it's in."""

import contextlib
import functools
import re

_CGROUPS = "/proc/self/cgroup"
_MOUNT = "/sys/fs/cgroup"


def kills() -> int:
    """Return how many processes of our memory cgroup it has killed; 0 if that isn't known.

    Source: Linux' ``memory.events`` (cgroup v2) and ``memory.oom_control`` (v1), field ``oom_kill``.
    """
    counts = [0]
    for file in _files():
        with contextlib.suppress(OSError), open(file) as opened:
            counts += map(int, re.findall(r"^oom_kill (\d+)", opened.read(), re.MULTILINE))
    return max(counts)


@functools.cache
def _files() -> list[str]:
    files: list[str] = []
    with contextlib.suppress(OSError), open(_CGROUPS) as opened:
        for line in opened.read().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(f"{_MOUNT}{path}/memory.events")
            if "memory" in controllers.split(","):  # a container's path is the host's, its own group is at the top
                files += [f"{_MOUNT}/memory{group}/memory.oom_control" for group in (path, "")]
    return files
