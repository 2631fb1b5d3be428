"""The public door: `run`, `start`, `resume` and `replay_recorded`, and what they return."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from tether.errors import UsageError, own_faults, unknown
from tether.execution.callbacks import Callbacks
from tether.execution.checkpoint import load_tensors
from tether.execution.directory import RunDirectory
from tether.execution.execute import Execution, described, plan_phases
from tether.execution.goals import Request
from tether.execution.interruption import Interruption
from tether.execution.plan import RunPlan
from tether.execution.progress import FollowedProgress, Progress, make_progress
from tether.execution.result import Result
from tether.loops.launch import launch
from tether.protocols import Options
from tether.protocols import make as make_protocol
from tether.runtimes.base import Runtime
from tether.runtimes.cluster import Cluster
from tether.runtimes.local import Local
from tether.runtimes.ray.runtime import Ray
from tether.runtimes.record import replay
from tether.runtimes.sim.runtime import Sim
from tether.runtimes.spark.hadoop import HadoopStorage, is_url
from tether.runtimes.spark.runtime import Spark
from tether.task import Callback, Task, check_can_travel, check_is_task, users_code
from tether.tasks import load as load_task
from tether.tasks import not_while_importing

__all__ = ["Result", "Training", "replay_recorded", "resume", "run", "start"]

P = ParamSpec("P")
R = TypeVar("R")


def _checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Turn arguments that a function does not take into a usage error, which Python would call a TypeError."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _check_names(kwargs, signature)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{function.__name__}(): {error}; see help(tether.{function.__name__})") from None
        return function(*args, **kwargs)

    return call


def _check_names(given: Iterable[str], signature: inspect.Signature) -> None:
    for name in given:
        if name not in signature.parameters:
            raise unknown("argument", name, signature.parameters)


@own_faults()
@_checks_arguments
def run(
    task: Task,
    protocol: Options | str | None = None,
    on: Runtime | str | None = None,
    *,
    workers: int | None = None,
    master: str | None = None,
    address: str | None = None,
    device: str | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    until: str | None = None,
    seconds: float | None = None,
    patience: int | None = None,
    warmup: Options | None = None,
    warmup_epochs: float = 1.0,
    seed: int | None = None,
    weights: Mapping[str, Tensor] | Path | str | None = None,
    run_dir: Path | str | None = None,
    evaluate_every: float | None = None,
    checkpoint_seconds: float = 30.0,
    checkpoints: str | None = None,
    record: bool = False,
    trace: bool = True,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], str | None] | None = None,
    task_spec: dict[str, Any] | None = None,
) -> Result:
    """Train a task and return the joint model.

    Arguments have the names of the options of `tether train`.

    protocol: how the workers agree: options such as `tether.Mpca(alpha=0.1)`, or a name such as "mpca". The default is
        the task's own, which is `tether.Tide()` for most tasks.
    on: where the workers run: `tether.Local(...)`, `tether.Sim(...)`, `tether.Spark(...)`, `tether.Ray(...)`, or just
        "local", "sim", "spark" or "ray"; local by default.
    workers: how many workers, 2 by default, if `on` is a name or left out.
    master: with on="spark", the cluster; a small one on this machine by default.
    address: with on="ray", the cluster, such as HOST:6379; the one that runs on this machine by default.
    device: where workers compute, if `on` is a name or left out: "cuda:0", "cuda" for all such devices in turns, "cpu",
        or "auto", the default, for what the machine has.
    epochs, steps: how long to train: passes over the data by all workers together, or optimizer steps per worker. The
        default is the task's own number of epochs or steps.
    until: end early when a metric reaches a value, such as "error<0.05". If only this is given, the run ends after 100
        epochs at the latest.
    seconds: end early after this time (virtual seconds in the simulator). If only this is given, the run ends after 100
        epochs at the latest.
    patience: end early when the metric has not improved for this many evaluations. The metric is validation_error, or
        else error, or else the first one the task has. If only this is given, the run ends after 100 epochs at the
        latest. The result is then the best model seen, on ties the most recent, and not the last model, unless `until`
        ended the run.
    warmup, warmup_epochs: begin with this many epochs of another protocol, such as tether.Server(sync="hard").
    seed: of the model's first weights, of the order of the data, and of all other random numbers; 0 by default, or the
        task's own.
    weights: what the model begins with: a state_dict, or a .safetensors or .pt file of one. It must have every tensor
        of the model. The default is what the task's model() returns.
    run_dir: where to keep the run; the default is a new directory below `runs`. The files of a run that ended there
        without a checkpoint are removed; a directory that holds any other run is refused.
    evaluate_every: epochs between two evaluations of the joint model; 1 by default, or the task's own. Evaluations that
        fall behind are done after training, as far as their models fit into 512 MiB.
    checkpoint_seconds: time between two checkpoints.
    checkpoints: keep checkpoints at this URL of any file system that Hadoop knows, such as hdfs://HOST/PATH, instead of
        in the run directory; `resume` accepts the URL on any machine.
    record: store every event, so that the run can be replayed.
    trace: store spans of time for trace.json.
    progress: the live display; the default depends on what standard error is.
    callbacks: objects whose methods are called at steps, evaluations, checkpoints and the end; see `tether.Callback`.
        `tether.CsvLogger`, `tether.TensorBoardLogger` and `tether.WandbLogger` are some.
    stop: called often; when it returns a reason, the run ends in good order with that reason.
    task_spec: how the command line finds the task again.

    Ctrl-C ends the run within three seconds, in good order, and raises `tether.Interrupted`, a KeyboardInterrupt whose
    `result` is what `run` would have returned: the joint model as it is, its metrics, the run directory. In a notebook
    it is `sys.last_value.result`. A second Ctrl-C ends the run at once.

    `tether.start` takes the same arguments, trains in the background and returns a `tether.Training`.
    """
    asked_at = time.monotonic()
    not_while_importing()
    check_is_task(task)
    if isinstance(protocol, str):
        protocol = make_protocol({"name": protocol})
    protocol = protocol if protocol is not None else make_protocol(task.protocol)
    _check_protocol("protocol", protocol)
    if warmup is not None:
        _check_protocol("warmup", warmup)
    on = make_runtime(on, workers, master, protocol, address=address, device=device)
    with users_code(task, "run_defaults()"):
        defaults = task.run_defaults(on.workers, seed)
    if all(goal is None for goal in (epochs, steps, until, seconds, patience)):
        steps = defaults.get("steps")
    request = Request(
        epochs,
        steps,
        until,
        defaults.get("seed", 0) if seed is None else seed,
        defaults.get("evaluate_every", 1.0) if evaluate_every is None else evaluate_every,
        checkpoint_seconds,
        record,
        trace,
        described(warmup) if warmup is not None else None,
        warmup_epochs,
        seconds,
        patience,
    )
    called = _checked_callbacks(callbacks, on)
    beginning = _state_dict(defaults.get("weights") if weights is None else weights)
    phases = plan_phases(task, protocol, on, request, weights=beginning)
    storage = HadoopStorage(checkpoints) if checkpoints is not None else None
    name = f"{task.name}-{protocol.name}"
    directory = RunDirectory.create(Path(run_dir) if run_dir is not None else None, name, storage)
    progress = progress or make_progress()
    with directory.lock(), Interruption() as interruption:
        return Execution(
            phases,
            protocol,
            on,
            request,
            directory,
            interruption,
            asked_at,
            progress,
            task_spec,
            stop,
            callbacks=called,
        ).run()


class Training:
    """A run in the background, as `tether.start` returns it. Its repr says how far it is.

    `stop()` ends the run in good order and returns its result. `wait()` returns the result when the run has ended by
    itself. `result` and `model` are there once it is over; looking at them earlier is an error and does not disturb the
    run. What went wrong in the run is raised by all four, as by a `concurrent.futures.Future`. A handle that is dropped
    ends its run.
    """

    def __init__(self, work: Callable[[Callable[[], str | None], Progress], Result], display: Progress | None) -> None:
        """`work` trains, is given a function that says why it is to stop, once it is, and reports to a display."""
        outcome: Future[Result] = Future()
        stopping = threading.Event()
        progress = FollowedProgress(display)

        def train() -> None:  # must not refer to the handle, which could then never be dropped
            try:
                outcome.set_result(work(lambda: "asked to end" if stopping.is_set() else None, progress))
            except BaseException as error:
                outcome.set_exception(error)

        self._outcome, self._stopping, self._progress = outcome, stopping, progress
        self._thread = threading.Thread(target=train, name="training", daemon=True)
        self._thread.start()
        weakref.finalize(self, stopping.set)

    def __repr__(self) -> str:
        if not self.is_over:
            return f"Training({'stopping, ' if self._stopping.is_set() else ''}{self._progress})"
        if (error := self._outcome.exception()) is not None:
            return f"Training(failed, {type(error).__name__}: {error})"
        result = self._outcome.result()
        return f"Training(over, {result.figures['reason']}, {result!r})"

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, by itself, by `stop()` or by an error."""
        return self._outcome.done()

    @property
    def result(self) -> Result:
        """What the run returned; UsageError while it is running."""
        if not self.is_over:
            raise UsageError(
                f"the run is not over ({self._progress}): call stop() to end it now, or wait() for it to "
                "end by itself; both return the result"
            )
        return self._outcome.result()

    @property
    def model(self) -> nn.Module:
        """The joint model of the result; UsageError while the run is going on."""
        return self.result.model

    def stop(self) -> Result:
        """End the run in good order and return its result; if it is over already, only return the result."""
        self._stopping.set()
        return self._outcome.result()

    def wait(self, seconds: float | None = None) -> Result:
        """Wait until the run ends by itself and return its result; TimeoutError if that takes longer than `seconds`."""
        return self._outcome.result(seconds)


