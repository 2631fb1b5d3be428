"""Wires task, protocol and runtime together."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from tether.checkpoint import Evaluated, Restored
from tether.director import Director, finite
from tether.errors import Interrupted, NodesLost, RunError, UsageError, own_faults
from tether.interruption import Interruption
from tether.plan import Request, RunPlan
from tether.progress import Progress, make_progress
from tether.protocols import Options
from tether.protocols import make as make_protocol
from tether.record import replay
from tether.rundir import VERSION, RunDirectory
from tether.runtimes.base import Outcome, Runtime
from tether.runtimes.hadoop import HadoopStorage, is_url
from tether.runtimes.local import Local
from tether.runtimes.sim import Sim
from tether.runtimes.spark import Spark
from tether.task import Task, check_is_task
from tether.tasks import load as load_task
from tether.tasks import not_while_importing
from tether.trace import relative_error
from tether.vector import digest


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


@own_faults()
def run(
    task: Task,
    protocol: Options | None = None,
    on: Runtime | None = None,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    until: str | None = None,
    seconds: float | None = None,
    patience: int | None = None,
    warmup: Options | None = None,
    warmup_epochs: float = 1.0,
    seed: int = 0,
    run_dir: Path | str | None = None,
    evaluate_every: float = 1.0,
    checkpoint_seconds: float = 30.0,
    checkpoints: str | None = None,
    record: bool = False,
    trace: bool = True,
    progress: Progress | None = None,
    stop: Callable[[], str | None] | None = None,
    task_spec: dict[str, Any] | None = None,
) -> Result:
    """Train a task.

    protocol: how the workers agree; the task's own unless given, which is `tether.Averaging()` for most.
    on: where they run, `tether.Local(workers=2)` unless given.
    epochs, steps: how long: passes over the data by all workers together, or optimizer steps per worker; the task's
        own number of epochs unless given.
    until: ends the run early, such as "error<0.05"; alone it allows at most 100 epochs.
    seconds: ends the run early, after so long (virtual seconds in the simulator); alone it allows at most 100 epochs.
    patience: ends the run early, when its metric (validation_error, or else error, or else the first that the task has)
        has not got better for so many evaluations; alone it allows at most 100 epochs. The model is then the best seen,
        of equals the last, and not that of the end, unless `until` has ended the run.
    warmup, warmup_epochs: begin with so many epochs of another protocol, such as tether.Server(sync="hard").
    evaluate_every: epochs between two evaluations of the joint model. Those that fall behind are made after training,
        as far as their models fit into 512 MiB.
    checkpoint_seconds: time between two checkpoints.
    checkpoints: keep them at this URL of any file system that Hadoop knows, such as hdfs://HOST/PATH, instead of in the
        run directory; `resume` takes the URL on any machine.
    record: keep every event so that the run can be replayed.
    trace: keep spans of time for trace.json.
    progress: the live display; chosen by what standard error is unless given.
    stop: asked all the time; the run ends, in good order, with the reason that it returns.
    task_spec: how the command line finds the task again.

    Ctrl-C ends the run within three seconds, in good order, and raises `tether.Interrupted`, a KeyboardInterrupt whose
    `result` is what would have been returned: the joint model as it is, its metrics, the run directory. In a notebook
    it is `sys.last_value.result`. A second Ctrl-C ends the run at once.
    """
    not_while_importing()
    check_is_task(task)
    protocol = protocol if protocol is not None else make_protocol(task.protocol)
    for options in filter(None, (protocol, warmup)):
        if not isinstance(options, Options):
            raise UsageError(f"protocol must be options such as tether.Averaging(), not {options!r}")
    request = Request(
        epochs,
        steps,
        until,
        seed,
        evaluate_every,
        checkpoint_seconds,
        record,
        trace,
        _described(warmup) if warmup is not None else None,
        warmup_epochs,
        seconds,
        patience,
    )
    on = on if on is not None else Local(protocol.workers_max or 2)
    phases = _phases(task, protocol, on, request, None)
    storage = HadoopStorage(checkpoints) if checkpoints is not None else None
    name = f"{task.name}-{protocol.name}"
    directory = RunDirectory.create(Path(run_dir) if run_dir is not None else None, name, storage)
    with directory.lock(), Interruption() as interruption:
        return _execute(phases, protocol, on, request, directory, progress, task_spec, interruption, stop)


class Training:
    """A run in the background: a handle to the model that it will have made when somebody looks.

    Looking at `result` or `model` ends the run in good order, and what is there then never changes. A handle that is
    dropped unseen ends its run too. `wait` lets it come to its own end.
    """

    def __init__(self, work: Callable[[Callable[[], str | None]], Result]) -> None:
        done: Future[Result] = Future()
        wanted = threading.Event()

        def run_() -> None:  # which must not refer to the handle, or nobody could drop it
            try:
                done.set_result(work(lambda: "asked to end" if wanted.is_set() else None))
            except BaseException as error:
                done.set_exception(error)

        self._done, self._wanted = done, wanted
        self._thread = threading.Thread(target=run_, name="training", daemon=True)
        self._thread.start()
        weakref.finalize(self, wanted.set)

    @property
    def is_over(self) -> bool:
        """Whether the run has come to an end."""
        return self._done.done()

    @property
    def result(self) -> Result:
        """What the run gave; ends it."""
        self._wanted.set()
        return self._done.result()

    @property
    def model(self) -> nn.Module:
        """The joint model; ends the run."""
        return self.result.model

    def wait(self, seconds: float | None = None) -> Result:
        """What the run gave, when it has ended by itself; `TimeoutError` if that takes longer."""
        return self._done.result(seconds)


def start(task: Task, protocol: Options | None = None, on: Runtime | None = None, **options: Any) -> Training:
    """As `run`, but in the background: returns at once, with a handle to the model."""
    not_while_importing()
    return Training(lambda stop: run(task, protocol, on, stop=stop, **options))


@own_faults()
def resume(
    run_dir: Path | str,
    task: Task | None = None,
    *,
    workers: int | None = None,
    master: str | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    until: str | None = None,
    seconds: float | None = None,
    patience: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Continue a run from its newest checkpoint.

    run_dir: its directory, or the URL of its checkpoints. With a URL nothing else of the run need be on this machine: a
        new run directory is made, whose metrics begin anew.
    task: needed if the run was not started by the command line.
    workers: another number of workers than before.
    master: of a run on Spark: another cluster than before. A session that there is already is used as it is.
    epochs, steps, until, seconds, patience: another goal than before; seconds and patience count from now on. What was
        the best before the run was continued may remain so.
    """
    not_while_importing()
    if isinstance(run_dir, str) and is_url(run_dir):
        directory = RunDirectory.fetch(HadoopStorage(run_dir))
    else:
        directory = RunDirectory.open(Path(run_dir))
    with directory.lock():
        config = directory.read_config()
        if directory.storage is None and config.get("checkpoints"):
            directory.storage = HadoopStorage(config["checkpoints"])
        restored = directory.load_checkpoint()
        if restored is None:
            where = directory.storage.url if directory.storage is not None else directory.path
            damage = "".join(f"; {note}" for note in directory.notes)
            raise UsageError(f"{where} has no checkpoint to continue from: start the run again{damage}")
        if master is not None:
            if config["runtime"]["name"] != "spark":
                raise UsageError(f"master: {directory.path} was no run on Spark")
            config["runtime"]["master"] = master
        task, protocol, on, request = _reopen(config, task, workers)
        request = replace(request, record=False)  # a record begins at the beginning
        if any(goal is not None for goal in (epochs, steps, until, seconds, patience)):
            request = replace(request, epochs=epochs, steps=steps, until=until, seconds=seconds, patience=patience)
        phases = _phases(task, protocol, on, request, restored)
        with Interruption() as interruption:
            return _execute(phases, protocol, on, request, directory, progress, config["task"], interruption)


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
    protocol = make_protocol(config["protocol"])
    described = dict(config["runtime"])
    kinds: dict[str, Callable[..., Runtime]] = {"local": Local, "sim": Sim, "spark": Spark.at}
    on = kinds[described.pop("name")](workers=workers if workers is not None else config["workers"], **described)
    return task, protocol, on, Request(**config["request"])


