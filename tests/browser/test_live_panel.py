"""The panel in a real JupyterLab and a real browser, while real runs go on, and when their kernel is gone."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import datetime

import pytest
from lab import IN_A_BROWSER, OTHER_KERNELS
from notebook_page import ARTEFACTS, FAKES, LONG, NotebookPage, debugger_works, go_dark, number, stop_works, wait_until
from playwright.sync_api import Page, WebSocket, expect

pytestmark = IN_A_BROWSER


def test_the_curve_grows_while_the_cell_is_busy(notebook: NotebookPage) -> None:
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
def test_nothing_in_the_panel_moves_after_the_first_second(notebook: NotebookPage, width: int, again: bool) -> None:
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


def test_a_short_cell_opens_as_one_line(notebook: NotebookPage) -> None:
    call = "nbddp.run(nbddp.barrier, nprocs=2, device='cpu');"
    notebook.open(call, call)
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    panel = notebook.panel.nth(1)  # the fork server was there already
    expect(panel.locator(".nbddp-chip")).to_have_text("Finished")
    assert panel.bounding_box()["height"] < 70
    panel.get_by_role("button", name="Details").click()
    expect(panel.locator("tbody tr")).to_have_count(2)
    expect(panel.locator(".nbddp-count")).to_have_text("no output")
    assert panel.bounding_box()["height"] > 100


def test_jupyterlab_says_busy_while_the_run_goes_on(notebook: NotebookPage) -> None:
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


HIDE = """
window.said = [];
window.theirs = Notification;
window.Notification = class {
  static permission = "granted";
  constructor(title, { body }) { said.push([title, body]); }
};
Object.defineProperty(document, "hidden", { configurable: true, value: true });
document.dispatchEvent(new Event("visibilitychange"));
"""
UNHIDE = """
delete document.hidden;
window.Notification = theirs;
document.dispatchEvent(new Event("visibilitychange"));
"""


@pytest.mark.parametrize("fail_at", [None, 150])
def test_a_tab_in_the_background_shows_progress_and_the_end(notebook: NotebookPage, fail_at: int | None) -> None:
    page = notebook.page
    notebook.open(f"nbddp.run(train, (2, 100, 0.02, {fail_at}), nprocs=2, device='cpu');")
    bare = page.title()
    notebook.run(1)
    expect(notebook.panel.locator(".nbddp-chart canvas")).to_have_count(2, timeout=30_000)
    assert page.title() == bare
    page.evaluate(HIDE)  # as if the user looked at another tab
    wait_until(lambda: re.fullmatch(rf"[1-9]\d? % {re.escape(bare)}", page.title()))
    wait_until(lambda: page.title() == ("✗ " if fail_at else "✓ ") + bare)
    assert page.evaluate("said.map(([title]) => title)") == [f"train: {'failed' if fail_at else 'finished'}"]
    assert ("do not</script> fit" in page.evaluate("said[0][1]")) == bool(fail_at)
    page.evaluate(UNHIDE)
    wait_until(lambda: page.title() == bare)


@pytest.mark.usefixtures("own_page")
def test_the_page_requests_nothing_from_another_host(notebook: NotebookPage) -> None:
    asked: list[str] = []
    notebook.page.on("request", lambda request: asked.append(request.url))
    notebook.open("nbddp.run(train, (1, 20), nprocs=2, device='cpu');")
    notebook.run_to_end(1)
    foreign = [url for url in asked if not url.startswith((notebook.lab.url, "data:", "blob:"))]
    assert not foreign


FLOOD = """
def flood():
    while True:
        nbddp.log(loss=1.0)
