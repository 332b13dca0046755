"""Finds the variable that cannot be pickled and the path to it: ``train → helper → log_file``."""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from nbddp.errors import PayloadError
from nbddp.payload.known import attributes_of_dispatching, is_dispatching
from nbddp.payload.packing import probe
from nbddp.payload.refusals import refuse_uninherited, refuse_unshippable

_MAX_DEPTH = 60


@dataclass(frozen=True)
class _Options:
    """The options of ``payload.prepare``."""

    inheriting: bool
    back: bool


def explain(
    named: dict[str, Any], error: Exception, *, what: str, inheriting: bool = True, back: bool = False
) -> PayloadError:
    """The error for objects that do not pickle.

    Args:
        named: the objects to pickle, by the names that the user knows.
        error: the exception that pickling them raised.
        what: the start of the message, e.g. ``"cannot send train to the ranks"``.
        inheriting, back: as for ``payload.prepare``.
    """
    for name, obj in named.items():
        found = _search(obj, (name,), set(), _Options(inheriting, back))
        if found is not None:
            path, reason = found
            return PayloadError(f"{what}: {' → '.join(path)}: {reason}", path)
    return PayloadError(f"{what}: {_reason(error)}")


def explain_unpacking(what: str, error: Exception) -> PayloadError:
    """The error for a file, named by ``what``, whose content did not unpickle."""
    why = "".join(traceback.format_exception_only(type(error), error)).strip()
    return PayloadError(
        f"{what} cannot be unpacked here: {why}. The modules that it needs must be importable: put them into the "
        "folder that this is started in, or on PYTHONPATH"
    )


def _search(obj: Any, path: tuple[str, ...], seen: set[int], options: _Options) -> tuple[tuple[str, ...], str] | None:
    """The path to the deepest object inside ``obj`` that does not pickle by itself, and the reason."""
    error = _error_of(obj, options)
    if error is None or id(obj) in seen or len(path) > _MAX_DEPTH:
        return None
    seen.add(id(obj))
    refusal = _refusal_of(obj, options)
    if refusal is not None:  # the user does not need to know its parts
        return path, _reason(refusal)
    for label, child in _children(obj):
        found = _search(child, (*path, label), seen, options)
        if found is not None:
            return found
    return path, _reason(error)


def _error_of(obj: Any, options: _Options) -> Exception | None:
    try:
        probe(obj, inheriting=options.inheriting, back=options.back)
    except Exception as error:  # whatever a user's __reduce__ raises
        return error
    return None


def _refusal_of(obj: Any, options: _Options) -> Exception | None:
    """The reason why ``obj`` itself does not pickle, from its own ``__reduce__`` or from nbddp for its type."""
    try:
        refuse_unshippable(obj, back=options.back)
        if not options.inheriting:
            refuse_uninherited(obj)
        if isinstance(getattr(type(obj), "__reduce__", None), types.FunctionType):
            obj.__reduce__()
    except Exception as error:  # whatever a user's __reduce__ raises
        return error
    return None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if is_dispatching(obj):
        yield from ((f"{obj.__name__} of {kind.__name__}", function) for kind, function in obj.registry.items())
        yield from attributes_of_dispatching(obj).items()
    elif isinstance(obj, types.FunctionType):
        yield from _function_parts(obj)
    elif isinstance(obj, types.MethodType):
        yield "self", obj.__self__
        yield obj.__func__.__qualname__, obj.__func__
    elif isinstance(obj, partial):
        yield str(getattr(obj.func, "__name__", type(obj.func).__name__)), obj.func
        yield from ((f"args[{i}]", arg) for i, arg in enumerate(obj.args))
        yield from obj.keywords.items()
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
        yield from ((f"key {key!r}", key) for key in obj)
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", item) for i, item in enumerate(obj))
    elif isinstance(obj, type):
        for name, value in vars(obj).items():
            yield name, getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        yield from ((base.__name__, base) for base in obj.__bases__)
    else:
        yield type(obj).__name__, type(obj)
        with contextlib.suppress(TypeError):  # no __dict__
            yield from ((f".{name}", value) for name, value in vars(obj).items())
        yield from (
            (f".{slot}", getattr(obj, slot)) for slot in getattr(type(obj), "__slots__", ()) if hasattr(obj, slot)
        )


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    yield from ((f"default {i}", value) for i, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
