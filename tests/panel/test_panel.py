"""The panel without a browser: the frames it sends, the picture saved in the notebook, and the text for a terminal."""

from __future__ import annotations

import base64
import dataclasses
import html.parser
import io
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeRun, Rank, status

from nbddp import wire
from nbddp.history.history import History, Series, Spread
from nbddp.launch.output import RankOutput, open_output
from nbddp.panel import frontend, ranks, summary, thinning
from nbddp.panel.curves import charts, ticks
from nbddp.panel.feed import Feed
from nbddp.panel.picture import Picture
from nbddp.panel.text import OutputWriter, TextView
from nbddp.panel.view import Status
from nbddp.text import fold

JS = Path(summary.__file__).parent / "js"
NASTY = "<img src=x onerror=alert(1)>&\"'</table><script>alert(2)</script>"


def points(message: tuple[dict[str, Any], bytes]) -> dict[str, tuple[list[float], list[float]]]:
    """The lines of a message, as the script takes them apart."""
    content, data = message
    values = np.frombuffer(data, "<f8")
    found, at = {}, 0
    names = {d["index"]: d["name"] for d in content["defs"]}
    for entry in content["series"]:
        n, band = entry["points"], entry["spread"]
        found[names.get(entry["index"], str(entry["index"]))] = (
            values[at : at + n].tolist(),
            values[at + n : at + 2 * n].tolist(),
        )
        at += 2 * n + 3 * band
    assert at == len(values)
    return found


# ---------------------------------------------------------------------------- messages


def test_frames_carry_each_point_once_and_a_snapshot_all_of_them() -> None:
    run = FakeRun()
    rank, feed = Rank(run.history), Feed(run)
    rank.log("loss", [0, 1], [5.0, 4.0])
    first = feed.frame(run.now)
    rank.log("loss", [2], [3.0])
    second = feed.frame(run.now)
    assert first is not None
    assert second is not None
    assert points(first) == {"loss": ([0, 1], [5, 4])}
    assert points(second) == {"0": ([2], [3])}
    assert points(feed.snapshot()) == {"loss": ([0, 1, 2], [5, 4, 3])}
    assert feed.snapshot()[0]["seq"] == second[0]["seq"] == first[0]["seq"] + 1


def test_a_snapshot_and_the_next_frame_share_no_point() -> None:
    run = FakeRun()
    rank, feed = Rank(run.history), Feed(run)
    rank.log("loss", [0], [5.0])
    feed.frame(run.now)
    rank.log("loss", [1], [4.0])
    assert points(feed.snapshot()) == {"loss": ([0], [5])}
    frame = feed.frame(run.now)
    assert frame is not None
    assert points(frame) == {"0": ([1], [4])}


def test_no_frame_is_sent_when_nothing_changed() -> None:
    clock = [0.0]
    run = FakeRun()
    feed = Feed(run, clock=lambda: clock[0])
    assert feed.frame(run.now) is not None
    assert feed.frame(dataclasses.replace(run.now, seconds=38.3)) is None
    clock[0] = 1.5
    assert feed.frame(dataclasses.replace(run.now, seconds=39.8)) is not None, "the page's clock is set now and then"


def test_a_lower_rank_that_logs_later_replaces_the_line() -> None:
    run = FakeRun(History(2))
    feed = Feed(run)
    Rank(run.history, 1).log("loss", [0, 1], [9.0, 9.0])
    feed.frame(run.now)
    Rank(run.history, 0).log("loss", [0], [5.0])
    frame = feed.frame(run.now)
    assert frame is not None
    assert frame[0]["series"][0]["fresh"] is True
    assert points(frame) == {"0": ([0], [5])}


def test_the_band_is_the_lowest_and_highest_over_the_ranks() -> None:
    history = History(3)
    for rank, offset in enumerate((0.0, 2.0, -1.0)):
        Rank(history, rank).log("loss", [0, 1, 2][: 3 - (rank == 2)], [1 + offset, 2 + offset, 3 + offset])
    spread = history.spread("loss")
    assert spread.steps.tolist() == [0, 1], "rank 2 has not come to step 2"
    assert spread.low.tolist() == [0, 1]
    assert spread.high.tolist() == [3, 4]
    alone = History(2)
    Rank(alone).log("loss", [0], [1.0])
    assert not len(alone.spread("loss").steps)


def test_nan_and_infinity_are_sent_as_bytes() -> None:
    run = FakeRun()
    Rank(run.history).log("loss", [0, 1, 2], [math.nan, math.inf, 1.0])
    frame = Feed(run).frame(run.now)
    assert frame is not None
    json.dumps(frame[0], allow_nan=False)
    values = points(frame)["loss"][1]
    assert math.isnan(values[0])
    assert values[1] == math.inf


def test_frames_of_many_points_and_much_output_stay_small() -> None:
    run = FakeRun(History(8), now=status("running", ranks=8))
    for name in "abcde":
        Rank(run.history).log(f"{name}/loss", range(100_000), np.random.rand(100_000).tolist())
    run.printed = dict.fromkeys(range(8), "x" * 1000000)
    feed = Feed(run)
    frame = feed.frame(run.now)
    assert frame is not None
    assert len(frame[1]) < 40_000
    assert sum(len(text) for _, text, _ in frame[0]["logs"]) <= 16 << 10
    assert len(feed.snapshot()[1]) < 24_000 * 16 * 1.1


