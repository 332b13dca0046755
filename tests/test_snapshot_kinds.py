"""What users put into checkpoints comes back; what could not be loaded is refused when it is saved, by its path."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import http
import os
import pathlib
import random
import uuid
import zoneinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import nbddp
from tests.support import script

PLAIN: dict[str, Any] = {
    "np.float64": np.float64(2.5),
    "np.int64": np.int64(-3),
    "np.bool": np.bool_(True),
    "np.str": np.str_("x"),
    "np.datetime64": np.datetime64("2026-11-22"),
    "np.dtype": np.dtype("float32"),
    "np type": np.float32,
    "ndarray": np.arange(6.0).reshape(2, 3),
    "fortran ndarray": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "empty ndarray": np.zeros((0, 3), np.int16),
    "structured ndarray": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "text ndarray": np.array(["a", "bc"]),
    "object ndarray": np.array([1, "a", None], dtype=object),
    "python's random state": random.getstate(),
    "numpy's random state": np.random.get_state(),
    "numpy's generator state": np.random.default_rng(3).bit_generator.state,
    "torch's random state": torch.get_rng_state(),
    "deque": collections.deque([1, np.float64(2)], maxlen=5),
    "OrderedDict": collections.OrderedDict(b=1, a=2),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "Counter": collections.Counter("aab"),
    "set": {1, 2},
    "frozenset": frozenset({1, "a"}),
    "Path": pathlib.Path("/tmp/x.pt"),
    "PurePath": pathlib.PurePosixPath("a/b"),
    "datetime": datetime.datetime(2026, 11, 22, 1, 2, 3, 4, datetime.timezone.utc),
    "zone": datetime.datetime(2026, 11, 22, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "date": datetime.date(2026, 11, 22),
    "time": datetime.time(1, 2),
    "timedelta": datetime.timedelta(seconds=1.5),
    "Decimal": decimal.Decimal("1.10"),
    "Fraction": fractions.Fraction(1, 3),
    "UUID": uuid.UUID(int=5),
    "SimpleNamespace": SimpleNamespace(lr=0.1, nested=[np.float32(1)]),
    "argparse.Namespace": argparse.Namespace(lr=0.1),
    "complex": 1 + 2j,
    "bytes": b"\x00\xff",
    "no bytes": b"",
    "bytearray": bytearray(b"ab"),
    "range": range(1, 9, 2),
    "slice": slice(1, None, 2),
    "Ellipsis": ...,
    "a type": float,
    "large int": -(2**200),
    "Enum of the standard library": http.HTTPStatus.OK,
    "torch.dtype": torch.bfloat16,
    "torch.device": torch.device("cpu"),
    "torch.Size": torch.Size([2, 3]),
    "None": None,
    "text": "ü\n\ud800",
    "nan": float("inf"),
    "tuple": (1, (2, [3])),
    "Parameter": torch.nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
}


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Color(enum.Enum):
    RED = 1


class Point(collections.namedtuple("Point", "x y")): ...


class Other:
    """A class of the user's own."""


def lr_fn(step: int) -> float:
    return 1.0 / (step + 1)


NOT_PLAIN: dict[str, tuple[Any, str]] = {
    "dataclass": (Config(), "a Config; save dataclasses.asdict() of it"),
    "Enum": (Color.RED, "a Color; save its .value"),
    "named tuple": (Point(1, 2), "a Point; save tuple() of it"),
    "own class": (Other(), "an Other; save its parts, or give it a state_dict()"),
    "own type": (Other, "the class Other; save its name"),
    "function": (lr_fn, "the function lr_fn; save its name"),
    "lambda": (lambda step: step, "the function <lambda>; save its name"),
    "generator": ((i for i in ()), "a generator; save its parts, or give it a state_dict()"),
    "torch generator": (torch.Generator(), "a Generator; save its get_state()"),
    "module": (os, "the module os; save its name"),
}


