"""Finds the names that a cell may read before it has bound them: a flow analysis of its statements."""

# ruff: noqa: N802, N815 - visit_If and so on are named as in ast.NodeVisitor
from __future__ import annotations

import ast
import contextlib
import symtable
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Union

_State = Union[frozenset[str], None]
_PASSIVE_DECORATORS = {"property", "staticmethod", "classmethod"}


class FlowAnalysis:
    """Visits the statements in order and records every name that may be read before the cell has bound it.

    A state is the set of names that the cell has bound or deleted on every path to a point; None if no path leads
    there. Where paths join, the names bound on all of them remain. Along a path, states only grow: a value from the
    notebook that was overwritten does not come back. So the body of a loop and the handler of an exception begin with
    the state before the loop or the ``try``. In a class's body ``".x"`` stands for the ``x`` of the class.

    The globals that a function reads count wherever the function's name is read.
    """

    def __init__(self, bound: frozenset[str]) -> None:
        self.needed: set[str] = set()
        self.required: set[str] = set()  # those of ``needed`` that the cell cannot have bound itself by then
        self._bound = bound
        self._bound_so_far: set[str] = set()
        self._global_reads: dict[str, set[str]] = {}  # by function or class: the globals that its code reads
        self._break_states: list[list[_State]] = []  # by enclosing loop
        self._hidden: frozenset[str] = frozenset()  # loop variables of comprehensions, type parameters
        self._classes: list[_ClassBody] = []

    def run(self, body: Iterable[ast.stmt], state: _State) -> _State:
        for node in body:
            if state is None:
                return None
            state = self.visit(node, state)
        return state

    def finish(self, state: _State, outputs: Iterable[str]) -> None:
        """Record what is read after the last statement: the outputs, and the globals of all functions."""
        if state is None:
            return
        for name in outputs:
            self._read(name, state)
        for reads in list(self._global_reads.values()):
            self._read_at_any_time(reads, state)

    def visit(self, node: ast.AST, state: frozenset[str]) -> Any:
        """Return the state after this statement or expression; only after a statement can it be None."""
        visitor = getattr(self, f"visit_{type(node).__name__}", None)
        return visitor(node, state) if visitor else self._in_order(ast.iter_child_nodes(node), state)

    # ------------------------------------------------------------------ statements

    def visit_If(self, node: ast.If, state: frozenset[str]) -> _State:
        state = self.visit(node.test, state)
        truth = _constant_truth(node.test)
        return _join(
            None if truth is False else self.run(node.body, state),
            None if truth is True else self.run(node.orelse, state),
        )

    def visit_For(self, node: ast.For, state: frozenset[str]) -> _State:
        state = self.visit(node.iter, state)
        return self._loop(node, self._assign(node.target, state), state)

    def visit_While(self, node: ast.While, state: frozenset[str]) -> _State:
        state = self.visit(node.test, state)
        return self._loop(node, state, None if _constant_truth(node.test) else state)

    def _loop(self, node: ast.For | ast.While, inside: frozenset[str], exhausted: _State) -> _State:
        self._break_states.append([])
        self.run(node.body, inside)
        breaks = self._break_states.pop()
        return _join(self.run(node.orelse, exhausted), *breaks)

    def visit_Break(self, node: ast.Break, state: frozenset[str]) -> _State:
        self._break_states[-1].append(state)
        return None

    def visit_Raise(self, node: ast.Continue | ast.Raise, state: frozenset[str]) -> _State:
        self._in_order(ast.iter_child_nodes(node), state)
        return None

    visit_Continue = visit_Raise

    def visit_With(self, node: ast.With, state: frozenset[str]) -> _State:
        before = inside = self._in_order([node.items[0].context_expr], state)
        for number, item in enumerate(node.items):
            inside = self.visit(item.context_expr, inside) if number else inside
            inside = self._assign(item.optional_vars, inside) if item.optional_vars else inside
        self.run(node.body, inside)
        return before  # an error that the context manager suppresses may have ended the body at any point

    def visit_Try(self, node: ast.Try, state: frozenset[str]) -> _State:
        ends = [self.run([*node.body, *node.orelse], state)]
        for handler in node.handlers:
            inside = self.visit(handler.type, state) if handler.type else state
            inside = self._bind({handler.name}, inside) if handler.name else inside
            ends.append(self.run(handler.body, inside))
        after, last = _join(*ends), self.run(node.finalbody, state)
        return None if after is None or last is None else after | last

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match, state: frozenset[str]) -> _State:
        state = self.visit(node.subject, state)
        ends: list[_State] = []
        for case in node.cases:
            inside = self.visit(case.pattern, state)
            inside = self._bind(_captured_names(case.pattern), inside)
            inside = self.visit(case.guard, inside) if case.guard else inside
            ends.append(self.run(case.body, inside))
        last = node.cases[-1]
        matches_anything = last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        return _join(*ends) if matches_anything else _join(state, *ends)

    def visit_Assign(self, node: ast.Assign, state: frozenset[str]) -> _State:
        state = self.visit(node.value, state)
        for target in node.targets:
            state = self._assign(target, state)
        return state

    def visit_AnnAssign(self, node: ast.AnnAssign, state: frozenset[str]) -> _State:
        state = self.visit(node.annotation, state)
        if node.value is None:
            return state
        return self._assign(node.target, self.visit(node.value, state))

    def visit_AugAssign(self, node: ast.AugAssign, state: frozenset[str]) -> _State:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id, state)
        return self._assign(node.target, self.visit(node.value, state))

    def visit_Delete(self, node: ast.Delete, state: frozenset[str]) -> _State:
        for name in _targets(node.targets):
            self._read(name, state)
        for target in node.targets:
            state = self._assign(target, state)
        return state

    def visit_Import(self, node: ast.Import | ast.ImportFrom, state: frozenset[str]) -> _State:
        return self._bind({(a.asname or a.name.partition(".")[0]) for a in node.names} - {"*"}, state)

    visit_ImportFrom = visit_Import

    def visit_Assert(self, node: ast.Assert, state: frozenset[str]) -> _State:
        state = self.visit(node.test, state)
        if node.msg is not None:
            self.visit(node.msg, state)
        return state

    def visit_TypeAlias(self, node: Any, state: frozenset[str]) -> _State:
        self._read_at_any_time(_globals_read_by(node), _without_class_names(state))
        return self._assign(node.name, state)

    # ------------------------------------------------------------------ functions and classes

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, state: frozenset[str]) -> _State:
        state = self._in_order(node.decorator_list, state)
        with self._hiding(_type_parameters(node)):
            state = self._in_order([node.args, *([node.returns] if node.returns else [])], state)
        reads = _globals_read_by(node)
        self._bound_so_far.update(name for n in ast.walk(node) if isinstance(n, ast.Global) for name in n.names)
        if not all(isinstance(d, ast.Name) and d.id in _PASSIVE_DECORATORS for d in node.decorator_list):
            self._read_at_any_time(reads, _without_class_names(state))  # the decorator may call it
        for owner in (node.name, *(outer.name for outer in self._classes)):
            self._global_reads.setdefault(owner, set()).update(reads)
        return self._bind({node.name}, state)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef, state: frozenset[str]) -> _State:
        state = self._in_order(node.decorator_list, state)
        with self._hiding(_type_parameters(node)):
            state = self._in_order([*node.bases, *node.keywords], state)
            self._classes.append(_ClassBody(node.name, _deleted(node.body)))
            ended = self.run(node.body, _without_class_names(state))
            self._classes.pop()
        if ended is None:
            return None
        if node.decorator_list or node.bases or node.keywords:  # each may call methods at once
            self._read_at_any_time(self._global_reads.get(node.name, ()), _without_class_names(state))
        return self._bind({node.name}, state)

    # ------------------------------------------------------------------ expressions

    def _in_order(self, nodes: Iterable[ast.AST], state: frozenset[str]) -> frozenset[str]:
        for node in nodes:
            state = self.visit(node, state)
        return state

    def visit_Name(self, node: ast.Name, state: frozenset[str]) -> frozenset[str]:
        if isinstance(node.ctx, ast.Load):
            self._read(node.id, state)
        return state

    def visit_NamedExpr(self, node: ast.NamedExpr, state: frozenset[str]) -> frozenset[str]:
        return self._bind({node.target.id}, self.visit(node.value, state))

    def visit_BoolOp(self, node: ast.BoolOp, state: frozenset[str]) -> frozenset[str]:
        state = self.visit(node.values[0], state)
        self._in_order(node.values[1:], state)
        return state

    def visit_Compare(self, node: ast.Compare, state: frozenset[str]) -> frozenset[str]:
        state = self._in_order([node.left, node.comparators[0]], state)
        self._in_order(node.comparators[1:], state)
        return state

    def visit_IfExp(self, node: ast.IfExp, state: frozenset[str]) -> frozenset[str]:
        state = self.visit(node.test, state)
        return self._in_order([node.body], state) & self._in_order([node.orelse], state)

    def visit_Dict(self, node: ast.Dict, state: frozenset[str]) -> frozenset[str]:
        return self._in_order((n for pair in zip(node.keys, node.values) for n in pair if n is not None), state)

    def visit_Lambda(self, node: ast.Lambda, state: frozenset[str]) -> frozenset[str]:
        self._read_at_any_time(_globals_read_by(node), _without_class_names(state))
        return self._in_order([node.args], state)

    def visit_ListComp(self, node: Any, state: frozenset[str]) -> frozenset[str]:
        state = self.visit(node.generators[0].iter, state)
        inside = _without_class_names(state)
        with contextlib.ExitStack() as stack:
            for number, generator in enumerate(node.generators):
                inside = self.visit(generator.iter, inside) if number else inside
                stack.enter_context(self._hiding(_targets([generator.target])))
                inside = self._in_order([generator.target, *generator.ifs], inside)
            self._in_order([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt], inside)
        return state  # there may have been no iteration

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    # ------------------------------------------------------------------ names

    def _assign(self, target: ast.expr, state: frozenset[str]) -> frozenset[str]:
        # The target a[i] binds no name and reads two.
        return self._bind(_targets([target]), self.visit(target, state))

    def _bind(self, names: Iterable[str], state: frozenset[str]) -> frozenset[str]:
        if not self._classes:
            self._bound_so_far.update(names)
            return state.union(names)
        return state.union(f".{name}" for name in names if name not in self._classes[-1].deleted)

    def _read(self, name: str, state: frozenset[str]) -> None:
        if name in self._hidden or (self._classes and f".{name}" in state):
            return
        if name not in state:
            self.needed.add(name)
            if name not in self._bound_so_far:
                self.required.add(name)
        self._read_at_any_time(self._global_reads.get(name, ()), _without_class_names(state))

    def _read_at_any_time(self, names: Iterable[str], state: frozenset[str]) -> None:
        """Record names that code reads which may run now, later or never, so before or after the cell binds them."""
        left, seen = set(names), set[str]()
        while left:
            seen.add(name := left.pop())
            if name not in state:
                self.needed.add(name)
                if name not in self._bound:
                    self.required.add(name)
            left |= self._global_reads.get(name, set()) - seen

    @contextlib.contextmanager
    def _hiding(self, names: Iterable[str]) -> Iterator[None]:
        before, self._hidden = self._hidden, self._hidden.union(names)
        yield
        self._hidden = before


