"""What is trained: model, optimizer, data, loss and metrics. Written by the user."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import re
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from tether.errors import TaskError, TetherError, UsageError


@dataclass(frozen=True)
class Length:
    """How long a run is, for a learning-rate schedule."""

    #: steps of the whole run
    steps: int
    #: steps that make one pass over the data
    steps_per_epoch: float
    #: mini-batches in a step: the number of workers that the run began with
    workers: int

    def after_epochs(self, epochs: float) -> int:
        """The step at which this many epochs are over."""
        return round(epochs * self.steps_per_epoch)


class Task:
    """What is trained. Subclass it and define `model`, `train_data` and `loss`; the rest has defaults.

    A task is built once and then copied to every process, so keep it small: load data in `train_data`, not in
    `__init__`. docs/tasks.md explains every method, with examples.
    """

    #: samples that go through the model at once: a worker's mini-batch, or a piece of it if it accumulates
    batch_size: int = 32
    #: how many batches make one mini-batch: a step is made with the mean of their gradients
    accumulate: int = 1
    #: shorten a gradient to this Euclidean norm if it is longer
    clip_norm: float | None = None
    #: limit every value of a gradient to the range from minus this to this; done before `clip_norm`
    clip_value: float | None = None
    #: what the model computes in during training: fp32, or bf16 or fp16 where torch's autocast finds that safe.
    #: Weights, gradients and what is exchanged keep the model's own precision
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    #: where workers compute: "cuda:0", "cuda" for all such devices in turns, "cpu", or "auto": what the machine has
    device: str = "auto"
    #: keep a moving average of the joint model, of which a step of the run leaves this share, such as 0.999; the
    #: average is evaluated and returned
    ema: float | None = None
    #: processes that load data for each worker; 0: a thread of the worker. A DataLoader brings its own number
    num_workers: int = 0
    #: mini-batches that each of them loads ahead
    prefetch: int = 2
    #: samples that make an epoch, for an IterableDataset without a length
    epoch_samples: int | None = None
    #: passes over the data by all workers together, unless `run` is given a goal
    epochs: float = 5
    #: end after this many evaluations without a better metric, unless `run` is given a goal
    patience: int | None = None
    #: the protocol that suits the task, unless `run` is given one: its name and its options, such as {"name": "server",
    #: "sync": "async"}. Set it on the class, where the command line finds it too
    protocol: ClassVar[Mapping[str, Any]] = {"name": "tide"}
    #: which of the workers this is, from 0, and how many there were when the run began; set by the run
    rank: int = 0
    world_size: int = 1
    #: brings each worker its own part of the data, on a runtime that supports it; None: `train_data` has all of it
    source: Any = None

    @property
    def name(self) -> str:
        """What runs of this task are called."""
        return type(self).__name__.lower()

    def model(self) -> nn.Module:
        """A new model. The random seed is set before the call, so all replicas start equal."""
        raise self._lacks("model", "a torch.nn.Module")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over the model's parameters; by default Adam with a learning rate of 0.001."""
        return torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Length) -> LRScheduler | None:
        """A learning-rate schedule over the steps of the run; none by default.

        A step of the run is one mini-batch of every worker under every protocol, so a schedule means the same under all
        of them. `length` has the number of steps: `OneCycleLR(optimizer, 0.1, length.steps)`,
        `MultiStepLR(optimizer, [length.after_epochs(120), length.after_epochs(130)])`. A `ReduceLROnPlateau` follows
        the evaluations of the joint model.
        """
        return None

    def train_data(self) -> Dataset[Any] | DataLoader[Any]:
        """The training samples: a Dataset with a length, an IterableDataset, or a DataLoader of one of them."""
        raise self._lacks("train_data", "a torch.utils.data.Dataset")

    def collate(self, samples: list[Any]) -> Any:
        """A batch made from samples, as the `collate_fn` of a DataLoader makes it."""
        return default_collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of one batch: a scalar tensor."""
        raise self._lacks("loss", "a scalar tensor")

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the joint model, computed during training in eval mode, without gradients; none by default."""
        return {}

    def note(self) -> str:
        """A line to show when a run begins, such as settings that follow from the data; none by default."""
        return ""

    def files(self) -> Mapping[str, str | bytes]:
        """What belongs to the trained model, such as its labels, by file name; none by default.

        A run keeps them in the folder `task` of its directory, from its beginning on.
        """
        return {}

    def final_files(self, model: nn.Module) -> Mapping[str, str | bytes]:
        """As `files`, but of the model that the run returns, when it has ended; none by default.

        Files of the same name are replaced. It is not called for a run that was interrupted.
        """
        return {}

    def step_files(self, model: nn.Module, step: int) -> Mapping[str, str | bytes]:
        """As `files`, but of the joint model at an evaluation, after this many steps of the run; none by default."""
        return {}

    def run_defaults(self, workers: int, seed: int | None) -> Mapping[str, Any]:
        """Arguments of `run` that hold unless the caller gives them; none by default.

        Known are `steps`, for a run without a goal, and `evaluate_every`, `seed` and `weights`. `seed` is what the
        caller gave, if anything.
        """
        return {}

    def _lacks(self, method: str, returns: str) -> TaskError:
        return TaskError(f"task {type(self).__name__} lacks the method {method}(): define it to return {returns}")


