"""Other libraries as they are draw what they have stored."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import Cells, run
from tests.test_autolog import Curves, assert_same, curves, in_tensorboard, program
from tests.wandb_file import stored_rows


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None  # an import here would change the tests' own process
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


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


@needs("mlflow")
def test_an_mlflow_run_draws_what_mlflow_has_stored(in_folder: Path) -> None:
    env = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": "runs"}
    found, expected = program("mlflow_quickstart.py", env=env), Curves()
    for path in in_folder.glob("runs/*/*/metrics/*"):
        for line in path.read_text().splitlines():
            _, value, step = line.split()[:3]
            expected.setdefault(path.name, []).append((int(step), float(value)))
    assert_same(found, expected, loss=12, accuracy=12, lr=12)


@needs("accelerate")
def test_accelerate_draws_what_both_trackers_have_stored(offline: Path) -> None:
    found = program("accelerate_tracking.py")
    assert_same(found, in_wandb(offline), train_loss=3, weight=3)
    stored = in_tensorboard(offline / "logs/example")
    assert_same(found, {name: stored[name] for name in found})


@needs("pytorch_lightning")
def test_lightning_and_fabric_draw_what_their_loggers_have_written(in_folder: Path) -> None:
    assert_same(program("lightning_module.py"), in_csv(in_folder / "lightning_logs"), train_loss=12, val_loss=3)
    assert_same(program("fabric_loop.py"), in_csv(in_folder / "fabric"), loss=12, weight=12, bias=12)


@needs("transformers")
def test_transformers_trainer_draws_its_log_history_without_the_speeds(offline: Path) -> None:
    found, expected = program("transformers_trainer.py"), Curves()
    for row in json.loads((offline / "log_history.json").read_text()):
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"):
            if name in row:
                expected.setdefault(name, []).append((row["step"], row[name]))
    assert_same(found, expected, loss=8, grad_norm=8, learning_rate=8, eval_loss=2, train_loss=1)


@needs("keras")
def test_keras_draws_its_history_and_what_a_callback_writes(in_folder: Path) -> None:
    found = program("keras_mlp.py")
    history = json.loads((in_folder / "history.json").read_text())
    assert history.keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    expected = {name: list(enumerate(values)) for name, values in history.items()}
    expected |= {f"epoch/{name}": points for name, points in expected.items()} | {"weights": found["weights"]}
    assert_same(found, expected, loss=4, weights=4)


@needs("fastai")  # it depends on torchvision; pip install --no-deps fastai
def test_fastai_draws_its_recorder_over_two_fits(in_folder: Path) -> None:
    found = program("fastai_tabular.py", nprocs=1)  # with more, it needs a group, which its script would make
    recorded = json.loads((in_folder / "values.json").read_text())
    assert recorded["names"] == ["epoch", "train_loss", "valid_loss", "accuracy", "time"]
    for column, name in enumerate(recorded["names"][1:-1]):
        assert found[name] == list(zip([5, 11, 17, 23], [row[column] for row in recorded["values"]]))
    assert [step for step, _ in found.pop("loss")] == list(range(24))
    assert found.keys() == {"train_loss", "valid_loss", "accuracy"}
