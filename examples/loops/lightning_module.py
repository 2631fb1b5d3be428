"""A Lightning module: a small network learns the digits of scikit-learn."""

import argparse

import torch
import torch.nn.functional as F
from lightning import pytorch as pl
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tether.lightning import TetherCallback


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("error", (self.layers(images).argmax(1) != labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    pl.seed_everything(1, verbose=False)

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16).float(), torch.tensor(labels)
    held_out = torch.arange(len(labels)) % 5 == 0
    train = DataLoader(TensorDataset(images[~held_out], labels[~held_out]), batch_size=32, shuffle=True)
    test = DataLoader(TensorDataset(images[held_out], labels[held_out]), batch_size=500)

    model = Digits()
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TetherCallback()],
    )
    trainer.fit(model, train)
    (found,) = trainer.test(model, test, verbose=False)
    print(f"error {found['error']:.4f}")
    torch.save(model.state_dict(), "lightning_module.pt")


if __name__ == "__main__":
    main()
