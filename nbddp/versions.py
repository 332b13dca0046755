"""Compares what must match where objects are pickled and where they are unpickled: versions, and the copy of nbddp."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

__version__ = "0.1.0"

_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

# For an interpreter that has not imported nbddp. It does not use or change sys.path, which may find another copy first.
_SOURCE = """
import sys
from importlib import machinery, util
spec = machinery.PathFinder.find_spec("nbddp", [{folder!r}])
if spec is not None:
    sys.modules["nbddp"] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
"""


def versions() -> dict[str, str]:
    """The versions of Python (major and minor) and of the packages, without a build's suffix (``+cu128``)."""
    from importlib import metadata  # takes 10 ms, which `import nbddp` saves

    python = ".".join(platform.python_version_tuple()[:2])
    packages = {name: metadata.version(name).partition("+")[0] for name in ("torch", "cloudpickle")}
    return {"Python": python, **packages, "nbddp": __version__}


def difference(there: Mapping[str, str]) -> tuple[str, str]:
    """The differing versions, there and here: ``("torch 2.12.0", "torch 2.13.0")``; empty strings if all are equal."""
    here = versions()
    names = [name for name in here if there.get(name) != here[name]]
    theirs = ", ".join(f"{name} {there.get(name, '(none)')}" for name in names)
    return theirs, ", ".join(f"{name} {here[name]}" for name in names)


def package_folder() -> str:
    """The folder that holds the package nbddp which this process has imported."""
    return _FOLDER


def import_source() -> str:
    """Python source that imports this copy of nbddp in a new interpreter."""
    return _SOURCE.format(folder=_FOLDER)


def difference_of_copies(notebooks: str, ranks: str) -> str:
    """What to do if notebook and rank have different copies; "" if not. Both arguments are a :func:`package_folder`."""
    if notebooks == ranks:
        return ""
    return (
        f"the notebook has imported nbddp from {notebooks}, and this rank from {ranks or 'an older copy'}. "
        f"Uninstall one of the two, or put {notebooks} first on PYTHONPATH, and restart the kernel"
    )
