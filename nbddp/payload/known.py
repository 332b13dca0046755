"""Remembers what a rank got from the notebook and in which state, so that unchanged objects need not be sent back."""

from __future__ import annotations

import collections
import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

# Nothing in these can change, or nothing that is pickled with a function or class.
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type(...), enum.Enum, torch.dtype, torch.device,
    type, types.ModuleType, types.BuiltinFunctionType,
)  # fmt: skip
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_DEPTH = 3
_MISSING = object()


class Known:
    """The notebook's classes and functions by number, and its variables by name, as this rank got them.

    Args:
        objects: in the order of the notebook's list.
        namespace: of this rank's ``__main__``; everything in it came from the notebook.
    """

    def __init__(self, objects: Sequence[Any] = (), namespace: Mapping[str, Any] | None = None) -> None:
        self._objects = objects
        self._numbers = {id(obj): number for number, obj in enumerate(objects)}
        self._names: dict[str, Callable[[Any], bool]] = {}
        self._predefined: Mapping[str, Any] = {}
        self._classes = {id(obj): _attributes(obj) for obj in objects if isinstance(obj, type)}
        named = [obj for obj in objects if not isinstance(obj, type) and _has_name(obj, namespace or {})]
        self._plain = {id(obj): parts for obj in named if (parts := _parts(obj)) is not None}
        self._remember(namespace or {})

    def add_variables(self, names: Mapping[str, Any], predefined: Mapping[str, Any]) -> None:
        """Add a cell's variables: those it gets from the notebook, and the names that every cell on a rank has."""
        self._remember(names)
        self._predefined = predefined

    def add_earlier(self, earlier: Known) -> None:
        """Add the variables of an earlier call on the same rank, as far as later ones have not replaced them."""
        self._names = {**earlier._names, **self._names}

    def add(self, names: Mapping[str, Any]) -> None:
        """Add variables that the reader has, or will have when the run is over."""
        self._remember(names)

    def forget(self, names: Iterable[str]) -> None:
        """Forget variables, which the reader has no longer."""
        for name in names:
            self._names.pop(name, None)

    def _remember(self, names: Mapping[str, Any]) -> None:
        self._names.update((name, _comparison(value)) for name, value in names.items())

    def number_of(self, obj: Any) -> int | None:
        """The number of a class or function that the reader has; None: its value must be sent.

        A class is sent as its number, so that ``isinstance`` holds in the notebook. So is a function that pickle would
        find by its name, as long as nothing in it can have changed.
        """
        number = self._numbers.get(id(obj))
        if number is None or isinstance(obj, type):
            return number
        before = self._plain.get(id(obj))
        now = _parts(obj) if before is not None else None
        unchanged = now is not None and len(now) == len(before or ()) and all(map(operator.is_, now, before or ()))
        return number if unchanged else None

    def knows(self, name: str) -> bool:
        """Has any value of this variable come?"""
        return name in self._names

    def has(self, name: str, value: Any) -> bool:
        """Is this value of a variable of ``__main__`` the one that came from the notebook?"""
        return name in self._names and self._names[name](value)

    def is_predefined(self, name: str, value: Any) -> bool:
        """Is it one of the names that cells have on a rank, but not in the notebook?"""
        known = not isinstance(value, types.ModuleType) and name in self._predefined
        return known and self._predefined[name] is value

    def changes_of(self, kind: type) -> Iterator[str]:
        """Describe what the rank has changed in a class of the notebook and its bases."""
        for base in kind.__mro__:
            if id(base) in self._classes:
                before, now = self._classes[id(base)], _attributes(base)
                names = sorted(
                    n for n in before.keys() | now.keys() if not _same(before.get(n, _MISSING), now.get(n, _MISSING))
                )
                if names:
                    changed = in_words([f"{base.__qualname__}.{name}" for name in names])
                    was = "was" if len(names) == 1 else "were"
                    yield f"{changed} {was} changed; the notebook's {base.__qualname__} is unchanged"


