"""The panel's page alone, in a real browser: frames of a told run, and no kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from nbddp.panel.status import Source, Status
from tests.curves import logged

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OPEN = """async ([code, state]) => {
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const model = { get: (name) => state[name], on() {}, off() {}, send() {} };
  (await import(url)).default.render({ model, el: document.body });
}"""
COLORED = """() => {  // whether the last chart has a pixel that isn't gray
  const canvas = [...document.querySelectorAll("canvas")].at(-1);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.some((value, i) => i % 4 === 0 && Math.abs(value - data[i + 2]) > 50);
}"""
pytestmark = pytest.mark.timeout(240)


def test_a_single_value_is_drawn_and_a_chart_without_values_says_so(started_browser: Browser, expect: Any) -> None:
    from nbddp.panel.widget import Panel

    panel, history = Panel("", ""), logged(gain=[-1.0, 0.0], loss=[2.0, 0.0], lost=[math.nan] * 2, once=[0.5])
    panel.update(Source(history, lambda: status), status := Status("train", "finished", 1.0))
    problems: list[object] = []
    page = started_browser.new_page(viewport={"width": 800, "height": 800})
    page.on("pageerror", lambda problem: problems.append(problem))  # playwright sets attributes on it
    page.add_style_tag(content=Panel._css)
    page.evaluate(OPEN, [Panel._esm, {name: getattr(panel, name) for name in ("head", "frame", "logs", "kernel_id")}])
    panel.leave()
    plots = page.locator(".nbddp-plot p")
    expect(plots).to_have_text(["", "", "all values are NaN or infinite", ""])
    page.get_by_role("button", name="Log scale").click()
    expect(plots).to_have_text(["no positive values", "", "no positive values", ""])
    page.get_by_role("button", name="Log scale").click()
    expect(plots.first).to_have_text("")
    assert page.evaluate(COLORED), "a dot"
    boxes = [figure.bounding_box() for figure in page.locator("figure").all()]
    assert len({box["width"] for box in boxes if box}) == 1, "also a third one in a row of its own"
    assert problems == []
    page.close()
