"""A history: what the notebook knows of a run's progress and metrics. No process is needed."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import nbddp
from nbddp.history.history import History, Restart
from nbddp.history.points import Series
from nbddp.history.records import RecordReader, Start
from nbddp.text import fold


def feed(history: History, rank: int, *records: Any) -> None:
    """As the bytes that a rank writes."""
    history.add(rank, RecordReader().feed(b"".join(map(msgpack.packb, records))))


def log(
    history: History, rank: int, name: str, steps: Iterable[int], offset: float = 0.0, reduce: str | None = None
) -> None:
    """Each value tells its step and its offset."""
    feed(history, rank, *([100.0 + s, s, False, reduce, 1, {name: s + offset}] for s in steps))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\rb", "b"), ("1%\r2%\nnext", "2%\nnext"), ("a\r\nb\r\n", "a\nb\n"), ("plain", "plain"), ("x\r", "x"), ("", "")],
)
def test_carriage_returns_are_folded_as_in_a_terminal(text: str, expected: str) -> None:
    assert fold(text) == expected


# ---------------------------------------------------------------------------- a mapping from names to series


def two_metrics() -> History:
    history = History()
    feed(history, 0, [1.0, 0, True, None, 1, {"loss": 0.5, "acc": 1.0}])
    return history


def test_a_history_is_a_mapping_from_names_to_series() -> None:
    history = History()
    assert (len(history), list(history), dict(history), history.get("loss")) == (0, [], {}, None)
    history = two_metrics()
    assert isinstance(history, Mapping)
    assert list(history) == list(history.keys()) == list(dict(history)) == ["loss", "acc"]
    assert [(name, series.values.tolist()) for name, series in history.items()] == [("loss", [0.5]), ("acc", [1.0])]
    assert ("loss" in history, "los" in history) == (True, False)
    assert history == history
    assert history != two_metrics()
    assert len({history, two_metrics()}) == 2


def test_a_series_tells_its_length_and_its_ends() -> None:
    two = Series(np.array([0, 4]), np.array([0.5, 1 / 3]))
    assert repr(two) == "Series(2 points: 0.5 at step 0 … 0.333333 at step 4)"
    assert repr(Series(np.array([7]), np.array([math.nan]))) == "Series(1 point: nan at step 7)"
    assert repr(Series(np.array([]), np.array([]))) == "Series(no points)"


def test_the_ends_of_a_long_series_are_shown_at_once() -> None:
    steps = np.arange(3_000_000)
    began = time.process_time()
    assert repr(Series(steps, steps / 2)) == "Series(3000000 points: 0 at step 0 … 1.5e+06 at step 2999999)"
    assert time.process_time() - began < 0.5


def test_the_notebook_knows_when_a_ranks_records_arrived() -> None:
    history, began = History(2), time.time()
    log(history, 0, "loss", [0])
    assert began <= history.ranks[0].arrived_at <= time.time()
    assert history.ranks[1].arrived_at == 0


def test_returned_columns_are_copies() -> None:
    history = two_metrics()
    for columns in (history["loss"], history.points("loss"), history.by_rank("loss")[0]):
        for column in columns:
            column[0] = 99
    feed(history, 0, [1.0, 1, True, None, 1, {"loss": 2.0}])
    assert [column.tolist() for column in history["loss"]] == [[0, 1], [0.5, 2.0]]


def test_an_empty_history_has_no_names_and_writes_an_empty_csv(tmp_path: Path) -> None:
    history = History(2)
    assert (list(history), history.latest(), history.notices) == ([], {}, [])
    assert "nothing logged" in repr(history)
    with pytest.raises(KeyError, match="none"):
        history["loss"]
    history.to_csv(tmp_path / "h.csv")
    assert (tmp_path / "h.csv").read_text().strip() == "step"


def test_the_first_thousand_names_of_a_run_are_kept_and_the_others_counted_once() -> None:
    history = History(2)
    for rank in (0, 1):
        feed(history, rank, *([1.0, i, False, None, 1, {f"step{i}": float(i)}] for i in range(3000)))
        feed(
            history, rank, *([1.0, step, False, None, 1, {name: 1.5}] for name, step in (("step3", 7000), ("x", 8000)))
        )
    assert list(history) == [f"step{i}" for i in range(1000)]
    assert (len(history), "step999" in history, "step1000" in history) == (1000, True, False)
    assert history["step3"].values.tolist() == [3.0, 1.5]
    assert history.notices == [
        "only the first 1,000 metrics are kept; 2,001 more names were logged. Is a step or a sample part of a name?"
    ]
    assert history.ranks[0].step == 8000  # a rank's progress counts all the same


def test_a_progress_bar_gives_its_rate_and_time_left() -> None:
    history = History(1)
    feed(history, 0, *({"time": 100.0 + done, "bar": [0, "epoch", done, 10]} for done in range(6)))
    bar = history.ranks[0].bars[0]
    assert (bar.desc, bar.total, bar.done, bar.rate, bar.seconds_left) == ("epoch", 10, 5, 1.0, 5.0)
    feed(history, 0, {"time": 106.0, "bar": [0, "epoch", 0, None]})
    assert (bar.total, bar.seconds_left) == (None, None)


# ---------------------------------------------------------------------------- over the ranks


def test_without_reduce_the_lowest_ranks_values_are_the_metrics() -> None:
    history = History(3)
    log(history, 2, "x", [0], 22.0)
    assert history["x"].values.tolist() == [22.0]
    log(history, 1, "x", [0], 11.0)
    assert history["x"].values.tolist() == [11.0]
    assert history.latest() == {"x": 11.0}
    assert sorted(history.by_rank("x")) == [1, 2]


def test_a_step_that_one_rank_never_reached_is_combined_at_the_end() -> None:
    history = History(2)
    log(history, 0, "loss", [0, 1], reduce="mean")
    log(history, 1, "loss", [0], 2.0, reduce="mean")
    assert history["loss"].values.tolist() == [1.0]
    history.settle()
    assert history["loss"].values.tolist() == [1.0, 1.0]


def test_weights_that_add_up_to_zero_give_nan() -> None:
    history = History(2)
    for rank in range(2):
        feed(history, rank, [1.0, 0, True, "mean", 0, {"loss": 1.0}], [1.0, 0, True, None, 0, {"own": 7.0}])
    assert math.isnan(history["loss"].values[0])
    assert history["own"].values.tolist() == history.by_rank("own")[1].values.tolist() == [7.0]


def test_where_ranks_do_not_log_alike_a_notice_says_so() -> None:
    history = History(3)
    for rank, steps in enumerate(([0, 1, 2], [0, 2], [0, 1, 2])):
        log(history, rank, "total", steps, reduce="sum")
        log(history, rank, "loss", steps, reduce="mean")
        log(history, rank, "theirs", [0], reduce="min" if rank else "max")
        log(history, rank, "mine", [0], reduce="max")
    log(history, 0, "mine", [1], reduce="mean")
    log(history, 1, "val", [0], reduce="sum")
    history.settle()
    assert history["total"].steps.tolist() == [0, 2]
    assert history["loss"].steps.tolist() == [0, 1, 2]
    skipped = "1 of 3 steps were logged by only 2 of 3 ranks (the first is step 1)"
    first = "rank 0 logged it with reduce='max'"
    assert history.notices == [
        f"total: {skipped}; the sums leave out these steps",
        f"loss: {skipped}; there the mean is over the ranks that logged it",
        f"theirs: {first} and rank 1 with reduce='min'; that of rank 0 counts for the whole run",
        f"mine: {first} and later with reduce='mean'; the first counts for the whole run",
        "mine: 1 of 2 steps were logged by only 1 of 3 ranks (the first is step 1); "
        "there the maximum is over the ranks that logged it",
        "val: only 1 of 3 ranks logged it; the sum is over that rank",
    ]


def test_a_step_that_one_rank_skips_does_not_end_the_band() -> None:
    history = History(3)
    for rank, steps in enumerate([range(100), range(100), [s for s in range(100) if s % 7]]):
        log(history, rank, "loss", steps, offset=float(rank))
    assert history.spread("loss").steps.tolist() == [s for s in range(100) if s % 7], "what every rank has logged"
    history.settle()
    spread = history.spread("loss")
    assert spread.steps.tolist() == list(range(100))
    assert (spread.high - spread.low).tolist() == [2.0 if s % 7 else 1.0 for s in range(100)]


def test_the_band_waits_for_the_slowest_rank_until_the_end() -> None:
    history = History(3)
    for rank, count in enumerate((10, 6, 10)):
        log(history, rank, "loss", range(count), offset=float(rank))
    assert history.spread("loss").steps.tolist() == list(range(6))
    history.settle()
    assert history.spread("loss").steps.tolist() == list(range(10))
    assert history.spread("loss").low.tolist() == [float(s) for s in range(10)]


def test_steps_that_begin_again_with_every_epoch_keep_their_band() -> None:
    history = History(2)
    for epoch in range(3):
        for rank in range(2):
            log(history, rank, "loss", [s for s in range(5) if s != rank], offset=10 * epoch + rank)
    history.settle()
    spread = history.spread("loss")
    assert spread.steps.tolist() == [2, 3, 4] * 3
    assert spread.low.tolist() == [s + 10 * epoch for epoch in range(3) for s in (2, 3, 4)]


def test_the_band_starts_where_a_later_rank_begins_to_log() -> None:
    history = History(2)
    for step in range(12):
        log(history, 0, "x", [step])
        if step >= 6:
            log(history, 1, "x", [step], 1.0)
    spread = history.spread("x")
    assert spread.steps.tolist() == list(range(6, 12))
    assert (spread.high - spread.low).tolist() == [1.0] * 6


# ---------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("reduce", [None, "mean"])
def test_steps_that_are_repeated_after_a_restart_replace_the_old_ones(reduce: str | None, tmp_path: Path) -> None:
    history = History(2)
    for rank in range(2):
        log(history, rank, "loss", range(8 + rank), reduce=reduce)
    history.restart("RankDied: rank 1 of 2 was killed by SIGKILL")
    assert history.restarts == [Restart(None, "RankDied: rank 1 of 2 was killed by SIGKILL")]
    assert len(history["loss"].steps) == 8, "until something is logged the old curve stands"
    for rank in range(2):
        log(history, rank, "loss", range(5, 7), 0.5, reduce)
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
    log(history, 0, "loss", [0, 1, 2, 3, 0, 1, 2])
    history.restart()
    log(history, 0, "loss", [1, 2], 0.5)
    assert history["loss"].values.tolist() == [0, 1, 2, 3, 0, 1.5, 2.5], "the first epoch is kept"


def test_a_saved_history_keeps_epochs_before_a_restart(tmp_path: Path) -> None:
    history = History(1)
    log(history, 0, "loss", [0, 1, 2, 0, 1])
    history.restart()
    log(history, 0, "loss", [0, 1, 2], 0.5)
    history.save(tmp_path / "h")
    for each in (history, History.load(tmp_path / "h")):
        assert each["loss"].values.tolist() == [0, 1, 2, 0.5, 1.5, 2.5]


def test_a_restart_cuts_each_metric_at_its_first_new_step() -> None:
    history = History(2)
    for rank in range(2):
        log(history, rank, "loss", range(100))
        log(history, rank, "val", [0, 50, 90])
    history.restart()
    log(history, 0, "loss", range(60, 62), 0.5)
    assert history["loss"].values.tolist() == [*range(60), 60.5, 61.5]
    assert history["val"].steps.tolist() == [0, 50, 90]
    log(history, 0, "val", [90], 0.5)
    assert history["val"].values.tolist() == [0, 50, 90.5]


def test_restarts_without_metrics_between_them_share_the_next_step() -> None:
    history = History(1)
    log(history, 0, "loss", range(5))
    history.restart("first")
    history.restart("second")
    log(history, 0, "loss", [3, 4, 5])
    history.restart("third")
    assert [(r.step, r.reason) for r in history.restarts] == [(3, "first"), (3, "second"), (None, "third")]
    assert history["loss"].steps.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_restart_resets_progress() -> None:
    history = History(1)
    log(history, 0, "loss", range(50))
    feed(history, 0, {"time": 160.0, "bar": [1, "epoch", 7, 10]})
    history.restart()
    assert (history.ranks[0].step, history.ranks[0].bars, history.ranks[0].step_seconds) == (-1, [], None)
    log(history, 0, "loss", [20])
    assert history.ranks[0].step == 20


def test_incomplete_steps_at_a_restart_are_not_combined_with_later_ones() -> None:
    history = History(2)
    log(history, 0, "loss", [0, 1, 2], reduce="sum")
    log(history, 1, "loss", [0, 1], reduce="sum")
    history.restart()
    for rank in range(2):
        log(history, rank, "loss", [1, 2], 0.5, "sum")
    history.settle()
    assert history["loss"].steps.tolist() == [0, 1, 2]
    assert history["loss"].values.tolist() == [0, 3, 5]


def test_a_run_that_is_broken_off_keeps_what_only_some_ranks_log() -> None:
    history = History(3)
    log(history, 0, "val", range(4), reduce="mean")  # a validation on rank 0
    for rank, count in enumerate((9, 2, 9)):
        log(history, rank, "own", range(count))
        log(history, rank, "loss", range(count), reduce="mean")
    history.restart()
    history.settle(broken_off=True)
    assert [len(history[name].steps) for name in ("val", "own", "loss")] == [4, 9, 2]


# ---------------------------------------------------------------------------- files


def everything() -> History:
    """Of two ranks and two attempts, with names that other tools keep for themselves."""
    history = History(2)
    for attempt in range(2):
        if attempt:
            history.restart("it died")
        for rank in range(2):
            steps = range(3 * attempt, 6 - rank)
            feed(history, rank, *([50.0 + s, s, True, "mean", 2, {"loss": s + rank / 2, "step": 1.0}] for s in steps))
            log(history, rank, "_step", steps, reduce="sum")
            log(history, rank, "_timestamp", steps)
        feed(history, 0, *([9.0, 5, True, op, 0, {"val/acc, top 1": math.nan}] for op in ("max", "min")))
    history.settle(broken_off=True)
    return history


def content(history: History) -> Any:
    columns = {
        name: [c.tobytes() for part in (history[name], *history.by_rank(name).values()) for c in part]
        for name in history
    }
    return columns, list(history), history.notices, history.restarts


def test_a_saved_history_is_loaded_as_it_was(tmp_path: Path) -> None:
    history = everything()
    history.save(tmp_path / "h")
    assert content(History.load(tmp_path / "h")) == content(history)
    assert len(history) == 5
    assert len(history.notices) == 2


def test_metrics_of_any_name_are_in_the_csv_and_in_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    history = everything()
    history.to_csv(tmp_path / "h.csv")
    frame = pandas.read_csv(tmp_path / "h.csv", index_col="step").rename(columns={"step.1": "step"})
    pandas.testing.assert_frame_equal(frame, history.to_pandas())
    assert list(frame) == ["loss", "step", "_step", "_timestamp", "val/acc, top 1"]


def test_csv_and_pandas_have_a_row_per_step(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    history = History(1)
    log(history, 0, "loss", range(4))
    log(history, 0, "acc, top 1", [3], 0.25)
    history.to_csv(tmp_path / "h.csv")
    rows = list(csv.reader((tmp_path / "h.csv").read_text().splitlines()))
    assert rows == [["step", "loss", "acc, top 1"], *([str(i), f"{i}.0", ""] for i in range(3)), ["3", "3.0", "3.25"]]
    frame = history.to_pandas()
    assert frame["loss"].tolist() == [0, 1, 2, 3]
    assert frame["acc, top 1"].isna().tolist() == [True, True, True, False]


@pytest.mark.parametrize("write", [History.to_csv, History.save])
def test_a_file_is_written_whole_and_only_where_a_file_may_be(write: Any, tmp_path: Path) -> None:
    history, theirs = two_metrics(), tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / "link").symlink_to(theirs)  # as another user could have left it in a shared folder
    write(history, tmp_path / "link")
    write(history, tmp_path / "link")
    assert (theirs.read_text(), (tmp_path / "link").is_symlink()) == ("precious", False)
    os.mkfifo(tmp_path / "pipe")
    for bad in ("pipe", ".", "none/h", "n" * 300, "\0", "theirs/h"):
        with pytest.raises(nbddp.NbddpError, match="cannot write '"):
            write(history, tmp_path / bad)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "theirs"], "and nothing else"


HEAD = Start(0, 1, 1.0).head()
POINT = msgpack.packb([1.0, 3, False, None, 1, {"loss": 0.5}])


def test_a_job_is_loaded_from_its_ranks_files_while_it_runs(tmp_path: Path) -> None:
    for rank in range(2):
        with open(tmp_path / ("m" if rank == 0 else "m.rank1"), "wb") as file:
            for attempt in range(2):
                file.write(Start(rank, 2, 1000.0 * attempt + rank).head())
                for step in range(3 * attempt, 5):
                    file.write(msgpack.packb([1.0, step, True, "sum", 1, {"loss": float(step + attempt)}]))
            file.write(POINT[:-3])  # it's being written
    history = History.load(tmp_path / "m")
    assert history["loss"].values.tolist() == [0, 2, 4, 8, 10]
    assert [restart.step for restart in history.restarts] == [3]


def test_zeros_left_by_a_machine_crash_are_not_metrics(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(HEAD + POINT + b"\0" * 100_000)
    assert History.load(tmp_path / "m")["loss"].values.tolist() == [0.5]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"step,loss\n0,1\n",
        POINT,
        HEAD + msgpack.packb("text"),
        HEAD + msgpack.packb([1.0, 2**60, False, None, 1, {"loss": 0.5}]),
        HEAD + msgpack.packb([1.0, 3, False, "median", 1, {"loss": 0.5}]),
        HEAD + msgpack.packb([1.0, 3, False, None, -1, {"loss": 0.5}]),
        HEAD + msgpack.packb([1.0, 3, False, None, 1, {"loss": "high"}]),
        HEAD + msgpack.packb({"name": "loss", "ops": [None], "rows": b"123"}),
        HEAD + msgpack.packb({"name": "loss", "ops": [None], "rows": b"\xff" * 40}),
        Start(7, 3, 1.0).head(),
        Start(0, 1 << 40, 1.0).head(),
        HEAD[:-2],
        HEAD + b"\xc1",
        (HEAD + POINT) * 200_000,
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_what_is_no_history_is_refused_soon(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(data)
    began = time.monotonic()
    with pytest.raises(nbddp.NbddpError, match=r"/m cannot be read as metrics: \S"):
        History.load(tmp_path / "m")
    assert time.monotonic() - began < 5
    with pytest.raises(nbddp.NbddpError, match="No such file"):
        History.load(tmp_path / "none")


def test_a_name_of_12_mb_without_an_end_takes_no_time(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(HEAD + POINT + POINT.split(b"\xa4")[0] + b"\xdb\x7f\xff\xff\xff" + b"n" * 12_000_000)
    began = time.monotonic()
    assert list(History.load(tmp_path / "m")) == ["loss"]
    assert time.monotonic() - began < 2
