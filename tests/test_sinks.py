"""``run(to=...)``: what sinks receive, judged by the readers of their own packages; sinks that fail or hang."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbddp
from nbddp.history.columns import Series
from nbddp.history.history import Cursor, History
from nbddp.kernel import metrics_out
from nbddp.sinks.interface import Points, rows
from nbddp.sinks.unsent import Unsent
from tests.support import Cells, Notebook, run, script, wait_until
from tests.wandb_file import stored_rows

TRAIN = """
    import math, nbddp
    def train(steps=30):
        for step in range(steps):
            nbddp.log({"loss/train": 1 / (step + 1), "rank": nbddp.rank()}, step=step)
            nbddp.log(mean=nbddp.rank() + step, step=step, reduce="mean")
        nbddp.log(odd=math.nan, step=7)
    def fail():
        train()
        raise ValueError("boom")
"""


@pytest.fixture
def names(cell: Cells) -> Any:
    return cell(TRAIN)


def test_a_function_receives_every_step_once_in_order(names: Any) -> None:
    got: list[tuple[int, dict[str, float]]] = []
    made = run(names.train, to=lambda step, metrics: got.append((step, metrics)))
    merged: dict[int, dict[str, float]] = {}
    for step, metrics in got:
        assert not merged.get(step, {}).keys() & metrics.keys()
        merged.setdefault(step, {}).update(metrics)
    assert list(merged) == list(range(30))
    assert merged[3] == {"loss/train": 0.25, "rank": 0.0, "mean": 3.5}
    assert [merged[step]["mean"] for step in range(30)] == made.history["mean"].values.tolist()
    assert math.isnan(merged[7]["odd"])


def test_files_hold_what_the_history_holds(names: Any, in_folder: Path) -> None:
    import pandas

    made = run(names.train, to=["csv:new/folder/a.csv", "jsonl:a.jsonl"])
    frame = made.history.to_pandas()
    pandas.testing.assert_frame_equal(pandas.read_csv("new/folder/a.csv", index_col="step"), frame)
    lines = pandas.read_json("a.jsonl", lines=True, precise_float=True).set_index("_step").sort_index()
    assert lines.index.name == "_step"
    merged = lines.groupby(level=0).first()
    np.testing.assert_array_equal(merged["loss/train"], frame["loss/train"])
    np.testing.assert_array_equal(merged["mean"], frame["mean"])
    run(names.train, 3, to="jsonl:a.jsonl")
    assert {json.loads(line)["_step"] for line in Path("a.jsonl").read_text().splitlines()} == {0, 1, 2, 7}


def test_the_csv_file_grows_while_the_run_goes_on(cell: Cells, in_folder: Path) -> None:
    import pandas

    names = cell("""
        import nbddp, os, time
        def train():
            for step in range(100_000):
                nbddp.log(loss=step)
                time.sleep(0.01)
                if os.path.exists("enough"): break
    """)
    going = run(names.train, to="csv:a.csv", wait=False)
    wait_until(lambda: Path("a.csv").exists() and Path("a.csv").read_text().count("\n") > 20)
    assert going.state == "running"
    Path("enough").touch()
    going.wait()
    pandas.testing.assert_frame_equal(pandas.read_csv("a.csv", index_col="step"), going.history.to_pandas())


@pytest.mark.slow
def test_tensorboard_has_the_steps_values_and_times(names: Any, in_folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("mine")  # type: ignore[no-untyped-call]
    began = time.time()
    made = run(names.train, to=[writer, "tensorboard:ours"])
    ended = time.time()
    writer.add_scalar("afterwards", 1.0)  # type: ignore[no-untyped-call]
    writer.close()  # type: ignore[no-untyped-call]
    for folder in ("mine", "ours"):
        found = EventAccumulator(folder)
        found.Reload()
        for name in made.history:
            steps, values = made.history[name]
            events = found.Scalars(name)
            assert [event.step for event in events] == steps.tolist()
            np.testing.assert_array_equal([event.value for event in events], values.astype(np.float32))
            assert all(began < event.wall_time < ended for event in events)
        assert ("afterwards" in found.Tags()["scalars"]) == (folder == "mine")


TRACKED = """
    import json, sys, time
    import mlflow, nbddp, wandb
    from lightning_fabric.loggers import CSVLogger

    def train():
        for step in range(30):
            nbddp.log({"loss/train": 1 / (step + 1)}, step=step)
            nbddp.log(mean=nbddp.rank() + step, step=step, reduce="mean")

    mlflow.set_tracking_uri("file:" + sys.argv[1])
    logger = CSVLogger(".", name="lightning")
    with wandb.init(project="trial", mode="offline") as run, mlflow.start_run() as active:
        run.log({"before": 1.0})
        began = time.time()
        made = nbddp.run(train, nprocs=2, device="cpu", show=False, to=[run, active, logger])
        ended = time.time()
    client = mlflow.MlflowClient()
    found = {}
    for name in made.history:
        points = sorted(client.get_metric_history(active.info.run_id, name), key=lambda point: point.step)
        found[name] = [[point.step, point.value, point.timestamp / 1000] for point in points]
    history = {name: [series.steps.tolist(), series.values.tolist()] for name, series in made.history.items()}
    runs = len(mlflow.search_runs(output_format="list"))
    print(json.dumps([began, ended, history, found, runs, logger.log_dir]))
