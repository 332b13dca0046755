"""The history of what ranks log follows the rules of ``log`` and does not depend on what arrives first.

Each rank's calls go through the rank's own end of the pipe; the bytes are cut anywhere, in any order of the ranks. The
reference applies the rules to lists and dicts, point by point.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.history.history import Cursor, History
from nbddp.worker import metrics
from nbddp.worker.metrics_pipe import MetricsPipe
from tests.properties.budget import examples

REDUCES = [None, "mean", "sum", "min", "max"]
NAMES = ["a", "b", "a name/that is longer than one piece of it, which is thirty-six bytes"]


@dataclass(frozen=True)
class Call:
    """One call of ``log`` on one rank."""

    values: dict[str, float]
    step: int | None
    reduce: str | None
    weight: float


@dataclass(frozen=True)
class Attempt:
    """From one start of the ranks to the next; of each rank its calls."""

    ranks: list[list[Call]]


def calls(names: list[str], usual: list[str | None]) -> st.SearchStrategy[Call]:
    small = st.integers(-3, 3).map(float) | st.sampled_from([-0.0, 0.1, 1e16, math.nan, math.inf, -math.inf])
    steps = st.none() | st.integers(-1, 4) | st.sampled_from([-(2**63), 2**63 - 1])
    weights = st.sampled_from([1, 1, 0, 3, 0.1, 1 / 3])
    values = st.dictionaries(st.sampled_from(names), small | st.floats(), min_size=1)
    return st.builds(Call, values, steps, st.sampled_from(usual), weights)


@st.composite
def attempts(draw: st.DrawFn) -> list[Attempt]:
    """Mostly of ranks that log alike, with some calls left out, added, or in another order."""
    usual = draw(st.lists(st.sampled_from(REDUCES), min_size=1, max_size=2))
    some = calls(NAMES[: draw(st.integers(1, 3))], usual)
    found = []
    for _ in range(draw(st.integers(1, 3))):
        program = draw(st.lists(some, max_size=8))
        ranks = [draw(varied(program, some)) for _ in range(draw(st.integers(1, 4)))]
        found.append(Attempt(ranks))
    return found


@st.composite
def varied(draw: st.DrawFn, program: list[Call], some: st.SearchStrategy[Call]) -> list[Call]:
    how = draw(st.sampled_from(["same", "same", "other values", "fewer", "more", "reordered", "other"]))
    if how == "other values":
        return [
            draw(some.map(lambda c, o=c: Call(dict.fromkeys(o.values, 2.5), o.step, o.reduce, c.weight)))
            for c in program
        ]
    if how == "fewer":
        return [call for call in program if draw(st.integers(0, 3))]
    if how == "more":
        return [each for call in program for each in ([call, draw(some)] if draw(st.booleans()) else [call])]
    if how == "reordered":
        return draw(st.permutations(program))
    return draw(st.lists(some, max_size=8)) if how == "other" else program


# ---------------------------------------------------------------------------- the reference


@dataclass(frozen=True)
class Value:
    step: int
    key: tuple[int, int]  # turn and place
    value: float
    weight: float


@dataclass
class Point:
    step: int
    values: dict[int, Value]


@dataclass
class Expected:
    """A metric by the rules, as plain lists."""

    ops: dict[int, list[str | None]] = field(default_factory=dict)
    columns: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    series: list[tuple[Any, ...]] = field(default_factory=list)
    spread: list[tuple[Any, ...]] = field(default_factory=list)
    counts: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def reduce(self) -> str | None:
        return self.ops[min(self.ops)][0]

    def attempt(self, logged: dict[int, list[Value]], world_size: int, broken_off: bool) -> None:
        for rank, values in logged.items():
            column = self.columns.setdefault(rank, [])
            _drop_from(column, values[0].step)
            column += [(value.step, value.value) for value in values]
        if self.reduce is None and len(logged) < 2 and not self.spread:
            return
        points = _points(logged, broken_off)
        for table in (self.series, self.spread, self.counts):
            if points:
                _drop_from(table, points[0].step)
        for point in points:
            values = [value.value for _, value in sorted(point.values.items())]
            if len(values) > 1:
                self.spread.append((point.step, _least(values, 1), _least(values, -1)))
            if self.reduce is not None:
                self.counts.append((point.step, len(values), world_size))
                if self.reduce != "sum" or len(values) == len(logged):
                    weights = [value.weight for _, value in sorted(point.values.items())]
                    self.series.append((point.step, _combine(self.reduce, values, weights)))

    def main(self) -> list[tuple[Any, ...]]:
        return self.series if self.reduce else list(self.columns[min(self.columns)])


def _points(logged: dict[int, list[Value]], broken_off: bool) -> list[Point]:
    groups: dict[tuple[int, int], dict[int, Value]] = {}
    for rank, values in sorted(logged.items()):
        for value in values:
            groups.setdefault(value.key, {})[rank] = value
    lowest = logged[min(logged)]
    own = {value.key: row for row, value in enumerate(lowest)}

    def order(key: tuple[int, int]) -> tuple[Any, ...]:
        if key in own:
            return own[key], 0
        turn, place = key
        below = [k for k in own if k[0] == turn and k[1] < place]
        above = [k for k in own if k[0] == turn and k[1] > place]
        row: float = own[max(below)] if below else own[min(above)] - 1 if above else math.inf
        return row, 1, turn, place

    keys = sorted(groups, key=order)
    if broken_off:
        ends = [max(i for i, key in enumerate(keys) if rank in groups[key]) for rank in logged]
        keys = keys[: min(ends) + 1]
    return [Point(groups[key][min(groups[key])].step, groups[key]) for key in keys]


def _drop_from(points: list[Any], step: int) -> None:
    """Of the last stretch in which steps do not fall, the points from this step on."""
    start = len(points)
    while start > 0 and (start == len(points) or points[start - 1][0] <= points[start][0]):
        start -= 1
    points[start:] = [point for point in points[start:] if point[0] < step]


def _least(values: list[float], sign: int) -> float:
    wrong = [value for value in values if math.isnan(value)]
    return wrong[0] if wrong else min(values, key=lambda value: sign * value)


def _combine(reduce: str, values: list[float], weights: list[float]) -> float:
    if reduce == "mean":
        total = _add(weights)
        return _add([value * weight for value, weight in zip(values, weights)]) / total if total else math.nan
    return {"sum": _add, "min": lambda v: _least(v, 1), "max": lambda v: _least(v, -1)}[reduce](values)


def _add(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def _numbered(calls: list[Call]) -> Iterator[tuple[str, str | None, Value]]:
    """The steps that ``log`` counts, and what each value pairs by."""
    step, last = 0, {}
    numbers: dict[Any, int] = {}
    for call in calls:
        if call.step is not None:
            step = call.step
        elif any(last.get(name) == step for name in call.values):
            step = min(step + 1, 2**63 - 1)
        for name, value in call.values.items():
            last[name] = step
            of = (name, call.step)
            numbers[of] = number = numbers.get(of, -1) + 1
            key = (-1, number) if call.step is None else (number, step)
            yield name, call.reduce, Value(step, key, value, float(call.weight))


def expected(program: list[Attempt], broken_off: bool) -> dict[str, Expected]:
    found: dict[str, Expected] = {}
    named: dict[tuple[int, str], int] = {}
    for number, attempt in enumerate(program):
        logged: dict[str, dict[int, list[Value]]] = {}
        for rank, calls in enumerate(attempt.ranks):
            for name, reduce, value in _numbered(calls):
                ops = found.setdefault(name, Expected()).ops.setdefault(rank, [])
                ops += [reduce] if reduce not in ops else []
                named.setdefault((rank, name), len(named))
                logged.setdefault(name, {}).setdefault(rank, []).append(value)
        for metric in found.values():
            among = {rank: c for rank, c in metric.columns.items() if rank < len(attempt.ranks)}
            metric.columns = among or metric.columns
        for name, ranks in logged.items():
            last = number + 1 == len(program)
            found[name].attempt(ranks, len(attempt.ranks), broken_off if last else True)
    firsts = {name: min((rank, at) for (rank, n), at in named.items() if n == name) for name in found}
    return {name: found[name] for name in sorted(found, key=firsts.__getitem__)}


# ---------------------------------------------------------------------------- ours


class Pipe(MetricsPipe):
    """A rank's end, into memory."""

    def __init__(self) -> None:
        super().__init__(os.open(os.devnull, os.O_WRONLY))
        self.data = b""

    def _put(self, records: bytes) -> None:
        self.data += records

    def _help(self) -> None:
        pass


