"""A real Jupyter server on loopback, and a page of a real browser in front of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Locator, Page

from tests.support import START_TIMEOUT_S, gone, ranks_of, wait_until

TOKEN = "nbddp-tests"
_CELLS = 24
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
    "codemirror-extension/plugin": {"defaultConfig": {"autoClosingBrackets": False}},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
TRAIN = """
import math, random, time
import nbddp
def train(epochs=3, steps=200, pause=0.01, fail_at=None):
    noise, step = random.Random(nbddp.rank()), 0
    for epoch in nbddp.progress(range(epochs), desc="epoch"):
        for _ in nbddp.progress(range(steps), desc="step"):
            step += 1
            loss = 2.4 * math.exp(-step / 160) + 0.2 + noise.gauss(0, 0.06)
            nbddp.log({"train/loss": loss, "train/acc": 1 - 0.4 * loss}, reduce="mean")
            time.sleep(pause)
            if step == fail_at and nbddp.rank() == 1:
                print("about to fail <b>now</b>", flush=True)
                raise ValueError(f"shapes <script>do not</script> fit at step {step}")
        nbddp.log({"val/loss": 2.4 * math.exp(-step / 160) + 0.25}, step=step)
        print(f"epoch {epoch} on rank {nbddp.rank()}", flush=True)
    return step
