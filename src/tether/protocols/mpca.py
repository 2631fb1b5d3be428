"""MPCA SGD: multi-phase coordinated asynchronous training (sections 4 and 6.3).

Workers never stop. The hub holds the joint model, cut into shards of equal size anywhere in the vector. Each shard goes
through a cycle of its own:

1. Broadcast: the projected joint shard goes to all workers, where it replaces the old target by a swap.
2. Reduction: a worker that has it contributes a copy of its own shard, weighted by tau, the steps that it has made
   since its last contribution of that shard (equation 9).
3. Preparation: the hub blends the mean R into its shard, x <- (1 - beta) x + beta R (equation 8), tracks its velocity,
   v <- delta v + (1 - delta) (x_t - x_t-1) (equation 4), and projects it, x* = x + gamma v (equation 5).

As many shards as there are phases are under way at a time: one is broadcast while another is reduced and a third is
prepared, so that both directions of the hub's link are in use (section 4.2). Other shards wait for their turn.
BatchNorm's buffers are a small shard of their own that circulates in addition. It is not projected, since a variance
must not fall below zero.

A worker moves its whole vector before every gradient, x <- x - alpha (x - x*) (equation 7); or the pull is part of the
gradient, g <- g + alpha (x - x*) (equation 6).

Schedules, which the hub sends so that every worker has the same: alpha is 0 for the first steps, then high, then decays
to its target (section 6.3); beta goes from 1 to its target by a constant factor per cycle (section 4.5); gamma grows
from 0 (section 4.3).

How many steps a contribution needs: one, where exchanges cost only time on the network. Where exchanges take CPU time
from training, workers would exchange at almost every step and train at half their speed. There a worker makes so many
steps that its exchanges take at most a given share of its gradients' time. The paper's cycles last 12 to 108 steps.

No worker waits for a straggler (section 4.6). A worker that has made too few steps contributes when it has made enough,
so that a fast network does not circulate unchanged shards forever, but at the latest when the median worker would have
made them: the hub knows every worker's speed from the steps it reports, and sends all workers the median. A slow worker
then contributes what it has, with weight 0 if it has made no step. While no worker has made a step, all wait longer
each time, up to a second. A worker that has nothing left to train on contributes its last steps at once.

A worker that does not answer at all, because it is paused or cut off, is left out: a shard that takes several times
longer than usual closes with the contributions that have arrived, and the hub asks the missing workers whether they are
there. They take part again as soon as they answer. A worker that answers but is missing again and again has to wait
longer each time; that happens if the process that brings it its values is paused and the worker is not. What a worker
has made in the meantime counts at most as much as a usual contribution.

A worker reports how many steps it has made in total, and the hub counts those that are new in each shard. A
contribution that arrives too late is therefore not lost: the next one reports its steps as well.

The workers of a new run begin at once, since the seed or the checkpoint gives all of them the hub's model. A worker
that joins later begins with the joint model when it has every shard. A worker that dies is left out of the reductions
under way.

Invariants: every shard is in one place, ready or under way; no more shards are under way than there are phases; for
each shard, the new steps of a worker's contributions add up to the steps it has reported.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tether.core.effects import Blend, Broadcast, Effect, Install, Record, Reduce, Send, SetTimer, Step
from tether.core.events import (
    Broadcasted,
    Event,
    GradientReady,
    PeerJoined,
    PeerLost,
    Received,
    Reduced,
    Started,
    StopRequested,
    TimerFired,
)
from tether.core.machine import Machine, NodeContext
from tether.core.message import Message, Stream, Tag, Timer
from tether.core.snapshot import snapshot
from tether.core.vector import shards
from tether.errors import InvariantBroken, UsageError
from tether.protocols.base import Options, RunProgress, option
from tether.protocols.ledger import Lease, More, Portion, Recall, Returned

SHARDS_MAX = 16
#: the share of the distance to the joint model by which the automatic alpha moves a worker in a cycle
PULL = 0.2
#: default schedules: those of the paper, or these shares of a run that is too short for them
FREE_STEPS, FREE_SHARE = 20, 0.05
ALPHA_DECAY_STEPS, ALPHA_DECAY_SHARE = 200, 0.2
RAMP_CYCLES, RAMP_SHARE = 20, 0.2
#: with every cycle, earlier measurements of the workers lose weight by this factor
FADING = 0.9
#: while no worker has made a step: by how much all wait longer each time, and the longest wait, so that the first
#: worker that makes a step does not find all shards waiting elsewhere
LULL_GROWTH = 4
LULL_SECONDS_MAX = 1.0
#: a worker may take this many times longer for a contribution than the median worker
ROOM = 1.1
#: a shard is overdue after this many times its usual cycle; the factor doubles each time that this was wrong
PATIENCE = 4.0
#: shorter cycles count as this long when a shard is judged to be overdue
CYCLE_SECONDS_MIN = 0.05


class Projected(Message, frozen=True):
    """Hub to all: a shard of the projected joint model, and the rate of the pull towards it."""

    shard: int
    cycle: int
    alpha: float
    #: how long a step takes the median worker; 0 if unknown
    step_seconds: float
    values: Tensor
    #: how many mini-batches of the run count
    position: int = 0
    #: the shortest wait before a contribution while no worker makes a step
    lull_seconds: float = 0.0


class AreYouThere(Message, frozen=True):
    """Hub to a worker that was missing in a reduction."""


class Here(Message, frozen=True):
    """Worker to hub: it is there and takes part again."""


@dataclass(frozen=True)
class Mpca(Options):
    """Workers never stop: shards of the joint model circulate, and every step pulls a worker towards them."""

    phases: Literal[1, 2, 3] = option(3, "how many shards are under way at a time: broadcast, reduced, prepared")
    alpha: float | Literal["auto"] = option(
        "auto",
        "pull towards the projected joint model at every step; 'auto': the steps of a measured cycle together cover a "
        "fifth of the distance. The paper uses 0.05, and 0.005 where a cycle has 100 steps",
    )
    beta: float = option(0.9, "by which share a reduction replaces the joint model")
    gamma: float = option(0.7, "how many cycles ahead the joint model is projected")
    delta: float = option(0.8, "how much of the joint model's velocity is kept from cycle to cycle")
    penalty: Literal["displace", "gradient"] = option(
        "displace",
        "pull by moving the model before every gradient, or as part of the gradient, which needs an elementwise "
        "optimizer",
    )
    weighted: bool = option(True, "weight a worker by the steps it made; otherwise all workers count equally")
    shards: int | None = option(None, "how many shards the model is cut into; by default the number of phases")
    exchange_share: float = option(
        0.02,
        "how much of a worker's time its exchanges may take from training on the same processors. Raise it for more "
        "frequent exchanges",
    )
    alpha_start: float = option(0.5, "the initial pull, from which a given alpha decays to its target")
    free_steps: int | None = option(None, "steps without any pull at the beginning; none: 20, or 5 % of a short run")
    alpha_decay_steps: int | None = option(
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
        for name in ("free_steps", "alpha_decay_steps", "beta_cycles", "gamma_cycles"):
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

    @property
    def needs_elementwise(self) -> bool:
        return self.penalty == "gradient"

    def machine(self, context: NodeContext) -> Machine:
        return MpcaHub(context, self) if context.node.role == "hub" else MpcaWorker(context, self)

    def cut(self, context: NodeContext) -> list[slice]:
        """The shards of the parameters and, if there are any, the buffers."""
        parts = shards(context.parameter_count, self.shards if self.shards is not None else self.phases)
        buffers = slice(context.parameter_count, len(context.weights))
        return [*parts, buffers] if buffers.start < buffers.stop else parts

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


@dataclass
class _Flight:
    """A shard under way, from its broadcast to the end of its reduction."""

    shard: int
    since: float
    members: tuple[str, ...]
    #: it took too long and closes with the contributions that have arrived
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
    """Holds the joint model and drives the cycles of its shards."""

    def __init__(self, context: NodeContext, options: Mpca) -> None:
        self.context = context
        self.options = options
        self.progress = RunProgress(context, self._state)
        self.present: list[str] = []
        #: present workers that do not answer
        self.silent: set[str] = set()
        #: how often each worker was missing since its last contribution, and until when it is left out
        self._misses: dict[str, int] = {}
        self._left_out: dict[str, float] = {}
        self._cut = options.cut(context)
        self.ready = deque(range(len(self._cut)))
        self._under_way: dict[Tag, _Flight] = {}
        restored = context.restored or {}
        cycles = restored.get("cycles", [0])
        #: a run that resumes with another number of shards resumes with the smallest of their cycles
        self.cycles: list[int] = list(cycles) if len(cycles) == len(self._cut) else [min(cycles)] * len(self._cut)
        velocity = restored.get("velocity", torch.zeros_like(context.weights))
        self._velocity = [velocity[part].clone() for part in self._cut]
        self._projected: list[Tensor] = []
        #: for each shard: the steps of each worker in its reductions
        self._told: list[dict[str, int]] = [{} for _ in self._cut]
        #: for each worker: its steps that count, which are in the reductions of every shard
        self._counted: dict[str, int] = {}
        #: for each shard: the usual duration of a cycle, and after how many times that it is overdue
        self._usual_seconds = [0.0] * len(self._cut)
        self._patience = [PATIENCE] * len(self._cut)
        self._rhythms: dict[str, _Rhythm] = {}
        self._measured_at = 0.0
        #: how long all workers wait for the first step
        self._lull_seconds = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.progress.over:
            return []
        match event:
            case Started(members=members):
                self.present = [worker for worker in self.context.workers if worker in members]
                self.progress.begin(members)
                self._projected = [self.context.weights[part].clone() for part in self._cut]
                self._measured_at = now
                return self._launch(now)
            case Reduced(tag=tag) if tag in self._under_way:
                return self._close(event, now)
            case TimerFired(timer=timer):
                return self._close_early(timer)
            case Received(sender=worker, message=Here()):
                self.silent.discard(worker)
                if (misses := self._misses.get(worker, 0)) > 1:
                    self._left_out[worker] = now + PATIENCE**misses * max(self._usual_seconds)
                return self._launch(now)
            case Received(sender=worker, message=More() | Returned() as message):
                return self.progress.deal(worker, message)
            case PeerJoined(peer=peer, role="worker"):
                self.present.append(peer)
                self.progress.join(peer)
                return self._launch(now)
            case PeerLost(peer=peer) if peer in self.present:
                self.present.remove(peer)
                self.silent.discard(peer)
                for known in (self._misses, self._left_out, self._rhythms, self._counted):
                    known.pop(peer, None)
                for told in self._told:
                    told.pop(peer, None)
                return self.progress.lose(peer)
            case StopRequested(reason=reason):
                return self.progress.finish(reason)
        return []

    def _launch(self, now: float) -> list[Effect]:
        """Start the cycles of as many ready shards as may be under way."""
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
            values, position = self._projected[shard], self.progress.position
            projected = Projected(shard, cycle, alpha, self._step_seconds(), values, position, self._lull_seconds)
            effects += [Broadcast(tag.stream, members, projected), Reduce(tag, members)]
            if usual := self._usual_seconds[shard]:
                waits = max(projected.step_seconds, projected.lull_seconds)
                limit = self._patience[shard] * max(usual, CYCLE_SECONDS_MIN) + waits
                effects.append(SetTimer(timer_of(shard), limit))
        return effects

    def _next(self) -> int | None:
        """A shard whose cycle may start: the buffers always, any other if fewer than `phases` are under way."""
        full = sum(not self._is_buffers(flight.shard) for flight in self._under_way.values()) == self.options.phases
        return next((shard for shard in self.ready if not full or self._is_buffers(shard)), None)

    def _is_buffers(self, shard: int) -> bool:
        return bool(self._cut[shard].start == self.context.parameter_count)

    def _close_early(self, timer: Timer) -> list[Effect]:
        """Close an overdue shard with the contributions that have arrived."""
        for tag, flight in self._under_way.items():
            if timer_of(flight.shard) == timer:
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
        return effects if self.progress.over else effects + self._launch(now)

    def _ask_missing(self, flight: _Flight, contributors: tuple[str, ...]) -> list[Effect]:
        """Leave the workers that were missing in a reduction out until they answer."""
        missing = [worker for worker in flight.members[1:] if worker in self.present and worker not in contributors]
        asked = [worker for worker in missing if worker not in self.silent]
        self.silent.update(asked)
        self._misses |= {worker: self._misses.get(worker, 0) + 1 for worker in asked}
        return [Send(worker, AreYouThere()) for worker in asked]

    def _new_steps(self, shard: int, reduced: Reduced) -> list[int]:
        """The steps of each contributor that are new in this reduction of the shard."""
        told = self._told[shard]
        new = [steps - told.get(name, 0) for name, steps in zip(reduced.contributors, reduced.steps, strict=True)]
        told |= dict(zip(reduced.contributors, reduced.steps, strict=True))
        return new

    def _measure(self, shard: int, taus: dict[str, int], seconds: float, now: float) -> None:
        """Track how fast the workers step, once per cycle of all shards."""
        lull = 0.0 if any(taus.values()) else max(LULL_GROWTH * self._lull_seconds, seconds)
        self._lull_seconds = min(lull, LULL_SECONDS_MAX)
        if shard == 0:
            for worker in self.present:
                self._rhythms.setdefault(worker, _Rhythm()).add(taus.get(worker, 0), now - self._measured_at)
            self._measured_at = now

    def _alpha(self) -> float:
        taus = [rhythm.steps / rhythm.cycles for rhythm in self._rhythms.values()]
        return self.options.alpha_at(
            self.progress.step, self.context.schedule.steps, statistics.median(taus) if taus else 0.0
        )

    def _done(self) -> float:
        """The share of the run that is done."""
        return self.progress.step / self.context.schedule.steps

    def _step_seconds(self) -> float:
        """How long a step takes the median worker, with some margin so that its steps are never cut short."""
        known = [rhythm.step_seconds for rhythm in self._rhythms.values()]
        usual = statistics.median_low(known) if known else math.inf
        return ROOM * usual if usual < math.inf else 0.0

    def _count(self, now: float) -> list[Effect]:
        """Count the gradients after which every shard has been reduced."""
        gradients = 0
        for worker in self.present:
            new = min(told.get(worker, 0) for told in self._told) - self._counted.get(worker, 0)
            if new:
                self._counted[worker] = self._counted.get(worker, 0) + new
                self.progress.ledger.count(worker, new)
                gradients += new
        return self.progress.advance(gradients, max(1, len(self.present)), now) if gradients else []

    def _prepare(self, shard: int, mean: Tensor) -> Tensor:
        """The joint shard after a reduction (equations 8 and 4); stores its projection (5) for the next broadcast."""
        options, cycle, part = self.options, self.cycles[shard], self._cut[shard]
        joint = self.context.weights[part]
        change = (mean - joint).mul_(options.beta_at(cycle, self._done()))
        velocity = self._velocity[shard].mul_(options.delta).add_(change, alpha=1 - options.delta)
        moved = change.add_(joint)
        gamma = 0.0 if self._is_buffers(shard) else options.gamma_at(cycle, self._done())
        projected = self.context.empty(len(moved), dtype=moved.dtype)
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
        self.progress.ledger.check()


class MpcaWorker:
    """Steps continuously, pulled towards the shards that it received last."""

    def __init__(self, context: NodeContext, options: Mpca) -> None:
        self.context = context
        self.options = options
        self.running = False
        self.portion = Portion(context, lambda more: [Send("hub", more)])
        self.alpha = 0.0
        self._cut = options.cut(context)
        self._targets: list[Tensor | None] = [None] * len(self._cut)
        #: for each shard: the last cycle, the time of the last contribution, and the steps since then
        self._cycles: list[int | None] = [None] * len(self._cut)
        self._given_at = [0.0] * len(self._cut)
        self.taus = [0] * len(self._cut)
        #: how many steps a contribution needs
        self.least = 1
        self.steps = 0
        self._contributions = 0
        self._compute_seconds = 0.0
        self._exchange_seconds = 0.0
        #: reductions to which the worker has not contributed yet, by shard
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
                compute = self._compute()  # first, since it shows whether anything is left to train on
                contributions = [self._contribute(shard, now) for shard in sorted(self._awaited) if self._is_due(shard)]
                return [Step(tilted), *contributions, *([] if tilted is not None else self._displace()), *compute]
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case TimerFired(timer=timer):
                late = [shard for shard in self._awaited if timer_of(shard) == timer]
                return [self._contribute(shard, now) for shard in late]
            case Received(message=AreYouThere()):
                return [Send("hub", Here())]
        return []

    def _start(self, now: float) -> list[Effect]:
        """Begin at once with the model that all workers begin with, unless this worker joins later."""
        self._given_at = [now] * len(self._cut)
        if self.context.joins_late:
            return []
        self.running = True
        return self._compute()

    def _compute(self) -> list[Effect]:
        return self.portion.compute("dense" if self.options.penalty == "gradient" else "none")

    def _take(self, projected: Projected, members: tuple[str, ...], now: float) -> list[Effect]:
        shard, last = projected.shard, self._cycles[projected.shard]
        self._targets[shard] = projected.values
        self._cycles[shard] = projected.cycle
        self.alpha = projected.alpha
        self.portion.position = max(self.portion.position, projected.position)
        part, tag = self._cut[shard], tag_of(shard, projected.cycle)
        self._awaited[shard] = Reduce(tag, members, snapshot(part.start, part.stop))
        if last is not None and projected.cycle > last + 1:  # the others continued without this worker
            self.taus[shard] = min(self.taus[shard], self.least)
        left = self._given_at[shard] + max(self.least * projected.step_seconds, projected.lull_seconds) - now
        # a worker that has not begun contributes each shard at once, but a second time only when it is due
        if (self.running or last is not None) and not self._is_due(shard) and left > 0:
            effects: list[Effect] = [SetTimer(timer_of(shard), left)]
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
        """The worker has made enough steps for a contribution, or all that it can make."""
        return self.taus[shard] >= (1 if self.portion.idle else self.least)

    def _contribute(self, shard: int, now: float) -> Reduce:
        """Contribute to the pending reduction of a shard."""
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
        """Equation 6: the gradient plus that of the penalty."""
        tilted = gradient.clone()
        for target, part in zip(self._targets, self._cut, strict=True):
            if self.alpha and target is not None and part.stop <= len(gradient):
                tilted[part].add_(self.context.weights[part] - target, alpha=self.alpha)
        return tilted

    def check(self) -> None:
        if any(self._is_due(shard) for shard in self._awaited):
            raise InvariantBroken(f"contributions of shards {sorted(self._awaited)} are held back")


def tag_of(shard: int, cycle: int) -> Tag:
    """The reduction of a shard in a cycle."""
    return Tag(Stream("shard", shard), cycle)


def timer_of(shard: int) -> Timer:
    """The timer of a shard: at the hub until it is overdue, at a worker until it contributes."""
    return Timer("shard", (shard,))