def sent(calls: list[Call]) -> bytes:
    """What a rank that makes these calls writes into its pipe."""
    pipe = Pipe()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metrics, "_pipe", pipe)
        for call in calls:
            metrics.log(call.values, step=call.step, reduce=call.reduce, weight=call.weight)
        metrics.flush()
    os.close(pipe._fd)
    return pipe.data


class View:
    """Reads the history now and then, as the panel does: the pieces that it has read add up to the whole history."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.cursors: dict[str, Cursor] = {}
        self.read: dict[str, tuple[list[Any], list[Any]]] = {}

    def look(self) -> None:
        for name in self._history.changes():
            before = self.cursors.get(name, Cursor())
            series, spread, after = self._history.new_points(name, before)
            if after.version != before.version:
                self.read[name] = ([], [])
            self.cursors[name] = after
            for read, new in zip(self.read[name], (series, spread)):
                read += zip(*(column.tolist() for column in new))


def fed(program: list[Attempt], data: st.DataObject, broken_off: bool) -> History:
    """Each rank's bytes, cut anywhere, in any order of the ranks."""
    history = History(len(program[0].ranks))
    view = View(history)
    for number, attempt in enumerate(program):
        if number:
            history.restart("it died")
            history.resize(len(attempt.ranks))
        left = {rank: sent(calls) for rank, calls in enumerate(attempt.ranks) if calls}
        while left:
            rank = data.draw(st.sampled_from(sorted(left)))
            size = data.draw(st.integers(1, 400) | st.just(len(left[rank])))
            history.feed(rank, left[rank][:size])
            left[rank] = left[rank][size:]
            left = {rank: rest for rank, rest in left.items() if rest}
            if data.draw(st.integers(0, 3)) == 0:
                view.look()
    history.settle(broken_off=broken_off)
    view.look()
    for name in history.names:
        series, spread = view.read[name]
        same(series, history[name])
        same(spread, history.spread(name))
    return history


