"""Metrics as columns, decoded from bytes that are cut anywhere; no process is needed."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp import wire
from nbddp.history.columns import Series
from nbddp.history.history import Cursor, History, Restart
from nbddp.history.records import RECORD_DTYPE
from nbddp.text import fold


def _name(ident: int, name: str) -> bytes:
    text = name.encode()
    size = wire.NAME_PIECE_BYTES
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [b""]
    return b"".join(
        wire.NAME_PIECE.pack(wire.KIND_NAME, int(i + 1 < len(pieces)), ident, piece) for i, piece in enumerate(pieces)
    )


def _point(
    ident: int, step: int, value: float, *, op: int = 0, counted: bool = False, weight: float = 1.0, at: float = 1.0
) -> bytes:
    return wire.RECORD.pack(wire.KIND_METRIC, op, ident, counted, weight, step, value, at)


def test_a_name_piece_is_as_long_as_a_record() -> None:
    assert wire.NAME_PIECE.size == wire.BEGIN.size == wire.RECORD.size == RECORD_DTYPE.itemsize == 40


@given(st.lists(st.floats(width=64), min_size=1, max_size=40), st.lists(st.integers(1, 70), max_size=60))
def test_bytes_cut_anywhere_give_the_same_columns(values: list[float], cuts: list[int]) -> None:
    data = _name(0, "loss") + b"".join(_point(0, i, value) for i, value in enumerate(values))
    history = History(1)
    position = 0
    for cut in cuts:
        history.feed(0, data[position : position + cut])
        position += cut
    history.feed(0, data[position:])
    np.testing.assert_array_equal(history["loss"].values, values)
    assert history["loss"].steps.tolist() == list(range(len(values)))


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=120))
def test_any_name_is_decoded(name: str) -> None:
    history = History(1)
    history.feed(0, _name(7, name) + _point(7, 0, 1.0))
    assert history.names == [name]


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.125, 100, width=32)), min_size=2, max_size=5),
    st.randoms(use_true_random=False),
)
def test_values_of_ranks_combine_alike_in_any_order(points: list[tuple[float, float]], random: object) -> None:
    order = list(range(len(points)))
    random.shuffle(order)  # type: ignore[attr-defined]
    history = History(len(points))
    for rank in order:
        value, weight = points[rank]
        data = b"".join(
            _name(op, name) + _point(op, 0, value, op=op, weight=weight)
            for op, name in enumerate(["none", "mean", "sum", "min", "max"])
            if op
        )
        assert "mean" not in history or len(history["mean"].values) == 0
        history.feed(rank, data)
    values = [value for value, _ in points]
    total = sum(weight for _, weight in points)
    mean = sum(value * weight for value, weight in points) / total
    assert history["mean"].values[0] == pytest.approx(mean, rel=1e-9, abs=1e-6)
    assert history["sum"].values.tolist() == [pytest.approx(math.fsum(values))]
    assert history["min"].values.tolist() == [min(values)]
    assert history["max"].values.tolist() == [max(values)]


def test_a_step_that_one_rank_never_reached_is_combined_at_the_end() -> None:
    history = History(2)
    history.feed(0, _name(0, "loss") + _point(0, 0, 1.0, op=1) + _point(0, 1, 3.0, op=1))
    history.feed(1, _name(0, "loss") + _point(0, 0, 3.0, op=1))
    assert history["loss"].values.tolist() == [2.0]
    history.settle()
    assert history["loss"].values.tolist() == [2.0, 3.0]


def test_weights_that_add_up_to_zero_give_nan() -> None:
    history = History(2)
    for rank in range(2):
        history.feed(rank, _name(0, "loss") + _point(0, 0, 1.0, op=1, weight=0.0))
    assert math.isnan(history["loss"].values[0])


def test_the_first_thousand_names_of_a_run_are_kept_and_the_others_counted_once() -> None:
    history = History(2)
    for rank in (0, 1):
        history.feed(rank, b"".join(_name(i, f"step{i}") + _point(i, i, float(i)) for i in range(5000)))
        history.feed(rank, _point(3, 7000, 1.5) + _point(4999, 8000, 1.5))
    assert history.names == [f"step{i}" for i in range(1000)]
    assert (len(history), "step999" in history, "step1000" in history) == (1000, True, False)
    assert history["step3"].values.tolist() == [3.0, 1.5]
    assert history.notices == [
        "only the first 1,000 metrics are kept; 4,000 more names were logged. Is a step or a sample part of a name?"
    ]
    assert history.ranks[0].step == 8000  # a rank's progress counts all the same


def test_without_reduce_the_lowest_ranks_values_are_the_metrics() -> None:
    history = History(3)
    history.feed(2, _name(0, "x") + _point(0, 0, 22.0))
    assert history["x"].values.tolist() == [22.0]
    history.feed(1, _name(0, "x") + _point(0, 0, 11.0))
    assert history["x"].values.tolist() == [11.0]
    assert history.latest() == {"x": 11.0}
    assert sorted(history.by_rank("x")) == [1, 2]


def test_csv_and_pandas_have_a_row_per_step(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    history = History(1)
    data = _name(0, "loss") + _name(1, "val/acc, top 1")
    data += b"".join(_point(0, i, i / 2) for i in range(4)) + _point(1, 3, 0.25) + _point(1, 3, 0.75)
    history.feed(0, data)
    history.to_csv(tmp_path / "h.csv")
    with open(tmp_path / "h.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["step", "loss", "val/acc, top 1"],
        ["0", "0.0", ""],
        ["1", "0.5", ""],
        ["2", "1.0", ""],
        ["3", "1.5", "0.75"],
    ]
    frame = history.to_pandas()
    assert frame.index.tolist() == [0, 1, 2, 3]
    assert frame["loss"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert frame["val/acc, top 1"].tolist()[3] == 0.75
    assert frame["val/acc, top 1"].isna().tolist() == [True, True, True, False]
    pandas.testing.assert_frame_equal(frame, pandas.read_csv(tmp_path / "h.csv", index_col="step"))


def test_an_empty_history_has_no_names_and_writes_an_empty_csv(tmp_path: Path) -> None:
    history = History(2)
    assert (history.names, len(history), history.latest()) == ([], 0, {})
    assert "nothing logged" in repr(history)
    with pytest.raises(KeyError, match="none"):
        history["loss"]
    history.to_csv(tmp_path / "h.csv")
    assert (tmp_path / "h.csv").read_text().strip() == "step"


def test_returned_columns_are_copies() -> None:
    history = History(1)
    history.feed(0, _name(0, "loss") + _point(0, 0, 1.0))
    steps, values = history["loss"]
    values[0] = 99.0
    history.feed(0, _point(0, 1, 2.0))
    assert (steps.tolist(), values.tolist()) == ([0], [99.0])
    assert history["loss"].values.tolist() == [1.0, 2.0]


def test_a_progress_bar_gives_its_rate_and_time_left() -> None:
    history = History(1)
    data = _name(0, "epoch")
    for done in range(6):
        data += wire.RECORD.pack(wire.KIND_PROGRESS, 0, 0, False, 0.0, 10, done, 100.0 + done)
    history.feed(0, data)
    bar = history.ranks[0].bars[0]
    assert (bar.desc, bar.total, bar.done, bar.rate) == ("epoch", 10, 5, 1.0)
    assert bar.seconds_left == 5.0
    history.feed(0, wire.RECORD.pack(wire.KIND_PROGRESS, 0, 0, False, 0.0, -1, 0, 106.0))
    assert (bar.total, bar.seconds_left) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\rb", "b"), ("1%\r2%\nnext", "2%\nnext"), ("a\r\nb\r\n", "a\nb\n"), ("plain", "plain"), ("x\r", "x"), ("", "")],
)
def test_carriage_returns_are_folded_as_in_a_terminal(text: str, expected: str) -> None:
    assert fold(text) == expected


# ---------------------------------------------------------------------------- restarts


def _log(history: History, rank: int, name: str, steps: Iterable[int], offset: float = 0.0, op: int = 0) -> None:
    """Each value tells its step and its offset."""
    data = _name(0, name) + b"".join(_point(0, s, s + offset, op=op, at=100.0 + s) for s in steps)
    history.feed(rank, data)


@pytest.mark.parametrize("op", [0, 1])
def test_steps_that_are_repeated_after_a_restart_replace_the_old_ones(op: int, tmp_path: Path) -> None:
    history = History(2)
    for rank in range(2):
        _log(history, rank, "loss", range(8 + rank), op=op)
    history.restart("RankDied: rank 1 of 2 was killed by SIGKILL")
    assert history.restarts == [Restart(None, "RankDied: rank 1 of 2 was killed by SIGKILL")]
    assert len(history["loss"].steps) == 8, "until something is logged the old curve stands"
    for rank in range(2):
        _log(history, rank, "loss", range(5, 7), 0.5, op=op)
    steps, values = history["loss"]
    assert steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert values.tolist() == [0, 1, 2, 3, 4, 5.5, 6.5]
    assert [r.step for r in history.restarts] == [5]
    for series in history.by_rank("loss").values():
        assert series.values.tolist() == values.tolist()
    spread = history.spread("loss")
    assert (spread.steps.tolist(), spread.low.tolist()) == (steps.tolist(), values.tolist())
    history.to_csv(tmp_path / "h.csv")
    rows = csv.DictReader((tmp_path / "h.csv").read_text().splitlines())
    assert [float(row["loss"]) for row in rows] == values.tolist()
    assert history.latest() == {"loss": 6.5}


def test_a_restart_replaces_only_steps_of_the_current_epoch() -> None:
    history = History(1)
    _log(history, 0, "loss", [0, 1, 2, 3, 0, 1, 1, 2])
    history.restart()
    _log(history, 0, "loss", [1, 2], 0.5)
    assert history["loss"].values.tolist() == [0, 1, 2, 3, 0, 1.5, 2.5], "the first epoch is kept"
    history = History(1)
    _log(history, 0, "loss", [0, 1, 2, 3, 4, 5, 0, 1])
    history.restart()
    _log(history, 0, "loss", [1], 0.5)
    assert history["loss"].values.tolist() == [0, 1, 2, 3, 4, 5, 0, 1.5]


def test_a_restart_cuts_each_metric_and_rank_at_its_first_new_step() -> None:
    history = History(2)
    for rank in range(2):
        _log(history, rank, "loss", range(100))
        _log(history, rank, "val", [0, 50, 90])
    history.restart()
    _log(history, 0, "loss", range(60, 62), 0.5)
    assert len(history.by_rank("loss")[1].steps) == 100
    assert history["val"].steps.tolist() == [0, 50, 90]
    _log(history, 1, "loss", range(70, 71), 0.5)
    _log(history, 0, "val", [90], 0.5)
    assert len(history.by_rank("loss")[1].steps) == 71
    assert history["val"].values.tolist() == [0, 50, 90.5]


def test_restarts_without_metrics_between_them_share_the_next_step() -> None:
    history = History(1)
    _log(history, 0, "loss", range(5))
    history.restart("first")
    history.restart("second")
    _log(history, 0, "loss", [3, 4, 5])
    history.restart("third")
    assert [(r.step, r.reason) for r in history.restarts] == [(3, "first"), (3, "second"), (None, "third")]
    assert history["loss"].steps.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_restart_resets_progress() -> None:
    history = History(1)
    _log(history, 0, "loss", range(50))
    history.feed(0, _name(1, "epoch") + wire.RECORD.pack(wire.KIND_PROGRESS, 0, 1, False, 0.0, 10, 7, 160.0))
    history.restart()
    assert (history.ranks[0].step, history.ranks[0].bars, history.ranks[0].step_seconds) == (-1, [], None)
    _log(history, 0, "loss", [20])
    assert history.ranks[0].step == 20


def test_incomplete_steps_at_a_restart_are_not_combined_with_later_ones() -> None:
    history = History(2)
    _log(history, 0, "loss", [0, 1, 2], op=wire.REDUCE_SUM)
    _log(history, 1, "loss", [0, 1], op=wire.REDUCE_SUM)
    history.restart()
    for rank in range(2):
        _log(history, rank, "loss", [1, 2], 0.5, op=wire.REDUCE_SUM)
    history.settle()
    assert history["loss"].steps.tolist() == [0, 1, 2]
    assert history["loss"].values.tolist() == [0, 3, 5]


# ---------------------------------------------------------------------------- the band


def test_combining_does_not_wait_for_ranks_of_a_lost_host() -> None:
    history = History(3)
    for rank in range(3):
        history.feed(rank, _name(0, "loss") + _name(1, "mine"))
        history.feed(rank, b"".join(_point(0, i, 1.0, op=wire.REDUCE_SUM) + _point(1, i, 1.0) for i in range(10)))
    history.feed(2, _name(2, "alone") + _point(2, 0, 7.0))
    for first, many in ((5, 2), (8, 3)):
        history.restart()
        history.resize(many)
        for rank in range(many):
            history.feed(rank, _name(0, "loss") + _name(1, "mine"))
            history.feed(
                rank, b"".join(_point(0, i, 2.0, op=wire.REDUCE_SUM) + _point(1, i, 2.0) for i in range(first, 10))
            )
        expected = [3.0] * 5 + ([4.0] * 5 if many == 2 else [4.0] * 3 + [6.0] * 2)
        assert history["loss"].values.tolist() == expected, "at once, not at the end"
        assert history.spread("mine").steps.tolist() == list(range(10))
        assert history.spread("mine").low.tolist() == [1.0] * 5 + [2.0] * 5
        assert sorted(history.by_rank("mine")) == list(range(many))
    assert history["alone"].values.tolist() == [7.0]


def test_a_step_that_one_rank_skips_does_not_end_the_band() -> None:
    history = History(3)
    for rank, steps in enumerate([range(100), range(100), [s for s in range(100) if s % 7]]):
        _log(history, rank, "loss", steps, offset=float(rank))
    assert history.spread("loss").steps.tolist() == [s for s in range(100) if s % 7], "what every rank has logged"
    history.settle()
    spread = history.spread("loss")
    assert spread.steps.tolist() == list(range(100))
    assert (spread.high - spread.low).tolist() == [2.0 if s % 7 else 1.0 for s in range(100)]


def test_the_band_waits_for_the_slowest_rank_until_the_end() -> None:
    history = History(3)
    for rank, count in enumerate((10, 6, 10)):
        _log(history, rank, "loss", range(count), offset=float(rank))
    assert history.spread("loss").steps.tolist() == list(range(6))
    history.settle()
    assert history.spread("loss").steps.tolist() == list(range(10))
    assert history.spread("loss").low.tolist() == [float(s) for s in range(10)]


def test_steps_that_begin_again_with_every_epoch_keep_their_band() -> None:
    history = History(2)
    for epoch in range(3):
        for rank in range(2):
            _log(history, rank, "loss", [s for s in range(5) if s != rank], offset=10 * epoch + rank)
    history.settle()
    spread = history.spread("loss")
    assert spread.steps.tolist() == [2, 3, 4] * 3
    assert spread.low.tolist() == [s + 10 * epoch for epoch in range(3) for s in (2, 3, 4)]


def test_the_band_starts_where_a_later_rank_begins_to_log() -> None:
    history = History(2)
    for step in range(12):
        history.feed(0, _name(0, "x") + _point(0, step, 10.0 * step))
        if step >= 6:
            history.feed(1, _name(0, "x") + _point(0, step, 10.0 * step + 1))
    spread = history.spread("x")
    assert spread.steps.tolist() == list(range(6, 12))
    assert (spread.high - spread.low).tolist() == [1.0] * 6


# ---------------------------------------------------------------------------- a view, which has seen a part


def test_a_view_gets_all_points_again_when_old_ones_were_replaced() -> None:
    history = History(2)
    _log(history, 1, "loss", range(4))
    series, _, seen = history.new_points("loss", Cursor())
    assert len(series.steps) == 4
    _log(history, 1, "loss", range(4, 6))
    series, _, again = history.new_points("loss", seen)
    assert (series.steps.tolist(), again.version) == ([4, 5], seen.version)

    def is_sent_again(count: int) -> bool:
        nonlocal again
        before = again
        series, _, again = history.new_points("loss", again)
        return again.version != before.version and len(series.steps) == count

    _log(history, 0, "loss", range(3))
    assert is_sent_again(3), "a lower rank's values count from now on"
    assert history.changes()["loss"] == 3
    history.restart()
    _log(history, 0, "loss", [1])
    assert is_sent_again(2), "a step was repeated"
    _log(history, 1, "loss", [1])
    assert is_sent_again(2), "the band was cut"
    assert history.new_points("loss", again)[0].steps.tolist() == []
    history = History(1)
    _log(history, 0, "loss", range(4))
    _, _, again = history.new_points("loss", Cursor())
    history.restart()
    _log(history, 0, "loss", [2])
    assert is_sent_again(3), "without a band too"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),  # rank
            st.integers(0, 49),  # name
            st.lists(st.integers(-3, 9), min_size=1, max_size=5),
            st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
            st.integers(0, 9).map(lambda n: n == 0),  # a restart before
        ),
        max_size=30,
    )
)
def test_any_order_of_steps_and_restarts_leaves_each_rank_what_it_logged_last(chunks: Any) -> None:
    history = History(2)
    expected: dict[tuple[int, str], list[tuple[int, float]]] = {}
    resumes: set[tuple[int, str]] = set()
    for rank, number, steps, offset, restart in chunks:
        if restart:
            history.restart()
            resumes = set(expected)
        key = (rank, f"m{number}")
        points = expected.setdefault(key, [])
        if key in resumes:
            resumes.discard(key)
            while points and points[-1][0] >= steps[0]:
                fell = len(points) > 1 and points[-1][0] < points[-2][0]
                points.pop()
                if fell:
                    break
        points += [(step, step + offset) for step in steps]
        _log(history, rank, key[1], steps, offset)
    for (rank, name), points in expected.items():
        series = history.by_rank(name)[rank]
        assert series.steps.tolist() == [step for step, _ in points]
        np.testing.assert_array_equal(series.values, [value for _, value in points])
        history.spread(name)


def test_a_history_is_a_mapping_from_names_to_series() -> None:
    history = History()
    assert (len(history), list(history), dict(history), history.get("loss")) == (0, [], {}, None)
    history = two_metrics()
    assert isinstance(history, Mapping)
    assert list(history) == list(history.keys()) == list(dict(history)) == history.names == ["loss", "acc"]
    assert [(name, series.values.tolist()) for name, series in history.items()] == [("loss", [0.5]), ("acc", [1.0])]
    assert [series.steps.tolist() for series in history.values()] == [[0], [0]]
    assert ("loss" in history, "los" in history) == (True, False)
    assert history == history
    assert history != two_metrics()
    assert len({history, two_metrics()}) == 2


def two_metrics() -> History:
    history = History()
    for i, (name, value) in enumerate({"loss": 0.5, "acc": 1.0}.items()):
        history.feed(0, wire.NAME_PIECE.pack(wire.KIND_NAME, 0, i, name.encode()))
        history.feed(0, wire.RECORD.pack(wire.KIND_METRIC, 0, i, False, 1.0, 0, value, 1.0))
    return history


def test_a_series_tells_its_length_and_its_ends() -> None:
    two = Series(np.array([0, 4]), np.array([0.5, 1 / 3]))
    assert repr(two) == "Series(2 points: 0.5 at step 0 … 0.333333 at step 4)"
    assert repr(Series(np.array([7]), np.array([math.nan]))) == "Series(1 point: nan at step 7)"
    assert repr(Series(np.array([]), np.array([]))) == "Series(no points)"
