"""What notebooks do with other launchers' libraries: it works, or a sentence says what to write."""

from __future__ import annotations

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
    with pytest.raises(
        nbddp.RankError, match="would both split the data among the ranks: prepare the plain DataLoader"
    ):
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