def in_words(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def differs(value: Any, other: Any) -> bool:
    """May a function that reads the variable see a difference between these values? True if that is unknown."""
    if value is other:
        return False
    if isinstance(value, types.FunctionType) and isinstance(other, types.FunctionType):
        return value.__code__ != other.__code__
    return type(value) is not type(other) or not isinstance(value, _CONSTANTS) or bool(value != other)


def attributes_of_cached(function: Any) -> dict[str, Any]:
    """The attributes that a user has set on a ``functools.lru_cache`` function."""
    made = (*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters")
    return {name: value for name, value in vars(function).items() if name not in made}


def is_dispatching(function: Any) -> bool:
    """Did ``functools.singledispatch`` create this function?"""
    return isinstance(function, types.FunctionType) and function.__code__ is _DISPATCHING


def attributes_of_dispatching(function: Any) -> dict[str, Any]:
    """The attributes that a user has set on a ``functools.singledispatch`` function."""
    return {name: value for name, value in vars(function).items() if name not in _MADE_BY_DISPATCHING}


_DISPATCHING = getattr(functools.singledispatch(len), "__code__", None)
_MADE_BY_DISPATCHING = ("register", "dispatch", "registry", "_clear_cache", "__wrapped__")


def _has_name(obj: Any, namespace: Mapping[str, Any]) -> bool:
    """Would pickle find it by its name?"""
    first, *rest = obj.__qualname__.split(".")
    try:
        found = functools.reduce(getattr, rest, namespace.get(first))
    except AttributeError:  # defined in a function
        return False
    return found is obj and obj.__module__ == "__main__"


def _comparison(value: Any) -> Callable[[Any], bool]:
    """A function that compares other objects with this value by identity, without keeping its memory alive."""
    if isinstance(value, _CONSTANTS):
        return functools.partial(operator.is_, value)
    try:
        reference = weakref.ref(value)
    except TypeError:
        address = id(value)
        return lambda other: id(other) == address
    return lambda other: reference() is other


def _parts(function: Any) -> list[Any] | None:
    """Everything that a function consists of; None if a part can change without being replaced, as in a closure."""
    if isinstance(function, functools._lru_cache_wrapper):
        attributes, parts = attributes_of_cached(function), _parts(function.__wrapped__)
    elif is_dispatching(function):
        attributes, parts = attributes_of_dispatching(function), _parts_of_registry(function.registry)
    else:
        attributes, parts = vars(function), _parts_of_plain(function)
    named = [*attributes, *attributes.values()]
    return [*parts, *named] if parts is not None and all(map(_is_constant, named)) else None


def _parts_of_registry(registry: Mapping[type, Any]) -> list[Any] | None:
    parts = [_parts(implementation) for implementation in registry.values()]
    if any(each is None for each in parts):
        return None
    return [*registry, *registry.values(), *(part for each in parts for part in each or ())]


def _parts_of_plain(function: Any) -> list[Any] | None:
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return None
    keywords = function.__kwdefaults__ or {}
    defaults = [*(function.__defaults__ or ()), *keywords, *keywords.values()]
    return [function.__code__, *defaults] if all(map(_is_constant, defaults)) else None


def _is_constant(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


def _attributes(kind: type) -> dict[str, Any]:
    """The attributes that a user has set, with copies of containers. Python and its libraries set others."""
    return {name: _copied(value, _DEPTH) for name, value in vars(kind).items() if _is_set_by_user(name, value)}


def _is_set_by_user(name: str, value: Any) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return isinstance(value, types.FunctionType) and not name.startswith("__annotate")
    return name != "_abc_impl" and not (name.startswith("_") and name.endswith("_"))  # _value2member_map_


class _Copy(list):  # type: ignore[type-arg]
    """A copy of a container's content."""


def _copied(value: Any, depth: int) -> Any:
    if depth and type(value) in _MAPPINGS:
        return _Copy([_Copy(value), *(_copied(inner, depth - 1) for inner in value.values())])
    if depth and type(value) in _SEQUENCES:
        return _Copy(_copied(inner, depth - 1) for inner in value)
    return value


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, _Copy) and isinstance(now, _Copy):
        return len(before) == len(now) and all(map(_same, before, now))
    return before is now or not (isinstance(before, _Copy) or isinstance(now, _Copy) or differs(before, now))
