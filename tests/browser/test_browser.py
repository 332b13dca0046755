"""The panel in a real JupyterLab and a real browser, while a cell is busy and afterwards."""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

in_ci = os.environ.get("CI") == "true"
if not in_ci:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from lab import CHROMIUM_FLAGS, PROMPT, Lab, browser, chromium, type_at_prompt
from playwright.sync_api import Browser, Page, expect

ARTEFACTS = Path(__file__).parents[1] / "artefacts"
# Folders with another ipykernel, made by `pip install --no-deps --target FOLDER ipykernel==VERSION`.
OTHER_KERNELS = [Path(p) for p in os.environ.get("NBDDP_TEST_IPYKERNELS", "").split(os.pathsep) if p]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(chromium() is None and not in_ci, reason="there is no Chromium"),
]

TRAIN = """
import math, random, time
import nbddp

def train(epochs=3, steps=200, pause=0.01, fail_at=None):
    noise, step = random.Random(nbddp.rank()), 0
    for epoch in nbddp.progress(range(epochs), desc="epoch"):
        for _ in nbddp.progress(range(steps), desc="step"):
            step += 1
            loss = 2.4 * math.exp(-step / 160) + 0.2 + noise.gauss(0, 0.06)
            nbddp.log({"train/loss": loss, "train/acc": 1 - 0.4 * loss}, step=step)
            time.sleep(pause)
            if step == fail_at and nbddp.rank() == 1:
                print("about to fail <b>now</b>", flush=True)
                raise ValueError(f"shapes <script>do not</script> fit at step {step} of {steps}")
        nbddp.log({"val/loss": 2.4 * math.exp(-step / 160) + 0.25}, step=step)
        print(f"epoch {epoch} on rank {nbddp.rank()}")
    return step
"""
LONG = "run = nbddp.run(train, (1, 100_000), nprocs=2, device='cpu')"


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def labs() -> Iterator[Callable[..., Lab]]:
    with contextlib.ExitStack() as stack:
        made: dict[Any, Lab] = {}

        def get(app: str = "lab", *kernel_path: str) -> Lab:
            if (app, kernel_path) not in made:
                made[app, kernel_path] = stack.enter_context(Lab(app, kernel_path))
            return made[app, kernel_path]

        yield get


@pytest.fixture(scope="module")
def shared_lab(labs: Callable[..., Lab]) -> Lab:
    return labs()  # before the first test looks at which processes there are


class Notebook:
    """One notebook in one page."""

    def __init__(self, lab: Lab, page: Page) -> None:
        self.lab, self.page = lab, page
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))

    def open(self, *cells: str) -> None:
        self.lab.write("test.ipynb", [TRAIN, *cells])
        self.lab.open(self.page, "test.ipynb")
        self.lab.run_to_end(self.page, 0)

    def run(self, index: int) -> None:
        self.lab.run(self.page, index)

    def run_to_end(self, index: int) -> None:
        self.lab.run_to_end(self.page, index)

    def output(self, index: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".jp-OutputArea").first

    @property
    def panel(self) -> Any:
        return self.page.locator(".nbddp")

    def tile(self, name: str) -> str:
        return str(self.panel.locator(".nbddp-tiles > div", has_text=name).locator("b").inner_text())

    def ranks(self) -> list[int]:
        kernel = psutil.Process(self.lab.kernel_pid())
        # Those that the fork server has started, not itself.
        return [p.pid for p in kernel.children(recursive=True) if p.ppid() != kernel.pid and os.getsid(p.pid) == p.pid]


@pytest.fixture
def page(shared_browser: Browser) -> Iterator[Page]:
    made = shared_browser.new_page(viewport={"width": 1100, "height": 900})
    yield made
    made.close()


@pytest.fixture
def notebook(shared_lab: Lab, page: Page) -> Iterator[Notebook]:
    yield from _notebook(shared_lab, page)


def _notebook(lab: Lab, page: Page) -> Iterator[Notebook]:
    made = Notebook(lab, page)
    yield made
    page.close()
    lab.end_kernels()
    lab.reset_settings()
    ours = [problem for problem in made.problems if "nbddp" in problem]
    assert not ours


MANY = """
def many():
    for step in range(1, 4):
        nbddp.log({f"layer{i}/norm": float(i * step) for i in range(60)}, step=step)
        nbddp.log({"huge": 1e308 * (-1) ** step, "tiny": 5e-324 * (step % 2), "train/loss": 1 / step}, step=step)
nbddp.run(many, nprocs=2, device="cpu", show=False).show()
"""


def number(text: str) -> int:
    return int(re.sub(r"\D", "", text))


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


# ---------------------------------------------------------------------------- while the cell runs


def test_the_curve_grows_while_the_cell_is_busy(notebook: Notebook) -> None:
    notebook.open(LONG)
    notebook.run(1)
    expect(notebook.panel).to_be_visible(timeout=30_000)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    expect(notebook.panel.locator(".nbddp-chart canvas")).to_have_count(2)
    first = number(notebook.tile("Step"))
    before = notebook.panel.locator(".nbddp-plot").first.screenshot()
    wait_until(lambda: number(notebook.tile("Step")) > first + 50)
    assert notebook.panel.locator(".nbddp-plot").first.screenshot() != before
    assert notebook.panel.locator(".nbddp-family").all_inner_texts() == ["Loss", "Accuracy"]
    assert notebook.page.locator(".jp-CodeCell").nth(1).locator(".jp-InputPrompt").inner_text() == "[*]:"


