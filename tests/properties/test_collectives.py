"""For any input of the ranks, reduce and gather give what one process computes, or the same error on every rank."""

from __future__ import annotations

import cmath
import functools
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import nbddp
from tests.properties.budget import batches
from tests.support import run

pytestmark = pytest.mark.filterwarnings("ignore:.*ComplexHalf", "ignore:overflow encountered")

OPS = ("mean", "sum", "min", "max")
CASES = 50  # in one run


@dataclass(frozen=True)
class Recipe:
    """A tensor, made in each rank and here from the same numbers."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    seed: int

    def make(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        values = self._values(dtype)
        if self.layout == "transposed":
            backwards = tuple(reversed(range(values.ndim)))
            return values.permute(backwards).contiguous().permute(backwards)
        if self.layout == "sliced":
            wide = torch.zeros((*self.shape, 2), dtype=dtype)
            wide[..., 1] = values
            return wide[..., 1]
        if self.layout == "expanded":
            return values.reshape(-1)[:1].expand(self.shape) if values.numel() and self.shape else values
        if self.layout == "channels_last" and values.ndim == 4:
            return values.to(memory_format=torch.channels_last)
        if self.layout == "conjugated" and dtype in (torch.complex64, torch.complex128):
            return values.conj()
        if self.layout == "trained" and dtype in (torch.float32, torch.float64, torch.complex64):
            return torch.nn.Parameter(values)
        return values

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        random = np.random.default_rng(self.seed)
        if dtype.is_complex:
            parts = [_floats(random, self.shape, torch.float32) for _ in range(2)]
            return torch.complex(parts[0].float(), parts[1].float()).to(dtype)
        if dtype.is_floating_point:
            return _floats(random, self.shape, dtype).to(dtype)
        if dtype == torch.bool:
            return torch.from_numpy(random.integers(0, 2, self.shape, dtype=np.int64)).bool()
        limits = torch.iinfo(dtype)
        low, high = (limits.min, limits.max) if random.random() < 0.4 else (max(limits.min, -20), 20)
        as_numpy = np.dtype(self.dtype)
        return torch.from_numpy(np.asarray(random.integers(low, high, self.shape, dtype=as_numpy, endpoint=True)))


def _floats(random: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Common ones, and in some tensors those that are special in this type."""
    plain = torch.from_numpy(np.asarray(random.normal(0, 3, shape)))
    largest = torch.finfo(dtype).max
    special = np.array([0.0, -0.0, math.nan, math.inf, -math.inf, largest, -largest, largest * 0.7, 1e-40, 1.0])
    often = random.choice([0, 0.05, 0.5])
    drawn = torch.from_numpy(np.asarray(random.choice(special, shape)))
    return torch.where(torch.from_numpy(np.asarray(random.random(shape) < often)), drawn, plain)


@dataclass(frozen=True)
class Case:
    """One call on all ranks, each with its own thing: a number, or a tensor's recipe."""

    call: str
    op: str
    things: tuple[Any, ...]

    def made(self, rank: int) -> Any:
        thing = self.things[rank]
        return thing.make() if isinstance(thing, Recipe) else thing


# ---------------------------------------------------------------------------- drawing

LAYOUTS = ("plain", "transposed", "sliced", "expanded", "channels_last", "conjugated", "trained")
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "complex32",
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
)  # fmt: skip
# More than 512 bytes do not travel with the description.
SHAPES = st.one_of(
    st.sampled_from([(), (1,), (0,), (3,), (2, 3), (3, 2), (6,), (1, 2, 2, 3), (2, 0)]),
    st.sampled_from([(700,), (30, 30), (2, 3, 8, 16)]),
)
NUMBERS = st.one_of(
    st.integers(-5, 5),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**62, 2**63, -(2**63), 2**1100]),
    st.booleans(),
    st.floats(),
    st.sampled_from([1e308, -1e308, 0.0, -0.0, math.nan, math.inf, 0.1]),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 255).map(np.uint8),
    st.floats(width=32).map(np.float32),
    st.floats(width=16).map(np.float16),
    st.floats().map(np.float64),
    st.booleans().map(np.bool_),
    st.fractions(),
    st.complex_numbers(allow_nan=False, allow_infinity=False, max_magnitude=1e100),
)
RECIPES = st.builds(Recipe, st.sampled_from(DTYPES), SHAPES, st.sampled_from(LAYOUTS), st.integers(0, 2**16))


