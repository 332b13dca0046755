"""Sends the user's own modules along with functions that use them, as source, to machines that may not have the files.

In the notebook: which modules the objects and functions of a payload lead to. In a rank: an importer of these modules,
under the notebook's own file names, so that a traceback shows the lines of the notebook's files.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_MAX_NBYTES = 4 << 20  # of one source file; what is larger is data


@dataclass(frozen=True)
class Source:
    """One module's source.

    Attributes:
        path: the file on the notebook's machine; a folder for a package without ``__init__.py``.
    """

    path: str
    is_package: bool
    code: bytes


# ---------------------------------------------------------------------------- in the notebook


def sources(
    names: Iterable[str], codes: Iterable[types.CodeType], texts: Iterable[str], folders: Sequence[str]
) -> dict[str, Source]:
    """Return the modules in these folders that a payload leads to, by name, with all that those import in turn.

    Args:
        names: of modules that objects of the payload come from.
        codes: functions that are sent by value; the imports in them count, too.
        texts: cells.
        folders: the user's own, in the order of ``sys.path``.
    """
    found: dict[str, Source] = {}
    waiting = [*names, *(name for code in codes for name in _imported_by(code))]
    for text in texts:
        with contextlib.suppress(SyntaxError):  # a magic; the rank says what is wrong
            waiting += _imports(text.encode(), "")
    seen = {"nbddp"}
    while waiting:
        name = waiting.pop()
        parent = name.rpartition(".")[0]
        if name in seen or name.partition(".")[0] in ("nbddp", *sys.builtin_module_names):
            continue
        seen.add(name)
        source = _find(name, folders)
        if source is None:
            continue
        found[name] = source
        waiting += [*([parent] if parent else []), *_imports_of(source, name)]
    return found


def _imported_by(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the modules that a function imports, and of what it imports from them."""
    instructions = list(dis.get_instructions(code))
    for at, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            name = str(instruction.argval)
            yield name
            for following in instructions[at + 1 :]:
                if following.opname == "IMPORT_FROM":
                    yield f"{name}.{following.argval}"
                elif following.opname == "IMPORT_NAME":
                    break
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imported_by(constant)


def _find(name: str, folders: Sequence[str]) -> Source | None:
    """Return the source of a module that lies in one of these folders, or is loaded from outside of Python's own."""
    inside = name.replace(".", os.sep)
    for folder in folders:
        path = os.path.join(folder, inside)
        for file, is_package in ((os.path.join(path, "__init__.py"), True), (f"{path}.py", False)):
            if (code := _read(file)) is not None:
                return Source(file, is_package, code)
    for folder in folders:
        if os.path.isdir(path := os.path.join(folder, inside)) and _holds_python(path):
            return Source(path, True, b"")
    return None


def _holds_python(folder: str) -> bool:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(entry.name.endswith(".py") for entry in entries)
    return False


def _read(path: str) -> bytes | None:
    with contextlib.suppress(OSError):
        if os.path.getsize(path) <= _MAX_NBYTES:
            with open(path, "rb") as file:
                return file.read()
    return None


def _imports_of(source: Source, name: str) -> tuple[str, ...]:
    try:
        return _imports(source.code, name if source.is_package else name.rpartition(".")[0])
    except (SyntaxError, ValueError):  # the import on the rank says what is wrong
        return ()


@functools.lru_cache(maxsize=4096)
def _imports(code: bytes, package: str) -> tuple[str, ...]:
    """Return the names of the modules that this source imports, and of what it imports from them."""
    names: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(name for name in names if name)


# ---------------------------------------------------------------------------- in a rank


class Importer(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the modules that came with the payload, before those of the same name on this machine."""

    def __init__(self, carried: dict[str, Source]) -> None:
        self._carried = carried

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        source = self._carried.get(fullname)
        if source is None:
            return None
        spec = importlib.util.spec_from_loader(fullname, self, origin=source.path, is_package=source.is_package)
        assert spec is not None
        folder = os.path.dirname(source.path) if source.code or not source.is_package else source.path
        if source.is_package and any((folder + os.sep).startswith(entry + os.sep) for entry in sys.path if entry):
            spec.submodule_search_locations = [folder]  # for what was not found in the source, and compiled modules
        spec.has_location = bool(source.code) or not source.is_package
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        source = self._carried[module.__name__]
        if source.code:
            text = importlib.util.decode_source(source.code)
            linecache.cache[source.path] = (len(text), None, text.splitlines(keepends=True), source.path)
        super().exec_module(module)

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._carried[fullname].code)

    def get_code(self, fullname: str) -> types.CodeType:
        source = self._carried[fullname]
        return compile(source.code, source.path, "exec", dont_inherit=True)

    def is_package(self, fullname: str) -> bool:
        return self._carried[fullname].is_package


def install(carried: dict[str, Source]) -> None:
    """Import these modules from their carried sources from now on."""
    if carried:
        sys.meta_path.insert(0, Importer(carried))
