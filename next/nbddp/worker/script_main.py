"""Runs a script on this rank, as its ``__main__``."""

from __future__ import annotations

import io
import os
import sys
import types
from multiprocessing.reduction import ForkingPickler

from nbddp.helpers import context


def run_script(path: str, argv: tuple[tuple[str, ...], ...]) -> None:
    """Do what ``python path ARGS`` does; ``argv`` has the arguments of each rank."""
    file = os.path.abspath(path)
    sys.argv = [path, *argv[context.rank()]]
    sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = file
    del ForkingPickler.reducer_override  # processes that it spawns import the file, as they can't a notebook
    with io.open_code(file) as opened:
        code = compile(opened.read(), file, "exec", dont_inherit=True)
    exec(code, vars(main))
