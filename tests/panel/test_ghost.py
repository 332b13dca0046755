"""What the page gets of an earlier run, and the metrics as a file that the page saves."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
from fakes import FakeRun, Rank, status

from nbddp.history.history import History, Series
from nbddp.panel import csv_parts, thinning
from nbddp.panel.csv_parts import CsvParts
from nbddp.panel.feed import Feed
from nbddp.panel.view import Earlier


def earlier(**curves: dict[int, float]) -> Earlier:
    history = History()
    for name, curve in curves.items():
        Rank(history).log(name, curve.keys(), curve.values())
    return Earlier("lr=0.1", 1_000.0, history)


def ghosts(message: tuple[dict[str, Any], bytes] | None) -> dict[int, tuple[list[float], list[float]]]:
    """The earlier run's curves, by the metric's number."""
    assert message is not None
    content, data = message
    json.dumps(content, allow_nan=False)
    values = np.frombuffer(data, "<f8")
    at = sum(2 * entry["points"] + 3 * entry["spread"] for entry in content["series"])
    found = {}
    for entry in content["ghosts"]:
        n = entry["points"]
        found[entry["index"]] = values[at : at + n].tolist(), values[at + n : at + 2 * n].tolist()
        at += 2 * n
    assert at == len(values)
    return found


def test_the_earlier_runs_curve_is_sent_once_with_the_metrics_first_points() -> None:
    run = FakeRun(earlier=earlier(loss={0: 5.0, 1: 4.0, 2: 3.0}, old={0: 1.0}))
    feed, rank = Feed(run), Rank(run.history)
    first = feed.frame(run.now)
    assert ghosts(first) == {}
    assert first is not None
    assert first[0]["head"]["earlier"] == {"name": "lr=0.1", "began": 1_000.0}
    rank.log("new", [0], [1.0])
    assert ghosts(feed.frame(run.now)) == {}
    rank.log("loss", [0], [4.5])
    assert ghosts(feed.frame(run.now)) == {1: ([0, 1, 2], [5, 4, 3])}
    rank.log("loss", [1], [3.5])
    assert ghosts(feed.frame(run.now)) == {}
    assert ghosts(feed.snapshot()) == {1: ([0, 1, 2], [5, 4, 3])}, "for a page that is reloaded"


@pytest.mark.parametrize(
    ("step", "before"),
    [(9, None), (10, (10, 5.0)), (13, (10, 5.0)), (17, (20, 4.0)), (30, None), (40, (40, 2.0)), (41, None)],
)
def test_a_new_value_comes_with_the_earlier_one_at_the_nearest_step(step: int, before: object) -> None:
    run = FakeRun(earlier=earlier(loss={10: 5.0, 20: 4.0, 30: math.nan, 40: 2.0}))
    Rank(run.history).log("loss", [step], [1.0])
    frame = Feed(run).frame(run.now)
    assert frame is not None
    assert frame[0]["series"][0]["before"] == before


def test_without_an_earlier_run_nothing_of_one_is_sent() -> None:
    run = FakeRun()
    Rank(run.history).log("loss", [0], [1.0])
    frame = Feed(run).frame(run.now)
    assert ghosts(frame) == {}
    assert frame is not None
    assert frame[0]["head"]["earlier"] is None
    assert frame[0]["series"][0]["before"] is None


def test_each_beginning_of_a_thinned_curve_has_its_points_and_extremes() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[[77, 60_000]] = 50.0, -50.0
    thin = thinning.thin_from_start(Series(np.arange(100_000), values), 2_400)
    assert len(thin.steps) <= 2_400
    assert bool(np.all(np.diff(thin.steps) > 0))
    assert {0, 77, 60_000, 99_999} <= set(thin.steps.tolist())
    for shown in (300, 1_000, 10_000, 99_999):
        assert np.count_nonzero(thin.steps <= shown) > 230, "what a chart of the first steps shows"
    short = Series(np.arange(5), np.arange(5.0))
    assert thinning.thin_from_start(short, 100) is short


def test_the_curves_of_an_earlier_run_stay_small_however_much_it_logged() -> None:
    names = [f"metric{i}" for i in range(500)]
    run = FakeRun(earlier=earlier(**{name: dict(enumerate(np.random.rand(200).tolist())) for name in names}))
    for name in names:
        Rank(run.history).log(name, [0], [1.0])
    content, data = Feed(run).frame(run.now) or ({}, b"")
    assert len(content["ghosts"]) == 500
    assert len(data) < 16 * (500 + 13_000)


def test_the_parts_of_a_file_are_the_file_whatever_is_logged_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_parts, "_PART_BYTES", 1_000)
    history = History()
    Rank(history).log('a,"b"', range(200), [s / 7 for s in range(200)])
    Rank(history).log("µ", [7], [math.nan])
    text = io.StringIO(newline="")
    history.write_csv(text)
    parts, whole, size = CsvParts(history), b"", 1
    while len(whole) < size:
        content, data = parts.part("one", len(whole))
        size, whole = content["size"], whole + data
        Rank(history).log("loss", [len(whole)], [1.0])
    assert whole.decode() == text.getvalue()
    assert parts.part("one", 1_000)[0]["size"] == 0, "a file that was sent is not kept"
    for request in ("two", "three", "four"):
        parts.part(request, 0)
    assert [parts.part(request, 1_000)[0]["size"] > 0 for request in ("two", "three", "four")] == [False, True, True]
    assert CsvParts(History()).part("none", 0) == ({"kind": "csv", "request": "none", "size": 6}, b"step\r\n")


def test_a_run_that_is_over_can_still_be_compared() -> None:
    run = FakeRun(now=status("finished"), earlier=earlier(loss={0: 5.0}))
    Rank(run.history).log("loss", [0], [1.0])
    assert ghosts(Feed(run).frame(run.now)) == {0: ([0], [5])}
