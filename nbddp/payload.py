"""Both sides. Objects to and from one block of memory that both sides map.

A block is one file in memory (``memfd``: not bound by a container's 64 MB /dev/shm). cloudpickle
(protocol 5) writes the small parts as a stream; numpy arrays and torch storages stay out of that
stream and are copied into the block once, at memory speed. Every reader maps the block copy-on-write,
so four ranks share one copy and none can change the notebook's::

    [header][array or storage][array or storage] ... [pickle stream][table]

Memory that overlapped in the sender overlaps in the block: views that shared storage still share it,
numpy with torch as well.
"""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import functools
import importlib
import io
import linecache
import multiprocessing.connection
import multiprocessing.managers
import multiprocessing.queues
import multiprocessing.synchronize
import os
import pickle
import struct
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

_HEADER = struct.Struct("<QQQ")  # where the pickle stream starts, where the table starts, end
_ALIGN = 64
_MAP_FROM_NBYTES = 1 << 20  # below this a copy is cheaper than a mapping, and pins nothing
_WRITE_CHUNK = 64 << 20


def open_block(name: str) -> int:
    """A new, empty block. Returns its fd; nothing of it has a name in any file system."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"nbddp-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass
class Packed:
    """What :func:`pack` wrote, and what must go along with it.

    Attributes:
        nbytes: size of the block.
        inherited: objects that only a starting process can be given (queues, locks, pipes, shared
            tensors), by the number that the stream calls them by.
        by_value: functions and classes that travelled by value, by the same kind of number.
    """

    nbytes: int
    inherited: list[Any]
    by_value: list[Any]


@dataclass
class Unpacked:
    """The object out of a block, with the functions and classes that came by value."""

    value: Any
    by_value: list[Any]


def pack(obj: object, fd: int, *, known: Sequence[Any] = (), inheriting: bool = True) -> Packed:
    """Write ``obj`` into the block ``fd``.

    Args:
        known: functions and classes that the reader has already, in the order of its own list; they
            travel as their number, so that an instance comes back as an instance of the very class.
        inheriting: is the reader about to be started by us? Then queues and locks may go along.

    Raises:
        Whatever pickling raises; ``culprit.explain`` turns that into the name of the variable.
    """
    stream = io.BytesIO()
    with contextlib.closing(_Packer(stream, known=known, inheriting=inheriting)) as pickler:
        # The list fills while obj is pickled, and comes after it: all its members are memo references.
        pickler.dump((obj, pickler.by_value))
        return pickler.write_block(fd, stream.getbuffer())


def probe(obj: object) -> None:
    """Pickle ``obj`` and forget the result: raises what :func:`pack` would, copies no array."""
    with contextlib.closing(_Packer(io.BytesIO(), known=(), inheriting=True)) as pickler:
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
    memory = _map(fd, nbytes)
    stream_at, table_at, end = _HEADER.unpack_from(memory, 0)
    table: _Table = pickle.loads(memory[table_at:end])
    for filename, lines in table.sources.items():
        # mtime None: linecache.checkcache leaves such an entry alone.
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    reading = _Reading(memory, table, inherited, known, device)
    with _reading_now(reading):
        value, by_value = pickle.loads(memory[stream_at:table_at], buffers=reading.buffers())
    return Unpacked(value, by_value)


# ---------------------------------------------------------------------------- writing


@dataclass
class _Table:
    """The block's contents list: where each buffer and storage lies."""

    buffers: list[tuple[int, int, bool]]  # offset, nbytes, readonly
    storages: list[tuple[int, int, bool]]  # offset, nbytes, was on an accelerator
    sources: dict[str, list[str]]  # lines of the notebook's cells, by the file name in their code objects


@dataclass
class _Storage:
    """A torch storage on its way into a block, with the parts of it that some tensor can see."""

    index: int
    storage: torch.UntypedStorage
    spans: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Piece:
    """Bytes of the sender's memory: where they lie, and the object to read them from."""

    address: int
    data: memoryview


