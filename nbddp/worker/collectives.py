"""Collectives on numbers and tensors that check every rank's argument before they combine anything.

The ranks first exchange short descriptions of their arguments (see ``exchange.py``), so a mismatch raises the same
error on every rank.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist

from nbddp.worker import context
from nbddp.worker.exchange import (
    INLINE_NBYTES,
    Part,
    device_for,
    exchange_parts,
    from_bytes,
    gather_tensors,
    group_device,
    require_group,
    to_bytes,
)
from nbddp.worker.reduction import prepare_reduce, reduce_numbers, reduce_tensors, require_same_type

N = TypeVar("N", int, float, torch.Tensor)


def all_reduce(x: N, op: str = "mean") -> N:
    """Combine a number or tensor over all ranks; every rank gets the result. A collective: call it on all ranks.

    Numbers are combined as in Python: an int on one rank and a float on another give a float, ints are exact at any
    size, and numpy scalars are returned as Python numbers. Tensors are combined elementwise. Half precision is
    added in float32, a mean does not overflow if its result fits, and NaN on any rank makes ``"min"`` and ``"max"``
    NaN, too. Each error is raised on all ranks and names the ranks that caused it.

    Args:
        x: a number, or a tensor of the same dtype and shape on every rank, in any memory order; it is not changed.
        op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.

    Returns:
        A number; for ints, ``"mean"`` gives a float and the others an int. Or a tensor with ``x``'s dtype, layout
        and device, detached.

    Raises:
        TypeError: some ranks pass a number and others a tensor, the tensors have different dtypes (torch would promote
            them, and some ranks would get another dtype than they passed), or ``x`` is neither a number nor a dense
            tensor.
        ValueError: shapes, ops or calls differ; the mean of integer tensors, or the sum of bools.
        OverflowError: the sum of integer tensors does not fit into their dtype.
    """
    given: Any = x
    parts, wire = exchange_parts(f"all_reduce(x, {op!r})", given, functools.partial(prepare_reduce, op=op))
    require_same_type(parts)
    result: Any
    if wire is None:
        result = reduce_numbers(parts, op)
    else:
        # Converted before it is rearranged, which would change the bits of a NaN.
        combined = reduce_tensors(wire, parts, op).to(given.dtype).view(given.shape)
        if type(given) is torch.Tensor and (given.stride(), given.device) == (combined.stride(), combined.device):
            return combined  # type: ignore[return-value]
        result = torch.empty_like(given.detach())
        result.as_subclass(torch.Tensor).copy_(combined)
    return cast(N, result)


def all_gather(x: N) -> list[N]:
    """Return every rank's ``x`` on every rank, ordered by rank. A collective: call it on all ranks.

    Args:
        x: a number or a tensor; types and shapes may differ between the ranks.

    Returns:
        Copies, of this rank's own ``x`` too and with a single rank too. Tensors are detached and on ``x``'s device.
    """
    parts, mine = exchange_parts("all_gather(x)", x, _prepare_gather)
    device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
    found = [_restore(part, flat, device) for part, flat in zip(parts, _gather_large(mine, parts))]
    return cast("list[N]", found)


def reduce(x: N, op: str = "mean") -> N:
    """Same as :func:`all_reduce`: every rank gets the result, unlike with ``torch.distributed.reduce``."""
    return all_reduce(x, op)


@overload
def gather(x: N, *, exact: Literal[False] = False) -> list[N]: ...


@overload
def gather(x: torch.Tensor, *, exact: Literal[True]) -> torch.Tensor: ...


def gather(x: Any, *, exact: bool = False) -> Any:
    """Same as :func:`all_gather`: every rank gets the list, unlike with ``torch.distributed.gather``.

    Args:
        exact: True: ``x`` has an entry for each sample that this rank took from a loader with ``exact=True``, in its
            order, shape (n, ...). Returns one tensor with the entries of all ranks in the order of the dataset (with
            ``shuffle=True`` or a sampler: of the epoch), so that a metric of it does not depend on the number of ranks.
            Not for a loader with ``batch_sampler``, which deals whole batches.

    Raises:
        ValueError: with ``exact=True``: the ranks' numbers of entries are not those of an exact loader, or the other
            dimensions differ. TypeError: ``x`` is not a tensor. Both are raised on all ranks.
    """
    return _interleaved(all_gather(x)) if exact else all_gather(x)


def _interleaved(shares: list[Any]) -> torch.Tensor:
    """The entries of all ranks: the first of each rank, then the second of each, and so on."""
    if not all(isinstance(share, torch.Tensor) and share.dim() for share in shares):
        raise TypeError("gather(x, exact=True) takes a tensor with an entry for each sample, of shape (n, ...)")
    kinds = [share for share in shares if len(share)] or shares  # a rank without a sample knows no shape
    if len({(share.dtype, share.shape[1:]) for share in kinds}) > 1:
        raise ValueError("gather(x, exact=True): the ranks' tensors differ in dtype, or in a dimension after the first")
    lengths = [len(share) for share in shares]
    if lengths != [len(range(rank, sum(lengths), len(shares))) for rank in range(len(shares))]:
        raise ValueError(
            f"gather(x, exact=True): {', '.join(map(str, lengths))} entries by rank are not the shares of one dataset. "
            "Use loader(..., exact=True), and pass one entry for each sample"
        )
    whole: torch.Tensor = kinds[0].new_empty((sum(lengths), *kinds[0].shape[1:]))
    for rank, share in enumerate(shares[: len(whole)]):
        whole[rank :: len(shares)] = share
    return whole


def broadcast(x: N, src: int = 0) -> N:
    """Return rank ``src``'s ``x`` on every rank. A collective: call it on all ranks.

    Args:
        x: a number or a tensor. On other ranks than ``src`` only its device is used.
        src: the rank whose ``x`` all ranks get.

    Returns:
        A copy, on rank ``src`` too. A tensor is detached, and on the device of this rank's own ``x`` if that is a
        tensor, else on the rank's :func:`device`.

    Raises:
        ValueError: rank ``src`` does not exist, or the ranks pass different ``src``; raised on all ranks.
    """
    parts, flat = exchange_parts(f"broadcast(x, src={src!r})", x, functools.partial(_prepare_broadcast, src=src))
    part = parts[src]
    if part.dtype is not None and part.memory is None:
        if flat is None:
            flat = torch.empty(_nbytes(part), dtype=torch.uint8, device=group_device())
        if context.world_size() > 1:
            dist.broadcast(flat, src)
    device = x.device if isinstance(x, torch.Tensor) else context.device()
    return cast(N, _restore(part, flat if flat is not None else torch.empty(0, dtype=torch.uint8), device))


def barrier() -> None:
    """Return when every rank has called it."""
    if context.world_size() == 1:
        return
    require_group("barrier")
    device = group_device()
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Run a block on local rank 0 of each host first, then on the other ranks: ``with main_first(): download()``.

    A collective: all ranks have to enter it. Ranks wait as long as for any other collective (``pg_timeout``).
    """
    if context.local_rank() > 0:
        barrier()
    yield
    if context.local_rank() == 0:
        barrier()


