"""Several hubs, each with a part of the vector: option `hubs`.

The link of a single hub carries every gradient and all weights of every worker. With K hubs each holds 1/K of the
parameters, like the servers of MXNet, the baseline of the MPCA SGD paper (section 6.3). A worker sends each hub its
part of a gradient, waits for the answers of all, and computes at the weights that they form together. The first hub
also holds the buffers. It counts for the run. Whatever needs the whole model, an evaluation, a checkpoint or the end,
waits there until the other hubs have sent their parts.

async: each hub steps with every push at once and has its own clock. The parts of one gradient may therefore differ in
staleness, and each part has the rate of its own staleness.

hard: the first hub decides which gradients form an update and at which rate. Another hub makes that update when it has
its parts of all of them, except those of workers that have died. So all hubs step with the same gradients, except for
what a dying worker sent to only some of them, and lambda workers still equal one with mini-batches of lambda*mu. A
worker that joins gets its first weights from the first hub, which waits for it from then on. The other hubs send it
theirs when they have reached the same clock. While the whole model is gathered, the first hub holds its answers back,
so that all parts are of the same update.

A hub that dies takes its part of the model along, so the run ends as it does when the only hub dies.

Invariants: no hub but the first makes an update that the first has not announced; a worker computes only with the parts
of all hubs, in hardsync of one clock; a gathered model has all parts.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from tether.core.effects import Checkpoint, Effect, Evaluate, Fail, Finish, Install, Record, Send, Step
from tether.core.events import Event, GradientReady, PeerJoined, PeerLost, Received, Started
from tether.core.machine import NodeContext
from tether.core.snapshot import StateSnapshot, snapshot, tensor
from tether.core.vector import shards
from tether.errors import InvariantBroken
from tether.protocols.ledger import Lease, Recall
from tether.protocols.server.messages import Current, GetPart, Mark, Part, Pull, Push, Refused, Round, Weights
from tether.protocols.server.pushes import GradientSum, make_portion, refusal
from tether.protocols.server.rates import RateRule

#: effects that need the whole model
_NEEDS_WHOLE_MODEL = (Evaluate, Checkpoint, Finish)


def hub_parts(context: NodeContext) -> dict[str, slice]:
    """The parameters that each hub holds, by its name and in the order of the parts."""
    names = [node.name for node in context.nodes if node.role == "hub"]
    return dict(zip(names, shards(context.parameter_count, len(names)), strict=True))


class MultiHubWorker:
    """Pushes every hub its part of each gradient."""

    def __init__(self, context: NodeContext, hard: bool) -> None:
        self.context = context
        self.hard = hard
        self.steps = 0
        self.computing = False
        self.portion = make_portion(context, hard)
        #: the clock of each part that is here, and the hubs that have not answered yet
        self.clocks: dict[str, int] = {}
        self.awaited: set[str] = set()
        self._parts = hub_parts(context)
        self._first, *self._others = self._parts

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return self._pull(self._first, -1)
            case Received(sender=sender, message=Weights() as weights):
                return [*self._install(sender, weights), *self._compute_after(sender)]
            case Received(sender=sender, message=Current()):
                return self._compute_after(sender)
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
        return [Send(hub, Pull(have, len(self.context.weights)))]

    def _install(self, hub: str, weights: Weights) -> list[Effect]:
        """Install a part. The first hub's first weights tell which clock to ask the others for."""
        first_weights = not self.clocks
        self.clocks[hub] = weights.clock
        effects: list[Effect] = [Install(tensor(weights.values), start=self._parts[hub].start)]
        if weights.buffers is not None and len(tensor(weights.buffers)):
            effects.append(Install(tensor(weights.buffers), start=self.context.parameter_count))
        if first_weights:
            for other in self._others:
                effects += self._pull(other, weights.clock - 1 if self.hard else -1)
        return effects

    def _push(self, gradient: Tensor, samples: int) -> list[Effect]:
        self.steps += 1
        self.awaited = set(self._parts)
        pushes: list[Effect] = []
        for hub, part in self._parts.items():
            mark = Mark(self.context.node.name, self.steps, self.clocks[hub], (self.portion.batch,))
            buffers = snapshot(self.context.parameter_count) if hub == self._first else gradient[:0]
            pushes.append(Send(hub, Push((mark,), gradient[part], buffers, samples, self.clocks[hub])))
        return pushes

    def _compute_after(self, hub: str) -> list[Effect]:
        """This hub has answered; compute if all have."""
        self.awaited.discard(hub)
        if self.awaited:
            return []
        self.computing = True
        return self.portion.compute("dense")

    def check(self) -> None:
        if not self.computing:
            return
        if self.awaited or self.clocks.keys() != self._parts.keys():
            raise InvariantBroken(f"computes with the parts of {sorted(self.clocks)}, awaiting {sorted(self.awaited)}")
        if self.hard and len(set(self.clocks.values())) > 1:
            raise InvariantBroken(f"computes with parts of different clocks: {self.clocks}")


