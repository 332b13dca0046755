"""Both sides. A block: one file in memory that both sides map, and what goes where in it.

It lies in huge pages where the system allows that, and else in a ``memfd``: neither is bound by a container's 64 MB
/dev/shm, or has a name in any file system.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import heapq
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

_MOST_COPIED_NBYTES = 16 << 20  # of what overlaps, in all
_MOST_MAPPINGS = 1 << 13  # of one block; Linux allows a process 65,530

_Chunks = Iterator[tuple[int, memoryview]]
Extent = tuple[int, int]  # addresses: of the first byte, and behind the last


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
    if nbytes < _MAP_FROM_NBYTES or not _can_map():
        copy = bytearray(nbytes)
        read = 0
        while read < nbytes:
            if not (more := os.preadv(fd, [memoryview(copy)[read:]], read)):
                raise EOFError(f"a block of {nbytes} bytes ends after {read}")
            read += more
        return memoryview(copy)
    return storage_bytes(_mapping(fd, nbytes, shared=False))


def _can_map() -> bool:
    return os.path.exists("/proc/self/fd")


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
    def extent(self) -> Extent:
        return self.address, self.address + self.data.nbytes


@dataclass(frozen=True)
class Area:
    """Memory of the sender that is one thing to the reader, and what of it goes into the block."""

    extent: Extent
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Place:
    """Where in the block an area begins, and in which of the reader's mappings of the block.

    Attributes:
        mapping: areas that overlap have different numbers, so that the reader writes to each alone.
    """

    offset: int
    mapping: int = 0


def lay_out(areas: Sequence[Area], first_offset: int) -> tuple[list[Place], int]:
    """Where everything goes, and the first free offset behind it. Bytes that areas share lie there once, unless few."""
    mappings = mappings_for([area.extent for area in areas], [area.nbytes for area in areas])
    regions = merged(area.extent for area, mapping in zip(areas, mappings) if mapping is not None)
    own = [area.extent for area, mapping in zip(areas, mappings) if mapping is None]
    shifts, offset = [], first_offset
    for start, stop in [*regions, *own]:
        shifts.append(offset + start % ALIGN - start)  # an address keeps its alignment, whatever that was
        offset = _aligned(stop + shifts[-1])
    starts, of_own = [start for start, _ in regions], iter(shifts[len(regions) :])
    places = []
    for area, mapping in zip(areas, mappings):
        start, stop = area.extent
        if mapping is None:
            places.append(Place(start + next(of_own)))
        elif start < stop:
            places.append(Place(start + shifts[bisect.bisect_right(starts, start) - 1], mapping))
        else:
            places.append(Place(0))  # empty: its address means nothing
    return places, offset


def parts_of(areas: Sequence[Area], places: Sequence[Place]) -> Iterator[tuple[int, memoryview]]:
    """What is to be written at which offset; in their order, and every byte once."""
    parts = [
        (place.offset + piece.address - area.extent[0], piece.data)
        for area, place in zip(areas, places)
        for piece in area.pieces
    ]
    written = 0
    for offset, data in sorted(parts, key=lambda part: (part[0], -part[1].nbytes)):
        start, stop = max(offset, written), offset + data.nbytes
        if start < stop:
            yield start, data[start - offset :]
            written = stop


def mappings_for(extents: Sequence[Extent], nbytes_seen: Sequence[int]) -> list[int | None]:
    """By extent, the number of the mapping to read it from: those of one number do not overlap.

    None: what overlaps is better copied, being small, or too much for the mappings that there may be.
    """
    numbers = _numbers_for(extents)
    nbytes: collections.Counter[int] = collections.Counter()
    for number, seen in zip(numbers, nbytes_seen):
        nbytes[number] += seen
    mapped, copied = {0}, 0
    for number in sorted(nbytes, key=nbytes.__getitem__):
        copied += nbytes[number]
        if (nbytes[number] >= _MAP_FROM_NBYTES or copied > _MOST_COPIED_NBYTES) and number < _MOST_MAPPINGS:
            mapped.add(number)
    return [number if number in mapped and (number == 0 or _can_map()) else None for number in numbers]


def _numbers_for(extents: Sequence[Extent]) -> list[int]:
    numbers = [0] * len(extents)
    busy: list[tuple[int, int]] = []  # a heap: up to where, and the number
    reach = 0
    for i in sorted(range(len(extents)), key=lambda i: (extents[i][0], -extents[i][1])):
        start, stop = extents[i]
        if start >= reach:
            busy.clear()
        if start < stop:
            numbers[i] = heapq.heappop(busy)[1] if busy and busy[0][0] <= start else len(busy)
            heapq.heappush(busy, (stop, numbers[i]))
            reach = max(reach, stop)
    return numbers


def merged(extents: Iterable[Extent]) -> list[Extent]:
    """The same bytes, those that overlap as one."""
    found: list[Extent] = []
    for start, stop in sorted(extents):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif start < stop:
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
