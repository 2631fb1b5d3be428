"""What is trained: model, optimizer, data, loss and metrics. Written by the user."""

from __future__ import annotations

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
from typing import Any, ClassVar

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset, default_collate

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

    #: samples in a worker's mini-batch
    batch_size: int = 32
    #: passes over the data by all workers together, unless `run` is given a goal
    epochs: float = 5
    #: end after this many evaluations without a better metric, unless `run` is given a goal
    patience: int | None = None
    #: the protocol that suits the task, unless `run` is given one: its name and its options, such as {"name": "server",
    #: "sync": "async"}. Set it on the class, where the command line finds it too
    protocol: ClassVar[Mapping[str, Any]] = {"name": "averaging"}
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

    def train_data(self) -> Dataset[Any]:
        """The training samples: any torch Dataset with a length."""
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

    def _lacks(self, method: str, returns: str) -> TaskError:
        return TaskError(f"task {type(self).__name__} lacks the method {method}(): define it to return {returns}")


def primary_metric(metrics: dict[str, float]) -> str:
    """The metric that decides which model is better: validation_error, or else error, or else the task's first."""
    return next((name for name in ("validation_error", "error") if name in metrics), next(iter(metrics), ""))


@contextmanager
def users_code(task: Task, what: str) -> Iterator[None]:
    """Wraps every call into the user's code: whatever it raises becomes a `TaskError` that names the line."""
    try:
        yield
    except TetherError:
        raise
    except Exception as error:
        raise TaskError(f"{what} failed: {describe_error(task, error)}{cuda_remedy(error)}") from error


def describe_error(task: Task, error: Exception) -> str:
    """An exception that the user's code raised, and the line of that code that it came from."""
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


def check_can_travel(task: Task) -> None:
    """Refuse a task that cannot be copied to other processes, and name the attribute that prevents it."""
    if (error := _why_unpicklable(task)) is None:
        return
    cls = type(task)
    methods = [value for value in vars(cls).values() if inspect.isfunction(value)]
    used = {name: method.__globals__[name] for method in methods for name in _names_of(method)}
    kinds = [
        (vars(task), f"attribute {{!r}} of task {cls.__name__}", r"self\.{}\b"),
        (vars(cls), f"attribute {{!r}} of class {cls.__name__}", r"{}\b"),
        (used, f"{{!r}}, which task {cls.__name__} uses,", r"{}\b"),
    ]
    for values, what, pattern in kinds:
        for name, value in values.items():
            if (reason := None if inspect.isroutine(value) else _why_unpicklable(value)) is not None:
                raise TaskError(
                    f"{what.format(name)} cannot be copied to the processes of the workers: {reason}"
                    f"{_assigned_at(cls, pattern.format(re.escape(name)))}; create it in model(), train_data() or "
                    "loss(), or leave it out in __getstate__()"
                )
    raise TaskError(f"task {cls.__name__} cannot be copied to the processes of the workers: {error}")


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
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise TaskError(
            f"train_data() of task {type(task).__name__} returned {type(data).__name__}, which has no length or cannot "
            "be indexed: return a map-style Dataset (len(data) and data[i])"
        )
    if not isinstance(task.batch_size, int) or task.batch_size < 1:
        raise TaskError(
            f"batch_size of task {type(task).__name__} is {task.batch_size!r}; it must be a whole number of at least 1"
        )
    with users_code(task, "the length of train_data()"):
        count = len(data)
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


def check_batch(task: Task, count: int) -> None:
    """Refuse a mini-batch that is larger than the data of a worker, since it would hold samples twice."""
    if task.batch_size > count:
        fewer = "" if task.source is None else ", or use fewer workers, so that each has a larger part of the data"
        raise TaskError(
            f"task {type(task).__name__} has mini-batches of {task.batch_size} samples, and a worker has {count} "
            f"training samples to take them from: set batch_size to at most {count}{fewer}"
        )
