"""What a front end gets of a run, without a browser: the panel's messages, pictures, lines."""

import gc
import json
import re
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import nbddp
from nbddp.errors import LaunchError
from nbddp.panel import frontend, live
from nbddp.panel.live import CellView
from nbddp.panel.status import RankStatus, Source, Status
from nbddp.panel.text_view import TextView
from tests.curves import Recorded
from tests.support import Cells, Notebook, answer_to, wait_until_alone

MIME = {"text/html", "text/plain"}
JUPYTERLAB, VS_CODE = "8f1c", "vscode-notebook-cell:/home/user/train.ipynb#W0sZmlsZQ%3D%3D"
TRAIN = """
import gc, os, time, weakref
import nbddp, nbddp.panel.widget
def train(steps=40, quiet_s=0.0):
    for step in nbddp.progress(range(steps), desc="step"):
        nbddp.log({"train/loss": 1 / (step + 1) + nbddp.rank(), "train/acc": step / 40}, reduce="mean")
        if step % 10 == 0: nbddp.log({"val/loss": 0.5, "val/acc": 0.5}, reduce="mean")
        time.sleep(0.02)
    print("trained", flush=True)
    time.sleep(quiet_s)
    return step
"""


class Page:
    """JupyterLab or VS Code, by the cell's id: what it gets, with the time."""

    def __init__(self, notebook: Notebook, cell: str = JUPYTERLAB) -> None:
        self._client, self._cell = notebook._client, cell
        self.displays: dict[str, list[dict[str, Any]]] = {}
        self.opened: list[dict[str, Any]] = []  # widgets
        self.changes: list[dict[str, Any]] = []  # of the newest one's state
        self.state: dict[str, Any] = {}
        self.text = ""

    def begin(self, source: str) -> str:
        content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": False}
        message = self._client.session.msg("execute_request", content, metadata={"cellId": self._cell})
        message["header"]["msg_id"] = message["msg_id"] = str(uuid.uuid4())
        self._client.shell_channel.send(message)
        return str(message["msg_id"])

    def run(self, source: str) -> str:
        """Run a cell; returns its status."""
        message = self.begin(source)
        self.read(lambda kind, content, of: (kind, content.get("execution_state"), of) == ("status", "idle", message))
        return str(answer_to(self._client, message, 60)["status"])

    def read(self, until: Callable[[str, dict[str, Any], str | None], bool]) -> None:
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            if kind in ("display_data", "update_display_data"):
                self.displays.setdefault(content["transient"]["display_id"], []).append(content["data"])
            elif kind == "comm_open" and "head" in content["data"]["state"]:
                self.opened.append(content)
            elif kind == "comm_msg" and self.opened and content["comm_id"] == self.opened[-1]["comm_id"]:
                self.changes.append(content["data"].get("state", {}))
                self.state |= self.changes[-1]
            elif kind == "stream":
                self.text += content["text"]
            if until(kind, content, message["parent_header"].get("msg_id")):
                return

    def read_to(self, text: str) -> None:
        """Read until a picture has this text."""
        self.read(lambda kind, content, of: "display" in kind and text in content["data"].get("text/html", ""))

    def stop(self) -> None:
        """As the panel's button, of a run in the background."""
        content = {"comm_id": self.opened[-1]["comm_id"], "data": {"method": "custom", "content": {"kind": "stop"}}}
        self._client.shell_channel.send(self._client.session.msg("comm_msg", content))


@pytest.fixture
def page(notebook: Notebook) -> Page:
    notebook.ok(TRAIN)
    return Page(notebook)


def test_a_saved_cell_holds_a_picture_and_no_widget_at_any_time(page: Page) -> None:
    page.run("nbddp.panel.live._FIRST_S = nbddp.panel.live._PICTURE_S = 0.3")
    assert page.run("run = nbddp.run(train, nprocs=4, device='cpu')") == "ok"
    page.run("nbddp.panel.live._FIRST_S, nbddp.panel.live._PICTURE_S = 3.0, 30.0")
    (pictures,) = page.displays.values()
    assert {frozenset(data) for data in pictures} == {frozenset(MIME)}
    assert len(pictures) >= 3
    assert all(re.search(r"as of \d\d:\d\d:\d\d, still running", data["text/html"]) for data in pictures[:-1])
    assert [text in pictures[-1]["text/html"] for text in ("Finished", "still running")] == [True, False]
    assert max(len(data["text/html"]) for data in pictures) < 100_000
    (opened,) = page.opened
    assert f'class="nbddp-picture {opened["data"]["state"]["place"]}"' in pictures[0]["text/html"]
    frames = [change["frame"] for change in page.changes if "frame" in change]
    assert [frame["over"] for frame in frames[-2:]] == [False, True]
    assert [[line["label"] for line in chart["lines"]] for chart in frames[-1]["charts"]] == [["train", "val"]] * 2
    assert max(len(json.dumps(change)) for change in page.changes) < 25_000
    assert page.state["logs"] == dict.fromkeys("0123", "trained\n")


