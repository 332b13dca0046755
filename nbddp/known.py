"""Both sides. What a rank was given of its notebook, and how it was then: what need not or must not go back."""

from __future__ import annotations

import collections
import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

# Nothing can be changed in these, or nothing that would travel with a function or class.
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type(...), enum.Enum, torch.dtype, torch.device,
    type, types.ModuleType, types.BuiltinFunctionType,
)  # fmt: skip
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_DEPTH = 3
_GONE = object()


class Known:
    """The notebook's classes and functions by number, and its variables by name, as they came to this rank.

    Args:
        objects: in the order of the notebook's own list.
        namespace: of this rank's ``__main__``; all that is in it is the notebook's.
    """

    def __init__(self, objects: Sequence[Any] = (), namespace: Mapping[str, Any] | None = None) -> None:
        self._objects = objects
        self._numbers = {id(obj): number for number, obj in enumerate(objects)}
        self._names: dict[str, Callable[[Any], bool]] = {}
        self._ready_made: Mapping[str, Any] = {}
        self._classes = {id(obj): _attributes(obj) for obj in objects if isinstance(obj, type)}
        named = [obj for obj in objects if not isinstance(obj, type) and _has_name(obj, namespace or {})]
        self._plain = {id(obj): parts for obj in named if (parts := _parts(obj)) is not None}
        self._note(namespace or {})

    def add_variables(self, names: Mapping[str, Any], ready_made: Mapping[str, Any]) -> None:
        """A cell's: what it takes from the notebook, and names that every cell on a rank has."""
        self._note(names)
        self._ready_made = ready_made

    def add_outputs(self, names: Mapping[str, Any]) -> None:
        """These will be the notebook's variables when the run is over."""
        self._note(names)

    def _note(self, names: Mapping[str, Any]) -> None:
        self._names.update((name, _comparison(value)) for name, value in names.items())

    def number_of(self, obj: Any) -> int | None:
        """Of what the reader has itself; None: its value must travel.

        A class stays the notebook's own, so that ``isinstance`` holds there. A function does as pickle would
        have it, by its name, as long as there is nothing in it that can have changed.
        """
        number = self._numbers.get(id(obj))
        if number is None or isinstance(obj, type):
            return number
        before = self._plain.get(id(obj))
        now = _parts(obj) if before is not None else None
        unchanged = now is not None and len(now) == len(before or ()) and all(map(operator.is_, now, before or ()))
        return number if unchanged else None

    def has(self, name: str, value: Any) -> bool:
        """Is this value of a variable of ``__main__`` the one that came from the notebook?"""
        return name in self._names and self._names[name](value)

    def is_ready_made(self, name: str, value: Any) -> bool:
        """Is it one of the names that every cell on a rank has, and only there?"""
        made = not isinstance(value, types.ModuleType) and name in self._ready_made
        return made and self._ready_made[name] is value

    def changes_of(self, kind: type) -> Iterator[str]:
        """What the rank did to a class of the notebook and its bases, in words."""
        for base in kind.__mro__:
            if id(base) in self._classes:
                before, now = self._classes[id(base)], _attributes(base)
                names = sorted(
                    n for n in before.keys() | now.keys() if not _same(before.get(n, _GONE), now.get(n, _GONE))
                )
                if names:
                    changed = in_words([f"{base.__qualname__}.{name}" for name in names])
                    was = "was" if len(names) == 1 else "were"
                    yield f"{changed} {was} changed; the notebook's {base.__qualname__} keeps its own"


def in_words(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def differs(value: Any, other: Any) -> bool:
    """Is this another value for a function that reads it? Where that cannot be seen, it is."""
    if value is other:
        return False
    if isinstance(value, types.FunctionType) and isinstance(other, types.FunctionType):
        return value.__code__ != other.__code__
    return type(value) is not type(other) or not isinstance(value, _CONSTANTS) or bool(value != other)


def attributes_of_cached(function: Any) -> dict[str, Any]:
    """Those that a user set on what ``functools.lru_cache`` gave."""
    made = (*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters")
    return {name: value for name, value in vars(function).items() if name not in made}


def is_dispatching(function: Any) -> bool:
    """Did ``functools.singledispatch`` make it?"""
    return isinstance(function, types.FunctionType) and function.__code__ is _DISPATCHING


def attributes_of_dispatching(function: Any) -> dict[str, Any]:
    """Those that a user set on what ``functools.singledispatch`` gave."""
    return {name: value for name, value in vars(function).items() if name not in _MADE_BY_DISPATCHING}


_DISPATCHING = getattr(functools.singledispatch(len), "__code__", None)
_MADE_BY_DISPATCHING = ("register", "dispatch", "registry", "_clear_cache", "__wrapped__")


def _has_name(obj: Any, namespace: Mapping[str, Any]) -> bool:
    """Would pickle find it by its name?"""
    first, *rest = obj.__qualname__.split(".")
    try:
        found = functools.reduce(getattr, rest, namespace.get(first))
    except AttributeError:  # made within a function
        return False
    return found is obj and obj.__module__ == "__main__"


def _comparison(value: Any) -> Callable[[Any], bool]:
    """Tells whether another is this one. Keeps no memory that the rank may want to free."""
    if isinstance(value, _CONSTANTS):
        return functools.partial(operator.is_, value)
    try:
        reference = weakref.ref(value)
    except TypeError:
        address = id(value)
        return lambda other: id(other) == address
    return lambda other: reference() is other


def _parts(function: Any) -> list[Any] | None:
    """All that a function consists of, if nothing of it can change by itself; None for a closure, say."""
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
    """Those that a user sets, containers copied. Python and its libraries keep notes of their own in classes."""
    return {name: _copied(value, _DEPTH) for name, value in vars(kind).items() if _is_users(name, value)}


def _is_users(name: str, value: Any) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return isinstance(value, types.FunctionType) and not name.startswith("__annotate")
    return name != "_abc_impl" and not (name.startswith("_") and name.endswith("_"))  # _value2member_map_


class _Copy(list):  # type: ignore[type-arg]
    """What was in a container."""


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
