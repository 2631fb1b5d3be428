"""The moving average of the joint model: one decay per step of the run, under every protocol that has a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tether import (
    Averaging,
    Elastic,
    Grid,
    Local,
    Mpca,
    Server,
    Sim,
    Single,
    TaskError,
    Tide,
    UsageError,
    resume,
)
from tether.api import trained_model
from tether.execution.progress import make_progress
from tether.learner.data import Batches
from tether.protocols import Options
from tether.testing.conformance import Blobs, largest_difference, train_quietly

QUIET = make_progress(quiet=True)


class Smooth(Blobs):
    ema: float | None = 0.9


def test_the_average_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    task = Smooth()
    result = train_quietly(task, Single(), Sim(1), tmp_path, steps=30)
    torch.manual_seed(0)
    model = task.model()
    optimizer, batches = task.optimizer(model), Batches(task, task.train_data(), seed=0)
    average: dict[str, Tensor] = {}
    for step in range(30):
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                average[name] = value.clone() if step == 0 else average[name].lerp(value, 0.1)
    found = result.model.state_dict()
    assert len(average) == 8 and all(torch.allclose(found[name], value, atol=1e-5) for name, value in average.items())


@pytest.mark.parametrize(
    "protocol",
    [
        Averaging(tau=4),
        Elastic(tau=2),
        Mpca(),
        Tide(),
        Server(sync="hard"),
        Server(sync="async"),
        Server(sync="soft", topology="tree", fan_out=2),
    ],
    ids=str,
)
def test_every_hub_averages_evaluates_and_returns_the_average_and_trains_as_without_it(
    protocol: Options, tmp_path: Path
) -> None:
    plain = train_quietly(Blobs(), protocol, Sim(2), tmp_path / "plain", steps=40)
    smooth = train_quietly(Smooth(), protocol, Sim(2), tmp_path / "smooth", steps=40)
    newest = max((tmp_path / "smooth" / "checkpoints").glob("at-*"))
    raw = load_file(newest / "model.safetensors")
    assert all(torch.equal(raw[name], value) for name, value in plain.model.state_dict().items())
    assert largest_difference(plain.model, smooth.model) > 1e-4 and smooth.metrics["error"] < 0.2
    assert smooth.metrics == Smooth().evaluate(smooth.model)
    assert all(
        torch.equal(value, smooth.model.state_dict()[name])
        for name, value in trained_model(tmp_path / "smooth")[0].items()
    )


def test_a_resumed_run_continues_the_average(tmp_path: Path) -> None:
    whole = train_quietly(Smooth(), Server(sync="hard"), Sim(2), tmp_path / "whole", steps=40)
    train_quietly(Smooth(), Server(sync="hard"), Sim(2), tmp_path / "part", steps=20)
    resumed = resume(tmp_path / "part", Smooth(), steps=40, progress=QUIET)
    assert largest_difference(whole.model, resumed.model) < 1e-6


def test_processes_do_the_same(tmp_path: Path) -> None:
    here = train_quietly(Smooth(), Server(sync="hard"), Sim(2), tmp_path / "here", steps=20)
    there = train_quietly(Smooth(), Server(sync="hard"), Local(2), tmp_path / "there", steps=20)
    assert largest_difference(here.model, there.model) < 1e-5


@pytest.mark.parametrize("protocol", [Grid(), Server(sync="hard", hubs=2)], ids=str)
def test_a_protocol_in_which_no_node_has_the_joint_model_refuses(protocol: Options, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ema of task Smooth averages the joint model, which no single node"):
        train_quietly(Smooth(), protocol, Sim(2), tmp_path, steps=5)


@pytest.mark.parametrize("decay", [0.0, 1.0, "0.9", True])
def test_an_impossible_decay_is_refused(decay: Any, tmp_path: Path) -> None:
    task = Smooth()
    task.ema = decay
    with pytest.raises(TaskError, match=r"ema of task Smooth is .*; it must be a number between 0 and 1"):
        train_quietly(task, Single(), Sim(1), tmp_path, steps=5)
