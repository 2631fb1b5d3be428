"""`tether study`: error against time over mini-batch size mu, number of workers lambda and protocol, in the simulator.

These are the trade-off curves of the Rudra paper (section 5.2), which calls the workers learners, on the user's own
task. Every cell is one simulated run under a parameter server. Finished cells are kept in study.json, so a study that
was stopped continues where it was, and a study with longer lists of mu, lambda or protocols runs only the new cells.
Cells of about equal mu*lambda are compared as in table 2: the product is rounded to the nearest power of two, so that
4*30, 8*18 and 128*1 are in one group.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tether import tasks
from tether.analysis.report import check_writable
from tether.analysis.runs import Row, format_number
from tether.core import settings as option_texts
from tether.core import units
from tether.errors import UsageError, missing_extra
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.protocols import Server
from tether.runtimes.sim.runtime import Sim
from tether.sweeps.sweep import (
    AS_GOOD_RATIO,
    EvaluatingObserver,
    SweepFile,
    SweepProgress,
    gradient_seconds,
    measure_run,
)
from tether.task import Task, check_task, primary_metric

#: how long the gradients of each mini-batch size are timed
TIMING_SECONDS = 0.5
#: the simulator's own cost per gradient, roughly; only the display of the time left depends on it
SIMULATING_SECONDS = 5e-4
#: options of the protocol that a study sets itself, and the flags that decide them
OWN_OPTIONS = {"sync": "--protocol", "n": "--protocol", "reference_batch": "--reference-batch"}


@dataclass(frozen=True)
class Settings:
    """All that decides the result of a cell besides mu, lambda and the protocol; equal for all cells of a study."""

    task: str
    data: str | None = None
    task_settings: dict[str, str] = field(default_factory=dict)
    server_settings: dict[str, str] = field(default_factory=dict)
    #: by default the task's own
    epochs: float = 0
    reference_batch: int = 0
    seed: int = 0
    link: str = "1gbit"
    latency: str = "0.2ms"
    #: by default measured on this machine
    step_seconds: str | None = None
    model_bytes: str | None = None

    @staticmethod
    def make(task: str, *, epochs: float | None = None, reference_batch: int | None = None, **others: Any) -> Settings:
        """Settings with the task's defaults; refuses values with which no cell could run."""
        settings = Settings(task, **others)
        usual = tasks.load(task, data=settings.data_path, settings=settings.task_settings)
        settings = replace(
            settings,
            epochs=usual.epochs if epochs is None else epochs,
            reference_batch=usual.batch_size if reference_batch is None else reference_batch,
        )
        for name in settings.server_settings.keys() & OWN_OPTIONS.keys():
            raise UsageError(f"--set {name}: a study sets {name} itself; use {OWN_OPTIONS[name]}")
        settings.request, settings.server(0), settings.sim(1, 1.0)  # each refuses bad values
        return settings

    @property
    def data_path(self) -> Path | None:
        return Path(self.data) if self.data else None

    @property
    def request(self) -> Request:
        """The request for a run that is evaluated only at its end and never saved."""
        never = sys.float_info.max
        return Request(self.epochs, seed=self.seed, evaluate_every=1e9, checkpoint_seconds=never, trace=False)

    def server(self, n: int) -> Server:
        """The protocol: n-softsync, or hardsync if n is 0.

        The learning rate is scaled as in the paper: by sqrt(lambda*mu/B) in hardsync, by 1/n in softsync.
        """
        chosen = option_texts.arguments(Server, "protocol server", self.server_settings)
        how: Row = {"sync": "soft", "n": n} if n else {"sync": "hard", "reference_batch": self.reference_batch}
        return Server(**{"rate": "1/n" if n else "sqrt", **chosen, **how})

    def sim(self, workers: int, step_seconds: float) -> Sim:
        return Sim(workers, self.link, self.latency, step_seconds, self.model_bytes)

    def load(self, mu: int) -> Task:
        """The task with mini-batches of mu."""
        texts = dict(self.task_settings)
        if "batch_size" in option_texts.parameters(tasks.find(self.task)):
            texts["batch_size"] = str(mu)
        task = tasks.load(self.task, data=self.data_path, settings=texts)
        task.batch_size = mu
        return task