class PartHub:
    """Any hub but the first: steps its part with what is pushed, and answers with it."""

    def __init__(self, context: NodeContext, hard: bool, rates: RateRule) -> None:
        self.context = context
        self.hard = hard
        #: a resumed run begins with the clock of the first hub
        self.clock = int(context.restored["clock"]) if context.restored else 0
        self.present: set[str] = set()
        #: hardsync: what was pushed and is in no update yet
        self.pushes: dict[str, Push] = {}
        #: the workers that want weights newer than this clock
        self.waiting: dict[str, int] = {}
        #: the position of the run, as far as this hub has stepped
        self.position = sum(stop - start for start, stop in context.schedule.counted)
        #: from the first hub, still to be carried out in this order
        self._instructions: list[Round | GetPart] = []
        self._lost: set[str] = set()
        self._rates = rates
        parts = hub_parts(context)
        self._first = next(iter(parts))
        self._part = parts[context.node.name]

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started(members=members):
                self.present = set(members) & set(self.context.workers)
            case PeerJoined(peer=peer, role="worker"):
                self.present.add(peer)
            case PeerLost(peer=peer):
                self.present.discard(peer)
                self.waiting.pop(peer, None)
                self._lost.add(peer)
                return self._carry_out_instructions()
            case Received(sender=sender, message=Pull(have=have, length=length)):
                if length != len(self.context.weights):
                    return [refusal(sender, length, len(self.context.weights))]
                self.waiting[sender] = have
                return self._answer_waiting()
            case Received(sender=sender, message=Push() as push):
                return self._receive_push(sender, push)
            case Received(message=(Round() | GetPart()) as instruction):
                self._instructions.append(instruction)
                return self._carry_out_instructions()
        return []

    def _receive_push(self, sender: str, push: Push) -> list[Effect]:
        (mark,) = push.marks
        if mark.clock > self.clock:
            raise InvariantBroken(f"{mark} was pushed at clock {self.clock}")
        if self.hard and mark.clock < self.clock:
            return []  # the first hub knew that this worker is dead, and made the update without it
        if self.hard:
            self.pushes[sender] = push
            return self._carry_out_instructions()
        staleness = self.clock - mark.clock
        rate, momentum_staleness = self._rates.for_update(max(1, len(self.present)), staleness)
        self.clock += 1
        self.waiting[sender] = mark.clock
        step = Step(push.gradient, rate, position=self.position, staleness=momentum_staleness)
        self.position += len(mark.batches)
        return [step, Record({}, (staleness,)), *self._answer_waiting()]

    def _carry_out_instructions(self) -> list[Effect]:
        """Do what the first hub has said, up to an update for which pushes are missing."""
        effects: list[Effect] = []
        while self._instructions:
            match self._instructions[0]:
                case GetPart(state=state):
                    values = snapshot(self._part.start, self._part.stop)
                    part = Part(values, StateSnapshot() if state else None)
                    effects.append(Send(self._first, part))
                case Round(marks=marks, rate=rate):
                    workers = [mark.worker for mark in marks]
                    if any(worker not in self.pushes and worker not in self._lost for worker in workers):
                        break
                    effects += self._update([self.pushes[name] for name in workers if name in self.pushes], rate)
                    self.position += sum(len(mark.batches) for mark in marks)
            del self._instructions[0]
        return effects

    def _update(self, pushes: list[Push], rate: float) -> list[Effect]:
        collected = GradientSum()
        for push in pushes:
            collected.add(push)
        effects: list[Effect] = []
        if pushes:
            gradient, _ = collected.means()
            effects += [Step(gradient, rate, position=self.position), Record({}, (0,) * len(pushes))]
        self.waiting |= {worker: self.clock for worker in self.pushes if worker not in self._lost}
        self.pushes = {}
        self.clock += 1
        return effects + self._answer_waiting()

    def _answer_waiting(self) -> list[Effect]:
        """Send this hub's part to the workers that wait for newer weights, if it is newer than theirs."""
        answered = sorted(name for name, have in self.waiting.items() if have < self.clock)
        for name in answered:
            del self.waiting[name]
        part = self._part
        return [Send(name, Weights(self.clock, snapshot(part.start, part.stop), push=True)) for name in answered]

    def check(self) -> None:
        if any(mark.clock != self.clock for push in self.pushes.values() for mark in push.marks):
            raise InvariantBroken(f"an update of clock {self.clock} would take {list(self.pushes)} of another")