WATCH_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries())
    for (const { node, previousRect, currentRect } of entry.sources) {
      const element = node?.nodeType === 1 ? node : node?.parentElement;
      const rects = [previousRect, currentRect].map(({ x, y, width, height }) => [x, y, width, height].map(Math.round));
      const name = element?.className || element?.tagName;
      if (element?.closest(".nbddp")) window.shifts.push([entry.startTime, name, ...rects]);
    }
}).observe({ type: "layout-shift" });
"""


# Two charts beside each other: no space is reserved for a second row.
@pytest.mark.parametrize(("width", "again"), [(1100, False), (1700, False), (1100, True)])
def test_nothing_in_the_panel_moves_after_the_first_second(notebook: Notebook, width: int, again: bool) -> None:
    late = "def late():\n    time.sleep(1.5)\n    return train(2, 150)\n"
    notebook.open(
        late + f"if {again}: nbddp.run(late, show=False, name='learning rate 0.1')",
        "nbddp.run(late, nprocs=2, device='cpu');",
    )
    notebook.run_to_end(1)
    notebook.page.set_viewport_size({"width": width, "height": 1000})
    notebook.page.wait_for_timeout(500)
    notebook.page.evaluate(WATCH_SHIFTS)
    notebook.run(2)
    notebook.panel.wait_for(timeout=30_000)
    began = notebook.page.evaluate("performance.now()")
    expect(notebook.panel.locator(".nbddp-waiting")).to_be_visible(timeout=30_000)  # there is no metric yet
    expect(notebook.panel.locator(".nbddp-chart")).to_have_count(2, timeout=30_000)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Finished", timeout=60_000)
    expect(notebook.panel.locator(".nbddp-remark").first).to_be_visible()  # "no rank took part in a collective"
    expect(notebook.panel.get_by_role("button", name="Earlier run")).to_have_count(int(again))
    notebook.page.wait_for_timeout(500)
    moved = [what for at, *what in notebook.page.evaluate("shifts") if at > began + 1000]
    assert not moved


def test_a_short_cell_opens_as_one_line(notebook: Notebook) -> None:
    call = "nbddp.run(nbddp.barrier, nprocs=2, device='cpu');"
    notebook.open(call, call)
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    panel = notebook.panel.nth(1)  # the fork server was there already
    expect(panel.locator(".nbddp-chip")).to_have_text("Finished")
    assert panel.bounding_box()["height"] < 70
    panel.get_by_role("button", name="Details").click()
    expect(panel.locator("tbody tr")).to_have_count(2)
    assert panel.bounding_box()["height"] > 100


def test_the_output_has_its_colours_and_the_first_tab_is_selected(notebook: Notebook) -> None:
    text = r"\x1b[1;31merror\x1b[0m on rank"
    say = f"def say():\n    nbddp.log(x=1.0)\n    print('{text}', nbddp.rank())\n"
    notebook.open(say + "nbddp.run(say, nprocs=2, device='cpu', show=False).show()")
    notebook.run_to_end(1)
    panel = notebook.panel
    panel.locator(".nbddp-logs summary").click()
    expect(panel.get_by_role("tab", name="Rank 0", selected=True)).to_have_count(1)
    colored = panel.get_by_role("tabpanel").locator("span")
    expect(panel.get_by_role("tabpanel")).to_have_text("error on rank 0")
    expect(colored).to_have_text("error")
    plain = panel.get_by_role("tabpanel").evaluate("e => getComputedStyle(e).color")
    assert colored.evaluate("e => [getComputedStyle(e).color, getComputedStyle(e).fontWeight]") == [
        "rgb(180, 35, 24)",
        "700",
    ]
    assert plain != "rgb(180, 35, 24)"
    panel.get_by_role("searchbox").fill("error on")
    expect(panel.locator(".nbddp-found")).to_have_text("1 of 1")  # the codes between the words do not count


def test_high_contrast_keeps_shapes_and_charts_speak(notebook: Notebook) -> None:
    notebook.page.emulate_media(forced_colors="active", color_scheme="dark")
    notebook.open("nbddp.run(train, (1, 60), nprocs=2, device='cpu');")
    notebook.run_to_end(1)
    panel = notebook.panel
    expect(panel).to_have_attribute("data-theme", "dark")
    assert panel.locator(".nbddp-chip").evaluate("e => getComputedStyle(e).borderTopWidth") == "1px"
    surface = panel.evaluate("e => getComputedStyle(e).backgroundColor")
    for shape in (".nbddp-progress i", ".nbddp-ranks .nbddp-dot", ".nbddp-dash"):
        assert panel.locator(shape).first.evaluate("e => getComputedStyle(e).backgroundColor") != surface
    live = panel.locator('[aria-live="polite"].nbddp-live')
    expect(live).to_have_text(re.compile(r"Step 60: Train loss [\d.]+, Train acc"))
    panel.locator(".nbddp-plot").first.focus()
    notebook.page.keyboard.press("ArrowLeft")
    expect(live).to_have_text(re.compile(r"Chart of Loss at step \d+: train"))


def test_jupyterlab_says_busy_while_the_run_goes_on(notebook: Notebook) -> None:
    notebook.open(LONG)
    notebook.run(1)
    expect(notebook.panel.locator(".nbddp-chart canvas")).to_have_count(2, timeout=30_000)
    bar, indicator = (
        notebook.page.locator("#jp-main-statusbar"),
        notebook.page.locator(".jp-Notebook-ExecutionIndicator"),
    )
    for _ in range(3):  # a message of the page, and the subshell's "idle" after it
        notebook.page.wait_for_timeout(1200)
        expect(bar).to_contain_text("| Busy")
        expect(indicator).to_have_attribute("data-status", "busy")
        notebook.panel.locator(".nbddp-plot").first.hover()
    notebook.panel.get_by_role("button", name="Stop").click()
    expect(bar).to_contain_text("| Idle", timeout=10_000)


def hide(page: Page, hidden: bool) -> None:
    """As if the user looked at another tab."""
    page.evaluate("hidden => Object.defineProperty(document, 'hidden', { configurable: true, value: hidden })", hidden)
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")


@pytest.mark.parametrize("fail_at", [None, 150])
def test_a_tab_in_the_background_shows_progress_and_the_end(notebook: Notebook, fail_at: int | None) -> None:
    page = notebook.page
    notebook.open(f"nbddp.run(train, (2, 100, 0.02, {fail_at}), nprocs=2, device='cpu');")
    page.evaluate("""() => { window.said = []; window.Notification = class {
        static permission = "granted";
        constructor(title, { body }) { said.push([title, body]); }
    }; }""")
    bare = page.title()
    notebook.run(1)
    expect(notebook.panel.locator(".nbddp-chart canvas")).to_have_count(2, timeout=30_000)
    assert page.title() == bare
    hide(page, True)
    wait_until(lambda: re.fullmatch(rf"[1-9]\d? % {re.escape(bare)}", page.title()))
    wait_until(lambda: page.title() == ("✗ " if fail_at else "✓ ") + bare)
    assert page.evaluate("said.map(([title]) => title)") == [f"train: {'failed' if fail_at else 'finished'}"]
    assert ("do not</script> fit" in page.evaluate("said[0][1]")) == bool(fail_at)
    hide(page, False)
    wait_until(lambda: page.title() == bare)


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


def test_the_slider_goes_back_through_the_steps_of_a_figure(notebook: Notebook) -> None:
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


def test_a_table_is_shown_without_its_scripts_and_figures_survive_a_reload(notebook: Notebook) -> None:
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
    saved = (notebook.lab.notebooks / "test.ipynb").read_text()
    assert "data:image/png;base64," in saved
    assert "left out here (HTML)" in saved
    page.reload()
    slider = notebook.panel.locator(".nbddp-figure input").first
    expect(slider).to_have_attribute("max", "4", timeout=60_000)
    expect(notebook.panel.locator(".nbddp-figure img")).to_have_attribute("alt", "a <b>name</b>, step 5")


def test_the_page_requests_nothing_from_another_host(notebook: Notebook) -> None:
    asked: list[str] = []
    notebook.page.on("request", lambda request: asked.append(request.url))
    notebook.open("nbddp.run(train, (1, 20), nprocs=2, device='cpu');")
    notebook.run_to_end(1)
    foreign = [url for url in asked if not url.startswith((notebook.lab.url, "data:", "blob:"))]
    assert not foreign


def test_at_most_ten_messages_a_second_at_any_rate_of_metrics(notebook: Notebook) -> None:
    notebook.page.on("websocket", lambda socket: socket.on("framereceived", lambda data: frames.append(len(data))))
    frames: list[int] = []
    flood = "def flood():\n    end = time.time() + 4\n    while time.time() < end: nbddp.log(loss=1.0)\n"
    notebook.open(flood + "nbddp.run(flood, nprocs=2, device='cpu');")
    notebook.run(1)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    notebook.page.wait_for_timeout(500)
    frames.clear()
    began = time.monotonic()
    notebook.page.wait_for_timeout(2000)
    seconds = time.monotonic() - began
    assert 0 < len(frames) <= 10 * seconds + 2, "ten a second, and a little for the server's own"
    assert sum(frames) < 200_000 * seconds


def _stop_works(notebook: Notebook, *more_cells: str) -> None:
    state = "print(run_state := nbddp.last_run().state, len(nbddp.last_run().history['train/loss'].steps) > 20)"
    notebook.open(LONG, state, *more_cells)
    notebook.run(1)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    time.sleep(2)
    ranks = notebook.ranks()
    assert len(ranks) >= 2
    button = notebook.panel.get_by_role("button", name="Stop")
    expect(button).to_be_enabled()
    began = time.monotonic()
    button.click()
    prompt = notebook.page.locator(".jp-CodeCell").nth(1).locator(".jp-InputPrompt")
    wait_until(lambda: "*" not in prompt.inner_text())
    assert time.monotonic() - began < 1.0, "from the click to an idle kernel"
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    expect(notebook.output(1)).to_contain_text("KeyboardInterrupt")
    expect(notebook.output(1)).to_contain_text("Stopped")
    notebook.run_to_end(2)
    expect(notebook.output(2)).to_contain_text("stopped True")


def test_stop_stops_within_a_second(notebook: Notebook) -> None:
    _stop_works(notebook)


def test_stop_works_in_notebook_7(labs: Callable[..., Lab], page: Page) -> None:
    pytest.importorskip("notebook", reason="Notebook 7 is not installed")
    with contextlib.closing(_notebook(labs("notebook"), page)) as made:
        _stop_works(next(made))
        next(made, None)


@pytest.mark.parametrize("folder", OTHER_KERNELS, ids=lambda path: path.name)
def test_stop_works_with_other_ipykernel_versions(folder: Path, labs: Callable[..., Lab], page: Page) -> None:
    version = next(importlib.metadata.distributions(path=[str(folder)], name="ipykernel")).version
    with contextlib.closing(_notebook(labs("lab", str(folder)), page)) as made:
        notebook = next(made)
        _stop_works(notebook, "import ipykernel; print(ipykernel.__version__)")
        notebook.run_to_end(3)
        expect(notebook.output(3)).to_have_text(version)
        next(made, None)


DEBUG = """
def fit():
    for i in range(40):
        nbddp.log({"train/loss": 1 / (i + 1)})
        time.sleep(0.02)
    loss = 3 * (nbddp.rank() + 2)
    breakpoint()
    return loss
