"""Takes in what happens in a run: writes metrics, has the joint model evaluated and saved, shows progress."""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tether.core.effects import Checkpoint, Evaluate
from tether.core.message import Row
from tether.core.trace import SPANS_MAX, Meter
from tether.errors import TaskError
from tether.execution.background import BackgroundQueue
from tether.execution.callbacks import Callbacks
from tether.execution.checkpoint import Evaluated, Restored
from tether.execution.directory import RunDirectory
from tether.execution.evaluation import JointModel, learning_warning
from tether.execution.goals import Patience, Request, Until, score
from tether.execution.interruption import Interruption
from tether.execution.metrics import MetricsWriter
from tether.execution.pending import PendingWrites
from tether.execution.plan import RunPlan
from tether.execution.progress import Progress
from tether.runtimes.base import NodeStates, Outcome
from tether.task import Task, users_code

#: the most memory for models that wait for their evaluation, and the most such models
WAITING_BYTES, WAITING_MAX = 512 << 20, 100
#: how long a run that fails waits for a checkpoint that is being written
GRACE_SECONDS = 0.7
#: how many of the latest rows of metrics are kept for who watches the run
RECENT_MAX = 300
#: what the pending writes call the newest checkpoint
LAST_CHECKPOINT = "the last checkpoint"


