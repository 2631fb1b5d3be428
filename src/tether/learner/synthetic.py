"""A task and its learner without a model or data, so that thousands of nodes fit into one simulation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tether.core.effects import GradientForm
from tether.core.machine import GradientResult
from tether.core.vector import Empty, Shared, shards
from tether.errors import UsageError
from tether.learner.average import MovingAverage
from tether.learner.guard import Guard
from tether.task import Task


class SyntheticTask(Task):
    """A quadratic bowl with noise instead of data and a model, for simulations of many nodes."""

    batch_size = 1
    options: ClassVar[dict[str, str]] = {
        "parameters": "number of values in the vector",
        "samples": "number of samples that an epoch pretends to have",
        "noise": "standard deviation of the gradient's noise",
        "rate": "the learning rate",
    }

    def __init__(self, parameters: int = 64, samples: int = 10_000, noise: float = 0.1, rate: float = 0.1) -> None:
        self.parameters = parameters
        self.samples = samples
        self.noise = noise
        self.rate = rate

    @property
    def name(self) -> str:
        return "synthetic"

    def model(self) -> nn.Module:
        model = nn.Module()
        model.register_parameter("position", nn.Parameter(torch.ones(self.parameters)))
        return model

    def train_data(self) -> Any:
        return range(self.samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return 0.5 * model.position.square().sum()  # type: ignore[operator]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"error": float(model.position.detach().square().mean())}  # type: ignore[operator]


class SyntheticLearner:
    """Minimizes the quadratic bowl of a `SyntheticTask` by plain gradient descent."""

    def __init__(
        self,
        task: SyntheticTask,
        *,
        index: int,
        seed: int,
        empty: Empty = torch.empty,
        shared: Shared | None = None,
        part: tuple[int, int] | None = None,
        guard: float = 0.0,
    ) -> None:
        for name in ("accumulate", "clip_norm", "clip_value", "precision"):
            if getattr(task, name) != getattr(Task, name):
                raise UsageError(f"{name}: a synthetic task has no model that it could apply to; leave it out")
        self.task = task
        values = torch.ones(task.parameters)
        self.weights = values if shared is None else shared.vector(values)
        self.parameter_count = task.parameters
        index_of_part, count = part or (0, 1)
        self._own = self.weights[shards(task.parameters, count)[index_of_part]]
        self.load_seconds = 0.0
        self.skipped = 0
        self.refused = 0
        self._guard = Guard(guard)
        self._average = MovingAverage()
        self._noise = torch.Generator().manual_seed(seed * 1_000_003 + index)
        self._empty = empty
        self._gradient = self._empty(task.parameters, dtype=self.weights.dtype)

    def seek(self, batch: int, upcoming: tuple[int, ...], position: int) -> None:
        """Every mini-batch gives the same bowl."""

    def compute(self, form: GradientForm, fresh: bool) -> GradientResult:
        if fresh:
            self._gradient = self._empty(self.parameter_count, dtype=self.weights.dtype)
        self._gradient.normal_(0.0, self.task.noise, generator=self._noise).add_(self.weights)
        if self._guard.refuses([self._gradient]):
            self.refused += 1
            self._gradient.zero_()
        returned = self._gradient[:0] if form == "none" else self._gradient
        return GradientResult(returned, 0.5 * float(self.weights.dot(self.weights)), self.task.batch_size)

    def step(
        self,
        gradient: Tensor | None,
        rate: float,
        touched: tuple[Tensor, ...] = (),
        position: int | None = None,
        staleness: float = 0.0,
    ) -> None:
        self._own.sub_(self._gradient if gradient is None else gradient, alpha=self.task.rate * rate)

    def load_gradient(self, gradient: Tensor) -> None:
        self._gradient.copy_(gradient)

    def average(self, decay: float) -> None:
        self._average.update(self.weights, decay)

    @property
    def averaged(self) -> Tensor | None:
        return self._average.values

    def restore_average(self, values: Tensor) -> None:
        """Continue with the average of an earlier part of the run."""
        self._average.values = values.to(self.weights).clone()

    def close(self) -> None:
        """It loads no data."""

    def observe(self, metrics: dict[str, float]) -> None:
        """Its rate never changes."""

    def state(self, others: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Plain gradient descent has no state."""
