"""Memory that is mapped from a file, by np.memmap or torch.load(mmap=True), is sent as file and offset."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

FROM_NBYTES = 1 << 20  # less is sent as bytes
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ..(.)(.) ([0-9a-f]+) \S+ (\d+) +(/.*)")
_CHANGED = re.compile(r"(?:Anonymous|Swap): +[1-9]")

Place = tuple[str, int]  # a file, and the offset in it


def place_of(address: int, nbytes: int) -> Place | None:
    """Return where this memory is in a file; None: nowhere, or what's there is something else by now."""
    for text in _mappings("/proc/self/maps"):
        found = _MAPPING.match(text)
        if not found or not int(found[1], 16) <= address <= address + nbytes <= int(found[2], 16):
            continue
        path, offset = found[7], int(found[5], 16) + address - int(found[1], 16)
        with contextlib.suppress(OSError):  # "(deleted)"
            if not path.startswith("/dev/") and os.stat(path).st_ino == int(found[6]):
                return (path, offset) if found[4] == "s" or not _is_changed(text) else None
        return None
    return None


def view(place: Place, nbytes: int) -> memoryview:
    """Map it, private and writable. Raises RuntimeError with the name of a file that isn't there."""
    path, offset = place
    mapped = torch.from_file(path, shared=False, size=offset + nbytes, dtype=torch.uint8)
    return mapped.numpy().data[offset:]


def _mappings(file: str) -> Iterator[str]:
    with open(file) as lines:
        yield from lines


def _is_changed(mapping: str) -> bool:
    """Whether pages of a private mapping have been written to."""
    lines = _mappings("/proc/self/smaps")
    for line in lines:
        if line == mapping:
            break
    for line in lines:
        if _CHANGED.match(line):
            return True
        if line.startswith("VmFlags"):
            return False
    return True
