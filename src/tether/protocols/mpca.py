"""MPCA SGD: multi-phase coordinated asynchronous training (sections 4 and 6.3).

Workers never stop. The hub holds the joint model, whose shards circulate (`protocols/circulation.py` has the cycles,
the phases, and the rules for stragglers, deaths and workers that join):

1. Broadcast: the projected joint shard goes to all workers, where it replaces the old target by a swap.
2. Reduction: a worker that has it contributes a copy of its own shard, weighted by tau, the steps that it has made
   since its last contribution of that shard (equation 9).
3. Preparation: the hub blends the mean R into its shard, x <- (1 - beta) x + beta R (equation 8), tracks its velocity,
   v <- delta v + (1 - delta) (x_t - x_t-1) (equation 4), and projects it, x* = x + gamma v (equation 5). BatchNorm's
   buffers are not projected, since a variance must not fall below zero.

A worker moves its whole vector before every gradient, x <- x - alpha (x - x*) (equation 7); or the pull is part of the
gradient, g <- g + alpha (x - x*) (equation 6).

Schedules, which the hub sends so that every worker has the same: alpha is 0 for the first steps, then high, then decays
to its target (section 6.3); beta goes from 1 to its target by a constant factor per cycle (section 4.5); gamma grows
from 0 (section 4.3). The paper's cycles last 12 to 108 steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tether.core.effects import Blend, Effect, Step
from tether.core.events import GradientReady
from tether.core.machine import Machine, NodeContext
from tether.core.message import Row
from tether.core.snapshot import Values, snapshot
from tether.errors import UsageError
from tether.protocols.base import Options, option
from tether.protocols.circulation import (
    AreYouThere,
    Circulated,
    Circulation,
    CirculationHub,
    CirculationWorker,
    Here,
    is_buffers,
)

#: the share of the distance to the joint model by which the automatic alpha moves a worker in a cycle
PULL = 0.2
#: default schedules: those of the paper, or these shares of a run that is too short for them
FREE_STEPS, FREE_SHARE = 20, 0.05
ALPHA_DECAY_STEPS, ALPHA_DECAY_SHARE = 200, 0.2
RAMP_CYCLES, RAMP_SHARE = 20, 0.2


class Projected(Circulated, frozen=True):
    """Hub to all: a shard of the projected joint model, and the rate of the pull towards it."""

    alpha: float = 0.0


@dataclass(frozen=True)
class Mpca(Circulation):
    """Workers never stop: shards of the joint model circulate, and every step pulls a worker towards them."""

    alpha: float | Literal["auto"] = option(
        "auto",
        "pull towards the projected joint model at every step; 'auto': the steps of a measured cycle together cover a "
        "fifth of the distance. The paper uses 0.05, and 0.005 where a cycle has 100 steps",
    )
    beta: float = option(0.9, "share of the joint model that a reduction replaces")
    gamma: float = option(0.7, "how many cycles ahead the joint model is projected")
    delta: float = option(0.8, "how much of the joint model's velocity is kept from cycle to cycle")
    penalty: Literal["displace", "gradient"] = option(
        "displace",
        "pull by moving the model before every gradient, or as part of the gradient, which needs an elementwise "
        "optimizer",
    )
    alpha_start: float = option(0.5, "the initial pull, from which a given alpha decays to its target")
    free_steps: int | None = option(None, "steps without any pull at the beginning; none: 20, or 5 % of a short run")
    alpha_decay_steps: int | None = option(
        None, "steps in which alpha decays from alpha_start to its target; none: 200, or 20 % of a short run"
    )
    beta_cycles: int | None = option(
        None, "cycles in which beta falls from 1 to its target; none: 20, or 20 % of the cycles of a short run"
    )
    gamma_cycles: int | None = option(
        None, "cycles in which gamma grows from 0 to its target; none: 20, or 20 % of the cycles of a short run"
    )

    name = "mpca"
    summary = "workers never stop; shards of the projected joint model circulate and pull (MPCA SGD)"
    suits = "Spark, or MPCA SGD as published; it has no outer momentum, unlike tide"
    messages = (Projected, AreYouThere, Here)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "alpha_start"):
            if (value := getattr(self, name)) != "auto" and not 0 < value < 1:
                raise UsageError(f"{name} must be between 0 and 1, not {value}")
        if not 0 < self.beta <= 1:
            raise UsageError(f"beta must be above 0 and at most 1, not {self.beta}")
        if not 0 <= self.delta < 1:
            raise UsageError(f"delta must be at least 0 and below 1, not {self.delta}")
        if not 0 <= self.gamma <= 10:
            raise UsageError(f"gamma must be within 0 and 10, not {self.gamma}: it counts cycles to look ahead")
        for name in ("free_steps", "alpha_decay_steps", "beta_cycles", "gamma_cycles"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UsageError(f"{name} cannot be negative: {value}")

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        return (
            cls(),
            cls(phases=1),
            cls(phases=2),
            cls(phases=2, shards=5, gamma=0.0),
            cls(penalty="gradient", weighted=False, alpha=0.02),
        )

    @property
    def needs_elementwise(self) -> bool:
        return self.penalty == "gradient"

    def machine(self, context: NodeContext) -> Machine:
        return MpcaHub(context, self) if context.node.role == "hub" else MpcaWorker(context, self)

    def alpha_at(self, step: int, steps: int, tau: float) -> float:
        """The pull at one of `steps` steps, if a cycle has `tau` steps.

        At first it is 0. Then a given alpha decays from `alpha_start` to its target by a constant factor per step. Over
        the steps of a cycle, the automatic alpha covers the share `PULL` of the distance: 1 - (1 - alpha)^tau.
        """
        free = self.free_steps if self.free_steps is not None else min(FREE_STEPS, FREE_SHARE * steps)
        decay_steps: float | None = self.alpha_decay_steps
        if decay_steps is None:
            decay_steps = min(ALPHA_DECAY_STEPS, ALPHA_DECAY_SHARE * steps)
        decayed = step - free
        if decayed < 0:
            return 0.0
        if self.alpha == "auto":
            return float(1 - (1 - PULL) ** (1 / max(1.0, tau))) if tau else 0.0
        if decayed >= decay_steps or self.alpha >= self.alpha_start:
            return self.alpha
        return float(self.alpha_start * (self.alpha / self.alpha_start) ** (decayed / decay_steps))

    def beta_at(self, cycle: int, done: float) -> float:
        """Falls from 1 to the target by a constant factor per cycle; `done` is the share of the run that is done."""
        return float(self.beta ** _ramp(cycle, self.beta_cycles, done))

    def gamma_at(self, cycle: int, done: float) -> float:
        """Grows from 0 to the target by the same amount per cycle."""
        return self.gamma * _ramp(cycle, self.gamma_cycles, done)


def _ramp(cycle: int, cycles: int | None, done: float) -> float:
    """How far a schedule is, between 0 and 1."""
    if cycles is not None:
        return min(1.0, cycle / cycles) if cycles else 1.0
    return min(1.0, max(cycle / RAMP_CYCLES, done / RAMP_SHARE))


class MpcaHub(CirculationHub):
    """Projects the joint model to where it will be when it arrives."""

    options: Mpca

    def __init__(self, context: NodeContext, options: Mpca) -> None:
        super().__init__(context, options)
        velocity = (context.restored or {}).get("velocity", torch.zeros_like(context.weights))
        self._velocity = [velocity[part].clone() for part in self._cut]

    def _message(self, shard: int) -> Projected:
        return Projected(**self._circulated(shard), alpha=self._alpha())

    def _prepare(self, shard: int, mean: Tensor, taus: list[int]) -> Tensor:
        """The joint shard after a reduction (equations 8 and 4); stores its projection (5) for the next broadcast."""
        options, cycle, part = self.options, self.cycles[shard], self._cut[shard]
        joint = self.context.weights[part]
        change = (mean - joint).mul_(options.beta_at(cycle, self._done()))
        velocity = self._velocity[shard].mul_(options.delta).add_(change, alpha=1 - options.delta)
        moved = change.add_(joint)
        gamma = 0.0 if self._is_buffers(shard) else options.gamma_at(cycle, self._done())
        projected = self.context.empty(len(moved), dtype=moved.dtype)
        self._outgoing[shard] = torch.add(moved, velocity, alpha=gamma, out=projected)
        return moved

    def _figures(self, shard: int) -> Row:
        cycle, done = self.cycles[shard], self._done()
        return {
            "alpha": self._alpha(),
            "beta": self.options.beta_at(cycle, done),
            "gamma": self.options.gamma_at(cycle, done),
        }

    def _alpha(self) -> float:
        return self.options.alpha_at(self.progress.step, self.context.schedule.steps, self._median_tau())

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "velocity": torch.cat(self._velocity)}


class MpcaWorker(CirculationWorker):
    """Pulled towards the shards that it received last."""

    options: Mpca

    def __init__(self, context: NodeContext, options: Mpca) -> None:
        super().__init__(context, options)
        self.alpha = 0.0

    def _step(self, ready: GradientReady, now: float) -> list[Effect]:
        self._count(ready)
        tilted = self._tilted(ready.gradient) if self.options.penalty == "gradient" else None
        compute = self._compute()  # first, since it shows whether anything is left to train on
        contributions = [effect for shard in self._due() for effect in self._contribute(shard, now)]
        return [Step(tilted), *contributions, *([] if tilted is not None else self._displace()), *compute]

    def _compute(self) -> list[Effect]:
        return self.portion.compute("dense" if self.options.penalty == "gradient" else "none")

    def _arrive(self, arrived: Circulated) -> list[Effect]:
        assert isinstance(arrived, Projected)
        self.alpha = arrived.alpha
        return []

    def _values(self, shard: int) -> Values:
        return snapshot(self._cut[shard].start, self._cut[shard].stop)

    def _displace(self) -> list[Effect]:
        """Equation 7."""
        if not self.alpha:
            return []
        return [
            Blend(target, self.alpha, part.start)
            for target, part in zip(self._received, self._cut, strict=True)
            if target is not None and not is_buffers(part, self.context)
        ]

    def _tilted(self, gradient: Tensor) -> Tensor:
        """Equation 6: the gradient plus that of the penalty."""
        tilted = gradient.clone()
        for target, part in zip(self._received, self._cut, strict=True):
            if self.alpha and target is not None and part.stop <= len(gradient):
                tilted[part].add_(self.context.weights[part] - target, alpha=self.alpha)
        return tilted
