"""Lightning's first LightningModule, shortened: `self.log` in training and validation, to two loggers."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        self.decoder = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 16))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = torch.nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.decoder(self.encoder(x)), x), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


pl.seed_everything(0)
data = TensorDataset(torch.randn(256, 16))
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    strategy="ddp",
    devices=2,
    log_every_n_steps=2,
    logger=[CSVLogger("lightning_logs"), TensorBoardLogger("lightning_tb")],
    enable_progress_bar=False,
    enable_checkpointing=False,
)
trainer.fit(LitAutoEncoder(), DataLoader(data, batch_size=16), DataLoader(data, batch_size=16))
