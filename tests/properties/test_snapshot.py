"""Nested state of all kinds comes back as plain torch gives it, or is refused with the right path."""

from __future__ import annotations

import argparse
import collections
import os
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from tests.properties.budget import examples
from tests.test_snapshot_kinds import NOT_PLAIN, PLAIN, same

_NAMES = st.sampled_from(["a", "b", "lr", "config"])
_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.float16, torch.complex64])
_LEAVES = (
    st.sampled_from(sorted(PLAIN)).map(PLAIN.__getitem__)
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.datetimes()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.builds(lambda n, dtype: torch.arange(n).to(dtype), st.integers(0, 4), _DTYPES)
    | st.builds(lambda n, kind: np.arange(n).astype(kind), st.integers(0, 4), st.sampled_from(["f4", "i8", "u1", "O"]))
    | st.floats(width=32).map(np.float32)
)


def _holders(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(_NAMES, inside, max_size=3)
    return (
        st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.lists(inside, max_size=3).map(collections.deque)
        | named
        | named.map(collections.OrderedDict)
        | named.map(lambda items: collections.defaultdict(list, items))
        | named.map(lambda items: SimpleNamespace(**items))
        | named.map(lambda items: argparse.Namespace(**items))
    )


STATES = st.dictionaries(_NAMES, st.recursive(_LEAVES, _holders, max_leaves=8), min_size=1, max_size=3)
# One step from a holder to what it holds: how it is made, and how the path goes on.
STEPS = {
    '["x"]': lambda x: {"w": 1, "x": x},
    "[0]": lambda x: [x, 2],
    "[1]": lambda x: (np.float64(1), x),
    "[2]": lambda x: collections.deque([0, 1, x]),
    '["y"]': lambda x: collections.OrderedDict(y=x),
    '["z"]': lambda x: collections.defaultdict(int, z=x),
    ".held": lambda x: SimpleNamespace(held=x),
    ".given": lambda x: argparse.Namespace(given=x),
}


@examples(60)
@given(STATES)
def test_state_comes_back_as_plain_torch_gives_it(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours, oracle = os.path.join(folder, "s.pt"), os.path.join(folder, "oracle.pt")
        nbddp.save_snapshot(ours, **state)
        torch.save(state, oracle)
        found = nbddp.load_snapshot(ours)
        assert same(found, torch.load(oracle, weights_only=False))
        assert same(found, state)
        assert sorted(os.listdir(folder)) == ["oracle.pt", "s.pt"]


@examples(40)
@given(STATES, st.sampled_from(sorted(NOT_PLAIN)), st.lists(st.sampled_from(sorted(STEPS)), max_size=4))
def test_state_that_would_not_load_is_refused_by_its_path(state: dict[str, Any], kind: str, way: list[str]) -> None:
    thing, told = NOT_PLAIN[kind]
    for step in reversed(way):
        thing = STEPS[step](thing)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "s.pt")
        nbddp.save_snapshot(path, epoch=1)
        with pytest.raises(nbddp.NbddpError) as refused:
            nbddp.save_snapshot(path, **state, bad=thing)
        assert str(refused.value).endswith(f": bad{''.join(way)} is {told}")
        assert nbddp.load_snapshot(path) == {"epoch": 1}
        assert os.listdir(folder) == ["s.pt"]
