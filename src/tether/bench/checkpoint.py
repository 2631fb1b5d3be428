"""What checkpoints cost training."""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.utils.data import TensorDataset

from tether.bench.common import NEVER, Report, Rounds, ratios_in_turns, run_quietly
from tether.execution.goals import Request
from tether.protocols import Averaging, Single
from tether.runtimes.local import Local
from tether.task import Task


def checkpoint(
    megabytes: Annotated[int, typer.Option(min=1, help="The size of the model. Choose that of your own.")] = 100,
    seconds: Annotated[
        float, typer.Option(help="The length of a turn. One shorter than three intervals says little.")
    ] = 100.0,
    interval: Annotated[
        float, typer.Option(help="Seconds between two checkpoints. Use fewer if the turns are shorter.")
    ] = Request().checkpoint_seconds,
    rounds: Rounds = 3,
) -> Report:
    """Steps per second with checkpoints over those without any, in turns.

    Under single the worker itself holds the model that is saved, and under averaging a hub does. Both also save
    momentum.
    """
    task = Wide(megabytes)
    rows, ratios = [], {}
    for protocol, workers in ((Single(), 1), (Averaging(tau=10), 2)):
        speeds: dict[float, list[float]] = {interval: [], NEVER: []}
        for turn in range(rounds):
            for every in (interval, NEVER) if turn % 2 else (NEVER, interval):
                figures = run_quietly(
                    task, protocol, Local(workers), seconds=seconds, epochs=NEVER, checkpoint_seconds=every
                )
                speeds[every].append(figures["steps"] / figures["seconds"])
        in_turns = ratios_in_turns(speeds[interval], speeds[NEVER])
        rows += [
            {"protocol": protocol.name, "interval_seconds": every, "steps_per_second": statistics.median(found)}
            for every, found in speeds.items()
        ]
        ratios[protocol.name] = statistics.median(in_turns)
        ratios |= {f"{protocol.name}_min": min(in_turns), f"{protocol.name}_max": max(in_turns)}
    return {"bench": "checkpoint", "megabytes": megabytes, "rounds": rounds, "rows": rows, "ratios": ratios}


class Wide(Task):
    """One square layer of a given size."""

    batch_size = 16

    def __init__(self, megabytes: int) -> None:
        self.width = round((megabytes * 1e6 / 4) ** 0.5)

    def model(self) -> nn.Module:
        return nn.Linear(self.width, self.width, bias=False)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randn(64, self.width, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = model(batch[0])
        return outputs.square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"error": 0.0}