def same(rows: list[tuple[Any, ...]], columns: tuple[Any, ...]) -> None:
    """To the bit, but for the sign and the payload of a NaN."""
    found = list(zip(*(column.tolist() for column in columns)))
    assert [tuple(map(repr, row)) for row in found] == [tuple(map(repr, row)) for row in rows]


def state(history: History) -> Any:
    return {
        name: [
            [column.tobytes() for column in table(name)]
            for table in (history.__getitem__, history.spread, history.counts)
        ]
        for name in history.names
    }, (history.names, history.notices, history.restarts, history.latest().keys())


@pytest.mark.slow
@examples(120)
@given(attempts(), st.booleans(), st.data())
def test_the_history_follows_the_rules_of_log(program: list[Attempt], broken_off: bool, data: st.DataObject) -> None:
    history = fed(program, data, broken_off)
    reference = expected(program, broken_off)
    assert history.names == list(reference)
    for name, metric in reference.items():
        same(metric.main(), history[name])
        same(metric.spread, history.spread(name))
        same(metric.counts, history.counts(name))
        assert {
            rank: list(zip(*map(list, s))) for rank, s in history.by_rank(name).items()
        }.keys() == metric.columns.keys()
        changed = any(ops != [metric.reduce] for ops in metric.ops.values())
        fewer = any(ranks < of for _, ranks, of in metric.counts)
        assert len([text for text in history.notices if text.startswith(f"{name}: ")]) == changed + fewer


@examples(60)
@given(attempts(), st.booleans(), st.data())
def test_the_history_is_bit_for_bit_the_same_in_any_order_of_arrival(
    program: list[Attempt], broken_off: bool, data: st.DataObject
) -> None:
    first, second = (fed(program, data, broken_off) for _ in range(2))
    assert state(first) == state(second)
