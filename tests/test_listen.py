"""Unmodified programs that log with other libraries draw curves: what those libraries have stored, each number once."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import inspect
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbddp
from nbddp.listening.after_import import after_import
from tests.support import Cells, Notebook, run
from tests.wandb_file import stored_rows

PROGRAMS = Path(__file__).parent / "programs" / "logging"


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None  # an import here would change the tests' own process
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


Curves = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def temp_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as temp:  # W&B leaves folders there
        monkeypatch.setenv("TMPDIR", temp)
        monkeypatch.setenv("WANDB_SILENT", "true")
        yield


def program(name: str, nprocs: int = 2, **options: Any) -> nbddp.Run:
    return nbddp.run_script(PROGRAMS / name, nprocs=nprocs, device="cpu", show=False, **options)


def curves(made: nbddp.Run) -> Curves:
    return {name: list(zip(steps.tolist(), values.tolist())) for name, (steps, values) in made.history.items()}


def in_tensorboard(folder: Path, prefix: str = "") -> Curves:
    """What TensorBoard reads there; its values are float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        prefix + name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]
    }


def in_wandb(folder: Path) -> Curves:
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: Curves = {}
    for row in stored_rows(path):
        for name, value in row.items():
            if not name.startswith("_") and not isinstance(value, str):
                found.setdefault(name, []).append((row["_step"], value))
    return found


def assert_same(found: Curves, expected: Curves) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(
            np.array(found[name]).astype(np.float32), np.array(expected[name]).astype(np.float32), name
        )


def test_the_tensorboard_tutorial_draws_what_tensorboard_shows(notebook: Notebook, in_folder: Path) -> None:
    notebook.ok("%load_ext nbddp")
    notebook.ok(f"%cd -q {in_folder}\n%ddp run -n 2 --device cpu --as made {PROGRAMS}/tensorboard_tutorial.py")
    found = eval(
        notebook.ok("{name: list(zip(s.tolist(), v.tolist())) for name, (s, v) in made.history.items()}").shown
    )
    events = sorted((in_folder / "runs/regression").glob("events*"))
    assert len(events) == 2  # the script does not ask for its rank; rank 0's curves count
    weight = in_tensorboard(in_folder / "runs/regression/slope_weight")["slope"][:10]
    target = in_tensorboard(in_folder / "runs/regression/slope_target")["slope"][:10]
    loss = in_tensorboard(events[0])["Loss/train"]
    assert len(loss) == len(weight) == 10
    assert_same(found, {"Loss/train": loss, "slope/weight": weight, "slope/target": target})


def test_a_second_writer_has_its_folder_in_front(in_folder: Path) -> None:
    found = curves(program("tensorboard_ddp.py"))
    assert [len(points) for points in found.values()] == [24, 3]
    assert_same(found, in_tensorboard(in_folder / "logs/train") | in_tensorboard(in_folder / "logs/val", "val/"))


@needs("tensorboardX")
def test_tensorboardx_draws_what_tensorboard_shows(in_folder: Path) -> None:
    found = curves(program("tensorboardx_demo.py", nprocs=1))
    assert {name: len(points) for name, points in found.items()} == dict.fromkeys(
        ("data/scalar1", "data/scalar2", "data/scalar_group/xsinx", "data/scalar_group/xcosx"), 20
    )
    groups = {name: found.pop(name) for name in list(found) if "group" in name}
    assert [value for _, value in groups["data/scalar_group/xsinx"]] == [n * np.sin(n) for n in range(20)]
    written = in_tensorboard(in_folder / "runs/demo")
    assert_same(found, {name: written[name] for name in found})


@pytest.mark.slow
def test_a_wandb_run_draws_the_rows_that_wandb_has_stored(in_folder: Path) -> None:
    """And not the writer's, which logs the same names at other steps."""
    found = curves(program("wandb_pytorch.py"))
    assert {name: len(points) for name, points in found.items()} == {
        "epoch": 12,
        "loss": 12,
        "norms.weight": 12,
        "val/loss": 3,
        "examples": 3,
    }
    assert_same(found, in_wandb(in_folder))


