"""A real Jupyter server on loopback and a real browser in front of it, for the tests and the screenshots."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from jupyter_client.session import Session

in_ci = os.environ.get("CI") == "true"
if not in_ci:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Locator, Page, TimeoutError, sync_playwright

START_S = 60.0
OPENED_S = 30.0  # in a page that has JupyterLab already
GONE_S = 5.0
TOKEN = "nbddp-tests"
KERNEL = "nbddp-tests"  # the name python3 would always mean the server's own ipykernel
# Folders with another ipykernel, made by `pip install --no-deps --target FOLDER ipykernel==VERSION`, by kernel name.
_FOLDERS = [Path(path) for path in os.environ.get("NBDDP_TEST_IPYKERNELS", "").split(os.pathsep) if path]
OTHER_KERNELS = {f"ipykernel-{path.name}": path for path in _FOLDERS}
_STDIN = ":not(.jp-OutputArea-stdin-hiding) > .jp-Stdin"  # an answered one stays for a moment, hidden
PROMPT = f"{_STDIN} .jp-Stdin-input"
QUESTION = f"{_STDIN} .jp-Stdin-prompt"
OPEN = """async (path) => {
  const { commands, serviceManager } = window.jupyterapp;
  await serviceManager.kernels.refreshRunning();
  await serviceManager.sessions.refreshRunning();
  const { sessionContext } = await commands.execute("docmanager:open", { path });
  await sessionContext.ready;
}"""
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str | None:
    """Where the browser is, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


IN_A_BROWSER = [  # the marks of a file's tests; in CI none skips
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(chromium() is None and not in_ci, reason="there is no Chromium"),
]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_FLAGS)
        try:
            yield started
        finally:
            started.close()


def type_at_prompt(within: Page | Locator, line: str) -> None:
    """Answer the prompt of a cell's ``input()`` or debugger."""
    prompt = within.locator(PROMPT)
    prompt.wait_for(timeout=20_000)
    prompt.fill(line)
    prompt.press("Enter")


