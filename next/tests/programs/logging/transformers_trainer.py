"""transformers' Trainer with a small BERT, reporting to TensorBoard and W&B."""

import json

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
config = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2
)
model = BertForSequenceClassification(config)
examples = [{"input_ids": ids, "labels": int(ids.sum() % 2)} for ids in torch.randint(0, 32, (64, 8))]

training_args = TrainingArguments(
    output_dir="out",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    logging_steps=2,
    eval_strategy="epoch",
    save_strategy="no",
    report_to=["tensorboard", "wandb"],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=training_args, train_dataset=examples, eval_dataset=examples[:16])
trainer.train()
if trainer.is_world_process_zero():
    with open("log_history.json", "w") as file:
        json.dump(trainer.state.log_history, file)
