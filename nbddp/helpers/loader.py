"""``loader`` deals data to the ranks: any sampler, streams, each sample once if asked, resumed in the middle."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from nbddp.helpers import context, log
from nbddp.helpers.collectives import all_gather
from nbddp.text import did_you_mean

_made = itertools.count()  # numbers the shares that are compared, which all ranks make in the same order
_newest: _Loader | None = None  # the loader that has returned a batch last


class _Place:
    """Where in the data the ranks are."""

    length: Any = None  # all ranks' samples in an epoch; None for a stream
    continues = exact = False
    epoch = 0
    start = 0  # samples of all ranks before load_state_dict, in the epoch's order
    taken = 0  # by this rank since then, in all passes of this epoch
    begun = 0  # epochs: a pass that began in an earlier one no longer counts

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's order from its beginning in the next pass; right after ``load_state_dict`` from there."""
        if epoch != self.epoch or self.taken:
            self.epoch, self.start, self.taken, self.begun = epoch, 0, 0, self.begun + 1


class _Share(_Place, DistributedSampler[Any]):  # so that Lightning doesn't put another one around it
    """This rank's share of each epoch: every n-th of what one process would take, in its order.

    A pass that is left early is continued by the next one, which wraps around: so a single rank may look at a batch,
    and each complete pass has the rank's whole share of the epoch. If the order never changes, each pass begins at its
    start.
    """

    def __init__(self, data: Any, source: Any, *, shuffle: bool, exact: bool) -> None:
        self.source, self.draws, self.shuffle, self.exact = source, (draws := source is not data), shuffle, exact
        self.length, self.continues = len(source), draws or shuffle
        self._split = data if isinstance(data, Subset) else None
        self._number, self._drawn = next(_made) if draws or self._split else -1, (-1, list[Any]())

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        left = order[self.start :]
        if not self.exact:  # as DistributedSampler: a few are repeated, so that all shares are equally long
            left += itertools.islice(itertools.cycle(order), -len(left) % context.world_size())
        share = left[context.rank() :: context.world_size()]
        yield from share[self.taken :] + share[: self.taken]

    def __len__(self) -> int:
        left, ranks = self.length - self.start, context.world_size()
        return len(range(context.rank(), left, ranks)) if self.exact else -(-left // ranks)

    def _order(self) -> list[Any]:
        """Return what one process would take: the same on all ranks."""
        seed = context.seed() + self.epoch  # as DistributedSampler
        if not self.draws:
            generator = torch.Generator().manual_seed(seed)
            return torch.randperm(self.length, generator=generator).tolist() if self.shuffle else [*range(self.length)]
        if self._drawn[0] != self.epoch:
            with _seeded(seed):
                for each in (self.source, getattr(self.source, "sampler", None)):
                    if callable(set_epoch := getattr(each, "set_epoch", None)):
                        set_epoch(self.epoch)
                    if isinstance(own := getattr(each, "generator", None), torch.Generator):
                        own.manual_seed(seed)
                drawn = self.epoch, list(self.source)
            self._compare(self.epoch, drawn, "sampler drew", _DRAW_ALIKE)
            self._drawn = drawn
        return list(self._drawn[1])

    def compare_split(self) -> None:
        """Raise RuntimeError if another rank has a Subset of other samples: each has split the data in its own way."""
        if self._split is not None:
            indices = self._split.indices
            samples = indices.tolist() if hasattr(indices, "tolist") else [*indices]
            self._compare("split", samples, "Subset has", _SPLIT_ALIKE)

    def _compare(self, when: int | str, samples: Any, what: str, hint: str) -> None:
        """Raise RuntimeError if another rank has other samples at this point of the program."""
        if context.world_size() == 1 or not dist.is_initialized():
            return
        point = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        digest = hashlib.sha256(repr(samples).encode()).hexdigest()
        kind = f"{type(self.source).__qualname__} {self.length} {self._number}"  # a rank may have made one more
        key, here = f"nbddp draw {kind} {when} {point}", f"{context.rank()} {digest}"
        rank, other = distributed_c10d._get_default_store().compare_set(key, "", here).decode().split()
        if other != digest:
            raise RuntimeError(f"loader(): rank {context.rank()}'s {what} different samples than rank {rank}'s. {hint}")


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of the CPU for a draw, and restore them: a rank's own seeds differ from the others'."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed), np.random.seed(seed % 2**32), random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0]), np.random.set_state(before[1]), random.setstate(before[2])


class _StreamShare(_Place, IterableDataset[Any]):
    """Every n-th sample of a stream that every rank reads, in the same order; or all of one that splits itself."""

    def __init__(self, stream: Any, *, exact: bool, splits: bool = False) -> None:
        self.stream, self.exact, self.splits = stream, exact, splits
        self.rank, self.ranks = context.rank(), context.world_size()  # a worker is no rank

    def __iter__(self) -> Iterator[Any]:
        reads: list[str] = []
        before = sys.getprofile()
        if before is None:  # else %prun measures, in C
            sys.setprofile(functools.partial(_note, reads))  # sees imported names, too, and only this thread
        try:
            samples: Iterator[Any] = map(next, itertools.repeat(iter(self.stream)))  # iter() again may begin again
            first = list(itertools.islice(samples, 1))
        finally:
            if before is None:
                sys.setprofile(None)
        samples, worker = itertools.chain(first, samples), get_worker_info()
        splits = self.splits or (self.ranks > 1 and reads)
        if self.start and (splits or reads or (worker is not None and worker.num_workers > 1)):
            raise TypeError(_NOT_RESUMED)
        if splits and reads and self.rank == 0:
            text = f"loader(): the stream reads {reads[0]}, so it's assumed to split itself among the ranks"
            warnings.warn(text, stacklevel=1)
        first = list(itertools.islice(samples, self.ranks))
        left = itertools.islice(itertools.chain(first, samples), self.start, None)
        while round_ := list(itertools.islice(left, 1 if splits else self.ranks)):
            if not (self.exact or splits):
                round_ += itertools.islice(itertools.cycle(first), self.ranks - len(round_))
            yield from round_ if splits else round_[self.rank : self.rank + 1]

    def __len__(self) -> int:
        length = len(self.stream)
        return len(range(self.rank, length, self.ranks)) if self.exact else -(-length // self.ranks)


_NOT_RESUMED = "loader() can't resume a stream that splits itself among ranks or workers: save its own state_dict()"
_SPLITS = "splits the samples among the ranks itself, pass the sampler you'd use on one GPU, or use torch's DataLoader"
_SPLIT_ALIKE = "Split the same way on all ranks: random_split(data, lengths, torch.Generator().manual_seed(0))"
_DRAW_ALIKE = f"Give it the same arguments and seeds on all ranks. If it {_SPLITS}"
_READERS = {each.__code__ for each in (context.rank, context.world_size, dist.get_rank, dist.get_world_size)}
_READERS.add(type(os.environ).__getitem__.__code__)
_BOTH = "and nbddp.loader() would both split the data among the ranks"
_ASKED = "rank", "world_size", "get_rank", "get_world_size", "RANK", "WORLD_SIZE"


def _note(reads: list[str], frame: Any, event: str, _: Any) -> None:
    """Note by which name the user's code, or a library, asks for its rank or the number of ranks: a profiler."""
    if event == "call" and frame.f_code in _READERS:
        name = frame.f_locals.get("key", frame.f_code.co_name)  # a variable's, or the function's own
        if name in _ASKED and not frame.f_back.f_globals.get("__name__", "").startswith(("nbddp.", "torch.")):
            reads.append(name)


class _Loader(DataLoader[Any]):
    """A DataLoader that knows where in the data it is. Its signature is DataLoader's: Lightning makes new ones."""

    _started = 0  # the start that a stream's persistent workers have
    _told = 0  # the epoch that a stream was told last
    # Of the newest batch: where in the share its pass began; the share's samples; all ranks' without repeated ones; the
    # samples of the batch; those of its pass so far.
    _at = (0, 0, 0, 0, 0)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """accelerate asks in ``prepare()``, before it deals the share of this rank to the ranks once more."""
        if context.world_size() > 1:
            raise TypeError(
                f"accelerator.prepare() {_BOTH}: prepare the plain DataLoader, or leave nbddp's out of prepare() and "
                "write x.to(nbddp.device())"
            )
        return False

    @property
    def bs(self) -> int:
        """fastai asks in ``distrib_ctx()``, likewise."""
        raise AttributeError(
            f"distrib_ctx() {_BOTH}: pass the plain DataLoader, or leave distrib_ctx() out and use nbddp.wrap(model)"
        )

    @property
    def _place(self) -> Any:
        places = (self.batch_sampler, self.sampler, self.dataset)
        return next((each for each in places if isinstance(each, _Place)), _Place())  # another library's sampler: lost

    def __iter__(self) -> Any:
        global _newest
        place, size, batches = self._place, self.batch_size or 1, self._place is self.batch_sampler
        share = most = sys.maxsize  # of a stream
        left = sys.maxsize if place.exact else 0  # 0: which samples are repeated isn't known
        if isinstance(place, _Share):
            place.compare_split()
            share, left = len(place), place.length - place.start
            most = -(-left // context.world_size())  # of any rank, so that all are in the same epoch
        elif isinstance(place, _StreamShare):
            if self._told != place.epoch and callable(set_epoch := getattr(place.stream, "set_epoch", None)):
                set_epoch(place.epoch)  # of the package datasets; within an epoch, what the user sets counts
            self._told = place.epoch
            if self._started != place.start:
                self._started, self._iterator = place.start, None
        began = place.taken = place.taken if place.continues else 0
        begun, seen = place.begun, 0
        sizes = map(len, place) if batches else (min(size, share - i) for i in range(0, share, size))
        _newest, self._at = self, (began, share, left, 0, 0)
        for count, batch in enumerate(super().__iter__(), 1):
            entries = next(sizes, size)  # a sampler may be longer than it says
            seen += entries
            _newest, self._at = self, (began, share, left, entries, seen)
            log.count_samples(entries)
            if place.begun == begun:
                place.taken = began + (count if batches else seen)
                if -(-place.taken // size) >= (share // size if self.drop_last else -(-most // size)):
                    place.set_epoch(place.epoch + 1)
            yield batch
        if place.begun == begun:
            place.set_epoch(place.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return where in the data the ranks are, if each has taken as many batches as this one."""
        place = self._place
        taken = place.start + place.taken * context.world_size()
        return {"epoch": place.epoch, "taken": taken, "length": place.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this position in the next pass, even on more or fewer ranks.

        Raises:
            TypeError: the stream splits itself, so only its own ``load_state_dict`` knows where it was.
            ValueError: the state is from data of a different length.
        """
        place = self._place
        if getattr(place, "splits", False):
            raise TypeError(_NOT_RESUMED)
        if (saved := state.get("length")) != place.length:
            raise ValueError(f"the state was saved with {saved} samples, but the data now has {place.length}")
        place.set_epoch(state["epoch"])
        place.start = state["taken"]

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch in the next pass."""
        self._place.set_epoch(epoch)


def gather_for_metrics(x: torch.Tensor) -> torch.Tensor:
    """Return all ranks' entries for the samples of a loader, in the dataset's order, without repeated samples.

    A collective, for the loader that returned the latest batch. The metric then doesn't depend on the number of ranks.

    Args:
        x: an entry for each sample of this rank's latest batch, or of all its batches in this pass, shape (n, ...).

    Raises:
        TypeError: ``x`` isn't a tensor.
        ValueError: on all ranks, if there isn't an entry for each sample (of a stream, whose last batch may be shorter,
            fewer are taken), or the loader has a ``batch_sampler``, or reads a stream without ``exact=True``.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"gather_for_metrics() takes a tensor, not a {type(x).__name__}: call it for each tensor")
    began, share, left, batch, seen = _newest._at if _newest is not None else (0, 0, 0, 0, 0)
    if _newest is None or not left or _newest._place is _newest.batch_sampler:
        raise ValueError(
            "gather_for_metrics() needs a batch from nbddp.loader() without batch_sampler; for a stream, use exact=True"
        )
    stream = share == sys.maxsize  # of which each worker's last batch may be shorter
    missing = batch * max(1, _newest.num_workers) if stream else 1
    entries = len(x) if any(0 <= whole - len(x) < missing for whole in (batch, seen)) else 0
    first = 0 if stream else began + seen - entries
    shares, places = all_gather(x.detach()), all_gather((first + torch.arange(entries)) % share)
    if [len(each) for each in shares] != [len(each) for each in places]:
        raise ValueError(
            f"gather_for_metrics(): the ranks passed {', '.join(str(len(each)) for each in shares)} entries; pass one "
            "for each sample of the latest batch, or of this pass so far"
        )
    index, order = torch.cat([place * len(shares) + rank for rank, place in enumerate(places)]).sort()
    return torch.cat(shares)[order[index < left].to(x.device)]


def loader(
    dataset: Any,
    batch_size: int | None = 1,
    *,
    shuffle: bool = False,
    split_batches: bool = False,
    exact: bool = False,
    sampler: Any = None,
    batch_sampler: Any = None,
    **kw: Any,
) -> DataLoader[Any]:
    """Return a DataLoader for this rank's share of ``dataset``. Batches stay on the CPU.

    A batch may have any structure, so nbddp doesn't move it: write ``x.to(nbddp.device())``. On CUDA, its memory is
    pinned, so that ``x.to(nbddp.device(), non_blocking=True)`` overlaps with training.

    With ``shuffle=True`` or a sampler, an epoch ends when all its batches have been taken, in one pass or in several
    that were left early: each pass continues where the last one stopped. So a single rank may look at a batch,
    ``next(iter(loader))``, and its next pass still has its whole share of the epoch that the other ranks are in. (A
    rank that goes through the whole loader alone is then in the next epoch: call ``loader.set_epoch(epoch)`` on every
    rank, as with ``DistributedSampler``.)

    ``loader.state_dict()`` has the position in the data. A loader that loads it with ``load_state_dict()`` continues
    with the next sample, even on more or fewer ranks. The position is right if every rank has taken as many batches as
    the rank that saves it.

    Args:
        dataset: map-style; or a stream, an ``IterableDataset``; or a DataLoader, which is re-created with its options
            for this rank's share. Each rank reads its part of a ``datasets`` stream. A stream that reads its
            rank or the world size while it's iterated is assumed to split itself. Any other is read by every rank,
            which keeps every n-th sample: its order must be the same on every rank. With several workers, the stream
            has to split itself among them, as in torch.
        batch_size: samples per step, on this rank or, with ``split_batches=True``, over all ranks.
        shuffle: use a new order each epoch, from the run's ``seed``: that of ``DistributedSampler`` with
            ``set_epoch(0)``, ``set_epoch(1)``, ...
        exact: True: every sample exactly once, for evaluation; some ranks may have one sample, and one batch, fewer.
            False: as with ``DistributedSampler``, a few samples are repeated to make the shares equal, so that no rank
            waits for another in a collective.
        sampler: any sampler with a length, such as ``WeightedRandomSampler``: every rank draws the same samples, as
            many as on one GPU, and keeps its share.
        batch_sampler: any sampler of batches; each rank takes its share of the batches.
        **kw: options of ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: the sampler, or the loader, is already distributed.
        ValueError: options that can't be combined, or a global batch size that isn't divisible by the world size.
        RuntimeError: while iterating: the samplers of two ranks drew different samples, or they split the data
            in different ways.
    """
    own = inspect.signature(loader).parameters.keys() - {"kw"}
    options = inspect.signature(DataLoader).parameters.keys() - own
    for name in kw.keys() - options:
        raise TypeError(f"loader() got an unexpected keyword argument {name!r}{did_you_mean(name, own | options)}")
    ranks = context.world_size()
    if isinstance(dataset, _Loader):
        raise TypeError("loader(): this loader already has the rank's share: pass the dataset, or the plain DataLoader")
    if isinstance(dataset, DataLoader):
        if (batch_size, shuffle, sampler, batch_sampler) != (1, False, None, None):
            raise ValueError("a DataLoader has its own batch_size and sampler: set them there")
        kw = {**{name: getattr(dataset, name) for name in options}, **kw}
        dataset, batch_size, its, batches = dataset.dataset, dataset.batch_size, dataset.sampler, dataset.batch_sampler
        if batch_size is None and batches is not None:
            batch_size, batch_sampler = 1, batches
        elif not isinstance(dataset, IterableDataset):
            shuffle = isinstance(its, RandomSampler) and not its.replacement and its.num_samples == len(dataset)
            sampler = None if shuffle or isinstance(its, SequentialSampler) else its
    if split_batches and (batch_size or 1) % ranks:
        raise ValueError(f"a global batch_size of {batch_size} isn't divisible by {ranks} ranks")
    batch_size = batch_size // ranks if batch_size and split_batches else batch_size
    kw.setdefault("pin_memory", context.device().type == "cuda")
    given = sampler if sampler is not None else batch_sampler
    if exact and kw.get("drop_last"):
        raise ValueError("exact=True takes every sample, but drop_last=True leaves some out: choose one")
    for each in (given, getattr(given, "sampler", None)):
        if hasattr(each, "num_replicas"):  # DistributedSampler's
            raise TypeError(f"loader() already distributes the samples. Since {type(each).__name__} {_SPLITS}")
    if isinstance(dataset, IterableDataset):
        datasets = sys.modules.get("datasets")
        if splits := datasets is not None and isinstance(dataset, datasets.IterableDataset):
            dataset = datasets.distributed.split_dataset_by_node(dataset, rank=context.rank(), world_size=ranks)
        stream = _StreamShare(dataset, exact=exact or splits, splits=splits)
        return _Loader(stream, batch_size, shuffle, sampler, batch_sampler, **kw)
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        raise TypeError(
            f"loader() takes a dataset, an IterableDataset, or a DataLoader, not a {type(dataset).__name__}"
        )
    share = _Share(dataset, dataset if given is None else given, shuffle=shuffle, exact=exact)
    shuffle = shuffle and given is not None  # which torch refuses, as it does other options that exclude each other
    if batch_sampler is not None:
        return _Loader(dataset, batch_size, shuffle, sampler, share, **kw)
    return _Loader(dataset, batch_size, shuffle, share, **kw)
