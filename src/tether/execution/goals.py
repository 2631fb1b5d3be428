"""How far a run goes and when it ends early, and which of two models is better."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tether.core.machine import Schedule
from tether.errors import UsageError, guess
from tether.execution.checkpoint import Restored
from tether.task import Task, mini_batch_samples, primary_metric

#: the most epochs of a run that is given only a target, a time or a patience
EPOCHS_MAX = 100
#: the numbers of a request that must be more than 0
POSITIVE = ("epochs", "steps", "evaluate_every", "warmup_epochs", "seconds")
#: words in a metric's name that say whether lower or higher values are better
FALLING, RISING = ("error", "loss"), ("accuracy",)


@dataclass(frozen=True)
class Request:
    """What the caller asked for: how far the run goes and what it keeps. The run directory stores it for `resume`."""

    epochs: float | None = None
    steps: int | None = None
    until: str | None = None
    seed: int = 0
    evaluate_every: float = 1.0
    checkpoint_seconds: float = 30.0
    record: bool = False
    trace: bool = True
    #: the protocol to begin with, as its name and options, and for how many epochs
    warmup: dict[str, Any] | None = None
    warmup_epochs: float = 1.0
    #: end after this many seconds at the latest
    seconds: float | None = None
    #: end after this many evaluations without improvement
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in (*POSITIVE, "checkpoint_seconds", "patience", "seed"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float):
                raise UsageError(f"{name} must be a number, not {value!r}")
            if value is not None and name in POSITIVE and not value > 0:
                raise UsageError(f"{name} must be more than 0, not {value!r}")
        if self.checkpoint_seconds < 0:
            raise UsageError(f"checkpoint_seconds cannot be negative: {self.checkpoint_seconds:g}")
        if self.epochs is not None and self.steps is not None:
            raise UsageError("give either epochs or steps, not both")
        if self.until is not None:
            Until.parse(self.until)
        if self.record and self.warmup is not None:
            raise UsageError("a run with a warm-up cannot be recorded: record the two parts as runs of their own")
        if self.patience is not None:
            Patience(self.patience)
        if self.seed < 0:
            raise UsageError(f"seed cannot be negative: {self.seed}")

    @property
    def has_goal(self) -> bool:
        """Whether the caller said anything about the length of the run."""
        return any(goal is not None for goal in (self.epochs, self.steps, self.until, self.seconds, self.patience))

    def with_goal(
        self,
        task: Task,
        epochs: float | None,
        steps: int | None,
        until: str | None,
        seconds: float | None,
        patience: int | None,
    ) -> Request:
        """The same with another goal. If that has neither epochs nor steps, the run goes no further than before."""
        if epochs is None and steps is None:
            epochs, steps = (self.epochs, self.steps) if self.has_goal else (task.epochs, None)
        return replace(self, epochs=epochs, steps=steps, until=until, seconds=seconds, patience=patience)

    def schedule(self, task: Task, samples: int, workers: int, restored: Restored | None) -> Schedule:
        """The steps that remain of a run whose epoch has this many samples."""
        batch_size = mini_batch_samples(task)
        kept = restored.state if restored is not None else {}
        # a resumed run keeps the size of its steps, even with another number of workers
        step_batches = kept.get("step_batches", workers)
        steps_per_epoch = samples / (step_batches * batch_size)
        usual = task.epochs if self.until is None and self.seconds is None and self.patience is None else EPOCHS_MAX
        goal, steps = None, self.steps
        if steps is None:
            goal = max(1, math.ceil((self.epochs if self.epochs is not None else usual) * samples / batch_size))
            steps = math.ceil(goal / step_batches)
        counted: tuple[tuple[int, int], ...] = ()
        first_step = 0
        if restored is not None:
            counted = tuple((start, stop) for start, stop in kept.get("counted", [[0, restored.samples // batch_size]]))
            done = sum(stop - start for start, stop in counted)
            if done * batch_size != restored.samples:  # the task's mini-batch has another size now
                done = restored.samples // batch_size
                counted = ((0, done),)
            first_step = restored.step if goal is None else done // step_batches
            if (first_step >= steps) if goal is None else any(start == 0 and stop >= goal for start, stop in counted):
                made = f"the run has made its {steps} steps"
                if first_step > steps:
                    made = f"{first_step} steps are made already, more than the {steps} asked for"
                raise UsageError(f"{made}: give more epochs or steps to go further")
        return Schedule(
            steps=max(1, steps),
            evaluate_every=max(1, round(self.evaluate_every * steps_per_epoch)),
            batch_size=batch_size,
            checkpoint_seconds=self.checkpoint_seconds,
            goal=goal,
            step_batches=step_batches,
            first_step=first_step,
            counted=counted,
            data_bound=task.source is not None,
            ema=task.ema or 0.0,
            upcoming=task.prefetch * max(1, task.num_workers),
        )


@dataclass(frozen=True)
class Until:
    """A condition on a metric that ends a run, such as error<0.05."""

    metric: str
    relation: str
    value: float

    _RELATIONS: ClassVar[dict[str, Any]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

    @staticmethod
    def parse(text: str) -> Until:
        match = re.fullmatch(r"\s*([\w.-]+)\s*(<=|>=|<|>)\s*([-+0-9.e]+)\s*", text)
        try:
            if match is None:
                raise ValueError
            return Until(match[1], match[2], float(match[3]))
        except ValueError:
            raise UsageError(f"the condition {text!r} is not understood; write it like error<0.05") from None

    def holds(self, metrics: dict[str, float]) -> bool:
        if self.metric not in metrics:
            known = ", ".join(sorted(metrics)) or "none: its evaluate() returns no metrics"
            meant = guess(self.metric, metrics)
            raise UsageError(f"the condition names the metric {self.metric!r}; the task has {known}.{meant}")
        return bool(self._RELATIONS[self.relation](metrics[self.metric], self.value))

    def __str__(self) -> str:
        return f"{self.metric}{self.relation}{self.value:g}"


class Patience:
    """Ends a run whose metric has not improved for a number of evaluations."""

    def __init__(self, evaluations: int) -> None:
        if evaluations < 1:
            raise UsageError(f"patience must be at least 1 evaluation, not {evaluations}")
        self.evaluations = evaluations
        self._best = -math.inf
        self._without_improvement = 0

    def ends(self, metrics: dict[str, float], *, late: bool = False) -> bool:
        """Whether this evaluation ends the run. `late`: its model is older than the last one that was evaluated."""
        value = score(metrics)
        if not late:
            self._without_improvement = 0 if value > self._best else self._without_improvement + 1
        self._best = max(self._best, value)
        return not late and self._without_improvement >= self.evaluations

    def __str__(self) -> str:
        return f"no better for {self.evaluations} evaluation{'s' if self.evaluations > 1 else ''}"


def score(metrics: dict[str, float]) -> float:
    """How good a model with these metrics is; higher is better."""
    metric = primary_metric(metrics)
    falls, rises = (any(word in metric.lower() for word in words) for words in (FALLING, RISING))
    if not falls and not rises:
        raise UsageError(
            f"patience does not know what is better for the metric {metric or 'none'!r}: have evaluate() return "
            "a metric called error, or first one whose name contains error, loss or accuracy"
        )
    return -metrics[metric] if falls else metrics[metric]
