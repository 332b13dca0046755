"""Lets one page and one kernel serve many tests: afterwards they are as good as new, and nothing of a run is left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import psutil
from lab import GONE_S, Lab
from playwright.sync_api import Browser, Page

from tests.support import marked_pids, strangers

SIZE = {"width": 1100, "height": 900}
_INTERRUPTED_S = 20.0
_OF_THE_BROWSER = ("/chromium", "/chrome", "/playwright/")  # the programs that show and drive it
_CLOSE = """async () => {
  for (const widget of [...window.jupyterapp.shell.widgets("main")]) widget.dispose();
  if (document.body.dataset.jpThemeLight !== "true")
    await window.jupyterapp.commands.execute("apputils:change-theme", { theme: "JupyterLab Light" });
}"""
# What a kernel knows of the runs before, and what a test has replaced in a module, is gone afterwards.
_FORGET = """
import importlib, sys
if "nbddp.kernel.run" in sys.modules:
    for run in sys.modules["nbddp.kernel.run"].going():
        run.stop()
if "ipywidgets" in sys.modules:
    sys.modules["ipywidgets"].Widget.close_all()
for name in ("nbddp.kernel.earlier", "nbddp.panel.live"):
    if name in sys.modules:
        importlib.reload(sys.modules[name])
get_ipython().reset(new_session=True)
"""


class SharedPage:
    """A page with JupyterLab, loaded once for many tests."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._page: Page | None = None

    def get(self) -> Page:
        self._page = self._page or self._browser.new_page(viewport=SIZE)
        return self._page

    def tidy(self) -> None:
        """Close all notebooks, whose panels go with them, and undo what a test has set."""
        page = self.get()
        page.unroute_all()
        page.emulate_media(color_scheme="null", forced_colors="null", reduced_motion="null")
        page.set_viewport_size(SIZE)
        page.evaluate(_CLOSE)
        page.wait_for_selector('body[data-jp-theme-light="true"]', state="attached")
        page.wait_for_function("() => !document.querySelector('.nbddp')")

    def drop(self) -> None:
        """Have the next test load a page of its own."""
        if self._page is not None:
            self._page.close()
        self._page = None


def settle(lab: Lab, shared_memory: set[str], others: set[int]) -> None:
    """End all runs and make all kernels forget them; nothing is left but the kernels and their fork servers.

    Args:
        shared_memory: the names in /dev/shm before the test.
        others: the processes before the test, such as a notebook of other tests.
    """
    deadline = time.monotonic() + _INTERRUPTED_S
    for kernel in lab.api("api/kernels"):
        _interrupt(lab, kernel["id"], deadline)
        while (reply := lab.execute(kernel["id"], _FORGET))["status"] == "aborted":  # as all that waits at an error
            assert time.monotonic() < deadline
        assert reply["status"] == "ok", reply
    deadline = time.monotonic() + GONE_S
    while (left := _processes_left(lab, others)) or set(os.listdir("/dev/shm")) - shared_memory:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes are left: {left}"
    assert not (more := set(os.listdir("/dev/shm")) - shared_memory), f"left in /dev/shm: {more}"


def _interrupt(lab: Lab, kernel: str, deadline: float) -> None:
    """End the cell that it may be busy with."""
    if lab.api(f"api/kernels/{kernel}")["execution_state"] == "idle":
        return
    lab.api(f"api/kernels/{kernel}/interrupt", "POST")
    while lab.api(f"api/kernels/{kernel}")["execution_state"] != "idle":
        assert time.monotonic() < deadline, "the cell goes on after an interrupt"
        time.sleep(0.02)


def _processes_left(lab: Lab, others: set[int]) -> dict[int, str]:
    """Every process that the test has started, wherever it hangs now, and that shall not stay."""
    known = [each["id"] for each in lab.api("api/kernels")]
    stay = {lab.pid} | others | {pid for pid, command in _commands() if any(kernel in command for kernel in known)}
    return {pid: what for pid, what in strangers(stay).items() if not any(word in what for word in _OF_THE_BROWSER)}


def _commands() -> Iterator[tuple[int, str]]:
    for pid in marked_pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield pid, " ".join(psutil.Process(pid).cmdline())
