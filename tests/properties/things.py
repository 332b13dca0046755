"""Anything a notebook might send to its ranks: containers of arrays and tensors in all their forms, and what they are.

Imported by ranks, too: :func:`describe` says on both sides what a thing is, so that both can be compared.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

TORCH_DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        # Shells without arithmetic, which torch itself cannot print: bits, quantized (made otherwise), below a byte.
        if isinstance(value, torch.dtype)
        and not str(value).startswith(("torch.q", "torch.bits", "torch.float4", "torch.int1", "torch.uint1"))
        and not (str(value)[-1] in "1234567" and "int" in str(value) and value.itemsize == 1)
    }
    | {torch.int16, torch.uint16},
    key=str,
)
NUMPY_DTYPES = [
    "?", "b", "B", "h", "H", "i", "I", "l", "L", "e", "f", "d", "g", "F", "D", "G", "S1", "S5", "U3", "V3",
    ">i2", ">i4", ">f8", ">c8", ">U2", "M8[D]", "M8[ns]", ">M8[s]", "m8[ms]",
    [("a", "i4"), ("b", "f8")],
    [("a", ">u2"), ("b", "S3", (2,)), ("c", [("d", "?")])],
]  # fmt: skip


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclasses.dataclass
class Config:
    """A dataclass."""

    data: Any
    more: Any = None


class Sub(np.ndarray):
    """A subclass of numpy's arrays."""


class SubTensor(torch.Tensor):
    """A subclass of torch's tensors."""


# ---------------------------------------------------------------------------- making them


def things() -> st.SearchStrategy[Any]:
    """Nested containers whose leaves may be the same object, or see the same memory."""
    return memories().flatmap(_nested)


def memories() -> st.SearchStrategy[list[Any]]:
    """Arrays and tensors, and views of them."""
    return _memories()


@st.composite
def _memories(draw: st.DrawFn) -> list[Any]:
    found: list[Any] = draw(st.lists(st.one_of(_arrays(), _tensors()), min_size=1, max_size=3))
    for _ in range(draw(st.integers(0, 5))):
        found.append(draw(_view(draw(st.sampled_from(found)))))
    if draw(st.booleans()):
        found.append(draw(_odd()))
    return found


def _nested(leaves: list[Any]) -> st.SearchStrategy[Any]:
    leaf = st.one_of(st.sampled_from(leaves), st.sampled_from([None, 3, 2.5, "text", b"bytes", 1 + 2j, ...]))
    keys = st.one_of(st.integers(), st.text(max_size=3), st.tuples(st.integers(), st.booleans()))
    nested = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.lists(inner, max_size=3).map(collections.deque),
            st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
            st.builds(Pair, inner, inner),
            st.builds(Config, inner, more=inner),
            st.sets(st.one_of(st.integers(), st.text(max_size=2)), max_size=3),
            st.frozensets(st.integers(), max_size=3),
            inner.map(_a_loop),
        ),
        max_leaves=8,
    )
    # Every leaf at least once; the same ones again within.
    return st.tuples(st.permutations(leaves).map(list), nested)


def _a_loop(inner: Any) -> list[Any]:
    loop = [inner]
    loop.append(loop)
    return loop


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=3))
    count = int(np.prod(shape, dtype=int))
    raw = draw(st.binary(min_size=4, max_size=16)) * (count * dtype.itemsize // 4 + 1)
    if dtype.kind in "?U" or dtype.names:  # not every bit pattern is a value
        array = np.zeros(count, dtype=dtype)
        if dtype.kind == "?":
            array[:] = [byte % 2 for byte in raw[:count]]
        elif dtype.kind == "U":
            array[:] = "xy"
        else:
            array["a"] = np.arange(count)
    else:
        array = np.frombuffer(bytearray(raw), dtype=dtype, count=count)
    return array.reshape(shape, order=draw(st.sampled_from("CF")))


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=3))
    count = int(np.prod(shape, dtype=int))
    raw = torch.tensor([i * 7 % (2 if dtype == torch.bool else 120) for i in range(count * dtype.itemsize)])
    tensor = raw.to(torch.uint8).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    if dtype.is_floating_point and draw(st.booleans()):
        tensor.requires_grad_()
        return torch.nn.Parameter(tensor.detach(), draw(st.booleans())) if draw(st.booleans()) else tensor
    return tensor.as_subclass(SubTensor) if draw(st.integers(0, 9)) == 0 else tensor


