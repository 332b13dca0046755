"""A history: what the notebook knows of a run's progress and metrics. No process is needed."""

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
from tests.curves import Recorded, logged


def feed(history: Recorded, rank: int, *records: Any) -> None:
    """As the bytes that a rank writes."""
    history.add(rank, RecordReader().feed(b"".join(map(msgpack.packb, records))))


def log(to: Recorded, rank: int, name: str, steps: Iterable[int], offset: float = 0.0, reduce: Any = None) -> None:
    """Each value tells its step and its offset."""
    feed(to, rank, *([100.0 + s, s, False, reduce, 1, {name: s + offset}] for s in steps))


def two_metrics() -> Recorded:
    history = Recorded()
    feed(history, 0, [1.0, 0, True, None, 1, {"loss": 0.5, "acc": 1.0}])
    return history


def test_a_history_is_a_mapping_from_names_to_series_and_an_empty_one_writes_an_empty_csv(tmp_path: Path) -> None:
    empty = Recorded(2)
    assert (len(empty), list(empty), dict(empty), empty.get("loss")) == (0, [], {}, None)
    assert (empty.latest(), empty.notices, "nothing logged" in repr(empty)) == ({}, [], True)
    with pytest.raises(KeyError, match="none"):
        empty["loss"]
    empty.to_csv(tmp_path / "h.csv")
    assert (tmp_path / "h.csv").read_text().strip() == "step"
    history = two_metrics()
    assert isinstance(history, Mapping)
    assert [*history] == [*history.keys()] == [*dict(history)] == ["loss", "acc"]
    assert [(name, series.values.tolist()) for name, series in history.items()] == [("loss", [0.5]), ("acc", [1.0])]
    assert ("loss" in history, "los" in history, history == history) == (True, False, True)
    assert history != two_metrics()
    assert len({history, two_metrics()}) == 2


def test_a_series_tells_its_length_and_its_ends() -> None:
    two = Series(np.array([0, 4]), np.array([0.5, 1 / 3]))
    assert repr(two) == "Series(2 points: 0.5 at step 0 … 0.333333 at step 4)"
    assert repr(Series(np.array([7]), np.array([math.nan]))) == "Series(1 point: nan at step 7)"
    assert repr(Series(np.array([]), np.array([]))) == "Series(no points)"
    steps = np.arange(3_000_000)
    began = time.process_time()
    assert repr(Series(steps, steps / 2)) == "Series(3000000 points: 0 at step 0 … 1.5e+06 at step 2999999)"
    assert time.process_time() - began < 0.5, "of a long series, too"


def test_returned_columns_are_copies() -> None:
    history = two_metrics()
    for columns in (history["loss"], history.points("loss"), history.by_rank("loss")[0]):
        for column in columns:
            column[0] = 99
    feed(history, 0, [1.0, 1, True, None, 1, {"loss": 2.0}])
    assert [column.tolist() for column in history["loss"]] == [[0, 1], [0.5, 2.0]]


def test_the_first_thousand_names_of_a_run_are_kept_and_the_others_counted_once() -> None:
    history = Recorded(2)
    for rank in (0, 1):
        later = [1.0, 7000, False, None, 1, {"step3": 1.5}], [1.0, 8000, False, None, 1, {"x": 1.5}]
        feed(history, rank, *([1.0, i, False, None, 1, {f"step{i}": float(i)}] for i in range(3000)), *later)
    assert list(history) == [f"step{i}" for i in range(1000)]
    assert (len(history), "step999" in history, "step1000" in history) == (1000, True, False)
    assert history["step3"].values.tolist() == [3.0, 1.5]
    told = "only the first 1,000 metrics are kept; 2,001 more names were logged. Do the names include a step?"
    assert history.notices == [told]
    assert history.ranks[0].step == 8000  # a rank's progress counts all the same