def _described(protocol: Options) -> dict[str, Any]:
    return {"name": protocol.name, **asdict(protocol)}


def _phases(
    task: Task, protocol: Options, on: Runtime, request: Request, restored: Restored | None
) -> list[Callable[[Restored | None], RunPlan]]:
    """How to plan each phase that is still to come, given the newest backup if there is one. The first is tried out."""

    def main(restored: Restored | None) -> RunPlan:
        return RunPlan.make(task, protocol, on, request, restored)

    def warm(restored: Restored | None) -> RunPlan:
        assert request.warmup is not None
        goal = replace(request, epochs=request.warmup_epochs, steps=None, until=None, seconds=None, patience=None)
        return RunPlan.make(task, make_protocol(request.warmup), on, goal, restored)

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


def _execute(
    phases: list[Callable[[Restored | None], RunPlan]],
    protocol: Options,
    on: Runtime,
    request: Request,
    directory: RunDirectory,
    progress: Progress | None,
    task_spec: dict[str, Any] | None,
    interruption: Interruption,
    stop: Callable[[], str | None] | None = None,
) -> Result:
    plan = phases[0](None)
    config: dict[str, Any] = {
        "version": VERSION,
        "status": "running",
        "reason": "",
        "error": None,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "checkpoints": directory.storage.url if directory.storage is not None else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": {"name": plan.task.name, "spec": None, **(task_spec or {})},
        "protocol": _described(protocol),
        "runtime": on.describe(),
        "workers": plan.workers,
        "request": asdict(request),
        "seed": request.seed,
        "result": None,
    }
    directory.begin(config)
    progress = progress or make_progress()
    began = time.monotonic()
    try:
        waiting, restarts = deque(phases), on.restarts
        while waiting:
            plan.directory = directory
            director = Director(plan, directory, progress, beside=not on.virtual, stop=stop, interruption=interruption)
            try:
                with director:
                    director.begin(request)
                    outcome = on.execute(plan, director)
                    model = director.finish(outcome, last=len(waiting) == 1)
                waiting.popleft()
                if interruption.happened:
                    waiting.clear()
            except NodesLost as error:
                if interruption.happened:
                    raise KeyboardInterrupt from error
                if not restarts:
                    raise NodesLost(f"{error}; continue with 'tether resume'") from error
                restarts -= 1
                plan = waiting[0](director.newest())
                plan.notes += (f"{error}; going on from the last backup, step {plan.schedule.first_step}",)
                if plan.seconds is not None:
                    plan.seconds = max(1.0, plan.seconds - (time.monotonic() - began))
                continue
            if waiting:
                plan = waiting[0](director.newest())
        result = _result(plan, on, outcome, director, model, time.monotonic() - began)
    except KeyboardInterrupt:
        with suppress(OSError):
            directory.write_config({**config, "status": "interrupted", "reason": "interrupted by the user"})
        raise Interrupted(directory.path, resumable=directory.has_checkpoint()) from None
    except BaseException as error:
        with suppress(OSError):
            directory.write_config({**config, "status": "failed", "error": f"{type(error).__name__}: {error}"})
        raise
    if outcome.spans and plan.traced:
        director.keep("trace.json", lambda: directory.write_trace(outcome.spans))
    director.retry()
    result.figures["unsaved"] = director.unsaved
    status = "interrupted" if outcome.reason == interruption.reason else "finished"
    ended = {**config, "status": status, "reason": outcome.reason, "result": result.figures}
    director.keep("run.json", lambda: directory.write_config(ended))
    result.figures["unsaved"] = director.unsaved
    if interruption.happened:
        raise Interrupted(directory.path, result, resumable=status == "interrupted")
    return result