class _NotebookNamespace(dict):  # type: ignore[type-arg]
    """Stands for the globals of ``__main__`` while pickling; arrives as the reader's own.

    cloudpickle gives functions that share globals a common, new dict. Ours is the reader's real
    ``__main__``, so that ``global``, dataclasses, type hints and pickling by reference work there too.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _main_namespace, ()


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO, *, known: Sequence[Any], inheriting: bool) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._take_buffer)
        self.by_value: list[Any] = []
        self._known = {id(obj): i for i, obj in enumerate(known)}
        self._inheriting = inheriting
        self._inherited: list[Any] = []
        self._buffers: list[memoryview] = []
        self._storages: dict[int, _Storage] = {}
        self._filenames: set[str] = set()
        if inheriting:
            # On the way in only: what a rank's function reads must not overwrite the notebook's variables.
            main = sys.modules["__main__"].__dict__
            self.globals_ref[id(main)] = _NotebookNamespace(__name__="__main__")

    def close(self) -> None:
        """Let go of what was pickled: the pickler itself is a reference cycle, by its buffer_callback."""
        self.clear_memo()
        self._buffers, self._storages, self._inherited = [], {}, []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            return self._reduce_code(obj)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # torch.backends.cudnn and the like: cloudpickle knows plain modules only.
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, functools._lru_cache_wrapper) and getattr(obj, "__module__", "") == "__main__":
            # It pickles by name, and the name is the notebook's.
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, torch.Tensor):
            self._note_span(obj)
            return NotImplemented
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
            return self._reduce_storage(obj)
        if isinstance(obj, _NEEDS_INHERITANCE) and self._inheriting:
            self._inherited.append(obj)
            return _take_inherited, (len(self._inherited) - 1,)
        if isinstance(obj, DistributedDataParallel):
            # Its process group ends with the ranks; what is wanted is the model.
            return _itself, (obj.module,)
        if obj is sys.stdout or obj is sys.stderr:
            return getattr, (sys, "stdout" if obj is sys.stdout else "stderr")
        if id(type(obj)) in self._known and "__slots__" in vars(type(obj)) and hasattr(obj, "__dict__"):
            # cloudpickle's copy of a class has no slots; the notebook's own has, and no __dict__ for a state.
            return copyreg.__newobj__, (type(obj),), (None, vars(obj))  # type: ignore[attr-defined]
        refuse_unshippable(obj)
        return super().reducer_override(obj)

    def _reduce_code(self, obj: Any) -> Any:
        number = self._known.get(id(obj))
        if number is not None:
            return _take_known, (number,)
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented:
            self.by_value.append(obj)
            if isinstance(obj, types.FunctionType):
                self._filenames.add(obj.__code__.co_filename)
        return reduced

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            self._buffers.append(buffer.raw())
        except BufferError:  # not contiguous: stays in the stream
            return True
        return False

    def _note_span(self, tensor: torch.Tensor) -> None:
        """Remember which bytes of its storage a tensor can see: only those are copied."""
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
            return
        try:
            entry = self._storage_of(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # a wrapper subclass without storage of its own
            return
        last = int(sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride())))
        start = int(tensor.storage_offset()) * tensor.element_size()
        entry.spans.append((start, start + (last + 1) * tensor.element_size()))

    def _storage_of(self, storage: torch.UntypedStorage) -> _Storage:
        # Wrappers come and go, the C++ object behind them is the identity.
        entry = self._storages.get(storage._cdata)
        if entry is None:
            entry = self._storages[storage._cdata] = _Storage(len(self._storages), storage)
        return entry

    def _reduce_storage(self, obj: Any) -> Any:
        dtype = None
        if isinstance(obj, torch.TypedStorage):
            obj, dtype = obj._untyped_storage, obj.dtype
        if obj.device.type == "meta":
            return NotImplemented
        if self._inheriting and obj.device.type == "cpu" and obj.is_shared():
            # share_memory_() is the user's word that ranks write to one tensor.
            self._inherited.append(obj)
            return _take_inherited, (len(self._inherited) - 1, dtype)
        seen_by_tensors = obj._cdata in self._storages
        entry = self._storage_of(obj)
        if not seen_by_tensors:
            entry.spans.append((0, obj.nbytes()))
        elif dtype is None:
            # Tensors of the newer dtypes (float8, uint16) pickle their untyped storage and unpickle
            # by torch._utils._rebuild_tensor_v3, which wants the typed wrapper of torch.load.
            dtype = torch.uint8
        return _take_storage, (entry.index, dtype)

    def write_block(self, fd: int, stream: memoryview) -> Packed:
        pieces = [_Piece(_address(view), view) for view in self._buffers]
        storage_pieces = [_storage_pieces(entry) for entry in self._storages.values()]
        layout = _Layout()
        for piece in pieces:
            layout.add(piece.address, piece.address + piece.data.nbytes)
        for base, nbytes, _ in storage_pieces:
            layout.add(base, base + nbytes)
        stream_at = layout.place(_ALIGN)
        table = _Table(
            [(layout.offset(p.address), p.data.nbytes, p.data.readonly) for p in pieces],
            [
                (layout.offset(base), nbytes, entry.storage.device.type != "cpu")
                for (base, nbytes, _), entry in zip(storage_pieces, self._storages.values())
            ],
            {name: lines for name in sorted(self._filenames) if (lines := linecache.getlines(name))},
        )
        encoded = pickle.dumps(table, protocol=5)
        end = stream_at + stream.nbytes + len(encoded)
        os.ftruncate(fd, end)
        for _, _, more in storage_pieces:
            pieces += more
        layout.write(fd, pieces)
        _pwrite(fd, _HEADER.pack(stream_at, stream_at + stream.nbytes, end), 0)
        _pwrite(fd, stream, stream_at)
        _pwrite(fd, encoded, stream_at + stream.nbytes)
        return Packed(end, self._inherited, self.by_value)


class _Layout:
    """Which interval of the sender's memory goes where in the block; overlapping ones stay so."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []
        self._regions: list[tuple[int, int, int]] = []  # start, stop, offset

    def add(self, start: int, stop: int) -> None:
        if stop > start:
            self._intervals.append((start, stop))

    def place(self, first_offset: int) -> int:
        """Give every region its offset. Returns the first free offset after them."""
        offset = first_offset
        merged: list[list[int]] = []
        for start, stop in sorted(self._intervals):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([start, stop])
        for start, stop in merged:
            shift = start % _ALIGN  # an address keeps its alignment, whatever that was
            self._regions.append((start, stop, offset + shift))
            offset = _aligned(offset + shift + stop - start)
        return offset

    def offset(self, address: int) -> int:
        index = _last_at_or_before(self._regions, address)
        if index < 0:
            return 0  # an empty array: its address means nothing
        start, stop, offset = self._regions[index]
        return offset + address - start if address < stop else 0

    def write(self, fd: int, pieces: list[_Piece]) -> None:
        """Copy every byte of the pieces once, however often they overlap."""
        written = 0
        for piece in sorted(pieces, key=lambda p: (p.address, -p.data.nbytes)):
            stop = piece.address + piece.data.nbytes
            start = max(piece.address, written)
            if start < stop:
                _pwrite(fd, piece.data[start - piece.address :], self.offset(start))
                written = stop


