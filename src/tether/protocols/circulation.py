"""Shards of the joint model that circulate between a hub and workers that never stop.

`mpca`, `tide` and `streaming` have this in common: the vector is cut into shards of equal size, anywhere, and each
shard goes through a cycle of its own. The hub broadcasts it to all workers; a worker that has it contributes a copy
of its own shard, weighted by tau, the steps that it has made since its last contribution of that shard; the hub makes
the next joint shard of the weighted mean. What the hub makes of the mean, and what a worker does with a shard that
arrives, is up to the protocol.

As many shards as there are phases are under way at a time: one is broadcast while another is reduced and a third is
prepared, so that both directions of the hub's link are in use (MPCA SGD, section 4.2). Other shards wait for their
turn. BatchNorm's buffers are a small shard of their own that circulates in addition.

How many steps a contribution needs: one, where exchanges cost only time on the network. Where exchanges take CPU time
from training, workers would exchange at almost every step and train at half their speed. There a worker makes
enough steps that its exchanges take at most a given share of its gradients' time.

No worker waits for a straggler (MPCA SGD, section 4.6). A worker that has made too few steps contributes when it has
made enough, so that a fast network does not circulate unchanged shards forever, but at the latest when the median
worker would have made them: the hub knows every worker's speed from the steps it reports, and sends all workers the
median. A slow worker then contributes what it has, with weight 0 if it has made no step. While no worker has made a
step, all wait longer each time, up to a second. A worker that has nothing left to train on contributes its last steps
at once, and after that waits for no steps of its own, so that it does not hold up those of others. If its data has
ended for good, its steps are in the joint model when every shard has come back since.

A worker that does not answer at all, because it is paused or cut off, is left out: a shard that takes several times
longer than usual closes with the contributions that have arrived, and the hub asks the missing workers whether they are
there. They take part again as soon as they answer. A worker that answers but is missing again and again has to wait
longer each time; that happens if the process that brings it its values is paused and the worker is not. What a worker
has made in the meantime counts at most as much as a usual contribution.

A worker reports how many steps it has made in total, and the hub counts those that are new in each shard. A
contribution that arrives too late is therefore not lost: the next one reports its steps as well. Where data may end
before the run does, broadcasts say which steps they have; a worker gives again what came too late, so that its last
steps are in every shard.

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

import msgspec
import torch
from torch import Tensor

from tether.core.effects import Broadcast, Contributed, Effect, Install, Record, Reduce, Send, SetTimer
from tether.core.events import (
    Broadcasted,
    DataEnded,
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
from tether.core.machine import NodeContext
from tether.core.message import Message, Row, Stream, Tag, Timer
from tether.core.snapshot import Values
from tether.core.vector import shards
from tether.errors import InvariantBroken, UsageError
from tether.protocols.base import Options, RunProgress, option
from tether.protocols.ledger import Lease, More, Portion, Recall, Returned

SHARDS_MAX = 16
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


class Circulated(Message, frozen=True):
    """Hub to all: a shard, on its way to the workers."""

    shard: int
    cycle: int
    #: how long a step takes the median worker; 0 if unknown
    step_seconds: float
    values: Tensor
    #: how many mini-batches of the run count
    position: int = 0
    #: the shortest wait before a contribution while no worker makes a step
    lull_seconds: float = 0.0
    #: how many steps of each worker are in the joint shard, where workers need to know it
    steps: dict[str, int] = msgspec.field(default_factory=dict)


class AreYouThere(Message, frozen=True):
    """Hub to a worker that was missing in a reduction."""


class Here(Message, frozen=True):
    """Worker to hub: it is there and takes part again."""


@dataclass(frozen=True)
class Circulation(Options):
    """The options of a protocol whose shards circulate."""

    phases: Literal[1, 2, 3] = option(3, "how many shards are under way at a time: broadcast, reduced, prepared")
    shards: int | None = option(
        None, "how many shards the model is cut into; by default the number of phases", kw_only=True
    )
    weighted: bool = option(
        True, "weight a worker by the steps it made; otherwise all workers count equally", kw_only=True
    )
    exchange_share: float = option(
        0.02,
        "how much of a worker's time its exchanges may take from training on the same processors. Raise it for more "
        "frequent exchanges",
        kw_only=True,
    )

    collective = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.exchange_share <= 1:
            raise UsageError(f"exchange_share must be above 0 and at most 1, not {self.exchange_share}")
        if self.shards is not None and not self.phases <= self.shards <= SHARDS_MAX:
            raise UsageError(f"shards must be within phases ({self.phases}) and {SHARDS_MAX}, not {self.shards}")

    def cut(self, context: NodeContext) -> list[slice]:
        """The shards of the parameters and, if there are any, the buffers."""
        parts = shards(context.parameter_count, self.shards if self.shards is not None else self.phases)
        buffers = slice(context.parameter_count, len(context.weights))
        return [*parts, buffers] if buffers.start < buffers.stop else parts


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


class CirculationHub:
    """Holds the joint model and drives the cycles of its shards."""

    def __init__(self, context: NodeContext, options: Circulation) -> None:
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
        #: for each shard: what is broadcast next
        self._outgoing: list[Tensor] = []
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
                self._outgoing = [self.context.weights[part].clone() for part in self._cut]
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
            message = self._message(shard)
            effects += [Broadcast(tag.stream, members, message), Reduce(tag, members)]
            if usual := self._usual_seconds[shard]:
                waits = max(self._steps_needed() * message.step_seconds, message.lull_seconds)
                limit = self._patience[shard] * max(usual, CYCLE_SECONDS_MIN) + waits
                effects.append(SetTimer(timer_of(shard), limit))
        return effects

    def _next(self) -> int | None:
        """A shard whose cycle may start: the buffers always, any other if fewer than `phases` are under way."""
        full = sum(not self._is_buffers(flight.shard) for flight in self._under_way.values()) == self.options.phases
        return next((shard for shard in self.ready if not full or self._is_buffers(shard)), None)

    def _is_buffers(self, shard: int) -> bool:
        return is_buffers(self._cut[shard], self.context)

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
            moved = self._prepare(shard, reduced.total / reduced.weight, taus)
            row = {"shard": shard, "cycle": cycle, "cycle_seconds": seconds, **self._figures(shard)}
            row |= {"tau": sum(taus) / len(taus), "taus": taus, "workers": len(reduced.contributors)}
            effects += [Install(moved, self._cut[shard].start), Record(row)]
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

    def _median_tau(self) -> float:
        """How many steps the median worker makes in a cycle; 0 if unknown."""
        taus = [rhythm.steps / rhythm.cycles for rhythm in self._rhythms.values()]
        return statistics.median(taus) if taus else 0.0

    def _circulated(self, shard: int) -> dict[str, Any]:
        """The fields of `Circulated` for the next broadcast of a shard."""
        return {
            "shard": shard,
            "cycle": self.cycles[shard],
            "step_seconds": self._step_seconds(),
            "values": self._outgoing[shard],
            "position": self.progress.position,
            "lull_seconds": self._lull_seconds,
            "steps": dict(self._told[shard]) if self._tells_steps() else {},
        }

    def _tells_steps(self) -> bool:
        """Whether broadcasts say which steps they have: a worker whose data has ended waits for its last ones."""
        return self.context.schedule.data_bound

    # ---- what a protocol makes of it ----

    def _message(self, shard: int) -> Circulated:
        """What is broadcast of a shard."""
        raise NotImplementedError

    def _steps_needed(self) -> int:
        """How many steps of a worker a contribution needs by the options."""
        return 1

    def _prepare(self, shard: int, mean: Tensor, taus: list[int]) -> Tensor:
        """The joint shard after a reduction; stores in `_outgoing` what is broadcast next."""
        raise NotImplementedError

    def _figures(self, shard: int) -> Row:
        """What the metrics say about the cycle that has just ended, besides its duration and its workers."""
        return {}

    def _state(self) -> dict[str, Any]:
        return {"cycles": list(self.cycles)}

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


class CirculationWorker:
    """Steps continuously, and contributes its shards."""

    def __init__(self, context: NodeContext, options: Circulation) -> None:
        self.context = context
        self.options = options
        self.running = False
        self.portion = Portion(context, lambda more: [Send("hub", more)])
        self._cut = options.cut(context)
        #: for each shard: the values that were received last
        self._received: list[Tensor | None] = [None] * len(self._cut)
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
        #: for each shard: the steps of the last contribution that had any, with all until then, and how many of this
        #: worker's steps the shard had when it was received last
        self._contributed = [(0, 0)] * len(self._cut)
        self._included = [0] * len(self._cut)
        #: its data has ended, and it has not said yet that its steps are in the joint model
        self._ending = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = self._handle(event, now)
        if self._ending and min(self._included) >= self.steps:
            self._ending = False
            effects.append(Contributed())
        return effects

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return self._start(now)
            case Broadcasted(members=members, message=Circulated() as arrived):
                return self._take(arrived, members, now)
            case GradientReady():
                return self._step(event, now)
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case TimerFired(timer=timer):
                late = next((shard for shard in self._awaited if timer_of(shard) == timer), None)
                return [] if late is None else self._contribute(late, now)
            case Received(message=AreYouThere()):
                return [Send("hub", Here())]
            case DataEnded():
                self.portion.end()
                self._ending = True
                return [effect for shard in self._due() for effect in self._contribute(shard, now)]
        return []

    def _start(self, now: float) -> list[Effect]:
        """Begin at once with the model that all workers begin with, unless this worker joins later."""
        self._given_at = [now] * len(self._cut)
        if self.context.joins_late:
            return []
        self.running = True
        return self._compute()

    def _compute(self) -> list[Effect]:
        return self.portion.compute()

    def _take(self, arrived: Circulated, members: tuple[str, ...], now: float) -> list[Effect]:
        shard, last = arrived.shard, self._cycles[arrived.shard]
        self._see_included(arrived)
        effects = self._arrive(arrived)
        self._received[shard] = arrived.values
        self._cycles[shard] = arrived.cycle
        self.portion.position = max(self.portion.position, arrived.position)
        self._awaited[shard] = Reduce(tag_of(shard, arrived.cycle), members)
        if last is not None and arrived.cycle > last + 1:  # the others continued without this worker
            self.taus[shard] = min(self.taus[shard], self.least)
        steps_seconds = 0.0 if self.portion.idle else self._needed(shard) * arrived.step_seconds
        left = self._given_at[shard] + max(steps_seconds, arrived.lull_seconds) - now
        # a worker that has not begun contributes each shard at once, but a second time only when it is due
        if (self.running or last is not None) and not self._is_due(shard) and left > 0:
            effects.append(SetTimer(timer_of(shard), left))
        else:
            effects += self._contribute(shard, now)
        received = [values for values in self._received if values is not None]
        if not self.running and len(received) == len(self._cut):
            self.running = True
            effects += [Install(torch.cat(received)), *self._compute()]
        return effects

    def _see_included(self, arrived: Circulated) -> None:
        """A worker whose data ends gives steps again that came too late for their reduction."""
        if not self.context.schedule.data_bound:
            return
        shard = arrived.shard
        tau, steps = self._contributed[shard]
        self._included[shard] = arrived.steps.get(self.context.node.name, 0)
        if self._included[shard] < steps:
            self.taus[shard] += tau
            self._contributed[shard] = 0, 0

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
        return self.taus[shard] >= (1 if self.portion.idle else self._needed(shard))

    def _contribute(self, shard: int, now: float) -> list[Effect]:
        """Contribute to the pending reduction of a shard."""
        reduction, tau = self._awaited.pop(shard), self.taus[shard]
        self.taus[shard], self._given_at[shard] = 0, now
        self._contributions += 1
        if tau:
            self._contributed[shard] = tau, self.steps
        weight = float(tau) if self.options.weighted else float(tau > 0)
        return [Reduce(reduction.tag, reduction.members, self._values(shard), weight, self.steps)]

    def _due(self) -> list[int]:
        """The shards to whose reductions the worker should contribute now."""
        return [shard for shard in sorted(self._awaited) if self._is_due(shard)]

    # ---- what a protocol makes of it ----

    def _needed(self, shard: int) -> int:
        """How many steps a contribution of a shard needs."""
        return self.least

    def _step(self, ready: GradientReady, now: float) -> list[Effect]:
        """Step with a gradient, contribute what is due, and compute the next gradient."""
        raise NotImplementedError

    def _arrive(self, arrived: Circulated) -> list[Effect]:
        """A shard has arrived; the one before it is still in `_received`."""
        raise NotImplementedError

    def _values(self, shard: int) -> Values:
        """What the worker contributes of a shard."""
        raise NotImplementedError

    def check(self) -> None:
        if held_back := self._due():
            raise InvariantBroken(f"contributions of shards {held_back} are held back")


def is_buffers(part: slice, context: NodeContext) -> bool:
    """Whether a shard is that of BatchNorm's buffers."""
    return bool(part.start == context.parameter_count)


def tag_of(shard: int, cycle: int) -> Tag:
    """The reduction of a shard in a cycle."""
    return Tag(Stream("shard", shard), cycle)


def timer_of(shard: int) -> Timer:
    """The timer of a shard: at the hub until it is overdue, at a worker until it contributes."""
    return Timer("shard", (shard,))
