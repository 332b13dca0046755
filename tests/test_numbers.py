"""What every view says in numbers: formats, ticks, names, smoothing, NaN, progress."""

import math
from typing import Any

import numpy as np
import pytest

from nbddp.history.history import History
from nbddp.panel import numbers, svg
from nbddp.panel.charts import charts, described, tile_label
from nbddp.panel.run_progress import notices, progress
from nbddp.text import cut
from tests.curves import Recorded, logged


def bar(history: Recorded, rank: int, level: int, desc: str, total: int, done: int, at: float = 1.0) -> None:
    history.add(rank, [{"time": at, "bar": [level, desc, done, total]}])


def drawn(history: History, **options: Any) -> str:
    shown, _ = charts(history)
    return "".join(svg.draw(chart, 350, **options) for chart in shown)


def test_a_metrics_value_is_written_with_about_five_digits() -> None:
    values = 0, -0.0, 12430.6, 0.246, 12.3456, 123.456, -0.5, 0.001, -0.00025, 3e12, math.nan, math.inf, -math.inf
    texts = "0 0 12,431 0.2460 12.35 123.5 -0.5000 0.0010 -2.50e-4 3.00e12 NaN ∞ −∞"
    assert " ".join(map(numbers.metric, values)) == texts


def test_ticks_have_as_many_digits_as_their_distance_needs_and_those_of_steps_are_whole_numbers() -> None:
    texts = {
        (0, 0.0008): "0 2e-4 4e-4 6e-4 8e-4",
        (0, 0.9): "0.0 0.2 0.4 0.6 0.8",
        (0, 11): "0.0 2.5 5.0 7.5 10.0",
        (1, 1.0001): "1.00000 1.00002 1.00004 1.00006 1.00008 1.00010",
        (0, 1700): "0 500 1000 1500",
        (0, 12_000): "0 2.5k 5k 7.5k 10k",
        (1e6, 2.2e6): "1M 1.25M 1.5M 1.75M 2M",
        (1e8, 5e8): "1e8 2e8 3e8 4e8 5e8",
        (-1e-5, 1e-5): "-1e-5 -5e-6 0 5e-6 1e-5",
    }
    assert {ends: " ".join(numbers.labels(numbers.ticks(*ends))) for ends in texts} == texts
    assert [numbers.ticks(0, end, whole=True) for end in (3, 12)] == [[0, 1, 2, 3], [0, 3, 6, 9, 12]]


def test_logarithmic_ticks_are_round_numbers_each_as_short_as_possible() -> None:
    places = {(0.2, 30): [1, 10], (2, 31): [2, 5, 10, 20], (1e-6, 1e6): [1e-6, 0.001, 1, 1000, 1e6]}
    assert {ends: numbers.log_ticks(*(math.log10(end) for end in ends)) for ends in places} == places
    short = {1e-5: "1e-5", 0.001: "0.001", 0.1: "0.1", 10: "10", 1000: "1000", 20_000: "20k", 1e9: "1e9"}
    assert {value: numbers.labels([value])[0] for value in short} == short


def test_a_log_scale_of_constants_mixed_signs_and_many_decades_has_ticks_and_a_chart_without_values_says_so() -> None:
    for values, label in (([5.0, 5.0], "5"), ([-1.0, 0.0, 10.0, 1000.0], "10"), ([1e-6, 1e6], "1e-6")):
        assert drawn(logged(loss=values), log=True).count(f">{label}</text>") == 1
    assert "no positive values" in drawn(logged(loss=[-1.0, 0.0]), log=True)
    assert ">all values are NaN or infinite</text>" in drawn(logged(loss=[math.nan] * 5))


def test_the_throughput_is_that_of_all_ranks_together() -> None:
    history = logged(2, loss=[1.0])
    for rank, samples in ((0, 10), (1, 30)):
        for second in range(5):
            history.add(rank, [{"time": 100.0 + second, "samples": samples * second}])
    assert progress(history).throughput == pytest.approx(40.0)


def test_a_stage_or_a_parameter_group_first_or_last_gives_one_chart() -> None:
    cases = {
        "Loss/train": ("Loss", "train", "Train Loss"),
        "val loss": ("Loss", "val", "Val loss"),
        "train_acc": ("Accuracy", "train", "Train accuracy"),
        "acc-Val": ("Accuracy", "Val", "Val accuracy"),
        "loss.test": ("Loss", "test", "Test loss"),
        "gan/loss_val": ("Loss", "gan val", "Gan val loss"),
        "gan/train_loss": ("Loss", "gan train", "Gan train loss"),
        "val/gan/loss": ("Loss", "val gan", "Val gan loss"),
        "BLEU": ("BLEU", "", "BLEU"),
        "train": ("Train", "", "Train"),
        "trainable": ("Trainable", "", "Trainable"),
        "lr": ("Learning rate", "", "Learning rate"),
        "lr/0": ("Learning rate", "group 0", "Learning rate group 0"),
        "group1/lr": ("Learning rate", "group1", "Learning rate group1"),
        "lr-AdamW/pg2": ("Learning rate", "AdamW/pg2", "Learning rate AdamW/pg2"),
        "lrp_loss": ("Lrp loss", "", "Lrp loss"),
    }
    assert {name: (*described(name), tile_label(name)) for name in cases} == cases
    shown, _ = charts(logged(**{"Loss/train": [1.0], "val/loss": [2.0]}))
    assert [[line.label for line in chart.lines] for chart in shown] == [["train", "val"]]
    assert cut("encoder.layers.11.attention.weight") == "encoder.lay…ntion.weight"


