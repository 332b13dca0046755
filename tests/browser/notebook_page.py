"""A notebook in a page of JupyterLab or Notebook 7, as a test uses it; cells that several test files run."""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from lab import KERNEL, PROMPT, QUESTION, Lab, type_at_prompt
from playwright.sync_api import Locator, Page, expect

ARTEFACTS = Path(__file__).parents[1] / "artefacts"

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
DEBUG = """
def fit():
    for i in range(40):
        nbddp.log({"train/loss": 1 / (i + 1)})
        time.sleep(0.02)
    loss = 3 * (nbddp.rank() + 2)
    nbddp.barrier()
    breakpoint()
    return loss
run = nbddp.run(fit, nprocs=2, device="cpu")
"""


class NotebookPage:
    """One notebook in one page."""

    def __init__(self, lab: Lab, page: Page, kernel: str = KERNEL) -> None:
        self.lab, self.page = lab, page
        self.file = f"{kernel}.ipynb"  # each kernel stays with its notebook
        self._kernel = kernel
        self.problems: list[str] = []
        page.on("pageerror", self._note)

    def _note(self, error: object) -> None:
        if str(error) != "Cannot send":  # JupyterLab's own, of the notebook that was closed before
            self.problems.append(str(error))

    def open(self, *cells: str) -> None:
        self.lab.write(self.file, [TRAIN, *cells], self._kernel)
        self.lab.open(self.page, self.file)
        self.lab.run_to_end(self.page, 0)

    def load(self) -> None:
        """Load the page again, with the notebook as it is saved."""
        self.lab.load(self.page, self.file)

    @property
    def path(self) -> Path:
        return self.lab.notebooks / self.file

    def forget_page(self) -> None:
        """Leave the page to another notebook."""
        self.page.remove_listener("pageerror", self._note)

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

    def kernel_pid(self) -> int:
        return self.lab.kernel_pid(self.file)

    def ranks(self) -> list[int]:
        kernel = psutil.Process(self.kernel_pid())
        # Those that the fork server has started, not itself.
        return [p.pid for p in kernel.children(recursive=True) if p.ppid() != kernel.pid and os.getsid(p.pid) == p.pid]


def number(text: str) -> int:
    return int(re.sub(r"\D", "", text))


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def go_dark(page: Page) -> None:
    page.locator('.lm-MenuBar-itemLabel:text-is("Settings")').click()
    page.locator('.lm-Menu-itemLabel:text-is("Theme")').hover()
    page.locator('.lm-Menu-itemLabel:text-is("JupyterLab Dark")').click()
    page.wait_for_selector('body[data-jp-theme-light="false"]', state="attached")


def first_loss(rank: int) -> float:
    """What that rank of TRAIN logs at its first step."""
    return 2.4 * math.exp(-1 / 160) + 0.2 + random.Random(rank).gauss(0, 0.06)


def stop_works(notebook: NotebookPage, *more_cells: str) -> None:
    state = "print(run_state := nbddp.last_run().state, len(nbddp.last_run().history['train/loss'].steps) > 20)"
    notebook.open(LONG, state, *more_cells)
    for _ in range(3):  # a busy machine may take longer once; what is slow takes longer every time
        took = _seconds_to_stop(notebook)
        notebook.run_to_end(2)
        expect(notebook.output(2)).to_contain_text("stopped True")
        if took < 1.0:
            break
    assert took < 1.0, f"{took:.2f} s from the click to an idle kernel"


def _seconds_to_stop(notebook: NotebookPage) -> float:
    """Run the first cell and stop it. Returns the time from the click to an idle kernel."""
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
    took = time.monotonic() - began
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    expect(notebook.output(1)).to_contain_text("KeyboardInterrupt")
    expect(notebook.output(1)).to_contain_text("Stopped")
    return took


def answer_both(output: Locator, line: str) -> None:
    """Answer the debugger once both ranks have stopped: on a busy machine it may ask for the first one alone."""
    question = output.locator(QUESTION)
    while "ranks 0 and 1" not in question.inner_text(timeout=20_000):
        type_at_prompt(output, "ranks")
    type_at_prompt(output, line)


def debugger_works(notebook: NotebookPage) -> None:
    notebook.open(DEBUG, "print('value', run.value)", DEBUG)
    notebook.run(1)
    output = notebook.output(1)
    answer_both(output, "p loss")
    expect(output).to_contain_text("rank 1: 9")
    expect(notebook.panel).to_contain_text("debugger: fit, line 7")
    expect(notebook.panel.locator(".nbddp-waiting")).to_be_hidden()  # the prompt is not pushed down by an empty chart
    notes = notebook.panel.locator(".nbddp-ranks .nbddp-note").all()
    assert all(note.bounding_box()["height"] < 22 for note in notes), "a note is broken into two lines"
    answer_both(output, "n")
    expect(output).to_contain_text("-> return loss")
    ARTEFACTS.mkdir(exist_ok=True)
    output.locator(PROMPT).wait_for()
    notebook.page.screenshot(path=ARTEFACTS / f"debugger-{notebook.lab.app}.png")
    answer_both(output, "c")
    notebook.run_to_end(2)
    expect(notebook.output(2)).to_have_text("value 6")
    notebook.run(3)
    notebook.output(3).locator(PROMPT).wait_for()
    notebook.panel.nth(1).locator("button", has_text="Stop").click()
    expect(notebook.output(3)).to_contain_text("KeyboardInterrupt", timeout=3000)
    assert notebook.ranks() == []
