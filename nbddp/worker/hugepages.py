"""In the fork server, last. Its memory in huge pages: a fork copies 100 page table entries instead of 50,000.

Measured with torch and torch._dynamo imported (210 MB): fork and exit of an empty child 13 ms before, 4 ms
after. A rank's first write to a huge page splits its own mapping of it; what it copies are small pages.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; older ones answer EINVAL, and nothing is lost


def collapse() -> None:
    """Ask the kernel to gather this process's private memory into huge pages now."""
    if not os.path.exists("/proc/self/maps"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, stop in list(_private_memory()):
        first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        last = stop // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if first < last:
            madvise(first, last - first, _MADV_COLLAPSE)


def _private_memory() -> Iterator[tuple[int, int]]:
    """The writable, private mappings that no file backs."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, _, _, inode, *_ = line.split()
            if permissions.startswith("rw") and permissions.endswith("p") and inode == "0":
                start, stop = addresses.split("-")
                yield int(start, 16), int(stop, 16)
