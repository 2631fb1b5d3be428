"""The elastic grid of BIDMach (Peng 2018, chapters 2 and 3), with what its section 6.1 leaves for the future.

There is no hub: every node trains, without ever waiting, and is tied to the nodes of its lines.

The grid (2.1, 6.1.1). Nodes have places in a box of d dimensions whose sides differ by at most one. Nodes that differ
in one coordinate are a line; a node is in d lines. Empty places never share a line, so the populations of the lines of
a dimension differ by at most one. An empty place is looked after by its neighbour along the first dimension, which
takes part in the lines of that place as well; without that a grid with several empty places can fall apart. So a change
at one node reaches every other in at most d rounds, one along each dimension, whatever the number of nodes.

A round (algorithm 1). The p peers of a line cut the vector into p slices. Each sends the i-th slice of its vector to
the i-th peer, which takes the mean and sends that to all; with all means a node moves its vector by

    x <- x + alpha * (mean - s)         s is the vector as it was sent, or (`pull="blend"`, as in line 17) as it is now

With s as it was sent the sum over a line is kept and no step that was made meanwhile is pulled back. Buffers, being
averages themselves, always move from where they are, so that they stay between those of the peers. Lines do not wait
for each other, and a line may have several rounds under way.

Line masters (2.1). The first peer of a line starts its rounds. A node reports a round when it has ended there and
`steps_per_round` steps have been made since the report before (6.1.3); when all have reported the next one starts. A
node that hears of a round in any way takes part in it. It keeps no more rounds of a line than may be under way: an
older one is given up, since a quorum of the line has ended it. Nor does it send a peer more rounds than that which the
peer has not answered: what is beyond waits for the answer, so a slow link never has a long queue.

Quorums with patience (2.1, 6.1.4). Slices, means and reports are waited for from all living peers, and after a time-out
only from a quorum. The previous slice or mean of a silent peer then stands in for it, for a few rounds. The time-out is
three times what half of the peers usually take, unless it is given, and doubles until that has been measured. Who is
known to be dead is not waited for.

The master and its configurations (2.2). The master places the nodes, again whenever one comes or goes, and moves as few
as the balance allows. A configuration has a stamp: the number of the master's term, the master, and a version. A node
obeys the newest it has heard of; what belongs to an older one is ignored, and what belongs to one that has not come yet
is kept until it does. Rounds begin anew with each.

Newcomers. The master sends a newcomer its own vector; the newcomer installs it, trains, and says that it is ready; then
it gets a place. Before it has values it neither takes part in rounds nor votes nor stands for election, so values that
are nobody's can never become those of others, whoever dies. Should only newcomers without values be left, they tell
each other so, and the run fails instead of waiting for ever.

Elections (6.1.5). Deaths are certain: the runtime is their authority, and a node that pauses is not dead. When the
master has died, each node stands for election after a delay that grows with its place in the configuration and doubles
with every attempt. It takes the next number and asks all living nodes. A node votes once for each number, never for an
older number than it has seen, and never for a candidate whose configuration is older than its own: it sends its own
instead. A candidate wins with the votes of more than half of its configuration, the dead included, as in Raft, or of
all its members that live. So of candidates with one configuration no two that live can win the same number: two
majorities would share a voter, and whoever lives has voted for itself. Should the dead master have told some of a
configuration that others do not know yet, its stamp, and last the name in it, decides whom everybody obeys. A vote
tells what the voter knows of the count, which line masters spread with every round.

Data. The master keeps the ledger of mini-batches. A new master begins it with the newest count that is known, and with
what every living node says it has made and still holds; until all have, nobody is dealt more. What only the dead knew
is made again.

The end. When all steps are made, or a stop is asked for, the master sends a final configuration. Nodes stop training
and reduce along one dimension after the other, sums carrying their weights, so the master gets the exact mean over all
nodes; whoever dies meanwhile is left out by another final configuration, which begins anew. So is who stands still:
each node says that it knows of the end, and the master does not wait for ever. The joint model of evaluations and
backups before the end is the master's own vector.

Invariants: no more rounds of a line are under way than allowed; only the first peer of a line leads it; a node's
configurations only become newer; populations of the lines differ by at most one; a node without values does not
compute.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from tether.errors import InvariantBroken, UsageError
from tether.machine import (
    Add,
    Blend,
    CancelTimer,
    Effect,
    Event,
    Fail,
    GradientReady,
    Install,
    Machine,
    Message,
    Node,
    PeerJoined,
    PeerLost,
    Received,
    Record,
    Replica,
    Seat,
    Send,
    SetTimer,
    Started,
    Step,
    StopRequested,
    TimerFired,
    change,
    snapshot,
)
from tether.protocols.base import Options, Pace, option
from tether.protocols.ledger import Lease, More, Portion, Recall, Returned, Spans
from tether.protocols.places import Line, lines, lines_of, rearranged
from tether.vector import shards

#: alpha times the number of pulls that may overlap, unless alpha is given
BETA = 0.9
#: the time-out, as a multiple of what half of the peers take, and before anything has been measured
PATIENCE = 3.0
FIRST_SECONDS = 1.0
#: for how many rounds the previous slice or mean of a silent peer stands in for it
STAND_IN_ROUNDS = 4
#: of how many rounds late arrivals are measured
ROUNDS_KEPT = 16
#: how much a new measurement counts
FRESHNESS = 0.2
#: between the attempts of two nodes to be elected
STAND_SECONDS = 0.2
#: patience in the finale: at least so long, and so many times what a round usually takes; doubled with every attempt
FINAL_SECONDS = 10.0
FINAL_PATIENCE = 20.0
#: a node tells the master of so many steps at the latest, and for every so many nodes half as often
TALLY_STEPS = 8
#: how many mini-batches a node has made before it forgets those that count
MADE_KEPT = 64
TALLY_NODES = 64

#: number of the term, its master, version
Stamp = tuple[int, str, int]
#: the mini-batches that count: pairs of the first and the one after the last
Counted = tuple[tuple[int, int], ...]
#: what is waited for in a round
Kind = Literal["slices", "means", "reports"]


# ---- messages -------------------------------------------------------------------------------------------------------


class Config(Message, frozen=True):
    """Master to all: who takes part, in the order of the places, and how far the run is; `final` is why it ends."""

    number: int
    master: str
    version: int
    members: tuple[str, ...]
    step: int
    counted: Counted
    final: str = ""

    @property
    def stamp(self) -> Stamp:
        return self.number, self.master, self.version


class Welcome(Message, frozen=True):
    """Master to a node without a place: the configuration, and values to begin with."""

    config: Config
    values: Tensor


class Ready(Message, frozen=True):
    """Node to master: it knows the configuration. A newcomer that has values now; everybody, when the end begins."""

    stamp: Stamp


class Empty(Message, frozen=True):
    """Newcomer to all: it has no values, and will get none of these, which are dead."""

    dead: tuple[str, ...]


class Stand(Message, frozen=True):
    """Candidate to all: the master is dead; vote for me. With the configuration it has."""

    number: int
    stamp: Stamp


class Vote(Message, frozen=True):
    """Answer to a candidate; a newcomer abstains. With the count as the voter knows it."""

    number: int
    granted: bool
    abstains: bool
    step: int
    counted: Counted


class Open(Message, frozen=True):
    """Line master to its line: a round begins. With the count as it knows it."""

    stamp: Stamp
    line: int
    round: int
    step: int
    counted: Counted


class Slice(Message, frozen=True):
    """Peer to peer: the receiver's slice of the sender's vector."""

    stamp: Stamp
    line: int
    round: int
    start: int
    weight: float
    values: Tensor


class Mean(Message, frozen=True):
    """Peer to peer: the mean of the sender's slice, and the weight of all that is in it."""

    stamp: Stamp
    line: int
    round: int
    start: int
    weight: float
    values: Tensor