run = nbddp.run(fit, nprocs=2, device="cpu")
"""


def _debugger_works(notebook: Notebook) -> None:
    notebook.open(DEBUG, "print('value', run.value)", DEBUG)
    notebook.run(1)
    output = notebook.output(1)
    type_at_prompt(output, "p loss")
    expect(output).to_contain_text("rank 1: 9")
    expect(notebook.panel).to_contain_text("debugger: fit, line 6")
    type_at_prompt(output, "n")
    expect(output).to_contain_text("-> return loss")
    ARTEFACTS.mkdir(exist_ok=True)
    output.locator(PROMPT).wait_for()
    notebook.page.screenshot(path=ARTEFACTS / f"debugger-{notebook.lab.app}.png")
    type_at_prompt(output, "c")
    notebook.run_to_end(2)
    expect(notebook.output(2)).to_have_text("value 6")
    notebook.run(3)
    notebook.output(3).locator(PROMPT).wait_for()
    notebook.panel.nth(1).locator("button", has_text="Stop").click()
    expect(notebook.output(3)).to_contain_text("KeyboardInterrupt", timeout=3000)
    assert notebook.ranks() == []


def test_the_debuggers_prompt_is_under_the_cell(notebook: Notebook) -> None:
    _debugger_works(notebook)


def test_the_debuggers_prompt_is_under_the_cell_in_notebook_7(labs: Callable[..., Lab], page: Page) -> None:
    pytest.importorskip("notebook", reason="Notebook 7 is not installed")
    with contextlib.closing(_notebook(labs("notebook"), page)) as made:
        _debugger_works(next(made))
        next(made, None)


@pytest.mark.parametrize("folder", OTHER_KERNELS, ids=lambda path: path.name)
def test_the_debugger_works_with_other_ipykernel_versions(folder: Path, labs: Callable[..., Lab], page: Page) -> None:
    with contextlib.closing(_notebook(labs("lab", str(folder)), page)) as made:
        _debugger_works(next(made))
        next(made, None)


def test_a_session_goes_on_after_a_failure_and_shows_what_its_ranks_hold(notebook: Notebook) -> None:
    notebook.open(
        "%load_ext nbddp\n%ddp open -n 2 --device cpu",
        "%%ddp\nimport time\nmodel = torch.nn.Linear(1000, 10)\nfor step in range(30):\n"
        "    nbddp.log(loss=1 / (step + 1)); time.sleep(0.02)",
        "%%ddp\nif rank == 1: raise ValueError('on purpose')\ndist.barrier()",
        "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nx",
        "%%ddp\nmode",
        "%ddp close",
    )
    for cell in (1, 2, 3, 4):
        notebook.run_to_end(cell)
    panel = notebook.output(2).locator(".nbddp")
    expect(panel).to_contain_text("session · 2 ranks · gloo · call 1")
    panel.locator("summary", has_text="Names on rank 0").click()
    expect(panel.locator(".nbddp-held")).to_contain_text("modelLinear float32, 40 kB, cpu")
    expect(notebook.output(3)).to_contain_text("ValueError: on purpose")
    expect(notebook.output(4)).to_contain_text("tensor([2.])")
    ARTEFACTS.mkdir(exist_ok=True)
    notebook.page.screenshot(path=ARTEFACTS / "session.png")
    cell = notebook.page.locator(".jp-Notebook .jp-CodeCell").nth(5)
    cell.locator(".cm-content").click()
    notebook.page.keyboard.press("Control+End")
    for _ in range(5):  # JupyterLab gives up on a first answer that takes longer than 1 s, as IPython's first one may
        notebook.page.keyboard.press("Tab")
        with contextlib.suppress(AssertionError):
            expect(cell.locator(".cm-content")).to_contain_text("model", timeout=3000)
            break
    expect(cell.locator(".cm-content")).to_contain_text("model")
    notebook.run_to_end(6)
    assert notebook.ranks() == []


def test_a_background_run_is_drawn_in_its_own_cell(notebook: Notebook) -> None:
    notebook.open(
        "run = nbddp.run(train, (1, 100_000), nprocs=2, device='cpu', wait=False)", "print('free')", "run.show()"
    )
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    expect(notebook.output(2)).to_have_text("free")
    expect(notebook.output(1).locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    first = number(notebook.tile("Step"))
    wait_until(lambda: number(notebook.tile("Step")) > first)
    notebook.run_to_end(3)
    second = notebook.output(3).locator(".nbddp")
    expect(second.locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    expect(second.locator("canvas")).to_have_count(2)
    notebook.page.get_by_role("button", name="Stop").first.click()
    for cell in (1, 3):
        expect(notebook.output(cell).locator(".nbddp-picture")).to_contain_text("Stopped", timeout=10_000)
    expect(notebook.output(2)).to_have_text("free")


# ---------------------------------------------------------------------------- failure


def test_a_failure_shows_the_rank_and_its_output(notebook: Notebook) -> None:
    notebook.open("run = nbddp.run(train, (3, 200, 0.01, 100), nprocs=3, device='cpu')", "nbddp.last_run().show()")
    notebook.run_to_end(1)
    picture = notebook.output(1).locator(".nbddp-picture")
    expect(picture).to_contain_text("rank 1 of 3 failed: ValueError: shapes <script>do not</script> fit")
    expect(picture.locator("pre")).to_contain_text("about to fail <b>now</b>")
    notebook.run_to_end(2)
    panel = notebook.output(2).locator(".nbddp")
    expect(panel.locator(".nbddp-chip")).to_have_text("Failed")
    expect(panel.get_by_role("alert")).to_contain_text("rank 1 of 3 failed: ValueError: shapes <script>")
    names = panel.get_by_label("Names on the failing line")
    expect(names.locator("dt")).to_have_text(["step", "steps"])
    expect(names.locator("dd")).to_have_text(["100", "200"])
    expect(picture.locator("code")).to_contain_text(["step\u00a0 100", "steps\u00a0 200"])
    expect(panel.locator("tbody tr").nth(1)).to_have_attribute("data-state", "failed")
    expect(panel.locator("tbody tr").nth(0)).to_have_attribute("data-state", "stopped")
    expect(panel.get_by_role("tab", selected=True)).to_have_text("Rank 1")
    expect(panel.get_by_role("tabpanel")).to_contain_text("about to fail <b>now</b>")
    expect(panel.get_by_role("button", name="Stop")).to_be_disabled()
    ARTEFACTS.mkdir(exist_ok=True)
    panel.screenshot(path=ARTEFACTS / "failed-light.png")
    go_dark(notebook.page)
    expect(panel).to_have_attribute("data-theme", "dark")
    panel.screenshot(path=ARTEFACTS / "failed-dark.png")


def go_dark(page: Page) -> None:
    page.locator('.lm-MenuBar-itemLabel:text-is("Settings")').click()
    page.locator('.lm-Menu-itemLabel:text-is("Theme")').hover()
    page.locator('.lm-Menu-itemLabel:text-is("JupyterLab Dark")').click()
    page.wait_for_selector('body[data-jp-theme-light="false"]', state="attached")


@pytest.mark.parametrize("shares_page", [True, False])
def test_a_panel_that_opens_in_a_dark_page_is_dark_every_time(notebook: Notebook, shares_page: bool) -> None:
    setting = f"import nbddp.panel.live\nnbddp.panel.live.is_jupyter = lambda: {shares_page}"
    notebook.open(FAKES + setting, *["show(run)"] * 10)
    go_dark(notebook.page)
    notebook.page.wait_for_timeout(1000)
    notebook.run_to_end(1)
    for cell in range(2, 12):
        notebook.run(cell)
        panel = notebook.output(cell).locator(".nbddp")
        expect(panel.locator("canvas")).to_have_count(2)
        expect(panel).to_have_attribute("data-theme", "dark", timeout=500)
    if shares_page:
        notebook.page.keyboard.press("Control+s")
        wait_until(lambda: "nbddp-picture" in (notebook.lab.notebooks / "test.ipynb").read_text())
        notebook.lab.open(notebook.page, "test.ipynb")
        expect(notebook.page.locator('.nbddp[data-theme="dark"]')).to_have_count(10, timeout=20_000)
        expect(notebook.page.locator('.nbddp[data-theme="light"]')).to_have_count(0)


def test_keys_typed_on_the_panel_are_not_shortcuts(notebook: Notebook, page: Page) -> None:
    notebook.open(FAKES + HOSTS, "run = cluster(2, 2); view = show(run)", "1")
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    panel, cells = notebook.panel, page.locator(".jp-Notebook .jp-CodeCell")
    expect(panel.locator("canvas")).to_have_count(1)
    panel.locator("details.nbddp-logs > summary").click()
    focusable = panel.locator(":is(button, input, summary, [tabindex]):visible")
    assert focusable.count() >= 12
    for element in focusable.all():
        element.focus()
        page.keyboard.press("d")
        page.keyboard.press("d")
        expect(cells).to_have_count(4)
    button = panel.get_by_role("button", name="Log scale")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("d")
    page.keyboard.press("d")
    page.wait_for_timeout(300)
    expect(cells).to_have_count(4)
    page.keyboard.press("Control+s")
    wait_until(lambda: "nbddp-picture" in (notebook.lab.notebooks / "test.ipynb").read_text())


# ---------------------------------------------------------------------------- the kernel is gone


def _lost(notebook: Notebook, end: Callable[[], object]) -> None:
    notebook.open(LONG)
    notebook.run(1)
    panel = notebook.panel
    expect(panel.locator(".nbddp-chip")).to_have_text("Running", timeout=30_000)
    expect(panel.locator("canvas")).to_have_count(2, timeout=10_000)
    end()
    expect(panel.locator(".nbddp-chip")).to_have_text("Lost", timeout=30_000)
    expect(panel.locator(".nbddp-hint")).to_have_text("these are the last numbers that arrived")
    expect(panel.locator(".nbddp-stop")).to_be_hidden()
    clock = panel.locator(".nbddp-summary").inner_text()
    notebook.page.wait_for_timeout(2500)
    assert panel.locator(".nbddp-summary").inner_text() == clock
    assert notebook.tile("Time left") == "–"
    grey = panel.locator(".nbddp-hint").evaluate("element => getComputedStyle(element).color")
    for part in (".nbddp-chip", "tbody .nbddp-dot"):
        assert panel.locator(part).first.evaluate("element => getComputedStyle(element).color") == grey


def test_after_a_restart_of_the_kernel_the_panel_says_lost(notebook: Notebook, page: Page) -> None:
    def restart() -> None:
        page.locator('.lm-MenuBar-itemLabel:text-is("Kernel")').click()
        page.locator('.lm-Menu-itemLabel:text-is("Restart Kernel…")').click()
        page.get_by_role("button", name="Confirm Kernel Restart").click()

    _lost(notebook, restart)
    ARTEFACTS.mkdir(exist_ok=True)
    notebook.panel.screenshot(path=ARTEFACTS / "lost.png")


def test_after_the_kernels_death_the_panel_says_lost(notebook: Notebook) -> None:
    _lost(notebook, lambda: os.kill(notebook.lab.kernel_pid(), signal.SIGKILL))


def test_a_kernel_that_speaks_again_is_no_longer_lost(notebook: Notebook) -> None:
    notebook.open(FAKES, "view = show(run)", "tell(view, run, seconds=90.0)")
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Lost", timeout=30_000)
    notebook.run_to_end(3)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Running")
    expect(notebook.panel.locator(".nbddp-stop")).to_be_visible()


# ---------------------------------------------------------------------------- what stays


def first_loss(rank: int) -> float:
    """What that rank of TRAIN logs at its first step."""
    return 2.4 * math.exp(-1 / 160) + 0.2 + random.Random(rank).gauss(0, 0.06)


def test_a_page_reload_keeps_all_points_and_output(notebook: Notebook) -> None:
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
    path = notebook.lab.notebooks / "test.ipynb"
    wait_until(lambda: "nbddp-picture" in path.read_text())
    assert "widget-view" not in path.read_text()
    notebook.page.goto("about:blank")
    notebook.lab.open(notebook.page, "test.ipynb")
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
    notebook = Notebook(shared_lab, doomed.new_page())
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


def test_the_saved_notebook_shows_the_picture_without_a_kernel(notebook: Notebook, page: Page) -> None:
    notebook.open("run = nbddp.run(train, (2, 100), nprocs=2, device='cpu')")
    notebook.run_to_end(1)
    panel = notebook.output(1).locator(".nbddp")
    expect(panel.locator(".nbddp-chip")).to_have_text("Finished")
    panel.locator(".u-over").first.hover()
    expect(panel.locator(".nbddp-step")).to_have_text(re.compile(r"step \d+"))
    page.keyboard.press("Control+s")
    path = notebook.lab.notebooks / "test.ipynb"
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
    notebook.lab.open(page, "theirs.ipynb")
    image = page.locator(".nbddp-picture img[alt^='Chart of']").first
    expect(image).to_be_visible()
    assert image.evaluate("image => image.complete && image.naturalWidth") > 0
    axis, curves = page.locator(".nbddp-picture img").first.bounding_box(), image.bounding_box()
    assert (axis["y"], axis["height"]) == (curves["y"], curves["height"]) == (curves["y"], 194)
    assert axis["x"] + axis["width"] == curves["x"], "the page has kept the layout"
    expect(page.locator(".nbddp-picture table").nth(0)).to_contain_text("train/loss")
    expect(page.locator(".nbddp-picture table").nth(1)).to_contain_text("finished")
    html = _nbconvert(path)
    assert "data:image/svg+xml;base64," in html


LAST = re.compile(r"Running.*train.*as of \d\d:\d\d:\d\d, before the run's end")


def test_a_reload_during_a_blocking_run_shows_the_last_picture(notebook: Notebook, page: Page) -> None:
    notebook.open("import nbddp.panel.live\nnbddp.panel.live._PICTURE_S = 0.5", LONG)
    notebook.run_to_end(1)
    notebook.run(2)
    expect(notebook.output(2).locator(".nbddp-picture img").first).to_be_attached(timeout=30_000)
    page.keyboard.press("Control+s")
    path = notebook.lab.notebooks / "test.ipynb"
    wait_until(lambda: "nbddp-picture" in path.read_text())
    assert "widget-view" not in path.read_text()
    page.reload()
    expect(notebook.output(2).locator(".nbddp-picture, .nbddp").first).to_be_visible(timeout=30_000)
    expect(notebook.output(2).locator(".nbddp-picture")).to_contain_text(LAST)
    expect(page.get_by_text("Loading widget")).to_have_count(0)
    os.kill(notebook.lab.kernel_pid(), signal.SIGKILL)
    page.goto("about:blank")
    notebook.lab.end_kernels()
    notebook.lab.open(page, "test.ipynb")
    expect(notebook.output(2).locator(".nbddp-picture img").first).to_be_visible()
    expect(page.get_by_text("Error displaying widget")).to_have_count(0)


def test_a_new_picture_below_the_panel_keeps_its_zoom(notebook: Notebook, page: Page) -> None:
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


def test_of_many_finished_runs_the_oldest_shows_its_picture(notebook: Notebook) -> None:
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


def test_show_after_a_run_displays_the_panel_and_saves_the_picture(notebook: Notebook, page: Page) -> None:
    notebook.open("run = nbddp.run(train, (2, 100), nprocs=2, device='cpu', show=False)", "run.show()")
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    output = notebook.output(2)
    expect(output.locator(".nbddp canvas")).to_have_count(2)
    expect(output.locator(".nbddp-picture")).to_be_hidden()
    page.keyboard.press("Control+s")
    path = notebook.lab.notebooks / "test.ipynb"
    wait_until(lambda: "nbddp-picture" in path.read_text())
    page.goto("about:blank")
    notebook.lab.open(page, "test.ipynb")
    expect(output.locator(".nbddp canvas")).to_have_count(2, timeout=30_000)
    page.goto("about:blank")
    notebook.lab.end_kernels()
    notebook.lab.open(page, "test.ipynb")
    expect(page.locator(".nbddp-picture img").first).to_be_visible()
    expect(page.locator(".nbddp")).to_have_count(0)
    expect(page.locator(".jp-OutputArea", has_text="Error displaying widget")).to_have_count(0)
    assert "data:image/svg+xml;base64," in _nbconvert(path)


def test_a_panel_shown_instead_of_a_picture_is_removed_with_its_output(notebook: Notebook) -> None:
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


def _nbconvert(path: Path) -> str:
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "html", "--stdout", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------------------- runs that need no processes

FAKES = f"""
import dataclasses, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1] / "panel")!r})
from fakes import FakeRun, Rank, status
from nbddp.history.history import History
from nbddp.panel.live import PanelView

