"""Takes in what happens in a run: metrics, evaluation, checkpoints, the display."""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from tether.errors import TaskError, TetherError
from tether.learner import build_model
from tether.machine import Checkpoint, Evaluate, Row
from tether.plan import Patience, RunPlan, Until, worth
from tether.progress import Progress
from tether.rundir import Evaluated, RunDirectory
from tether.runtimes.base import NodeStates, Outcome
from tether.task import describe_error
from tether.trace import Meter
from tether.vector import Vector

#: how long a checkpoint that is being written is waited for when a run ends badly
GRACE_SECONDS = 0.7


class _Beside:
    """A thread that does one thing at a time and, if it falls behind, only the newest; the last is always done."""

    def __init__(self, name: str) -> None:
        self._pending: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self._put(work)

    def close(self) -> None:
        """Do what is still wanted and end; raises what went wrong."""
        self._pending.put(None)
        self._thread.join()
        self.check()

    def abandon(self, seconds: float) -> None:
        """End, and do what is still wanted only if that takes no longer."""
        try:
            self._pending.put(None, timeout=seconds)
        except queue.Full:
            self._put(None)
        self._thread.join(seconds)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _put(self, work: Callable[[], None] | None) -> None:
        while True:
            try:
                self._pending.put_nowait(work)
                return
            except queue.Full:
                with suppress(queue.Empty):
                    self._pending.get_nowait()

    def _work(self) -> None:
        while (work := self._pending.get()) is not None:
            if self._failure is None:
                try:
                    work()
                except Exception as error:
                    self._failure = error


