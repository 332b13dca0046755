"""Unmodified programs that log with other libraries draw curves: what those libraries have stored, each number once."""

from __future__ import annotations

import importlib.util
import json
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbddp
from nbddp.history.history import History
from nbddp.history.records import AUTOLOG
from tests.support import Cells, run
from tests.wandb_file import stored_rows

PROGRAMS = Path(__file__).parent / "programs" / "logging"
Curves = dict[str, list[tuple[int, float]]]


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None  # an import here would change the tests' own process
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def program(name: str, nprocs: int = 2, **options: Any) -> Curves:
    return curves(nbddp.run_script(PROGRAMS / name, nprocs=nprocs, device="cpu", show=False, **options))


def module(path: str, source: str) -> None:
    """Write a library that stands for the real one, in the current folder."""
    Path(path).parent.mkdir(parents=True)
    for folder in [*Path(path).parents][:-1]:
        (folder / "__init__.py").touch()
    Path(path).write_text(source)


def curves(made: nbddp.Run) -> Curves:
    return {name: list(zip(steps.tolist(), values.tolist())) for name, (steps, values) in made.history.items()}


def in_tensorboard(folder: Path, prefix: str = "") -> Curves:
    """What TensorBoard reads there; its values are float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {prefix + name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def in_wandb(folder: Path) -> Curves:
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = stored_rows(path)
    names = {name for row in rows for name, value in row.items() if name[0] != "_" and not isinstance(value, str)}
    return {name: [(row["_step"], row[name]) for row in rows if name in row] for name in names}


def in_csv(folder: Path) -> Curves:
    """What Lightning's CSVLogger has written."""
    import pandas

    (path,) = folder.glob("**/metrics.csv")
    frame = pandas.read_csv(path, index_col="step").drop(columns="epoch", errors="ignore")
    return {name: list(frame[name].dropna().items()) for name in frame}


def assert_same(found: Curves, expected: Curves, **lengths: int) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        mine, theirs = (np.array(each[name]).astype(np.float32) for each in (found, expected))
        np.testing.assert_array_equal(mine, theirs, name)
    assert {name: len(found[name]) for name in lengths} == lengths


# ---------------------------------------------------------------------------- TensorBoard


def test_the_tensorboard_tutorial_draws_what_tensorboard_shows(in_folder: Path) -> None:
    found = program("tensorboard_tutorial.py")
    events = sorted((in_folder / "runs/regression").glob("events*"))
    assert len(events) == 2, "the script doesn't ask for its rank; rank 0's curves count"
    expected = {"Loss/train": in_tensorboard(events[0])["Loss/train"]}
    for name in ("weight", "target"):
        expected[f"slope/{name}"] = in_tensorboard(in_folder / f"runs/regression/slope_{name}")["slope"][:10]
    assert_same(found, expected, **{"Loss/train": 10, "slope/weight": 10})


def test_a_second_writer_has_its_folder_in_front(in_folder: Path) -> None:
    found = program("tensorboard_ddp.py")
    expected = in_tensorboard(in_folder / "logs/train") | in_tensorboard(in_folder / "logs/val", "val/")
    assert_same(found, expected, **{"loss": 24, "val/loss": 3})


