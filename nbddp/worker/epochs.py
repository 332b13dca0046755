"""Keeps loaders in the same epoch on every rank, even if a single rank looks at a batch."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from nbddp.worker import context
from nbddp.worker.agreement import collectives_begun, set_default

_made: Counter[tuple[int, int]] = Counter()  # loaders so far, by the length of the data and the batch size


class EpochSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that advances its epoch by itself, and lets a rank look at single batches.

    A pass through the rank's whole share ends the epoch. A pass that is left early does not: the next one starts
    after the samples that were taken, and wraps around. So every complete pass has the rank's whole share of the
    epoch, whatever was taken before, and passes that are all left early still cover all the data.

    Args:
        source: the dataset; or a sampler, of samples or of batches, of whose draw each rank takes its share.
        batch_size: of the loader, to tell loaders apart.
        draws: ``source`` is a sampler, and its draw is the epoch's order.
        exact: repeat nothing: some ranks may have one sample, or batch of a sampler, less than others.
        **options: of ``DistributedSampler``.
    """

    def __init__(
        self, source: Any, batch_size: int, *, draws: bool = False, exact: bool = False, **options: Any
    ) -> None:
        super().__init__(source, **options)
        self.changes = self.shuffle or draws  # the order, with the epoch
        self._draw = EpochDraw(source, self.seed) if draws else None
        self._exact = exact
        self._start = 0  # in the epoch's order, after load_state_dict
        self._taken = 0  # samples of this epoch, in all passes so far
        self._version = 0  # changes with the epoch: a pass that began before no longer counts
        size = (len(source), batch_size)
        self._name = f"{size[0]} {size[1]} {_made[size]}"
        _made[size] += 1
        self._compared: tuple[int | None, int] = (None, 0)  # collectives begun, and earlier comparisons at that number

    def __iter__(self) -> Iterator[Any]:
        indices = self.share()
        taken = self._taken if self.changes else 0
        return iter(indices[taken:] + indices[:taken])

    def __len__(self) -> int:
        left = len(self.dataset) - self._start  # type: ignore[arg-type]
        if self._exact:
            return len(range(self.rank, left, self.num_replicas))
        return -(-left // self.num_replicas)

    def share(self) -> list[Any]:
        """Return this rank's samples of the epoch, in order."""
        order = self._order()
        left = order[self._start :]
        if not self._exact:
            left += itertools.islice(itertools.cycle(order), -len(left) % self.num_replicas)
        return left[self.rank :: self.num_replicas]

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's order from its start in the next pass; right after ``load_state_dict`` from there."""
        if epoch == self.epoch and self._start and not self._taken:
            return
        super().set_epoch(epoch)
        self._start = self._taken = 0
        self._version += 1

    def state_dict(self) -> dict[str, int]:
        """Return where in the data all ranks together are, if each has taken as much as this one."""
        return {
            "epoch": self.epoch,
            "taken": self._start + self._taken * self.num_replicas,
            "length": len(self.dataset),  # type: ignore[arg-type]
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there in the next pass, also with another number of ranks. Raises ValueError."""
        length = len(self.dataset)  # type: ignore[arg-type]
        if state["length"] != length:
            raise ValueError(f"the loader's state is of {state['length']:,} samples, and there are {length:,} now")
        self.set_epoch(state["epoch"])
        self._start = min(state["taken"], length)

    def _order(self) -> list[Any]:
        """The epoch's samples, as one process would take them."""
        if self._draw is not None:
            return self._draw.order(self.epoch, self._name)
        length = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return list(range(length))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(length, generator=generator).tolist()


class EpochDraw:
    """What a sampler draws in each epoch: the same on every rank, which each draw all of it.

    A sampler that draws with its own ``generator`` does so, and for epoch n has drawn n times before. For others the
    global generators of torch, numpy and Python are seeded with the run's seed and the epoch during the draw.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._samplers = [sampler, getattr(sampler, "sampler", None)]  # the second one of a BatchSampler
        found = [getattr(each, "generator", None) for each in self._samplers]
        self._generator = next((each for each in found if isinstance(each, torch.Generator)), None)
        self._first_state = self._generator.get_state() if self._generator is not None else None
        self._draws = 0  # with its own generator
        self._epoch, self._order = -1, list[Any]()

    def order(self, epoch: int, name: str) -> list[Any]:
        """Return a copy of the epoch's draw. Raises RuntimeError if another rank has drawn something else.

        Args:
            name: the same on all ranks, for this loader alone.
        """
        if epoch != self._epoch:
            self._order = self._drawn(epoch)
            self._epoch = epoch
            self._compare(name)
        return list(self._order)

    def _drawn(self, epoch: int) -> list[Any]:
        for each in self._samplers:
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(epoch)
        if self._generator is None or self._first_state is None:
            with _seeded(self._seed + epoch):
                return list(self._sampler)
        if epoch < self._draws:
            self._generator.set_state(self._first_state)
            self._draws = 0
        for _ in range(self._draws, epoch):
            collections.deque(self._sampler, maxlen=0)
        self._draws = epoch + 1
        return list(self._sampler)

    def _compare(self, name: str) -> None:
        digest = hashlib.blake2b(repr(self._order).encode(), digest_size=16).hexdigest()
        here = f"{context.rank()} {digest}"
        rank, other = set_default(f"draw {name} {self._epoch}", here).split()
        if other != digest and int(rank) != context.rank():
            raise RuntimeError(
                f"loader(): the sampler of rank {context.rank()} drew other samples than that of rank {rank} in epoch "
                f"{self._epoch}, so that shares would overlap. Give it the same arguments on every rank, and if it has "
                "a generator, seed that alike"
            )


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of the CPU for a block, and restore them. Not those of GPUs, which no sampler uses."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


class Pass:
    """One iteration of a loader: counts its samples, and checks that the other ranks are in the same epoch.

    Ranks compare their epochs once in a pass, after a collective has shown that they iterate together. No rank waits
    for another: the first rank leaves its epoch in the process group's store.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        if not sampler.changes:
            sampler._taken = 0  # every pass begins at the start
        self._epoch = sampler.epoch
        self._version = sampler._version
        self._began = collectives_begun() if sampler.changes else None
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