def _view(thing: Any) -> st.SearchStrategy[Any]:
    if isinstance(thing, torch.Tensor):
        return _tensor_view(thing)
    if isinstance(thing, np.ndarray):
        return _array_view(thing)
    return st.just(thing)


@st.composite
def _tensor_view(draw: st.DrawFn, tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) is SubTensor:
        return tensor
    ways: list[Callable[[], Any]] = [
        lambda: tensor.detach(),
        lambda: tensor.detach().unsqueeze(0),
        lambda: tensor.detach().expand(2, *tensor.shape),
        lambda: tensor.detach().permute(draw(st.permutations(range(tensor.dim())))),
        lambda: draw(_strided(tensor.detach())),
    ]
    if tensor.dim():
        ways.append(lambda: tensor.detach()[draw(st.slices(len(tensor)).filter(lambda s: (s.step or 1) > 0))])
    if tensor.dtype.is_complex:
        ways += [lambda: tensor.detach().conj(), lambda: tensor.detach().conj().imag]  # with the negative bit
        if not tensor.is_conj() and not tensor.is_neg():
            ways.append(lambda: torch.view_as_real(tensor.detach()))
    if tensor.dtype.is_floating_point and tensor.is_leaf:
        ways.append(lambda: torch.nn.Parameter(tensor.detach()))
    if tensor.dtype in _NUMPYS and not tensor.is_conj() and not tensor.is_neg():
        ways += [lambda: tensor.detach().numpy()] * 2
    return draw(st.sampled_from(ways))()


_NUMPYS = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


