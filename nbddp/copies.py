"""Both sides. Which copy of nbddp this is: with a checkout and an installed one, the ranks must have the notebook's."""

from __future__ import annotations

import os

_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

# In an interpreter that has imported nothing of ours. sys.path stays as it is: it may find another copy first.
_SOURCE = """
import sys
from importlib import machinery, util
spec = machinery.PathFinder.find_spec("nbddp", [{folder!r}])
if spec is not None:
    sys.modules["nbddp"] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
"""


def folder() -> str:
    """Where this process has imported nbddp from: the folder that holds the package."""
    return _FOLDER


def import_source() -> str:
    """Python source that imports this copy of nbddp in a new interpreter."""
    return _SOURCE.format(folder=_FOLDER)


def difference(notebooks: str, ranks: str) -> str:
    """What to do about two copies; "" if it is one. Both are a :func:`folder`."""
    if notebooks == ranks:
        return ""
    return (
        f"the notebook has imported nbddp from {notebooks}, and this rank from {ranks or 'an older copy'}. "
        f"Uninstall one of the two, or put {notebooks} first on PYTHONPATH, and restart the kernel"
    )
