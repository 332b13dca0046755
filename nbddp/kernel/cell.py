"""Kernel side. The body of a ``%%ddp`` cell as source text: what it needs, what it sets, what cannot run on a rank."""

from __future__ import annotations

import ast
import contextlib
import re
import symtable
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

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
        needed: names that it may read before it has set them, so that they come from elsewhere.
        perhaps: those of them that it may have set itself by then.
        bound: names that it sets, in ``__main__``.
        open_ended: does it set names that cannot be seen (``from x import *``, ``exec``)?
    """

    needed: frozenset[str]
    perhaps: frozenset[str]
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


def names_of(tree: ast.Module, outputs: Iterable[str] = ()) -> Names:
    """Which names the cell takes from the notebook, and which it sets.

    Args:
        outputs: names that are brought back at the cell's end.
    """
    nodes = list(ast.walk(tree))
    called = {node.id for node in nodes if isinstance(node, ast.Name)}
    stars = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
    open_ended = stars or "exec" in called
    bound = _bound(tree)
    reading = _Reading(bound)
    reading.finish(reading.run(tree.body, frozenset()), outputs if open_ended else bound.intersection(outputs))
    looked_up = _named_in_strings(nodes) if called & _LOOKS_UP_NAMES else set[str]()
    needed = frozenset(reading.needed | looked_up)
    return Names(needed, needed if open_ended else needed - reading.certain, bound, open_ended)


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

_State = Union[frozenset[str], None]
_LOOKS_UP_NAMES = {"eval", "exec", "globals", "locals", "vars"}
_CALLS_NOTHING = {"property", "staticmethod", "classmethod"}


class _Reading:
    """Goes through the statements and notes every name that may be read while it is still the notebook's.

    A state holds the names that the cell has surely set or deleted by then, whichever way it took; None: the cell
    never gets there. States only grow along a way, since what was overwritten does not come back. So the body of a
    loop and the handler of an exception begin with the state before the loop or the ``try``, and where ways meet,
    the names that each of them has set remain. In a class's body ``".x"`` stands for the ``x`` of the class.

    What a function reads counts wherever the function's name is read.
    """

    def __init__(self, bound: frozenset[str]) -> None:
        self.needed: set[str] = set()
        self.certain: set[str] = set()  # of the needed, those that the cell cannot have set itself by then
        self._bound = bound
        self._set_above: set[str] = set()
        self._later: dict[str, set[str]] = {}  # by function or class: the globals that its code reads
        self._breaks: list[list[_State]] = []
        self._hidden: frozenset[str] = frozenset()  # loop variables of comprehensions, type parameters
        self._classes: list[_ClassBody] = []

    def run(self, body: Iterable[ast.stmt], state: _State) -> _State:
        for node in body:
            if state is None:
                return None
            state = self._statement(node, state)
        return state

    def finish(self, state: _State, outputs: Iterable[str]) -> None:
        """At the end: names to bring back, and functions that nobody has used by name."""
        if state is None:
            return
        for name in outputs:
            self._read(name, state)
        for reads in list(self._later.values()):
            self._read_by_function(reads, state)

    # ------------------------------------------------------------------ statements

    def _statement(self, node: ast.stmt, state: frozenset[str]) -> _State:
        special = _STATEMENTS.get(type(node).__name__)
        if special is not None:
            return special(self, node, state)
        return self._expression(node, state)

    def _if(self, node: ast.If, state: frozenset[str]) -> _State:
        state = self._expression(node.test, state)
        truth = _truth(node.test)
        return _meet(
            None if truth is False else self.run(node.body, state),
            None if truth is True else self.run(node.orelse, state),
        )

    def _for(self, node: ast.For, state: frozenset[str]) -> _State:
        state = self._expression(node.iter, state)
        return self._loop(node, self._assign(node.target, state), state)

    def _while(self, node: ast.While, state: frozenset[str]) -> _State:
        state = self._expression(node.test, state)
        return self._loop(node, state, None if _truth(node.test) else state)

    def _loop(self, node: ast.For | ast.While, inside: frozenset[str], unbroken: _State) -> _State:
        self._breaks.append([])
        self.run(node.body, inside)
        breaks = self._breaks.pop()
        return _meet(self.run(node.orelse, unbroken), *breaks)

    def _break(self, node: ast.Break, state: frozenset[str]) -> _State:
        self._breaks[-1].append(state)
        return None

    def _jump(self, node: ast.Continue | ast.Raise, state: frozenset[str]) -> _State:
        self._expression(node, state)
        return None

    def _with(self, node: ast.With, state: frozenset[str]) -> _State:
        before = inside = self._expression(node.items[0].context_expr, state)
        for number, item in enumerate(node.items):
            inside = self._expression(item.context_expr, inside) if number else inside
            inside = self._assign(item.optional_vars, inside) if item.optional_vars else inside
        self.run(node.body, inside)
        return before  # all that came then may have been cut short by an error that the context manager suppresses

    def _try(self, node: ast.Try, state: frozenset[str]) -> _State:
        ends = [self.run([*node.body, *node.orelse], state)]
        for handler in node.handlers:
            inside = self._expression(handler.type, state) if handler.type else state
            inside = self._bind({handler.name}, inside) if handler.name else inside
            ends.append(self.run(handler.body, inside))
        after, last = _meet(*ends), self.run(node.finalbody, state)
        return None if after is None or last is None else after | last

    def _match(self, node: ast.Match, state: frozenset[str]) -> _State:
        state = self._expression(node.subject, state)
        ends: list[_State] = []
        for case in node.cases:
            inside = self._expression(case.pattern, state)
            inside = self._bind(_captured(case.pattern), inside)
            inside = self._expression(case.guard, inside) if case.guard else inside
            ends.append(self.run(case.body, inside))
        return _meet(*ends) if _matches_all(node.cases[-1]) else _meet(state, *ends)

    def _assignment(self, node: ast.Assign, state: frozenset[str]) -> _State:
        state = self._expression(node.value, state)
        for target in node.targets:
            state = self._assign(target, state)
        return state

    def _annotated(self, node: ast.AnnAssign, state: frozenset[str]) -> _State:
        state = self._expression(node.annotation, state)
        if node.value is None:
            return state
        return self._assign(node.target, self._expression(node.value, state))

    def _augmented(self, node: ast.AugAssign, state: frozenset[str]) -> _State:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id, state)
        return self._assign(node.target, self._expression(node.value, state))

    def _delete(self, node: ast.Delete, state: frozenset[str]) -> _State:
        for name in _targets(node.targets):
            self._read(name, state)
        for target in node.targets:
            state = self._assign(target, state)
        return state

    def _import(self, node: ast.Import | ast.ImportFrom, state: frozenset[str]) -> _State:
        return self._bind({(a.asname or a.name.partition(".")[0]) for a in node.names} - {"*"}, state)

    def _assert(self, node: ast.Assert, state: frozenset[str]) -> _State:
        state = self._expression(node.test, state)
        if node.msg is not None:
            self._expression(node.msg, state)
        return state

    def _type_alias(self, node: Any, state: frozenset[str]) -> _State:
        self._read_by_function(_read_inside(node), _of_module(state))
        return self._assign(node.name, state)

    # ------------------------------------------------------------------ functions and classes

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, state: frozenset[str]) -> _State:
        state = self._in_order(node.decorator_list, state)
        with self._hiding(_type_parameters(node)):
            state = self._in_order([node.args, *([node.returns] if node.returns else [])], state)
        reads = _read_inside(node)
        self._set_above.update(name for n in ast.walk(node) if isinstance(n, ast.Global) for name in n.names)
        if not all(isinstance(d, ast.Name) and d.id in _CALLS_NOTHING for d in node.decorator_list):
            self._read_by_function(reads, _of_module(state))  # the decorator may call it, or keep it
        for owner in (node.name, *(outer.name for outer in self._classes)):
            self._later.setdefault(owner, set()).update(reads)
        return self._bind({node.name}, state)

    def _class(self, node: ast.ClassDef, state: frozenset[str]) -> _State:
        state = self._in_order(node.decorator_list, state)
        with self._hiding(_type_parameters(node)):
            state = self._in_order([*node.bases, *node.keywords], state)
            self._classes.append(_ClassBody(node.name, _deleted(node.body)))
            ended = self.run(node.body, _of_module(state))
            self._classes.pop()
        if ended is None:
            return None
        if node.decorator_list or node.bases or node.keywords:  # each of these may call its methods at once
            self._read_by_function(self._later.get(node.name, ()), _of_module(state))
        return self._bind({node.name}, state)

    # ------------------------------------------------------------------ expressions

    def _expression(self, node: ast.AST, state: frozenset[str]) -> frozenset[str]:
        special = _EXPRESSIONS.get(type(node).__name__)
        if special is not None:
            return special(self, node, state)
        return self._in_order(ast.iter_child_nodes(node), state)

    def _in_order(self, nodes: Iterable[ast.AST], state: frozenset[str]) -> frozenset[str]:
        for node in nodes:
            state = self._expression(node, state)
        return state

    def _name(self, node: ast.Name, state: frozenset[str]) -> frozenset[str]:
        if isinstance(node.ctx, ast.Load):
            self._read(node.id, state)
        return state

    def _walrus(self, node: ast.NamedExpr, state: frozenset[str]) -> frozenset[str]:
        return self._bind({node.target.id}, self._expression(node.value, state))

    def _and_or(self, node: ast.BoolOp, state: frozenset[str]) -> frozenset[str]:
        state = self._expression(node.values[0], state)
        self._in_order(node.values[1:], state)
        return state

    def _comparison(self, node: ast.Compare, state: frozenset[str]) -> frozenset[str]:
        state = self._in_order([node.left, node.comparators[0]], state)
        self._in_order(node.comparators[1:], state)
        return state

    def _choice(self, node: ast.IfExp, state: frozenset[str]) -> frozenset[str]:
        state = self._expression(node.test, state)
        return self._expression(node.body, state) & self._expression(node.orelse, state)

    def _dict(self, node: ast.Dict, state: frozenset[str]) -> frozenset[str]:
        return self._in_order((n for pair in zip(node.keys, node.values) for n in pair if n is not None), state)

    def _lambda(self, node: ast.Lambda, state: frozenset[str]) -> frozenset[str]:
        self._read_by_function(_read_inside(node), _of_module(state))
        return self._expression(node.args, state)

    def _comprehension(self, node: Any, state: frozenset[str]) -> frozenset[str]:
        state = self._expression(node.generators[0].iter, state)
        inside = _of_module(state)
        with contextlib.ExitStack() as stack:
            for number, generator in enumerate(node.generators):
                inside = self._expression(generator.iter, inside) if number else inside
                stack.enter_context(self._hiding(_targets([generator.target])))
                inside = self._in_order([generator.target, *generator.ifs], inside)
            self._in_order([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt], inside)
        return state  # it may have gone round no time at all

    # ------------------------------------------------------------------ names

    def _assign(self, target: ast.expr, state: frozenset[str]) -> frozenset[str]:
        # a[i] as a target sets no name, and reads two.
        return self._bind(_targets([target]), self._expression(target, state))

    def _bind(self, names: Iterable[str], state: frozenset[str]) -> frozenset[str]:
        if not self._classes:
            self._set_above.update(names)
            return state.union(names)
        return state.union(f".{name}" for name in names if name not in self._classes[-1].deleted)

    def _read(self, name: str, state: frozenset[str]) -> None:
        if name in self._hidden or (self._classes and f".{name}" in state):
            return
        if name not in state:
            self.needed.add(name)
            if name not in self._set_above:
                self.certain.add(name)
        self._read_by_function(self._later.get(name, ()), _of_module(state))

    def _read_by_function(self, names: Iterable[str], state: frozenset[str]) -> None:
        """What code reads that runs now, later or never, and so before or after the cell has set it."""
        waiting, seen = set(names), set[str]()
        while waiting:
            seen.add(name := waiting.pop())
            if name not in state:
                self.needed.add(name)
                if name not in self._bound:
                    self.certain.add(name)
            waiting |= self._later.get(name, set()) - seen

    @contextlib.contextmanager
    def _hiding(self, names: Iterable[str]) -> Iterator[None]:
        before, self._hidden = self._hidden, self._hidden.union(names)
        yield
        self._hidden = before


class _ClassBody(NamedTuple):
    """The class whose body is being read, and the names that it deletes: an outer one shows again behind them."""

    name: str
    deleted: set[str]


_STATEMENTS: dict[str, Callable[[_Reading, Any, frozenset[str]], _State]] = {
    "If": _Reading._if,
    "For": _Reading._for,
    "While": _Reading._while,
    "Break": _Reading._break,
    "Continue": _Reading._jump,
    "Raise": _Reading._jump,
    "With": _Reading._with,
    "Try": _Reading._try,
    "TryStar": _Reading._try,
    "Match": _Reading._match,
    "Assign": _Reading._assignment,
    "AnnAssign": _Reading._annotated,
    "AugAssign": _Reading._augmented,
    "Delete": _Reading._delete,
    "Import": _Reading._import,
    "ImportFrom": _Reading._import,
    "Assert": _Reading._assert,
    "TypeAlias": _Reading._type_alias,
    "FunctionDef": _Reading._function,
    "AsyncFunctionDef": _Reading._function,
    "ClassDef": _Reading._class,
}

_EXPRESSIONS: dict[str, Callable[[_Reading, Any, frozenset[str]], frozenset[str]]] = {
    "Name": _Reading._name,
    "NamedExpr": _Reading._walrus,
    "BoolOp": _Reading._and_or,
    "Compare": _Reading._comparison,
    "IfExp": _Reading._choice,
    "Dict": _Reading._dict,
    "Lambda": _Reading._lambda,
    "ListComp": _Reading._comprehension,
    "SetComp": _Reading._comprehension,
    "DictComp": _Reading._comprehension,
    "GeneratorExp": _Reading._comprehension,
}


def _meet(*states: _State) -> _State:
    """What is surely set where ways meet."""
    reached = [state for state in states if state is not None]
    return frozenset.intersection(*reached) if reached else None


def _of_module(state: frozenset[str]) -> frozenset[str]:
    """Without the names of a class's body, which functions and comprehensions in it do not see."""
    return frozenset(name for name in state if not name.startswith("."))


