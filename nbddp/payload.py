"""Both sides. Objects to and from one block of memory that both sides map.

A block is one file in memory (see ``block.py``). cloudpickle (protocol 5) writes the small parts as a
stream; numpy arrays and torch storages stay out of that stream and are copied into the block once, at
memory speed. Every reader maps the block copy-on-write, so four ranks share one copy and none can change
the notebook's::

    [header][array or storage][array or storage] ... [pickle stream][table]

Who shares memory with whom is as after ``pickle`` and ``torch.save``. Tensors of one storage share it still.
Numpy arrays are independent, of the arrays and tensors too that they were views of; so are pandas objects,
also those that pandas keeps apart by copy-on-write, which ``pickle`` lets share. That costs no memory: bytes
that several arrays see lie in the block once, and each array is read from a private mapping in which nothing
else lies over it. Only small arrays (less than 1 MiB in all that overlaps) lie there once each.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import io
import linecache
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from nbddp.block import (
    ALIGN,
    Area,
    Extent,
    Piece,
    Place,
    as_bytes,
    fill,
    lay_out,
    map_block,
    mappings_for,
    merged,
    open_block,
    parts_of,
    storage_bytes,
    storage_over,
)
from nbddp.functions import noting
from nbddp.known import Known
from nbddp.packing import PackedStorage, Packer, Reading, reading_now, refuse_uninherited, refuse_unshippable
from nbddp.travelling_lines import sources_of

__all__ = [
    "Packed",
    "Pickled",
    "Unpacked",
    "open_block",
    "pack",
    "prepare",
    "probe",
    "refuse_uninherited",
    "refuse_unshippable",
    "unpack",
]

_SMALL_NBYTES = 1 << 20  # gaps up to here cost nothing worth a copy
_HEADER = struct.Struct("<QQQ")  # where the pickle stream starts, where the table starts, end


@dataclass
class Packed:
    """What is in a block, and what must go along with it.

    Attributes:
        nbytes: size of the block.
        inherited: objects that only a starting process can be given (queues, locks, pipes, shared
            tensors), by the number that the stream calls them by.
        by_value: functions and classes that travelled by value, by the same kind of number.
    """

    nbytes: int
    inherited: list[Any]
    by_value: list[Any]


class Pickled:
    """An object pickled and laid out, its arrays still where they are.

    Attributes:
        packed: what the block will be.
    """

    def __init__(self, packed: Packed, parts: list[tuple[int, memoryview]]) -> None:
        self.packed = packed
        self._parts = parts

    def write(self, fd: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Copy all of it into the block ``fd``, for as long as that is ``wanted``, and let go of the arrays."""
        parts, self._parts = self._parts, []
        fill(fd, self.packed.nbytes, parts, wanted)


@dataclass
class Unpacked:
    """The object out of a block.

    Attributes:
        by_value: functions and classes that came by value, in order.
        named: those of them that the notebook had under their own names.
        notes: what the user should hear of, in words.
    """

    value: Any
    by_value: list[Any]
    named: dict[str, Any]
    notes: list[str]


def pack(obj: object, fd: int, *, known: Known | None = None, inheriting: bool = True, back: bool = False) -> Packed:
    """Write ``obj`` into the block ``fd``; as :func:`prepare` and :meth:`Pickled.write`."""
    pickled = prepare(obj, known=known, inheriting=inheriting, back=back)
    pickled.write(fd)
    return pickled.packed


def prepare(obj: object, *, known: Known | None = None, inheriting: bool = True, back: bool = False) -> Pickled:
    """Pickle ``obj`` and see how large its block will be.

    Args:
        known: what the reader, the notebook, has already. Its classes travel as their number, so that an instance
            comes back as an instance of the very class; functions come to live in its ``__main__``.
        inheriting: is the reader about to be started by us? Then queues and locks may go along.
        back: is it a result, on its way to a notebook? Then nothing is inherited, and ``__main__`` is its reader's own.

    Raises:
        Whatever pickling raises; ``culprit.explain`` turns that into the name of the variable.
    """
    stream = io.BytesIO()
    with contextlib.closing(Packer(stream, known=known, inheriting=inheriting, back=back)) as pickler:
        # The others fill while obj is pickled, and come after it: all their members are memo references.
        pickler.dump((obj, pickler.by_value, pickler.named, pickler.notes))
        return _lay_out(pickler, memoryview(stream.getvalue()))


