"""Worker side. Models, data and numbers spread over the ranks: thin names for torch's own tools."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from nbddp.worker import context, metrics

N = TypeVar("N", int, float, torch.Tensor)

_COUNT_EVERY_S = 0.1
_samples = 0  # of all loaders of this rank together
_OPS = {"mean": "SUM", "sum": "SUM", "min": "MIN", "max": "MAX"}


def wrap(model: torch.nn.Module, **ddp: Any) -> torch.nn.Module:
    """The model on this rank's device, in ``DistributedDataParallel`` when there is more than one rank.

    Args:
        **ddp: options of ``torch.nn.parallel.DistributedDataParallel``, e.g. ``find_unused_parameters``.

    Returns:
        The DDP module (the model itself is its ``.module``), or the model alone for one rank or when
        nothing in it is trained.
    """
    device = context.device()
    model = model.to(device)
    if context.world_size() == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    _require_group("wrap")
    if device.type != "cpu":
        ddp.setdefault("device_ids", [device])
    return DistributedDataParallel(model, **ddp)


class _ReshufflingSampler(DistributedSampler[Any]):
    """``DistributedSampler`` that begins a new epoch by itself each time it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


class _CountingLoader(DataLoader[Any]):
    """A DataLoader that tells the panel how many samples went through it."""

    def __iter__(self) -> Any:
        global _samples
        counted_at = 0.0
        left = len(self.sampler)  # type: ignore[arg-type]
        for batch in super().__iter__():
            taken = min(self.batch_size or 1, left)
            left -= taken
            _samples += taken
            now = time.monotonic()
            if now - counted_at >= _COUNT_EVERY_S or not left:
                counted_at = now
                metrics.count_samples(_samples)
            yield batch


def loader(
    dataset: Dataset[Any], batch_size: int = 1, *, shuffle: bool = False, split_batch: bool = False, **kw: Any
) -> DataLoader[Any]:
    """A DataLoader that gives each rank its own share of ``dataset``, reshuffled every epoch by itself.

    Args:
        dataset: map-style; its length need not divide by the world size: the shares are evened out by
            repeating a few samples (``DistributedSampler``'s meaning), so that no rank waits for another.
        batch_size: samples per rank and step, or with ``split_batch=True`` per step over all ranks.
        shuffle: a new order each epoch, from the run's ``seed``; ``loader.sampler.set_epoch`` still
            picks one, e.g. after a resume.
        **kw: options of ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: an IterableDataset, or a sampler of your own. ValueError: a global batch size that
            the world size does not divide.
    """
    if isinstance(dataset, IterableDataset):
        raise TypeError("loader() shards by index; shard an IterableDataset itself, by rank() and world_size()")
    if "sampler" in kw or "batch_sampler" in kw:
        raise TypeError("loader() brings its own sampler; for another one use torch.utils.data.DataLoader")
    ranks = context.world_size()
    if split_batch:
        if batch_size % ranks:
            raise ValueError(f"a global batch_size of {batch_size} does not divide by {ranks} ranks")
        batch_size //= ranks
    sampler = _ReshufflingSampler(
        dataset, num_replicas=ranks, rank=context.rank(), shuffle=shuffle, seed=context.seed()
    )
    kw.setdefault("pin_memory", context.device().type == "cuda")
    return _CountingLoader(dataset, batch_size, sampler=sampler, **kw)


def reduce(x: N, op: str = "mean") -> N:
    """One number or tensor from all ranks', the same on every rank. A collective: call it on all.

    Args:
        x: a number, or a tensor of equal shape on every rank; it is left as it is.
        op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.

    Returns:
        A float for a ``"mean"`` of numbers, else the type of ``x``; a tensor on ``x``'s device.
    """
    if op not in _OPS:
        raise ValueError(f"op is 'mean', 'sum', 'min' or 'max', not {op!r}")
    if not isinstance(x, torch.Tensor):
        wide = torch.tensor(x, dtype=torch.int64 if isinstance(x, int) and op != "mean" else torch.float64)
        return cast(N, _all_reduce(wide, op).item())
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"the mean of {x.dtype} is not of that type; pass x.float()")
    return _all_reduce(x.detach().clone(), op)


def _all_reduce(tensor: torch.Tensor, op: str) -> torch.Tensor:
    if context.world_size() == 1:
        return tensor
    _require_group("reduce")
    on_device = tensor.to(_group_device())
    dist.all_reduce(on_device, op=getattr(dist.ReduceOp, _OPS[op]))
    if op == "mean":
        on_device = on_device / context.world_size()
    return on_device.to(tensor.device)


def gather(x: N) -> list[N]:
    """Every rank's ``x``, by rank, on every rank. A collective: call it on all.

    Args:
        x: a number or a tensor; shapes may differ between the ranks. Tensors arrive on ``x``'s device.
    """
    if context.world_size() == 1:
        return [x]
    _require_group("gather")
    result: list[Any] = [None] * context.world_size()
    dist.all_gather_object(result, x.detach().cpu() if isinstance(x, torch.Tensor) else x)
    return [item.to(x.device) if isinstance(x, torch.Tensor) else item for item in result]


def barrier() -> None:
    """Return when every rank has come here."""
    if context.world_size() == 1:
        return
    _require_group("barrier")
    device = _group_device()
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def _group_device() -> torch.device:
    """Where this group's collectives take their tensors."""
    return context.device() if "nccl" in str(dist.get_backend()) else torch.device("cpu")


def _require_group(what: str) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            f"{what}() needs a process group and there is none: this run has init=False; call "
            "torch.distributed.init_process_group() first"
        )