class _ClassBody(NamedTuple):
    """The class whose body is visited, and the names that it deletes: an outer name of the same text reappears."""

    name: str
    deleted: set[str]


def _join(*states: _State) -> _State:
    """Return the state where paths join."""
    reached = [state for state in states if state is not None]
    return frozenset.intersection(*reached) if reached else None


def _without_class_names(state: frozenset[str]) -> frozenset[str]:
    """Return the state without the names of a class's body, which its functions and comprehensions do not see."""
    return frozenset(name for name in state if not name.startswith("."))


def _constant_truth(test: ast.expr) -> bool | None:
    return bool(test.value) if isinstance(test, ast.Constant) else None


def _captured_names(pattern: ast.pattern) -> set[str]:
    nodes = list(ast.walk(pattern))
    named = {node.name for node in nodes if isinstance(node, (ast.MatchAs, ast.MatchStar))}
    return {name for name in named | {n.rest for n in nodes if isinstance(n, ast.MatchMapping)} if name is not None}


def _type_parameters(node: Any) -> set[str]:
    return {parameter.name for parameter in getattr(node, "type_params", ())}  # Python 3.12


def _deleted(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names that these statements delete, including those that an ``except`` deletes at its end."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    deleted = {name for node in nodes if isinstance(node, ast.Delete) for name in _targets(node.targets)}
    return deleted | {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}


def bound_names(tree: ast.Module) -> frozenset[str]:
    """Return the names that the cell binds in ``__main__``, also in its functions."""
    tables = list(_with_children(symtable.symtable(ast.unparse(tree), "<cell>", "exec")))
    return frozenset(
        symbol.get_name()
        for number, table in enumerate(tables)
        for symbol in table.get_symbols()
        if (symbol.is_assigned() or symbol.is_imported()) and (number == 0 or symbol.is_declared_global())
    )


def _globals_read_by(node: ast.stmt | ast.expr) -> set[str]:
    """Return the globals that a function reads, with all functions, classes and comprehensions inside."""
    statement = node if isinstance(node, ast.stmt) else ast.Expr(node)
    outside = symtable.symtable(ast.unparse(ast.fix_missing_locations(ast.Module([statement], []))), "<cell>", "exec")
    updated: set[str] = set()  # the names that x += 1 and del x read, which a symbol table does not show as read
    for inner in ast.walk(node):
        if isinstance(inner, ast.AugAssign):
            updated |= _targets([inner.target])
        elif isinstance(inner, ast.Delete):
            updated |= _targets(inner.targets)
    return {
        symbol.get_name()
        for child in outside.get_children()
        for table in _with_children(child)
        for symbol in table.get_symbols()
        if symbol.is_global() and (symbol.is_referenced() or symbol.get_name() in updated)
    }


def _with_children(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _with_children(child)


def _targets(nodes: Iterable[ast.expr]) -> set[str]:
    """Return the plain names among assignment targets; ``a.b`` and ``a[0]`` bind no name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.Tuple, ast.List)):
            found |= _targets(node.elts)
        elif isinstance(node, ast.Starred):
            found |= _targets([node.value])
    return found