def same(one: Any, other: Any) -> bool:
    """Equal, and of one type, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_kind = one.dtype == other.dtype and one.layout == other.layout and one.shape == other.shape
        return same_kind and torch.equal(one.detach().to_dense(), other.detach().to_dense())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and same(one.tolist(), other.tolist())
    if isinstance(one, np.random.Generator):
        return same(one.bit_generator.state, other.bit_generator.state)
    if isinstance(one, dict):
        factory = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return factory and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        limit = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return limit and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (SimpleNamespace, argparse.Namespace)):
        return same(vars(one), vars(other))
    return bool(one == other) or (one != one and other != other)


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_state_comes_back_as_it_was(kind: str, in_folder: Path) -> None:
    nbddp.save_snapshot("s.pt", it=PLAIN[kind], nested={"a": [PLAIN[kind]]})
    found = nbddp.load_snapshot("s.pt")
    assert found is not None
    assert same(found, {"it": PLAIN[kind], "nested": {"a": [PLAIN[kind]]}})
    torch.save({"it": PLAIN[kind]}, "oracle.pt")
    assert same(found["it"], torch.load("oracle.pt", weights_only=False)["it"])


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpys_generators_continue_their_sequence(kind: str, in_folder: Path) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(5))
    generator.random(3)
    nbddp.save_snapshot("s.pt", it=generator, old=np.random.RandomState(7))
    found = nbddp.load_snapshot("s.pt")
    assert found is not None
    assert found["it"].random(4).tolist() == generator.random(4).tolist()
    assert found["it"].spawn(1)[0].random() == generator.spawn(1)[0].random()
    assert found["old"].random_sample(2).tolist() == np.random.RandomState(7).random_sample(2).tolist()


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_state_that_could_not_be_loaded_is_refused_by_its_path(kind: str, in_folder: Path) -> None:
    nbddp.save_snapshot("s.pt", epoch=1)
    thing, told = NOT_PLAIN[kind]
    holders = {
        "it": thing,
        'it["config"]["x"]': {"config": {"a": 1, "x": thing}},
        "it[1][0]": (0, [thing]),
        "it.nested": SimpleNamespace(nested=thing),
    }
    for path, it in holders.items():
        with pytest.raises(nbddp.NbddpError) as refused:
            nbddp.save_snapshot("s.pt", epoch=2, model=torch.nn.Linear(1, 1), it=it)
        assert str(refused.value) == (
            f"s.pt was not written, because load_snapshot() could not read it again: {path} is {told}"
        )
    assert nbddp.load_snapshot("s.pt") == {"epoch": 1}
    assert os.listdir(".") == ["s.pt"]


def test_objects_with_a_state_dict_are_saved_as_their_state_dict(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # an optimizer's first step sets it
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_fn)
    state = {"m": model, "rest": [optimizer, (scheduler,)]}
    nbddp.save_snapshot("s.pt", trained=state)
    found = nbddp.load_snapshot("s.pt")
    assert found is not None
    expected = {"m": model.state_dict(), "rest": [optimizer.state_dict(), (scheduler.state_dict(),)]}
    assert same(found["trained"], expected)
    assert state["m"] is model


def test_shared_and_cyclic_references_are_kept(in_folder: Path) -> None:
    shared = [torch.ones(2)]
    state: dict[str, Any] = {"a": shared, "b": shared}
    state["itself"] = state
    nbddp.save_snapshot("s.pt", it=state)
    found = nbddp.load_snapshot("s.pt")
    assert found is not None
    assert found["it"]["a"] is found["it"]["b"]
    assert found["it"]["itself"] is found["it"]


def test_torchs_list_of_safe_globals_is_left_unchanged(in_folder: Path) -> None:
    torch.serialization.add_safe_globals([collections.deque])
    try:
        before = set(torch.serialization.get_safe_globals())
        nbddp.save_snapshot("s.pt", it=[collections.deque([1]), np.float64(1)])
        nbddp.load_snapshot("s.pt")
        assert set(torch.serialization.get_safe_globals()) == before
        with pytest.raises(nbddp.NbddpError):
            nbddp.save_snapshot("s.pt", it=Config())
        assert set(torch.serialization.get_safe_globals()) == before
    finally:
        torch.serialization.clear_safe_globals()


def test_classes_in_the_users_safe_globals_are_saved_too(in_folder: Path) -> None:
    with torch.serialization.safe_globals([Config]):
        nbddp.save_snapshot("s.pt", it=Config(0.5))
        assert nbddp.load_snapshot("s.pt") == {"it": Config(0.5)}
    with pytest.raises(nbddp.NbddpError, match=r"s\.pt holds tests\.test_snapshot_kinds\.Config"):
        nbddp.load_snapshot("s.pt")
    assert nbddp.load_snapshot("s.pt", weights_only=False) == {"it": Config(0.5)}


def test_a_full_disk_raises_its_own_error_and_keeps_the_old_snapshot(in_folder: Path) -> None:
    done = script("""
        import nbddp, resource, signal, torch
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        nbddp.save_snapshot("s.pt", epoch=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            nbddp.save_snapshot("s.pt", weights=torch.zeros(1_000_000))
        except Exception as error:
            print(type(error).__name__)
        print(nbddp.load_snapshot("s.pt"))
    """)
    assert done.stdout.splitlines()[-1] == "{'epoch': 1}", done.stderr
    assert "NbddpError" not in done.stdout
