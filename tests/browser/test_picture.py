"""The picture without scripts, at the widths that pages give it."""

from __future__ import annotations

import base64
import itertools
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

in_ci = os.environ.get("CI") == "true"
if not in_ci:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from lab import chromium
from playwright.sync_api import Browser, Page

sys.path.append(str(Path(__file__).parents[1] / "panel"))

from fakes import FakeRun, Rank, status

from nbddp.history.history import History
from nbddp.panel.picture import Picture

pytestmark = pytest.mark.skipif(chromium() is None and not in_ci, reason="there is no Chromium")

WIDTHS = {330: 1, 700: 2, 1400: 2}  # of the page, and how many columns of charts it has space for


@pytest.fixture(scope="module")
def page(shared_browser: Browser) -> Page:
    return shared_browser.new_page()


@pytest.fixture(scope="module")
def html() -> str:
    """Of a finished run of four ranks with three charts: loss, accuracy, and one in a row of its own."""
    history, steps = History(4), np.arange(1000)
    for rank in range(4):
        noise = np.random.default_rng(rank).random(1000)
        Rank(history, rank).log("train/loss", steps, 2 * np.exp(-steps / 300) + noise, op=1)
        Rank(history, rank).log("train/acc", steps, 1 - np.exp(-steps / 300) * noise, op=1)
        Rank(history, rank).log("lr", steps, 1e-7 * (1 + np.cos(steps / 1000)))
    Rank(history).log("val/loss", range(99, 1000, 100), [1.0] * 10)
    now = status("finished", ranks=4)
    return Picture(history, now, FakeRun(history, now)).bundle()["text/html"]


@pytest.mark.parametrize("width", WIDTHS)
def test_charts_wrap_to_the_width_of_the_page_and_nothing_leaves_the_card(page: Page, html: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.set_content(html)
    card = page.locator(".nbddp-picture").bounding_box()
    assert card is not None
    charts = [image.bounding_box() for image in page.locator("img[alt^='Chart of']").all()]
    assert len({round(chart["x"]) for chart in charts if chart}) >= WIDTHS[width]
    assert sum(bool(chart) and chart["y"] == charts[0]["y"] for chart in charts) == WIDTHS[width]
    right = card["x"] + card["width"]
    for chart in charts:
        assert chart["height"] == 194
        assert chart["width"] > 220
        assert chart["x"] + chart["width"] <= right
    for table in page.locator(".nbddp-picture table").all():
        assert table.evaluate("table => table.parentElement.scrollWidth == table.parentElement.clientWidth")
    last = charts[-1]
    assert right - 20 < last["x"] + last["width"], "a chart that is alone in its row fills it"
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_page_that_drops_styles_shows_axis_and_curves_side_by_side(page: Page, html: str) -> None:
    page.set_viewport_size({"width": 700, "height": 900})
    page.set_content("<style>img {max-width: 100%; height: auto}</style>" + re.sub(' style="[^"]*"', "", html))
    images = [image.bounding_box() for image in page.locator("img").all()]
    assert len(images) == 6
    for axis, curves in zip(images[::2], images[1::2]):
        assert axis["height"] == curves["height"] == 194
        assert axis["y"] == curves["y"]
        assert axis["x"] + axis["width"] == curves["x"]


def test_the_text_of_a_chart_has_the_same_size_at_every_width(page: Page, html: str) -> None:
    svg = base64.b64decode(re.findall('base64,([^"]+)" alt="Chart', html)[0]).decode()
    sizes, ends = [], []
    for width in (240, 330, 700):
        page.set_content(f"<div style='width:{width}px;height:194px'>{svg}</div>")
        texts = page.evaluate("[...document.querySelectorAll('text')].map(t => t.getBoundingClientRect().toJSON())")
        sizes.append([round(text["height"], 1) for text in texts])
        ends.append(max(text["right"] for text in texts))
        dots = page.evaluate("document.querySelector('path[stroke-width=\"5\"]').getBoundingClientRect().right")
        assert dots > width * 0.9, "the curves are stretched"
        assert all(left["right"] < right["left"] for left, right in itertools.pairwise(texts)), "labels do not overlap"
    assert sizes[0] == sizes[1] == sizes[2]
    assert min(sizes[0]) > 10
    assert ends[0] < ends[1] < ends[2]
