"""Pickles a notebook's objects: small parts into a stream, arrays, storages and inherited objects beside it.

The stream calls the functions at the end when it is read; they use the current :class:`Reading`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import io
import marshal
import os
import pickle
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from nbddp.payload import classes, functions, hints, libraries
from nbddp.payload.known import Known, attributes_of_cached, is_dispatching
from nbddp.payload.refusals import NEEDS_INHERITANCE, refuse_uninherited, refuse_unshippable
from nbddp.payload.shared_tensors import SharedHere


@dataclass
class PackedStorage:
    """A torch storage to be copied into a block, with the ranges of bytes (start, stop) that a tensor sees."""

    index: int
    storage: torch.UntypedStorage
    spans: list[tuple[int, int]] = field(default_factory=list)


class _NotebookNamespace(dict):  # type: ignore[type-arg]
    """Replaces the globals of ``__main__`` while pickling; it is unpickled as the globals of the reader's ``__main__``.

    cloudpickle gives functions that share globals a common, new dict. With the reader's real ``__main__``, ``global``,
    dataclasses, type hints and pickling by reference also work there.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _main_namespace, ()


class Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with buffers and storages out of band. It must be closed, because it is a reference cycle.

    Attributes:
        by_value: functions and classes that were pickled by value, in order.
        named: those of them that are variables of the notebook under their own names.
        notes: messages for the user.
        inherited: objects that a process can get only when it starts, in order.
        buffers: contiguous memory of arrays, in the order of the stream.
        storages: torch storages, by their identity.
        arrays: arrays whose memory is not a buffer, e.g. because of gaps or steps backwards, in order.
        modules: names of modules that objects were pickled from by reference.
        codes: the code objects of the functions that were pickled by value.
        variables: the notebook's, by name, that its functions read and that were pickled with them.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        *,
        known: Known | None = None,
        sent: Known | None = None,
        inheriting: bool = True,
        back: bool = False,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._take_buffer)
        self.by_value: list[Any] = []
        self.named: dict[str, Any] = {}
        self.notes: list[str] = []
        self.inherited: list[Any] = []
        self.buffers: list[memoryview] = []
        self.storages: dict[int, PackedStorage] = {}
        self.arrays: list[npt.NDArray[Any]] = []
        self.modules: set[str] = set()
        self.codes: list[types.CodeType] = []
        self.variables: dict[str, Any] = {}
        self._known = known
        self._sent = sent
        self._cells: set[int] = set()  # ids of the cells of functions that were pickled by value
        self._inheriting = inheriting
        self._shared_here = SharedHere()
        self._back = back
        self._main = sys.modules["__main__"].__dict__
        if not back:
            # Not for results: what a rank's function reads must not overwrite the notebook's variables.
            self.globals_ref[id(self._main)] = _NotebookNamespace(__name__="__main__")

    def close(self) -> None:
        """Release what was pickled; the pickler itself is a reference cycle because of its buffer_callback."""
        self.clear_memo()
        self.buffers, self.storages, self.arrays, self.inherited = [], {}, [], []

    def reducer_override(self, obj: Any) -> Any:
        for kinds, reduce in _REDUCERS:
            if isinstance(obj, kinds):
                return reduce(self, obj)
        if obj is sys.stdout or obj is sys.stderr:
            return getattr, (sys, "stdout" if obj is sys.stdout else "stderr")
        refuse_unshippable(obj, back=self._back)
        if (reduce := libraries.reducer(type(obj))) is not None:
            return reduce(obj)
        reduce_without_state = None if self._back else libraries.reducer_into_ranks(type(obj))
        reduced = NotImplemented if reduce_without_state is None else reduce_without_state(obj)
        return self._by_cloudpickle(obj) if reduced is NotImplemented else reduced

    def _by_cloudpickle(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, types.ModuleType):
            self.modules.add(obj.__name__)
        elif reduced is NotImplemented and isinstance(obj, (type, types.FunctionType)):
            self.modules.add(str(obj.__module__))
        return classes.complete(obj, reduced) if isinstance(obj, type) else reduced

    def _reduce_code(self, obj: Any) -> Any:
        number = self._number_of(obj)
        if number is not None:
            return _take_known, (number,)
        reduced = self._by_cloudpickle_with_annotations(obj)
        if reduced is NotImplemented:
            return reduced
        self._record_by_value(obj)
        if is_dispatching(obj):
            return functions.reduce_dispatching(obj)
        if not isinstance(obj, types.FunctionType):
            return reduced
        self.codes.append(obj.__code__)
        self._cells.update(map(id, obj.__closure__ or ()))
        reduced = functions.with_its_cells(obj, reduced)
        if self._known is not None and obj.__globals__ is self._main:
            return functions.for_the_notebook(obj, reduced, self._known, self.notes)
        if self._sent is not None and obj.__globals__ is self._main:
            return functions.without_known_variables(reduced, self._sent, self.variables)
        return reduced

    def _by_cloudpickle_with_annotations(self, obj: Any) -> Any:
        try:
            return self._by_cloudpickle(obj)
        except Exception:  # whatever the evaluation of an annotation raises
            if isinstance(obj, type) or hints.can_be_read(obj):
                raise
            return self._by_cloudpickle(hints.with_texts(obj))

    def _number_of(self, obj: Any) -> int | None:
        if self._known is None:
            return None
        number = self._known.number_of(obj)
        if number is not None and isinstance(obj, type):
            self.notes += [note for note in self._known.changes_of(obj) if note not in self.notes]
        return number

    def _record_by_value(self, obj: Any) -> None:
        self.by_value.append(obj)
        name = obj.__qualname__
        if not self._back and obj.__module__ == "__main__" and self._main.get(name) is obj:
            self.named[name] = obj

    def _reduce_bytecode(self, code: types.CodeType) -> Any:
        try:
            return marshal.loads, (marshal.dumps(code),)  # cloudpickle 3.1.3 drops the name of the file
        except ValueError:  # it has constants that no compiler makes
            return self._by_cloudpickle(code)

    def _reduce_cell(self, cell: types.CellType) -> Any:
        return (types.CellType, ()) if id(cell) in self._cells else self._by_cloudpickle(cell)

    def _reduce_module(self, obj: types.ModuleType) -> Any:
        if type(obj) is types.ModuleType:
            return self._by_cloudpickle(obj)
        # E.g. torch.backends.cudnn: cloudpickle supports plain modules only.
        return importlib.import_module, (obj.__name__,)

    def _reduce_environ(self, obj: Any) -> Any:
        # By value it would be this process's whole environment, including tokens.
        return getattr, (os, "environ" if obj.encodekey is os.environ.encodekey else "environb")

    def _reduce_cached(self, obj: Any) -> Any:
        if getattr(obj, "__module__", "") != "__main__":
            return self._by_cloudpickle(obj)
        # It would pickle itself by a name that only the notebook defines.
        number = self._number_of(obj)
        if number is not None:
            return _take_known, (number,)
        self._record_by_value(obj)
        return _cached, (obj.__wrapped__, obj.cache_parameters()), attributes_of_cached(obj)

    def _reduce_ddp(self, obj: DistributedDataParallel) -> Any:
        # The wrapper's process group ends with the ranks, so only the model is sent.
        return _itself, (obj.module,)

    def _reduce_inherited(self, obj: Any) -> Any:
        if self._back:
            return self._by_cloudpickle(obj)
        refuse_unshippable(obj)
        return self._inherit(obj)

    def _inherit(self, obj: Any, dtype: torch.dtype | None = None) -> Any:
        if not self._inheriting:
            refuse_uninherited(obj)
        self.inherited.append(obj)
        return _take_inherited, (len(self.inherited) - 1, dtype)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        self._record_span(tensor)
        if tensor.dtype not in torch.storage._new_dtypes():
            return NotImplemented  # torch's own way, which calls _reduce_storage
        return _with_seen_storage(tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL))  # type: ignore[no-untyped-call]

    def _reduce_array(self, array: npt.NDArray[Any]) -> Any:
        kind = type(array)
        simple = all(getattr(kind, name) is getattr(np.ndarray, name) for name in _PICKLING_METHODS)
        # Python's buffer protocol supports neither dates nor records with dates.
        by_buffer = array.flags.forc and kind is np.ndarray and array.dtype.kind not in "mMV"
        if not simple or by_buffer or array.dtype.hasobject or not array.nbytes:
            return self._by_cloudpickle(array)  # numpy's own way: a buffer, or bytes in the stream
        self.arrays.append(array)
        return _take_array, (len(self.arrays) - 1, kind)

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            self.buffers.append(buffer.raw())
        except BufferError:  # not contiguous: stays in the stream
            return True
        return False

    def _record_span(self, tensor: torch.Tensor) -> None:
        """Remember which bytes of its storage a tensor sees: only those are copied."""
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_nested:
            return
        if is_lazy(tensor) or not tensor.numel():
            return
        try:
            entry = self._storage_of(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # a wrapper subclass without storage of its own
            return
        last = int(sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride())))
        start = int(tensor.storage_offset()) * tensor.element_size()
        entry.spans.append((start, start + (last + 1) * tensor.element_size()))

    def _storage_of(self, storage: torch.UntypedStorage) -> PackedStorage:
        # By the C++ object, because torch may create several Python objects for it.
        entry = self.storages.get(storage._cdata)
        if entry is None:
            entry = self.storages[storage._cdata] = PackedStorage(len(self.storages), storage)
        return entry

    def _reduce_storage(self, obj: Any) -> Any:
        dtype = None
        if isinstance(obj, torch.TypedStorage):
            obj, dtype = obj._untyped_storage, obj.dtype
        if obj.device.type == "meta":
            return NotImplemented
        if self._is_shared(obj):
            return self._inherit(obj, dtype)
        return self._by_index(obj, dtype, whole=dtype is None or obj._cdata not in self.storages)

    def _reduce_seen(self, seen: _SeenStorage) -> Any:
        if self._is_shared(seen.storage):
            return self._reduce_storage(seen.storage)
        return self._by_index(seen.storage, torch.uint8, whole=False)

    def _is_shared(self, storage: torch.UntypedStorage) -> bool:
        return not self._back and storage in self._shared_here

    def _by_index(self, storage: torch.UntypedStorage, dtype: torch.dtype | None, *, whole: bool) -> Any:
        entry = self._storage_of(storage)
        if whole:  # the user's own object, not a part of a tensor
            entry.spans.append((0, storage.nbytes()))
        return _take_storage, (entry.index, dtype)


