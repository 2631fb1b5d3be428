"""What studies, searches and benchmarks share: measured runs, the file of the finished ones, and the display."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from tether.analysis.runs import Row
from tether.core.effects import Evaluate
from tether.core.trace import Meter
from tether.core.vector import Vector
from tether.errors import Diverged, UsageError
from tether.execution.plan import RunPlan
from tether.learner.learner import build_model, evaluate
from tether.runtimes.base import NullObserver, Runtime

#: a run is as good as another if its error is at most this many times as large
AS_GOOD_RATIO = 1.1
#: the evaluations in this share of a run, at its end, are averaged
TAIL_SHARE = 0.25


class SweepFile:
    """The settings of a sweep and the cells that are finished, in a JSON file that is complete after every cell.

    Without a path, nothing is written.
    """

    #: the word for such a sweep in messages
    kind: ClassVar[str]
    #: the attributes that the file holds besides the settings
    kept: ClassVar[tuple[str, ...]] = ("metric", "cells")

    def __init__(self, path: Path | None, settings: Row) -> None:
        self.path = path
        self.settings = settings
        self.metric = ""
        self.cells: dict[str, Row] = {}
        if path is None or not path.exists():
            return
        try:
            content = json.loads(path.read_text("utf-8"))
            before = dict(content["settings"])
            vars(self).update({name: content[name] for name in self.kept})
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path} is not a {self.kind} of this version: give another folder with --to") from None
        names = sorted(name for name in before.keys() | settings if before.get(name) != settings.get(name))
        if names:
            differ = ", ".join(f"{name} was {before.get(name)!r}, now {settings.get(name)!r}" for name in names)
            raise UsageError(f"{path} holds a {self.kind} with other settings: {differ}. Give another folder with --to")

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".new")
        content = {name: getattr(self, name) for name in ("settings", *self.kept)}
        partial.write_text(json.dumps(content, indent=1), "utf-8")
        os.replace(partial, self.path)


class EvaluatingObserver(NullObserver):
    """Evaluates the joint model whenever the run asks for it, keeps the metrics, and reports how far the run is."""

    def __init__(self, plan: RunPlan, on_fraction: Callable[[float], None] = lambda fraction: None) -> None:
        self._task, self._on_fraction, self._steps = plan.task, on_fraction, plan.steps
        self._model = build_model(plan.task, plan.seed)
        self._vector = Vector(self._model)
        #: the time, step and metrics of each
        self.evaluations: list[tuple[float, int, dict[str, float]]] = []

    def meter(self, meter: Meter, now: float) -> None:
        if meter.node == "worker-0":
            self._on_fraction(min(1.0, meter.steps / self._steps))

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        self._vector.weights.copy_(weights)
        self.evaluations.append((now, effect.step, self.measure()))

    def observed(self) -> Sequence[dict[str, float]]:
        return [metrics for _, _, metrics in self.evaluations]

    def measure(self) -> dict[str, float]:
        """The task's metrics for the model as it is."""
        metrics = evaluate(self._task, self._model)
        if not metrics:
            raise UsageError(
                f"evaluate() of task {self._task.name} returns no metrics: runs are compared by one, such as error"
            )
        return metrics

    def tail_mean(self, metric: str) -> float:
        """The metric's mean over the last quarter of the run, since a single evaluation is noisy."""
        last = self.evaluations[-1][1]
        return statistics.fmean(
            metrics[metric] for _, step, metrics in self.evaluations if step > (1 - TAIL_SHARE) * last
        )


def gradient_seconds(plan: RunPlan, seconds: float = 0.0) -> float:
    """The median time of a gradient, on one thread as in the simulator. Raises the errors of the task's loss."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        replica = plan.build(next(node for node in plan.nodes if node.computes))[1]
        replica.compute("none", False)  # the first one warms up
        taken: list[float] = []
        while len(taken) < 3 or sum(taken) < seconds:
            begun = time.perf_counter()
            replica.compute("none", False)
            taken.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(taken)


def measure_run(plan: RunPlan, on: Runtime, observer: EvaluatingObserver, metric: str) -> Row:
    """Run a plan and return its figures. Divergence is a result, with the reason in `failed`; other errors raise."""
    result: Row = {"seconds": None, "error": None, "staleness": None, "steps": plan.steps, "failed": None}
    try:
        outcome = on.execute(plan, observer)
    except Diverged as failure:
        return {**result, "failed": str(failure)}
    counts = [(k, n) for meter in outcome.meters.values() for k, n in meter.staleness.items()]
    error = observer.tail_mean(metric)
    return {
        **result,
        "seconds": outcome.seconds,
        "error": error if math.isfinite(error) else None,
        "staleness": sum(k * n for k, n in counts) / max(1, sum(n for _, n in counts)),
        "failed": None if math.isfinite(error) else f"{metric} became {error}",
    }


class SweepProgress:
    """The progress over all cells: a bar in a terminal, otherwise a line for each cell."""

    def __init__(self, total: int, finished: int, console: Console | None) -> None:
        console = console or Console(stderr=True, force_interactive=None if sys.stderr.isatty() else False)
        self._console, self._total, self._finished = console, total, finished
        columns = (
            BarColumn(30),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._bar = Progress(*columns, console=console, speed_estimate_period=300, redirect_stdout=False)
        self._line = self._bar.add_task("", total=None)
        self._shown: AbstractContextManager[Any] = self._bar if console.is_interactive else nullcontext()
        self._before = self._share = self._begun = 0.0
        #: the relative cost of each cell
        self.work: dict[Hashable, float] = {}

    def __enter__(self) -> None:
        self._shown.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._shown.__exit__(*exception)

    def begin(self, what: str, cell: Hashable | None = None) -> None:
        """Show what is being done: a cell, or a preparation."""
        if cell is not None:
            self._begun = self._begun or time.monotonic()
            self._share = self.work[cell] / sum(self.work.values())
        self._bar.update(self._line, description=f"{self._finished}/{self._total}  {what}", total=1.0 if cell else None)

    def update(self, fraction: float) -> None:
        """Show how much of the current cell is done."""
        self._bar.update(self._line, completed=self._before + fraction * self._share)

    def finish(self, cell: Hashable, result: str) -> None:
        """Count the current cell as finished, and print its result where no bar is shown."""
        self._finished += 1
        self._before += self._share
        self.update(0.0)
        if not self._console.is_interactive:
            left = (time.monotonic() - self._begun) * (1 - self._before) / self._before
            line = f"{self._finished}/{self._total}  {cell}: {result}; about {left:.0f} s left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
