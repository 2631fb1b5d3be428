"""Executes a planned run: its phases one after the other, restarts after lost nodes, and what is written at the end."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from torch import Tensor

from tether.errors import Interrupted, NodesLost
from tether.execution.callbacks import Callbacks
from tether.execution.checkpoint import Evaluated, Restored
from tether.execution.configuration import VERSION
from tether.execution.directory import RunDirectory
from tether.execution.evaluation import JointModel
from tether.execution.goals import Request
from tether.execution.interruption import Interruption
from tether.execution.observer import RunObserver
from tether.execution.plan import RunPlan
from tether.execution.progress import Progress
from tether.execution.result import Result, make_result
from tether.protocols import Options
from tether.protocols import make as make_protocol
from tether.runtimes.base import Outcome, Runtime
from tether.task import Task

#: plans a phase of a run, given the newest checkpoint if there is one
Phase = Callable[[Restored | None], RunPlan]


def plan_phases(
    task: Task,
    protocol: Options,
    on: Runtime,
    request: Request,
    restored: Restored | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> list[Phase]:
    """The phases that remain: perhaps a warm-up, and training proper. Errors in any plan are raised here.

    `weights` is a state_dict that the first phase begins with.
    """

    def main(restored: Restored | None) -> RunPlan:
        return RunPlan.make(task, protocol, on, request, restored, weights)

    def warm(restored: Restored | None) -> RunPlan:
        assert request.warmup is not None
        goal = replace(request, epochs=request.warmup_epochs, steps=None, until=None, seconds=None, patience=None)
        return RunPlan.make(task, make_protocol(request.warmup), on, goal, restored, weights)

    if request.warmup is None:
        first = main(restored)
        return [lambda later: main(later) if later else first]
    schedule = (warming := warm(None)).schedule
    if restored is None:
        main(None)
        return [lambda later: warm(later) if later else warming, main]
    if restored.samples < (schedule.goal or 0) * schedule.batch_size:
        return [lambda later: warm(later or restored), main]
    return [lambda later: main(later or restored)]


def described(protocol: Options) -> dict[str, Any]:
    """A protocol as run.json has it: its name and its options."""
    return {"name": protocol.name, **asdict(protocol)}


@dataclass
class Execution:
    """One call of `run` or `resume`, after its phases were planned and its run directory was locked."""

    phases: list[Phase]
    protocol: Options
    on: Runtime
    request: Request
    directory: RunDirectory
    interruption: Interruption
    #: when the caller asked for the run, by `time.monotonic`
    asked_at: float
    progress: Progress
    #: how the command line finds the task again
    task_spec: dict[str, Any] | None = None
    #: returns the reason for which the run is to end, once there is one
    stop: Callable[[], str | None] | None = None
    #: makes the joint model on the caller's side
    joint: Callable[[RunPlan, Callable[[str], None]], JointModel] = JointModel
    callbacks: Callbacks = field(default_factory=Callbacks)

    def run(self) -> Result:
        """Train until the end of the last phase, and write how the run ended, whichever way it did."""
        plan = self.phases[0](None)
        config = self._config(plan)
        self.directory.begin(config)
        try:
            self.callbacks.call("on_begin", self.directory.path)
            trained = self._train(plan)
            result = make_result(
                trained.plan,
                self.on,
                trained.outcome,
                trained.observer,
                trained.model,
                startup_seconds=trained.startup_seconds,
                wall_seconds=time.monotonic() - self.asked_at,
            )
        except KeyboardInterrupt:
            with suppress(OSError):
                ended = {**config, "status": "interrupted", "reason": "interrupted by the user"}
                self.directory.write_config(ended)
            command = self.directory.resume_command() if self.directory.has_checkpoint() else ""
            raise Interrupted(self.directory.path, command=command) from None
        except BaseException as error:
            with suppress(OSError):
                ended = {**config, "status": "failed", "error": f"{type(error).__name__}: {error}"}
                self.directory.write_config(ended)
            raise
        self._write_end(config, trained, result)
        return result

    def _train(self, plan: RunPlan) -> _Trained:
        """Every phase in turn. If the nodes that a phase needs have died, it is planned again from the checkpoint."""
        waiting, restarts = deque(self.phases), self.on.restarts
        began = time.monotonic()
        part_began, startup_seconds = self.asked_at, None
        while True:
            plan.directory = self.directory
            plan.callbacks = self.callbacks.stepping
            plan.task_spec = self.task_spec
            observer = RunObserver(
                plan,
                self.directory,
                self.progress,
                background=not self.on.virtual,
                stop=self.stop,
                interruption=self.interruption,
                asked_at=part_began,
                joint=self.joint,
                callbacks=self.callbacks,
            )
            lost: NodesLost | None = None
            try:
                with observer:
                    observer.begin(self.request)
                    outcome = self.on.execute(plan, observer)
                    model = observer.finish(outcome, last=len(waiting) == 1)
            except NodesLost as error:
                if self.interruption.happened:
                    raise KeyboardInterrupt from error
                if not restarts:
                    raise NodesLost(f"{error}; continue with '{self.directory.resume_command()}'") from error
                restarts, lost = restarts - 1, error
            if startup_seconds is None:  # of the first part that began to train
                startup_seconds = observer.startup_seconds
            if lost is None:
                waiting.popleft()
                if not waiting or self.interruption.happened:
                    return _Trained(plan, observer, outcome, model, startup_seconds or 0.0)
            part_began = time.monotonic()
            plan = waiting[0](observer.newest_checkpoint())
            if lost is not None:
                plan.notes += (f"{lost}; resuming from the last checkpoint, step {plan.schedule.first_step}",)
                if plan.seconds is not None:
                    plan.seconds = max(1.0, plan.seconds - (time.monotonic() - began))

    def _write_end(self, config: dict[str, Any], trained: _Trained, result: Result) -> None:
        """Write the trace and how the run ended, as far as the disk lets us; raises Interrupted if it was."""
        observer, outcome = trained.observer, trained.outcome
        if outcome.spans and trained.plan.traced:
            observer.write("trace.json", lambda: self.directory.write_trace(outcome.spans))
        observer.retry_writes()
        result.figures["unsaved"] = observer.unsaved
        status = "interrupted" if outcome.reason == self.interruption.reason else "finished"
        ended = {**config, "status": status, "reason": outcome.reason, "result": result.figures}
        if trained.plan.scripted:  # the script may have chosen the protocol
            ended["protocol"] = described(trained.plan.protocol)
        observer.write("run.json", lambda: self.directory.write_config(ended))
        result.figures["unsaved"] = observer.unsaved
        self.callbacks.call("on_end", result)
        if self.interruption.happened:
            command = self.directory.resume_command() if status == "interrupted" else ""
            raise Interrupted(self.directory.path, result, command=command)

    def _config(self, plan: RunPlan) -> dict[str, Any]:
        storage = self.directory.storage
        return {
            "version": VERSION,
            "status": "running",
            "reason": "",
            "error": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "checkpoints": storage.url if storage is not None else None,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "task": {"name": plan.task.name, "spec": None, **(self.task_spec or {})},
            "protocol": described(self.protocol),
            "runtime": self.on.describe(),
            "workers": plan.workers,
            "request": asdict(self.request),
            "seed": self.request.seed,
            "result": None,
        }


@dataclass(frozen=True)
class _Trained:
    """The last phase of a run that has ended."""

    plan: RunPlan
    observer: RunObserver
    outcome: Outcome
    model: Evaluated
    startup_seconds: float
