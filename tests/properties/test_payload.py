"""Values, kinds and strides arrive as they were packed, and memory is shared where pickle would share it."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from nbddp import payload
from tests.properties.budget import examples
from tests.properties.things import describe, orders, overlaps, overwrite, things
from tests.support import run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*([Ss]parse|[Qq]uant|ComplexHalf|nested|beta|prototype)"),
    pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:TypedStorage is deprecated", "ignore:.*not writable"),
]
_MAPPED_NBYTES = 2 << 20  # more than a copy is made of


def round_trip(thing: Any, *, back: bool = False) -> Any:
    fd = payload.open_block("test")
    try:
        packed = payload.pack(thing, fd, back=back)
        return payload.unpack(fd, packed.nbytes, inherited=packed.inherited).value
    finally:
        os.close(fd)


@pytest.mark.slow
@examples(150)
@given(things(), st.booleans(), st.booleans())
def test_any_value_arrives_as_it_was(thing: Any, mapped: bool, back: bool) -> None:
    """Small things are read, large ones mapped; results travel by the second way."""
    before = describe(thing)
    note(str(before))
    sent = [thing, torch.ones(_MAPPED_NBYTES, dtype=torch.uint8)] if mapped else [thing]
    arrived = round_trip(sent, back=back)[0]
    assert describe(arrived) == before
    assert overlaps(arrived) == []
    assert all(order in (None, now) for order, now in zip(orders(thing), orders(arrived)))
    overwrite(arrived)
    assert describe(thing) == before


@examples(40)
@given(things())
def test_a_result_can_be_sent_as_an_argument_again(thing: Any) -> None:
    """A result of one run is the next run's argument."""
    before = describe(thing)
    assert describe(round_trip(round_trip(thing), back=True)) == before


@pytest.mark.slow
@examples(8)
@given(st.lists(things(), min_size=1, max_size=6))
def test_real_ranks_receive_and_return_any_value_unchanged(several: list[Any]) -> None:
    before = describe(several)
    done = run(_look_and_write, several)
    for seen, written, back in done.values:
        assert seen == before
        assert describe(back) == written
    assert describe(several) == before


def _look_and_write(several: list[Any]) -> tuple[Any, Any, Any]:
    seen = describe(several)
    assert overlaps(several) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overwrite(several)
    return seen, describe(several), several