def probe(obj: object, *, known: Known | None = None, inheriting: bool = True, back: bool = False) -> None:
    """Pickle ``obj`` and forget the result: raises what :func:`pack` would, copies no array."""
    with contextlib.closing(Packer(io.BytesIO(), known=known, inheriting=inheriting, back=back)) as pickler:
        pickler.dump(obj)


def unpack(
    fd: int,
    nbytes: int,
    *,
    inherited: Sequence[Any] = (),
    known: Sequence[Any] = (),
    device: torch.device | None = None,
) -> Unpacked:
    """Read the object out of the block ``fd``, mapping what is large copy-on-write.

    Args:
        device: where tensors that lived on an accelerator go; None: the CPU.
    """
    memory = map_block(fd, nbytes)
    stream_at, table_at, end = _HEADER.unpack_from(memory, 0)
    table: _Table = pickle.loads(memory[table_at:end])
    for filename, lines in table.sources.items():
        # mtime None: linecache.checkcache leaves such an entry alone.
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    mappings = functools.cache(lambda number: map_block(fd, nbytes) if number else memory)
    storage = functools.cache(lambda index: table.storages[index].read(mappings, device))
    here: list[str] = []
    with (
        reading_now(Reading(storage, lambda number: table.arrays[number].read(mappings), inherited, known)),
        noting(here),
    ):
        buffers = (buffer.read(mappings) for buffer in table.buffers)
        value, by_value, named, notes = pickle.loads(memory[stream_at:table_at], buffers=buffers)
    return Unpacked(value, by_value, named, notes + here)


_Mappings = Callable[[int], memoryview]


@dataclass(frozen=True)
class _Buffer:
    """Where in the block an array's memory lies."""

    place: Place
    nbytes: int
    readonly: bool

    def read(self, mappings: _Mappings) -> memoryview:
        view = mappings(self.place.mapping)[self.place.offset : self.place.offset + self.nbytes]
        return view.toreadonly() if self.readonly else view


@dataclass(frozen=True)
class _Storage:
    """Where in the block a torch storage lies, and whether it came from an accelerator."""

    place: Place
    nbytes: int
    was_on_device: bool

    def read(self, mappings: _Mappings, device: torch.device | None) -> torch.UntypedStorage:
        memory = mappings(self.place.mapping)
        storage = storage_over(memory[self.place.offset : self.place.offset + self.nbytes])
        if self.was_on_device and device is not None and device.type != "cpu":
            return as_bytes(storage).to(device).untyped_storage()
        return storage


@dataclass(frozen=True)
class _Array:
    """Where in the block an array with gaps or steps backwards lies: its memory, and its first element within that."""

    memory: _Buffer
    first: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, mappings: _Mappings) -> npt.NDArray[Any]:
        return np.ndarray(self.shape, self.dtype, self.memory.read(mappings), self.first, self.strides)


@dataclass(frozen=True)
class _Table:
    """The block's contents list.

    Attributes:
        sources: the lines of the functions that travel, in their places, by the file name in their code objects.
    """

    buffers: list[_Buffer]
    storages: list[_Storage]
    arrays: list[_Array]
    sources: dict[str, list[str]]


def _lay_out(pickler: Packer, stream: memoryview) -> Pickled:
    buffers = [_area_of(Piece.of(view)) for view in pickler.buffers]
    storages = [_LaidOut.of(entry) for entry in pickler.storages.values()]
    arrays = _compact(pickler.arrays, [*buffers, *(storage.area for storage in storages)])
    areas = [*buffers, *(storage.area for storage in storages), *(_area_of(_memory_of(array)) for array in arrays)]
    places, stream_at = lay_out(areas, ALIGN)
    placed = iter(places)
    table = _Table(
        [_Buffer(next(placed), area.nbytes, area.pieces[0].data.readonly) for area in buffers],
        [_Storage(next(placed), storage.nbytes, storage.was_on_device) for storage in storages],
        [_placed(array, next(placed)) for array in arrays],
        sources_of(pickler.codes),
    )
    table_at = stream_at + stream.nbytes
    encoded = pickle.dumps(table, protocol=5)
    end = table_at + len(encoded)
    header = memoryview(_HEADER.pack(stream_at, table_at, end))
    parts = [(0, header), *parts_of(areas, places), (stream_at, stream), (table_at, memoryview(encoded))]
    return Pickled(Packed(end, pickler.inherited, pickler.by_value), parts)


