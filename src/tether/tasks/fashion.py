"""Fashion-MNIST: 70,000 grey images of clothes, from the IDX files of its publisher."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch.utils.data import TensorDataset

from tether.errors import UsageError
from tether.tasks.classification import Classification
from tether.tasks.images import dataset, read_idx
from tether.tasks.networks import cnn, mlp

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
#: of the training pixels, scaled to 0..1
_MEAN, _DEVIATION = 0.2860, 0.3530


class Fashion(Classification):
    """Fashion-MNIST: recognize ten kinds of clothes in 28 x 28 grey pixels."""

    options: ClassVar = Classification.options | {
        "data": "a folder with the four IDX files, gzipped or not, or with a subfolder fashion-mnist that has them"
    }
    networks: ClassVar = {
        "mlp": partial(mlp, 784, 256, 128, 10),
        "cnn": partial(cnn, 28, 1, 16, 32, hidden=64),
    }

    def __init__(
        self,
        data: str | Path | None = None,
        batch_size: int = 64,
        learning_rate: float = 1e-3,
        momentum: float | None = None,
        network: Literal["mlp", "cnn"] = "mlp",
    ) -> None:
        super().__init__(
            batch_size=batch_size, learning_rate=learning_rate, momentum=momentum, network=network, data=data
        )
        self._paths = {part: [_find(self.data, name) for name in names] for part, names in _FILES.items()}

    def train_data(self) -> TensorDataset:
        return self._read("train")

    def test_data(self) -> TensorDataset:
        return self._read("test")

    def _read(self, part: str) -> TensorDataset:
        images, labels = self._paths[part]
        raw = dataset(read_idx(images), read_idx(labels), shape=(28, 28), classes=10, source=images)
        pixels = raw.tensors[0].unsqueeze(1).to(torch.float32).div_(255).sub_(_MEAN).div_(_DEVIATION)
        return TensorDataset(pixels, raw.tensors[1])


def _find(data: Path | None, name: str) -> Path:
    if data is not None:
        for folder in (data, data / "fashion-mnist"):
            for path in (folder / f"{name}.gz", folder / name):
                if path.is_file():
                    return path
    what = "task fashion needs its data" if data is None else f"{data} has no file {name}.gz"
    expected = ", ".join(f"{name}.gz" for names in _FILES.values() for name in names)
    raise UsageError(
        f"{what}: fetch {expected} from the project zalandoresearch/fashion-mnist on GitHub (folder data/fashion), put "
        "them into one folder DIR or into DIR/fashion-mnist, gzipped or not, and pass --data DIR"
    )
