"""Packs objects into one block of memory that both sides map, and unpacks them.

A block is one file in memory (see ``block.py`` and ``layout.py``). cloudpickle (protocol 5) writes the small parts as a
stream. numpy arrays and torch storages stay out of the stream and are copied into the block once, at memory speed.
Every reader maps the block copy-on-write, so four ranks share one copy, and none can change the notebook's::

    [header][array or storage][array or storage] ... [pickle stream][table]

Objects share memory as after ``pickle`` and ``torch.save``. Tensors of one storage still share it. A numpy array is
independent, also of the array or tensor that it was a view of. So is a pandas object, even if pandas keeps it apart by
copy-on-write only, where ``pickle`` lets objects share memory. That takes no memory: bytes that several arrays see are
in the block once, and each array is read from a private mapping in which no other array overlaps it. Only small arrays
(overlaps of less than 1 MiB in all) are in the block several times.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nbddp.payload import carried
from nbddp.payload.arrays import compact, extent_of, memory_of
from nbddp.payload.block import Place, as_bytes, fill, map_block, storage_bytes, storage_over
from nbddp.payload.functions import noting
from nbddp.payload.known import Known
from nbddp.payload.layout import ALIGN, Area, Piece, lay_out, parts_of
from nbddp.payload.light import is_light
from nbddp.payload.pickler import PackedStorage, Packer, Reading, reading_now
from nbddp.payload.source_lines import sources_of

_HEADER = struct.Struct("<QQQ")  # offsets: start of the pickle stream, start of the table, end


@dataclass
class Packed:
    """The size of a block, and the objects that are not in it.

    Attributes:
        nbytes: the size of the block.
        inherited: objects that a process can get only when it starts (queues, locks, pipes, shared tensors). The
            stream refers to them by their index.
        by_value: functions and classes that were pickled by value. An answer may refer to them by their index.
        variables: the notebook's variables that went along with functions which read them.
        is_light: returns whether the call surely needs none of the modules that torch imports only for training.
    """

    nbytes: int
    inherited: list[Any]
    by_value: list[Any]
    variables: dict[str, Any] = field(default_factory=dict)
    is_light: Callable[[], bool] = lambda: False


class Pickled:
    """A pickled object with the layout of its block; its arrays are not copied yet.

    Attributes:
        packed: describes the block to be written.
    """

    def __init__(self, packed: Packed, parts: list[tuple[int, memoryview]]) -> None:
        self.packed = packed
        self._parts = parts

    def write(self, fd: int, keep_going: Callable[[], bool] = lambda: True) -> None:
        """Copy everything into the block ``fd``, until ``keep_going`` returns False, and release the arrays."""
        parts, self._parts = self._parts, []
        fill(fd, self.packed.nbytes, parts, keep_going)


@dataclass
class Unpacked:
    """The object from a block.

    Attributes:
        by_value: functions and classes that were pickled by value, in order.
        named: those of them that were variables of the notebook under their own names.
        notes: messages for the user.
    """

    value: Any
    by_value: list[Any]
    named: dict[str, Any]
    notes: list[str]


def pack(obj: object, fd: int, *, known: Known | None = None, inheriting: bool = True, back: bool = False) -> Packed:
    """Write ``obj`` into the block ``fd``: :func:`prepare` and :meth:`Pickled.write` in one call."""
    pickled = prepare(obj, known=known, inheriting=inheriting, back=back)
    pickled.write(fd)
    return pickled.packed


def prepare(
    obj: object,
    *,
    known: Known | None = None,
    sent: Known | None = None,
    inheriting: bool = True,
    back: bool = False,
    folders: Sequence[str] = (),
    texts: Iterable[str] = (),
) -> Pickled:
    """Pickle ``obj`` and compute the layout of its block.

    Args:
        known: the objects that the reader, the notebook, has already. Its classes are sent as their numbers, so that
            an instance is again an instance of the same class; the globals of functions are its ``__main__``.
        sent: the variables that the reader, a rank that stays, has from earlier calls; functions leave them out.
        inheriting: whether the reader is a process that we are about to start, which can inherit queues and locks.
        back: whether this is a result for the notebook, in which nothing is inherited, and for which ``__main__`` is
            the reader's.
        folders: modules in these folders are sent as source: the reader may not have the files.
        texts: cells and scripts in ``obj``, which import modules, too.

    Raises:
        Whatever pickling raises; ``unpicklable.explain`` turns it into an error that names the variable.
    """
    stream = io.BytesIO()
    with contextlib.closing(Packer(stream, known=known, sent=sent, inheriting=inheriting, back=back)) as pickler:
        # The lists are filled while obj is pickled, and pickled after it, so all their members are memo references.
        pickler.dump((obj, pickler.by_value, pickler.named, pickler.notes))
        texts = list(texts)
        modules = carried.sources(pickler.modules, pickler.codes, texts, folders) if folders else {}
        pickled = _lay_out(pickler, memoryview(stream.getvalue()), modules)
        pickled.packed.is_light = functools.cache(functools.partial(is_light, pickler.modules, pickler.codes, texts))
        return pickled


def probe(obj: object, *, known: Known | None = None, inheriting: bool = True, back: bool = False) -> None:
    """Pickle ``obj`` and discard the result: raises what :func:`pack` would raise, but copies no array."""
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
    """Read the object from the block ``fd``; large arrays are mapped copy-on-write.

    Args:
        inherited, known: the objects that the stream refers to by number.
        device: for tensors that were on an accelerator; None: the CPU.
    """
    memory = map_block(fd, nbytes)
    stream_at, table_at, end = _HEADER.unpack_from(memory, 0)
    table: _Table = pickle.loads(memory[table_at:end])
    carried.install(table.carried)
    for filename, lines in table.sources.items():
        # mtime None: linecache.checkcache leaves such an entry alone.
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    mappings = functools.cache(lambda number: map_block(fd, nbytes) if number else memory)
    storage = functools.cache(lambda index: table.storages[index].read(mappings, device))
    reading_notes: list[str] = []
    with (
        reading_now(Reading(storage, lambda number: table.arrays[number].read(mappings), inherited, known)),
        noting(reading_notes),
    ):
        buffers = (buffer.read(mappings) for buffer in table.buffers)
        value, by_value, named, notes = pickle.loads(memory[stream_at:table_at], buffers=buffers)
    return Unpacked(value, by_value, named, notes + reading_notes)


_Mappings = Callable[[int], memoryview]


@dataclass(frozen=True)
class _Buffer:
    """The place of an array's memory in the block."""

    place: Place
    nbytes: int
    readonly: bool

    def read(self, mappings: _Mappings) -> memoryview:
        view = mappings(self.place.mapping)[self.place.offset : self.place.offset + self.nbytes]
        return view.toreadonly() if self.readonly else view


