"""Both sides. How the objects of a notebook pickle: what goes into the stream, what goes beside it, what is refused.

The functions at the end are what the stream calls when it is read; they ask the :class:`Reading` under way.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import io
import multiprocessing.connection
import multiprocessing.managers
import multiprocessing.queues
import multiprocessing.synchronize
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from nbddp import classes, functions
from nbddp.known import Known, attributes_of_cached, is_dispatching
from nbddp.sharing import SharedHere


@dataclass
class PackedStorage:
    """A torch storage on its way into a block, with the parts of it (start, stop) that some tensor can see."""

    index: int
    storage: torch.UntypedStorage
    spans: list[tuple[int, int]] = field(default_factory=list)


class _NotebookNamespace(dict):  # type: ignore[type-arg]
    """Stands for the globals of ``__main__`` while pickling; arrives as the reader's own.

    cloudpickle gives functions that share globals a common, new dict. Ours is the reader's real
    ``__main__``, so that ``global``, dataclasses, type hints and pickling by reference work there too.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _main_namespace, ()


class Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with buffers and storages out of band. Close it: it is a reference cycle.

    Attributes:
        by_value: functions and classes that travelled by value, in order.
        named: those of them that the notebook has under their own names now.
        notes: what the user should hear of, in words.
        inherited: what only a starting process can be given, in order.
        buffers: contiguous memory of arrays, in the order of the stream.
        storages: torch storages, by their identity.
        arrays: whose memory is no buffer, for gaps or steps backwards, say; in the order of their numbers.
        codes: of the functions that travelled by value.
    """

    def __init__(
        self, stream: io.BytesIO, *, known: Known | None = None, inheriting: bool = True, back: bool = False
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._take_buffer)
        self.by_value: list[Any] = []
        self.named: dict[str, Any] = {}
        self.notes: list[str] = []
        self.inherited: list[Any] = []
        self.buffers: list[memoryview] = []
        self.storages: dict[int, PackedStorage] = {}
        self.arrays: list[npt.NDArray[Any]] = []
        self.codes: list[types.CodeType] = []
        self._known = known
        self._cells: set[int] = set()  # of functions that travel
        self._inheriting = inheriting
        self._shared_here = SharedHere()
        self._back = back
        self._main = sys.modules["__main__"].__dict__
        if not back:
            # On the way in only: what a rank's function reads must not overwrite the notebook's variables.
            self.globals_ref[id(self._main)] = _NotebookNamespace(__name__="__main__")

    def close(self) -> None:
        """Let go of what was pickled: the pickler itself is a reference cycle, by its buffer_callback."""
        self.clear_memo()
        self.buffers, self.storages, self.arrays, self.inherited = [], {}, [], []

    def reducer_override(self, obj: Any) -> Any:
        for kinds, reduce in _SPECIAL:
            if isinstance(obj, kinds):
                return reduce(self, obj)
        if obj is sys.stdout or obj is sys.stderr:
            return getattr, (sys, "stdout" if obj is sys.stdout else "stderr")
        refuse_unshippable(obj, back=self._back)
        if (reduce := _reducer_both_ways(type(obj))) is not None:
            return reduce(obj)
        reduce_without = None if self._back else _reducer_of(type(obj))
        reduced = NotImplemented if reduce_without is None else reduce_without(obj)
        return self._by_cloudpickle(obj) if reduced is NotImplemented else reduced

    def _by_cloudpickle(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        return classes.complete(obj, reduced) if isinstance(obj, type) else reduced

    def _reduce_code(self, obj: Any) -> Any:
        number = self._number_of(obj)
        if number is not None:
            return _take_known, (number,)
        reduced = self._by_cloudpickle(obj)
        if reduced is not NotImplemented:
            self._note_travelled(obj)
            if is_dispatching(obj):
                return functions.reduce_dispatching(obj)
            if isinstance(obj, types.FunctionType):
                self.codes.append(obj.__code__)
                return self._with_surroundings(obj, reduced)
        return reduced

    def _number_of(self, obj: Any) -> int | None:
        if self._known is None:
            return None
        number = self._known.number_of(obj)
        if number is not None and isinstance(obj, type):
            self.notes += [note for note in self._known.changes_of(obj) if note not in self.notes]
        return number

    def _note_travelled(self, obj: Any) -> None:
        self.by_value.append(obj)
        name = obj.__qualname__
        if not self._back and obj.__module__ == "__main__" and self._main.get(name) is obj:
            self.named[name] = obj

    def _with_surroundings(self, function: types.FunctionType, reduced: Any) -> Any:
        self._cells.update(map(id, function.__closure__ or ()))
        reduced = functions.with_its_cells(function, reduced)
        if self._known is not None and function.__globals__ is self._main:
            return functions.for_the_notebook(function, reduced, self._known, self.notes)
        return reduced

    def _reduce_cell(self, cell: types.CellType) -> Any:
        return (types.CellType, ()) if id(cell) in self._cells else self._by_cloudpickle(cell)

    def _reduce_module(self, obj: types.ModuleType) -> Any:
        if type(obj) is types.ModuleType:
            return self._by_cloudpickle(obj)
        # torch.backends.cudnn and the like: cloudpickle knows plain modules only.
        return importlib.import_module, (obj.__name__,)

    def _reduce_environ(self, obj: Any) -> Any:
        # By value it would be this process's whole environment, tokens included.
        return getattr, (os, "environ" if obj.encodekey is os.environ.encodekey else "environb")

    def _reduce_cached(self, obj: Any) -> Any:
        if getattr(obj, "__module__", "") != "__main__":
            return self._by_cloudpickle(obj)
        # It pickles by name, and the name is the notebook's.
        number = self._number_of(obj)
        if number is not None:
            return _take_known, (number,)
        self._note_travelled(obj)
        return _cached, (obj.__wrapped__, obj.cache_parameters()), attributes_of_cached(obj)

    def _reduce_ddp(self, obj: DistributedDataParallel) -> Any:
        # Its process group ends with the ranks; what is wanted is the model.
        return _itself, (obj.module,)

    def _reduce_inherited(self, obj: Any) -> Any:
        if self._back:
            return self._by_cloudpickle(obj)
        refuse_unshippable(obj)
        self._check_that_it_is_inherited(obj)
        self.inherited.append(obj)
        return _take_inherited, (len(self.inherited) - 1,)

    def _check_that_it_is_inherited(self, obj: Any) -> None:
        if not self._inheriting:
            refuse_uninherited(obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        self._note_span(tensor)
        if tensor.dtype not in torch.storage._new_dtypes():
            return NotImplemented  # torch's own way, whose storages come by here
        return _with_seen_storage(tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL))  # type: ignore[no-untyped-call]

    def _reduce_array(self, array: npt.NDArray[Any]) -> Any:
        kind = type(array)
        simple = all(getattr(kind, name) is getattr(np.ndarray, name) for name in _PICKLES)
        # Dates are no buffers for Python's protocol, nor are records with dates in them.
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

    def _note_span(self, tensor: torch.Tensor) -> None:
        """Remember which bytes of its storage a tensor can see: only those are copied."""
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
        # Wrappers come and go, the C++ object behind them is the identity.
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
            self._check_that_it_is_inherited(obj)
            # share_memory_() is the user's word that ranks write to one tensor.
            self.inherited.append(obj)
            return _take_inherited, (len(self.inherited) - 1, dtype)
        return self._by_index(obj, dtype, whole=dtype is None or obj._cdata not in self.storages)

    def _reduce_seen(self, seen: _Seen) -> Any:
        if self._is_shared(seen.storage):
            return self._reduce_storage(seen.storage)
        return self._by_index(seen.storage, torch.uint8, whole=False)

    def _is_shared(self, storage: torch.UntypedStorage) -> bool:
        return not self._back and storage in self._shared_here

    def _by_index(self, storage: torch.UntypedStorage, dtype: torch.dtype | None, *, whole: bool) -> Any:
        entry = self._storage_of(storage)
        if whole:  # not a tensor's part, but the user's own
            entry.spans.append((0, storage.nbytes()))
        return _take_storage, (entry.index, dtype)


@dataclass(frozen=True)
class _Seen:
    """The storage of a tensor of a newer dtype (float8, uint16): sent as far as tensors see it."""

    storage: torch.UntypedStorage


def _with_seen_storage(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """How a tensor of a newer dtype reduces, or a subclass of tensors, with its untyped storage marked."""
    function, args, *rest = reduced
    if function is torch._utils._rebuild_tensor_v3 and isinstance(args[0], torch.UntypedStorage):
        return _rebuild_tensor, (_Seen(args[0]), *args[1:]), *rest
    if function is torch._tensor._rebuild_from_type_v2:
        inner, kind, inner_args, *state = args
        inner, inner_args = _with_seen_storage((inner, inner_args))
        return function, (inner, kind, inner_args, *state), *rest
    return reduced


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


def refuse_unshippable(obj: object, *, back: bool = False) -> None:
    """Raise ``TypeError`` for what would pickle, and arrive as something that cannot work.

    Args:
        back: is it on its way to a notebook? What a rank made there for itself may come.
    """
    if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
        name = getattr(obj, "name", "")
        raise TypeError(f"an open file ({name!r}) stays where it was opened; open it inside the function")
    if isinstance(obj, _NEEDS_INHERITANCE) and _of_fork_context(obj):
        kind = type(obj).__name__
        raise TypeError(
            f"a {kind} of multiprocessing's fork context works in forks of this process alone; "
            f'make it with multiprocessing.get_context("spawn").{kind}()'
        )
    if (refusal := _refusal_of(type(obj))) is not None and not (back and refusal.of_one_process):
        raise TypeError(refusal.text(type(obj).__name__))
    if isinstance(obj, torch.nn.Module) and classes.is_parametrized(type(obj)):
        classes.refuse_parametrized(obj)


def refuse_uninherited(obj: object) -> None:
    """Raise ``TypeError`` for what reaches a process only while this one starts it."""
    if isinstance(obj, _NEEDS_INHERITANCE):
        kind = type(obj).__name__
        raise TypeError(f"a {kind} reaches only processes that the notebook itself starts; make it inside the function")
    if isinstance(obj, (torch.Tensor, torch.UntypedStorage)) and _lies_in_shared_memory(obj):
        raise TypeError(
            "a tensor in shared memory (share_memory_()) reaches only processes that the notebook itself starts; "
            "pass its .clone()"
        )


def _lies_in_shared_memory(obj: Any) -> bool:
    if obj.device.type != "cpu" or (isinstance(obj, torch.Tensor) and obj.layout is not torch.strided):
        return False
    try:
        return (obj.untyped_storage() if isinstance(obj, torch.Tensor) else obj) in SharedHere()
    except (RuntimeError, NotImplementedError, ValueError):  # lazy, or a wrapper subclass without storage of its own
        return False


def _of_fork_context(obj: Any) -> bool:
    """SemLocks remember it, in themselves or as a part of a queue or event (multiprocessing since 2023)."""
    parts = (obj, *getattr(obj, "__dict__", {}).values())
    return any(getattr(part, "_is_fork_ctx", False) for part in parts)


# ---------------------------------------------------------------------------- of other libraries


@dataclass(frozen=True)
class _Refusal:
    """Of a library's classes and their subclasses.

    Attributes:
        module: where they are defined; it is never imported for this.
        advice: what follows on "a Widget".
        of_one_process: do they work in the process that made them, a rank or the notebook, as if there were no other?
    """

    module: str
    names: tuple[str, ...]
    advice: str
    of_one_process: bool = False

    def text(self, kind: str) -> str:
        return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind} {self.advice}"


_ONE_PROCESS = "in the notebook, which knows one process; pass what was given to {}(), and call it inside the function"
_MADE = "made in the notebook knows one process; make it inside the function"
_PREPARED = f"comes from accelerator.prepare() {_ONE_PROCESS.format('prepare')}"
_SET_UP = f"comes from fabric.setup() {_ONE_PROCESS.format('setup')}"
_FABRICS = ("_FabricModule", "_FabricOptimizer", "_FabricDataLoader")
_STATES = ("PartialState", "AcceleratorState", "GradientState")
_COMPILED = "is compiled code, which does not pickle: pass the plain"
_SCRIPT_IT = "and script or trace it inside the function"

_REFUSED = (
    _Refusal("ipywidgets", ("Widget",), "lives in the notebook's front end; log() values and update it outside"),
    _Refusal("IPython.core.interactiveshell", ("InteractiveShell",), "is the notebook itself; ranks have none"),
    _Refusal("torch", ("Stream", "Event"), "belongs to one device of this process; make it inside the function"),
    _Refusal("torch.jit", ("ScriptFunction",), f"{_COMPILED} function {_SCRIPT_IT}"),
    _Refusal("torch.jit", ("ScriptModule",), f"{_COMPILED} module {_SCRIPT_IT}, or pass its state_dict()"),
    _Refusal("torch.cuda", ("Stream", "Event"), "belongs to one device of this process; make it inside the function"),
    _Refusal("accelerate.accelerator", ("Accelerator",), f"{_MADE}: accelerator = Accelerator()", True),
    _Refusal("accelerate.state", _STATES, _MADE, True),
    _Refusal("accelerate.optimizer", ("AcceleratedOptimizer",), _PREPARED, True),
    _Refusal("accelerate.scheduler", ("AcceleratedScheduler",), _PREPARED, True),
    _Refusal("accelerate.data_loader", ("DataLoaderShard", "DataLoaderDispatcher"), _PREPARED, True),
    _Refusal("lightning_fabric.fabric", ("Fabric",), f"{_MADE}: fabric = Fabric()", True),
    _Refusal("lightning_fabric.wrappers", _FABRICS, _SET_UP, True),
    _Refusal("lightning.fabric.fabric", ("Fabric",), f"{_MADE}: fabric = Fabric()", True),
    _Refusal("lightning.fabric.wrappers", _FABRICS, _SET_UP, True),
    _Refusal("pytorch_lightning.trainer.trainer", ("Trainer",), f"{_MADE}: trainer = Trainer(...)", True),
    _Refusal("lightning.pytorch.trainer.trainer", ("Trainer",), f"{_MADE}: trainer = Trainer(...)", True),
    _Refusal("transformers.trainer", ("Trainer",), f"{_MADE}: trainer = Trainer(...)", True),
)


def _by_type(look: Callable[[type], Any]) -> Callable[[type], Any]:
    """Looked up once per type: what a class inherits does not change, and whose class it inherits is imported."""
    found: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()

    def of(kind: type) -> Any:
        try:
            return found[kind]
        except KeyError:
            return found.setdefault(kind, look(kind))

    return of


@_by_type
def _refusal_of(kind: type) -> _Refusal | None:
    return next((refusal for refusal in _REFUSED if _is_one_of(kind, refusal.module, refusal.names)), None)


@_by_type
def _reducer_of(kind: type) -> Callable[[Any], Any] | None:
    return next((reduce for module, name, reduce in _WITHOUT_STATE if _is_one_of(kind, module, (name,))), None)


@_by_type
def _reducer_both_ways(kind: type) -> Callable[[Any], Any] | None:
    if issubclass(kind, functools.cached_property):
        return classes.reduce_cached_property
    if classes.is_parametrized(kind):
        return classes.reduce_parametrized
    return _reducer_of_values(kind)


def _reducer_of_values(kind: type) -> Callable[[Any], Any] | None:
    """Of what holds the values of pandas' frames and series. Private; of pandas 2.2 to 3.1."""
    if _is_one_of(kind, "pandas._libs.internals", ("Block",)):
        return _with_values_of_its_own
    if _is_one_of(kind, "pandas.core.internals.managers", ("SingleBlockManager",)):
        return lambda manager: (kind, (manager.blocks[0], manager.axes[0]))  # its own way passes the block by
    return None