@dataclass(frozen=True)
class StepInfo:
    """A mini-batch of a worker that is done."""

    rank: int
    world_size: int
    #: how many mini-batches this process has made
    step: int
    #: how many mini-batches of the whole run count, as far as the worker knows
    position: int
    loss: float
    samples: int


class Callback:
    """What is to happen beside training. Subclass it, define some of its methods, and pass it as `callbacks=[...]`.

    `on_step` is called in the processes of the workers, which have copies of the callback; all others are called in the
    process that called `tether.run`, one at a time. An exception in any of them ends the run.
    """

    def on_begin(self, directory: Path) -> None:
        """The run begins or is resumed; `directory` is its run directory."""

    def on_step(self, step: StepInfo) -> None:
        """A worker has computed the gradient of a mini-batch."""

    def on_progress(self, figures: dict[str, Any]) -> None:
        """The figures of a node, a few times a second: what a row `progress` of metrics.jsonl holds."""

    def on_evaluation(self, step: int, samples: int, metrics: dict[str, float]) -> None:
        """The joint model was evaluated; in the order of steps."""

    def on_checkpoint(self, step: int, samples: int, path: str) -> None:
        """A checkpoint was written; `path` is its folder or URL."""

    def on_end(self, result: Any) -> None:
        """The run has ended, by itself or by Ctrl-C; `result` is its `tether.Result`."""


def primary_metric(metrics: dict[str, float]) -> str:
    """The metric that decides which model is better: validation_error, or else error, or else the task's first."""
    return next((name for name in ("validation_error", "error") if name in metrics), next(iter(metrics), ""))


@contextmanager
def users_code(task: Task | Callback, what: str) -> Iterator[None]:
    """Wraps every call into the user's code: whatever it raises becomes a `TaskError` that names the line."""
    try:
        yield
    except TetherError:
        raise
    except Exception as error:
        raise TaskError(f"{what} failed: {describe_error(task, error)}{cuda_remedy(error)}") from error


