"""cloudpickle for notebooks: memory stays out of the stream, code keeps its file and its lines."""

from __future__ import annotations

import functools
import importlib
import io
import marshal
import os
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
from torch.nn.parallel import DistributedDataParallel

from nbddp.payload import libraries

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
        files: where the code of the functions comes from.
    """

    def __init__(self, stream: io.BytesIO, *, back: bool = False, received: Sequence[Any] = ()) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(stream, protocol=5, buffer_callback=self.buffers.append)
        self.by_value: list[Any] = []
        self.named: dict[str, Any] = {}
        self.files: set[str] = set()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._received = {id(obj): number for number, obj in enumerate(received)}
        self._back = back
        self._main: Any = vars(sys.modules["__main__"])
        if not back:  # a result brings its own globals: it must not overwrite the notebook's variables
            self.globals_ref[id(self._main)] = _Main(__name__="__main__")

    def reducer_override(self, obj: Any) -> Any:
        for kinds, reduce in _REDUCERS:
            if isinstance(obj, kinds):
                return reduce(self, obj)
        return libraries.reduced(obj, back=self._back)

    def _reduce_named(self, obj: Any) -> Any:
        """Reduce a class or function. What the notebook has sent goes back as its number: it's the same object."""
        if id(obj) in self._received and not getattr(obj, "__closure__", None):
            return _received, (self._received[id(obj)],)
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple):
            if isinstance(obj, type) and vars(obj).get("__slots__") and len(reduced[1]) > 3:
                make, (metaclass, name, bases, namespace, *rest), *state = reduced  # cloudpickle leaves them out
                reduced = (
                    make,
                    (metaclass, name, bases, {**namespace, "__slots__": vars(obj)["__slots__"]}, *rest),
                    *state,
                )
            self.by_value.append(obj)
            if not self._back and self._main.get(obj.__qualname__) is obj:
                self.named[obj.__qualname__] = obj
        return reduced

    def _reduce_code(self, code: types.CodeType) -> Any:
        self.files.add(code.co_filename)
        return marshal.loads, (marshal.dumps(code),)  # cloudpickle 3.1.3 leaves out the file's name

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        data = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())  # type: ignore[no-untyped-call]
        return _storage, (data.numpy(), storage.device.type != "cpu")

    def _reduce_typed_storage(self, typed: torch.TypedStorage) -> Any:
        return _typed_storage, (self._the_same(typed._untyped_storage), typed.dtype)

    def _the_same(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return one Python object for each storage: torch may create several."""
        return self._storages.setdefault(storage._cdata, storage)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) is not torch.Tensor or tensor.dtype not in torch.storage._new_dtypes():
            return NotImplemented  # torch's own way, by its storage
        tensor = tensor.resolve_conj().resolve_neg()
        layout = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.requires_grad
        return _tensor, (self._the_same(tensor.untyped_storage()), tensor.dtype, *layout)

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if type(module) is types.ModuleType:
            return super().reducer_override(module)
        return importlib.import_module, (module.__name__,)  # e.g. torch.backends.cudnn, a subclass of modules

    def _reduce_cached(self, cached: Any) -> Any:
        if cached.__module__ != "__main__":
            return NotImplemented
        return _cached, (cached.__wrapped__, cached.cache_parameters())


_REDUCERS: tuple[tuple[Any, Any], ...] = (
    ((type, types.FunctionType), Packer._reduce_named),
    (types.CodeType, Packer._reduce_code),
    (torch.Tensor, Packer._reduce_tensor),
    (torch.UntypedStorage, Packer._reduce_storage),
    (torch.TypedStorage, Packer._reduce_typed_storage),
    (types.ModuleType, Packer._reduce_module),
    (functools._lru_cache_wrapper, Packer._reduce_cached),
    (DistributedDataParallel, lambda _, ddp: (_itself, (ddp.module,))),
    (type(os.environ), lambda _, environ: (getattr, (os, "environ"))),
    (type(sys.stdout), lambda _, out: _standard_stream(out)),
)


class Unpacker(pickle.Unpickler):
    """Reads what a :class:`Packer` has written; ``known`` are the objects that it refers to by number."""

    def __init__(self, stream: io.BytesIO, buffers: Any, known: Sequence[Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._known.__getitem__ if found is _received else found


def _received(number: int) -> Any:
    raise AssertionError("an Unpacker finds the object")


def _main_globals() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _itself(obj: Any) -> Any:
    return obj


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _standard_stream(stream: Any) -> Any:
    name = next((name for name in ("stdout", "stderr") if getattr(sys, name) is stream), "")
    return (getattr, (sys, name)) if name else NotImplemented


def _storage(data: Any, was_on_device: bool) -> torch.UntypedStorage:
    tensor = torch.from_numpy(data)
    return (tensor.to(device_here) if was_on_device else tensor).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _tensor(storage: Any, dtype: Any, offset: int, size: Any, stride: Any, requires_grad: bool) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    return tensor.requires_grad_(requires_grad)
