"""A function that was sent goes on as if it had not been: with its variables, shared or not, and its defaults."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cloudpickle
from hypothesis import given, note
from hypothesis import strategies as st

from nbddp import payload
from nbddp.payload.known import Known
from tests.properties.budget import examples
from tests.properties.closures import Case, Globals, call, call_all, cases, make, results_without_travelling, same
from tests.support import fresh_main, run


@examples(150)
@given(cases())
def test_functions_keep_their_state_in_a_rank_and_when_they_come_back(case: Case) -> None:
    note(case.source)
    with fresh_main() as notebook, fresh_main() as rank:
        with being(notebook.main):
            functions = make(case, notebook.main.__dict__)
            results = call(functions, case.before)
        there, by_value = travelled(functions, notebook.main, rank.main)
        known = Known(there.by_value, rank.main.__dict__)
        results += call(there.value, case.inside)
        back, _ = travelled(there.value, rank.main, notebook.main, known, by_value)
        differs = vars(rank.main).get("total", 0) != vars(notebook.main)["total"] and "total" in vars(rank.main)
        results += call(back.value, case.after)
    assert results == results_without_travelling(case)
    assert same(back.value) == same(functions)
    assert any("reads total" in line for line in back.notes) == differs


def travelled(
    thing: Any, here: ModuleType, there: ModuleType, known: Known | None = None, by_value: list[Any] | None = None
) -> tuple[payload.Unpacked, list[Any]]:
    """The thing on the other side, and what of it travelled by value."""
    fd = payload.open_block("test")
    try:
        with being(here):
            packed = payload.pack(thing, fd, known=known, back=known is not None)
        with being(there):
            return payload.unpack(fd, packed.nbytes, known=by_value or []), packed.by_value
    finally:
        os.close(fd)


@contextlib.contextmanager
def being(main: ModuleType) -> Iterator[None]:
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        yield
    finally:
        sys.modules["__main__"] = before


@examples(50)
@given(cases(alone=True))
def test_a_single_function_behaves_as_cloudpickle_makes_it(case: Case) -> None:
    note(case.source)
    functions = make(case, {"__name__": "__main__"})
    results = call(functions, case.before)
    for numbers in (case.inside, case.after):
        functions = cloudpickle.loads(cloudpickle.dumps(functions))
        results += call(functions, numbers)
    assert results == results_without_travelling(case)


@examples(5)
@given(st.lists(cases(), min_size=10, max_size=10))
def test_functions_keep_their_state_after_real_ranks_called_them(several: list[Case]) -> None:
    with fresh_main() as notebook:
        namespace = notebook.main.__dict__
        made = [make(case, namespace, f"_{number}") for number, case in enumerate(several)]
        before = [call(functions, case.before) for functions, case in zip(made, several)]
        kept = [Globals(namespace, f"_{number}") for number in range(len(several))]
        done = run(call_all, [(functions, case.inside) for functions, case in zip(made, several)])
        for values in done.values:
            for (inside, functions), first, case, globals_ in zip(values, before, several, kept):
                note(case.source)
                globals_.restore()
                assert first + inside + call(functions, case.after) == results_without_travelling(case)
