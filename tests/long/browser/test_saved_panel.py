"""What stays of a panel: in the saved file, after a reload of the page, and in other front ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support import START_TIMEOUT_S, free_port, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.lab import Sheet

pytestmark = pytest.mark.timeout(240)


def test_the_saved_notebook_shows_the_picture_without_a_kernel(sheet: Sheet, expect: Any) -> None:
    cell = sheet.run("run = nbddp.run(train, (2, 100, 0.002), nprocs=2, device='cpu')")
    expect(cell.panel.locator("canvas")).to_have_count(2)
    saved = sheet.save()
    saved["cells"] = [each for each in saved["cells"] if each["outputs"]][-1:]
    (output,) = [each for each in saved["cells"][0]["outputs"] if each["output_type"] == "display_data"]
    assert set(output["data"]) == {"text/html", "text/plain"}
    assert len("".join(output["data"]["text/html"])) < 100_000
    assert "widgets" not in saved["metadata"], "no widget state"
    theirs = sheet.lab.notebooks / "theirs.ipynb"  # unsigned, as somebody else's notebook: not trusted
    theirs.write_text(json.dumps(saved))
    page = sheet.page.context.new_page()
    page.goto(sheet.lab.address(theirs.name))
    images = page.locator(".nbddp-picture img")
    expect(images).to_have_count(2, timeout=START_TIMEOUT_S * 1000)
    for image in images.all():
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    assert str(images.first.get_attribute("alt")).startswith("Loss: train 0.")
    expect(page.locator(".nbddp-picture")).to_contain_text("Finished")
    expect(page.locator(".nbddp-picture tr")).to_have_count(3)
    expect(page.locator("section.nbddp")).to_have_count(0)
    page.close()


def test_a_reload_of_a_busy_page_shows_the_last_picture_and_a_lost_kernel_is_said(sheet: Sheet, expect: Any) -> None:
    cell = sheet.begin("run = nbddp.run(train, (1, 100_000), nprocs=2, device='cpu')")
    expect(cell.output.locator(".nbddp-picture img")).to_have_count(2, timeout=30_000)
    expect(cell.panel.locator("canvas")).to_have_count(2, timeout=30_000)
    sheet.save()
    kernel = psutil.Process(sheet.lab.kernel_pid())
    kernel.suspend()
    expect(cell.panel).to_have_attribute("data-lost", "true", timeout=30_000)
    expect(cell.panel.get_by_role("button", name="Stop")).to_be_hidden()
    kernel.resume()
    expect(cell.panel).to_have_attribute("data-lost", "false", timeout=10_000)
    sheet.page.goto(sheet.lab.address(sheet.path.name))
    expect(cell.output.locator(".nbddp-picture, section.nbddp").first).to_be_visible(timeout=60_000)
    expect(cell.output.locator(".nbddp-picture")).to_contain_text("still running")
    expect(sheet.page.get_by_text("Error displaying widget")).to_have_count(0)
    sheet.lab.interrupt()


def test_notebook_7_shows_the_panel_and_stops_the_run(started_browser: Browser, expect: Any) -> None:
    from tests.browser.lab import Lab

    with Lab("notebook") as lab:
        page = started_browser.new_page(viewport={"width": 1100, "height": 900})
        sheet = lab.open(page)
        cell = sheet.begin("run = nbddp.run(train, (1, 100_000), nprocs=2, device='cpu')")
        expect(cell.panel.locator("canvas")).to_have_count(2, timeout=30_000)
        cell.panel.get_by_role("button", name="Stop").click()
        expect(cell.panel).to_have_attribute("data-state", "stopped", timeout=10_000)
        assert sheet.ranks() == []
        page.close()


MARIMO = """
import marimo
app = marimo.App()

@app.cell
def _():
    import time
    import nbddp
    return nbddp, time

@app.cell
def _(nbddp, time):
    def train(steps):
        for step in nbddp.progress(range(steps), desc="step"):
            nbddp.log(loss=1 / (step + 1))
            time.sleep(0.02)
    run = nbddp.run(train, (300,), nprocs=2, device="cpu")
    return
"""


@pytest.fixture
def marimo(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook in marimo's editor, whose cells run when a page opens it."""
    pytest.importorskip("marimo")
    (tmp_path / "train.py").write_text(MARIMO)
    port = free_port()
    command = [sys.executable, "-m", "marimo", "-y", "edit", "train.py", "--headless", "--no-token", f"--port={port}"]
    with open(tmp_path / "log", "wb") as log:
        env = {**os.environ, "HOME": str(tmp_path)}
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env=env)
    try:
        wait_until(lambda: _answers(f"http://127.0.0.1:{port}"), START_TIMEOUT_S, (tmp_path / "log").read_text())
        yield f"http://127.0.0.1:{port}"
    finally:
        for process in [*psutil.Process(server.pid).children(recursive=True), server]:
            process.kill()
        server.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False


def test_marimo_shows_the_panel_and_then_the_picture(marimo: str, started_browser: Browser, expect: Any) -> None:
    page = started_browser.new_page(viewport={"width": 1100, "height": 900})
    with page.expect_response("**/api/kernel/instantiate"):
        page.goto(marimo)
    page.wait_for_timeout(1000)  # the answer comes before the page can run cells
    page.get_by_test_id("run-button").last.click()
    panel, picture = page.locator("section.nbddp"), page.locator(".nbddp-picture")
    expect(panel).to_have_attribute("data-state", "running", timeout=START_TIMEOUT_S * 1000)
    expect(panel.locator("canvas")).to_have_count(1)
    expect(picture).to_contain_text("Finished", timeout=START_TIMEOUT_S * 1000)
    expect(picture.locator("img")).to_have_count(1)
    page.close()