def _with_values_of_its_own(block: Any) -> Any:
    """How a block reduces, had it an array that nobody else holds.

    Frames that pandas keeps apart by copy-on-write may hold one array. pandas' note of that does not travel: after
    pickle they share it unprotected. A slice of dates, categories or strings is another object over the same array.
    """
    function, (values, *rest) = block.__reduce__()
    values = values[:]
    if hasattr(values, "_from_backing_data"):
        values = values._from_backing_data(values._ndarray[:])
    return function, (values, *rest)


def _is_one_of(kind: type, module: str, names: Sequence[str]) -> bool:
    known = vars(sys.modules[module]) if module in sys.modules else {}
    return any(name in known and issubclass(kind, known[name]) for name in names)


def _reduce_training_arguments(args: Any) -> Any:
    """Their device, rank and world size are those of the process that made them; a rank finds out its own."""
    function, new, state, *rest = _with_state(args, lambda state: _without(state, *_FOUND_OUT))
    return function, new, state, *(rest or (None, None)), _arrive


# distributed_state is accelerate's; transformers 4 kept the device under the longer name.
_FOUND_OUT = ("distributed_state", "_setup_devices", "__cached__setup_devices", "_n_gpu")


def _reduce_data_module(module: Any) -> Any:
    """The trainer that used it last is one process's; fit() gives it another."""
    return _with_state(module, lambda state: {**state, "trainer": None})


