"""What panel, picture and text say about the numbers: formats, names, smoothing, NaN."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from nbddp.history.history import History
from nbddp.panel import numbers, summary, svg
from nbddp.panel.curves import charts, log_ticks, smooth, ticks, x_range, y_range
from nbddp.panel.feed import Feed
from nbddp.panel.picture import Picture
from nbddp.panel.text import TextView, progress_text
from tests.panel.fakes import FakeRun, Rank, status

# js/test/numbers.test.js reads the same cases.
CASES = json.loads(Path(__file__).with_name("numbers.json").read_text())


# ---------------------------------------------------------------------------- formats


@pytest.mark.parametrize(("value", "text"), CASES["metric"])
def test_a_metrics_value_is_written_as_in_the_panel(value: float | str, text: str) -> None:
    assert numbers.metric(float(value)) == text


@pytest.mark.parametrize(("values", "texts"), CASES["ticks"])
def test_ticks_have_as_many_digits_as_their_distance_needs(values: list[float], texts: list[str]) -> None:
    assert numbers.ticks(values) == texts


@pytest.mark.parametrize(("values", "texts"), CASES["log_ticks"])
def test_logarithmic_ticks_are_each_as_short_as_possible(values: list[float], texts: list[str]) -> None:
    assert numbers.log_ticks(values) == texts


@pytest.mark.parametrize(("ends", "places"), CASES["log_places"])
def test_logarithmic_ticks_are_round_numbers(ends: list[float], places: list[float]) -> None:
    found = log_ticks(math.log10(ends[0]), math.log10(ends[1]), 5)
    assert [float(f"{10**tick:.9g}") for tick in found] == places


def test_steps_are_whole_numbers() -> None:
    assert ticks(0, 3, 5, whole=True) == [0, 1, 2, 3]
    assert ticks(0, 12, 5, whole=True) == [0, 3, 6, 9, 12]
    history = History()
    Rank(history).log("loss", range(3), [3.0, 2.0, 1.0])
    assert ">0.5<" not in Picture(history).svg


@pytest.mark.parametrize(
    ("values", "labels"),
    [([5.0, 5.0], ["2", "5", "10"]), ([-1.0, 0.0, 10.0, 1000.0], ["10", "20"]), ([1e-6, 1e6], ["1e-6", "1e6"])],
)
def test_a_log_scale_of_constants_mixed_signs_and_many_decades_has_ticks(
    values: list[float], labels: list[str]
) -> None:
    history = History()
    Rank(history).log("loss", range(len(values)), values)
    svg = Picture(history, log=True).svg
    assert all(f">{label}<" in svg for label in labels[:1])
    (family,) = charts(history, 100, log=True).families
    low, high = y_range(family)
    assert low < high
    assert len(log_ticks(low, high, 5)) > 1


# ---------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "family", "title", "label", "tile"),
    [
        ("Loss/train", "loss", "Loss", "train", "Train Loss"),
        ("Loss/val", "loss", "Loss", "val", "Val Loss"),
        ("val loss", "loss", "Loss", "val", "Val loss"),
        ("train_acc", "acc", "Accuracy", "train", "Train acc"),
        ("acc-Val", "acc", "Accuracy", "Val", "Val acc"),
        ("loss.test", "loss", "Loss", "test", "Test loss"),
        ("gan/loss_val", "loss", "Loss", "gan/val", "Gan val loss"),
        ("val/gan/loss", "loss", "Loss", "val/gan", "Val gan loss"),
        ("BLEU", "bleu", "BLEU", "BLEU", "BLEU"),
        ("test F1", "f1", "F1", "test", "Test F1"),
        ("train", "train", "Train", "train", "Train"),
        ("trainable", "trainable", "Trainable", "trainable", "Trainable"),
    ],
)
def test_a_stage_first_or_last_gives_one_chart(name: str, family: str, title: str, label: str, tile: str) -> None:
    assert summary.describe(name) == summary.Metric(name, family, title, label, tile)


# ---------------------------------------------------------------------------- smoothing


def test_a_mean_reaches_over_two_percent_of_the_points() -> None:
    values = np.random.default_rng(0).normal(size=10_000)
    mean = smooth(values, np.array([0, 5_000, 9_999]))
    assert mean == pytest.approx([values[:101].mean(), values[4_900:5_101].mean(), values[-101:].mean()])


def test_few_points_and_smooth_data_are_not_smoothed() -> None:
    noise = np.random.default_rng(0).normal(size=200)
    assert smooth(noise[:99], np.arange(99)) is None
    assert smooth(noise, np.arange(200)) is not None
    assert smooth(np.cos(np.arange(10_000) / 1000), np.arange(5)) is None, "a schedule"
    assert smooth(np.repeat(noise, 50), np.arange(5)) is None, "a value per epoch"


def test_a_mean_passes_over_nan_and_forgets_a_spike() -> None:
    values = np.random.default_rng(0).normal(size=1_000)
    values[[10, 500]] = 1e200, math.nan
    mean = smooth(values, np.array([500, 501, 800]))
    assert mean is not None
    assert math.isnan(mean[0]), "the line does not go on where the metric is NaN"
    assert mean[1:] == pytest.approx([np.nanmean(values[491:512]), values[790:811].mean()])


def test_the_picture_smooths_all_points_and_not_those_that_it_draws() -> None:
    values = np.random.default_rng(0).exponential(size=100_000)  # its extremes have another mean
    history = History()
    Rank(history).log("loss", range(100_000), values.tolist())
    (family,) = charts(history, 600).families
    mean = family.lines[0].mean
    assert mean is not None
    assert len(mean) == len(family.lines[0].series.steps) <= 600
    assert mean.mean() == pytest.approx(1.0, abs=0.02)


# ---------------------------------------------------------------------------- NaN


def broken_run() -> History:
    """Rank 1's loss is NaN from step 60; rank 0's is not."""
    history = History(2)
    for rank in range(2):
        values = [1.0 + step % 2 if step < 60 or rank == 0 else math.nan for step in range(200)]
        Rank(history, rank).log("train/loss", range(200), values, op=1)
        Rank(history, rank).log("acc", range(200), [0.5] * 200, op=1)
    return history


def test_nan_is_marked_in_the_charts_of_its_family_only() -> None:
    history = broken_run()
    text = "train/loss is NaN from step 60 on rank 1"
    assert summary.marks(history) == [summary.Mark(60, "NaN from step 60", text, "loss")]
    svg = Picture(history).svg
    assert svg.count(">NaN from step 60</text>") == 1
    assert 'fill="#d9453d">train NaN</text>' in svg, "the legend says it in red"


def test_a_notice_names_the_ranks_and_the_step_of_nan() -> None:
    history = broken_run()
    text = "train/loss is NaN from step 60 on rank 1"
    assert summary.notices(history) == [text]
    assert text in Picture(history, status("finished")).bundle()["text/html"]
    content, _ = Feed(FakeRun(history)).frame(status("running")) or ({}, b"")
    assert text in content["head"]["remark"]
    stream = io.StringIO()
    view = TextView(FakeRun(history), stream)
    view.update(status("running"))
    view.update(status("finished"))
    assert text in stream.getvalue()
    assert "train/loss NaN" in stream.getvalue()


def test_all_ranks_are_named_as_a_range_and_infinity_as_itself() -> None:
    history = History(4)
    for rank in range(4):
        Rank(history, rank).log("loss", [7, 8], [math.inf, math.nan])
    assert summary.notices(history)[:1] == ["loss is ∞ from step 7 on ranks 0 to 3"]


def test_a_single_nan_among_numbers_is_not_the_end_of_the_line() -> None:
    history = History()
    rank = Rank(history)
    rank.log("loss", [1, 2, 3], [1.0, math.nan, 2.0])
    assert summary.marks(history) == []
    rank.log("loss", [4], [math.nan])
    rank.log("loss", [5], [math.nan])
    assert [mark.step for mark in summary.marks(history)] == [4]
    rank.log("loss", [6], [1.0])
    assert summary.marks(history) == []
    rank.log("loss", [7], [math.nan])
    history.restart("killed")
    assert summary.notices(history) == [], "the ranks start again"


def test_a_chart_of_nothing_but_nan_says_so() -> None:
    history = History()
    Rank(history).log("loss", range(5), [math.nan] * 5)
    assert ">every value is NaN or infinite</text>" in Picture(history).svg
    assert x_range(charts(history, 100).families[0].lines) == (0.0, 4.0)


# ---------------------------------------------------------------------------- progress


def test_progress_and_time_left_are_the_slowest_ranks_in_panel_and_text() -> None:
    history = History(3)
    for rank, speed in ((0, 10), (1, 4), (2, 10)):
        for at in (1, 2):
            Rank(history, rank).bar(0, "step", 100, speed * at, at=float(at))
    progress = summary.progress(history)
    assert (progress.step, progress.steps, progress.fraction, progress.left) == (8, 100, 0.08, 23.0)
    assert progress_text(history) == ["step 8/100", "0:23 left"]


def test_a_rank_without_a_loop_does_not_hold_the_progress_back() -> None:
    history = History(2)
    Rank(history, 0).bar(0, "epoch", 5, 2)
    Rank(history, 1).log("loss", [1], [1.0])
    assert summary.progress(history).outer == 3
    logged = History(3)
    Rank(logged, 0).log("loss", [9], [1.0])
    Rank(logged, 2).log("loss", [7], [1.0])
    assert summary.progress(logged).step == 7


def test_a_loop_over_the_rest_of_a_range_counts_from_there_after_a_restart() -> None:
    history = History()
    rank = Rank(history)
    rank.bar(0, "epoch", 6, 3)
    for _ in range(2):  # a second restart, too
        history.restart("killed")
        rank = Rank(history)
        rank.bar(0, "epoch", 3, 0)
        progress = summary.progress(history)
        assert (progress.outer, progress.outers, progress.fraction) == (4, 6, 0.5)
        assert progress_text(history)[0] == "epoch 4/6", "as in the panel"


def test_the_whole_loop_again_after_a_restart_counts_from_zero() -> None:
    history = History()
    Rank(history).bar(0, "epoch", 6, 3)
    history.restart("killed")
    Rank(history).bar(0, "epoch", 6, 1)
    assert summary.progress(history).outer == 2


TQDM = "\r 75%|███████▌  | 75/100 [00:07<00:02, 10.12it/s]\r 76%|███████▌  | 76/100 [00:07<00:02, 10.12it/s]"


def test_tqdms_own_numbers_fill_the_bar_where_there_is_no_progress_loop() -> None:
    run = FakeRun(History(2), printed={0: "epoch 3/5\n" + TQDM, 1: TQDM.replace("76/", "70/")})
    content, _ = Feed(run).frame(status("running", ranks=2)) or ({}, b"")
    head = content["head"]
    assert (head["step"], head["steps"], head["fraction"], head["left"]) == (70, 100, 0.7, 2.0)
    Rank(run.history).bar(0, "step", 10, 1)
    content, _ = Feed(run).frame(status("running", ranks=2)) or ({}, b"")
    assert content["head"]["steps"] == 10


@pytest.mark.parametrize("text", ["", "epoch 3/5\n", "10/11/2026 [INFO]", "1/2 [a<b]"])
def test_other_fractions_in_the_output_are_not_progress(text: str) -> None:
    assert summary.from_output([text]) is None


def test_a_bar_of_unknown_speed_has_no_time_left() -> None:
    assert summary.from_output(["0/0 [00:00<?, ?it/s]"]) == summary.Progress(0, 0)


# ---------------------------------------------------------------------------- the picture's size


def test_a_picture_is_at_most_100_kb_with_all_that_is_around_it() -> None:
    history = History(2)
    for rank in range(2):
        for name in ("train/loss", "val/loss", "acc", "lr", "grad_norm"):
            values = np.random.default_rng(rank).normal(size=20_000)
            Rank(history, rank).log(name, range(20_000), values.tolist())
    bundle = Picture(history, status("finished", ranks=2)).bundle()
    assert len(json.dumps(bundle).encode()) <= 100_000
    (loss, *_) = charts(history, 6000).families
    assert len(loss.lines[0].series.steps) <= 600, "two points per pixel"


def decoded(path: str) -> list[tuple[float, float]]:
    """The corners of a path: a start, then steps."""
    numbers = [float(number) for number in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", path)]
    steps = list(zip(numbers[::2], numbers[1::2]))
    return list(itertools.accumulate(steps, lambda at, by: (at[0] + by[0], at[1] + by[1])))


def test_a_lines_steps_add_up_to_its_points() -> None:
    x, y = np.linspace(44, 358, 600), np.random.default_rng(0).uniform(-500, 500, 600)
    found = decoded(svg.draw_path(x, y))
    assert np.abs(np.array(found) - np.stack([x, y], 1)).max() <= 0.05 + 1e-9
    y[[0, 7, 8, 599]] = math.nan, math.inf, -math.inf, math.nan
    assert np.array(decoded(svg.draw_path(x, y))) == pytest.approx(np.stack([x, y], 1)[np.isfinite(y)], abs=0.051)
    assert svg.draw_path(np.array([1.0, 2.0, 1.5]), np.array([1.0, 3.25, 0.0])) == "M1 1l1 2.2-.5-3.2"
    assert svg.draw_path(x, y * math.nan) == ""


def test_a_marks_label_stays_within_its_chart() -> None:
    history = History()
    Rank(history).log("loss", range(100), [1.0] * 70 + [math.nan] * 30)
    Rank(history).log("acc", range(100), [1.0] * 100)
    assert 'text-anchor="end">NaN from step 70</text>' in Picture(history).svg


def test_the_picture_has_the_panels_card_tiles_and_ranks() -> None:
    history = broken_run()
    Rank(history).bar(0, "epoch", 5, 5)
    html = Picture(history, status("finished", ranks=2)).bundle()["text/html"]
    assert "border:1px solid" in html
    tiles = re.findall("<div [^>]*>([^<]*)</div><b [^>]*>([^<]*)</b>", html)
    for tile in (("Epoch", "5 of 5"), ("Train loss", "NaN"), ("Accuracy", "0.5000")):
        assert tile in tiles
    assert html.count("</span> finished</td><td>199</td>") == 2
