"""The rounds of one line as one of its peers runs them (algorithm 1): scatter, reduce, gather, pull, report.

Every wait in a round is for all living peers first, and after a time-out for a quorum of them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from tether.core.effects import CancelTimer, Record, SetTimer
from tether.core.machine import NodeContext
from tether.core.message import Timer
from tether.errors import InvariantBroken
from tether.protocols.grid.counting import Counting
from tether.protocols.grid.geometry import Line
from tether.protocols.grid.membership import Membership
from tether.protocols.grid.messages import Mean, Open, Report, RoundMessage, Slice
from tether.protocols.grid.outbox import Outbox
from tether.protocols.grid.vector import OwnVector, Weighted, weighted_mean

#: the time-out as a multiple of what half of the peers usually take, and its value before anything is measured
PATIENCE = 3.0
FIRST_SECONDS = 1.0
#: how much a new measurement counts in the running average
FRESHNESS = 0.2
#: for how many rounds the previous slice or mean of a silent peer stands in for it
STAND_IN_ROUNDS = 4
#: the number of rounds whose late arrivals are still measured
ROUNDS_KEPT = 16

#: what a round waits for
Kind = Literal["slices", "means", "reports"]


@dataclass(frozen=True)
class RoundRules:
    """The options of the rounds, with nothing left to choose."""

    #: the share of the way to the mean that a round moves a node
    alpha: float
    pull: Literal["difference", "blend"]
    #: the steps between two reports; with 0 a round is reported as soon as it has ended
    steps_per_round: int
    rounds_in_flight: int
    #: the share of the living peers that is enough after the time-out
    quorums: dict[Kind, float]
    #: None: `PATIENCE` times what half of the peers usually take
    timeout_seconds: float | None

    def quorum(self, kind: Kind, living: int) -> int:
        """How many of `living` peers, the node included, are enough after the time-out; one alone exchanges nothing."""
        return max(min(2, living), math.ceil(self.quorums[kind] * living - 1e-9))


class Patience:
    """How long a node waits for all peers before a quorum is enough, learned from all of its lines."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._given_seconds = timeout_seconds
        #: what half of the peers usually take, and the time-out until that is known
        self._usual: dict[Kind, float] = {}
        self._provisional: dict[Kind, float] = {}

    def seconds(self, kind: Kind) -> float:
        """The time-out."""
        if self._given_seconds is not None:
            return self._given_seconds
        kind = _measured(kind)
        return PATIENCE * self._usual[kind] if kind in self._usual else self._provisional.get(kind, FIRST_SECONDS)

    def usual_seconds(self, kind: Kind) -> float:
        """What half of the peers usually take; 0 before it is known."""
        return self._usual.get(_measured(kind), 0.0)

    def measure(self, kind: Kind, seconds: float) -> None:
        """Half of the peers took this long."""
        usual = self._usual.get(kind, seconds)
        self._usual[kind] = usual + FRESHNESS * (seconds - usual)

    def ran_out(self, kind: Kind, seconds: float) -> None:
        """The time-out came after this long; until anything is measured, the next one is at least twice as long."""
        kind = _measured(kind)
        self._provisional[kind] = max(self._provisional.get(kind, FIRST_SECONDS), 2 * seconds)


def _measured(kind: Kind) -> Kind:
    """Slices are timed like means: a slice alone says little, while a mean has made the way there and back."""
    return "means" if kind == "slices" else kind


@dataclass
class _Wait:
    """A wait for all peers of a line."""

    since: float
    came: set[str] = field(default_factory=set)
    #: the timer was set, and it has fired
    timed: bool = False
    overdue: bool = False


@dataclass
class _Round:
    """A node's part in a round."""

    #: the vector as it was sent
    sent: Tensor
    slices_wait: _Wait
    means_wait: _Wait
    slices: dict[str, Weighted] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)
    reduced: bool = False