class PartGatherer:
    """At the first hub: holds back the effects that need the whole model until the other hubs have sent their parts."""

    def __init__(self, context: NodeContext, hard: bool) -> None:
        self._parts = dict(list(hub_parts(context).items())[1:])
        self._hard = hard
        #: effects for which the other hubs are still to be asked
        self._next: list[Effect] = []
        #: effects for which they were asked, and the parts that have come
        self._held: list[Effect] = []
        self._received: dict[str, Part] = {}

    @property
    def others(self) -> list[str]:
        """The names of all hubs but the first."""
        return list(self._parts)

    def defer(self, effects: list[Effect]) -> list[Effect]:
        """The effects that can be performed now, and the requests for the parts that the others need."""
        if not self._parts or not any(isinstance(effect, _NEEDS_WHOLE_MODEL) for effect in effects):
            return effects
        waits = [isinstance(effect, _NEEDS_WHOLE_MODEL) for effect in effects]
        if self._hard:  # answers wait too, so that no part proceeds to another update
            first = waits.index(True)
            waits = [place >= first for place in range(len(effects))]
        self._next += [effect for effect, wait in zip(effects, waits, strict=True) if wait]
        return [*(effect for effect, wait in zip(effects, waits, strict=True) if not wait), *self._request_parts()]

    def _request_parts(self) -> list[Effect]:
        if self._held or not self._next:
            return []
        self._held, self._next, self._received = self._next, [], {}
        state = any(isinstance(effect, Checkpoint) for effect in self._held)
        return [Send(hub, GetPart(state)) for hub in self._parts]

    def receive(self, sender: str, part: Part) -> list[Effect]:
        """Take in a part. With the last one, install all of them and release what was held back."""
        self._received[sender] = part
        if len(self._received) < len(self._parts):
            return []
        received = [self._received[hub] for hub in self._parts]
        installs = [
            Install(tensor(part.values), start=place.start)
            for part, place in zip(received, self._parts.values(), strict=True)
        ]
        states = tuple(part.state for part in received if part.state is not None)
        released = [
            msgspec.structs.replace(effect, parts=states) if isinstance(effect, Checkpoint) else effect
            for effect in self._held
        ]
        self._held = []
        return [*installs, *released, *self._request_parts()]
