"""How much faster several workers reach a target than one: the model of DeepSpark (section 5.1), and its fit to runs.

`speedup` is the model. `fit` takes the model's quantities from the records of two runs, and `fits` does so for every
run that can be compared. A `Fit` holds both the prediction and the measured ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tether.analysis.runs import Row, RunRecord, format_number
from tether.errors import UsageError
from tether.execution.goals import FALLING, RISING
from tether.task import primary_metric

#: what a reader must know about the speedups of a report
SPEEDUP_NOTE = (
    "How many times faster than one worker the run reached the target: measured, and predicted by equation 8 of "
    "DeepSpark, (N C + L) / ((tau C + S) M + L / workers). The run of one worker gives the steps that it needs alone "
    "(N), the seconds per step (C) and the seconds of waiting for data (L). The other run gives the steps per round "
    "(tau), the seconds for which a worker stood idle between two rounds (S), and the rounds (M). The model leaves "
    "out workers that slow each other down on shared processors, start-up, installing values, and deaths. It cannot "
    "tell how many rounds a run will need."
)

#: the columns of the table of speedups, with the paper's letters in brackets
SPEEDUP_HEADINGS = (
    "run",
    "workers",
    "target",
    "steps alone (N)",
    "seconds per step (C)",
    "seconds waiting for data (L)",
    "steps per round (tau)",
    "seconds idle per round (S)",
    "rounds (M)",
    "speedup predicted",
    "speedup measured",
)


def speedup(
    *,
    steps_alone: float,
    step_seconds: float,
    tau: float,
    exchange_seconds: float,
    rounds: float,
    workers: int,
    load_seconds: float = 0.0,
) -> float:
    """The time that one worker needs to reach a target, divided by that of several: equation 8 of DeepSpark.

        speedup = (N C + L) / ((tau C + S) M + L / K)

    steps_alone: N, the steps that one worker needs.
    step_seconds: C, the time of one mini-batch.
    tau: steps between two exchanges.
    exchange_seconds: S, the time that an exchange adds to a round.
    rounds: M, the rounds of tau steps that the workers need.
    workers: K; each reads its share of the data.
    load_seconds: L, the time of reading all the data once; with 0 this is equation 7, which is also SparkNet's.
    """
    for name, value, least, more in (
        ("steps_alone", steps_alone, 0, True),
        ("step_seconds", step_seconds, 0, True),
        ("tau", tau, 1, False),
        ("exchange_seconds", exchange_seconds, 0, False),
        ("rounds", rounds, 0, True),
        ("workers", workers, 1, False),
        ("load_seconds", load_seconds, 0, False),
    ):
        if not math.isfinite(value) or value < least or (more and value == least):
            raise UsageError(f"{name} must be {'more than' if more else 'at least'} {least}, not {value}")
    alone = steps_alone * step_seconds + load_seconds
    return alone / ((tau * step_seconds + exchange_seconds) * rounds + load_seconds / workers)


@dataclass(frozen=True)
class Fit:
    """The model's quantities, taken from two runs, and the measured speedup."""

    alone: RunRecord
    run: RunRecord
    metric: str
    target: float
    steps_alone: int
    step_seconds: float
    tau: float
    exchange_seconds: float
    rounds: float
    workers: int
    load_seconds: float
    measured: float

    @property
    def predicted(self) -> float:
        return speedup(
            steps_alone=self.steps_alone,
            step_seconds=self.step_seconds,
            tau=self.tau,
            exchange_seconds=self.exchange_seconds,
            rounds=self.rounds,
            workers=self.workers,
            load_seconds=self.load_seconds,
        )


def fit(alone: RunRecord, run: RunRecord, metric: str, target: float, falling: bool | None = None) -> Fit:
    """The model for `run` against `alone`, a run of one worker, at the first evaluation at which each is at the target.

    A step takes as long as in the run of one worker, and L is the time that it waits for the data of N steps. A round
    is tau steps (the mean up to the target if tau changes), and S is the time for which a worker stands idle between
    two rounds. If no tau was recorded, every step is a round. `falling` says that smaller values of the metric are
    better; give it only where `falls` is wrong.
    """
    if not _is_alone(alone):
        raise UsageError(f"{alone.name} is not a run of one worker: name a run with protocol 'single' first")
    if _comparable_by(alone) != _comparable_by(run):
        raise UsageError(f"{alone.name} and {run.name} differ in their task, or only one of them was simulated")
    for each in filter(_had_warmup, (alone, run)):
        raise UsageError(f"{each.name} began with another protocol, and the model covers only one")
    if falling is None:
        falling = falls(metric, [curve for each in (alone, run) if (curve := _curve(each, metric))])
    first, second = (_reached(each, metric, target, falling) for each in (alone, run))
    made = sum(row["steps"] for row in alone.workers.values())
    loaded = sum(row.get("load_seconds", 0.0) for row in alone.workers.values())
    taus = [row for row in run.records if "tau" in row]
    tau, tau_later = (_mean_tau(taus, until) for until in (second["time"], math.inf))
    # No wait follows the last round of a worker.
    rounds = [(row["wait_seconds"], row["steps"] / tau_later - 1) for row in run.workers.values()]
    waits = [(seconds, count) for seconds, count in rounds if count > 0]
    if not made or not waits or not second["time"]:
        raise UsageError(f"{alone.name} and {run.name} have too few steps to tell how long one takes")
    return Fit(
        alone,
        run,
        metric,
        target,
        steps_alone=first["step"],
        step_seconds=(sum(row["compute_seconds"] for row in alone.workers.values()) - loaded) / made,
        tau=tau,
        exchange_seconds=sum(seconds for seconds, _ in waits) / sum(count for _, count in waits),
        rounds=second["step"] / tau,
        workers=run.config["workers"],
        load_seconds=first["step"] * loaded / made,
        measured=first["time"] / second["time"],
    )