class Lab:
    """JupyterLab or Notebook 7 on a free port of 127.0.0.1, with folders of its own.

    Args:
        app: ``"lab"`` or ``"notebook"``.
        kernels: further kernels by name, each with a folder that it finds packages in first, e.g. another ipykernel.
    """

    def __init__(self, app: str = "lab", kernels: Mapping[str, Path] | None = None) -> None:
        self.app = app
        self._temp = tempfile.TemporaryDirectory(prefix="nbl-")
        self.folder = Path(self._temp.name)
        self.notebooks = self.folder / "notebooks"
        self.notebooks.mkdir()
        self.reset_settings()
        for name, path in {KERNEL: None, **(kernels or {})}.items():
            self._write_kernel(name, path)
        self._process = self._start()
        self.url = self._address()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server, its kernels and all that they started."""
        left = [self._process, *self.processes()]
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self._process.wait()
        self._temp.cleanup()

    def end_kernels(self) -> None:
        """Of all open notebooks; nothing that they started is left."""
        for what in ("sessions", "kernels"):
            for each in self.api(f"api/{what}"):
                with contextlib.suppress(urllib.error.HTTPError):  # it went with its session
                    self.api(f"api/{what}/{each['id']}", "DELETE")
        _, left = psutil.wait_procs(self.processes(), GONE_S)
        assert not left, f"these are left: {left}"

    def api(self, path: str, method: str = "GET") -> Any:
        data = b"" if method == "POST" else None
        request = urllib.request.Request(f"{self.url}/{path}", data, method=method)
        request.add_header("Authorization", f"token {TOKEN}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def execute(self, kernel: str, source: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """Run source in the kernel with that id, beside all pages. Returns the content of its reply."""
        to = json.loads((self.folder / "runtime" / f"kernel-{kernel}.json").read_text())
        session = Session(key=to["key"].encode(), signature_scheme=to["signature_scheme"])
        with zmq.Context() as context, context.socket(zmq.DEALER) as shell:
            shell.linger = 0
            shell.connect(f"tcp://{to['ip']}:{to['shell_port']}")
            session.send(shell, "execute_request", {"code": source, "silent": True, "allow_stdin": False})
            assert shell.poll(timeout_s * 1000), f"kernel {kernel} does not answer"
            return dict(session.recv(shell)[1]["content"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """All that the server has started, directly or not."""
        return psutil.Process(self.pid).children(recursive=True)

    def kernel_of(self, name: str) -> dict[str, Any] | None:
        """What the server knows about the kernel of that notebook; None if there is none."""
        with contextlib.suppress(urllib.error.HTTPError):  # while another kernel is on its way out
            return next((each["kernel"] for each in self.api("api/sessions") if each["path"] == name), None)
        return None

    def kernel_pid(self, name: str) -> int:
        """The process id of the kernel of that notebook."""
        kernel = self.kernel_of(name)
        assert kernel is not None
        return next(each.pid for each in self.processes() if kernel["id"] in " ".join(each.cmdline()))

    def write(self, name: str, cells: Sequence[str], kernel: str = KERNEL) -> Path:
        """A notebook of these cells."""
        code = [
            {
                "cell_type": "code",
                "id": f"c{i}",
                "source": source,
                "metadata": {},
                "outputs": [],
                "execution_count": None,
            }
            for i, source in enumerate(cells)
        ]
        metadata = {"kernelspec": {"name": kernel, "display_name": "Python 3", "language": "python"}}
        path = self.notebooks / name
        path.write_text(json.dumps({"cells": code, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
        return path

    def open(self, page: Page, name: str) -> None:
        """The notebook in the page, its kernel ready. A page that has JupyterLab already does not load it again."""
        if self.app == "lab" and page.evaluate("Boolean(window.jupyterapp)"):
            page.evaluate(OPEN, name)
            # A page whose kernels have been ended from outside may wait for the new one forever.
            with contextlib.suppress(TimeoutError):
                return self._wait_until_ready(page, name, OPENED_S)
        return self.load(page, name)

    def load(self, page: Page, name: str) -> None:
        """The same in a page that is loaded for it."""
        tree = "lab/tree" if self.app == "lab" else "notebooks"
        page.goto(f"{self.url}/{tree}/{name}?token={TOKEN}&reset")  # reset: no other notebook is open
        self._wait_until_ready(page, name)

    def _wait_until_ready(self, page: Page, name: str, timeout_s: float = START_S) -> None:
        page.wait_for_selector(".jp-CodeCell", timeout=timeout_s * 1000)
        page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=timeout_s * 1000)
        deadline = time.monotonic() + START_S
        # The page says idle a moment before it can execute.
        while not self._is_ready(name):
            assert time.monotonic() < deadline, "no kernel is ready"
            time.sleep(0.1)
        page.wait_for_timeout(500)

    def _is_ready(self, name: str) -> bool:
        kernel = self.kernel_of(name)
        return bool(kernel and kernel["connections"] and kernel["execution_state"] == "idle")

    def run(self, page: Page, index: int) -> None:
        """Start a cell; returns as soon as the kernel has it."""
        cell = page.locator(".jp-Notebook .jp-CodeCell").nth(index)
        prompt = cell.locator(".jp-InputPrompt").first
        before = prompt.inner_text()
        prompt.click()
        page.keyboard.press("Control+Enter")
        deadline = time.monotonic() + START_S
        while prompt.inner_text() == before and time.monotonic() < deadline:
            time.sleep(0.02)

    def run_to_end(self, page: Page, index: int) -> None:
        self.run(page, index)
        prompt = page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".jp-InputPrompt").first
        deadline = time.monotonic() + START_S
        while "*" in prompt.inner_text():
            assert time.monotonic() < deadline, f"cell {index} has not ended"
            time.sleep(0.02)

    def reset_settings(self) -> None:
        """Undo what has been set in a page, as a theme."""
        settings = self.folder / "config" / "lab" / "user-settings" / "@jupyterlab"
        shutil.rmtree(settings, ignore_errors=True)
        for plugin, values in {
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
            "docmanager-extension/plugin": {"autosave": False},
            "codemirror-extension/plugin": {"defaultConfig": {"autoClosingBrackets": False}},
            "completer-extension/manager": {"providerTimeout": 10_000},  # 1 s is too short on a busy machine
        }.items():
            path = settings / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))

    def _write_kernel(self, name: str, path: Path | None) -> None:
        paths = [str(path or ""), os.environ.get("PYTHONPATH", "")]
        spec = {
            "argv": [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": "Python 3",
            "language": "python",
            "env": {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        }
        folder = self.folder / "data" / "kernels" / name
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps(spec))

    def _start(self) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            "JUPYTER_RUNTIME_DIR": str(self.folder / "runtime"),
            "JUPYTER_DATA_DIR": str(self.folder / "data"),
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "JUPYTERLAB_SETTINGS_DIR": str(self.folder / "config" / "lab" / "user-settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(self.folder / "workspaces"),
            "IPYTHONDIR": str(self.folder / "ipython"),
        }
        command = [sys.executable, "-m", "jupyter", self.app, "--no-browser", "--allow-root", "--ServerApp.port=0"]
        command += ["--ServerApp.ip=127.0.0.1", f"--IdentityProvider.token={TOKEN}"]
        command += [
            f"--ServerApp.root_dir={self.notebooks}",
            "--LabApp.news_url=",
            "--LabApp.extension_manager=readonly",
            "--LabApp.expose_app_in_browser=True",  # window.jupyterapp
        ]
        with open(self.folder / "server.log", "wb") as log:
            return subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=self.notebooks)

    def _address(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for path in (self.folder / "runtime").glob("jpserver-*.json"):
                with contextlib.suppress(json.JSONDecodeError, OSError):
                    info = json.loads(path.read_text())
                    address = f"http://127.0.0.1:{info['port']}"
                    with urllib.request.urlopen(f"{address}/api?token={TOKEN}", timeout=5):
                        return address
            time.sleep(0.1)
        raise AssertionError("the server did not start:\n" + (self.folder / "server.log").read_text()[-4000:])
