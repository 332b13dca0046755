"""A run's history is what the ranks logged, whatever arrives first and wherever its bytes are cut.

Each rank's calls go through ``log``. The reference applies the rules to dicts, point by point.
"""

import contextlib
import functools
import math
import operator
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import nbddp
from nbddp.helpers import log as rank_side
from nbddp.history.history import History
from nbddp.history.records import MAX_STEP, RecordReader
from tests.curves import Recorded
from tests.support import CHARACTERS, damaged

VALUES = st.floats(width=64)  # NaN, infinities and zeros of both signs, too
CASES = settings().max_examples
FEW = settings(max_examples=max(1, CASES // 5))  # a case takes 1 to 60 ms; NBDDP_CASES scales them all
CUTS = st.lists(st.integers(1, 100), max_size=50)


@dataclass(frozen=True)
class Call:
    """One call of ``log``."""

    values: dict[str, float]
    step: int | None = None
    reduce: str | None = None
    weight: float = 1


def sent(calls: list[Call]) -> bytes:
    """What a rank that makes these calls writes."""
    with tempfile.TemporaryFile() as file, mock.patch.object(rank_side, "_log", rank_side._Log(file.fileno())):
        for call in calls:
            nbddp.log(call.values, step=call.step, reduce=call.reduce, weight=call.weight)
        rank_side.flush()
        file.seek(0)
        return file.read()


def arrive(history: Recorded, by_rank: list[list[Call]], data: st.DataObject) -> None:
    """Each rank's bytes, cut anywhere, in any order of the ranks; now and then somebody looks."""
    left = {rank: sent(calls) for rank, calls in enumerate(by_rank)}
    readers = [RecordReader() for _ in by_rank]
    while left := {rank: rest for rank, rest in left.items() if rest}:
        rank = data.draw(st.sampled_from(sorted(left)))
        size = data.draw(st.sampled_from([1 << 20, 40, 150]))
        history.add(rank, readers[rank].feed(left[rank][:size]))
        left[rank] = left[rank][size:]
        if data.draw(st.booleans()):
            for name in history:
                history.points(name)


@FEW
@given(st.text(CHARACTERS, max_size=120), st.lists(VALUES, min_size=1, max_size=40), CUTS)
def test_bytes_cut_anywhere_give_equal_columns_under_any_name(name: str, values: list[float], cuts: list[int]) -> None:
    data, history, reader = sent([Call({name: value}) for value in values]), Recorded(1), RecordReader()
    for cut in [*cuts, len(data)]:
        history.add(0, reader.feed(data[:cut]))
        data = data[cut:]
    assert list(history) == [name]
    np.testing.assert_array_equal(history[name].values, values)
    assert history[name].steps.tolist() == list(range(len(values)))


def calls(names: list[str], usual: list[str | None]) -> st.SearchStrategy[Call]:
    small = st.integers(-3, 3).map(float) | st.sampled_from([0.1, 1e16, math.nan, math.inf, -math.inf])
    steps = st.none() | st.integers(-1, 4) | st.sampled_from([-MAX_STEP, 2**52])
    values = st.dictionaries(st.sampled_from(names), small | st.floats(), min_size=1)
    return st.builds(Call, values, steps, st.sampled_from(usual), st.sampled_from([1, 1, 0, 3, 0.1, 1 / 3]))


@st.composite
def programs(draw: st.DrawFn) -> list[list[list[Call]]]:
    """By attempt and rank; ranks mostly log alike, with some calls left out, added, or in another order."""
    usual = draw(st.lists(st.sampled_from([None, "mean", "sum", "min", "max"]), min_size=1, max_size=2))
    some = calls(["a", "b", "c"][: draw(st.integers(1, 3))], usual)
    ranks = draw(st.integers(1, 4))
    attempts = [draw(st.lists(some, max_size=8)) for _ in range(draw(st.integers(1, 3)))]
    return [[draw(varied(calls, some)) for _ in range(ranks)] for calls in attempts]


@st.composite
def varied(draw: st.DrawFn, program: list[Call], some: st.SearchStrategy[Call]) -> list[Call]:
    how = draw(st.sampled_from(["same", "same", "fewer", "more", "reordered", "other"]))
    if how == "fewer":
        return [call for call in program if draw(st.integers(0, 3))]
    if how == "more":
        return [each for call in program for each in ([call, draw(some)] if draw(st.booleans()) else [call])]
    if how == "reordered":
        return draw(st.permutations(program))
    return draw(st.lists(some, max_size=8)) if how == "other" else program


@dataclass
class Rows:
    """A metric in one attempt. A key is (lap, place)."""

    rows: dict[tuple[int, float], dict[int, tuple[int, float, float]]] = field(default_factory=dict)
    last: dict[int, tuple[int, float]] = field(default_factory=dict)
    first_steps: list[int] = field(default_factory=list)
    kept: float = math.inf

    @property
    def keys(self) -> list[tuple[int, float]]:
        return sorted(self.rows)

    def step(self, key: tuple[int, float]) -> int:
        return self.rows[key][min(self.rows[key])][0]


def numbered(calls: list[Call]) -> Iterator[tuple[str, Call, int, tuple[int, float]]]:
    """By value: its name, its call, the step that ``log`` counts, and the key that it pairs by."""
    step, last = 0, {}
    keys: dict[str, tuple[int, float]] = {}
    counts: dict[str, int] = {}
    for call in calls:
        if call.step is not None:
            step = call.step
        elif any(last.get(name) == step for name in call.values):
            step += 1
        for name in call.values:
            last[name] = step
            if call.step is None:
                counts[name] = counts.get(name, -1) + 1
            place = counts[name] if call.step is None else step
            lap, before = keys.get(name, (0, -math.inf))
            keys[name] = lap + (place < before), place
            yield name, call, step, keys[name]


def expected(program: list[list[list[Call]]], broken_off: bool) -> dict[str, Any]:
    """By name, in order: the series, and by rank what it logged."""
    attempts: dict[str, list[Rows]] = {}
    ops: dict[str, dict[int, str | None]] = {}
    order: dict[str, tuple[int, int]] = {}
    seen: list[list[str]] = [[] for _ in program[0]]
    for by_rank in program:
        fresh: dict[str, Rows] = {}
        for rank, calls in enumerate(by_rank):
            for name, call, step, key in numbered(calls):
                rows = fresh.setdefault(name, Rows())
                if rank not in rows.last:
                    rows.first_steps.append(step)
                rows.last[rank] = key
                rows.rows.setdefault(key, {})[rank] = step, call.values[name], float(call.weight)
                ops.setdefault(name, {}).setdefault(rank, call.reduce)
                if name not in seen[rank]:
                    seen[rank].append(name)
                    order[name] = min(order.get(name, (rank, 99)), (rank, len(seen[rank])))
        for name, rows in fresh.items():
            repeat_from(attempts.setdefault(name, []), min(rows.first_steps))
            attempts[name].append(rows)
    found, logged_last = {}, {name for calls in program[-1] for call in calls for name in call.values}
    for name in sorted(attempts, key=order.__getitem__):
        op = ops[name][min(ops[name])]
        series, columns = [], {rank: [] for rows in attempts[name] for rank in rows.last if rows.kept}
        for rows in attempts[name]:
            ends = broken_off or name not in logged_last or rows is not attempts[name][-1]
            for i, key in enumerate(rows.keys):
                if i < rows.kept:
                    for rank, (_, value, _) in rows.rows[key].items():
                        columns[rank].append((rows.step(key), value))
                    if not (op and ends and key > min(rows.last.values())):
                        series += combined(op, rows, key)
        found[name] = series, columns
    return found


def repeat_from(attempts: list[Rows], step: int) -> None:
    for rows in reversed(attempts):
        keys = rows.keys
        again = [i for i, key in enumerate(keys) if key[0] == keys[-1][0] and rows.step(key) >= step]
        rows.kept = min(rows.kept, *again, len(keys))
        if rows.kept:
            return


def combined(op: str | None, rows: Rows, key: tuple[int, float]) -> list[tuple[int, float]]:
    values = [value for _, (_, value, _) in sorted(rows.rows[key].items())]
    weights = [weight for _, (_, _, weight) in sorted(rows.rows[key].items())]
    if op is None:
        return [rows.rows[key][min(rows.last)][:2]] if min(rows.last) in rows.rows[key] else []
    if op == "sum":
        return [(rows.step(key), added(values))] if len(values) == len(rows.last) else []
    if op == "mean":
        total = added(weights)
        return [(rows.step(key), added(v * w for v, w in zip(values, weights)) / total if total else math.nan)]
    return [(rows.step(key), math.nan if any(map(math.isnan, values)) else {"min": min, "max": max}[op](values))]


def added(values: Iterable[float]) -> float:
    """Added one by one; since Python 3.12, ``sum`` is more exact."""
    return functools.reduce(operator.add, values, 0.0)


def ran(program: list[list[list[Call]]], broken_off: bool, data: st.DataObject) -> Recorded:
    history = Recorded(len(program[0]))
    for number, by_rank in enumerate(program):
        if number:
            history.restart("it died")
        arrive(history, by_rank, data)
    history.settle(broken_off=broken_off)
    return history


def state(history: History) -> Any:
    tables = {name: (history[name], history.spread(name), *history.by_rank(name).values()) for name in history}
    return (
        {name: [column.tobytes() for table in each for column in table] for name, each in tables.items()},
        (list(history), history.notices, history.restarts, history.latest().keys()),
    )


@settings(max_examples=max(1, CASES // 3))
@given(programs(), st.booleans(), st.data())
def test_the_history_is_bit_for_bit_the_same_in_any_order_of_arrival(
    program: list[list[list[Call]]], broken_off: bool, data: st.DataObject
) -> None:
    history = ran(program, broken_off, data)
    assert state(ran(program, broken_off, data)) == state(history)
    with tempfile.TemporaryDirectory() as folder:
        history.save(f"{folder}/h")
        assert state(History.load(f"{folder}/h")) == state(history)
    reference = expected(program, broken_off)
    assert list(history) == list(reference)
    for name, (series, columns) in reference.items():
        np.testing.assert_array_equal(history[name].steps, [step for step, _ in series])
        np.testing.assert_array_equal(history[name].values, [value for _, value in series])
        found = {rank: list(zip(*(c.tolist() for c in each))) for rank, each in history.by_rank(name).items()}
        assert repr(found) == repr(dict(sorted(columns.items())))


def test_a_start_that_was_repeated_wholly_still_counts_in_the_file(tmp_path: Path) -> None:
    history, second = Recorded(2), [(0, 9, True, "loss"), (1, 5, False, "loss"), (0, 0, False, "lr")]
    for rows in ([(0, 6, False, "lr loss"), (1, 0, False, "loss")], second, [(1, 7, False, "loss")]):
        for rank, step, counted, names in rows:
            history.add(rank, [[1.0, step, counted, None, 1, dict.fromkeys(names.split(), 0.5)]])
        history.restart()
    history.save(tmp_path / "h")
    found = History.load(tmp_path / "h")
    assert list(found) == list(history) == ["lr", "loss"]
    assert [len(each.steps) for each in found.by_rank("loss").values()] == [0, 2]


@FEW
@given(st.integers(0))
def test_a_damaged_history_is_loaded_or_refused(seed: int) -> None:
    history = Recorded(2)
    for rank in range(2):
        history.add(rank, [[1.0, step, True, "mean", 1, {"loss": 0.5}] for step in range(5)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "h")
        history.save(path)
        path.write_bytes(damaged(path.read_bytes(), seed))
        with contextlib.suppress(nbddp.NbddpError):
            loaded = History.load(path)
            assert all(loaded.by_rank(name) for name in loaded)
            assert len(loaded.notices) <= len(loaded)