def test_a_ranks_progress_has_its_arrival_its_rate_and_time_left() -> None:
    history, began = Recorded(2), time.time()
    feed(history, 0, *({"time": 100.0 + done, "bar": [0, "epoch", done, 10]} for done in range(6)))
    assert began <= history.ranks[0].arrived_at <= time.time()
    assert history.ranks[1].arrived_at == 0
    bar = history.ranks[0].bars[0]
    assert (bar.desc, bar.total, bar.done, bar.rate, bar.seconds_left) == ("epoch", 10, 5, 1.0, 5.0)
    feed(history, 0, {"time": 106.0, "bar": [0, "epoch", 0, None]})
    assert (bar.total, bar.seconds_left) == (None, None)


def test_weights_that_add_up_to_zero_give_nan() -> None:
    history = Recorded(2)
    for rank in range(2):
        feed(history, rank, [1.0, 0, True, "mean", 0, {"loss": 1.0}], [1.0, 0, True, None, 0, {"own": 7.0}])
    assert math.isnan(history["loss"].values[0])
    assert history["own"].values.tolist() == history.by_rank("own")[1].values.tolist() == [7.0]


def test_where_ranks_do_not_log_alike_a_notice_says_so() -> None:
    history = Recorded(3)
    for rank, steps in enumerate(([0, 1, 2], [0, 2], [0, 1, 2])):
        log(history, rank, "total", steps, reduce="sum")
        log(history, rank, "loss", steps, reduce="mean")
        log(history, rank, "theirs", [0], reduce="min" if rank else "max")
        log(history, rank, "mine", [0], reduce="max")
    log(history, 0, "mine", [1], reduce="mean")
    log(history, 1, "val", [0], reduce="sum")
    history.settle()
    assert [history[name].steps.tolist() for name in ("total", "loss")] == [[0, 2], [0, 1, 2]]
    skipped = "1 of 3 steps was logged by only 2 of 3 ranks (the first is step 1)"
    first = "rank 0 logged it with reduce='max'"
    assert history.notices == [
        f"total: {skipped}; the sums leave out this one",
        f"loss: {skipped}; for this one, the mean is over the ranks that logged it",
        f"theirs: {first} and rank 1 with reduce='min'; rank 0's is used for the whole run",
        f"mine: {first} and later with reduce='mean'; the first is used for the whole run",
        "mine: 1 of 2 steps was logged by only 1 of 3 ranks (the first is step 1); "
        "for this one, the maximum is over the ranks that logged it",
        "val: only 1 of 3 ranks logged it; the sum is over that rank",
    ]


MOST = [step for step in range(100) if step % 7]


@pytest.mark.parametrize(
    ("epochs", "by_rank", "before", "after", "widths"),
    [
        (1, [range(100), range(100), MOST], MOST, range(100), [2.0 if step % 7 else 1.0 for step in range(100)]),
        (1, [range(10), range(6), range(10)], range(6), range(10), [2.0] * 10),
        (3, [[1, 2, 3, 4], [0, 2, 3, 4]], [2, 3, 4], [2, 3, 4], [1.0] * 3),
        (1, [range(12), range(6, 12)], range(6, 12), range(6, 12), [1.0] * 6),
    ],
    ids=["one rank skips steps", "one is slow", "steps begin again", "one begins later"],
)
def test_the_band_waits_for_the_slowest_rank_until_the_end(
    epochs: int, by_rank: list[Any], before: Any, after: Any, widths: list[float]
) -> None:
    history = Recorded(len(by_rank))
    for epoch in range(epochs):
        for rank, steps in enumerate(by_rank):
            log(history, rank, "loss", steps, offset=10 * epoch + rank)
    assert history.spread("loss").steps.tolist() == [*before] * epochs
    history.settle()
    spread = history.spread("loss")
    assert spread.steps.tolist() == [*after] * epochs
    assert spread.low.tolist() == [step + 10.0 * epoch for epoch in range(epochs) for step in after]
    assert (spread.high - spread.low).tolist() == widths * epochs


