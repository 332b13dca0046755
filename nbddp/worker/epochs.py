"""Keeps loaders in the same epoch on every rank, even if a single rank looks at a batch."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from nbddp.worker import context
from nbddp.worker.agreement import collectives_begun, set_default

_made: Counter[tuple[int, int]] = Counter()  # loaders so far, by the length of the data and the batch size


class EpochSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that advances its epoch by itself, and lets a rank look at single batches.

    A pass through the rank's whole share ends the epoch. A pass that is left early does not: the next one starts
    after the samples that were taken, and wraps around. So every complete pass has the rank's whole share of the
    epoch, whatever was taken before, and passes that are all left early still cover all the data.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._taken = 0  # samples of this epoch, in all passes so far
        self._version = 0  # changes with the epoch: a pass that began before no longer counts
        size = (len(dataset), batch_size)  # type: ignore[arg-type]
        self._name = f"{size[0]} {size[1]} {_made[size]}"
        _made[size] += 1
        self._compared: tuple[int | None, int] = (None, 0)  # collectives begun, and earlier comparisons at that number

    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        taken = self._taken if self.shuffle else 0
        return iter(indices[taken:] + indices[:taken])

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's order from its start in the next pass."""
        super().set_epoch(epoch)
        self._taken = 0
        self._version += 1


class Pass:
    """One iteration of a loader: counts its samples, and checks that the other ranks are in the same epoch.

    Ranks compare their epochs once in a pass, after a collective has shown that they iterate together. No rank waits
    for another: the first rank leaves its epoch in the process group's store.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._epoch = sampler.epoch
        self._version = sampler._version
        self._began = collectives_begun() if sampler.shuffle else None
        self._to_compare = self._began is not None

    def count(self, samples: int) -> None:
        """Count a batch that is returned next."""
        sampler = self._sampler
        if sampler._version == self._version:
            sampler._taken += samples
            if sampler._taken >= len(sampler):
                sampler.set_epoch(sampler.epoch + 1)

    def check_epoch(self) -> None:
        """Compare epochs, when the next batch is requested after the pass's first collective."""
        if self._to_compare and collectives_begun() != self._began:
            self._compare()

    def end(self) -> None:
        """End a pass that has returned all its batches."""
        if self._to_compare:
            self._compare()
        if self._sampler._version == self._version:
            self._sampler.set_epoch(self._epoch + 1)

    def _compare(self) -> None:
        self._to_compare = False
        sampler, now = self._sampler, collectives_begun()
        at, count = sampler._compared
        sampler._compared = now, count + 1 if at == now else 0
        first = set_default(f"epoch {sampler._name} {sampler._compared}", f"{context.rank()} {self._epoch}")
        rank, epoch = map(int, first.split())
        here = f"{context.rank()} {now}"
        if epoch == self._epoch or set_default(f"epoch {sampler._name} warned", here) != here:
            return
        warnings.warn(
            f"loader(): rank {rank} is in epoch {epoch}, but rank {context.rank()} is in epoch {self._epoch}. Shares "
            "of different epochs overlap and leave samples out. Most likely one rank alone went through the loader. "
            "Call loader.sampler.set_epoch(epoch) on every rank before each epoch",
            stacklevel=4,  # the user's loop
        )