def test_frames_and_snapshots_from_two_threads_agree() -> None:
    run = FakeRun()
    rank, feed = Rank(run.history), Feed(run)
    wrong: list[object] = []

    def look() -> None:
        for _ in range(200):
            content, data = feed.snapshot()
            if sum(2 * e["points"] + 3 * e["spread"] for e in content["series"]) * 8 != len(data):
                wrong.append(content)

    thread = threading.Thread(target=look)
    thread.start()
    told = 0
    for step in range(400):
        rank.log("loss", [step], [float(step)])
        frame = feed.frame(run.now)
        assert frame is not None
        told += frame[0]["series"][0]["points"]
    thread.join()
    assert told == 400
    assert not wrong


# ---------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("name", "family", "label", "tile"),
    [
        ("loss", "loss", "loss", "Loss"),
        ("train/loss", "loss", "train", "Train loss"),
        ("val_acc", "acc", "val", "Val acc"),
        ("gan/g/loss", "loss", "gan/g", "Gan g loss"),
        ("lr", "lr", "lr", "Learning rate"),
        ("learning_rate", "learning_rate", "learning_rate", "Learning rate"),
    ],
)
def test_a_metrics_name_gives_its_family_label_and_tile(name: str, family: str, label: str, tile: str) -> None:
    metric = summary.describe(name)
    assert (metric.family, metric.label, metric.tile) == (family, label, tile)


def test_progress_counts_steps_over_all_epochs() -> None:
    history = History()
    rank = Rank(history)
    for done in (0, 30):
        rank.bar(0, "epoch", 5, 2)
        rank.bar(1, "step", 100, done, at=1.0 + done / 10)
    progress = summary.progress(history)
    assert (progress.step, progress.steps, progress.outer, progress.outers) == (230, 500, 3, 5)
    assert progress.fraction == pytest.approx(0.46)
    assert progress.left == pytest.approx(27.0)


def test_a_rank_that_is_slow_stuck_or_behind_is_marked() -> None:
    history = History(4)
    for rank in range(4):
        slow = 3 if rank == 1 else 1
        for step in range(10):
            Rank(history, rank).log("loss", [step], [1.0], at=100 + step * 0.1 * slow)
    Rank(history, 2).log("loss", [60], [1.0], at=106.0)
    rows = ranks.rows(status("running", ranks=4), history, now=106.5)
    assert rows[0].note == "silent for 6 s"
    assert rows[2].note == ""
    assert rows[3].note == "silent for 6 s"
    assert "behind" in rows[1].note
    assert not any(row.note for row in ranks.rows(status("finished", ranks=4), history, now=200.0))


def test_steps_that_restart_every_epoch_show_the_newest_values() -> None:
    series = Series(np.array([0, 1, 2, 3, 1, 2, 5]), np.arange(7.0))
    steps, values = thinning.forward(series)
    assert steps.tolist() == [0, 1, 2, 5]
    assert values.tolist() == [0, 4, 5, 6]
    history = History(2)
    for rank in range(2):
        Rank(history, rank).log("loss", [*range(100), *range(60)], np.random.rand(160).tolist())
    assert len(history.spread("loss").steps) == 160
    (family,) = charts(history, 6000).families
    assert family.lines[0].spread.steps.tolist() == family.lines[0].series.steps.tolist() == list(range(60))


@pytest.mark.parametrize("points", [3, 15, 150])
def test_a_thinned_band_contains_all_values_and_has_no_width_where_all_ranks_agree(points: int) -> None:
    steps, noise = np.arange(1000), np.random.default_rng(points).random((2, 1000))
    curve = 1000 * np.exp(-steps / 100)
    full = Spread(steps, curve - noise[0], curve + noise[1])
    full.high[500] = np.nan
    band = thinning.thin_spread(full, points)
    assert len(band.steps) <= points + 2
    assert (band.steps[0], band.steps[-1]) == (0, 999)
    shown = np.isfinite(full.high)
    assert np.all(np.interp(steps, band.steps, band.low) <= full.low + 1e-9)
    assert np.all((np.interp(steps, band.steps, band.high) >= full.high - 1e-9)[shown])
    same = thinning.thin_spread(Spread(steps, steps * 7.0, steps * 7.0), points)
    assert same.low == pytest.approx(same.high), "steep, and yet no rank differs"
    assert thinning.thin_spread(full, 1000) is full


def test_the_step_shown_is_not_behind_the_table_of_ranks() -> None:
    history = History()
    rank = Rank(history)
    for done in (0, 880):
        rank.bar(0, "step", 1500, done, at=1.0 + done / 20)
    rank.log("loss", [885], [1.0], at=45.2)
    assert summary.progress(history).step == 885
    rank.log("loss", [1_400], [1.0], at=45.3)
    assert summary.progress(history).step == 880, "these steps count something else"


# ---------------------------------------------------------------------------- several hosts


def on_hosts(state: str, *hosts: str, each: int = 2, **more: Any) -> Status:
    return status(state, ranks=each * len(hosts), hosts=[host for host in hosts for _ in range(each)], **more)


def with_state(now: Status, rank: int, state: str) -> Status:
    rows = [dataclasses.replace(row, state=state) if row.rank == rank else row for row in now.ranks]
    return dataclasses.replace(now, ranks=tuple(rows))