def _mean_tau(rows: Iterable[Row], until: float) -> float:
    """The mean tau of all exchanges up to a time; a row also counts for the exchanges before it that have no row."""
    counted = [(row["tau"], row.get("rows", 1)) for row in rows if row["time"] <= until] or [(1.0, 1)]
    return statistics.fmean([tau for tau, _ in counted], [rows for _, rows in counted])


def fits(runs: Sequence[RunRecord]) -> list[Fit]:
    """Compare every run of a task with the task's first run of one worker; real and simulated runs separately.

    The metric is the one that decides which model is better; the target is the hardest one that all of them reach.
    """
    found: list[Fit] = []
    for alone in runs:
        if not _is_alone(alone) or any(_comparable_by(alone) == _comparable_by(fit.alone) for fit in found):
            continue
        metrics = alone.evaluations[0]["metrics"] if alone.evaluations else {}
        metric = primary_metric(metrics)
        others = [run for run in runs if not _is_alone(run) and _comparable_by(run) == _comparable_by(alone)]
        compared = [run for run in (alone, *others) if not _had_warmup(run) and _curve(run, metric)]
        curves = [_curve(run, metric) for run in compared]
        if len(compared) < 2 or compared[0] is not alone:
            continue
        falling = falls(metric, curves)
        target = max(map(min, curves)) if falling else min(map(max, curves))
        for run in compared[1:]:
            with suppress(UsageError):  # a run that has hardly begun
                found.append(fit(alone, run, metric, target, falling))
    return found


def falls(metric: str, curves: Iterable[Sequence[float]]) -> bool:
    """Whether smaller values of a metric are better, judged by its name, or else by whether most of its curves fall."""
    if any(word in metric.lower() for word in FALLING):
        return True
    return not any(word in metric.lower() for word in RISING) and most_fall(curves)


def most_fall(curves: Iterable[Sequence[float]]) -> bool:
    """Whether more than half of the curves end lower than they began."""
    ends = [curve[-1] < curve[0] for curve in curves]
    return sum(ends) * 2 > len(ends)


def _is_alone(run: RunRecord) -> bool:
    return bool(run.config["protocol"]["name"] == "single")


def _had_warmup(run: RunRecord) -> bool:
    """Whether the run began with another protocol."""
    return bool(run.config.get("request", {}).get("warmup"))


def _comparable_by(run: RunRecord) -> tuple[dict[str, Any], bool]:
    """Two runs can be compared if this is equal: the task, and whether the time is virtual."""
    return run.config["task"], run.virtual


def _curve(run: RunRecord, metric: str) -> list[float]:
    values = [row["metrics"].get(metric) for row in run.evaluations]
    return [value for value in values if value is not None and math.isfinite(value)]


def _reached(run: RunRecord, metric: str, target: float, falling: bool) -> Row:
    """The first evaluation at the target."""
    for row in run.evaluations:
        value = row["metrics"].get(metric)
        if value is not None and (value <= target if falling else value >= target):
            return row
    raise UsageError(f"{run.name} never reached {metric} {'<=' if falling else '>='} {target:g}")


def speedup_grid(found: Sequence[Fit]) -> list[list[str]]:
    """The headings, then a row for each run that was compared with one worker."""
    return [list(SPEEDUP_HEADINGS)] + [
        [
            fit.run.name,
            str(fit.workers),
            f"{fit.metric} {format_number(fit.target)}",
            *map(format_number, (fit.steps_alone, fit.step_seconds, fit.load_seconds)),
            *map(format_number, (fit.tau, fit.exchange_seconds, fit.rounds)),
            format_number(fit.predicted, ".2f"),
            format_number(fit.measured, ".2f"),
        ]
        for fit in found
    ]
