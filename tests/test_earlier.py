"""Which earlier run a new one is compared with."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import nbddp
from nbddp.history.history import History
from nbddp.kernel import earlier
from tests.panel.fakes import Rank
from tests.support import Cells, run, start, wait_until

TRAIN = """
import nbddp, time
def train(value=1.0, stop_at=None, forever=False):
    for step in range(5):
        if step == stop_at:
            raise ValueError("bad batch")
        nbddp.log(loss=value * step)
    while forever:
        time.sleep(0.01)
def other():
    nbddp.log(loss=9.0)
"""


@pytest.fixture(autouse=True)
def _no_runs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "_begun", {})


def compared_with(run: nbddp.Run) -> str | None:
    """The name of the run before."""
    found = run._viewable.earlier
    return found and found.name


def test_a_run_is_compared_with_the_newest_of_its_function_that_has_curves(cell: Cells) -> None:
    names = cell(TRAIN)
    assert compared_with(run(names.train, name="first")) is None
    assert compared_with(run(names.other, name="other")) is None
    second = run(names.train, 2.0, name="second")
    assert compared_with(second) == "first"
    with pytest.raises(nbddp.RankError):
        run(names.train, 3.0, 0, name="failed at once")
    failed = nbddp.last_run()
    assert failed is not None
    assert compared_with(failed) == "second"
    with pytest.raises(nbddp.RankError):
        run(names.train, 4.0, 3, name="failed later")
    assert compared_with(run(functools.partial(names.train, 5.0), name="partial")) == "failed later"
    assert compared_with(run(names.other)) == "other"


def test_a_run_that_goes_on_is_not_compared_with_until_it_was_stopped(cell: Cells) -> None:
    names = cell(TRAIN)
    going = start(names.train, 1.0, None, True, name="going")
    wait_until(lambda: going.history.latest().get("loss") == 4.0)
    assert compared_with(run(names.train, name="meanwhile")) is None
    going.stop(0)
    third = run(names.train, name="third")
    assert compared_with(third) == "meanwhile"
    assert compared_with(run(names.train)) == "third"


def test_the_earlier_curves_outlive_the_run(cell: Cells) -> None:
    names = cell(TRAIN)
    run(names.train, 2.0)
    run(names.other)
    found = run(names.train)._viewable.earlier
    assert found is not None
    assert found.history["loss"].values.tolist() == [0, 2, 4, 6, 8]


def test_a_script_is_compared_with_itself(in_folder: Path) -> None:
    for name in ("a.py", "b.py"):
        Path(name).write_text("import nbddp\nnbddp.log(x=1.0)\n")
    found = [compared_with(nbddp.run_script(path, nprocs=1, device="cpu", show=False)) for path in ("a.py", "b.py")]
    again = nbddp.run_script(in_folder / "a.py", nprocs=1, device="cpu", show=False)
    assert [*found, compared_with(again)] == [None, None, "a.py"]


def test_one_history_of_the_newest_functions_is_kept() -> None:
    def over(*values: float) -> History:
        history = History()
        Rank(history).log("loss", range(len(values)), values)
        history.settle()
        return history

    assert earlier.begin("", "cell without an id", over(1.0)) is None
    assert earlier.begin("train", "train", over(1.0)) is None
    for number in range(20):
        assert earlier.begin(f"cell {number}", "without a metric", over()) is None
    assert list(earlier._begun) == ["train", "cell 19"]
    for number in range(10):
        assert earlier.begin(f"f{number}", "run", over(1.0)) is None
    assert list(earlier._begun) == [f"f{number}" for number in range(2, 10)]
    for number in range(5):
        earlier.begin("f9", f"again {number}", over(2.0))
    assert [run.name for run in earlier._begun["f9"]] == ["again 3", "again 4"]
