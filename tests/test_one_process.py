"""Other libraries' objects for one process are refused on their way to the ranks, or arrive adapted to all ranks."""

from __future__ import annotations

import importlib
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nbddp
from nbddp import payload
from tests.support import Cells, Notebook, run


@pytest.fixture(scope="module", autouse=True)
def _imported(_warm: None) -> None:
    """Imported once, with what that changes in the environment undone."""
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("accelerate", "lightning_fabric", "pytorch_lightning", "transformers.trainer"):
            importlib.import_module(module)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These libraries set variables, keep one state per process, and warn."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in os.environ.keys() - before.keys():
        monkeypatch.delenv(name)


def made(kind: str) -> Any:
    """One of these objects, as a notebook's cell makes it."""
    return MAKERS[kind]()


def _accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator()


def _prepared(index: int) -> Any:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = torch.utils.data.DataLoader([torch.ones(2)] * 4, batch_size=2)
    return _accelerator().prepare(model, optimizer, loader, scheduler)[index]


def _state(name: str) -> Any:
    import accelerate.state

    return getattr(accelerate.state, name)()


def _fabric() -> Any:
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu")


def _set_up(index: int) -> Any:
    model = torch.nn.Linear(2, 1)
    return _fabric().setup(model, torch.optim.SGD(model.parameters(), lr=0.1))[index]


def _lightning_trainer() -> Any:
    import pytorch_lightning

    return pytorch_lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )


def _arguments(**fields: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments("out", use_cpu=True, report_to=[], **fields)


def _trainer() -> Any:
    from transformers import Trainer

    return Trainer(torch.nn.Linear(2, 1), _arguments())


PREPARED = "comes from accelerator.prepare() in the notebook, which knows one process; "
SET_UP = "comes from fabric.setup() in the notebook, which knows one process; "
MAKERS = {
    "Accelerator": _accelerator,
    "PartialState": lambda: _state("PartialState"),
    "GradientState": lambda: _state("GradientState"),
    "AcceleratorState": lambda: _accelerator().state,
    "AcceleratedOptimizer": lambda: _prepared(1),
    "DataLoaderShard": lambda: _prepared(2),
    "AcceleratedScheduler": lambda: _prepared(3),
    "Fabric": _fabric,
    "_FabricModule": lambda: _set_up(0),
    "FabricSGD": lambda: _set_up(1),
    "_FabricDataLoader": lambda: _fabric().setup_dataloaders(torch.utils.data.DataLoader([1, 2])),
    "lightning's Trainer": _lightning_trainer,
    "transformers' Trainer": _trainer,
}
REFUSED = {
    "Accelerator": "an Accelerator made in the notebook knows one process; make it inside the function: "
    "accelerator = Accelerator()",
    "PartialState": "a PartialState made in the notebook knows one process; make it inside the function",
    "GradientState": "a GradientState made in the notebook knows one process; make it inside the function",
    "AcceleratorState": "an AcceleratorState made in the notebook knows one process; make it inside the function",
    "AcceleratedOptimizer": f"an AcceleratedOptimizer {PREPARED}"
    "pass what was given to prepare(), and call it inside the function",
    "DataLoaderShard": f"a DataLoaderShard {PREPARED}pass what was given to prepare(), and call it inside the function",
    "AcceleratedScheduler": f"an AcceleratedScheduler {PREPARED}"
    "pass what was given to prepare(), and call it inside the function",
    "Fabric": "a Fabric made in the notebook knows one process; make it inside the function: fabric = Fabric()",
    "_FabricModule": f"a _FabricModule {SET_UP}pass what was given to setup(), and call it inside the function",
    "FabricSGD": f"a FabricSGD {SET_UP}pass what was given to setup(), and call it inside the function",
    "_FabricDataLoader": f"a _FabricDataLoader {SET_UP}pass what was given to setup(), and call it inside the function",
    "lightning's Trainer": "a Trainer made in the notebook knows one process; make it inside the function: "
    "trainer = Trainer(...)",
    "transformers' Trainer": "a Trainer made in the notebook knows one process; make it inside the function: "
    "trainer = Trainer(...)",
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_launchers_object_is_refused_by_name_with_a_remedy(kind: str, cell: Cells) -> None:
    names = cell("def train(): return str(thing)")
    cell.main.__dict__["thing"] = made(kind)
    with pytest.raises(nbddp.PayloadError) as refused:
        run(names.train)
    assert str(refused.value) == f"cannot send train to the ranks: train → thing: {REFUSED[kind]}"


def test_a_subclass_of_a_launchers_object_is_refused_by_its_own_name(cell: Cells) -> None:
    names = cell("""
        from accelerate import Accelerator
        class Mine(Accelerator): ...
        mine = Mine()
        def train(): return mine.num_processes
    """)
    with pytest.raises(nbddp.PayloadError, match="train → mine: a Mine made in the notebook knows one process"):
        run(names.train)


def test_the_package_lightning_is_recognised_as_well_as_its_parts(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """``lightning`` is ``pytorch_lightning`` and ``lightning_fabric`` under other names."""
    for module, name in (("lightning.pytorch.trainer.trainer", "Trainer"), ("lightning.fabric.fabric", "Fabric")):
        kind = type(name, (), {"__module__": module})
        monkeypatch.setitem(__import__("sys").modules, module, SimpleNamespace(**{name: kind}))
        with pytest.raises(TypeError, match=f"a {name} made in the notebook knows one process"):
            payload.refuse_unshippable(kind())


def test_a_launchers_object_in_a_cell_is_refused_by_its_variable(notebook: Notebook) -> None:
    notebook.ok("%load_ext nbddp\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)")
    reply = notebook.cell("%%ddp -n 2 --device cpu\naccelerator.num_processes")
    assert reply.ename == "PayloadError"
    assert "accelerator: an Accelerator made in the notebook knows one process" in reply.evalue
    notebook.ok("del accelerator")


# ---------------------------------------------------------------------------- what travels without its state

SEEN = """
def seen(args):
    return (
        args.world_size, args.process_index, args.local_process_index, args.n_gpu, str(args.device),
        str(args.parallel_mode), args.should_save, args.should_log, args.train_batch_size,
        args.distributed_state.num_processes, args.distributed_state.is_main_process,
    )
"""


@pytest.mark.slow
def test_the_notebooks_training_arguments_equal_those_made_in_the_rank(cell: Cells) -> None:
    cell(SEEN)
    names = cell("""
        from transformers import Seq2SeqTrainingArguments, TrainingArguments
        class Own(TrainingArguments): ...
        def make(kind): return kind("out", use_cpu=True, report_to=[], per_device_train_batch_size=3)
        notebooks = [make(kind) for kind in (TrainingArguments, Seq2SeqTrainingArguments, Own)]
        def train(nested):
            from accelerate.state import PartialState
            found = [(type(args), seen(args), args) for args in [*notebooks, *nested["arguments"]]]
            inside = [(type(args), seen(args), args) for args in map(make, [k for k, *_ in found])]
            return found == inside, [values for _, values, _ in found]
    """)
    values = run(names.train, {"arguments": [names.make(names.TrainingArguments)]}).values
    for rank, (equal, found) in enumerate(values):
        assert equal
        mode = "ParallelMode.DISTRIBUTED"
        assert found == [(2, rank, rank, 0, "cpu:0", mode, rank == 0, rank == 0, 3, 2, rank == 0)] * 4
    assert names.seen(names.notebooks[0])[:3] == (1, 0, 0)  # the notebook's own are as they were


@pytest.mark.slow
def test_with_init_false_the_function_or_the_training_arguments_make_the_group(cell: Cells) -> None:
    cell(SEEN)
    names = cell("""
        import torch.distributed as dist
        from transformers import TrainingArguments
        args = TrainingArguments("out", use_cpu=True, report_to=[])
        def train(by_itself):
            if by_itself:
                dist.init_process_group("gloo")
            return seen(args)[:3], dist.get_world_size()
    """)
    for by_itself in (True, False):
        assert run(names.train, by_itself, init=False).values == [((2, rank, rank), 2) for rank in (0, 1)]


@pytest.mark.slow
def test_a_trainer_with_the_notebooks_arguments_trains_one_model(in_folder: Path, cell: Cells) -> None:
    names = cell("""
        import torch
        from transformers import Trainer, TrainingArguments
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(2, 1)
            def forward(self, x, y):
                return {"loss": torch.nn.functional.mse_loss(self.linear(x), y)}
        def make():
            return TrainingArguments("out", use_cpu=True, report_to=[], per_device_train_batch_size=4, max_steps=3,
                                     save_strategy="no", disable_tqdm=True, seed=3)
        args = make()
        data = [{"x": torch.tensor([float(i), 1.0]) / 10, "y": torch.tensor([float(-i)])} for i in range(16)]
        def train(args):
            torch.manual_seed(0)
            model = Model()
            Trainer(model, args or make(), train_dataset=data).train()
            return model.linear.weight.tolist()
    """)
    notebooks, inside = run(names.train, names.args).values, run(names.train, None).values
    assert notebooks[0] == notebooks[1] == inside[0] == inside[1]


def test_a_model_prepared_in_the_notebook_is_wrapped_in_ddp_in_a_rank(cell: Cells) -> None:
    names = cell("""
        import torch
        from accelerate import Accelerator
        model = Accelerator().prepare(torch.nn.Linear(2, 1))
        def train():
            return type(Accelerator().prepare(model)).__name__
    """)
    assert run(names.train).values == ["DistributedDataParallel"] * 2
    assert names.model._is_accelerate_prepared  # the notebook's own is as it was


@pytest.mark.slow
def test_a_lightning_data_module_arrives_without_its_trainer(in_folder: Path, cell: Cells) -> None:
    names = cell("""
        import pytorch_lightning as pl, torch
        class Data(pl.LightningDataModule):
            def train_dataloader(self): return torch.utils.data.DataLoader([torch.ones(2)] * 8, batch_size=2)
        class Model(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(2, 1)
            def training_step(self, batch, _): return self.linear(batch).sum()
            def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
        def trainer(**options):
            return pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                              enable_progress_bar=False, enable_model_summary=False, **options)
        data, model = Data(), Model()
        data.trainer = trainer(devices=1)  # as fit() does
        def train():
            before = data.trainer
            mine = trainer(devices=2, strategy="ddp")
            mine.fit(model, data)
            return before, mine.world_size, data.trainer is mine
    """)
    assert run(names.train).values == [(None, 2, True)] * 2
    assert names.data.trainer.world_size == 1


# ---------------------------------------------------------------------------- results


def test_launcher_objects_made_in_a_rank_come_back(cell: Cells) -> None:
    names = cell("""
        from accelerate import Accelerator
        from transformers import TrainingArguments
        def train():
            args = TrainingArguments("out", use_cpu=True, report_to=[])
            return Accelerator(), args, args.world_size
    """)
    accelerator, arguments, world_size = run(names.train).value
    assert type(accelerator).__name__ == "Accelerator"
    assert (world_size, arguments.world_size, arguments.output_dir) == (2, 2, "out")  # as it was there


def test_a_result_that_fails_is_not_blamed_on_a_launchers_object(cell: Cells) -> None:
    names = cell("""
        from accelerate import Accelerator
        def train():
            return [Accelerator(), (i for i in ())]
    """)
    with pytest.raises(nbddp.PayloadError, match=r"the result → \[1\]: .*generator"):
        run(names.train)


def test_the_oracle_pickle_keeps_a_process_count_of_one() -> None:
    """What plain pickle does, and so what every other launcher's ``spawn`` hands to its processes."""
    assert pickle.loads(pickle.dumps(_arguments())).__dict__["distributed_state"].num_processes == 1
