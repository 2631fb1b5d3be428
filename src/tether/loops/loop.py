"""`tether.join` and what goes with it: the public functions of a user's own loop."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler, Sampler

from tether.errors import UsageError
from tether.execution.checkpoint import save_tensors
from tether.learner.loop import LoopReplica
from tether.loops.process import Place, place, rank, world_size
from tether.loops.sampler import SharedSampler
from tether.protocols import Options
from tether.runtimes.randomness import seed_all

T = TypeVar("T")

__all__ = ["Loop", "evaluate", "is_main", "join", "rank", "sampler", "save", "world_size"]

#: how often a loop checks that model and optimizer are still those that were joined
CHECK_SECONDS = 0.25

#: the loop of this process, and the samplers that it was given
_loop: Loop | None = None
_samplers: list[SharedSampler] = []


class Loop:
    """What `join` returns. It unpacks into what the loop uses, and as a context manager it ends the run in good order.

    In a script that was started alone it changes nothing.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.closed = False

    def __iter__(self) -> Iterator[Any]:
        """Model and optimizer, and the scheduler if `join` was given one."""
        return iter((self.model, self.optimizer, *(() if self.scheduler is None else (self.scheduler,))))

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        """End the loop of this process: wait for the others, and leave the joint model in `model`."""
        self.closed = True

    def with_joint_model(self, function: Callable[[nn.Module], T]) -> T:
        """What a function returns for the joint model as it is now, in evaluation mode and without gradients."""
        modes = [(part, part.training) for part in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                return function(self.model)
        finally:
            for part, training in modes:
                part.training = training

    def record(self, metrics: dict[str, float]) -> None:
        """Put metrics of the joint model into the metrics of the run, if there is one."""


class TiedLoop(Loop):
    """The loop of a process that `tether launch` has started."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        protocol: Options | None,
        place: Place,
    ) -> None:
        from tether.loops.worker import Worker  # the links of a run, which a script alone does not need

        super().__init__(model, optimizer, scheduler)
        self._stepping = _unwrapped(optimizer)
        self._replica = LoopReplica(model, self._stepping, scheduler)
        self._replica.extra_state, self._replica.restore_extra = self._state, self._restore
        self._checked_at = 0.0
        self._resumed = place.plan.restored is not None or place.node.life > 1
        #: the steps of the schedule, and how many of them a resumed loop has not repeated yet
        self._schedule_calls = 0
        self._schedule_repeats = 0
        _differ_from_first(place.node.index)
        self._tie_optimizer()
        if scheduler is not None:
            self._tie_scheduler()
        self._worker = Worker(place, self._replica, protocol)

    @property
    def steps(self) -> int:
        """How many steps this process has made since the run began or was resumed."""
        return self._worker.steps

    @property
    def earlier_steps(self) -> int:
        """The steps of the process that this one replaces which count."""
        return self._worker.earlier_steps

    def close(self) -> None:
        if self.closed:
            return
        if not self.steps and not self._resumed and all(len(drawn) for drawn in _samplers):
            shares = " and ".join(str(len(drawn)) for drawn in _samplers)
            raise UsageError(
                "the loop has ended, and optimizer.step() was never called on the optimizer that tether.join() was "
                "given: call it after every backward(), and do not make another optimizer after tether.join(); an "
                "optimizer in two steps, such as SAM, must have its second one in step(closure)"
                + (
                    f". This process's share of the data is {shares} samples: a DataLoader with a larger batch_size "
                    "and drop_last returns nothing"
                    if shares
                    else ""
                )
            )
        self._replica.check()
        self._end()

    def _end(self) -> None:
        """Wait for the others, and leave the joint model in the module, as tensors of its own."""
        self.closed = True
        self._worker.end()
        self._replica.vector.gather_buffers()
        self._replica.vector.unbind(self._replica.weights)

    def with_joint_model(self, function: Callable[[nn.Module], T]) -> T:
        if self.closed:  # it is in the module
            return super().with_joint_model(function)
        vector = self._replica.vector
        vector.gather_buffers()
        vector.unbind(self._worker.joint_weights().to(self._replica.weights.device))
        try:
            return super().with_joint_model(function)
        finally:
            vector.bind()

    def record(self, metrics: dict[str, float]) -> None:
        self._worker.record(metrics)

    def disconnect(self) -> None:
        """Close the connections to the run, which has ended."""
        self._worker.close()

    # ---- steps ----

    def _tie_optimizer(self) -> None:
        """Have the optimizer's `step` of this instance go through the protocol."""
        original = self._stepping.step
        inner = getattr(original, "__func__", original)
        # those of torch call the closure once, for the gradient; others may call it in the middle of their step
        of_torch = type(self._stepping).step.__module__.startswith("torch.optim.")
        closure_first = of_torch and not _is_lbfgs(self._stepping)
        self._replica.may_replace = not of_torch

        @functools.wraps(inner)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.closed:
                return original(*args, **kwargs)
            given = kwargs.get("closure", args[0] if args else None)
            if given is None or not closure_first:
                return self._step(lambda: original(*args, **kwargs))
            # before the node is locked: the closure has the forward and backward passes
            with torch.enable_grad():
                loss = given()
            self._step(lambda: original())
            return loss

        # a bound method, since schedulers wrap the function in it
        self._stepping.step = types.MethodType(step, self._stepping)  # type: ignore[method-assign]

    def _step(self, step: Callable[[], Any]) -> Any:
        if (now := time.monotonic()) - self._checked_at > CHECK_SECONDS:
            self._checked_at = now
            self._replica.check()
        self._replica.pending_step, self._replica.returned = step, None
        for drawn in _samplers:  # before the step, since a checkpoint may be made while it waits for others
            drawn.step_made(self.earlier_steps + self.steps + 1)
        if not self._worker.step():
            self._end()
            raise KeyboardInterrupt("the run has ended")
        return self._replica.returned

    def _tie_scheduler(self) -> None:
        """Count the steps of the schedule; in a resumed run, leave out those of the epochs that are skipped."""
        kind = type(self.scheduler)

        @functools.wraps(kind.step)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._schedule_repeats and not self._worker.steps:
                self._schedule_repeats -= 1
                return None
            self._schedule_calls += 1
            return kind.step(scheduler, *args, **kwargs)

        # a class of its own, since an attribute of the instance would be in its state_dict
        self.scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})

    # ---- what a checkpoint keeps ----

    def _state(self) -> dict[str, Any]:
        return {"loop": {"samplers": [drawn.state() for drawn in _samplers], "schedule_calls": self._schedule_calls}}

    def _restore(self, state: dict[str, Any]) -> None:
        kept = state.get("loop")
        if kept is None:
            return
        self._schedule_calls = self._schedule_repeats = kept["schedule_calls"]


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    protocol: Options | None = None,
) -> Loop:
    """Tie a model and its optimizer to those of the other processes of the run, and return what the loop uses.

    From then on `optimizer.step()` means what the protocol says. In a script that was started alone, nothing changes,
    bit for bit. Under `tether launch -n 4 train.py` every process begins with the weights of the first one.

    model, optimizer: as the loop has them. The optimizer's parameters must be the model's; those that are frozen at
        first belong to the optimizer from the beginning.
    scheduler: of the learning rate, if there is one, so that a resumed run continues it. The loop steps it.
    protocol: how the processes agree, such as tether.Mpca(), unless the command line says it; tether.Tide() by default.

    The result unpacks into model and optimizer, and the scheduler if there is one. As a context manager it ends the
    loop: it waits for the other processes and leaves the joint model in `model`. Without it, the end of the script
    does. docs/loops.md has examples.
    """
    global _loop
    _check(model, optimizer, scheduler, protocol)
    where = place()
    if world_size() > 1 and _is_lbfgs(optimizer):
        raise UsageError(
            "tether.join(): LBFGS compares its gradients from step to step, and between two steps other processes "
            "change the weights: use an optimizer such as torch.optim.SGD or Adam, or launch one process"
        )
    if _loop is not None and (where is not None or not _loop.closed):
        raise UsageError(
            "tether.join() was called twice: a run ties one model and one optimizer; put both models into one "
            "nn.Module, or start another run for the second"
        )
    if where is None:
        _loop = Loop(model, optimizer, scheduler)
    else:
        _loop = TiedLoop(model, optimizer, scheduler, protocol, where)
    return _loop


