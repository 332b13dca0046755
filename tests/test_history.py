"""Metrics as columns, from bytes that are cut anywhere; no process needed."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp import wire
from nbddp.kernel.history import History


def _name(ident: int, name: str) -> bytes:
    text = name.encode()
    pieces = [text[i : i + 24] for i in range(0, len(text), 24)] or [b""]
    return b"".join(
        wire.NAME_PIECE.pack(wire.KIND_NAME, int(i + 1 < len(pieces)), ident, piece) for i, piece in enumerate(pieces)
    )


def _point(ident: int, step: int, value: float, *, op: int = 0, weight: float = 1.0, at: float = 1.0) -> bytes:
    return wire.RECORD.pack(wire.KIND_METRIC, op, ident, weight, step, value, at)


def test_a_name_piece_is_as_long_as_a_record() -> None:
    assert wire.NAME_PIECE.size == wire.RECORD.size == 32


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
def test_every_name_arrives(name: str) -> None:
    history = History(1)
    history.feed(0, _name(7, name) + _point(7, 0, 1.0))
    assert history.names == [name]


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.125, 100, width=32)), min_size=2, max_size=5),
    st.randoms(use_true_random=False),
)
def test_ranks_combine_in_any_order(points: list[tuple[float, float]], random: object) -> None:
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


def test_weights_that_add_up_to_nothing_give_nan() -> None:
    history = History(2)
    for rank in range(2):
        history.feed(rank, _name(0, "loss") + _point(0, 0, 1.0, op=1, weight=0.0))
    assert math.isnan(history["loss"].values[0])


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


def test_an_empty_history(tmp_path: Path) -> None:
    history = History(2)
    assert (history.names, len(history), history.latest()) == ([], 0, {})
    assert "nothing logged" in repr(history)
    with pytest.raises(KeyError, match="none"):
        history["loss"]
    history.to_csv(tmp_path / "h.csv")
    assert (tmp_path / "h.csv").read_text().strip() == "step"


def test_what_is_handed_out_does_not_change_later() -> None:
    history = History(1)
    history.feed(0, _name(0, "loss") + _point(0, 0, 1.0))
    steps, values = history["loss"]
    values[0] = 99.0
    history.feed(0, _point(0, 1, 2.0))
    assert (steps.tolist(), values.tolist()) == ([0], [99.0])
    assert history["loss"].values.tolist() == [1.0, 2.0]


def test_progress_bars_and_time_left() -> None:
    history = History(1)
    data = _name(0, "epoch")
    for done in range(6):
        data += wire.RECORD.pack(wire.KIND_PROGRESS, 0, 0, 0.0, 10, done, 100.0 + done)
    history.feed(0, data)
    bar = history.ranks[0].bars[0]
    assert (bar.desc, bar.total, bar.done, bar.rate) == ("epoch", 10, 5, 1.0)
    assert bar.seconds_left == 5.0
    history.feed(0, wire.RECORD.pack(wire.KIND_PROGRESS, 0, 0, 0.0, -1, 0, 106.0))
    assert (bar.total, bar.seconds_left) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\rb", "b"), ("1%\r2%\nnext", "2%\nnext"), ("a\r\nb\r\n", "a\nb\n"), ("plain", "plain"), ("x\r", "x"), ("", "")],
)
def test_carriage_returns_fold_as_a_terminal_would(text: str, expected: str) -> None:
    assert wire.fold(text) == expected