def smooth(values: Any, points: int = 100_000) -> Any:
    (chart,), _ = charts(logged(loss=values), points=points)
    return chart.lines[0].smooth


def test_a_mean_reaches_over_two_percent_of_the_points() -> None:
    values = np.random.default_rng(0).normal(size=10_000)
    mean = smooth(values)[[0, 5_000, 9_999]]
    assert mean == pytest.approx([values[:101].mean(), values[4_900:5_101].mean(), values[-101:].mean()])
    drawn = smooth(values**2, points=360)  # the extremes alone would have another mean
    assert drawn.mean() == pytest.approx((values**2).mean(), abs=0.02)


def test_few_points_and_smooth_data_are_not_smoothed() -> None:
    noise = np.random.default_rng(0).normal(size=200)
    assert smooth(noise[:99]) is None
    assert smooth(noise) is not None
    assert smooth(np.cos(np.arange(10_000) / 1000)) is None, "a schedule"
    assert smooth(np.repeat(noise, 50)) is None, "a value per epoch"


def test_a_mean_passes_over_nan_and_forgets_a_spike() -> None:
    values = np.random.default_rng(0).normal(size=1_000)
    values[[10, 500]] = 1e200, math.nan
    mean = smooth(values)
    assert math.isnan(mean[500]), "the line does not go on where the metric is NaN"
    assert mean[[501, 800]] == pytest.approx([np.nanmean(values[491:512]), values[790:811].mean()])


def test_nan_is_marked_in_the_chart_of_its_metric_only_and_a_notice_names_the_ranks() -> None:
    history = logged(2, acc=[0.5] * 200)
    for rank in range(2):
        values = [1.0 + step % 2 if step < 60 or rank == 0 else math.nan for step in range(200)]
        logged(history=history, rank=rank, reduce="mean", **{"train/loss": values})
    marks = {chart.title: [text for _, text, _ in chart.marks] for chart in charts(history)[0]}
    assert marks == {"Loss": ["NaN since step 60"], "Accuracy": []}
    assert notices(history) == ["train/loss has been NaN since step 60 on rank 1"]
    assert notices(logged(4, loss=[1.0, math.inf, math.nan])) == ["loss has been ∞ since step 1 on ranks 0 to 3"]
    many = notices(logged(**{f"m{i}": [math.nan] for i in range(9)}))
    assert many[2:] == ["m2 has been NaN since step 0 on rank 0", "and 6 more with NaN or infinite values"]


def test_a_single_nan_among_numbers_is_not_the_end_of_the_line() -> None:
    history = logged(loss=[1.0, math.nan, 2.0])
    assert not notices(history)
    logged(history=history, loss=[math.nan], first=3)
    logged(history=history, loss=[math.nan], first=4)
    assert notices(history) == ["loss has been NaN since step 3 on rank 0"]
    logged(history=history, loss=[1.0], first=5)
    assert not charts(history)[0][0].marks
    logged(history=history, loss=[math.nan], first=6)
    history.restart("killed")
    assert not notices(history), "the ranks start again"


def test_progress_counts_steps_over_all_epochs() -> None:
    history = Recorded()
    for done in (0, 30):
        bar(history, 0, 0, "epoch", 5, 2)
        bar(history, 0, 1, "step", 100, done, at=1.0 + done / 10)
    now = progress(history)
    assert (now.step, now.loops) == (None, [("Epoch", 3, 5), ("Step", 230, 500)])
    assert (now.fraction, now.left) == (pytest.approx(0.46), pytest.approx(27.0))
    bar(history, 0, 1, "step", 100, 100, at=11.0)
    bar(history, 0, 0, "epoch", 5, 3, at=11.0)
    assert progress(history).loops == [("Epoch", 4, 5), ("Step", 300, 500)], "an inner loop's end counts once"


def test_step_is_what_log_counts() -> None:
    history = logged(loss=[1.0] * 31)
    bar(history, 0, 0, "step", 100, 30)
    assert (progress(history).step, progress(history).steps, progress(history).loops) == (30, 100, [])
    history = logged(loss=[1.0] * 4)  # once in ten items
    bar(history, 0, 0, "step", 100, 40)
    assert (progress(history).step, progress(history).steps, progress(history).loops) == (3, None, [])
    assert progress(history).fraction == 0.4


def test_progress_and_time_left_are_the_slowest_ranks_of_those_with_a_loop() -> None:
    history = Recorded(3)
    for rank, speed in ((0, 10), (1, 4), (2, 10)):
        for at in (1, 2):
            bar(history, rank, 0, "step", 100, speed * at, at=float(at))
    now = progress(history)
    assert (now.loops, now.fraction, now.left) == ([("Step", 8, 100)], 0.08, 23.0)
    history = Recorded(2)
    bar(history, 0, 0, "epoch", 5, 2)
    logged(history=history, rank=1, loss=[1.0, 1.0])
    assert progress(history).loops == [("Epoch", 3, 5)]
    silent = logged(history=Recorded(3), rank=2, loss=[1.0] * 8)
    assert progress(logged(history=silent, rank=0, loss=[1.0] * 10)).step == 7


def test_after_a_restart_a_loop_over_the_rest_counts_from_there_and_the_whole_loop_from_zero() -> None:
    history = Recorded()
    bar(history, 0, 0, "epoch", 6, 3)
    for _ in range(2):  # a second restart, too
        history.restart("killed")
        bar(history, 0, 0, "epoch", 3, 0)
        assert (progress(history).loops, progress(history).fraction) == ([("Epoch", 4, 6)], 0.5)
    history.restart("killed")
    bar(history, 0, 0, "epoch", 6, 1)
    assert progress(history).loops == [("Epoch", 2, 6)], "the whole loop again"