"""


@pytest.mark.slow
def test_wandb_mlflow_and_lightning_get_one_run_each_with_steps_values_and_times(in_folder: Path) -> None:
    import pandas

    # In a process of its own: these packages leave threads, a service and environment variables.
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as temp:  # W&B leaves folders there
        quiet = {"WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
        done = script(TRACKED, str(in_folder / "mlruns"), TMPDIR=temp, **quiet)
    assert done.returncode == 0, done.stderr
    began, ended, history, in_mlflow, mlflow_runs, log_dir = json.loads(done.stdout.splitlines()[-1])

    assert mlflow_runs == 1
    for name, (steps, values) in history.items():
        assert [[step, value] for step, value, _ in in_mlflow[name]] == [list(pair) for pair in zip(steps, values)]
        assert all(began - 0.001 < at < ended for *_, at in in_mlflow[name])

    merged: dict[int, dict[str, float]] = {}
    (stored,) = in_folder.glob("wandb/offline-run-*/*.wandb")
    for row in stored_rows(stored):
        if "before" in row:
            continue
        assert began < row["_timestamp"] < ended
        merged.setdefault(int(row["step"]), {}).update(row)
    assert sorted(merged) == list(range(30))
    for name, (_, values) in history.items():
        assert [merged[step][name] for step in range(30)] == values

    frame = pandas.read_csv(in_folder / log_dir / "metrics.csv")
    assert frame["mean"].dropna().tolist() == history["mean"][1]


@pytest.mark.parametrize("end", ["fails", "is stopped"])
def test_everything_logged_is_written_after_a_failure_and_a_stop(cell: Cells, in_folder: Path, end: str) -> None:
    import pandas

    names = cell(f"""
        import nbddp, time
        def train():
            for step in range(50): nbddp.log(loss=step)
            if {end == "fails"}: raise ValueError("boom")
            time.sleep(1000)
    """)
    going = run(names.train, to="csv:a.csv", wait=False)
    wait_until(lambda: "loss" in going.history and len(going.history["loss"].steps) == 50)
    going.cancel()
    going.exception()
    if end == "fails":
        with pytest.raises(nbddp.RankError):
            going.wait()
    else:
        going.wait()
    assert pandas.read_csv("a.csv")["loss"].tolist() == list(range(50))


def test_a_sink_that_failed_gets_the_same_metrics_again_and_each_once(
    cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_out, "_PAUSES_S", [0.1])
    names = cell("""
        import nbddp, os, time
        def train():
            for step in range(100_000):
                nbddp.log(loss=step)
                time.sleep(0.01)
                if os.path.exists("enough"): break
    """)
    got: list[int] = []
    failures: list[int] = []

    def sometimes(step: int, metrics: dict[str, float]) -> None:
        if step in (7, 17, 37) and failures.count(step) < 2:
            failures.append(step)
            raise OSError("busy")
        got.append(step)
        if len(got) == 60:
            Path("enough").touch()

    Path("later").mkdir()
    going = run(names.train, to=[sometimes, "jsonl:later/a.jsonl", "csv:later/a.csv"], wait=False)
    wait_until(lambda: Path("later/a.jsonl").exists() and Path("later/a.jsonl").stat().st_size)
    Path("later").rename("away")  # the folder comes back when more has been logged
    seen = len(got)
    wait_until(lambda: len(got) > seen + 10)
    Path("away").rename("later")
    going.wait()
    steps = going.history["loss"].steps.tolist()
    assert got == steps
    assert failures == [7, 7, 17, 17, 37, 37]
    assert [json.loads(line)["loss"] for line in Path("later/a.jsonl").read_text().splitlines()] == steps
    assert len(Path("later/a.csv").read_text().splitlines()) == 1 + len(steps)
    assert going.logs(0).count("did not take metrics: OSError: busy. They are written again") == 1
    assert going.logs(0).count("jsonl:later/a.jsonl did not take metrics: FileNotFoundError") == 1
    assert "no more metrics" not in going.logs(0)


def test_two_runs_cannot_write_one_file_at_once(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp, time
        def train(): nbddp.log(loss=1.0)
        def last():
            train()
            time.sleep(1000)
    """)
    Path("link").symlink_to(".")
    going = run(names.last, to=["csv:a.csv", "jsonl:a.jsonl"], wait=False)
    for to in ("csv:a.csv", "csv:link/a.csv", f"jsonl:{in_folder}/a.jsonl"):
        with pytest.raises(nbddp.LaunchError, match="a run that is not over writes this file"):
            run(names.train, to=to)
    with pytest.raises(nbddp.LaunchError, match="names a file that to= names twice"):
        run(names.train, to=["csv:b.csv", "csv:./b.csv"])
    run(names.train, to="csv:b.csv")
    going.stop()
    run(names.train, to=["csv:a.csv", "jsonl:a.jsonl"])
    assert Path("a.jsonl").read_text().count("\n") == 1


