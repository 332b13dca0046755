"""Memory that is mapped from a file, by np.memmap or torch.load(mmap=True), is sent as file and offset."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import re
from collections.abc import Iterable, Sequence

import numpy as np

_FROM_NBYTES = 1 << 20  # less is sent as bytes
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ...(.) ([0-9a-f]+) \S+ (\d+) +(/.*)")
_CHANGED = re.compile(r"(?:Anonymous|Swap): +[1-9]")
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


def views(wanted: Iterable[tuple[Place, int]]) -> list[memoryview]:
    """Map places of these sizes, private and writable. Raises RuntimeError if a file isn't that one any more."""
    files: dict[str, memoryview] = {}  # each once, since a mapping keeps a descriptor
    found = []
    for (path, offset, inode), nbytes in wanted:
        if path not in files:
            with open(path, "rb") as file:
                access = mmap.PROT_READ | mmap.PROT_WRITE
                mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=access)
                files[path] = memoryview(mapped if os.fstat(file.fileno()).st_ino == inode else b"")
        if len(files[path]) < offset + nbytes:
            raise RuntimeError(f"{path} was replaced or cut off after it was sent")
        found.append(files[path][offset : offset + nbytes])
    return found


def _place(mapping: re.Match[str], address: int, nbytes: int) -> Place | None:
    begin, end, offset, inode = int(mapping[1], 16), int(mapping[2], 16), int(mapping[4], 16), int(mapping[5])
    with contextlib.suppress(OSError):  # "(deleted)"
        is_there = address + nbytes <= end and os.stat(mapping[6]).st_ino == inode
        if is_there and (mapping[3] == "s" or not _is_changed(mapping[0])):
            return mapping[6], offset + address - begin, inode
    return None


def _is_changed(mapping: str) -> bool:
    """Whether pages of a private mapping have been written to."""
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith(mapping):
                break
        for line in lines:
            if _CHANGED.match(line):
                return True
            if line.startswith("VmFlags"):
                return False
    return True