def show(run, **more):
    view = PanelView(run, with_output=False, **more)
    view.update(run.now)
    return view

def tell(view, run, **more):
    run.now = dataclasses.replace(run.now, **more)
    view.update(run.now)

run = FakeRun(History(2), status("running", ranks=2, max_restarts=3))
for rank in range(2):
    for name in ("train/loss", "train/acc"):
        Rank(run.history, rank).log(name, range(600), [s / 600 + rank for s in range(600)], at=time.time())
"""
RESTART = """
reason = "RankDied: rank 1 of 2 was killed by SIGKILL"
run.history.restart(reason)
for rank in range(2):
    for name in ("train/loss", "train/acc"):
        Rank(run.history, rank).log(name, range(450, 500), [5.0] * 50, at=time.time())
tell(view, run, restarts=1, restart_reason=reason)
"""


NAN = """
import math
run = FakeRun(History(2), status("running", ranks=2))
for rank in range(2):
    broken = [math.nan if s >= 400 and rank else 1 + random.random() for s in range(600)]
    Rank(run.history, rank).log("Loss/train", range(600), broken, op=1, at=time.time())
    Rank(run.history, rank).log("Loss/val", [200, 400], [1.5, 1.25], op=1, at=time.time())
    Rank(run.history, rank).log("wide", range(3), [1e-6, 1.0, 1e6], op=1, at=time.time())
    Rank(run.history, rank).log("gone", range(3), [math.nan] * 3, op=1, at=time.time())