@dataclass(frozen=True)
class Cell:
    """One run. With one worker all protocols are the same, and lambda-soft is N-soft with N = lambda."""

    n: int  # 0 is hardsync
    mu: int
    workers: int

    @staticmethod
    def of(protocol: str, mu: int, workers: int) -> Cell:
        if protocol == "hard" or workers == 1:
            return Cell(0, mu, workers)
        return Cell(workers if protocol == "lambda-soft" else int(protocol.partition("-")[0]), mu, workers)

    def __str__(self) -> str:
        return f"{f'{self.n}-soft' if self.n else 'hard'} mu={self.mu} lambda={self.workers}"


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """Read '4,8,16' as numbers, and sort them."""
    try:
        counts = {int(part) for part in text.split(",")}
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not understood; write whole numbers like {flag} 4,8,16") from None
    if min(counts) < 1:
        raise UsageError(f"{flag} {text!r}: every number must be at least 1")
    return tuple(sorted(counts))


def parse_protocols(text: str) -> tuple[str, ...]:
    """Read 'hard,1-soft,lambda-soft' as names, without repetitions."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        if word not in ("hard", "lambda-soft") and not re.fullmatch(r"[1-9][0-9]*-soft", word):
            raise UsageError(
                f"unknown protocol {word!r} of a study; known: hard, 1-soft, N-soft with any number N, lambda-soft"
            )
    return words


def parse_step_seconds(text: str) -> Callable[[int], float]:
    """The seconds of a step by mu: '0.05' for every mu, or points such as '4=0.01,128=0.05'.

    Between two points the time is linear, outside of them it is proportional to mu.
    """
    if "=" not in text:
        seconds = units.seconds(text, "--step-seconds")
        return lambda mu: seconds
    points: dict[int, float] = {}
    for pair in text.split(","):
        mu, equals, value = pair.partition("=")
        if not equals or not mu.strip().isdecimal() or int(mu) < 1 or int(mu) in points:
            raise UsageError(f"--step-seconds {text!r} is not understood; write 0.05, or pairs like 4=0.01,128=0.05")
        points[int(mu)] = units.seconds(value, "--step-seconds")
    known = sorted(points)

    def step_seconds(mu: int) -> float:
        nearest = min(max(mu, known[0]), known[-1])
        return float(np.interp(nearest, known, [points[point] for point in known])) * mu / nearest

    return step_seconds


def study(
    settings: Settings,
    mu: Sequence[int],
    workers: Sequence[int],
    protocols: Sequence[str],
    to: Path,
    console: Console | None = None,
) -> Row:
    """Run the cells that are not in to/study.json yet, draw to/study.png, and return the rows and the findings."""
    try:
        from tether.analysis.sweep_plots import tradeoff_png  # now, so that it does not fail after hours of simulation
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    check_writable(to)
    combinations = [(word, m, k) for word in protocols for k in workers for m in mu]
    wanted = {at: Cell.of(*at) for at in combinations if Cell.of(*at).n <= at[2]}
    if not wanted:
        raise UsageError("no cell is left: N-soft needs at least N workers; give larger numbers to --lambda")
    given = parse_step_seconds(settings.step_seconds) if settings.step_seconds else None
    if given:
        settings.sim(1, min(map(given, mu)))  # refuses a time of 0
    file = StudyFile(to / "study.json", settings)
    # One mini-batch size after the other, so that only one task with its data is in memory at a time.
    todo = sorted(
        {cell for cell in wanted.values() if str(cell) not in file.cells},
        key=lambda cell: (cell.mu, cell.workers, cell.n),
    )
    if todo:
        _run_cells(todo, settings, file, given, len(set(wanted.values())), console)

    rows: dict[tuple[str, int, int], Row] = {}
    curves: dict[str, list[Row]] = {}
    for (word, m, k), cell in wanted.items():
        label = word if cell.n else "hard"
        row = {"protocol": label, "mu": m, "lambda": k, "mu_lambda": m * k, **file.cells[str(cell)]}
        curves.setdefault(word, []).append(rows.setdefault((label, m, k), row))
    outcome: Row = {
        "study": str(to),
        "task": settings.task,
        "metric": file.metric,
        "settings": asdict(settings),
        "rows": list(rows.values()),
        **_findings(list(rows.values()), curves, settings, file.metric),
        "left_out": [
            f"{word} with lambda={k}" for word, m, k in combinations if m == mu[0] and (word, m, k) not in wanted
        ],
    }
    (to / "study.png").write_bytes(tradeoff_png(outcome, curves))
    return outcome


class StudyFile(SweepFile):
    """study.json."""

    kind = "study"
    kept = (*SweepFile.kept, "measured_seconds")

    def __init__(self, path: Path, settings: Settings) -> None:
        self.measured_seconds: dict[str, float] = {}
        super().__init__(path, asdict(settings))


def _run_cells(
    todo: list[Cell],
    settings: Settings,
    file: StudyFile,
    given: Callable[[int], float] | None,
    total: int,
    console: Console | None,
) -> None:
    load = lru_cache(maxsize=1)(settings.load)
    progress = SweepProgress(total, total - len(todo), console)
    with progress:
        # Errors of the task appear here, so an error in a cell is one of that configuration.
        check_task(load(todo[-1].mu), load(todo[-1].mu).train_data(), max(cell.workers for cell in todo))
        wall_seconds = {}
        for mu in sorted({cell.mu for cell in todo}, reverse=True):  # the smallest last, since it is run first
            progress.begin(f"timing gradients of mini-batch {mu}")
            plan = RunPlan.make(load(mu), settings.server(0), settings.sim(1, 1.0), settings.request, None)
            known = given is not None or str(mu) in file.measured_seconds
            wall_seconds[mu] = gradient_seconds(plan, 0.0 if known else TIMING_SECONDS)
            if given is None:
                file.measured_seconds.setdefault(str(mu), wall_seconds[mu])
        file.metric = file.metric or primary_metric(EvaluatingObserver(plan).measure())
        progress.work = {cell: (wall_seconds[cell.mu] + SIMULATING_SECONDS) / cell.mu for cell in todo}
        for cell in todo:
            progress.begin(str(cell), cell)
            seconds = given(cell.mu) if given else file.measured_seconds[str(cell.mu)]
            row = _simulate(cell, load(cell.mu), settings, seconds, file.metric, progress.update)
            file.cells[str(cell)] = row
            file.write()
            error, virtual_seconds = format_number(row["error"]), format_number(row["seconds"])
            progress.finish(cell, f"{file.metric} {error} after {virtual_seconds} s (virtual)")


def _simulate(
    cell: Cell, task: Task, settings: Settings, step_seconds: float, metric: str, on_fraction: Callable[[float], None]
) -> Row:
    on = settings.sim(cell.workers, step_seconds)
    plan = RunPlan.make(task, settings.server(cell.n), on, settings.request, None)
    return measure_run(plan, on, EvaluatingObserver(plan, on_fraction), metric)


# ---- findings -------------------------------------------------------------------------------------------------------


def _findings(rows: list[Row], curves: dict[str, list[Row]], settings: Settings, metric: str) -> Row:
    """The ratios of a study, the rows that no other row beats in both time and error, and the advice in words."""
    rows = [row for row in rows if row["error"] is not None]
    if not rows:
        return {"ratios": {}, "front": [], "recommendation": "No configuration converged: lower the learning rate."}
    shown = _ErrorText(metric)
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["seconds"], row["error"])):
        if not front or row["error"] < front[-1]["error"]:
            front.append(row)
    advice = ["Lowest " + metric + " within a time (virtual seconds):"]
    advice += [f"  {row['seconds']:.4g} s: {shown(row)} with {_name(row)}" for row in front]
    ratios = {"lowest_error": front[-1]["error"]}
    alone = [row for row in rows if row["lambda"] == 1]
    if alone:
        base = min(alone, key=lambda row: abs(math.log(row["mu"] / settings.reference_batch)))
        advice.append(_compare_with_one_worker(rows, base, shown, ratios))
    decides = {}
    for protocol, curve in {**curves, "all": rows}.items():
        if protocol == "all" and len(curves) == 1:
            continue
        spread = _spread([row for row in curve if row["error"] is not None], shown.scale)
        if spread is not None:
            decides[protocol], sentence = _compare_products(protocol, *spread, shown, ratios)
            advice.append(sentence)
    advice.append(_advise_on_rule(decides, rows, settings.reference_batch, shown))
    advice.append("Each cell is one run with one seed: small differences may be chance.")
    return {"ratios": ratios, "front": front, "recommendation": "\n".join(advice)}


class _ErrorText:
    """How errors are written: in percent if the metric is called error, otherwise as they are."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.scale, self.unit = (100, "percentage points") if metric == "error" else (1, f"of {metric}")

    def __call__(self, row: Row) -> str:
        return f"{row['error']:.2%}" if self.metric == "error" else f"{row['error']:.4g}"


