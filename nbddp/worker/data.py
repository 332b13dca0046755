"""``wrap`` and ``loader`` distribute a model and its data over the ranks, with torch's own tools."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

# Private, of torch 2.6 to 2.13: DDP's own constructor calls them.
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbddp.worker import context, metrics
from nbddp.worker.epochs import EpochSampler, Pass
from nbddp.worker.exchange import require_group

_COUNT_EVERY_S = 0.1
_BUCKET_NBYTES = 250 << 20  # DDP's own value
_samples = 0  # of all loaders of this rank together


def wrap(model: torch.nn.Module, **ddp: Any) -> torch.nn.Module:
    """Move the model to this rank's device and, with several ranks, wrap it in ``DistributedDataParallel``.

    Data is not moved: batches stay on the CPU until you write ``x.to(nbddp.device())``.

    Args:
        **ddp: options of ``torch.nn.parallel.DistributedDataParallel``, e.g. ``find_unused_parameters``.

    Returns:
        The DDP module (the model itself is its ``.module``), or the model itself if there is one rank or
        no parameter requires a gradient. In either case all ranks have rank 0's parameters and buffers.
    """
    device = context.device()
    model = model.to(device)
    if context.world_size() == 1:
        return model
    require_group("wrap")
    if not any(p.requires_grad for p in model.parameters()):
        # Broadcast as DDP's constructor does, because a randomly initialised frozen model differs on each rank.
        if tensors := [*model.parameters(), *model.buffers()]:
            group: Any = dist.group.WORLD
            _verify_param_shape_across_processes(group, tensors)
            _sync_module_states(model, group, _BUCKET_NBYTES, 0, ())
        return model
    if device.type != "cpu":
        ddp.setdefault("device_ids", [device])
    return DistributedDataParallel(model, **ddp)


class _EpochLoader(DataLoader[Any]):
    """A DataLoader that counts its epochs, and reports to the panel how many samples it has returned."""

    sampler: EpochSampler

    def __iter__(self) -> Any:
        global _samples
        counted_at = 0.0
        remaining = len(self.sampler)
        this_pass = Pass(self.sampler)
        for batch in super().__iter__():
            taken = min(self.batch_size or 1, remaining)
            remaining -= taken
            _samples += taken
            now = time.monotonic()
            if now - counted_at >= _COUNT_EVERY_S or not remaining:
                counted_at = now
                metrics.count_samples(_samples)
            this_pass.count(taken)
            yield batch
            this_pass.check_epoch()
        this_pass.end()


def loader(
    dataset: Dataset[Any], batch_size: int = 1, *, shuffle: bool = False, split_batch: bool = False, **kw: Any
) -> DataLoader[Any]:
    """A DataLoader for this rank's share of ``dataset``. Batches stay on the CPU.

    A batch may have any structure, so nbddp does not move it: write ``x.to(nbddp.device())``. On CUDA its memory is
    pinned, so that ``x.to(nbddp.device(), non_blocking=True)`` overlaps with the training.

    With ``shuffle=True`` an epoch ends when all its batches have been taken, in one pass or in several that were left
    early: each pass continues where the last one stopped. So a single rank may look at a batch, ``next(iter(loader))``,
    and its next pass still has its whole share of the epoch that the other ranks are in. If ranks get into different
    epochs, e.g. because one rank alone went through the whole loader, a ``UserWarning`` names them.

    Args:
        dataset: map-style; its length need not be divisible by the world size: as with ``DistributedSampler``, a few
            samples are repeated to make the shares equal, so that no rank waits for another.
        batch_size: samples per step, on this rank or, with ``split_batch=True``, over all ranks.
        shuffle: use a new order each epoch, from the run's ``seed``: that of ``DistributedSampler`` with
            ``set_epoch(0)``, ``set_epoch(1)``, ... ``loader.sampler.set_epoch`` begins another epoch, e.g. after a
            resume.
        **kw: options of ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: ``dataset`` is an IterableDataset, or you pass a sampler.
        ValueError: the global batch size is not divisible by the world size.
    """
    if isinstance(dataset, IterableDataset):
        raise TypeError("loader() shards by index; shard an IterableDataset yourself, by rank() and world_size()")
    if "sampler" in kw or "batch_sampler" in kw:
        raise TypeError("loader() has its own sampler; to use another one, use torch.utils.data.DataLoader")
    ranks = context.world_size()
    if split_batch:
        if batch_size % ranks:
            raise ValueError(f"a global batch_size of {batch_size} is not divisible by {ranks} ranks")
        batch_size //= ranks
    sampler = EpochSampler(
        dataset, batch_size, num_replicas=ranks, rank=context.rank(), shuffle=shuffle, seed=context.seed()
    )
    kw.setdefault("pin_memory", context.device().type == "cuda")
    return _EpochLoader(dataset, batch_size, sampler=sampler, **kw)
