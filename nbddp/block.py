"""Both sides. A block: one file in memory that both sides map, and what goes where in it.

It lies in huge pages where the system allows that, and else in a ``memfd``: neither is bound by a container's 64 MB
/dev/shm, or has a name in any file system.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import operator
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbddp import hugefiles

ALIGN = 64
_MAP_FROM_NBYTES = 1 << 20  # below this a copy is cheaper than a mapping, and pins nothing
_CHUNK_NBYTES = 4 << 20  # of one thread, between two looks whether it is still wanted
_TOGETHER_FROM_NBYTES = 32 << 20
_MOST_THREADS = 4

_Chunks = Iterator[tuple[int, memoryview]]


def open_block(name: str) -> int:
    """A new, empty block. Returns its fd; nothing of it has a name in any file system."""
    hugefiles.begin()
    if (fd := hugefiles.open_file(f"nbddp-{name}")) is not None:
        return fd
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"nbddp-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def map_block(fd: int, nbytes: int) -> memoryview:
    """The block's bytes, private and writable, kept alive by whoever holds a part of them."""
    if nbytes < _MAP_FROM_NBYTES or not os.path.exists("/proc/self/fd"):
        copy = bytearray(nbytes)
        read = 0
        while read < nbytes:
            if not (more := os.preadv(fd, [memoryview(copy)[read:]], read)):
                raise EOFError(f"a block of {nbytes} bytes ends after {read}")
            read += more
        return memoryview(copy)
    return storage_bytes(_mapping(fd, nbytes, shared=False))


def _mapping(fd: int, nbytes: int, *, shared: bool) -> Any:
    """Not mmap.mmap: it keeps a duplicate of the fd open for as long as the mapping lives."""
    return torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", shared=shared, nbytes=nbytes)


