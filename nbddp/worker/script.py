"""Worker side. Source text as this rank's ``__main__``: the body of a ``%%ddp`` cell, or a whole script."""

from __future__ import annotations

import ast
import io
import linecache
import os
import sys
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

import nbddp
from nbddp import remains
from nbddp.worker import context, main_module


@dataclass(frozen=True)
class Cell:
    """The body of a cell.

    Attributes:
        source: whole lines, as many before the body as the cell has.
        filename: what the notebook calls this cell in its tracebacks.
        outputs: names that rank 0 brings back.
    """

    source: str
    filename: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class CellResult:
    """What a cell left on one rank: the value of its last expression, and the names asked for (rank 0)."""

    value: Any
    outputs: dict[str, Any]


def run_cell(cell: Cell, /, **names: Any) -> CellResult:
    """Execute the cell with the notebook's ``names`` as globals of ``__main__``.

    Its own functions and classes then see each other, pickle and reach DataLoader workers by name.
    """
    namespace = sys.modules["__main__"].__dict__
    namespace.update(names)
    ready_made = _ready_made()
    for name, value in ready_made.items():
        namespace.setdefault(name, value)
    main_module.known.add_variables(names, ready_made)
    linecache.cache[cell.filename] = (len(cell.source), None, cell.source.splitlines(keepends=True), cell.filename)
    value = _execute(ast.parse(cell.source, cell.filename), cell.filename, namespace)
    asked_for = cell.outputs if context.is_primary() else ()
    outputs = {name: namespace[name] for name in asked_for if name in namespace}
    main_module.known.add_outputs(outputs)
    # A training is not lost because its last line happens to give a generator, or one of its names holds one.
    outputs = {name: remains.of(value, main_module.known) for name, value in outputs.items()}
    return CellResult(remains.parts_of(value, main_module.known), outputs)


def _ready_made() -> dict[str, Any]:
    return {
        "nbddp": nbddp,
        "torch": torch,
        "dist": dist,
        "rank": context.rank(),
        "world_size": context.world_size(),
        "device": context.device(),
    }


def _execute(tree: ast.Module, filename: str, namespace: dict[str, Any]) -> Any:
    """Run the statements. Returns the value of the last one if that is an expression."""
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        del tree.body[-1]
    # dont_inherit: the __future__ imports of this file are not the cell's.
    exec(compile(tree, filename, "exec", dont_inherit=True), namespace)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), filename, "eval", dont_inherit=True), namespace)


@dataclass(frozen=True)
class Script:
    """A script and its arguments.

    Attributes:
        path: as the user wrote it; ``sys.argv[0]``.
        argv: by rank, without the path.
    """

    path: str
    argv: tuple[tuple[str, ...], ...]


def run_script(script: Script, /) -> None:
    """Be ``python script.py ARGS``: its folder on ``sys.path``, its names in ``__main__``."""
    file = os.path.abspath(script.path)
    sys.argv[:] = [script.path, *script.argv[context.rank()]]
    sys.path.insert(0, os.path.dirname(file))
    main = sys.modules["__main__"]
    main.__dict__.update(__file__=file, __spec__=None, __cached__=None, __package__=None)
    # A process that the script starts by spawn imports it as a file, like any script's; a notebook's
    # names would travel by value.
    if "reducer_override" in ForkingPickler.__dict__:
        del ForkingPickler.reducer_override
    with io.open_code(file) as opened:
        code = compile(opened.read(), file, "exec", dont_inherit=True)
    exec(code, main.__dict__)
