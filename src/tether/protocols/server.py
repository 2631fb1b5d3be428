"""Parameter server: Rudra's three protocols and three architectures, and Downpour.

The hub holds the weights and their clock, the number of updates so far (section 3.1). A learner takes the gradient of
one mini-batch and pushes it with the clock of the weights it was taken at; its staleness is the hub's clock less
that. The optimizer runs at the hub, on the flat vector, with the mean of the gradients collected for an update:

- hard (equation 3): one gradient of every learner present, all of the current clock. Staleness is always zero, and
  lambda learners of mini-batch mu equal one learner of mini-batch lambda*mu (equation 7) at the rate it is given here.
- soft (equation 5): any c = floor(lambda/n) gradients. The average staleness comes out as n.
- async (equation 4): every gradient at once, which is soft with n = lambda.

Learning rate: in hardsync times sqrt(lambda*mu/B), B being the batch size it was chosen for (section 3.2): the task's
own, mu, unless given. To compare with a learner of mini-batch lambda*mu and the same rate, `rate="none"`. Otherwise
it is the task's own, and momentum, where the optimizer has it, is lessened by the average staleness of the update
(equation 2), with the rate: of momentum m and s = 1 + staleness, m^s is left and the rate is divided by the root of s.
From s = 8 on all rates fall with 1/s, as the paper's do. ARCHITECTURE.md has the figures. The paper's 1/n (equation 6)
remains a choice, as do the average staleness itself and that of each gradient (footnote 3).

Architectures (section 3.3). In a star the learners talk to the hub. In a tree (Rudra-adv) they talk to an aggregator
on their own host, which sends the mean of what it has collected upwards as one push and answers when it is answered,
so all weights carry one clock. With overlap (Rudra-adv*) the hub sends its weights down a tree of learners, a new one
when all have the last; a learner computes while its push is under way, has one push under way at most, and never
merges two.

Where (GaDei): the hub steps with what is pushed, or, on one machine, each learner steps by itself on weights that all
share, and nothing is pushed (`tether.protocols.inline`).

Sharing (GaDei, section 4.1). In async on one machine all nodes have one vector, unless `consistent`. Learners take
gradients at it as it is, also while the hub steps on it, so no weights travel and a pull costs nothing. The answer to a
push tells the hub's clock; a gradient is marked with the newest that its learner knew when it began, so its staleness
is at most what is recorded. A learner goes on while a push is unanswered, or two.

Downpour: a learner pushes the sum of `push_every` gradients, pulls every `pull_every` steps and steps by itself
meanwhile.

Several hubs (`tether.protocols.parts`): each has a part of the vector, and learners talk to all of them.

Rows: where every push is stepped with by itself it has only the touched rows of embeddings (`tether.rows`).

Conversation: every Pull and Push is answered, by Weights if they are newer than what the asker has, else by Current.
In hardsync the answer to a push is the update it took part in. A sender keeps its push until the answer comes, and if
whom it pushed to dies, pushes it again to the next one above; gradients are numbered per learner, and a push with any
number that has been counted already is not counted again. So each gradient counts once, or not at all if its learner
died.

A learner that dies is no longer waited for; what it had pushed counts. One that comes pulls and counts from then on.
BatchNorm's buffers ride along and are averaged.

Invariants: no gradient is counted twice; none is of a later clock than the hub's; in hardsync all are of its clock,
and only learners present are awaited; a learner has at most one push under way, or two where weights are shared.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from tether.errors import InvariantBroken, UsageError
from tether.machine import (
    Broadcast,
    Broadcasted,
    Effect,
    Event,
    Fail,
    GradientReady,
    Install,
    Machine,
    Node,
    PeerJoined,
    PeerLost,
    Received,
    Record,
    Row,
    Seat,
    Send,
    Started,
    Step,
    StopRequested,
    Wanted,
    snapshot,
)
from tether.protocols.base import Options, Pace, option
from tether.protocols.inline import Halt, InlineHub, InlineLearner, Tally
from tether.protocols.ledger import Lease, More, Recall, Returned
from tether.protocols.parts import Gathering, Give, Part, PartedLearner, PartHub, Round, parts
from tether.protocols.pushes import (
    Current,
    Got,
    Mark,
    Pull,
    Push,
    PushLog,
    Refused,
    Sum,
    Weights,
    dealing,
    portion,
    refuse,
)

#: a downcast waits for the last one to arrive everywhere, but not for longer than so many gradients of each learner:
#: a learner that stands still must not freeze the weights of all
DOWNCAST_PATIENCE = 4
#: how many pushes of a learner that shares the hub's weights may be unanswered: it need not wait for the hub, and does
#: not run away from it
UNANSWERED_MAX = 2
#: up to so many asynchronous learners have the rate of one
STALE_LEARNERS = 8


#: what learners that share the hub's weights need of the other options
_PLAIN = {"sync": "async", "topology": "star", "overlap": False, "push_every": 1, "pull_every": 1, "hubs": 1}
#: learning rates that need nothing of what only the hub knows
_INLINE_RATES = ("auto", "none", "1/n", "staleness")


@dataclass(frozen=True)
class Server(Options):
    """The optimizer runs at a hub; learners push gradients and pull weights."""

    sync: Literal["hard", "soft", "async"] = option(
        "hard", "an update takes one gradient of every learner (hard), lambda/n of them (soft) or one (async)"
    )
    n: int = option(1, "soft: how many updates the learners' gradients are split into")
    topology: Literal["star", "tree"] = option("star", "learners talk to the hub (star) or to aggregators (tree)")
    fan_out: int = option(8, "tree: how many below each aggregator, and below the hub")
    overlap: bool = option(False, "weights are cast down a tree of learners; pushes run beside computation")
    rate: Literal["auto", "none", "sqrt", "1/n", "average", "gradient", "staleness"] = option(
        "auto",
        "learning rate times: 1 (none), sqrt(lambda*mu/B) (sqrt), 1/n (in async 1/lambda), one over an update's "
        "average staleness (average) or each gradient's own (gradient); or the task's own, but with momentum to "
        "the power of s, and then over sqrt(s), where s is 1 + the average staleness, inline lambda "
        "(staleness), and times 8/s where that is less than 1; auto: sqrt in hardsync, else staleness",
    )
    reference_batch: int | None = option(
        None,
        "sqrt: B, the batch size the learning rate was chosen for; by default mu, the task's own, so that lambda "
        "learners have sqrt(lambda) times its rate",
    )
    push_every: int = option(1, "Downpour: steps between two pushes")
    pull_every: int = option(1, "Downpour: steps between two pulls; the learner steps by itself meanwhile")
    apply: Literal["server", "inline", "auto"] = option(
        "server",
        "async, on one machine: the hub steps (server), or each learner does, on weights that all share (inline); "
        "auto: inline unless a processor is left for the hub",
    )
    hubs: int = option(
        1,
        "hard and async, star: how many hubs share the work, each with a part of the vector; raise it where one hub's "
        "link is the limit. All but the first are on hosts of learners",
    )
    consistent: bool | None = option(
        None,
        "async: nobody reads weights while they are written, since copies of them travel; if not, all on one machine "
        "have them in common; by default they do where they can",
    )

    name = "server"
    summary = "parameter server: the hub steps with the learners' gradients (Rudra, Downpour)"
    messages = (Pull, Weights, Current, Refused, Push, Got, Tally, Halt, Round, Give, Part)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "push_every", "pull_every", "hubs"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.fan_out < 2:
            raise UsageError(f"fan_out must be at least 2, not {self.fan_out}: with 1 below each, a tree never ends")
        if self.reference_batch is not None and self.reference_batch < 1:
            raise UsageError(f"reference_batch must be at least 1, not {self.reference_batch}")
        if self.n != 1 and self.sync != "soft":
            raise UsageError(f"n={self.n} is for sync='soft'; {self.sync} has none")
        if max(self.push_every, self.pull_every) > 1 and (self.sync == "hard" or self.overlap):
            raise UsageError(
                "push_every and pull_every make learners go on by themselves: use them with sync='soft' or 'async' and "
                "without overlap, which sends each gradient on its own"
            )
        if self.hubs > 1:
            self._check_hubs()
        self._check_sharing()

    def _check_hubs(self) -> None:
        if self.sync == "soft":
            raise UsageError(f"hubs={self.hubs} is for sync='hard' or 'async': hubs would split gradients differently")
        if self.rate == "gradient":
            raise UsageError(
                f"hubs={self.hubs}: use rate='average', which is the same where an update has one gradient"
            )
        if self.consistent is False:
            raise UsageError(f"hubs={self.hubs} is for weights that travel, which consistent=False does without")
        needed = {"topology": "star", "overlap": False, "push_every": 1, "pull_every": 1, "apply": "server"}
        for name, value in (needed | {"compress": "none"}).items():
            if getattr(self, name) != value:
                raise UsageError(f"hubs={self.hubs} needs {name}={value!r}, not {getattr(self, name)!r}")

    def _check_sharing(self) -> None:
        asked = f"apply={self.apply!r}" if self.apply != "server" else "consistent=False"
        if asked == "consistent=False" and self.consistent is not False:
            return
        for name, value in _PLAIN.items():
            if getattr(self, name) != value:
                raise UsageError(f"{asked} needs {name}={value!r}, not {getattr(self, name)!r}")
        if self.shares and self.compress != "none":
            raise UsageError(f"with {asked} nothing is sent that compress={self.compress!r} could make smaller")
        if self.apply == "inline" and self.rate not in _INLINE_RATES:
            raise UsageError(f"rate={self.rate!r} goes by what the hub knows of each gradient: use apply='server'")
        if self.apply == "inline" and self.consistent:
            raise UsageError("learners that step on shared weights read what others write: use apply='server'")

    @property
    def steps_at_hub(self) -> bool:
        return self.apply != "inline"

    @property
    def steps_at_workers(self) -> bool:
        return not self.steps_at_hub or self.pull_every > 1

    @property
    def shares(self) -> bool:
        return self.apply == "inline" or self.consistent is False

    def settled(self, workers: int, processors: int | None) -> Options:
        plain = self.compress == "none" and all(getattr(self, name) == value for name, value in _PLAIN.items())
        chosen = self
        if self.apply == "auto":
            crowded = processors is not None and processors <= workers
            able = plain and self.rate in _INLINE_RATES and not self.consistent
            chosen = replace(self, apply="inline" if crowded and able else "server")
        if chosen.apply == "server" and chosen.consistent is None and plain and processors is not None:
            chosen = replace(chosen, consistent=False)
        return chosen

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        combinations = [
            cls(sync=sync, topology=topology, fan_out=2, overlap=overlap)
            for sync in ("hard", "soft", "async")
            for topology in ("star", "tree")
            for overlap in (False, True)
        ]
        sharing = cls(sync="async", apply="inline"), cls(sync="async", consistent=False)
        several = cls(sync="hard", hubs=3), cls(sync="async", hubs=2)
        return *combinations, cls(sync="async", push_every=2, pull_every=3), *sharing, *several

    def nodes(self, workers: int) -> tuple[Node, ...]:
        if self.n > workers:
            raise UsageError(f"n must be within 1 and the number of learners, {workers}, not {self.n}")
        learners = [Node(f"worker-{i}", "worker", True, i, parent="hub") for i in range(workers)]
        if self.topology == "star":
            others = [Node(f"hub-{i}", "hub", index=i, host=f"worker-{i % workers}") for i in range(1, self.hubs)]
            return Node("hub", "hub"), *others, *learners
        return Node("hub", "hub"), *_tree(learners, self.fan_out)

    def machine(self, seat: Seat) -> Machine:
        if self.apply == "inline":
            return InlineHub(seat) if seat.node.role == "hub" else InlineLearner(seat, self._inline_step(seat))
        hard = self.sync == "hard"
        match seat.node.role:
            case "hub" if seat.node.index:
                return PartHub(seat, hard, partial(self.modulation, batch_size=seat.schedule.batch_size))
            case "hub":
                return ServerHub(seat, self)
            case "aggregator":
                return Aggregator(seat, self)
        if self.hubs > 1:
            return PartedLearner(seat, hard)
        return SharingLearner(seat) if self.shares else ServerLearner(seat, self)

    @property
    def rate_rule(self) -> str:
        """How the learning rate is changed, with what is left to be chosen chosen."""
        if self.rate != "auto":
            return self.rate
        return "sqrt" if self.sync == "hard" else "staleness"

    @property
    def vital(self) -> frozenset[str]:
        return frozenset({"hub", *(f"hub-{i}" for i in range(1, self.hubs))})

    def part_of(self, node: Node) -> tuple[int, int] | None:
        return (node.index, self.hubs) if self.hubs > 1 and node.role == "hub" else None

    def modulation(self, learners: int, staleness: float, *, batch_size: int) -> tuple[float, float]:
        """What an update multiplies the learning rate by, and the staleness that momentum is lessened by."""
        match self.rate_rule:
            case "sqrt":
                return math.sqrt(learners * batch_size / (self.reference_batch or batch_size)), 0.0
            case "1/n":
                return 1 / (self.n if self.sync != "async" else learners), 0.0
            case "average":
                return 1 / max(1.0, staleness), 0.0
            case "staleness":
                return min(1.0, STALE_LEARNERS / (1 + staleness)), staleness
        return 1.0, 0.0

    def _inline_step(self, seat: Seat) -> Step:
        """Nobody counts updates there; as many are made while a gradient is taken as there are other learners."""
        learners = len(seat.workers)
        rate, staleness = self.modulation(learners, learners - 1, batch_size=seat.schedule.batch_size)
        return Step(rate=rate, staleness=staleness)


def _tree(learners: list[Node], fan_out: int) -> list[Node]:
    """Aggregators above the learners, each on a host of those below it, until the hub has at most `fan_out` below."""
    placed: list[Node] = []
    level, count = learners, 0
    while level is learners or len(level) > fan_out:
        above: list[Node] = []
        for start in range(0, len(level), fan_out):
            group = level[start : start + fan_out]
            host = group[0].host or f"host-{start // fan_out}"
            parent = Node(f"aggregator-{count}", "aggregator", host=host, parent="hub")
            count += 1
            above.append(parent)
            placed += [replace(node, host=node.host or host, parent=parent.name) for node in group]
        level = above
    return placed + level


class _Below:
    """What a learner and an aggregator have in common: somebody above, and pushes under way to it.

    There is at most one, but for an aggregator in hardsync: a learner that comes while a round goes on adds another.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.above = seat.node.parent
        self.clock = -1
        self.under_way: list[Push] = []
        self.asked = False
        self._lost: set[str] = set()

    def _ask(self) -> list[Effect]:
        self.asked = True
        return [Send(self.above, Pull(self.clock, len(self.seat.weights)))]

    def _push(self, push: Push) -> list[Effect]:
        self.under_way.append(push)
        return [Send(self.above, push)]

    def _answered(self, push: bool) -> None:
        if push:
            self.under_way = []
        else:
            self.asked = False

    def _lose(self, peer: str) -> list[Effect]:
        """If it was the one above, turn to the next and say again what was not answered."""
        self._lost.add(peer)
        if peer != self.above:
            return []
        parents = {node.name: node.parent for node in self.seat.nodes}
        while self.above in self._lost and self.above != "hub":
            self.above = parents[self.above]
        again: list[Effect] = [Send(self.above, push) for push in self.under_way]
        return again + (self._ask() if self.asked else [])

    def _begin(self, members: tuple[str, ...]) -> list[Effect]:
        absent = {node.name for node in self.seat.nodes} - set(members)
        effects = [effect for peer in sorted(absent) for effect in self._lose(peer)]
        return effects or self._ask()


