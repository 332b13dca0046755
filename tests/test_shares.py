"""The shares of all ranks together are what one process would take, for every sampler, size and number of ranks."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils import data

import nbddp
from nbddp.helpers import context
from nbddp.helpers import loader as loaders
from nbddp.messages import Place, Settings

SEED = 7
FEW = settings(max_examples=max(1, settings().max_examples // 5))  # 10 to 60 ms each; NBDDP_CASES scales them all
SIZES, RANKS = st.integers(0, 40), st.integers(1, 5)
LENGTHS, BATCHES = st.integers(1, 60), st.integers(1, 9)
MAKERS: dict[str, Any] = {
    "shuffle": None,
    "in order": None,
    "RandomSampler": lambda n: data.RandomSampler(range(max(n, 1))),
    "with a generator": lambda n: data.RandomSampler(range(max(n, 1)), generator=torch.Generator().manual_seed(n)),
    "SequentialSampler": lambda n: data.SequentialSampler(range(n)),
    "SubsetRandomSampler": lambda n: data.SubsetRandomSampler(range(0, n, 3)),
    "WeightedRandomSampler": lambda n: data.WeightedRandomSampler([1.0 + i % 3 for i in range(max(n, 1))], max(n, 1)),
    "BatchSampler": lambda n: data.BatchSampler(data.RandomSampler(range(max(n, 1))), 4, drop_last=False),
    "BatchSampler with a generator": lambda n: data.BatchSampler(MAKERS["with a generator"](n), 4, drop_last=False),
}
KINDS = st.sampled_from(sorted({*MAKERS} - {"SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler"}))


def _on_ranks(ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """What the function gives on each rank, one after the other: no rank waits for another."""
    results, before = [], context._current
    try:
        for rank in range(ranks):
            context.enter(Settings("", ranks, seed=SEED), Place(rank, rank, ranks, folder=""))
            results.append(function(rank))
    finally:
        context._current = before
    return results


def _loader(kind: str, size: int, batch_size: int = 1, *, exact: bool) -> Any:
    """A loader for the rank that it's made on."""
    dataset: Any = range(max(size, 1) if kind not in ("shuffle", "in order") else size)
    if kind.startswith("BatchSampler"):
        return nbddp.loader(dataset, batch_sampler=MAKERS[kind](size), exact=exact)
    if MAKERS[kind]:
        return nbddp.loader(dataset, batch_size, sampler=MAKERS[kind](size), exact=exact)
    return nbddp.loader(dataset, batch_size, shuffle=kind == "shuffle", exact=exact)


def _shares(kind: str, size: int, ranks: int, epoch: int, *, exact: bool) -> tuple[list[list[Any]], list[int]]:
    """What each rank's sampler gives in an epoch, and how much it says that it does."""

    def share(_: int) -> tuple[list[Any], int]:
        place = _loader(kind, size, exact=exact)._place
        place.set_epoch(epoch)
        return list(place), len(place)

    shares, lengths = zip(*_on_ranks(ranks, share))
    return list(shares), list(lengths)


def _one_process(kind: str, size: int, epoch: int) -> list[Any]:
    """What torch's sampler draws without ranks, when it is seeded as documented."""
    if kind == "in order":
        return list(range(size))
    generator = torch.Generator().manual_seed(SEED + epoch)
    if kind == "shuffle":
        return torch.randperm(size, generator=generator).tolist()
    sampler = MAKERS[kind](size)
    if kind.endswith("with a generator"):
        getattr(sampler, "sampler", sampler).generator = generator
    with loaders._seeded(SEED + epoch):
        return list(sampler)


def _dealt(shares: list[list[Any]]) -> list[Any]:
    """The first of each rank, then the second of each, and so on."""
    return [share[i] for i in range(max(map(len, shares))) for share in shares if i < len(share)]


@FEW
@given(st.sampled_from(sorted(MAKERS)), SIZES, RANKS, st.integers(0, 3))
@example("BatchSampler with a generator", 40, 2, 1)
def test_shares_are_the_order_of_one_process_exactly_or_padded(kind: str, size: int, ranks: int, epoch: int) -> None:
    expected = _one_process(kind, size, epoch)
    shares, lengths = _shares(kind, size, ranks, epoch, exact=True)
    assert (_dealt(shares), [len(share) for share in shares]) == (expected, lengths)
    shares, lengths = _shares(kind, size, ranks, epoch, exact=False)
    dealt = _dealt(shares)
    assert len({len(share) for share in shares} | set(lengths)) == 1
    assert dealt[: len(expected)] == expected
    assert len(dealt) - len(expected) < ranks


