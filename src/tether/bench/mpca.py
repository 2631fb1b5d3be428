"""MPCA SGD without each of its parts, after figures 5 to 8, 10a and 10c of its paper."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tether.analysis.runs import load_run
from tether.bench.common import FashionData, Report, Seeds, Target, run_quietly
from tether.bench.workloads import LINK, WORKLOADS, Trial, reach_all
from tether.core.units import bytes_per_second
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Mpca
from tether.runtimes.sim.costs import StepTime
from tether.runtimes.sim.runtime import Sim

WORKLOAD = "resnet-152"
WORKERS = 8


def mpca(
    data: FashionData = None,
    seeds: Seeds = 3,
    target: Target = 0.12,
    steps: Annotated[
        int,
        typer.Option(min=30, help="Steps of each worker where phases are compared. Use fewer for a first look."),
    ] = 300,
) -> Report:
    """Time to a target error with and without extrapolation and weights, and how well 1 to 3 phases use the hub's link.

    All of it runs in the simulator: extrapolation and weights (figures 10a and 10c of the MPCA SGD paper) on its
    ResNet-152, phases (figures 5 to 8) on all of its workloads.
    """
    half_speed = tuple((f"worker-{index}", 2.0) for index in range(3))
    variants: dict[str, tuple[Mpca, tuple[tuple[str, float], ...]]] = {
        "gamma 0.7": (Mpca(), ()),
        "gamma 0": (Mpca(gamma=0.0), ()),
        "3 of 8 at half speed, weighted": (Mpca(), half_speed),
        "3 of 8 at half speed, unweighted": (Mpca(weighted=False), half_speed),
    }
    trials = [
        Trial(WORKLOAD, label, options, seed, WORKERS, target, data, slow=slow)
        for seed in range(seeds)
        for label, (options, slow) in variants.items()
    ]
    outcomes = reach_all(trials)
    seconds = {label: outcomes[WORKLOAD, label, False]["seconds"] for label in variants}
    rows = [{"what": label, "seconds": seconds[label], "cycle_seconds": None, "hub_link": None} for label in variants]
    rows += [_phases(name, phases, steps) for name in WORKLOADS for phases in (1, 2, 3)]
    ratios = {
        "without extrapolation over with": seconds["gamma 0"] / seconds["gamma 0.7"],
        "unweighted over weighted": seconds["3 of 8 at half speed, unweighted"]
        / seconds["3 of 8 at half speed, weighted"],
    }
    return {"bench": "mpca", "workload": WORKLOAD, "target": target, "seeds": seeds, "rows": rows, "ratios": ratios}


def _phases(name: str, phases: Literal[1, 2, 3], steps: int) -> dict[str, Any]:
    """The duration of a shard's cycle, and the share of the hub's link in use; this needs no real learning."""
    workload = WORKLOADS[name]
    sim = Sim(
        workers=WORKERS,
        step_seconds=StepTime(workload.step_seconds, spread=0.05),
        link=LINK,
        model_bytes=workload.model_bytes,
    )
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "run"
        figures = run_quietly(SyntheticTask(), Mpca(phases=phases), sim, steps=steps, run_dir=place, evaluate_every=1.0)
        kept = load_run(place)
    sent = kept.nodes["hub"]["bytes_sent"] / bytes_per_second(LINK) / figures["seconds"]
    cycle = statistics.median(row["cycle_seconds"] for row in kept.records)
    return {"what": f"{name}, {phases} phases", "seconds": None, "cycle_seconds": cycle, "hub_link": sent}
