"""A plain PyTorch loop in the style of PyTorch's own MNIST example, on the digits of scikit-learn."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import tether


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout(torch.flatten(x, 1))
        return self.fc2(F.relu(self.fc1(x)))


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    with torch.no_grad():
        wrong = sum((model(data).argmax(1) != target).sum().item() for data, target in loader)
    return wrong / len(loader.dataset)


def fit(model, train_loader, test_loader, optimizer, scheduler, epochs):
    for epoch in range(epochs):
        train(model, train_loader, optimizer)
        scheduler.step()
        print(f"epoch {epoch}: error {test(model, test_loader):.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    torch.manual_seed(1)

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
    held_out = torch.arange(len(labels)) % 5 == 0
    train_loader = DataLoader(TensorDataset(images[~held_out], labels[~held_out]), batch_size=32, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[held_out], labels[held_out]), batch_size=500)

    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    with tether.join(model, optimizer, scheduler):
        fit(model, train_loader, test_loader, optimizer, scheduler, args.epochs)
    print(f"error {test(model, test_loader):.4f}")
    torch.save(model.state_dict(), "plain_loop.pt")


if __name__ == "__main__":
    main()