@FEW
@given(LENGTHS, RANKS, BATCHES, st.booleans(), st.booleans(), st.integers(0, 3))
def test_shuffled_batches_are_those_of_torchs_distributed_sampler(
    size: int, ranks: int, batch_size: int, drop_last: bool, split_batches: bool, epoch: int
) -> None:
    def compare(rank: int) -> None:
        options: Any = {"shuffle": True, "drop_last": drop_last, "split_batches": split_batches}
        loader: Any = nbddp.loader(range(size), batch_size * (ranks if split_batches else 1), **options)
        theirs: Any = data.DistributedSampler(range(size), ranks, rank, seed=SEED)  # type: ignore[arg-type]
        for each in (loader, theirs):
            each.set_epoch(epoch)
        expected: Any = data.DataLoader(range(size), batch_size, sampler=theirs, drop_last=drop_last)  # type: ignore[arg-type]
        assert (len(loader), loader.batch_size, _batches(loader)) == (len(expected), batch_size, _batches(expected))

    _on_ranks(ranks, compare)


def _batches(loader: Any, most: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader, most)]


@FEW
@given(KINDS, LENGTHS, RANKS, BATCHES, st.booleans(), st.integers(0, 1), st.integers(0, 50))
def test_a_loader_resumed_at_any_step_goes_on_as_if_uninterrupted(
    kind: str, size: int, ranks: int, batch_size: int, exact: bool, epoch: int, steps: int
) -> None:
    """Also at an epoch's last batch: it goes on with the next epoch."""

    def whole(_: int) -> list[list[list[int]]]:
        loader = _loader(kind, size, batch_size, exact=exact)
        return [_batches(loader) for _ in range(3)]

    passes = _on_ranks(ranks, whole)
    steps = min(steps, len(passes[0][epoch]))

    def interrupted(_: int) -> Any:
        loader = _loader(kind, size, batch_size, exact=exact)
        for _ in range(epoch):
            _batches(loader)
        _batches(loader, steps)
        return loader.state_dict()

    state = _on_ranks(ranks, interrupted)[0]

    def resumed(rank: int) -> None:
        loader = _loader(kind, size, batch_size, exact=exact)
        loader.load_state_dict(state)
        left = passes[rank][epoch][steps:] if steps < len(passes[0][epoch]) else passes[rank][epoch + 1]
        assert _batches(loader) == left

    _on_ranks(ranks, resumed)


@FEW
@given(LENGTHS, st.lists(st.tuples(RANKS, st.integers(0, 5)), max_size=3), RANKS, BATCHES)
def test_resumed_with_other_ranks_every_sample_of_the_epoch_is_taken_once(
    size: int, parts: list[tuple[int, int]], last_ranks: int, batch_size: int
) -> None:
    def part(_: int, steps: int | None, state: Any) -> tuple[list[list[int]], Any]:
        loader = _loader("shuffle", size, batch_size, exact=True)
        loader.load_state_dict(state)
        return _batches(loader, steps), loader.state_dict()

    seen: list[int] = []
    state = {"epoch": 0, "taken": 0, "length": size}
    for ranks, steps in [*parts, (last_ranks, None)]:
        most = None if steps is None else min(steps, (size - len(seen)) // ranks // batch_size)  # that are full
        shares, states = zip(*_on_ranks(ranks, functools.partial(part, steps=most, state=state)))
        seen += [i for share in shares for batch in share for i in batch]
        state = states[0]
        if len(seen) == size:
            break
    assert (sorted(seen), state) == (list(range(size)), {"epoch": 1, "taken": 0, "length": size})


def test_a_batch_for_all_ranks_is_divided_and_a_share_and_an_epoch_are_told_to_whoever_asks() -> None:
    class Told(data.SequentialSampler):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    def train(_: int) -> tuple[int, list[int], list[int]]:
        Told.epochs = []
        told = nbddp.loader(range(12), sampler=Told(range(12)))
        list(told), list(told)
        stream: Any = Sized(11)
        lengths = [len(nbddp.loader(stream, 1, exact=exact)) for exact in (True, False)]
        return len(_batches(nbddp.loader(range(12), 6, split_batches=True))[0]), Told.epochs, lengths

    assert _on_ranks(3, train) == [(2, [0, 1], [share, 4]) for share in (4, 4, 3)]
    with pytest.raises(ValueError, match="a global batch_size of 8 isn't divisible by 3 ranks"):
        _on_ranks(3, lambda _: nbddp.loader(range(12), 8, split_batches=True))
    assert not nbddp.loader(range(4))._is_accelerate_prepared
    with pytest.raises(TypeError, match=r"accelerator\.prepare\(\) and nbddp\.loader\(\) would both split the data"):
        _on_ranks(2, lambda _: nbddp.loader(range(4))._is_accelerate_prepared)


class Numbers(data.IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))