def _result(
    plan: RunPlan, on: Runtime, outcome: Outcome, director: Director, model: Evaluated, wall_seconds: float
) -> Result:
    workers = {node.name for node in plan.nodes if node.computes}
    meters = outcome.meters
    computing = [meter for name, meter in meters.items() if name.partition("~")[0] in workers]
    if not computing:
        raise RunError("the run ended without figures of any worker")
    staleness: Counter[int] = Counter()
    for meter in meters.values():
        staleness.update(meter.staleness)
    figures: dict[str, Any] = {
        "protocol": plan.protocol.name,
        "runtime": on.name,
        "workers": plan.workers,
        "steps": director.step,
        "samples": director.samples,
        "seconds": director.time_before + outcome.seconds,
        "samples_per_second": (director.samples - plan.schedule.first_samples) / max(outcome.seconds, 1e-9),
        "wall_seconds": wall_seconds,
        "metrics": model.metrics,
        "untrained_metrics": director.untrained,
        "warning": director.warning,
        "model_step": model.step,
        "digest": digest(model.weights),
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
        "gradients_skipped": sum(meter.gradients_skipped for meter in meters.values()),
        "gradients_refused": {
            name: meter.gradients_refused for name, meter in meters.items() if meter.gradients_refused
        },
        "events": outcome.events,
        "reason": outcome.reason,
        "run": str(director.directory.path),
    }
    if plan.compress != "none":
        sent, saved = figures["bytes_sent"], sum(meter.bytes_saved for meter in meters.values())
        figures["compression"] = {
            "bytes_saved": saved,
            "share": sent / max(1, sent + saved),
            "relative_error": relative_error(meters.values()),
        }
    joint = director.joint_model(model.weights)
    return Result(joint, model.metrics, finite(figures), director.history, director.directory.path)
