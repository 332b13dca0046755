"""Worker side. Numbers and tensors of all ranks: every rank says what it brings before anything is combined.

The ranks first exchange a short description each. What does not fit together is then the same error on every rank:
no backend compares types or shapes, it adds the bytes.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from nbddp.worker import context

N = TypeVar("N", int, float, torch.Tensor)

_SLOT_NBYTES = 1024  # a description that is longer takes a second exchange
_LENGTH_NBYTES = 8
_INLINE_NBYTES = 512  # a tensor up to this size travels with its description
_SHOWN = 8  # of different parts in an error
_OPS = ("mean", "sum", "min", "max")
_LOCALLY: dict[str, Callable[[Any, Any], Any]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


@dataclass(frozen=True)
class _Part:
    """What one rank brings to a collective.

    Attributes:
        call: as the user wrote it, e.g. ``reduce(x, 'sum')``.
        what: in an error's words, e.g. ``float32 tensor of shape (3,)``.
        refusal: why this rank cannot take part.
        value: what is no tensor, and what is none that can be sent as its memory.
        dtype, shape, strides: of a tensor.
        low, high: its extremes, where they matter: of what is added and may not fit, and NaN where there is one.
        memory: of a small tensor; that of a larger one follows.
    """

    call: str
    what: str
    refusal: tuple[type[Exception], str] | None = None
    value: Any = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    low: float = 0
    high: float = 0
    memory: bytes | None = None


def reduce(x: N, op: str = "mean") -> N:
    """One number or tensor from all ranks', the same on every rank. A collective: call it on all.

    Numbers are combined as Python combines them: an int beside a float on another rank counts as a float, ints are
    exact at any size, and numpy's numbers come back as Python's. Tensors are combined by element. Half precision is
    added in float32, a mean does not overflow where its result fits, and NaN on any rank is NaN in ``"min"`` and
    ``"max"``, too.

    Args:
        x: a number, or a tensor of the same dtype and shape on every rank, in any memory order; it is left as it is.
        op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.

    Returns:
        A number; of ints a float for ``"mean"``, else an int. Or a tensor with ``x``'s dtype, layout and device,
        detached.

    Raises:
        TypeError: a number beside a tensor, tensors of different dtypes (torch would promote them, and half of the
            ranks would get another type than they gave), or what is neither a number nor a dense tensor.
        ValueError: different shapes, ops or calls; the mean of integer tensors, the sum of bools.
        OverflowError: a sum of integer tensors that their dtype does not hold.
        Each of them is raised on all ranks, and names the ranks.
    """
    given: Any = x
    parts, wire = _meet(f"reduce(x, {op!r})", given, functools.partial(_summand, op=op))
    _require_one_kind(parts)
    result: Any
    if wire is None:
        result = _reduce_numbers(parts, op)
    else:
        combined = _reduce_tensors(wire, parts, op).to(given.dtype)  # before it is rearranged: NaN has other bits after
        combined = combined.view(given.shape)
        if type(given) is torch.Tensor and (given.stride(), given.device) == (combined.stride(), combined.device):
            return combined  # type: ignore[return-value]
        result = torch.empty_like(given.detach())
        result.as_subclass(torch.Tensor).copy_(combined)
    return cast(N, result)


def gather(x: N) -> list[N]:
    """Every rank's ``x``, by rank, on every rank. A collective: call it on all.

    Args:
        x: a number or a tensor; types and shapes may differ between the ranks.

    Returns:
        Copies, ``x`` itself among them, also with one rank. Tensors are detached, and on ``x``'s device.
    """
    parts, memory = _meet("gather(x)", x, _memory)
    device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
    found = [_restored(part, flat, device) for part, flat in zip(parts, _memories(memory, parts))]
    return cast("list[N]", found)


def barrier() -> None:
    """Return when every rank has come here."""
    if context.world_size() == 1:
        return
    require_group("barrier")
    device = _group_device()
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def require_group(what: str) -> None:
    """Raise RuntimeError where there is no process group."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"{what}() needs a process group and there is none: this run has init=False; call "
            "torch.distributed.init_process_group() first"
        )


# ---------------------------------------------------------------------------- agreeing