def current() -> Loop | None:
    """The loop of this process, if it has joined."""
    return _loop


def is_main() -> bool:
    """Whether this is the process that prints and saves: the one of rank 0."""
    return rank() == 0


def evaluate(function: Callable[[nn.Module], T]) -> T | None:
    """What a function returns for the joint model as it is now, in evaluation mode and without gradients.

    The process of rank 0 calls it; the others continue at once, with None. A number, or a dict of numbers, becomes a
    row of the run's metrics. In a script that was started alone, the joint model is the model.
    """
    loop = _joined("evaluate")
    if not is_main():
        return None
    result = loop.with_joint_model(function)
    values: Any = result if isinstance(result, dict) else {"value": result}
    if all(isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1) for value in values.values()):
        loop.record({str(name): float(value) for name, value in values.items()})
    return result


def save(path: Path | str) -> None:
    """Save the state_dict of the joint model as it is now, to a file that ends in .safetensors, .pt or .pth.

    The process of rank 0 writes the file; the others continue at once.
    """
    loop, path = _joined("save"), Path(path)
    if is_main():
        loop.with_joint_model(lambda model: save_tensors(model.state_dict(), path))


def sampler(dataset: Any) -> Sampler[int]:
    """A sampler for a DataLoader: each sample of an epoch is drawn by one process, exactly, also after a resume.

    Use it instead of `shuffle=True`. In a script that was started alone it is the RandomSampler that `shuffle=True`
    stands for. Make it before the loop begins.
    """
    where = place()
    if where is None:
        return RandomSampler(dataset)
    if isinstance(_loop, TiedLoop) and _loop.steps:
        raise UsageError("tether.sampler() was called after the first step: make all samplers before the loop")
    made = SharedSampler(dataset, seed=where.plan.seed, rank=rank(), world_size=world_size())
    number = len(_samplers)
    _samplers.append(made)
    made.resume(where.plan.drawn_by(number))
    made.keep(where.spec.directory / f"samples-{rank()}-{number}", _earlier_steps if where.node.life > 1 else None)
    return made


