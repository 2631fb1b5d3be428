"""`tether tune`: a protocol's alpha, searched on a small part of the training data.

The grid search of the MPCA SGD paper (section 6.3): every value of alpha is one run on the same random part of the
data, all else being equal. Usually a broad corridor of values works about as well as the best, and that is what the
search shows. The values that are finished are kept in tune.json, so a search that was stopped goes on where it was, and
one with further values runs only those.
"""

from __future__ import annotations

import json
import math
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.utils.data import Subset, TensorDataset

from tether import settings as option_texts
from tether.cells import AS_GOOD, CellFile, Row, Show, Watcher, figure, gradient_seconds, run_cell
from tether.errors import UsageError, missing_extra
from tether.plan import Request, RunPlan
from tether.protocols import Options, known
from tether.runtimes.base import Runtime
from tether.runtimes.sim import Sim
from tether.speedup import falls
from tether.task import Task, check_is_task, check_task, metric_of

#: how often the joint model of each run is evaluated
EVALUATIONS = 12
#: within so many steps a schedule must have come to its alpha
STEPS_MAX = 100_000
#: how much worse than the best a value in the corridor may be, unless said otherwise
TOLERANCE = round(AS_GOOD - 1, 6)


@dataclass(frozen=True)
class Point:
    """One value of alpha, and what came out with it."""

    alpha: float
    #: the metric at the end of the run; none if it diverged
    value: float | None
    seconds: float | None
    steps: int
    failed: str | None
    #: seconds and metric at each evaluation
    curve: list[list[float]]


