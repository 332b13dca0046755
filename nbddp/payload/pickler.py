"""cloudpickle for notebooks: memory stays out of the stream, code keeps its file and its lines."""

import dataclasses
import functools
import importlib
import io
import marshal
import mmap
import os
import pickle
import random
import sys
import types
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from IPython.core.autocall import ExitAutocall
from torch._utils import _rebuild_parameter, _rebuild_parameter_with_state, _rebuild_tensor_v3
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from nbddp.payload import libraries

_byte_bounds: Any = np.byte_bounds if hasattr(np, "byte_bounds") else np.lib.array_utils.byte_bounds  # numpy 1
parameters: MutableMapping[Any, None] = WeakTensorKeyDictionary()  # that have come from another process
Received = Mapping[int | str, Any]  # what the other side has sent, by its number or name
# Names, in their modules, of objects that a process has once: a copy isn't MISSING, and no seed would reach it.
_THE_ONLY = {
    id(dataclasses.MISSING): "MISSING",
    id(random.random.__self__): "_inst",  # type: ignore[attr-defined]
    id(np.random.rand.__self__): "_rand",  # type: ignore[attr-defined]
    id(torch.default_generator): "default_generator",
}
device_here: str | torch.device = "cpu"  # where tensors go that were on an accelerator; a rank sets its own


class _Main(dict):  # type: ignore[type-arg]
    """Stands for the globals of the notebook's ``__main__``; the reader's own take their place."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _main_globals, ()


class Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what is sent between the notebook and a rank.

    Attributes:
        buffers: memory of arrays and storages, in the order of the stream.
        by_value: classes and functions that were pickled by value, in order.
        named: those of them that are variables of ``__main__`` under their own names.
        codes: of the functions.
        weak_references: how many came back as dead ones.
    """

    def __init__(
        self, stream: io.BytesIO, *, back: bool = False, received: Received | None = None, alone: bool = False
    ) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(stream, protocol=5, buffer_callback=self.buffers.append)
        self.by_value: list[Any] = []
        self.named: dict[str, Any] = {}
        self.codes: list[types.CodeType] = []
        self.weak_references = 0
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._received = {id(obj): key for key, obj in (received or {}).items() if obj is not None}
        self._back, self._alone = back, alone
        self._main: Any = vars(sys.modules["__main__"])
        if not back:  # a result brings its own globals: it must not overwrite the notebook's variables
            self.globals_ref[id(self._main)] = _Main(__name__="__main__")

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in _THE_ONLY:
            return _THE_ONLY[id(obj)]
        for kinds, reduce in _REDUCERS:
            if isinstance(obj, kinds):
                return reduce(self, obj)
        return libraries.reduced(obj, back=self._back)

    def _reduce_named(self, obj: Any) -> Any:
        """Reduce a class or function. What the notebook has sent goes back as its number or name: it's the same."""
        if id(obj) in self._received and not getattr(obj, "__closure__", None):
            return _received, (self._received[id(obj)],)
        if (compiler := _compiler_of(obj)) is not None:
            reduced = _compile, (_settings(compiler), obj._torchdynamo_orig_callable)
        else:
            reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple):
            if isinstance(obj, type) and len(reduced) > 2:
                reduced = self._complete(obj, *reduced)
            self.by_value.append(obj)
            if not self._back and self._main.get(obj.__qualname__) is obj:
                self.named[obj.__qualname__] = obj
                if isinstance(obj, types.FunctionType) and not self._alone and "globals" in _names(obj.__code__):
                    self.named |= self._definitions
        return reduced

    @functools.cached_property
    def _definitions(self) -> dict[str, Any]:
        """What cells have defined and can be sent: a function that calls ``globals()`` may use any of it."""
        return {name: obj for name, obj in list(self._main.items()) if is_definition(name, obj) and can_be_sent(obj)}

    def _complete(self, kind: type, make: Any, args: tuple[Any, ...], *state: Any) -> Any:
        """Add what cloudpickle forgets of a class: its slots, and that ``__init_subclass__`` has been called."""
        if vars(kind).get("__slots__"):
            metaclass, name, bases, namespace, *rest = args
            args = metaclass, name, bases, {**namespace, "__slots__": vars(kind)["__slots__"]}, *rest
        hooked = next((base for base in kind.__mro__[1:] if "__init_subclass__" in vars(base)), None)
        if hooked is not None and isinstance(super().reducer_override(hooked), tuple):
            return _without_hook, (hooked, make, args), *state
        return make, args, *state

    def _reduce_code(self, code: types.CodeType) -> Any:
        self.codes.append(code)
        return marshal.loads, (marshal.dumps(code),)  # cloudpickle 3.1.3 leaves out the file's name

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        same = self._storages.setdefault(storage._cdata, storage)  # torch may create several objects for one storage
        if same is not storage:
            return _itself, (same,)
        data = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())  # type: ignore[no-untyped-call]
        return _storage, (data.numpy(), storage.device.type != "cpu")

    def _reduce_ddp(self, ddp: DistributedDataParallel) -> Any:
        if self._back:
            return _itself, (ddp.module,)
        raise TypeError(
            "a DistributedDataParallel model belongs to this process's group; "
            "send model.module, and wrap it inside the function: nbddp.wrap(model)"
        )

    def _reduce_weak_reference(self, _: Any) -> Any:
        if not self._back:
            return NotImplemented
        self.weak_references += 1  # what they refer to may hold what can't be sent, such as a DataLoader's iterator
        return _dead_reference, ()

    def _reduce_cached(self, cached: Any) -> Any:
        if cached.__module__ != "__main__":
            return NotImplemented
        return _cached, (cached.__wrapped__, cached.cache_parameters())

    def _reduce_cached_property(self, cached: Any) -> Any:
        if not hasattr(cached, "lock"):  # as in Python 3.11
            return NotImplemented
        return type(cached), (cached.func,), {"attrname": cached.attrname}