class Director:
    """Takes in what happens in a run: writes metrics, has the joint model evaluated and saved, shows progress."""

    def __init__(
        self,
        plan: RunPlan,
        directory: RunDirectory,
        progress: Progress,
        *,
        beside: bool,
        stop: Callable[[], str | None] | None = None,
    ) -> None:
        """`beside` has models evaluated in a thread; `stop` says why the run shall end, once it shall."""
        self._plan = plan
        self.directory = directory
        self._until = Until.parse(plan.until) if plan.until else None
        self._patience = Patience(plan.patience) if plan.patience is not None else None
        best = directory.load_best() if self._patience is not None else None
        self._best = worth(best.metrics) if best is not None else -math.inf
        self._progress = progress
        self._lock = threading.Lock()
        self.time_before = directory.last_time()  # of the part of the run that is continued
        self._file = directory.metrics.open("a")
        self._evaluator = _Beside("evaluator") if beside else None
        self._writer = _Beside("checkpoints")
        self._model = build_model(plan.task, plan.seed)
        self._vector = Vector(self._model)
        self._stop: str | None = None
        self._asked_to_stop = stop
        self.history: list[dict[str, Any]] = []
        #: what evaluations have found, by the samples that the model had seen, those of earlier parts included
        self._evaluations = directory.evaluations(plan.restored) if plan.restored is not None else {}
        if plan.restored is not None:
            self._row("resumed", 0.0, samples=plan.restored.samples)
        self.step = 0
        self.samples = 0

    def __enter__(self) -> Director:
        workers = [node.name for node in self._plan.nodes if node.computes]
        self._progress.begin(f"{self._plan.task.name} · {self._plan.protocol.name}", workers, self._plan.steps)
        if self._evaluator is not None:
            count = len(self._plan.nodes)
            self._progress.note(f"starting {count} process{'es' if count > 1 else ''}")
        if self._plan.schedule.first_step == 0 and (told := self._plan.task.note()):
            self.note(told)
        for told in self._plan.notes:
            self.note(told)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if kind is not None:
            self._writer.abandon(GRACE_SECONDS)
            if self._evaluator is not None:
                self._evaluator.abandon(0.0)
            self._progress.end(f"ended: {error}" if isinstance(error, TetherError) else f"ended: {kind.__name__}")
        with self._lock:
            self._file.close()

    def finish(self, outcome: Outcome) -> Evaluated:
        """After the last event: the last figures, and whatever is still being evaluated or written.

        What the run has come to is its last model or, if it has patience, the best that it has seen.
        """
        for name, meter in outcome.meters.items():
            if name not in outcome.lost:
                self.meter(meter, outcome.seconds)
        if self._evaluator is not None:
            self._evaluator.close()
        self._writer.close()
        last = self.history[-1]["metrics"] if self.history else {}
        model = Evaluated(self.step, self.samples, last, outcome.weights)
        if self._patience is not None and outcome.reason != f"{self._until} reached":
            model = self.directory.load_best() or model
            if model.step != self.step:
                self.note(f"the model is that of step {model.step}, the best that was seen")
        self._progress.end(", ".join(f"{name} {value:.4g}" for name, value in model.metrics.items()) or "finished")
        return model

    def joint_model(self, weights: Tensor) -> nn.Module:
        """The task's model with these weights."""
        self._vector.weights.copy_(weights)
        return self._model

    # ---- what the runtime tells ----

    def meter(self, meter: Meter, now: float) -> None:
        self._progress.meter(meter, now)
        self._row(
            "progress",
            now,
            node=meter.node,
            steps=meter.steps,
            samples=meter.samples,
            loss=meter.loss,
            compute_seconds=meter.compute_seconds,
            load_seconds=meter.load_seconds,
            wait_seconds=meter.wait_seconds,
            bytes_sent=meter.bytes_sent,
            bytes_received=meter.bytes_received,
            bytes_saved=meter.bytes_saved,
        )

    def record(self, node: str, values: Row, now: float) -> None:
        self._row("record", now, node=node, **values)

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        self.step, self.samples = effect.step, effect.samples
        if self._evaluator is None:
            self._evaluate(effect, weights, now)
        else:
            self._evaluator.check()
            self._evaluator.do(lambda: self._evaluate(effect, weights, now))

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None:
        self._writer.check()
        self._writer.do(lambda: self._save(effect, weights, state))

    def observed(self) -> Sequence[dict[str, float]]:
        return list(self._evaluations.values())

    def note(self, text: str) -> None:
        self._progress.note(text)
        self._row("note", None, text=text)

    def stop_requested(self) -> str | None:
        if self._evaluator is not None:
            self._evaluator.check()
        return self._stop or (self._asked_to_stop() if self._asked_to_stop is not None else None)

    # ---- beside training ----

    def _evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        task = self._plan.task
        try:
            metrics = task.evaluate(self.joint_model(weights))
        except Exception as error:
            raise TaskError(f"evaluate() failed: {describe_error(task, error)}") from error
        if not isinstance(metrics, dict):
            raise TaskError(f"evaluate() of task {type(task).__name__} returned {metrics!r}: return a dict of numbers")
        try:
            metrics = {name: float(value) for name, value in metrics.items()}
        except (TypeError, ValueError):
            raise TaskError(
                f"evaluate() of task {type(task).__name__} returned {metrics!r}: values must be numbers"
            ) from None
        row = {"time": now, "step": effect.step, "samples": effect.samples, "metrics": metrics}
        self.history.append(row)
        self._evaluations[effect.samples] = metrics
        self._row("evaluation", now, step=effect.step, samples=effect.samples, metrics=metrics)
        self._progress.evaluation(metrics, now, effect.step)
        # of equals the last: few held-out rows cannot tell it from the others, and it has learned longest
        if self._patience is not None and (value := worth(metrics)) >= self._best:
            self._best = value
            self.directory.save_best(Evaluated(effect.step, effect.samples, metrics, weights))
        if self._until is not None and self._until.holds(metrics):
            self._stop = f"{self._until} reached"
        elif self._patience is not None and self._patience.ends(metrics):
            self._stop = str(self._patience)

    def _save(self, effect: Checkpoint, weights: Tensor, state: NodeStates) -> None:
        self.directory.save_checkpoint(
            effect.step,
            effect.samples,
            weights,
            effect.state,
            state.hub,
            self._plan.protocol.name,
            state.workers,
            dict(self._evaluations),
        )

    def _row(self, kind: str, now: float | None, **values: Any) -> None:
        time_ = None if now is None else self.time_before + now
        line = json.dumps(finite({"kind": kind, "time": time_, **values}), allow_nan=False)
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")
                self._file.flush()


def finite(value: Any) -> Any:
    """What JSON can hold: a number that is none becomes null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(item) for key, item in value.items()}
    return value
