"""The layout of a block: where each array and storage goes, and which of the reader's mappings it is read from."""

from __future__ import annotations

import bisect
import collections
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nbddp.payload.block import MAP_FROM_NBYTES, Place, can_map

ALIGN = 64
_MAX_COPIED_NBYTES = 16 << 20  # total size of overlapping arrays that are copied instead of mapped
_MAX_MAPPINGS = 1 << 13  # of one block; Linux allows a process 65,530

Extent = tuple[int, int]  # the addresses of the first byte and after the last byte


@dataclass(frozen=True)
class Piece:
    """Bytes of the sender's memory: their address, and a view of them."""

    address: int
    data: memoryview

    @classmethod
    def of(cls, data: memoryview) -> Piece:
        """A contiguous buffer as a piece."""
        return cls(int(np.frombuffer(data, dtype=np.uint8).ctypes.data) if data.nbytes else 0, data)

    @property
    def extent(self) -> Extent:
        return self.address, self.address + self.data.nbytes


@dataclass(frozen=True)
class Area:
    """The memory of one array or storage of the sender, and the pieces of it that go into the block."""

    extent: Extent
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.pieces)


def lay_out(areas: Sequence[Area], first_offset: int) -> tuple[list[Place], int]:
    """Each area's offset, and the first free offset after them. Bytes that areas share are stored once, unless few."""
    mappings = mappings_for([area.extent for area in areas], [area.nbytes for area in areas])
    regions = merged(area.extent for area, mapping in zip(areas, mappings) if mapping is not None)
    own = [area.extent for area, mapping in zip(areas, mappings) if mapping is None]
    shifts, offset = [], first_offset
    for start, stop in [*regions, *own]:
        shifts.append(offset + start % ALIGN - start)  # each address keeps its alignment
        offset = -(-(stop + shifts[-1]) // ALIGN) * ALIGN  # rounded up
    starts, own_shifts = [start for start, _ in regions], iter(shifts[len(regions) :])
    places = []
    for area, mapping in zip(areas, mappings):
        start, stop = area.extent
        if mapping is None:
            places.append(Place(start + next(own_shifts)))
        elif start < stop:
            places.append(Place(start + shifts[bisect.bisect_right(starts, start) - 1], mapping))
        else:
            places.append(Place(0))  # empty: its address means nothing
    return places, offset


def parts_of(areas: Sequence[Area], places: Sequence[Place]) -> Iterator[tuple[int, memoryview]]:
    """The bytes to write with their offsets, sorted by offset; each byte once."""
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
    """The number of the mapping to read each extent from: extents with the same number do not overlap.

    None: the extent overlaps others and is copied, because it is small or needs more mappings than a process may have.
    """
    numbers = _number(extents)
    nbytes: collections.Counter[int] = collections.Counter()
    for number, seen in zip(numbers, nbytes_seen):
        nbytes[number] += seen
    mapped, copied = {0}, 0
    for number in sorted(nbytes, key=nbytes.__getitem__):
        copied += nbytes[number]
        if (nbytes[number] >= MAP_FROM_NBYTES or copied > _MAX_COPIED_NBYTES) and number < _MAX_MAPPINGS:
            mapped.add(number)
    return [number if number in mapped and (number == 0 or can_map()) else None for number in numbers]


def _number(extents: Sequence[Extent]) -> list[int]:
    """Number the extents, from 0, so that those with the same number do not overlap."""
    numbers = [0] * len(extents)
    busy: list[tuple[int, int]] = []  # a heap of (stop, number)
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
    """The same bytes as disjoint, sorted extents."""
    found: list[Extent] = []
    for start, stop in sorted(extents):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif start < stop:
            found.append((start, stop))
    return found