def start(
    task: Task,
    protocol: Options | str | None = None,
    on: Runtime | str | None = None,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Training:
    """As `run`, but in the background: returns a handle to the run at once."""
    not_while_importing()
    _check_names(options, inspect.signature(run))
    return Training(lambda stop, display: run(task, protocol, on, stop=stop, progress=display, **options), progress)


@own_faults()
@_checks_arguments
def resume(
    run_dir: Path | str,
    task: Task | None = None,
    *,
    workers: int | None = None,
    master: str | None = None,
    address: str | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    until: str | None = None,
    seconds: float | None = None,
    patience: int | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], str | None] | None = None,
) -> Result:
    """Continue a run from its newest checkpoint.

    run_dir: its directory, or the URL of its checkpoints. With a URL, nothing else of the run need be on this machine:
        a new run directory is made, which holds only the metrics from now on.
    task: needed if the run was not started by the command line.
    workers: another number of workers than before.
    master: for a run on Spark, another cluster than before. An existing session is used as it is.
    address: for a run on Ray, another cluster than before.
    epochs, steps, until, seconds, patience: another goal than before; seconds and patience count from now on. Without
        epochs and steps the run goes no further than it would have gone before. A model from before remains the best
        until a better one is found.
    callbacks, stop: as in `run`; those of the earlier part are not kept.
    """
    asked_at = time.monotonic()
    not_while_importing()
    if isinstance(run_dir, str) and is_url(run_dir):
        directory = RunDirectory.fetch(HadoopStorage(run_dir))
    else:
        directory = RunDirectory.open(Path(run_dir))
    if directory.storage is None and "script" in directory.read_config()["task"]:
        if any(other is not None for other in (task, master, address, epochs, steps, until, seconds, patience)):
            raise UsageError(f"{directory.path} is a run of a script, which knows its own task and goal: name neither")
        return launch(None, resume=directory.path, workers=workers, progress=progress)
    with directory.lock():
        config = directory.read_config()
        if directory.storage is None and config.get("checkpoints"):
            directory.storage = HadoopStorage(config["checkpoints"])
        restored = directory.load_checkpoint()
        if restored is None:
            where = directory.storage.url if directory.storage is not None else directory.path
            damage = "".join(f"; {note}" for note in directory.notes)
            how = f"with --run {directory.path} (run_dir)" if directory.is_abandoned() else "in another place"
            raise UsageError(f"{where} has no checkpoint to continue from: start the run again, {how}{damage}")
        for name, place in {"master": master, "address": address}.items():
            if place is not None:
                if config["runtime"]["name"] != _PLACES[name]:
                    engine = _PLACES[name].title()
                    raise UsageError(f"{name}: {directory.path} was not a run on {engine}; leave {name} out")
                config["runtime"][name] = place
        task, protocol, on, request = _reopen(config, task, workers)
        request = replace(request, record=False)  # a record begins at the beginning
        if any(goal is not None for goal in (epochs, steps, until, seconds, patience)):
            request = request.with_goal(task, epochs, steps, until, seconds, patience)
        called = _checked_callbacks(callbacks, on)
        phases = plan_phases(task, protocol, on, request, restored)
        progress = progress or make_progress()
        with Interruption() as interruption:
            return Execution(
                phases,
                protocol,
                on,
                request,
                directory,
                interruption,
                asked_at,
                progress,
                config["task"],
                stop,
                callbacks=called,
            ).run()


