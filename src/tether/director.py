"""Takes in what happens in a run: metrics, evaluation, checkpoints, the display."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from tether.checkpoint import Evaluated, Restored
from tether.errors import UsageError
from tether.interruption import Interruption
from tether.learner import build_model, evaluate
from tether.machine import Checkpoint, Evaluate, Row
from tether.metrics import MetricsWriter
from tether.plan import Patience, Request, RunPlan, Until, worth
from tether.progress import Progress
from tether.rundir import RunDirectory, not_finite
from tether.runtimes.base import NodeStates, Outcome
from tether.task import metric_of, users_code
from tether.trace import SPANS_MAX, Meter
from tether.twin import Guest, own_device
from tether.vector import Vector, is_finite

#: how much memory models may take that wait for their evaluation, and how many there may be
WAITING_BYTES, WAITING_MAX = 512 << 20, 100
#: a model whose metric is better by less than this share has learned nothing
LITTLE = 0.05
#: how long a checkpoint that is being written is waited for when a run ends badly
GRACE_SECONDS = 0.7


class _Beside:
    """A thread that does one thing at a time. If it falls behind, some of what waits is left out, but never the last.

    Each work has a place, which is its number of samples, and comes after those before it. Of more than `room` works
    that wait, the one goes whose neighbours are nearest to each other: what is done is spread evenly. What is to be
    done at 0, before all others, stays.
    """

    def __init__(self, name: str, room: int = 1, *, newest_first: bool = False) -> None:
        self._room = room
        self._newest_first = newest_first
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        #: the places of works that were begun
        self._begun = [0]
        self.left_out = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, place: int, work: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.append((place, work))
            if len(self._waiting) > self._room:
                self._leave_one_out()
            self._changed.notify()

    def _leave_one_out(self) -> None:
        places = sorted([*self._begun, *(place for place, _ in self._waiting)])
        gaps = {}
        for i, (place, _) in enumerate(self._waiting[:-1]):
            if place > 0:
                at = bisect.bisect_left(places, place)
                gaps[i] = places[at + 1] - places[at - 1]
        if gaps:
            del self._waiting[min(gaps, key=gaps.__getitem__)]
            self.left_out += 1

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def next_place(self) -> float:
        """The place of the first work that waits."""
        with self._changed:
            return min((place for place, _ in self._waiting), default=math.inf)

    def close(self, seconds_left: Callable[[], float] = lambda: math.inf) -> None:
        """Do what is still wanted, as far as there is time, and end; raises what went wrong."""
        self._end()
        while self._thread.is_alive() and seconds_left() > 0:
            self._thread.join(0.1)
        self.abandon(0.0)
        self.check()

    def leave_out_all_but_the_last(self) -> None:
        with self._changed:
            self._waiting = self._waiting[-1:]

    def abandon(self, seconds: float) -> None:
        """End, and do what is still wanted only as far as that takes no longer."""
        self._end()
        self._thread.join(seconds)
        with self._changed:
            self._waiting.clear()

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                place, work = self._waiting.pop(-1 if self._newest_first else 0)
                self._begun.append(place)
            if self._failure is None:
                try:
                    work()
                except Exception as error:
                    self._failure = error
            del work  # and the weights that it holds


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
        interruption: Interruption | None = None,
    ) -> None:
        """`beside` has models evaluated in a thread; `stop` says why the run shall end, once it shall."""
        self._interruption = interruption or Interruption()
        self._plan = plan
        self.directory = directory
        self._until = Until.parse(plan.until) if plan.until else None
        self._patience = Patience(plan.patience) if plan.patience is not None else None
        best = directory.load_best() if self._patience is not None else None
        self._best = (worth(best.metrics), best.step) if best is not None else (-math.inf, 0)
        self._progress = progress
        self._lock = threading.Lock()
        history = directory.history()
        self.time_before = history.last_time  # of the part of the run that is continued
        self._metrics = MetricsWriter(directory.metrics)
        #: what could not be written, and how to try again; what has been told about already
        self._owed: dict[str, Callable[[], None]] = {}
        self._told_of: set[str] = set()
        #: the newest checkpoint and the best model, while they are owed
        self._unsaved: Restored | None = None
        self._unsaved_best: Evaluated | None = None
        self._abandoned = False
        self._model = build_model(plan.task, plan.seed)
        # the device after the learners', if there are so many
        device = own_device(plan.workers) if next(self._model.parameters()).device.type == "cpu" else None
        self._guest = Guest(self._model, device) if device is not None else None
        self._vector = Vector(self._model)
        self._evaluator: _Beside | None = None
        if beside:
            room = max(1, min(WAITING_MAX, WAITING_BYTES // max(1, self._vector.weights.nbytes)))
            # whether the run shall end is a question to the newest model
            decides = self._until is not None or self._patience is not None
            self._evaluator = _Beside("evaluator", room, newest_first=decides)
        self._writer = _Beside("checkpoints")
        #: the metrics before training, as far as they are known
        self.untrained = history.untrained
        self._stop: str | None = None
        self._asked_to_stop = stop
        self.history: list[dict[str, Any]] = []
        #: what evaluations have found, by the samples that the model had seen, those of earlier parts included
        self._evaluations = history.evaluations(plan.restored) if plan.restored is not None else {}
        if history.damage:
            directory.notes.append(history.damage)
        if plan.restored is not None:
            self._row("resumed", 0.0, samples=plan.restored.samples)
        #: evaluations before which another waits, in order
        self._held: list[dict[str, Any]] = []
        self._in_order = threading.Lock()
        self._asked = 0
        self._newest = 0
        #: what is wrong with the model that the run has come to
        self.warning: str | None = None
        self.step = 0
        self.samples = 0
        #: whose gradients the guard has refused
        self._guarded: set[str] = set()

    def __enter__(self) -> Director:
        workers = [node.name for node in self._plan.nodes if node.computes]
        self._progress.begin(f"{self._plan.task.name} · {self._plan.protocol.name}", workers, self._plan.steps)
        return self

    def begin(self, request: Request) -> None:
        """Before training: say what there is to say, and have the untrained model evaluated.

        A goal that its metrics cannot tell is refused.
        """
        if self._evaluator is not None:
            count = len(self._plan.nodes)
            self._progress.note(f"starting {count} process{'es' if count > 1 else ''}")
        if self._plan.schedule.first_step == 0:
            with users_code(self._plan.task, "note()"):
                told = self._plan.task.note()
            if told:
                self.note(told)
        for told in self._plan.notes:
            self.note(told)
        self._tell_of_damage()
        until = Until.parse(request.until) if request.until else None
        decided = until is not None or self._patience is not None or request.patience is not None
        weights = self._vector.weights.clone() if self._plan.restored is None else self._plan.restored.weights
        if self.untrained is None and self._plan.restored is None:
            if self._evaluator is None or decided:
                self._evaluate_untrained(weights)
            else:
                self._evaluator.do(0, lambda: self._evaluate_untrained(weights))
        if decided:
            metrics = self.untrained if self.untrained is not None else self._measure(weights)
            if until is not None:
                until.holds(metrics)
            if self._patience is not None or request.patience is not None:
                worth(metrics)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if kind is not None:
            self._writer.abandon(GRACE_SECONDS)
            if self._evaluator is not None:
                self._evaluator.abandon(0.0)
            self._release(math.inf)
            self._progress.close()  # whoever gets the error tells it
            with self._lock:
                self._abandoned = True

    def finish(self, outcome: Outcome, last: bool = True) -> Evaluated:
        """After the last event: the last figures, and whatever is still to be evaluated or written.

        What the run has come to is its last model or, if it has patience, the best that it has seen. `last`: no other
        phase follows.
        """
        for name, meter in outcome.meters.items():
            if name not in outcome.lost:
                self.meter(meter, outcome.seconds)
        if dropped := sum(meter.spans_dropped for meter in outcome.meters.values()):
            self.note(f"{dropped} spans are not in trace.json, which has the first {SPANS_MAX} of each node")
        interrupted, seconds_left = self._interruption.happened, self._interruption.seconds_left
        if self._evaluator is not None:
            if interrupted:
                self._evaluator.leave_out_all_but_the_last()
            elif (waiting := self._evaluator.waiting) > 1:
                self._progress.note(f"training has ended; {waiting} evaluations are still to be made")
            self._evaluator.close(seconds_left)
            if left_out := self._evaluator.left_out:
                self.note(
                    f"{left_out} of {self._asked} evaluations were left out, since training was faster: "
                    "raise evaluate_every"
                )
        self._writer.close(seconds_left)
        self._require_finite(self.step, outcome.weights)
        metrics = self.history[-1]["metrics"] if self.history else {}
        if self._interruption.happened and self.history and self.history[-1]["step"] != self.step:
            metrics = {}  # there was no time to evaluate the model that it ended with
        model = Evaluated(self.step, self.samples, metrics, outcome.weights)
        if self._patience is not None and outcome.reason != f"{self._until} reached":
            model = self._unsaved_best or self.directory.load_best() or model
            self._tell_of_damage()
            if model.step != self.step:
                self.note(f"the model is that of step {model.step}, the best that was seen")
        if last and (warning := self._judge(model.metrics)):
            self.warning = warning
            self.note(warning)
        self._progress.end(", ".join(f"{name} {value:.4g}" for name, value in model.metrics.items()) or "finished")
        return model

    def keep(self, what: str, write: Callable[[], None]) -> None:
        """Write something; if that fails, say so once, and try again when the same thing is written next.

        A run without its trace, or without its newest checkpoint, is better than none.
        """
        try:
            write()
        except OSError as error:
            self._owed[what] = write
            if what not in self._told_of:
                self._told_of.add(what)
                self.note(f"{what} cannot be written ({error.strerror or error}): the run goes on, and tries again")
        else:
            self._owed.pop(what, None)

    def retry(self) -> None:
        """Try once more to write what could not be written, and say what is still missing."""
        for what, write in list(self._owed.items()):
            self.keep(what, write)
        if self.unsaved:
            self.note(f"not kept: {', '.join(self.unsaved)}")

    @property
    def unsaved(self) -> list[str]:
        """What could not be written so far."""
        rows = self._metrics.unwritten
        missing = [what for what in self._owed if what != "metrics.jsonl"]
        return [*missing, f"{rows} rows of metrics.jsonl"] if rows else missing

    def newest(self) -> Restored | None:
        """What the run can go on from: its newest checkpoint, also one that could not be written."""
        kept, made = self.directory.load_checkpoint(), self._unsaved
        if made is None or "the last checkpoint" not in self._owed:
            return kept
        return made if made.workers or kept is None else replace(made, workers=kept.workers)

    def joint_model(self, weights: Tensor) -> nn.Module:
        """The task's model with these weights, in evaluation mode."""
        self._vector.weights.copy_(weights)
        return self._model.eval()

    # ---- what the runtime tells ----

    def meter(self, meter: Meter, now: float) -> None:
        self._interruption.worthwhile |= meter.steps > 0
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
            gradients_skipped=meter.gradients_skipped,
            gradients_refused=meter.gradients_refused,
        )
        if meter.gradients_refused and meter.node not in self._guarded:
            self._guarded.add(meter.node)
            self.note(
                f"{meter.node} refuses gradients that are far longer than is usual for it (guard); look at its data"
            )

    def record(self, node: str, values: Row, now: float) -> None:
        self._interruption.worthwhile = True
        self._row("record", now, node=node, **values)

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        self._interruption.worthwhile = True
        self.step, self.samples = effect.step, effect.samples
        self._asked += 1
        if self._evaluator is None:
            self._evaluate(effect, weights, now)
        else:
            self._evaluator.check()
            kept = weights.clone()  # while it waits, its sender may use the memory again
            self._evaluator.do(effect.samples, lambda: self._evaluate(effect, kept, now))

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None:
        self._writer.check()
        self._writer.do(effect.samples, lambda: self._save(effect, weights, state))

    def observed(self) -> Sequence[dict[str, float]]:
        return list(self._evaluations.values())

    def note(self, text: str) -> None:
        self._progress.note(text)
        self._row("note", None, text=text)

    def stop_requested(self) -> str | None:
        if self._evaluator is not None:
            self._evaluator.check()
        asked = self._asked_to_stop() if self._asked_to_stop is not None else None
        return self._stop or self._interruption.reason or asked

    def seconds_left(self) -> float:
        return self._interruption.seconds_left()

    # ---- beside training ----

    def _evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        self._require_finite(effect.step, weights)
        metrics = self._measure(weights)
        row = {"time": now, "step": effect.step, "samples": effect.samples, "metrics": metrics}
        with self._in_order:
            bisect.insort(self._held, row, key=lambda row: row["samples"])
        self._release(self._evaluator.next_place() if self._evaluator is not None else math.inf)
        late = effect.samples < self._newest
        self._newest = max(self._newest, effect.samples)
        if not late:
            self._progress.evaluation(metrics, now, effect.step)
        # of equals the last: few held-out rows cannot tell it from the others, and it has learned longest
        if self._patience is not None and (found := (worth(metrics), effect.step)) >= self._best:
            self._best = found
            self._unsaved_best = Evaluated(effect.step, effect.samples, metrics, weights)
            self.keep("best.safetensors", partial(self._save_best, self._unsaved_best))
        if self._until is not None and self._until.holds(metrics):
            self._stop = f"{self._until} reached"
        elif self._patience is not None and self._patience.ends(metrics, late=late):
            self._stop = str(self._patience)

    def _release(self, before: float) -> None:
        """Write the rows that no evaluation still to come belongs before."""
        with self._in_order:
            while self._held and self._held[0]["samples"] <= before:
                row = self._held.pop(0)
                self.history.append(row)
                self._evaluations[row["samples"]] = row["metrics"]
                self._row("evaluation", row["time"], step=row["step"], samples=row["samples"], metrics=row["metrics"])

    def _evaluate_untrained(self, weights: Tensor) -> None:
        self.untrained = self._measure(weights)
        self._row("untrained", 0.0, metrics=self.untrained)

    def _measure(self, weights: Tensor) -> dict[str, float]:
        """The metrics of these weights, on a device if there is one that can."""
        if self._guest is not None:
            try:
                self._guest.take(weights)
                return evaluate(self._plan.task, self._guest.model)
            except Exception as error:  # also for want of memory: the learners come first
                self.note(f"evaluating on {self._guest.device} failed, and is done on the host from now on: {error}")
                self._guest = None
        return evaluate(self._plan.task, self.joint_model(weights))

    def _require_finite(self, step: int, weights: Tensor) -> None:
        if not is_finite(weights[: self._vector.parameter_count]):
            raise not_finite(step)

    def _judge(self, metrics: dict[str, float]) -> str | None:
        """What is wrong with a model that has these metrics: it has learned nothing, or lost what it had learned."""
        metric = metric_of(metrics)
        if self.untrained is None or metric not in self.untrained:
            return None
        start, end = self.untrained[metric], metrics[metric]
        try:
            gained = worth({metric: end}) - worth({metric: start})
            gains = {worth({metric: row["metrics"][metric]}) - worth({metric: start}): row for row in self.history}
        except (UsageError, LookupError):
            return None  # nobody knows what is better
        most = max((gain for gain in gains if math.isfinite(gain)), default=0.0)
        if gained > max(LITTLE * abs(start), most / 2) or (start == end == 0 and worth({metric: 1.0}) < 0):
            return None
        told = f"{metric} {end:.4g}, {start:.4g} before"
        if most > 2 * max(gained, LITTLE * abs(start)):
            best = gains[most]
            told += f", and {best['metrics'][metric]:.4g} at step {best['step']}, which patience would have kept"
        much = "no" if not gained > 0 else "hardly" if gained <= LITTLE * abs(start) else "not much"
        return (
            f"the model is {much} better than before training ({told}): lower the learning rate or the momentum, use "
            "fewer workers or another protocol, or check the data"
        )

    def _save(self, effect: Checkpoint, weights: Tensor, state: NodeStates) -> None:
        evaluations = dict(self._evaluations)
        self._require_finite(effect.step, weights)
        self._unsaved = Restored(
            effect.step,
            effect.samples,
            weights,
            effect.state,
            state.hub,
            self._plan.protocol.name,
            state.workers or {},
            evaluations,
        )
        self.keep("the last checkpoint", partial(self._write_checkpoint, self._unsaved, state.workers))

    def _write_checkpoint(self, made: Restored, workers: dict[int, dict[str, Any]] | None) -> None:
        self.directory.save_checkpoint(
            made.step,
            made.samples,
            made.weights,
            made.state,
            made.replica_state,
            made.protocol,
            workers,
            made.evaluations,
            self._vector.parameter_count,
        )
        self._unsaved = None

    def _save_best(self, best: Evaluated) -> None:
        self.directory.save_best(best)
        self._unsaved_best = None

    def _tell_of_damage(self) -> None:
        for told in self.directory.notes:
            self.note(told)
        self.directory.notes.clear()

    def _row(self, kind: str, now: float | None, **values: Any) -> None:
        time_ = None if now is None else self.time_before + now
        with self._lock:
            if self._abandoned:
                return
            self._metrics.append(finite({"kind": kind, "time": time_, **values}))
        self.keep("metrics.jsonl", self._flush)

    def _flush(self) -> None:
        with self._lock:
            self._metrics.flush()


def finite(value: Any) -> Any:
    """What JSON can hold: a number that is none becomes null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(item) for key, item in value.items()}
    return value
