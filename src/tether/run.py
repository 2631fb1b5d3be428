"""Wires task, protocol and runtime together, and owns the run directory."""

from __future__ import annotations

import json
import math
import operator
import os
import queue
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, ClassVar

from torch import Tensor, nn

from tether.errors import RunError, TaskError, TetherError, UsageError
from tether.learner import Learner, SyntheticLearner, build_model
from tether.machine import Checkpoint, Evaluate, Machine, Message, Node, Replica, Schedule, Seat
from tether.progress import Progress, make_progress
from tether.protocols import Averaging, Options
from tether.protocols import known as known_protocols
from tether.record import EventLog, replay
from tether.rundir import Restored, RunDirectory
from tether.runtimes.base import Outcome, Runtime
from tether.runtimes.interpreter import Recorder
from tether.runtimes.local import Local
from tether.runtimes.sim import Sim
from tether.task import Batches, SyntheticTask, Task, check_task, describe_error
from tether.tasks import load as load_task
from tether.trace import Meter, write_chrome_trace
from tether.vector import Vector, digest

#: a run that only has a target gives up after so many epochs
EPOCHS_MAX = 100


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
            raise UsageError(f"the condition names the metric {self.metric!r}; the task has {known}")
        return bool(self._RELATIONS[self.relation](metrics[self.metric], self.value))

    def __str__(self) -> str:
        return f"{self.metric}{self.relation}{self.value:g}"


@dataclass
class Result:
    """What a run gave."""

    model: nn.Module
    metrics: dict[str, float]
    figures: dict[str, Any]
    history: list[dict[str, Any]]
    directory: Path

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        return f"Result({shown}, seconds={self.figures['seconds']:.4g}, run={str(self.directory)!r})"


@dataclass(frozen=True)
class Request:
    """Everything that decides what a run does; kept in the run directory so that it can be continued."""

    epochs: float | None = None
    steps: int | None = None
    until: str | None = None
    seed: int = 0
    evaluate_every: float = 1.0
    checkpoint_seconds: float = 30.0
    record: bool = False
    trace: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} must be more than 0, not {value}")
        if self.epochs is not None and self.steps is not None:
            raise UsageError("give either epochs or steps, not both")
        if self.until is not None:
            Until.parse(self.until)
        if self.seed < 0:
            raise UsageError(f"seed cannot be negative: {self.seed}")

    def schedule(self, task: Task, samples: int, workers: int, restored: Restored | None) -> Schedule:
        batch_size = task.batch_size
        steps_per_epoch = samples / (workers * batch_size)
        usual = task.epochs if self.until is None else EPOCHS_MAX
        epochs = self.epochs if self.epochs is not None else usual
        first_step = 0
        steps = self.steps if self.steps is not None else math.ceil(epochs * steps_per_epoch)
        if restored is not None:
            # with another number of workers, what is left of the samples is shared anew
            done = restored.samples / (workers * batch_size) if self.steps is None else restored.step
            first_step = math.floor(done)
            if first_step >= steps:
                raise UsageError(f"the run has made its {steps} steps: give more epochs or steps to go further")
        return Schedule(
            steps=max(1, steps),
            evaluate_every=max(1, round(self.evaluate_every * steps_per_epoch)),
            batch_size=batch_size,
            checkpoint_seconds=self.checkpoint_seconds,
            first_step=first_step,
            first_samples=restored.samples if restored else 0,
        )


def run(
    task: Task,
    protocol: Options | None = None,
    on: Runtime | None = None,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    until: str | None = None,
    seed: int = 0,
    run_dir: Path | str | None = None,
    evaluate_every: float = 1.0,
    checkpoint_seconds: float = 30.0,
    record: bool = False,
    trace: bool = True,
    progress: Progress | None = None,
    task_spec: dict[str, Any] | None = None,
) -> Result:
    """Train a task.

    protocol: how the workers agree, `tether.Averaging()` unless given.
    on: where they run, `tether.Local(workers=2)` unless given.
    epochs, steps: how long: passes over the data by all workers together, or optimizer steps per worker; the task's
        own number of epochs unless given.
    until: ends the run early, such as "error<0.05"; alone it allows at most 100 epochs.
    evaluate_every: epochs between two evaluations of the joint model.
    checkpoint_seconds: time between two checkpoints.
    record: keep every event so that the run can be replayed.
    trace: keep spans of time for trace.json.
    progress: the live display; chosen by what standard error is unless given.
    task_spec: how the command line finds the task again.
    """
    request = Request(epochs, steps, until, seed, evaluate_every, checkpoint_seconds, record, trace)
    protocol = protocol if protocol is not None else Averaging()
    if not isinstance(protocol, Options):
        raise UsageError(f"protocol must be options such as tether.Averaging(), not {protocol!r}")
    on = on if on is not None else Local(protocol.workers_max or 2)
    plan = RunPlan.make(task, protocol, on, request, None)
    directory = RunDirectory.create(Path(run_dir) if run_dir is not None else None, f"{task.name}-{protocol.name}")
    return _execute(plan, on, request, directory, progress, task_spec)