def describe_error(task: Task | Callback, error: Exception) -> str:
    """An exception that the user's code raised, and the line of that code that it came from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    methods = [value for cls in type(task).__mro__ for value in vars(cls).values() if inspect.isfunction(value)]
    sources = {method.__code__.co_filename for method in methods} - {__file__}
    own = [frame for frame in frames if frame.filename in sources or not _is_installed(frame.filename)] or frames
    return f"{type(error).__name__}: {error} ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name})"


def cuda_remedy(error: Exception) -> str:
    """What to do about an error caused by missing CUDA, as the end of a message; "" for any other error."""
    if torch.cuda.is_available() or "CUDA" not in str(error):
        return ""
    return "; there is no CUDA here: leave the model on the CPU; workers that have a GPU move it there themselves"


def _is_installed(filename: str) -> bool:
    """Whether a file belongs to Tether, another package or Python itself, and not to the user."""
    folders = Path(filename).parts
    installed = "site-packages" in folders or "dist-packages" in folders or filename.startswith("<frozen ")
    return installed or any(Path(filename).is_relative_to(Path(other).parent) for other in (__file__, os.__file__))


def check_can_travel(task: Task | Callback) -> None:
    """Refuse a task that cannot be copied to other processes, and name the attribute that prevents it."""
    if (error := _why_unpicklable(task)) is None:
        return
    cls = type(task)
    what_it_is = "task" if isinstance(task, Task) else "callback"
    methods = [value for value in vars(cls).values() if inspect.isfunction(value)]
    used = {name: method.__globals__[name] for method in methods for name in _names_of(method)}
    kinds = [
        (vars(task), f"attribute {{!r}} of {what_it_is} {cls.__name__}", r"self\.{}\b"),
        (vars(cls), f"attribute {{!r}} of class {cls.__name__}", r"{}\b"),
        (used, f"{{!r}}, which {what_it_is} {cls.__name__} uses,", r"{}\b"),
    ]
    for values, what, pattern in kinds:
        for name, value in values.items():
            if (reason := None if inspect.isroutine(value) else _why_unpicklable(value)) is not None:
                raise TaskError(
                    f"{what.format(name)} cannot be copied to the processes of the workers: {reason}"
                    f"{_assigned_at(cls, pattern.format(re.escape(name)))}; create it in model(), train_data() or "
                    "loss(), or leave it out in __getstate__()"
                )
    raise TaskError(f"{what_it_is} {cls.__name__} cannot be copied to the processes of the workers: {error}")


def _names_of(method: types.FunctionType) -> Iterator[str]:
    """The global names that a method uses."""
    return (name for name in method.__code__.co_names if name in method.__globals__)


class _DiscardingFile(io.RawIOBase):
    """A file that keeps nothing, since a task may hold much data."""

    def write(self, data: Any) -> int:
        return len(memoryview(data))


def _why_unpicklable(value: Any) -> Exception | None:
    try:
        cloudpickle.Pickler(_DiscardingFile()).dump(value)
    except Exception as error:  # pickling runs code of the user and of any package
        return error
    return None


def _assigned_at(cls: type, pattern: str) -> str:
    """The line of a class's file that assigns something, for a message; "" if no line does."""
    try:
        file, lines = inspect.getsourcefile(cls), inspect.findsource(cls)[0]
    except (OSError, TypeError):
        return ""
    found = (number for number, line in enumerate(lines, 1) if re.match(rf"\s*{pattern}\s*(:[^=]*)?=", line))
    return f" ({file}:{number})" if (number := next(found, None)) is not None else ""


def check_is_task(task: object) -> None:
    """Refuse anything that is not a task, such as its class."""
    if not isinstance(task, Task):
        hint = f"write {task.__name__}()" if isinstance(task, type) else "subclass tether.Task"
        raise UsageError(f"the first argument must be a Task, not {task!r}: {hint}")


