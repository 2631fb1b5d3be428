"""Errors at equal samples of all protocols with their defaults, by the duration of an exchange."""

from __future__ import annotations

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
from tether.tasks.cifar import Cifar
from tether.tasks.fashion import Fashion

TASKS: dict[str, Callable[[Path | None], Task]] = {"fashion": Fashion, "cifar": Cifar}
DEFAULTS: dict[str, Options] = {
    "averaging": Averaging(),
    "elastic": Elastic(),
    "mpca": Mpca(),
    "grid": Grid(),
    "tide": Tide(),
}
LINK = "1gbit"
STEP_SECONDS = 0.1


def cycles(
    data: Annotated[
        Path | None,
        typer.Option(help="The folder with the files of Fashion-MNIST and the CIFAR-10 subset; always needed."),
    ] = None,
    task: Annotated[Sequence[str], names("The tasks to train. fashion alone is faster.", "fashion,cifar")] = (
        "fashion",
        "cifar",
    ),
    workers: Annotated[Sequence[int], counts("Numbers of workers.")] = (3, 8),
    steps: Annotated[
        Sequence[int], counts("Lengths of runs, in steps of a worker. The longest take most of the time.")
    ] = (100, 400, 2000, 10000),
    cycle: Annotated[Sequence[int], counts("Durations of an exchange, in steps of a worker.")] = (1, 10, 50, 100),
    seeds: Seeds = 3,
) -> Report:
    """Errors at equal samples, all protocols with their defaults, where an exchange takes as long as 1 to 100 steps.

    All of it runs in the simulator: with slower exchanges the workers train longer on their own.
    """
    for name in task:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
        TASKS[name](data)  # raises now if the files are missing
    settings = [
        (name, count, length, duration)
        for name in task
        for count in sorted(workers)
        for length in sorted(steps)
        for duration in sorted(cycle)
    ]
    cells = [Cell(*setting, label, seed, data) for setting in settings for seed in range(seeds) for label in DEFAULTS]
    errors: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for done, (cell, error) in enumerate(in_parallel(end_error, cells), start=1):
        errors[cell.task, cell.workers, cell.steps, cell.cycle, cell.label].append(error)
        what = f"{cell.task}, {cell.workers} workers, {cell.steps} steps, cycle of {cell.cycle}, {cell.label}"
        print(f"{done}/{len(cells)}  {what}, seed {cell.seed}: {error:.2f} %", file=sys.stderr)
    means = {key: statistics.fmean(found) for key, found in errors.items()}
    rows: list[dict[str, Any]] = [
        {
            **dict(zip(("task", "workers", "steps", "cycle"), setting, strict=True)),
            **{label: means[*setting, label] for label in DEFAULTS},
        }
        for setting in settings
    ]
    ratios = {
        f"most points above averaging, {label}": max(row[label] - row["averaging"] for row in rows)
        for label in DEFAULTS
        if label != "averaging"
    }
    return {"bench": "cycles", "seeds": seeds, "rows": rows, "ratios": ratios}


@dataclass(frozen=True)
class Cell:
    """One run, on a link on which a cycle of mpca lasts a given number of steps."""

    task: str
    workers: int
    steps: int
    cycle: int
    label: str
    seed: int
    data: Path | None


def end_error(cell: Cell) -> float:
    """The error of the joint model at the end, in percent."""
    torch.set_num_threads(1)
    # the hub sends a broadcast down two chains, which keeps its link busy for twice the size of the model
    size = cell.cycle * STEP_SECONDS * bytes_per_second(LINK) / 2
    sim = Sim(
        workers=cell.workers,
        step_seconds=StepTime(STEP_SECONDS, spread=0.05),
        link=LINK,
        model_bytes=round(size),
    )
    request = Request(steps=cell.steps, seed=cell.seed, evaluate_every=NEVER, checkpoint_seconds=NEVER, trace=False)
    plan = RunPlan.make(TASKS[cell.task](cell.data), DEFAULTS[cell.label], sim, request, None)
    watcher = EvaluatingObserver(plan)
    sim.execute(plan, watcher)
    return 100 * watcher.evaluations[-1][2]["error"]