@dataclass(frozen=True)
class _SeenStorage:
    """The storage of a tensor of a newer dtype (float8, uint16), of which only the bytes that tensors see are sent."""

    storage: torch.UntypedStorage


def _with_seen_storage(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the untyped storage in a reduced tensor of a newer dtype, or of a subclass, by a ``_SeenStorage``."""
    function, args, *rest = reduced
    if function is torch._utils._rebuild_tensor_v3 and isinstance(args[0], torch.UntypedStorage):
        return _rebuild_tensor, (_SeenStorage(args[0]), *args[1:]), *rest
    if function is torch._tensor._rebuild_from_type_v2:
        inner, kind, inner_args, *state = args
        inner, inner_args = _with_seen_storage((inner, inner_args))
        return function, (inner, kind, inner_args, *state), *rest
    return reduced


_PICKLING_METHODS = ("__reduce__", "__reduce_ex__", "__setstate__")  # a subclass that overrides one pickles its own way

_REDUCERS: tuple[tuple[Any, Callable[[Packer, Any], Any]], ...] = (
    ((type, types.FunctionType), Packer._reduce_code),
    (types.CodeType, Packer._reduce_bytecode),
    (types.CellType, Packer._reduce_cell),
    (torch.Tensor, Packer._reduce_tensor),
    (np.ndarray, Packer._reduce_array),
    ((torch.UntypedStorage, torch.TypedStorage), Packer._reduce_storage),
    (_SeenStorage, Packer._reduce_seen),
    (types.ModuleType, Packer._reduce_module),
    (type(os.environ), Packer._reduce_environ),
    (functools._lru_cache_wrapper, Packer._reduce_cached),
    (typing.ForwardRef, lambda _, ref: hints.reduce_forward_ref(ref)),
    (hints.ALIASES, lambda _, alias: hints.reduce_alias(alias)),
    (DistributedDataParallel, Packer._reduce_ddp),
    (NEEDS_INHERITANCE, Packer._reduce_inherited),
)


# ---------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Reading:
    """The objects that a stream refers to while it is read.

    Attributes:
        storage: returns the storage with an index.
        array: returns the array with a number.
        inherited, known: objects by number.
    """

    storage: Callable[[int], torch.UntypedStorage]
    array: Callable[[int], npt.NDArray[Any]]
    inherited: Sequence[Any]
    known: Sequence[Any]


_reading: contextvars.ContextVar[Reading] = contextvars.ContextVar("nbddp_reading")


@contextlib.contextmanager
def reading_now(reading: Reading) -> Iterator[None]:
    """Resolve the references of streams with ``reading``."""
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


def _take_array(number: int, kind: type[Any]) -> Any:
    return _reading.get().array(number).view(kind)


def _take_storage(index: int, dtype: torch.dtype | None) -> Any:
    storage = _reading.get().storage(index)
    return storage if dtype is None else _typed(storage, dtype)


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, *rest: Any) -> Any:
    # torch's own function for the newer dtypes needs the typed wrapper of torch.load, and fails for requires_grad.
    typed = storage if isinstance(storage, torch.TypedStorage) else _typed(storage, torch.uint8)
    tensor = torch._utils._rebuild_tensor_v3(typed, offset, size, stride, False, *rest)  # type: ignore[no-untyped-call]
    return tensor.requires_grad_(requires_grad)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
