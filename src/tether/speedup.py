"""How much faster several workers reach a target than one alone: the model of DeepSpark (section 5.1), and its fit.

`speedup` is the model. `fit` takes its quantities from what two runs have recorded, and `fits` does so for every run
that can be compared; beside each prediction stands the ratio of the times that were measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tether.errors import UsageError
from tether.plan import FALLING, RISING
from tether.task import metric_of

if TYPE_CHECKING:
    from tether.report import RunRecord


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
    """Time of one learner over time of several until both reach the same target: equation 8 of DeepSpark.

        speedup = (N C + L) / ((tau C + S) M + L / K)

    steps_alone: N, the steps that one learner needs.
    step_seconds: C, the time of one mini-batch.
    tau: steps between two exchanges.
    exchange_seconds: S, what an exchange adds to a round.
    rounds: M, the rounds of tau steps that the workers need.
    workers: K; each reads its share of the data.
    load_seconds: L, what reading all the data once costs; with 0 this is equation 7, which SparkNet has.
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
    """The quantities of the model as two runs have them, and the speedup that was measured."""

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
    """The model for `run` against `alone`, a run of one learner, at the first evaluation of each at the target.

    A step costs what it costs alone; waiting for the data of N steps is L. A round is tau steps, on average up to the
    target where tau changes, and S is the time that a worker stood still between two rounds. Without recorded tau every
    step is a round. `falling`, smaller values of the metric are better, need be given only where `falls` is wrong.
    """
    if not _alone(alone):
        raise UsageError(f"{alone.name} is no run of one learner: name one with protocol 'single' first")
    if _kind(alone) != _kind(run):
        raise UsageError(f"{alone.name} and {run.name} differ in their task, or only one of them was simulated")
    for each in filter(_warmed, (alone, run)):
        raise UsageError(f"{each.name} began with another protocol, and the model knows only one")
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
        raise UsageError(f"{alone.name} and {run.name} have too few steps to tell what one costs")
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


def _mean_tau(rows: Iterable[dict[str, Any]], until: float) -> float:
    """Of all exchanges until then, also those whose rows were left out, for which the next row stands."""
    counted = [(row["tau"], row.get("rows", 1)) for row in rows if row["time"] <= until] or [(1.0, 1)]
    return statistics.fmean([tau for tau, _ in counted], [rows for _, rows in counted])


def fits(runs: Sequence[RunRecord]) -> list[Fit]:
    """What can be compared: all runs of a task with its first run of one learner, real and virtual time apart.

    The metric is the one that says which model is better; the target is the hardest that all of them reach.
    """
    found: list[Fit] = []
    for alone in runs:
        if not _alone(alone) or any(_kind(alone) == _kind(fit.alone) for fit in found):
            continue
        metrics = alone.evaluations[0]["metrics"] if alone.evaluations else {}
        metric = metric_of(metrics)
        others = [run for run in runs if not _alone(run) and _kind(run) == _kind(alone)]
        compared = [run for run in (alone, *others) if not _warmed(run) and _curve(run, metric)]
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
    """Whether smaller values of a metric are better: by its name, or else because most of its curves fall."""
    if any(word in metric.lower() for word in FALLING):
        return True
    return not any(word in metric.lower() for word in RISING) and most_fall(curves)


def most_fall(curves: Iterable[Sequence[float]]) -> bool:
    """Whether more than half of the curves end lower than they began."""
    ends = [curve[-1] < curve[0] for curve in curves]
    return sum(ends) * 2 > len(ends)


def _alone(run: RunRecord) -> bool:
    return bool(run.config["protocol"]["name"] == "single")


def _warmed(run: RunRecord) -> bool:
    """Whether the run began with another protocol."""
    return bool(run.config.get("request", {}).get("warmup"))


def _kind(run: RunRecord) -> tuple[dict[str, Any], bool]:
    """What two runs must share to be compared."""
    return run.config["task"], run.virtual


def _curve(run: RunRecord, metric: str) -> list[float]:
    values = [row["metrics"].get(metric) for row in run.evaluations]
    return [value for value in values if value is not None and math.isfinite(value)]


def _reached(run: RunRecord, metric: str, target: float, falling: bool) -> dict[str, Any]:
    """The first evaluation at the target."""
    for row in run.evaluations:
        value = row["metrics"].get(metric)
        if value is not None and (value <= target if falling else value >= target):
            return row
    raise UsageError(f"{run.name} never reached {metric} {'<=' if falling else '>='} {target:g}")
