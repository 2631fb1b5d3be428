"""Staleness and overlap in the simulator, after figure 4 and table 1 of the Rudra paper.

The paper calls a worker a learner.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Annotated, Any

import typer

from tether.bench.common import Report
from tether.execution.goals import Request
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Options, Server
from tether.runtimes.base import Outcome
from tether.runtimes.sim.costs import StepTime
from tether.runtimes.sim.runtime import Sim
from tether.testing.swarm import simulate


def rudra(
    steps: Annotated[
        int,
        typer.Option(
            min=10,
            help="Steps of each worker where staleness is counted; a tenth of them where overlap is. Use fewer for a "
            "first look.",
        ),
    ] = 700,
) -> Report:
    """Rudra's staleness (figure 4) and its overlap of computation with communication (table 1), in the simulator."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    even = StepTime(0.1, spread=0.05)
    for n in (1, 2, 30):
        outcome = _simulated(Server(sync="soft", n=n), Sim(workers=30, step_seconds=even, link="10gbit"), steps)
        histogram = _staleness(outcome)
        mean = _mean(histogram)
        above = sum(count for k, count in histogram.items() if k > 2 * n) / histogram.total()
        rows.append({"what": f"{n}-softsync, 30 workers", "staleness": mean, "above_2n": above, "overlap": None})
        ratios[f"staleness_over_n_{n}_softsync"] = mean / n
    large = Sim(workers=60, step_seconds=StepTime(0.2, spread=0.05), link="240gbit", model_bytes="300MB")
    architectures = {
        "base": Server(sync="async"),
        "adv": Server(sync="async", topology="tree"),
        "adv*": Server(sync="async", topology="tree", overlap=True),
    }
    for label, server in architectures.items():
        outcome = _simulated(server, large, steps // 10)
        meters = [meter for name, meter in outcome.meters.items() if name.startswith("worker")]
        share = statistics.fmean(meter.overlap for meter in meters)
        mean = _mean(_staleness(outcome))
        rows.append({"what": f"{label}, 60 workers, 300 MB", "staleness": mean, "above_2n": None, "overlap": share})
        ratios[f"overlap_{label}"] = share
    return {"bench": "rudra", "rows": rows, "ratios": ratios}


def _simulated(protocol: Options, sim: Sim, steps: int) -> Outcome:
    task = SyntheticTask(parameters=16, rate=0.01)
    return simulate(task, protocol, sim, Request(steps=steps, trace=False))


def _staleness(outcome: Outcome) -> Counter[int]:
    """How many gradients of each staleness were applied."""
    return sum((Counter(meter.staleness) for meter in outcome.meters.values()), Counter())


def _mean(histogram: Counter[int]) -> float:
    return sum(k * count for k, count in histogram.items()) / histogram.total()
