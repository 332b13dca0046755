"""``run(log_to=...)``: what destinations receive, judged by their own packages; those that fail or hang."""

import math
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nbddp
from nbddp.loggers import log_to
from tests.curves import Recorded, logged
from tests.support import Cells, Notebook, run, wait_until

TRAIN = """
    import math, nbddp
    def train(steps=30):
        for step in range(steps):
            nbddp.log({"loss/train": 1 / (step + 1), "rank": nbddp.rank()}, step=step)
            nbddp.log(mean=nbddp.rank() + step, step=step, reduce="mean")
        nbddp.log(odd=math.nan, step=7)
"""


@pytest.fixture
def names(cell: Cells) -> Any:
    return cell(TRAIN)


def test_a_function_gets_each_step_once_in_order_and_tensorboard_values_and_times(names: Any, in_folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    got: list[tuple[int, dict[str, float]]] = []
    writer = SummaryWriter("mine")  # type: ignore[no-untyped-call]
    began = time.time()
    wandb: list[Any] = []
    like_wandb = SimpleNamespace(define_metric=lambda *args, **kwargs: wandb.append((args, kwargs)), log=wandb.append)
    lightning: list[Any] = []
    keep = lightning.append
    like_lightnings = SimpleNamespace(log_metrics=lambda row, step: keep((step, row)), save=lambda: keep("saved"))
    to = [lambda step, metrics: got.append((step, metrics)), writer, like_wandb, like_lightnings]
    made = run(names.train, log_to=to)
    ended = time.time()
    merged: dict[int, dict[str, float]] = {}
    for step, metrics in got:
        assert not merged.get(step, {}).keys() & metrics.keys()
        merged.setdefault(step, {}).update(metrics)
    assert (list(merged), merged[3]) == (list(range(30)), {"loss/train": 0.25, "rank": 0.0, "mean": 3.5})
    assert [merged[step]["mean"] for step in range(30)] == made.history["mean"].values.tolist()
    assert math.isnan(merged[7]["odd"])
    found = EventAccumulator("mine")
    found.Reload()
    for name in made.history:
        steps, values = made.history[name]
        events = found.Scalars(name)
        assert [event.step for event in events] == steps.tolist()
        np.testing.assert_array_equal([event.value for event in events], values.astype(np.float32))
        assert all(began < event.wall_time < ended for event in events)
        np.testing.assert_allclose([event.wall_time for event in events], made.history.points(name).times, 0, 1e-3)
    assert wandb[0] == (("*",), {"step_metric": "step"})
    assert [row["step"] for row in wandb[1:]] == [step for step, _ in got]
    assert all(began < row["_timestamp"] < ended and row["rank"] == 0 for row in wandb[1:31] if "rank" in row)
    assert lightning == [*got, "saved"]
    writer.add_scalar("it's still open", 1.0)  # type: ignore[no-untyped-call]
    writer.close()  # type: ignore[no-untyped-call]


def test_what_cannot_receive_metrics_is_refused_before_a_process_starts(names: Any) -> None:
    before = nbddp.last_run()
    for to, message in (
        (5, "log_to=5 can't take metrics. Pass a SummaryWriter, "),
        (math, "can't take metrics"),
        ("csv:a.csv", "log_to='csv:a.csv' can't take metrics"),
        ([print, None], "log_to=None can't take metrics"),
        (dict, "log_to=<class 'dict'> can't take metrics"),
    ):
        with pytest.raises(nbddp.LaunchError, match=message):
            run(names.train, log_to=to)
        with pytest.raises(nbddp.LaunchError, match=message):
            nbddp.Session(nprocs=1, device="cpu", log_to=to)
    assert nbddp.last_run() is before


def test_one_that_raises_is_named_once_and_the_others_get_everything(names: Any) -> None:
    got = []

    def fail(step: int, metrics: dict[str, float]) -> None:
        raise OSError("disk on fire")

    for _ in range(2):  # also in the next run
        got.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")
            made = run(names.train, log_to=[fail, lambda step, metrics: got.append(step)])
        assert (set(got), len(made.history["rank"].steps)) == ({*range(30)}, 30)
        text = "fail gets no more metrics: OSError: disk on fire. The run continues, and run.history has all of them"
        assert [str(each.message) for each in said] == [text]


def test_one_that_hangs_delays_only_the_end_and_is_named(names: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_to, "_END_S", 0.3)
    release = threading.Event()

    def hang(step: int, metrics: dict[str, float]) -> None:
        release.wait(60)

    began = time.monotonic()
    try:
        with pytest.warns(UserWarning, match=r"hang didn't take all metrics within 0\.3 s"):
            made = run(names.train, log_to=hang)
        assert (made.state, time.monotonic() - began < 5) == ("finished", True)
    finally:
        release.set()
        wait_until(lambda: "nbddp-log-to" not in {thread.name for thread in threading.enumerate()})


def test_an_interrupt_ends_the_wait_for_one_that_hangs(notebook: Notebook) -> None:
    going = notebook.begin("""
        import nbddp, threading
        release = threading.Event()
        def hang(step, metrics):
            print("hangs", flush=True)
            release.wait(60)
        def train(): nbddp.log(loss=1.0)
        nbddp.run(train, nprocs=2, device="cpu", show=False, log_to=hang)
    """)
    notebook.shown_so_far(going, "hangs")
    began = time.monotonic()
    notebook.interrupt()
    assert notebook.end_of(going).ename == "KeyboardInterrupt"
    assert time.monotonic() - began < 5.0, "not the ten seconds"
    assert "finished" in notebook.ok("release.set()\nnbddp.last_run()").shown


@pytest.mark.parametrize("end", ["fails", "is stopped"])
def test_everything_logged_is_sent_after_a_failure_and_a_stop(cell: Cells, end: str) -> None:
    names = cell(f"""
        import nbddp, time
        def train():
            for step in range(50): nbddp.log(loss=step)
            if {end == "fails"}: raise ValueError("boom")
            time.sleep(1000)
    """)
    got = []
    going = run(names.train, log_to=lambda step, metrics: got.append(metrics["loss"]), wait=False)
    wait_until(lambda: "loss" in going.history and len(going.history["loss"].steps) == 50)
    if end == "is stopped":
        going.stop()
    assert isinstance(going.exception(), nbddp.RankError) == (end == "fails")
    assert got == list(range(50))


def test_a_sessions_calls_and_cells_send_what_they_log(cell: Cells) -> None:
    got = []
    with nbddp.Session(nprocs=1, device="cpu", log_to=lambda step, metrics: got.append((step, metrics))) as session:
        session.run(cell(TRAIN).train, (2,))
        session.cell("import nbddp\nnbddp.log(loss=0.5)")
    assert (got[1], got[3:]) == ((1, {"loss/train": 0.5, "rank": 0, "mean": 1}), [(0, {"loss": 0.5})])


def take(history: Recorded) -> dict[str, list[tuple[int, float]]]:
    return {name: list(zip(each.steps.tolist(), each.values.tolist())) for name, each in history.take().items()}


def test_points_that_a_restart_repeats_are_sent_again() -> None:
    history = logged(loss=range(10))
    assert take(history) == {"loss": [(step, step) for step in range(9)]}, "the last one may still be replaced"
    history.restart()
    logged(history=history, first=5, loss=range(105, 112))
    assert take(history) == {"loss": [(step, step + 100) for step in range(5, 11)]}
    history.restart()
    logged(history=history, first=20, loss=[220])  # goes on
    history.settle()
    assert take(history) == {"loss": [(11, 111), (20, 220)]}
    assert take(history) == {"loss": []}


def test_only_values_that_stay_are_sent() -> None:
    history = Recorded(2)
    logged(history=history, rank=1, loss=[0.5, 1.5, 2.5])  # arrives before rank 0's
    assert take(history) == {"loss": []}
    logged(history=history, rank=0, loss=range(3))
    logged(history=history, rank=0, first=2, loss=[2.25])  # once more
    assert take(history) == {"loss": [(0, 0), (1, 1)]}
    history.settle()
    assert take(history) == {"loss": [(2, 2.25)]}
    history = Recorded(2)
    logged(history=history, rank=0, reduce="mean", loss=range(4))
    assert take(history) == {"loss": []}
    logged(history=history, rank=1, reduce="mean", loss=range(1, 4))
    assert take(history) == {"loss": [(0, 0.5), (1, 1.5)]}
    history.settle()
    assert take(history) == {"loss": [(2, 2.5), (3, 3)]}


def test_a_step_that_comes_again_in_the_next_epoch_is_a_call_of_its_own() -> None:
    history, got = Recorded(), []
    sender = log_to.Sender(history, log_to.destinations(lambda step, metrics: got.append((step, metrics["loss"]))))
    for epoch in range(2):
        history.add(0, [[10 * epoch + step, step, False, None, 1, {"loss": epoch + step}] for step in range(2)])
    history.settle()
    sender.finish()
    assert got == [(0, 0), (1, 1), (0, 1), (1, 2)]
