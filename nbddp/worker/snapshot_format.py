"""Reads and writes snapshots that load without running code, and finds the object that prevents that.

A snapshot may hold objects that torch considers safe (tensors, numbers, text, plain containers), numpy's values, and
values of the standard library whose constructors have no side effects.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import importlib
import io
import os
import pickle
import types
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import torch

_SAFE = {
    "argparse": ("Namespace",),
    "builtins": (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range"),
        *("set", "slice", "str", "tuple", "Ellipsis", "NotImplemented"),
    ),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "http": ("HTTPStatus", "HTTPMethod"),
    "ipaddress": ("IPv4Address", "IPv6Address"),
    "numpy": ("dtype", "ndarray", *sorted({kind.__name__ for kind in np.sctypeDict.values()})),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "numpy.random._mt19937": ("MT19937",),
    "numpy.random._pcg64": ("PCG64", "PCG64DXSM"),
    "numpy.random._philox": ("Philox",),
    "numpy.random._pickle": ("__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"),
    "numpy.random._sfc64": ("SFC64",),
    "numpy.random.bit_generator": ("SeedSequence", "__pyx_unpickle_SeedSequence"),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "re": ("RegexFlag",),
    "signal": ("Handlers", "Signals"),
    "types": ("SimpleNamespace",),
    "uuid": ("SafeUUID", "UUID"),
    "zoneinfo": ("ZoneInfo",),
}
# The names of the same modules in numpy 1 and Python 3.13.
_OTHER_NAMES = {"numpy.core.": "numpy._core.", "pathlib._local.": "pathlib."}


# ---------------------------------------------------------------------------- writing and reading


class Pickler(pickle.Pickler):
    """Pickles the few types whose own format torch's reader does not know as calls of their classes."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is collections.deque:
            return kind, (list(obj), obj.maxlen)
        if kind is collections.defaultdict:
            return kind, (obj.default_factory, dict(obj))
        if kind is zoneinfo.ZoneInfo and obj.key is not None:
            return kind, (obj.key,)
        return NotImplemented


class _Pickling:
    """The interface that ``torch.save`` expects of a pickle module."""

    __name__ = "pickle"
    Pickler = Pickler


def write(obj: object, file: BinaryIO) -> None:
    """``torch.save`` with checksums, in a form that :func:`read` can read. Raises whatever pickling raises."""
    before = torch.serialization.get_crc32_options()  # the user may have turned checksums off
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(obj, file, pickle_module=_Pickling)
    finally:
        torch.serialization.set_crc32_options(before)


def read(file: str | BinaryIO, **options: Any) -> Any:
    """``torch.load(weights_only=True)`` that also accepts numpy's and the standard library's values."""
    try:
        names = unsafe_names(file)
    except (RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError):
        names = []  # truncated, or not a zip archive: torch.load raises the error
    already_safe = torch.serialization.get_safe_globals()
    made = {kind for name in names for kind in _MADE_BY.get(_current_name(name), ()) if kind not in already_safe}
    with torch.serialization.safe_globals([*made, *filter(None, map(_safe_global, names))]):
        return torch.load(file, weights_only=True, **options)