@st.composite
def _strided(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Any view that as_strided can make: steps of 0, overlaps, an offset."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    if not room:
        return tensor
    sizes = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = [draw(st.integers(0, max(0, (room - 1) // (2 * max(1, len(sizes)))))) for _ in sizes]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides) if size)
    if last >= room:
        return tensor
    return tensor.as_strided(sizes, strides, draw(st.integers(0, room - 1 - last)))


@st.composite
def _array_view(draw: st.DrawFn, array: np.ndarray[Any, Any]) -> Any:
    def frozen() -> Any:
        view = array.view()
        view.flags.writeable = False
        return view

    ways: list[Callable[[], Any]] = [
        lambda: array.transpose(draw(st.permutations(range(array.ndim)))),
        lambda: np.broadcast_to(array, (2, *array.shape)),
        lambda: array[tuple(draw(st.slices(size)) for size in array.shape)],
        lambda: array[tuple(slice(None, None, -1) for _ in array.shape)],
        lambda: array.view(Sub),
        frozen,
    ]
    if array.dtype.names and array.ndim:
        ways.append(lambda: array["a"])
    if array.ndim == 1 and len(array) > 2 and array.flags.writeable:
        ways.append(lambda: np.lib.stride_tricks.sliding_window_view(array, 2, writeable=True))
    if array.flags.c_contiguous:
        ways += [lambda: array.reshape(-1), lambda: array.reshape(-1).view("u1") if array.size else array]
    simple = array.dtype.kind in "bif" and array.dtype.isnative and array.dtype.itemsize <= 8
    if simple and array.flags.writeable and all(stride >= 0 for stride in array.strides):
        ways += [lambda: torch.from_numpy(array.view(np.ndarray))] * 3
    return draw(st.sampled_from(ways))()


def _odd() -> st.SearchStrategy[Any]:
    """What has a way of its own to pickle."""
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.5]])
    makers: list[Callable[[], Any]] = [
        lambda: dense.to_sparse(),
        lambda: dense.to_sparse_csr(),
        lambda: dense.to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8),
        lambda: torch.quantize_per_channel(dense, torch.ones(2), torch.zeros(2), 0, torch.quint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
        lambda: torch.empty(2, 3, device="meta"),
        lambda: torch.nn.LazyLinear(3),
        lambda: torch.nn.Linear(2, 3),
        lambda: torch.nn.BatchNorm1d(2),
        lambda: np.array([{"a": 1}, None, [1, 2]], dtype=object),
        lambda: np.array([(1, {"b": 2})], dtype=[("a", int), ("o", object)]),
        lambda: np.ma.array([1.0, 2.0], mask=[False, True]),
        lambda: np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
        lambda: np.array(["a", "bcd" * 10], dtype=np.dtypes.StringDType()),
        lambda: np.float32(1.5),
        lambda: np.datetime64("2024-01-01"),
        lambda: bytearray(b"abc"),
        lambda: torch.ones(3).untyped_storage(),
        lambda: torch.Generator().manual_seed(3),
        lambda: np.random.default_rng(3),
        _frame,
    ]
    if not hasattr(np.dtypes, "StringDType"):  # before numpy 2
        del makers[15]
    return st.sampled_from(makers).map(lambda make: make())


def _frame() -> Any:
    import pandas

    frame = pandas.DataFrame({"x": range(4), "name": list("abcd"), "when": pandas.date_range("2024", periods=4)})
    frame["kind"] = frame.name.astype("category")
    return frame


# ---------------------------------------------------------------------------- saying what they are


def describe(thing: Any) -> list[Any]:
    """All that is to survive: kinds, values, which places hold one object, and which tensors one storage.

    Not told are the strides of numpy arrays that are not contiguous, and which arrays are views of each other: they
    arrive as objects of their own, as from pickle.
    """
    describer = _Describer()
    described = describer.of(thing)
    return [described, describer.storages()]


def orders(thing: Any) -> list[tuple[bool, bool] | None]:
    """Of each array that is contiguous, how it is."""
    describer = _Describer()
    describer.of(thing)
    flags = [array.flags for array, _ in describer.arrays]
    return [(each.c_contiguous, each.f_contiguous) if each.forc else None for each in flags]


def overlaps(thing: Any) -> list[tuple[Any, Any]]:
    """Each two arrays or storages in it that have bytes in common, and each array whose own elements have."""
    describer = _Describer()
    describer.of(thing)
    extents = describer.extents()
    found = [(a, b) for a, b in itertools.combinations(extents, 2) if max(a[0], b[0]) < min(a[1], b[1])]
    return found + [(extent, extent) for array, extent in describer.arrays if _lies_over_itself(array)]


class _Describer:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self.arrays: list[tuple[Any, tuple[int, int]]] = []
        self._storages: list[Any] = []

    def of(self, thing: Any) -> Any:
        if isinstance(thing, (int, float, complex, str, bytes, type(None), type(...), np.dtype)):
            return repr(thing)
        if id(thing) in self._numbers:
            return ["again", self._numbers[id(thing)]]
        self._numbers[id(thing)] = len(self._numbers)
        self._alive.append(thing)
        return [type(thing).__name__, *self._parts(thing)]

    def _parts(self, thing: Any) -> Iterator[Any]:
        if isinstance(thing, torch.Tensor):
            yield from self._tensor(thing)
        elif isinstance(thing, np.ndarray):
            yield from self._array(thing)
        elif isinstance(thing, torch.UntypedStorage):
            yield bytes(thing.tolist())
        elif isinstance(thing, dict):
            yield from ([self.of(key), self.of(value)] for key, value in thing.items())
        elif isinstance(thing, (set, frozenset)):
            yield sorted(map(repr, thing))
        elif isinstance(thing, (list, tuple, collections.deque)):
            yield from map(self.of, thing)
        elif isinstance(thing, (torch.Generator, np.random.Generator, bytearray, np.generic)):
            yield repr(_state(thing))
        elif type(thing).__name__ == "DataFrame":
            yield thing.to_csv(), [str(dtype) for dtype in thing.dtypes]
        else:
            yield [[name, self.of(value)] for name, value in sorted(vars(thing).items()) if _is_data(name)]

    def _tensor(self, tensor: torch.Tensor) -> Iterator[Any]:
        yield str(tensor.dtype), str(tensor.layout), tensor.device.type, tensor.requires_grad
        if torch.nn.parameter.is_lazy(tensor) or tensor.is_nested:
            yield repr(tensor.unbind()) if tensor.is_nested else "lazy"
            return
        yield tuple(tensor.shape), tensor.is_conj(), tensor.is_neg()
        if tensor.device.type == "meta":
            return
        if tensor.layout is not torch.strided:
            yield _bits(tensor.to_dense())
            return
        if tensor.is_quantized:
            yield str(tensor.qscheme()), _bits(tensor.int_repr()), _bits(tensor.dequantize())
            return
        yield tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
        yield _bits(tensor)
        self._storages.append(tensor.untyped_storage())

    def _array(self, array: np.ndarray[Any, Any]) -> Iterator[Any]:
        # numpy itself forgets the byte order of dates where there are none.
        yield str(array.dtype if array.nbytes else array.dtype.kind), array.shape
        if isinstance(array, np.ma.MaskedArray):
            yield repr(array)
        elif array.dtype.hasobject:
            yield [self.of(item) for item in array.reshape(-1).tolist()]
        elif not array.dtype.isbuiltin and type(array.dtype).__name__ == "StringDType":
            yield array.tolist()
        else:
            plain = array.view(np.ndarray)
            yield array.flags.writeable or not array.nbytes
            yield np.ascontiguousarray(plain).tobytes()
            self.arrays.append((plain, _extent(plain) if plain.nbytes else (0, 0)))

    def extents(self) -> list[tuple[int, int]]:
        """The addresses of all arrays, and of all storages that tensors share."""
        storages = {storage._cdata: storage for storage in self._storages}.values()
        of_storages = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        return [extent for _, extent in self.arrays] + of_storages

    def storages(self) -> list[int]:
        """By tensor, which of them has the same storage first."""
        identities = [storage._cdata for storage in self._storages]
        return [identities.index(identity) for identity in identities]


def _extent(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    lowest = highest = array.ctypes.data
    for size, step in zip(array.shape, array.strides):
        lowest, highest = lowest + min(0, (size - 1) * step), highest + max(0, (size - 1) * step)
    return lowest, highest + array.itemsize


def _lies_over_itself(array: np.ndarray[Any, Any]) -> bool:
    """By the address of each of its bytes."""
    if not array.flags.writeable or not array.nbytes:
        return False
    steps = [np.arange(size) * step for size, step in zip(array.shape, array.strides)]
    bytes_ = functools.reduce(np.add.outer, [*steps, np.arange(array.itemsize)], np.int64(0)).reshape(-1)
    return len(set(bytes_.tolist())) < len(bytes_)


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def _state(thing: Any) -> Any:
    if isinstance(thing, torch.Generator):
        return bytes(thing.get_state().tolist())
    return thing.bit_generator.state if isinstance(thing, np.random.Generator) else thing


def _is_data(name: str) -> bool:
    return not name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called", "_hook", "_hook_id"))


# ---------------------------------------------------------------------------- in a rank


def seen_and_overwritten(thing: Any) -> tuple[list[Any], Any]:
    """What the rank got, and the thing to be sent back; then every byte of it that can be is written over."""
    description = describe(thing)
    return description, thing


def overwrite(thing: Any) -> None:
    """Write over all memory that can be written."""
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, dict):
            waiting += current.values()
        elif isinstance(current, (list, tuple, collections.deque)):
            waiting += current
        elif isinstance(current, Config):
            waiting += [current.data, current.more]
        elif isinstance(current, np.ndarray) and current.flags.writeable and not current.dtype.hasobject:
            current.view(np.ndarray)[...] = np.zeros((), current.dtype)
        elif isinstance(current, torch.Tensor) and _has_memory(current):
            current.untyped_storage().fill_(0)


def _has_memory(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or torch.nn.parameter.is_lazy(tensor):
        return False
    return tensor.device.type == "cpu"