class ServerLearner(_Below):
    """Computes gradients and pushes each of them."""

    def __init__(self, seat: Seat, options: Server) -> None:
        super().__init__(seat)
        self.options = options
        self.steps = 0
        self.computing = False
        self.newest: Weights | None = None
        self.outgoing: Push | None = None
        self.used_clock = -1
        self.portion = portion(seat, options.sync == "hard")
        self._accrued: Tensor | None = None
        self._accrued_samples = 0
        self._batches: tuple[int, ...] = ()
        alone = (options.sync, options.topology, options.push_every, options.compress) == ("async", "star", 1, "none")
        self._wanted: Wanted = "rows" if alone else "flat"

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started(members=members):
                return self._begin(members)
            case Received(message=Weights() as weights):
                self._answered(weights.push)
                self._keep(weights)
                return self._go()
            case Received(message=Current(push=push)):
                self._answered(push)
                return self._go()
            case Broadcasted(message=Weights() as weights):
                self._keep(weights)
                return [Send("hub", Got(weights.clock)), *self._go()]
            case GradientReady():
                self.computing = False
                return [*self._took(event.gradient, event.touched, event.samples), *self._go()]
            case PeerLost(peer=peer):
                return self._lose(peer)
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case Received(message=Refused(reason=reason)):
                return [Fail(reason)]
        return []

    def _keep(self, weights: Weights) -> None:
        if weights.clock > max(self.clock, self.newest.clock if self.newest else -1):
            self.newest = weights

    def _took(self, gradient: Tensor, touched: tuple[Tensor, ...], samples: int) -> list[Effect]:
        """A gradient is there: what goes out, and what is done with it here."""
        options = self.options
        self.steps += 1
        self.used_clock = self.clock
        self._batches += (self.portion.batch,)
        if options.push_every > 1:
            self._accrued = gradient.clone() if self._accrued is None else self._accrued.add_(gradient)
            self._accrued_samples += samples
            gradient, samples = self._accrued, self._accrued_samples
        pulls = self.steps % options.pull_every == 0
        if self.steps % options.push_every == 0:
            self._put_out(gradient, touched, samples, pulls)
            pulls = False
        effects: list[Effect] = [Step()] if options.pull_every > 1 else []
        return [*effects, *self._ask()] if pulls else effects

    def _put_out(self, gradient: Tensor, touched: tuple[Tensor, ...], samples: int, pulls: bool) -> None:
        """Make a push of what has been accrued."""
        mark = Mark(self.seat.node.name, self.steps, self.used_clock, self._batches)
        have = self.clock if pulls and not self.options.overlap else None
        self.outgoing = Push((mark,), gradient, snapshot(self.seat.parameter_count), samples, have, touched)
        self._accrued, self._accrued_samples, self._batches = None, 0, ()

    def _go(self) -> list[Effect]:
        """Push what waits, if nothing is under way; compute, if nothing must be waited for."""
        effects: list[Effect] = []
        if self.outgoing is not None and not self.under_way:
            effects += self._push(self.outgoing)
            self.outgoing = None
        if self.computing or self.asked or self.outgoing is not None:
            return effects
        clock = self.newest.clock if self.newest is not None else self.clock
        if clock < 0 or (self.options.sync == "hard" and clock <= self.used_clock):
            return effects
        if self.under_way and not self.options.overlap:
            return effects
        if self.newest is not None:
            effects.append(Install(self.newest.values))
            self.clock, self.newest = self.newest.clock, None
        self.computing = True
        effects += self.portion.compute(self._wanted, self.options.overlap)
        if self.portion.idle and self._accrued is not None:  # perhaps nothing will ever follow
            self._put_out(self._accrued, (), self._accrued_samples, pulls=False)
            effects += self._go()
        return effects

    def check(self) -> None:
        if len(self.under_way) > 1:
            raise InvariantBroken(f"{len(self.under_way)} pushes are under way")
        if self.computing and self.clock < 0:
            raise InvariantBroken("computes before any weights came")
        if self.computing and self.outgoing is not None and not self.portion.idle:
            raise InvariantBroken("computes while a gradient waits: the two would be merged")