def resume(
    run_dir: Path | str,
    task: Task | None = None,
    *,
    workers: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    until: str | None = None,
    progress: Progress | None = None,
) -> Result:
    """Continue a run from its newest checkpoint.

    task: needed if the run was not started by the command line.
    workers: another number of workers than before.
    epochs, steps, until: another goal than before.
    """
    directory = RunDirectory.open(Path(run_dir))
    config = directory.read_config()
    restored = directory.load_checkpoint()
    if restored is None:
        raise UsageError(f"{directory.path} has no checkpoint to continue from: start the run again")
    _refuse_if_running(directory, config)
    task, protocol, on, request = _reopen(config, task, workers)
    request = replace(request, record=False)  # a record begins at the beginning
    if epochs is not None or steps is not None or until is not None:
        request = replace(request, epochs=epochs, steps=steps, until=until)
    plan = RunPlan.make(task, protocol, on, request, restored)
    return _execute(plan, on, request, directory, progress, config["task"])


def replay_recorded(run_dir: Path | str, task: Task | None = None) -> dict[str, int]:
    """Feed a recorded run into fresh machines: the number of events per node, or an error where one differs."""
    directory = RunDirectory.open(Path(run_dir))
    files = sorted((directory.path / "record").glob("*.events"))
    if not files:
        raise UsageError(f"{directory.path} was not recorded: run it with --record (record=True)")
    plan = RunPlan.make(*_reopen(directory.read_config(), task, None), None)
    nodes = {node.name: node for node in plan.nodes}
    counts = {}
    for file in files:
        node = nodes[file.stem.partition("~")[0]]
        while node.name != file.stem:
            node = node.successor()
        counts[file.stem] = replay(file, plan.messages, *plan.build(node))
    return counts


def _reopen(config: dict[str, Any], task: Task | None, workers: int | None) -> tuple[Task, Options, Runtime, Request]:
    """The parts of a run as its directory describes them."""
    if task is None:
        spec = config["task"]
        if spec.get("spec") is None:
            raise UsageError(f"the task {spec['name']!r} was not named on a command line: give it as resume(run, task)")
        task = load_task(spec["spec"], data=Path(spec["data"]) if spec["data"] else None, settings=spec["settings"])
    named = dict(config["protocol"])
    protocol = known_protocols()[named.pop("name")](**named)
    described = dict(config["runtime"])
    kind = {"local": Local, "sim": Sim}[described.pop("name")]
    on: Runtime = kind(workers=workers if workers is not None else config["workers"], **described)
    return task, protocol, on, Request(**config["request"])


def _refuse_if_running(directory: RunDirectory, config: dict[str, Any]) -> None:
    if config["status"] == "running" and config["pid"] != os.getpid() and Path(f"/proc/{config['pid']}").exists():
        raise UsageError(f"{directory.path} is still running, as process {config['pid']}: stop that first")


def _execute(
    plan: RunPlan,
    on: Runtime,
    request: Request,
    directory: RunDirectory,
    progress: Progress | None,
    task_spec: dict[str, Any] | None,
) -> Result:
    plan.directory = directory
    config: dict[str, Any] = {
        "version": 1,
        "status": "running",
        "reason": "",
        "error": None,
        "pid": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": {"name": plan.task.name, "spec": None, **(task_spec or {})},
        "protocol": {"name": plan.protocol.name, **asdict(plan.protocol)},
        "runtime": on.describe(),
        "workers": plan.workers,
        "request": asdict(request),
        "seed": request.seed,
        "result": None,
    }
    directory.write_config(config)
    director = Director(plan, directory, request, progress or make_progress(), beside=not on.virtual)
    began = time.monotonic()
    try:
        with director:
            outcome = on.execute(plan, director)
            director.finish(outcome)
        result = _result(plan, on, outcome, director, time.monotonic() - began)
    except KeyboardInterrupt:
        directory.write_config({**config, "status": "interrupted", "reason": "interrupted by the user"})
        raise
    except TetherError as error:
        directory.write_config({**config, "status": "failed", "error": f"{type(error).__name__}: {error}"})
        raise
    except BaseException as error:
        directory.write_config({**config, "status": "failed", "error": repr(error)})
        raise
    if outcome.spans and plan.traced:
        write_chrome_trace(directory.trace, outcome.spans)
    directory.write_config({**config, "status": "finished", "reason": outcome.reason, "result": result.figures})
    return result