@st.composite
def cases(draw: st.DrawFn, ranks: int, call: str) -> Case:
    op = draw(st.sampled_from(OPS)) if call == "reduce" else ""
    what = draw(st.sampled_from(["numbers", "alike", "tensors", "anything"]))
    if what == "numbers":
        things = [draw(NUMBERS) for _ in range(ranks)]
    elif what == "alike":
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
        rest = st.builds(functools.partial(Recipe, dtype, shape), st.sampled_from(LAYOUTS), st.integers(0, 2**16))
        things = [draw(rest) for _ in range(ranks)]
    else:
        things = [draw(RECIPES if what == "tensors" else st.one_of(NUMBERS, RECIPES)) for _ in range(ranks)]
    return Case(call, op, tuple(things))


@st.composite
def runs(draw: st.DrawFn, call: str) -> list[Case]:
    ranks = draw(st.integers(2, 4))
    return draw(st.lists(cases(ranks, call), min_size=CASES, max_size=CASES))


# ---------------------------------------------------------------------------- in the ranks


@dataclass(frozen=True)
class Tensor:
    """A tensor that came out, as plain data."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    memory: bytes
    plain: bool

    @staticmethod
    def of(x: torch.Tensor) -> Tensor:
        plain = type(x) is torch.Tensor and not x.requires_grad and not x.is_conj()
        name = str(x.dtype).removeprefix("torch.")
        bare = x.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
        memory = bare.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
        return Tensor(name, tuple(x.shape), x.stride(), memory, plain)

    def flat(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        return torch.frombuffer(bytearray(self.memory), dtype=dtype) if self.memory else torch.empty(0, dtype=dtype)


def try_all(several: list[Case]) -> list[tuple[str, Any]]:
    return [_tried(case) for case in several]


def _tried(case: Case) -> tuple[str, Any]:
    x = case.made(nbddp.rank())
    try:
        result = nbddp.gather(x) if case.call == "gather" else nbddp.reduce(x, case.op)
    except Exception as error:
        return type(error).__name__, str(error)
    assert not isinstance(x, torch.Tensor) or Tensor.of(x) == Tensor.of(case.made(nbddp.rank())), "x was changed"
    return "", [_plain(item) for item in result] if isinstance(result, list) else _plain(result)


def _plain(x: Any) -> Any:
    return Tensor.of(x) if isinstance(x, torch.Tensor) else x


# ---------------------------------------------------------------------------- what it should be


def check_reduced(case: Case, outcomes: list[tuple[str, Any]]) -> None:
    errors = {(kind, text if kind else "") for kind, text in outcomes}
    assert len(errors) == 1, "the ranks disagree"
    kind, text = errors.pop()
    made = [case.made(rank) for rank in range(len(case.things))]
    expected = refused(case.op, made)
    if expected or kind:
        assert kind in expected or may_overflow(case.op, made, kind), (expected, kind, text)
        alone = {refused_alone(case.op, x) for x in made}
        assert "rank" in text or (len(alone) == 1 and alone != {""})
        return
    results = [result for _, result in outcomes]
    if isinstance(made[0], torch.Tensor):
        check_tensors(case.op, made, results)
    else:
        check_numbers(case.op, made, results)


def refused(op: str, made: list[Any]) -> set[str]:
    """The errors of which one is due; what each rank refuses by itself comes first."""
    alone = {error for x in made if (error := refused_alone(op, x))}
    if alone:
        return alone
    if len({getattr(x, "dtype", None) if isinstance(x, torch.Tensor) else None for x in made}) > 1:
        return {"TypeError"}
    if len({x.shape for x in made if isinstance(x, torch.Tensor)}) > 1:
        return {"ValueError"}
    return set()


def refused_alone(op: str, x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return "ValueError" if op in ("min", "max") and isinstance(x, complex) else ""
    number = x.dtype.is_floating_point or x.dtype.is_complex
    if op == "mean" and not number:
        return "ValueError"
    if (op == "sum" and x.dtype == torch.bool) or (op in ("min", "max") and x.dtype.is_complex):
        return "ValueError"
    return "TypeError" if x.dtype == torch.uint64 else ""


def may_overflow(op: str, made: list[Any], kind: str) -> bool:
    """A large int beside a float, or a sum of integers beyond its type: refused, and told."""
    if kind != "OverflowError":
        return False
    if not isinstance(made[0], torch.Tensor):
        return any(abs(x) > 1e308 for x in made if isinstance(x, (int, Fraction)))
    limits = torch.iinfo(made[0].dtype)
    if made[0].dtype == torch.int64:
        # No wider type: refused where the extremes of the ranks might meet.
        return not (sum(int(x.min()) for x in made) >= limits.min and sum(int(x.max()) for x in made) <= limits.max)
    sums = [sum(column) for column in zip(*(x.flatten().tolist() for x in made))]
    return min(sums) < limits.min or max(sums) > limits.max


def check_numbers(op: str, made: list[Any], results: list[Any]) -> None:
    assert len({(type(result), repr(result)) for result in results}) == 1, results
    values = [x.item() if isinstance(x, np.generic) else x for x in made]
    got = results[0]
    if op in ("min", "max") and not any(v != v for v in values):
        assert got == (min if op == "min" else max)(values)
        assert type(got) in {type(value) for value in values}
        return
    kinds = {int if isinstance(v, bool) else type(v) for v in values}
    expected_type = next((kind for kind in (complex, float, Fraction) if kind in kinds), int)
    if op in ("min", "max"):
        assert got != got
        return
    assert type(got) is (float if op == "mean" and expected_type is int else expected_type)
    check_sum(op, values, got, eps=2.0**-50, largest=1.7976931348623157e308)


def check_tensors(op: str, made: list[torch.Tensor], results: list[Tensor]) -> None:
    for x, result in zip(made, results):
        assert result.memory == results[0].memory, "other bits on another rank"
        assert (result.dtype, result.shape) == (str(x.dtype).removeprefix("torch."), tuple(x.shape))
        assert result.strides == torch.empty_like(x.detach()).stride()
        assert result.plain
    dtype = made[0].dtype
    got = results[0].flat()
    columns = list(zip(*(as_list(x) for x in made)))
    assert len(columns) == len(got)
    for values, value in zip(columns, as_list(got)):
        if op in ("min", "max"):
            if any(v != v for v in values):
                assert value != value
            else:
                assert value == (min if op == "min" else max)(values)
        elif not dtype.is_floating_point and not dtype.is_complex:
            assert value == sum(values)
        else:
            limits = torch.finfo(dtype)
            check_sum(op, values, value, eps=2 * limits.eps, largest=limits.max, tiny=limits.smallest_normal)


def as_list(x: torch.Tensor) -> list[Any]:
    x = x.detach().resolve_conj().flatten()
    if x.dtype.is_complex:
        return list(x.to(torch.complex128).tolist())
    return list((x.double() if x.dtype.is_floating_point else x).tolist())


def check_sum(op: str, values: Any, got: Any, *, eps: float, largest: float, tiny: float = 1e-300) -> None:
    """Against exact fractions; where the exact result or what leads to it is out of range, as floats have it."""
    if any(isinstance(v, complex) for v in (*values, got)):
        check_complex(op, values, got, eps=eps, largest=largest, tiny=tiny)
        return
    count = len(values) if op == "mean" else 1
    special = [v for v in values if isinstance(v, float) and not math.isfinite(v)]
    if special:
        # inf - inf, also where the infinity comes of finite values on the way.
        may_be_nan = any(abs(v) > largest / 4 for v in values if math.isfinite(v)) or math.isnan(sum(special))
        assert got == sum(special) or (may_be_nan and math.isnan(got)), (values, got)
        return
    exact = sum(map(Fraction, values)) / count
    size = sum(abs(Fraction(v)) for v in values) / count
    if not isinstance(got, float):
        assert got == exact
    elif not math.isfinite(got) or abs(got) == largest:  # float8 ends at its largest, without an infinity
        # On the way to the sum it was out of range; a mean is in range where its values are.
        assert size >= Fraction(largest) * (1 - Fraction(eps)), (values, got)
    else:
        assert abs(Fraction(got) - exact) <= max(Fraction(eps) * size, Fraction(tiny)), (values, got, exact)


def check_complex(op: str, values: Any, got: Any, **limits: float) -> None:
    if any(not cmath.isfinite(v) for v in values if isinstance(v, (complex, float))):
        return  # Python and torch themselves differ on them
    if not cmath.isfinite(got):
        assert sum(abs(complex(v)) for v in values) > limits["largest"] / 2
        return
    for part in ("real", "imag"):
        check_sum(op, [float(getattr(v, part, 0.0)) for v in values], float(getattr(got, part)), **limits)


@pytest.mark.slow
@batches(8, CASES)
@given(runs("reduce"))
def test_reduce_gives_what_one_process_computes(several: list[Case]) -> None:
    done = run(try_all, several, nprocs=len(several[0].things))
    for case, *outcomes in zip(several, *done.values):
        note(str(case))
        check_reduced(case, outcomes)


@pytest.mark.slow
@batches(4, CASES)
@given(runs("gather"))
def test_gather_gives_what_each_rank_has(several: list[Case]) -> None:
    done = run(try_all, several, nprocs=len(several[0].things))
    for case, *outcomes in zip(several, *done.values):
        note(str(case))
        expected = [_plain(case.made(rank)) for rank in range(len(case.things))]
        for kind, gathered in outcomes:
            assert kind == ""
            for one, other in itertools.zip_longest(gathered, expected):
                assert same(one, other), (one, other)


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(got, Tensor) and got.plain and (got.dtype, got.shape, got.memory) == (
            expected.dtype, expected.shape, expected.memory,
        )  # fmt: skip
    return type(got) is type(expected) and repr(got) == repr(expected)
