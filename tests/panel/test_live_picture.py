"""The picture that is renewed while a run goes on, with a page that only counts what it gets."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from fakes import FakeRun, Rank, status

from nbddp.errors import LaunchError
from nbddp.history.history import History
from nbddp.panel import choose, frontend, live_picture
from nbddp.panel.live_picture import PictureView

STEP_S = 0.2  # between two looks at the run, as kernel/views.py has it


class Page:
    """The displays of a cell, with the time of each, on a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.shown: list[tuple[float, dict[str, str]]] = []

    def display(self, data: dict[str, str], **_options: Any) -> Page:
        self.update(data)
        return self

    def update(self, data: dict[str, str], **_options: Any) -> None:
        self.shown.append((self.now, data))

    @property
    def bytes(self) -> int:
        return sum(len(text.encode()) for _, data in self.shown for text in data.values())


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    made = Page()
    monkeypatch.setattr("IPython.display.display", made.display)
    monkeypatch.setattr(live_picture.time, "monotonic", lambda: made.now)
    return made


def train(page: Page, view: PictureView, run: FakeRun, seconds: float) -> None:
    """Four noisy metrics on eight ranks, looked at as often as a run is."""
    ranks, random = [Rank(run.history, rank) for rank in range(8)], np.random.default_rng(0)
    for step in range(int(seconds / STEP_S)):
        page.now += STEP_S
        for rank in ranks:
            for name in ("train/loss", "val/loss", "acc", "lr"):
                rank.log(name, [step], [float(np.exp(-step / 500) + 0.2 * random.random())])
        view.update(run.now)


def test_a_picture_is_at_most_two_seconds_old_and_ten_minutes_are_at_most_5_mb(page: Page) -> None:
    run = FakeRun(History(8), status("running", ranks=8))
    view = PictureView(run, with_output=False)
    train(page, view, run, 120)
    times = [at for at, _ in page.shown]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 2.0
    assert min(b - a for a, b in itertools.pairwise(times)) >= 1.0 - 1e-9
    assert page.bytes <= 5_000_000 * 120 / 600
    run.now = status("finished", ranks=8)
    view.update(run.now)
    view.update(run.now)
    last = page.shown[-1][1]
    assert len(page.shown) == len(times) + 1
    assert "Finished" in last["text/html"]
    assert sum(map(len, last.values())) <= 200_000
    for _, data in page.shown:
        assert set(data) == {"text/html", "text/plain"}
        html = data["text/html"]
        assert not re.search(r"<(script|style|link|iframe|object|svg)|https?:|\son\w+=|javascript:", html)
        assert re.findall(r'<img src="([^"]{26})', html) in ([], ["data:image/svg+xml;base64,"] * html.count("<img"))


def test_nothing_is_sent_while_nothing_changes(page: Page) -> None:
    run = FakeRun()
    view = PictureView(run, with_output=False)
    for _ in range(50):
        page.now += STEP_S
        view.update(run.now)
    assert len(page.shown) == 1
    assert "■ ends the run" in page.shown[0][1]["text/html"]


# ---------------------------------------------------------------------------- which view it is


@pytest.mark.parametrize(
    ("environ", "message", "show", "view"),
    [
        ({}, {"metadata": {"cellId": "a"}}, None, "PanelView"),
        ({}, {"header": {"msg_id": "d7b6f0f8-6d0e-4a6a-9d3c-1b4c8c5a7e1f"}}, None, "PanelView"),
        ({}, {"header": {"msg_id": "0f1e2d3c-4b5a6978_312_7"}}, None, "ExecutedView"),
        ({}, {"header": {"msg_id": "0f1e2d3c-4b5a6978_312_7"}}, True, "PictureView"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, {}, None, "PictureView"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, {}, None, "ExecutedView"),
        ({"COLAB_RELEASE_TAG": "release-colab_20260819"}, {"metadata": {"cellId": "a"}}, None, "PictureView"),
        ({"DATABRICKS_RUNTIME_VERSION": "17.3"}, {}, None, "PictureView"),
        ({"DATABRICKS_RUNTIME_VERSION": "17.3"}, {}, "widget", "PanelView"),
        ({"COLAB_RELEASE_TAG": "release-colab_20260819", "NBDDP_PANEL": "widget"}, {}, None, "PanelView"),
        ({"NBDDP_PANEL": "widget"}, {}, "text", "TextView"),
        ({"NBDDP_PANEL": "picture"}, {}, True, "PictureView"),
    ],
)
def test_the_view_fits_the_place(
    environ: dict[str, str], message: dict[str, Any], show: Any, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(frontend, "_request", lambda: message)
    assert type(choose.view_for(FakeRun(), show=show, reopened=False, with_output=False)).__name__ == "TextView"
    monkeypatch.setattr(frontend, "shell", lambda: object())
    assert type(choose.view_for(FakeRun(), show=show, reopened=False, with_output=False)).__name__ == view


def test_a_view_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="show='movie' is not known: use widget, picture, text"):
        choose.check("movie")
    monkeypatch.setenv("NBDDP_PANEL", "on")
    with pytest.raises(LaunchError, match="NBDDP_PANEL='on' is not known"):
        choose.check(None)