def test_no_frame_is_sent_when_nothing_changed(page: Page) -> None:
    message = page.begin("nbddp.run(train, (5, 2.5), nprocs=2, device='cpu')")
    page.read(lambda kind, content, of: "trained" in page.state.get("logs", {}).get("1", ""))
    sent = len(page.changes)
    page.read(lambda kind, content, of: page.state["frame"]["over"])
    page.read(lambda kind, content, of: (kind, content.get("execution_state"), of) == ("status", "idle", message))
    quiet = page.changes[sent:-2]  # the ranks finish one after the other
    assert sum("frame" in change for change in quiet) <= 5, "their memory may change; it's read once a second"
    assert 2 <= sum("head" in change for change in quiet) <= 4, "the clock goes on"


def test_a_run_in_the_background_is_drawn_in_its_own_cell_to_its_end(page: Page) -> None:
    assert page.run("run = nbddp.run(train, nprocs=2, device='cpu', wait=False)") == "ok"
    assert page.run("print('free')") == "ok"
    page.read_to("Finished")
    assert len(page.displays) == 1
    assert page.state["frame"]["over"]
    assert page.run("run.show()") == "ok"
    (shown,) = list(page.displays.values())[1]
    assert "Finished" in shown["text/html"]
    assert (len(page.opened), page.text) == (2, "free\n")


def test_the_panels_stop_ends_a_run_in_the_background(page: Page) -> None:
    page.run("run = nbddp.run(train, (5, 60), nprocs=2, device='cpu', wait=False)")
    page.read(lambda kind, content, of: page.state.get("frame", {}).get("state") == "running")
    page.stop()
    page.read_to("Stopped")
    page.run("print(run.state, run.logs(0))")
    assert page.text.startswith("stopped")


def test_an_interrupt_while_the_panel_opens_stops_the_run(page: Page, notebook: Notebook) -> None:
    slow = "print('opens'), time.sleep(1), setattr(d, 'display', theirs), theirs(*a, **k)"
    page.run("import IPython.display as d; theirs = d.display")
    page.run(f"d.display = lambda *a, **k: ({slow})[-1]")
    cell = page.begin("nbddp.run(train, nprocs=2, device='cpu')")
    page.read(lambda kind, content, of: "opens" in page.text)
    notebook.interrupt("kill")
    reply = notebook.end_of(cell)
    assert (reply.ename, reply.evalue[:17]) == ("KeyboardInterrupt", "train was stopped")
    assert "Stopped" in reply.data[-1]["text/html"]
    wait_until_alone(notebook.pid)


def test_vs_code_has_a_picture_beside_the_widget_and_in_its_place_at_the_end(page: Page, notebook: Notebook) -> None:
    page = Page(notebook, VS_CODE)
    assert page.run("run = nbddp.run(train, nprocs=2, device='cpu')") == "ok"
    ((first, *_, last),) = page.displays.values()
    assert (set(first), set(last)) == (MIME | {"application/vnd.jupyter.widget-view+json"}, MIME)
    assert ("still running" in first["text/html"], "Finished" in last["text/html"]) == (True, True)


class Told:
    """A run as the test tells it, and the displays of its cell."""

    def __init__(self, ranks: int = 2) -> None:
        self.history, self.printed, self.now = Recorded(ranks), "", 0.0
        self.at: list[float] = []
        self.shown: list[dict[str, str]] = []
        self.be("running")

    def be(self, state: str) -> None:
        ranks = tuple(RankStatus(rank, "cpu", state) for rank in range(len(self.history.ranks)))
        self.status = Status("train", state, 1.0, ranks=ranks)

    def log(self, step: int, **values: float) -> None:
        for rank in range(len(self.history.ranks)):
            self.history.add(rank, [[100.0 + step, step, True, "mean", 1, values]])

    def source(self) -> Source:
        return Source(self.history, lambda: self.status, tail=lambda rank, chars: self.printed[-chars:])

    def view(self, *, is_live: bool = True) -> CellView:
        return CellView(self.source(), is_live=is_live)

    def display(self, data: dict[str, str], **_: Any) -> "Told":
        self.update(data)
        return self

    def update(self, data: dict[str, str], **_: Any) -> None:
        self.at.append(self.now)
        self.shown.append(data)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    made = Told()
    monkeypatch.setattr("IPython.display.display", lambda data, **_: made.display(data))
    monkeypatch.setattr(frontend, "cell_id", lambda: JUPYTERLAB)
    return made


def test_frames_of_many_points_and_much_output_stay_small() -> None:
    from nbddp.panel.widget import Panel

    told, panel = Told(8), Panel("", "")
    values = np.random.default_rng(0).random(20_000).tolist()
    records = ([step, step, True, None, 1, dict.fromkeys("abcde", value)] for step, value in enumerate(values))
    told.history.add(0, records)
    told.printed = "x" * 1_000_000
    panel.update(told.source(), told.status)
    assert len(json.dumps(panel.frame)) < 100_000
    assert sum(map(len, panel.logs.values())) <= 16_000
    told.be("finished")
    panel.update(told.source(), told.status)
    assert len(json.dumps(panel.frame)) < 300_000
    panel.leave()