class SharingLearner:
    """Takes gradients at the hub's own weights, as they are at that moment, and pushes each."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.clock = -1
        self.steps = 0
        self.portion = portion(seat)
        self.unanswered = 0
        #: the newest clock that was told when the gradient under way was begun
        self.begun_at: int | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return [Send("hub", Pull(self.clock, len(self.seat.weights)))]
            case Received(message=Current(push=push, clock=clock)):
                self.clock = clock
                self.unanswered -= push
                return self._go()
            case GradientReady(gradient=gradient, touched=touched, samples=samples):
                assert self.begun_at is not None
                self.steps += 1
                self.unanswered += 1
                mark = Mark(self.seat.node.name, self.steps, self.begun_at, (self.portion.batch,))
                self.begun_at = None
                pushed = Push((mark,), gradient, gradient[:0], samples, None, touched)
                return [Send("hub", pushed), *self._go()]
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case Received(message=Refused(reason=reason)):
                return [Fail(reason)]
        return []

    def _go(self) -> list[Effect]:
        if self.begun_at is not None or self.unanswered >= UNANSWERED_MAX:
            return []
        self.begun_at = self.clock
        return self.portion.compute("rows", fresh=True)

    def check(self) -> None:
        if not 0 <= self.unanswered <= UNANSWERED_MAX:
            raise InvariantBroken(f"{self.unanswered} pushes are unanswered")
        if self.begun_at is not None and self.begun_at < 0:
            raise InvariantBroken("computes before it knows the clock")


class Aggregator(_Below):
    """Averages what comes from below and passes it on as one push."""

    def __init__(self, seat: Seat, options: Server) -> None:
        super().__init__(seat)
        self.options = options
        self.sum = Sum()
        self._values: Tensor | None = None
        self._log = PushLog()
        #: who waits for an answer, with what they have: those in the sum, those in the push under way; those who pulled
        #: since this node last did, those for whom it did
        self.in_sum: dict[str, int | None] = {}
        self.in_push: dict[str, int | None] = {}
        self.pulling: dict[str, int | None] = {}
        self.in_pull: dict[str, int | None] = {}
        below: dict[str, set[str]] = {}
        for node in seat.nodes:
            below.setdefault(node.parent, set()).add(node.name)
        self._below = _descendants(seat.node.name, below) & set(seat.workers)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started(members=members):
                return self._begin(members)
            case Received(sender=sender, message=Pull(have=have, length=length)):
                if length != len(self.seat.weights):
                    return [refuse(sender, length, len(self.seat.weights))]
                self.pulling[sender] = have
                return [] if self.asked else self._pull()
            case Received(sender=sender, message=Push() as push):
                return self._take(sender, push)
            case Received(message=Weights(clock=clock, values=values, push=push)):
                if clock > self.clock:
                    self.clock, self._values = clock, values
                return self._pass_answer_on(push)
            case Received(message=Current(push=push)):
                return self._pass_answer_on(push)
            case PeerJoined(peer=peer) if peer.partition("~")[0] in self._below:
                self._below.add(peer)
            case PeerLost(peer=peer):
                for waiting in (self.in_sum, self.in_push, self.pulling, self.in_pull):
                    waiting.pop(peer, None)
                return [*self._lose(peer), *self._relay()]
            case Received(message=Refused(reason=reason)):
                return [Fail(reason)]
        return []

    def _take(self, sender: str, push: Push) -> list[Effect]:
        if self._log.count(push.marks):
            if self.options.sync == "hard" and self.sum.marks:
                # only the dead leave gradients behind of a round that has gone on without them
                clock, summed = push.marks[0].clock, self.sum.marks[0].clock
                if clock < summed:
                    return [self._answer(sender, push.have, push=True)]
                if clock > summed:
                    self.sum = Sum()
            self.sum.add(push)
            self.in_sum[sender] = push.have
            effects = self._relay()
            self.sum.keep()
            return effects
        # it has come by another way; its sender waits for the same answer
        if set(push.marks) & set(self.sum.marks):
            self.in_sum[sender] = push.have
        elif any(set(push.marks) & set(other.marks) for other in self.under_way):
            self.in_push[sender] = push.have
        else:
            return [self._answer(sender, push.have, push=True)]
        return []

    def _pass_answer_on(self, push: bool) -> list[Effect]:
        self._answered(push)
        asking = self.in_push if push else self.in_pull
        if not push and self.options.sync != "hard":
            # in hardsync the answer may be of a round that was over when they asked
            asking |= self.pulling
            self.pulling = {}
        effects: list[Effect] = [self._answer(child, have, push) for child, have in sorted(asking.items())]
        asking.clear()
        if self.pulling and not self.asked:
            effects += self._pull()
        return effects + self._relay()

    def _pull(self) -> list[Effect]:
        self.in_pull, self.pulling = self.pulling, {}
        return self._ask()

    def _answer(self, child: str, have: int | None, push: bool) -> Effect:
        if self._values is None or have is None or have >= self.clock:
            return Send(child, Current(push))
        return Send(child, Weights(self.clock, self._values, push))

    def _relay(self) -> list[Effect]:
        """Push the mean upwards: in hardsync when all below are in it, otherwise when nothing is under way."""
        if not self.sum.marks:
            return []
        if self.options.sync == "hard":
            pushed = {mark.learner for push in self.under_way for mark in push.marks}
            if not self._below - self._lost - pushed <= self.sum.learners:
                return []
        elif self.under_way:
            return []
        collected, self.sum = self.sum, Sum()
        self.in_push, self.in_sum = self.in_push | self.in_sum, {}
        gradient, buffers = collected.means()
        have = None if self.options.overlap else self.clock
        return self._push(Push(tuple(collected.marks), gradient, buffers, collected.samples, have))

    def check(self) -> None:
        if self.options.sync == "hard" and len({mark.clock for mark in self.sum.marks}) > 1:
            raise InvariantBroken(f"gradients of two hardsync rounds in one sum: {self.sum.marks}")


class ServerHub:
    """Collects gradients, steps with their mean, and gives the weights out."""

    def __init__(self, seat: Seat, options: Server) -> None:
        self.seat = seat
        self.options = options
        self.pace = Pace(seat, self._state, **dealing(options.sync == "hard"))
        self.clock = int(seat.restored["clock"]) if seat.restored else 0
        self.present: set[str] = set()
        self.sum = Sum()
        self._log = PushLog()
        #: hardsync: who waits for the update, with what they have
        self.waiting: dict[str, int | None] = {}
        #: overlap: the clock of the last downcast, and who has not got it yet
        self.downcast_clock = self.clock
        self.downcast_to: set[str] = set()
        self._since_downcast = 0
        self._part = parts(seat)["hub"]
        self._gathering = Gathering(seat, options.sync == "hard")

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(sender=sender, message=Part() as part):
                return self._gathering.take(sender, part)
        return [] if self.pace.over else self._gathering.defer(self._handle(event, now))

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started(members=members):
                self.present = set(members) & set(self.seat.workers)
                self.pace.begin(members)
            case Received(sender=sender, message=Pull(have=have, length=length)):
                if length != len(self.seat.weights):
                    return [refuse(sender, length, len(self.seat.weights))]
                return [self._answer(sender, have, push=False)]
            case Received(sender=sender, message=Push() as push):
                return self._take(sender, push, now)
            case Received(sender=sender, message=More() | Returned() as message):
                return self.pace.deal(sender, message)
            case Received(sender=sender, message=Got(clock=clock)) if clock == self.downcast_clock:
                self.downcast_to.discard(sender)
                return self._downcast()
            case PeerJoined(peer=peer, role="worker"):
                self.present.add(peer)
                self.pace.join(peer)
            case PeerLost(peer=peer):
                self.present.discard(peer)
                self.downcast_to.discard(peer)
                self.waiting.pop(peer, None)
                # an aggregator may still have gradients of a learner that is dead
                effects = self.pace.lose(peer, late=self.options.topology == "tree")
                effects += self._update_if_complete(now)
                return [*effects, *([] if self.pace.over else self._downcast())]
            case StopRequested(reason=reason):
                effects = self._update(now) if self.sum.marks else []  # what was pushed counts
                return effects if self.pace.over else [*effects, *self.pace.finish(reason)]
        return []

    def _take(self, sender: str, push: Push, now: float) -> list[Effect]:
        hard = self.options.sync == "hard"
        if not self._log.count(push.marks):  # it has come by another way
            if hard and set(push.marks) & set(self.sum.marks):
                self.waiting[sender] = push.have
                return []
            return [self._answer(sender, push.have, push=True)]
        if hard and not self.present & {mark.learner for mark in push.marks} and push.marks[0].clock < self.clock:
            # an aggregator passes on what a learner left behind; the round has gone on without it
            return [self._answer(sender, push.have, push=True)]
        for mark in push.marks:
            if mark.clock > self.clock or (hard and mark.clock != self.clock):
                raise InvariantBroken(f"{mark} was pushed at clock {self.clock} of {self.options.sync}sync")
        for mark in push.marks:
            self.pace.ledger.settle(mark.learner, mark.batches)
        self.sum.add(push, self._scale(push))
        self._since_downcast += len(push.marks)
        if self._since_downcast >= DOWNCAST_PATIENCE * len(self.present):
            self.downcast_to.clear()
        if hard:
            self.waiting[sender] = push.have
        # too few gradients for an update may be all that there are, until those of the dead are dealt
        effects = self._update_if_complete(now) or self.pace.deal_late()
        self.sum.keep()
        return effects if hard or self.pace.over else [*effects, self._answer(sender, push.have, push=True)]

    def _scale(self, push: Push) -> float:
        """Per-gradient modulation: a push is scaled by the mean of one over the staleness of what is in it."""
        if self.options.rate_rule != "gradient":
            return 1.0
        return statistics.fmean(1 / max(1, self.clock - mark.clock) for mark in push.marks)

    def _complete(self) -> bool:
        if not self.sum.marks:
            return False
        match self.options.sync:
            case "hard":
                return self.present <= self.sum.learners
            case "soft":
                enough = len(self.sum.marks) >= max(1, len(self.present) // self.options.n)
                return enough or self.pace.complete
        return True

    def _update_if_complete(self, now: float) -> list[Effect]:
        return self._update(now) if self._complete() else []

    def _update(self, now: float) -> list[Effect]:
        collected, self.sum = self.sum, Sum()
        before = self.pace.position - sum(len(mark.batches) for mark in collected.marks)
        staleness = tuple(self.clock - mark.clock for mark in collected.marks)
        mean_staleness = statistics.fmean(staleness)
        gradient, buffers = collected.means()
        learners, batch_size = max(1, len(self.present)), self.seat.schedule.batch_size
        rate, lessened_by = self.options.modulation(learners, mean_staleness, batch_size=batch_size)
        effects: list[Effect] = [Step(gradient, rate, collected.touched, before, lessened_by)]
        if len(buffers):
            effects.append(Install(buffers, start=self.seat.parameter_count))
        self.clock += 1
        clocks = [mark.clock for mark in collected.marks]
        row: Row = {"clock": self.clock, "clocks": clocks, "staleness": mean_staleness}
        effects.append(Record(row, staleness))
        if self.options.sync == "hard":
            told = Round(self.clock - 1, tuple(collected.marks), rate)
            effects += [Send(hub, told) for hub in self._gathering.others]
        effects += self._pace(collected, now)
        if self.pace.over:
            return effects
        effects += self._downcast()
        effects += [self._answer(child, have, push=True) for child, have in sorted(self.waiting.items())]
        self.waiting = {}
        return effects

    def _pace(self, collected: Sum, now: float) -> list[Effect]:
        """In hardsync a step is an update; otherwise it is as many gradients as there are learners."""
        if self.options.sync == "hard":
            return self.pace.advance(len(collected.marks), len(collected.marks), now)
        gradients = sum(len(mark.batches) for mark in collected.marks)
        return self.pace.advance(gradients, max(1, len(self.present)), now)

    def _answer(self, child: str, have: int | None, push: bool) -> Effect:
        if self.options.shares:
            return Send(child, Current(push, self.clock))
        if have is None or have >= self.clock:
            return Send(child, Current(push))
        if self.options.hubs == 1:
            return Send(child, Weights(self.clock, snapshot(), push))
        buffers = snapshot(self.seat.parameter_count)
        return Send(child, Weights(self.clock, snapshot(0, self._part.stop), push, buffers))

    def _downcast(self) -> list[Effect]:
        if not self.options.overlap or self.downcast_to or self.downcast_clock == self.clock or not self.present:
            return []
        self.downcast_clock, self.downcast_to, self._since_downcast = self.clock, set(self.present), 0
        return [Broadcast("weights", ("hub", *sorted(self.present)), Weights(self.clock, snapshot()))]

    def _state(self) -> dict[str, Any]:
        return {"clock": self.clock}

    def check(self) -> None:
        self.pace.ledger.check()
        numbered = [(mark.learner, mark.number) for mark in self.sum.marks]
        if len(set(numbered)) != len(numbered):
            raise InvariantBroken(f"a gradient is counted twice: {self.sum.marks}")
        if self.options.sync == "hard" and any(mark.clock != self.clock for mark in self.sum.marks):
            raise InvariantBroken(f"a hardsync round of clock {self.clock} holds {self.sum.marks}")


def _descendants(name: str, below: dict[str, set[str]]) -> set[str]:
    found = set(below.get(name, set()))
    for child in tuple(found):
        found |= _descendants(child, below)
    return found
