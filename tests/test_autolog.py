"""Unmodified programs that log with other libraries draw curves: what those libraries have stored, each number once."""

import traceback
from pathlib import Path
from typing import Any

import numpy as np

import nbddp
from nbddp.history.history import History
from nbddp.history.records import AUTOLOG
from nbddp.loggers import autolog
from tests.curves import Recorded
from tests.support import Cells, error_of, run

PROGRAMS = Path(__file__).parent / "programs" / "logging"
Curves = dict[str, list[tuple[int, float]]]


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


def assert_same(found: Curves, expected: Curves, **lengths: int) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        mine, theirs = (np.array(each[name]).astype(np.float32) for each in (found, expected))
        np.testing.assert_array_equal(mine, theirs, name)
    assert {name: len(found[name]) for name in lengths} == lengths


def test_tensorboards_programs_draw_what_it_shows_a_second_writer_with_its_folder_in_front(in_folder: Path) -> None:
    found = program("tensorboard_tutorial.py")
    events = sorted((in_folder / "runs/regression").glob("events*"))
    assert len(events) == 2, "the script doesn't ask for its rank; rank 0's curves count"
    expected = {"Loss/train": in_tensorboard(events[0])["Loss/train"]}
    for name in ("weight", "target"):
        expected[f"slope/{name}"] = in_tensorboard(in_folder / f"runs/regression/slope_{name}")["slope"][:10]
    assert_same(found, expected, **{"Loss/train": 10, "slope/weight": 10})
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
                for fold, writer in enumerate(folds): writer.add_scalar("loss", fold + step, step)
                writer.add_scalar("array", np.array([1.5]), step)
                writer.add_scalar("tensor", torch.tensor([2.5]), step)
                other.add_scalar("loss", -1.0, step)
                folds[0].add_scalar("Loss/train", 10 + step, step)
                folds[0].add_scalars("Loss", {"train": 20 + step}, step)
            for value in (3.0, 4.0): writer.add_scalar("counted", value)
    """)
    assert curves(run(names.train, nprocs=1)) == {
        "loss": [(0, 0), (1, 1)], "val/loss": [(0, 1), (1, 2)], "fold2/val/loss": [(0, 2), (1, 3)],
        "Loss/train": [(0, 10), (1, 11)], "val/Loss/train": [(0, 20), (1, 21)],
        "array": [(0, 1.5), (1, 1.5)], "tensor": [(0, 2.5), (1, 2.5)], "counted": [(1, 3), (2, 4)],
    }  # fmt: skip


def test_what_wandb_refuses_is_left_to_its_own_error() -> None:
    class Attached:
        id = property(lambda run: setattr(run, "_step", 3) or "a")  # as one that came from another process
        name = "b"

    assert autolog._wandb(Attached(), "train_loss", None) == ({}, 3, "a/b")


def test_a_library_that_has_been_imported_before_is_heard(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        from nbddp.loggers import autolog
        def train():
            from torch.utils.tensorboard import SummaryWriter
            heard = []
            autolog.listen(lambda metrics, step: heard.append((metrics, step)), dict)
            SummaryWriter("mine").add_scalar("loss", 0.5, 3)
            return heard
    """)
    assert run(names.train, nprocs=1, autolog=False).value == [({"loss": 0.5}, 3)]


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
    assert (made.values, list(made.history)) == (["trained", "trained"], ["before"])
    assert made.logs().count("not recording what") == 2
    assert "[rank 0] nbddp: not recording what tensorboard logs (KeyError: 'odd')\n" in made.logs()
    assert "not recording what wandb logs (AttributeError: type object 'Run' has no attribute 'log')" in made.logs()


def test_a_curve_that_log_writes_replaces_one_that_was_heard(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp
        from torch.utils.tensorboard import SummaryWriter
        def train(first):
            writer = SummaryWriter("runs")
            for step in range(5):
                if first == "log": nbddp.log(loss=step, step=step)
                writer.add_scalar("loss", -step, step)
                writer.add_scalar("lr", 0.1, step)
                if first == "writer": nbddp.log(loss=step, step=step)
    """)
    own, heard = [(step, step) for step in range(5)], [(step, 0.1) for step in range(5)]
    for first in ("log", "writer"):
        assert curves(run(names.train, first, nprocs=1)) == {"loss": own, "lr": heard}
    assert curves(run(names.train, "log", nprocs=1, autolog=False)) == {"loss": own}


def test_a_restart_and_a_saved_file_keep_what_log_has_replaced(tmp_path: Path) -> None:
    history = Recorded()
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


def test_an_import_that_fails_shows_only_the_users_frames_and_imports_no_other(cell: Cells, in_folder: Path) -> None:
    module("tensorboardX/writer.py", "1 / 0")
    names = cell("""
        import sys
        def train():
            assert not {"tensorboard", "wandb", "mlflow", "transformers"} & sys.modules.keys()
            sys.path.insert(0, ".")
            import tensorboardX.writer
    """)
    frames = traceback.extract_tb(error_of(names.train, nprocs=1).cause.__traceback__)
    assert [frame.name for frame in frames] == ["train", "<module>"]
