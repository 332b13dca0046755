"""``loader`` deals data to the ranks: any sampler, streams, each sample once if asked, resumed in the middle."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from nbddp.helpers import context, log
from nbddp.helpers.collectives import all_gather

_newest: _Loader | None = None  # the loader that has returned a batch last


class _Share(Sampler[Any]):
    """This rank's share of each epoch: every n-th of what one process would take, in its order.

    A pass that is left early is continued by the next one, which wraps around: so a single rank may look at a batch,
    and each complete pass has the rank's whole share of the epoch.
    """

    def __init__(self, source: Any, *, draws: bool, shuffle: bool, exact: bool) -> None:
        self.source, self.draws, self.shuffle, self.exact = source, draws, shuffle, exact
        self.epoch = 0
        self.start = 0  # of all ranks, in the epoch's order: after load_state_dict
        self.taken = 0  # by this rank, in all passes of this epoch

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        left = order[self.start :]
        if not self.exact:  # as DistributedSampler: a few are repeated, so that all shares are equally long
            left += itertools.islice(itertools.cycle(order), -len(left) % context.world_size())
        share = left[context.rank() :: context.world_size()]
        if not (self.draws or self.shuffle):
            self.taken = 0  # the order never changes: each pass begins at the start
        yield from share[self.taken :] + share[: self.taken]

    def __len__(self) -> int:
        left, ranks = len(self.source) - self.start, context.world_size()
        return len(range(context.rank(), left, ranks)) if self.exact else -(-left // ranks)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.start, self.taken = epoch, 0, 0

    def take(self, samples: int) -> None:
        """Count samples of a batch that is returned next."""
        self.taken += samples
        if self.taken >= len(self):
            self.set_epoch(self.epoch + 1)

    def _order(self) -> list[Any]:
        """Return what one process would take: the same on all ranks."""
        if not self.draws:
            indices = range(len(self.source))
            generator = torch.Generator().manual_seed(context.seed() + self.epoch)  # as DistributedSampler
            return torch.randperm(len(indices), generator=generator).tolist() if self.shuffle else list(indices)
        with _seeded(context.seed() + self.epoch):
            for each in (self.source, getattr(self.source, "sampler", None)):
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(self.epoch)
                if isinstance(own := getattr(each, "generator", None), torch.Generator):
                    own.manual_seed(context.seed() + self.epoch)
            return list(self.source)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of the CPU for a draw, and restore them: a rank's own seeds differ from the others'."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed), np.random.seed(seed % 2**32), random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0]), np.random.set_state(before[1]), random.setstate(before[2])


class _StreamShare(IterableDataset[Any]):
    """Every n-th sample of a stream that every rank reads, in the same order."""

    def __init__(self, stream: Any, *, exact: bool) -> None:
        self.stream, self.exact, self.skip = stream, exact, 0
        self.rank, self.ranks = context.rank(), context.world_size()  # a worker is no rank

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.stream)
        first = list(itertools.islice(samples, self.ranks))
        left = itertools.islice(itertools.chain(first, samples), self.skip, None)
        while round_ := list(itertools.islice(left, self.ranks)):
            if not self.exact:
                round_ += itertools.islice(itertools.cycle(first), self.ranks - len(round_))
            yield from round_[self.rank : self.rank + 1]

    def __len__(self) -> int:
        length = len(self.stream)
        return len(range(self.rank, length, self.ranks)) if self.exact else -(-length // self.ranks)


class _Loader(DataLoader[Any]):
    """A DataLoader that knows where in the data it is. Its signature is DataLoader's: Lightning makes new ones."""

    _epoch = _taken = 0  # of a stream
    real = 0  # how many samples of the newest batch of all ranks are not repeated ones

    @property
    def _share(self) -> _Share | None:
        return next((each for each in (self.batch_sampler, self.sampler) if isinstance(each, _Share)), None)

    def __iter__(self) -> Any:
        global _newest
        share, ranks = self._share, context.world_size()
        sizes = self._sizes()
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)) and share is None:
            set_epoch(self._epoch)  # of the package datasets
        for batch in super().__iter__():
            size = next(sizes)
            log.count_samples(size)
            _newest, self._taken = self, self._taken + size
            if share is not None:
                self.real = min(size * ranks, len(share.source) - share.start - share.taken * ranks)
                share.take(1 if share is self.batch_sampler else size)
            yield batch
        self._go_to(self._epoch + 1, 0)

    def _go_to(self, epoch: int, taken: int) -> None:
        self._epoch, self._taken = epoch, 0
        if isinstance(self.dataset, _StreamShare) and self.dataset.skip != taken:
            self.dataset.skip = taken
            self._iterator = None  # persistent workers have a copy of the stream

    def _sizes(self) -> Iterator[int]:
        if (share := self._share) is not None and share is self.batch_sampler:
            yield from map(len, share)
        left = len(share) if share is not None else sys.maxsize
        while True:
            yield min(self.batch_size or 1, left)
            left -= self.batch_size or 1

    def state_dict(self) -> dict[str, int]:
        """Return where in the data the ranks are, if each has taken as many batches as this one."""
        share, ranks = self._share, context.world_size()
        if share is None:
            return {"epoch": self._epoch, "taken": getattr(self.dataset, "skip", 0) + self._taken * ranks}
        return {"epoch": share.epoch, "taken": share.start + share.taken * ranks, "length": len(share.source)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there in the next pass, also with another number of ranks. Raises ValueError."""
        if (share := self._share) is None:
            return self._go_to(state["epoch"], state["taken"])
        if state["length"] != len(share.source):
            raise ValueError(f"the state is of {state['length']:,} samples, and there are {len(share.source):,} now")
        share.set_epoch(state["epoch"])
        share.start = state["taken"]

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch in the next pass."""
        self._go_to(epoch, 0)
        if (share := self._share) is not None and (epoch != share.epoch or share.taken):
            share.set_epoch(epoch)


def gather_for_metrics(x: torch.Tensor) -> torch.Tensor:
    """Return all ranks' entries for the newest batch of a loader, in the dataset's order, without repeated samples.

    A collective. ``x`` has an entry for each of this rank's samples of the batch, shape (n, ...).
    """
    if _newest is None or (_newest._share is not None and _newest._share is _newest.batch_sampler):
        raise RuntimeError("gather_for_metrics() needs a batch of nbddp.loader (without batch_sampler)")
    shares = all_gather(x)
    whole: torch.Tensor = max(shares, key=len).new_empty((sum(map(len, shares)), *x.shape[1:]))
    for rank, share in enumerate(shares):
        whole[rank :: len(shares)] = share
    return whole[: _newest.real] if _newest.real else whole


_OF_A_LOADER = (
    *("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)


def loader(
    dataset: Any,
    batch_size: int = 1,
    *,
    shuffle: bool = False,
    split_batches: bool = False,
    exact: bool = False,
    sampler: Any = None,
    batch_sampler: Any = None,
    **kw: Any,
) -> DataLoader[Any]:
    """Return a DataLoader for this rank's share of ``dataset``."""
    ranks = context.world_size()
    if isinstance(dataset, DataLoader):
        given, kw = dataset, {**{name: getattr(dataset, name) for name in _OF_A_LOADER}, **kw}
        dataset, batch_size, own = given.dataset, given.batch_size or 1, given.sampler
        shuffle = isinstance(own, torch.utils.data.RandomSampler)
        sampler = None if shuffle or isinstance(own, torch.utils.data.SequentialSampler) else own
    if split_batches and batch_size % ranks:
        raise ValueError(f"a global batch_size of {batch_size} is not divisible by {ranks} ranks")
    batch_size //= ranks if split_batches else 1
    kw.setdefault("pin_memory", context.device().type == "cuda")
    given = sampler if sampler is not None else batch_sampler
    if shuffle and (given is not None or isinstance(dataset, IterableDataset)):
        raise ValueError("the sampler, or the stream, decides the order: leave out shuffle=True")
    if isinstance(given, DistributedSampler) or isinstance(getattr(given, "sampler", None), DistributedSampler):
        raise TypeError("loader() distributes the samples itself: pass the sampler of one GPU")
    if isinstance(dataset, IterableDataset):
        datasets = sys.modules.get("datasets")
        if datasets is not None and isinstance(dataset, datasets.IterableDataset):
            split = datasets.distributed.split_dataset_by_node
            return _Loader(split(dataset, rank=context.rank(), world_size=ranks), batch_size, **kw)
        return _Loader(_StreamShare(dataset, exact=exact), batch_size, **kw)
    share = _Share(dataset if given is None else given, draws=given is not None, shuffle=shuffle, exact=exact)
    if batch_sampler is not None:
        return _Loader(dataset, batch_sampler=share, **kw)
    return _Loader(dataset, batch_size, sampler=share, **kw)
