"""Whatever is sent arrives as it was: kinds, numbers, layouts, and which of its parts are the same memory.

``NBDDP_CASES=3000 python -m pytest tests/test_payload_properties.py --timeout=0`` tries that many new values.
"""

import collections
import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from nbddp import payload
from tests.support import CHARACTERS

CASES = settings(
    max_examples=int(os.environ.get("NBDDP_CASES", "25")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip
NUMPY_DTYPES = ["?", "b", "H", "i", "l", "e", "f", "d", "g", "F", "S5", "V3", ">i2", ">f8", ">c8", "M8[ns]", ">M8[s]"]
DENSE = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.5]])
ODD = (  # what has a way of its own to pickle
    lambda: DENSE.to_sparse(),
    lambda: DENSE.to_sparse_csr(),
    lambda: torch.quantize_per_tensor(DENSE, 0.5, 3, torch.qint8),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    lambda: torch.empty(2, 3, device="meta"),
    lambda: torch.nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False),
    lambda: torch.nn.BatchNorm1d(2),
    lambda: torch.ones(3).untyped_storage(),
    lambda: torch.Generator().manual_seed(3),
    lambda: np.random.default_rng(3),
    lambda: np.array([{"a": 1}, None, [1, 2]], dtype=object),
    lambda: np.ma.array([1.0, 2.0], mask=[False, True]),
    lambda: np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", ">f8")]),
    lambda: np.float32(1.5),
    lambda: bytearray(b"abc"),
    lambda: importlib.import_module("pandas").DataFrame({"x": range(3), "kind": [*"aba"]}).astype({"kind": "category"}),
)


class Pair(NamedTuple):
    left: Any
    right: Any


class SubTensor(torch.Tensor): ...


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """An array of any kind and order, or a view of one."""
    dtype, shape = np.dtype(draw(st.sampled_from(NUMPY_DTYPES))), draw(st.lists(st.integers(0, 4), max_size=3))
    data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, int(np.prod(shape)) * dtype.itemsize)
    array = data.astype("u1").view(dtype).reshape(shape, order=draw(st.sampled_from("CF")))
    views = array, array.T, array[..., ::2] if shape else array, np.flip(array), np.broadcast_to(array, (2, *shape))
    return draw(st.sampled_from(views))


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """A tensor of any kind."""
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(st.lists(st.integers(0, 4), max_size=3))
    data = torch.arange(int(np.prod(shape)) * dtype.itemsize) % (2 if dtype == torch.bool else 120)
    tensor = data.to(torch.uint8).view(dtype).view(shape)
    if draw(st.integers(0, 9)) == 0:
        return tensor.as_subclass(SubTensor)
    return tensor.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> Any:
    """The same memory, seen in another way."""
    plain, room = tensor.detach(), tensor.untyped_storage().nbytes() // tensor.element_size()
    ways = [lambda: tensor, lambda: plain, lambda: plain.expand(2, *plain.shape)]
    ways.append(lambda: plain.mT if plain.ndim > 1 else plain)
    if plain.ndim:
        ways.append(lambda: plain[draw(st.slices(len(plain)).filter(lambda s: (s.step or 1) > 0))])
    if room > 4:
        ways.append(lambda: plain.as_strided((2, 2), draw(st.sampled_from([(1, 1), (0, 2), (2, 1)])), room - 4))
    if plain.dtype.is_complex:
        ways += [plain.conj, lambda: plain.conj().imag]  # with the negative bit
    if plain.dtype in (torch.int64, torch.float32) and type(plain) is torch.Tensor:
        ways.append(plain.numpy)
    return draw(st.sampled_from(ways))()


@st.composite
def values(draw: st.DrawFn) -> Any:
    """Nested containers whose leaves may be the same object, or see the same memory."""
    data = st.one_of(arrays(), tensors(), st.sampled_from(ODD).map(lambda make: make()))
    found = draw(st.lists(data, min_size=1, max_size=3))
    strided = [each for each in found if isinstance(each, torch.Tensor) and _has_memory(each)]
    found += [draw(views(draw(st.sampled_from(strided)))) for _ in range(draw(st.integers(0, 4))) if strided]
    keys = st.one_of(st.integers(), st.text(CHARACTERS, max_size=3), st.tuples(st.booleans()))
    nested = st.recursive(
        st.sampled_from([*found, None, 3, 2.5, "text", b"bytes", 1j, ..., frozenset({1}), {2}]),
        lambda inner: st.one_of(
            *(st.lists(inner, max_size=4).map(kind) for kind in (list, tuple, collections.deque, _loop)),
            *(st.dictionaries(keys, inner, max_size=3).map(kind) for kind in (dict, collections.OrderedDict)),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=8,
    )
    return [found, draw(nested)]


def _loop(items: list[Any]) -> list[Any]:
    items.append(items)
    return items


def _has_memory(tensor: torch.Tensor) -> bool:
    is_odd = tensor.is_quantized or tensor.is_nested
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not is_odd


class Description:
    """All that has to arrive: kinds, numbers, layouts, which places hold one object, and which tensors one memory."""

    def __init__(self, value: Any) -> None:
        self._seen: dict[int, Any] = {}
        self.storages: list[torch.UntypedStorage] = []
        self.text = str(self._of(value)) + str([[a._cdata == b._cdata for a in self.storages] for b in self.storages])

    def _of(self, value: Any) -> Any:
        if isinstance(value, (int, float, complex, str, bytes, type(None), type(...))):
            return repr(value)
        if id(value) in self._seen:
            return "again", list(self._seen).index(id(value))
        self._seen[id(value)] = value
        return type(value).__name__, *self._parts(value)

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value.dtype, value.layout, value.device, value.requires_grad
            if _has_memory(value):
                yield value.shape, value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()
                yield bytes(value.untyped_storage())
                self.storages.append(value.untyped_storage())
            else:
                yield repr(value)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject and type(value) is np.ndarray:
            native = value.dtype.newbyteorder("=") if value.dtype.kind != "V" else value.dtype
            # numpy's own pickle gives views with gaps in native order, and forgets the unit of no dates at all.
            yield str(native if value.size else native.kind), value.shape, value.astype(native).tobytes()
            yield value.flags.f_contiguous and not value.flags.c_contiguous  # a view without gaps keeps its order
        elif isinstance(value, (list, tuple, collections.deque)):
            yield from map(self._of, value)
        elif isinstance(value, dict):
            yield from ((self._of(key), self._of(item)) for key, item in value.items())
        elif isinstance(value, torch.Generator):
            yield value.get_state().tolist()
        elif isinstance(value, np.random.Generator):
            yield value.bit_generator.state
        elif isinstance(value, torch.UntypedStorage):
            yield bytes(value)
        elif isinstance(value, torch.nn.Module):
            yield self._of(dict(value.state_dict())), repr(value)
        else:
            yield repr(value), str(getattr(value, "dtypes", ""))


@pytest.mark.filterwarnings("ignore")
@CASES
@example(torch.zeros(1).to(torch.float8_e5m2).requires_grad_(), False, False)
@given(values(), st.booleans(), st.booleans())
def test_any_value_arrives_as_it_was(value: Any, mapped: bool, back: bool) -> None:
    """To a rank or back, by a copy or by a mapping; also what plain pickle refuses, such as float8."""
    before = Description(value)
    note(before.text)
    packed = payload.pack([value, torch.ones(2 << 20) if mapped else None], back=back)
    with packed.block as block:
        arrived = Description(payload.unpack(block).value[0])
    assert arrived.text == before.text
    for storage in arrived.storages:
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            storage.fill_(0)
    assert Description(value).text == before.text
