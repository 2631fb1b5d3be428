"""Workers that step by themselves, on one vector that all share: option `apply="inline"`.

Where workers share a machine, the weights need not travel at all. Every worker computes gradients at the shared vector
as it is at that moment, and steps on it in place, without a lock (Hogwild): if two steps write the same element at the
same time, one of them may be lost there. Each worker has its own optimizer, with its own momentum. The hub computes
nothing. It counts the steps that the workers report every now and then, and has the vector evaluated and saved.

The end: when enough steps are reported, the hub tells the workers to halt. It finishes when each has sent its last
tally or died, so that nothing changes the final model any more. A worker that stands still is waited for no longer than
`HALT_SECONDS`.

A worker that dies leaves all its steps in the vector, and at most half of one more. A worker that joins finds the
weights in place.

Invariants: no worker steps after it has halted; the hub counts no step of a worker that has sent its last tally.
"""

from __future__ import annotations

from typing import Any

from tether.core.effects import CancelTimer, Effect, Record, Send, SetTimer, Step
from tether.core.events import Event, GradientReady, PeerJoined, PeerLost, Received, Started, StopRequested, TimerFired
from tether.core.machine import NodeContext
from tether.core.message import Timer
from tether.errors import InvariantBroken
from tether.protocols.base import RunProgress
from tether.protocols.ledger import Lease, More, Recall, Returned
from tether.protocols.server.messages import Halt, Tally
from tether.protocols.server.pushes import make_portion

#: how often a worker reports its steps
TALLY_SECONDS = 0.05
#: how long the hub waits for the last tallies
HALT_SECONDS = 5.0
HALT_TIMER = Timer("halt")


class InlineWorker:
    """Steps on the shared vector."""

    def __init__(self, context: NodeContext, step: Step) -> None:
        self.context = context
        self._step = step
        self.halted = False
        self.portion = make_portion(context)
        self._steps_since_tally = 0
        self._tallied_at = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.halted:
            return []
        match event:
            case Started():
                self._tallied_at = now
                return self.portion.compute()
            case GradientReady():
                self._steps_since_tally += 1
                compute = self.portion.compute()
                due = self.portion.idle or now - self._tallied_at >= TALLY_SECONDS
                return [self._step, *(self._send_tally(now) if due else []), *compute]
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case Received(message=Halt()):
                self.halted = True
                return self._send_tally(now)
        return []

    def _send_tally(self, now: float) -> list[Effect]:
        tally = Tally(self._steps_since_tally, self.halted)
        self._steps_since_tally, self._tallied_at = 0, now
        return [Send("hub", tally)]

    def check(self) -> None:
        if self.halted and self._steps_since_tally:
            raise InvariantBroken(
                f"{self.context.node.name} has halted without reporting its last {self._steps_since_tally} steps"
            )


class InlineHub:
    """Counts the workers' steps, and ends the run."""

    def __init__(self, context: NodeContext) -> None:
        self.context = context
        self.progress = RunProgress(context)
        self.running: set[str] = set()
        #: why the run is ending; empty while it is not
        self.ending = ""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.progress.over:
            return []
        match event:
            case Started(members=members):
                self.running = {worker for worker in self.context.workers if worker in members}
                self.progress.begin(members)
            case Received(sender=worker, message=More() | Returned() as message):
                return [] if self.ending else self.progress.deal(worker, message)
            case PeerJoined(peer=peer, role="worker"):
                self.running.add(peer)
                self.progress.join(peer)
                return [Send(peer, Halt())] if self.ending else []
            case PeerLost(peer=peer):
                return [*self.progress.lose(peer), *self._remove_running(peer)]
            case Received(sender=sender, message=Tally() as tally):
                return self._count(sender, tally, now)
            case StopRequested(reason=reason) if not self.ending:
                return self._halt_workers(reason)
            case TimerFired(timer=timer) if timer == HALT_TIMER:
                return self.progress.finish(self.ending)
        return []

    def _count(self, sender: str, tally: Tally, now: float) -> list[Effect]:
        workers = max(1, len(self.running))
        row: dict[str, Any] = {"worker": sender, "steps": tally.steps, "workers": workers}
        effects: list[Effect] = [Record(row)] if tally.steps else []
        self.progress.ledger.count(sender, tally.steps)
        self.progress.tally(tally.steps, workers)
        if self.progress.complete and not self.ending:
            effects += self._halt_workers(self.progress.reason())
        elif not self.ending:
            effects += self.progress.advance(0, workers, now)
        return effects + (self._remove_running(sender) if tally.last else [])

    def _halt_workers(self, reason: str) -> list[Effect]:
        self.ending = reason
        if not self.running:
            return self.progress.finish(reason)
        return [*(Send(worker, Halt()) for worker in sorted(self.running)), SetTimer(HALT_TIMER, HALT_SECONDS)]

    def _remove_running(self, worker: str) -> list[Effect]:
        """A worker has halted or died: with the last one, the run ends."""
        self.running.discard(worker)
        if self.ending and not self.running:
            return [CancelTimer(HALT_TIMER), *self.progress.finish(self.ending)]
        return []

    def check(self) -> None:
        self.progress.ledger.check()
        if self.progress.over and not self.ending:
            raise InvariantBroken("the run is over without a reason")
