"""CIFAR-10: small colour photographs, from its publisher's binary files or from an .npz file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tether.errors import UsageError
from tether.tasks.classification import Classification
from tether.tasks.images import dataset, read_cifar, read_npz
from tether.tasks.networks import cnn, resnet

_BATCHES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
#: of the red, green and blue training pixels, scaled to 0..1
_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
_DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
_HOW = (
    "fetch the binary version of CIFAR-10 (cifar-10-binary.tar.gz from www.cs.toronto.edu/~kriz/cifar.html), unpack "
    "data_batch_1.bin to data_batch_5.bin and test_batch.bin into DIR or DIR/cifar-10-batches-bin and pass --data DIR; "
    "or pass an .npz file with x_train (n, 3, 32, 32), y_train, x_test and y_test, all uint8"
)


class Cifar(Classification):
    """CIFAR-10: recognize ten kinds of things in 32 x 32 colour pixels. Both networks have BatchNorm.

    The images stay bytes, which need a quarter of the memory in every worker, and are standardized batch by batch.
    """

    options: ClassVar = Classification.options | {
        "data": "an .npz file with x_train, y_train, x_test and y_test, or a folder with one or the binary batches",
        "flip": "mirror half of the training images at random",
    }
    networks: ClassVar = {
        "cnn": partial(cnn, 32, 3, 16, 32, 64, hidden=64, batch_norm=True),
        "resnet": resnet,
    }

    def __init__(
        self,
        data: str | Path | None = None,
        batch_size: int = 64,
        learning_rate: float = 1e-3,
        momentum: float | None = None,
        network: Literal["cnn", "resnet"] = "cnn",
        flip: bool = False,
    ) -> None:
        super().__init__(
            batch_size=batch_size, learning_rate=learning_rate, momentum=momentum, network=network, data=data
        )
        self.flip = flip
        self._source = _find(self.data)

    def train_data(self) -> TensorDataset:
        return _read(self._source, "train")

    def test_data(self) -> TensorDataset:
        return _read(self._source, "test")

    def examples(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = batch
        mean, deviation = _MEAN.to(images.device), _DEVIATION.to(images.device)
        return images.to(torch.float32).div_(255).sub_(mean).div_(deviation), labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.flip:
            images, labels = batch
            mirrored = torch.rand(len(images), device=images.device) < 0.5
            batch = [torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images), labels]
        return super().loss(model, batch)


def _find(data: Path | None) -> Path:
    """The .npz file, or the folder of the binary batches."""
    if data is None:
        raise UsageError(f"task cifar needs its data: {_HOW}")
    if data.is_file():
        return data
    for folder in (data, data / "cifar-10-batches-bin"):
        missing = [name for names in _BATCHES.values() for name in names if not (folder / name).is_file()]
        if not missing:
            return folder
        if len(missing) < 6:
            raise UsageError(f"{folder} lacks {', '.join(missing)}: {_HOW}")
    files = sorted(data.glob("cifar*.npz")) or sorted(data.glob("*.npz"))
    if len(files) > 1:
        raise UsageError(f"{data} has several .npz files ({', '.join(f.name for f in files)}): pass one as --data FILE")
    if not files:
        raise UsageError(f"{data} has no CIFAR-10 data: {_HOW}")
    return files[0]


def _read(source: Path, part: str) -> TensorDataset:
    if source.is_file():
        images, labels = read_npz(source, f"x_{part}", f"y_{part}")
    else:
        batches = [read_cifar(source / name) for name in _BATCHES[part]]
        images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return dataset(images, labels, shape=(3, 32, 32), classes=10, source=source)
