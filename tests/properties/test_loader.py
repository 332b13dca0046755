"""In any use of a loader, all ranks together see every sample in a pass, or are warned that they did not."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import nbddp
from tests.properties.budget import batches
from tests.support import run

CASES = 20  # in one run


@dataclass(frozen=True)
class Act:
    """What one rank, or all of them together, do with the loader.

    Attributes:
        rank: who; None for all, with a collective at every batch.
        batches: how many before it is left; None for a whole pass.
    """

    rank: int | None
    batches: int | None


@dataclass(frozen=True)
class Case:
    size: int
    batch_size: int
    workers: int
    acts: tuple[Act, ...]


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    few = st.one_of(st.just(1), st.integers(1, 4))
    look = st.builds(Act, st.integers(0, ranks - 1), few)
    alone = st.builds(Act, st.integers(0, ranks - 1), st.none())
    together = st.builds(Act, st.none(), st.one_of(st.none(), few))
    whole = st.just(Act(None, None))
    # Mostly what people do; a whole pass alone is what they have to be told of.
    acts = draw(st.lists(st.one_of(look, look, whole, whole, together, alone), min_size=1, max_size=8))
    workers = draw(st.sampled_from([0] * 30 + [1]))
    return Case(draw(st.integers(1, 40)), draw(st.integers(1, 8)), workers, (*acts, Act(None, None), Act(None, None)))


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[Case]]:
    ranks = draw(st.integers(2, 4))
    return ranks, draw(st.lists(cases(ranks), min_size=CASES, max_size=CASES))


# ---------------------------------------------------------------------------- in the ranks


def go_through_all(several: list[Case]) -> list[tuple[list[list[int]], list[list[str]]]]:
    return [_gone_through(case) for case in several]


def _gone_through(case: Case) -> tuple[list[list[int]], list[list[str]]]:
    """For each act: the samples that this rank has seen, and what it was told."""
    loader = nbddp.loader(range(case.size), case.batch_size, shuffle=True, num_workers=case.workers)  # type: ignore[arg-type]
    seen, told = [], []
    for act in case.acts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen.append(_act(loader, act) if act.rank in (None, nbddp.rank()) else [])
            nbddp.barrier()
        told.append([str(each.message) for each in caught])
    return seen, told


def _act(loader: Any, act: Act) -> list[int]:
    samples: list[int] = []
    for count, batch in enumerate(loader, 1):
        samples += batch.tolist()
        if act.rank is None:
            nbddp.barrier()
        if count == act.batches:
            break
    return samples


# ---------------------------------------------------------------------------- what it should be


def check(case: Case, ranks: int, outcomes: list[Any]) -> None:
    seen = [outcome[0] for outcome in outcomes]
    told = [[text for outcome in outcomes for text in outcome[1][i]] for i in range(len(case.acts))]
    share = math.ceil(case.size / ranks)
    for i, act in enumerate(case.acts):
        if act != Act(None, None):
            continue
        counts = Counter(sample for samples in seen for sample in samples[i])
        assert counts.total() == share * ranks
        covered = set(counts) == set(range(case.size)) and max(counts.values()) <= math.ceil(share * ranks / case.size)
        assert covered or any(told[: i + 1]), (i, counts)
    assert all("is in epoch" in text for texts in told for text in texts)
    assert not any(told) or may_differ(case), told


def may_differ(case: Case) -> bool:
    """Only who has taken a whole epoch's batches alone, or not the same in a pass left early, can be elsewhere."""
    looks = [act for act in case.acts if act.rank is not None]
    return bool(looks) and (
        any(act.batches is None for act in looks)
        or any(act.rank is None and act.batches is not None for act in case.acts)
        or sum(act.batches or 0 for act in looks) * case.batch_size >= case.size / 4
    )


@pytest.mark.slow
@batches(8, CASES)
@given(runs())
def test_a_pass_of_all_ranks_has_every_sample_or_a_warning(drawn: tuple[int, list[Case]]) -> None:
    ranks, several = drawn
    done = run(go_through_all, several, nprocs=ranks, seed=1)
    for case, *outcomes in zip(several, *done.values):
        note(str(case))
        check(case, ranks, outcomes)
