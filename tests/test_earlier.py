"""The earlier run of the same function, script, or cell, in gray; and pictures of a history's curves."""

import functools
import gc
import pickle
import weakref
from pathlib import Path

import pytest

import nbddp
from nbddp.history.history import History
from nbddp.kernel import earlier
from tests.curves import Recorded
from tests.support import Cells, Notebook, run, start, wait_until

TRAIN = """
import nbddp, time
def train(value=1.0, stop_at=None, forever=False):
    for step in range(5):
        if step == stop_at: raise ValueError("bad batch")
        nbddp.log(loss=value * step)
    while forever: time.sleep(0.01)
def other(): nbddp.log(loss=9.0)
"""


@pytest.fixture(autouse=True)
def _no_runs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "_newest", {})


def test_a_run_is_compared_with_the_newest_of_its_function_that_has_curves_and_is_over(cell: Cells) -> None:
    names = cell(TRAIN)
    first, other, second = run(names.train), run(names.other), run(names.train, 2.0)
    assert first._before is other._before is None
    assert second._before is second._source().before is first.history
    assert ["earlier run" in each._repr_html_() for each in (first, second)] == [False, True]
    with pytest.raises(nbddp.RankError):
        run(names.train, 3.0, 0)
    assert nbddp.last_run()._before is second.history
    with pytest.raises(nbddp.RankError):
        run(names.train, 4.0, 3)
    failed = nbddp.last_run()
    going = start(names.train, 1.0, None, True)
    wait_until(lambda: going.history.latest().get("loss") == 4.0)
    assert run(functools.partial(names.train, 5.0))._before is failed.history
    going.stop(0)
    assert run(names.train)._before is going.history


def test_a_script_is_compared_with_itself(in_folder: Path) -> None:
    for name in ("a.py", "b.py"):
        Path(name).write_text("import nbddp\nnbddp.log(x=1.0)\n")
    one, two = (nbddp.run_script(path, nprocs=1, device="cpu", show=False) for path in ("a.py", "b.py"))
    again = nbddp.run_script(in_folder / "a.py", nprocs=1, device="cpu", show=False)
    assert [one._before, two._before, again._before] == [None, None, one.history]


def test_one_history_of_the_newest_eight_functions_is_kept() -> None:
    def over(*values: float) -> History:
        history = Recorded()
        history.add(0, [[1.0, step, False, None, 1, {"loss": value}] for step, value in enumerate(values)])
        history.settle()
        return history

    earlier.keep("", over(1.0))
    earlier.keep("without a metric", over())
    for number in range(10):
        earlier.keep(f"f{number}", over(1.0))
    assert list(earlier._newest) == [f"f{number}" for number in range(2, 10)]
    replaced = weakref.ref(earlier.before("f2"))
    earlier.keep("f2", newest := over(2.0))
    assert earlier.before("f2") is newest
    gc.collect()
    assert replaced() is None
    earlier.keep("f10", over(1.0))
    assert list(earlier._newest) == [*(f"f{number}" for number in range(4, 10)), "f2", "f10"]


def test_a_plot_has_metrics_of_a_run_or_loaded_history_and_another_runs_in_gray(cell: Cells, in_folder: Path) -> None:
    done = run(cell("import nbddp\ndef train(): nbddp.log(loss=1.0, acc=0.5, lr=0.1)").train)
    html = done.history.plot("acc", "lr", before=done).data
    assert [f"<b>{title}</b>" in html for title in ("Loss", "Accuracy", "Learning rate")] == [False, True, True]
    assert "earlier run" in html
    assert done.history.plot(before=done.history).data.count("<img") == 3
    assert "earlier run" not in done.history.plot("acc").data
    assert done.history.plot("lr", log=True).data != done.history.plot("lr").data
    with pytest.raises(KeyError, match="no metric 'los' was logged; the metrics are: loss, acc, lr"):
        done.history.plot("los")
    done.history.save("run.metrics")
    assert nbddp.History.load("run.metrics").plot().data == done.history.plot().data
    assert nbddp.History()._repr_html_() is None


def test_a_run_shows_its_picture_at_a_cells_end_unless_the_cell_shows_it_anyway(notebook: Notebook) -> None:
    notebook.ok(TRAIN)
    assert notebook.ok("run = nbddp.run(train, nprocs=2, device='cpu', show='picture')\nrun").result == ""
    assert "<img" in notebook.ok("run").data[-1]["text/html"]
    assert "<img" in notebook.ok("nbddp.run(train, nprocs=2, device='cpu', show=False)").data[-1]["text/html"]
    assert notebook.ok("nbddp.run(print, nprocs=1, device='cpu')").result == ""


def test_a_run_stays_in_the_notebook(cell: Cells) -> None:
    done = run(cell("def train(): return 1").train)
    with pytest.raises(TypeError, match="a Run can't be sent; pass its value"):
        pickle.dumps(done)
    with pytest.raises(nbddp.PayloadError, match="a Run can't be sent; pass its value"):
        run(print, done)
