"""The joint model on the caller's side: its metrics, and whether it has learned anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from tether.core.device import EvaluationReplica, choose_device
from tether.core.vector import Vector, is_finite
from tether.errors import UsageError
from tether.execution.directory import not_finite
from tether.execution.goals import score
from tether.execution.plan import RunPlan
from tether.learner.learner import evaluate
from tether.task import primary_metric

#: a model whose metric has improved by less than this share has learned nothing
LITTLE = 0.05


class JointModel:
    """A copy of the task's model that takes the weights of the joint model and is evaluated with them."""

    def __init__(self, plan: RunPlan, note: Callable[[str], None]) -> None:
        self._task = plan.task
        self._note = note
        self._model = plan.new_model()
        # the first device that no worker uses, if there is one
        device = (
            choose_device(plan.device_name, plan.workers)
            if next(self._model.parameters()).device.type == "cpu"
            else None
        )
        self._on_device = EvaluationReplica(self._model, device) if device is not None else None
        self._vector = Vector(self._model)
        self.parameter_count = self._vector.parameter_count
        #: the names of the model's tensors
        self.layout = self._vector.layout
        self.nbytes = self._vector.weights.nbytes

    def weights(self) -> Tensor:
        """A copy of the weights that the model has now: before any others were given, those it starts with."""
        return self._vector.weights.clone()

    def with_weights(self, weights: Tensor) -> nn.Module:
        """The model with these weights, in evaluation mode; the next call changes the same module."""
        self._vector.weights.copy_(weights)
        return self._model.eval()

    def measure(self, weights: Tensor) -> dict[str, float]:
        """The metrics of these weights, computed on a device if there is one that can."""
        if self._on_device is not None:
            try:
                self._on_device.load_weights(weights)
                return evaluate(self._task, self._on_device.model)
            except Exception as error:  # also for lack of memory: the workers come first
                where = self._on_device.device
                self._note(f"evaluating on {where} failed; evaluations run on the host from now on: {error}")
                self._on_device = None
        return evaluate(self._task, self.with_weights(weights))

    def require_finite(self, step: int, weights: Tensor) -> None:
        """Raise `Diverged` unless all parameters are finite; buffers may hold anything."""
        if not is_finite(weights[: self.parameter_count]):
            raise not_finite(step)


def learning_warning(
    metrics: dict[str, float], untrained: dict[str, float] | None, history: Sequence[dict[str, Any]]
) -> str | None:
    """What to tell the user if a model with these metrics has learned nothing, or has lost what it had learned."""
    metric = primary_metric(metrics)
    if untrained is None or metric not in untrained:
        return None
    start, end = untrained[metric], metrics[metric]
    try:
        gained = score({metric: end}) - score({metric: start})
        gains = {score({metric: row["metrics"][metric]}) - score({metric: start}): row for row in history}
    except (UsageError, LookupError):
        return None  # it is not known which values are better
    most = max((gain for gain in gains if math.isfinite(gain)), default=0.0)
    if gained > max(LITTLE * abs(start), most / 2) or (start == end == 0 and score({metric: 1.0}) < 0):
        return None
    course = f"{metric} {end:.4g}, {start:.4g} before"
    if most > 2 * max(gained, LITTLE * abs(start)):
        best = gains[most]
        course += f", and {best['metrics'][metric]:.4g} at step {best['step']}, which patience would have kept"
    much = "no" if not gained > 0 else "hardly" if gained <= LITTLE * abs(start) else "not much"
    return (
        f"the model is {much} better than before training ({course}): lower the learning rate or the momentum, use "
        "fewer workers or another protocol, or check the data"
    )
