"""A server of several hubs, each with a part of the vector: `hubs` of protocol server.

One hub's link carries every gradient and all weights of every learner. With K hubs each has 1/K of the parameters, as
the servers of MXNet, the baseline of the MPCA SGD paper (section 6.3). A learner sends each hub its part of a gradient,
waits for the answers of all, and computes at what they make together. The first hub has the buffers too. It counts, and
what needs the whole model, an evaluation, a checkpoint or the end, waits there until the others have told their parts.

async: each hub steps with every push at once and has a clock of its own, so the parts of a gradient may be of different
staleness, and the rate of each part goes by its own.

hard: the first hub says which gradients make an update and at which rate. Another hub makes it when it has its parts of
all of them, but for those of learners that have died. So all hubs step with the same gradients, but for what a dying
learner told only some of them, and lambda learners are still one with mini-batches of lambda*mu. A learner that comes
has its first weights of the first hub, which then waits for it, and those of the others when they are of the same
clock. While the whole model is gathered the first hub holds its answers back: all parts are then of one update.

A hub that dies takes its part of the model along, so the run ends as it does with the only one.

Invariants: no hub but the first is ahead of what it was told; a learner computes only with parts of all hubs, in
hardsync of one clock; a gathered model has all parts.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from torch import Tensor

from tether.errors import InvariantBroken
from tether.machine import (
    Checkpoint,
    Effect,
    Evaluate,
    Event,
    Fail,
    Finish,
    GradientReady,
    Install,
    Message,
    Node,
    PeerJoined,
    PeerLost,
    Received,
    Record,
    ReplicaState,
    Seat,
    Send,
    Started,
    Step,
    replica_state,
    snapshot,
)
from tether.protocols.ledger import Lease, Recall
from tether.protocols.pushes import Current, Mark, Pull, Push, Refused, Sum, Weights, portion, refuse
from tether.vector import shards

#: what needs the whole model
_WHOLE = (Evaluate, Checkpoint, Finish)


class Round(Message, frozen=True):
    """First hub to the others, hardsync: the update of this clock has these gradients, and that rate."""

    clock: int
    marks: tuple[Mark, ...]
    rate: float


class Give(Message, frozen=True):
    """First hub to the others: tell your part, as it is after what you were told before; `state` if to be saved."""

    state: bool


class Part(Message, frozen=True):
    """The answer to that."""

    values: Tensor
    state: ReplicaState | None


def hub_names(nodes: tuple[Node, ...]) -> tuple[str, ...]:
    """The hubs in the order of their parts."""
    return tuple(node.name for node in nodes if node.role == "hub")


def parts(seat: Seat) -> dict[str, slice]:
    """Which of the parameters each hub has."""
    names = hub_names(seat.nodes)
    return dict(zip(names, shards(seat.parameter_count, len(names)), strict=True))


class PartedLearner:
    """Pushes every hub its part of each gradient."""

    def __init__(self, seat: Seat, hard: bool) -> None:
        self.seat = seat
        self.hard = hard
        self.steps = 0
        self.computing = False
        self.portion = portion(seat, hard)
        #: the clock of each part that is here, and whose answers are still to come
        self.clocks: dict[str, int] = {}
        self.awaited: set[str] = set()
        self._parts = parts(seat)
        self._first, *self._others = self._parts

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return self._pull(self._first, -1)
            case Received(sender=sender, message=Weights(clock=clock, values=values, buffers=buffers)):
                begins = not self.clocks
                self.clocks[sender] = clock
                effects: list[Effect] = [Install(values, start=self._parts[sender].start)]
                if buffers is not None and len(buffers):
                    effects.append(Install(buffers, start=self.seat.parameter_count))
                if begins:
                    for other in self._others:
                        effects += self._pull(other, clock - 1 if self.hard else -1)
                return [*effects, *self._answered(sender)]
            case Received(sender=sender, message=Current()):
                return self._answered(sender)
            case GradientReady(gradient=gradient, samples=samples):
                self.computing = False
                return self._push(gradient, samples)
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send(self._first, self.portion.give())]
            case Received(message=Refused(reason=reason)):
                return [Fail(reason)]
        return []

    def _pull(self, hub: str, have: int) -> list[Effect]:
        self.awaited.add(hub)
        return [Send(hub, Pull(have, len(self.seat.weights)))]

    def _push(self, gradient: Tensor, samples: int) -> list[Effect]:
        self.steps += 1
        self.awaited = set(self._parts)
        pushes: list[Effect] = []
        for hub, part in self._parts.items():
            mark = Mark(self.seat.node.name, self.steps, self.clocks[hub], (self.portion.batch,))
            buffers = snapshot(self.seat.parameter_count) if hub == self._first else gradient[:0]
            pushes.append(Send(hub, Push((mark,), gradient[part], buffers, samples, self.clocks[hub])))
        return pushes

    def _answered(self, hub: str) -> list[Effect]:
        self.awaited.discard(hub)
        if self.awaited:
            return []
        self.computing = True
        return self.portion.compute("flat")

    def check(self) -> None:
        if not self.computing:
            return
        if self.awaited or self.clocks.keys() != self._parts.keys():
            raise InvariantBroken(f"computes with the parts of {sorted(self.clocks)}, awaiting {sorted(self.awaited)}")
        if self.hard and len(set(self.clocks.values())) > 1:
            raise InvariantBroken(f"computes with parts of different clocks: {self.clocks}")


class PartHub:
    """Any hub but the first: steps with its part of what is pushed, and gives it out."""

    def __init__(self, seat: Seat, hard: bool, step: Callable[[int, float], tuple[float, float]]) -> None:
        """`step`: what scales the rate, and what lessens momentum, for so many learners and such a staleness."""
        self.seat = seat
        self.hard = hard
        #: a resumed run begins with that of the first hub
        self.clock = int(seat.restored["clock"]) if seat.restored else 0
        self.present: set[str] = set()
        #: hardsync: what was pushed and is in no update yet
        self.pushes: dict[str, Push] = {}
        #: who asks for weights that are newer than what they have
        self.waiting: dict[str, int] = {}
        #: how far the run is, by what has been stepped with here
        self.position = sum(stop - start for start, stop in seat.schedule.counted)
        self._told: list[Round | Give] = []
        self._lost: set[str] = set()
        self._step = step
        self._first = hub_names(seat.nodes)[0]
        self._part = parts(seat)[seat.node.name]

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started(members=members):
                self.present = set(members) & set(self.seat.workers)
            case PeerJoined(peer=peer, role="worker"):
                self.present.add(peer)
            case PeerLost(peer=peer):
                self.present.discard(peer)
                self.waiting.pop(peer, None)
                self._lost.add(peer)
                return self._obey()
            case Received(sender=sender, message=Pull(have=have, length=length)):
                if length != len(self.seat.weights):
                    return [refuse(sender, length, len(self.seat.weights))]
                self.waiting[sender] = have
                return self._answer()
            case Received(sender=sender, message=Push() as push):
                return self._take(sender, push)
            case Received(message=(Round() | Give()) as told):
                self._told.append(told)
                return self._obey()
        return []

    def _take(self, sender: str, push: Push) -> list[Effect]:
        (mark,) = push.marks
        if mark.clock > self.clock:
            raise InvariantBroken(f"{mark} was pushed at clock {self.clock}")
        if self.hard and mark.clock < self.clock:
            return []  # the first hub knew that its learner is dead, and made the update without it
        if self.hard:
            self.pushes[sender] = push
            return self._obey()
        staleness = self.clock - mark.clock
        rate, lessened_by = self._step(max(1, len(self.present)), staleness)
        self.clock += 1
        self.waiting[sender] = mark.clock
        step = Step(push.gradient, rate, position=self.position, staleness=lessened_by)
        self.position += len(mark.batches)
        return [step, Record({}, (staleness,)), *self._answer()]

    def _obey(self) -> list[Effect]:
        """Do what the first hub has told, in its order, as far as what it takes is there."""
        effects: list[Effect] = []
        while self._told:
            match self._told[0]:
                case Give(state=state):
                    values = snapshot(self._part.start, self._part.stop)
                    part = Part(values, replica_state() if state else None)
                    effects.append(Send(self._first, part))
                case Round(marks=marks, rate=rate):
                    learners = [mark.learner for mark in marks]
                    if any(learner not in self.pushes and learner not in self._lost for learner in learners):
                        break
                    effects += self._update([self.pushes[name] for name in learners if name in self.pushes], rate)
                    self.position += sum(len(mark.batches) for mark in marks)
            del self._told[0]
        return effects

    def _update(self, pushes: list[Push], rate: float) -> list[Effect]:
        collected = Sum()
        for push in pushes:
            collected.add(push)
        effects: list[Effect] = []
        if pushes:
            gradient, _ = collected.means()
            effects += [Step(gradient, rate, position=self.position), Record({}, (0,) * len(pushes))]
        self.waiting |= {learner: self.clock for learner in self.pushes if learner not in self._lost}
        self.pushes = {}
        self.clock += 1
        return effects + self._answer()

    def _answer(self) -> list[Effect]:
        asking = sorted(name for name, have in self.waiting.items() if have < self.clock)
        for name in asking:
            del self.waiting[name]
        part = self._part
        return [Send(name, Weights(self.clock, snapshot(part.start, part.stop), push=True)) for name in asking]

    def check(self) -> None:
        if any(mark.clock != self.clock for push in self.pushes.values() for mark in push.marks):
            raise InvariantBroken(f"an update of clock {self.clock} would take {list(self.pushes)} of another")


class Gathering:
    """At the first hub: what needs the whole model waits until the others have told their parts."""

    def __init__(self, seat: Seat, hard: bool) -> None:
        self._parts = dict(list(parts(seat).items())[1:])
        self._hard = hard
        self._due: list[Effect] = []
        self._asked: list[Effect] = []
        self._told: dict[str, Part] = {}

    @property
    def others(self) -> list[str]:
        return list(self._parts)

    def defer(self, effects: list[Effect]) -> list[Effect]:
        """What can be done now; the others are asked for what the rest needs."""
        if not self._parts or not any(isinstance(effect, _WHOLE) for effect in effects):
            return effects
        whole = [isinstance(effect, _WHOLE) for effect in effects]
        if self._hard:  # answers wait too, so that no part goes on to another update
            first = whole.index(True)
            whole = [place >= first for place in range(len(effects))]
        self._due += [effect for effect, waits in zip(effects, whole, strict=True) if waits]
        return [*(effect for effect, waits in zip(effects, whole, strict=True) if not waits), *self._ask()]

    def _ask(self) -> list[Effect]:
        if self._asked or not self._due:
            return []
        self._asked, self._due, self._told = self._due, [], {}
        state = any(isinstance(effect, Checkpoint) for effect in self._asked)
        return [Send(hub, Give(state)) for hub in self._parts]

    def take(self, sender: str, part: Part) -> list[Effect]:
        """A part has come. With the last one, what has waited is done."""
        self._told[sender] = part
        if len(self._told) < len(self._parts):
            return []
        told = [self._told[hub] for hub in self._parts]
        installs = [
            Install(part.values, start=place.start) for part, place in zip(told, self._parts.values(), strict=True)
        ]
        states = tuple(part.state for part in told if part.state is not None)
        done = [
            msgspec.structs.replace(effect, parts=states) if isinstance(effect, Checkpoint) else effect
            for effect in self._asked
        ]
        self._asked = []
        return [*installs, *done, *self._ask()]
