"""What notebooks do with other launchers' libraries: it works, or a sentence says what to write."""

import importlib.util
from pathlib import Path

import pytest

import nbddp
from tests.support import Cells, Notebook, out, run


def test_accelerate_cannot_deal_out_a_share_once_more(cell: Cells) -> None:
    pytest.importorskip("accelerate")
    names = cell("""
        import nbddp, torch
        from torch.utils.data import DataLoader
        def train(make):
            from accelerate import Accelerator
            return sum(map(len, Accelerator(cpu=True).prepare(make(range(16), 4))))
    """)
    assert run(names.train, names.DataLoader).values == [8, 8]
    assert run(names.train, nbddp.loader, nprocs=1).value == 16
    told = "would both split the data among the ranks: prepare the plain DataLoader"
    with pytest.raises(nbddp.RankError, match=told):
        run(names.train, nbddp.loader)


def test_a_trainer_of_transformers_comes_back(own_notebook: Notebook, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    own_notebook.ok(f"""
        import nbddp, torch
        def train():
            from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
            small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
            model = BertForSequenceClassification(BertConfig(vocab_size=50, **small))
            data = [{{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(i % 2)}} for i in range(64)]
            options = dict(max_steps=4, per_device_train_batch_size=4, report_to=[], save_strategy="no", use_cpu=True)
            trainer = Trainer(model=model, args=TrainingArguments({str(tmp_path)!r}, **options), train_dataset=data)
            trainer.train()
            return trainer, {{name: weight.clone() for name, weight in model.state_dict().items()}}
        trainer, weights = nbddp.run(train, nprocs=2, device="cpu", show=False).value
    """)
    equal = "all(torch.equal(weight, weights[name]) for name, weight in trainer.model.state_dict().items())"
    assert out(own_notebook.ok(f"trainer.state.global_step, {equal}")) == "(4, True)"
    assert out(own_notebook.ok("trainer.evaluate(trainer.train_dataset)['eval_loss'] > 0")) == "True"


def test_lightning_leaves_the_share_of_a_loader_alone(cell: Cells) -> None:
    if importlib.util.find_spec("pytorch_lightning") is None:  # its import changes the environment
        pytest.skip("Lightning isn't installed")
    names = cell("""
        import nbddp, torch
        def train():
            import pytorch_lightning as lightning
            class Model(lightning.LightningModule):
                def __init__(self):
                    super().__init__()
                    self.layer, self.seen = torch.nn.Linear(1, 1), []
                def training_step(self, batch, _):
                    self.seen += batch[0].flatten().tolist()
                    return self.layer(batch[0]).sum()
                def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
            quiet = dict.fromkeys("logger enable_checkpointing enable_progress_bar enable_model_summary".split(), False)
            trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
            data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(24, 1))
            trainer.fit(model := Model(), nbddp.loader(data, 4, shuffle=True))
            return model.seen
    """)
    first, second = run(names.train).values
    assert sorted(first + second) == list(range(24))