nbddp.run(flood, nprocs=2, device="cpu")
"""
SENT = re.compile(rb'"date": ?"([^"]+)"')  # in a message's header, which comes first
HEARD, SNAPSHOT = re.compile(rb'"heard": ?[1-9]'), re.compile(rb'"kind": ?"snapshot"')


def test_at_most_ten_messages_a_second_at_any_rate_of_metrics(notebook: NotebookPage) -> None:
    """Counted by the time at which the kernel sent them, since a busy machine delivers many at once."""
    page, frames = notebook.page, list[bytes]()

    def sent_at(frame: bytes) -> float:
        found = SENT.search(frame)
        return datetime.fromisoformat(found[1].decode().replace("Z", "+00:00")).timestamp() if found else 0.0

    def listen(socket: WebSocket) -> None:
        socket.on("framereceived", lambda data: frames.append(data if isinstance(data, bytes) else data.encode()))

    def has_begun() -> bool:
        """Whether the page has all that it asked for at its start, which a busy kernel sends several times."""
        page.wait_for_timeout(50)
        whole = [sent_at(frame) for frame in frames if SNAPSHOT.search(frame)]
        return any(map(HEARD.search, frames)) and bool(whole) and time.time() > max(whole) + 1.5

    page.on("websocket", listen)
    notebook.open(FLOOD)
    page.remove_listener("websocket", listen)
    notebook.run(1)
    wait_until(has_begun)
    began = time.time()
    page.wait_for_timeout(2000)
    notebook.panel.locator(".nbddp-stop").click()
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Stopped", timeout=20_000)
    sent = [frame for frame in frames if began <= sent_at(frame) < began + 2]
    assert 0 < len(sent) <= 10 * 2 + 2, "ten a second, and a little for the server's own"
    changes = [len(frame) for frame in sent if not SNAPSHOT.search(frame)]
    assert len(changes) >= len(sent) - 1, "at most one late answer to the page's start"
    assert sum(changes) < 200_000 * 2


def test_a_background_run_is_drawn_in_its_own_cell(notebook: NotebookPage) -> None:
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


def test_stop_stops_within_a_second(notebook: NotebookPage) -> None:
    stop_works(notebook)


@pytest.mark.parametrize("kernel", OTHER_KERNELS)
def test_stop_works_with_other_ipykernel_versions(notebook: NotebookPage, kernel: str) -> None:
    version = next(importlib.metadata.distributions(path=[str(OTHER_KERNELS[kernel])], name="ipykernel")).version
    stop_works(notebook, "import ipykernel; print(ipykernel.__version__)")
    notebook.run_to_end(3)
    expect(notebook.output(3)).to_have_text(version)


def test_the_debuggers_prompt_is_under_the_cell(notebook: NotebookPage) -> None:
    debugger_works(notebook)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kernel", OTHER_KERNELS)
def test_the_debugger_works_with_other_ipykernel_versions(notebook: NotebookPage) -> None:
    debugger_works(notebook)


def test_a_session_goes_on_after_a_failure_and_shows_what_its_ranks_hold(notebook: NotebookPage) -> None:
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


def test_a_failure_shows_the_rank_and_its_output(notebook: NotebookPage) -> None:
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


NAMES = """
def names():
    for step in range(1, 4):
        nbddp.log({f"sample/{i}": float(i * step) for i in range(20_000)}, step=step)
nbddp.run(names, nprocs=1, device="cpu");
"""


def test_twenty_thousand_names_leave_the_page_responsive(notebook: NotebookPage) -> None:
    notebook.open(NAMES)
    notebook.page.evaluate("""() => {
        let last = performance.now();
        window.longest = 0;
        window.ticks = setInterval(() => {
            window.longest = Math.max(window.longest, performance.now() - last);
            last = performance.now();
        }, 20);
    }""")
    notebook.run_to_end(1)
    told = "only the first 1,000 metrics are kept; 19,000 more names were logged"
    expect(notebook.output(1)).to_contain_text(told, timeout=30_000)
    expect(notebook.output(1)).to_contain_text("and 960 more")
    assert notebook.page.evaluate("clearInterval(ticks), longest") < 5_000
    assert not notebook.problems


# ---------------------------------------------------------------------------- the kernel is gone


def _lost(notebook: NotebookPage, end: Callable[[], object]) -> None:
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


def test_after_a_restart_of_the_kernel_the_panel_says_lost(notebook: NotebookPage, page: Page) -> None:
    def restart() -> None:
        page.locator('.lm-MenuBar-itemLabel:text-is("Kernel")').click()
        page.locator('.lm-Menu-itemLabel:text-is("Restart Kernel…")').click()
        page.get_by_role("button", name="Confirm Kernel Restart").click()

    _lost(notebook, restart)
    ARTEFACTS.mkdir(exist_ok=True)
    notebook.panel.screenshot(path=ARTEFACTS / "lost.png")


@pytest.mark.usefixtures("own_page")
def test_after_the_kernels_death_the_panel_says_lost(notebook: NotebookPage) -> None:
    _lost(notebook, lambda: os.kill(notebook.kernel_pid(), signal.SIGKILL))
    notebook.lab.end_kernels()


def test_a_kernel_that_speaks_again_is_no_longer_lost(notebook: NotebookPage) -> None:
    notebook.open(FAKES, "view = show(run)", "tell(view, run, seconds=90.0)")
    notebook.run_to_end(1)
    notebook.run_to_end(2)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Lost", timeout=30_000)
    notebook.run_to_end(3)
    expect(notebook.panel.locator(".nbddp-chip")).to_have_text("Running")
    expect(notebook.panel.locator(".nbddp-stop")).to_be_visible()
