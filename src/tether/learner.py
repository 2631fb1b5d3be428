"""One replica of the model with its data and its optimizer.

`Learner` trains a task; `SyntheticLearner` follows a made-up gradient and needs no model, so that thousands of them
fit into one simulation.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tether.errors import Diverged, TaskError, TetherError, UsageError
from tether.machine import Taken, Wanted
from tether.rows import LARGE, rows_of
from tether.task import Length, SyntheticTask, Task, cuda_remedy, describe_error, metric_of, users_code
from tether.twin import Twin, to_device
from tether.vector import Empty, Shared, Vector, is_finite, put_gradient, shards
from tether.wire import can_be_kept

#: optimizers that treat every element alike, so that a flat vector gives the same result as separate parameters
ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
}
#: so many gradients of a learner may be other than finite; more, only while they are no more than this share of all
SKIPPED_MIN, SKIPPED_SHARE = 10, 0.05
#: how many gradients say what is usual; the first so many are never refused
GUARD_HISTORY = 16
_FUSED_ON_CPU = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad}


#: of a learner that belongs to no run
UNKNOWN = Length(steps=10**9, steps_per_epoch=1.0, workers=1)


class Guard:
    """Tells gradients that are far longer than usual, by the median of the last ones that were not."""

    def __init__(self, times: float) -> None:
        """`times` as long is too long; 0: nothing is."""
        self._times = times
        self._norms: deque[float] = deque(maxlen=GUARD_HISTORY)

    def refuses(self, made: Iterable[Tensor]) -> bool:
        """Whether the gradient with these values must not be used."""
        if not self._times:
            return False
        norm = math.sqrt(sum(float(values.square().sum()) for values in made))
        if len(self._norms) == GUARD_HISTORY and norm > self._times * statistics.median(self._norms) > 0:
            return True
        self._norms.append(norm)
        return False


class Learner:
    """Computes gradients, steps and holds the vector that values are installed into.

    A gradient with a value that is not finite, although the loss is, counts as zero: all of it, and what the pass made
    of buffers is undone. That is so before anybody sees it, so every protocol treats it as any other: a learner that
    steps by itself makes a step in which only momentum and weight decay act, and whoever averages or applies gradients
    of others gets zeros. Such gradients are counted, and past a limit the run ends.

    With a guard the same is done to gradients that are far longer than is usual for this learner, without a limit.
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
        device: torch.device | None = None,
        part: tuple[int, int] | None = None,
        guard: float = 0.0,
    ) -> None:
        """`length`: of the run, for the schedule; `device`: where gradients are computed, if not at the model.

        `part`: the optimizer has only this part, of so many, of the vector; it computes no gradients then.
        """
        self.task = task
        self.node = node
        self.model = build_model(task, seed)
        self._twin: Twin | None = None
        if device is not None:
            self.model.to("cpu")
            self._twin = Twin(self.model, device)
        self.vector = Vector(self.model, empty, shared)
        self.weights = self.vector.weights
        self.parameter_count = self.vector.parameter_count
        with users_code(task, "optimizer()"):
            self.optimizer = task.optimizer(self.model)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TaskError(
                f"optimizer() of task {type(task).__name__} returned {type(self.optimizer).__name__}: "
                "return a torch.optim.Optimizer"
            )
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TaskError(
                f"{type(self.optimizer).__name__} calls the loss itself, several times a step, which no protocol can "
                "exchange: use an optimizer such as torch.optim.SGD or Adam"
            )
        self._rows = rows_of(self.model, self.vector, self.optimizer, flat=type(self.optimizer) in ELEMENTWISE)
        if self._twin is not None:
            self._twin.follow(self.model)
        places = list(zip(self.vector.parameters, self.vector.positions, strict=False))
        # runs of their own, so that a step can use their gradients where backward made them
        self._large = {start: p for p, start in places if p.numel() >= LARGE}
        by_rows = {part.start: part.stop for part in self._rows}
        alone = by_rows | {start: start + p.numel() for start, p in self._large.items()}
        runs = flatten(self.optimizer, self.vector, alone.items())
        self.flat = runs is not None
        self._parts = Parts(self.optimizer, self.parameter_count, *part) if part is not None and self.flat else None
        self._runs = self._parts.keep(self.optimizer, self.vector) if self._parts is not None else runs or []
        #: where in the vector the gradients that it is given begin
        self._first = self._parts.own.start if self._parts is not None else 0
        #: each embedding whose gradients are rows, with its run of the vector and its group of the optimizer
        self._row_runs = [
            (part, run, group)
            for part in self._rows
            for group in self.optimizer.param_groups
            for run in group["params"]
            if isinstance(run, _FlatRun) and run.start == part.start
        ]
        self._dense = [(p, self._packed(start)) for p, start in places if start not in by_rows]
        self._empty = empty
        self._length = length
        with users_code(task, "scheduler()"):
            scheduler = task.scheduler(self.optimizer, length)
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            raise TaskError(
                f"scheduler() of task {type(task).__name__} returned {type(scheduler).__name__}: return a "
                "torch.optim.lr_scheduler.LRScheduler, or None"
            )
        #: follows the evaluations of the joint model, and not the run's position
        self.plateau = scheduler if isinstance(scheduler, ReduceLROnPlateau) else None
        self.scheduler: LRScheduler | None = scheduler if self.plateau is None else None
        #: how many steps of the run the schedule has gone, and how far the run is
        self._scheduled = 0
        self._position = 0
        self._has_stepped = False
        self._batches = batches
        self._steps = 0
        self.load_seconds = 0.0
        self.skipped = 0
        self.refused = 0
        self._guard = Guard(guard)

    def seek(self, batch: int, upcoming: tuple[int, ...], position: int) -> None:
        self._position = position
        self._batches.seek(batch, upcoming)  # type: ignore[attr-defined]

    def compute(self, wanted: Wanted, fresh: bool) -> Taken:
        self._steps += 1
        self._drop()
        for parameter in self.vector.parameters:
            parameter.grad = None  # a gradient made anew and copied costs half of one added to zeros
        buffers = self.weights[self.parameter_count :].clone()
        if self._twin is None:
            value = self._pass(self.model, self.weights.device)
        else:
            self._twin.take(self.weights)
            with self._twin.computing():
                value = self._pass(self._twin.model, self._twin.device)
            self._twin.give(self.vector)
        for part in self._rows:
            part.take()
        gradient, touched = self._gather(wanted, fresh)
        made = self._made(gradient)
        if not all(is_finite(values) for values in made):
            self._skip(made)
            self.weights[self.parameter_count :].copy_(buffers)
        elif self._guard.refuses(made):
            self.refused += 1
            for values in made:
                values.zero_()
            self.weights[self.parameter_count :].copy_(buffers)
        return Taken(gradient, value, self.task.batch_size, touched)

    def _made(self, gradient: Tensor) -> list[Tensor]:
        """Where the values of the last gradient are: what was wanted of it, and what a step would use."""
        rows = [part.values for part in self._rows if part.values is not None]
        if gradient.numel():
            return [gradient, *rows]
        stepped = self._runs if self.flat else self.vector.parameters
        return [*(run.grad for run in stepped if run.grad is not None), *rows]

    def _skip(self, made: list[Tensor]) -> None:
        """Have zeros in place of the last gradient."""
        for values in made:
            values.zero_()
        self.skipped += 1
        if self.skipped > max(SKIPPED_MIN, SKIPPED_SHARE * self._steps):
            raise self._error(
                f"{self.skipped} of its gradients were not finite, although the losses were",
                "lower the learning rate, or look for what has no derivative in loss(), such as sqrt(0)",
                Diverged,
            )

    def _pass(self, model: nn.Module, device: torch.device) -> float:
        """A loss and its gradients, of the next mini-batch."""
        try:
            began = time.perf_counter()
            batch = next(self._batches)
            self.load_seconds += time.perf_counter() - began
            if device.type != "cpu":
                batch = to_device(batch, device)
            loss = self.task.loss(model, batch)
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        except TetherError:
            raise
        except Exception as error:
            remedy = f"correct the task's data or its loss(){cuda_remedy(error)}"
            raise self._error(describe_error(self.task, error), remedy) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            if isinstance(loss, Tensor) and loss.numel() == 1:
                what = "a tensor without a gradient"
            raise self._error(f"loss() returned {what}", "return a scalar tensor computed from the model's output")
        value = float(loss.detach())
        if not math.isfinite(value):
            remedy = "lower the learning rate, clip gradients or check the data"
            raise self._error(f"the loss became {value}", remedy, Diverged)
        return value

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
        own = [run.grad for run in self._runs], [(part.touched, part.values) for part in self._rows]
        if gradient is not None:
            self._show(gradient.to(self.weights), touched)
        in_rows = [(part, run, group) for part, run, group in self._row_runs if run.grad is None]
        with _changed(self.optimizer, rate, staleness):
            for part, run, group in in_rows:
                if part.lazy:
                    part.step(self.optimizer, group, run)
                else:
                    run.grad = part.whole()
            # one of torch's own, on a flat vector, is our business; any other is the user's
            with nullcontext() if self.flat else users_code(self.task, "the optimizer's step()"):
                self.optimizer.step()
        for _, run, _ in in_rows:
            run.grad = None
        if gradient is not None:
            for run, run_gradient in zip(self._runs, own[0], strict=True):
                run.grad = run_gradient
            for part, rows in zip(self._rows, own[1], strict=True):
                part.touched, part.values = rows

    def _follow_schedule(self, position: int) -> None:
        """Have the learning rate that the schedule gives where the run is."""
        if self.scheduler is None:
            return
        step = min(position // self._length.workers, self._length.steps - 1)
        while self._scheduled < step:
            self._scheduled += 1
            with warnings.catch_warnings():  # whoever comes late goes through the schedule before it steps
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                with users_code(self.task, "a step of the schedule"):
                    self.scheduler.step()

    def load_gradient(self, gradient: Tensor) -> None:
        self.vector.gradient.copy_(gradient)
        for part in self._rows:
            part.drop()
            part.laid = None
        self._lay(self.vector.gradient)

    def _gather(self, wanted: Wanted, fresh: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What is wanted of the gradient that backward has made, and all of it laid out for a step."""
        touched = {part.start: part.touched for part in self._rows if part.touched is not None}
        if wanted == "rows" and 0 < len(touched) == len(self._rows):
            self.vector.gather_buffers()
            packed = self._pack()
            self._lay(packed, packed=True)
            return packed, tuple(touched.values())
        if fresh and wanted != "step":
            self.vector.renew_gradient()
            for part in self._rows:
                part.laid = None
        made = {start: p.grad for start, p in self._large.items() if p.grad is not None and not p.grad.is_sparse}
        flat = self.vector.gather_gradient(touched.keys() | made.keys() if wanted == "step" else touched.keys())
        self._lay(flat)
        if wanted == "step":
            for run in self._runs:
                if run.start in made:
                    run.grad = made[run.start].reshape(-1)
            return flat[:0], ()
        for part in self._rows:
            part.lay()
        return flat, ()

    def _pack(self) -> Tensor:
        """The dense parameters' gradients and, behind them, those of the touched rows."""
        rows = [part.values.reshape(-1) for part in self._rows if part.values is not None]
        dense = self._packed(self.parameter_count)
        count = dense + sum(map(len, rows))
        packed = self._empty(count, dtype=self.weights.dtype, device=self.weights.device)
        for parameter, start in self._dense:
            put_gradient(parameter, packed[start : start + parameter.numel()].view(parameter.shape))
        if rows:
            torch.cat(rows, out=packed[dense:])
        return packed

    def _packed(self, position: int) -> int:
        """Where a position of the vector is in a gradient whose rows are apart."""
        return position - sum(part.stop - part.start for part in self._rows if part.start < position)

    def _lay(self, gradient: Tensor, packed: bool = False) -> None:
        """Show the optimizer its gradients, but for the embeddings whose touched rows are known."""
        touched = {part.start for part in self._rows if part.touched is not None}
        for run in self._runs:
            start = self._packed(run.start) if packed else run.start - self._first
            run.grad = None if run.start in touched else gradient[start : start + len(run)]

    def _show(self, gradient: Tensor, touched: tuple[Tensor, ...]) -> None:
        """Have the optimizer see one from elsewhere. It is read where it lies: a copy costs as much as a step."""
        if not self.flat:
            raise UsageError(
                f"{type(self.optimizer).__name__} needs the shapes of the parameters and cannot run on a flat "
                "vector at the hub: use protocol 'averaging' or 'single', or an optimizer such as "
                "torch.optim.SGD or Adam"
            )
        self._drop()
        position = self._packed(self.parameter_count)
        for part, rows in zip(self._rows, touched, strict=False):
            position = part.put(rows, gradient, position)
        self._lay(gradient, packed=bool(touched))

    def _drop(self) -> None:
        """Let go of the last gradient, so that its memory can be used again."""
        for run in self._runs:
            run.grad = None
        for part in self._rows:
            part.drop()

    def observe(self, metrics: dict[str, float]) -> None:
        if self.plateau is None:
            return
        if not metrics:
            raise self._error(
                "ReduceLROnPlateau follows what evaluate() finds, and that has no metrics", "return one, such as error"
            )
        with users_code(self.task, "a step of the schedule"):
            self.plateau.step(metrics[metric_of(metrics)])

    def state(self, others: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        if not self._has_stepped:
            return {}
        optimizer = self.optimizer.state_dict()
        if self._parts is not None and (others := list(others)):
            apart = [other.get("optimizer", {"state": {}}) for other in others]  # one that has never stepped has none
            optimizer = self._parts.joined([optimizer, *apart])
        state = {"kind": type(self.optimizer).__name__, "optimizer": optimizer}
        # an optimizer of the user's own may hold anything: training is worth more than its state
        return copy.deepcopy(state) if can_be_kept(state) else {}

    def restore(self, state: dict[str, Any]) -> None:
        own = type(self.optimizer).__name__
        if "optimizer" not in state or state.get("kind", own) != own:
            return
        optimizer = state["optimizer"] if self._parts is None else self._parts.cut(state["optimizer"])
        if not self._fits(optimizer):
            return
        # rates are the task's: where the run is in its schedule follows from its position and its evaluations
        groups = self.optimizer.state_dict()["param_groups"]
        kept = copy.deepcopy(optimizer["state"])  # the same may be given to several, and may be lent
        self.optimizer.load_state_dict({"state": kept, "param_groups": groups})
        self._has_stepped = True

    def _fits(self, state: dict[str, Any]) -> bool:
        """Whether it is the state of an optimizer over the same parameters."""
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


class SyntheticLearner:
    """Slides down the bowl of a `SyntheticTask` by plain gradient descent."""

    def __init__(
        self,
        task: SyntheticTask,
        *,
        index: int,
        seed: int,
        empty: Empty = torch.empty,
        shared: Shared | None = None,
        part: tuple[int, int] | None = None,
        guard: float = 0.0,
    ) -> None:
        self.task = task
        values = torch.ones(task.parameters)
        self.weights = values if shared is None else shared.vector(values)
        self.parameter_count = task.parameters
        place, count = part or (0, 1)
        self._own = self.weights[shards(task.parameters, count)[place]]
        self.load_seconds = 0.0
        self.skipped = 0
        self.refused = 0
        self._guard = Guard(guard)
        self._noise = torch.Generator().manual_seed(seed * 1_000_003 + index)
        self._empty = empty
        self._gradient = self._empty(task.parameters, dtype=self.weights.dtype)

    def seek(self, batch: int, upcoming: tuple[int, ...], position: int) -> None:
        """Every mini-batch is the same bowl."""

    def compute(self, wanted: Wanted, fresh: bool) -> Taken:
        if fresh:
            self._gradient = self._empty(self.parameter_count, dtype=self.weights.dtype)
        self._gradient.normal_(0.0, self.task.noise, generator=self._noise).add_(self.weights)
        if self._guard.refuses([self._gradient]):
            self.refused += 1
            self._gradient.zero_()
        given = self._gradient[:0] if wanted == "step" else self._gradient
        return Taken(given, 0.5 * float(self.weights.dot(self.weights)), self.task.batch_size)

    def step(
        self,
        gradient: Tensor | None,
        rate: float,
        touched: tuple[Tensor, ...] = (),
        position: int | None = None,
        staleness: float = 0.0,
    ) -> None:
        self._own.sub_(self._gradient if gradient is None else gradient, alpha=self.task.rate * rate)

    def load_gradient(self, gradient: Tensor) -> None:
        self._gradient.copy_(gradient)

    def observe(self, metrics: dict[str, float]) -> None:
        """Its rate never changes."""

    def state(self, others: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Plain gradient descent has no state."""


@contextmanager
def _changed(optimizer: torch.optim.Optimizer, rate: float, staleness: float) -> Iterator[None]:
    """The optimizer with `rate` times its learning rate, and such a momentum as suits stale gradients, for one step.

    A velocity decays as if the updates that a gradient has missed were steps of its own: staleness acts as momentum
    itself (Mitliagkas et al., "Asynchrony begets momentum"), and both together make training diverge. What a rate that
    was chosen with momentum can bear falls too, with the root of it. Without momentum a rate is left alone.
    """
    names: tuple[str, ...] = ("lr", "momentum")
    usual = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        change = rate
        if group.get("momentum"):
            group["momentum"] = group["momentum"] ** (1 + staleness)
            change /= math.sqrt(1 + staleness)
        if change != 1.0:
            group["lr"] = group["lr"] * change
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, usual, strict=True):
            group.update(own)


def build_model(task: Task, seed: int) -> nn.Module:
    """The task's model as every replica of a run starts with it; the global random state is left as it was."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        with users_code(task, "model()"):
            model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"model() of task {type(task).__name__} returned {type(model).__name__}: return a torch.nn.Module"
        )
    return model


def evaluate(task: Task, model: nn.Module) -> dict[str, float]:
    """The task's metrics of a model, taken in evaluation mode and without gradients; its modes are restored."""
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


def flatten(
    optimizer: torch.optim.Optimizer, vector: Vector, apart: Iterable[tuple[int, int]] = ()
) -> list[_FlatRun] | None:
    """Make an optimizer work on whole runs of the flat vector instead of on one parameter after another.

    The optimizer keeps its class, groups and settings; `apart` are parameters that stay runs of their own. None, and
    nothing changed, for an optimizer that is not elementwise. Each run is to be given its gradient before a step.
    """
    if type(optimizer) not in ELEMENTWISE:
        return None
    places = {
        id(parameter): (start, start + parameter.numel())
        for parameter, start in zip(vector.parameters, vector.positions, strict=False)
    }
    edges = {edge for part in apart for edge in part}
    made: list[_FlatRun] = []
    for group in optimizer.param_groups:
        if any(p.requires_grad and id(p) not in places for p in group["params"]):
            raise TaskError(
                "the optimizer holds a parameter that is not the model's: make it part of what model() returns"
            )
        runs: list[list[int]] = []
        for start, stop in sorted(places[id(p)] for p in group["params"] if id(p) in places):
            if runs and runs[-1][1] == start and start not in edges:
                runs[-1][1] = stop
            else:
                runs.append([start, stop])
        group["params"] = [_FlatRun.of(vector, start, stop) for start, stop in runs]
        made += group["params"]
        if type(optimizer) in _FUSED_ON_CPU and group.get("fused") is None and not group.get("foreach"):
            group["fused"] = not group.get("differentiable", False)
    optimizer.state.clear()
    return made


class _FlatRun(nn.Parameter):
    """A run of the vector as an optimizer sees it."""

    start: int

    @staticmethod
    def of(vector: Vector, start: int, stop: int) -> _FlatRun:
        run = _FlatRun(vector.weights[start:stop])
        run.start = start
        return run


class Parts:
    """An optimizer that was made for the whole vector and steps one of its parts, and the states of such optimizers.

    Runs are cut where a part ends, which is no matter to an optimizer that treats every element alike. So the states of
    all parts make one of the whole, from which a run with any number of hubs can go on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter_count: int, index: int, count: int) -> None:
        self._parts = shards(parameter_count, count)
        self.own = self._parts[index]
        self._groups = [
            [(run.start, run.start + len(run)) for run in group["params"]] for group in optimizer.param_groups
        ]

    def keep(self, optimizer: torch.optim.Optimizer, vector: Vector) -> list[_FlatRun]:
        """Leave the optimizer its own part."""
        for group, runs in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [
                _FlatRun.of(vector, *piece) for run in runs if (piece := _overlap(run, self.own)) is not None
            ]
        return [run for group in optimizer.param_groups for run in group["params"]]

    def joined(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of an optimizer of the whole vector, of those of all parts."""
        found: dict[int, list[dict[str, Any]]] = {}
        for part, state in zip(self._parts, states, strict=True):
            for piece, number in enumerate(self._numbers(part)):
                found.setdefault(number, []).append(state["state"].get(piece, {}))
        whole = {
            number: {
                name: torch.cat([piece[name] for piece in pieces])
                if isinstance(value, Tensor) and value.ndim
                else value
                for name, value in pieces[0].items()
            }
            for number, pieces in found.items()
            if all(pieces)  # a hub that has never stepped has none
        }
        return {"state": whole, "param_groups": self._numbered(states[0], [len(runs) for runs in self._groups])}

    def cut(self, state: dict[str, Any]) -> dict[str, Any]:
        """What an optimizer of this part needs of the state of one of the whole vector."""
        runs = [run for group in self._groups for run in group]
        own: dict[int, dict[str, Any]] = {}
        for piece, number in enumerate(self._numbers(self.own)):
            start, stop = _overlap(runs[number], self.own) or (0, 0)
            within = slice(start - runs[number][0], stop - runs[number][0])
            own[piece] = {  # copies, since other hubs may be given the same state
                name: (value[within] if value.ndim else value).clone() if isinstance(value, Tensor) else value
                for name, value in state["state"].get(number, {}).items()
            }
        counts = [sum(_overlap(run, self.own) is not None for run in runs) for runs in self._groups]
        return {"state": {k: v for k, v in own.items() if v}, "param_groups": self._numbered(state, counts)}

    def _numbers(self, part: slice) -> list[int]:
        """Of the runs of the whole vector, those that have something of a part."""
        runs = [run for group in self._groups for run in group]
        return [number for number, run in enumerate(runs) if _overlap(run, part) is not None]

    @staticmethod
    def _numbered(state: dict[str, Any], counts: list[int]) -> list[dict[str, Any]]:
        """The settings of a state's groups, which shall have so many runs each."""
        numbers = iter(range(sum(counts)))
        groups = zip(state["param_groups"], counts, strict=True)
        return [{**group, "params": list(itertools.islice(numbers, count))} for group, count in groups]


def _overlap(run: tuple[int, int], part: slice) -> tuple[int, int] | None:
    start, stop = max(run[0], part.start), min(run[1], part.stop)
    return (start, stop) if start < stop else None


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [_to(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