def _reduce_model(module: Any) -> Any:
    """accelerate would take it for one that is in DDP already."""
    if _PREPARED_MARK not in vars(module):
        return NotImplemented
    return _with_state(module, lambda state: _without(state, _PREPARED_MARK))


_PREPARED_MARK = "_is_accelerate_prepared"


def _with_state(obj: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """As ``obj`` pickles by itself, but for its state."""
    function, args, state, *rest = obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return function, args, change(state), *rest


def _without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


_WITHOUT_STATE: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("transformers.training_args", "TrainingArguments", _reduce_training_arguments),
    ("pytorch_lightning.core.datamodule", "LightningDataModule", _reduce_data_module),
    ("lightning.pytorch.core.datamodule", "LightningDataModule", _reduce_data_module),
    ("torch.nn.modules.module", "Module", _reduce_model),
)

_PICKLES = ("__reduce__", "__reduce_ex__", "__setstate__")  # who replaces one of these pickles in a way of its own

_SPECIAL: tuple[tuple[Any, Callable[[Packer, Any], Any]], ...] = (
    ((type, types.FunctionType), Packer._reduce_code),
    (types.CellType, Packer._reduce_cell),
    (torch.Tensor, Packer._reduce_tensor),
    (np.ndarray, Packer._reduce_array),
    ((torch.UntypedStorage, torch.TypedStorage), Packer._reduce_storage),
    (_Seen, Packer._reduce_seen),
    (types.ModuleType, Packer._reduce_module),
    (type(os.environ), Packer._reduce_environ),
    (functools._lru_cache_wrapper, Packer._reduce_cached),
    (DistributedDataParallel, Packer._reduce_ddp),
    (_NEEDS_INHERITANCE, Packer._reduce_inherited),
)