def test_awaiting_a_run_with_a_slow_sink_does_not_block_the_loop(names: Any) -> None:
    release = threading.Event()

    def slow(step: int, metrics: dict[str, float]) -> None:
        release.wait(60)

    async def longest_pause() -> float:
        going = asyncio.ensure_future(_wait(run(names.train, 3, to=slow, wait=False)))
        longest, ended = 0.0, time.monotonic() + 3.0  # the run itself takes a tenth of that
        while not going.done():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)
            if began > ended:
                release.set()
        await going
        return longest

    try:
        assert asyncio.run(longest_pause()) < 1.0
    finally:
        release.set()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("nbddp-to")])


async def _wait(going: nbddp.Run) -> None:
    await going


def test_a_sink_that_raises_is_told_of_once_and_the_others_get_everything(names: Any) -> None:
    got = []

    def fail(step: int, metrics: dict[str, float]) -> None:
        raise OSError("disk on fire")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = run(names.train, to=[fail, lambda step, metrics: got.append(step)])
    assert made.state == "finished"
    assert set(got) == set(range(30))
    text = made.logs(0) + "".join(str(each.message) for each in said)
    assert text.count("fail takes no more metrics: OSError: disk on fire. The run goes on") == 1


def test_a_sink_that_hangs_delays_only_the_end_and_is_told_of(names: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_out, "_END_S", 0.3)
    release = threading.Event()

    def hang(step: int, metrics: dict[str, float]) -> None:
        release.wait(60)

    began = time.monotonic()
    try:
        with pytest.warns(UserWarning, match="hang has not taken over all metrics yet"):
            made = run(names.train, to=hang)
        assert time.monotonic() - began < 5
        began = time.monotonic()
        made.wait()
        assert time.monotonic() - began < 0.2  # once told, nobody waits again
    finally:
        release.set()
        wait_until(lambda: "nbddp-to-hang" not in {thread.name for thread in threading.enumerate()})