@dataclass
class RunPlan:
    """Who takes part and how each is built; travels to the processes of a run."""

    task: Task
    protocol: Options
    nodes: tuple[Node, ...]
    schedule: Schedule
    seed: int
    vector_bytes: int
    record: bool
    traced: bool
    restored: Restored | None
    directory: RunDirectory | None = None
    _data: Any = field(default=None, repr=False)

    @staticmethod
    def make(task: Task, protocol: Options, on: Runtime, request: Request, restored: Restored | None) -> RunPlan:
        """Check the task as far as that is possible without training it."""
        if not isinstance(task, Task):
            hint = f"write {task.__name__}()" if isinstance(task, type) else "subclass tether.Task"
            raise UsageError(f"the first argument must be a Task, not {task!r}: {hint}")
        if protocol.workers_max is not None and on.workers > protocol.workers_max:
            raise UsageError(
                f"protocol {protocol.name!r} uses {protocol.workers_max} worker, not {on.workers}: "
                "leave the number of workers out, or choose another protocol"
            )
        data = task.train_data()
        samples = check_task(task, data, on.workers)
        plan = RunPlan(
            task=task,
            protocol=protocol,
            nodes=protocol.nodes(on.workers),
            schedule=request.schedule(task, samples, on.workers, restored),
            seed=request.seed,
            vector_bytes=0,
            record=request.record,
            traced=request.trace,
            restored=restored,
            _data=data,
        )
        joint = next(node for node in plan.nodes if node.name == plan.joint)
        _, replica = plan.build(joint)
        if protocol.steps_at_hub and isinstance(replica, Learner) and not replica.flat:
            raise UsageError(
                f"{type(replica.optimizer).__name__} cannot run on a flat vector, which protocol {protocol.name!r} "
                "needs at its hub: use protocol 'averaging' or 'single', or an optimizer such as torch.optim.SGD"
            )
        plan.vector_bytes = replica.weights.numel() * replica.weights.element_size()
        return plan

    @property
    def joint(self) -> str:
        return self.protocol.joint

    @property
    def messages(self) -> tuple[type[Message], ...]:
        return self.protocol.messages

    @property
    def steps(self) -> int:
        return self.schedule.steps - self.schedule.first_step

    @property
    def workers(self) -> int:
        return sum(node.computes for node in self.nodes)

    def build(self, node: Node) -> tuple[Machine, Replica]:
        replica: Replica
        if isinstance(self.task, SyntheticTask):
            replica = SyntheticLearner(self.task, index=node.index, seed=self.seed)
        else:
            replica = Learner(self.task, self._batches(node), node=node.name, seed=self.seed)
        restored = self.restored
        if restored is not None:
            if replica.weights.shape != restored.weights.shape:
                raise UsageError(
                    f"the checkpoint holds {restored.weights.numel()} values and the model {replica.weights.numel()}: "
                    "the task's model has changed since"
                )
            replica.weights.copy_(restored.weights)
            if node.name == self.joint:
                replica.restore(restored.replica_state)
        seat = Seat(
            node,
            self.nodes,
            replica.weights,
            replica.parameter_count,
            self.schedule,
            restored.state if restored else None,
        )
        return self.protocol.machine(seat), replica

    def _batches(self, node: Node) -> Any:
        if not node.computes:
            return iter(())
        if self._data is None:
            self._data = self.task.train_data()
        first = self.schedule.first_samples
        return Batches(self.task, self._data, seed=self.seed, index=node.index, count=self.workers, first=first)

    def log(self, name: str) -> IO[bytes] | None:
        return self.directory.below("logs", f"{name}.log").open("wb") if self.directory else None

    def recorder(self, node: Node, replica: Replica) -> Recorder | None:
        if not self.record or self.directory is None:
            return None
        return EventLog(self.directory.below("record", f"{node.name}.events"), replica)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None}


