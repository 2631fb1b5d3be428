"""A guard refuses gradients that are far longer than usual for their worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tether import Averaging, Elastic, Grid, Mpca, Server, TaskError, UsageError
from tether.learner.guard import GUARD_HISTORY, Guard
from tether.protocols import Options
from tether.protocols import make as make_protocol
from tether.testing.conformance import Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim

PROTOCOLS: list[dict[str, Any]] = [
    {"name": "server", "sync": "hard"},
    {"name": "server", "sync": "async"},
    {"name": "averaging", "tau": 4},
    {"name": "elastic", "tau": 3},
    {"name": "mpca"},
    {"name": "grid"},
]


class Poisoned(Blobs):
    """From its 20th step on, the gradients of one worker are a million times too long. All share one process."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.steps: dict[int, int] = {}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        steps = self.steps[id(model)] = self.steps.get(id(model), 0) + 1
        if list(self.steps).index(id(model)) != 1 or steps < 20:
            return loss
        return 1e6 * loss - (1e6 * loss).detach() + loss.detach()


def error_of(options: Options, directory: Path) -> float:
    try:
        return train_quietly(Poisoned(), options, Sim(workers=4), directory, steps=80).metrics["error"]
    except TaskError:  # losses have become infinite
        return 1.0


@pytest.mark.parametrize("described", PROTOCOLS, ids=lambda described: " ".join(map(str, described.values())))
def test_a_poisoned_worker_ruins_a_run_without_a_guard_and_not_with_one(
    described: dict[str, Any], tmp_path: Path
) -> None:
    assert error_of(make_protocol(described), tmp_path / "without") > 0.3
    assert error_of(make_protocol({**described, "guard": 100.0}), tmp_path / "with") < 0.1


def test_refused_gradients_are_counted_and_their_worker_is_named(tmp_path: Path) -> None:
    result = train_quietly(Poisoned(), Averaging(tau=4, guard=100.0), Sim(workers=3), tmp_path / "run", steps=40)
    assert result.figures["gradients_refused"] == {"worker-1": 21}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    notes = [row["text"] for row in rows if row["kind"] == "note" and "guard" in row["text"]]
    assert len(notes) == 1 and notes[0].startswith("worker-1 refuses gradients")


@pytest.mark.parametrize(
    "options", [Server(guard=10.0), Elastic(guard=10.0), Mpca(guard=10.0), Grid(guard=10.0)], ids=str
)
def test_a_guard_refuses_nothing_of_an_ordinary_run(options: Options, tmp_path: Path) -> None:
    guarded = train_quietly(Blobs(), options, Sim(workers=3), tmp_path / "guarded", steps=30)
    plain = train_quietly(Blobs(), make_protocol({"name": options.name}), Sim(workers=3), tmp_path / "plain", steps=30)
    assert guarded.figures["gradients_refused"] == {}
    assert guarded.figures["digest"] == plain.figures["digest"]


def test_a_guard_compares_with_the_median_of_the_gradients_it_has_accepted() -> None:
    guard = Guard(10.0)
    assert not any(guard.refuses([torch.tensor([1e9])]) for _ in range(3)), "it knows nothing yet"
    assert not any(guard.refuses([torch.ones(1)]) for _ in range(GUARD_HISTORY - 3))
    assert guard.refuses([torch.tensor([6.0]), torch.tensor([9.0])])
    assert not guard.refuses([torch.tensor([9.0])])
    assert all(guard.refuses([torch.tensor([11.0])]) for _ in range(100)), "refused gradients do not count"


def test_a_guard_that_would_refuse_half_of_all_gradients_is_refused() -> None:
    with pytest.raises(UsageError, match=r"guard must be more than 1, such as 100, or 0 for none, not 0\.5"):
        Averaging(guard=0.5)
