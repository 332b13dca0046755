"""The panel in a real JupyterLab and a real browser, while real runs go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import wait_until

if TYPE_CHECKING:
    from tests.browser.lab import Cell, Sheet

LONG = "run = nbddp.run(train, (1, 100_000), nprocs=2, device='cpu')"
pytestmark = pytest.mark.timeout(240)


def begin(sheet: Sheet, source: str = LONG) -> Cell:
    """Start a run, until its curves are there."""
    from playwright.sync_api import expect

    cell = sheet.begin(source)
    expect(cell.panel).to_have_attribute("data-state", "running", timeout=30_000)
    expect(cell.panel.locator("canvas")).to_have_count(2, timeout=30_000)
    return cell


def test_the_curve_grows_while_the_cell_is_busy(sheet: Sheet, expect: Any) -> None:
    cell = begin(sheet)
    step, plot = cell.tile("Step"), cell.panel.locator(".nbddp-plot").first
    before = plot.screenshot()
    wait_until(lambda: cell.tile("Step") > step + 50)
    assert plot.screenshot() != before
    assert cell.is_busy
    assert cell.panel.locator("figcaption b").all_inner_texts() == ["Loss", "Accuracy"]
    expect(cell.panel.get_by_role("status")).to_have_text("train: running")
    expect(sheet.page.locator("#jp-main-statusbar")).to_contain_text("| Busy", timeout=10_000)


def test_stop_stops_within_a_second(sheet: Sheet, expect: Any) -> None:
    took = []
    while not took or (took[-1] > 1 and len(took) < 3):  # a busy machine may take longer once
        cell = begin(sheet)
        button, began = cell.panel.get_by_role("button", name="Stop"), time.monotonic()
        button.click()
        wait_until(lambda: not cell.is_busy)  # noqa: B023
        took.append(time.monotonic() - began)
        assert sheet.ranks() == []
        expect(cell.output).to_contain_text("KeyboardInterrupt")
        expect(cell.panel).to_have_attribute("data-state", "stopped")
        expect(button).to_be_hidden()
    assert took[-1] <= 1, took
