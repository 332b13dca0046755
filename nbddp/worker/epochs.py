"""Worker side. Which epoch a loader is in: the same on every rank, also when one of them looks at a batch alone."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from nbddp.worker import context
from nbddp.worker.agreement import collectives, first_to_say

_made: Counter[tuple[int, int]] = Counter()  # loaders so far, by their data's length and their batch size


class EpochSampler(DistributedSampler[Any]):
    """``DistributedSampler`` whose epochs follow each other by themselves, and a rank may look at batches in between.

    A pass that goes through the rank's share ends its epoch. A pass that is left early does not: the next one goes on
    behind the samples that it took, round the same share. So every whole pass has the whole share of its epoch,
    whatever a rank took before; and passes that are all left early go through all data in the end.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._taken = 0  # samples of this epoch, in passes up to now
        self._turn = 0  # grows with every change of the epoch: a pass that began before counts no more
        size = (len(dataset), batch_size)  # type: ignore[arg-type]
        self._name = f"{size[0]} {size[1]} {_made[size]}"
        _made[size] += 1
        self._compared: tuple[int | None, int] = (None, 0)  # at which collective, and how often there

    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        taken = self._taken if self.shuffle else 0
        return iter(indices[taken:] + indices[:taken])

    def set_epoch(self, epoch: int) -> None:
        """The next pass has this epoch's order, from its start."""
        super().set_epoch(epoch)
        self._taken = 0
        self._turn += 1


class Pass:
    """One iteration of a loader: it says how far it is, and whether the other ranks are in the same epoch.

    Ranks compare their epochs once in a pass, when a collective in it has shown that they go through it together. No
    rank waits for another: the first to come leaves its epoch in the process group's store.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._epoch = sampler.epoch
        self._turn = sampler._turn
        self._began = collectives() if sampler.shuffle else None
        self._to_compare = self._began is not None

    def take(self, samples: int) -> None:
        """A batch is handed out."""
        sampler = self._sampler
        if sampler._turn == self._turn:
            sampler._taken += samples
            if sampler._taken >= len(sampler):
                sampler.set_epoch(sampler.epoch + 1)

    def go_on(self) -> None:
        """The next batch is asked for."""
        if self._to_compare and collectives() != self._began:
            self._compare()

    def end(self) -> None:
        """There is none left."""
        if self._to_compare:
            self._compare()
        if self._sampler._turn == self._turn:
            self._sampler.set_epoch(self._epoch + 1)

    def _compare(self) -> None:
        self._to_compare = False
        sampler, now = self._sampler, collectives()
        at, count = sampler._compared
        sampler._compared = now, count + 1 if at == now else 0
        first = first_to_say(f"epoch {sampler._name} {sampler._compared}", f"{context.rank()} {self._epoch}")
        rank, epoch = map(int, first.split())
        told = f"{context.rank()} {now}"
        if epoch == self._epoch or first_to_say(f"epoch {sampler._name} told", told) != told:
            return
        warnings.warn(
            f"loader(): rank {rank} is in epoch {epoch} and rank {context.rank()} in epoch {self._epoch}. Shares of "
            "different epochs overlap and leave samples out. Most likely one rank has gone through the loader alone; "
            "loader.sampler.set_epoch(epoch) on every rank before each epoch brings them together",
            stacklevel=4,  # the line that iterates
        )
