"""Tide: workers never stop, and the joint model is carried on in the direction in which all of them keep moving.

A protocol of Tether's own. The rules, for each shard:

1. *Correction.* A worker contributes a copy C of its shard and keeps it. When the next joint shard J arrives, it takes
   back what its contribution was off by, C - J, and keeps the steps that it has made since; but it takes no weight back
   further than it is off now. Off is its distance to where the joint shard will be with the s steps made since, if it
   moves on as it did in the tau steps since J', the joint shard before:

       x <- x - clip(C - J, between 0 and x - J - s/tau (J - J'))

   If the contribution came too late to be in J, J' takes the place of C. The hub says with every shard how many steps
   of each worker are in it.
2. *Drift.* The hub takes the mean of the contributions, weighted by steps. Its difference to the joint shard is D, the
   change that all workers agree on after tau steps. The drift V is the running mean of D per step over the last
   `horizon` steps, V <- m V + (1 - m) D / tau with m = exp(-tau / horizon), but of at least five exchanges, since a
   change that came once has not persisted. The joint shard becomes

       x <- x + D + e tau V

3. *Agreement.* Each worker also reports how far it has moved. Let A be the squared length of D over the mean squared
   length of the K workers' own changes: 1 if all made the same change, 1/K if they differ by noise alone. The share of
   a worker's change that is signal is q = (K A - 1) / (K - 1), and e = min(K - 1, (1 - q) / 2 q).

BatchNorm's buffers have neither correction nor drift: the joint ones are the mean. A worker keeps its own, which follow
its weights within a few steps; the joint ones follow later, and to blend them into its own makes both worse.

Invariants: those of the circulation; a joint shard that is what the worker contributed changes nothing, so that one
worker alone learns what `single` learns; with e = 0 and without delay, tide is averaging.

Why it works. Correction: no step is lost while an exchange is under way. Where the loss is steep, the steps since the contribution
have already led back from what was noise in C. To take it back a second time would turn the noise around instead of
ending it; hence the clip.

Drift: as with Nesterov's momentum, the joint model moves on in the direction that persists, in which single steps are
too short. DiLoCo's rate 0.7 and momentum 0.9 are about e = 6. Since the horizon counts steps and not exchanges, a fast
network may exchange at every step: momentum per exchange would be forgotten within a few steps there.

Agreement: while workers agree, early in a run or where curvature and not noise limits them, K workers do what each of
them does, and there is nothing to gain from a longer way; no drift. Where noise rules, their mean has moved as far as
one worker, where one worker that made all the steps would have moved K times as far; hence at most K - 1.

Debts. MPCA SGD: workers never stop, shards circulate in phases, and contributions weigh by their steps
(`protocols/circulation.py`). DiLoCo and Streaming DiLoCo: the joint model has a momentum of its own, and shards are
exchanged while training goes on. BIDMach's grid: a worker adds the difference to what it sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tether.core.effects import Effect, Install, Send, SetTimer, Step
from tether.core.events import Event, GradientReady, Received
from tether.core.machine import Machine, NodeContext
from tether.core.message import Message, Row
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
    timer_of,
)

#: the automatic horizon in steps, and the largest share of a short run that it is
HORIZON_STEPS, HORIZON_SHARE = 500, 0.25
#: a change that has persisted for fewer exchanges than this counts for less
HORIZON_EXCHANGES = 5
#: the drift that a given ratio of noise to signal is worth
DRIFT_PER_NOISE = 0.5
#: with every reduction, earlier measurements of the agreement lose weight by this factor
FADING = 0.8
#: how many times its last change the joint shard is thought to move on at most while a worker makes further steps
AHEAD_MAX = 2.0
#: smaller shares of signal are not told from noise
SIGNAL_MIN = 1e-3


class Joint(Circulated, frozen=True):
    """Hub to all: a shard of the joint model, and how many steps of each worker are in it."""


class Moved(Message, frozen=True):
    """Worker to hub, next to a contribution: the squared length of its change."""

    shard: int
    cycle: int
    square: float


@dataclass(frozen=True)
class Tide(Circulation):
    """Workers never stop; the joint model moves on in the direction that persists, as far as the noise allows."""

    drift: float | Literal["auto"] = option(
        "auto",
        "how much further than the workers' mean the joint model moves, in units of the change that persists; 'auto' "
        "follows from how much the workers agree; 0 is averaging",
    )
    horizon: int | Literal["auto"] = option(
        "auto", "the steps over which a change must persist to count; 'auto': 500, or a quarter of a short run"
    )
    every: int | Literal["auto"] = option(
        "auto",
        "the fewest steps between two contributions of a shard; 'auto': as often as the network and `exchange_share` "
        "allow",
    )

    name = "tide"
    summary = "workers never stop; the joint model also moves on in the direction that persists"
    suits = "every other case, so it is the default: any network, any number of workers, equally fast or not"
    messages = (Joint, Moved, AreYouThere, Here)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drift != "auto" and not 0 <= self.drift <= 100:
            raise UsageError(f"drift must be within 0 and 100, or 'auto', not {self.drift}")
        if self.horizon != "auto" and self.horizon < 1:
            raise UsageError(f"horizon must be at least 1 step, or 'auto', not {self.horizon}")
        if self.every != "auto" and self.every < 1:
            raise UsageError(f"every must be at least 1 step, or 'auto', not {self.every}")

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        return (
            cls(),
            cls(phases=1, drift=0.0),
            cls(phases=2, shards=5, drift=0.5, horizon=20),
            cls(weighted=False, horizon=10, every=3),
        )

    def machine(self, context: NodeContext) -> Machine:
        return TideHub(context, self) if context.node.role == "hub" else TideWorker(context, self)

    def horizon_of(self, steps: int) -> float:
        """The horizon in a run of this many steps."""
        return min(HORIZON_STEPS, HORIZON_SHARE * steps) if self.horizon == "auto" else self.horizon


class TideHub(CirculationHub):
    """Moves the joint model by the workers' mean change and by its drift."""

    options: Tide

    def __init__(self, context: NodeContext, options: Tide) -> None:
        super().__init__(context, options)
        restored = context.restored or {}
        drift = restored.get("drift", torch.zeros_like(context.weights))
        self._drift = [drift[part].clone() for part in self._cut]
        #: sums that fade: the squared lengths of the mean changes, and the mean squared lengths of the workers' own
        self._mean_square, self._own_square = restored.get("squares", [0.0, 0.0])
        #: for each shard: the squared lengths of the workers' changes in the current cycle
        self._squares: list[dict[str, float]] = [{} for _ in self._cut]
        self._horizon = options.horizon_of(context.schedule.steps)
        self.signal = 1.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(sender=worker, message=Moved(shard=shard, cycle=cycle, square=square)):
                if shard < len(self._cut) and cycle == self.cycles[shard] and math.isfinite(square):
                    self._squares[shard][worker] = square
                return []
        return super().handle(event, now)

    def _steps_needed(self) -> int:
        return 1 if self.options.every == "auto" else self.options.every

    def _message(self, shard: int) -> Joint:
        return Joint(**self._circulated(shard))

    def _tells_steps(self) -> bool:
        return True

    def _prepare(self, shard: int, mean: Tensor, taus: list[int]) -> Tensor:
        part, tau = self._cut[shard], max(1.0, sum(taus) / len(taus))
        moved = self._outgoing[shard] = self.context.empty(len(mean), dtype=mean.dtype)
        if self._is_buffers(shard):
            return moved.copy_(mean)
        change = mean - self.context.weights[part]
        self._measure_agreement(shard, float(change @ change))
        kept = math.exp(-min(tau / self._horizon, 1 / HORIZON_EXCHANGES))
        drift = self._drift[shard].mul_(kept).add_(change, alpha=(1 - kept) / tau)
        return torch.add(mean, drift, alpha=self._drift_factor() * tau, out=moved)

    def _measure_agreement(self, shard: int, square: float) -> None:
        """Update the share of the workers' changes that is signal."""
        squares, self._squares[shard] = list(self._squares[shard].values()), {}
        if len(squares) < 2:
            return
        self._mean_square = FADING * self._mean_square + square
        self._own_square = FADING * self._own_square + sum(squares) / len(squares)
        if self._own_square > 0:
            agreement, workers = self._mean_square / self._own_square, len(squares)
            self.signal = min(1.0, max(SIGNAL_MIN, (workers * agreement - 1) / (workers - 1)))

    def _drift_factor(self) -> float:
        """e in the rules."""
        if self.options.drift != "auto":
            return self.options.drift
        return min(len(self.present) - 1.0, DRIFT_PER_NOISE * (1 - self.signal) / self.signal)

    def _figures(self, shard: int) -> Row:
        return {"signal": self.signal, "drift": self._drift_factor()}

    def _state(self) -> dict[str, Any]:
        squares = [self._mean_square, self._own_square]
        return {**super()._state(), "drift": torch.cat(self._drift), "squares": squares}


