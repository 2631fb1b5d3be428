"""The first program: handwritten digits, four workers on this machine."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import tether


class Digits(tether.Task):
    batch_size = 32

    def model(self):
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def train_data(self):
        return TensorDataset(*self.samples(held_out=False))

    def loss(self, model, batch):
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model):  # during training, on the joint model
        images, labels = self.samples(held_out=True)
        return {"error": (model(images).argmax(1) != labels).float().mean().item()}

    def samples(self, held_out):
        images, labels = load_digits(return_X_y=True)
        chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
        return torch.tensor(images / 16).float()[chosen], torch.tensor(labels)[chosen]


result = tether.run(Digits(), workers=4, epochs=30)
print(result)
print(result.model)  # the joint model, an ordinary nn.Module
