"""Shares a stream, an ``IterableDataset``, among the ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from nbddp.worker import context


class StreamShare(IterableDataset[Any]):
    """Every n-th sample of a stream, where n is the number of ranks; each rank reads all of it.

    Args:
        exact: repeat nothing: some ranks may have one sample less. Otherwise the first samples are repeated at the end.

    Attributes:
        skip: how many samples of all ranks the next pass leaves out at the start.
    """

    def __init__(self, stream: IterableDataset[Any], *, exact: bool) -> None:
        self.stream = stream
        self.skip = 0
        self._exact = exact
        self._rank, self._ranks = context.rank(), context.world_size()  # a DataLoader's worker is no rank

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise TypeError(
                "loader() with several workers needs a stream that shares itself among them, such as one of the "
                "package datasets; with num_workers=1 any stream works"
            )
        first: list[Any] = []
        count = -self.skip
        for sample in self.stream:
            if not self._exact and len(first) < self._ranks:
                first.append(sample)
            if count >= 0 and count % self._ranks == self._rank:
                yield sample
            count += 1
        ranks_with_one_more = count % self._ranks if count > 0 else 0
        if first and 0 < ranks_with_one_more <= self._rank:
            yield first[(self._rank - ranks_with_one_more) % len(first)]

    def __len__(self) -> int:
        """For a stream that knows its length."""
        length = len(self.stream)  # type: ignore[arg-type]
        return len(range(self._rank, length, self._ranks)) if self._exact else -(-length // self._ranks)


def split_by_itself(stream: Any) -> Any:
    """The share of a stream that knows how to split itself over ranks and workers (package ``datasets``), else None."""
    theirs = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    if not (isinstance(theirs, type) and isinstance(stream, theirs)):
        return None
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    return split(stream, rank=context.rank(), world_size=context.world_size())
