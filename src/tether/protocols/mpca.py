"""MPCA SGD: multi-phase coordinated asynchronous training (sections 4 and 6.3).

Workers never stop. The hub holds the joint model, cut into shards of equal size anywhere in the vector, and leads each
shard round a cycle of its own:

1. Broadcast: the projected joint shard goes to all workers, where it becomes the new target by a swap.
2. Reduction: having it, a worker contributes a copy of its own shard, weighted by the steps tau it has made since its
   last contribution of that shard (equation 9).
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

Nobody waits for a straggler (section 4.6). A worker that has made too few steps contributes when it has made enough, so
that a fast network does not circulate unchanged shards without end, but at the latest when the usual worker would have
made them: the hub sees everybody's speed in the steps they tell, and tells all the median. A slow worker then
contributes what it has, with weight 0 if that is nothing. As long as nobody has made a step, all wait longer each time,
up to a second. A worker that has nothing left to train on contributes its last steps at once: no more will follow.

A worker that does not answer at all, because it is paused or cut off, is left out: a shard that takes several times as
long as it usually does closes with what has come, and the hub asks those that are missing whether they are there. They
take part again as soon as they answer; later, the more often they answered and were missing again, as where the process
that brings a worker its values is paused and not the worker. What they made meanwhile counts as no more than a usual
contribution.

A worker tells how many steps it has made in all, and the hub counts those that are new in each shard. So a contribution
that came too late is not lost: the next one tells of its steps as well.

The workers of a new run begin at once, since the seed or the checkpoint gives all of them the hub's model. One that
comes later begins when it has every shard, with the joint model. One that dies is left out of the reductions under way.

Invariants: every shard is in one place, ready or under way; no more are under way than there are phases; of each shard,
the new steps of a worker's contributions add up to the steps it has told.
"""

from __future__ import annotations

import math
import statistics
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
    SetTimer,
    Started,
    Step,
    StopRequested,
    TimerFired,
    snapshot,
    stream_of,
)
from tether.protocols.base import Options, Pace, option
from tether.protocols.ledger import Lease, More, Portion, Recall, Returned
from tether.vector import shards

SHARDS_MAX = 16
#: the share of the way to the joint model that the automatic alpha makes in a cycle
PULL = 0.2
#: schedules unless given: those of the paper, or these shares of a run for which they are too long
FREE_STEPS, FREE_SHARE = 20, 0.05
SETTLE_STEPS, SETTLE_SHARE = 200, 0.2
RAMP_CYCLES, RAMP_SHARE = 20, 0.2
#: what is measured of the workers fades by this factor with every cycle
FADING = 0.9
#: how much longer all wait each time, as long as nobody has made a step, and the longest wait: whoever makes a step in
#: the end must not find all shards waiting elsewhere
LULL_GROWTH = 4
LULL_SECONDS_MAX = 1.0
#: a worker's contribution may be so much later than that of the usual one
ROOM = 1.1
#: a shard is overdue after so many times what its cycle usually takes, and the longer the more often that was wrong
PATIENCE = 4.0
#: a cycle counts as at least so long when it is judged whether a shard is overdue
CYCLE_SECONDS_MIN = 0.05


class Projected(Message, frozen=True):
    """Hub to all: the projected joint model's shard, and the rate of the pull towards it."""

    shard: int
    cycle: int
    alpha: float
    #: what a step takes the usual worker; 0 if that is not known yet
    step_seconds: float
    values: Tensor
    #: how many mini-batches of the run count so far
    position: int = 0
    #: how long to wait at least, while nobody makes a step
    lull_seconds: float = 0.0


class AreYouThere(Message, frozen=True):
    """Hub to a worker that was missing in a reduction."""


class Here(Message, frozen=True):
    """Worker to hub: it is there, and takes part again."""


