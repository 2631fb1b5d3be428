"""A simulated run that was interrupted and resumed with the same workers ends with the model of one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tether import Averaging, Mpca, Server, StepTime
from tether.core.effects import Checkpoint
from tether.core.vector import digest
from tether.execution.checkpoint import Restored
from tether.execution.directory import RunDirectory
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.protocols import Options
from tether.runtimes.base import NodeStates, NullObserver
from tether.testing.conformance import Blobs
from tether.testing.conformance import CheckedSim as Sim

UNEQUAL = StepTime(0.1, spread=0.5)


class Keeper(NullObserver):
    """Writes every checkpoint and reads it again, as `resume` would."""

    def __init__(self, directory: Path, protocol: str) -> None:
        self.directory, self.protocol = directory, protocol
        self.kept: list[Restored] = []

    def checkpoint(self, effect: Checkpoint, weights: torch.Tensor, state: NodeStates, now: float) -> None:
        (place := self.directory / f"{len(self.kept)}").mkdir(parents=True)
        directory = RunDirectory(place)
        at = effect.step, effect.samples
        directory.save_checkpoint(*at, weights, effect.state, state.hub, self.protocol, state.workers)
        read = RunDirectory(place).load_checkpoint()
        assert read is not None
        self.kept.append(read)


def train(
    options: Options, directory: Path, step_seconds: StepTime, goal: dict[str, Any], restored: Restored | None = None
) -> tuple[torch.Tensor, list[Restored]]:
    """A run with a checkpoint after every update of the joint model."""
    sim = Sim(workers=3, step_seconds=step_seconds)
    request = Request(**goal, seed=1, checkpoint_seconds=1e-9, trace=False)
    keeper = Keeper(directory, options.name)
    outcome = sim.execute(RunPlan.make(Blobs(), options, sim, request, restored), keeper)
    return outcome.weights, keeper.kept[:-1]


@pytest.mark.parametrize("goal", [{"steps": 16}, {"epochs": 0.7}], ids=["steps", "epochs"])
@pytest.mark.parametrize("step_seconds", [StepTime(0.1), UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    "options",
    [
        Server(sync="hard"),
        Server(sync="hard", topology="tree", fan_out=2),
        Server(sync="hard", hubs=2),
        Averaging(tau=1),
        Averaging(tau=4),
        Averaging(tau=4, outer="nesterov"),
    ],
    ids=str,
)
def test_a_run_that_is_interrupted_at_any_step_ends_as_if_it_had_not_been(
    options: Options, step_seconds: StepTime, goal: dict[str, Any], tmp_path: Path
) -> None:
    """At any step of a round, averaging resumes from the end of the round before, with the same mini-batches."""
    whole, kept = train(options, tmp_path / "whole", step_seconds, goal)
    assert len(kept) >= (2 if options.name == "averaging" and options.tau == 4 else 12)  # type: ignore[attr-defined]
    for number, restored in enumerate(kept):
        further, _ = train(options, tmp_path / f"from {number}", step_seconds, goal, restored)
        assert digest(further) == digest(whole), f"resumed from step {restored.step}"


def test_mpca_ends_with_another_model_that_is_as_good(tmp_path: Path) -> None:
    """No checkpoint holds what its workers do between two contributions."""
    goal = {"steps": 40}
    whole, kept = train(Mpca(), tmp_path / "whole", UNEQUAL, goal)
    further, _ = train(Mpca(), tmp_path / "further", UNEQUAL, goal, kept[len(kept) // 2])
    assert digest(further) != digest(whole)
    task = Blobs()
    errors = []
    for weights in (whole, further):
        model = task.model()
        torch.nn.utils.vector_to_parameters(weights[: sum(p.numel() for p in model.parameters())], model.parameters())
        points, labels = task.train_data().tensors
        errors.append(float((model.train()(points).argmax(1) != labels).float().mean()))
    assert errors[1] <= errors[0] + 0.05 and max(errors) < 0.2