@dataclass(frozen=True)
class _Storage:
    """The place of a torch storage in the block, and whether it was on an accelerator."""

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
    """An array with gaps or steps backwards: the place of its memory, and the offset of its first element in it."""

    memory: _Buffer
    first: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def at(cls, place: Place, array: npt.NDArray[Any]) -> _Array:
        start, stop = extent_of(array)
        memory = _Buffer(place, stop - start, not array.flags.writeable)
        return cls(memory, array.ctypes.data - start, array.dtype, array.shape, array.strides)

    def read(self, mappings: _Mappings) -> npt.NDArray[Any]:
        return np.ndarray(self.shape, self.dtype, self.memory.read(mappings), self.first, self.strides)


@dataclass(frozen=True)
class _Table:
    """The block's table of contents.

    Attributes:
        sources: the source lines of the pickled functions, by the file name in their code objects.
        carried: modules whose source was sent along, by name.
    """

    buffers: list[_Buffer]
    storages: list[_Storage]
    arrays: list[_Array]
    sources: dict[str, list[str]]
    carried: dict[str, carried.Source]


def _lay_out(pickler: Packer, stream: memoryview, modules: dict[str, carried.Source]) -> Pickled:
    buffers = [_area_of(Piece.of(view)) for view in pickler.buffers]
    storages = [_LaidOut.of(entry) for entry in pickler.storages.values()]
    others = [*buffers, *(storage.area for storage in storages)]
    arrays = compact(pickler.arrays, others)
    areas = [*others, *(_area_of(memory_of(array)) for array in arrays)]
    places, stream_at = lay_out(areas, ALIGN)
    place = iter(places)
    table = _Table(
        [_Buffer(next(place), area.nbytes, area.pieces[0].data.readonly) for area in buffers],
        [_Storage(next(place), storage.nbytes, storage.was_on_device) for storage in storages],
        [_Array.at(next(place), array) for array in arrays],
        sources_of(pickler.codes),
        modules,
    )
    table_at = stream_at + stream.nbytes
    encoded = pickle.dumps(table, protocol=5)
    end = table_at + len(encoded)
    header = memoryview(_HEADER.pack(stream_at, table_at, end))
    parts = [(0, header), *parts_of(areas, places), (stream_at, stream), (table_at, memoryview(encoded))]
    return Pickled(Packed(end, pickler.inherited, pickler.by_value, pickler.variables), parts)


def _area_of(piece: Piece) -> Area:
    return Area(piece.extent, [piece])


@dataclass(frozen=True)
class _LaidOut:
    """A storage in this process's memory, and the pieces of it that a tensor sees: only those are copied."""

    area: Area
    was_on_device: bool

    @property
    def nbytes(self) -> int:
        """The size of the whole storage."""
        return self.area.extent[1] - self.area.extent[0]

    @classmethod
    def of(cls, entry: PackedStorage) -> _LaidOut:
        was_on_device = entry.storage.device.type != "cpu"
        storage = entry.storage.cpu() if was_on_device else entry.storage  # type: ignore[no-untyped-call]
        whole = Piece.of(storage_bytes(storage))
        spans = [(max(start, 0), min(stop, whole.data.nbytes)) for start, stop in entry.spans]
        pieces = [Piece(whole.address + start, whole.data[start:stop]) for start, stop in spans]
        return cls(Area(whole.extent, pieces), was_on_device)
