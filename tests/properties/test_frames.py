"""pandas objects that are independent of each other in the notebook are so in ranks and when they come back."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pandas")

import pandas as pd  # noqa: TID253 - imported where pandas is

from tests.frames import WAYS, frame, play
from tests.properties.budget import examples
from tests.properties.test_payload import round_trip
from tests.support import run

pytestmark = pytest.mark.filterwarnings("ignore:.*incompatible dtype", "ignore:.*Downcasting")
_STEPS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(WAYS))), min_size=1, max_size=6)
_WRITES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


def made_by(steps: list[tuple[int, str]], rows: int) -> list[Any]:
    """A frame, and what the steps make of it, each of something that is there already."""
    objects: list[Any] = [frame(rows)]
    for number, way in steps:
        # Not every way can go on, and some end in a number.
        with contextlib.suppress(Exception):
            made = WAYS[way](objects[number % len(objects)])
            objects += [made] if isinstance(made, (pd.DataFrame, pd.Series)) else []
    return objects


def in_range(writes: list[tuple[int, int, int]], objects: list[Any]) -> list[tuple[int, int, int]]:
    return [
        (number % len(objects), row, column) for number, row, column in writes if len(objects[number % len(objects)])
    ]


@examples(40)
@given(_STEPS, _WRITES, st.sampled_from([2, 5, 6]), st.booleans(), st.booleans())
def test_frames_are_independent_after_a_round_trip(
    steps: list[tuple[int, str]], writes: list[tuple[int, int, int]], rows: int, mapped: bool, back: bool
) -> None:
    expected = made_by(steps, rows)
    writes = in_range(writes, expected)
    beside = torch.ones(2 << 20 if mapped else 1, dtype=torch.uint8)
    arrived = round_trip([made_by(steps, rows), beside], back=back)[0]
    assert play(arrived, writes) == play(expected, writes)


@pytest.mark.slow
@examples(3)
@given(st.lists(st.tuples(_STEPS, _WRITES), min_size=1, max_size=8), st.sampled_from([5, 140_000]))
def test_frames_are_independent_in_real_ranks_and_afterwards(several: list[Any], rows: int) -> None:
    """With 140,000 rows each column is mapped, not copied."""
    expected = [made_by(steps, rows) for steps, _ in several]
    writes = [in_range(writes, objects) for (_, writes), objects in zip(several, expected)]
    plays = [play(objects, each) for objects, each in zip(expected, writes)]
    sent = [made_by(steps, rows) for steps, _ in several]
    for seen, back in run(_play_on_copies, sent, writes).values:
        assert seen == plays
        assert [play(objects, each) for objects, each in zip(back, writes)] == plays
    assert [play(objects, each) for objects, each in zip(sent, writes)] == plays


def _play_on_copies(several: list[Any], writes: list[Any]) -> Any:
    """The values sent back are those that came, for the same play there."""
    untouched = round_trip(several)
    return [play(objects, each) for objects, each in zip(several, writes)], untouched