"""


def test_nan_is_marked_in_red_and_a_log_scale_has_labels(notebook: Notebook) -> None:
    notebook.open(FAKES + "import random", NAN, "view = show(run)")
    panel = notebook.panel
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    notebook.run_to_end(3)
    expect(panel.locator(".nbddp-chart")).to_have_count(3)
    loss = panel.locator(".nbddp-chart").first
    mark = loss.locator(".nbddp-mark span")
    expect(mark).to_have_text("NaN from step 400")
    red = mark.evaluate("e => getComputedStyle(e).color")
    value = loss.locator(".nbddp-value").first
    expect(value).to_have_text("NaN")
    assert value.evaluate("e => getComputedStyle(e).color") == red
    expect(panel.get_by_text("Loss/train is NaN from step 400 on rank 1")).to_be_visible()
    expect(panel.locator(".nbddp-nothing:visible")).to_have_count(1)
    inside, label = loss.locator(".u-over").bounding_box(), mark.bounding_box()
    assert label["x"] + label["width"] <= inside["x"] + inside["width"]
    plot = loss.locator(".u-over")
    plot.hover(position={"x": 100, "y": 60})
    expect(value).to_have_text(re.compile(r"^[0-9.]+ \(mean [0-9.]+\)$"))
    panel.get_by_role("button", name="Log scale").click()
    panel.screenshot(path=ARTEFACTS / "nan.png")
    assert not notebook.problems


def test_a_restart_is_marked_on_the_curves_and_reported(notebook: Notebook) -> None:
    notebook.open(
        FAKES, "view = show(run)", RESTART, "tell(view, run, state='failed', error='rank 1 of 2 failed', failed_rank=1)"
    )
    panel = notebook.panel
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    expect(panel.locator("canvas")).to_have_count(2)
    expect(panel.locator(".nbddp-mark")).to_have_count(0)
    expect(panel.locator(".nbddp-notice")).to_have_count(2)
    expect(panel.locator(".nbddp-notice").first).to_be_hidden()
    notebook.run_to_end(3)
    told = "restarted 1 of 3 after RankDied: rank 1 of 2 was killed by SIGKILL"
    expect(panel.get_by_role("status").filter(has_text="restarted")).to_have_text(told)
    expect(panel.locator(".nbddp-mark")).to_have_count(2)
    words = panel.locator(".nbddp-mark span").first
    expect(words).to_have_text("restart 1")
    expect(words).to_have_attribute("title", "restart 1: RankDied: rank 1 of 2 was killed by SIGKILL")
    expect(panel.locator(".nbddp-plot").first).to_have_attribute("aria-label", re.compile("restart 1 at step 450$"))
    over, mark = panel.locator(".u-over").first.bounding_box(), panel.locator(".nbddp-mark").first.bounding_box()
    assert mark["x"] == pytest.approx(over["x"] + over["width"] * 450 / 499, abs=2), "the repeated steps are gone"
    notebook.run_to_end(4)
    picture = notebook.output(2).locator(".nbddp-picture")
    expect(picture).to_contain_text("1 restart")
    expect(picture).to_contain_text(told)


def test_a_stalled_run_shows_where_each_rank_is(notebook: Notebook) -> None:
    hang = "rank 1 finished the loop at step 120; rank 0 waits\\n\\nrank 0 is here:\\n  File <b>x</b>, line 14"
    tells = [f"tell(view, run, hang={text!r})".replace("\\\\", "\\") for text in (hang, hang + " now", "", hang)]
    notebook.open(FAKES, "view = show(run)", *tells)
    for cell in (1, 2, 3):
        notebook.run_to_end(cell)
    notice = notebook.panel.get_by_role("status").filter(has_text="rank 1 finished")
    expect(notice.locator("strong")).to_have_text("rank 1 finished the loop at step 120; rank 0 waits")
    expect(notice.locator("pre")).to_be_hidden()
    notice.locator("summary").click()
    expect(notice.locator("pre")).to_have_text("rank 0 is here:\n  File <b>x</b>, line 14")
    ARTEFACTS.mkdir(exist_ok=True)
    notebook.panel.screenshot(path=ARTEFACTS / "stands-still.png")
    notice.get_by_role("button", name="Close").click()
    expect(notice).to_be_hidden()
    notebook.run_to_end(4)
    notebook.page.wait_for_timeout(300)
    expect(notice).to_be_hidden()
    notebook.run_to_end(5)
    notebook.run_to_end(6)
    expect(notice).to_be_visible()


NASTY = """
evil = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>\\"'><svg onload=window.hit=1>"
evil += chr(0x202e) + chr(27)
texts = dict(name=evil, summary=evil, notice="", error=evil, restart_reason=evil, hang=evil + chr(10) + evil)
bad = FakeRun(History(2), status("failed", ranks=2, failed_rank=1, restarts=1, max_restarts=1, **texts))
bad.now = dataclasses.replace(bad.now, ranks=tuple(dataclasses.replace(r, device=evil) for r in bad.now.ranks))
bad.printed = {0: evil + chr(10), 1: evil + chr(10)}
for n in range(2):
    rank = Rank(bad.history, n)
    for name in (evil, "val/" + evil, evil + "/loss"):
        rank.log(name, range(40), [float(s) for s in range(40)])
    rank.bar(0, evil, 5, 2)