@dataclass(frozen=True)
class Mpca(Options):
    """Workers never stop: shards of the joint model circulate, and every step pulls a worker towards them."""

    phases: Literal[1, 2, 3] = option(3, "shards under way at a time: broadcast, reduced, prepared")
    alpha: float | Literal["auto"] = option(
        "auto",
        "pull towards the projected joint model at every step; 'auto': so much that the steps of a cycle, as measured, "
        "make a fifth of the way. The paper has 0.05, and 0.005 where a cycle is 100 steps",
    )
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
    alpha_start: float = option(0.5, "the first pull, from which a given alpha decays to its target")
    free_steps: int | None = option(None, "steps without any pull at the beginning; none: 20, or 5 % of a short run")
    settle_steps: int | None = option(
        None, "steps in which alpha decays from alpha_start to its target; none: 200, or 20 % of a short run"
    )
    beta_cycles: int | None = option(
        None, "cycles in which beta falls from 1 to its target; none: 20, or as many as 20 % of a short run has"
    )
    gamma_cycles: int | None = option(
        None, "cycles in which gamma grows from 0 to its target; none: 20, or as many as 20 % of a short run has"
    )

    name = "mpca"
    summary = "workers never stop; shards of the projected joint model circulate and pull (MPCA SGD)"
    messages = (Projected, AreYouThere, Here)
    collective = True

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
        for name in ("free_steps", "settle_steps", "beta_cycles", "gamma_cycles"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UsageError(f"{name} cannot be negative: {value}")
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

    def alpha_at(self, step: int, steps: int, tau: float) -> float:
        """The pull at a step of so many, where a cycle has `tau` steps.

        0 at first. Then a given alpha decays from `alpha_start` to its target by a constant factor per step. The
        automatic one makes, over the steps of a cycle, the share `PULL` of the way: 1 - (1 - alpha)^tau.
        """
        free = self.free_steps if self.free_steps is not None else min(FREE_STEPS, FREE_SHARE * steps)
        settle = self.settle_steps if self.settle_steps is not None else min(SETTLE_STEPS, SETTLE_SHARE * steps)
        settled = step - free
        if settled < 0:
            return 0.0
        if self.alpha == "auto":
            return float(1 - (1 - PULL) ** (1 / max(1.0, tau))) if tau else 0.0
        if settled >= settle or self.alpha >= self.alpha_start:
            return self.alpha
        return float(self.alpha_start * (self.alpha / self.alpha_start) ** (settled / settle))

    def beta_at(self, cycle: int, done: float) -> float:
        """From 1 to the target by a constant factor per cycle; `done` is the share of the run that is made."""
        return float(self.beta ** _ramp(cycle, self.beta_cycles, done))

    def gamma_at(self, cycle: int, done: float) -> float:
        """From 0 to the target by as much per cycle."""
        return self.gamma * _ramp(cycle, self.gamma_cycles, done)


def _ramp(cycle: int, cycles: int | None, done: float) -> float:
    """How far a schedule is on its way from 0 to 1."""
    if cycles is not None:
        return min(1.0, cycle / cycles) if cycles else 1.0
    return min(1.0, max(cycle / RAMP_CYCLES, done / RAMP_SHARE))


@dataclass
class _Flight:
    """A shard under way, from its broadcast to the end of its reduction."""

    shard: int
    since: float
    members: tuple[str, ...]
    #: it took too long, and closes with what has come
    overdue: bool = False


@dataclass
class _Rhythm:
    """How a worker steps, over its latest cycles."""

    steps: float = 0.0
    cycles: float = 0.0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        self.steps = FADING * self.steps + steps
        self.cycles = FADING * self.cycles + 1
        self.seconds = FADING * self.seconds + seconds

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps if self.steps else math.inf


class MpcaHub:
    """Holds the joint model and leads its shards round their cycles."""

    def __init__(self, seat: Seat, options: Mpca) -> None:
        self.seat = seat
        self.options = options
        self.pace = Pace(seat, self._state)
        self.present: list[str] = []
        #: of those present, who did not answer lately
        self.silent: set[str] = set()
        #: how often each was missing since its last contribution, and until when it is left out for that
        self._misses: dict[str, int] = {}
        self._left_out: dict[str, float] = {}
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
        #: of each shard: the steps of each worker in its reductions
        self._told: list[dict[str, int]] = [{} for _ in self._cut]
        #: the steps of each worker that count: those in the reductions of every shard
        self._counted: dict[str, int] = {}
        #: of each shard: what a cycle usually takes, and the patience with it
        self._usual_seconds = [0.0] * len(self._cut)
        self._patience = [PATIENCE] * len(self._cut)
        self._rhythms: dict[str, _Rhythm] = {}
        self._measured_at = 0.0
        #: how long all wait for the first step of anybody
        self._lull_seconds = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.pace.over:
            return []
        match event:
            case Started(members=members):
                self.present = [worker for worker in self.seat.workers if worker in members]
                self.pace.begin(members)
                self._projected = [self.seat.weights[part].clone() for part in self._cut]
                self._measured_at = now
                return self._launch(now)
            case Reduced(tag=tag) if tag in self._under_way:
                return self._close(event, now)
            case TimerFired(name=stream):
                return self._give_up(stream)
            case Received(sender=worker, message=Here()):
                self.silent.discard(worker)
                if (misses := self._misses.get(worker, 0)) > 1:
                    self._left_out[worker] = now + PATIENCE**misses * max(self._usual_seconds)
                return self._launch(now)
            case Received(sender=worker, message=More() | Returned() as message):
                return self.pace.deal(worker, message)
            case PeerJoined(peer=peer, role="worker"):
                self.present.append(peer)
                self.pace.join(peer)
                return self._launch(now)
            case PeerLost(peer=peer) if peer in self.present:
                self.present.remove(peer)
                self.silent.discard(peer)
                for known in (self._misses, self._left_out, self._rhythms, self._counted):
                    known.pop(peer, None)
                for told in self._told:
                    told.pop(peer, None)
                return self.pace.lose(peer)
            case StopRequested(reason=reason):
                return self.pace.finish(reason)
        return []

    def _launch(self, now: float) -> list[Effect]:
        """Send off the shards that are ready, as many as may be under way."""
        effects: list[Effect] = []
        answering = [worker for worker in self.present if worker not in self.silent]
        trusted = [worker for worker in answering if self._left_out.get(worker, now) <= now]
        members = ("hub", *(trusted or answering))
        while len(members) > 1 and (shard := self._next()) is not None:
            self.ready.remove(shard)
            cycle = self.cycles[shard]
            tag = tag_of(shard, cycle)
            self._under_way[tag] = _Flight(shard, now, members)
            alpha = self._alpha()
            values, position = self._projected[shard], self.pace.position
            projected = Projected(shard, cycle, alpha, self._step_seconds(), values, position, self._lull_seconds)
            effects += [Broadcast(stream_of(tag), members, projected), Reduce(tag, members)]
            if usual := self._usual_seconds[shard]:
                waits = max(projected.step_seconds, projected.lull_seconds)
                limit = self._patience[shard] * max(usual, CYCLE_SECONDS_MIN) + waits
                effects.append(SetTimer(stream_of(tag), limit))
        return effects

    def _next(self) -> int | None:
        """A shard that may be sent off: the buffers at once, another if there are fewer under way than phases."""
        full = sum(not self._is_buffers(flight.shard) for flight in self._under_way.values()) == self.options.phases
        return next((shard for shard in self.ready if not full or self._is_buffers(shard)), None)

    def _is_buffers(self, shard: int) -> bool:
        return bool(self._cut[shard].start == self.seat.parameter_count)

    def _give_up(self, stream: str) -> list[Effect]:
        """Have a shard that is overdue closed with what has come."""
        for tag, flight in self._under_way.items():
            if stream_of(tag) == stream:
                flight.overdue = True
                self._patience[flight.shard] *= 2
                return [Reduce(tag, ("hub",))]
        return []

    def _close(self, reduced: Reduced, now: float) -> list[Effect]:
        flight = self._under_way.pop(reduced.tag)
        shard, cycle = flight.shard, self.cycles[flight.shard]
        seconds = now - flight.since
        effects: list[Effect] = []
        if flight.overdue:
            effects = self._ask_missing(flight, reduced.contributors)
        else:
            fading = FADING * self._usual_seconds[shard] + (1 - FADING) * seconds
            self._usual_seconds[shard] = max(seconds, fading)
            self._patience[shard] = PATIENCE
        for worker in reduced.contributors:
            self._misses.pop(worker, None)
        taus = self._new_steps(shard, reduced)
        self._measure(shard, dict(zip(reduced.contributors, taus, strict=True)), seconds, now)
        if reduced.total is not None and reduced.weight > 0:
            row = Record(
                {
                    "shard": shard,
                    "cycle": cycle,
                    "cycle_seconds": seconds,
                    "alpha": self._alpha(),
                    "beta": self.options.beta_at(cycle, self._done()),
                    "gamma": self.options.gamma_at(cycle, self._done()),
                    "tau": sum(taus) / len(taus),
                    "taus": taus,
                    "workers": len(reduced.contributors),
                }
            )
            effects += [Install(self._prepare(shard, reduced.total / reduced.weight), self._cut[shard].start), row]
        self.cycles[shard] += 1
        self.ready.append(shard)
        effects += self._count(now)
        return effects if self.pace.over else effects + self._launch(now)

    def _ask_missing(self, flight: _Flight, contributors: tuple[str, ...]) -> list[Effect]:
        """Leave out those that were missing in a reduction until they answer."""
        missing = [worker for worker in flight.members[1:] if worker in self.present and worker not in contributors]
        asked = [worker for worker in missing if worker not in self.silent]
        self.silent.update(asked)
        self._misses |= {worker: self._misses.get(worker, 0) + 1 for worker in asked}
        return [Send(worker, AreYouThere()) for worker in asked]

    def _new_steps(self, shard: int, reduced: Reduced) -> list[int]:
        """The steps of each contributor that are in a reduction of this shard for the first time."""
        told = self._told[shard]
        new = [steps - told.get(name, 0) for name, steps in zip(reduced.contributors, reduced.steps, strict=True)]
        told |= dict(zip(reduced.contributors, reduced.steps, strict=True))
        return new

    def _measure(self, shard: int, taus: dict[str, int], seconds: float, now: float) -> None:
        """Follow how fast the workers step; once in a cycle, in which every shard has its turn."""
        lull = 0.0 if any(taus.values()) else max(LULL_GROWTH * self._lull_seconds, seconds)
        self._lull_seconds = min(lull, LULL_SECONDS_MAX)
        if shard == 0:
            for worker in self.present:
                self._rhythms.setdefault(worker, _Rhythm()).add(taus.get(worker, 0), now - self._measured_at)
            self._measured_at = now

    def _alpha(self) -> float:
        taus = [rhythm.steps / rhythm.cycles for rhythm in self._rhythms.values()]
        return self.options.alpha_at(self.pace.step, self.seat.schedule.steps, statistics.median(taus) if taus else 0.0)

    def _done(self) -> float:
        """The share of the run that is made."""
        return self.pace.step / self.seat.schedule.steps

    def _step_seconds(self) -> float:
        """What a step takes the usual worker, and somewhat more, so that it is never cut short."""
        known = [rhythm.step_seconds for rhythm in self._rhythms.values()]
        usual = statistics.median_low(known) if known else math.inf
        return ROOM * usual if usual < math.inf else 0.0

    def _count(self, now: float) -> list[Effect]:
        """A gradient counts once every shard has been reduced after it."""
        gradients = 0
        for worker in self.present:
            new = min(told.get(worker, 0) for told in self._told) - self._counted.get(worker, 0)
            if new:
                self._counted[worker] = self._counted.get(worker, 0) + new
                self.pace.ledger.count(worker, new)
                gradients += new
        return self.pace.advance(gradients, max(1, len(self.present)), now) if gradients else []

    def _prepare(self, shard: int, mean: Tensor) -> Tensor:
        """The joint shard after a reduction; its projection is kept for the next broadcast."""
        options, cycle, part = self.options, self.cycles[shard], self._cut[shard]
        joint = self.seat.weights[part]
        change = (mean - joint).mul_(options.beta_at(cycle, self._done()))
        velocity = self._velocity[shard].mul_(options.delta).add_(change, alpha=1 - options.delta)
        moved = change.add_(joint)
        gamma = 0.0 if self._is_buffers(shard) else options.gamma_at(cycle, self._done())
        projected = self.seat.empty(len(moved), dtype=moved.dtype)
        self._projected[shard] = torch.add(moved, velocity, alpha=gamma, out=projected)
        return moved

    def _state(self) -> dict[str, Any]:
        return {"cycles": list(self.cycles), "velocity": torch.cat(self._velocity)}

    def check(self) -> None:
        busy = [flight.shard for flight in self._under_way.values() if not self._is_buffers(flight.shard)]
        if len(busy) > self.options.phases:
            raise InvariantBroken(f"shards {busy} are under way in {self.options.phases} phases")
        places = [*self.ready, *(flight.shard for flight in self._under_way.values())]
        if sorted(places) != list(range(len(self._cut))):
            raise InvariantBroken(f"not every shard is in one place: {places}")
        if len(set(self.present)) != len(self.present):
            raise InvariantBroken(f"a worker is present twice: {self.present}")
        self.pace.ledger.check()


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
        #: of each shard: the last cycle, when it was contributed last, and the steps since then
        self._cycles: list[int | None] = [None] * len(self._cut)
        self._given_at = [0.0] * len(self._cut)
        self.taus = [0] * len(self._cut)
        #: how many steps it takes for the next contribution
        self.least = 1
        self.steps = 0
        self._contributions = 0
        self._compute_seconds = 0.0
        self._exchange_seconds = 0.0
        #: reductions that wait for a step, by their shard
        self._awaited: dict[int, Reduce] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return self._start(now)
            case Broadcasted(members=members, message=Projected() as projected):
                return self._take(projected, members, now)
            case GradientReady(gradient=gradient):
                self._count(event)
                tilted = self._tilted(gradient) if self.options.penalty == "gradient" else None
                compute = self._compute()  # says whether anything is left to train on
                contributions = [self._contribute(shard, now) for shard in sorted(self._awaited) if self._is_due(shard)]
                return [Step(tilted), *contributions, *([] if tilted is not None else self._displace()), *compute]
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case TimerFired(name=stream):
                late = [shard for shard, reduction in self._awaited.items() if stream_of(reduction.tag) == stream]
                return [self._contribute(shard, now) for shard in late]
            case Received(message=AreYouThere()):
                return [Send("hub", Here())]
        return []

    def _start(self, now: float) -> list[Effect]:
        """Begin at once with the model that all begin with, unless the others have begun long ago."""
        self._given_at = [now] * len(self._cut)
        if self.seat.joins_late:
            return []
        self.running = True
        return self._compute()

    def _compute(self) -> list[Effect]:
        return self.portion.compute("flat" if self.options.penalty == "gradient" else "step")

    def _take(self, projected: Projected, members: tuple[str, ...], now: float) -> list[Effect]:
        shard, last = projected.shard, self._cycles[projected.shard]
        self._targets[shard] = projected.values
        self._cycles[shard] = projected.cycle
        self.alpha = projected.alpha
        self.portion.position = max(self.portion.position, projected.position)
        part, tag = self._cut[shard], tag_of(shard, projected.cycle)
        self._awaited[shard] = Reduce(tag, members, snapshot(part.start, part.stop))
        if last is not None and projected.cycle > last + 1:  # the others went on without it
            self.taus[shard] = min(self.taus[shard], self.least)
        left = self._given_at[shard] + max(self.least * projected.step_seconds, projected.lull_seconds) - now
        # before it has begun it contributes a shard at once, but the same shard a second time only in its turn
        if (self.running or last is not None) and not self._is_due(shard) and left > 0:
            effects: list[Effect] = [SetTimer(stream_of(tag), left)]
        else:
            effects = [self._contribute(shard, now)]
        targets = [target for target in self._targets if target is not None]
        if not self.running and len(targets) == len(self._cut):
            self.running = True
            effects += [Install(torch.cat(targets)), *self._compute()]
        return effects

    def _count(self, ready: GradientReady) -> None:
        self.steps += 1
        self.taus = [tau + 1 for tau in self.taus]
        self._compute_seconds += ready.seconds
        self._exchange_seconds += ready.exchange_seconds
        if self._contributions and self._compute_seconds:
            cycle = self._exchange_seconds * len(self._cut) / self._contributions
            allowed = self.options.exchange_share * self._compute_seconds / self.steps
            self.least = max(1, math.ceil(cycle / allowed))

    def _is_due(self, shard: int) -> bool:
        """It has made enough steps for a contribution, or all that it can make."""
        return self.taus[shard] >= (1 if self.portion.idle else self.least)

    def _contribute(self, shard: int, now: float) -> Reduce:
        """The awaited contribution of a shard, with the steps that it has."""
        reduction, tau = self._awaited.pop(shard), self.taus[shard]
        self.taus[shard], self._given_at[shard] = 0, now
        self._contributions += 1
        weight = float(tau) if self.options.weighted else float(tau > 0)
        return Reduce(reduction.tag, reduction.members, reduction.values, weight, self.steps)

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
        if any(self._is_due(shard) for shard in self._awaited):
            raise InvariantBroken(f"contributions of shards {sorted(self._awaited)} are held back")


def tag_of(shard: int, cycle: int) -> str:
    """The name of a reduction."""
    return f"shard {shard} {cycle}"
