"""Instances of any class that a notebook defines are, in a rank and afterwards, what pickle makes of them."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from cloudpickle import cloudpickle
from hypothesis import given, note, reject
from hypothesis import strategies as st

from nbddp import payload
from nbddp.worker import main_module
from tests.properties.budget import examples
from tests.properties.classes import PREAMBLE, cells
from tests.slotted import describe
from tests.support import fresh_main, run


def as_pickled(thing: Any) -> Any:
    """The oracle; rejects what pickle itself refuses."""
    try:
        return pickle.loads(pickle.dumps(thing))
    except Exception:
        reject()


@examples(60)
@given(cells())
def test_instances_sent_and_returned_are_what_pickle_makes_of_them(source: str) -> None:
    note(source)
    with fresh_main() as notebook:
        exec(PREAMBLE + source, notebook.main.__dict__)
        instances = notebook.main.instances
        once = as_pickled(instances)
        expected, twice = describe(once), describe(as_pickled(once))
        seen, back = _there_and_back(instances)
        assert seen == expected
        assert describe(back) == twice
        assert [type(each) for each in back] == [type(each) for each in instances]


def _there_and_back(instances: list[Any]) -> tuple[Any, Any]:
    """By way of another ``__main__`` that has seen none of the classes before; and what they were there."""
    there, back = payload.open_block("there"), payload.open_block("back")
    try:
        sent = payload.pack(instances, there)
        with fresh_main() as rank:
            tracked = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
            before = dict(tracked)
            tracked.clear()
            unpacked = payload.unpack(there, sent.nbytes)
            known = main_module.publish(rank.main, unpacked)
            seen = describe(unpacked.value)
            returned = payload.pack(unpacked.value, back, known=known, back=True)
            tracked.clear()
            tracked.update(before)
        return seen, payload.unpack(back, returned.nbytes, known=sent.by_value).value
    finally:
        os.close(there)
        os.close(back)


@pytest.mark.slow
@examples(6)
@given(st.lists(cells(), min_size=1, max_size=6))
def test_real_ranks_see_and_return_what_pickle_makes_of_instances(sources: list[str]) -> None:
    with fresh_main() as notebook:
        several = []
        for i, source in enumerate(sources):
            exec(PREAMBLE + source.replace("K", f"Of{i}_"), notebook.main.__dict__)
            several.append(notebook.main.instances)
        once = as_pickled(several)
        expected, twice = describe(once), describe(as_pickled(once))
        for seen, back in run(_look, several).values:
            assert seen == expected
            assert describe(back) == twice
            assert [[type(each) for each in some] for some in back] == [
                [type(each) for each in some] for some in several
            ]


def _look(several: list[Any]) -> Any:
    return describe(several), several
