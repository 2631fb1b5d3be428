"""Every protocol with its defaults over networks, numbers of workers and tasks: time to a target, error at the end."""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tether.bench.common import NEVER, Report, Seeds, counts, in_parallel, names
from tether.core.units import bytes_per_second
from tether.errors import unknown
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.protocols import Averaging, Elastic, Grid, Mpca, Options, Tide
from tether.runtimes.sim.costs import StepTime
from tether.runtimes.sim.runtime import Sim
from tether.sweeps.sweep import EvaluatingObserver
from tether.task import Task
from tether.tasks.chars import Chars
from tether.tasks.cifar import Cifar
from tether.tasks.fashion import Fashion

#: each with a small mini-batch, where workers differ by much noise; the metric is the error, of chars the loss
TASKS: dict[str, Callable[[Path | None], Task]] = {
    "fashion": lambda data: Fashion(data, batch_size=16),
    "cifar": lambda data: Cifar(data, batch_size=16),
    "chars": lambda data: Chars(data, batch_size=8),
}
PROTOCOLS: dict[str, Options] = {
    "averaging": Averaging(),
    "diloco": Averaging(outer="nesterov"),
    "elastic": Elastic(),
    "grid": Grid(),
    "mpca": Mpca(),
    "tide": Tide(),
}
#: ResNet-110, the smallest workload of the MPCA SGD paper
STEP_SECONDS, MODEL_BYTES = 0.095, "7MiB"
#: a metric counts as reached by the mean of this many evaluations, of which an epoch has `EVALUATIONS`
MEAN_OF, EVALUATIONS = 3, 5


def frontier(
    data: Annotated[
        Path | None,
        typer.Option(help="The folder with Fashion-MNIST, the CIFAR-10 subset and tinyshakespeare.txt; always needed."),
    ] = None,
    task: Annotated[Sequence[str], names("The tasks to train. fashion alone is the fastest.", "fashion,chars")] = (
        "fashion",
        "cifar",
        "chars",
    ),
    link: Annotated[Sequence[str], names("The networks. One is enough for a first look.", "100mbit,1gbit")] = (
        "10mbit",
        "100mbit",
        "1gbit",
        "10gbit",
    ),
    workers: Annotated[Sequence[int], counts("Numbers of workers.")] = (2, 4, 8, 16, 32),
    epochs: Annotated[float, typer.Option(help="The length of a run. Longer ones reach lower errors.")] = 3.0,
    seeds: Seeds = 1,
    picture: Annotated[Path | None, typer.Option(help="Also draw the times to the targets, to this PNG file.")] = None,
) -> Report:
    """Time to a target and error at equal samples, all protocols with their defaults, in the simulator.

    Steps and bytes cost as much as those of ResNet-110. The target of a row is the best metric that all protocols
    reach, so that each has a time; the metric of a moment is the mean of three evaluations.
    """
    for name in task:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
        TASKS[name](data)  # raises now if the files are missing
    for speed in link:
        bytes_per_second(speed, "--link")
    settings = [(name, speed, count) for name in task for speed in link for count in sorted(workers)]
    cells = [
        Cell(*setting, label, epochs, seed, data)
        for setting in settings
        for seed in range(seeds)
        for label in PROTOCOLS
    ]
    curves: dict[tuple[str, str, int, int], dict[str, Curve]] = defaultdict(dict)
    for done, (cell, curve) in enumerate(in_parallel(train, cells), start=1):
        curves[cell.task, cell.link, cell.workers, cell.seed][cell.label] = curve
        what = f"{cell.task}, {cell.link}, {cell.workers} workers, {cell.label}, seed {cell.seed}"
        print(f"{done}/{len(cells)}  {what}: {curve[-1][1]:.4g} at {curve[-1][0]:.0f} s", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    slower: dict[str, list[float]] = defaultdict(list)
    for setting in settings:
        found = [compare(curves[*setting, seed]) for seed in range(seeds)]
        times = {label: statistics.fmean(times[label] for _, times, _ in found) for label in PROTOCOLS}
        ends = {label: statistics.fmean(ends[label] for _, _, ends in found) for label in PROTOCOLS}
        place = dict(zip(("task", "link", "workers"), setting, strict=True))
        target = statistics.fmean(target for target, _, _ in found)
        rows.append({**place, "what": f"seconds to {target:.4g}", **times})
        rows.append({**place, "what": "metric at the end", **ends})
        for label, seconds in times.items():
            slower[label].append(seconds / times["tide"])
    ratios = {f"seconds of {label} over tide's": statistics.geometric_mean(ratio) for label, ratio in slower.items()}
    if picture is not None:
        from tether.analysis.sweep_plots import frontier_png

        picture.write_bytes(frontier_png([row for row in rows if row["what"] != "metric at the end"], list(PROTOCOLS)))
    return {"bench": "frontier", "epochs": epochs, "seeds": seeds, "rows": rows, "ratios": ratios}


#: the metric over time, in virtual seconds
Curve = list[tuple[float, float]]


def compare(curves: dict[str, Curve]) -> tuple[float, dict[str, float], dict[str, float]]:
    """The target of these runs, the seconds that each takes to it, and the metric of each at the end."""
    smooth = {label: _smooth(curve) for label, curve in curves.items()}
    target = max(min(value for _, value in curve) for curve in smooth.values())
    times = {
        label: next((seconds for seconds, value in curve if value <= target), math.inf)
        for label, curve in smooth.items()
    }
    return target, times, {label: curve[-1][1] for label, curve in smooth.items()}


def _smooth(curve: Curve) -> Curve:
    """The means of successive evaluations; a run that exchanges rarely may have only a few."""
    count = min(MEAN_OF, len(curve))
    return [
        (curve[last][0], statistics.fmean(value for _, value in curve[last - count + 1 : last + 1]))
        for last in range(count - 1, len(curve))
    ]


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    link: str
    workers: int
    label: str
    epochs: float
    seed: int
    data: Path | None


def train(cell: Cell) -> Curve:
    """The metric of the joint model over time."""
    torch.set_num_threads(1)
    step_time = StepTime(STEP_SECONDS, spread=0.05)
    sim = Sim(workers=cell.workers, step_seconds=step_time, link=cell.link, model_bytes=MODEL_BYTES)
    request = Request(
        epochs=cell.epochs, seed=cell.seed, evaluate_every=1 / EVALUATIONS, checkpoint_seconds=NEVER, trace=False
    )
    plan = RunPlan.make(TASKS[cell.task](cell.data), PROTOCOLS[cell.label], sim, request, None)
    watcher = EvaluatingObserver(plan)
    sim.execute(plan, watcher)
    metric = "loss" if cell.task == "chars" else "error"
    return [(seconds, metrics[metric]) for seconds, _, metrics in watcher.evaluations]
