"""What studies, searches and benchmarks share: runs that are cells of a grid, a file of those finished, the display."""

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

from tether.errors import Diverged, UsageError
from tether.learner import build_model, evaluate
from tether.machine import Evaluate
from tether.plan import RunPlan
from tether.runtimes.base import Runtime
from tether.swarm import Nobody
from tether.trace import Meter
from tether.vector import Vector

#: a cell counts as good as another up to this many times its error
AS_GOOD = 1.1
#: the share of a run, at its end, whose evaluations are averaged
SETTLED_SHARE = 0.25

Row = dict[str, Any]
#: what a benchmark has found: its rows, and the ratios that count
Report = dict[str, Any]


class CellFile:
    """A file of the settings and the cells that are finished; complete after every cell. Without a path, no file."""

    what: ClassVar[str]
    #: what is kept besides the settings
    names: ClassVar[tuple[str, ...]] = ("metric", "cells")

    def __init__(self, path: Path | None, settings: Row) -> None:
        self.path = path
        self.settings = settings
        self.metric = ""
        self.cells: dict[str, Row] = {}
        if path is None or not path.exists():
            return
        try:
            kept = json.loads(path.read_text("utf-8"))
            before = dict(kept["settings"])
            vars(self).update({name: kept[name] for name in self.names})
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path} is no {self.what} of this version: give another folder with --to") from None
        names = sorted(name for name in before.keys() | settings if before.get(name) != settings.get(name))
        if names:
            differ = ", ".join(f"{name} was {before.get(name)!r}, now {settings.get(name)!r}" for name in names)
            raise UsageError(f"{path} holds a {self.what} with other settings: {differ}. Give another folder with --to")

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        kept = {name: getattr(self, name) for name in ("settings", *self.names)}
        beside.write_text(json.dumps(kept, indent=1), "utf-8")
        os.replace(beside, self.path)


class Watcher(Nobody):
    """Of a run, its evaluations and how far it is."""

    def __init__(self, plan: RunPlan, fraction: Callable[[float], None] = lambda fraction: None) -> None:
        self._task, self._fraction, self._steps = plan.task, fraction, plan.steps
        self._model = build_model(plan.task, plan.seed)
        self._vector = Vector(self._model)
        #: time, step and metrics of each
        self.evaluations: list[tuple[float, int, dict[str, float]]] = []

    def meter(self, meter: Meter, now: float) -> None:
        if meter.node == "worker-0":
            self._fraction(min(1.0, meter.steps / self._steps))

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        self._vector.weights.copy_(weights)
        self.evaluations.append((now, effect.step, self.measure()))

    def observed(self) -> Sequence[dict[str, float]]:
        return [metrics for _, _, metrics in self.evaluations]

    def measure(self) -> dict[str, float]:
        """What the task says of its model."""
        metrics = evaluate(self._task, self._model)
        if not metrics:
            raise UsageError(
                f"evaluate() of task {self._task.name} returns no metrics: runs are compared by one, such as error"
            )
        return metrics

    def settled(self, metric: str) -> float:
        """The metric at the end: its mean over the last part of the run, since one evaluation is much by chance."""
        last = self.evaluations[-1][1]
        return statistics.fmean(
            metrics[metric] for _, step, metrics in self.evaluations if step > (1 - SETTLED_SHARE) * last
        )


def gradient_seconds(plan: RunPlan, seconds: float = 0.0) -> float:
    """The median time of a gradient, on one thread as in the simulator; raises what is wrong with the task's loss."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        replica = plan.build(next(node for node in plan.nodes if node.computes))[1]
        replica.compute("step", False)  # the first one warms up
        taken: list[float] = []
        while len(taken) < 3 or sum(taken) < seconds:
            begun = time.perf_counter()
            replica.compute("step", False)
            taken.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(taken)


def run_cell(plan: RunPlan, on: Runtime, watcher: Watcher, metric: str) -> Row:
    """One run; that it diverges is a result too, any other error ends it all."""
    result: Row = {"seconds": None, "error": None, "staleness": None, "steps": plan.steps, "failed": None}
    try:
        outcome = on.execute(plan, watcher)
    except Diverged as failure:
        return {**result, "failed": str(failure)}
    counts = [(k, n) for meter in outcome.meters.values() for k, n in meter.staleness.items()]
    error = watcher.settled(metric)
    return {
        **result,
        "seconds": outcome.seconds,
        "error": error if math.isfinite(error) else None,
        "staleness": sum(k * n for k, n in counts) / max(1, sum(n for _, n in counts)),
        "failed": None if math.isfinite(error) else f"{metric} became {error}",
    }


class Show:
    """Progress over all cells: a bar in a terminal, else a line for each cell."""

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
        #: what each cell costs, against the others
        self.work: dict[Any, float] = {}

    def __enter__(self) -> None:
        self._shown.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._shown.__exit__(*exception)

    def now(self, what: str, cell: Hashable | None = None) -> None:
        if cell is not None:
            self._begun = self._begun or time.monotonic()
            self._share = self.work[cell] / sum(self.work.values())
        self._bar.update(self._line, description=f"{self._finished}/{self._total}  {what}", total=1.0 if cell else None)

    def fraction(self, fraction: float) -> None:
        self._bar.update(self._line, completed=self._before + fraction * self._share)

    def done(self, cell: Hashable, text: str) -> None:
        self._finished += 1
        self._before += self._share
        self.fraction(0.0)
        if not self._console.is_interactive:
            left = (time.monotonic() - self._begun) * (1 - self._before) / self._before
            line = f"{self._finished}/{self._total}  {cell}: {text}; about {left:.0f} s left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