@pytest.mark.parametrize("reduce", [None, "mean"])
def test_steps_that_are_repeated_after_a_restart_replace_the_old_ones(reduce: str | None, tmp_path: Path) -> None:
    history = Recorded(2)
    for rank in range(2):
        log(history, rank, "loss", range(8 + rank), reduce=reduce)
    history.restart("RankDied: rank 1 of 2 was killed by SIGKILL")
    assert history.restarts == [Restart(None, "RankDied: rank 1 of 2 was killed by SIGKILL")]
    assert len(history["loss"].steps) == 8, "until something is logged the old curve stands"
    for rank in range(2):
        log(history, rank, "loss", range(5, 7), 0.5, reduce)
    steps, values = history["loss"]
    assert (steps.tolist(), values.tolist()) == ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5.5, 6.5])
    assert [r.step for r in history.restarts] == [5]
    for series in history.by_rank("loss").values():
        assert series.values.tolist() == values.tolist()
    spread = history.spread("loss")
    assert (spread.steps.tolist(), spread.low.tolist()) == (steps.tolist(), values.tolist())
    history.to_csv(tmp_path / "h.csv")
    rows = csv.DictReader((tmp_path / "h.csv").read_text().splitlines())
    assert ([float(row["loss"]) for row in rows], history.latest()) == (values.tolist(), {"loss": 6.5})


@pytest.mark.parametrize(
    ("before", "again", "values"),
    [
        ([0, 1, 2, 3, 0, 1, 2], [[1, 2]], [0, 1, 2, 3, 0, 1.5, 2.5]),
        ([0, 1, 2, 0, 1], [[0, 1, 2]], [0, 1, 2, 0.5, 1.5, 2.5]),
        (range(100), [range(60, 62)], [*range(60), 60.5, 61.5]),
        (range(10), [[5], [3]], [0, 1, 2, 3.75]),
    ],
)
def test_a_restart_replaces_each_metrics_steps_from_its_first_new_one_in_the_newest_epoch(
    before: Any, again: Any, values: Any, tmp_path: Path
) -> None:
    history = Recorded(2)
    for rank in range(2):
        log(history, rank, "loss", before)
        log(history, rank, "val", [0, 50, 90])
    for offset, steps in zip((0.5, 0.75), again):
        history.restart()
        log(history, 0, "loss", steps, offset)
    assert history["val"].steps.tolist() == [0, 50, 90]
    log(history, 0, "val", [90], 0.5)
    history.save(tmp_path / "h")
    for each in (history, History.load(tmp_path / "h")):
        assert each["loss"].values.tolist() == values, "earlier epochs are kept"
        assert each["val"].values.tolist() == [0, 50, 90.5]


def test_while_ranks_log_a_history_has_the_points_that_all_have_passed_and_at_the_end_all(tmp_path: Path) -> None:
    history = logged(history=Recorded(2), rank=0, reduce="mean", loss=[1.0] * 5)
    assert history["loss"].values.tolist() == []
    logged(history=history, rank=1, reduce="mean", loss=[2.0] * 3)
    history.save(tmp_path / "h")
    for each in (history, History.load(tmp_path / "h")):
        assert each["loss"].values.tolist() == [1.5] * 3
    history.settle()
    assert history["loss"].values.tolist() == [1.5] * 3 + [1.0] * 2


def test_restarts_without_metrics_between_them_share_the_next_step_and_each_resets_progress() -> None:
    history = Recorded(1)
    log(history, 0, "loss", range(5))
    feed(history, 0, {"time": 160.0, "bar": [1, "epoch", 7, 10]})
    history.restart("first")
    assert (history.ranks[0].step, history.ranks[0].bars, history.ranks[0].step_seconds) == (-1, [], None)
    history.restart("second")
    log(history, 0, "loss", [3, 4, 5])
    assert history.ranks[0].step == 5
    history.restart("third")
    assert [(r.step, r.reason) for r in history.restarts] == [(3, "first"), (3, "second"), (None, "third")]
    assert history["loss"].steps.tolist() == [0, 1, 2, 3, 4, 5]