# ---------------------------------------------------------------------------- gathering


def _prepare_gather(part: Part, x: Any) -> tuple[Part, torch.Tensor | None]:
    """This rank's part of a gather, and the memory of its tensor as bytes."""
    if not isinstance(x, torch.Tensor):
        return replace(part, value=x), None
    if x.device.type == "meta":
        raise TypeError("all_gather() takes tensors with data, not a meta one")
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_nested or x.is_quantized or x.layout != torch.strided:
        return replace(part, value=x.detach().clone().cpu()), None
    dense = x.detach().resolve_conj().resolve_neg().to(device_for(x), copy=True)
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    memory = to_bytes(flat) if flat.nbytes <= INLINE_NBYTES else None
    return replace(part, dtype=x.dtype, shape=tuple(x.shape), strides=dense.stride(), memory=memory), flat


def _prepare_broadcast(part: Part, x: Any, src: int) -> tuple[Part, torch.Tensor | None]:
    """As :func:`_prepare_gather` on rank ``src``; the other ranks send nothing."""
    if not isinstance(src, int) or not 0 <= src < context.world_size():
        raise ValueError(f"src must be a rank, 0 to {context.world_size() - 1}, not {src!r}")
    return _prepare_gather(part, x) if context.rank() == src else (part, None)


def _gather_large(mine: torch.Tensor | None, parts: Sequence[Part]) -> list[torch.Tensor]:
    """The bytes of every rank's tensor, by rank; empty for a rank without a large tensor."""
    sizes = [_nbytes(part) if part.memory is None else 0 for part in parts]
    if not any(sizes):
        return [torch.empty(0, dtype=torch.uint8)] * len(parts)
    if len(parts) == 1 and mine is not None:
        return [mine]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=group_device())
    if mine is not None:
        padded[: len(mine)] = mine
    return [flat[:size].clone() if size < len(flat) else flat for flat, size in zip(gather_tensors(padded), sizes)]


def _nbytes(part: Part) -> int:
    return math.prod(part.shape) * part.dtype.itemsize if part.dtype is not None else 0


def _restore(part: Part, flat: torch.Tensor, device: torch.device) -> Any:
    if part.dtype is None:
        return part.value.to(device) if isinstance(part.value, torch.Tensor) else part.value
    elements = flat.view(part.dtype) if part.memory is None else from_bytes(part.memory, part.dtype)
    return elements.as_strided(part.shape, part.strides).to(device)