class LatestValues:
    """What each peer sent last. It stands in for a silent peer, but not for long: old values pull back."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Tensor]] = {}

    def keep(self, peer: str, round_: int, values: Tensor) -> None:
        self._kept[peer] = round_, values

    def of(self, peer: str, round_: int) -> Tensor | None:
        kept, values = self._kept.get(peer, (-STAND_IN_ROUNDS, None))
        return values if round_ - kept <= STAND_IN_ROUNDS else None


class _PeerQueue:
    """What goes to one peer. It defers new rounds while the peer owes answers for all rounds that may be under way."""

    def __init__(self, peer: str, rounds_max: int, out: Outbox) -> None:
        self._peer = peer
        self._rounds_max = rounds_max
        self._out = out
        #: the newest round that the peer has said something about, and the later rounds that it was sent
        self._answered = 0
        self._unanswered: set[int] = set()
        self._deferred: list[Open | Slice | Mean] = []

    def send(self, message: Open | Slice | Mean, opened: int) -> None:
        """Send a message of a round now or later; `opened` is the newest round of the line."""
        if message.round > self._answered and message.round not in self._unanswered:
            if len(self._unanswered) >= self._rounds_max:
                self._deferred = [*self._still_wanted(opened), message]
                return
            self._unanswered.add(message.round)
        self._out.send(self._peer, message)

    def answered(self, round_: int, opened: int) -> None:
        """The peer has said something about a round: deferred messages go now, except for rounds that are too old."""
        self._answered = max(self._answered, round_)
        self._unanswered = {owed for owed in self._unanswered if owed > self._answered}
        deferred, self._deferred = self._still_wanted(opened), []
        for message in deferred:
            self.send(message, opened)

    def _still_wanted(self, opened: int) -> list[Open | Slice | Mean]:
        return [message for message in self._deferred if message.round > opened - self._rounds_max]


class LineRounds:
    """The rounds of one of a node's lines, for as long as a configuration lasts."""

    def __init__(
        self,
        line_number: int,
        line: Line,
        context: NodeContext,
        rules: RoundRules,
        *,
        membership: Membership,
        counting: Counting,
        vector: OwnVector,
        patience: Patience,
        out: Outbox,
    ) -> None:
        self.line = line
        self._line_number = line_number
        self.name = context.node.name
        self._rules = rules
        self._empty = context.empty
        self._stamp = membership.stamp
        self._dead = membership.dead
        self._counting = counting
        self._vector = vector
        self._patience = patience
        self._out = out
        #: the slice that each peer reduces
        self.parts = line.slices(len(vector))
        #: the newest round heard of, and those under way
        self.opened = 0
        self._rounds: dict[int, _Round] = {}
        #: the latest slice and mean of each peer
        self.slices = LatestValues()
        self.means = LatestValues()
        #: rounds that have ended here and are not reported yet, and the steps since the last report
        self.unreported: deque[int] = deque()
        self._steps = 0
        self._queues = {peer: _PeerQueue(peer, rules.rounds_in_flight, out) for peer in line.peers}
        #: at the line master: the reports of the rounds under way
        self._led: dict[int, _Wait] = {}
        #: the waits of the latest rounds, ended ones included: late arrivals show how long to wait
        self._waits: dict[tuple[Kind, int], _Wait] = {}

    # ---- what happens to a line ----

    def start(self, now: float) -> None:
        """At the line master: open the first rounds."""
        if self.line.master == self.name:
            self._lead(now)

    def receive(self, sender: str, message: RoundMessage, now: float) -> None:
        """Take a message of a peer of this line."""
        self._queues[sender].answered(message.round, self.opened)
        if isinstance(message, Report):
            self._take_report(sender, message.round, now)
            return
        if isinstance(message, Slice | Mean):
            part = self.parts[self.name if isinstance(message, Slice) else sender]
            if message.start != part.start or message.values.shape != (part.stop - part.start,):
                return
        self._join_rounds(message.round, now)
        round_ = self._rounds.get(message.round)
        match message:
            case Slice(values=values, weight=weight):
                self.slices.keep(sender, message.round, values)
                if round_ is not None:
                    round_.slices[sender] = values, weight
                    round_.slices_wait.came.add(sender)
            case Mean(values=values):
                self.means.keep(sender, message.round, values)
                if round_ is not None:
                    round_.means[sender] = values
                self._note_arrival("means", message.round, sender, now)
        self._proceed(message.round, now)

    def step_made(self, now: float) -> None:
        """The node makes another step."""
        self._steps += 1
        self._report(now)

    def report_due(self, now: float) -> None:
        """Report what waited for steps that will not be made."""
        self._report(now)

    def time_out(self, kind: str, number: int, now: float) -> None:
        """The timer of a wait in a round has fired: a quorum is enough from now on."""
        round_ = self._rounds.get(number)
        if kind == "reports" and number in self._led:
            self._mark_overdue(self._led[number], "reports", now)
            self._lead(now)
        elif kind == "slices" and round_ is not None:
            self._mark_overdue(round_.slices_wait, "slices", now)
            self._proceed(number, now)
        elif kind == "means" and round_ is not None:
            self._mark_overdue(round_.means_wait, "means", now)
            self._proceed(number, now)

    def peer_lost(self, now: float) -> None:
        """A peer has died, so there is less to wait for."""
        if self.line.master == self.name:
            self._lead(now)
        for number in list(self._rounds):
            self._proceed(number, now)

    # ---- a round (algorithm 1) ----

    def _join_rounds(self, newest: int, now: float) -> None:
        """Take part in a round, and in those before it that may still be under way; give up older ones."""
        allowed = self._rules.rounds_in_flight
        for number in range(max(self.opened, newest - allowed) + 1, newest + 1):
            self.opened = number
            for old in [old for old in self._rounds if old <= number - allowed]:
                del self._rounds[old]
            self._scatter(number, now)

    def _scatter(self, number: int, now: float) -> None:
        """Lines 2 to 6: send each peer its slice of the vector."""
        values = self._vector.copy()
        round_ = self._rounds[number] = _Round(values, _Wait(now), _Wait(now))
        self._remember("means", number, round_.means_wait)
        round_.slices[self.name] = values[self.parts[self.name]], 1.0
        round_.slices_wait.came.add(self.name)
        for peer in self.line.peers_after(self.name):
            part = self.parts[peer]
            self._send(peer, Slice(self._stamp, self._line_number, number, part.start, 1.0, values[part]))
        self._proceed(number, now)

    def _proceed(self, number: int, now: float) -> None:
        """Reduce, and end the round, when enough has come."""
        round_ = self._rounds.get(number)
        if round_ is None:
            return
        if not round_.reduced and self._is_enough(round_.slices_wait, "slices", number, now):
            self._reduce(number, round_)
        if round_.reduced and self._is_enough(round_.means_wait, "means", number, now):
            self._pull(number, round_)
            del self._rounds[number]
            self._counting.round_ended()
            self.unreported.append(number)
            self._report(now)

    def _reduce(self, number: int, round_: _Round) -> None:
        """Lines 10 to 13: send all peers the mean of the slices; a silent peer's last slice stands in for it."""
        round_.reduced = True
        for peer in self.line.peers:
            stand_in = self.slices.of(peer, number)
            if stand_in is not None and peer not in self._dead:
                round_.slices.setdefault(peer, (stand_in, 1.0))
        came = [round_.slices[peer] for peer in self.line.peers if peer in round_.slices]
        mean, weight = weighted_mean(came, self._empty)
        round_.means[self.name] = mean
        round_.means_wait.came.add(self.name)
        start = self.parts[self.name].start
        for peer in self.line.peers_after(self.name):
            self._send(peer, Mean(self._stamp, self._line_number, number, start, weight, mean))

    def _pull(self, number: int, round_: _Round) -> None:
        """Line 17: move towards the means; a silent peer's last mean stands in for the one that did not come."""
        sent = round_.sent if self._rules.pull == "difference" else None
        for peer, part in self.parts.items():
            mean = round_.means.get(peer)
            if mean is None and peer not in self._dead:
                mean = self.means.of(peer, number)
            if mean is not None:
                self._vector.pull(part, mean, self._rules.alpha, sent)

    def _send(self, peer: str, message: Open | Slice | Mean) -> None:
        self._queues[peer].send(message, self.opened)

    # ---- reports, and the line master ----

    def _report(self, now: float) -> None:
        """Report a round that has ended here once the steps between two reports are made (6.1.3)."""
        if not self.unreported or (self._steps < self._rules.steps_per_round and not self._counting.ended):
            return
        self._steps = 0
        number = self.unreported.popleft()
        if self.line.master == self.name:
            self._take_report(self.name, number, now)
        else:
            self._out.send(self.line.master, Report(self._stamp, self._line_number, number))

    def _take_report(self, sender: str, number: int, now: float) -> None:
        self._note_arrival("reports", number, sender, now)
        if number in self._led:
            self._lead(now)

    def _lead(self, now: float) -> None:
        """At the line master: close the rounds that are over, in order, and open the next ones."""
        while self._led:
            oldest = min(self._led)
            wait = self._led[oldest]
            if not self._is_enough(wait, "reports", oldest, now):
                break
            del self._led[oldest]
            row = {
                "line": self._line_number,
                "dimension": self.line.dimension,
                "round": oldest,
                "seconds": now - wait.since,
            }
            self._out.add(Record({**row, "reports": len(wait.came), "workers": len(self.line.peers)}))
        while len(self._led) < self._rules.rounds_in_flight:
            newest = self.opened + 1
            self._led[newest] = _Wait(now)
            self._remember("reports", newest, self._led[newest])
            step, counted = self._counting.known
            for peer in self.line.peers_after(self.name):
                self._send(peer, Open(self._stamp, self._line_number, newest, step, counted))
            self._join_rounds(newest, now)

    # ---- waiting ----

    def _is_enough(self, wait: _Wait, kind: Kind, number: int, now: float) -> bool:
        """Whether all living peers have come, or a quorum of them and the time-out; sets the timer if need be."""
        living = [peer for peer in self.line.peers if peer not in self._dead]
        if all(peer in wait.came for peer in living):
            if wait.timed and not wait.overdue:
                self._out.add(CancelTimer(self._timer(kind, number)))
            return True
        if len(wait.came) < self._rules.quorum(kind, len(living)):
            return False
        if not wait.timed:
            wait.timed = True
            seconds = max(0.0, wait.since + self._patience.seconds(kind) - now)
            self._out.add(SetTimer(self._timer(kind, number), seconds))
        return wait.overdue

    def _timer(self, kind: Kind, number: int) -> Timer:
        term, _, version = self._stamp
        return Timer(kind, (self._line_number, number, term, version))

    def _mark_overdue(self, wait: _Wait, kind: Kind, now: float) -> None:
        wait.overdue = True
        self._patience.ran_out(kind, now - wait.since)

    def _remember(self, kind: Kind, number: int, wait: _Wait) -> None:
        """Keep a wait for late arrivals, and forget the oldest that can no longer be under way."""
        self._waits[kind, number] = wait
        while len(self._waits) > ROUNDS_KEPT + 2 * self._rules.rounds_in_flight:
            del self._waits[next(iter(self._waits))]

    def _note_arrival(self, kind: Kind, number: int, sender: str, now: float) -> None:
        """Note an arrival, even a late one; the arrival of the peer in the middle shows what is usual."""
        wait = self._waits.get((kind, number))
        if wait is None or sender in wait.came:
            return
        wait.came.add(sender)
        if len(wait.came - {self.name}) == self.line.half:
            self._patience.measure(kind, now - wait.since)

    def check(self) -> None:
        """Raise `InvariantBroken` if too many rounds are under way, or this node leads another's line."""
        under_way, allowed = max(len(self._rounds), len(self._led)), self._rules.rounds_in_flight
        if under_way > allowed:
            raise InvariantBroken(f"{under_way} rounds of a line are under way; {allowed} may be")
        if self._led and self.line.master != self.name:
            raise InvariantBroken(f"{self.name} leads a line of {self.line.master}")
