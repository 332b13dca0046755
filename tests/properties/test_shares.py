"""The shares of all ranks together are what one process would take, for every sampler, size and number of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nbddp.worker import data
from nbddp.worker.collectives import _interleaved
from nbddp.worker.epochs import EpochSampler, _seeded
from nbddp.worker.streams import StreamShare
from tests.properties.budget import examples

SIZES, RANKS = st.integers(0, 200), st.integers(1, 5)
MAKERS: dict[str, Any] = {
    "shuffle": None,
    "in order": None,
    "RandomSampler": lambda n: RandomSampler(range(max(n, 1))),
    "with a generator": lambda n: RandomSampler(range(max(n, 1)), generator=torch.Generator().manual_seed(n)),
    "SequentialSampler": lambda n: SequentialSampler(range(n)),
    "SubsetRandomSampler": lambda n: SubsetRandomSampler(range(0, n, 3)),
    "WeightedRandomSampler": lambda n: WeightedRandomSampler([1.0 + i % 3 for i in range(max(n, 1))], max(n, 1)),
    "BatchSampler": lambda n: BatchSampler(RandomSampler(range(max(n, 1))), 4, drop_last=False),
}


def _samplers(kind: str, size: int, ranks: int, *, exact: bool, seed: int = 7) -> list[EpochSampler]:
    make = MAKERS[kind]
    return [
        EpochSampler(
            range(size) if make is None else make(size),
            1,
            draws=make is not None,
            exact=exact,
            num_replicas=ranks,
            rank=rank,
            shuffle=kind == "shuffle",
            seed=seed,
        )
        for rank in range(ranks)
    ]


def _one_process(kind: str, size: int, epoch: int, seed: int = 7) -> list[Any]:
    """What torch's sampler draws without ranks, when it is seeded as documented."""
    if kind == "in order":
        return list(range(size))
    if kind == "shuffle":
        return list(torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)))
    sampler = MAKERS[kind](size)
    if kind == "with a generator":
        return [list(sampler) for _ in range(epoch + 1)][-1]
    with _seeded(seed + epoch):
        return list(sampler)


def _dealt(shares: list[list[Any]]) -> list[Any]:
    """The first of each rank, then the second of each, and so on."""
    return [share[i] for i in range(max(map(len, shares))) for share in shares if i < len(share)]


@examples(150)
@given(st.sampled_from(sorted(MAKERS)), SIZES, RANKS, st.integers(0, 3))
def test_exact_shares_are_the_order_of_one_process(kind: str, size: int, ranks: int, epoch: int) -> None:
    samplers = _samplers(kind, size, ranks, exact=True)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert _dealt(shares) == _one_process(kind, size, epoch)
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]


@examples(150)
@given(st.sampled_from(sorted(MAKERS)), SIZES, RANKS, st.integers(0, 3))
def test_default_shares_are_equally_long_and_begin_with_that_order(
    kind: str, size: int, ranks: int, epoch: int
) -> None:
    samplers = _samplers(kind, size, ranks, exact=False)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares, expected = [list(sampler) for sampler in samplers], _one_process(kind, size, epoch)
    assert len({len(share) for share in shares} | {len(sampler) for sampler in samplers}) == 1
    dealt = _dealt(shares)
    assert dealt[: len(expected)] == expected
    assert len(dealt) - len(expected) < ranks


def _loaders(kind: str, size: int, ranks: int, batch_size: int, *, exact: bool) -> list[Any]:
    batches = kind == "BatchSampler"
    options: dict[str, Any] = {} if batches else {"batch_size": batch_size}
    dataset: Any = range(size)
    samplers = _samplers(kind, size, ranks, exact=exact)
    role = "batch_sampler" if batches else "sampler"
    return [data._EpochLoader(dataset, **{role: each}, **options) for each in samplers]


def _batches(loader: Any, most: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader, most)]


@examples(150)
@given(
    st.sampled_from(["shuffle", "in order", "RandomSampler", "with a generator", "BatchSampler"]),
    st.integers(1, 200),
    RANKS,
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 1),
    st.integers(0, 50),
)
def test_a_loader_resumed_at_any_step_goes_on_as_if_uninterrupted(
    kind: str, size: int, ranks: int, batch_size: int, exact: bool, epoch: int, steps: int
) -> None:
    made = [_loaders(kind, size, ranks, batch_size, exact=exact) for _ in range(3)]
    whole = [[_batches(loader) for _ in range(3)] for loader in made[0]]
    steps = min(steps, len(whole[0][epoch]))
    for loader in made[1]:
        for _ in range(epoch):
            _batches(loader)
        _batches(loader, steps)
    for rank, loader in enumerate(made[2]):
        loader.load_state_dict(made[1][0].state_dict())
        left = whole[rank][epoch][steps:] if steps < len(whole[0][epoch]) else whole[rank][epoch + 1]
        assert _batches(loader) == left


@examples(150)
@given(st.integers(1, 200), RANKS, RANKS, st.integers(1, 9), st.integers(0, 50))
def test_resumed_with_other_ranks_every_sample_of_the_epoch_is_taken_once(
    size: int, ranks: int, later_ranks: int, batch_size: int, steps: int
) -> None:
    first = _loaders("shuffle", size, ranks, batch_size, exact=True)
    steps = min(steps, size // ranks // batch_size)  # the batches that are full on every rank
    seen = [i for loader in first for batch in _batches(loader, steps) for i in batch]
    if len(seen) == size:
        return
    for loader in _loaders("shuffle", size, later_ranks, batch_size, exact=True):
        loader.load_state_dict(first[0].state_dict())
        seen += [i for batch in _batches(loader) for i in batch]
    assert sorted(seen) == list(range(size))


class Numbers(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))


def _streams(size: int, ranks: int, *, exact: bool, skip: int = 0) -> list[list[int]]:
    found = []
    for rank in range(ranks):
        share = StreamShare(Numbers(size), exact=exact)
        share._rank, share._ranks, share.skip = rank, ranks, skip
        found.append(list(share))
    return found


@examples(150)
@given(SIZES, RANKS, st.integers(0, 40))
def test_shares_of_a_stream_are_the_stream_and_resume(size: int, ranks: int, rounds: int) -> None:
    assert _dealt(_streams(size, ranks, exact=True)) == list(range(size))
    padded = _streams(size, ranks, exact=False)
    assert len({len(share) for share in padded}) == 1
    assert _dealt(padded)[:size] == list(range(size))
    taken = min(rounds, len(padded[0]))
    assert _streams(size, ranks, exact=False, skip=taken * ranks) == [share[taken:] for share in padded]


@examples(150)
@given(SIZES, RANKS)
def test_entries_gathered_from_exact_shares_are_in_the_datasets_order(size: int, ranks: int) -> None:
    whole = torch.arange(size * 2.0).reshape(size, 2)
    assert _interleaved([whole[rank::ranks] for rank in range(ranks)]).tolist() == whole.tolist()