bad.history.restart(evil)
Rank(bad.history).log(evil, [20], [1.0])
Rank(bad.history).bar(0, evil, 5, 2)
"""


def test_no_text_becomes_an_element_or_script(notebook: Notebook) -> None:
    page = notebook.page
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    notebook.open(FAKES, NASTY, "show(bad)", "show(bad)")
    for cell in (1, 2, 3, 4):
        notebook.run_to_end(cell)
    panel = notebook.output(3).locator(".nbddp")
    expect(panel.locator("canvas").first).to_be_visible()
    panel.locator(".nbddp-hang summary").click()
    for rank in ("Rank 0", "Rank 1"):
        panel.get_by_role("tab", name=rank).click()
    panel.get_by_role("searchbox").fill("<img")
    panel.locator(".nbddp-plot").first.focus()
    page.keyboard.press("PageUp")
    panel.locator(".nbddp-mark span").first.hover()
    picture = notebook.output(4).locator(".nbddp-picture")
    expect(picture).to_contain_text("onerror")
    page.wait_for_timeout(500)
    assert page.evaluate("window.hit") is None
    assert not dialogs
    assert panel.locator("img, script, svg, iframe, object, a").count() == 0
    assert picture.locator("script, svg, iframe, object, a, img:not([src^='data:image/svg+xml;base64,'])").count() == 0
    for shown in (panel, picture):
        attributes = shown.evaluate("e => [...e.querySelectorAll('*')].flatMap(n => n.getAttributeNames())")
        assert not [name for name in attributes if name.startswith("on")]
        assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", shown.inner_text())
        assert "<script>window.hit=1</script>" in shown.inner_text(), "text stays text"


def test_where_stop_cannot_work_the_panel_names_the_toolbar_button(notebook: Notebook) -> None:
    deaf = "view._widget.on_msg(view._on_message, remove=True)"
    one = f"view = show(run); {deaf}; view._widget.heard = 0"
    notebook.open(FAKES, one, f"{one}; view._widget.kernel_id = ''")
    notebook.page.route("**/interrupt", lambda route: route.fulfill(status=403))
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    panel = notebook.output(2).locator(".nbddp")
    button = panel.get_by_role("button", name="Stop")
    expect(button).to_be_enabled()
    button.click()
    expect(panel.locator(".nbddp-hint")).to_have_text("use ■ in the toolbar", timeout=20_000)
    expect(button).to_be_enabled()
    notebook.run_to_end(3)
    panel = notebook.output(3).locator(".nbddp")
    expect(panel.locator(".nbddp-hint")).to_have_text("to stop, use ■ in the toolbar", timeout=20_000)
    expect(panel.locator(".nbddp-stop")).to_be_hidden()


def test_nothing_is_animated_with_prefers_reduced_motion(notebook: Notebook) -> None:
    notebook.open(FAKES, "view = show(run)")
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    expect(notebook.panel.locator("canvas")).to_have_count(2)
    moving = """() => [...document.querySelectorAll('.nbddp, .nbddp *')].filter(e => {
        const style = getComputedStyle(e);
        return style.animationName !== 'none' || style.transitionDuration !== '0s';
    }).length"""
    assert notebook.page.evaluate(moving) > 0
    notebook.page.emulate_media(reduced_motion="reduce")
    assert notebook.page.evaluate(moving) == 0


HOSTS = """
def cluster(hosts, each, **more):
    ranks = hosts * each
    now = status("running", ranks=ranks, hosts=[f"gpu{i // each + 1}" for i in range(ranks)],
                 summary=f"{ranks} processes · nccl · {hosts} hosts", **more)
    rows = [dataclasses.replace(row, device=f"cuda:{row.rank % each}", memory_bytes=1 << 30) for row in now.ranks]
    run = FakeRun(History(ranks), dataclasses.replace(now, ranks=tuple(rows)))
    for rank in range(ranks):
        Rank(run.history, rank).log("loss", range(200), [200 / (s + 20) for s in range(200)], at=time.time() + 1e6)
    return run

def fail(run, rank):
    rows = [dataclasses.replace(row, state="failed" if row.rank == rank else "stopped") for row in run.now.ranks]
    run.now = dataclasses.replace(run.now, ranks=tuple(rows))
    where = f"rank {rank} of {len(rows)} on {rows[rank].host} failed: ValueError: bad batch"
    tell(view, run, state="failed", failed_rank=rank, error=where)
