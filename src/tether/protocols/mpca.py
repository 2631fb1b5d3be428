"""MPCA SGD: multi-phase coordinated asynchronous training (sections 4 and 6.3).

Workers never stop. The hub holds the joint model, cut into shards of equal size anywhere in the vector, and leads each
shard round a cycle of its own:

1. Broadcast: the projected joint shard goes to all workers, where it becomes the new target by a swap.
2. Reduction: having it, a worker contributes a copy of its own shard, weighted by the steps tau it has made since its
   last contribution of that shard (equation 9). One that has made too few contributes when it has made enough.
3. Preparation: the hub blends the mean into its shard, x <- (1 - beta) x + beta R (equation 8), follows how it moves,
   v <- delta v + (1 - delta) (x_t - x_t-1) (equation 4), and projects it, x* = x + gamma v (equation 5).

As many shards as there are phases are under way at a time, so that one is broadcast while another is reduced and a
third is prepared, and both directions of the hub's link are in use (section 4.2). Shards beyond that wait for their
turn. BatchNorm's buffers are one more shard, which is small and goes round beside the others; it is not projected: a
variance must not fall below zero.

A worker displaces its model before every gradient, x <- x - alpha (x - x*), over the whole vector (equation 7); or the
pull is part of the gradient, g <- g + alpha (x - x*) (equation 6).

Schedules, all told by the hub so that every worker has the same: alpha is 0 for the first steps, then high, then decays
to its target (section 6.3); beta goes from 1 to its target by a constant factor per cycle (section 4.5); gamma grows
from 0 (section 4.3).

How many steps are enough: one, where exchanges cost no more than time on the network. Processes that share their
processors with training would exchange at almost every step and train at half their speed; there a worker makes as many
as keep what its exchanges cost below a share of what its gradients take. The paper's cycles last 12 to 108 steps.

A worker begins when it has every shard, so one that comes late begins with the joint model, like all. One that dies is
left out of the reductions under way.

Invariants: every shard is in one place, ready or under way; no more are under way than there are phases; a worker's
contributions of one shard add up to the steps it has made.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tether.errors import InvariantBroken, UsageError
from tether.machine import (
    Blend,
    Broadcast,
    Broadcasted,
    Effect,
    Event,
    GradientReady,
    Install,
    Machine,
    Message,
    PeerJoined,
    PeerLost,
    Received,
    Record,
    Reduce,
    Reduced,
    Seat,
    Send,
    Started,
    Step,
    StopRequested,
    snapshot,
    stream_of,
)
from tether.protocols.base import Options, Pace, option
from tether.protocols.ledger import Lease, More, Portion, Recall, Returned
from tether.vector import shards

#: more would be told of as closed too late (see `tether.runtimes.collectives`)
SHARDS_MAX = 16


class Projected(Message, frozen=True):
    """Hub to all: the projected joint model's shard, and the rate of the pull towards it."""

    shard: int
    cycle: int
    alpha: float
    values: Tensor


