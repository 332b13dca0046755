"""What stays of a panel in a real JupyterLab: after a reload of the page, in the saved notebook, and as a file."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab import CHROMIUM_FLAGS, IN_A_BROWSER, Lab, chromium
from nbconvert import HTMLExporter
from notebook_page import (
    ARTEFACTS,
    FAKES,
    LONG,
    NotebookPage,
    first_loss,
    go_dark,
    number,
    wait_until,
)
from playwright.sync_api import Browser, Page, expect

pytestmark = IN_A_BROWSER


def test_a_page_reload_keeps_all_points_and_output(notebook: NotebookPage) -> None:
    steps = "print(nbddp.last_run().stop(), list(map(int, set(np.diff(nbddp.last_run().history['train/loss'].steps)))))"
    notebook.open(
        "run = nbddp.run(train, (50, 1000, 0.005), nprocs=2, device='cpu', wait=False)",
        "nbddp.last_run().show()",
        "import numpy as np; " + steps,
    )
    notebook.run_to_end(1)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    notebook.panel.locator("details.nbddp-logs summary").click()
    expect(notebook.panel.get_by_role("tabpanel")).to_contain_text("epoch 0 on rank 0", timeout=30_000)
    before = number(notebook.tile("Step"))
    notebook.page.keyboard.press("Control+s")
    path = notebook.path
    wait_until(lambda: "nbddp-picture" in path.read_text())
    assert "widget-view" not in path.read_text()
    notebook.page.goto("about:blank")
    notebook.load()
    expect(notebook.output(1).locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    notebook.run_to_end(2)
    for panel in (notebook.output(1).locator(".nbddp"), notebook.output(2).locator(".nbddp")):
        expect(panel.locator("canvas")).to_have_count(2, timeout=30_000)
        assert number(panel.locator(".nbddp-tiles b").first.inner_text()) >= before
        plot = panel.locator(".nbddp-plot").first
        plot.focus()
        for _ in range(11):
            notebook.page.keyboard.press("PageUp")
        label = plot.get_attribute("aria-label")
        assert f"Chart of Loss at step 1: train {first_loss(0):.4f}" in label, "the first step ever logged"
        panel.locator("details.nbddp-logs summary").click()
        expect(panel.get_by_role("tabpanel")).to_contain_text("epoch 0 on rank 0")
        expect(panel.locator("tbody tr")).to_have_count(2)
    notebook.run_to_end(3)
    expect(notebook.output(3)).to_have_text("None [1]")
    expect(notebook.output(2).locator(".nbddp-picture")).to_contain_text("Stopped", timeout=10_000)
    panel = notebook.output(1).locator(".nbddp")
    expect(panel.locator(".nbddp-chip")).to_have_text("Stopped", timeout=10_000)
    expect(panel.locator("canvas")).to_have_count(2)


def test_a_run_goes_on_when_the_browser_is_killed(shared_lab: Lab, shared_browser: Browser, tmp_path: Path) -> None:
    """A laptop's battery, while a cell is busy: the run goes on to its end, and the kernel to its next."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    doomed = shared_browser.browser_type.launch(executable_path=chromium(), args=CHROMIUM_FLAGS)
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    notebook = NotebookPage(shared_lab, doomed.new_page())
    told = tmp_path / "told"
    tell = f"open({str(told)!r}, 'w').write(f'{{run.state}} {{run.value}} {{nbddp.run(nbddp.rank, nprocs=2).values}}')"
    notebook.open(f"run = nbddp.run(train, (1, 300), nprocs=2, device='cpu')\n{tell}")
    notebook.run(1)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until(lambda: told.exists() and told.read_text())
    assert told.read_text() == "finished 300 [0, 1]"
    shared_lab.end_kernels()
    with contextlib.suppress(Exception):  # its driver has lost it already
        doomed.close()