def unsafe_names(file: str | BinaryIO, *, not_on_our_list: bool = False) -> list[str]:
    """The globals in the file that torch does not consider safe, optionally without those on our list."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    finally:
        if not isinstance(file, str):
            file.seek(0)
    return sorted(name for name in names if not (not_on_our_list and _safe_global(name)))


def _current_name(name: str) -> str:
    for other, ours in _OTHER_NAMES.items():
        if name.startswith(other):
            return ours + name.removeprefix(other)
    return name


def _safe_global(name: str) -> tuple[Any, str] | None:
    """The object with that name, if it is on our list and exists here."""
    module, _, attribute = _current_name(name).rpartition(".")
    if attribute not in _SAFE.get(module, ()):
        return None
    for module_name in (module, module.replace("numpy._core", "numpy.core")):
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module_name), attribute), name
    return None


# Types that these functions create: the file sets the state of their objects, but does not name them.
_MADE_BY: dict[str, tuple[type, ...]] = {
    "numpy.dtype": tuple({type(np.dtype(code)) for code in np.typecodes["All"]}),
    "numpy.random._pickle.__generator_ctor": (np.random.Generator,),
    "numpy.random._pickle.__randomstate_ctor": (np.random.RandomState,),
}


# ---------------------------------------------------------------------------- objects that do not load


def check(path: str) -> None:
    """Read the file as :func:`read` does; tensors are mapped, so their bytes are not read."""
    read(path, mmap=True, map_location="cpu")


def culprit(named: dict[str, Any]) -> tuple[str, str] | None:
    """The path to the first object that cannot be loaded again, and its description."""
    for name, obj in named.items():
        found = _search(obj, name, set())
        if found is not None:
            return found
    return None


def _search(obj: Any, path: str, seen: set[int]) -> tuple[str, str] | None:
    if type(obj) in _ALWAYS_LOAD or id(obj) in seen or loads(obj):
        return None
    seen.add(id(obj))
    for step, child in _children(obj):
        found = _search(child, path + step, seen)
        if found is not None:
            return found
    return path, _describe(obj)


_ALWAYS_LOAD = {int, float, str, bool, type(None), torch.Tensor, torch.nn.Parameter}


def loads(obj: object) -> bool:
    """Can this object be written and read again on its own?"""
    file = io.BytesIO()
    try:
        write(obj, file)
        file.seek(0)
        read(file)
    except Exception:  # whatever a user's __reduce__ raises
        return False
    return True


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f" (its key {key!r})", key) for key in obj)
        yield from ((f"[{_quoted(key)}]", value) for key, value in obj.items())
        yield from ((".default_factory", obj.default_factory) for _ in [0] if hasattr(obj, "default_factory"))
    elif isinstance(obj, (list, tuple, collections.deque)) and type(obj).__module__ in ("builtins", "collections"):
        yield from ((f"[{i}]", item) for i, item in enumerate(obj))
    elif isinstance(obj, (set, frozenset)):
        yield from ((f" (its member {item!r})", item) for item in obj)
    elif isinstance(obj, (types.SimpleNamespace, argparse.Namespace)):
        yield from ((f".{name}", value) for name, value in vars(obj).items())
    elif isinstance(obj, np.ndarray) and obj.dtype.hasobject:
        yield from ((f"[{', '.join(map(str, index))}]", item) for index, item in np.ndenumerate(obj))


def _quoted(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) and key.isidentifier() else repr(key)


def _describe(obj: Any) -> str:
    """``a Color; save its .value``."""
    if isinstance(obj, type):
        return f"the class {obj.__name__}; save its name"
    if isinstance(obj, types.ModuleType):
        return f"the module {obj.__name__}; save its name"
    if callable(obj) and hasattr(obj, "__name__"):
        return f"the function {obj.__name__}; save its name"
    kind = type(obj).__name__
    advice = next((advice for fits, advice in _INSTEAD if fits(obj)), "its parts, or give it a state_dict()")
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}; save {advice}"


_INSTEAD: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda obj: isinstance(obj, enum.Enum), "its .value"),
    (dataclasses.is_dataclass, "dataclasses.asdict() of it"),
    (lambda obj: isinstance(obj, tuple), "tuple() of it"),
    (lambda obj: isinstance(obj, dict), "dict() of it"),
    (lambda obj: isinstance(obj, list), "list() of it"),
    (lambda obj: isinstance(obj, os.PathLike), "str() of it"),
    (lambda obj: isinstance(obj, torch.Generator), "its get_state()"),
    (lambda obj: isinstance(obj, torch.Tensor), "its .detach() as a plain tensor"),
    (lambda obj: isinstance(obj, int), "it as text"),
)