def _area_of(piece: Piece) -> Area:
    return Area(piece.extent, [piece])


def _compact(arrays: list[npt.NDArray[Any]], others: list[Area]) -> list[npt.NDArray[Any]]:
    """The arrays themselves, or copies without gaps of those that would take much unseen memory along.

    Copied is also what lies over itself, since each element is to be written to alone; and over others, if it is small
    or gaps for the most part.
    """
    arrays = [_copied(array) if _lies_over_itself(array) else array for array in arrays]
    extents = [_extent_of(array) for array in arrays]
    mappings = mappings_for(
        [*(area.extent for area in others), *extents],
        [*(area.nbytes for area in others), *(array.nbytes for array in arrays)],
    )[len(others) :]
    wide = _lie_wide(extents, [array.nbytes for array in arrays], others)
    return [
        _copied(array) if is_wide or mapping is None or (mapping and stop - start > 2 * array.nbytes) else array
        for array, mapping, is_wide, (start, stop) in zip(arrays, mappings, wide, extents)
    ]


def _copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    copy = array.copy("K")
    copy.flags.writeable = array.flags.writeable
    return copy


def _lies_over_itself(array: npt.NDArray[Any]) -> bool:
    """May it be that writing to one element changes another? Not for steps that each reach beyond the shorter ones."""
    reach = array.itemsize
    for step, size in sorted((abs(step), size) for step, size in zip(array.strides, array.shape) if size > 1):
        if step < reach:
            return array.flags.writeable
        reach += step * (size - 1)
    return False


def _lie_wide(extents: list[Extent], nbytes: list[int], others: list[Area]) -> list[bool]:
    """Which of them are in regions that are large, and mostly gaps that nobody sees."""
    in_sight = [piece.extent for area in others for piece in area.pieces]
    regions = merged([*in_sight, *extents])
    firsts = [start for start, _ in regions]
    region_of = [bisect.bisect_right(firsts, start) - 1 for start, _ in extents]
    seen = [0] * len(regions)
    for start, stop in in_sight:
        if start < stop:
            seen[bisect.bisect_right(firsts, start) - 1] += stop - start
    for (start, stop), size, region in zip(extents, nbytes, region_of):
        seen[region] += min(size, stop - start)
    wide = [stop - start > max(2 * nbytes, _SMALL_NBYTES) for (start, stop), nbytes in zip(regions, seen)]
    return [wide[region] for region in region_of]


def _extent_of(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The addresses of its lowest byte, and behind its highest."""
    reaches = [(size - 1) * step for size, step in zip(array.shape, array.strides)]
    first = array.ctypes.data
    return first + sum(r for r in reaches if r < 0), first + sum(r for r in reaches if r > 0) + array.itemsize


def _memory_of(array: npt.NDArray[Any]) -> Piece:
    """All bytes between an array's lowest and highest, gaps too."""
    start, stop = _extent_of(array)
    forwards: Any = tuple(slice(None, None, -1 if step < 0 else 1) for step in array.strides)
    # The dots: an array of no dimension would else be a number, and a copy.
    first: Any = (*(slice(1),) * array.ndim, ...)
    lowest = array.view(np.ndarray)[(*forwards, ...)][first].reshape(1).view(np.uint8)
    return Piece(start, memoryview(as_strided(lowest, (stop - start,), (1,))))  # type: ignore[arg-type]


def _placed(array: npt.NDArray[Any], place: Place) -> _Array:
    start, stop = _extent_of(array)
    memory = _Buffer(place, stop - start, not array.flags.writeable)
    return _Array(memory, array.ctypes.data - start, array.dtype, array.shape, array.strides)


@dataclass(frozen=True)
class _LaidOut:
    """A storage in this process's memory, and the pieces of it that some tensor sees: only those are copied."""

    area: Area
    was_on_device: bool

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return self.area.extent[1] - self.area.extent[0]

    @classmethod
    def of(cls, entry: PackedStorage) -> _LaidOut:
        was_on_device = entry.storage.device.type != "cpu"
        storage = entry.storage.cpu() if was_on_device else entry.storage  # type: ignore[no-untyped-call]
        whole = Piece.of(storage_bytes(storage))
        spans = [(max(start, 0), min(stop, whole.data.nbytes)) for start, stop in entry.spans]
        pieces = [Piece(whole.address + start, whole.data[start:stop]) for start, stop in spans]
        return cls(Area(whole.extent, pieces), was_on_device)