@pytest.mark.slow
def test_an_mlflow_run_draws_what_mlflow_has_stored(in_folder: Path) -> None:
    found = curves(
        program("mlflow_quickstart.py", env={"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": "runs"})
    )
    expected: Curves = {}
    for path in in_folder.glob("runs/*/*/metrics/*"):
        for line in path.read_text().splitlines():
            _, value, step = line.split()[:3]
            expected.setdefault(path.name, []).append((int(step), float(value)))
    assert [len(points) for points in expected.values()] == [12, 12, 12]
    assert_same(found, expected)


# ---------------------------------------------------------------------------- trainers, once each


def in_csv(folder: Path) -> Curves:
    """What Lightning's CSVLogger has written."""
    (path,) = folder.glob("**/metrics.csv")
    found: Curves = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            for name in row.keys() - {"step", "epoch"}:
                if row[name]:
                    found.setdefault(name, []).append((int(row["step"]), float(row[name])))
    return found


@pytest.mark.slow
def test_accelerate_draws_what_both_trackers_have_stored(in_folder: Path) -> None:
    found = curves(program("accelerate_tracking.py"))
    assert {name: len(points) for name, points in found.items()} == {"train_loss": 3, "weight": 3}
    assert_same(found, in_wandb(in_folder))
    stored = in_tensorboard(in_folder / "logs/example")
    assert_same(found, {name: stored[name] for name in found})


@pytest.mark.slow
def test_lightning_draws_what_self_log_has_sent_to_its_loggers(in_folder: Path) -> None:
    found = curves(program("lightning_module.py"))
    assert {name: len(points) for name, points in found.items()} == {"train_loss": 12, "val_loss": 3}
    assert_same(found, in_csv(in_folder / "lightning_logs"))


@pytest.mark.slow
def test_fabric_draws_what_its_logger_has_written(in_folder: Path) -> None:
    found = curves(program("fabric_loop.py"))
    assert {name: len(points) for name, points in found.items()} == {"loss": 12, "weight": 12, "bias": 12}
    assert_same(found, in_csv(in_folder / "fabric"))


@pytest.mark.slow
def test_transformers_trainer_draws_its_log_history_without_the_speeds(in_folder: Path) -> None:
    found = curves(program("transformers_trainer.py", env={"WANDB_MODE": "offline"}))
    expected: Curves = {}
    for row in json.loads((in_folder / "log_history.json").read_text()):
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"):
            if name in row:
                expected.setdefault(name, []).append((row["step"], row[name]))
    assert [len(points) for points in expected.values()] == [8, 8, 8, 2, 1]
    assert_same(found, expected)
    # And both of its reporters have them, under names of their own.
    (events,) = in_folder.glob("**/events*")
    for stored in (in_tensorboard(events), in_wandb(in_folder)):
        assert [value for _, value in stored["train/loss"]] == pytest.approx([value for _, value in expected["loss"]])


@needs("keras")
@pytest.mark.slow
def test_keras_draws_its_history_and_what_a_callback_adds(in_folder: Path) -> None:
    found = curves(program("keras_mlp.py"))
    assert len(found["weights"]) == len({value for _, value in found.pop("weights")}) == 4
    history = json.loads((in_folder / "history.json").read_text())
    assert_same(found, {name: list(enumerate(values)) for name, values in history.items()})
    assert {name: len(points) for name, points in found.items()} == dict.fromkeys(
        ("loss", "accuracy", "val_loss", "val_accuracy"), 4
    )


@needs("fastai")  # not in the extra "test": it depends on torchvision; pip install --no-deps fastai
@pytest.mark.slow
def test_fastai_draws_its_recorder_over_two_fits(in_folder: Path) -> None:
    found = curves(program("fastai_tabular.py"))
    recorded = json.loads((in_folder / "values.json").read_text())
    assert recorded["names"] == ["epoch", "train_loss", "valid_loss", "accuracy", "time"]
    for column, name in enumerate(recorded["names"][1:-1]):
        assert [value for _, value in found[name]] == [row[column] for row in recorded["values"]]
        assert [step for step, _ in found[name]] == [5, 11, 17, 23]
    assert [step for step, _ in found.pop("loss")] == list(range(24))
    assert found.keys() == {"train_loss", "valid_loss", "accuracy"}


# ---------------------------------------------------------------------------- beside nbddp.log


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
        writer.close()
