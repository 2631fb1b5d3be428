"""How much checkpoints slow down training."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.utils.data import TensorDataset

from tether.bench.common import NEVER, Report, Rounds, run_quietly
from tether.execution.goals import Request
from tether.protocols import Averaging, Options, Single
from tether.runtimes.local import Local
from tether.task import Task

#: a checkpoint is written, and the disk has it, within this time
WRITING_SECONDS = 5.0


def checkpoint(
    megabytes: Annotated[int, typer.Option(min=1, help="The size of the model. Choose that of your own.")] = 100,
    seconds: Annotated[float, typer.Option(help="The length of a run. A longer one measures more checkpoints.")] = 60.0,
    interval: Annotated[
        float,
        typer.Option(min=2 * WRITING_SECONDS, help="Seconds between two checkpoints. Fewer measure more of them."),
    ] = 12.0,
    rounds: Rounds = 3,
) -> Report:
    """How much of training's time a checkpoint takes, at the interval that runs have by default.

    In one run, the steps that begin while a checkpoint is made and written are compared with all others. Under single
    the worker itself holds the model that is saved, and under averaging a hub does. Both also save momentum.
    """
    rows, ratios = [], {}
    for protocol, workers in ((Single(), 1), (Averaging(tau=10), 2)):
        task, losses, steps = Wide(megabytes), [], []
        for _ in range(rounds):
            for lost, usual in _lost_seconds(task, protocol, workers, seconds, interval):
                losses.append(lost)
                steps.append(usual)
        rows.append(
            {
                "protocol": protocol.name,
                "checkpoints": len(losses),
                "step_seconds": statistics.median(steps),
                "lost_seconds": statistics.fmean(losses),
                "lost_seconds_min": min(losses),
                "lost_seconds_max": max(losses),
            }
        )
        ratios[f"{protocol.name}, lost of {Request().checkpoint_seconds:g} s"] = (
            statistics.fmean(losses) / Request().checkpoint_seconds
        )
    return {"bench": "checkpoint", "megabytes": megabytes, "rounds": rounds, "rows": rows, "ratios": ratios}


def _lost_seconds(
    task: Task, protocol: Options, workers: int, seconds: float, interval: float
) -> Iterator[tuple[float, float]]:
    """For every checkpoint of a run: the time that its steps took beyond the usual, and the usual time of a step."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "run"
        run_quietly(
            task,
            protocol,
            Local(workers),
            run_dir=place,
            trace=True,
            seconds=seconds,
            epochs=NEVER,
            checkpoint_seconds=interval,
        )
        spans = json.loads((place / "trace.json").read_text())["traceEvents"]
    worker = next(span["pid"] for span in spans if span["ph"] == "M" and span["args"]["name"] == "worker-0")
    gradients = [span for span in spans if span.get("name") == "gradient" and span["pid"] == worker]
    begun = sorted(span["ts"] / 1e6 for span in gradients)
    made = sorted(span["ts"] / 1e6 for span in spans if span.get("name") == "checkpoint")
    steps = list(pairwise(begun))
    writing = [[step for step in steps if step[1] > at and step[0] < at + WRITING_SECONDS] for at in made]
    beside = {step for during in writing for step in during}
    usual = statistics.fmean(stop - start for start, stop in steps[1:] if (start, stop) not in beside)
    for during in writing:
        if during and during[-1][1] < begun[-1]:  # the last checkpoint is written when training has ended
            yield during[-1][1] - during[0][0] - len(during) * usual, usual


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
