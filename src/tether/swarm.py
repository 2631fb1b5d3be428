"""Many simulated runs, each drawn from a seed: protocol, cluster, delays and faults.

Every run must end with all its steps made, no invariant broken and a model that has learned something; every tenth is
run twice and must repeat bit for bit. A failing seed is a complete description of the run that failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tether.errors import RunError, TetherError, UsageError
from tether.machine import Checkpoint, Evaluate, Row
from tether.plan import Request, RunPlan
from tether.protocols import Options, known
from tether.runtimes.base import NodeStates, Outcome
from tether.runtimes.faults import Faults
from tether.runtimes.sim import Sim, StepTime
from tether.task import SyntheticTask
from tether.trace import Meter
from tether.vector import digest

#: bugs that can be planted to see that the swarm finds them
PLANTS = ("drop",)


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for."""

    seed: int
    task: SyntheticTask
    protocol: Options
    sim: Sim
    request: Request

    def __str__(self) -> str:
        faults = ", ".join(
            f"{fault.kind} {fault.node}" + (f" at {fault.at:.3g} s" if fault.at is not None else f" nth {fault.nth}")
            for fault in self.sim.faults.schedule
        )
        return (
            f"{self.protocol}, {self.sim.workers} workers, {self.request.steps} steps, "
            f"link {self.sim.link}; faults: {faults or 'none'}"
        )


@dataclass(frozen=True)
class Verdict:
    """How a seed went; `error` is empty if all was well."""

    seed: int
    scenario: Scenario
    events: int
    error: str


class Nobody:
    """An observer that wants to know nothing."""

    def meter(self, meter: Meter, now: float) -> None: ...

    def record(self, node: str, values: Row, now: float) -> None: ...

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None: ...

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None: ...

    def observed(self) -> Sequence[dict[str, float]]:
        return ()

    def note(self, text: str) -> None: ...

    def stop_requested(self) -> str | None:
        return None

    def seconds_left(self) -> float:
        return math.inf


def draw(seed: int, protocol: str | None = None, plant: str | None = None) -> Scenario:
    """The run that a seed stands for."""
    rng = np.random.default_rng(seed)
    names = [protocol] if protocol else sorted(known())
    variants = [options for name in names for options in known()[name].variants()]
    options = variants[int(rng.integers(len(variants)))]
    workers = min(int(rng.integers(1, 10)), options.workers_max or 10)
    steps = int(rng.integers(10, 60))
    step_time = StepTime(
        seconds=0.1,
        spread=float(rng.choice([0.0, 0.1, 1.0])),
        straggle_chance=float(rng.choice([0.0, 0.05])),
    )
    nodes = options.nodes(workers)
    hub = options.joint if not any(node.name == options.joint and node.computes for node in nodes) else None
    computing = tuple(node.name for node in nodes if node.computes)
    helpers = tuple(node.name for node in nodes if not node.computes and node.name not in options.vital)
    faults = Faults.draw(rng, computing, hub, 0.7 * steps * step_time.seconds, helpers)
    if options.joint == "" and rng.random() < 0.5:
        faults = Faults.churn(rng, computing, steps * step_time.seconds, float(rng.uniform(0.2, 2.0)))
    if plant == "drop" and len(nodes) > 1:
        pair = (options.joint or computing[0], str(rng.choice(computing)))
        faults = faults.drop(*(pair if rng.random() < 0.5 else pair[::-1]), nth=int(rng.integers(1, 8)))
    link, latency = float(rng.choice([1e4, 1e6, 1e9])), float(rng.choice([0.0, 0.0002, 0.05]))
    sim = Sim(
        workers=workers,
        link=link,
        latency=latency,
        model_bytes="2MiB" if link == 1e9 and seed % 2 else None,  # so large that it travels in parts
        step_seconds=step_time,
        faults=faults,
        detect_seconds=float(rng.choice([0.01, 0.5])),
        events_max=5_000 + 60 * workers * steps,  # of 400 seeds the busiest needs 27 for a worker's step
    )
    task = SyntheticTask(parameters=int(rng.integers(1, 40)))
    return Scenario(seed, task, options, sim, Request(steps=steps, seed=seed, checkpoint_seconds=1.0, trace=False))


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario, without a run directory."""
    plan = RunPlan.make(scenario.task, scenario.protocol, scenario.sim, scenario.request, None)
    return scenario.sim.execute(plan, Nobody())


def judge(scenario: Scenario) -> Verdict:
    """Run a scenario and say what was wrong with it."""
    try:
        outcome = simulate(scenario)
        error = float(outcome.weights.square().mean())
        if not math.isfinite(error) or error >= 1.0:
            raise RunError(f"the model did not learn: its error went from 1 to {error:.4g}")
        if scenario.seed % 10 == 0 and digest(simulate(scenario).weights) != digest(outcome.weights):
            raise RunError("a second run with the same seed gave another model")
    except TetherError as error_:
        return Verdict(scenario.seed, scenario, 0, f"{type(error_).__name__}: {error_}")
    return Verdict(scenario.seed, scenario, outcome.events, "")


def swarm(
    seeds: range,
    protocol: str | None = None,
    plant: str | None = None,
    each: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Judge every seed; the verdicts that found something wrong."""
    if plant is not None and plant not in PLANTS:
        raise UsageError(f"unknown bug to plant {plant!r}; known: {', '.join(PLANTS)}")
    wrong = []
    for seed in seeds:
        verdict = judge(draw(seed, protocol, plant))
        each(verdict)
        if verdict.error:
            wrong.append(verdict)
    return wrong
