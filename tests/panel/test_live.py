"""The panel in a cell's output, with a page that only counts what it gets."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
from fakes import FakeRun, Rank, status

from nbddp.panel import live


class Page:
    """The displays of a cell, instead of a notebook's."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def display(self, data: dict[str, str], **_options: Any) -> Page:
        self.shown.append(data)
        return self

    def update(self, data: dict[str, str], **_options: Any) -> None:
        self.shown.append(data)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    made = Page()
    monkeypatch.setattr("IPython.display.display", made.display)
    monkeypatch.setattr(live, "is_jupyter", lambda: True)
    return made


def a_run() -> FakeRun:
    run = FakeRun()
    Rank(run.history).log("loss", range(10), [1.0] * 10)
    return run


def test_a_saved_cell_holds_a_picture_and_no_widget_at_any_time(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = a_run(), [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    view = live.PanelView(run, with_output=False)
    for seconds in range(0, 70, 5):
        now[0] = 100.0 + seconds
        view.update(dataclasses.replace(run.now, seconds=float(seconds)))
    assert len(page.shown) == 3, "at 0, 30 and 60 s"
    assert all("before the run's end" in data["text/html"].replace("&#x27;", "'") for data in page.shown)
    run.now = status("finished")
    view.update(run.now)
    view.update(run.now)
    assert len(page.shown) == 4
    assert "Finished" in page.shown[-1]["text/html"]
    assert "before the run" not in page.shown[-1]["text/html"]
    assert {frozenset(data) for data in page.shown} == {frozenset({"text/html", "text/plain"})}


def test_the_first_picture_shows_the_run_as_it_is_after_the_import_of_the_widget(page: Page) -> None:
    run = a_run()
    run.now = status("running")
    live.PanelView(run, with_output=False).update(status("starting"))
    assert "Running" in page.shown[0]["text/html"]


def test_a_panel_that_stays_keeps_the_history_and_lets_the_run_go(page: Page) -> None:
    run = a_run()
    run.printed = {0: "the last line"}
    view = live.PanelView(run, with_output=False)
    view.update(run.now)
    run.now = status("finished")
    view.update(run.now)
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    content, _ = view._feed.snapshot()
    assert content["head"]["state"] == "finished"
    assert content["logs"] == [[0, "the last line", True]]
    assert content["series"][0]["points"] == 10
    view._on_message(None, {"kind": "stop"}, None)


def test_only_the_newest_finished_panels_stay(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_KEPT", 2)
    monkeypatch.setattr(live, "_finished", live.collections.deque())
    views = []
    for _ in range(3):
        run = a_run()
        run.now = status("finished")
        views.append(live.PanelView(run, with_output=False))
        views[-1].update(run.now)
    assert [view._widget.comm is None for view in views] == [True, False, False]  # type: ignore[union-attr]