def write_at(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data``. ``pwrite`` fills a new memfd at memcpy speed; a shared mapping takes 1.4 times that."""
    view = memoryview(data).cast("B")
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], offset + done)


def fill(fd: int, nbytes: int, parts: Sequence[tuple[int, memoryview]], wanted: Callable[[], bool]) -> None:
    """Size the block and copy the parts to their offsets, for as long as that is ``wanted``; much of it by threads.

    Two ``pwrite`` to one file wait for each other, a page fault of its mapping for none: so one thread writes, the
    others copy. With two on two cores, 1 GiB takes 0.7 to 0.9 times as long as with one.

    Args:
        parts: each with its offset, in their order.
    """
    chunks = iter(
        [
            (offset + start, data[start : start + _CHUNK_NBYTES])
            for offset, data in parts
            for start in range(0, data.nbytes, _CHUNK_NBYTES)
        ]
    )
    written = sum(data.nbytes for _, data in parts)
    if written < nbytes // 2:
        # What no tensor sees of its storage stays a hole. A huge page would fill it, and there is none at a file's end.
        _write(fd, chunks, wanted)
        return os.ftruncate(fd, nbytes)
    os.ftruncate(fd, nbytes)
    mapped, others = None, _threads_beside(fd, written)
    if others:
        with contextlib.suppress(RuntimeError):  # this process became another user's, or has no room for it
            mapped = storage_bytes(_mapping(fd, nbytes, shared=True))
    if mapped is None:
        return _write(fd, chunks, wanted)
    copies = []
    with ThreadPoolExecutor(others, "nbddp-copy") as pool:
        try:
            with contextlib.suppress(RuntimeError):  # the system has no thread to give
                for _ in range(others):
                    copies.append(pool.submit(_copy, mapped, chunks, wanted))
            _write(fd, chunks, wanted)
        finally:
            collections.deque(chunks, maxlen=0)  # none is left to begin with
    for copy in copies:
        copy.result()
    return None


def write_piece(fd: int, piece: memoryview | bytes, at: int, nbytes: int) -> None:
    """Write a piece of a block that comes piece by piece, the first one first, and takes an earlier one's place.

    Args:
        at: its offset.
        nbytes: of the whole block, which is sized at once: the system chooses pages by a file's size.
    """
    if at == 0:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, nbytes)
    write_at(fd, piece, at)


def _write(fd: int, chunks: _Chunks, wanted: Callable[[], bool]) -> None:
    for offset, data in chunks:
        if not wanted():
            return
        write_at(fd, data, offset)


def _copy(mapped: memoryview, chunks: _Chunks, wanted: Callable[[], bool]) -> None:
    for offset, data in chunks:
        if not wanted():
            return
        place = np.frombuffer(mapped[offset : offset + data.nbytes], dtype=np.uint8)
        np.copyto(place, np.frombuffer(data, dtype=np.uint8))


def _threads_beside(fd: int, nbytes: int) -> int:
    """How many threads copy so much into a mapping, beside the one that writes; no more than torch would take."""
    if nbytes < _TOGETHER_FROM_NBYTES or not _never_lacks_room(fd):
        return 0
    return min(torch.get_num_threads(), _MOST_THREADS) - 1


def _never_lacks_room(fd: int) -> bool:
    """Is a write to a mapping of it as safe as ``pwrite``? Where there is no room, it is a SIGBUS and no error."""
    with contextlib.suppress(OSError):
        strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
        unlimited = os.fstatvfs(fd).f_blocks == 0  # as large as there is memory
        return unlimited and os.fstat(fd).st_nlink == 0 and not strict
    return False


@dataclass(frozen=True)
class Piece:
    """Bytes of the sender's memory: where they lie, and the object to read them from."""

    address: int
    data: memoryview

    @classmethod
    def of(cls, data: memoryview) -> Piece:
        """The piece that a contiguous buffer is."""
        return cls(int(np.frombuffer(data, dtype=np.uint8).ctypes.data) if data.nbytes else 0, data)

    @property
    def extent(self) -> tuple[int, int]:
        """Its addresses: the first, and the one behind the last."""
        return self.address, self.address + self.data.nbytes


class Layout:
    """Which interval of the sender's memory goes where in the block; overlapping ones stay so."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []
        self._regions: list[tuple[int, int, int]] = []  # start, stop, offset

    def add(self, start: int, stop: int) -> None:
        """These bytes of memory will be in the block."""
        if stop > start:
            self._intervals.append((start, stop))

    def place(self, first_offset: int) -> int:
        """Give every region its offset. Returns the first free offset after them."""
        offset = first_offset
        for start, stop in merged(self._intervals):
            shift = start % ALIGN  # an address keeps its alignment, whatever that was
            self._regions.append((start, stop, offset + shift))
            offset = _aligned(offset + shift + stop - start)
        return offset

    def offset(self, address: int) -> int:
        """Where in the block the byte at this address is."""
        index = bisect.bisect_right(self._regions, address, key=operator.itemgetter(0)) - 1
        if index < 0:
            return 0  # an empty array: its address means nothing
        start, stop, offset = self._regions[index]
        return offset + address - start if address < stop else 0

    def disjoint(self, pieces: list[Piece]) -> Iterator[tuple[int, memoryview]]:
        """Every byte of the pieces once, however often they overlap, and its offset."""
        written = 0
        for piece in sorted(pieces, key=lambda p: (p.address, -p.data.nbytes)):
            stop = piece.address + piece.data.nbytes
            start = max(piece.address, written)
            if start < stop:
                yield self.offset(start), piece.data[start - piece.address :]
                written = stop


def merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes, those that overlap as one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def as_bytes(storage: Any) -> torch.Tensor:
    """A storage as a tensor of uint8 over the same memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def storage_bytes(storage: Any) -> memoryview:
    """A CPU storage's memory."""
    return memoryview(as_bytes(storage).numpy())  # type: ignore[arg-type]


def storage_over(view: memoryview) -> torch.UntypedStorage:
    """A CPU storage over memory of somebody else's, which it keeps alive."""
    if not view.nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
