"""Combines numbers or tensors of all ranks for ``all_reduce``."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from nbddp.worker import context
from nbddp.worker.exchange import INLINE_NBYTES, Part, by_rank, device_for, from_bytes, to_bytes

_OPS = ("mean", "sum", "min", "max")
_LOCAL_OPS: dict[str, Callable[[Any, Any], Any]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


def prepare_reduce(part: Part, x: Any, op: str) -> tuple[Part, torch.Tensor | None]:
    """This rank's part of a reduce, and its tensor in the dtype that is added or compared."""
    if op not in _OPS:
        raise ValueError(f"op must be 'mean', 'sum', 'min' or 'max', not {op!r}")
    if not isinstance(x, torch.Tensor):
        return replace(part, value=_number(x, op)), None
    _require_dense(x)
    _require_supported(x.dtype, op)
    wire = torch.empty(x.shape, dtype=_wire_dtype(x.dtype), device=device_for(x))
    wire.copy_(x.detach().as_subclass(torch.Tensor))
    if wire.is_complex():
        wire = torch.view_as_real(wire)
    needs_extremes = op != "sum" if wire.is_floating_point() else op == "sum"
    low, high = _extremes(wire) if needs_extremes else (0, 0)
    memory = to_bytes(wire) if wire.nbytes <= INLINE_NBYTES else None
    return replace(part, dtype=x.dtype, shape=tuple(x.shape), low=low, high=high, memory=memory), wire


def require_same_type(parts: Sequence[Part]) -> None:
    """Raise TypeError or ValueError if the ranks' tensors have different dtypes or shapes."""
    have = by_rank([part.description for part in parts], "has", "have")
    if len({part.dtype for part in parts}) > 1:
        raise TypeError(f"all_reduce(): {have}; all ranks must pass numbers, or tensors of the same dtype")
    if len({part.shape for part in parts}) > 1:
        raise ValueError(f"all_reduce(): {have}; all ranks must pass tensors of the same shape")


# ---------------------------------------------------------------------------- numbers


def _number(x: Any, op: str) -> Any:
    """A Python number; a bool becomes an int if it is added."""
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if isinstance(x, np.generic):
        if x.dtype.kind not in "biufc":
            raise TypeError(f"all_reduce() takes a number or a tensor, not {type(x).__name__}")
        x = x.item()
    if not isinstance(x, numbers.Number):
        hint = "; pass torch.from_numpy(x)" if isinstance(x, np.ndarray) else ""
        raise TypeError(f"all_reduce() takes a number or a tensor, not {type(x).__name__}{hint}")
    if op in ("min", "max") and isinstance(x, numbers.Complex) and not isinstance(x, numbers.Real):
        raise ValueError("complex numbers have no order")
    return int(x) if isinstance(x, bool) and op in ("mean", "sum") else x


def reduce_numbers(parts: Sequence[Part], op: str) -> Any:
    """The result for numbers, with Python's arithmetic."""
    values = [part.value for part in parts]
    try:
        if op in ("min", "max"):
            first_nan = next((value for value in values if value != value), None)
            return first_nan if first_nan is not None else (min if op == "min" else max)(values)
        total = functools.reduce(operator.add, values)
        if op == "sum":
            return total
        if total - total == 0:
            return total / len(values)
        return functools.reduce(operator.add, [value / len(values) for value in values])  # the sum overflowed
    except (TypeError, ArithmeticError) as error:  # Decimal + float, 10**400 + 0.5, ...
        have = by_rank([part.description for part in parts], "has", "have")
        raise type(error)(f"all_reduce(): {have}: {error}") from None


# ---------------------------------------------------------------------------- tensors


def _require_dense(x: torch.Tensor) -> None:
    kind = type(x).__name__
    if x.is_nested or x.is_quantized or x.layout != torch.strided:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
    elif x.device.type == "meta":
        kind = "meta"
    # A DTensor or a fake tensor, which has no memory, overrides __torch_dispatch__; other subclasses have memory.
    elif type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return
    raise TypeError(
        f"all_reduce() takes dense tensors, not a {kind} one; pass x.to_dense(), x.dequantize() or the like"
    )


