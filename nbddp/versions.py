"""Both sides. The versions that must be the same where something is pickled and where it is read."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

import nbddp


def versions() -> dict[str, str]:
    """Of Python, by its first two numbers, and of the packages; without what names a build (``+cu128``)."""
    python = ".".join(platform.python_version_tuple()[:2])
    packages = {name: metadata.version(name).partition("+")[0] for name in ("torch", "cloudpickle")}
    return {"Python": python, **packages, "nbddp": nbddp.__version__}


def difference(there: Mapping[str, str]) -> tuple[str, str]:
    """What differs: theirs, and ours, e.g. ``("torch 2.12.0", "torch 2.13.0")``; two empty strings if nothing does."""
    here = versions()
    names = [name for name in here if there.get(name) != here[name]]
    theirs = ", ".join(f"{name} {there.get(name, '(none)')}" for name in names)
    return theirs, ", ".join(f"{name} {here[name]}" for name in names)
