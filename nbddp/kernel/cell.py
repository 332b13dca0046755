"""Kernel side. The body of a ``%%ddp`` cell as source text: what it needs, what it sets, what cannot run on a rank."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nbddp.errors import LaunchError

_FOR_THE_NOTEBOOK = re.compile(r"^\s*([%!?])|=\s*([%!])\s*\w|(\?)\s*$")
_CELL_ONLY = {
    "get_ipython": "there is no IPython on a rank: do this in a cell of its own",
    "display": "display() is the notebook's: make the value the cell's last line, or bring it back with -o",
}


@dataclass(frozen=True)
class Names:
    """Of a cell's body.

    Attributes:
        needed: names that it reads before it sets them, so that they come from elsewhere.
        bound: names that it sets, in ``__main__``.
        open_ended: does it set names that cannot be seen (``from x import *``)?
    """

    needed: frozenset[str]
    bound: frozenset[str]
    open_ended: bool


def parse(source: str, filename: str) -> ast.Module:
    """The cell's syntax tree, if every rank can run it.

    Raises:
        LaunchError: it holds what only the notebook can run, with the line. SyntaxError: it is no Python.
    """
    try:
        tree = ast.parse(source, filename)
    except SyntaxError as error:
        if magic := _magic_at(source, error.lineno):
            raise LaunchError(f"line {error.lineno}: {magic}") from None
        raise
    for node in _awaiting(tree.body):
        raise LaunchError(
            f"line {node.lineno}: a rank has no running event loop to await in; "
            "put it into an async function and call asyncio.run()"
        )
    compile(tree, filename, "exec", dont_inherit=True)  # a return outside of a function, say
    if not tree.body:
        raise LaunchError("the cell has no line to run on the ranks")
    return tree


def names_of(tree: ast.Module) -> Names:
    """Which names the cell takes from the notebook, and which it sets."""
    reading = _Reading()
    bound: set[str] = set()
    reading.run(tree.body, bound)
    reading.finish(bound)
    tables = list(_with_children(_table(tree)))
    stars = any(isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in ast.walk(tree))
    return Names(
        needed=frozenset(reading.needed),
        bound=frozenset(
            s.get_name()
            for i, table in enumerate(tables)
            for s in table.get_symbols()
            if (s.is_assigned() or s.is_imported()) and (i == 0 or s.is_declared_global())
        ),
        open_ended=stars,
    )


def refuse_notebook_names(tree: ast.Module, names: Iterable[str]) -> None:
    """Raise ``LaunchError`` where the cell uses one of ``names``, which exist in a notebook only."""
    wanted = set(names) & set(_CELL_ONLY)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in wanted:
            raise LaunchError(f"line {node.lineno}: {_CELL_ONLY[node.id]}")


def _magic_at(source: str, line_number: int | None) -> str:
    """Why ranks cannot run that line, if it is IPython's own syntax."""
    lines = source.splitlines()
    if line_number is None or not 0 < line_number <= len(lines):
        return ""
    line = lines[line_number - 1].strip()
    found = _FOR_THE_NOTEBOOK.search(line)
    if found is None:
        return ""
    kind = {"%": "a magic", "!": "a shell command", "?": "a question"}[next(filter(None, found.groups()))]
    instead = ", or use subprocess.run() here" if kind == "a shell command" else ""
    return f"`{line}` is {kind} for the notebook, which ranks do not have; put it into a cell of its own{instead}"


def _awaiting(body: Iterable[ast.AST]) -> Iterator[ast.expr | ast.stmt]:
    """Every await of the cell itself, not those in its async functions."""
    for node in body:
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            yield node
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)) and any(g.is_async for g in node.generators):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)):
            yield from _awaiting(ast.iter_child_nodes(node))


# ---------------------------------------------------------------------------- reading order


