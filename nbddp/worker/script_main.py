"""Runs a script or a module on this rank, as its ``__main__``."""

import io
import os
import runpy
import sys
import types
from multiprocessing.reduction import ForkingPickler

from nbddp.helpers import context


def run_script(path: str, argv: tuple[tuple[str, ...], ...], module: bool) -> None:
    """Do what ``python path ARGS`` or ``python -m path ARGS`` does; ``argv`` has the arguments of each rank."""
    del ForkingPickler.reducer_override  # processes that it spawns import the file, as they can't a notebook
    sys.argv = [path, *argv[context.rank()]]
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(path, run_name="__main__", alter_sys=True)
        return
    file = os.path.abspath(path)
    sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = file
    with io.open_code(file) as opened:
        code = compile(opened.read(), file, "exec", dont_inherit=True)
    exec(code, vars(main))
