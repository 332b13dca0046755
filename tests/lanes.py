"""Lets test processes run side by side (of ``pytest -n 2 --dist loadfile``, or of two clones).

No test sees what another process leaves: where root allows it, each has a /dev/shm of its own, and the tests know
their processes by a mark.
"""

from __future__ import annotations

import ctypes
import os

import pytest

_CLONE_NEWNS = 0x00020000  # linux/sched.h
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h
# These begin first, so that none is left alone at the end.
_LONGEST = (
    "test_live_panel",
    "test_saved_panel",
    "test_drawn_panel",
    "test_in_a_notebook",
    "test_end",
    "test_lost",
    "test_smoke",
    "test_notebooks",
    "test_script",
    "test_preload",
    "test_export",
    "test_docs",
    "test_waits",
    "test_network",
    "test_left_behind",
    "test_sinks",
    "test_panel",
    "test_ranks",
    "test_bad_input",
    "test_faults",
    "test_soak",
)


def take_own_shared_memory() -> None:
    """Give this process and all that it starts a /dev/shm of its own, since tests look at what is left there."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = (
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0
    )
    if not mounted and "PYTEST_XDIST_WORKER" in os.environ:
        raise RuntimeError(f"pytest -n needs a /dev/shm for each process: {os.strerror(ctypes.get_errno())} (be root?)")


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file, the longest first; needs ``--no-loadscope-reorder``.

    In a file those that share a login to hosts come first, as the others close it.
    """

    def key(item: pytest.Item) -> tuple[int, str, bool]:
        place = _LONGEST.index(item.path.stem) if item.path.stem in _LONGEST else len(_LONGEST)
        return place, str(item.path), "warm" not in getattr(item, "fixturenames", ())

    items.sort(key=key)
