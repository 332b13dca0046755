"""Exchanges descriptions of all ranks' arguments before a collective, so that a mismatch raises on every rank.

Backends do not compare types or shapes: they add the bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nbddp.worker import context, process_group

INLINE_NBYTES = 512  # a tensor up to this size is sent with its description
_SLOT_NBYTES = 1024  # a longer description takes a second exchange
_LENGTH_NBYTES = 8
_MAX_SHOWN = 8  # different arguments in an error


@dataclass(frozen=True)
class Part:
    """One rank's contribution to a collective.

    Attributes:
        call: the call as the user wrote it, e.g. ``all_reduce(x, 'sum')``.
        description: for errors, e.g. ``float32 tensor of shape (3,)``.
        refusal: why this rank cannot take part.
        value: a number or another object, or a tensor that cannot be sent as its memory.
        dtype, shape, strides: of a tensor.
        low, high: a tensor's extremes, if its sum may overflow or its NaNs have to be found; NaN if it has one.
        memory: the bytes of a small tensor; those of a larger one are sent afterwards.
    """

    call: str
    description: str
    refusal: tuple[type[Exception], str] | None = None
    value: Any = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    low: float = 0
    high: float = 0
    memory: bytes | None = None


def require_group(what: str) -> None:
    """Raise RuntimeError if there is no process group."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"{what}() needs a process group, but this run has init=False: call "
            "torch.distributed.init_process_group() first"
        )


def exchange_parts(
    call: str, x: Any, prepare: Callable[[Part, Any], tuple[Part, torch.Tensor | None]]
) -> tuple[list[Part], torch.Tensor | None]:
    """All ranks' parts, and this rank's tensor as it is sent. An error on any rank is raised on all ranks."""
    if context.world_size() > 1:
        require_group(call.partition("(")[0])
    part, wire = Part(call, _describe(x)), None
    try:
        part, wire = prepare(part, x)
        packed = pickle.dumps(part)
    except Exception as error:  # the other ranks wait for this rank's part, whatever the error
        kind = type(error) if type(error) in (TypeError, ValueError) else RuntimeError
        packed = pickle.dumps(replace(part, value=None, refusal=(kind, str(error)[:1000])))
    parts = [pickle.loads(each) for each in _exchange(packed)]
    _require_same_call(parts)
    return parts, wire


def _exchange(data: bytes) -> list[bytes]:
    """Every rank's bytes, in one collective if they are short."""
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
    return [each.cpu().numpy().tobytes() for each in gather_tensors(mine.to(group_device()))]


def gather_tensors(mine: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor; all have the same dtype and shape."""
    gathered = [torch.empty_like(mine) for _ in range(context.world_size())]
    dist.all_gather(gathered, mine)
    return gathered


def _require_same_call(parts: Sequence[Part]) -> None:
    calls = [part.call for part in parts]
    name = calls[0].partition("(")[0]
    if len(set(calls)) > 1:
        raise ValueError(
            f"{name}(): {by_rank(calls, 'calls', 'call')}; all ranks must make the same calls in the same order"
        )
    refusals = {part.refusal for part in parts if part.refusal is not None}
    for kind, text in sorted(refusals, key=str):
        if all(part.refusal == (kind, text) for part in parts):
            raise kind(text)
        refusing = [rank for rank, part in enumerate(parts) if part.refusal == (kind, text)]
        raise kind(f"{name}() on {_list_ranks(refusing)}: {text}")


def by_rank(texts: Sequence[str], singular: str, plural: str) -> str:
    """``rank 0 has int 0, ranks 1 and 2 have float 2.5``."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    shown = [f"{_list_ranks(same)} {singular if len(same) == 1 else plural} {text}" for text, same in ranks.items()]
    more = [f"and {len(shown) - _MAX_SHOWN} more"] if len(shown) > _MAX_SHOWN else []
    return ", ".join(shown[:_MAX_SHOWN] + more)


def _list_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _describe(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)}"
    kind = type(x).__name__
    if isinstance(x, int) and x.bit_length() > 64:
        return f"{kind} of {x.bit_length()} bits"
    return f"{kind} {x}" if isinstance(x, (int, float, complex, np.number, np.bool_)) else kind


# ---------------------------------------------------------------------------- memory and devices


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the tensor's elements."""
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(memory: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor on the CPU with these elements."""
    return torch.frombuffer(bytearray(memory), dtype=dtype) if memory else torch.empty(0, dtype=dtype)


def group_device() -> torch.device:
    """The device of the tensors that this group's collectives take."""
    return context.device() if process_group.uses_nccl() else torch.device("cpu")


def device_for(x: torch.Tensor) -> torch.device:
    """The device where ``x`` is combined: its own if there are no other ranks."""
    return x.device if context.world_size() == 1 else group_device()
