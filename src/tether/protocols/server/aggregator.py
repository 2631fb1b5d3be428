"""Aggregators, the inner nodes of a tree."""

from __future__ import annotations

from torch import Tensor

from tether.core.effects import Effect, Fail, Send
from tether.core.events import Event, PeerJoined, PeerLost, Received, Started
from tether.core.machine import NodeContext
from tether.core.snapshot import tensor
from tether.errors import InvariantBroken
from tether.protocols.server.messages import Current, Pull, Push, Refused, Weights
from tether.protocols.server.pushes import GradientSum, PushLog, Requester, refusal


class Aggregator(Requester):
    """Averages the pushes of the nodes below it and passes them on as one; pulls once for all of them."""

    def __init__(self, context: NodeContext, *, hard: bool, overlap: bool) -> None:
        super().__init__(context)
        self.hard = hard
        self.overlap = overlap
        self.sum = GradientSum()
        self._values: Tensor | None = None
        self._log = PushLog()
        #: the nodes below that wait for an answer, each with the clock of its weights: those whose push is in the sum,
        #: or in the push under way; those whose pull is to be passed on, or is in the pull under way
        self.in_sum: dict[str, int | None] = {}
        self.in_push: dict[str, int | None] = {}
        self.in_next_pull: dict[str, int | None] = {}
        self.in_pull: dict[str, int | None] = {}
        children: dict[str, set[str]] = {}
        for node in context.nodes:
            children.setdefault(node.parent, set()).add(node.name)
        self._workers_below = _descendants(context.node.name, children) & set(context.workers)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started(members=members):
                return self._start(members)
            case Received(sender=sender, message=Pull(have=have, length=length)):
                if length != len(self.context.weights):
                    return [refusal(sender, length, len(self.context.weights))]
                self.in_next_pull[sender] = have
                return [] if self.pull_under_way else self._pass_pulls_on()
            case Received(sender=sender, message=Push() as push):
                return self._receive_push(sender, push)
            case Received(message=Weights(clock=clock, values=values, push=push)):
                if clock > self.clock:
                    self.clock, self._values = clock, tensor(values)
                return self._pass_answer_on(push)
            case Received(message=Current(push=push)):
                return self._pass_answer_on(push)
            case PeerJoined(peer=peer) if peer.partition("~")[0] in self._workers_below:
                self._workers_below.add(peer)
            case PeerLost(peer=peer):
                for waiting in (self.in_sum, self.in_push, self.in_next_pull, self.in_pull):
                    waiting.pop(peer, None)
                return [*self._lose(peer), *self._pass_sum_on()]
            case Received(message=Refused(reason=reason)):
                return [Fail(reason)]
        return []

    def _receive_push(self, sender: str, push: Push) -> list[Effect]:
        if not self._log.add_if_new(push.marks):
            return self._receive_duplicate(sender, push)
        if self.hard and self.sum.marks:
            # the clocks differ only if a worker died and the round went on without the gradient it left here
            clock, sum_clock = push.marks[0].clock, self.sum.marks[0].clock
            if clock < sum_clock:
                return [self._answer(sender, push.have, push=True)]
            if clock > sum_clock:
                self.sum = GradientSum()
        self.sum.add(push)
        self.in_sum[sender] = push.have
        effects = self._pass_sum_on()
        self.sum.copy_borrowed()
        return effects

    def _receive_duplicate(self, sender: str, push: Push) -> list[Effect]:
        """The gradient came another way before. Its sender waits for the same answer."""
        if set(push.marks) & set(self.sum.marks):
            self.in_sum[sender] = push.have
        elif any(set(push.marks) & set(other.marks) for other in self.under_way):
            self.in_push[sender] = push.have
        else:
            return [self._answer(sender, push.have, push=True)]
        return []

    def _pass_sum_on(self) -> list[Effect]:
        """Push the mean upwards: in hardsync when it has all workers below, otherwise when no push is under way."""
        if not self.sum.marks:
            return []
        if self.hard:
            pushed = {mark.worker for push in self.under_way for mark in push.marks}
            if not self._workers_below - self._lost - pushed <= self.sum.workers:
                return []
        elif self.under_way:
            return []
        collected, self.sum = self.sum, GradientSum()
        self.in_push, self.in_sum = self.in_push | self.in_sum, {}
        gradient, buffers = collected.means()
        have = None if self.overlap else self.clock
        return self._send_push(Push(tuple(collected.marks), gradient, buffers, collected.samples, have))

    def _pass_pulls_on(self) -> list[Effect]:
        self.in_pull, self.in_next_pull = self.in_next_pull, {}
        return self._send_pull()

    def _pass_answer_on(self, push: bool) -> list[Effect]:
        self._mark_answered(push)
        waiting = self.in_push if push else self.in_pull
        if not push and not self.hard:
            # in hardsync the answer may be of a round that was already over when these pulls came
            waiting |= self.in_next_pull
            self.in_next_pull = {}
        effects: list[Effect] = [self._answer(child, have, push) for child, have in sorted(waiting.items())]
        waiting.clear()
        if self.in_next_pull and not self.pull_under_way:
            effects += self._pass_pulls_on()
        return effects + self._pass_sum_on()

    def _answer(self, child: str, have: int | None, push: bool) -> Effect:
        if self._values is None or have is None or have >= self.clock:
            return Send(child, Current(push))
        return Send(child, Weights(self.clock, self._values, push))

    def check(self) -> None:
        if self.hard and len({mark.clock for mark in self.sum.marks}) > 1:
            raise InvariantBroken(f"gradients of two hardsync rounds in one sum: {self.sum.marks}")


def _descendants(name: str, children: dict[str, set[str]]) -> set[str]:
    found = set(children.get(name, set()))
    for child in tuple(found):
        found |= _descendants(child, children)
    return found