@dataclass(frozen=True)
class Mpca(Options):
    """Workers never stop: shards of the joint model circulate, and every step pulls a worker towards them."""

    phases: Literal[1, 2, 3] = option(3, "shards under way at a time: broadcast, reduced, prepared")
    alpha: float = option(0.05, "pull towards the projected joint model at every step")
    beta: float = option(0.9, "share of the joint model that a reduction replaces")
    gamma: float = option(0.7, "how many cycles ahead the joint model is projected")
    delta: float = option(0.8, "how slowly the joint model's trajectory follows its changes")
    penalty: Literal["displace", "gradient"] = option(
        "displace", "pull by moving the model before every gradient, or as a part of the gradient"
    )
    weighted: bool = option(True, "weight a worker by the steps it made; otherwise all count alike")
    shards: int | None = option(None, "pieces the model is cut into; none: as many as phases")
    exchange_share: float = option(
        0.02, "how much of a worker's time its exchanges may take from training on the same processors"
    )
    alpha_start: float = option(0.5, "the first pull, from which alpha decays to its target")
    free_steps: int = option(20, "steps without any pull at the beginning")
    settle_steps: int = option(200, "steps in which alpha decays from alpha_start to its target")
    beta_cycles: int = option(20, "cycles in which beta falls from 1 to its target")
    gamma_cycles: int = option(20, "cycles in which gamma grows from 0 to its target")

    name = "mpca"
    summary = "workers never stop; shards of the projected joint model circulate and pull (MPCA SGD)"
    messages = (Projected,)
    collective = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "alpha_start"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if not 0 < self.beta <= 1:
            raise UsageError(f"beta must be above 0 and at most 1, not {self.beta}")
        if not 0 <= self.delta < 1:
            raise UsageError(f"delta must be at least 0 and below 1, not {self.delta}")
        if not 0 <= self.gamma <= 10:
            raise UsageError(f"gamma must be within 0 and 10, not {self.gamma}: it counts cycles to look ahead")
        for name in ("free_steps", "settle_steps", "beta_cycles", "gamma_cycles"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} cannot be negative: {getattr(self, name)}")
        if not 0 < self.exchange_share <= 1:
            raise UsageError(f"exchange_share must be above 0 and at most 1, not {self.exchange_share}")
        if self.shards is not None and not self.phases <= self.shards <= SHARDS_MAX:
            raise UsageError(f"shards must be within phases ({self.phases}) and {SHARDS_MAX}, not {self.shards}")

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        return (
            cls(),
            cls(phases=1),
            cls(phases=2),
            cls(phases=2, shards=5, gamma=0.0),
            cls(penalty="gradient", weighted=False, alpha=0.02),
        )

    def machine(self, seat: Seat) -> Machine:
        return MpcaHub(seat, self) if seat.node.role == "hub" else MpcaWorker(seat, self)

    def cut(self, seat: Seat) -> list[slice]:
        """The shards of the parameters and, if there are any, the buffers."""
        parts = shards(seat.parameter_count, self.shards if self.shards is not None else self.phases)
        buffers = slice(seat.parameter_count, len(seat.weights))
        return [*parts, buffers] if buffers.start < buffers.stop else parts

    def alpha_at(self, step: int) -> float:
        """0, then `alpha_start` decayed by a constant factor per step, then the target."""
        settled = step - self.free_steps
        if settled < 0:
            return 0.0
        if settled >= self.settle_steps or self.alpha >= self.alpha_start:
            return self.alpha
        return float(self.alpha_start * (self.alpha / self.alpha_start) ** (settled / self.settle_steps))

    def beta_at(self, cycle: int) -> float:
        """From 1 to the target by a constant factor per cycle."""
        return float(self.beta ** (cycle / self.beta_cycles)) if cycle < self.beta_cycles else self.beta

    def gamma_at(self, cycle: int) -> float:
        """From 0 to the target by as much per cycle."""
        return self.gamma * cycle / self.gamma_cycles if cycle < self.gamma_cycles else self.gamma


@dataclass
class _Flight:
    """A shard under way, from its broadcast to the end of its reduction."""

    shard: int
    since: float