"""


def test_ranks_are_grouped_by_host_and_fold_by_keyboard(notebook: Notebook) -> None:
    few, many = "run = cluster(2, 2); view = show(run)", "run = cluster(8, 8); view = show(run)"
    notebook.open(FAKES + HOSTS, few, "fail(run, 3)", many, "fail(run, 42)")
    page = notebook.page
    for index in (1, 2):
        notebook.run_to_end(index)
    panel = notebook.output(2).locator(".nbddp")
    shown = panel.locator(".nbddp-ranks tbody tr:not(.nbddp-host):visible")
    expect(shown).to_have_count(4)
    heading = panel.locator(".nbddp-host").first
    expect(heading).to_have_text(re.compile("gpu1.*2 ranks.*running.*step 199"))
    fold = panel.get_by_role("button", name="gpu1")
    expect(fold).to_have_attribute("aria-expanded", "true")
    fold.focus()
    page.keyboard.press("Space")
    expect(fold).to_have_attribute("aria-expanded", "false")
    expect(shown).to_have_count(2)
    page.keyboard.press("Enter")
    expect(fold).to_have_attribute("aria-expanded", "true")
    expect(fold).to_be_focused()
    ARTEFACTS.mkdir(exist_ok=True)
    panel.screenshot(path=ARTEFACTS / "hosts.png")
    notebook.run_to_end(3)
    picture = notebook.output(2).locator(".nbddp-picture")
    expect(picture).to_contain_text("gpu2")
    notebook.run_to_end(4)
    panel = notebook.output(4).locator(".nbddp")
    expect(panel.locator(".nbddp-host:visible")).to_have_count(8)
    expect(panel.locator(".nbddp-ranks tbody tr:not(.nbddp-host):visible")).to_have_count(0)
    panel.get_by_role("button", name="gpu3").click()
    expect(panel.locator(".nbddp-ranks tbody tr:not(.nbddp-host):visible")).to_have_count(8)
    for width in (330, 744):
        page.evaluate(
            "w => document.querySelector('.nbddp').parentElement.style.cssText = `flex:none;width:${w}px`", width
        )
        page.wait_for_timeout(400)
        table = panel.locator(".nbddp-scroll")
        assert panel.evaluate("e => e.scrollWidth - e.clientWidth") <= 0
        for line in panel.locator(".nbddp-host:visible").all():
            assert line.bounding_box()["height"] < 60
            assert line.locator("th > div").bounding_box()["width"] <= table.bounding_box()["width"] + 1
        panel.screenshot(path=ARTEFACTS / f"hosts-{width}.png")
    go_dark(page)
    expect(panel).to_have_attribute("data-theme", "dark")
    panel.screenshot(path=ARTEFACTS / "hosts-dark.png")
    assert not notebook.problems


# ---------------------------------------------------------------------------- the run before, and files

INKS = """(canvas) => {
    const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const found = { grey: 0, blue: 0, blueRows: 0 };
    for (let y = 0; y < height; y++) {
        let blue = 0;
        for (let x = 61; x < width; x++) {  // right of the labels
            const [r, g, b, a] = data.slice((y * width + x) * 4, (y * width + x) * 4 + 4);
            if (a > 220 && Math.abs(r - 143) < 3 && r === g && g === b) found.grey += 1;
            if (a > 220 && r === 0x25 && g === 0x63 && b === 0xeb) blue += 1;
        }
        found.blue += blue;
        found.blueRows += Number(blue > 0);
    }
    return { ...found, height };
}"""
DIFFERENCES = """
for name in ("train/loss", "train/acc", "val/loss"):
    old, new = (each.history[name].values[-1] for each in (before, after))
    print(name, f"{old:.4f}", f"{'▲' if new > old else '▼'} {abs(new - old):.4f}")