class _Beside:
    """A thread that does one thing at a time and, if it falls behind, only the newest; the last is always done."""

    def __init__(self, name: str) -> None:
        self._pending: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self._put(work)

    def close(self, wait: bool = True) -> None:
        """Do what is still wanted and end; raises what went wrong. Without `wait`, what is pending is given up."""
        if wait:
            self._pending.put(None)
            self._thread.join()
            self.check()
        else:
            self._put(None)

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
        self, plan: RunPlan, directory: RunDirectory, request: Request, progress: Progress, *, beside: bool
    ) -> None:
        self._plan = plan
        self.directory = directory
        self._until = Until.parse(request.until) if request.until else None
        self._progress = progress
        self._lock = threading.Lock()
        self._time_before = directory.last_time()  # of the part of the run that is continued
        self._file = directory.metrics.open("a")
        self._evaluator = _Beside("evaluator") if beside else None
        self._writer = _Beside("checkpoints")
        self._model = build_model(plan.task, plan.seed)
        self._vector = Vector(self._model)
        self._stop: str | None = None
        self.history: list[dict[str, Any]] = []
        self.step = 0
        self.samples = 0

    def __enter__(self) -> Director:
        workers = [node.name for node in self._plan.nodes if node.computes]
        self._progress.begin(f"{self._plan.task.name} · {self._plan.protocol.name}", workers, self._plan.steps)
        if self._evaluator is not None:
            count = len(self._plan.nodes)
            self._progress.note(f"starting {count} process{'es' if count > 1 else ''}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if kind is not None:
            for thread in filter(None, (self._evaluator, self._writer)):
                thread.close(wait=False)
            self._progress.end(f"ended: {error}" if isinstance(error, TetherError) else f"ended: {kind.__name__}")
        with self._lock:
            self._file.close()

    def finish(self, outcome: Outcome) -> None:
        """After the last event: the last figures, and whatever is still being evaluated or written."""
        for name, meter in outcome.meters.items():
            if name not in outcome.lost:
                self.meter(meter, outcome.seconds)
        if self._evaluator is not None:
            self._evaluator.close()
        self._writer.close()
        metrics = self.history[-1]["metrics"] if self.history else {}
        self._progress.end(", ".join(f"{name} {value:.4g}" for name, value in metrics.items()) or "finished")

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
            wait_seconds=meter.wait_seconds,
            bytes_sent=meter.bytes_sent,
            bytes_received=meter.bytes_received,
        )

    def record(self, node: str, values: dict[str, float | int | str], now: float) -> None:
        self._row("record", now, node=node, **values)

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        self.step, self.samples = effect.step, effect.samples
        if self._evaluator is None:
            self._evaluate(effect, weights, now)
        else:
            self._evaluator.check()
            self._evaluator.do(lambda: self._evaluate(effect, weights, now))

    def checkpoint(self, effect: Checkpoint, weights: Tensor, replica_state: dict[str, Any], now: float) -> None:
        self._writer.check()
        self._writer.do(lambda: self._save(effect, weights, replica_state))

    def note(self, text: str) -> None:
        self._progress.note(text)
        self._row("note", None, text=text)

    def stop_requested(self) -> str | None:
        if self._evaluator is not None:
            self._evaluator.check()
        return self._stop

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
        self._row("evaluation", now, step=effect.step, samples=effect.samples, metrics=metrics)
        self._progress.evaluation(metrics, now, effect.step)
        if self._until is not None and self._until.holds(metrics):
            self._stop = f"{self._until} reached"

    def _save(self, effect: Checkpoint, weights: Tensor, replica_state: dict[str, Any]) -> None:
        self.directory.save_checkpoint(effect.step, effect.samples, weights, effect.state, replica_state)

    def _row(self, kind: str, now: float | None, **values: Any) -> None:
        time_ = None if now is None else self._time_before + now
        line = json.dumps(_finite({"kind": kind, "time": time_, **values}), allow_nan=False)
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")
                self._file.flush()


def _finite(value: Any) -> Any:
    """What JSON can hold: a number that is none becomes null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
    return value


def _result(plan: RunPlan, on: Runtime, outcome: Outcome, director: Director, wall_seconds: float) -> Result:
    workers = {node.name for node in plan.nodes if node.computes}
    meters = outcome.meters
    computing = [meter for name, meter in meters.items() if name.partition("~")[0] in workers]
    if not computing:
        raise RunError("the run ended without figures of any worker")
    model = director.joint_model(outcome.weights)
    staleness: Counter[int] = Counter()
    for meter in meters.values():
        staleness.update(meter.staleness)
    metrics = director.history[-1]["metrics"] if director.history else {}
    figures = {
        "protocol": plan.protocol.name,
        "runtime": on.name,
        "workers": plan.workers,
        "steps": director.step,
        "samples": director.samples,
        "seconds": outcome.seconds,
        "samples_per_second": (director.samples - plan.schedule.first_samples) / max(outcome.seconds, 1e-9),
        "wall_seconds": wall_seconds,
        "metrics": metrics,
        "digest": digest(outcome.weights),
        "bytes_sent": sum(meter.bytes_sent for meter in meters.values()),
        "bytes_received": sum(meter.bytes_received for meter in meters.values()),
        "overlap": statistics.fmean(meter.overlap for meter in computing),
        "utilization": {
            "mean": statistics.fmean(meter.utilization(outcome.seconds) for meter in computing),
            "workers": {meter.node: meter.utilization(outcome.seconds) for meter in computing},
        },
        "staleness": {
            "mean": sum(k * n for k, n in staleness.items()) / max(1, sum(staleness.values())),
            "max": max(staleness, default=0),
            "histogram": {str(k): n for k, n in sorted(staleness.items())},
        },
        "events": outcome.events,
        "reason": outcome.reason,
        "run": str(director.directory.path),
    }
    return Result(model, metrics, _finite(figures), director.history, director.directory.path)