class MpcaHub:
    """Holds the joint model and leads its shards round their cycles."""

    def __init__(self, seat: Seat, options: Mpca) -> None:
        self.seat = seat
        self.options = options
        self.pace = Pace(seat, self._state)
        self.present: list[str] = []
        self._cut = options.cut(seat)
        self.ready = deque(range(len(self._cut)))
        self._under_way: dict[str, _Flight] = {}
        restored = seat.restored or {}
        cycles = restored.get("cycles", [0])
        #: a run that goes on with another number of shards goes on with the least of their cycles
        self.cycles: list[int] = list(cycles) if len(cycles) == len(self._cut) else [min(cycles)] * len(self._cut)
        velocity = restored.get("velocity", torch.zeros_like(seat.weights))
        self._velocity = [velocity[part].clone() for part in self._cut]
        self._projected: list[Tensor] = []
        #: of each worker: gradients in each shard's reductions that are not in those of every shard yet
        self._reduced: dict[str, list[int]] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.pace.over:
            return []
        match event:
            case Started(members=members):
                self.present = [worker for worker in self.seat.workers if worker in members]
                self.pace.begin(members)
                self._projected = [self.seat.weights[part].clone() for part in self._cut]
                return self._launch(now)
            case Reduced():
                return self._close(event, now)
            case Received(sender=worker, message=More() | Returned() as message):
                return self.pace.deal(worker, message)
            case PeerJoined(peer=peer, role="worker"):
                self.present.append(peer)
                self.pace.join(peer)
                return self._launch(now)
            case PeerLost(peer=peer) if peer in self.present:
                self.present.remove(peer)
                self._reduced.pop(peer, None)
                return self.pace.lose(peer)
            case StopRequested(reason=reason):
                return self.pace.finish(reason)
        return []

    def _launch(self, now: float) -> list[Effect]:
        """Send off the shards that are ready, as many as may be under way."""
        effects: list[Effect] = []
        while self.present and (shard := self._next()) is not None:
            self.ready.remove(shard)
            cycle, members = self.cycles[shard], ("hub", *self.present)
            tag = tag_of(shard, cycle)
            self._under_way[tag] = _Flight(shard, now)
            alpha = self.options.alpha_at(self.pace.step)
            effects += [
                Broadcast(stream_of(tag), members, Projected(shard, cycle, alpha, self._projected[shard])),
                Reduce(tag, members),
            ]
        return effects

    def _next(self) -> int | None:
        """A shard that may be sent off: the buffers at once, another if there are fewer under way than phases."""
        full = sum(not self._is_buffers(flight.shard) for flight in self._under_way.values()) == self.options.phases
        return next((shard for shard in self.ready if not full or self._is_buffers(shard)), None)

    def _is_buffers(self, shard: int) -> bool:
        return bool(self._cut[shard].start == self.seat.parameter_count)

    def _close(self, reduced: Reduced, now: float) -> list[Effect]:
        flight = self._under_way.pop(reduced.tag)
        shard, cycle = flight.shard, self.cycles[flight.shard]
        effects: list[Effect] = []
        if reduced.total is not None and reduced.weight > 0:
            row = Record(
                {
                    "shard": shard,
                    "cycle": cycle,
                    "cycle_seconds": now - flight.since,
                    "alpha": self.options.alpha_at(self.pace.step),
                    "beta": self.options.beta_at(cycle),
                    "gamma": self.options.gamma_at(cycle),
                    "tau": sum(reduced.steps) / len(reduced.steps),
                    "taus": list(reduced.steps),
                    "workers": len(reduced.contributors),
                }
            )
            effects = [Install(self._prepare(shard, reduced.total / reduced.weight), self._cut[shard].start), row]
        self.cycles[shard] += 1
        self.ready.append(shard)
        for worker, steps in zip(reduced.contributors, reduced.steps, strict=True):
            if worker in self.present:  # what the dead had not finished has been dealt to others
                self._reduced.setdefault(worker, [0] * len(self._cut))[shard] += steps
        effects += self._count(now)
        return effects if self.pace.over else effects + self._launch(now)

    def _count(self, now: float) -> list[Effect]:
        """A gradient counts once every shard has been reduced after it."""
        gradients = 0
        for worker, reduced in self._reduced.items():
            new = min(reduced)
            self._reduced[worker] = [steps - new for steps in reduced]
            self.pace.ledger.count(worker, new)
            gradients += new
        return self.pace.advance(gradients, max(1, len(self.present)), now) if gradients else []

    def _prepare(self, shard: int, mean: Tensor) -> Tensor:
        """The joint shard after a reduction; its projection is kept for the next broadcast."""
        options, cycle, part = self.options, self.cycles[shard], self._cut[shard]
        joint = self.seat.weights[part]
        change = (mean - joint).mul_(options.beta_at(cycle))
        velocity = self._velocity[shard].mul_(options.delta).add_(change, alpha=1 - options.delta)
        moved = change.add_(joint)
        gamma = 0.0 if self._is_buffers(shard) else options.gamma_at(cycle)
        projected = self.seat.empty(len(moved), dtype=moved.dtype)
        self._projected[shard] = torch.add(moved, velocity, alpha=gamma, out=projected)
        return moved

    def _state(self) -> dict[str, Any]:
        return {"cycles": list(self.cycles), "velocity": torch.cat(self._velocity)}

    def check(self) -> None:
        busy = [flight.shard for flight in self._under_way.values() if not self._is_buffers(flight.shard)]
        if len(busy) > self.options.phases:
            raise InvariantBroken(f"shards {busy} are under way in {self.options.phases} phases")
        self.pace.ledger.check()
        places = [*self.ready, *(flight.shard for flight in self._under_way.values())]
        if sorted(places) != list(range(len(self._cut))):
            raise InvariantBroken(f"not every shard is in one place: {places}")
        if len(set(self.present)) != len(self.present):
            raise InvariantBroken(f"a worker is present twice: {self.present}")


