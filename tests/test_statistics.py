"""BatchNorm's running statistics: those of the joint model must fit its weights, however rare exchanges are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tether import Averaging, Elastic, Grid, Mpca, StepTime, Streaming, Tide
from tether.protocols import Options
from tether.tasks.digits import Digits
from tether.testing.conformance import CheckedSim as Sim
from tether.testing.conformance import train_quietly


class Scale(nn.Module):
    """Inputs as people have them before they are scaled."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 100 * inputs + 300


class NormedDigits(Digits):
    """Its statistics must move far from where they begin."""

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [Scale()]
        for inputs, outputs in [(64, 64), (64, 32), (32, 32)]:
            layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(32, 10))


def error_of(model: nn.Module, task: Digits) -> float:
    model.eval()
    return float(task.evaluate(model)["error"])


def error_with_exact_statistics(model: nn.Module, task: Digits) -> float:
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()
            layer.momentum = None  # the mean of all that passes through
    model.train()
    with torch.no_grad():
        model(task.train_data().tensors[0])
    return error_of(model, task)


@pytest.mark.parametrize("link", ["100kbit", "10mbit"], ids=["rare", "frequent"])
@pytest.mark.parametrize(
    "options", [Averaging(), Elastic(), Mpca(), Tide(), Streaming(tau=10), Grid()], ids=lambda options: options.name
)
def test_the_joint_statistics_fit_the_joint_weights(options: Options, link: str, tmp_path: Path) -> None:
    task = NormedDigits()
    sim = Sim(workers=4, step_seconds=StepTime(0.1, spread=0.05), link=link)
    model = train_quietly(task, options, sim, tmp_path / "run", steps=50).model
    error = error_of(model, task)
    assert error <= error_with_exact_statistics(model, task) + 0.06