def _meet(
    call: str, x: Any, prepare: Callable[[_Part, Any], tuple[_Part, torch.Tensor | None]]
) -> tuple[list[_Part], torch.Tensor | None]:
    """All ranks' parts, and this rank's tensor in the form that is sent. Raises what any rank refuses, on all ranks."""
    if context.world_size() > 1:
        require_group(call.partition("(")[0])
    part, wire = _Part(call, _described(x)), None
    try:
        part, wire = prepare(part, x)
        packed = pickle.dumps(part)
    except Exception as error:  # whatever it is, the other ranks wait for this one's part
        kind = type(error) if type(error) in (TypeError, ValueError) else RuntimeError
        packed = pickle.dumps(replace(part, value=None, refusal=(kind, str(error)[:1000])))
    parts = [pickle.loads(each) for each in _exchange(packed)]
    _require_one_call(parts)
    return parts, wire


def _exchange(data: bytes) -> list[bytes]:
    """Every rank's bytes, in one collective when they are few."""
    if context.world_size() == 1:
        return [data]
    head = len(data).to_bytes(_LENGTH_NBYTES, "little") + data
    heads = _all_gather_bytes(head[:_SLOT_NBYTES], _SLOT_NBYTES)
    ends = [_LENGTH_NBYTES + int.from_bytes(each[:_LENGTH_NBYTES], "little") for each in heads]
    if max(ends) > _SLOT_NBYTES:
        tails = _all_gather_bytes(head[_SLOT_NBYTES:], max(ends) - _SLOT_NBYTES)
        heads = [each + tail for each, tail in zip(heads, tails)]
    return [each[_LENGTH_NBYTES:end] for each, end in zip(heads, ends)]


def _all_gather_bytes(data: bytes, nbytes: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)
    return [each.cpu().numpy().tobytes() for each in _all_gather(mine.to(_group_device()))]


def _all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
    everyones = [torch.empty_like(mine) for _ in range(context.world_size())]
    dist.all_gather(everyones, mine)
    return everyones


def _require_one_call(parts: Sequence[_Part]) -> None:
    calls = [part.call for part in parts]
    name = calls[0].partition("(")[0]
    if len(set(calls)) > 1:
        raise ValueError(
            f"{name}(): {_by_rank(calls, 'calls', 'call')}; every rank has to make the same call at the same time"
        )
    refusals = {part.refusal for part in parts if part.refusal is not None}
    for kind, text in sorted(refusals, key=str):
        if all(part.refusal == (kind, text) for part in parts):
            raise kind(text)
        refusing = [rank for rank, part in enumerate(parts) if part.refusal == (kind, text)]
        raise kind(f"{name}() on {_names(refusing)}: {text}")


def _require_one_kind(parts: Sequence[_Part]) -> None:
    """What reduce() needs to be the same on all ranks."""
    have = _by_rank([part.what for part in parts], "has", "have")
    if len({part.dtype for part in parts}) > 1:
        raise TypeError(f"reduce(): {have}; every rank has to bring a number, or a tensor of the same dtype")
    if len({part.shape for part in parts}) > 1:
        raise ValueError(f"reduce(): {have}; every rank has to bring a tensor of the same shape")


def _by_rank(texts: Sequence[str], one: str, several: str) -> str:
    """``rank 0 has int 0, ranks 1 and 2 have float 2.5``."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    shown = [f"{_names(same)} {one if len(same) == 1 else several} {text}" for text, same in ranks.items()]
    more = [f"and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return ", ".join(shown[:_SHOWN] + more)


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _described(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{_short(x.dtype)} tensor of shape {tuple(x.shape)}"
    kind = type(x).__name__
    if isinstance(x, int) and x.bit_length() > 64:
        return f"{kind} of {x.bit_length()} bits"
    return f"{kind} {x}" if isinstance(x, (int, float, complex, np.number, np.bool_)) else kind


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------- numbers


def _number(x: Any, op: str) -> Any:
    """A number as Python's own; a bool counts as an int where it is added."""
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if isinstance(x, np.generic):
        if x.dtype.kind not in "biufc":
            raise TypeError(f"reduce() takes a number or a tensor, not {type(x).__name__}")
        x = x.item()
    if not isinstance(x, numbers.Number):
        hint = "; pass torch.from_numpy(x)" if isinstance(x, np.ndarray) else ""
        raise TypeError(f"reduce() takes a number or a tensor, not {type(x).__name__}{hint}")
    if op in ("min", "max") and isinstance(x, numbers.Complex) and not isinstance(x, numbers.Real):
        raise ValueError("complex numbers have no order")
    return int(x) if isinstance(x, bool) and op in ("mean", "sum") else x


def _reduce_numbers(parts: Sequence[_Part], op: str) -> Any:
    try:
        return _combine_numbers([part.value for part in parts], op)
    except (TypeError, ArithmeticError) as error:  # a Decimal beside a float, 10**400 beside 0.5, ...
        have = _by_rank([part.what for part in parts], "has", "have")
        raise type(error)(f"reduce(): {have}: {error}") from None


