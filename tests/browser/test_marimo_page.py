"""The panel in marimo's editor, in a real browser: live while the cell is busy; the interrupt ends the run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

in_ci = os.environ.get("CI") == "true"
if not in_ci:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from lab import GONE_S, START_S, browser, chromium
from playwright.sync_api import Page, expect

PYTHON = next((path for path in os.environ.get("NBDDP_TEST_PLACES", "").split(":") if "/marimo/" in path), "")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(chromium() is None and not in_ci, reason="there is no Chromium"),
    pytest.mark.skipif(not PYTHON, reason="needs NBDDP_TEST_PLACES, see tests/places/make.py"),
]

NOTEBOOK = """
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
        for i in nbddp.progress(range(steps), desc="step"):
            nbddp.log(loss=1 / (i + 1))
            time.sleep(0.02)
        return nbddp.rank()
    return (train,)


@app.cell
def _(nbddp, train):
    short = nbddp.run(train, (50,), nprocs=2, device="cpu")
    return (short,)


@app.cell
def _(nbddp, short, train):
    nbddp.run(train, (100_000,), nprocs=2, device="cpu")
    return


if __name__ == "__main__":
    app.run()
"""


@contextlib.contextmanager
def editor() -> Iterator[tuple[str, int]]:
    """The address of an editor with the notebook, and its process id; nothing that it started is left."""
    with tempfile.TemporaryDirectory(prefix="nbl-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        Path(folder, "train.py").write_text(NOTEBOOK)
        homes = {f"XDG_{kind}_HOME": str(Path(folder, kind.lower())) for kind in ("CONFIG", "STATE", "CACHE", "DATA")}
        command = [PYTHON, "-m", "marimo", "edit", "train.py", "--headless", "--no-token", "--skip-update-check"]
        with open(Path(folder, "log"), "wb") as log:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                cwd=folder,
                env={**os.environ, **homes},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        address = f"http://127.0.0.1:{port}"
        try:
            wait_for(f"{address}/health")
            yield address, process.pid
        finally:
            started = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(START_S)
            _, left = psutil.wait_procs(started, GONE_S)
            for each in left:
                each.kill()
        assert not left, f"these are left: {left}"


def wait_for(url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        assert time.monotonic() < deadline, "the editor did not start"
        time.sleep(0.1)


def test_the_panel_is_live_while_a_cell_is_busy_and_the_interrupt_ends_the_run() -> None:
    with editor() as (address, pid), browser() as started:
        page: Page = started.new_page()
        with page.expect_response("**/api/kernel/instantiate"):
            page.goto(address)
        page.wait_for_timeout(1000)  # the answer comes before the page can run cells
        page.get_by_test_id("run-button").last.click()
        panel = page.locator("marimo-anywidget .nbddp")
        picture = page.locator("img[alt^='Chart of']")
        expect(picture).to_have_count(1, timeout=60_000)  # of the short run, whose cell is over
        assert picture.evaluate("image => image.naturalWidth") > 0
        expect(panel.locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
        expect(panel.locator(".nbddp-hint")).to_have_text("to stop, use ■ in the toolbar", timeout=30_000)
        step = panel.locator(".nbddp-tiles > div", has_text="Step").locator("b")
        expect(panel.locator(".nbddp-chart canvas")).to_have_count(1, timeout=30_000)
        before = int(step.inner_text().replace(",", ""))
        expect(step).not_to_have_text(f"{before:,}")
        page.wait_for_timeout(1500)
        assert int(step.inner_text().replace(",", "")) > before + 10
        page.get_by_test_id("interrupt-button").first.click()
        expect(page.get_by_text("This cell was interrupted")).to_be_visible(timeout=30_000)
        expect(panel).to_have_count(0)
        assert psutil.Process(pid).is_running()