class Done(Message, frozen=True):
    """Peer to line master: the round has ended here, and the steps after it are made."""

    stamp: Stamp
    line: int
    round: int


class Tally(Message, frozen=True):
    """Node to master: the steps it has made since it last told."""

    steps: int


class Holdings(Message, frozen=True):
    """Node to a new master: the mini-batches it has made and that may not count yet, and those it still has."""

    number: int
    made: tuple[int, ...]
    held: tuple[int, ...]


# ---- options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid(Options):
    """No hub: nodes in a grid train without a pause, and each is tied to those of its rows and columns."""

    dimensions: int = option(2, "of the grid; a node is in as many lines")
    alpha: float | Literal["auto"] = option(
        "auto", "share of the way to the mean of a line; 'auto': 0.9/(dimensions * rounds_in_flight)"
    )
    steps_per_round: int | Literal["auto"] = option(
        "auto", "steps of every node between two rounds of a line; 'auto': as the network allows, but at least one"
    )
    rounds_in_flight: int = option(1, "rounds of a line that may be under way at a time")
    scatter_quorum: float = option(0.5, "share of a line whose slices are enough after the time-out")
    gather_quorum: float = option(0.5, "share of a line whose means are enough after the time-out")
    round_quorum: float = option(0.5, "share of a line whose reports are enough after the time-out")
    timeout_seconds: float | Literal["auto"] = option(
        "auto", "patience with silent peers; 'auto': three times what half of the peers usually take"
    )
    pull: Literal["difference", "blend"] = option(
        "difference", "move by the difference of the mean to what was sent, or towards the mean from where it is now"
    )

    name = "grid"
    summary = "no hub: nodes in a grid are tied to their rows and columns by quorum allreduces (BIDMach)"
    messages = (Config, Welcome, Ready, Empty, Stand, Vote, Open, Slice, Mean, Done, Tally, Holdings)
    joint = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dimensions", "rounds_in_flight"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.alpha != "auto" and not 0 < self.alpha <= 1:
            raise UsageError(f"alpha must be above 0 and at most 1, not {self.alpha}: it is the share of the way moved")
        if self.steps_per_round != "auto" and self.steps_per_round < 1:
            raise UsageError(f"steps_per_round must be at least 1 or 'auto', not {self.steps_per_round}")
        for name in ("scatter_quorum", "gather_quorum", "round_quorum"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}: it is a share")
        if self.timeout_seconds != "auto" and not 0 <= self.timeout_seconds < math.inf:
            raise UsageError(f"timeout_seconds must be a time or 'auto', not {self.timeout_seconds}")

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        return (
            cls(),
            cls(dimensions=1, alpha=0.5, steps_per_round=3),
            cls(dimensions=3, rounds_in_flight=2, timeout_seconds=0.05),
            cls(pull="blend", alpha=0.3, scatter_quorum=1.0, gather_quorum=1.0, round_quorum=1.0),
            cls(rounds_in_flight=3, scatter_quorum=0.7, gather_quorum=0.7, round_quorum=0.7),
        )

    def nodes(self, workers: int) -> tuple[Node, ...]:
        return tuple(Node(f"worker-{i}", "peer", computes=True, index=i) for i in range(workers))

    def machine(self, seat: Seat) -> Machine:
        return GridNode(seat, self)

    @property
    def rate(self) -> float:
        """The share of the way to the mean that a round moves a node."""
        return BETA / (self.dimensions * self.rounds_in_flight) if self.alpha == "auto" else self.alpha

    def quorum(self, kind: Kind, living: int) -> int:
        """How many of so many peers, oneself included, are enough after the time-out; one alone exchanges nothing."""
        shares = {"slices": self.scatter_quorum, "means": self.gather_quorum, "reports": self.round_quorum}
        return max(min(2, living), math.ceil(shares[kind] * living - 1e-9))


