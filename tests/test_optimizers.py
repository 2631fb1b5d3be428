"""Optimizers of the user's own: they step wherever workers do, and are refused where a hub must step without shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tether import Averaging, Elastic, Grid, Local, Mpca, Server, Sim, Single, Streaming, Tide, UsageError, resume
from tether.execution.progress import make_progress
from tether.learner.data import Batches
from tether.protocols import Options
from tether.testing.conformance import Blobs, largest_difference, train_quietly

QUIET = make_progress(quiet=True)


class Subclass(torch.optim.SGD):
    """SGD of the user's own, which also counts its steps in a way that a checkpoint cannot hold."""

    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["seen"] = torch.tensor(1.0)
        return super().step(closure)


class MuonLike(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal, which needs their shapes."""

    def __init__(self, parameters: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(parameter.grad)
                change = velocity
                if parameter.ndim == 2:
                    left, _, right = torch.linalg.svd(velocity, full_matrices=False)
                    change = left @ right
                parameter.add_(change, alpha=-group["lr"])


class Lamb(torch.optim.Optimizer):
    """Adam with a rate for each layer that follows from the norms of its weights and its change."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(first=torch.zeros_like(parameter), second=torch.zeros_like(parameter), step=0)
                state["step"] += 1
                state["first"].lerp_(parameter.grad, 0.1)
                state["second"].lerp_(parameter.grad.square(), 0.01)
                first, second = (
                    state["first"] / (1 - 0.9 ** state["step"]),
                    state["second"] / (1 - 0.99 ** state["step"]),
                )
                change = first / (second.sqrt() + 1e-6)
                weights, length = parameter.norm(), change.norm()
                trust = (weights / length).item() if weights > 0 and length > 0 else 1.0
                parameter.add_(change, alpha=-group["lr"] * trust)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "a subclass": lambda parameters: Subclass(parameters, lr=0.05, momentum=0.9),
    "like Muon": MuonLike,
    "LAMB": Lamb,
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
}


class Own(Blobs):
    """Blobs with one of these optimizers."""

    def __init__(self, name: str) -> None:
        super().__init__(norm=False)
        self.chosen = name

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.chosen](model.parameters())


def plain_loop(task: Own, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = task.model()
    optimizer, batches = task.optimizer(model), Batches(task, task.train_data(), seed=0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss: Tensor = task.loss(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_does_what_a_plain_loop_does(name: str, tmp_path: Path) -> None:
    result = train_quietly(Own(name), Single(), Sim(1), tmp_path, steps=20)
    assert largest_difference(result.model, plain_loop(Own(name), 20)) < 1e-5


LOCAL_STEPS = [
    Averaging(tau=4),
    Averaging(tau=4, outer="nesterov"),
    Elastic(tau=2),
    Mpca(),
    Tide(),
    Streaming(tau=4),
    Grid(),
]


@pytest.mark.parametrize("protocol", LOCAL_STEPS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_and_resumes_under_every_protocol_that_steps_locally(
    name: str, protocol: Options, tmp_path: Path
) -> None:
    train_quietly(Own(name), protocol, Sim(2), tmp_path, steps=30)
    result = resume(tmp_path, Own(name), steps=80, progress=QUIET)
    assert result.metrics["error"] < 0.1


def test_it_trains_in_processes_and_inline(tmp_path: Path) -> None:
    protocol = Server(sync="async", apply="inline")
    result = train_quietly(Own("LAMB"), protocol, Local(2), tmp_path, steps=60)
    assert result.metrics["error"] < 0.2


@pytest.mark.parametrize(
    "protocol", [Server(sync="hard"), Server(sync="soft"), Server(sync="async"), Mpca(penalty="gradient")], ids=str
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_refused_where_a_step_is_made_with_a_flat_gradient(name: str, protocol: Options, tmp_path: Path) -> None:
    kind = type(OPTIMIZERS[name]([nn.Parameter(torch.zeros(1))])).__name__
    with pytest.raises(
        UsageError, match=rf"{kind} cannot step with a flat gradient, .* or a protocol in which workers"
    ):
        train_quietly(Own(name), protocol, Sim(2), tmp_path, steps=5)
