"""Memory that is mapped from a file, by np.memmap or torch.load(mmap=True), is sent as file and offset."""

import bisect
import contextlib
import mmap
import os
import re
from collections.abc import Sequence

import numpy as np

_FROM_NBYTES = 1 << 20  # less is sent as bytes
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ...(.) ([0-9a-f]+) \S+ (\d+) +(/.*)")
_OF_A_FILE, _PRESENT_OR_SWAPPED = 61, 62  # bits of a page, in the kernel's admin-guide/mm/pagemap.rst
_MAP_NORESERVE = 0x4000  # linux/mman.h: the file may be larger than the memory

Place = tuple[str, int, int]  # a file, the offset in it, and its inode


def places(buffers: Sequence[memoryview]) -> list[Place | None]:
    """Return where each of them is in a file; None: nowhere, or what's there is something else by now."""
    found: list[Place | None] = [None] * len(buffers)
    if large := [index for index, buffer in enumerate(buffers) if buffer.nbytes >= _FROM_NBYTES]:
        with open("/proc/self/maps") as file:
            mappings = [match for match in map(_MAPPING.match, file) if match and not match[6].startswith("/dev/")]
        begins = [int(mapping[1], 16) for mapping in mappings]
        for index in large:
            address = np.frombuffer(buffers[index], np.uint8).ctypes.data
            if at := bisect.bisect(begins, address):
                found[index] = _place(mappings[at - 1], address, buffers[index].nbytes)
    return found


def view(place: Place, nbytes: int, files: dict[str, memoryview]) -> memoryview:
    """Map this place, private and writable. Raises RuntimeError if the file isn't that one any more.

    Args:
        files: what has been mapped; each file once, since a mapping keeps a descriptor.
    """
    path, offset, inode = place
    if path not in files:
        with open(path, "rb") as file:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=access)
            files[path] = memoryview(mapped if os.fstat(file.fileno()).st_ino == inode else b"")
    if len(files[path]) < offset + nbytes:
        raise RuntimeError(f"{path} was replaced or truncated after it was sent")
    return files[path][offset : offset + nbytes]


def _place(mapping: re.Match[str], address: int, nbytes: int) -> Place | None:
    begin, end, offset, inode = int(mapping[1], 16), int(mapping[2], 16), int(mapping[4], 16), int(mapping[5])
    with contextlib.suppress(OSError):  # "(deleted)"
        is_there = address + nbytes <= end and os.stat(mapping[6]).st_ino == inode
        if is_there and (mapping[3] == "s" or not _is_changed(address, nbytes)):
            return mapping[6], offset + address - begin, inode
    return None


def _is_changed(address: int, nbytes: int) -> bool:
    """Whether pages of a private mapping have been written to: they're in memory or swapped out, and no file's."""
    first, end = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    pages = np.fromfile("/proc/self/pagemap", np.uint64, end - first, offset=first * 8)
    return bool(((pages >> _PRESENT_OR_SWAPPED != 0) & (pages >> _OF_A_FILE & 1 == 0)).any())
