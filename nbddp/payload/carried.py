"""The notebook's own modules, for nodes without its folders: sent as source, imported under their own names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import util
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from nbddp.errors import LaunchError

Modules = dict[str, tuple[str, bytes]]
_MOST_BYTES = 8 << 20


def sources(folders: Iterable[str]) -> Modules:
    """Return file and source by name: the modules and packages in these folders, and what was imported from there."""
    found: dict[str, str] = {}
    for folder in map(Path, folders):
        packages = [init.parent for init in folder.glob("*/__init__.py")]
        for file in [*folder.glob("*.py"), *(file for package in packages for file in package.rglob("*.py"))]:
            parts = file.relative_to(folder).with_suffix("").parts
            found.setdefault(".".join(parts[:-1] if parts[-1] == "__init__" else parts), str(file))
        inside = os.path.join(folder, "")
        for name, module in list(sys.modules.items()):  # also of packages without an __init__.py
            path = getattr(module, "__file__", None) or ""
            if path.endswith(".py") and path.startswith(inside) and name != "__main__":
                found.setdefault(name, path)
    modules = {name: (path, Path(path).read_bytes()) for name, path in found.items() if name}
    if sum(len(source) for _, source in modules.values()) > _MOST_BYTES:
        raise LaunchError("the modules next to the notebook are too large to send: install them on the nodes")
    return modules


class Importer(MetaPathFinder, SourceLoader):  # type: ignore[misc]
    """Imports these modules before those of the same name on this machine."""

    def __init__(self, modules: Modules) -> None:
        self._modules, self._sources = modules, dict(modules.values())

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in self._modules:
            return util.spec_from_file_location(fullname, self.get_filename(fullname), loader=self)
        if any(name.startswith(f"{fullname}.") for name in self._modules):  # a package without an __init__.py
            return util.spec_from_loader(fullname, None, is_package=True)
        return None

    def get_filename(self, fullname: str) -> str:
        return self._modules[fullname][0]

    def get_data(self, path: str) -> bytes:
        return self._sources[path]