def test_csv_and_pandas_have_a_row_per_step(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    history = Recorded(1)
    log(history, 0, "loss", range(4))
    log(history, 0, "acc, top 1", [3], 0.25)
    feed(history, 0, [1.0, 1, False, None, 1, {"step": 0.5, "_step": math.nan, "_timestamp": 2.5}])  # others' own names
    history.to_csv(tmp_path / "h.csv")
    assert list(csv.reader((tmp_path / "h.csv").read_text().splitlines())) == [
        ["step", "loss", "acc, top 1", "step.1", "_step", "_timestamp"],
        ["0", "0.0", "", "", "", ""],
        ["1", "1.0", "", "0.5", "nan", "2.5"],
        ["2", "2.0", "", "", "", ""],
        ["3", "3.0", "3.25", "", "", ""],
    ]
    frame = history.to_pandas()
    assert frame["loss"].tolist() == [0, 1, 2, 3]
    assert frame["acc, top 1"].isna().tolist() == [True, True, True, False]
    read = pandas.read_csv(tmp_path / "h.csv", index_col="step").rename(columns={"step.1": "step"})
    pandas.testing.assert_frame_equal(read, frame)
    log(history, 0, "loss", range(4), 0.5)  # in the next epoch
    history.to_csv(tmp_path / "h.csv")
    for table in (history.to_pandas(), pandas.read_csv(tmp_path / "h.csv")):
        assert table["loss"].tolist() == [0.5, 1.5, 2.5, 3.5]


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
        with pytest.raises(nbddp.NbddpError, match="can't write '"):
            write(history, tmp_path / bad)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "theirs"], "and nothing else"


HEAD = Start(0, 1, 1.0).head()
POINT = msgpack.packb([1.0, 3, False, None, 1, {"loss": 0.5}])


def test_a_job_is_loaded_from_its_ranks_files_while_it_runs(tmp_path: Path) -> None:
    for rank in range(2):
        with open(tmp_path / ("m" if rank == 0 else "m.rank1"), "wb") as file:
            for attempt in range(2):
                file.write(Start(rank, 2, (rank, 1000.0 - rank)[attempt]).head())  # a moment after rank 0; then before
                for step in range(3 * attempt, 5):
                    file.write(msgpack.packb([1.0, step, True, "sum", 1, {"loss": float(step + attempt)}]))
            file.write(POINT[:-3])  # it's being written
    history = History.load(tmp_path / "m")
    assert (history["loss"].values.tolist(), [each.step for each in history.restarts]) == ([0, 2, 4, 8, 10], [3])
    (tmp_path / "n").write_bytes(HEAD + POINT + Start(0, 2, 9.0).head() + POINT)
    (tmp_path / "n.rank1").write_bytes(Start(1, 2, 9.0).head() + POINT)
    assert [*History.load(tmp_path / "n").by_rank("loss")] == [0, 1], "restarted with more ranks"


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"step,loss\n0,1\n", POINT, HEAD + msgpack.packb("text"), HEAD[:-2], HEAD + b"\xc1"),
        HEAD + msgpack.packb([1.0, 2**60, False, None, 1, {"loss": 0.5}]),
        HEAD + msgpack.packb([1.0, 3, False, "median", 1, {"loss": 0.5}]),
        HEAD + msgpack.packb([1.0, 3, False, None, -1, {"loss": 0.5}]),
        HEAD + msgpack.packb([1.0, 3, False, None, 1, {"loss": "high"}]),
        *(HEAD + msgpack.packb({"name": "loss", "ops": [None], "rows": rows}) for rows in (b"123", b"\xff" * 40)),
        *(Start(7, 3, 1.0).head(), Start(1, 3, 1.0).head() + POINT, Start(0, 1 << 40, 1.0).head()),
        (HEAD + POINT) * 200_000,
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_what_is_no_history_is_refused_soon(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(data)
    began = time.monotonic()
    with pytest.raises(nbddp.NbddpError, match=r"/m can't be read as metrics: \S"):
        History.load(tmp_path / "m")
    assert time.monotonic() - began < 5
    with pytest.raises(nbddp.NbddpError, match="No such file"):
        History.load(tmp_path / "none")


@pytest.mark.parametrize(
    "left",
    [b"\0" * 100_000, POINT.split(b"\xa4")[0] + b"\xdb\x7f\xff\xff\xff" + b"n" * 12_000_000],
    ids=["zeros of a machine's crash", "a name without an end"],
)
def test_what_follows_the_last_whole_record_is_no_metric_and_takes_no_time(left: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(HEAD + POINT + left)
    began = time.monotonic()
    assert [series.values.tolist() for series in History.load(tmp_path / "m").values()] == [[0.5]]
    assert time.monotonic() - began < 2