def test_steps_that_a_restart_repeats_with_other_values_are_written_again(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        def train():
            first = 5 * nbddp.restart_count()
            for step in range(first, 15): nbddp.log(loss=step + 100 * nbddp.restart_count(), step=step)
            time.sleep(1.5)  # so that the first attempt's have been written
            if nbddp.restart_count() == 0: raise ValueError("boom")
    """)
    got: list[tuple[int, float]] = []
    run(names.train, max_restarts=1, to=lambda step, metrics: got.append((step, metrics["loss"])))
    assert got == [(step, step) for step in range(15)] + [(step, step + 100) for step in range(5, 15)]


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("cvs:a.csv", "did you mean csv"),
        ("a.csv", "no kind that nbddp knows"),
        ("csv:", "has no path"),
        ("csv:/proc/no/such/a.csv", "folder cannot be made"),
        ("csv:/tmp", "cannot be written"),
        ("tensorboard:/etc/passwd", "that is a file"),
        (5, "cannot receive metrics"),
        (math, "is a module. Pass what"),
        ([print, None], "cannot receive metrics"),
        (dict, "cannot receive metrics"),
    ],
)
def test_what_cannot_receive_metrics_is_refused_before_a_process_starts(names: Any, to: Any, message: str) -> None:
    before = nbddp.last_run()
    with pytest.raises(nbddp.LaunchError, match=message):
        run(names.train, to=to)
    assert nbddp.last_run() is before


def test_cells_name_files_and_variables(notebook: Notebook, in_folder: Path) -> None:
    import pandas

    notebook.ok("%load_ext nbddp\nseen = []\ndef keep(step, metrics): seen.append(step)")
    notebook.ok(f"%%ddp -n 2 --device cpu --to csv:{in_folder}/a.csv,keep\nfor i in range(4): nbddp.log(loss=i)")
    assert notebook.ok("seen").shown.strip() == "[0, 1, 2, 3]"
    assert pandas.read_csv(in_folder / "a.csv")["loss"].tolist() == [0, 1, 2, 3]


def test_an_interrupt_ends_the_wait_for_a_sink_that_hangs(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp, threading
        release = threading.Event()
        def hang(step, metrics): release.wait(60)
        def train(): nbddp.log(loss=1.0)
    """)
    going = notebook.begin("nbddp.run(train, nprocs=2, device='cpu', show=False, to=hang)")
    try:
        time.sleep(2.0)  # the run itself takes a tenth of that
        began = time.monotonic()
        notebook.interrupt()
        assert notebook.end_of(going).ename == "KeyboardInterrupt"
        assert time.monotonic() - began < 2.0
    finally:
        shown = notebook.ok("release.set()\nnbddp.last_run()").shown
    assert "finished" in shown


def test_a_run_without_sinks_starts_no_thread_for_them(names: Any) -> None:
    before = {thread.name for thread in threading.enumerate()}
    run(names.train)
    assert not {name for name in {thread.name for thread in threading.enumerate()} - before if "nbddp-to" in name}


def test_rows_keep_a_step_that_was_logged_twice_under_one_name() -> None:
    steps, values, times = np.array([1, 1, 2]), np.array([0.1, 0.2, 0.3]), np.array([10.0, 11.0, 12.0])
    points = [Points("a", steps, values, times), Points("b", np.array([2]), np.array([5.0]), np.array([12.5]))]
    assert [tuple(row) for row in rows(points)] == [
        (1, 10.0, {"a": 0.1}),
        (1, 11.0, {"a": 0.2}),
        (2, 12.0, {"a": 0.3, "b": 5.0}),
    ]


def test_points_that_were_handed_out_do_not_come_again_when_others_change() -> None:
    class Changing:
        """A history whose points become invalid with every read."""

        version, points = 0, [(0, 1.0), (1, math.nan), (1, 2.0)]

        def timed_points(self, cursors: Any) -> Any:
            self.version += 1
            steps, values = (np.array(column) for column in zip(*self.points))
            cursor = Cursor((self.version,), len(self.points))
            return {"a": (Series(steps, values.astype(float)), steps * 1.0, cursor)}

    history: Any = Changing()
    unsent = Unsent(history)
    assert [each.steps.tolist() for each in unsent.take()] == [[0, 1, 1]]
    assert unsent.take() == []
    history.points = [(0, 1.0), (1, math.nan), (5, 7.0), (1, 2.0), (1, 2.0), (2, 3.0)]
    (points,) = unsent.take()
    assert [points.steps.tolist(), points.values.tolist()] == [[5, 1, 2], [7.0, 2.0, 3.0]]
    assert unsent.take() == []


def test_points_combined_from_ranks_have_the_lowest_ranks_time(cell: Cells) -> None:
    names = cell("""
        import nbddp, time
        def train():
            time.sleep(nbddp.rank())
            nbddp.log(loss=1.0, reduce="mean")
    """)
    history: History = run(names.train).history
    (_, (combined,), _) = history.timed_points({})["loss"]
    assert abs(combined - history._metrics["loss"].columns[0].times(0)[0]) == 0
    assert history._metrics["loss"].columns[1].times(0)[0] - combined > 0.5