"""


def test_a_second_run_shows_the_first_one_in_grey_and_the_differences(notebook: Notebook) -> None:
    notebook.open(
        "def fit(scale):\n    log = nbddp.log\n    nbddp.log = lambda values, **k: log("
        "{n: v * scale for n, v in values.items()}, **k)\n    return train(2, 100)\n"
        "before = nbddp.run(fit, (1.0,), nprocs=2, device='cpu')",
        "after = nbddp.run(fit, (0.8,), nprocs=2, device='cpu', name='scaled')",
        DIFFERENCES,
    )
    for cell in (1, 2, 3):
        notebook.run_to_end(cell)
    first, second = (notebook.output(cell).locator(".nbddp") for cell in (1, 2))
    expect(first.locator("canvas")).to_have_count(2)
    expect(first.locator(".nbddp-before")).to_have_count(0)
    expect(first.get_by_role("button", name="Earlier run")).to_have_count(0)
    button = second.get_by_role("button", name="Earlier run: fit")
    expect(button).to_have_attribute("aria-pressed", "true")
    told = [line.split(" ", 2) for line in notebook.output(3).inner_text().splitlines()]
    assert {sign[0] for *_, sign in told} <= {"▲", "▼"}
    olds = {name: old for name, old, _ in told}
    expect(second.locator(".nbddp-before")).to_have_text(["before", "before"])
    tiles = second.locator(".nbddp-tiles > div")
    for name, _, difference in told[:2]:  # as many as this width has tiles for
        shown = tiles.filter(has_text=name.replace("/", " ").capitalize()).locator(".nbddp-change")
        expect(shown).to_have_text(difference)
        expect(shown).to_have_attribute("title", f"{olds[name]} at step 200 of the earlier run")
    canvas, places = second.locator("canvas").first, lambda: [each.bounding_box() for each in tiles.all()]
    assert canvas.evaluate(INKS)["grey"] > 100
    assert first.locator("canvas").first.evaluate(INKS)["grey"] == 0
    plot = second.locator(".nbddp-plot").first
    plot.focus()
    for _ in range(11):
        notebook.page.keyboard.press("PageUp")
    start = first_loss(0)
    value = rf"{0.8 * start:.4f} \((mean [\d.]+, )?before {start:.4f}\)"
    expect(plot).to_have_attribute("aria-label", re.compile(f"at step 1: train {value}"))
    expect(second.locator(".nbddp-value").first).to_have_text(re.compile(value))
    notebook.page.keyboard.press("Escape")
    ARTEFACTS.mkdir(exist_ok=True)
    second.screenshot(path=ARTEFACTS / "earlier.png")
    stood = places()
    button.click()
    expect(second.locator(".nbddp-before")).to_have_count(0)
    expect(second.locator(".nbddp-change").first).to_have_text("")
    assert (canvas.evaluate(INKS)["grey"], places()) == (0, stood)
    button.click()
    expect(second.locator(".nbddp-before")).to_have_count(2)


def test_an_earlier_run_that_was_longer_and_diverged_leaves_the_new_curve_in_view(notebook: Notebook) -> None:
    before = "old = History()\nRank(old).log('loss', range(6_000), [1.0 + s * s for s in range(6_000)])\n"
    run = "Rank(new.history).log('loss', range(60), [1 - s / 80 for s in range(60)]); view = show(new)"
    notebook.open(
        FAKES + "from nbddp.panel.view import Earlier",
        before + "new = FakeRun(earlier=Earlier('train', 0.0, old))\n" + run,
    )
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    panel = notebook.panel
    expect(panel.locator(".nbddp-change", has_text="▼")).to_have_attribute(
        "title", "3,482 at step 59 of the earlier run"
    )
    ink = panel.locator("canvas").evaluate(INKS)
    assert ink["blue"] > 100
    assert ink["blueRows"] > 0.12 * ink["height"]
    panel.locator(".nbddp-plot").focus()
    notebook.page.keyboard.press("ArrowRight")
    expect(panel.locator(".nbddp-step")).to_have_text("step 59")


def test_a_cell_that_is_executed_again_shows_its_own_run_before(notebook: Notebook) -> None:
    body = "import time\nfor step in range(30):\n    nbddp.log(loss=1 / (step + 1))\n    time.sleep(0.02)"
    cell = f"%%ddp -n 2 --device cpu\n{body}"
    notebook.open("%load_ext nbddp", cell, cell)
    for index in (1, 2, 3):
        notebook.run_to_end(index)
    expect(notebook.output(3).locator("canvas")).to_have_count(1)
    expect(notebook.output(3).locator(".nbddp-before")).to_have_count(0)
    notebook.run_to_end(2)
    panel = notebook.output(2).locator(".nbddp")
    expect(panel.get_by_role("button", name="Earlier run: In[3]")).to_be_visible()
    expect(panel.locator(".nbddp-before")).to_have_text("before")
    expect(panel.locator(".nbddp-change").filter(has_text="before")).to_have_text("= before")


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


def test_the_panel_is_saved_as_a_picture_and_its_metrics_as_a_file(notebook: Notebook) -> None:
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
    os.kill(notebook.lab.kernel_pid(), signal.SIGKILL)
    assert _saved(panel, "CSV") == ("lr_0.1_a-thinned.csv", own), "this page has all of its few points"
    said = "The kernel did not answer, so lr_0.1_a-thinned.csv has only the 402 points that this page has."
    expect(panel.locator(".nbddp-remark").last).to_have_text(said)


def test_a_large_file_comes_whole_through_the_servers_limit(notebook: Notebook) -> None:
    many = "big = FakeRun(now=status('finished'))\nRank(big.history).log('loss', range(200_000), "
    many += "[s / 7 for s in range(200_000)])\nbig.history.to_csv('own.csv'); view = show(big)"
    notebook.open(FAKES, many)
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    own = (notebook.lab.notebooks / "own.csv").read_bytes()
    assert len(own) > 4_000_000
    assert _saved(notebook.panel, "CSV") == ("train.csv", own)


def test_the_metrics_so_far_are_saved_while_the_cell_is_busy(notebook: Notebook) -> None:
    notebook.open(LONG)
    notebook.run(1)
    expect(notebook.panel.locator("canvas")).to_have_count(2, timeout=30_000)
    _, text = _saved(notebook.panel, "CSV")
    rows = text.decode().splitlines()
    assert rows[0] == "step,train/loss,train/acc"
    assert rows[1].startswith(f"1,{first_loss(0)},")
    assert int(rows[-1].split(",")[0]) == len(rows) - 1
    notebook.panel.get_by_role("button", name="Stop").click()


# ---------------------------------------------------------------------------- the look and the hands


def test_a_chart_of_sixty_lines_lists_eight_until_asked_for_more(notebook: Notebook) -> None:
    notebook.open(MANY)
    notebook.run_to_end(1)
    panel, page = notebook.panel, notebook.page
    expect(panel.locator("canvas")).to_have_count(4)
    page.evaluate("document.querySelector('.nbddp').parentElement.style.cssText = 'flex:none;width:330px'")
    page.wait_for_timeout(400)
    rest = panel.locator(".nbddp-rest")
    expect(rest).to_have_text("and 52 more")
    expect(panel.locator(".nbddp-key", has_text="layer")).to_have_count(8)
    rest.click()
    expect(rest).to_have_text("only 8")
    expect(panel.locator(".nbddp-key", has_text="layer")).to_have_count(60)
    for caption in panel.locator("figcaption").all():
        assert caption.bounding_box()["height"] < 180
    panel.get_by_role("button", name="Log scale").click()
    page.wait_for_timeout(400)
    expect(panel.locator("canvas")).to_have_count(4)
    ARTEFACTS.mkdir(exist_ok=True)
    panel.screenshot(path=ARTEFACTS / "many-lines.png")
    assert not notebook.problems


NAMES = """
def names():
    for step in range(1, 4):
        nbddp.log({f"sample/{i}": float(i * step) for i in range(20_000)}, step=step)
nbddp.run(names, nprocs=1, device="cpu");
"""


def test_twenty_thousand_names_leave_the_page_responsive(notebook: Notebook) -> None:
    notebook.open(NAMES)
    notebook.page.evaluate("""() => {
        let last = performance.now();
        window.longest = 0;
        setInterval(() => {
            window.longest = Math.max(window.longest, performance.now() - last);
            last = performance.now();
        }, 20);
    }""")
    notebook.run_to_end(1)
    told = "only the first 1,000 metrics are kept; 19,000 more names were logged"
    expect(notebook.output(1)).to_contain_text(told, timeout=30_000)
    expect(notebook.output(1)).to_contain_text("and 960 more")
    assert notebook.page.evaluate("window.longest") < 5_000
    assert not notebook.problems


def test_the_panel_fits_every_width_and_keyboard_zoom_and_search_work(notebook: Notebook) -> None:
    notebook.open("run = nbddp.run(train, (3, 200, 0.001), nprocs=2, device='cpu', show=False)", "run.show()")
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    panel, page = notebook.panel, notebook.page
    expect(panel.locator("canvas")).to_have_count(2)
    ARTEFACTS.mkdir(exist_ok=True)
    page.set_viewport_size({"width": 2200, "height": 1000})
    for width in (330, 744, 1600):
        page.evaluate(
            "w => document.querySelector('.nbddp').parentElement.style.cssText = `flex:none;width:${w}px`", width
        )
        page.wait_for_timeout(400)
        overflow = panel.evaluate("e => e.scrollWidth - e.clientWidth")
        assert overflow <= 0, f"at {width} px something sticks out by {overflow} px"
        table = panel.locator(".nbddp-scroll").evaluate("e => e.scrollWidth - e.clientWidth")
        assert table <= 0, f"at {width} px columns are hidden"
        tiles = panel.locator(".nbddp-tiles > div:not([data-free=true]) > div")
        cut = tiles.evaluate_all("all => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)")
        assert not cut, f"at {width} px tiles are cut off"
        panel.screenshot(path=ARTEFACTS / f"width-{width}.png")
    plot = panel.locator(".nbddp-plot").first
    plot.focus()
    for _ in range(3):
        page.keyboard.press("PageUp")
    expect(panel.locator(".nbddp-step")).to_have_text(re.compile(r"step \d+"))
    expect(panel.locator(".nbddp-plot").nth(1)).to_have_attribute("aria-label", re.compile("at step"))
    box = panel.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, box["y"] + 60, steps=5)
    page.mouse.up()
    reset = panel.get_by_role("button", name="Reset zoom")
    expect(reset).to_be_visible()
    reset.click()
    expect(reset).to_be_hidden()
    panel.get_by_role("button", name="Log scale").click()
    expect(panel.get_by_role("button", name="Log scale")).to_have_attribute("aria-pressed", "true")
    panel.get_by_role("slider", name="Smoothing").press("Home")
    panel.locator(".nbddp-logs summary").click()
    panel.get_by_role("tab", name="Rank 1").click()
    panel.get_by_role("searchbox").fill("epoch 2")
    expect(panel.get_by_role("tabpanel")).to_have_text("epoch 2 on rank 1")
    expect(panel.locator(".nbddp-found")).to_have_text("1 of 3")