class MpcaWorker:
    """Steps without end, pulled towards the shards it was last given."""

    def __init__(self, seat: Seat, options: Mpca) -> None:
        self.seat = seat
        self.options = options
        self.running = False
        self.portion = Portion(seat, lambda more: [Send("hub", more)])
        self.alpha = 0.0
        self._cut = options.cut(seat)
        self._targets: list[Tensor | None] = [None] * len(self._cut)
        #: steps since each shard's last contribution, and how many it takes for the next
        self.taus = [0] * len(self._cut)
        self.least = 1
        self._steps = 0
        self._contributions = 0
        self._compute_seconds = 0.0
        self._exchange_seconds = 0.0
        #: reductions that wait for a step, by their shard
        self._awaited: dict[int, Reduce] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Broadcasted(members=members, message=Projected() as projected):
                return self._take(projected, members)
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case GradientReady(gradient=gradient):
                self._count(event)
                contributions = [e for shard in sorted(self._awaited) for e in self._contribute(shard)]
                if self.options.penalty == "gradient":
                    return [Step(self._tilted(gradient)), *contributions, *self._compute()]
                return [Step(), *contributions, *self._displace(), *self._compute()]
        return []

    def _compute(self) -> list[Effect]:
        effects = self.portion.compute("flat" if self.options.penalty == "gradient" else "step")
        if self.portion.idle:
            effects += [e for shard in sorted(self._awaited) for e in self._contribute(shard)]
        return effects

    def _take(self, projected: Projected, members: tuple[str, ...]) -> list[Effect]:
        shard = projected.shard
        self._targets[shard] = projected.values
        self.alpha = projected.alpha
        part = self._cut[shard]
        reduction = Reduce(tag_of(shard, projected.cycle), members, snapshot(part.start, part.stop))
        self._awaited[shard] = reduction
        effects = self._contribute(shard)
        if self.running:
            return effects
        targets = [target for target in self._targets if target is not None]
        if len(targets) == len(self._cut):
            self.running = True
            effects += [Install(torch.cat(targets)), *self._compute()]
        return effects

    def _count(self, ready: GradientReady) -> None:
        self._steps += 1
        self.taus = [tau + 1 for tau in self.taus]
        self._compute_seconds += ready.seconds
        self._exchange_seconds += ready.exchange_seconds
        if self._contributions and self._compute_seconds:
            cycle = self._exchange_seconds * len(self._cut) / self._contributions
            allowed = self.options.exchange_share * self._compute_seconds / self._steps
            self.least = max(1, math.ceil(cycle / allowed))

    def _contribute(self, shard: int) -> list[Effect]:
        """The awaited contribution of a shard, if there are steps enough in it; one that has not begun has nothing."""
        if self.running and self.taus[shard] < self.least and not self.portion.idle:
            return []
        reduction, steps = self._awaited.pop(shard), self.taus[shard]
        self.taus[shard] = 0
        self._contributions += 1
        weight = float(steps) if self.options.weighted else float(steps > 0)
        return [Reduce(reduction.tag, reduction.members, reduction.values, weight, steps)]

    def _displace(self) -> list[Effect]:
        """Equation 7."""
        if not self.alpha:
            return []
        return [
            Blend(target, self.alpha, part.start)
            for target, part in zip(self._targets, self._cut, strict=True)
            if target is not None
        ]

    def _tilted(self, gradient: Tensor) -> Tensor:
        """Equation 6: the gradient with that of the penalty."""
        tilted = gradient.clone()
        for target, part in zip(self._targets, self._cut, strict=True):
            if self.alpha and target is not None and part.stop <= len(gradient):
                tilted[part].add_(self.seat.weights[part] - target, alpha=self.alpha)
        return tilted

    def check(self) -> None:
        if any(self.taus[shard] >= self.least for shard in self._awaited):
            raise InvariantBroken(f"contributions of shards {sorted(self._awaited)} are held back")


def tag_of(shard: int, cycle: int) -> str:
    """The name of a reduction."""
    return f"shard {shard} {cycle}"