def test_the_saved_notebook_shows_the_picture_without_a_kernel(notebook: NotebookPage, page: Page) -> None:
    notebook.open("run = nbddp.run(train, (2, 100), nprocs=2, device='cpu')")
    notebook.run_to_end(1)
    panel = notebook.output(1).locator(".nbddp")
    expect(panel.locator(".nbddp-chip")).to_have_text("Finished")
    panel.locator(".u-over").first.hover()
    expect(panel.locator(".nbddp-step")).to_have_text(re.compile(r"step \d+"))
    page.keyboard.press("Control+s")
    path = notebook.path
    wait_until(lambda: "nbddp-picture" in path.read_text())
    saved = json.loads(path.read_text())
    outputs = saved["cells"][1]["outputs"]
    assert len(json.dumps(outputs)) < 200_000
    assert not any("widget-view" in mime for output in outputs for mime in output.get("data", {}))
    page.goto("about:blank")
    notebook.lab.end_kernels()
    # Unsigned: as somebody else's notebook, untrusted.
    saved["cells"][0]["source"] = "# not run here"
    (notebook.lab.notebooks / "theirs.ipynb").write_text(json.dumps(saved))
    notebook.lab.load(page, "theirs.ipynb")
    image = page.locator(".nbddp-picture img[alt^='Chart of']").first
    expect(image).to_be_visible()
    assert image.evaluate("image => image.complete && image.naturalWidth") > 0
    axis, curves = page.locator(".nbddp-picture img").first.bounding_box(), image.bounding_box()
    assert (axis["y"], axis["height"]) == (curves["y"], curves["height"]) == (curves["y"], 194)
    assert axis["x"] + axis["width"] == curves["x"], "the page has kept the layout"
    expect(page.locator(".nbddp-picture table").nth(0)).to_contain_text("train/loss")
    expect(page.locator(".nbddp-picture table").nth(1)).to_contain_text("finished")
    html = HTMLExporter().from_filename(path)[0]
    assert "data:image/svg+xml;base64," in html


LAST = re.compile(r"Running.*train.*as of \d\d:\d\d:\d\d, before the run's end")


def test_a_reload_during_a_blocking_run_shows_the_last_picture(notebook: NotebookPage, page: Page) -> None:
    notebook.open("import nbddp.panel.live\nnbddp.panel.live._PICTURE_S = 0.5", LONG)
    notebook.run_to_end(1)
    notebook.run(2)
    expect(notebook.output(2).locator(".nbddp-picture img").first).to_be_attached(timeout=30_000)
    expect(notebook.output(2).locator(".nbddp-picture")).to_contain_text(LAST)
    page.keyboard.press("Control+s")
    path = notebook.path
    wait_until(lambda: "nbddp-picture" in path.read_text())
    assert "widget-view" not in path.read_text()
    page.reload()
    expect(notebook.output(2).locator(".nbddp-picture, .nbddp").first).to_be_visible(timeout=60_000)
    expect(notebook.output(2).locator(".nbddp-picture")).to_contain_text(LAST)
    expect(page.get_by_text("Loading widget")).to_have_count(0)
    os.kill(notebook.kernel_pid(), signal.SIGKILL)
    page.goto("about:blank")
    notebook.lab.end_kernels()
    notebook.load()
    expect(notebook.output(2).locator(".nbddp-picture img").first).to_be_visible()
    expect(page.get_by_text("Error displaying widget")).to_have_count(0)