def trained_model(run_dir: Path | str) -> tuple[dict[str, Tensor], dict[str, bytes]]:
    """The model of a run as tensors by the names of its state_dict, and the files that its task keeps beside it.

    It is the model that the run returned or, if it has not ended, that of its newest checkpoint or the best one so far.
    run_dir: its directory, or the URL of its checkpoints.
    """
    with TemporaryDirectory(prefix="tether-") as copies:
        directory = _opened(run_dir, Path(copies))
        model, files = directory.load_model(), directory.read_files()
    if model is None:
        damage = "".join(f"; {note}" for note in directory.notes)
        raise UsageError(f"{run_dir} has no checkpoint, so there is no model{damage}")
    return model.tensors, files


def task_files(run_dir: Path | str) -> dict[str, bytes]:
    """The files that a run's task keeps beside its model; `run_dir` as in `trained_model`."""
    with TemporaryDirectory(prefix="tether-") as copies:
        return _opened(run_dir, Path(copies)).read_files()


def _opened(run_dir: Path | str, copies: Path) -> RunDirectory:
    """A run to read from; what is elsewhere is copied to a folder first."""
    if isinstance(run_dir, str) and is_url(run_dir):
        directory = RunDirectory(copies, HadoopStorage(run_dir))
    else:
        directory = RunDirectory.open(Path(run_dir))
        if (url := directory.read_config().get("checkpoints")) is not None:
            directory = RunDirectory(copies, HadoopStorage(url))
    if directory.storage is not None:
        try:
            directory.storage.get("run.json", copies / "run.json")
        except FileNotFoundError:
            raise UsageError(f"{directory.storage.url} holds no run: it has no run.json") from None
    return directory


