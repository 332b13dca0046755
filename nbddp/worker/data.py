"""Worker side. Models and data spread over the ranks: thin names for torch's own tools."""

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
from nbddp.worker.collectives import require_group
from nbddp.worker.epochs import EpochSampler, Pass

_COUNT_EVERY_S = 0.1
_BUCKET_NBYTES = 250 << 20  # as DDP has it
_samples = 0  # of all loaders of this rank together


def wrap(model: torch.nn.Module, **ddp: Any) -> torch.nn.Module:
    """The model on this rank's device, in ``DistributedDataParallel`` when there is more than one rank.

    Args:
        **ddp: options of ``torch.nn.parallel.DistributedDataParallel``, e.g. ``find_unused_parameters``.

    Returns:
        The DDP module (the model itself is its ``.module``), or the model alone for one rank or when
        nothing in it is trained. Either way all ranks have rank 0's parameters and buffers.
    """
    device = context.device()
    model = model.to(device)
    if context.world_size() == 1:
        return model
    require_group("wrap")
    if not any(p.requires_grad for p in model.parameters()):
        _give_all_ranks_the_first_ones(model)
        return model
    if device.type != "cpu":
        ddp.setdefault("device_ids", [device])
    return DistributedDataParallel(model, **ddp)


def _give_all_ranks_the_first_ones(model: torch.nn.Module) -> None:
    """What DDP's constructor does with what is trained: a frozen model that was made at random differs, too."""
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors:
        return
    group: Any = dist.group.WORLD
    _verify_param_shape_across_processes(group, tensors)
    _sync_module_states(model, group, _BUCKET_NBYTES, 0, ())


class _EpochLoader(DataLoader[Any]):
    """A DataLoader that keeps count of its epochs, and tells the panel how many samples went through it."""

    sampler: EpochSampler

    def __iter__(self) -> Any:
        global _samples
        counted_at = 0.0
        left = len(self.sampler)
        this_pass = Pass(self.sampler)
        for batch in super().__iter__():
            taken = min(self.batch_size or 1, left)
            left -= taken
            _samples += taken
            now = time.monotonic()
            if now - counted_at >= _COUNT_EVERY_S or not left:
                counted_at = now
                metrics.count_samples(_samples)
            this_pass.take(taken)
            yield batch
            this_pass.go_on()
        this_pass.end()


def loader(
    dataset: Dataset[Any], batch_size: int = 1, *, shuffle: bool = False, split_batch: bool = False, **kw: Any
) -> DataLoader[Any]:
    """A DataLoader that gives each rank its own share of ``dataset``, reshuffled every epoch by itself.

    With ``shuffle=True`` an epoch ends when its batches have been taken, in one pass or in several that were left
    early: each goes on where the last one stopped. So a rank may look at a batch alone, ``next(iter(loader))``, and
    its next pass still has its whole share of the epoch that the others are in. Ranks that do get into different
    epochs, e.g. because one went through the whole loader alone, are told by a ``UserWarning`` that names them.

    Args:
        dataset: map-style; its length need not divide by the world size: the shares are evened out by
            repeating a few samples (``DistributedSampler``'s meaning), so that no rank waits for another.
        batch_size: samples per rank and step, or with ``split_batch=True`` per step over all ranks.
        shuffle: a new order each epoch, from the run's ``seed``: that of ``DistributedSampler`` with
            ``set_epoch(0)``, ``set_epoch(1)``, ... ``loader.sampler.set_epoch`` still picks one, from its start,
            e.g. after a resume.
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
    sampler = EpochSampler(
        dataset, batch_size, num_replicas=ranks, rank=context.rank(), shuffle=shuffle, seed=context.seed()
    )
    kw.setdefault("pin_memory", context.device().type == "cuda")
    return _EpochLoader(dataset, batch_size, sampler=sampler, **kw)
