"""Both sides. How functions travel: cloudpickle's way, and what that leaves out.

Left out are variables that several closures share, which it gives to each of them; a namespace to come back to, in
place of copies of what the function reads; and what ``functools.singledispatch`` makes, which holds weak references.
All are here; the functions at the end are called by the stream.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from nbddp.known import Known, attributes_of_dispatching, differs, in_words


def with_its_cells(function: types.FunctionType, reduced: Any) -> Any:
    """What cloudpickle (3.1) reduces a function to, with the very cells of its closure.

    They travel empty, so that a function may be in its own cell, and are filled with the function's state.
    """
    make, (code, namespace, name, defaults, _), (attributes, slots), *setting = reduced
    contents = tuple(map(_copied, function.__closure__ or ()))
    arguments = code, namespace, name, defaults, function.__closure__
    return make, arguments, (attributes, {**slots, "__closure__": contents}), *setting


def _copied(cell: types.CellType) -> types.CellType:
    try:
        return types.CellType(cell.cell_contents)
    except ValueError:  # an empty one
        return types.CellType()


def for_the_notebook(function: types.FunctionType, reduced: Any, known: Known, notes: list[str]) -> Any:
    """The same, to live in its reader's ``__main__``, with those variables alone that the rank set."""
    _, (code, *_, closure), (attributes, slots), *_, set_state = reduced
    read = slots["__globals__"]
    if lost := [name for name, value in read.items() if known.is_ready_made(name, value)]:
        notes.append(f"{function.__name__} reads {in_words(lost)}, which only a %%ddp cell has")
    news = {n: value for n, value in read.items() if not known.has(n, value) and n not in lost}
    state = set_state, attributes, {**slots, "__globals__": news}
    return _function_here, (code, closure), state, None, None, _set_state_here


def reduce_dispatching(function: Any) -> Any:
    """How a function reduces that ``functools.singledispatch`` made: to its implementations, by class."""
    # They are in the state, and not in the arguments: they may call the function.
    default = function.registry[object]
    state = tuple(function.registry.items()), attributes_of_dispatching(function)
    return _dispatching, (getattr(default, "__name__", function.__name__),), state, None, None, _set_implementations


# ---------------------------------------------------------------------------- reading

_notes: contextvars.ContextVar[list[str]] = contextvars.ContextVar("nbddp_notes")


@contextlib.contextmanager
def noting(notes: list[str]) -> Iterator[None]:
    """Put into ``notes`` what there is to say about functions that arrive."""
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
    news = {name: value for name, value in read.items() if name not in here}
    before = {name: here[name] for name in ("__builtins__",) if name in here}
    set_state(function, (attributes, {**slots, "__globals__": news}))
    here.update(before)  # a module in a notebook, and a dict for cloudpickle
    if others := sorted(name for name in read.keys() - news.keys() if differs(here[name], read[name])):
        own = "the notebook's own, which differs" if len(others) == 1 else "the notebook's own, which differ"
        _notes.get().append(
            f"{function.__name__} reads {in_words(others)}: in the notebook it finds {own} from the rank's"
        )


def _dispatching(name: str) -> Any:
    """Without implementations yet. Its name in errors cannot be changed later."""

    def default(*_: Any) -> None: ...

    default.__name__ = name
    return functools.singledispatch(default)


def _set_implementations(function: Any, state: tuple[tuple[tuple[type, Any], ...], dict[str, Any]]) -> None:
    implementations, attributes = state
    for kind, implementation in implementations:
        function.register(kind, implementation)
    functools.update_wrapper(function, function.registry[object])
    vars(function).update(attributes)