"""


@pytest.mark.parametrize("first", ["log", "writer"])
def test_a_name_that_nbddp_logs_is_not_heard(cell: Cells, in_folder: Path, first: str) -> None:
    made = run(cell(BESIDE).train, first)
    assert made.history["loss"].values.tolist()[-4:] == [1, 2, 3, 4]
    assert len(made.history["loss"].values) == (5 if first == "log" else 6)  # it is known by then
    assert made.history["lr"].steps.tolist() == [0, 1, 2, 3, 4]


def test_without_listen_only_nbddp_logs(cell: Cells, in_folder: Path) -> None:
    assert list(run(cell(BESIDE).train, "log", listen=False).history) == ["loss"]


def test_another_version_of_a_library_ends_its_curves_and_not_the_training(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import sys, nbddp
        def train():
            from torch.utils.tensorboard import SummaryWriter
            class Odd(dict):
                def items(self): raise KeyError("odd")
            writer = SummaryWriter("runs")
            writer.add_scalar("before", 1.0)
            for _ in range(3):
                try: writer.add_scalars("odd", Odd())
                except KeyError: pass
            writer.add_scalar("after", 2.0)
            writer.close()
            return "trained"
    """)
    made = run(names.train)
    assert made.values == ["trained", "trained"]
    assert list(made.history) == ["before"]
    assert made.logs().count("draws no curves of what tensorboard logs (KeyError: 'odd')") == 1


def test_the_traceback_of_a_failing_import_has_no_frames_of_the_import_system(cell: Cells, in_folder: Path) -> None:
    Path("tensorboardX").mkdir()
    Path("tensorboardX/__init__.py").write_text("from .writer import SummaryWriter\n")
    Path("tensorboardX/writer.py").write_text("1 / 0\n")
    names = cell("""
        import sys
        def train():
            sys.path.insert(0, ".")
            import tensorboardX
    """)
    with pytest.raises(nbddp.RankError) as raised:
        run(names.train)
    frames = traceback.extract_tb(raised.value.cause.__traceback__)
    assert [frame.name for frame in frames] == ["train", "<module>", "<module>"]


def test_ranks_import_no_library_that_the_code_does_not_import(cell: Cells) -> None:
    names = cell("""
        import sys
        def modules(): return [name for name in ("tensorboard", "wandb", "tensorboardX") if name in sys.modules]
    """)
    assert run(names.modules).values == [[], []]


def test_a_callback_after_an_import_leaves_the_module_as_any_other(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        """A finder of Python 2's kind."""

        def find_module(self, name: str, path: Any = None) -> None:
            return None

    monkeypatch.setattr(sys, "meta_path", [Old(), *sys.meta_path])
    monkeypatch.syspath_prepend(str(in_folder))
    Path("heard_later.py").write_text("value = 1\ndef function(): return value\n")
    Path("broken_later.py").write_text("raise RuntimeError('broken')\n")
    seen: list[Any] = []
    after_import({"heard_later", "broken_later", "not_there", "json"}, seen.append)
    assert seen == [json]  # imported before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # Python 3.10 and 3.11, of the old finder
        import heard_later  # type: ignore[import-not-found]

        with pytest.raises(RuntimeError, match="broken"):
            import broken_later  # type: ignore[import-not-found]  # noqa: F401
        with pytest.raises(ModuleNotFoundError):
            import not_there  # type: ignore[import-not-found]  # noqa: F401
        assert seen == [json, heard_later]
        assert "exec_module" not in vars(heard_later.__spec__.loader)
        assert "return value" in inspect.getsource(heard_later.function)
        importlib.reload(heard_later)
    assert seen == [json, heard_later, heard_later]
    monkeypatch.delitem(sys.modules, "heard_later")


def test_each_call_of_a_session_has_its_own_names(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        def begin():
            global writer
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter("first")
            writer.add_scalar("loss", 1.0, 1)
        def go_on():
            from torch.utils.tensorboard import SummaryWriter
            SummaryWriter("second").add_scalar("loss", 2.0, 1)
    """)
    with nbddp.session(nprocs=2, device="cpu") as s:
        assert curves(s.run(names.begin, show=False)) == {"loss": [(1, 1.0)]}
        assert curves(s.run(names.go_on, show=False)) == {"loss": [(1, 2.0)]}