def _compare_with_one_worker(rows: list[Row], base: Row, shown: _ErrorText, ratios: dict[str, float]) -> str:
    """How much faster the fastest row of equal quality is than one worker with the usual mini-batch."""
    as_good = [row for row in rows if row["error"] <= AS_GOOD_RATIO * base["error"]]
    fastest = min(as_good, key=lambda row: row["seconds"])
    ratios["baseline_error"] = base["error"]
    ratios["speedup_at_baseline_error"] = base["seconds"] / fastest["seconds"]
    sentence = f"One worker with mu={base['mu']} reaches {shown(base)} in {base['seconds']:.4g} s. "
    if fastest is base:
        return sentence + "Nothing faster is as good."
    return sentence + (
        f"The fastest as good ({shown.metric} at most {AS_GOOD_RATIO:g} times that) is {_name(fastest)}: "
        f"{ratios['speedup_at_baseline_error']:.1f} times faster, with {shown(fastest)}."
    )


def _spread(rows: list[Row], scale: float) -> tuple[dict[int, float], float] | None:
    """The range of errors within each group of about equal mu*lambda, and the range of the groups' means.

    None if there is nothing to compare.
    """
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(2 ** round(math.log2(row["mu_lambda"])), []).append(scale * row["error"])
    means = [statistics.fmean(errors) for errors in groups.values()]
    by_product = {product: max(errors) - min(errors) for product, errors in sorted(groups.items()) if len(errors) > 1}
    return (by_product, max(means) - min(means)) if by_product and len(groups) > 1 else None