def test_the_first_picture_is_of_the_run_after_the_widgets_import(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told.be("starting")
    monkeypatch.setattr(frontend, "kernel_id", lambda: told.be("running") or "")
    told.view().update()
    assert "Running" in told.shown[0]["text/html"]


def test_a_panel_that_stays_keeps_its_last_frame_and_lets_run_and_history_go(told: Told) -> None:
    told.printed = "the last line"
    told.log(0, loss=1.0)
    view = told.view()
    view.update()
    told.be("finished")
    view.update()
    panel, gone = live._finished[-1], weakref.ref(told.history)
    told.history = Recorded(2)
    gc.collect()
    assert (gone(), panel.frame["state"], panel.logs["1"]) == (None, "finished", "the last line")
    view._hear(panel, {"kind": "stop"}, [])


def test_only_the_newest_finished_panels_stay(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LIVE", 2)
    monkeypatch.setattr(live, "_finished", live.collections.deque())
    told.be("finished")
    panels = []
    for _ in range(3):
        told.view().update()
        panels.append(live._finished[-1])
    assert [panel.comm is None for panel in panels] == [True, False, False]


def test_a_view_that_raises_is_given_up_and_the_run_goes_on(
    cell: Cells, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def update(view: TextView) -> None:
        raise ValueError("no paper")

    monkeypatch.setattr(TextView, "update", update)
    assert nbddp.run(cell("def f(): return 7").f, nprocs=2, device="cpu").value == 7
    assert capsys.readouterr().out == "[nbddp: f can't be shown here anymore: ValueError: no paper]\n"


def test_a_picture_is_a_few_seconds_old_ten_minutes_are_at_most_5_mb_and_none_is_sent_while_nothing_changes(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.time, "monotonic", lambda: told.now)

    def looks(until: float) -> Iterator[None]:  # as often as the kernel does
        while (now := told.now + 0.1) < until:
            told.now = now
            yield

    view, random = told.view(is_live=False), np.random.default_rng(0)
    for step, _ in enumerate(looks(40)):
        values = np.exp(-step / 500) + 0.2 * random.random(4)
        told.log(step, **dict(zip(("loss_train", "loss_val", "acc", "lr"), values.tolist())))
        view.update()
    ages = np.diff(told.at)
    assert ages.min() >= 1.0 - 1e-9
    assert ages.max() <= 4.0
    assert sum(len(text) for data in told.shown for text in data.values()) <= 5_000_000 * 40 / 600
    shown = []
    for until in (45, 50):
        for _ in looks(until):
            view.update()
        shown.append(len(told.shown))
    assert shown == [len(ages) + 2] * 2, "the newest values, and then nothing"
    told.be("finished")
    view.update()
    view.update()
    assert len(told.shown) == len(ages) + 3
    assert "Finished" in told.shown[-1]["text/html"]
    for data in told.shown:
        assert set(data) == MIME
        assert not re.search(r"<(script|style|link|iframe|object|svg)|https?:|\son\w+=|javascript:", data["text/html"])


UUID, OF_A_PROGRAM = ({"header": {"msg_id": each}} for each in (str(uuid.uuid4()), "0f1e2d3c-4b5a6978_312_7"))
IN_LAB = {"metadata": {"cellId": "a"}}


@pytest.mark.parametrize(
    ("environ", "message", "show", "kind"),
    [
        ({}, IN_LAB, None, "panel"),
        ({}, UUID, None, "panel"),
        ({}, OF_A_PROGRAM, None, "text"),
        ({}, OF_A_PROGRAM, True, "picture"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, {}, None, "picture"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, {}, None, "text"),
        ({"COLAB_RELEASE_TAG": "release-colab_20260819"}, IN_LAB, None, "picture"),
        ({"DATABRICKS_RUNTIME_VERSION": "17.3"}, {}, None, "picture"),
        ({"DATABRICKS_RUNTIME_VERSION": "17.3"}, {}, "panel", "panel"),
        ({"COLAB_RELEASE_TAG": "release-colab_20260819", "NBDDP_PANEL": "panel"}, {}, None, "panel"),
        ({"NBDDP_PANEL": "panel"}, {}, "text", "text"),
        ({"NBDDP_PANEL": "picture"}, {}, True, "picture"),
    ],
)
def test_the_view_fits_the_place(
    environ: dict[str, str], message: dict[str, Any], show: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(frontend, "_request", lambda: message)
    assert frontend.kind(show) == "text", "in a script"
    monkeypatch.setattr(frontend, "shell", lambda: object())
    assert frontend.kind(show) == kind


def test_a_view_that_does_not_exist_is_refused(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    names = cell("def f(): pass")
    with pytest.raises(LaunchError, match="show='movie' is unknown: use one of panel, picture, text"):
        nbddp.run(names.f, nprocs=2, show="movie")
    monkeypatch.setenv("NBDDP_PANEL", "on")
    with pytest.raises(LaunchError, match="NBDDP_PANEL='on' is unknown: use one of panel, picture, text"):
        nbddp.run(names.f, nprocs=2)