def test_a_new_picture_below_the_panel_keeps_its_zoom(notebook: NotebookPage, page: Page) -> None:
    notebook.open("import nbddp.panel.live\nnbddp.panel.live._PICTURE_S = 0.3", LONG)
    notebook.run_to_end(1)
    notebook.run(2)
    panel = notebook.panel
    expect(panel.locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    panel.get_by_role("button", name="Log scale").click()
    panel.locator("details.nbddp-logs summary").click()
    panel.evaluate("element => window.first = element")
    before = notebook.output(2).locator(".nbddp-picture").text_content()
    wait_until(lambda: notebook.output(2).locator(".nbddp-picture").text_content() != before)
    page.wait_for_timeout(1000)
    assert panel.evaluate("element => window.first === element")
    expect(panel.get_by_role("button", name="Log scale")).to_have_attribute("aria-pressed", "true")
    panel.get_by_role("button", name="Stop").click()
    expect(panel.locator(".nbddp-chip")).to_have_text("Stopped", timeout=10_000)
    expect(panel.get_by_role("tabpanel")).to_be_visible()
    expect(panel).to_have_count(1)


def test_of_many_finished_runs_the_oldest_shows_its_picture(notebook: NotebookPage) -> None:
    notebook.open(
        FAKES + "import nbddp.panel.live\nnbddp.panel.live._KEPT = 2",
        *["run.now = dataclasses.replace(run.now, state='finished'); show(run)"] * 3,
    )
    for cell in (1, 2, 3, 4):
        notebook.run_to_end(cell)
    expect(notebook.output(2).locator(".nbddp-picture img").first).to_be_visible()
    for cell in (3, 4):
        expect(notebook.output(cell).locator(".nbddp canvas")).to_have_count(2)
        expect(notebook.output(cell).locator(".nbddp-picture")).to_be_hidden()
    expect(notebook.panel).to_have_count(2)


def test_show_after_a_run_displays_the_panel_and_saves_the_picture(notebook: NotebookPage, page: Page) -> None:
    notebook.open("run = nbddp.run(train, (2, 100), nprocs=2, device='cpu', show=False)", "run.show()")
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    output = notebook.output(2)
    expect(output.locator(".nbddp canvas")).to_have_count(2)
    expect(output.locator(".nbddp-picture")).to_be_hidden()
    page.keyboard.press("Control+s")
    path = notebook.path
    wait_until(lambda: "nbddp-picture" in path.read_text())
    page.goto("about:blank")
    notebook.load()
    expect(output.locator(".nbddp canvas")).to_have_count(2, timeout=30_000)
    page.goto("about:blank")
    notebook.lab.end_kernels()
    notebook.load()
    expect(page.locator(".nbddp-picture img").first).to_be_visible()
    expect(page.locator(".nbddp")).to_have_count(0)
    expect(page.locator(".jp-OutputArea", has_text="Error displaying widget")).to_have_count(0)
    assert "data:image/svg+xml;base64," in HTMLExporter().from_filename(path)[0]


def test_a_panel_shown_instead_of_a_picture_is_removed_with_its_output(notebook: NotebookPage) -> None:
    notebook.open("run = nbddp.run(train, (1, 50), nprocs=2, device='cpu', show=False); run.show()", "1")
    notebook.run_to_end(1)
    expect(notebook.panel.locator("canvas")).to_have_count(2)
    notebook.page.locator('.lm-MenuBar-itemLabel:text-is("Edit")').click()
    notebook.page.locator('.lm-Menu-itemLabel:text-is("Clear Outputs of All Cells")').click()
    expect(notebook.panel).to_have_count(0)
    notebook.run_to_end(1)
    expect(notebook.panel).to_have_count(1)
    expect(notebook.panel.locator("canvas")).to_have_count(2)
    assert not notebook.problems


# ---------------------------------------------------------------------------- figures


SHOW = """
import torch

class Table:
    def __init__(self, step):
        self.step = step

    def _repr_html_(self):
        run = "parent.document.title = 'it ran'"
        return f"<script>{run}</script><img src=x onerror=\\"{run}\\"><table><tr><td>row {self.step}</td></tr></table>"

def paint(steps, pause=0.3):
    for step in nbddp.progress(range(1, steps + 1), desc="step"):
        nbddp.log(loss=1 / step, step=step)
        nbddp.show(torch.full((8, 12), step, dtype=torch.uint8), "a <b>name</b>")
        nbddp.show(Table(step), "table")
        time.sleep(pause)
"""


SHADE = """image => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, 1, 1).data[0];
}"""


def test_the_slider_goes_back_through_the_steps_of_a_figure(notebook: NotebookPage) -> None:
    notebook.open(SHOW + "nbddp.run(paint, (200,), nprocs=2, device='cpu');")
    notebook.run(1)
    page, figure = notebook.page, notebook.panel.locator(".nbddp-figure").first
    title, slider, image = figure.locator("strong"), figure.locator("input"), figure.locator("img")
    expect(title).to_have_text("a <b>name</b>", timeout=30_000)
    wait_until(lambda: int(slider.get_attribute("max") or 0) >= 4)
    place = "e => [e.offsetTop, e.offsetLeft, e.offsetWidth, e.offsetHeight]"
    before = figure.locator(".nbddp-stage").evaluate(place)
    newest = image.evaluate(SHADE)
    wait_until(lambda: image.evaluate(SHADE) > newest)  # at its right end it follows the newest
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    chosen = number((slider.get_attribute("aria-valuetext") or "").removeprefix("step "))
    expect(image).to_have_attribute("alt", f"a <b>name</b>, step {chosen}")
    assert image.evaluate(SHADE) == chosen
    wait_until(lambda: "newest" in figure.locator(".nbddp-figure-step").inner_text())
    page.wait_for_timeout(1200)
    assert image.evaluate(SHADE) == chosen, "it stays, whatever comes"
    page.keyboard.type("dd")  # in JupyterLab, these delete a cell
    page.keyboard.press("End")
    wait_until(lambda: image.evaluate(SHADE) > chosen + 3)
    assert figure.locator(".nbddp-stage").evaluate(place) == before, "nothing has moved"
    expect(page.locator(".jp-Notebook .jp-CodeCell")).to_have_count(2)
    notebook.panel.get_by_role("button", name="Stop").click()
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Stopped", timeout=20_000)


def test_a_table_is_shown_without_its_scripts_and_figures_survive_a_reload(notebook: NotebookPage) -> None:
    notebook.open(SHOW + "nbddp.run(paint, (5, 0.05), nprocs=2, device='cpu');")
    notebook.run_to_end(1)
    page = notebook.page
    frame = notebook.panel.frame_locator("iframe")
    expect(frame.locator("td")).to_have_text("row 5")
    assert frame.locator("td").evaluate("e => getComputedStyle(e).color") == notebook.panel.evaluate(
        "e => getComputedStyle(e).color"
    )
    notebook.panel.locator(".nbddp-figure input").nth(1).focus()
    page.keyboard.press("Home")
    expect(frame.locator("td")).to_have_text("row 1")
    assert "it ran" not in page.title()
    page.keyboard.press("Control+s")
    page.wait_for_timeout(1000)
    saved = notebook.path.read_text()
    assert "data:image/png;base64," in saved
    assert "left out here (HTML)" in saved
    page.reload()
    slider = notebook.panel.locator(".nbddp-figure input").first
    expect(slider).to_have_attribute("max", "4", timeout=60_000)
    expect(notebook.panel.locator(".nbddp-figure img")).to_have_attribute("alt", "a <b>name</b>, step 5")


# ---------------------------------------------------------------------------- files


SIZE = """async (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const bitmap = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
    const context = canvas.getContext("2d");
    context.drawImage(bitmap, 0, 0);
    const { data } = context.getImageData(0, 0, bitmap.width, bitmap.height);
    const same = (r, g, b) => { let n = 0; for (let i = 0; i < data.length; i += 4) {
        n += Number(data[i] === r && data[i + 1] === g && data[i + 2] === b); } return n; };
    return { width: bitmap.width, height: bitmap.height, white: same(255, 255, 255), blue: same(0x25, 0x63, 0xeb) };
}"""


def _saved(panel: Any, kind: str) -> tuple[str, bytes]:
    with panel.page.expect_download() as download:
        panel.get_by_role("button", name=f"Save as {kind}").click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


@pytest.mark.usefixtures("own_page")
def test_the_panel_is_saved_as_a_picture_and_its_metrics_as_a_file(notebook: NotebookPage) -> None:
    name = "lr 0.1/a"
    notebook.open(
        f"run = nbddp.run(train, (2, 100), nprocs=2, device='cpu', name={name!r})\nrun.history.to_csv('own.csv')"
    )
    notebook.run_to_end(1)
    page, panel = notebook.page, notebook.panel
    go_dark(page)
    expect(panel).to_have_attribute("data-theme", "dark")
    name, png = _saved(panel, "PNG")
    assert name == "lr_0.1_a.png"
    picture = page.evaluate(SIZE, base64.b64encode(png).decode())
    assert picture["width"] == 2 * 744
    assert 600 < picture["height"] < 900
    assert picture["white"] > 0.8 * picture["width"] * picture["height"], "light, whatever the page's theme"
    assert picture["blue"] > 1_000
    ARTEFACTS.mkdir(exist_ok=True)
    (ARTEFACTS / "saved.png").write_bytes(png)
    expect(page.locator(".nbddp-sheet")).to_have_count(0)
    own = (notebook.lab.notebooks / "own.csv").read_bytes()
    assert _saved(panel, "CSV") == ("lr_0.1_a.csv", own)
    expect(panel.locator(".nbddp-remark").last).to_be_hidden()
    os.kill(notebook.kernel_pid(), signal.SIGKILL)
    assert _saved(panel, "CSV") == ("lr_0.1_a-thinned.csv", own), "this page has all of its few points"
    said = "The kernel did not answer, so lr_0.1_a-thinned.csv has only the 402 points that this page has."
    expect(panel.locator(".nbddp-remark").last).to_have_text(said)
    notebook.lab.end_kernels()


def test_a_large_file_comes_whole_through_the_servers_limit(notebook: NotebookPage) -> None:
    many = "big = FakeRun(now=status('finished'))\nRank(big.history).log('loss', range(200_000), "
    many += "[s / 7 for s in range(200_000)])\nbig.history.to_csv('own.csv'); view = show(big)"
    notebook.open(FAKES, many)
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    own = (notebook.lab.notebooks / "own.csv").read_bytes()
    assert len(own) > 4_000_000
    assert _saved(notebook.panel, "CSV") == ("train.csv", own)


def test_the_metrics_so_far_are_saved_while_the_cell_is_busy(notebook: NotebookPage) -> None:
    notebook.open(LONG)
    notebook.run(1)
    expect(notebook.panel.locator("canvas")).to_have_count(2, timeout=30_000)
    _, text = _saved(notebook.panel, "CSV")
    rows = text.decode().splitlines()
    assert rows[0] == "step,train/loss,train/acc"
    assert rows[1].startswith(f"1,{first_loss(0)},")
    assert int(rows[-1].split(",")[0]) == len(rows) - 1
    notebook.panel.get_by_role("button", name="Stop").click()
