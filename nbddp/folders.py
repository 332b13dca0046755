"""Both sides. Which folders of a module search path are the user's: those that may hold modules of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def users(path: Iterable[str]) -> list[str]:
    """The folders on ``path`` that exist and do not belong to this Python or its packages, absolute, each once."""
    pythons = {os.path.realpath(prefix) + os.sep for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found = dict.fromkeys(os.path.realpath(folder or os.curdir) for folder in path)
    return [folder for folder in found if os.path.isdir(folder) and not (folder + os.sep).startswith(tuple(pythons))]


def first(folders: Iterable[str], path: Iterable[str]) -> list[str]:
    """``path`` after those of the folders that exist here: as in the notebook, modules there hide installed ones."""
    there = [folder for folder in folders if os.path.isdir(folder)]
    return [*there, *(folder for folder in path if folder not in there)]
