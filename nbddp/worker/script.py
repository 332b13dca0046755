"""Runs the body of a ``%%ddp`` cell, or a whole script, as this rank's ``__main__``."""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

from nbddp.payload import partial
from nbddp.worker import context, main_module

_VALUE = "nbddp: value of the cell"  # no name that a cell can have


@dataclass(frozen=True)
class Cell:
    """The body of a cell.

    Attributes:
        source: whole lines; those before the body as comments.
        filename: the cell's name in the notebook's tracebacks.
        outputs: names that the first of these ranks returns.
        ranks: that run the cell, in order; the others only get its names.
    """

    source: str
    filename: str
    outputs: tuple[str, ...]
    ranks: Sequence[int]


@dataclass(frozen=True)
class CellResult:
    """A cell's result on one rank: the value of its last expression, and, on the first rank, its ``outputs``."""

    value: Any
    outputs: dict[str, Any]


def texts(args: Iterable[Any]) -> Iterator[str]:
    """Yield the source of the cells and scripts among these arguments of a call."""
    for arg in args:
        if isinstance(arg, Cell):
            yield arg.source
        elif isinstance(arg, Script):
            with contextlib.suppress(OSError), open(arg.path, encoding="utf-8", errors="replace") as file:
                yield file.read()  # without the file, the call raises


def run_cell(cell: Cell, /, **names: Any) -> CellResult | None:
    """Execute the cell with the notebook's ``names`` as globals of ``__main__``.

    So the cell's functions and classes see each other, and can be pickled and sent to DataLoader workers by name.
    """
    namespace = sys.modules["__main__"].__dict__
    namespace.update(names)
    predefined = {
        "nbddp": sys.modules["nbddp"],  # not imported: worker/ must not depend on the public package
        "torch": torch,
        "dist": dist,
        "rank": context.rank(),
        "world_size": context.world_size(),
        "device": context.device(),
    }
    for name, value in predefined.items():
        namespace.setdefault(name, value)
    main_module.known.add_variables(names, predefined)
    if context.rank() not in cell.ranks:
        return None
    linecache.cache[cell.filename] = (len(cell.source), None, cell.source.splitlines(keepends=True), cell.filename)
    value = _execute(ast.parse(cell.source, cell.filename), cell.filename, namespace)
    requested = cell.outputs if context.rank() == cell.ranks[0] else ()
    outputs = {name: namespace[name] for name in requested if name in namespace}
    main_module.known.add(outputs)
    # In parts, so that a training's results are not lost because one of them does not pickle, e.g. a generator.
    outputs = {name: partial.of(value, main_module.known) for name, value in outputs.items()}
    if value is None and not outputs:
        return None
    return CellResult(partial.parts_of(value, main_module.known), outputs)


def _execute(tree: ast.Module, filename: str, namespace: dict[str, Any]) -> Any:
    """Run the statements. Returns the value of the last one if it is an expression."""
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        # One code for the whole cell, so that a debugger steps from its other lines to the last one.
        target = ast.copy_location(ast.Name(_VALUE, ast.Store()), last)
        tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
    # dont_inherit: the __future__ imports of this file must not apply to the cell.
    exec(compile(tree, filename, "exec", dont_inherit=True), namespace)
    return namespace.pop(_VALUE, None)


@dataclass(frozen=True)
class Script:
    """A script and its arguments.

    Attributes:
        path: as the user wrote it; ``sys.argv[0]``.
        argv: each rank's arguments, without the path.
    """

    path: str
    argv: tuple[tuple[str, ...], ...]


def run_script(script: Script, /) -> None:
    """Do what ``python script.py ARGS`` does: its folder goes on ``sys.path``, its names into ``__main__``."""
    file = os.path.abspath(script.path)
    sys.argv[:] = [script.path, *script.argv[context.rank()]]
    sys.path.insert(0, os.path.dirname(file))
    main = sys.modules["__main__"]
    main.__dict__.update(__file__=file, __spec__=None, __cached__=None, __package__=None)
    # Processes that the script spawns import the script's file, so its names are not pickled by value as a
    # notebook's are.
    if "reducer_override" in ForkingPickler.__dict__:
        del ForkingPickler.reducer_override
    with io.open_code(file) as opened:
        code = compile(opened.read(), file, "exec", dont_inherit=True)
    exec(code, main.__dict__)