_REDUCERS: tuple[tuple[Any, Any], ...] = (
    ((type, types.FunctionType), Packer._reduce_named),
    (types.CodeType, Packer._reduce_code),
    (np.memmap, lambda _, array: _mapped(array)),
    (ExitAutocall, lambda _, leave: (getattr, (sys, "exit"))),  # exit(), quit() of a notebook
    (torch.UntypedStorage, Packer._reduce_storage),
    (torch.TypedStorage, lambda _, typed: (_typed_storage, (typed._untyped_storage, typed.dtype))),
    (types.ModuleType, lambda _, module: _module(module)),
    (functools._lru_cache_wrapper, Packer._reduce_cached),
    (functools.cached_property, Packer._reduce_cached_property),
    (DistributedDataParallel, Packer._reduce_ddp),
    (weakref.ref, Packer._reduce_weak_reference),
    (type(os.environ), lambda _, environ: (getattr, (os, "environb" if environ is os.environb else "environ"))),
    ((io.IOBase, type(sys.stdout)), lambda _, stream: _stream(stream)),
)


class Unpacker(pickle.Unpickler):
    """Reads what a :class:`Packer` has written; ``known`` are the objects that it refers to by number."""

    def __init__(self, stream: io.BytesIO, buffers: Any, known: Sequence[Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found in (_rebuild_parameter, _rebuild_parameter_with_state):
            return functools.partial(_parameter, found)
        return self._known_one if found is _received else _rebuild if found is _rebuild_tensor_v3 else found

    def _known_one(self, key: int | str) -> Any:
        return self._known[key] if isinstance(key, int) else getattr(sys.modules["__main__"], key)


def is_definition(name: str, obj: Any) -> bool:
    """Whether this is a class or function that cells have defined under this name."""
    return isinstance(obj, (type, types.FunctionType)) and (obj.__module__, obj.__qualname__) == ("__main__", name)


def can_be_sent(obj: object) -> bool:
    """Whether this pickles."""
    try:
        Packer(io.BytesIO(), alone=True).dump(obj)
    except Exception:  # whatever a user's __reduce__ raises
        return False
    return True


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return {*code.co_names}.union(*inner)


def _received(key: int | str) -> Any:
    raise AssertionError("an Unpacker finds the object")


def _without_hook(hooked: type, make: Any, args: tuple[Any, ...]) -> Any:
    """Make a class, of which ``hooked.__init_subclass__`` must not be called a second time."""
    hook = vars(hooked).get("__init_subclass__")
    type.__setattr__(hooked, "__init_subclass__", classmethod(lambda cls: None))
    try:
        return make(*args)
    finally:
        if hook is None:  # it's still to be set, with the rest of the class
            type.__delattr__(hooked, "__init_subclass__")
        else:
            type.__setattr__(hooked, "__init_subclass__", hook)


def _compiler_of(obj: Any) -> Any:
    """Return torch.compile's context, which is in the closure of a function that it has made; None for others."""
    if not isinstance(obj, types.FunctionType) or "_torchdynamo_orig_callable" not in vars(obj):
        return None
    held = dict(zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True))
    context = held["self"].cell_contents if "self" in held else None
    return context if type(context).__name__ == "OptimizeContext" else None  # its module is slow to import


def _settings(compiler: Any) -> dict[str, Any]:
    backend = compiler.callback
    while inner := getattr(backend, "_torchdynamo_orig_backend", getattr(backend, "_torchdynamo_orig_callable", None)):
        backend = inner  # torch 2.6 has the second name
    return {"backend": backend, "nopython": getattr(compiler, "fullgraph", False), "dynamic": compiler._dynamic}


def _compile(settings: dict[str, Any], original: Any) -> Any:
    return torch._dynamo.optimize(**settings)(original)


def _main_globals() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _itself(obj: Any) -> Any:
    return obj


def _module(module: types.ModuleType) -> Any:
    if type(module) is types.ModuleType:
        return NotImplemented
    return importlib.import_module, (module.__name__,)  # e.g. torch.backends.cudnn, a subclass of modules


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _dead_reference() -> Any:
    gone = type("Gone", (), {})()
    hash(reference := weakref.ref(gone))  # as a key, it needs one
    return reference


def _stream(stream: Any) -> Any:
    if name := next((name for name in ("stdout", "stderr") if getattr(sys, name) is stream), ""):
        return getattr, (sys, name)
    if isinstance(stream, (io.BytesIO, io.StringIO)) or type(stream).__module__ != "_io":
        return NotImplemented  # of a library, which knows how to pickle it
    name = getattr(stream, "name", "")
    raise TypeError(f"an open file ({name!r}) belongs to this process; send its path, and open it in the function")


def _mapped(array: np.memmap[Any, Any]) -> Any:
    """Reduce a view of a file to a plain array over the bytes between its first and its last, one buffer."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not array.size or not isinstance(base, mmap.mmap):  # e.g. array + 1, which numpy calls a memmap, too
        return _itself, (np.array(array),)
    whole, (low, high) = np.frombuffer(base, np.uint8), _byte_bounds(array)
    within = whole[low - whole.ctypes.data : high - whole.ctypes.data]
    return np.ndarray, (array.shape, array.dtype, within, array.ctypes.data - low, array.strides)


def _storage(data: Any, was_on_device: bool) -> torch.UntypedStorage:
    tensor = torch.from_numpy(data)
    return (tensor.to(device_here) if was_on_device else tensor).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _parameter(rebuild: Any, *args: Any) -> Any:
    parameter = rebuild(*args)
    parameters[parameter] = None
    return parameter


def _rebuild(storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, *args: Any) -> Any:
    """Make a tensor of a dtype such as float8, whose storage torch writes without a type, but reads with one."""
    typed: Any = types.SimpleNamespace(_untyped_storage=storage)
    # torch's own can't make one that requires a gradient.
    return _rebuild_tensor_v3(typed, offset, size, stride, False, *args).requires_grad_(requires_grad)  # type: ignore[no-untyped-call]
