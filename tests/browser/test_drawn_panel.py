"""What the panel draws in a real JupyterLab, and what the mouse and the keyboard do there."""

from __future__ import annotations

import re

import pytest
from lab import IN_A_BROWSER
from notebook_page import ARTEFACTS, FAKES, HOSTS, NotebookPage, first_loss, go_dark, wait_until
from playwright.sync_api import Page, expect

pytestmark = IN_A_BROWSER


def test_the_output_has_its_colours_and_the_first_tab_is_selected(notebook: NotebookPage) -> None:
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


def test_high_contrast_keeps_shapes_and_charts_speak(notebook: NotebookPage) -> None:
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


@pytest.mark.parametrize("shares_page", [True, False])
def test_a_panel_that_opens_in_a_dark_page_is_dark_every_time(notebook: NotebookPage, shares_page: bool) -> None:
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
        wait_until(lambda: "nbddp-picture" in notebook.path.read_text())
        notebook.load()
        expect(notebook.page.locator('.nbddp[data-theme="dark"]')).to_have_count(10, timeout=20_000)
        expect(notebook.page.locator('.nbddp[data-theme="light"]')).to_have_count(0)


def test_keys_typed_on_the_panel_are_not_shortcuts(notebook: NotebookPage, page: Page) -> None:
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
    wait_until(lambda: "nbddp-picture" in notebook.path.read_text())


MANY = """
def many():
    for step in range(1, 4):
        nbddp.log({f"layer{i}/norm": float(i * step) for i in range(60)}, step=step)
        nbddp.log({"huge": 1e308 * (-1) ** step, "tiny": 5e-324 * (step % 2), "train/loss": 1 / step}, step=step)
nbddp.run(many, nprocs=2, device="cpu", show=False).show()
"""


def test_a_chart_of_sixty_lines_lists_eight_until_asked_for_more(notebook: NotebookPage) -> None:
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


def test_the_panel_fits_every_width_and_keyboard_zoom_and_search_work(notebook: NotebookPage) -> None:
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


# ---------------------------------------------------------------------------- runs that need no processes


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


def test_nan_is_marked_in_red_and_a_log_scale_has_labels(notebook: NotebookPage) -> None:
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


def test_a_restart_is_marked_on_the_curves_and_reported(notebook: NotebookPage) -> None:
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


def test_a_stalled_run_shows_where_each_rank_is(notebook: NotebookPage) -> None:
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


def test_no_text_becomes_an_element_or_script(notebook: NotebookPage) -> None:
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


def test_where_stop_cannot_work_the_panel_names_the_toolbar_button(notebook: NotebookPage) -> None:
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


def test_nothing_is_animated_with_prefers_reduced_motion(notebook: NotebookPage) -> None:
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


def test_ranks_are_grouped_by_host_and_fold_by_keyboard(notebook: NotebookPage) -> None:
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


# ---------------------------------------------------------------------------- the run before


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


def test_a_second_run_shows_the_first_one_in_grey_and_the_differences(notebook: NotebookPage) -> None:
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


def test_an_earlier_run_that_was_longer_and_diverged_leaves_the_new_curve_in_view(notebook: NotebookPage) -> None:
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


def test_a_cell_that_is_executed_again_shows_its_own_run_before(notebook: NotebookPage) -> None:
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
