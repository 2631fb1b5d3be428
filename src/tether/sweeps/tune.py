"""`tether tune`: search for a protocol's alpha on a small part of the training data.

This is the grid search of the MPCA SGD paper (section 6.3): every value of alpha is one run on the same random part of
the data, with all other settings equal. Usually a broad corridor of values works about as well as the best, and the
search shows that corridor. Finished values are kept in tune.json, so a search that was stopped continues where it was,
and a search with further values runs only those.
"""

from __future__ import annotations

import json
import math
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from tether.analysis.report import check_writable
from tether.analysis.runs import Row, format_number
from tether.analysis.speedup import falls
from tether.analysis.tuning import Point, Tuning
from tether.core import settings as option_texts
from tether.errors import UsageError, missing_extra
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.protocols import Options, known
from tether.runtimes.base import Runtime
from tether.runtimes.sim.runtime import Sim
from tether.sweeps.sweep import (
    AS_GOOD_RATIO,
    EvaluatingObserver,
    SweepFile,
    SweepProgress,
    gradient_seconds,
    measure_run,
)
from tether.task import Task, check_is_task, check_task, primary_metric

#: how often the joint model of each run is evaluated
EVALUATIONS = 12
#: a schedule must reach its alpha within this many steps
STEPS_MAX = 100_000
#: how much worse than the best a value in the corridor may be, by default
TOLERANCE = round(AS_GOOD_RATIO - 1, 6)


class TuneFile(SweepFile):
    """tune.json."""

    kind = "search"
    kept = (*SweepFile.kept, "untrained")

    def __init__(self, path: Path | None, settings: Row) -> None:
        #: the metric of the untrained model
        self.untrained = 0.0
        super().__init__(path, settings)


def tunable() -> list[str]:
    """The protocols that have an alpha to search for."""
    return [name for name, cls in known().items() if _has_alpha(cls)]


def _has_alpha(cls: type[Options]) -> bool:
    parameter = option_texts.parameters(cls).get("alpha")
    if parameter is None:
        return False
    kind = option_texts.type_of(cls, parameter)
    return float in (kind, *typing.get_args(kind))


def check_tunable(cls: type[Options]) -> None:
    if not _has_alpha(cls):
        raise UsageError(f"protocol {cls.name!r} has no alpha to search for; these have: {', '.join(tunable())}")


def parse_alphas(text: str, points: int = 8) -> tuple[float, ...]:
    """Read '0.01,0.1' as a list, and '0.001..0.5' as a range of `points` values at equal ratios, of two digits each."""
    low, dots, high = text.partition("..")
    try:
        alphas = [float(part) for part in ((low, high) if dots else text.split(","))]
    except ValueError:
        raise UsageError(
            f"--alpha {text!r} is not understood; write a range like 0.001..0.5 or values like 0.01,0.05,0.1"
        ) from None
    if not all(0 < alpha < math.inf for alpha in alphas):
        raise UsageError(f"--alpha {text!r}: every value must be more than 0")
    if dots:
        if not alphas[0] < alphas[1]:
            raise UsageError(f"--alpha {text!r}: the range must go from a smaller to a larger value")
        if points < 2:
            raise UsageError(f"--points {points}: a range needs at least 2 points, its ends")
        between = np.geomspace(alphas[0], alphas[1], points)[1:-1]
        rounded = (float(f"{alpha:.2g}") for alpha in between)
        alphas += [alpha for alpha in rounded if alphas[0] < alpha < alphas[1]]
    elif len(set(alphas)) < 2:
        raise UsageError(f"--alpha {text!r}: a search needs at least two values")
    return tuple(sorted(set(alphas)))


