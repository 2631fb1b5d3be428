"""Replicas for a user's own loop: the user's module and optimizer as they are, and a vector that no optimizer steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tether.core.effects import GradientForm
from tether.core.machine import GradientResult
from tether.core.vector import Empty, Vector, copy_gradient, is_finite
from tether.core.wire import can_be_packed, pack_tree, unpack_tree
from tether.errors import Diverged, UsageError
from tether.learner.guard import Guard, too_many_skipped
from tether.learner.optimizer import adjusted


class _Plain:
    """What a replica of a user's own loop has no part in: the script loads data, and evaluates what it likes."""

    load_seconds = 0.0
    skipped = 0
    refused = 0
    averaged: Tensor | None = None

    def average(self, decay: float) -> None:
        raise NotImplementedError("a script has no task that could ask for an average")

    def observe(self, metrics: dict[str, float]) -> None:
        """A schedule is stepped by the user's loop."""

    def close(self) -> None:
        """It loads no data."""


class LoopReplica(_Plain):
    """The module and the optimizer of a user's own loop.

    The loop computes gradients, and the optimizer steps as it would alone: on the module's own parameters, which are
    views of the vector, and with its own gradients, unless the machine hands over another one.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        #: where tensors are allocated that other processes read
        self.empty: Empty = torch.empty
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.vector = Vector(model, frozen=parameters)
        self.weights = self.vector.weights
        self.parameter_count = self.vector.parameter_count
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._known = {id(parameter) for parameter in self.vector.parameters}
        #: what the user's call of `step` does, and what it returned
        self.pending_step: Callable[[], Any] | None = None
        self.returned: Any = None
        #: the optimizer is not one of torch's, and may give parameters other memory
        self.may_replace = False
        self._has_stepped = False
        self._name = ""
        self._guard = Guard(0)
        self._steps = 0
        #: the buffers as the last gradient that was used has left them
        self._buffers = self.weights[self.parameter_count :]
        #: what else a checkpoint keeps, and takes back
        self.extra_state: Callable[[], dict[str, Any]] = dict
        self.restore_extra: Callable[[dict[str, Any]], None] = lambda state: None

    def begin(self, name: str, guard: float, empty: Empty) -> None:
        """The weights are those of the run now, of which this is a worker. `guard` is an option of its protocol."""
        self._name, self._guard, self.empty = name, Guard(guard), empty
        self._buffers = self.weights[self.parameter_count :].clone()

    def check(self) -> None:
        """Raise UsageError if the user has changed the model or the optimizer in a way that cannot be exchanged."""
        if not self.vector.is_bound():
            raise UsageError(
                "the parameters of the model were replaced after tether.join(), as .to(), .half(), "
                "load_state_dict(assign=True) and parameter.data = values do: do that before tether.join(), and set "
                "values with parameter.data.copy_(values)"
            )
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._known:
                    raise UsageError(
                        "the optimizer was given a parameter after tether.join() that is not exchanged: add all "
                        "parameters to the optimizer before tether.join(), also those that are frozen at first"
                    )

    def seek(self, batch: int, upcoming: tuple[int, ...], position: int) -> None:
        """Which samples a gradient has is up to the user."""

    def compute(self, form: GradientForm, fresh: bool) -> GradientResult:
        """The gradient that the user's loop has computed; its loss is not known, and a step counts as one sample."""
        self.vector.gather_buffers()
        self._steps += 1
        self._refuse_wrong_gradient()
        gradient = self.weights[:0]
        if form != "none":
            gradient = torch.empty_like(self.weights[: self.parameter_count])
            for parameter, start in zip(self.vector.parameters, self.vector.positions, strict=False):
                view = gradient[start : start + parameter.numel()].view(parameter.shape)
                copy_gradient(parameter, view)
        return GradientResult(gradient, math.nan, 1)

    def _refuse_wrong_gradient(self) -> None:
        """Replace a gradient that is not finite, or that the guard refuses, by zeros."""
        gradients = [p.grad for p in self.vector.parameters if p.grad is not None]
        values = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        buffers = self.weights[self.parameter_count :]
        finite = all(is_finite(part) for part in values)
        if finite and not self._guard.refuses(values):
            self._buffers.copy_(buffers)
            return
        buffers.copy_(self._buffers)
        for gradient in gradients:
            gradient.zero_()
        if finite:
            self.refused += 1
            return
        self.skipped += 1
        if too_many_skipped(self.skipped, self._steps):
            raise Diverged(
                f"{self._name}, step {self._steps}: {self.skipped} of its gradients were not finite; lower the "
                "learning rate, clip gradients, or look for what has no derivative in the loss, such as sqrt(0)"
            )

    def step(
        self,
        gradient: Tensor | None,
        rate: float,
        touched: tuple[Tensor, ...] = (),
        position: int | None = None,
        staleness: float = 0.0,
    ) -> None:
        self._has_stepped = True
        if gradient is not None:
            self.load_gradient(gradient)
        assert self.pending_step is not None
        with adjusted(self.optimizer, rate, staleness):
            self.returned = self.pending_step()
        if self.may_replace:
            self.vector.bind_replaced()

    def load_gradient(self, gradient: Tensor) -> None:
        for parameter, start in zip(self.vector.parameters, self.vector.positions, strict=False):
            if parameter.grad is None:
                continue
            part = gradient[start : start + parameter.numel()].view(parameter.shape)
            if parameter.grad.is_sparse:  # what the machine hands over has other rows too
                parameter.grad = part.clone()
            else:
                parameter.grad.copy_(part)

    def state(self, others: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        state: dict[str, Any] = dict(self.extra_state())
        if self._has_stepped:
            optimizer = self.optimizer.state_dict()
            if can_be_packed(optimizer):  # an optimizer of the user's own may hold anything
                state |= {"kind": type(self.optimizer).__name__, "optimizer": optimizer}
            if self.scheduler is not None and can_be_packed(scheduler := self.scheduler.state_dict()):
                state["scheduler"] = scheduler
        tensors: list[Tensor] = []
        values = pack_tree(state, tensors)
        copied: dict[str, Any] = unpack_tree(values, [self._copied(tensor) for tensor in tensors])
        return copied

    def _copied(self, values: Tensor) -> Tensor:
        copied = self.empty(values.numel(), dtype=values.dtype, device=values.device)
        return copied.view(values.shape).copy_(values.detach())

    def restore(self, state: dict[str, Any]) -> None:
        self.restore_extra(state)
        own = type(self.optimizer).__name__
        if "optimizer" not in state or state.get("kind", own) != own:
            return
        kept = copy.deepcopy(state["optimizer"])  # it may be lent
        groups = self.optimizer.state_dict()["param_groups"]
        if [group["params"] for group in kept["param_groups"]] != [group["params"] for group in groups]:
            return
        if self.scheduler is None or "scheduler" not in state:
            kept["param_groups"] = groups  # without its schedule, the rates are those of the script
        self.optimizer.load_state_dict(kept)
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
        self._has_stepped = True


class HeldWeights(_Plain):
    """A vector that is only exchanged: that of a hub which neither computes gradients nor steps."""

    def __init__(self, weights: Tensor, parameter_count: int) -> None:
        self.weights = weights
        self.parameter_count = parameter_count

    def seek(self, batch: int, upcoming: tuple[int, ...], position: int) -> None:
        raise NotImplementedError("this node computes no gradients")

    def compute(self, form: GradientForm, fresh: bool) -> GradientResult:
        raise NotImplementedError("this node computes no gradients")

    def step(
        self,
        gradient: Tensor | None,
        rate: float,
        touched: tuple[Tensor, ...] = (),
        position: int | None = None,
        staleness: float = 0.0,
    ) -> None:
        raise NotImplementedError("this node has no optimizer")

    def load_gradient(self, gradient: Tensor) -> None:
        raise NotImplementedError("this node has no optimizer")

    def state(self, others: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """There is nothing to restore besides the weights."""