def _truth(test: ast.expr) -> bool | None:
    return bool(test.value) if isinstance(test, ast.Constant) else None


def _captured(pattern: ast.pattern) -> set[str]:
    nodes = list(ast.walk(pattern))
    named = {node.name for node in nodes if isinstance(node, (ast.MatchAs, ast.MatchStar))}
    return {name for name in named | {n.rest for n in nodes if isinstance(n, ast.MatchMapping)} if name is not None}


def _matches_all(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def _type_parameters(node: Any) -> set[str]:
    return {parameter.name for parameter in getattr(node, "type_params", ())}  # Python 3.12


def _deleted(body: Iterable[ast.stmt]) -> set[str]:
    """Names that these statements delete, or that an ``except`` deletes at its end."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    deleted = {name for node in nodes if isinstance(node, ast.Delete) for name in _targets(node.targets)}
    return deleted | {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}


def _bound(tree: ast.Module) -> frozenset[str]:
    """Names that the cell sets in ``__main__``, its functions too."""
    tables = list(_with_children(symtable.symtable(ast.unparse(tree), "<cell>", "exec")))
    return frozenset(
        symbol.get_name()
        for number, table in enumerate(tables)
        for symbol in table.get_symbols()
        if (symbol.is_assigned() or symbol.is_imported()) and (number == 0 or symbol.is_declared_global())
    )


def _read_inside(node: ast.stmt | ast.expr) -> set[str]:
    """The globals that a function reads, and all functions, classes and comprehensions within."""
    statement = node if isinstance(node, ast.stmt) else ast.Expr(node)
    outside = symtable.symtable(ast.unparse(ast.fix_missing_locations(ast.Module([statement], []))), "<cell>", "exec")
    changed = {name for inner in ast.walk(node) for name in _changed(inner)}
    return {
        symbol.get_name()
        for child in outside.get_children()
        for table in _with_children(child)
        for symbol in table.get_symbols()
        if symbol.is_global() and (symbol.is_referenced() or symbol.get_name() in changed)
    }


def _changed(node: ast.AST) -> set[str]:
    """Names that ``x += 1`` and ``del x`` read, which no symbol table says."""
    if isinstance(node, ast.AugAssign):
        return _targets([node.target])
    return _targets(node.targets) if isinstance(node, ast.Delete) else set()


def _named_in_strings(nodes: Iterable[ast.AST]) -> set[str]:
    """Names in the strings that may be code, or a key of ``globals()``."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            with contextlib.suppress(SyntaxError, ValueError):
                found |= {inner.id for inner in ast.walk(ast.parse(node.value)) if isinstance(inner, ast.Name)}
    return found


def _with_children(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _with_children(child)


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
