"""The hub: the only one, or the first of several."""

from __future__ import annotations

import statistics
from typing import Any, Literal

from tether.core.effects import Broadcast, Effect, Install, Record, Send, Step
from tether.core.events import Event, PeerJoined, PeerLost, Received, Started, StopRequested
from tether.core.machine import NodeContext
from tether.core.message import Row, Stream
from tether.core.snapshot import snapshot
from tether.errors import InvariantBroken
from tether.protocols.base import RunProgress
from tether.protocols.ledger import More, Returned
from tether.protocols.server.messages import Current, DowncastArrived, Part, Pull, Push, Round, Weights
from tether.protocols.server.parts import PartGatherer, hub_parts
from tether.protocols.server.pushes import GradientSum, PushLog, dealing_options, refusal
from tether.protocols.server.rates import RateRule

#: a downcast waits until the last one has arrived everywhere, but no longer than this many gradients of each worker:
#: a worker that stands still must not freeze the weights of all
DOWNCAST_PATIENCE = 4


class ServerHub:
    """Collects gradients, steps with their mean, and answers with the weights."""

    def __init__(
        self,
        context: NodeContext,
        *,
        sync: Literal["hard", "soft", "async"],
        n: int,
        rates: RateRule,
        tree: bool,
        overlap: bool,
        shares: bool,
    ) -> None:
        self.context = context
        self.sync = sync
        self.hard = sync == "hard"
        self.n = n
        self.rates = rates
        self.tree = tree
        self.overlap = overlap
        self.shares = shares
        self.progress = RunProgress(context, self._state, **dealing_options(self.hard))
        self.clock = int(context.restored["clock"]) if context.restored else 0
        self.present: set[str] = set()
        self.sum = GradientSum()
        self._log = PushLog()
        #: hardsync: the senders that wait for the update, each with the clock of its weights
        self.waiting: dict[str, int | None] = {}
        #: overlap: the clock of the last downcast, the workers that it has not reached yet, and the gradients since
        self.downcast_clock = self.clock
        self.downcast_to: set[str] = set()
        self._gradients_since_downcast = 0
        self._part = hub_parts(context)["hub"]
        self._gatherer = PartGatherer(context, self.hard)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(sender=sender, message=Part() as part):
                return self._gatherer.receive(sender, part)
        return [] if self.progress.over else self._gatherer.defer(self._handle(event, now))

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started(members=members):
                self.present = set(members) & set(self.context.workers)
                self.progress.begin(members)
            case Received(sender=sender, message=Pull(have=have, length=length)):
                if length != len(self.context.weights):
                    return [refusal(sender, length, len(self.context.weights))]
                return [self._answer(sender, have, push=False)]
            case Received(sender=sender, message=Push() as push):
                return self._receive_push(sender, push, now)
            case Received(sender=sender, message=More() | Returned() as message):
                return self.progress.deal(sender, message)
            case Received(sender=sender, message=DowncastArrived(clock=clock)) if clock == self.downcast_clock:
                self.downcast_to.discard(sender)
                return self._downcast()
            case PeerJoined(peer=peer, role="worker"):
                self.present.add(peer)
                self.progress.join(peer)
            case PeerLost(peer=peer):
                self.present.discard(peer)
                self.downcast_to.discard(peer)
                self.waiting.pop(peer, None)
                # in a tree, an aggregator may still have gradients of a worker that is dead
                effects = self.progress.lose(peer, late=self.tree)
                effects += self._update_if_complete(now)
                return [*effects, *([] if self.progress.over else self._downcast())]
            case StopRequested(reason=reason):
                effects = self._update(now) if self.sum.marks else []  # what was pushed counts
                return effects if self.progress.over else [*effects, *self.progress.finish(reason)]
        return []

    def _receive_push(self, sender: str, push: Push, now: float) -> list[Effect]:
        if not self._log.add_if_new(push.marks):  # it came another way before
            if self.hard and set(push.marks) & set(self.sum.marks):
                self.waiting[sender] = push.have
                return []
            return [self._answer(sender, push.have, push=True)]
        if self.hard and not self.present & {mark.worker for mark in push.marks} and push.marks[0].clock < self.clock:
            # an aggregator passes on what a dead worker left behind, and the round has gone on without it
            return [self._answer(sender, push.have, push=True)]
        self._collect(push)
        if self.hard:
            self.waiting[sender] = push.have
        # what is collected counts already, and perhaps only what dead workers had is left to deal
        effects = self._update_if_complete(now) or self.progress.deal_late()
        self.sum.copy_borrowed()
        return effects if self.hard or self.progress.over else [*effects, self._answer(sender, push.have, push=True)]

    def _collect(self, push: Push) -> None:
        """Add a push to the next update."""
        for mark in push.marks:
            if mark.clock > self.clock or (self.hard and mark.clock != self.clock):
                raise InvariantBroken(f"{mark} was pushed at clock {self.clock}{' of hardsync' if self.hard else ''}")
        for mark in push.marks:
            self.progress.ledger.count_batches(mark.worker, mark.batches)
        self.sum.add(push, self.rates.for_push(self.clock - mark.clock for mark in push.marks))
        self._gradients_since_downcast += len(push.marks)
        if self._gradients_since_downcast >= DOWNCAST_PATIENCE * len(self.present):
            self.downcast_to.clear()

    def _update_if_complete(self, now: float) -> list[Effect]:
        return self._update(now) if self._update_is_complete() else []

    def _update_is_complete(self) -> bool:
        if not self.sum.marks:
            return False
        match self.sync:
            case "hard":
                return self.present <= self.sum.workers
            case "soft":
                return len(self.sum.marks) >= max(1, len(self.present) // self.n) or self.progress.complete
        return True

    def _update(self, now: float) -> list[Effect]:
        """Step with what is collected, and send the new weights to those that wait for them."""
        collected, self.sum = self.sum, GradientSum()
        effects = [*self._step(collected), *self._advance(collected, now)]
        if self.progress.over:
            return effects
        effects += self._downcast()
        effects += [self._answer(sender, have, push=True) for sender, have in sorted(self.waiting.items())]
        self.waiting = {}
        return effects

    def _step(self, collected: GradientSum) -> list[Effect]:
        position = self.progress.position - collected.batch_count
        clocks = [mark.clock for mark in collected.marks]
        staleness = tuple(self.clock - clock for clock in clocks)
        average = statistics.fmean(staleness)
        rate, momentum_staleness = self.rates.for_update(max(1, len(self.present)), average)
        gradient, buffers = collected.means()
        effects: list[Effect] = [Step(gradient, rate, collected.touched, position, momentum_staleness)]
        if len(buffers):
            effects.append(Install(buffers, start=self.context.parameter_count))
        self.clock += 1
        row: Row = {"clock": self.clock, "clocks": clocks, "staleness": average}
        effects.append(Record(row, staleness))
        if self.hard:
            message = Round(self.clock - 1, tuple(collected.marks), rate)
            effects += [Send(hub, message) for hub in self._gatherer.others]
        return effects

    def _advance(self, collected: GradientSum, now: float) -> list[Effect]:
        """In hardsync a step of the run is an update; otherwise it is one gradient for each worker present."""
        if self.hard:
            return self.progress.advance(len(collected.marks), len(collected.marks), now)
        return self.progress.advance(collected.batch_count, max(1, len(self.present)), now)

    def _answer(self, sender: str, have: int | None, push: bool) -> Effect:
        if self.shares:
            return Send(sender, Current(push, self.clock))
        if have is None or have >= self.clock:
            return Send(sender, Current(push))
        if not self._gatherer.others:
            return Send(sender, Weights(self.clock, snapshot(), push))
        buffers = snapshot(self.context.parameter_count)
        return Send(sender, Weights(self.clock, snapshot(0, self._part.stop), push, buffers))

    def _downcast(self) -> list[Effect]:
        """With overlap, broadcast the weights if they are new and all workers have the last ones."""
        if not self.overlap or self.downcast_to or self.downcast_clock == self.clock or not self.present:
            return []
        self.downcast_clock, self.downcast_to, self._gradients_since_downcast = self.clock, set(self.present), 0
        return [Broadcast(Stream("weights"), ("hub", *sorted(self.present)), Weights(self.clock, snapshot()))]

    def _state(self) -> dict[str, Any]:
        return {"clock": self.clock}

    def check(self) -> None:
        self.progress.ledger.check()
        numbered = [(mark.worker, mark.number) for mark in self.sum.marks]
        if len(set(numbered)) != len(numbered):
            raise InvariantBroken(f"a gradient is counted twice: {self.sum.marks}")
        if self.hard and any(mark.clock != self.clock for mark in self.sum.marks):
            raise InvariantBroken(f"a hardsync round of clock {self.clock} holds {self.sum.marks}")