def test_each_host_shows_the_worst_state_of_its_ranks() -> None:
    history = History(4)
    for rank in range(4):
        Rank(history, rank).log("loss", range(10 + rank), [1.0] * (10 + rank), at=100.0)
    now = with_state(on_hosts("running", "gpu1", "gpu2"), 2, "failed")
    rows = ranks.rows(now, history, now=112.0)
    first, second = ranks.hosts(rows)
    assert first == ranks.Host("gpu1", [0, 1], "running", 9, "rank 0 silent for 12 s, and 1 more")
    assert second == ranks.Host("gpu2", [2, 3], "failed", 11, "rank 3 silent for 12 s")
    assert ranks.hosts(ranks.rows(status("running", ranks=4), history, now=112.0)) == []
    for worse, better in itertools.pairwise(("failed", "stopped", "starting", "running", "finished")):
        (host,) = ranks.hosts(ranks.rows(with_state(on_hosts(better, "gpu1"), 1, worse), History(2), now=0.0))
        assert host.state == worse


def test_ranks_of_a_lost_host_are_listed_separately() -> None:
    now = with_state(on_hosts("running", "gpu1", ""), 3, "stopped")
    assert [(h.name, h.ranks) for h in ranks.hosts(ranks.rows(now, History(4), now=0.0))] == [
        ("gpu1", [0, 1]),
        ("lost", [2, 3]),
    ]


def test_hosts_are_sent_to_the_page_only_if_there_are_several() -> None:
    run = FakeRun(History(4), on_hosts("running", "gpu1", "gpu2"))
    head = Feed(run).snapshot()[0]["head"]
    assert [row["host"] for row in head["rows"]] == ["gpu1", "gpu1", "gpu2", "gpu2"]
    assert head["hosts"][1] == {"name": "gpu2", "ranks": [2, 3], "state": "running", "step": None, "note": ""}
    assert Feed(FakeRun()).snapshot()[0]["head"]["hosts"] == []


def test_the_picture_and_the_last_line_name_the_host_that_failed() -> None:
    now = with_state(on_hosts("stopped", "gpu1", "gpu2", failed_rank=3), 3, "failed")
    run = FakeRun(History(4), now, printed={3: "its last words\n"})
    Rank(run.history, 3).log("loss", [0, 7], [1.0, 2.0])
    bundle = Picture(run.history, run.now, run).bundle()
    parsed = Parsed(bundle["text/html"])
    assert "HostRanksStateStepgpu10 to 1● stopped–gpu22 to 3● failed7" in parsed.text
    assert "Last output of rank 3 on gpu2" in parsed.text
    assert bundle["text/plain"].startswith("train: stopped (rank 3 on gpu2) after 0:38 · ")
    alone = Picture(History(2), status("failed", ranks=2, failed_rank=1), run).bundle()
    assert "<th>Host</th>" not in alone["text/html"]
    assert "(rank" not in alone["text/plain"]


def test_a_hundred_hosts_fit_into_the_picture() -> None:
    now = on_hosts("finished", *(f"gpu{i}" for i in range(100)), each=8)
    html = Picture(History(800), now, FakeRun(History(800), now)).bundle()["text/html"]
    assert html.count("<tr>") == 1 + 40 + 1
    assert "and 60 more" in html
    now = with_state(
        on_hosts("stopped", *(f"gpu{i}" for i in range(100)), each=8, failed_rank=8 * 57), 8 * 57, "failed"
    )
    html = Picture(History(800), now, FakeRun(History(800), now)).bundle()["text/html"]
    assert html.index("gpu57<") < html.index("gpu0<")


# ---------------------------------------------------------------------------- restarts, and a run that stands still

REASON = "RankDied: rank 2 of 4 was killed by SIGKILL"


def restarted(history: History, count: int = 1) -> None:
    """Twenty steps, a restart that repeats the last ten of them, and five more."""
    for rank in range(len(history.ranks)):
        Rank(history, rank).log("loss", range(20), [1.0] * 20)
    for _ in range(count):
        history.restart(REASON)
    for rank in range(len(history.ranks)):
        Rank(history, rank).log("loss", range(10, 25), [2.0] * 15)


def test_a_restart_replaces_the_curve_in_the_page() -> None:
    run = FakeRun(History(2))
    feed = Feed(run)
    ranks = [Rank(run.history, rank) for rank in range(2)]
    for rank in ranks:
        rank.log("loss", range(2000), np.random.rand(2000).tolist())
    feed.frame(run.now)
    run.history.restart(REASON)
    told = feed.frame(run.now)
    assert told is not None
    assert not told[0]["series"], "the old curve stands until there is another"
    ranks = [Rank(run.history, rank) for rank in range(2)]
    for rank in ranks:
        rank.log("loss", [1500], [2.0])
    assert len(points(feed.snapshot())["loss"][0]) <= 2000, "before the frame that tells it"
    frame = feed.frame(run.now)
    assert frame is not None
    (entry,) = frame[0]["series"]
    steps, values = points(frame)["0"]
    assert entry["fresh"] is True
    assert (steps, values[-1]) == (list(range(1501)), 2.0), "whole, and as fine as a snapshot"
    assert entry["spread"] == 1501
    assert frame[0]["head"]["marks"] == [
        {"step": 1500, "label": "restart 1", "text": f"restart 1: {REASON}", "family": ""}
    ]
    assert points(feed.snapshot())["loss"] == (steps, values)
    ranks[0].log("loss", [1501], [3.0])
    frame = feed.frame(run.now)
    assert frame is not None
    assert (frame[0]["series"][0]["fresh"], points(frame)["0"]) == (False, ([1501], [3.0]))


