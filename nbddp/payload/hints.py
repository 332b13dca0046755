"""Handles annotations, which Python 3.14 evaluates only when they are read, and completes how they are pickled.

cloudpickle (3.1) leaves out a class's annotations, and fails at those of a function that cannot be evaluated. A
``ForwardRef`` holds all globals of the notebook. ``type X = ...`` would be looked up in the rank's ``__main__``. The
stream calls the functions at the end when it is read.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from typing import Any

ALIASES: tuple[type, ...] = ()
if sys.version_info >= (3, 12):
    ALIASES = (typing.TypeAliasType,)


def signature(function: Any) -> inspect.Signature:
    """``inspect.signature``, which does not fail where an annotation cannot be evaluated."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.STRING)
    return inspect.signature(function)


def shown(signature: inspect.Signature) -> str:
    """Return the text of a signature, with annotations as in its source."""
    if sys.version_info >= (3, 14):
        return signature.format(quote_annotation_strings=False)
    return str(signature)


def of_class(kind: type) -> dict[str, Any]:
    """Return the attributes to set on a copy of a class, so that it has this class's own annotations."""
    return {"__annotations__": _read(kind)} if vars(kind).get("__annotate_func__") is not None else {}


def can_be_read(function: types.FunctionType) -> bool:
    """Return whether all annotations of a function can be evaluated."""
    try:
        return isinstance(function.__annotations__, dict)
    except Exception:  # a name that is not defined, or whatever an expression of the user's raises
        return False


def with_texts(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of a function whose annotations are their own source."""
    kept = function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copy = types.FunctionType(*kept)
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(copy, name, getattr(function, name))
    vars(copy).update(vars(function))
    copy.__annotations__ = _texts(function)
    return copy


def reduce_forward_ref(ref: Any) -> Any:
    """Reduce a ``ForwardRef`` without the globals, which are those of its module."""
    if not hasattr(ref, "__owner__"):  # before Python 3.14
        return NotImplemented
    module = ref.__forward_module__ or (ref.__globals__ or {}).get("__name__")
    arguments = ref.__forward_arg__, ref.__forward_is_argument__, module, ref.__forward_is_class__
    return _forward_ref, arguments, (None, {"__owner__": ref.__owner__})


def reduce_alias(alias: Any) -> Any:
    """Reduce a ``type X = ...`` of the notebook to its value, in which the alias may occur itself."""
    if alias.__module__ != "__main__":
        return NotImplemented
    if alias.__type_params__:
        return _generic_alias, (alias.__name__, alias.__value__, alias.__type_params__)
    return _alias, (alias.__name__,), alias.__value__, None, None, _set_value


def _read(obj: Any) -> dict[str, Any]:
    try:
        return dict(obj.__annotations__)
    except Exception:  # a name that is not defined, or whatever an expression of the user's raises
        return _texts(obj)


def _texts(obj: Any) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return dict(get_annotations(obj, format=Format.STRING))
    return {}


# ---------------------------------------------------------------------------- reading


def _forward_ref(text: str, is_argument: bool, module: str | None, is_class: bool) -> Any:
    return typing.ForwardRef(text, is_argument=is_argument, module=module, is_class=is_class)


_values: dict[int, list[Any]] = {}  # of aliases whose state has not been read yet, by id


def _alias(name: str) -> Any:
    value: list[Any] = []
    names: dict[str, Any] = {"__name__": "__main__", "_value": value}
    exec(f"type {name} = _value[0]", names)  # evaluated when it is read; a syntax of Python 3.12
    _values[id(names[name])] = value
    return names[name]


def _set_value(alias: Any, value: Any) -> None:
    _values.pop(id(alias)).append(value)


def _generic_alias(name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    names: dict[str, Any] = {"__name__": "__main__", "typing": typing, "given": (name, value)}
    exec("alias = typing.TypeAliasType(*given, type_params=parameters)", {**names, "parameters": parameters}, names)
    return names["alias"]