def _storage_pieces(entry: _Storage) -> tuple[int, int, list[_Piece]]:
    """A storage's address, its size, and the bytes of it that some tensor sees."""
    storage = entry.storage if entry.storage.device.type == "cpu" else entry.storage.cpu()  # type: ignore[no-untyped-call]
    nbytes = storage.nbytes()
    if nbytes == 0:
        return 0, 0, []
    whole = _bytes_of(storage)
    base = _address(whole)
    spans = [(max(start, 0), min(stop, nbytes)) for start, stop in entry.spans]
    return base, nbytes, [_Piece(base + start, whole[start:stop]) for start, stop in spans]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if view.nbytes else 0


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _last_at_or_before(regions: list[tuple[int, int, int]], address: int) -> int:
    low, high = 0, len(regions)
    while low < high:
        middle = (low + high) // 2
        if regions[middle][0] <= address:
            low = middle + 1
        else:
            high = middle
    return low - 1


def _pwrite(fd: int, data: memoryview | bytes, offset: int) -> None:
    view = memoryview(data).cast("B") if not isinstance(data, memoryview) or data.format != "B" else data
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done : done + _WRITE_CHUNK], offset + done)


# What multiprocessing hands over only to a process that it is starting.
_NEEDS_INHERITANCE: tuple[type, ...] = (
    multiprocessing.connection.Connection,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
    multiprocessing.synchronize.SemLock,
    multiprocessing.synchronize.Condition,
    multiprocessing.synchronize.Event,
    multiprocessing.managers.BaseProxy,
)