@pytest.mark.usefixtures("_fonts")
def test_a_restart_is_marked_in_every_picture() -> None:
    history = History(2)
    restarted(history)
    ended = status("finished", restarts=1, max_restarts=3, restart_reason=REASON)
    picture = Picture(history, ended)
    assert f"<title>restart 1: {REASON}</title>" in picture.svg
    assert ">restart 1</text>" in picture.svg
    html = picture.bundle()["text/html"]
    assert "· 1 restart</p>" in html
    assert f"restarted 1 of 3 after {REASON}" in html
    assert "· 1 restart ·" in repr(picture)
    (axes,) = picture.figure().axes
    assert [list(line.get_xdata()) for line in axes.lines][-1] == [10, 10]
    assert [text.get_text() for text in axes.texts] == ["restart 1"]
    history = History(2)
    restarted(history, count=2)
    assert ">restarts 1 to 2</text>" in Picture(history).svg
    history.restart("not resumed yet")
    assert Picture(history).svg.count("stroke-dasharray") == 1


@pytest.mark.parametrize("blocking", [False, True])
def test_text_lines_report_a_restart_and_the_number_of_restarts_at_the_end(blocking: bool) -> None:
    stream, history = io.StringIO(), History()
    view = TextView(FakeRun(history), stream, clock=iter(range(0, 1000, 10)).__next__)
    now = status("running")
    view.update(status("starting"))
    view.update(now)
    now = dataclasses.replace(now, restarts=1, max_restarts=3, restart_reason=REASON, blocking=blocking)
    for state in ("starting", "running", "running", "finished"):
        view.update(dataclasses.replace(now, state=state))
    # Of a blocking run, rank 0's output is shown, and has the line already.
    restarted = "" if blocking else f"train: restarted 1 of 3 after {REASON}\n"
    assert stream.getvalue() == (
        f"train: 1 process · gloo\n{restarted}train: finished after 0:38 · 1 process · gloo · 1 restart\n"
    )


def test_every_view_reports_metrics_that_ranks_log_differently() -> None:
    run, stream = FakeRun(History(2)), io.StringIO()
    for rank, steps in enumerate(([0, 1, 2], [0, 2])):
        Rank(run.history, rank).log("total", steps, [1.0] * len(steps), op=wire.REDUCE_SUM)
    run.history.settle()
    run.now = status("finished", ranks=2)
    told = "total: 1 of 3 steps were logged by only 1 of 2 ranks (the first is step 1); the sums leave out these steps"
    frame = Feed(run).frame(run.now)
    assert frame is not None
    assert frame[0]["head"]["remark"] == told
    assert told in Picture(run.history, run.now).bundle()["text/html"]
    TextView(run, stream).update(run.now)
    assert stream.getvalue().startswith(f"train: {told}\ntrain: finished after")


def test_every_view_says_what_a_start_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run, stream, waits_for = FakeRun(), io.StringIO(), "importing torch, 1.1 s"
    monkeypatch.setattr(frontend, "shell", lambda: "a kernel's")
    monkeypatch.setattr(frontend, "is_executed", lambda: False)
    view, summary = TextView(run, stream), f"1 process · gloo · {waits_for}"
    for seconds in (0.1, 1.2, 1.4):
        run.now = status("starting", seconds=seconds, summary=summary, waits_for=waits_for)
        view.update(run.now)
    assert stream.getvalue() == f"train: 1 process · gloo\ntrain: {waits_for}\n"
    assert waits_for in Picture(run.history, run.now).bundle()["text/html"]
    for notice, shown in (("", summary), ("no GPU", f"no GPU · {waits_for}")):
        frame = Feed(run).frame(dataclasses.replace(run.now, notice=notice))
        assert frame is not None
        assert frame[0]["head"]["summary"] == shown


def test_lines_in_a_file_leave_out_what_a_start_waits_for() -> None:
    stream = io.StringIO()
    TextView(FakeRun(), stream).update(status("starting", seconds=2.0, waits_for="importing torch, 1.1 s"))
    assert "importing" not in stream.getvalue()


HANG = "rank 1 finished the loop at step 120; rank 0 waits in all_reduce\n\n"
HANG += "rank 0 is here:\n  File x, line 14\n\tloss.backward()"


def test_the_text_view_reports_each_stall_once() -> None:
    stream, history = io.StringIO(), History()
    view = TextView(FakeRun(history), stream, clock=lambda: 0.0)
    view.update(status("running"))
    for hang in (HANG, HANG + " more", "", HANG):
        view.update(status("running", hang=hang))
    assert stream.getvalue() == 2 * f"train: {HANG.expandtabs()}\n"


def test_a_stall_is_sent_to_the_page_once_and_is_in_later_snapshots() -> None:
    run = FakeRun()
    feed = Feed(run, clock=lambda: 0.0)
    feed.frame(run.now)
    run.now = status("running", hang=HANG)
    frame = feed.frame(run.now)
    assert frame is not None
    assert frame[0]["hang"] == HANG.expandtabs().split("\n")
    assert feed.frame(dataclasses.replace(run.now, summary="other"))[0].get("hang") is None  # type: ignore[index]
    assert feed.snapshot()[0]["hang"] == frame[0]["hang"]
    after = feed.frame(status("running"))
    assert after is not None
    assert after[0]["hang"] == []