def test_writers_have_curves_of_their_own_and_arrays_are_numbers(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import numpy as np, torch
        def train():
            from tensorboardX import SummaryWriter as Other
            from torch.utils.tensorboard import SummaryWriter
            folds = [SummaryWriter(f"fold{fold}/val") for fold in range(3)]
            other = Other("fold0/val")
            for step in range(2):
                for fold, writer in enumerate(folds):
                    writer.add_scalar("loss", fold + step, step)
                writer.add_scalar("array", np.array([1.5]), step)
                writer.add_scalar("tensor", torch.tensor([2.5]), step)
                other.add_scalar("loss", -1.0, step)
                folds[0].add_scalar("Loss/train", 10 + step, step)
                folds[0].add_scalars("Loss", {"train": 20 + step}, step)
    """)
    assert curves(run(names.train, nprocs=1)) == {
        "loss": [(0, 0), (1, 1)],
        "val/loss": [(0, 1), (1, 2)],
        "fold2/val/loss": [(0, 2), (1, 3)],
        "array": [(0, 1.5), (1, 1.5)],
        "tensor": [(0, 2.5), (1, 2.5)],
        "Loss/train": [(0, 10), (1, 11)],
        "val/Loss/train": [(0, 20), (1, 21)],
    }


def test_another_version_of_a_library_ends_its_curves_and_not_the_training(cell: Cells, in_folder: Path) -> None:
    module("wandb/sdk/wandb_run.py", "class Run: pass")
    names = cell("""
        import sys
        def train():
            from torch.utils.tensorboard import SummaryWriter
            sys.path.insert(0, ".")
            import wandb.sdk.wandb_run
            class Odd(dict):
                def items(self): raise KeyError("odd")
            writer = SummaryWriter("runs")
            writer.add_scalar("before", 1.0)
            for _ in range(3):
                try: writer.add_scalars("odd", Odd())
                except KeyError: pass
            writer.add_scalar("after", 2.0)
            return "trained"
    """)
    made = run(names.train)
    assert made.values == ["trained", "trained"]
    assert list(made.history) == ["before"]
    assert made.logs().count("not recording what") == 2
    assert "[rank 0] nbddp: not recording what tensorboard logs (KeyError: 'odd')\n" in made.logs()
    assert "not recording what wandb logs (AttributeError: type object 'Run' has no attribute 'log')" in made.logs()


# ---------------------------------------------------------------------------- log() and sessions

BESIDE = """
    import nbddp
    from torch.utils.tensorboard import SummaryWriter
    def train(first):
        writer = SummaryWriter("runs")
        for step in range(5):
            if first == "log": nbddp.log(loss=step, step=step)
            writer.add_scalar("loss", -step, step)
            writer.add_scalar("lr", 0.1, step)
            if first == "writer": nbddp.log(loss=step, step=step)
"""


@pytest.mark.parametrize("first", ["log", "writer"])
def test_a_curve_that_log_writes_replaces_one_that_was_heard(cell: Cells, in_folder: Path, first: str) -> None:
    own, heard = [(step, step) for step in range(5)], [(step, 0.1) for step in range(5)]
    assert curves(run(cell(BESIDE).train, first, nprocs=1)) == {"loss": own, "lr": heard}
    assert curves(run(cell(BESIDE).train, first, nprocs=1, autolog=False)) == {"loss": own}


def test_a_restart_and_a_saved_file_keep_what_log_has_replaced(tmp_path: Path) -> None:
    history = History()
    history.add(0, [[1.0, 0, False, AUTOLOG, 1, {"loss": 5.0, "lr": 0.1}], [2.0, 0, True, None, 1, {"loss": 1.0}]])
    history.restart()
    history.add(0, [[3.0, 1, False, AUTOLOG, 1, {"loss": 6.0, "lr": 0.2}], [4.0, 1, False, None, 1, {"loss": 2.0}]])
    history.save(tmp_path / "metrics")
    for each in (history, History.load(tmp_path / "metrics")):
        assert {name: series.values.tolist() for name, series in each.items()} == {"loss": [1, 2], "lr": [0.1, 0.2]}


def test_each_call_of_a_session_has_its_own_names(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        from torch.utils.tensorboard import SummaryWriter
        def train(folder, value): SummaryWriter(folder).add_scalar("loss", value, 1)
    """)
    with nbddp.Session(nprocs=1, device="cpu") as session:
        for folder, value in ("first", 1.0), ("second", 2.0):
            assert curves(session.run(names.train, (folder, value))) == {"loss": [(1, value)]}


# ---------------------------------------------------------------------------- trainers


def test_a_trainers_own_writer_is_not_heard_and_a_callbacks_is(cell: Cells, in_folder: Path) -> None:
    """Although the callback logs the trainer's value."""
    source = "class Trainer:\n    def log(self, logs): self.writer.add_scalar('train/loss', logs['loss'], 3)"
    module("transformers/trainer.py", source)
    names = cell("""
        import sys, types
        from torch.utils.tensorboard import SummaryWriter
        def train():
            sys.path.insert(0, ".")
            from transformers.trainer import Trainer
            trainer = Trainer()
            trainer.writer, trainer.state = SummaryWriter("runs"), types.SimpleNamespace(global_step=3)
            trainer.log({"loss": 0.5, "train_runtime": 7.0, "note": "text"})
            trainer.writer.add_scalar("mine", 0.5, 3)
    """)
    assert curves(run(names.train, nprocs=1)) == {"loss": [(3, 0.5)], "mine": [(3, 0.5)]}


def test_an_import_that_fails_shows_only_the_users_frames_and_nothing_is_imported_for_it(
    cell: Cells, in_folder: Path
) -> None:
    module("tensorboardX/writer.py", "1 / 0")
    names = cell("""
        import sys
        def train():
            assert not {"tensorboard", "wandb", "mlflow", "transformers"} & sys.modules.keys()
            sys.path.insert(0, ".")
            import tensorboardX.writer
    """)
    with pytest.raises(nbddp.RankError) as raised:
        run(names.train, nprocs=1)
    frames = traceback.extract_tb(raised.value.cause.__traceback__)
    assert [frame.name for frame in frames] == ["train", "<module>"]


# ---------------------------------------------------------------------------- other libraries, as they are


