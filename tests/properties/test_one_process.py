"""A launcher's object is refused by name however a function reaches it; training arguments arrive as if new."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp import payload
from tests.properties.budget import examples
from tests.support import fresh_main
from tests.test_one_process import (
    MAKERS,
    REFUSED,
    _arguments,
    _as_before,  # noqa: F401 - fixtures
    _imported,  # noqa: F401
    made,
)

# pytest's own: what these objects set and keep is undone after the whole test, not after each case.
pytestmark = pytest.mark.filterwarnings("ignore")

# How one object holds another, and how the path to it goes on.
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "[1]": (lambda x: [0, x], lambda h: h[1]),
    "[0]": (lambda x: (x, "y"), lambda h: h[0]),
    "['k']": (lambda x: {"j": 1, "k": x}, lambda h: h["k"]),
    ".held": (lambda x: SimpleNamespace(other=2, held=x), lambda h: h.held),
    "args[0]": (lambda x: functools.partial(max, x), lambda h: h.args[0]),
    "word": (lambda x: functools.partial(max, word=x), lambda h: h.keywords["word"]),
    "held": (lambda x: _closure(x), lambda h: h()),
    "default 0": (lambda x: _default(x), lambda h: h.__defaults__[0]),
}
WAYS = st.lists(st.sampled_from(sorted(HOLDERS)), max_size=4)
DELIVERIES = st.sampled_from(["argument", "keyword", "global"])


def _closure(held: Any) -> Any:
    return lambda: held


def _default(value: Any) -> Any:
    def function(default: Any = value) -> Any:
        return default

    function.__module__ = "__main__"
    return function


def _held(obj: Any, way: list[str]) -> Any:
    for step in reversed(way):
        obj = HOLDERS[step][0](obj)
    return obj


def _out_of(holder: Any, way: list[str]) -> Any:
    for step in way:
        holder = HOLDERS[step][1](holder)
    return holder


@functools.cache
def _kept(kind: str) -> Any:
    return made(kind)


@pytest.mark.slow
@examples(60)
@given(st.sampled_from(sorted(MAKERS)), WAYS, DELIVERIES)
def test_the_path_to_a_launchers_object_is_named(kind: str, way: list[str], delivery: str) -> None:
    thing = _held(_kept(kind), way)
    with fresh_main() as cell, pytest.raises(nbddp.PayloadError) as refused:
        names = cell("def train(*args, **kwargs): return [thing for _ in args]")
        cell.main.__dict__["thing"] = thing if delivery == "global" else None
        args = (thing,) if delivery == "argument" else ()
        kwargs = {"named": thing} if delivery == "keyword" else {}
        nbddp.run(names.train, args, kwargs, nprocs=2, device="cpu", show=False)
    first = {"argument": ("args[0]",), "keyword": ("named",), "global": ("train", "thing")}[delivery]
    assert refused.value.path == (*first, *way)
    assert str(refused.value).endswith(REFUSED[kind])


@examples(25)
@given(
    WAYS,
    st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": st.floats(1e-6, 1.0),
            "per_device_train_batch_size": st.integers(1, 64),
            "num_train_epochs": st.integers(1, 9),
            "weight_decay": st.floats(0, 0.5),
            "lr_scheduler_type": st.sampled_from(["linear", "cosine", "constant"]),
            "seed": st.integers(0, 2**31),
            "label_names": st.none() | st.lists(st.text(max_size=3), max_size=2),
            "gradient_accumulation_steps": st.integers(1, 8),
        },
    ),
)
def test_training_arguments_arrive_as_if_made_in_the_rank(way: list[str], fields: dict[str, Any]) -> None:
    sent = _arguments(**fields)
    there = {"_n_gpu": 5, "_setup_devices": "there", "distributed_state": SimpleNamespace(num_processes=7)}
    vars(sent).update(there)
    block = payload.open_block("arguments")
    try:
        packed = payload.pack(_held(sent, way), block)
        arrived = _out_of(payload.unpack(block, packed.nbytes).value, way)
    finally:
        os.close(block)
    assert arrived == sent  # field by field
    assert vars(sent).items() >= there.items()
    assert (arrived.world_size, arrived.n_gpu, str(arrived.device)) == (1, 0, "cpu")
