"""A run as lines of text: in a terminal, a script, a notebook that a program executes."""

import builtins
import dataclasses
import threading
from typing import Any

import pytest

import nbddp
from nbddp.history.history import History
from nbddp.panel.status import Source, Status
from nbddp.panel.text_view import TextView
from tests.curves import Recorded, logged
from tests.support import Cells, Notebook

Capsys = pytest.CaptureFixture[str]
REASON = "RankDied: rank 1 of 2 was killed by SIGKILL"
TRAIN = """
import nbddp
def train():
    for step in range(20): nbddp.log(loss=1 / (step + 1), reduce="mean")
    nbddp.barrier()
    print("done")
"""


class Followed:
    """A run without processes, and its view, on a clock that's set."""

    def __init__(self, history: History) -> None:
        self.history, self.now = history, 0.0
        self.status = Status("train", "starting", 0.0, "2 ranks · gloo")
        self._view = TextView(Source(history, lambda: self.status), clock=lambda: self.now)

    def becomes(self, state: str, now: float, **changes: Any) -> None:
        self.now = now
        self.status = dataclasses.replace(self.status, state=state, seconds=now, **changes)
        self._view.update()


def test_a_line_in_two_seconds_tells_loops_time_left_and_metrics_and_one_the_end(capsys: Capsys) -> None:
    history = Recorded()
    run = Followed(history)
    for tenth in range(60):
        logged(history=history, first=tenth, loss=[tenth])
        run.becomes("running", tenth / 10)
    run.becomes("running", 9.0)  # with nothing new
    run.becomes("running", 12.0)
    run.becomes("finished", 38.0)
    run.becomes("finished", 39.0)
    lines = ["train: step 20 · loss 20", "train: step 40 · loss 40", "train: step 59 · loss 59"]
    assert capsys.readouterr().out.splitlines() == [*lines, "train: finished after 0:38 · 2 ranks · gloo · loss 59"]
    history = Recorded()
    history.add(0, [{"bar": [0, "Epoch", 2, 5], "time": 1.0}, {"bar": [0, "Epoch", 3, 5], "time": 2.0}])
    logged(history=history, first=70, loss=[70])
    run = Followed(history)
    run.becomes("running", 0.0)
    run.becomes("running", 3.0)
    assert capsys.readouterr().out == "train: epoch 4/5 · step 70 · 2.0 s left · loss 70\n"


def test_a_run_that_has_nothing_to_show_but_its_output_is_silent_unless_it_takes_long(capsys: Capsys) -> None:
    for seconds in (0.5, 30.0):
        run = Followed(Recorded())
        run.becomes("starting", 20.0)
        run.becomes("running", 20.0)
        run.becomes("finished", 20.0 + seconds)
    assert capsys.readouterr().out == "train: finished after 0:50 · 2 ranks · gloo\n"


def test_text_lines_report_once_a_restart_the_number_of_restarts_and_a_hang_with_all_stacks(capsys: Capsys) -> None:
    history = Recorded()
    run = Followed(history)
    run.becomes("running", 1.0)
    history.restart(REASON)
    for state in ("starting", "running", "running", "finished"):
        run.becomes(state, 38.0, restarts=1, max_restarts=3)
    told = f"train: restart 1 of 3 after {REASON}\ntrain: finished after 0:38 · 2 ranks · gloo · 1 restart\n"
    assert capsys.readouterr().out == told
    run = Followed(Recorded())
    for seconds in (30, 31):
        run.becomes("running", seconds, hang=f"Nothing for {seconds} s\n  File ...")
    run.becomes("running", 32.0, hang="")
    run.becomes("running", 70.0, hang="Nothing for 32 s")
    assert capsys.readouterr().out == "train: Nothing for 30 s\n  File ...\ntrain: Nothing for 32 s\n"


def test_the_end_tells_once_what_the_ranks_have_not_logged_alike_and_a_remark(capsys: Capsys) -> None:
    history = Recorded(2)
    for rank, step in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2)):
        logged(history=history, rank=rank, first=step, reduce="sum", total=[step])
    history.settle()
    run = Followed(history)
    for _ in range(2):
        run.becomes("finished", 1.0, remark="no collective was called")
    told = "total: 1 of 3 steps was logged by only 1 of 2 ranks (the first is step 1); the sums leave out this one"
    end = "train: finished after 1.0 s · 2 ranks · gloo · total 4"
    assert capsys.readouterr().out.splitlines() == [f"train: {told}", end, "train: no collective was called"]
    short = Followed(Recorded())
    short.becomes("running", 0.1)
    short.becomes("finished", 1.0, remark="no collective was called")
    assert "train: no collective was called\n" in capsys.readouterr().out


def test_long_names_are_cut_in_the_middle_and_many_metrics_at_eight(capsys: Capsys) -> None:
    history = logged(**{name: [1] for name in ["a" * 100 + "\x1b[2J" + "b" * 100, *map(str, range(2, 11))]})
    run = Followed(history)
    run.becomes("finished", 1.0)
    metrics = capsys.readouterr().out.strip().split(" · ")[3:]
    assert metrics == ["a" * 29 + "…" + "b" * 30 + " 1", *(f"{n} 1" for n in range(2, 9)), "and 2 more"]
    logged(history=history, **{"\x1b[2J": [1]})
    run.becomes("running", 5.0)
    run.becomes("running", 8.0)
    assert "\x1b" not in capsys.readouterr().out


def test_the_thread_of_a_run_in_the_background_writes_nothing(capsys: Capsys) -> None:
    run = Followed(logged(loss=[1]))
    thread = threading.Thread(target=run.becomes, args=("finished", 9.0))
    thread.start()
    thread.join()
    assert capsys.readouterr().out == ""
    run.becomes("finished", 9.0)
    assert capsys.readouterr().out == "train: finished after 9.0 s · 2 ranks · gloo · loss 1\n"


PICTURE = {"text/html", "text/plain"}


def test_an_executed_notebook_keeps_the_picture_and_no_dead_widget(notebook: Notebook) -> None:
    """This client of the kernel is no page either."""
    call = "run = nbddp.run(train, nprocs=2, device='cpu'{})"
    notebook.ok(TRAIN)
    at_once = notebook.ok(call.format(""))
    assert at_once.shown.startswith("done\n")
    assert [set(each) for each in at_once.data] == [PICTURE]
    assert not notebook.ok(call.format(", wait=False")).data
    assert [set(each) for each in notebook.ok("_ = run.wait()").data] == [PICTURE]


def test_a_view_shows_in_which_line_a_rank_has_stopped(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    names = cell('def train():\n    name = input("name? ")\n    stop()\n    return name\ndef stop(): breakpoint()')
    seen = []

    def answer(prompt: str) -> str:
        seen.append([rank.waits for rank in nbddp.last_run()._status().ranks])
        return "Ada" if prompt == "name? " else "c"

    monkeypatch.setattr(builtins, "input", answer)
    run = nbddp.run(names.train, nprocs=2, device="cpu", show="text")
    assert (run.values, seen) == (["Ada", "Ada"], [["for input"] * 2, ["at line 5"] * 2])
