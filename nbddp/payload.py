"""Both sides. Objects to and from one block of memory that both sides map.

A block is one file in memory (see ``block.py``). cloudpickle (protocol 5) writes the small parts as a
stream; numpy arrays and torch storages stay out of that stream and are copied into the block once, at
memory speed. Every reader maps the block copy-on-write, so four ranks share one copy and none can change
the notebook's::

    [header][array or storage][array or storage] ... [pickle stream][table]

Memory that overlapped in the sender overlaps in the block: views that shared storage still share it,
numpy with torch as well. Numpy views with gaps, say columns, do so unless together they see less than
half of a large array: then each arrives as a copy of its own, as from ``pickle``.
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
    Layout,
    Piece,
    as_bytes,
    fill,
    map_block,
    merged,
    open_block,
    storage_bytes,
    storage_over,
)
from nbddp.functions import noting
from nbddp.known import Known
from nbddp.packing import PackedStorage, Packer, Reading, reading_now, refuse_uninherited, refuse_unshippable

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
        return _lay_out(pickler, stream.getbuffer())


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
    storage = functools.cache(lambda index: table.storages[index].read(memory, device))
    here: list[str] = []
    with (
        reading_now(Reading(storage, lambda number: table.arrays[number].read(memory), inherited, known)),
        noting(here),
    ):
        buffers = (place.read(memory) for place in table.buffers)
        value, by_value, named, notes = pickle.loads(memory[stream_at:table_at], buffers=buffers)
    return Unpacked(value, by_value, named, notes + here)


@dataclass(frozen=True)
class _Buffer:
    """Where in the block an array's memory lies."""

    offset: int
    nbytes: int
    readonly: bool

    def read(self, memory: memoryview) -> memoryview:
        view = memory[self.offset : self.offset + self.nbytes]
        return view.toreadonly() if self.readonly else view


@dataclass(frozen=True)
class _Storage:
    """Where in the block a torch storage lies, and whether it came from an accelerator."""

    offset: int
    nbytes: int
    was_on_device: bool

    def read(self, memory: memoryview, device: torch.device | None) -> torch.UntypedStorage:
        storage = storage_over(memory[self.offset : self.offset + self.nbytes])
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

    def read(self, memory: memoryview) -> npt.NDArray[Any]:
        return np.ndarray(self.shape, self.dtype, self.memory.read(memory), self.first, self.strides)


@dataclass(frozen=True)
class _Table:
    """The block's contents list.

    Attributes:
        sources: lines of the notebook's cells, by the file name in their code objects.
    """

    buffers: list[_Buffer]
    storages: list[_Storage]
    arrays: list[_Array]
    sources: dict[str, list[str]]


def _lay_out(pickler: Packer, stream: memoryview) -> Pickled:
    pieces = [Piece.of(view) for view in pickler.buffers]
    storages = [_LaidOut.of(entry) for entry in pickler.storages.values()]
    in_sight = [*pieces, *(piece for storage in storages for piece in storage.seen)]
    arrays = _without_wide_gaps(pickler.arrays, [piece.extent for piece in in_sight])
    pieces_of_arrays = [_memory_of(array) for array in arrays]
    layout = Layout()
    for piece in [*pieces, *pieces_of_arrays]:
        layout.add(*piece.extent)
    for storage in storages:
        layout.add(storage.address, storage.address + storage.nbytes)
    stream_at = layout.place(ALIGN)
    table = _Table(
        [_Buffer(layout.offset(p.address), p.data.nbytes, p.data.readonly) for p in pieces],
        [_Storage(layout.offset(s.address), s.nbytes, s.was_on_device) for s in storages],
        [_placed(array, piece, layout) for array, piece in zip(arrays, pieces_of_arrays)],
        {name: lines for name in sorted(pickler.filenames) if (lines := linecache.getlines(name))},
    )
    table_at = stream_at + stream.nbytes
    encoded = pickle.dumps(table, protocol=5)
    end = table_at + len(encoded)
    header = memoryview(_HEADER.pack(stream_at, table_at, end))
    data = layout.disjoint([*in_sight, *pieces_of_arrays])
    parts = [(0, header), *data, (stream_at, stream), (table_at, memoryview(encoded))]
    return Pickled(Packed(end, pickler.inherited, pickler.by_value), parts)


def _without_wide_gaps(arrays: list[npt.NDArray[Any]], others: list[tuple[int, int]]) -> list[npt.NDArray[Any]]:
    """The arrays themselves, or copies without gaps of those that would take much unseen memory along."""
    extents = [_extent_of(array) for array in arrays]
    regions = merged([*others, *extents])
    firsts = [start for start, _ in regions]
    region_of = [bisect.bisect_right(firsts, start) - 1 for start, _ in extents]
    seen = [0] * len(regions)
    for start, stop in others:
        seen[bisect.bisect_right(firsts, start) - 1] += stop - start
    for array, (start, stop), region in zip(arrays, extents, region_of):
        seen[region] += min(array.nbytes, stop - start)
    wide = [stop - start > max(2 * nbytes, _SMALL_NBYTES) for (start, stop), nbytes in zip(regions, seen)]
    return [array.copy("K") if wide[region] else array for array, region in zip(arrays, region_of)]


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


def _placed(array: npt.NDArray[Any], piece: Piece, layout: Layout) -> _Array:
    place = _Buffer(layout.offset(piece.address), piece.data.nbytes, not array.flags.writeable)
    return _Array(place, array.ctypes.data - piece.address, array.dtype, array.shape, array.strides)


@dataclass(frozen=True)
class _LaidOut:
    """A storage in this process's memory, and the pieces of it that some tensor sees: only those are copied."""

    address: int
    nbytes: int
    was_on_device: bool
    seen: list[Piece]

    @classmethod
    def of(cls, entry: PackedStorage) -> _LaidOut:
        was_on_device = entry.storage.device.type != "cpu"
        storage = entry.storage.cpu() if was_on_device else entry.storage  # type: ignore[no-untyped-call]
        whole = storage_bytes(storage)
        base = Piece.of(whole).address
        spans = [(max(start, 0), min(stop, whole.nbytes)) for start, stop in entry.spans]
        return cls(base, whole.nbytes, was_on_device, [Piece(base + start, whole[start:stop]) for start, stop in spans])