class _Reading:
    """Goes through the statements in their order and notes what is read before it is set.

    What a function reads counts when the function itself is first used. Bodies of loops count as run,
    branches as perhaps run: of those, only what every one sets is set afterwards.
    """

    def __init__(self) -> None:
        self.needed: set[str] = set()
        self._later: dict[str, set[str]] = {}  # by function or class: the globals that its code reads

    def run(self, body: Iterable[ast.stmt], bound: set[str]) -> None:
        for node in body:
            self._statement(node, bound)

    def finish(self, bound: set[str]) -> None:
        """Functions that nobody has used by name: a decorator may have kept them."""
        while self._later:
            self._read(self._later.popitem()[1], bound)

    def _statement(self, node: ast.stmt, bound: set[str]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._definition(node, bound)
        elif isinstance(node, ast.If):
            self._expression(node.test, bound)
            self._branches([node.body, node.orelse], bound)
        elif isinstance(node, (ast.For, ast.While)):
            self._expression(node.iter if isinstance(node, ast.For) else node.test, bound)
            self._assign(node.target if isinstance(node, ast.For) else None, bound)
            self.run([*node.body, *node.orelse], bound)
        elif isinstance(node, ast.With):
            for item in node.items:
                self._expression(item.context_expr, bound)
                self._assign(item.optional_vars, bound)
            self.run(node.body, bound)
        elif isinstance(node, ast.Try):
            self._try(node, bound)
        else:
            self._simple(node, bound)

    def _branches(self, bodies: Iterable[list[ast.stmt]], bound: set[str]) -> None:
        outcomes = []
        for body in bodies:
            self.run(body, outcome := set(bound))
            outcomes.append(outcome)
        bound |= set.intersection(*outcomes)

    def _try(self, node: ast.Try, bound: set[str]) -> None:
        for handler in node.handlers:
            if handler.type is not None:
                self._expression(handler.type, bound)
        # A handler's name is known in its body alone.
        named = {handler.name for handler in node.handlers if handler.name} - bound
        bound |= named
        self._branches([[*node.body, *node.orelse], *(handler.body for handler in node.handlers)], bound)
        bound -= named
        self.run(node.finalbody, bound)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, bound: set[str]) -> None:
        table = _table(ast.Module([node], []))
        self._read(_referenced(table), bound)
        own = {node.name}
        for child in table.get_children():
            if child.get_type() == "class":
                self._read(_globals(child) - own, bound)
        self._later[node.name] = _read_below(table)
        bound.add(node.name)

    def _simple(self, node: ast.stmt, bound: set[str]) -> None:
        table = _table(ast.Module([node], []))
        self._read(_referenced(table) | _read_below(table), bound)
        if isinstance(node, ast.AugAssign):  # reads its target, which no table says
            self._read(_targets([node.target]), bound)
        if isinstance(node, ast.Delete):
            self._read(gone := _targets(node.targets), bound)
            bound -= gone
            return
        bound |= {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}

    def _assign(self, target: ast.expr | None, bound: set[str]) -> None:
        if target is None:
            return
        # a[i] as a target sets no name, and reads two.
        self._read({n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}, bound)
        bound |= _targets([target])

    def _expression(self, node: ast.expr, bound: set[str]) -> None:
        self._simple(ast.Expr(node), bound)

    def _read(self, names: Iterable[str], bound: set[str]) -> None:
        for name in names:
            if name not in bound:
                self.needed.add(name)
            elif name in self._later:
                self._read(self._later.pop(name), bound)


def _table(tree: ast.Module) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(ast.fix_missing_locations(tree)), "<cell>", "exec")


def _with_children(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _with_children(child)


def _referenced(table: symtable.SymbolTable) -> set[str]:
    return {s.get_name() for s in table.get_symbols() if s.is_referenced()}


def _globals(table: symtable.SymbolTable) -> set[str]:
    return {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}


def _read_below(table: symtable.SymbolTable) -> set[str]:
    """The globals that the functions, classes and comprehensions in it read."""
    return {name for child in table.get_children() for t in _with_children(child) for name in _globals(t)}


def _targets(nodes: Iterable[ast.expr]) -> set[str]:
    """The plain names among assignment targets; ``a.b`` and ``a[0]`` set no name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.Tuple, ast.List)):
            found |= _targets(node.elts)
        elif isinstance(node, ast.Starred):
            found |= _targets([node.value])
    return found
