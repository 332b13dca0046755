"""What objects of large libraries arrive as, or with which remedy they are refused."""

import os
from pathlib import Path

import pytest

from tests.support import Cells, run
from tests.test_payload import refused

pytestmark = pytest.mark.filterwarnings("ignore")
TIED = "in the notebook and is tied to its process; send what you passed to {0}(), and call {0}() inside the function"
ACCELERATED, SET_UP = "comes from accelerator.prepare() ", "comes from fabric.setup() "
MADE = "made in the notebook is tied to its process; create it inside the function"
LAUNCHERS = """
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    class Mine(Accelerator): ...
    model, loader = torch.nn.Linear(2, 1), torch.utils.data.DataLoader([torch.ones(2)] * 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    mine = Mine()
    def train(): return str(thing)
    things = [Accelerator(), mine, mine.state, PartialState(), GradientState()]
    things += mine.prepare(optimizer, loader, schedule)
"""
PREPARED = "an AcceleratedOptimizer", "a DataLoaderShard", "an AcceleratedScheduler"
REFUSED = [
    *(f"{kind} {MADE}: accelerator = Accelerator()" for kind in ("an Accelerator", "a Mine")),
    *(f"{kind} {MADE}" for kind in ("an AcceleratorState", "a PartialState", "a GradientState")),
    *(f"{kind} {ACCELERATED}{TIED.format('prepare')}" for kind in PREPARED),
]
OF_OTHERS = """
    import torch, pytorch_lightning
    from lightning_fabric import Fabric
    from transformers import Trainer, TrainingArguments
    model, fabric = torch.nn.Linear(2, 1), Fabric(accelerator="cpu")
    def train(): return str(thing)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    things = [fabric, *fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))]
    things += [fabric.setup_dataloaders(torch.utils.data.DataLoader([1, 2]))]
    things += [pytorch_lightning.Trainer(accelerator="cpu", **quiet)]
    things += [Trainer(model, TrainingArguments("out", use_cpu=True, report_to=[]))]
"""
REFUSED_OF_OTHERS = [
    f"a Fabric {MADE}: fabric = Fabric()",
    *(f"a {kind} {SET_UP}{TIED.format('setup')}" for kind in ("_FabricModule", "FabricSGD", "_FabricDataLoader")),
    *[f"a Trainer {MADE}: trainer = Trainer(...)"] * 2,
]


@pytest.mark.parametrize(
    ("source", "texts"), [(LAUNCHERS, REFUSED), (OF_OTHERS, REFUSED_OF_OTHERS)], ids=["accelerate", "others"]
)
def test_a_launchers_object_is_refused_by_name_with_a_remedy(
    cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, texts: list[str]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # these libraries set variables
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert refused(cell, cell(source)) == texts


def test_a_compiled_function_arrives_as_its_original_and_its_settings(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which torch sets
    names = cell("""
        import torch
        from nbddp.payload.pickler import _compiler_of
        scale = 3
        @torch.compile(backend="eager", fullgraph=True)
        def tripled(x, n=2): return scale * x if n == 0 else again(x, n - 1)
        def again(x, n): return tripled(x, n)
        relu = torch.compile(torch.nn.functional.relu, backend="eager", dynamic=True)
        def train():
            compilers = [_compiler_of(tripled), _compiler_of(relu)]
            settings = [(each.fullgraph, each._dynamic) for each in compilers]
            return tripled(torch.ones(2)).tolist(), relu(torch.tensor([-1.0, 2.0])).tolist(), settings, tripled.__name__
    """)
    assert run(names.train, nprocs=1).value == ([3.0] * 2, [0.0, 2.0], [(True, None), (False, True)], "tripled")


def test_a_lightning_data_module_arrives_without_its_trainer_and_trains_with_ddp(
    cell: Cells, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # these libraries set variables
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
