"""`tether study`: error against time over mini-batch size mu, number of learners lambda and protocol, in the simulator.

The trade-off curves of the Rudra paper (section 5.2), on the user's own task. Every cell is one simulated run under a
parameter server; the cells that are finished are kept in study.json, so a study that was stopped goes on where it was,
and one with longer lists of mu, lambda or protocols runs only what is new. Cells of about equal mu*lambda are compared
as in table 2: the product is rounded to the nearest power of two, so that 4*30, 8*18 and 128*1 stand together.
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

from tether import settings as option_texts
from tether import tasks, units
from tether.cells import AS_GOOD, CellFile, Row, Show, Watcher, figure, gradient_seconds, run_cell
from tether.errors import UsageError, missing_extra
from tether.plan import Request, RunPlan
from tether.protocols import Server
from tether.runtimes.sim import Sim
from tether.task import Task, check_task, metric_of

#: how long the gradients of one mini-batch size are timed
TIMING_SECONDS = 0.5
#: what the simulator itself takes for a gradient, roughly; only the display of the time left depends on it
SIMULATING_SECONDS = 5e-4
#: options of the protocol that the study itself sets
OWN_OPTIONS = {"sync": "--protocol", "n": "--protocol", "reference_batch": "--reference-batch"}


@dataclass(frozen=True)
class Settings:
    """What decides the result of a cell besides mu, lambda and the protocol: cells of other settings are no company."""

    task: str
    data: str | None = None
    task_settings: dict[str, str] = field(default_factory=dict)
    server_settings: dict[str, str] = field(default_factory=dict)
    #: the task's own unless given
    epochs: float = 0
    reference_batch: int = 0
    seed: int = 0
    link: str = "1gbit"
    latency: str = "0.2ms"
    #: measured on this machine unless given
    step_seconds: str | None = None
    model_bytes: str | None = None

    @staticmethod
    def make(task: str, *, epochs: float | None = None, reference_batch: int | None = None, **others: Any) -> Settings:
        """Refuses what no cell could be run with."""
        made = Settings(task, **others)
        usual = tasks.load(task, data=made.data_path, settings=made.task_settings)
        made = replace(
            made,
            epochs=usual.epochs if epochs is None else epochs,
            reference_batch=usual.batch_size if reference_batch is None else reference_batch,
        )
        for name in made.server_settings.keys() & OWN_OPTIONS.keys():
            raise UsageError(f"--set {name}: a study sets {name} itself; use {OWN_OPTIONS[name]}")
        made.request, made.server(0), made.sim(1, 1.0)  # each refuses bad values
        return made

    @property
    def data_path(self) -> Path | None:
        return Path(self.data) if self.data else None

    @property
    def request(self) -> Request:
        """Of a run that is evaluated at its end only, and never saved."""
        never = sys.float_info.max
        return Request(self.epochs, seed=self.seed, evaluate_every=1e9, checkpoint_seconds=never, trace=False)

    def server(self, n: int) -> Server:
        """n = 0 is hardsync. Learning rate as in the paper: sqrt(lambda*mu/B) in hardsync, 1/n in softsync."""
        chosen = option_texts.arguments(Server, "protocol server", self.server_settings)
        how: Row = {"sync": "soft", "n": n} if n else {"sync": "hard", "reference_batch": self.reference_batch}
        return Server(**{"rate": "1/n" if n else "sqrt", **chosen, **how})

    def sim(self, learners: int, step_seconds: float) -> Sim:
        return Sim(learners, self.link, self.latency, step_seconds, self.model_bytes, checked=False)

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
    """One run. The protocols are the same for one learner, and lambda-soft is N-soft of N = lambda."""

    n: int  # 0 is hardsync
    mu: int
    learners: int

    @staticmethod
    def of(protocol: str, mu: int, learners: int) -> Cell:
        if protocol == "hard" or learners == 1:
            return Cell(0, mu, learners)
        return Cell(learners if protocol == "lambda-soft" else int(protocol.partition("-")[0]), mu, learners)

    def __str__(self) -> str:
        return f"{f'{self.n}-soft' if self.n else 'hard'} mu={self.mu} lambda={self.learners}"


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """'4,8,16' as numbers, in order."""
    try:
        counts = {int(part) for part in text.split(",")}
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not understood; write whole numbers like {flag} 4,8,16") from None
    if min(counts) < 1:
        raise UsageError(f"{flag} {text!r}: every number must be at least 1")
    return tuple(sorted(counts))


def parse_protocols(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        if word not in ("hard", "lambda-soft") and not re.fullmatch(r"[1-9][0-9]*-soft", word):
            raise UsageError(
                f"unknown protocol {word!r} of a study; known: hard, 1-soft, N-soft with any number N, lambda-soft"
            )
    return words


def parse_step_seconds(text: str) -> Callable[[int], float]:
    """'0.05' holds for every mu; '4=0.01,128=0.05' is linear between its points and proportional to mu outside."""
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
    learners: Sequence[int],
    protocols: Sequence[str],
    to: Path,
    console: Console | None = None,
) -> Row:
    """Runs the cells that are not in to/study.json yet, draws to/study.png and says what the cells tell."""
    try:
        from tether.tradeoff import tradeoff_png  # now, and not after hours of simulation
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    combinations = [(word, m, k) for word in protocols for k in learners for m in mu]
    wanted = {at: Cell.of(*at) for at in combinations if Cell.of(*at).n <= at[2]}
    if not wanted:
        raise UsageError("no cell is left: N-soft needs at least N learners; give larger numbers to --lambda")
    given = parse_step_seconds(settings.step_seconds) if settings.step_seconds else None
    if given:
        settings.sim(1, min(map(given, mu)))  # refuses a time of 0
    file = StudyFile(to / "study.json", settings)
    # Mini-batch by mini-batch, so that one task with its data is held at a time.
    todo = sorted(
        {cell for cell in wanted.values() if str(cell) not in file.cells},
        key=lambda cell: (cell.mu, cell.learners, cell.n),
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


class StudyFile(CellFile):
    """study.json."""

    what = "study"
    names = (*CellFile.names, "measured_seconds")

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
    show = Show(total, total - len(todo), console)
    with show:
        # Whatever is wrong with the task comes up here: an error in a cell is then one of that configuration.
        check_task(load(todo[-1].mu), load(todo[-1].mu).train_data(), max(cell.learners for cell in todo))
        wall_seconds = {}
        for mu in sorted({cell.mu for cell in todo}, reverse=True):  # the smallest last, which is run first
            show.now(f"timing gradients of mini-batch {mu}")
            plan = RunPlan.make(load(mu), settings.server(0), settings.sim(1, 1.0), settings.request, None)
            known = given is not None or str(mu) in file.measured_seconds
            wall_seconds[mu] = gradient_seconds(plan, 0.0 if known else TIMING_SECONDS)
            if given is None:
                file.measured_seconds.setdefault(str(mu), wall_seconds[mu])
        file.metric = file.metric or metric_of(Watcher(plan).measure())
        show.work = {cell: (wall_seconds[cell.mu] + SIMULATING_SECONDS) / cell.mu for cell in todo}
        for cell in todo:
            show.now(str(cell), cell)
            seconds = given(cell.mu) if given else file.measured_seconds[str(cell.mu)]
            file.cells[str(cell)] = result = _simulate(
                cell, load(cell.mu), settings, seconds, file.metric, show.fraction
            )
            file.write()
            show.done(
                cell, f"{file.metric} {figure(result['error'])} after {result['seconds'] or math.nan:.4g} s (virtual)"
            )


def _simulate(
    cell: Cell, task: Task, settings: Settings, step_seconds: float, metric: str, fraction: Callable[[float], None]
) -> Row:
    on = settings.sim(cell.learners, step_seconds)
    plan = RunPlan.make(task, settings.server(cell.n), on, settings.request, None)
    return run_cell(plan, on, Watcher(plan, fraction), metric)


# ---- what the cells tell --------------------------------------------------------------------------------------------


def _findings(rows: list[Row], curves: dict[str, list[Row]], settings: Settings, metric: str) -> Row:
    """The figures of a study, the rows that no other one beats in both time and error, and what follows, in words."""
    rows = [row for row in rows if row["error"] is not None]
    if not rows:
        return {"ratios": {}, "front": [], "recommendation": "No configuration converged: lower the learning rate."}
    scale, unit = (100, "percentage points") if metric == "error" else (1, f"of {metric}")
    shown = "{:.2f} %".format if metric == "error" else "{:.4g}".format
    B, most = settings.reference_batch, max(row["lambda"] for row in rows)
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["seconds"], row["error"])):
        if not front or row["error"] < front[-1]["error"]:
            front.append(row)
    said = ["Lowest " + metric + " within a time (virtual seconds):"]
    said += [f"  {row['seconds']:.4g} s: {shown(scale * row['error'])} with {_name(row)}" for row in front]
    ratios = {"lowest_error": front[-1]["error"]}

    alone = [row for row in rows if row["lambda"] == 1]
    if alone:
        base = min(alone, key=lambda row: abs(math.log(row["mu"] / B)))
        as_good = [row for row in rows if row["error"] <= AS_GOOD * base["error"]]
        fastest = min(as_good, key=lambda row: row["seconds"])
        ratios["baseline_error"] = base["error"]
        ratios["speedup_at_baseline_error"] = base["seconds"] / fastest["seconds"]
        said.append(
            f"One learner with mu={base['mu']} reaches {shown(scale * base['error'])} in {base['seconds']:.4g} s. "
            + (
                f"The fastest as good ({metric} at most {AS_GOOD:g} times that) is {_name(fastest)}: "
                f"{ratios['speedup_at_baseline_error']:.1f} times faster, with {shown(scale * fastest['error'])}."
                if fastest is not base
                else "Nothing faster is as good."
            )
        )
    verdicts: dict[str, bool] = {}
    for word, curve in {**curves, "all": rows}.items():
        told = _spread([row for row in curve if row["error"] is not None], scale)
        key, name = word.replace("-", "_"), "All protocols together" if word == "all" else word
        if told is None or (word == "all" and len(curves) == 1):
            continue
        by_product, between = told
        ratios |= {f"spread_{key}_mu_lambda_{product}": value for product, value in by_product.items()}
        ratios[f"spread_{key}"] = within = statistics.fmean(by_product.values())
        ratios[f"between_{key}"] = between
        verdicts[word] = within <= between / 2
        said.append(
            f"{name}: at equal mu*lambda {metric} differs by {within:.2f} {unit} on average (at most "
            f"{max(by_product.values()):.2f}), from one mu*lambda to another by up to {between:.2f}: "
            + ("mu*lambda decides." if verdicts[word] else "mu*lambda alone does not decide.")
        )
    holds = [word for word, held in verdicts.items() if held and word != "all"]
    if not verdicts:
        said.append(
            "Too few cells have equal mu*lambda to tell whether it decides; try mu and lambda of powers of two."
        )
    elif not holds:
        said.append("The rule 'keep mu*lambda constant' is not supported by these cells: choose from the list above.")
    elif most > B:
        said.append(f"mu*lambda cannot be kept at {B} with {most} learners: even mu=1 makes it {most}.")
    else:
        mu = max(1, round(B / most))
        near = min(
            (row for row in rows if row["lambda"] == most),
            key=lambda row: (abs(math.log(row["mu"] / mu)), row["error"]),
        )
        said.append(
            f"Keep mu*lambda constant ({', '.join(holds)}): for {most} learners and the batch of {B} that the learning "
            f"rate was chosen for, take mu={mu}. The nearest cell that was run, {_name(near)}, has "
            f"{shown(scale * near['error'])} in {near['seconds']:.4g} s."
        )
    said.append("Each cell is one run with one seed: small differences may be chance.")
    return {"ratios": ratios, "front": front, "recommendation": "\n".join(said)}


def _spread(rows: list[Row], scale: float) -> tuple[dict[int, float], float] | None:
    """How far errors of about equal mu*lambda lie apart, and how far their means; none if nothing can be compared."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(2 ** round(math.log2(row["mu_lambda"])), []).append(scale * row["error"])
    means = [statistics.fmean(errors) for errors in groups.values()]
    by_product = {product: max(errors) - min(errors) for product, errors in sorted(groups.items()) if len(errors) > 1}
    return (by_product, max(means) - min(means)) if by_product and len(groups) > 1 else None


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
        error = "diverged" if row["failed"] else figure(row["error"])
        result.add_row(row["protocol"], *counts, figure(row["seconds"]), error, figure(row["staleness"]))
    remarks = ["With lambda=1 all protocols are the same: run once, as hard."]
    remarks = remarks if any(row["lambda"] == 1 for row in outcome["rows"]) else []
    remarks += [f"Smaller {outcome['metric']} is taken for better."] if outcome["metric"] != "error" else []
    remarks += [f"Left out, n > lambda: {', '.join(outcome['left_out'])}."] if outcome["left_out"] else []
    result.caption, result.caption_justify = "\n".join(remarks), "left"
    return result
