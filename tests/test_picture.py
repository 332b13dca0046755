"""The picture of a run: what it shows, that it's safe and small, and that it draws only what was logged."""

import base64
import dataclasses
import html.parser
import math
import re
import time
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nbddp.panel import svg
from nbddp.panel.charts import RED, charts
from nbddp.panel.html import parts, picture, plot
from nbddp.panel.run_progress import lagging
from nbddp.panel.status import RankStatus, Status
from tests.curves import Recorded, logged

FEW = settings(max_examples=max(1, settings().max_examples // 5))  # 5 ms each; NBDDP_CASES scales them all
GREEN, BLUE = "#22994f", "#3b7df0"
HANG = "rank 0 is waiting in all_reduce\nrank 0 is here:\n  train, line 14"


def status(state: str = "finished", ranks: int = 1, host: str = "", **more: Any) -> Status:
    rows = tuple(RankStatus(rank, "cpu", state, 600 << 20, host=host) for rank in range(ranks))
    given = {"name": "train", "state": state, "seconds": 62.4, "summary": "1 rank · gloo", "ranks": rows}
    return Status(**given | more)


def change(of: Status, rank: int, **more: Any) -> Status:
    ranks = tuple(dataclasses.replace(each, **more) if each.rank == rank else each for each in of.ranks)
    return dataclasses.replace(of, ranks=ranks)


class Page(html.parser.HTMLParser):
    """What a browser would make of a picture: elements and attributes, texts, images."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.images: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(f"@{name}" for name, _ in attrs)}
        if tag == "img":
            self.images.append(base64.b64decode((dict(attrs)["src"] or "").partition(",")[2]).decode())
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(source: str) -> str:
    return " ".join(Page(re.sub("(?=<(?:div|td|b|span|pre|summary))", " ", source)).text.split())


@FEW
@given(st.data())
def test_every_edge_of_the_band_was_logged_and_the_extremes_are_kept(data: st.DataObject) -> None:
    ranks, count, points = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 90), st.integers(2, 50)))
    values = data.draw(arrays(float, (ranks, count), elements=st.floats(-1e6, 1e6) | st.sampled_from([math.nan])))
    history, reduce = Recorded(ranks), data.draw(st.sampled_from([None, "mean", "min", "max"]))
    for rank in range(ranks):
        logged(history=history, rank=rank, reduce=reduce, loss=values[rank])
    history.settle()
    (line,) = charts(history, points=points)[0][0].lines
    known = set(values[np.isfinite(values)])
    assert len(line.x) <= points
    assert {edge for edge in [*line.low, *line.high] if np.isfinite(edge)} <= known
    alike = values[:, np.isfinite(values).all(0)]
    if alike.size:
        assert np.nanmin(line.low) <= alike.min()
        assert np.nanmax(line.high) >= alike.max()
    assert (line.x[0], line.x[-1], line.count) == (0, count - 1, count)


def test_a_bucket_is_the_mean_of_its_numbers_and_none_where_there_is_only_nan() -> None:
    (line,) = charts(logged(loss=[4.0, math.nan] * 40 + [math.nan] * 80), points=20)[0][0].lines
    assert [*line.y[:10]] == [4.0] * 10
    assert np.isnan(line.y[10:]).all()


def test_the_band_is_the_lowest_and_highest_over_the_ranks() -> None:
    history = Recorded(2)
    logged(history=history, rank=0, reduce="mean", loss=[1.0, 2.0, 3.0])
    logged(history=history, rank=1, reduce="mean", loss=[3.0, 1.0])
    (line,) = charts(history)[0][0].lines
    assert (line.x.tolist(), line.low.tolist(), line.high.tolist()) == ([0, 1], [1, 1], [3, 2])
    assert 'fill-opacity=".18"' in svg.draw(charts(history)[0][0], 350)
    assert 'fill-opacity=".18"' not in svg.draw(charts(logged(loss=[1.0, 2.0]))[0][0], 350)


def test_a_restart_replaces_the_curve_and_is_marked_and_a_new_epoch_replaces_it() -> None:
    history = logged(2, loss=[1.0] * 2000)
    history.restart("RankDied")
    assert len(charts(history, points=5000)[0][0].lines[0].x) == 2000, "the old curve stands until there is another"
    logged(history=history, loss=[2.0], first=1500)
    (chart,), _ = charts(history, points=5000)
    assert (chart.lines[0].x.tolist(), chart.lines[0].y[-1]) == ([*range(1501)], 2.0)
    assert [mark[:2] for mark in chart.marks] == [(1500, "restart 1")]
    assert 'text-anchor="end">restart 1</text>' in svg.draw(chart, 350), "on the side with more space"
    history = logged(loss=[5.0, 4.0, 3.0])
    logged(history=history, loss=[2.0, 1.0])
    assert charts(history)[0][0].lines[0].y.tolist() == [2.0, 1.0]


def test_an_earlier_run_is_gray_behind_the_curves_it_has() -> None:
    before = logged(loss=[3.0, 2.0], old=[1.0])
    (loss, acc), _ = charts(logged(loss=[2.0], acc=[0.5]), before)
    assert [(line.ghost, line.label) for line in loss.lines] == [(True, "earlier run"), (False, "")]
    assert len(acc.lines) == 1
    assert "earlier run" in text_of(plot(logged(loss=[2.0]), before=before))


def test_a_stage_has_its_color_in_every_chart_and_eight_lines_are_drawn() -> None:
    shown, _ = charts(logged(**{"val/loss": [1.0], "train/loss": [1.0], "val/acc": [1.0]}))
    assert [[line.color for line in chart.lines] for chart in shown] == [["#e0661f", BLUE], ["#e0661f"]]
    many = logged(**{f"layer{i}/norm": [1.0] for i in range(10)})
    assert len({line.color for line in charts(many)[0][0].lines}) == 8
    assert "and 2 more" in text_of(picture(many, status()))
    families = logged(**{f"metric_{letter}": [1.0] for letter in "abcdefgh"})
    assert text_of(plot(families)).endswith("Not drawn: Metric g, Metric h")
    assert text_of(plot(families, ["metric_h"])) == "Metric h ━ 1"


def test_the_picture_has_tiles_and_ranks_with_their_memory_and_what_waits_for_the_user() -> None:
    history = logged(2, reduce="mean", **{"train/loss": [1.0, 0.5], "acc": [0.25, 0.5]})
    history.add(0, [{"time": 1.0, "bar": [0, "epoch", 5, 5]}])
    page = picture(history, status(ranks=2))
    text = text_of(page)
    assert "Finished train 1 rank · gloo Step 1 Epoch 5 of 5 Train loss 0.5000 Acc" in text
    assert ["Total time 1:02" in text, "Loss ━ 0.5000" in text, "Time left" in text] == [True, True, False]
    assert text.endswith("0 cpu finished 1 100.0 ms 600 MiB 1 cpu finished 1 100.0 ms 600 MiB")
    assert 'alt="Loss: train 0.5000"' in page
    text = text_of(picture(Recorded(2), change(status("running", 2), 1, waits="at line 3")))
    assert text.startswith("Paused at line 3 train")
    assert text.endswith("0 cpu running – – 600 MiB 1 cpu paused at line 3 – – 600 MiB")
    assert "Waiting for input" in text_of(picture(Recorded(), change(status("running"), 0, waits="for input")))
    gauge = text_of(picture(Recorded(), change(status("running"), 0, gpu=(8 << 30, 16 << 30))))
    assert gauge.endswith("cpu running – – 8.0 / 16 GiB")


def test_a_state_has_one_color_in_head_bar_and_table() -> None:
    colors = {"starting": "#8a8a8a", "running": BLUE, "finished": GREEN, "failed": RED, "stopped": "#b07a10"}
    for state, color in colors.items():
        pieces = parts(Recorded(), status(state))
        for name in ("head", "bar", "table"):
            assert set(re.findall("background:(#[0-9a-f]{6})", pieces[name])) == {color}


def test_a_rank_that_is_slow_stuck_or_behind_is_marked() -> None:
    history, now = Recorded(4), time.time()
    for rank in range(4):
        logged(history=history, rank=rank, loss=[1.0] * 10, every_s=0.3 if rank == 1 else 0.1)
    logged(history=history, rank=2, loss=[1.0], first=60)
    for rank, seconds in enumerate((6.5, 3.8, 0.5, 6.5)):
        history.ranks[rank].arrived_at = now - seconds
    notes = lagging(history, status("running", 4), now)
    assert notes == {0: "silent for 6 s", 1: "51 steps behind", 3: "silent for 6 s"}
    logged(history=history, rank=2, loss=[1.0])
    history.ranks[2].step = 9
    assert lagging(history, status("running", 4), now)[1] == "slow"
    assert not lagging(history, status(ranks=4), now)
    logged(history=(two := logged(2, loss=[1.0] * 3, every_s=6.0)), loss=[1.0], first=3, every_s=6.0)
    assert lagging(two, status("running", 2))[1] == "1 step behind"


def test_of_16_ranks_one_sees_that_there_are_more_and_those_in_trouble() -> None:
    history = logged(16, loss=[1.0])
    history.ranks[13].arrived_at -= 60
    shown, rest = picture(history, status("running", 16)).split("<details")
    assert "silent for 60 s" in shown
    assert shown.count("<tr>") == 1 + 8
    assert "and 8 more</summary>" in rest
    many = text_of(picture(Recorded(500), change(status("stopped", 500), 300, state="failed", host="gpu3")))
    assert "300 gpu3 · cpu failed" in many
    assert many.endswith("and 476 more")


def test_the_picture_reports_metrics_that_ranks_log_differently() -> None:
    history = Recorded(2)
    logged(history=history, rank=0, reduce="sum", total=[1.0] * 3)
    logged(history=history, rank=1, reduce="sum", total=[1.0])
    logged(history=history, rank=1, reduce="sum", total=[1.0], first=2)
    history.settle()
    told = "total: 1 of 3 steps was logged by only 1 of 2 ranks (the first is step 1); the sums leave out this one"
    assert told in text_of(picture(history, status(ranks=2)))


def test_a_failure_shows_the_error_the_stacks_and_the_failed_ranks_last_output() -> None:
    printed = "old\n" * 20 + "".join(f"line {i}\n" for i in range(10)) + "end\n"
    failed = status("failed", 2, host="gpu1", failed_rank=1, error="rank 1 of 2 raised", hang=HANG)
    page = picture(Recorded(2), failed, tail=lambda rank, chars: printed if rank == 1 else "")
    text = text_of(page)
    assert "● rank 1 of 2 raised ▲ rank 0 is waiting in all_reduce Stacks rank 0 is here: train, line 14" in text
    assert text.endswith(f"Last output of rank 1 on gpu1 old {' '.join(f'line {i}' for i in range(10))} end")
    assert page.count(" open>") == 2
    assert " open>" not in picture(Recorded(), status("running", hang=HANG))
    long = picture(Recorded(), status("stopped", hang=HANG + "\n<&x" * 1_000_000))
    assert "more characters" in long
    assert len(long) < 40_000


@pytest.mark.parametrize(
    "nasty",
    [
        "\"'<img src=x onerror=alert(1)>&</table><script>alert(2)</script>",
        "]]></svg><script>",
        "\x1b]8;;x\x07\x00\u202e\n\ud800",
    ],
)
def test_a_users_text_cannot_break_out_of_the_picture(nasty: str) -> None:
    texts = dict.fromkeys(("name", "summary", "error", "remark"), nasty)
    failed = status("failed", 2, nasty, failed_rank=0, hang=f"{nasty}\n{nasty}", restarts=1, **texts)
    run = change(failed, 1, state="running", waits=nasty)
    history = logged(2, **{nasty: range(50), f"val/{nasty}": range(50), **{f"{nasty}{i}": [1.0] for i in range(14)}})
    history.restart(nasty)
    logged(history=history, first=25, **{nasty: [math.nan]})
    history.add(0, [{"time": 1.0, "bar": [0, nasty, 1, 2, {nasty: nasty}]}])
    page = Page(picture(history, run, history, tail=lambda rank, chars: f"\x1b[31m{nasty}\x1b[0m\n"))
    tags = {"div", "span", "b", "img", "table", "tr", "th", "td", "details", "summary", "pre"}
    assert page.names <= tags | {"@class", "@style", "@src", "@alt", "@open"}
    assert not page.open
    elements = [element for image in page.images for element in ElementTree.fromstring(image).iter()]
    assert {element.tag.partition("}")[2] for element in elements} <= {"svg", "text", "path"}
    assert not [name for element in elements for name in element.attrib if name.startswith("on") or "href" in name]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page.text)


def test_the_picture_stays_small_whatever_was_logged() -> None:
    rng = np.random.default_rng(0)
    many = [f"m{i}/value{i % 7}" for i in range(80)]
    for names, steps in ((["train/loss", "val/loss", "acc", "lr", "grad_norm"], 280), (many, 232)):  # all are drawn
        history = logged(2, reduce="mean", **{name: rng.normal(size=steps) for name in names})
        history.ranks.extend(history.ranks * 149)
        for _ in range(30):
            history.restart("killed " * 1_000)
            logged(history=history, first=steps - 1, **{names[0]: [1.0]})
        texts = dict.fromkeys(("error", "remark"), "long " * 1_000)
        run = status("failed", 300, "host" * 100, failed_rank=0, hang=HANG * 10_000, restarts=1, **texts)
        assert len(picture(history, run, history, tail=lambda rank, chars: "output " * 10_000).encode()) <= 100_000


ODD_VALUES = [
    [2.0], [2.0] * 100, [math.nan] * 50, [math.nan, math.inf, 1.0], [1e-30, 1e30], [1e308, -1e308] * 300,
    [1.7e308, -math.inf] * 40, [0.0, 5e-324], [5e-324, 5e-324], [1.0, 1.0 + 2**-52], [1e16, 1e16 + 2],
]  # fmt: skip


def test_the_picture_of_odd_values_and_steps_is_valid_svg() -> None:
    odd = [logged(loss=values) for values in ODD_VALUES]
    for steps in ([2**53 - 1, 2**53], [-(2**53), 2**53], [0, 0]):
        odd.append(logged(first=steps[0], loss=[1.0]))
        logged(history=odd[-1], first=steps[1], loss=[2.0])
    for history in odd:
        for log in (False, True):
            drawn = svg.draw(charts(history)[0][0], 350, log=log)
            ElementTree.fromstring(drawn)
            assert not re.search(r"[^A-Za-z](nan|inf)[^a-z]", drawn)


def test_a_lines_relative_steps_add_up_to_its_points_and_leave_out_what_is_not_finite() -> None:
    x, y = np.linspace(44, 358, 600), np.random.default_rng(0).uniform(-500, 500, 600)
    y[[0, 7, 599]] = math.nan, math.inf, -math.inf
    moves = np.array([float(number) for number in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", svg._path(x, y))]).reshape(-1, 2)
    assert moves.cumsum(0) == pytest.approx(np.stack([x, y], 1)[np.isfinite(y)], abs=0.051)
    assert svg._path(x, y * math.nan) == ""