nbddp.run(nbddp.rank, nprocs=2, device="cpu", show=False)
"""


def chromium() -> str | None:
    """Where the browser is, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Lab:
    """JupyterLab or Notebook 7 (``app``: "lab" or "notebook") on a free port, with folders of its own."""

    def __init__(self, app: str = "lab") -> None:
        self._app = app
        self._temp = tempfile.TemporaryDirectory(prefix="nbl-")
        self._folder = Path(self._temp.name)
        self.notebooks = self._folder / "notebooks"
        self.notebooks.mkdir()
        for plugin, values in SETTINGS.items():
            self._write(self._folder / f"settings/@jupyterlab/{plugin}.jupyterlab-settings", values)
        # The name python3 would always mean the server's own kernel, without this environment.
        argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "Python 3", "language": "python", "env": {"NBDDP_PANEL": ""}}
        self._write(self._folder / "data/kernels/nbddp-tests/kernel.json", spec)
        self._process = self._start()
        self.url = str(wait_until(self._address, START_TIMEOUT_S, "the server is there"))

    @staticmethod
    def _write(path: Path, values: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    def _start(self) -> subprocess.Popen[bytes]:
        folders = {"RUNTIME_DIR": "runtime", "DATA_DIR": "data", "CONFIG_DIR": "config"}
        environ = {f"JUPYTER_{name}": str(self._folder / each) for name, each in folders.items()}
        environ |= {f"JUPYTERLAB_{name.upper()}_DIR": str(self._folder / name) for name in ("settings", "workspaces")}
        options = (
            f"--no-browser --allow-root --ServerApp.port=0 --ServerApp.ip=127.0.0.1 --IdentityProvider.token={TOKEN} "
            f"--ServerApp.root_dir={self.notebooks} --LabApp.news_url= --LabApp.extension_manager=readonly"
        )
        command = [sys.executable, "-m", "jupyter", self._app, *options.split()]
        with open(self._folder / "server.log", "wb") as log:
            return subprocess.Popen(command, env=os.environ | environ, stdout=log, stderr=log, cwd=self.notebooks)

    def _address(self) -> str | None:
        for path in (self._folder / "runtime").glob("jpserver-*.json"):
            with contextlib.suppress(json.JSONDecodeError, OSError):
                address = f"http://127.0.0.1:{json.loads(path.read_text())['port']}"
                with urllib.request.urlopen(f"{address}/api?token={TOKEN}", timeout=5):
                    return address
        return None

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End the server, its kernels, and all that they have started."""
        left = [self._process, *psutil.Process(self._process.pid).children(recursive=True)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self._process.wait()
        self._temp.cleanup()

    def api(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(f"{self.url}/{path}", b"" if method == "POST" else None, method=method)
        request.add_header("Authorization", f"token {TOKEN}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def interrupt(self) -> None:
        """As the toolbar's button."""
        for kernel in self.api("api/kernels"):
            self.api(f"api/kernels/{kernel['id']}/interrupt", "POST")

    def kernel_pid(self) -> int:
        kernel = self.api("api/kernels")[0]["id"]
        children = psutil.Process(self._process.pid).children()
        return next(each.pid for each in children if kernel in " ".join(each.cmdline()))

    def write(self, *sources: str) -> Path:
        """A notebook of these cells."""
        code = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
        cells = [{**code, "id": f"c{i}", "source": source} for i, source in enumerate(sources)]
        kernel = {"name": "nbddp-tests", "display_name": "Python 3", "language": "python"}
        path = self.notebooks / f"n{time.monotonic_ns()}.ipynb"
        self._write(path, {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
        return path

    def open(self, page: Page) -> Sheet:
        """A notebook with empty cells in the page; ``train`` is defined, and the fork server is warm."""
        sheet = Sheet(self, page, self.write(TRAIN, *[""] * _CELLS))
        sheet.load()
        sheet.run()
        return sheet

    def address(self, name: str) -> str:
        tree = "lab/tree" if self._app == "lab" else "notebooks"
        return f"{self.url}/{tree}/{name}?token={TOKEN}&reset"  # reset: no other notebook is open


class Sheet:
    """A notebook in a page."""

    def __init__(self, lab: Lab, page: Page, path: Path) -> None:
        self.lab, self.page, self.path = lab, page, path
        self.problems: list[str] = []
        self._begun: list[Cell] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))

    def load(self) -> None:
        """Load the page, with the notebook as it's saved."""
        self.page.goto(self.lab.address(self.path.name))
        self.page.wait_for_selector(".jp-CodeCell", timeout=START_TIMEOUT_S * 1000)
        wait_until(self._is_ready, START_TIMEOUT_S, "the kernel is ready")
        self.page.wait_for_timeout(500)

    def _is_ready(self) -> bool:
        found = [each["kernel"] for each in self.lab.api("api/sessions") if each["path"] == self.path.name]
        return bool(found and found[0]["connections"] and found[0]["execution_state"] == "idle")

    def begin(self, source: str = "") -> Cell:
        """Run the next cell, with this source if it's empty."""
        cell = Cell(self.page.locator(".jp-Notebook .jp-CodeCell").nth(len(self._begun)))
        self._begun.append(cell)
        before = cell.prompt
        if source:
            cell.locator.locator(".cm-content").click()
            self.page.keyboard.insert_text(source)
        else:
            cell.locator.locator(".jp-InputPrompt").first.click()
        self.page.keyboard.press("Control+Enter")
        wait_until(lambda: cell.prompt != before, START_TIMEOUT_S)
        return cell

    def run(self, source: str = "") -> Cell:
        cell = self.begin(source)
        wait_until(lambda: not cell.is_busy, START_TIMEOUT_S)
        return cell

    def is_busy(self) -> bool:
        return any(cell.is_busy for cell in self._begun)

    def save(self) -> dict[str, Any]:
        """Save, and return what's in the file."""
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        wait_until(lambda: self.path.stat().st_mtime_ns != before)
        self.page.wait_for_timeout(200)
        return dict(json.loads(self.path.read_text()))

    def ranks(self) -> list[int]:
        return [pid for pid in ranks_of(self.lab.kernel_pid()) if not gone(pid)]


@dataclass
class Cell:
    locator: Locator

    @property
    def prompt(self) -> str:
        return self.locator.locator(".jp-InputPrompt").first.inner_text()

    @property
    def is_busy(self) -> bool:
        return "*" in self.prompt

    @property
    def output(self) -> Locator:
        return self.locator.locator(".jp-OutputArea").first

    @property
    def panel(self) -> Locator:
        return self.output.locator("section.nbddp")

    def tile(self, name: str) -> int:
        """The number in a tile."""
        label = self.panel.locator("[data-part=tiles]").get_by_text(name, exact=True)
        return int(re.sub(r"\D", "", label.locator("xpath=..").locator("b").inner_text()))