def reduced(task: Task, share: float, seed: int, data: Any = None) -> Task:
    """The task with a random share of its training data; all else is the same, also the data it evaluates on.

    The result is an instance of a subclass of the task's class and shares its attributes, so only the data differ.
    """

    @lru_cache(maxsize=1)
    def part() -> Any:
        whole: Any = task.train_data() if data is None else data
        chosen = np.random.default_rng((seed, len(whole))).permutation(len(whole))
        chosen = np.sort(chosen[: max(1, round(share * len(whole)))])
        if type(whole) is TensorDataset:
            return TensorDataset(*(tensor[chosen] for tensor in whole.tensors))
        return Subset(whole, chosen.tolist())

    kind = type(task)
    members = {
        "__module__": kind.__module__,
        "train_data": lambda self: part(),
        "evaluate": lambda self, model: task.evaluate(model),  # it may use the training data too
        "__reduce_ex__": lambda self, version: (reduced, (task, share, seed)),
    }
    result: Task = object.__new__(type(kind.__name__, (kind,), members))
    result.__dict__ = task.__dict__
    return result


def tune(
    task: Task,
    protocol: Options,
    on: Runtime | None = None,
    *,
    alphas: Sequence[float],
    share: float = 0.1,
    epochs: float | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    to: Path | str | None = None,
    task_spec: Row | None = None,
    console: Console | None = None,
) -> Tuning:
    """Run a task with every alpha on a share of its data.

    protocol: its other options hold for all runs.
    on: where the runs take place, `tether.Sim()` by default.
    epochs: passes over the share; by default the task's own number, or more if a schedule of alpha needs them.
    tolerance: how much worse than the best a value in the corridor may be, as a share of the best.
    to: a folder for tune.json and tune.png; values that are finished there are not run again.
    task_spec: identifies the task among others of its name.
    """
    check_is_task(task)
    check_tunable(type(protocol))
    if not 0 < share <= 1:
        raise UsageError(f"share must be more than 0 and at most 1, not {share}")
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"tolerance must be at least 0, not {tolerance}")
    if not alphas:
        raise UsageError("a search needs some values of alpha")
    values: list[Row] = [{"alpha": alpha} for alpha in sorted(set(alphas), reverse=True)]
    options = {value["alpha"]: replace(protocol, **value) for value in values}  # raises for bad values
    options = dict(sorted(options.items()))
    if to is not None:  # now, so that neither fails after hours of training
        check_writable(Path(to))
        alpha_png = _import_alpha_png()
    on = on if on is not None else Sim()
    data = task.train_data()
    samples_of_all = check_task(task, data, on.workers)
    if isinstance(data, DataLoader | IterableDataset):
        raise UsageError(
            f"train_data() of task {type(task).__name__} returned {type(data).__name__}, of which no part can be "
            "chosen: tune a task that returns a map-style Dataset"
        )
    part = reduced(task, share, seed, data)
    samples = check_task(part, part.train_data(), 1)
    _check_samples(samples, samples_of_all, on.workers, task.batch_size)
    epochs = _choose_epochs(task, epochs, options.values(), samples / (on.workers * task.batch_size))
    never = sys.float_info.max
    request = Request(epochs, seed=seed, evaluate_every=epochs / EVALUATIONS, checkpoint_seconds=never, trace=False)

    described = {"name": protocol.name, **asdict(protocol), "alpha": "searched"}
    settings = {
        "task": {"name": task.name, "batch_size": task.batch_size, **(task_spec or {})},
        "protocol": described,
        "on": on.name,
        **(asdict(on) if is_dataclass(on) and not isinstance(on, type) else {"workers": on.workers, **on.describe()}),
        "epochs": epochs,
        "share": share,
        "seed": seed,
    }
    folder = Path(to) if to is not None else None
    file = TuneFile(folder and folder / "tune.json", json.loads(json.dumps(settings, default=str)))
    todo = {alpha: chosen for alpha, chosen in options.items() if _name(alpha) not in file.cells}
    if todo:
        progress = SweepProgress(len(options), len(options) - len(todo), console)
        _run_points(part, on, request, todo, file, progress)

    points = [Point(alpha, **file.cells[_name(alpha)]) for alpha in options]
    found = Tuning(
        task.name,
        protocol,
        file.metric,
        _falling(file),
        tolerance,
        on.virtual,
        on.workers,
        samples,
        samples_of_all,
        points,
    )
    if found.best is not None:
        found = replace(found, protocol=options[found.best.alpha])
    if folder is not None:
        (folder / "tune.png").write_bytes(alpha_png(found))
    return found