# ---------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Reading:
    """One stream being read: what its references stand for.

    Attributes:
        storage: the storage of that index.
        array: the array of that number.
        inherited, known: by number.
    """

    storage: Callable[[int], torch.UntypedStorage]
    array: Callable[[int], npt.NDArray[Any]]
    inherited: Sequence[Any]
    known: Sequence[Any]


_reading: contextvars.ContextVar[Reading] = contextvars.ContextVar("nbddp_reading")


@contextlib.contextmanager
def reading_now(reading: Reading) -> Iterator[None]:
    """Answer the stream's references from ``reading``."""
    token = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(token)


def _itself(obj: Any) -> Any:
    return obj


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _arrive(args: Any, state: dict[str, Any]) -> None:
    """Be what they would be if they had been made here: that may make a group, as it does under torchrun."""
    vars(args).update(state)
    _ = args._setup_devices  # transformers 4 and 5


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
    # torch's own way for the newer dtypes wants the typed wrapper of torch.load, and cannot do requires_grad.
    typed = storage if isinstance(storage, torch.TypedStorage) else _typed(storage, torch.uint8)
    tensor = torch._utils._rebuild_tensor_v3(typed, offset, size, stride, False, *rest)  # type: ignore[no-untyped-call]
    return tensor.requires_grad_(requires_grad)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