def check_task(task: Task, data: Any, workers: int) -> int:
    """The number of training samples; raises TaskError if the task cannot be shared among that many workers."""
    if type(task).loss is Task.loss:
        raise task._lacks("loss", "a scalar tensor")
    if isinstance(data, DataLoader):
        adopt_loader(task, data)
    _check_attributes(task)
    count = epoch_samples(task, data)
    if count == 0:
        raise TaskError(
            f"train_data() of task {type(task).__name__} returned no samples: check where it takes them from"
        )
    if count < workers:
        raise TaskError(
            f"task {type(task).__name__} has {count} training samples for {workers} workers: "
            f"every worker needs at least one; use at most {count} workers"
        )
    # a step of all workers may be more than an epoch: their mini-batches then belong to different epochs
    check_batch(task, count if task.source is None else count // workers)
    return count


def adopt_loader(task: Task, loader: DataLoader[Any]) -> None:
    """Have the task take over the batch size and the loading processes of its DataLoader."""
    given = f"the DataLoader that train_data() of task {type(task).__name__} returned"
    batch_size = loader.batch_size
    if batch_size is None and type(loader.batch_sampler) is BatchSampler:
        batch_size = loader.batch_sampler.batch_size
    if batch_size is None:
        raise TaskError(f"{given} has no batch size, and no BatchSampler of torch: give it one batch_size for all")
    if isinstance(sampler_of(loader), DistributedSampler):
        raise TaskError(
            f"{given} has a DistributedSampler, which shares the data out: leave it out; Tether does that itself"
        )
    if isinstance(loader.dataset, IterableDataset) and drops_last(loader):
        raise TaskError(
            f"{given} has drop_last=True and an IterableDataset: leave drop_last out; no mini-batch is ever short, "
            "since one at the end of an epoch continues in the next"
        )
    task.batch_size = batch_size
    task.num_workers = loader.num_workers
    task.prefetch = loader.prefetch_factor or task.prefetch


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What decides the order of a loader's samples."""
    return loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else loader.sampler


def drops_last(loader: DataLoader[Any]) -> bool:
    """Whether a loader leaves out the samples at the end of an epoch that fill no batch."""
    sampler = loader.batch_sampler
    return sampler.drop_last if type(sampler) is BatchSampler else loader.drop_last


def epoch_samples(task: Task, data: Any) -> int:
    """How many samples make an epoch of what train_data() returned; raises TaskError if that cannot be known."""
    samples: Any = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(samples, IterableDataset):
        if task.epoch_samples is not None:
            return task.epoch_samples
        if not hasattr(samples, "__len__"):
            raise TaskError(
                f"train_data() of task {type(task).__name__} returned {type(samples).__name__}, an IterableDataset "
                "without a length: set epoch_samples of the task to the samples that make an epoch, or define __len__()"
            )
        with users_code(task, "the length of train_data()"):
            return len(samples)
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise TaskError(
            f"train_data() of task {type(task).__name__} returned {type(samples).__name__}, which has no length or "
            "cannot be indexed: return a map-style Dataset (len(data) and data[i]), an IterableDataset or a DataLoader"
        )
    with users_code(task, "the length of train_data()"):
        count = len(sampler_of(data) if isinstance(data, DataLoader) else samples)
    if isinstance(data, DataLoader) and drops_last(data):
        count -= count % task.batch_size
    return count


def mini_batch_samples(task: Task) -> int:
    """How many samples one gradient of a worker is the mean of."""
    return task.batch_size * task.accumulate


def check_batch(task: Task, count: int) -> None:
    """Refuse a mini-batch that is larger than the data of a worker, since it would hold samples twice."""
    if mini_batch_samples(task) > count:
        fewer = "" if task.source is None else ", or use fewer workers, so that each has a larger part of the data"
        product = "" if task.accumulate == 1 else " times accumulate"
        raise TaskError(
            f"task {type(task).__name__} has mini-batches of {mini_batch_samples(task)} samples, and a worker has "
            f"{count} training samples to take them from: set batch_size{product} to at most {count}{fewer}"
        )


def _check_attributes(task: Task) -> None:
    """Refuse values that attributes of a task cannot have."""

    def refuse(name: str, expected: str) -> TaskError:
        return TaskError(f"{name} of task {type(task).__name__} is {getattr(task, name)!r}; it must be {expected}")

    for name in ("batch_size", "accumulate"):
        value = getattr(task, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refuse(name, "a whole number of at least 1")
    for name, least in (("num_workers", 0), ("prefetch", 1)):
        value = getattr(task, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise refuse(name, f"a whole number of at least {least}")
    samples = task.epoch_samples
    if samples is not None and (not isinstance(samples, int) or isinstance(samples, bool) or samples < 1):
        raise refuse("epoch_samples", "a whole number of at least 1, or None")
    for name in ("clip_norm", "clip_value"):
        limit = getattr(task, name)
        if limit is not None and (not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0):
            raise refuse(name, "a number of more than 0, or None")
    if task.ema is not None and (not isinstance(task.ema, int | float) or not 0 < task.ema < 1):
        raise refuse("ema", "a number between 0 and 1, such as 0.999, or None")
    if task.precision not in (known := get_args(get_type_hints(Task)["precision"])):
        raise refuse("precision", " or ".join(known))


def code_hash(path: Path) -> str:
    """What tells one version of a task's file from another."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
