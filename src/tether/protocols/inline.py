"""Learners that step themselves, on one vector that all share: `apply="inline"` of protocol server.

Where learners share a machine the weights need not travel at all. Every learner takes gradients at the shared vector as
it is at that moment and steps on it in place, without a lock (Hogwild): where two steps meet at one element, one of
them may be lost there. Each has an optimizer of its own, with its own momentum. The hub computes nothing. It counts
what the learners tell it every now and then, and has the vector evaluated and saved.

The end: when enough steps are told the hub tells the learners to halt, and finishes once each has told its last steps
or died, so nothing changes the final model any more. A learner that stands still is not waited for longer than a while.

A learner that dies has left every step in the vector that it made, and at most half of one more. One that comes finds
the weights there.

Invariants: nobody steps after it has halted; the hub counts no step of anybody who has told its last.
"""

from __future__ import annotations

from typing import Any

from tether.errors import InvariantBroken
from tether.machine import (
    CancelTimer,
    Effect,
    Event,
    GradientReady,
    Message,
    PeerJoined,
    PeerLost,
    Received,
    Record,
    Seat,
    Send,
    SetTimer,
    Started,
    Step,
    StopRequested,
    TimerFired,
)
from tether.protocols.base import Pace
from tether.protocols.ledger import Lease, More, Portion, Recall, Returned

#: a learner tells what it has done so often
TELL_SECONDS = 0.05
#: how long the last word of a learner is waited for
HALT_SECONDS = 5.0


class Tally(Message, frozen=True):
    """Learner to hub: the steps it has made since it last told; `last` if it has halted."""

    steps: int
    last: bool = False


class Halt(Message, frozen=True):
    """Hub to learner: enough."""


class InlineLearner:
    """Steps on the shared vector."""

    def __init__(self, seat: Seat, step: Step) -> None:
        self.seat = seat
        self._step = step
        self.halted = False
        self.portion = Portion(seat, lambda more: [Send("hub", more)])
        self._steps = 0
        self._told_at = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.halted:
            return []
        match event:
            case Started():
                self._told_at = now
                return self.portion.compute()
            case GradientReady():
                self._steps += 1
                compute = self.portion.compute()
                tell = self._tell(now) if self.portion.idle or now - self._told_at >= TELL_SECONDS else []
                return [self._step, *tell, *compute]
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case Received(message=Halt()):
                self.halted = True
                return self._tell(now)
        return []

    def _tell(self, now: float) -> list[Effect]:
        tally = Tally(self._steps, self.halted)
        self._steps, self._told_at = 0, now
        return [Send("hub", tally)]

    def check(self) -> None:
        if self.halted and self._steps:
            raise InvariantBroken(f"{self.seat.node.name} has halted and not told of {self._steps} steps")


class InlineHub:
    """Counts, and ends the run."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.pace = Pace(seat)
        self.running: set[str] = set()
        #: why the run is ending
        self.ending = ""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.pace.over:
            return []
        match event:
            case Started(members=members):
                self.running = {worker for worker in self.seat.workers if worker in members}
                self.pace.begin(members)
            case Received(sender=worker, message=More() | Returned() as message):
                return [] if self.ending else self.pace.deal(worker, message)
            case PeerJoined(peer=peer, role="worker"):
                self.running.add(peer)
                self.pace.join(peer)
                return [Send(peer, Halt())] if self.ending else []
            case PeerLost(peer=peer):
                return [*self.pace.lose(peer), *self._without(peer)]
            case Received(sender=sender, message=Tally() as tally):
                return self._count(sender, tally, now)
            case StopRequested(reason=reason) if not self.ending:
                return self._halt(reason)
            case TimerFired(name="halt"):
                return self.pace.finish(self.ending)
        return []

    def _count(self, sender: str, tally: Tally, now: float) -> list[Effect]:
        workers = max(1, len(self.running))
        row: dict[str, Any] = {"learner": sender, "steps": tally.steps, "workers": workers}
        effects: list[Effect] = [Record(row)] if tally.steps else []
        self.pace.ledger.count(sender, tally.steps)
        self.pace.tally(tally.steps, workers)
        if self.pace.complete and not self.ending:
            effects += self._halt(self.pace.reason())
        elif not self.ending:
            effects += self.pace.advance(0, workers, now)
        return effects + (self._without(sender) if tally.last else [])

    def _halt(self, reason: str) -> list[Effect]:
        self.ending = reason
        if not self.running:
            return self.pace.finish(reason)
        return [*(Send(worker, Halt()) for worker in sorted(self.running)), SetTimer("halt", HALT_SECONDS)]

    def _without(self, peer: str) -> list[Effect]:
        self.running.discard(peer)
        if self.ending and not self.running:
            return [CancelTimer("halt"), *self.pace.finish(self.ending)]
        return []

    def check(self) -> None:
        self.pace.ledger.check()
        if self.pace.over and not self.ending:
            raise InvariantBroken("the run is over without a reason")
