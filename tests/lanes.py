"""Runs the tests in several processes side by side (``pytest -n 3``) without one test seeing what another one left.

Tests of hosts share one set of network namespaces, those of pages one browser and its servers; tests of other files
share a costly fixture. Each such group runs in one process. The longest groups start first.
"""

from __future__ import annotations

import ctypes
import os

import pytest

_CLONE_NEWNS = 0x00020000  # linux/sched.h
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h
_GROUPS = ("hosts", "browser", "notebooks", "faults", "soak", "benchmarks", "properties")  # folders or files, by length
_WITH_A_COSTLY_FIXTURE = ("test_packaging", "test_one_process", "test_same_as_torchrun", "test_docs")


def take_own_shared_memory() -> None:
    """Give this process and all that it starts a /dev/shm of its own, since tests look at what is left there."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = (
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0
    )
    if not mounted:
        raise RuntimeError(f"pytest -n needs a /dev/shm for each process: {os.strerror(ctypes.get_errno())} (be root?)")


def arrange(items: list[pytest.Item]) -> None:
    """Put the tests that share something into one group, and the groups first."""
    for item in items:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _GROUPS.index(_group(item)) if _group(item) in _GROUPS else len(_GROUPS))


def _group(item: pytest.Item) -> str:
    folder, name = item.path.parent.name, item.path.stem
    if folder == "properties":  # each draws many cases with what its module has made once
        return name
    if folder in _GROUPS:
        return folder
    if name == "test_notebooks":
        return "notebooks"
    return name if name in _WITH_A_COSTLY_FIXTURE else ""
