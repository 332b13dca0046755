"""Calls a function with a module when that has been imported, without importing it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

Callback = Callable[[ModuleType], object]


def after_import(names: Iterable[str], callback: Callback) -> None:
    """Call the function with each of these modules: now if it is imported already, else when it is."""
    waiting = set(names)
    for name in waiting & sys.modules.keys():
        callback(sys.modules[name])
    sys.meta_path.insert(0, _Watch(waiting, callback))


class _Watch(MetaPathFinder):
    """Finds nothing itself. For the modules in question it asks the other finders, and extends what they return."""

    def __init__(self, names: set[str], callback: Callback) -> None:
        self._names = names
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)  # Python, too, passes over finders without it
            if finder is not self and find is not None and (spec := find(fullname, path, target)) is not None:
                with contextlib.suppress(AttributeError):  # a loader of another kind; then nothing is heard
                    _call_after(spec.loader, self._callback)
                return cast(ModuleSpec, spec)
        return None


def _call_after(loader: Any, callback: Callback) -> None:
    """Extend this loader's next execution of a module; the loader itself stays, with its sources and its data."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        callback(module)

    loader.exec_module = exec_module
