"""Finds out whether the code of a call may stop in the debugger, so that its collectives wait long enough."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

from nbddp.tracebacks import is_in_the_standard_library, library_of
from nbddp.worker import script

_NAMES = {"breakpoint", "set_trace"}
_IN_TEXT = re.compile(r"\b(breakpoint|set_trace)\s*\(")


def are_in(args: Iterable[Any], code: Iterable[Any]) -> bool:
    """Return whether anything here calls a debugger by name.

    Args:
        args: of the call; a cell or a script is one of them.
        code: functions, classes and modules. Modules of installed libraries are left out.
    """
    if any(_IN_TEXT.search(text) for text in script.texts(args)):
        return True
    seen: set[int] = set()
    return any(_NAMES & set(each.co_names) for obj in code for each in _codes(obj, seen))


def _codes(obj: Any, seen: set[int]) -> Iterator[types.CodeType]:
    """Yield the code of a function, or of all that a class or a module defines.

    Only the types of the members are looked at, since an attribute of theirs may be code of a user's or a library's:
    of proxies, and of modules that are imported when they are used.
    """
    kind = type(obj)
    if kind is types.CodeType:
        yield obj
        yield from (code for const in obj.co_consts for code in _codes(const, seen))
    elif kind is types.FunctionType:
        yield from _codes(obj.__code__, seen)
    elif kind in (staticmethod, classmethod):
        yield from _codes(obj.__func__, seen)
    elif kind is property:
        yield from (code for function in (obj.fget, obj.fset, obj.fdel) for code in _codes(function, seen))
    elif (issubclass(kind, type) or _is_users_module(obj)) and id(obj) not in seen:
        seen.add(id(obj))  # classes may refer to each other
        home = obj.__name__ if kind is types.ModuleType else obj.__module__
        for member in list(vars(obj).values()):
            if not _has_module(type(member)) or member.__module__ == home:
                yield from _codes(member, seen)


def _is_users_module(obj: Any) -> bool:
    if type(obj) is not types.ModuleType:  # those of another type may be imported by any access
        return False
    file = str(vars(obj).get("__file__", ""))
    return not is_in_the_standard_library(file) and not any(library_of(["", file]))


def _has_module(kind: type) -> bool:
    """Return whether objects of this type belong to a module: functions and classes."""
    return kind is types.FunctionType or issubclass(kind, type)
