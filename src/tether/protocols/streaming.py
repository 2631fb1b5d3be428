"""Streaming DiLoCo (Douillard et al. 2025): fragments of the model are exchanged one after the other, during training.

As in DiLoCo, workers train alone, and the hub treats the joint model minus their mean as the gradient of an outer
optimizer, SGD with Nesterov's momentum. Three things differ (sections 2.2 to 2.3 of the paper):

1. The model is cut into fragments. Each is exchanged every tau steps, and fragments take turns: with n of them, one
   begins every tau/n steps, so that the peak of the traffic falls by a factor of n.
2. Workers do not stop for an exchange. The outer step of a fragment arrives a while after the worker has contributed
   it; the paper names that delay in steps, here it is what the network takes.
3. On arrival a worker mixes its fragment x with the joint one J: x <- alpha x + (1 - alpha) J.

How fragments circulate, and what happens when workers are slow, silent, die or join, is in `protocols/circulation.py`.
BatchNorm's buffers are the mean, and a worker keeps its own.

Invariants: those of the circulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tether.core.effects import Blend, Effect, Step
from tether.core.events import GradientReady
from tether.core.machine import Machine, NodeContext
from tether.core.snapshot import Values, snapshot
from tether.errors import UsageError
from tether.protocols.base import Options, option
from tether.protocols.circulation import (
    SHARDS_MAX,
    AreYouThere,
    Circulated,
    Circulation,
    CirculationHub,
    CirculationWorker,
    Here,
    is_buffers,
)


class Fragment(Circulated, frozen=True):
    """Hub to all: a fragment of the joint model after an outer step."""


@dataclass(frozen=True)
class Streaming(Circulation):
    """Workers never stop; every tau steps each fragment of the model makes a step with outer momentum."""

    phases: Literal[1, 2, 3] = option(3, "how many fragments are under way at a time")
    shards: int | None = option(4, f"how many fragments the model is cut into, at most {SHARDS_MAX}", kw_only=True)
    weighted: bool = option(
        False, "weight a worker by the steps it made; otherwise all workers count equally", kw_only=True
    )
    tau: int = option(
        50, "steps between two exchanges of a fragment; the paper uses 100 for runs of many thousand steps"
    )
    mix: float = option(
        0.5, "alpha in the paper: how much of its own values a worker keeps when a joint fragment arrives"
    )
    outer_rate: float = option(0.7, "learning rate of the outer optimizer")
    outer_momentum: float = option(0.9, "momentum of the outer optimizer")

    name = "streaming"
    summary = "workers never stop; fragments take turns in steps with outer momentum (Streaming DiLoCo)"
    suits = "Streaming DiLoCo as published: outer momentum, and workers never stop; tide has been faster so far"
    messages = (Fragment, AreYouThere, Here)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau < 1:
            raise UsageError(f"tau must be at least 1 step, not {self.tau}")
        if not 0 <= self.mix < 1:
            raise UsageError(
                f"mix must be at least 0 and below 1, not {self.mix}: with 1 no worker would learn of others"
            )
        if self.outer_rate <= 0:
            raise UsageError(f"outer_rate must be more than 0, not {self.outer_rate}")
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(f"outer_momentum must be at least 0 and below 1, not {self.outer_momentum}")

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        return (
            cls(),
            cls(tau=4),
            cls(phases=1, shards=2, tau=2, mix=0.0, outer_momentum=0.5),
            cls(tau=3, weighted=True, outer_momentum=0.0),
        )

    def machine(self, context: NodeContext) -> Machine:
        return StreamingHub(context, self) if context.node.role == "hub" else StreamingWorker(context, self)


class StreamingHub(CirculationHub):
    """Makes an outer step with each mean of a fragment."""

    options: Streaming

    def __init__(self, context: NodeContext, options: Streaming) -> None:
        super().__init__(context, options)
        velocity = (context.restored or {}).get("velocity", torch.zeros_like(context.weights))
        self._velocity = [velocity[part].clone() for part in self._cut]

    def _message(self, shard: int) -> Fragment:
        return Fragment(**self._circulated(shard))

    def _steps_needed(self) -> int:
        return self.options.tau

    def _prepare(self, shard: int, mean: Tensor, taus: list[int]) -> Tensor:
        options, joint = self.options, self.context.weights[self._cut[shard]]
        moved = self._outgoing[shard] = self.context.empty(len(mean), dtype=mean.dtype)
        if self._is_buffers(shard):
            return moved.copy_(mean)
        gradient = joint - mean
        velocity = self._velocity[shard].mul_(options.outer_momentum).add_(gradient)
        gradient.add_(velocity, alpha=options.outer_momentum)
        return torch.sub(joint, gradient, alpha=options.outer_rate, out=moved)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "velocity": torch.cat(self._velocity)}


class StreamingWorker(CirculationWorker):
    """Trains alone, and mixes in the fragments that arrive."""

    options: Streaming

    def __init__(self, context: NodeContext, options: Streaming) -> None:
        super().__init__(context, options)
        #: how often it has contributed each fragment after all the steps that it needs
        self._turns = [0] * len(self._cut)

    def _step(self, ready: GradientReady, now: float) -> list[Effect]:
        self._count(ready)
        compute = self._compute()  # first, since it shows whether anything is left to train on
        return [Step(), *(effect for shard in self._due() for effect in self._contribute(shard, now)), *compute]

    def _needed(self, shard: int) -> int:
        """tau; but the first time less, so that fragments take turns from then on."""
        tau = self.options.tau
        if not self._turns[shard]:
            tau = max(1, tau * (shard + 1) // len(self._cut))
        return max(self.least, tau)

    def _contribute(self, shard: int, now: float) -> list[Effect]:
        self._turns[shard] += self.taus[shard] >= self._needed(shard)
        return super()._contribute(shard, now)

    def _arrive(self, arrived: Circulated) -> list[Effect]:
        part = self._cut[arrived.shard]
        # what comes first is what it began with
        if not self.running or is_buffers(part, self.context) or self._cycles[arrived.shard] is None:
            return []
        return [Blend(arrived.values, 1 - self.options.mix, part.start)]

    def _values(self, shard: int) -> Values:
        return snapshot(self._cut[shard].start, self._cut[shard].stop)