# ---- the machine ----------------------------------------------------------------------------------------------------


@dataclass
class _Wait:
    """Something that is awaited from all peers of a line."""

    since: float
    came: dict[str, Any] = field(default_factory=dict)
    #: patience is measured, and has ended
    timed: bool = False
    overdue: bool = False


@dataclass
class _Round:
    """A node's part in a round; `sent` is None as long as it has nothing to send."""

    slices: _Wait
    means: _Wait
    sent: Tensor | None = None
    reduced: bool = False


class _Latest:
    """What each peer sent last, to stand in for it when it is silent, though not for long: old values pull back."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Tensor]] = {}

    def keep(self, peer: str, round_: int, values: Tensor) -> None:
        self._kept[peer] = round_, values

    def of(self, peer: str, round_: int) -> Tensor | None:
        kept, values = self._kept.get(peer, (-STAND_IN_ROUNDS, None))
        return values if round_ - kept <= STAND_IN_ROUNDS else None


class _Lane:
    """One of a node's lines, as long as a configuration lasts."""

    def __init__(self, line: Line, length: int) -> None:
        self.line = line
        self.parts = dict(zip(line.peers, shards(length, len(line.peers)), strict=True))
        #: the newest round heard of, and those under way
        self.opened = 0
        self.rounds: dict[int, _Round] = {}
        #: the latest slice and mean of each peer
        self.slices = _Latest()
        self.means = _Latest()
        #: rounds that have ended here and are not reported yet, and the steps since the last report
        self.ended: deque[int] = deque()
        self.steps = 0
        #: the newest round of which each peer has said something, those after it that it was sent, and what it was not
        self.answered = dict.fromkeys(line.peers, 0)
        self.unanswered: dict[str, set[int]] = {peer: set() for peer in line.peers}
        self.deferred: dict[str, list[Open | Slice | Mean]] = {peer: [] for peer in line.peers}
        #: at the line master: the reports of the rounds under way
        self.led: dict[int, _Wait] = {}
        #: what was awaited in the latest rounds, ended ones included: who comes too late tells how long to wait
        self.waits: dict[tuple[Kind, int], _Wait] = {}

    def remember(self, kind: Kind, round_: int, wait: _Wait, allowed: int) -> None:
        """Keep what is awaited, and forget the oldest of it that can no longer be under way."""
        self.waits[kind, round_] = wait
        while len(self.waits) > ROUNDS_KEPT + 2 * allowed:
            del self.waits[next(iter(self.waits))]

    def drop(self, round_: int) -> None:
        """Be done with a round; of its means only their coming is remembered."""
        means = self.rounds.pop(round_).means
        means.came = dict.fromkeys(means.came)

    def still_wanted(self, peer: str, allowed: int) -> list[Open | Slice | Mean]:
        """What a peer was not sent yet, but for rounds that are given up."""
        return [message for message in self.deferred[peer] if message.round > self.opened - allowed]

    def others(self, name: str) -> list[str]:
        """The peers, beginning with the next, so that not all send to the same one first."""
        peers, here = self.line.peers, self.line.peers.index(name)
        return [*peers[here + 1 :], *peers[:here]]


