"""Completes how cloudpickle pickles functions.

cloudpickle gives each closure its own copy of a variable that several closures share, and a function that returns to
the notebook copies of the globals it reads. It cannot pickle a ``functools.singledispatch`` function, which holds weak
references. The functions at the end of this file are called while a stream is read.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from nbddp.payload.known import Known, attributes_of_dispatching, differs, in_words


def with_its_cells(function: types.FunctionType, reduced: Any) -> Any:
    """Change what cloudpickle (3.1) reduces a function to, so that the function shares the cells of its closure.

    The cells are pickled empty, so that a function may be in its own cell, and are filled when its state is set.
    """
    make, (code, namespace, name, defaults, _), (attributes, slots), *setting = reduced
    contents = tuple(map(_copied, function.__closure__ or ()))
    arguments = code, namespace, name, defaults, function.__closure__
    return make, arguments, (attributes, {**slots, "__closure__": contents}), *setting


def _copied(cell: types.CellType) -> types.CellType:
    try:
        return types.CellType(cell.cell_contents)
    except ValueError:  # an empty cell
        return types.CellType()


def for_the_notebook(function: types.FunctionType, reduced: Any, known: Known, notes: list[str]) -> Any:
    """Change a reduced function so that its globals are its reader's ``__main__``; takes only what the rank has set."""
    _, (code, *_, closure), (attributes, slots), *_, set_state = reduced
    read = slots["__globals__"]
    if lost := [name for name, value in read.items() if known.is_predefined(name, value)]:
        notes.append(f"{function.__name__} reads {in_words(lost)}, which only a %%ddp cell has")
    changed = {n: value for n, value in read.items() if not known.has(n, value) and n not in lost}
    state = set_state, attributes, {**slots, "__globals__": changed}
    return _function_here, (code, closure), state, None, None, _set_state_here


def without_known_variables(reduced: Any, sent: Known, variables: dict[str, Any]) -> Any:
    """Change a reduced function so that it takes along only the variables that its reader does not have yet."""
    make, arguments, (attributes, slots), *setting = reduced
    new = {name: value for name, value in slots["__globals__"].items() if not sent.has(name, value)}
    variables.update(new)
    return make, arguments, (attributes, {**slots, "__globals__": new}), *setting


def reduce_dispatching(function: Any) -> Any:
    """Reduce a function that ``functools.singledispatch`` has created to its implementations, by class."""
    # The implementations are in the state and not in the arguments, because they may call the function.
    default = function.registry[object]
    state = tuple(function.registry.items()), attributes_of_dispatching(function)
    return _dispatching, (getattr(default, "__name__", function.__name__),), state, None, None, _set_implementations


# ---------------------------------------------------------------------------- reading

_notes: contextvars.ContextVar[list[str]] = contextvars.ContextVar("nbddp_notes")


@contextlib.contextmanager
def noting(notes: list[str]) -> Iterator[None]:
    """Collect in ``notes`` what the user should know about the functions that are read."""
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def _function_here(code: types.CodeType, closure: tuple[types.CellType, ...] | None) -> types.FunctionType:
    return types.FunctionType(code, sys.modules["__main__"].__dict__, None, None, closure)


def _set_state_here(function: types.FunctionType, state: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
    set_state, attributes, slots = state
    here, read = function.__globals__, slots["__globals__"]
    missing = {name: value for name, value in read.items() if name not in here}
    before = {name: here[name] for name in ("__builtins__",) if name in here}
    set_state(function, (attributes, {**slots, "__globals__": missing}))
    here.update(before)  # a module in a notebook; cloudpickle has set it to a dict
    if others := sorted(name for name in read.keys() - missing.keys() if differs(here[name], read[name])):
        values = "whose value in the notebook differs" if len(others) == 1 else "whose values in the notebook differ"
        _notes.get().append(f"{function.__name__} reads {in_words(others)}, {values} from the rank's")


def _dispatching(name: str) -> Any:
    """A singledispatch function without implementations. The name that it shows in errors cannot be changed later."""

    def default(*_: Any) -> None: ...

    default.__name__ = name
    return functools.singledispatch(default)


def _set_implementations(function: Any, state: tuple[tuple[tuple[type, Any], ...], dict[str, Any]]) -> None:
    implementations, attributes = state
    for kind, implementation in implementations:
        function.register(kind, implementation)
    functools.update_wrapper(function, function.registry[object])
    vars(function).update(attributes)
