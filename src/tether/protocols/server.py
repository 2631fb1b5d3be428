"""Parameter server (Rudra, sections 3.1 and 3.2).

The hub holds the weights and their clock, the number of updates so far. A learner pulls the weights, takes the gradient
of one mini-batch and pushes it with the clock of the weights it was taken at. The optimizer runs at the hub, on the
flat vector.

hardsync (equation 3): the clock moves from i to i+1 when every learner present has pushed exactly one gradient of clock
i. The hub applies their mean, weighted by samples, and sends the new weights to all. Staleness is always zero, and
lambda learners of mini-batch mu equal one learner of mini-batch lambda*mu (equation 7).

A learner that dies before its gradient arrived is no longer waited for; what it had pushed counts. A learner that comes
is given the current weights and counts from this round on. BatchNorm's buffers ride along and are averaged.

Invariants: a learner is either awaited or has been counted, never both; only learners present are awaited; every
gradient counted has the current clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tether.errors import InvariantBroken
from tether.machine import (
    Compute,
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
    Seat,
    Send,
    Started,
    Step,
    StopRequested,
    snapshot,
)
from tether.protocols.base import Options, Pace, option


class Weights(Message, frozen=True):
    """Hub to learner: the vector and its clock."""

    clock: int
    values: Tensor


class Push(Message, frozen=True):
    """Learner to hub: one gradient, taken at weights of that clock, and the learner's buffers."""

    clock: int
    gradient: Tensor
    buffers: Tensor
    samples: int


@dataclass(frozen=True)
class Server(Options):
    """The optimizer runs at a hub; learners push gradients and pull weights."""

    sync: Literal["hard"] = option("hard", "when the hub updates: 'hard' waits for one gradient of every learner")

    name = "server"
    summary = "parameter server: the hub steps with the learners' gradients (Rudra)"
    messages = (Weights, Push)
    steps_at_hub = True

    def machine(self, seat: Seat) -> Machine:
        return HardHub(seat) if seat.node.role == "hub" else ServerLearner(seat)


class HardHub:
    """Collects one gradient of each learner, steps with their mean, and sends the weights out."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.pace = Pace(seat.schedule)
        self.clock = seat.schedule.first_step
        self.present: set[str] = set()
        self.awaited: set[str] = set()
        self.counted: list[str] = []
        self._samples = 0
        self._gradient: Tensor | None = None
        self._buffers: Tensor | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.pace.over:
            return []
        match event:
            case Started(members=members):
                self.present = set(members) & set(self.seat.workers)
                return self._send_weights()
            case Received(sender=sender, message=Push() as push):
                return self._count(sender, push, now)
            case PeerJoined(peer=peer, role="worker"):
                self.present.add(peer)
                self.awaited.add(peer)
                return [Send(peer, Weights(self.clock, snapshot()))]
            case PeerLost(peer=peer):
                self.present.discard(peer)
                self.awaited.discard(peer)
                return self._update_if_complete(now)
            case StopRequested(reason=reason):
                return self.pace.finish(reason)
        return []

    def _count(self, learner: str, push: Push, now: float) -> list[Effect]:
        if learner not in self.awaited:
            raise InvariantBroken(f"{learner} pushed a gradient of clock {push.clock} that nobody awaits")
        if push.clock != self.clock:
            raise InvariantBroken(f"{learner} pushed clock {push.clock} in hardsync round {self.clock}")
        self.awaited.remove(learner)
        self.counted.append(learner)
        self._samples += push.samples
        if self._gradient is None or self._buffers is None:
            self._gradient = push.gradient * push.samples
            self._buffers = push.buffers * push.samples
        else:
            self._gradient.add_(push.gradient, alpha=push.samples)
            self._buffers.add_(push.buffers, alpha=push.samples)
        return self._update_if_complete(now)

    def _update_if_complete(self, now: float) -> list[Effect]:
        if self.awaited or self._gradient is None or self._buffers is None:
            return []
        samples, counted = self._samples, len(self.counted)
        effects: list[Effect] = [Step(self._gradient.div_(samples))]
        if len(self._buffers):
            effects.append(Install(self._buffers.div_(samples), start=self.seat.parameter_count))
        self.clock += 1
        self.counted, self._samples, self._gradient, self._buffers = [], 0, None, None
        effects.append(Record(staleness=(0,) * counted))
        effects += self.pace.advance(1, samples, now)
        return effects if self.pace.over else [*effects, *self._send_weights()]

    def _send_weights(self) -> list[Effect]:
        self.awaited = set(self.present)
        return [Send(learner, Weights(self.clock, snapshot())) for learner in sorted(self.present)]

    def check(self) -> None:
        if not self.awaited <= self.present:
            raise InvariantBroken(f"awaits the absent {sorted(self.awaited - self.present)}")
        if self.awaited & set(self.counted):
            raise InvariantBroken(f"awaits the counted {sorted(self.awaited & set(self.counted))}")
        if len(set(self.counted)) != len(self.counted):
            raise InvariantBroken(f"counted a learner twice: {self.counted}")


class ServerLearner:
    """Pulls, computes, pushes."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.clock = -1
        self.computing = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(message=Weights(clock=clock, values=values)):
                if self.computing:
                    raise InvariantBroken(f"weights of clock {clock} came while a gradient was being taken")
                self.clock, self.computing = clock, True
                return [Install(values), Compute()]
            case GradientReady(gradient=gradient, samples=samples):
                self.computing = False
                buffers = snapshot(self.seat.parameter_count)
                return [Send("hub", Push(self.clock, gradient, buffers, samples))]
        return []

    def check(self) -> None:
        if self.computing and self.clock < 0:
            raise InvariantBroken("computes before any weights came")