def _compare_products(
    protocol: str, by_product: dict[int, float], between: float, shown: _ErrorText, ratios: dict[str, float]
) -> tuple[bool, str]:
    """Whether mu*lambda decides the error: it varies at most half as much at equal mu*lambda as between them."""
    key, name = protocol.replace("-", "_"), "All protocols together" if protocol == "all" else protocol
    ratios |= {f"spread_{key}_mu_lambda_{product}": value for product, value in by_product.items()}
    ratios[f"spread_{key}"] = within = statistics.fmean(by_product.values())
    ratios[f"between_{key}"] = between
    decides = within <= between / 2
    return decides, (
        f"{name}: at equal mu*lambda {shown.metric} differs by {within:.2f} {shown.unit} on average (at most "
        f"{max(by_product.values()):.2f}), from one mu*lambda to another by up to {between:.2f}: "
        + ("mu*lambda decides." if decides else "mu*lambda alone does not decide.")
    )


def _advise_on_rule(decides: dict[str, bool], rows: list[Row], reference_batch: int, shown: _ErrorText) -> str:
    """Whether to follow the paper's rule, keep mu*lambda constant, and what it means for the largest lambda."""
    holds = [protocol for protocol, held in decides.items() if held and protocol != "all"]
    most = max(row["lambda"] for row in rows)
    if not decides:
        return "Too few cells have equal mu*lambda to tell whether it decides; try mu and lambda of powers of two."
    if not holds:
        return "The rule 'keep mu*lambda constant' is not supported by these cells: choose from the list above."
    if most > reference_batch:
        return f"mu*lambda cannot be kept at {reference_batch} with {most} workers: even mu=1 makes it {most}."
    mu = max(1, round(reference_batch / most))
    near = min(
        (row for row in rows if row["lambda"] == most),
        key=lambda row: (abs(math.log(row["mu"] / mu)), row["error"]),
    )
    return (
        f"Keep mu*lambda constant ({', '.join(holds)}): for {most} workers and the batch of {reference_batch} that the "
        f"learning rate was chosen for, take mu={mu}. The nearest cell that was run, {_name(near)}, has "
        f"{shown(near)} in {near['seconds']:.4g} s."
    )


def _name(row: Row) -> str:
    return f"{row['protocol']} mu={row['mu']} lambda={row['lambda']}"


def table(outcome: Row) -> Table:
    """The rows, for a terminal."""
    result = Table(box=SIMPLE_HEAD, title=f"{outcome['task']}, simulated", title_style="bold", title_justify="left")
    headings = ("protocol", "mu", "lambda", "mu*lambda", "virtual s", outcome["metric"], "staleness")
    for heading in headings:
        result.add_column(heading, justify="left" if heading == "protocol" else "right")
    for row in outcome["rows"]:
        counts = (str(row[name]) for name in ("mu", "lambda", "mu_lambda"))
        error = "diverged" if row["failed"] else format_number(row["error"])
        seconds, staleness = format_number(row["seconds"]), format_number(row["staleness"])
        result.add_row(row["protocol"], *counts, seconds, error, staleness)
    remarks = ["With lambda=1 all protocols are the same: it was run once, as hard."]
    remarks = remarks if any(row["lambda"] == 1 for row in outcome["rows"]) else []
    remarks += [f"A smaller {outcome['metric']} counts as better."] if outcome["metric"] != "error" else []
    remarks += [f"Left out, n > lambda: {', '.join(outcome['left_out'])}."] if outcome["left_out"] else []
    result.caption, result.caption_justify = "\n".join(remarks), "left"
    return result
