"""Finds the folders of a module search path that may hold the user's own modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def users(path: Iterable[str]) -> list[str]:
    """The absolute folders on ``path`` that exist and do not belong to this Python or its packages; no duplicates."""
    pythons = {os.path.realpath(prefix) + os.sep for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found = dict.fromkeys(os.path.realpath(folder or os.curdir) for folder in path)
    return [folder for folder in found if os.path.isdir(folder) and not (folder + os.sep).startswith(tuple(pythons))]


def first(folders: Iterable[str], path: Iterable[str]) -> list[str]:
    """``path`` with those of the folders that exist here in front: as in the notebook, they hide installed modules."""
    there = [folder for folder in folders if os.path.isdir(folder)]
    return [*there, *(folder for folder in path if folder not in there)]