def _require_supported(dtype: torch.dtype, op: str) -> None:
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"the mean of {dtype} tensors does not have that dtype; pass x.float()")
    if op == "sum" and dtype == torch.bool:
        raise ValueError(f"the sum of {dtype} tensors does not have that dtype; pass x.long(), or op='max' for any()")
    if op in ("min", "max") and dtype.is_complex:
        raise ValueError("complex numbers have no order")
    if dtype == torch.uint64:
        raise TypeError("all_reduce() does not take torch.uint64, which backends cannot add; pass x.long()")


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype that every backend can add and compare, wider than a small one so that its sums fit."""
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


def reduce_tensors(wire: torch.Tensor, parts: Sequence[Part], op: str) -> torch.Tensor:
    """The result in the wire's dtype. Raises ``OverflowError`` on all ranks if it does not fit into the tensors'."""
    dtype = cast(torch.dtype, parts[0].dtype)
    if dtype.is_complex:
        return torch.view_as_complex(_mean(wire, parts) if op == "mean" else _combine(wire, parts, op))
    if not dtype.is_floating_point:
        return _sum_of_integers(wire, parts, dtype) if op == "sum" else _combine(wire, parts, op)
    if op == "mean":
        return _mean(wire, parts)
    if any(math.isnan(part.low) for part in parts):
        return _flip_negatives(_combine(wire, parts, op, functools.partial(_sortable_bits, op=op))).view(wire.dtype)
    return _combine(wire, parts, op)


def _mean(wire: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    ranks = len(parts)
    peak = sum(max(abs(part.low), abs(part.high)) for part in parts)
    if peak <= torch.finfo(wire.dtype).max / 2:
        return _combine(wire, parts, "sum").div_(ranks)
    # Elements whose sum overflows are divided first, which costs a bit of precision.
    divided_first = _combine(wire, parts, "sum", lambda share: share / ranks)
    mean = _combine(wire, parts, "sum") / ranks
    return torch.where(mean.isfinite(), mean, divided_first)


def _sortable_bits(floats: torch.Tensor, op: str) -> torch.Tensor:
    """Integers that sort like the floats, with NaN first for "min" and last for "max": a backend's min ignores NaN."""
    keys = _flip_negatives(floats.view(torch.int64 if floats.dtype == torch.float64 else torch.int32))
    limits = torch.iinfo(keys.dtype)
    return keys.masked_fill_(floats.isnan(), limits.min if op == "min" else limits.max)


def _flip_negatives(bits: torch.Tensor) -> torch.Tensor:
    """Reverse the order of negative floats' bits to sort them as integers; applied twice, it changes nothing.

    Both extreme integers stand for NaN.
    """
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def _sum_of_integers(wire: torch.Tensor, parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
    """The exact sum, or OverflowError: torch's own addition wraps around silently."""
    low, high = sum(part.low for part in parts), sum(part.high for part in parts)
    if _fits(low, high, dtype):
        return _combine(wire, parts, "sum")
    if _fits(low, high, torch.int64):
        total = _combine(wire, parts, "sum", torch.Tensor.long)
        if _fits(*_extremes(total), dtype):
            return total
    hint = "x.double()" if dtype == torch.int64 else "x.long()"
    raise OverflowError(f"all_reduce(): the sum over {len(parts)} ranks is too large for {dtype}; pass {hint}")


def _fits(low: float, high: float, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= low and high <= limits.max


def _combine(
    wire: torch.Tensor,
    parts: Sequence[Part],
    op: str,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda share: share,
) -> torch.Tensor:
    """Apply ``change`` to all ranks' tensors and combine them; small tensors were sent with the parts.

    Overwrites ``wire``, unless ``change`` returns a new tensor.
    """
    memories = [part.memory for part in parts if part.memory is not None]
    if memories:  # of all ranks or of none, since the shapes are equal
        shares = [change(from_bytes(memory, wire.dtype)) for memory in memories]
        return functools.reduce(_LOCAL_OPS[op], shares).view(wire.shape)
    changed = change(wire)
    if context.world_size() > 1:
        dist.all_reduce(changed, op=getattr(dist.ReduceOp, op.upper()))
    return changed