def replay_recorded(run_dir: Path | str, task: Task | None = None) -> dict[str, int]:
    """Feed a recorded run into fresh machines. Returns the number of events per node, or raises where one differs."""
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


def _checked_callbacks(callbacks: Sequence[Callback], on: Runtime) -> Callbacks:
    called = Callbacks(callbacks)
    for callback in called.stepping if not on.virtual else ():
        check_can_travel(callback)
    return called


def _state_dict(weights: object) -> Mapping[str, Tensor] | None:
    if isinstance(weights, str | Path):
        return load_tensors(Path(weights))
    if weights is None:
        return None
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UsageError(f"weights must be a state_dict or the path of a file, not {weights!r:.100}")
    return {name: value.detach().cpu() for name, value in weights.items()}


def _check_protocol(name: str, options: object) -> None:
    """Refuse anything that is not the options of a protocol, such as their class."""
    if not isinstance(options, Options):
        what = options.__name__ if isinstance(options, type) and issubclass(options, Options) else "Averaging"
        raise UsageError(f"{name} must be options such as tether.Averaging(), not {options!r}: write tether.{what}()")


#: by name, what makes a runtime with a number of workers
RUNTIMES: dict[str, Callable[..., Runtime]] = {
    "local": Local,
    "sim": Sim,
    "spark": Spark.at,
    "ray": Ray,
    "cluster": Cluster,
}
#: options that say which cluster, and the runtime that has each
_PLACES = {"master": "spark", "address": "ray"}


def make_runtime(
    on: object,
    workers: int | None,
    master: str | None,
    protocol: Options,
    *,
    address: str | None = None,
    device: str | None = None,
    **settings: Any,
) -> Runtime:
    """Where to run, from a name or as it was given; `settings` are more of what a runtime of that name takes."""
    on = on if on is not None else "local"
    if not isinstance(on, str):
        if isinstance(on, type) or not hasattr(on, "execute"):
            raise UsageError(
                f"on must be tether.Local(...), tether.Sim(...), tether.Spark(...), tether.Ray(...) or "
                f"tether.Cluster(...), not {on!r}; or one of the names {', '.join(RUNTIMES)}"
            )
        if any(given is not None for given in (workers, master, address, device)):
            raise UsageError(
                "workers, master, address and device belong to the runtime: write "
                f"tether.{type(on).__name__}(...) with them"
            )
        return on  # type: ignore[return-value]
    if on not in RUNTIMES:
        raise unknown("runtime", on, RUNTIMES)
    places = {"master": master, "address": address}
    for name, place in places.items():
        if place is not None and on != (engine := _PLACES[name]):
            raise UsageError(f"{name}: only a {engine.title()} cluster has that; add on='{engine}' (--on {engine})")
    places = {name: place for name, place in places.items() if on == _PLACES[name]}
    if device is not None and on != "local":
        raise UsageError(
            "device: only workers in processes on this machine are given a device by name; on Spark and Ray they take "
            "those that the cluster assigns, and in the simulator model() decides"
        )
    count = workers if workers is not None else protocol.workers_max or (0 if on == "cluster" else 2)
    settings |= {"device": device} if on == "local" else {}
    return RUNTIMES[on](**places, workers=count, **settings)


def _reopen(config: dict[str, Any], task: Task | None, workers: int | None) -> tuple[Task, Options, Runtime, Request]:
    """The parts of a run, as its run.json describes them."""
    if task is None:
        spec = config["task"]
        if spec.get("spec") is None:
            raise UsageError(f"the task {spec['name']!r} was not named on a command line: give it as resume(run, task)")
        task = load_task(spec["spec"], data=Path(spec["data"]) if spec["data"] else None, settings=spec["settings"])
    protocol = make_protocol(config["protocol"])
    described = dict(config["runtime"])
    on = RUNTIMES[described.pop("name")](workers=workers if workers is not None else config["workers"], **described)
    return task, protocol, on, Request(**config["request"])