def _combine_numbers(values: Sequence[Any], op: str) -> Any:
    if op in ("min", "max"):
        first_nan = next((value for value in values if value != value), None)
        return first_nan if first_nan is not None else (min if op == "min" else max)(values)
    total = functools.reduce(operator.add, values)
    if op == "sum":
        return total
    if total - total == 0:
        return total / len(values)
    return functools.reduce(operator.add, [value / len(values) for value in values])  # the sum alone may overflow


# ---------------------------------------------------------------------------- tensors, reduced


def _summand(part: _Part, x: Any, op: str) -> tuple[_Part, torch.Tensor | None]:
    """This rank's part in a reduce, and its tensor in the form that is added or compared."""
    if op not in _OPS:
        raise ValueError(f"op is 'mean', 'sum', 'min' or 'max', not {op!r}")
    if not isinstance(x, torch.Tensor):
        return replace(part, value=_number(x, op)), None
    _require_dense(x)
    _require_meaning(x.dtype, op)
    wire = torch.empty(x.shape, dtype=_wide(x.dtype), device=_device_for(x))
    wire.copy_(x.detach().as_subclass(torch.Tensor))
    if wire.is_complex():
        wire = torch.view_as_real(wire)
    matter = op != "sum" if wire.is_floating_point() else op == "sum"
    low, high = _extremes(wire) if matter else (0, 0)
    memory = _bytes(wire) if wire.nbytes <= _INLINE_NBYTES else None
    return replace(part, dtype=x.dtype, shape=tuple(x.shape), low=low, high=high, memory=memory), wire


def _require_dense(x: torch.Tensor) -> None:
    kind = type(x).__name__
    if x.is_nested or x.is_quantized or x.layout != torch.strided:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
    elif x.device.type == "meta":
        kind = "meta"
    # A DTensor or a fake tensor has no memory of its own; a subclass that only changes functions has.
    elif type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return
    raise TypeError(f"reduce() takes dense tensors, not a {kind} one; pass x.to_dense(), x.dequantize() or the like")


def _require_meaning(dtype: torch.dtype, op: str) -> None:
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"the mean of {dtype} is not of that type; pass x.float()")
    if op == "sum" and dtype == torch.bool:
        raise ValueError(f"the sum of {dtype} is not of that type; pass x.long(), or op='max' for any()")
    if op in ("min", "max") and dtype.is_complex:
        raise ValueError("complex numbers have no order")
    if dtype == torch.uint64:
        raise TypeError("reduce() does not take torch.uint64, which backends do not add; pass x.long()")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A type that every backend adds and compares, and that holds the sum of a few."""
    if dtype.is_complex:
        return torch.complex64 if dtype == torch.complex32 else dtype
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize <= 2 else dtype
    return torch.int32 if dtype.itemsize <= 2 or dtype == torch.int32 else torch.int64


def _extremes(wire: torch.Tensor) -> tuple[float, float]:
    if not wire.numel():
        return 0, 0
    low, high = torch.stack(torch.aminmax(wire)).tolist()
    return low, high


def _reduce_tensors(wire: torch.Tensor, parts: Sequence[_Part], op: str) -> torch.Tensor:
    """The result in its wide type; where it does not fit, ``OverflowError`` on all ranks."""
    dtype = cast(torch.dtype, parts[0].dtype)
    if dtype.is_complex:
        return torch.view_as_complex(_mean(wire, parts) if op == "mean" else _together(wire, parts, op))
    if not dtype.is_floating_point:
        return _sum_of_integers(wire, parts, dtype) if op == "sum" else _together(wire, parts, op)
    if op == "mean":
        return _mean(wire, parts)
    if any(math.isnan(part.low) for part in parts):
        return _flipped(_together(wire, parts, op, functools.partial(_in_order, op=op))).view(wire.dtype)
    return _together(wire, parts, op)


def _mean(wire: torch.Tensor, parts: Sequence[_Part]) -> torch.Tensor:
    ranks = len(parts)
    peak = sum(max(abs(part.low), abs(part.high)) for part in parts)
    if peak <= torch.finfo(wire.dtype).max / 2:
        return _together(wire, parts, "sum").div_(ranks)
    # The sum may overflow where the mean does not. Dividing first costs a bit of precision, so only there.
    divided_first = _together(wire, parts, "sum", lambda share: share / ranks)
    mean = _together(wire, parts, "sum") / ranks
    return torch.where(mean.isfinite(), mean, divided_first)


def _in_order(floats: torch.Tensor, op: str) -> torch.Tensor:
    """Integers in the order of the floats, NaN first for "min" and last for "max": a backend's own min loses it."""
    keys = _flipped(floats.view(torch.int64 if floats.dtype == torch.float64 else torch.int32))
    limits = torch.iinfo(keys.dtype)
    return keys.masked_fill_(floats.isnan(), limits.min if op == "min" else limits.max)


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Negative floats count downwards in their bits, integers upwards. Twice is none; both extremes are NaN."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def _sum_of_integers(wire: torch.Tensor, parts: Sequence[_Part], dtype: torch.dtype) -> torch.Tensor:
    """Exact: torch's own addition would wrap around without a word."""
    low, high = sum(part.low for part in parts), sum(part.high for part in parts)
    if _fits(low, high, dtype):
        return _together(wire, parts, "sum")
    if _fits(low, high, torch.int64):
        total = _together(wire, parts, "sum", torch.Tensor.long)
        if _fits(*_extremes(total), dtype):
            return total
    hint = "x.double()" if dtype == torch.int64 else "x.long()"
    raise OverflowError(f"reduce(): the sum over {len(parts)} ranks is too large for {dtype}; pass {hint}")