def test_the_picture_of_a_stalled_run_shows_where_and_stays_small() -> None:
    html = Picture(History(), status("stopped", hang=HANG)).bundle()["text/html"]
    assert "<b>rank 1 finished the loop at step 120; rank 0 waits in all_reduce</b></summary>" in html
    assert "rank 0 is here:\n  File x, line 14" in html
    long = Picture(History(), status("stopped", hang=HANG + "\n<&x" * 1_000_000)).bundle()["text/html"]
    assert len(long) < 40_000
    assert "more characters" in long
    assert "Where" not in Picture(History(), status("stopped")).bundle()["text/html"]


def test_thinning_keeps_the_extremes_and_ends() -> None:
    values = np.sin(np.arange(100_000.0))
    values[54_321], values[60_000] = 50.0, math.nan
    steps, thinned = thinning.thin(Series(np.arange(100_000), values), 500)
    assert len(steps) <= 502
    assert 54_321 in steps
    assert steps[0] == 0
    assert steps[-1] == 99_999
    assert np.isfinite(thinned).all()


def test_output_is_readable_from_any_position_and_after_the_end() -> None:
    fd = open_output()
    writer = os.dup(fd)
    output = RankOutput(fd)
    os.write(writer, "naïve".encode()[:3])
    text, position, follows = output.since(0, 1000)
    assert (text, follows) == ("na", True), "half a character waits"
    os.write(writer, "naïve".encode()[3:] + b"\n")
    text, position, follows = output.since(position, 1000)
    assert (text, follows) == ("ïve\n", True)
    os.write(writer, b"last\n")
    output.close()
    os.close(writer)
    assert output.since(position, 1000)[0] == "last\n"
    assert output.since(0, 4) == ("naï", 4, True)


def test_a_reader_that_is_behind_skips_to_the_end() -> None:
    fd = open_output()
    os.write(fd, b"x" * 1_000_000 + b"end")
    output = RankOutput(fd)
    text, position, follows = output.since(0, 100)
    assert text.endswith("end")
    assert len(text) == 100
    assert not follows
    assert position == 1_000_003
    output.close()


# ---------------------------------------------------------------------------- the picture


def svgs_of(html: str) -> list[str]:
    """Of each chart first the axis, then the curves."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert found
    assert len(found) == 2 * html.count('alt="Chart of ')
    return [base64.b64decode(data).decode() for data in found]


class Parsed(html.parser.HTMLParser):
    """Which elements and attributes a browser would make of it, and which text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


