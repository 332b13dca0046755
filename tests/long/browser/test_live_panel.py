"""The panel in a real JupyterLab: what a mouse does, the background, and the debugger."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.test_live_panel import LONG, begin
from tests.support import wait_until

if TYPE_CHECKING:
    from tests.browser.lab import Sheet

pytestmark = pytest.mark.timeout(240)


def test_a_failure_is_shown_also_on_a_dark_page(sheet: Sheet, expect: Any) -> None:
    panel = sheet.run("nbddp.run(train, (3, 200, 0.01, 100), nprocs=3, device='cpu')").panel
    notes = panel.locator("[data-part=notes]")
    expect(panel).to_have_attribute("data-state", "failed")
    expect(notes).to_contain_text("ValueError: shapes <script>do not</script> fit at step 100")
    expect(panel.get_by_role("status")).to_contain_text("train: failed, rank 1 of 3 failed: ValueError")
    expect(panel.locator("tr").nth(2)).to_contain_text("failed")
    expect(panel.locator("tr").nth(1)).to_contain_text("stopped")
    panel.locator("summary", has_text="Rank logs").click()
    expect(panel.get_by_role("button", name="Rank 1")).to_have_attribute("aria-pressed", "true")
    expect(panel.locator(".nbddp-logs pre")).to_contain_text("about to fail <b>now</b>")
    sheet.page.locator('.lm-MenuBar-itemLabel:text-is("Settings")').click()
    sheet.page.locator('.lm-Menu-itemLabel:text-is("Theme")').hover()
    sheet.page.locator('.lm-Menu-itemLabel:text-is("JupyterLab Dark")').click()
    sheet.page.wait_for_selector('body[data-jp-theme-light="false"]', state="attached")
    back, text = (panel.evaluate(f"e => getComputedStyle(e).{name}") for name in ("backgroundColor", "color"))
    assert brightness(back) < 60 < 200 < brightness(text)


def brightness(color: str) -> float:
    return sum(map(float, color[color.index("(") + 1 : -1].split(",")[:3])) / 3


def test_hover_zoom_and_log_scale(sheet: Sheet, expect: Any) -> None:
    cell = begin(sheet)
    wait_until(lambda: cell.tile("Step") > 60)
    panel, mouse = cell.panel, sheet.page.mouse
    over, tips = panel.locator(".u-over").first, panel.locator(".nbddp-tip")
    while not tips.first.inner_text():  # the page may scroll meanwhile
        box = over.bounding_box() or {}
        mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
        sheet.page.wait_for_timeout(100)
    for tip in tips.all():  # of both charts
        expect(tip).to_contain_text("step ")
        expect(tip).to_contain_text("train 0.")
    mouse.move(box["x"] + 50, box["y"] + 60)
    mouse.down()
    mouse.move(box["x"] + 120, box["y"] + 60, steps=5)
    mouse.up()
    unzoom = panel.get_by_role("button", name="Reset zoom")
    expect(unzoom).to_be_visible()
    unzoom.click()
    expect(unzoom).to_be_hidden()
    log, plot = panel.get_by_role("button", name="Log scale"), panel.locator(".nbddp-plot").first
    log.click()
    expect(log).to_have_attribute("aria-pressed", "true")
    sheet.page.keyboard.type("dd")  # in JupyterLab, these delete a cell
    expect(panel).to_be_visible()
    assert plot.locator("canvas").count() == 1
    mouse.move(0, 0)
    expect(tips.first).to_be_hidden()


def test_stop_ends_a_run_in_the_background_while_another_cell_is_busy(sheet: Sheet, expect: Any) -> None:
    cell = begin(sheet, LONG[:-1] + ", wait=False)")
    assert not cell.is_busy
    other = sheet.begin("import time; time.sleep(5)")
    cell.panel.get_by_role("button", name="Stop").click()
    expect(cell.panel).to_have_attribute("data-state", "stopped", timeout=10_000)
    assert other.is_busy
    wait_until(lambda: not other.is_busy)
    assert sheet.run("print(run.state)").output.inner_text().strip() == "stopped"


FIT = """
def fit():
    for i in range(40): nbddp.log({"train/loss": 1 / (i + 1)})
    loss = 3 * (nbddp.rank() + 2)
    breakpoint()
    return loss
run = nbddp.run(fit, nprocs=2, device="cpu")
"""


def test_the_debuggers_prompt_is_under_the_cell(sheet: Sheet, expect: Any) -> None:
    cell = sheet.begin(FIT)
    prompt = cell.output.locator(":not(.jp-OutputArea-stdin-hiding) > .jp-Stdin .jp-Stdin-input")
    prompt.fill("p loss", timeout=30_000)
    expect(cell.panel).to_contain_text(re.compile(r"for input|at line \d"))
    prompt.press("Enter")
    expect(cell.output).to_contain_text("rank 1] 9")
    while cell.is_busy:  # on a busy machine, the prompt may be of one rank
        prompt.fill("c", timeout=30_000)
        prompt.press("Enter")
        sheet.page.wait_for_timeout(1000)
    expect(cell.panel).to_have_attribute("data-state", "finished")