def _run_points(
    task: Task, on: Runtime, request: Request, todo: dict[float, Options], file: TuneFile, progress: SweepProgress
) -> None:
    with progress:
        progress.begin("trying the task")
        plan = RunPlan.make(task, next(iter(todo.values())), on, request, None)
        gradient_seconds(plan)  # raises an error of the task's loss before the first run
        untrained = EvaluatingObserver(plan).measure()
        file.metric = file.metric or primary_metric(untrained)
        file.untrained = untrained[file.metric]
        progress.work = {_name(alpha): 1.0 for alpha in todo}
        for alpha, options in todo.items():
            name = _name(alpha)
            progress.begin(f"{name}{_best_so_far(file)}", name)
            plan = RunPlan.make(task, options, on, request, None)
            observer = EvaluatingObserver(plan, progress.update)
            row = measure_run(plan, on, observer, file.metric)
            curve = [[time, metrics[file.metric]] for time, _, metrics in observer.evaluations]
            file.cells[name] = {
                "value": row["error"],
                **{key: row[key] for key in ("seconds", "steps", "failed")},
                "curve": [[time, value] for time, value in curve if math.isfinite(value)],
            }
            file.write()
            result = f"diverged ({row['failed']})" if row["failed"] else f"{file.metric} {format_number(row['error'])}"
            progress.finish(name, result + _best_so_far(file))


def _name(alpha: float) -> str:
    return f"alpha={alpha}"


def _falling(file: TuneFile) -> bool:
    curves = [[file.untrained, cell["value"]] for cell in file.cells.values() if cell["value"] is not None]
    return falls(file.metric, curves)


def _best_so_far(file: TuneFile) -> str:
    values = {name: cell["value"] for name, cell in file.cells.items() if cell["value"] is not None}
    if not values:
        return ""
    name = (min if _falling(file) else max)(values, key=lambda name: values[name])
    return f"; best {format_number(values[name])} with {name}"


def _check_samples(samples: int, of_all: int, workers: int, batch_size: int) -> None:
    """Refuse a share that is smaller than one step of all workers."""
    step = workers * batch_size
    if samples >= step:
        return
    remedy = "use fewer workers or smaller mini-batches"
    if step <= of_all:
        remedy = f"give a share of at least {math.ceil(100 * step / of_all) / 100:g}, or {remedy}"
    raise UsageError(
        f"{samples} of {of_all} samples are too few: {workers} workers with mini-batches of {batch_size} take {step} "
        f"in every step; {remedy}"
    )


def _choose_epochs(task: Task, epochs: float | None, options: Iterable[Options], steps_per_epoch: float) -> float:
    """Enough epochs for a protocol with a schedule to hold its alpha for half of the steps; fewer are refused."""
    steps = math.ceil((task.epochs if epochs is None else epochs) * steps_per_epoch)
    reached = max(_step_of_alpha(each, steps) for each in options)
    least = math.ceil(2 * reached / steps_per_epoch)
    if epochs is None:
        return max(task.epochs, least)
    if epochs < least:
        raise UsageError(
            f"the protocol holds its alpha from step {reached} on, and these runs have "
            f"{steps} steps: they would say little about it. Give {least} epochs or a "
            "larger share, or shorten the protocol's schedule, such as --set alpha_decay_steps=10"
        )
    return epochs


def _step_of_alpha(options: Options, steps: int) -> int:
    """The first step, in a run of that many, at which a protocol's schedule reaches alpha; 0 without a schedule."""
    alpha_at: Callable[[int, int, float], float] | None = getattr(options, "alpha_at", None)
    if alpha_at is None:
        return 0
    alpha: float = vars(options)["alpha"]
    return next((step for step in range(STEPS_MAX) if alpha_at(step, steps, 1.0) == alpha), STEPS_MAX)


def _import_alpha_png() -> Callable[[Tuning], bytes]:
    try:
        from tether.analysis.sweep_plots import alpha_png
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    return alpha_png