@pytest.fixture
def offline(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TMPDIR", str(in_folder))  # W&B leaves folders there
    return in_folder


@needs("tensorboardX")
def test_tensorboardx_draws_what_tensorboard_shows(in_folder: Path) -> None:
    found, group = program("tensorboardx_demo.py", nprocs=1), "data/scalar_group"
    assert [value for _, value in found.pop(f"{group}/xsinx")] == [n * np.sin(n) for n in range(20)]
    assert [value for _, value in found.pop(f"{group}/xcosx")] == [n * np.cos(n) for n in range(20)]
    assert_same(found, in_tensorboard(in_folder / "runs/demo"), **{"data/scalar1": 20, "data/scalar2": 20})


@pytest.mark.long
@needs("wandb")
def test_a_wandb_run_draws_the_rows_that_wandb_has_stored(offline: Path, cell: Cells) -> None:
    """And not the writer's, which logs the same names at other steps; nor rows that W&B drops or overwrites."""
    lengths = {"epoch": 12, "loss": 12, "norms.weight": 12, "val/loss": 3, "examples": 3}
    assert_same(program("wandb_pytorch.py"), in_wandb(offline), **lengths)
    names = cell("""
        def train():
            import wandb
            with wandb.init(project="steps") as run:
                for step, value in (0, 1.0), (5, 2.0), (5, 3.0), (3, 4.0), (None, 5.0), (5, 6.0), (9, 7.0):
                    run.log({"loss": value}, step=step)
    """)
    (offline / "wandb").rename(offline / "before")
    assert_same(curves(run(names.train, nprocs=1)), in_wandb(offline))


@pytest.mark.long
@needs("mlflow")
def test_an_mlflow_run_draws_what_mlflow_has_stored(in_folder: Path) -> None:
    env = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": "runs"}
    found, expected = program("mlflow_quickstart.py", env=env), Curves()
    for path in in_folder.glob("runs/*/*/metrics/*"):
        for line in path.read_text().splitlines():
            _, value, step = line.split()[:3]
            expected.setdefault(path.name, []).append((int(step), float(value)))
    assert_same(found, expected, loss=12, accuracy=12, lr=12)


@pytest.mark.long
@needs("accelerate")
def test_accelerate_draws_what_both_trackers_have_stored(offline: Path) -> None:
    found = program("accelerate_tracking.py")
    assert_same(found, in_wandb(offline), train_loss=3, weight=3)
    stored = in_tensorboard(offline / "logs/example")
    assert_same(found, {name: stored[name] for name in found})


@pytest.mark.long
@needs("pytorch_lightning")
def test_lightning_and_fabric_draw_what_their_loggers_have_written(in_folder: Path) -> None:
    assert_same(program("lightning_module.py"), in_csv(in_folder / "lightning_logs"), train_loss=12, val_loss=3)
    assert_same(program("fabric_loop.py"), in_csv(in_folder / "fabric"), loss=12, weight=12, bias=12)


@pytest.mark.long
@needs("transformers")
def test_transformers_trainer_draws_its_log_history_without_the_speeds(offline: Path) -> None:
    found, expected = program("transformers_trainer.py"), Curves()
    for row in json.loads((offline / "log_history.json").read_text()):
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"):
            if name in row:
                expected.setdefault(name, []).append((row["step"], row[name]))
    assert_same(found, expected, loss=8, grad_norm=8, learning_rate=8, eval_loss=2, train_loss=1)


@pytest.mark.long
@needs("keras")
def test_keras_draws_its_history_and_what_a_callback_writes(in_folder: Path) -> None:
    found = program("keras_mlp.py")
    history = json.loads((in_folder / "history.json").read_text())
    assert history.keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    expected = {name: list(enumerate(values)) for name, values in history.items()}
    expected |= {f"epoch/{name}": points for name, points in expected.items()} | {"weights": found["weights"]}
    assert_same(found, expected, loss=4, weights=4)


@pytest.mark.long
@needs("fastai")  # it depends on torchvision; pip install --no-deps fastai
def test_fastai_draws_its_recorder_over_two_fits(in_folder: Path) -> None:
    found = program("fastai_tabular.py", nprocs=1)  # with more, it needs a group, which its script would make
    recorded = json.loads((in_folder / "values.json").read_text())
    assert recorded["names"] == ["epoch", "train_loss", "valid_loss", "accuracy", "time"]
    for column, name in enumerate(recorded["names"][1:-1]):
        assert found[name] == list(zip([5, 11, 17, 23], [row[column] for row in recorded["values"]]))
    assert [step for step, _ in found.pop("loss")] == list(range(24))
    assert found.keys() == {"train_loss", "valid_loss", "accuracy"}