def _earlier_steps() -> int:
    return _loop.earlier_steps if isinstance(_loop, TiedLoop) else 0


def _joined(what: str) -> Loop:
    if _loop is None:
        raise UsageError(f"tether.{what}() was called before tether.join(model, optimizer): join first")
    return _loop


def _check(model: object, optimizer: object, scheduler: object, protocol: object) -> None:
    """Refuse what cannot be joined."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"tether.join(): the model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"tether.join(): the optimizer must be one torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise UsageError(f"tether.join(): the scheduler must have a method step, unlike {type(scheduler).__name__}")
    if protocol is not None and not isinstance(protocol, Options):
        raise UsageError(f"tether.join(): protocol must be options such as tether.Mpca(), not {protocol!r}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in names for parameter in trained)
    if foreign:
        raise UsageError(
            f"tether.join(): {foreign} of the {len(trained)} parameters of the optimizer are not parameters of the "
            "model: make the optimizer from model.parameters() of the model that is joined, after the model was moved "
            "or wrapped"
        )
    others = getattr(getattr(scheduler, "optimizer", optimizer), "param_groups", None)
    if others is not optimizer.param_groups:  # which a wrapper of the optimizer shares
        raise UsageError("tether.join(): the scheduler is one of another optimizer")


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps: the wrapper of accelerate makes no step while gradients are accumulated."""
    inner = getattr(optimizer, "optimizer", None)
    of_accelerate = type(optimizer).__module__.startswith("accelerate.")
    return inner if of_accelerate and isinstance(inner, torch.optim.Optimizer) else optimizer


def _is_lbfgs(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(_unwrapped(optimizer), torch.optim.LBFGS)


def _differ_from_first(index: int) -> None:
    """Give every process but the first random numbers of its own: with equal ones all would draw the same samples."""
    if index:
        seed_all((torch.initial_seed() * 1_000_003 + index * 7919) % 2**32)