@dataclass(frozen=True)
class Tuning:
    """What a search found; `points` are in the order of alpha."""

    task: str
    #: with the best alpha, if any run converged
    protocol: Options
    metric: str
    #: smaller values of the metric are better
    falling: bool
    tolerance: float
    virtual: bool
    workers: int
    samples: int
    samples_of_all: int
    points: list[Point]

    @property
    def best(self) -> Point | None:
        """The middle one if several are equal."""
        values = [point.value for point in self.points if point.value is not None]
        if not values:
            return None
        lowest = min(values) if self.falling else max(values)
        equal = [point for point in self.points if point.value == lowest]
        return equal[len(equal) // 2]

    @property
    def limit(self) -> float:
        """The worst value of the metric that is still in the corridor."""
        lowest = self.best.value if self.best and self.best.value is not None else math.nan
        return lowest + (1 if self.falling else -1) * self.tolerance * abs(lowest)

    @property
    def limit_text(self) -> str:
        return f"{100 * self.tolerance:g} % worse than the best"

    @property
    def corridor(self) -> list[Point]:
        """The neighbours of the best, as far as all of them are within the tolerance."""
        if self.best is None:
            return []
        at = self.points.index(self.best)
        first, last = at, at
        while first > 0 and self._within(self.points[first - 1]):
            first -= 1
        while last + 1 < len(self.points) and self._within(self.points[last + 1]):
            last += 1
        return self.points[first : last + 1]

    def _within(self, point: Point) -> bool:
        if point.value is None:
            return False
        return point.value <= self.limit if self.falling else point.value >= self.limit

    @property
    def percent(self) -> bool:
        return self.metric == "error"

    @property
    def recommendation(self) -> str:
        """What follows, in words."""
        best, corridor = self.best, self.corridor
        if best is None or best.value is None:
            return "No alpha converged: lower the learning rate."
        value = f"{100 * best.value:.2f} %" if self.percent else f"{best.value:.4g}"
        said = [f"Take alpha={best.alpha:g}: {self.metric} {value}."]
        if len(corridor) > 1:
            said.append(
                f"Corridor: {corridor[0].alpha:g} to {corridor[-1].alpha:g}, at most {self.limit_text} "
                f"({len(corridor)} of {len(self.points)} values)."
            )
        else:
            said.append(f"No neighbour is in the corridor: all are more than {self.limit_text}.")
        for end, word in ((self.points[0], "smallest"), (self.points[-1], "largest")):
            if best is end:
                said.append(f"The best is the {word} value that was tried: a {word[:-3]}er one may be better.")
            elif end in corridor:
                said.append(f"The corridor reaches the {word} value that was tried: it may be wider.")
        if best is self.points[-1]:
            said.append("In a short run the joint model hardly moves with a small alpha: compare with more epochs.")
        said.append(
            f"Each value is one run with one seed on {self.samples:,} of {self.samples_of_all:,} samples, "
            f"{best.steps:,} steps per worker: small differences may be chance."
        )
        return "\n".join(said)

    @property
    def figures(self) -> Row:
        """Everything, for JSON."""
        best, corridor = self.best, self.corridor
        return {
            "task": self.task,
            "protocol": self.protocol.name,
            "metric": self.metric,
            "workers": self.workers,
            "samples": self.samples,
            "samples_of_all": self.samples_of_all,
            "tolerance": self.tolerance,
            "alpha": best.alpha if best else None,
            "value": best.value if best else None,
            "corridor": [corridor[0].alpha, corridor[-1].alpha] if corridor else None,
            "at_edge": best in (self.points[0], self.points[-1]),
            "points": [asdict(point) for point in self.points],
            "recommendation": self.recommendation,
        }

    def table(self) -> Table:
        """The points, for a terminal."""
        title = f"{self.task}, {self.protocol.name}, {self.workers} workers{', simulated' if self.virtual else ''}"
        result = Table(box=SIMPLE_HEAD, title=title, title_style="bold", title_justify="left")
        for heading in ("alpha", self.metric, "worse by", "virtual s" if self.virtual else "seconds", ""):
            result.add_column(heading, justify="right" if heading else "left")
        best, corridor = self.best, self.corridor
        for point in self.points:
            value = "diverged" if point.value is None else figure(point.value)
            worse = "-"
            if point.value is not None and best and best.value:
                worse = f"{100 * abs(point.value / best.value - 1):.1f} %"
            mark = "best" if point is best else "corridor" if point in corridor else ""
            style = "bold" if point is best else None if point in corridor else "dim"
            result.add_row(f"{point.alpha:g}", value, worse, figure(point.seconds), mark, style=style)
        return result

    def png(self) -> bytes:
        """The picture: the metric over alpha, and over time for each alpha."""
        return _alpha_png()(self)


class TuneFile(CellFile):
    """tune.json."""

    what = "search"
    names = (*CellFile.names, "untrained")

    def __init__(self, path: Path | None, settings: Row) -> None:
        #: the metric of the model that nobody has trained
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
    """'0.01,0.1' as it is; '0.001..0.5' as so many values at equal ratios, of two digits between the ends."""
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
            raise UsageError(f"--points {points}: a range has at least its 2 ends")
        between = np.geomspace(alphas[0], alphas[1], points)[1:-1]
        rounded = (float(f"{alpha:.2g}") for alpha in between)
        alphas += [alpha for alpha in rounded if alphas[0] < alpha < alphas[1]]
    elif len(set(alphas)) < 2:
        raise UsageError(f"--alpha {text!r}: a search needs at least two values")
    return tuple(sorted(set(alphas)))


def reduced(task: Task, share: float, seed: int, data: Any = None) -> Task:
    """The task with a random share of its training data; everything else, and what it evaluates on, is the same.

    It is of the task's own kind and has its very attributes, so nothing can tell the two apart but by the data.
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
        "evaluate": lambda self, model: task.evaluate(model),  # which may use the training data too
        "__reduce_ex__": lambda self, version: (reduced, (task, share, seed)),
    }
    made: Task = object.__new__(type(kind.__name__, (kind,), members))
    made.__dict__ = task.__dict__
    return made


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
    on: where they run, `tether.Sim()` unless given.
    epochs: passes over the share; unless given the task's own number, or as many as a schedule of alpha needs.
    tolerance: how much worse than the best a value in the corridor may be, as a share of the best.
    to: a folder for tune.json and tune.png; the values that are finished there are not run again.
    task_spec: what tells the task from others of its name.
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
    options = {value["alpha"]: replace(protocol, **value) for value in values}  # refuses bad ones
    options = dict(sorted(options.items()))
    if to is not None:
        _alpha_png()  # now, and not after hours of training
    on = on if on is not None else Sim()
    data = task.train_data()
    samples_of_all = check_task(task, data, on.workers)
    part = reduced(task, share, seed, data)
    samples = check_task(part, part.train_data(), 1)
    _check_enough(samples, samples_of_all, on.workers, task.batch_size)
    epochs = _epochs(task, epochs, options.values(), samples / (on.workers * task.batch_size))
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
        _run_points(part, on, request, todo, file, Show(len(options), len(options) - len(todo), console))

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
        (folder / "tune.png").write_bytes(found.png())
    return found


def _run_points(
    task: Task, on: Runtime, request: Request, todo: dict[float, Options], file: TuneFile, show: Show
) -> None:
    with show:
        show.now("trying the task")
        plan = RunPlan.make(task, next(iter(todo.values())), on, request, None)
        gradient_seconds(plan)
        untrained = Watcher(plan).measure()
        file.metric = file.metric or metric_of(untrained)
        file.untrained = untrained[file.metric]
        show.work = {_name(alpha): 1.0 for alpha in todo}
        for alpha, options in todo.items():
            name = _name(alpha)
            show.now(f"{name}{_best_so_far(file)}", name)
            plan = RunPlan.make(task, options, on, request, None)
            watcher = Watcher(plan, show.fraction)
            row = run_cell(plan, on, watcher, file.metric)
            curve = [[time, metrics[file.metric]] for time, _, metrics in watcher.evaluations]
            file.cells[name] = {
                "value": row["error"],
                **{key: row[key] for key in ("seconds", "steps", "failed")},
                "curve": [[time, value] for time, value in curve if math.isfinite(value)],
            }
            file.write()
            told = f"diverged ({row['failed']})" if row["failed"] else f"{file.metric} {figure(row['error'])}"
            show.done(name, told + _best_so_far(file))


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
    return f"; best {figure(values[name])} with {name}"


def _check_enough(samples: int, of_all: int, workers: int, batch_size: int) -> None:
    """Refuse a share of which a step of all workers takes more than there is."""
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


def _epochs(task: Task, epochs: float | None, options: Iterable[Options], steps_per_epoch: float) -> float:
    """So many that a protocol with a schedule has its alpha for half the steps; fewer are refused."""
    steps = math.ceil((task.epochs if epochs is None else epochs) * steps_per_epoch)
    settled = max(_settled_at(each, steps) for each in options)
    least = math.ceil(2 * settled / steps_per_epoch)
    if epochs is None:
        return max(task.epochs, least)
    if epochs < least:
        raise UsageError(
            f"the protocol has its alpha from step {settled} on, and these runs have "
            f"{steps} steps: they would say little about it. Give {least} epochs or a "
            "larger share, or shorten the protocol's schedule, such as --set settle_steps=10"
        )
    return epochs


def _settled_at(options: Options, steps: int) -> int:
    """The step from which a protocol has its alpha, in a run of so many; 0 without a schedule."""
    alpha_at: Callable[[int, int, float], float] | None = getattr(options, "alpha_at", None)
    if alpha_at is None:
        return 0
    alpha: float = vars(options)["alpha"]
    return next((step for step in range(STEPS_MAX) if alpha_at(step, steps, 1.0) == alpha), STEPS_MAX)


def _alpha_png() -> Callable[[Tuning], bytes]:
    try:
        from tether.tradeoff import alpha_png
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    return alpha_png
