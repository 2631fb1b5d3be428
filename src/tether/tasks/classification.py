"""What the built-in tasks share: they learn classes, and are judged on samples held out from training."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tether.errors import UsageError, unknown
from tether.task import Task


class Classification(Task):
    """Cross entropy as loss; error rate and mean loss on `test_data` as metrics; Adam or SGD.

    A subclass lists its `networks` and gives `train_data` and `test_data`.
    """

    #: what each constructor parameter is for, shown by `tether tasks`
    options: ClassVar[dict[str, str]] = {
        "batch_size": "samples in a worker's mini-batch",
        "learning_rate": "step size of the optimizer",
        "momentum": "use SGD with this momentum instead of Adam",
        "network": "architecture of the model",
    }
    #: the architectures by name; each value builds a new model
    networks: ClassVar[dict[str, Callable[..., nn.Module]]]
    #: samples that go through the model at once in `evaluate`, which bounds its memory
    chunk: ClassVar[int] = 1000

    def __init__(
        self,
        *,
        batch_size: int,
        learning_rate: float,
        network: str,
        momentum: float | None = None,
        data: str | Path | None = None,
    ) -> None:
        if momentum is not None and not 0 <= momentum < 1:
            raise UsageError(f"momentum of task {self.name!r} is {momentum}; it must be at least 0 and less than 1")
        if not learning_rate > 0:
            raise UsageError(f"learning_rate of task {self.name!r} is {learning_rate}; it must be greater than 0")
        if network not in self.networks:
            raise unknown(f"{self.name} network", network, self.networks)
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.network = network
        # absolute, because a worker may start in another folder
        self.data = None if data is None else Path(data).expanduser().resolve()

    def model(self) -> nn.Module:
        return self.networks[self.network]()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.momentum is None:
            return torch.optim.Adam(model.parameters(), lr=self.learning_rate)
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)

    def test_data(self) -> TensorDataset:
        """The held-out samples, in the form that `train_data` has."""
        raise self._lacks("test_data", "a torch.utils.data.TensorDataset")

    def examples(self, batch: Any) -> tuple[Tensor, Tensor]:
        """A batch as the inputs of the model and the classes that it should predict."""
        inputs, labels = batch
        return inputs, labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = self.examples(batch)
        return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.metrics_on(model, self._held_out)

    def metrics_on(self, model: nn.Module, samples: TensorDataset) -> dict[str, float]:
        """Error rate and mean loss on these samples."""
        device = next(model.parameters()).device
        tensors = samples.tensors
        wrong, loss, count = 0, 0.0, 0
        for parts in zip(*(torch.split(tensor, self.chunk) for tensor in tensors), strict=True):
            inputs, labels = self.examples([part.to(device) for part in parts])
            scores, labels = model(inputs).flatten(0, -2), labels.flatten()
            wrong += int((scores.argmax(1) != labels).sum())
            loss += functional.cross_entropy(scores, labels, reduction="sum").item()
            count += len(labels)
        return {"error": wrong / count, "loss": loss / count}

    @cached_property
    def _held_out(self) -> TensorDataset:
        return self.test_data()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out cached properties: a task is copied to every process, which reads its data again."""
        cached = {name for cls in type(self).__mro__ for name, a in vars(cls).items() if isinstance(a, cached_property)}
        return {name: value for name, value in vars(self).items() if name not in cached}