def refuse_unshippable(obj: object) -> None:
    """Raise ``TypeError`` for what would pickle, and arrive as something that cannot work."""
    if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
        name = getattr(obj, "name", "")
        raise TypeError(f"an open file ({name!r}) stays where it was opened; open it inside the function")
    for module, names, advice in _STAYS_IN_NOTEBOOK:
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(obj, tuple(getattr(loaded, n) for n in names if hasattr(loaded, n))):
            raise TypeError(f"a {type(obj).__name__} {advice}")


_STAYS_IN_NOTEBOOK = (
    ("ipywidgets", ("Widget",), "lives in the notebook's front end; log() values and update it outside"),
    ("IPython.core.interactiveshell", ("InteractiveShell",), "is the notebook itself; ranks have none"),
    ("torch", ("Stream", "Event"), "belongs to one device of this process; make it inside the function"),
    ("torch.cuda", ("Stream", "Event"), "belongs to one device of this process; make it inside the function"),
)


# ---------------------------------------------------------------------------- reading


@dataclass
class _Reading:
    """One :func:`unpack` under way: what the stream's references stand for."""

    memory: memoryview
    table: _Table
    inherited: Sequence[Any]
    known: Sequence[Any]
    device: torch.device | None
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def buffers(self) -> Iterator[memoryview]:
        for offset, nbytes, readonly in self.table.buffers:
            view = self.memory[offset : offset + nbytes]
            yield view.toreadonly() if readonly else view

    def storage(self, index: int) -> torch.UntypedStorage:
        if index not in self._storages:
            offset, nbytes, was_on_device = self.table.storages[index]
            storage = _storage_over(self.memory[offset : offset + nbytes])
            if was_on_device and self.device is not None and self.device.type != "cpu":
                storage = _as_bytes(storage).to(self.device).untyped_storage()
            self._storages[index] = storage
        return self._storages[index]


_reading: contextvars.ContextVar[_Reading] = contextvars.ContextVar("nbddp_reading")


@contextlib.contextmanager
def _reading_now(reading: _Reading) -> Iterator[None]:
    token = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(token)


def _itself(obj: Any) -> Any:
    return obj


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _main_namespace() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def _take_known(number: int) -> Any:
    return _reading.get().known[number]


def _take_inherited(number: int, dtype: torch.dtype | None = None) -> Any:
    obj = _reading.get().inherited[number]
    return obj if dtype is None else _typed(obj, dtype)


def _take_storage(index: int, dtype: torch.dtype | None) -> Any:
    storage = _reading.get().storage(index)
    return storage if dtype is None else _typed(storage, dtype)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _as_bytes(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _bytes_of(storage: Any) -> memoryview:
    return memoryview(_as_bytes(storage).numpy())  # type: ignore[arg-type]


def _storage_over(view: memoryview) -> torch.UntypedStorage:
    if not view.nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _map(fd: int, nbytes: int) -> memoryview:
    """The block's bytes, private and writable, kept alive by whoever holds a part of them."""
    if nbytes < _MAP_FROM_NBYTES or not os.path.exists("/proc/self/fd"):
        copy = bytearray(nbytes)
        read = 0
        while read < nbytes:
            read += os.preadv(fd, [memoryview(copy)[read:]], read)
        return memoryview(copy)
    # Not mmap.mmap: it keeps a duplicate of the fd open for as long as the mapping lives.
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", shared=False, nbytes=nbytes)
    return _bytes_of(storage)
