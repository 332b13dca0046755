"""``loader`` distributes data over the ranks, with torch's own tools."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from nbddp.worker import context, metrics
from nbddp.worker.epochs import EpochSampler, Pass
from nbddp.worker.streams import StreamShare, split_by_itself

_COUNT_EVERY_S = 0.1
_samples = 0  # of all loaders of this rank together


class _EpochLoader(DataLoader[Any]):
    """A DataLoader that counts its epochs, and reports to the panel how many samples it has returned.

    Its signature is that of DataLoader, since Lightning makes such loaders anew.
    """

    @property
    def _epochs(self) -> EpochSampler:
        """The sampler, or the sampler of batches. Raises TypeError if another library has put in its own."""
        for each in (self.batch_sampler, self.sampler):
            if isinstance(each, EpochSampler):
                return each
        raise TypeError("the loader's sampler has been replaced, and nbddp does not know where in the data it is")

    def __iter__(self) -> Any:
        if not any(isinstance(each, EpochSampler) for each in (self.batch_sampler, self.sampler)):
            yield from super().__iter__()
            return
        this_pass = Pass(self._epochs)
        in_batches = self._epochs is self.batch_sampler
        sizes = map(len, self._epochs) if in_batches else self._sizes()
        count = _Counter()
        for batch in super().__iter__():
            size = next(sizes, self.batch_size or 1)  # a sampler may be longer than it says
            count.add(size)
            this_pass.count(1 if in_batches else size)
            yield batch
            this_pass.check_epoch()
        count.end()
        this_pass.end()

    def state_dict(self) -> dict[str, int]:
        """Return where in the data the ranks are, to be saved in a snapshot."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there: the next pass has the rest of that epoch, also with another number of ranks.

        Raises:
            ValueError: the state is of a dataset, or sampler, of another length.
        """
        self._epochs.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch in the next pass."""
        self._epochs.set_epoch(epoch)

    def _sizes(self) -> Iterator[int]:
        """The number of samples of each batch of a pass."""
        left = len(self._epochs)
        while left > 0:
            yield min(self.batch_size or 1, left)
            left -= self.batch_size or 1


class _StreamLoader(DataLoader[Any]):
    """A DataLoader of a stream that counts epochs and samples."""

    def __init__(self, share: Any, **kw: Any) -> None:
        self._epoch = 0
        self._taken = self._skip = 0  # samples: of this rank in the newest pass, of all ranks before it
        super().__init__(share, **kw)

    def __iter__(self) -> Any:
        if isinstance(self.dataset, StreamShare) and self.dataset.skip != self._skip:
            self.dataset.skip = self._skip
            self._iterator = None  # persistent workers have a copy of the stream
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):  # of the package datasets
            set_epoch(self._epoch)
        self._taken = 0
        count = _Counter()
        for batch in super().__iter__():
            self._taken += self.batch_size or 1
            count.add(self.batch_size or 1)
            yield batch
        count.end()
        self._epoch, self._taken, self._skip = self._epoch + 1, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Return where in the stream the ranks are, to be saved in a snapshot."""
        return {"epoch": self._epoch, "taken": self._skip + self._taken * context.world_size()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there: the next pass leaves out what was taken of that epoch.

        Raises:
            TypeError: the stream splits itself, so that only its own ``load_state_dict`` knows where it was.
        """
        if not isinstance(self.dataset, StreamShare):
            raise TypeError("this stream splits itself: save its own state_dict() in the snapshot, and load that")
        self._epoch, self._skip = state["epoch"], state["taken"]

    def set_epoch(self, epoch: int) -> None:
        """Count from this epoch on."""
        self._epoch, self._taken, self._skip = epoch, 0, 0


class _Counter:
    """Reports the samples of this rank to the panel, not more often than it shows them."""

    def __init__(self) -> None:
        self._reported_at = 0.0

    def add(self, samples: int) -> None:
        global _samples
        _samples += samples
        now = time.monotonic()
        if now - self._reported_at >= _COUNT_EVERY_S:
            self._reported_at = now
            metrics.count_samples(_samples)

    def end(self) -> None:
        metrics.count_samples(_samples)


