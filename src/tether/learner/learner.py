"""One replica of the model with its data and its optimizer."""

from __future__ import annotations

import copy
import inspect
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tether.core.device import Device, DeviceReplica, to_device
from tether.core.effects import GradientForm
from tether.core.machine import GradientResult
from tether.core.vector import Empty, Shared, Vector, copy_gradient, is_finite
from tether.core.wire import can_be_packed, pack_tree, unpack_tree
from tether.errors import Diverged, TaskError, TetherError, UsageError
from tether.learner.average import MovingAverage
from tether.learner.clip import HALF, Clip, Scale
from tether.learner.guard import Guard, too_many_skipped
from tether.learner.optimizer import FlatRun, OptimizerSplit, adjusted, flatten, is_elementwise
from tether.learner.sparse import LARGE, sparse_embeddings
from tether.task import (
    Callback,
    Length,
    StepInfo,
    Task,
    cuda_remedy,
    describe_error,
    mini_batch_samples,
    primary_metric,
    users_code,
)

#: the length that a schedule sees if the learner belongs to no run
UNKNOWN = Length(steps=10**9, steps_per_epoch=1.0, workers=1)


def make_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """The task's optimizer; TaskError if it is none that steps with a gradient it is given."""
    with users_code(task, "optimizer()"):
        optimizer = task.optimizer(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"optimizer() of task {type(task).__name__} returned {type(optimizer).__name__}: "
            "return a torch.optim.Optimizer"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TaskError(
            f"{type(optimizer).__name__} calls the loss itself, several times a step, which no protocol can "
            "exchange: use an optimizer such as torch.optim.SGD or Adam"
        )
    return optimizer


def make_scheduler(task: Task, optimizer: torch.optim.Optimizer, length: Length) -> LRScheduler | None:
    """The task's schedule, if it has one."""
    with users_code(task, "scheduler()"):
        scheduler = task.scheduler(optimizer, length)
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise TaskError(
            f"scheduler() of task {type(task).__name__} returned {type(scheduler).__name__}: return a "
            "torch.optim.lr_scheduler.LRScheduler, or None"
        )
    return scheduler


class Learner:
    """Computes gradients, steps the optimizer, and holds the vector that values are installed into.

    If a gradient has a value that is not finite although the loss is finite, the whole gradient counts as zero, and
    what the pass did to buffers is undone. The learner does that before anything else sees the gradient, so every
    protocol treats it as any other: a worker that steps by itself makes a step in which only momentum and weight decay
    act, and a hub that averages or applies gradients gets zeros. Such gradients are counted, and past a limit the run
    ends.

    With a guard, gradients that are far longer than usual for this learner count as zero too, without a limit.

    A gradient is the mean over a whole mini-batch, which the task may have the learner accumulate from several batches.
    It is unscaled before it is looked at. If it overflows in half precision, the same mini-batch is tried again with a
    smaller scale, so that the protocol sees every gradient once and none that is zero for lack of range.

    A gradient is clipped where it is final: as it leaves `compute` or, where the hub steps with the mean of several,
    in `step`, as one learner with a larger mini-batch would.
    """

    def __init__(
        self,
        task: Task,
        batches: Iterator[Any],
        *,
        node: str,
        seed: int,
        length: Length = UNKNOWN,
        empty: Empty = torch.empty,
        shared: Shared | None = None,
        device: Device | None = None,
        part: tuple[int, int] | None = None,
        guard: float = 0.0,
        clips_mean: bool = False,
        initial: InitialWeights | None = None,
        place: tuple[int, int] = (0, 1),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """`length`: that of the run, for the schedule; `device`: where gradients are computed, if not at the model.

        The vector and the optimizer are on the device too, unless the vector is `shared`.

        `part`: an index and a count; the optimizer steps only this part of the vector, and computes no gradients.
        `clips_mean`: steps are made with means of gradients, which are clipped instead of the gradients.
        `initial`: what the model begins with, instead of what the task draws.
        `place`: the worker's rank and the number of workers, as the task sees them.
        `callbacks`: their `on_step` is called after every mini-batch.
        """
        self.task = task
        self._place = place
        self._callbacks = callbacks
        self.node = node
        self.model = build_model(task, seed, initial)
        self._device_replica: DeviceReplica | None = None
        self._device = device
        if device is not None and shared is not None:
            self.model.to("cpu")
            self._device_replica = DeviceReplica(self.model, device.where)
        elif device is not None:
            self.model = device.place(self.model)
        self.vector = Vector(self.model, empty, shared)
        self.weights = self.vector.weights
        self.parameter_count = self.vector.parameter_count
        self.optimizer = make_optimizer(task, self.model)
        self._flatten_optimizer(part)
        self._empty = empty
        self._length = length
        scheduler = make_scheduler(task, self.optimizer, length)
        #: follows the evaluations of the joint model, and not the run's position
        self.plateau = scheduler if isinstance(scheduler, ReduceLROnPlateau) else None
        self.scheduler: LRScheduler | None = scheduler if self.plateau is None else None
        #: the step of the run that the schedule is at, and the run's position in mini-batches
        self._scheduled = 0
        self._position = 0
        self._has_stepped = False
        self._batches = batches
        self._steps = 0
        self.load_seconds = 0.0
        self.skipped = 0
        self.refused = 0
        self._guard = Guard(guard)
        self._average = MovingAverage()
        self._clip = Clip(task.clip_norm, task.clip_value)
        self._clips_mean = clips_mean
        self._scale = Scale(task.precision)

    def _flatten_optimizer(self, part: tuple[int, int] | None) -> None:
        """Have the optimizer step runs of the vector if it can, and find out where it takes each gradient."""
        elementwise = is_elementwise(self.optimizer)
        self._embeddings = sparse_embeddings(self.model, self.vector, self.optimizer, flat=elementwise)
        if self._device_replica is not None:
            self._device_replica.copy_sparse_flags(self.model)
        places = list(zip(self.vector.parameters, self.vector.positions, strict=False))
        # runs of their own, so that a step can use their gradients where backward made them
        self._large = {start: p for p, start in places if p.numel() >= LARGE}
        by_rows = {embedding.start: embedding.stop for embedding in self._embeddings}
        separate = by_rows | {start: start + p.numel() for start, p in self._large.items()}
        runs = flatten(self.optimizer, self.vector, separate.items())
        #: whether the optimizer works on runs of the vector
        self.flat = runs is not None
        self._split: OptimizerSplit | None = None
        self._runs = runs or []
        if part is not None and self.flat:
            self._split = OptimizerSplit(self.optimizer, self.parameter_count, *part)
            self._runs = self._split.restrict(self.optimizer, self.vector)
        #: where in the vector the gradients begin that `step` is given
        self._gradient_start = self._split.own.start if self._split is not None else 0
        #: each embedding whose gradients are rows, with its run of the vector and its group of the optimizer
        self._embedding_runs = [
            (embedding, run, group)
            for embedding in self._embeddings
            for group in self.optimizer.param_groups
            for run in group["params"]
            if isinstance(run, FlatRun) and run.start == embedding.start
        ]
        self._dense = [(p, self._packed_position(start)) for p, start in places if start not in by_rows]

    def seek(self, batch: int, upcoming: tuple[int, ...], position: int) -> None:
        self._position = position
        self._batches.seek(batch, upcoming)  # type: ignore[attr-defined]

    def compute(self, form: GradientForm, fresh: bool) -> GradientResult:
        self._steps += 1
        self.task.rank, self.task.world_size = self._place  # in the simulator, workers share one task
        batches = self._load()
        buffers = self.weights[self.parameter_count :].clone()
        while True:
            loss = self._pass(batches)
            gradient, touched = self._gather(form, fresh)
            values = self._gradient_values(gradient)
            self._scale.unscale(values)
            finite = all(is_finite(part) for part in values)
            if finite or not self._scale.reduce():
                break
            self.weights[self.parameter_count :].copy_(buffers)
        if not finite:
            self._skip(values)
            self.weights[self.parameter_count :].copy_(buffers)
        elif self._guard.refuses(values):
            self.refused += 1
            for part in values:
                part.zero_()
            self.weights[self.parameter_count :].copy_(buffers)
        else:
            self._scale.good()
            if self._clip.is_set and not self._clips_mean:
                # a gradient that is returned has all values; those that a step uses hold some of them again
                whole = 1 if gradient.numel() else len(values)
                self._clip.apply(values[:whole], values[whole:])
        samples = mini_batch_samples(self.task)
        for callback in self._callbacks:
            with users_code(callback, f"on_step() of {type(callback).__name__}"):
                callback.on_step(StepInfo(*self._place, self._steps, self._position, loss, samples))
        return GradientResult(gradient, loss, samples, touched)

    def _load(self) -> list[Any]:
        """The batches of the next mini-batch."""
        began = time.perf_counter()
        with self._users_code():
            batches = [next(self._batches) for _ in range(self.task.accumulate)]
        self.load_seconds += time.perf_counter() - began
        return batches

    def _pass(self, batches: list[Any]) -> float:
        """The mean loss of these batches, after a forward and a backward pass of each."""
        self._release()
        for parameter in self.vector.parameters:
            parameter.grad = None  # a new gradient that is copied costs half of one that is added to zeros
        if self._device_replica is None:
            loss = sum(self._forward_backward(self.model, batch, self.weights.device) for batch in batches)
        else:
            self._device_replica.load_weights(self.weights)
            with self._device_replica.on_stream():
                model, device = self._device_replica.model, self._device_replica.device
                loss = sum(self._forward_backward(model, batch, device) for batch in batches)
            self._device_replica.write_back(self.vector)
        for embedding in self._embeddings:
            embedding.collect()
        return loss / len(batches)

    def _gradient_values(self, gradient: Tensor) -> list[Tensor]:
        """Every tensor that holds values of the last gradient: the one that is returned, and those a step uses."""
        rows = [embedding.values for embedding in self._embeddings if embedding.values is not None]
        if gradient.numel():
            return [gradient, *rows]
        stepped = self._runs if self.flat else self.vector.parameters
        return [*(run.grad for run in stepped if run.grad is not None), *rows]

    def _skip(self, values: list[Tensor]) -> None:
        """Replace the last gradient by zeros, and end the run if that has happened too often."""
        for part in values:
            part.zero_()
        self.skipped += 1
        if too_many_skipped(self.skipped, self._steps):
            raise self._error(
                f"{self.skipped} of its gradients were not finite, although the losses were",
                "lower the learning rate, or look for what has no derivative in loss(), such as sqrt(0)",
                Diverged,
            )

    def _forward_backward(self, model: nn.Module, batch: Any, device: torch.device) -> float:
        """The loss of a batch, after a backward pass that adds its share to the gradient."""
        half = HALF.get(self.task.precision)
        with self._users_code():
            if self._device is not None:
                batch = self._device.place(batch)
            elif device.type != "cpu":
                batch = to_device(batch, device)
            with torch.autocast(device.type, half) if half is not None else nullcontext():
                loss = self.task.loss(model, batch)
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
                factor = self._scale.factor / self.task.accumulate
                scaled = loss if factor == 1.0 else loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor
                scaled.backward()  # type: ignore[no-untyped-call]
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            if isinstance(loss, Tensor) and loss.numel() == 1:
                what = "a tensor without a gradient"
            raise self._error(f"loss() returned {what}", "return a scalar tensor computed from the model's output")
        value = float(loss.detach())
        if not math.isfinite(value):
            remedy = "lower the learning rate, clip gradients (clip_norm) or check the data"
            raise self._error(f"the loss became {value}", remedy, Diverged)
        return value

    @contextmanager
    def _users_code(self) -> Iterator[None]:
        """Whatever the user's data or loss raises becomes an error that names node, step and line."""
        try:
            yield
        except TetherError:
            raise
        except Exception as error:
            remedy = f"correct the task's data or its loss(){cuda_remedy(error)}"
            raise self._error(describe_error(self.task, error), remedy) from error

    def step(
        self,
        gradient: Tensor | None,
        rate: float,
        touched: tuple[Tensor, ...] = (),
        position: int | None = None,
        staleness: float = 0.0,
    ) -> None:
        self._has_stepped = True
        self._follow_schedule(self._position if position is None else position)
        own_gradients = [run.grad for run in self._runs]
        own_rows = [(embedding.touched, embedding.values) for embedding in self._embeddings]
        if gradient is not None:
            self._bind_external(gradient.to(self.weights), touched)
        if self._clips_mean and self._clip.is_set:
            self._clip_bound()
        by_rows = [(embedding, run, group) for embedding, run, group in self._embedding_runs if run.grad is None]
        with adjusted(self.optimizer, rate, staleness):
            for embedding, run, group in by_rows:
                if embedding.lazy:
                    embedding.step(self.optimizer, group, run)
                else:
                    run.grad = embedding.dense_gradient()
            # an error in torch's own optimizer on a flat vector is an internal one; in any other it is the user's
            with nullcontext() if self.flat else users_code(self.task, "the optimizer's step()"):
                self.optimizer.step()
        for _, run, _ in by_rows:
            run.grad = None
        if gradient is not None:
            for run, own_gradient in zip(self._runs, own_gradients, strict=True):
                run.grad = own_gradient
            for embedding, rows in zip(self._embeddings, own_rows, strict=True):
                embedding.touched, embedding.values = rows

    def _clip_bound(self) -> None:
        """Clip the gradient that is bound for a step. It is copied, since it may lie in memory of others."""
        runs = [run for run in self._runs if run.grad is not None]
        by_rows = [embedding for embedding in self._embeddings if embedding.values is not None]
        clipped = iter(self._clip.applied([*(run.grad for run in runs), *(e.values for e in by_rows)]))  # type: ignore[list-item]
        for run in runs:
            run.grad = next(clipped)
        for embedding in by_rows:
            embedding.values = next(clipped)

    def _follow_schedule(self, position: int) -> None:
        """Set the learning rate that the schedule has at the run's position."""
        if self.scheduler is None:
            return
        step = min(position // self._length.workers, self._length.steps - 1)
        while self._scheduled < step:
            self._scheduled += 1
            with warnings.catch_warnings():  # a node that joins late goes through the schedule before it steps
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                with users_code(self.task, "a step of the schedule"):
                    self.scheduler.step()

    def load_gradient(self, gradient: Tensor) -> None:
        self.vector.gradient.copy_(gradient)
        for embedding in self._embeddings:
            embedding.clear()
            embedding.nonzero_rows = None
        self._bind(self.vector.gradient)

    def _gather(self, form: GradientForm, fresh: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradient that backward has made, in this form, after all of it is bound for a step."""
        touched = {
            embedding.start: embedding.touched for embedding in self._embeddings if embedding.touched is not None
        }
        if form == "rows" and 0 < len(touched) == len(self._embeddings):
            self.vector.gather_buffers()
            packed = self._pack()
            self._bind(packed, packed=True)
            return packed, tuple(touched.values())
        if fresh and form != "none":
            self.vector.renew_gradient()
            for embedding in self._embeddings:
                embedding.nonzero_rows = None
        in_place = {start: p.grad for start, p in self._large.items() if p.grad is not None and not p.grad.is_sparse}
        flat = self.vector.gather_gradient(touched.keys() | in_place.keys() if form == "none" else touched.keys())
        self._bind(flat)
        if form == "none":
            for run in self._runs:
                if run.start in in_place:
                    run.grad = in_place[run.start].reshape(-1)
            return flat[:0], ()
        for embedding in self._embeddings:
            embedding.scatter()
        return flat, ()

    def _pack(self) -> Tensor:
        """The gradients of the dense parameters and, behind them, those of the touched rows."""
        rows = [embedding.values.reshape(-1) for embedding in self._embeddings if embedding.values is not None]
        dense = self._packed_position(self.parameter_count)
        count = dense + sum(map(len, rows))
        packed = self._empty(count, dtype=self.weights.dtype, device=self.weights.device)
        for parameter, start in self._dense:
            copy_gradient(parameter, packed[start : start + parameter.numel()].view(parameter.shape))
        if rows:
            torch.cat(rows, out=packed[dense:])
        return packed

    def _packed_position(self, position: int) -> int:
        """Where a position of the vector is in a packed gradient, which has the rows of embeddings behind all else."""
        return position - sum(e.stop - e.start for e in self._embeddings if e.start < position)

    def _bind(self, gradient: Tensor, packed: bool = False) -> None:
        """Make this the gradient of the optimizer's runs, except for embeddings whose touched rows are known."""
        by_rows = {embedding.start for embedding in self._embeddings if embedding.touched is not None}
        for run in self._runs:
            start = self._packed_position(run.start) if packed else run.start - self._gradient_start
            run.grad = None if run.start in by_rows else gradient[start : start + len(run)]

    def _bind_external(self, gradient: Tensor, touched: tuple[Tensor, ...]) -> None:
        """Bind a gradient that the machine hands over. It is read where it lies: a copy costs as much as a step."""
        if not self.flat:
            raise UsageError(
                f"{type(self.optimizer).__name__} needs the shapes of the parameters and cannot step with a flat "
                "gradient: use an optimizer such as torch.optim.SGD or Adam, or a protocol in which workers step with "
                "their own gradients"
            )
        self._release()
        position = self._packed_position(self.parameter_count)
        for embedding, rows in zip(self._embeddings, touched, strict=False):
            position = embedding.load(rows, gradient, position)
        self._bind(gradient, packed=bool(touched))

    def _release(self) -> None:
        """Drop all references to the last gradient, so that its memory can be reused."""
        for run in self._runs:
            run.grad = None
        for embedding in self._embeddings:
            embedding.clear()

    def average(self, decay: float) -> None:
        self._average.update(self.weights, decay)

    @property
    def averaged(self) -> Tensor | None:
        return self._average.values

    def restore_average(self, values: Tensor) -> None:
        """Continue with the average of an earlier part of the run."""
        self._average.values = values.to(self.weights).clone()

    def close(self) -> None:
        """End what loads data."""
        if hasattr(self._batches, "close"):
            self._batches.close()

    def observe(self, metrics: dict[str, float]) -> None:
        if self.plateau is None:
            return
        if not metrics:
            raise self._error(
                "ReduceLROnPlateau follows what evaluate() returns, and it returned no metrics",
                "return one, such as error",
            )
        with users_code(self.task, "a step of the schedule"):
            self.plateau.step(metrics[primary_metric(metrics)])

    def state(self, others: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        if not self._has_stepped:
            return {}
        optimizer = self.optimizer.state_dict()
        if self._split is not None and (others := list(others)):
            parts = [other.get("optimizer", {"state": {}}) for other in others]  # a hub that never stepped has none
            optimizer = self._split.join_states([optimizer, *parts])
        state = {"kind": type(self.optimizer).__name__, "optimizer": optimizer}
        # an optimizer of the user's own may hold anything: training is worth more than its state
        if not can_be_packed(state):
            return {}
        tensors: list[Tensor] = []
        values = pack_tree(state, tensors)
        # copied to where it can be lent, so that sending it copies nothing
        copied: dict[str, Any] = unpack_tree(values, [self._copied(tensor) for tensor in tensors])
        return copied

    def _copied(self, values: Tensor) -> Tensor:
        copied = self._empty(values.numel(), dtype=values.dtype, device=values.device)
        return copied.view(values.shape).copy_(values.detach())

    def restore(self, state: dict[str, Any]) -> None:
        own = type(self.optimizer).__name__
        if "optimizer" not in state or state.get("kind", own) != own:
            return
        optimizer = state["optimizer"] if self._split is None else self._split.cut_state(state["optimizer"])
        if not self._fits(optimizer):
            return
        # rates are the task's: where the run is in its schedule follows from its position and its evaluations
        groups = self.optimizer.state_dict()["param_groups"]
        kept = copy.deepcopy(optimizer["state"])  # several learners may be given the same state, or one that is lent
        self.optimizer.load_state_dict({"state": kept, "param_groups": groups})
        self._has_stepped = True

    def _fits(self, state: dict[str, Any]) -> bool:
        """Whether this is the state of an optimizer over the same parameters."""
        groups = self.optimizer.state_dict()["param_groups"]
        if [group["params"] for group in state["param_groups"]] != [group["params"] for group in groups]:
            return False
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return all(
            value.dim() == 0 or not self.flat or value.shape == parameters[number].shape
            for number, kept in state["state"].items()
            for value in kept.values()
            if isinstance(value, Tensor)
        )

    def _error(self, what: str, remedy: str, kind: type[TaskError] = TaskError) -> TaskError:
        return kind(f"{self.node}, step {self._steps}: {what} (task {type(self.task).__name__}); {remedy}")


@dataclass(frozen=True)
class InitialWeights:
    """Values for a new model, by the names of its state_dict."""

    tensors: Mapping[str, Tensor]
    #: whether they must be all values that the model has
    whole: bool


def build_model(task: Task, seed: int, initial: InitialWeights | None = None) -> nn.Module:
    """The task's model as every replica of a run starts with it; the global random state is left as it was."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        with users_code(task, "model()"):
            model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"model() of task {type(task).__name__} returned {type(model).__name__}: return a torch.nn.Module"
        )
    if initial is not None:
        _load_initial(model, initial)
    return model


def _load_initial(model: nn.Module, initial: InitialWeights) -> None:
    own = {name: value.shape for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    given = {name: value.shape for name, value in initial.tensors.items()}
    wrong = [f"{name} is missing" for name in own if initial.whole and name not in given]
    wrong += [f"the model has no {name}" for name in given if name not in own]
    wrong += [
        f"{name} has the shape {tuple(shape)} and not {tuple(own[name])}"
        for name, shape in given.items()
        if name in own and own[name] != shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UsageError(
            f"the weights do not fit the model {type(model).__name__}: {'; '.join(wrong[:3])}{more}; give a whole "
            "state_dict of the task's model()"
        )
    model.load_state_dict(dict(initial.tensors), strict=False)


def evaluate(task: Task, model: nn.Module) -> dict[str, float]:
    """The task's metrics of a model, computed in eval mode and without gradients; restores the modes of the model."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), users_code(task, "evaluate()"):
            metrics = task.evaluate(model)
    finally:
        for part, training in modes:
            part.training = training
    if not isinstance(metrics, dict):
        raise TaskError(f"evaluate() of task {type(task).__name__} returned {metrics!r}: return a dict of numbers")
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError):
        raise TaskError(
            f"evaluate() of task {type(task).__name__} returned {metrics!r}: values must be numbers"
        ) from None
