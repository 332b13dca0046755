"""Analyses the source of a ``%%ddp`` cell: the names that it needs and binds, and lines that cannot run on a rank."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nbddp.errors import LaunchError
from nbddp.magic.flow import FlowAnalysis, bound_names

_IPYTHON_SYNTAX = re.compile(r"^\s*([%!?])|=\s*([%!])\s*\w|(\?)\s*$")
_LOOKS_UP_NAMES = {"eval", "exec", "globals", "locals", "vars"}
_NOTEBOOK_ONLY = {
    "get_ipython": "a rank has no IPython: use a separate cell without %%ddp",
    "display": "a rank has no display(): make the value the cell's last line, or return it with -o",
}


@dataclass(frozen=True)
class Names:
    """The names of a cell.

    Attributes:
        needed: names that it may read before it has bound them, so that they come from the notebook.
        optional: those of ``needed`` that it may also have bound itself by then.
        bound: names that it binds in ``__main__``.
        binds_unknown: whether it may bind names that its source does not show (``from x import *``, ``exec``).
    """

    needed: frozenset[str]
    optional: frozenset[str]
    bound: frozenset[str]
    binds_unknown: bool


def parse(source: str, filename: str) -> ast.Module:
    """Return the cell's syntax tree.

    Raises:
        LaunchError: a line cannot run on a rank. SyntaxError: the cell is not Python.
    """
    try:
        tree = ast.parse(source, filename)
    except SyntaxError as error:
        if why := _magic_error(source, error.lineno):
            raise LaunchError(f"line {error.lineno}: {why}") from None
        raise
    for node in _top_level_awaits(tree.body):
        raise LaunchError(
            f"line {node.lineno}: a rank has no running event loop for await; use an async function and asyncio.run()"
        )
    compile(tree, filename, "exec", dont_inherit=True)  # finds a return outside of a function, for example
    if not tree.body:
        raise LaunchError("the cell has no statement to run on the ranks")
    return tree


def names_of(tree: ast.Module, outputs: Iterable[str] = ()) -> Names:
    """Find the names that the cell needs from the notebook and those that it binds.

    Args:
        outputs: names whose values are returned to the notebook at the cell's end.
    """
    nodes = list(ast.walk(tree))
    called = {node.id for node in nodes if isinstance(node, ast.Name)}
    stars = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
    binds_unknown = stars or "exec" in called
    bound = bound_names(tree)
    flow = FlowAnalysis(bound)
    flow.finish(flow.run(tree.body, frozenset()), outputs if binds_unknown else bound.intersection(outputs))
    in_strings = _names_in_strings(nodes) if called & _LOOKS_UP_NAMES else set[str]()
    needed = frozenset(flow.needed | in_strings)
    return Names(needed, needed if binds_unknown else needed - flow.required, bound, binds_unknown)


def refuse_notebook_names(tree: ast.Module, names: Iterable[str]) -> None:
    """Raise ``LaunchError`` where the cell uses one of ``names`` that exists in a notebook only."""
    refused = set(names) & set(_NOTEBOOK_ONLY)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in refused:
            raise LaunchError(f"line {node.lineno}: {_NOTEBOOK_ONLY[node.id]}")


def _magic_error(source: str, line_number: int | None) -> str:
    """Return why ranks cannot run a line of IPython syntax; "" if the line is not IPython syntax."""
    lines = source.splitlines()
    if line_number is None or not 0 < line_number <= len(lines):
        return ""
    line = lines[line_number - 1].strip()
    found = _IPYTHON_SYNTAX.search(line)
    if found is None:
        return ""
    kind = {"%": "a magic", "!": "a shell command", "?": "a help request"}[next(filter(None, found.groups()))]
    instead = ", or call subprocess.run() here" if kind == "a shell command" else ""
    return f"`{line}` is {kind} of IPython, which ranks do not have; move it to a separate cell{instead}"


def _top_level_awaits(body: Iterable[ast.AST]) -> Iterator[ast.expr | ast.stmt]:
    """Yield each await of the cell itself, not those in its async functions."""
    for node in body:
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            yield node
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)) and any(g.is_async for g in node.generators):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)):
            yield from _top_level_awaits(ast.iter_child_nodes(node))


def _names_in_strings(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names in strings that may be code or a key of ``globals()``."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            with contextlib.suppress(SyntaxError, ValueError):
                found |= {inner.id for inner in ast.walk(ast.parse(node.value)) if isinstance(inner, ast.Name)}
    return found