def _fits(low: float, high: float, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= low and high <= limits.max


def _together(
    wire: torch.Tensor,
    parts: Sequence[_Part],
    op: str,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda share: share,
) -> torch.Tensor:
    """All ranks' tensors, each changed first, added or compared; small ones have come with the parts.

    ``wire`` is used up, unless ``change`` makes a new one of it.
    """
    memories = [part.memory for part in parts if part.memory is not None]
    if memories:  # shapes are equal: of all ranks, or of none
        shares = [change(_tensor(memory, wire.dtype)) for memory in memories]
        return functools.reduce(_LOCALLY[op], shares).view(wire.shape)
    changed = change(wire)
    if context.world_size() > 1:
        dist.all_reduce(changed, op=getattr(dist.ReduceOp, op.upper()))
    return changed


# ---------------------------------------------------------------------------- tensors, gathered


def _memory(part: _Part, x: Any) -> tuple[_Part, torch.Tensor | None]:
    """This rank's part in a gather, and the memory of its tensor as bytes."""
    if not isinstance(x, torch.Tensor):
        return replace(part, value=x), None
    if x.device.type == "meta":
        raise TypeError("gather() takes tensors with data, not a meta one")
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_nested or x.is_quantized or x.layout != torch.strided:
        return replace(part, value=x.detach().clone().cpu()), None
    dense = x.detach().resolve_conj().resolve_neg().to(_device_for(x), copy=True)
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    memory = _bytes(flat) if flat.nbytes <= _INLINE_NBYTES else None
    return replace(part, dtype=x.dtype, shape=tuple(x.shape), strides=dense.stride(), memory=memory), flat


def _memories(mine: torch.Tensor | None, parts: Sequence[_Part]) -> list[torch.Tensor]:
    """Every rank's bytes, by rank; empty for what is none of the large tensors."""
    sizes = [_nbytes(part) if part.memory is None else 0 for part in parts]
    if not any(sizes):
        return [torch.empty(0, dtype=torch.uint8)] * len(parts)
    if len(parts) == 1 and mine is not None:
        return [mine]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_group_device())
    if mine is not None:
        padded[: len(mine)] = mine
    return [flat[:size].clone() if size < len(flat) else flat for flat, size in zip(_all_gather(padded), sizes)]


def _nbytes(part: _Part) -> int:
    return math.prod(part.shape) * part.dtype.itemsize if part.dtype is not None else 0


def _restored(part: _Part, flat: torch.Tensor, device: torch.device) -> Any:
    if part.dtype is None:
        return part.value.to(device) if isinstance(part.value, torch.Tensor) else part.value
    elements = flat.view(part.dtype) if part.memory is None else _tensor(part.memory, part.dtype)
    return elements.as_strided(part.shape, part.strides).to(device)


# ---------------------------------------------------------------------------- bytes


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(memory: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(memory), dtype=dtype) if memory else torch.empty(0, dtype=dtype)


def _group_device() -> torch.device:
    """Where this group's collectives take their tensors."""
    return context.device() if "nccl" in str(dist.get_backend()) else torch.device("cpu")


def _device_for(x: torch.Tensor) -> torch.device:
    return x.device if context.world_size() == 1 else _group_device()