def loader(
    dataset: Dataset[Any],
    batch_size: int = 1,
    *,
    shuffle: bool = False,
    split_batch: bool = False,
    exact: bool = False,
    sampler: Sampler[Any] | None = None,
    batch_sampler: Sampler[list[Any]] | None = None,
    **kw: Any,
) -> DataLoader[Any]:
    """A DataLoader for this rank's share of ``dataset``. Batches stay on the CPU.

    A batch may have any structure, so nbddp does not move it: write ``x.to(nbddp.device())``. On CUDA its memory is
    pinned, so that ``x.to(nbddp.device(), non_blocking=True)`` overlaps with the training.

    With ``shuffle=True`` or a sampler an epoch ends when all its batches have been taken, in one pass or in several
    that were left early: each pass continues where the last one stopped. So a single rank may look at a batch,
    ``next(iter(loader))``, and its next pass still has its whole share of the epoch that the other ranks are in. If
    ranks get into different epochs, e.g. because one rank alone went through the whole loader, a ``UserWarning`` names
    them.

    ``loader.state_dict()`` says where in the data the ranks are. A loader that gets it by ``load_state_dict()`` goes on
    with the next sample, also with another number of ranks. It is right if every rank has taken as many batches as the
    rank that saves it. ``loader.set_epoch(epoch)`` begins another epoch.

    Args:
        dataset: map-style, or an ``IterableDataset``. Of a stream of the package ``datasets`` each rank reads its part;
            any other stream is read by every rank, which keeps every n-th sample: its order has to be the same on every
            rank, and it must not split itself. (For a stream that does, use torch's DataLoader.)
        batch_size: samples per step, on this rank or, with ``split_batch=True``, over all ranks.
        shuffle: use a new order each epoch, from the run's ``seed``: that of ``DistributedSampler`` with
            ``set_epoch(0)``, ``set_epoch(1)``, ...
        exact: True: every sample exactly once, for an evaluation; some ranks may have a sample, and a batch, less.
            False: as with ``DistributedSampler`` a few samples are repeated to make the shares equal, so that no rank
            waits for another one in a collective.
        sampler: any sampler with a length, such as ``WeightedRandomSampler``: every rank makes the same draw, of as
            many samples as on one GPU, and takes its share of it.
        batch_sampler: any sampler of batches; each rank takes its share of the batches.
        **kw: options of ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: the sampler is already distributed, or has no length.
        ValueError: options that exclude each other (``exact`` and ``drop_last``, for example), or a global batch size
            that is not divisible by the world size.
        RuntimeError: while iterating: the samplers of two ranks drew different samples.
    """
    ranks = context.world_size()
    if split_batch:
        if batch_size % ranks:
            raise ValueError(f"a global batch_size of {batch_size} is not divisible by {ranks} ranks")
        batch_size //= ranks
    kw.setdefault("pin_memory", context.device().type == "cuda")
    given = sampler if sampler is not None else batch_sampler
    _check_samplers(dataset, sampler, batch_sampler, shuffle=shuffle)
    if exact and kw.get("drop_last"):
        raise ValueError("exact=True takes every sample, and drop_last=True leaves some out: choose one of them")
    if isinstance(dataset, IterableDataset):
        share = split_by_itself(dataset)
        share = StreamShare(dataset, exact=exact) if share is None else share
        return _StreamLoader(share, batch_size=batch_size, **kw)
    if batch_sampler is not None and (batch_size != 1 or kw.get("drop_last")):
        raise ValueError(
            "loader() with batch_sampler takes no batch_size, split_batch or drop_last: it makes the batches"
        )
    epochs = EpochSampler(
        dataset if given is None else given,
        batch_size,
        draws=given is not None,
        exact=exact,
        num_replicas=ranks,
        rank=context.rank(),
        shuffle=shuffle,
        seed=context.seed(),
    )
    if batch_sampler is not None:
        return _EpochLoader(dataset, batch_sampler=epochs, **kw)
    return _EpochLoader(dataset, batch_size, sampler=epochs, **kw)


def _check_samplers(dataset: Any, sampler: Any, batch_sampler: Any, *, shuffle: bool) -> None:
    given = sampler if sampler is not None else batch_sampler
    if sampler is not None and batch_sampler is not None:
        raise ValueError("loader() takes a sampler or a batch_sampler, not both")
    if isinstance(dataset, IterableDataset) and (given is not None or shuffle):
        raise ValueError("a stream has an order of its own: shuffle it before, and pass neither shuffle nor a sampler")
    if given is None:
        return
    if shuffle:
        raise ValueError("the sampler decides the order: leave out shuffle=True")
    if isinstance(given, DistributedSampler) or isinstance(getattr(given, "sampler", None), DistributedSampler):
        raise TypeError(
            "loader() distributes the samples itself: leave the DistributedSampler out, or pass the sampler of one GPU"
        )
    if not hasattr(given, "__len__"):
        raise TypeError(f"loader() needs a sampler with a length, and {type(given).__name__} has no __len__")
