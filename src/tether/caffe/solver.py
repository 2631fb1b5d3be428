"""Caffe's solvers: the update of every type, and the policies of the learning rate.

With rate r, momentum mu, gradient g (decay included) and weights w, every history h begins at 0:

    SGD        h <- mu h + r g;                     w <- w - h
    Nesterov   h' = mu h + r g;                     w <- w - ((1 + mu) h' - mu h);  h <- h'
    AdaGrad    h <- h + g^2;                        w <- w - r g / (sqrt(h) + delta)
    RMSProp    h <- d h + (1 - d) g^2;              w <- w - r g / (sqrt(h) + delta)
    AdaDelta   h <- mu h + (1 - mu) g^2;            u = g sqrt((k + delta) / (h + delta))
               k <- mu k + (1 - mu) u^2;            w <- w - r u
    Adam       m <- mu m + (1 - mu) g;              v <- mu2 v + (1 - mu2) g^2
               w <- w - r sqrt(1 - mu2^t) / (1 - mu^t) m / (sqrt(v) + delta)

The rate is part of SGD's history, so that a lower rate acts on new gradients only; torch's SGD differs there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tether.caffe.net import Net
from tether.caffe.weights import SolverState
from tether.errors import UsageError, unknown

TYPES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")
POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid")


class CaffeSolver(torch.optim.Optimizer):
    """An optimizer with the update of one type of solver; it treats every value alike."""

    #: works on runs of a flat vector as it does on single parameters
    elementwise: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        type: str = "SGD",
        momentum: float = 0.0,
        momentum2: float = 0.999,
        rms_decay: float = 0.99,
        delta: float = 1e-8,
        weight_decay: float = 0.0,
        regularization: str = "L2",
    ) -> None:
        self.type = type
        #: the histories to begin with, each for the whole vector of parameters, and the iteration they are of
        self.beginning: tuple[tuple[Tensor, ...], int] | None = None
        self._positions: dict[int, int] = {}
        self.regularization = regularization
        settings = {
            "lr": lr,
            "momentum": momentum,
            "momentum2": momentum2,
            "rms_decay": rms_decay,
            "delta": delta,
            "weight_decay": weight_decay,
        }
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, self.state[parameter])

    def _update(self, weights: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if decay := group["weight_decay"]:
            gradient = gradient.add(weights if self.regularization == "L2" else weights.sign(), alpha=decay)
        rate, momentum, delta = group["lr"], group["momentum"], group["delta"]
        if "history" not in state:
            for slot, name in enumerate(("history", "second")[: slots(self.type)]):
                state[name] = self._first_history(weights, slot)
            state["step"] = self.beginning[1] if self.beginning is not None else 0
        history = state["history"]
        match self.type:
            case "SGD":
                weights.sub_(history.mul_(momentum).add_(gradient, alpha=rate))
            case "Nesterov":
                weights.add_(history, alpha=momentum)
                weights.sub_(history.mul_(momentum).add_(gradient, alpha=rate), alpha=1 + momentum)
            case "AdaGrad":
                history.addcmul_(gradient, gradient)
                weights.addcdiv_(gradient, history.sqrt().add_(delta), value=-rate)
            case "RMSProp":
                share = group["rms_decay"]
                history.mul_(share).addcmul_(gradient, gradient, value=1 - share)
                weights.addcdiv_(gradient, history.sqrt().add_(delta), value=-rate)
            case "AdaDelta":
                second = state["second"]
                history.mul_(momentum).addcmul_(gradient, gradient, value=1 - momentum)
                update = gradient * ((second + delta) / (history + delta)).sqrt_()
                second.mul_(momentum).addcmul_(update, update, value=1 - momentum)
                weights.sub_(update, alpha=rate)
            case "Adam":
                second, other = state["second"], group["momentum2"]
                state["step"] += 1
                history.mul_(momentum).add_(gradient, alpha=1 - momentum)
                second.mul_(other).addcmul_(gradient, gradient, value=1 - other)
                correction = math.sqrt(1 - other ** state["step"]) / (1 - momentum ** state["step"])
                weights.addcdiv_(history, second.sqrt().add_(delta), value=-rate * correction)

    def _first_history(self, weights: Tensor, slot: int) -> Tensor:
        if self.beginning is None:
            return torch.zeros_like(weights)
        # a run of the vector knows where it begins; a parameter by itself does not
        start = getattr(weights, "start", self._positions.get(id(weights), 0))
        values = self.beginning[0][slot][start : start + weights.numel()]
        return values.to(weights).view_as(weights).clone()

    def begin_with(self, net: Net, state: SolverState) -> None:
        """Begin with the histories of a .solverstate of this net."""
        owned = [blob for blob in net.blobs if blob.owner == (blob.module, blob.name)]
        count, found = slots(self.type) * len(owned), len(state.histories)
        if found != count:
            raise UsageError(
                f"the .solverstate has {found} histories, and {self.type} has {count} for this net: name the state of "
                "this net and type of solver"
            )
        wholes = []
        for slot in range(slots(self.type)):
            histories = state.histories[slot * len(owned) : (slot + 1) * len(owned)]
            by_parameter: dict[int, Tensor] = {}
            for blob, values in zip(owned, histories, strict=True):
                if values.numel() != math.prod(blob.shape):
                    raise UsageError(
                        f"the .solverstate has a history of shape {tuple(values.shape)} for a parameter of layer "
                        f"{blob.layer!r} of shape {blob.shape}: name the state of this net"
                    )
                if (parameter := net.layers[blob.module]._parameters.get(blob.name)) is not None:
                    by_parameter[id(parameter)] = values.reshape(-1)
            learned = [p for p in net.parameters() if p.requires_grad]
            wholes.append(torch.cat([by_parameter[id(p)] for p in learned]))
            ends = [0, *itertools.accumulate(p.numel() for p in learned)]
            self._positions = {id(p): start for p, start in zip(learned, ends, strict=False)}
        self.beginning = (tuple(wholes), state.iteration)

    def histories(self, net: Net) -> tuple[Tensor, ...]:
        """The histories as a .solverstate has them, after the optimizer was made to work on runs of the vector."""
        learned = [p for p in net.parameters() if p.requires_grad]
        ends = [0, *itertools.accumulate(p.numel() for p in learned)]
        positions = {id(p): start for p, start in zip(learned, ends, strict=False)}
        found: list[Tensor] = []
        for slot, name in enumerate(("history", "second")[: slots(self.type)]):
            whole = torch.zeros(ends[-1])
            for group in self.param_groups:
                for run in group["params"]:
                    start = getattr(run, "start", positions.get(id(run), 0))
                    values = self.state[run].get(name)
                    values = self._first_history(run, slot) if values is None else values
                    whole[start : start + run.numel()] = values.reshape(-1).cpu()
            for blob in net.blobs:
                if blob.owner != (blob.module, blob.name):
                    continue
                parameter = net.layers[blob.module]._parameters.get(blob.name)
                start = positions.get(id(parameter), -1)
                # statistics, and parameters with an lr_mult of 0, have an empty history in Caffe too
                values = whole[start : start + math.prod(blob.shape)] if start >= 0 else torch.zeros(blob.shape)
                found.append(values.reshape(blob.shape))
        return tuple(found)


def slots(kind: str) -> int:
    """How many histories a parameter has."""
    return 2 if kind in ("AdaDelta", "Adam") else 1


@dataclass(frozen=True)
class Policy:
    """The learning rate at an iteration, which a worker's own iterations count."""

    name: str
    base: float
    gamma: float
    power: float
    stepsize: int
    stepvalues: tuple[int, ...]
    max_iter: int

    @staticmethod
    def of(solver: Any) -> Policy:
        name = solver.lr_policy or "fixed"
        if name not in POLICIES:
            raise unknown("lr_policy", name, POLICIES)
        if name == "step" and solver.stepsize < 1:
            raise UsageError(f"lr_policy step needs stepsize of at least 1, and not {solver.stepsize}")
        if name == "poly" and solver.max_iter < 1:
            raise UsageError("lr_policy poly needs max_iter")
        return Policy(
            name,
            solver.base_lr,
            solver.gamma,
            solver.power,
            solver.stepsize,
            tuple(solver.stepvalue),
            solver.max_iter,
        )

    def rate(self, iteration: int) -> float:
        """The learning rate at an iteration."""
        return self.base * self.factor(iteration)

    def factor(self, iteration: int) -> float:
        """The rate at an iteration as a share of the base rate."""
        try:
            match self.name:
                case "step":
                    return float(self.gamma ** (iteration // self.stepsize))
                case "exp":
                    return float(self.gamma**iteration)
                case "inv":
                    return float((1 + self.gamma * iteration) ** -self.power)
                case "multistep":
                    return float(self.gamma ** self._steps_before(iteration))
                case "poly":
                    return float(max(0.0, 1 - iteration / self.max_iter) ** self.power)
                case "sigmoid":
                    return 1 / (1 + math.exp(-self.gamma * (iteration - self.stepsize)))
        except (OverflowError, ZeroDivisionError, TypeError):
            where = f"lr_policy {self.name} with gamma {self.gamma:g} and power {self.power:g}"
            raise UsageError(f"{where} has no rate at iteration {iteration}") from None
        return 1.0

    def current_step(self, iteration: int) -> int:
        """How often the rate was lowered, which a .solverstate holds."""
        if self.name == "step":
            return iteration // self.stepsize
        return self._steps_before(iteration) if self.name == "multistep" else 0

    def _steps_before(self, iteration: int) -> int:
        # Caffe goes on to the next value only when it has passed the one before
        count = 0
        for value in self.stepvalues:
            if iteration < value:
                break
            count += 1
        return count


def make_solver(solver: Any, net: Net, factor: float = 1.0) -> CaffeSolver:
    """The optimizer that a solver file describes, over the parameters of a net with their own multipliers.

    `factor`: by how much its rates are higher than in the file.
    """
    base_lr = factor * solver.base_lr
    if solver.type not in TYPES:
        raise unknown("solver type", solver.type, TYPES)
    if solver.regularization_type not in ("L1", "L2"):
        raise unknown("regularization_type", solver.regularization_type, ("L1", "L2"))
    if solver.type in ("AdaGrad", "RMSProp") and solver.momentum:
        raise UsageError(f"momentum cannot be used with {solver.type}: leave it out, as Caffe demands")
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for blob in net.blobs:
        parameter = net.layers[blob.module]._parameters.get(blob.name)
        if parameter is not None and parameter.requires_grad and blob.owner == (blob.module, blob.name):
            groups.setdefault((blob.lr_mult, blob.decay_mult), []).append(parameter)
    if not groups:
        raise UsageError("the net has nothing to learn: some parameter must have an lr_mult of more than 0")
    return CaffeSolver(
        [
            {"params": params, "lr": base_lr * lr_mult, "weight_decay": solver.weight_decay * decay_mult}
            for (lr_mult, decay_mult), params in groups.items()
        ],
        base_lr,
        type=solver.type,
        momentum=solver.momentum,
        momentum2=solver.momentum2,
        rms_decay=solver.rms_decay,
        delta=solver.delta,
        regularization=solver.regularization_type,
    )
