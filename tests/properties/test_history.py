"""A run's history is what the ranks logged, wherever its bytes are cut; the reference is a few lists and dicts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nbddp import wire
from nbddp.history.history import History
from tests.properties.budget import examples

RESTART = "restart"
VALUES = st.floats(width=64)  # NaN, infinities and zeros of both signs, too


@dataclass(frozen=True)
class Logged:
    """One call of ``log`` on one rank."""

    rank: int
    name: int
    step: int
    value: float


@dataclass
class Reference:
    """By rank and name, the points in their order; what is repeated after a restart takes the old one's place."""

    columns: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    restarted: set[tuple[int, int]] = field(default_factory=set)

    def log(self, entry: Logged) -> None:
        key = (entry.rank, entry.name)
        points = self.columns.setdefault(key, [])
        if key in self.restarted:
            self.restarted.discard(key)
            self._drop_from(points, entry.step)
        points.append((entry.step, entry.value))

    def restart(self) -> None:
        self.restarted = set(self.columns)

    @staticmethod
    def _drop_from(points: list[tuple[int, float]], step: int) -> None:
        """Of the last stretch in which steps do not fall, the points from this step on."""
        start = len(points)
        while start > 0 and (start == len(points) or points[start - 1][0] <= points[start][0]):
            start -= 1
        kept = [point for point in points[start:] if point[0] < step]
        points[start:] = kept


def entries(ranks: int, names: int, steps: st.SearchStrategy[int]) -> st.SearchStrategy[Logged]:
    return st.builds(Logged, st.integers(0, ranks - 1), st.integers(0, names - 1), steps, VALUES)


def fed(history: History, events: list[Logged | str], ranks: int, cuts: list[int]) -> None:
    """Give the history each rank's bytes, cut anywhere; a restart begins with a new pipe."""
    known: set[tuple[int, int]] = set()
    waiting = dict.fromkeys(range(ranks), b"")
    sizes = iter(cuts)

    def flush() -> None:
        for rank, data in waiting.items():
            while data:
                size = next(sizes, len(data))
                history.feed(rank, data[:size])
                data = data[size:]
            waiting[rank] = b""

    for event in events:
        if isinstance(event, str):
            flush()
            known.clear()
            history.restart("it died")
            continue
        if (event.rank, event.name) not in known:
            known.add((event.rank, event.name))
            waiting[event.rank] += wire.NAME_PIECE.pack(wire.KIND_NAME, 0, event.name, f"m{event.name}".encode())
        record = (wire.KIND_METRIC, 0, event.name, False, 1.0, event.step, event.value, 1.0)
        waiting[event.rank] += wire.RECORD.pack(*record)
    flush()


def same(history: History, reference: Reference) -> None:
    for (rank, name), points in reference.columns.items():
        steps, values = history.by_rank(f"m{name}")[rank]
        assert steps.tolist() == [step for step, _ in points]
        np.testing.assert_array_equal(values, [value for _, value in points])


CUTS = st.lists(st.integers(1, 100), max_size=50)


@examples(60)
@given(st.integers(1, 4), st.integers(1, 50), st.data(), CUTS)
def test_columns_are_what_was_logged(ranks: int, names: int, data: st.DataObject, cuts: list[int]) -> None:
    events: list[Logged | str] = data.draw(
        st.lists(entries(ranks, names, st.integers(-(2**63) + 1, 2**63 - 1)), max_size=60)
    )
    history, reference = History(ranks), Reference()
    fed(history, events, ranks, cuts)
    for event in events:
        assert isinstance(event, Logged)
        reference.log(event)
    same(history, reference)
    assert set(history.names) == {f"m{name}" for _, name in reference.columns}


@examples(80)
@given(st.integers(1, 3), st.integers(1, 3), st.data(), CUTS)
def test_steps_repeated_after_a_restart_replace_the_old_ones(
    ranks: int, names: int, data: st.DataObject, cuts: list[int]
) -> None:
    one = st.one_of(entries(ranks, names, st.integers(0, 12)), st.just(RESTART))
    events: list[Logged | str] = data.draw(st.lists(one, max_size=60))
    history, reference = History(ranks), Reference()
    fed(history, events, ranks, cuts)
    for event in events:
        if isinstance(event, str):
            reference.restart()
        else:
            reference.log(event)
    same(history, reference)
    assert len(history.restarts) == events.count(RESTART)