class TideWorker(CirculationWorker):
    """Stands where the joint model is, plus the steps that it has made since."""

    options: Tide

    def __init__(self, context: NodeContext, options: Tide) -> None:
        super().__init__(context, options)
        #: for each shard: the joint shard that its values are based on
        self._base: list[Tensor] = []
        #: for each shard: how many steps of each worker are in that joint shard
        self._counted: list[dict[str, int]] = [{} for _ in self._cut]
        #: for each shard: what it has contributed since then, and after how many steps
        self._given: list[tuple[Tensor, int] | None] = [None] * len(self._cut)
        #: the values of a shard that has just arrived, until they are installed
        self._arrived: dict[int, Tensor] = {}
        #: shards that are contributed as soon as the step before is made
        self._stepping: set[int] = set()

    def _start(self, now: float) -> list[Effect]:
        self._base = [self.context.weights[part].clone() for part in self._cut]
        return super()._start(now)

    def _step(self, ready: GradientReady, now: float) -> list[Effect]:
        """Contributions follow in an event of their own: the machine keeps a copy of the weights after the step."""
        self._count(ready)
        compute = self._compute()  # first, since it shows whether anything is left to train on
        self._stepping.update(due := super()._due())
        return [Step(), *(SetTimer(timer_of(shard), 0.0) for shard in due), *compute]

    def _needed(self, shard: int) -> int:
        return self.least if self.options.every == "auto" else max(self.least, self.options.every)

    def _take(self, arrived: Circulated, members: tuple[str, ...], now: float) -> list[Effect]:
        was_running = self.running
        effects = super()._take(arrived, members, now)
        self._arrived.clear()
        if self.running and not was_running:  # it begins with the joint model
            self._base = [values for values in self._received if values is not None]
            self._given = [None] * len(self._cut)
        return effects

    def _arrive(self, arrived: Circulated) -> list[Effect]:
        assert isinstance(arrived, Joint)
        shard, part = arrived.shard, self._cut[arrived.shard]
        if not self.running or is_buffers(part, self.context):
            return []
        self._arrived[shard] = self._corrected(arrived)
        self._base[shard], self._counted[shard], self._given[shard] = arrived.values, arrived.steps, None
        return [Install(self._arrived[shard], part.start)]

    def _corrected(self, arrived: Joint) -> Tensor:
        """Rule 1."""
        shard, joint = arrived.shard, arrived.values
        mine, before, given = self.context.weights[self._cut[shard]], self._base[shard], self._given[shard]
        counted = arrived.steps.get(self.context.node.name, 0)
        off = (given[0] if given is not None and counted >= given[1] else before) - joint
        ahead = joint + (joint - before).mul_(self._cycles_ahead(arrived.steps, shard))
        off_now = mine - ahead
        values = self.context.empty(len(joint), dtype=joint.dtype)
        return torch.sub(mine, off.clamp_(off_now.clamp(max=0.0), off_now.clamp(min=0.0)), out=values)

    def _cycles_ahead(self, steps: dict[str, int], shard: int) -> float:
        """The steps of this worker that are not in a joint shard, in units of those that are new in it."""
        new = [count - self._counted[shard].get(worker, 0) for worker, count in steps.items()]
        since = self.steps - steps.get(self.context.node.name, 0)
        return min(AHEAD_MAX, since * len(new) / sum(new)) if any(new) else 0.0

    def _values(self, shard: int) -> Values:
        copy = snapshot(self._cut[shard].start, self._cut[shard].stop)
        if is_buffers(self._cut[shard], self.context):
            return copy
        values = self._arrived.get(shard)
        if values is None:
            values = copy.take(self.context.weights, self.context.empty)
        self._given[shard] = values, self.steps
        return values

    def _contribute(self, shard: int, now: float) -> list[Effect]:
        self._stepping.discard(shard)
        tag, tau = self._awaited[shard].tag, self.taus[shard]
        effects = super()._contribute(shard, now)
        given = self._given[shard]
        if tau and given is not None and self.running:
            change = given[0] - self._base[shard]
            # ahead of the contribution: the last one closes the reduction, and what comes later is not looked at
            effects.insert(0, Send("hub", Moved(shard, tag.number, float(change @ change))))
        return effects

    def _due(self) -> list[int]:
        return [shard for shard in super()._due() if shard not in self._stepping]