class GridNode:
    """A node of the grid: it trains, takes part in the rounds of its lines, and may become master."""

    def __init__(self, seat: Seat, options: Grid) -> None:
        self.seat = seat
        self.options = options
        self.name = seat.node.name
        #: how far the run is; only the master's ledger is up to date
        self.pace = Pace(seat)
        self.portion = Portion(seat, self._ask)
        #: the newest count that is known, and what was made here and is not in it
        self.counted: Counted = seat.schedule.counted
        self._made: list[int] = []
        #: at a new master: whose holdings are still to come, what the others have, and who has asked meanwhile
        self._awaited: set[str] = set()
        self._holdings: dict[str, Holdings] = {}
        self._asking: dict[str, More] = {}
        self._told: list[tuple[str, int]] = []
        #: nodes that the runtime has told of and that are not known to be dead
        self.living: set[str] = {self.name}
        self.dead: set[str] = set()
        #: the highest number of a term seen, and for whom this node voted in it
        self.number = 0
        self.voted = ""
        #: None as long as it is a newcomer without values
        self.config: Config | None = None
        founders = tuple(node.name for node in seat.nodes)
        self._first: Config | None = None
        if self.name in founders:
            members = rearranged((), founders, options.dimensions)
            self._first = Config(1, founders[0], 1, members, self.pace.step, self.counted)
        self.computing = False
        #: the buffers as they were with the last gradient, and what has pulled them since; another may be changing them
        self._buffers = torch.empty(0)
        self.stop_reason = ""
        #: while it stands for election: who voted for it and who abstained
        self._votes: set[str] = set()
        self._abstained: set[str] = set()
        self._attempts = 0
        self._lanes: dict[int, _Lane] = {}
        #: newcomers without values, and whom each knows to be dead
        self._empty: dict[str, set[str]] = {}
        #: messages of configurations that have not come yet
        self._held: list[tuple[str, Open | Slice | Mean | Done]] = []
        #: what half of the peers usually take, and the patience with them until that is known
        self._usual: dict[Kind, float] = {}
        self._patience: dict[Kind, float] = {}
        #: steps that the master has not been told of, and whether a round has ended since
        self._untold = 0
        self._ended = False
        #: in the finale: the vector and its weight after each dimension
        self._sums: list[tuple[Tensor, float]] = []
        #: it begins with the next event, after the step that this one makes
        self._postponed = False
        #: at the master: who knows of the end, and how often the finale has begun
        self._aware: set[str] = set()
        self._finales = 0
        self._effects: list[Effect] = []
        self._obeyed = self.stamp

    @property
    def is_master(self) -> bool:
        return self.config is not None and self.config.master == self.name

    @property
    def stamp(self) -> Stamp:
        return self.config.stamp if self.config is not None else (0, "", 0)

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.pace.over:
            return []
        effects: list[Effect] = []
        self._effects = effects
        if self._postponed:
            self._postponed = False
            self._sum_up(self._vector(), 1.0, now)
        match event:
            case Started(members=members):
                self._start(members, now)
            case GradientReady():
                self._take_gradient(now)
            case Received(sender=sender, message=message):
                self._receive(sender, message, now)
            case TimerFired(name="stand"):
                self._stand(now)
            case TimerFired(name="final"):
                self._hurry(now)
            case TimerFired(name=name):
                self._lose_patience(name, now)
            case PeerJoined(peer=peer):
                self.living.add(peer)
                if self.is_master:
                    self._welcome([peer])
                elif self.config is None:
                    self._despair()
            case PeerLost(peer=peer):
                self._lose(peer, now)
            case StopRequested(reason=reason):
                self.stop_reason = self.stop_reason or reason
                if self.is_master:
                    self._end(self.stop_reason, now)
        return effects

    def _do(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def _send(self, to: str, message: Message) -> None:
        self._do(Send(to, message))

    # ---- training and counting ----

    def _start(self, members: tuple[str, ...], now: float) -> None:
        self.living = (self.living | set(members)) - self.dead
        self._buffers = self._buffers_now()
        if self._first is None:
            self._despair()
            return
        self._adopt(self._first, now)
        for absent in [name for name in self._first.members if name not in self.living]:
            self._lose(absent, now)

    def _buffers_now(self) -> Tensor:
        return self.seat.weights[self.seat.parameter_count :].clone()

    def _compute(self) -> None:
        if not self.computing:
            self.computing = True
            self._do(*self.portion.compute())

    def _take_gradient(self, now: float) -> None:
        self.computing = False
        self._buffers = self._buffers_now()
        assert self.config is not None
        if self.config.final:
            return
        self._do(Step())
        self._untold += 1
        self._made.append(self.portion.batch)
        for number, lane in self._lanes.items():
            lane.steps += 1
            self._report(number, lane, now)
        self._tell(now)
        if not self.config.final:
            self._compute()
            if self.portion.idle:
                self._tell(now)

    def _tell(self, now: float) -> None:
        """Tell the master what was done: after a round, when it has become much, or when there is nothing to do."""
        assert self.config is not None
        steps = self._untold
        seldom = math.ceil(len(self.config.members) / TALLY_NODES)
        enough = 1 if self.portion.idle else seldom if self._ended else seldom * TALLY_STEPS
        if self.is_master:
            self._untold = 0
            self._count(self.name, steps, now)
        elif self.config.master not in self.dead and steps >= enough:
            self._untold = 0
            self._ended = False
            self._send(self.config.master, Tally(steps))

    def _count(self, worker: str, steps: int, now: float) -> None:
        """At the master: a node has made so many steps."""
        if self._awaited:
            self._told.append((worker, steps))
        elif worker in self.pace.ledger.members:
            self.pace.ledger.count(worker, steps)
            self._advance(steps, now)

    def _advance(self, gradients: int, now: float) -> None:
        """At the master: so many more gradients are in the ledger."""
        assert self.config is not None
        self.counted = tuple(self.pace.ledger.counted)
        workers = len(self.config.members)
        self.pace.tally(gradients, workers)
        if self.config.final:
            return
        if self.pace.complete:
            self._end(self.pace.reason(), now)
        else:
            self._do(*self.pace.advance(0, workers, now))

    def _learn(self, step: int, counted: Counted) -> None:
        """How far the run is, as somebody else knows it."""
        self.pace.step = max(self.pace.step, step)
        if not self.is_master and Spans(counted).total > Spans(self.counted).total:
            self.counted = counted
            self.portion.position = max(self.portion.position, Spans(counted).total)
            if len(self._made) > MADE_KEPT:
                known = Spans(counted)
                self._made = [batch for batch in self._made if batch not in known]

    # ---- who trains on what ----

    def _ask(self, more: More) -> list[Effect]:
        """Ask the master for mini-batches; a master asks itself."""
        assert self.config is not None
        if self.is_master:
            self._deal(self.name, more)
            return []
        return [Send(self.config.master, more)] if self.config.master not in self.dead else []

    def _deal(self, sender: str, message: More | Returned) -> None:
        """At the master."""
        if self._awaited:
            if isinstance(message, More):
                self._asking[sender] = message
            return
        if sender not in self.pace.ledger.members and sender in self.living:
            self.pace.join(sender)
        self._hand_out(self.pace.deal(sender, message))

    def _hand_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to=self.name, message=Lease() as lease):
                    self._do(*self.portion.take(lease))
                case Send(to=self.name, message=Recall()):
                    self._hand_out(self.pace.deal(self.name, self.portion.give()))
                case _:
                    self._do(effect)

    def _hold(self) -> Holdings:
        """What this node tells a new master; with it everything is told."""
        self._untold = 0
        known = Spans(self.counted)
        begun = (self.portion.batch,) if self.computing and not self.portion.idle else ()
        made = tuple(batch for batch in self._made if batch not in known)
        return Holdings(self.stamp[0], made, (*begun, *self.portion.held))

    def _obey_new_master(self, now: float) -> None:
        """Tell it what was made here and what is still to be made."""
        assert self.config is not None
        holdings = self._hold()
        if self.is_master:
            self.pace.ledger.counted = Spans(self.counted)
            self._awaited, self._told, self._asking = self.living - {self.name}, [], {}
            self._holdings = {self.name: holdings}
            self._open_ledger(now)
        else:
            self._awaited = set()
            self._send(self.config.master, holdings)
        self._do(*self.portion.ask_again())

    def _take_holdings(self, sender: str, holdings: Holdings, now: float) -> None:
        """At a new master: when all have told, the ledger is known again."""
        if holdings.number != self.stamp[0] or sender not in self._awaited:
            return
        self._holdings[sender] = holdings
        self._awaited.discard(sender)
        self._open_ledger(now)

    def _open_ledger(self, now: float) -> None:
        if self._awaited or not self._holdings:
            return
        made = {sender: told.made for sender, told in self._holdings.items()}
        held = {sender: told.held for sender, told in self._holdings.items() if sender not in self.dead}
        told, asking = self._told, self._asking
        self._holdings, self._told, self._asking = {}, [], {}
        self._advance(self.pace.ledger.rebuild(self.counted, made, held), now)
        for sender, steps in told:
            self._count(sender, steps, now)
        for sender, more in asking.items():
            if sender not in self.dead:
                self._deal(sender, more)

    # ---- messages ----

    def _receive(self, sender: str, message: Message, now: float) -> None:
        match message:
            case Open() | Slice() | Mean() | Done():
                self._receive_of_round(sender, message, now)
            case Config():
                self._consider(message, now)
            case Welcome(config=config, values=values) if config.stamp >= self.stamp:
                if self.config is None:
                    self._do(Install(values))
                    self._buffers = values[self.seat.parameter_count :].clone()
                    self._adopt(config, now)
                else:
                    self._consider(config, now)
                self._send(sender, Ready(config.stamp))
            case Ready(stamp=stamp) if self.is_master:
                if self._is_final():
                    self._aware |= {sender} if stamp == self.stamp else set()
                elif sender not in self._members():
                    self._configure([*self._members(), sender], now)
            case Empty(dead=dead) if self.config is None:
                self._empty[sender] = set(dead)
                self._give_up()
            case Stand():
                self._vote_on(sender, message)
            case Vote():
                self._take_vote(sender, message, now)
            case Tally(steps=steps) if self.is_master:
                self._count(sender, steps, now)
            case More() | Returned() if self.is_master:
                self._deal(sender, message)
            case Holdings() if self.is_master:
                self._take_holdings(sender, message, now)
            case Lease():
                self._do(*self.portion.take(message))
            case Recall():
                self._send(sender, self.portion.give())

    def _keep_early(self, sender: str, message: Open | Slice | Mean | Done) -> None:
        """Keep a message until its configuration comes. What the sender said in an earlier one is void by now."""
        still = [(other, held) for other, held in self._held if other != sender or held.stamp == message.stamp]
        self._held = [*still, (sender, message)]
        self._check_held()

    def _check_held(self) -> None:
        """A peer has only so many rounds under way with one that does not answer, in the lines that two can share."""
        kinds, lines_max = 4, 2 * self.options.dimensions
        allowed = kinds * lines_max * self.options.rounds_in_flight
        for sender, count in Counter(sender for sender, _ in self._held).items():
            if count > allowed:
                raise InvariantBroken(f"{self.name} holds {count} early messages of {sender}; {allowed} may come")

    def _receive_of_round(self, sender: str, message: Open | Slice | Mean | Done, now: float) -> None:
        if message.stamp != self.stamp:
            if message.stamp > self.stamp:
                self._keep_early(sender, message)
            return
        lane = self._lanes.get(message.line)
        if lane is None or sender not in lane.line.peers:
            return
        self._answered(lane, sender, message.round)
        if isinstance(message, Open):
            self._learn(message.step, message.counted)
        if isinstance(message, Done):
            self._take_report(message.line, lane, sender, message.round, now)
            return
        if isinstance(message, Slice | Mean):
            part = lane.parts[self.name if isinstance(message, Slice) else sender]
            if message.start != part.start or message.values.shape != (part.stop - part.start,):
                return
        self._hear_of(message.line, lane, message.round, now)
        match message:
            case Slice(values=values, weight=weight):
                lane.slices.keep(sender, message.round, values)
                if message.round in lane.rounds:
                    lane.rounds[message.round].slices.came[sender] = (values, weight)
            case Mean(values=values, weight=weight):
                lane.means.keep(sender, message.round, values)
                wanted = message.round in lane.rounds
                self._came("means", lane, message.round, sender, (values, weight) if wanted else None, now)
        self._proceed(message.line, lane, message.round, now)

    # ---- rounds ----

    def _hear_of(self, number: int, lane: _Lane, newest: int, now: float) -> None:
        """Take part in a round, and in those before it that may still be under way."""
        allowed = self.options.rounds_in_flight
        for round_ in range(max(lane.opened, newest - allowed) + 1, newest + 1):
            lane.opened = round_
            for old in [old for old in lane.rounds if old <= round_ - allowed]:
                lane.drop(old)
            part = lane.rounds[round_] = _Round(_Wait(now), _Wait(now))
            lane.remember("means", round_, part.means, allowed)
            if not self._is_final():
                self._scatter(number, lane, round_, self._vector(), 1.0, now)

    def _vector(self) -> Tensor:
        """A copy of the vector as it will be after the changes that this event has brought so far."""
        weights = self.seat.weights
        vector = self.seat.empty(len(weights), dtype=weights.dtype, device=weights.device).copy_(weights)
        replica = cast(Replica, SimpleNamespace(weights=vector))
        for effect in self._effects:
            if isinstance(effect, Install | Add | Blend):
                change(replica, effect)
        vector[self.seat.parameter_count :] = self._buffers
        return vector

    def _scatter(self, number: int, lane: _Lane, round_: int, values: Tensor, weight: float, now: float) -> None:
        """Lines 2 to 6 of algorithm 1."""
        lane.rounds[round_].sent = values
        lane.rounds[round_].slices.came[self.name] = (values[lane.parts[self.name]], weight)
        for peer in lane.others(self.name):
            part = lane.parts[peer]
            self._pass(lane, peer, Slice(self.stamp, number, round_, part.start, weight, values[part]))
        self._proceed(number, lane, round_, now)

    def _pass(self, lane: _Lane, peer: str, message: Open | Slice | Mean) -> None:
        """Send something of a round, unless the peer owes answers about as many rounds as may be under way."""
        round_, owed = message.round, lane.unanswered[peer]
        if round_ > lane.answered[peer] and round_ not in owed:
            if len(owed) >= self.options.rounds_in_flight:
                lane.deferred[peer] = [*lane.still_wanted(peer, self.options.rounds_in_flight), message]
                return
            owed.add(round_)
        self._send(peer, message)

    def _answered(self, lane: _Lane, peer: str, round_: int) -> None:
        """A peer has said something of a round: what waited for that goes now, but for rounds that are too old."""
        lane.answered[peer] = max(lane.answered[peer], round_)
        lane.unanswered[peer] = {owed for owed in lane.unanswered[peer] if owed > lane.answered[peer]}
        deferred, lane.deferred[peer] = lane.still_wanted(peer, self.options.rounds_in_flight), []
        for message in deferred:
            self._pass(lane, peer, message)

    def _came(self, kind: Kind, lane: _Lane, round_: int, sender: str, what: Any, now: float) -> None:
        """Note an arrival, a late one too; that of the peer in the middle tells what is usual."""
        wait = lane.waits.get((kind, round_))
        if wait is None or sender in wait.came:
            return
        wait.came[sender] = what
        if sum(name != self.name for name in wait.came) == math.ceil((len(lane.line.peers) - 1) / 2):
            usual = self._usual.get(kind, now - wait.since)
            self._usual[kind] = usual + FRESHNESS * (now - wait.since - usual)

    def _enough(self, wait: _Wait, kind: Kind, number: int, lane: _Lane, round_: int, now: float) -> bool:
        if self._is_final():
            return len(wait.came) == len(lane.line.peers)
        timer = f"{kind} {number} {round_} {self.stamp[0]}.{self.stamp[2]}"
        living = [peer for peer in lane.line.peers if peer not in self.dead]
        if all(peer in wait.came for peer in living):
            if wait.timed and not wait.overdue:
                self._do(CancelTimer(timer))
            return True
        if len(wait.came) < self.options.quorum(kind, len(living)):
            return False
        if not wait.timed:
            wait.timed = True
            self._do(SetTimer(timer, max(0.0, wait.since + self._timeout_seconds(kind) - now)))
        return wait.overdue

    def _timeout_seconds(self, kind: Kind) -> float:
        if self.options.timeout_seconds != "auto":
            return self.options.timeout_seconds
        # a slice alone says little: a mean has made the way there and back
        kind = "means" if kind == "slices" else kind
        return PATIENCE * self._usual[kind] if kind in self._usual else self._patience.get(kind, FIRST_SECONDS)

    def _lose_patience(self, name: str, now: float) -> None:
        kind, *where = name.split()
        if len(where) != 3 or where[2] != f"{self.stamp[0]}.{self.stamp[2]}":
            return
        number, round_ = int(where[0]), int(where[1])
        lane = self._lanes[number]
        if kind == "reports" and round_ in lane.led:
            self._tire(lane.led[round_], "reports", now)
            self._lead(number, lane, now)
        elif kind != "reports" and round_ in lane.rounds:
            part = lane.rounds[round_]
            self._tire(part.slices if kind == "slices" else part.means, "means", now)
            self._proceed(number, lane, round_, now)

    def _tire(self, wait: _Wait, kind: Kind, now: float) -> None:
        """Wait no longer; who has never seen half of the peers come in time gives them twice as long the next time."""
        wait.overdue = True
        self._patience[kind] = max(self._patience.get(kind, FIRST_SECONDS), 2 * (now - wait.since))

    def _proceed(self, number: int, lane: _Lane, round_: int, now: float) -> None:
        """Reduce, and end the round, when enough has come."""
        part = lane.rounds.get(round_)
        if part is None or part.sent is None:
            return
        if not part.reduced and self._enough(part.slices, "slices", number, lane, round_, now):
            part.reduced = True
            self._reduce(number, lane, round_, part)
        if part.reduced and self._enough(part.means, "means", number, lane, round_, now):
            if self._is_final():
                del lane.rounds[round_]
                self._take_sum(lane, part, now)
            else:
                self._pull(lane, round_, part)
                lane.drop(round_)
                self._ended = True
                lane.ended.append(round_)
                self._report(number, lane, now)

    def _reduce(self, number: int, lane: _Lane, round_: int, part: _Round) -> None:
        """Lines 10 to 13: the mean of what came; the last slice of who is silent stands in for it."""
        if not self._is_final():
            for peer in lane.line.peers:
                stand_in = lane.slices.of(peer, round_)
                if stand_in is not None and peer not in self.dead:
                    part.slices.came.setdefault(peer, (stand_in, 1.0))
        came = [part.slices.came[peer] for peer in lane.line.peers if peer in part.slices.came]
        weight = sum(weight for _, weight in came)
        (first, share), *others = came
        mean = self.seat.empty(len(first), dtype=first.dtype, device=first.device)
        torch.mul(first, share / weight, out=mean)
        for values, share in others:
            mean.add_(values, alpha=share / weight)
        start = lane.parts[self.name].start
        part.means.came[self.name] = (mean, weight)
        for peer in lane.others(self.name):
            self._pass(lane, peer, Mean(self.stamp, number, round_, start, weight, mean))

    def _pull(self, lane: _Lane, round_: int, part: _Round) -> None:
        """Line 17."""
        parameters, rate = self.seat.parameter_count, self.options.rate
        assert part.sent is not None
        for peer, place in lane.parts.items():
            mean = part.means.came[peer][0] if peer in part.means.came else lane.means.of(peer, round_)
            if mean is None or (peer in self.dead and peer not in part.means.came):
                continue
            edge = max(place.start, min(place.stop, parameters))
            inner = mean[: edge - place.start]
            if not len(inner):
                pass
            elif self.options.pull == "difference":
                self._do(Add(inner, rate, place.start), Add(part.sent[place.start : edge], -rate, place.start))
            else:
                self._do(Blend(inner, rate, place.start))
            if edge < place.stop:
                outer = mean[edge - place.start :]
                self._do(Blend(outer, rate, edge))
                self._buffers[edge - parameters : place.stop - parameters].lerp_(outer, rate)

    # ---- reports and line masters ----

    def _report(self, number: int, lane: _Lane, now: float) -> None:
        """Report a round that has ended here, when the steps between two reports are made."""
        wanted = 1 if self.options.steps_per_round == "auto" else self.options.steps_per_round
        if not lane.ended or lane.steps < wanted:
            return
        lane.steps = 0
        round_, leader = lane.ended.popleft(), lane.line.peers[0]
        if leader == self.name:
            self._take_report(number, lane, self.name, round_, now)
        else:
            self._send(leader, Done(self.stamp, number, round_))

    def _take_report(self, number: int, lane: _Lane, sender: str, round_: int, now: float) -> None:
        self._came("reports", lane, round_, sender, None, now)
        if round_ in lane.led:
            self._lead(number, lane, now)

    def _lead(self, number: int, lane: _Lane, now: float) -> None:
        """At the line master: close the rounds that are over, in order, and open the next ones."""
        assert self.config is not None
        while lane.led:
            oldest = min(lane.led)
            wait = lane.led[oldest]
            if not self._enough(wait, "reports", number, lane, oldest, now):
                break
            del lane.led[oldest]
            row = {"line": number, "dimension": lane.line.dimension, "round": oldest, "seconds": now - wait.since}
            self._do(Record({**row, "reports": len(wait.came), "workers": len(lane.line.peers)}))
        while len(lane.led) < self.options.rounds_in_flight and not self._is_final():
            newest = lane.opened + 1
            lane.led[newest] = _Wait(now)
            lane.remember("reports", newest, lane.led[newest], self.options.rounds_in_flight)
            for peer in lane.others(self.name):
                self._pass(lane, peer, Open(self.stamp, number, newest, self.pace.step, self.counted))
            self._hear_of(number, lane, newest, now)

    # ---- configurations ----

    def _members(self) -> tuple[str, ...]:
        return self.config.members if self.config is not None else ()

    def _is_final(self) -> bool:
        return self.config is not None and self.config.final != ""

    def _consider(self, config: Config, now: float) -> None:
        """Obey a configuration unless a newer one is known; who has no values yet obeys none."""
        if self.config is not None and config.stamp > self.stamp:
            self._adopt(config, now)

    def _adopt(self, config: Config, now: float) -> None:
        new_master = config is not self._first and config.number != self.stamp[0]
        self.config = config
        if config.number > self.number:
            self.number, self.voted = config.number, ""
        self._votes, self._abstained, self._attempts = set(), set(), 0
        self._learn(config.step, config.counted)
        if new_master:
            self._obey_new_master(now)
        self._sums = []
        all_lines = lines(config.members, self.options.dimensions)
        mine = lines_of(config.members, self.options.dimensions).get(self.name, [])
        self._lanes = {number: _Lane(all_lines[number], len(self.seat.weights)) for number in mine}
        if config.final:
            self._postponed = len(config.members) > 1 and any(isinstance(effect, Step) for effect in self._effects)
            if self.is_master:
                self._await_finale()
            else:
                self._send(config.master, Ready(config.stamp))
            if self.name in config.members and not self._postponed:
                self._sum_up(self._vector(), 1.0, now)
        else:
            self._compute()
            for number, lane in self._lanes.items():
                if lane.line.peers[0] == self.name:
                    self._lead(number, lane, now)
        held, self._held = self._held, []
        for sender, message in held:
            self._receive_of_round(sender, message, now)
        if config.master in self.dead:
            self._await_election()

    def _configure(self, members: Iterable[str], now: float, final: str = "") -> None:
        """At the master: the next version."""
        assert self.config is not None
        number, version = self.config.number, self.config.version
        self._issue(number, version + 1, members, final or self.config.final, now)

    def _issue(self, number: int, version: int, members: Iterable[str], final: str, now: float) -> None:
        present = [name for name in dict.fromkeys(members) if name not in self.dead]
        placed = rearranged(self._members(), present, self.options.dimensions)
        config = Config(number, self.name, version, placed, self.pace.step, self.counted, final)
        for name in placed:
            if name != self.name:
                self._send(name, config)
        if not final:
            self._do(Record({"term": number, "version": version, "workers": len(placed)}))
        self._adopt(config, now)

    def _welcome(self, newcomers: Iterable[str]) -> None:
        assert self.config is not None
        if not self.config.final:
            for name in newcomers:
                self._send(name, Welcome(self.config, snapshot()))

    def _lose(self, peer: str, now: float) -> None:
        self.dead.add(peer)
        self.living.discard(peer)
        if self.config is None:
            self._despair()
            return
        if self.is_master:
            if peer in self._awaited:
                self._awaited.discard(peer)
                self._open_ledger(now)
            elif not self._awaited:
                self._hand_out(self.pace.lose(peer))
            if peer in self._members():
                self._configure(self._members(), now)
            return
        if peer == self.config.master:
            self._await_election()
        elif self._votes:
            self._count_votes(now)
        for number, lane in list(self._lanes.items()):
            if peer in lane.line.peers:
                if lane.line.peers[0] == self.name:
                    self._lead(number, lane, now)
                for round_ in list(lane.rounds):
                    self._proceed(number, lane, round_, now)

    def _despair(self) -> None:
        """A newcomer without values tells the others, unless one of the first is left: those have values."""
        if not self.living & {node.name for node in self.seat.nodes}:
            for peer in sorted(self.living - {self.name}):
                self._send(peer, Empty(tuple(sorted(self.dead))))
            self._give_up()

    def _give_up(self) -> None:
        """End the run if nobody has values and nobody who is dead can have sent any that are still to come."""
        others = self.living - {self.name}
        if all(peer in self._empty and self._empty[peer] >= self.dead for peer in others):
            self._do(Fail(f"{self.name} joined when everybody who knew the model had died", lost=True))

    # ---- elections ----

    def _await_election(self) -> None:
        alive = [name for name in self._members() if name not in self.dead]
        rank = alive.index(self.name) if self.name in alive else len(alive)
        first = rank if not self._attempts else rank + 1
        self._do(SetTimer("stand", STAND_SECONDS * first * 2**self._attempts))

    def _stand(self, now: float) -> None:
        if self.config is None or self.config.master not in self.dead:
            return
        self.number += 1
        self.voted = self.name
        self._attempts += 1
        self._votes, self._abstained = {self.name}, set()
        for peer in sorted(self.living - {self.name}):
            self._send(peer, Stand(self.number, self.config.stamp))
        self._await_election()
        self._count_votes(now)

    def _vote_on(self, candidate: str, stand: Stand) -> None:
        if stand.number > self.number:
            self.number, self.voted = stand.number, ""
            self._votes = set()
        if self.config is not None and stand.stamp < self.config.stamp:
            self._send(candidate, self.config)
            return
        granted = stand.number == self.number and self.voted in ("", candidate) and self.config is not None
        if granted:
            self.voted = candidate
            if self.config is not None and self.config.master in self.dead:
                self._await_election()
        abstains = self.config is None
        self._send(candidate, Vote(self.number, granted, abstains, self.pace.step, self.counted))

    def _take_vote(self, voter: str, vote: Vote, now: float) -> None:
        self._learn(vote.step, vote.counted)
        if vote.number > self.number:
            self.number, self.voted = vote.number, ""
            self._votes = set()
        if vote.number != self.number or not self._votes:
            return
        (self._votes if vote.granted else self._abstained if vote.abstains else set()).add(voter)
        self._count_votes(now)

    def _count_votes(self, now: float) -> None:
        assert self.config is not None
        members = set(self._members())
        electorate = members & self.living or self.living - self._abstained
        if 2 * len(self._votes & members) <= len(members) and not electorate <= self._votes:
            return
        voters, final = sorted(self._votes & self.living), self.config.final or self.stop_reason
        if self.pace.steps_left <= 0:
            final = final or "all steps made"
        self._do(CancelTimer("stand"))
        self._issue(self.number, 1, [*self._members(), *voters], final, now)
        self._welcome(sorted(self.living - set(self._members())))

    # ---- the end ----

    def _end(self, reason: str, now: float) -> None:
        if not self._is_final():
            self._configure(self._members(), now, final=reason)

    def _await_finale(self) -> None:
        self._aware = {self.name}
        if len(self._members()) > 1:
            seconds = max(FINAL_SECONDS, FINAL_PATIENCE * self._usual.get("means", 0.0))
            self._do(SetTimer("final", seconds * 2**self._finales))
        self._finales += 1

    def _hurry(self, now: float) -> None:
        """The finale takes too long: begin it anew without those who do not answer."""
        if self.is_master and self._is_final():
            self._configure([name for name in self._members() if name in self._aware], now)

    def _sum_up(self, values: Tensor, weight: float, now: float) -> None:
        """Reduce along the next dimension; after the last one the values are the mean over all."""
        self._sums.append((values, weight))
        dimension = len(self._sums) - 1
        if dimension == self.options.dimensions:
            if self.is_master:
                self._finish(values)
            return
        lanes = {number: lane for number, lane in self._lanes.items() if lane.line.dimension == dimension}
        if not lanes:
            self._sum_up(values, weight, now)
        for number, lane in lanes.items():
            self._hear_of(number, lane, 1, now)
            self._scatter(number, lane, 1, values, weight, now)

    def _take_sum(self, lane: _Lane, part: _Round, now: float) -> None:
        if len(self._sums) > lane.line.dimension + 1:
            return  # another line of this dimension gave the same
        means = [part.means.came[peer] for peer in lane.line.peers]
        self._sum_up(torch.cat([values for values, _ in means]), means[0][1], now)

    def _finish(self, mean: Tensor) -> None:
        assert self.config is not None
        if len(self.config.members) > 1:
            self._do(Install(mean))
        self._do(*self.pace.finish(self.config.final))

    def check(self) -> None:
        if self.is_master and not self._awaited:
            self.pace.ledger.check()
        if self.stamp < self._obeyed:
            raise InvariantBroken(f"{self.name} went back from configuration {self._obeyed} to {self.stamp}")
        self._obeyed = self.stamp
        self._check_held()
        allowed = self.options.rounds_in_flight
        for lane in self._lanes.values():
            if max(len(lane.rounds), len(lane.led)) > allowed:
                raise InvariantBroken(f"{len(lane.rounds)} rounds of a line are under way; {allowed} may be")
            if lane.led and lane.line.peers[0] != self.name:
                raise InvariantBroken(f"{self.name} leads a line of {lane.line.peers[0]}")
        if self.config is None:
            if self.computing:
                raise InvariantBroken(f"{self.name} computes without values")
            return
        if self.config.number > self.number:
            raise InvariantBroken(f"{self.name} obeys term {self.config.number} and has seen {self.number} only")
        if self.is_master and self.name not in self.config.members:
            raise InvariantBroken(f"{self.name} is master of a grid without a place for it")