class RunObserver:
    """What a runtime reports to. One observer serves one part of a run, from its start to its end or failure."""

    def __init__(
        self,
        plan: RunPlan,
        directory: RunDirectory,
        progress: Progress,
        *,
        background: bool,
        stop: Callable[[], str | None] | None = None,
        interruption: Interruption | None = None,
        asked_at: float | None = None,
        joint: Callable[[RunPlan, Callable[[str], None]], JointModel] = JointModel,
        callbacks: Callbacks | None = None,
    ) -> None:
        """`background`: evaluate models in a thread while training goes on; it is off where time is virtual.

        `stop` returns the reason for which the run is to end, once there is one. `asked_at` is when the caller asked
        for the run, by `time.monotonic`. `joint` makes the joint model.
        """
        self._interruption = interruption or Interruption()
        self._plan = plan
        self._callbacks = callbacks or Callbacks()
        self.directory = directory
        self._until = Until.parse(plan.until) if plan.until else None
        self._patience = Patience(plan.patience) if plan.patience is not None else None
        best = directory.load_best() if self._patience is not None else None
        self._best = (score(best.metrics), best.step) if best is not None else (-math.inf, 0)
        self._progress = progress
        self._asked_at = time.monotonic() if asked_at is None else asked_at
        #: seconds from then until training began; 0 where time is virtual, None while it has not begun
        self.startup_seconds: float | None = None if background else 0.0
        history = directory.history()
        #: seconds of training in earlier parts of the run
        self.earlier_seconds = history.last_time
        self._metrics = MetricsWriter(directory.metrics)
        self._metrics_lock = threading.Lock()
        #: the latest rows with their numbers, for who watches the run from elsewhere
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=RECENT_MAX)
        self._rows_written = 0
        self._writes = PendingWrites(self.note)
        #: the newest checkpoint and the best model, while their writes are pending
        self._unsaved: Restored | None = None
        self._unsaved_best: Evaluated | None = None
        self._abandoned = False
        self._joint = joint(plan, self.note)
        self._evaluator: BackgroundQueue | None = None
        if background:
            room = max(1, min(WAITING_MAX, WAITING_BYTES // max(1, self._joint.nbytes)))
            # the newest model decides whether the run ends
            decides = self._until is not None or self._patience is not None
            self._evaluator = BackgroundQueue("evaluator", room, newest_first=decides)
        self._writer = BackgroundQueue("checkpoints")
        #: the metrics of the model before training, if they are known
        self.untrained = history.untrained
        self._stop_reason: str | None = None
        self._stop_asked = stop
        self.history: list[dict[str, Any]] = []
        #: the metrics of every evaluation by its number of samples, those of earlier parts of the run included
        self._evaluations = history.evaluations(plan.restored) if plan.restored is not None else {}
        if history.damage:
            directory.notes.append(history.damage)
        if plan.restored is not None:
            self._write_row("resumed", 0.0, samples=plan.restored.samples)
        #: rows of evaluations that wait for the row of an earlier one, in order
        self._held_rows: list[dict[str, Any]] = []
        self._held_lock = threading.Lock()
        self._evaluations_asked = 0
        self._newest_evaluated = 0
        #: what is wrong with the final model, if anything
        self.warning: str | None = None
        self.step = 0
        self.samples = 0
        #: nodes whose gradients the guard has refused
        self._guarded: set[str] = set()

    def __enter__(self) -> RunObserver:
        workers = [node.name for node in self._plan.nodes if node.computes]
        self._progress.begin(f"{self._plan.task.name} · {self._plan.protocol.name}", workers, self._plan.steps)
        if (first_step := self._plan.schedule.first_step) > 0:
            self._progress.resumed(first_step)
        return self

    def begin(self, request: Request) -> None:
        """Before training: pass on the notes and have the untrained model evaluated.

        Raises UsageError if the task's metrics do not suit the goal.
        """
        if self._evaluator is not None:
            self._progress.starting(len(self._plan.nodes))
        if self._plan.schedule.first_step == 0:
            with users_code(self._plan.task, "note()"):
                text = self._plan.task.note()
            if text:
                self.note(text)
            self._keep_files("files()", self._plan.task.files)
        for text in self._plan.notes:
            self.note(text)
        self._note_damage()
        until = Until.parse(request.until) if request.until else None
        decided = until is not None or self._patience is not None or request.patience is not None
        weights = self._joint.weights() if self._plan.restored is None else self._plan.restored.weights
        if self.untrained is None and self._plan.restored is None and not self._plan.scripted:
            if self._evaluator is None or decided:
                self._evaluate_untrained(weights)
            else:
                self._evaluator.submit(0, lambda: self._evaluate_untrained(weights))
        if decided:
            metrics = self.untrained if self.untrained is not None else self._joint.measure(weights)
            if until is not None:
                until.holds(metrics)
            if self._patience is not None or request.patience is not None:
                score(metrics)

    def _keep_files(self, method: str, made: Callable[[], Mapping[str, str | bytes]]) -> None:
        """Write what a method of the task returns, beside the model."""
        task = self._plan.task
        with users_code(task, method):
            files = made()
            valid = isinstance(files, dict) and all(
                isinstance(content, str | bytes) and isinstance(name, str) and Path(name).name == name
                for name, content in files.items()
            )
        if not valid:
            raise TaskError(
                f"{method} of task {type(task).__name__} returned {files!r:.200}: return a dict of texts or bytes by "
                "file names without folders"
            )
        if files:
            self.write("the task's files", lambda: self.directory.write_files(files))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if kind is not None:
            self._writer.abandon(GRACE_SECONDS)
            if self._evaluator is not None:
                self._evaluator.abandon(0.0)
            self._write_held_rows(math.inf)
            self._progress.close()  # the caller reports the error
            with self._metrics_lock:
                self._abandoned = True

    def finish(self, outcome: Outcome, last: bool = True) -> Evaluated:
        """After the last event: write the last figures, and do the evaluations and writes that still wait.

        Returns the last model or, if the run has patience, the best one. `last`: no other phase follows.
        """
        for name, meter in outcome.meters.items():
            if name not in outcome.lost:
                self.meter(meter, outcome.seconds)
        if dropped := sum(meter.spans_dropped for meter in outcome.meters.values()):
            self.note(f"{dropped} spans are not in trace.json, which has the first {SPANS_MAX} of each node")
        interrupted, seconds_left = self._interruption.happened, self._interruption.seconds_left
        if self._evaluator is not None:
            if interrupted:
                self._evaluator.keep_only_last()
            elif (waiting := self._evaluator.waiting) > 1:
                self._progress.note(f"training has ended; {waiting} evaluations remain")
            self._evaluator.close(seconds_left)
            if dropped := self._evaluator.dropped:
                self.note(
                    f"{dropped} of {self._evaluations_asked} evaluations were left out, because training was faster: "
                    "raise evaluate_every"
                )
        self._writer.close(seconds_left)
        self._joint.require_finite(self.step, outcome.weights)
        metrics = self.history[-1]["metrics"] if self.history else {}
        unmeasured = self._interruption.happened or self._plan.scripted
        if unmeasured and self.history and self.history[-1]["step"] != self.step:
            metrics = {}  # the final model was not evaluated
        model = Evaluated(self.step, self.samples, metrics, outcome.weights)
        if self._patience is not None and outcome.reason != f"{self._until} reached":
            model = self._unsaved_best or self.directory.load_best() or model
            self._note_damage()
            if model.step != self.step:
                self.note(f"the model is that of step {model.step}, the best that was seen")
        if last and not interrupted and not self._plan.scripted:
            joint = self._joint.with_weights(model.weights)
            self._keep_files("final_files()", lambda: self._plan.task.final_files(joint))
        if last and (warning := learning_warning(model.metrics, self.untrained, self.history)):
            self.warning = warning
            self.note(warning)
        self._progress.end(", ".join(f"{name} {value:.4g}" for name, value in model.metrics.items()) or "finished")
        return model

    def write(self, name: str, write: Callable[[], None]) -> None:
        """Write something; if that fails, say so once and try again later."""
        self._writes.write(name, write)

    def retry_writes(self) -> None:
        """Try once more to write what could not be written, and say what is still missing."""
        self._writes.retry()
        if self.unsaved:
            self.note(f"not saved: {', '.join(self.unsaved)}")

    @property
    def unsaved(self) -> list[str]:
        """What could not be written so far."""
        rows = self._metrics.unwritten
        missing = [name for name in self._writes.names if name != "metrics.jsonl"]
        return [*missing, f"{rows} rows of metrics.jsonl"] if rows else missing

    def newest_checkpoint(self) -> Restored | None:
        """What the run can resume from: its newest checkpoint, even one that could not be written."""
        saved, unsaved = self.directory.load_checkpoint(), self._unsaved
        if unsaved is None or LAST_CHECKPOINT not in self._writes.names:
            return saved
        return unsaved if unsaved.workers or saved is None else replace(unsaved, workers=saved.workers)

    def joint_model(self, weights: Tensor) -> nn.Module:
        """The task's model with these weights, in evaluation mode."""
        return self._joint.with_weights(weights)

    # ---- reports of the runtime ----

    def meter(self, meter: Meter, now: float) -> None:
        self._mark_training(now)
        self._interruption.worthwhile |= meter.steps > 0
        self._progress.meter(meter, now)
        figures = {
            "node": meter.node,
            "steps": meter.steps,
            "samples": meter.samples,
            "loss": meter.loss,
            "compute_seconds": meter.compute_seconds,
            "load_seconds": meter.load_seconds,
            "wait_seconds": meter.wait_seconds,
            "bytes_sent": meter.bytes_sent,
            "bytes_received": meter.bytes_received,
            "bytes_saved": meter.bytes_saved,
            "bytes_to_host": meter.bytes_to_host,
            "bytes_to_device": meter.bytes_to_device,
            "gradients_skipped": meter.gradients_skipped,
            "gradients_refused": meter.gradients_refused,
        }
        self._write_row("progress", now, **figures)
        self._callbacks.call("on_progress", finite({"time": self.earlier_seconds + now, **figures}))
        if meter.gradients_refused and meter.node not in self._guarded:
            self._guarded.add(meter.node)
            self.note(f"{meter.node} refuses gradients that are far longer than usual for it (guard); look at its data")

    def record(self, node: str, values: Row, now: float) -> None:
        self._mark_training(now)
        self._interruption.worthwhile = True
        self._write_row("record", now, node=node, **values)

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        self._mark_training(now)
        self._interruption.worthwhile = True
        self.step, self.samples = effect.step, effect.samples
        if self._plan.scripted:
            return  # the user's own loop evaluates
        self._evaluations_asked += 1
        if self._evaluator is None:
            self._evaluate(effect, weights, now)
        else:
            self._evaluator.raise_failure()
            kept = weights.clone()  # the sender may reuse the memory while this waits
            self._evaluator.submit(effect.samples, lambda: self._evaluate(effect, kept, now))

    def measured(self, step: int, metrics: dict[str, float], now: float, *, final: bool) -> None:
        step = self.step if final else step
        samples = self.samples if final else step * (self._plan.schedule.step_batches or self._plan.workers)
        self.history.append({"time": now, "step": step, "samples": samples, "metrics": metrics})
        self._evaluations[samples] = metrics
        self._write_row("evaluation", now, step=step, samples=samples, metrics=metrics)
        self._progress.evaluation(metrics, now, step)

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None:
        self._writer.raise_failure()
        self._writer.submit(effect.samples, lambda: self._save(effect, weights, state))

    def observed(self) -> Sequence[dict[str, float]]:
        return list(self._evaluations.values())

    def note(self, text: str) -> None:
        self._progress.note(text)
        self._write_row("note", None, text=text)

    def recent_rows(self, after: int) -> list[tuple[int, dict[str, Any]]]:
        with self._metrics_lock:
            return [numbered for numbered in self._recent if numbered[0] > after]

    def stop_requested(self) -> str | None:
        if self._evaluator is not None:
            self._evaluator.raise_failure()
        asked = self._stop_asked() if self._stop_asked is not None else None
        return self._stop_reason or self._interruption.reason or asked

    def seconds_left(self) -> float:
        return self._interruption.seconds_left()

    def _mark_training(self, now: float) -> None:
        """The first report of a node says for how long training has gone on, and so when it began."""
        if self.startup_seconds is None:
            self.startup_seconds = max(0.0, time.monotonic() - now - self._asked_at)
            self._progress.training(self.startup_seconds, now)

    # ---- in the background ----

    def _evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        self._joint.require_finite(effect.step, weights)
        metrics = self._joint.measure(weights)
        row = {"time": now, "step": effect.step, "samples": effect.samples, "metrics": metrics}
        with self._held_lock:
            bisect.insort(self._held_rows, row, key=lambda row: row["samples"])
        self._write_held_rows(self._evaluator.first_position() if self._evaluator is not None else math.inf)
        task = self._plan.task
        if type(task).step_files is not Task.step_files:
            joint = self._joint.with_weights(weights)
            self._keep_files("step_files()", lambda: task.step_files(joint, effect.step))
        late = effect.samples < self._newest_evaluated
        self._newest_evaluated = max(self._newest_evaluated, effect.samples)
        if not late:
            self._progress.evaluation(metrics, now, effect.step)
        # on ties, the most recent: few held-out rows cannot tell the two apart, and it has learned longest
        if self._patience is not None and (found := (score(metrics), effect.step)) >= self._best:
            self._best = found
            self._unsaved_best = Evaluated(effect.step, effect.samples, metrics, weights)
            self.write("best.safetensors", partial(self._write_best, self._unsaved_best))
        if self._until is not None and self._until.holds(metrics):
            self._stop_reason = f"{self._until} reached"
        elif self._patience is not None and self._patience.ends(metrics, late=late):
            self._stop_reason = str(self._patience)

    def _write_held_rows(self, up_to: float) -> None:
        """Write the rows of evaluations up to this number of samples: no evaluation that waits comes before them."""
        with self._held_lock:
            while self._held_rows and self._held_rows[0]["samples"] <= up_to:
                row = self._held_rows.pop(0)
                self.history.append(row)
                self._evaluations[row["samples"]] = row["metrics"]
                values = {name: row[name] for name in ("step", "samples", "metrics")}
                self._write_row("evaluation", row["time"], **values)
                self._callbacks.call("on_evaluation", row["step"], row["samples"], dict(row["metrics"]))

    def _evaluate_untrained(self, weights: Tensor) -> None:
        self.untrained = self._joint.measure(weights)
        self._write_row("untrained", 0.0, metrics=self.untrained)

    def _save(self, effect: Checkpoint, weights: Tensor, state: NodeStates) -> None:
        evaluations = dict(self._evaluations)
        self._joint.require_finite(effect.step, weights)
        self._unsaved = Restored(
            effect.step,
            effect.samples,
            weights,
            effect.state,
            state.hub,
            self._plan.protocol.name,
            state.workers or {},
            evaluations,
            others=self._joint.layout.others,
        )
        self.write(LAST_CHECKPOINT, partial(self._write_checkpoint, self._unsaved, state.workers))

    def _write_checkpoint(self, made: Restored, workers: dict[int, dict[str, Any]] | None) -> None:
        path = self.directory.save_checkpoint(
            made.step,
            made.samples,
            made.weights,
            made.state,
            made.replica_state,
            made.protocol,
            workers,
            made.evaluations,
            self._joint.parameter_count,
            self._joint.layout,
        )
        self._unsaved = None
        storage = self.directory.storage
        where = str(path) if storage is None else f"{storage.url}/checkpoints/{path.name}"
        self._callbacks.call("on_checkpoint", made.step, made.samples, where)

    def _write_best(self, best: Evaluated) -> None:
        self.directory.save_best(best, self._joint.layout)
        self._unsaved_best = None

    def _note_damage(self) -> None:
        for text in self.directory.notes:
            self.note(text)
        self.directory.notes.clear()

    def _write_row(self, kind: str, now: float | None, **values: Any) -> None:
        seconds = None if now is None else self.earlier_seconds + now
        with self._metrics_lock:
            self._rows_written += 1
            self._recent.append((self._rows_written, finite({"kind": kind, "time": seconds, **values})))
            if self._abandoned:
                return
            self._metrics.append(finite({"kind": kind, "time": seconds, **values}))
        self.write("metrics.jsonl", self._flush)

    def _flush(self) -> None:
        with self._metrics_lock:
            self._metrics.flush()


def finite(value: Any) -> Any:
    """The value as JSON can hold it: non-finite numbers become null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(item) for key, item in value.items()}
    return value
