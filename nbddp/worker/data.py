"""Worker side. Models and data spread over the ranks: thin names for torch's own tools."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from nbddp.worker import context, metrics
from nbddp.worker.collectives import require_group

_COUNT_EVERY_S = 0.1
_samples = 0  # of all loaders of this rank together


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
    require_group("wrap")
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