OF_PICTURE = {"div", "p", "span", "b", "img", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre"}
OF_SVG = {"svg", "text", "path", "line", "g", "title"}


@pytest.mark.parametrize(
    "nasty", [NASTY, "\" onload=alert(1) x='", "]]><!--<svg onload=alert(1)>", "\u202e&lt;b&gt;\x00\x1b[2J"]
)
def test_a_users_text_cannot_break_out_of_the_picture(nasty: str) -> None:
    texts = {"name": nasty, "summary": nasty, "error": nasty, "restart_reason": nasty, "hang": f"{nasty}\n{nasty}"}
    run = FakeRun(now=status("failed", failed_rank=0, hosts=[nasty], restarts=1, max_restarts=1, **texts))
    run.printed = {0: f"\x1b[31m{nasty}\x1b[0m\n"}
    rank = Rank(run.history)
    rank.log(nasty, range(50), [float(i) for i in range(50)])
    rank.log(f"val/{nasty}", range(50), [float(i) for i in range(50)])
    for i in range(14):  # more families than charts
        rank.log(f"{nasty}{i}", [0], [1.0])
    run.history.restart(nasty)
    Rank(run.history).log(nasty, [25], [1.0])
    bundle = Picture(run.history, run.now, run).bundle()
    parsed = Parsed(bundle["text/html"])
    assert parsed.tags <= OF_PICTURE
    assert parsed.attributes <= {"class", "style", "src", "alt", "open", "colspan"}
    assert not parsed.open
    assert summary.plain(nasty) in parsed.text
    drawn = [ElementTree.fromstring(svg) for svg in svgs_of(bundle["text/html"])]
    elements = [element for svg in drawn for element in svg.iter()]
    assert {element.tag.partition("}")[2] for element in elements} == OF_SVG
    assert not [name for element in elements for name in element.attrib if name.startswith("on") or "href" in name]
    texts = [text for svg in drawn for text in svg.itertext()]
    for text in (parsed.text.replace("\n", ""), bundle["text/plain"], *texts):
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_the_picture_stays_small_whatever_was_logged() -> None:
    history = History(2)
    for rank in range(2):
        for i in range(30):
            Rank(history, rank).log(f"m{i}/value{i}", range(20_000), np.random.randn(20_000).tolist())
    bundle = Picture(history, status("finished")).bundle()
    assert len(json.dumps(bundle)) < 200_000
    ElementTree.fromstring(Picture(history).svg)


@pytest.mark.parametrize(
    ("name", "metrics", "points"),
    [("layer{}/norm", 1000, 20), ("m{}", 3000, 2), ("层{}é&/" + "<" * 50, 300, 100), ("m{}/x{}" + "层" * 5000, 20, 5)],
)
def test_a_picture_of_any_number_of_metrics_stays_within_the_limit(name: str, metrics: int, points: int) -> None:
    history = History()
    rank = Rank(history)
    for i in range(metrics):
        rank.log(name.format(i, i), range(points), np.random.randn(points).tolist())
    bundle = Picture(history, status("finished")).bundle()
    assert len(json.dumps(bundle, ensure_ascii=False).encode()) < 200_000
    assert len(bundle["text/plain"]) < 1000
    assert all(map(ElementTree.fromstring, svgs_of(bundle["text/html"])))


def test_more_lines_than_colours_share_all_of_them() -> None:
    history = History()
    rank = Rank(history)
    for i in range(24):
        rank.log(f"layer{i}/norm", [0], [1.0])
    colors = re.findall('stroke="(#[0-9a-f]+)" stroke-width="5"', Picture(history).svg)
    assert len(colors) == 24
    assert {colors.count(color) for color in colors} == {3}


def test_the_pictures_clock_shows_minutes_with_two_digits() -> None:
    for seconds, shown in ((4.9, "00:04"), (38.2, "00:38"), (3662.0, "1:01:02")):
        html = Picture(History(), status("finished", seconds=seconds)).bundle()["text/html"]
        assert f"· {shown}</p>" in html


def test_lines_that_are_not_drawn_are_counted() -> None:
    history = History()
    rank = Rank(history)
    for i in range(300):
        rank.log(f"layer{i}/norm", range(3), [1.0, 2.0, 3.0])
    picture = Picture(history, status("finished"))
    assert "and 276 more" in picture.svg
    assert "and 260 more" in picture.bundle()["text/html"]
    assert repr(picture).endswith("layer7/norm 3 · … and 292 more")


@pytest.mark.usefixtures("_fonts")
def test_families_that_are_not_drawn_are_named() -> None:
    history = History()
    rank = Rank(history)
    for i in range(12):
        rank.log(f"m{i}", [0, 1], [1.0, 2.0])
    assert "Not drawn" not in Picture(history).svg
    rank.log("a$b$c^", [0, 1], [1.0, 2.0])
    assert ">Not drawn: A$b$c^</text>" in Picture(history).svg
    for i in range(100):
        rank.log(f"n{i}", [0, 1], [1.0, 2.0])
    assert charts(history, 6000).note == "Not drawn: A$b$c^, N0, N1, N2, N3, N4, N5, N6, … and 93 more"
    Picture(history).figure().savefig(io.BytesIO())


def test_a_line_of_progress_names_a_few_metrics() -> None:
    stream, history = io.StringIO(), History()
    view = TextView(FakeRun(history), stream, clock=iter(range(0, 100, 10)).__next__)
    view.update(status("running"))
    rank = Rank(history)
    for i in range(100):
        rank.log(f"m{i}", [0], [1.0])
    view.update(status("running"))
    assert stream.getvalue().endswith("m7 1 · … and 92 more\n")


ODD_VALUES = [
    [1.0],
    [2.0] * 100,
    [math.nan] * 50,
    [math.nan, math.inf, 1.0],
    [1e-30, 1e30],
    [1e308, -1e308],
    [1.7e308, -math.inf] * 40,
    [0.0, 5e-324],
    [5e-324, 5e-324],
    [1.0, 1.0 + 2**-52],
    [1e16, 1e16 + 2],
    [1e-15, 3e-15],
]


@pytest.mark.usefixtures("_fonts")
@pytest.mark.parametrize("values", ODD_VALUES)
def test_the_picture_of_odd_values_is_valid_svg(values: list[float]) -> None:
    history = History()
    Rank(history).log("loss", range(len(values)), values)
    svg = Picture(history).svg
    ElementTree.fromstring(svg)
    assert not re.search(r"[ML]-?(nan|inf)", svg)
    Picture(history).figure().savefig(io.BytesIO())


@pytest.mark.parametrize("steps", [[2**62], [2**53, 2**53 + 1], [-(2**63), 2**63 - 1], [0, 0]])
def test_the_picture_of_odd_steps_is_valid_svg(steps: list[int]) -> None:
    history = History()
    Rank(history).log("loss", steps, [float(i) for i in range(len(steps))])
    svg = Picture(history).svg
    ElementTree.fromstring(svg)
    assert "nan" not in svg


def test_ticks_of_small_numbers_are_not_all_zero() -> None:
    assert ticks(1e-15, 3e-15, 5) == pytest.approx([1e-15, 1.5e-15, 2e-15, 2.5e-15, 3e-15], rel=1e-9, abs=0)


def test_a_history_without_points_has_a_picture_too() -> None:
    ElementTree.fromstring(Picture(History()).svg)
    assert "Finished" in Picture(History(), status("finished")).bundle()["text/html"]


@pytest.fixture(scope="session")
def _fonts() -> None:
    """matplotlib keeps the fonts open that it has drawn with."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figure.add_subplot().set_title("warm", loc="left")
    figure.savefig(io.BytesIO())


@pytest.mark.usefixtures("_fonts")
def test_plot_gives_the_same_picture_and_a_figure() -> None:
    history = History()
    rank = Rank(history)
    rank.log("train/loss", range(300), [1 / (i + 1) for i in range(300)])
    rank.log("val/loss", [100, 200], [0.5, 0.4])
    rank.log("acc", range(300), [i / 300 for i in range(300)])
    picture = history.plot()
    html = picture._repr_mimebundle_()["text/html"]
    for chart in svgs_of(html)[1::2]:
        curves = re.findall(r'd="M[\d.]+ [\d.]+(l[^"]+)" stroke="', chart)
        assert all(curve in picture.svg for curve in curves)
        assert curves
    for words in ("<b>Loss</b>", "</span> train 0.0033", "</span> val 0.4000", "<b>Accuracy</b>"):
        assert words in html, "titles and legends are the page's text"
    figure = picture.figure()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Loss", "Accuracy"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 1], "a smooth line is drawn once; val is dots"
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert len(buffer.getvalue()) > 5_000


# ---------------------------------------------------------------------------- text


def test_text_reports_the_end_once_and_without_control_characters() -> None:
    stream = io.StringIO()
    history = History()
    view = TextView(FakeRun(history), stream, clock=lambda: 0.0)
    view.update(status("starting"))
    view.update(status("running"))
    view.write("a\r")
    view.write("ab\r")
    Rank(history).log("loss", [0], [0.5])
    for _ in range(3):
        view.update(status("finished"))
    assert stream.getvalue() == (
        "train: 1 process · gloo\nab\ntrain: finished after 0:38 · 1 process · gloo · loss 0.5000\n"
    )


@pytest.mark.parametrize("cut", range(1, 17))
def test_a_rewritten_line_that_was_shown_in_part_keeps_its_beginning(cut: int) -> None:
    stream, printed = io.StringIO(), "abc\rdef\r\n1\r\n2\r3\n4"
    writer = OutputWriter(stream)
    writer.write(printed[:cut])
    writer.write(printed[cut:])
    assert fold(stream.getvalue()) == "def\n1\n3\n4"


def test_a_rewritten_bar_is_not_kept_in_all_its_states() -> None:
    stream = io.StringIO()
    writer = OutputWriter(stream)
    for step in range(1000):
        writer.write(f"\r{step:3}")
    assert len(writer._rewritable) < 10
    writer.finish()
    assert stream.getvalue() == "999\n"


def lines_of_one_bar(desc: str, total: int, every_s: float) -> int:
    """How many lines a loop leaves that takes ten seconds, or ends before."""
    stream, history, now = io.StringIO(), History(), [0.0]
    rank, view = Rank(history), TextView(FakeRun(history), stream, clock=lambda: now[0])
    view.update(status("running"))
    for tenth in range(1, 101):
        now[0] = tenth / 10
        rank.bar(0, desc, total, min(total, int(now[0] / every_s + 1e-9)), at=now[0])
        view.update(status("running"))
    return stream.getvalue().count("\n")


def test_an_epoch_bar_prints_a_line_for_each_epoch_even_if_it_is_the_only_bar() -> None:
    assert lines_of_one_bar("epoch", 20, 0.5) >= 20
    assert lines_of_one_bar("Round", 200, 1.0) >= 9


def test_a_lone_bar_of_many_fast_items_does_not_flood() -> None:
    assert lines_of_one_bar("step", 1000, 0.01) <= 6
    assert lines_of_one_bar("epoch", 1000, 0.01) <= 6
    assert lines_of_one_bar("background", 20, 0.5) <= 6


CONTROLS = "a\x1b[31mb\x00c\x08\nd\x9be\uffff\u202e"


def test_control_characters_in_names_reach_neither_svg_nor_terminal() -> None:
    stream, history = io.StringIO(), History()
    rank = Rank(history)
    for name in (CONTROLS, f"train/{CONTROLS}", f"{CONTROLS}/loss"):
        rank.log(name, [0, 1], [1.0, 2.0])
    rank.bar(0, CONTROLS, 5, 2)
    named = status(
        "finished",
        hosts=[CONTROLS],
        failed_rank=0,
        name=CONTROLS,
        summary=CONTROLS,
        notice=CONTROLS,
        error=CONTROLS,
        hang=CONTROLS,
    )
    named = dataclasses.replace(named, restarts=1, max_restarts=1, restart_reason=CONTROLS)
    bundle = Picture(history, named).bundle()
    assert all(map(ElementTree.fromstring, svgs_of(bundle["text/html"])))
    now = [0.0]
    view = TextView(FakeRun(history), stream, clock=lambda: now[0])
    for state in ("starting", "running", "running", "finished"):
        view.update(dataclasses.replace(named, state=state, blocking=False))
        now[0] += 10
    assert stream.getvalue().count("\n") == 5, "a restart, two lines of standing still, progress, the end"
    head = Feed(FakeRun(history, named)).snapshot()[0]
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202e\uffff]", json.dumps(head, ensure_ascii=False))
    for text in (*bundle.values(), stream.getvalue().replace("\n", "")):
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202e\uffff]", text)


def test_the_users_output_keeps_its_colours() -> None:
    stream = io.StringIO()
    TextView(FakeRun(), stream).write("\x1b[31mred\x1b[0m\n")
    assert stream.getvalue() == "\x1b[31mred\x1b[0m\n"


# ---------------------------------------------------------------------------- where it lives


def test_importing_nbddp_in_a_plain_script_loads_no_widget() -> None:
    code = (
        "import sys, nbddp, nbddp.panel.live, nbddp.kernel.runner\n"
        "print([m for m in ('anywidget', 'ipywidgets', 'matplotlib', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not (JS / "node_modules").is_dir(), reason="the script's packages are not installed (npm ci)")
def test_the_built_script_matches_its_sources(tmp_path: Path) -> None:
    node = shutil.which("node")
    assert node is not None
    subprocess.run([node, "build.mjs", str(tmp_path)], cwd=JS, check=True)
    for built in tmp_path.iterdir():
        assert built.read_bytes() == (JS.parent / "static" / built.name).read_bytes(), f"{built.name}: npm run build"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_scripts_own_tests_pass() -> None:
    done = subprocess.run(["node", "--test"], cwd=JS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


def test_the_lock_file_names_no_host() -> None:
    assert "://" not in re.sub(r'"url": "https://[^"]*"', "", (JS / "package-lock.json").read_text())


# ---------------------------------------------------------------------------- a real kernel, without a page

TRAIN = """
import nbddp
def train():
    for step in range(20):
        nbddp.log(loss=1 / (step + 1))
    print("done")
"""


def executed(folder: Path, *cells: str) -> list[Any]:
    """The outputs of each cell, as `jupyter nbconvert --execute` leaves them."""
    code = [{"cell_type": "code", "id": f"c{i}", "source": source} for i, source in enumerate((TRAIN, *cells))]
    for cell in code:
        cell |= {"metadata": {}, "outputs": [], "execution_count": None}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    path = folder / "test.ipynb"
    path.write_text(json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace", str(path)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    after = json.loads(path.read_text())
    return [cell["outputs"] for cell in after["cells"]][1:]


def displayed(outputs: list[Any]) -> list[dict[str, Any]]:
    return [output["data"] for output in outputs if output["output_type"] == "display_data"]


def test_an_executed_notebook_keeps_the_picture_and_no_dead_widget(in_folder: Path) -> None:
    (outputs,) = executed(in_folder, "nbddp.run(train, nprocs=2, device='cpu');")
    (data,) = displayed(outputs)
    assert set(data) == {"text/html", "text/plain"}
    assert "train: finished after" in "".join(data["text/plain"])
    assert all(map(ElementTree.fromstring, svgs_of("".join(data["text/html"]))))
    said = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    assert "train: 2 processes · gloo" in said
    assert "done" in said


def test_a_background_run_leaves_its_picture_in_the_cell_that_waits_for_it(in_folder: Path) -> None:
    started, waited = executed(in_folder, "run = nbddp.run(train, nprocs=2, device='cpu', wait=False)", "run.wait();")
    assert not displayed(started)
    assert [set(data) for data in displayed(waited)] == [{"text/html", "text/plain"}]


def test_show_true_opens_the_panel_whatever_the_front_end(in_folder: Path) -> None:
    source = "run = nbddp.run(train, nprocs=2, device='cpu', show=True)"
    look = "import ipywidgets; print([type(w).__name__ for w in ipywidgets.Widget.widgets.values()])"
    first, second, silent = executed(in_folder, source, look, "nbddp.run(train, nprocs=2, device='cpu', show=False);")
    assert [set(data) for data in displayed(first)] == [{"text/html", "text/plain"}], "the picture took its place"
    assert "".join(second[0]["text"]).strip() == "[]", "the widget is closed"
    assert not silent


def test_a_plot_of_some_metrics_draws_no_others() -> None:
    history = History()
    for name in ("loss", "acc", "lr"):
        Rank(history).log(name, [0, 1, 2], [1.0, 2.0, 3.0])
    history.plot("loss")  # by the package's face
    svg = history.plot("acc", "lr").svg
    assert [title in svg for title in (">Loss<", ">Accuracy<", ">Learning rate<")] == [False, True, True]
    assert history.plot().svg.count('font-weight="700"') == 3
    with pytest.raises(KeyError, match="no metric 'los' was logged; the metrics are: loss, acc, lr"):
        history.plot("los")


def test_a_logarithmic_plot_has_equal_distances_for_equal_ratios() -> None:
    history = History()
    Rank(history).log("loss", range(5), [1.0, 0.1, 0.01, 0.001, -1.0])
    picture = history.plot(log=True)
    found = re.findall(r"M[0-9.]+ ([0-9.]+)h0", picture.svg)
    heights = [float(height) for height in found]
    assert len(heights) == 4, "a value that is not positive has no logarithm"
    steps = [below - above for above, below in itertools.pairwise(heights)]
    assert max(steps) - min(steps) < 0.2
    assert min(steps) > 10
    for label in (">1<", ">0.1<", ">0.01<", ">0.001<"):
        assert label in picture.svg
    axes = picture.figure().axes[0]
    assert axes.get_yscale() == "log"
    assert axes.lines[0].get_ydata()[:4] == pytest.approx([1.0, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("values", [[-1.0, 0.0], [2.0, 2.0], [2.0, 3.0], [1e-30, 1e30], [float("nan"), float("inf")]])
def test_a_logarithmic_plot_of_any_values_is_a_picture(values: list[float]) -> None:
    history = History()
    Rank(history).log("loss", range(2), values)
    ElementTree.fromstring(history.plot(log=True).svg)
    assert [axes.get_yscale() for axes in history.plot(log=True).figure().axes] == ["log"]
