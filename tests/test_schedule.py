"""A learning-rate schedule is a function of how far the run is, whichever node steps and however the run began.

`python tests/test_schedule.py` prints the rates at given samples, protocol by protocol.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tether import Averaging, Elastic, Faults, Grid, Length, Mpca, Server, Single
from tether.core.effects import Checkpoint
from tether.core.machine import Node, Replica
from tether.errors import RunError
from tether.execution.checkpoint import Restored
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.learner import Learner
from tether.protocols import Options
from tether.runtimes.base import NodeStates, NullObserver
from tether.runtimes.interpreter import Recorder
from tether.testing.conformance import Blobs
from tether.testing.conformance import CheckedSim as Sim

WORKERS = 4
BATCH = 10
PROTOCOLS: dict[str, Options] = {
    "single": Single(),
    "hardsync": Server(sync="hard"),
    "2-softsync": Server(sync="soft", n=2),
    "async": Server(sync="async"),
    "async, weights shared": Server(sync="async", consistent=False),
    "async, inline": Server(sync="async", apply="inline"),
    "averaging": Averaging(tau=5),
    "elastic": Elastic(tau=3),
    "mpca": Mpca(),
    "grid": Grid(),
}
Make = Callable[[torch.optim.Optimizer, Length], Any]


class Falling(Blobs):
    """Halves the rate after each quarter of the run."""

    def __init__(self, make: Make | None = None) -> None:
        super().__init__(batch_size=BATCH, norm=False, momentum=0.0)
        self.make = make

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.08)

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Length) -> Any:
        if self.make is not None:
            return self.make(optimizer, length)
        return lr_scheduler.MultiStepLR(optimizer, [length.after_epochs(epochs) for epochs in (1, 2, 3)], gamma=0.5)


class Watched(RunPlan):
    """A plan that remembers the rate of every step and how many samples the run had seen."""

    def recorder(self, node: Node, replica: Replica) -> Recorder | None:
        assert isinstance(replica, Learner)
        step = replica.step

        def noted(gradient: Any, rate: float, touched: Any, position: int | None, staleness: float) -> None:
            step(gradient, rate, touched, position, staleness)
            at = replica._position if position is None else position
            self.rates.append((node.name, at * BATCH, replica.optimizer.param_groups[0]["lr"]))

        replica.step = noted  # type: ignore[method-assign]
        return None

    @property
    def rates(self) -> list[tuple[str, int, float]]:
        return vars(self).setdefault("_rates", [])


class Keeper(NullObserver):
    def __init__(self) -> None:
        self.kept: list[Restored] = []

    def checkpoint(self, effect: Checkpoint, weights: Any, state: NodeStates, now: float) -> None:
        self.kept.append(Restored(effect.step, effect.samples, weights, effect.state, state.hub))


def train(
    options: Options,
    task: Falling,
    sim: Sim,
    restored: Restored | None = None,
    protocol: str = "",
    keeper: Keeper | None = None,
    **goal: Any,
) -> tuple[list[tuple[str, int, float]], Keeper]:
    workers = min(sim.workers, options.workers_max or sim.workers)
    sim = replace(sim, workers=workers)
    request = Request(seed=1, trace=False, **{"epochs": 4, "checkpoint_seconds": 1e9, "evaluate_every": 1e9, **goal})
    if restored is not None:
        restored = replace(restored, protocol=protocol or options.name)
    plan = Watched(**vars(RunPlan.make(task, options, sim, request, restored)))
    keeper = keeper or Keeper()
    sim.execute(plan, keeper)
    return plan.rates, keeper


def expected(samples: int) -> float:
    """The rate of `Falling` where 1000 samples are an epoch."""
    return 0.08 * 0.5 ** min(3, samples // 1000)


def wrong(rates: list[tuple[str, int, float]], slack: int) -> list[tuple[str, int, float]]:
    """Steps whose rate is not the expected one anywhere within `slack` samples."""
    return [
        row
        for row in rates
        if not any(row[2] == pytest.approx(expected(max(0, row[1] + near))) for near in (0, -slack, slack))
    ]


def begin(options: Options) -> list[tuple[str, int, float]]:
    return train(options, Falling(), Sim(workers=WORKERS))[0]


def resumed(options: Options, workers: int) -> list[tuple[str, int, float]]:
    _, keeper = train(options, Falling(), Sim(workers=WORKERS), seconds=6.0)
    return train(options, Falling(), Sim(workers=workers), keeper.kept[-1])[0]


def replaced(options: Options) -> list[tuple[str, int, float]]:
    faults = Faults().restart("worker-1", step=55, seconds=0.5)
    return train(options, Falling(), Sim(workers=WORKERS, faults=faults, detect_seconds=0.1))[0]


def restarted(options: Options) -> list[tuple[str, int, float]]:
    """What `run` does when vital nodes have died: plan again from the last checkpoint."""
    workers = min(WORKERS, options.workers_max or WORKERS)
    faults = Faults()
    for name in options.vital or [f"worker-{index}" for index in range(workers)]:
        faults = faults.crash(name, at=6.0 if workers > 1 else 24.0)
    keeper = Keeper()
    with pytest.raises(RunError, match="died at"):
        train(options, Falling(), Sim(workers, faults=faults), keeper=keeper, checkpoint_seconds=0.5)
    return train(options, Falling(), Sim(workers), keeper.kept[-1])[0]


def warmed_up(options: Options) -> list[tuple[str, int, float]]:
    _, keeper = train(Server(sync="hard"), Falling(), Sim(workers=options.workers_max or WORKERS), epochs=1.5)
    return train(options, Falling(), Sim(workers=WORKERS), keeper.kept[-1], protocol="server")[0]


CASES: dict[str, Callable[[Options], list[tuple[str, int, float]]]] = {
    "begin": begin,
    "resume, 4 workers": lambda options: resumed(options, WORKERS),
    "resume, 2 workers": lambda options: resumed(options, 2),
    "resume, 7 workers": lambda options: resumed(options, 7),
    "replaced": replaced,
    "restart": restarted,
    "warm-up": warmed_up,
}


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("case", CASES)
def test_the_rate_follows_from_the_samples_so_far(name: str, case: str) -> None:
    options = PROTOCOLS[name]
    if options.workers_max == 1 and case in ("replaced",):
        pytest.skip("a single worker is not replaced")
    rates = CASES[case](options)
    assert {rate for _, _, rate in rates} >= {expected(2500), expected(3500)}
    # a step of the run is 40 samples; a worker knows where the run is to within what it was dealt ahead
    assert not wrong(rates, 2 * WORKERS * BATCH)


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if name != "single"])
def test_a_replacement_has_the_rate_of_the_other_workers(name: str) -> None:
    rates = replaced(PROTOCOLS[name])
    assert not [row for row in rates if row[0] == "worker-1~2" and row[2] > expected(1000)]


MAKES: dict[str, Make] = {
    "one cycle": lambda optimizer, length: lr_scheduler.OneCycleLR(optimizer, 0.1, length.steps),
    "cosine after a warm-up": lambda optimizer, length: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10),
            lr_scheduler.CosineAnnealingLR(optimizer, length.steps - 10),
        ],
        [10],
    ),
    "epochs 120 and 130 of 140, in small": lambda optimizer, length: lr_scheduler.MultiStepLR(
        optimizer, [length.after_epochs(4 * 120 / 140), length.after_epochs(4 * 130 / 140)]
    ),
}


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("make", MAKES)
def test_schedules_that_know_the_length_of_the_run_end_where_it_ends(name: str, make: str) -> None:
    options = PROTOCOLS[name]
    workers = options.workers_max or WORKERS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter in")
        rates, _ = train(options, Falling(MAKES[make]), Sim(workers=WORKERS))
    length = Length(-(-400 // workers), 100 / workers, workers)
    alone = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.08)
    scheduler = MAKES[make](alone, length)
    course = []
    for _ in range(length.steps):
        course.append(alone.param_groups[0]["lr"])
        alone.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The epoch parameter in")
            scheduler.step()
    for _, samples, rate in rates:
        step = samples // (BATCH * workers)
        near = course[max(0, step - 2) : step + 3]
        assert min(near) - 1e-9 <= rate <= max(near) + 1e-9
    assert rates[-1][2] <= max(course[-3:]) + 1e-9


if __name__ == "__main__":
    places = (500, 1500, 2500, 3500)
    print(f"rates at {places} samples")
    print("| protocol | " + " | ".join(CASES) + " |")
    for name, options in PROTOCOLS.items():
        cells = []
        for case in CASES:
            if options.workers_max == 1 and case == "replaced":
                cells.append("")
                continue
            rates = CASES[case](options)
            at = {place: [rate for _, samples, rate in rates if abs(samples - place) < 100] for place in places}
            cells.append(" ".join("/".join(f"{rate:g}" for rate in sorted(set(at[p]))) or "-" for p in places))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