class Sized(Numbers):
    def __len__(self) -> int:
        return self.size


def _streams(size: int, ranks: int, *, exact: bool, start: int = 0) -> list[list[int]]:
    def share(_: int) -> list[int]:
        loader: Any = nbddp.loader(Numbers(size), exact=exact)
        loader.load_state_dict({"epoch": 0, "taken": start})
        return [i for batch in _batches(loader) for i in batch]

    return _on_ranks(ranks, share)


@FEW
@given(SIZES, RANKS, st.integers(0, 20))
def test_shares_of_a_stream_are_the_stream_and_resume(size: int, ranks: int, rounds: int) -> None:
    assert _dealt(_streams(size, ranks, exact=True)) == list(range(size))
    padded = _streams(size, ranks, exact=False)
    assert len({len(share) for share in padded}) == 1
    assert _dealt(padded)[:size] == list(range(size))
    taken = min(rounds, len(padded[0]))
    assert _streams(size, ranks, exact=False, start=taken * ranks) == [share[taken:] for share in padded]


@FEW
@given(LENGTHS, RANKS, BATCHES, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 9))
def test_gathered_entries_are_in_the_datasets_order_without_repeated_samples(
    size: int, ranks: int, batch_size: int, exact: bool, shuffle: bool, looks: int, step: int
) -> None:
    """For a batch, or after the loop (step 0); also if passes were left early before."""
    kind = "shuffle" if shuffle else "in order"
    step = min(step, size // ranks // batch_size if exact else -(-size // ranks // batch_size))  # that all ranks have
    looks = looks if looks * batch_size < size // ranks else 0  # all in one epoch
    sent: list[list[torch.Tensor]] = []  # by rank, what it gathers

    def own(x: torch.Tensor) -> list[torch.Tensor]:
        sent[-1].append(x)
        return [x]

    def entries(_: int) -> tuple[torch.Tensor, int]:
        loader = _loader(kind, size, batch_size, exact=exact)
        for _ in range(looks):
            next(iter(loader), None)
        epoch, position = loader._place.epoch, loader._place.taken * shuffle
        batches = [torch.empty(0, dtype=torch.int64), *itertools.islice(loader, step or None)]
        sent.append([])
        loaders.gather_for_metrics(batches[-1] if step else torch.cat(batches))
        return epoch, position + (len(batches) - 2) * batch_size

    before = loaders.all_gather
    try:
        loaders.all_gather = own  # type: ignore[assignment]
        epoch, first = _on_ranks(ranks, entries)[0]
        answers = zip(*sent)
        loaders.all_gather = lambda x: list(next(answers))
        gathered = loaders.gather_for_metrics(sent[-1][0]).tolist()
    finally:
        loaders.all_gather = before
    order = [int(i) for i in _one_process(kind, size, epoch)]
    if step and looks == 0:
        assert gathered == order[first * ranks : (first + batch_size) * ranks]
    else:
        assert gathered == [i for i in order if i in gathered or not step]


def test_entries_are_gathered_for_the_loader_of_the_latest_batch() -> None:
    def sizes(_: int) -> list[int]:
        found = []
        for batch in nbddp.loader(range(6), 2):
            found.append(len(nbddp.gather_for_metrics(batch)))
            found += [len(nbddp.gather_for_metrics(each)) for each in nbddp.loader(range(4), 3)]
        return found

    assert _on_ranks(1, sizes) == [[2, 3, 1] * 3]
    batches = data.BatchSampler(range(4), 2, drop_last=False)
    for loader in nbddp.loader(Numbers(4), 2), nbddp.loader(range(4), batch_sampler=batches):
        next(iter(loader))
        with pytest.raises(ValueError, match=r"needs .* without batch_sampler; for a stream, use exact=True"):
            nbddp.gather_for_metrics(torch.ones(2))
