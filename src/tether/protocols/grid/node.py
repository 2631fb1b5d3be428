"""The machine of a grid node: it gives each event to the part it concerns, and acts on what the parts decide."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from tether.core.effects import Contributed, Effect, Install, Record
from tether.core.events import (
    DataEnded,
    Event,
    GradientReady,
    PeerJoined,
    PeerLost,
    Received,
    Started,
    StopRequested,
    TimerFired,
)
from tether.core.machine import NodeContext
from tether.core.message import Message, Timer
from tether.core.snapshot import snapshot, tensor
from tether.errors import InvariantBroken
from tether.protocols.grid.counting import Counting
from tether.protocols.grid.election import STAND, Election
from tether.protocols.grid.finale import FINAL, Finale
from tether.protocols.grid.membership import EarlyMessages, Membership
from tether.protocols.grid.messages import (
    Config,
    Holdings,
    Mean,
    NoWeights,
    Open,
    Ready,
    Report,
    RequestVote,
    RoundMessage,
    Slice,
    Tally,
    Vote,
    Welcome,
)
from tether.protocols.grid.outbox import Outbox
from tether.protocols.grid.rounds import LineRounds, Patience, RoundRules
from tether.protocols.grid.vector import OwnVector
from tether.protocols.ledger import Lease, More, Recall, Returned


class GridNode:
    """A node of the grid: it trains, takes part in the rounds of its lines, and may become master."""

    def __init__(self, context: NodeContext, dimensions: int, rules: RoundRules) -> None:
        self.context = context
        self.name = context.node.name
        self._rules = rules
        self._out = Outbox()
        self.vector = OwnVector(context, self._out)
        self.patience = Patience(rules.timeout_seconds)
        self.membership = Membership(context, dimensions, self._out)
        self.election = Election(self.membership, self._out)
        self.counting = Counting(context, self.membership, self._out, self._end)
        self.finale = Finale(
            context,
            dimensions,
            membership=self.membership,
            vector=self.vector,
            patience=self.patience,
            out=self._out,
        )
        #: the node's lines by their numbers; empty in the finale
        self.lines: dict[int, LineRounds] = {}
        self._early = EarlyMessages(self.name, dimensions, rules.rounds_in_flight)
        self._stop_reason = ""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.counting.progress.over:
            return []
        self.vector.begin_event()
        self._finish(self.finale.resume(now))
        match event:
            case Started(members=members):
                self._start(members, now)
            case GradientReady():
                self._take_gradient(now)
            case Received(sender=sender, message=message):
                self._receive(sender, message, now)
            case TimerFired(timer=timer):
                self._time_out(timer, now)
            case PeerJoined(peer=peer):
                self.membership.join(peer)
                if self.membership.is_master:
                    self._welcome([peer])
                elif self.membership.config is None:
                    self.membership.announce_no_weights()
            case PeerLost(peer=peer):
                self._lose(peer, now)
            case DataEnded():
                self.counting.end(now)
                for line in self.lines.values():
                    line.report_due(now)
                self._out.add(Contributed())  # the finale has the vectors of all nodes
            case StopRequested(reason=reason):
                self._stop_reason = self._stop_reason or reason
                if self.membership.is_master:
                    self._end(self._stop_reason, now)
        return self._out.drain()

    def _start(self, members: tuple[str, ...], now: float) -> None:
        self.membership.join(*members)
        self.vector.read_buffers()
        founders = self.membership.founders
        if self.name not in founders:
            self.membership.announce_no_weights()
            return
        first = self.membership.next_config(1, 1, founders[0], founders, *self.counting.known, final="")
        self._adopt(first, now, founding=True)
        for absent in [name for name in first.members if name not in self.membership.living]:
            self._lose(absent, now)

    def _take_gradient(self, now: float) -> None:
        self.counting.gradient_came()
        self.vector.read_buffers()
        if self.membership.final:
            return
        self.vector.step()
        self.counting.step_made()
        for line in self.lines.values():
            line.step_made(now)
        self.counting.tally(now)
        if not self.membership.final:
            self.counting.compute()
            if self.counting.portion.idle:
                self.counting.tally(now)

    def _time_out(self, timer: Timer, now: float) -> None:
        if timer == STAND:
            self._stand(now)
        elif timer == FINAL:
            self._restart_finale(now)
        else:
            term, _, version = self.membership.stamp
            match timer.numbers:
                case (line, round_, *configuration) if configuration == [term, version] and line in self.lines:
                    self.lines[line].time_out(timer.name, round_, now)

    # ---- messages ----

    def _receive(self, sender: str, message: Message, now: float) -> None:
        match message:
            case Open() | Slice() | Mean() | Report():
                self._receive_of_round(sender, message, now)
            case Config():
                self._consider(message, now)
            case Welcome() if message.config.stamp >= self.membership.stamp:
                self._take_welcome(sender, message, now)
            case Ready(stamp=stamp) if self.membership.is_master:
                if self.membership.final:
                    self.finale.acknowledge(sender, stamp)
                elif sender not in self.membership.members:
                    self._configure([*self.membership.members, sender], now)
            case NoWeights(dead=dead) if self.membership.config is None:
                self.membership.note_no_weights(sender, dead)
            case RequestVote():
                self.election.answer(sender, message, *self.counting.known)
            case Vote(step=step, counted=counted):
                self.counting.learn(step, counted)
                self.election.take_vote(sender, message)
                self._take_office_if_elected(now)
            case Tally(steps=steps) if self.membership.is_master:
                self.counting.count(sender, steps, now)
            case More() | Returned() if self.membership.is_master:
                self.counting.deal(sender, message)
            case Holdings() if self.membership.is_master:
                self.counting.take_holdings(sender, message, now)
            case Lease():
                self.counting.take_lease(message)
            case Recall():
                self.counting.give_back(sender)

    def _receive_of_round(self, sender: str, message: RoundMessage, now: float) -> None:
        """Take a message of the configuration that this node obeys; keep one of a newer configuration."""
        if message.stamp > self.membership.stamp:
            self._early.keep(sender, message)
        elif message.stamp < self.membership.stamp:
            return
        elif self.membership.final:
            self._finish(self.finale.receive(sender, message, now))
        elif (line := self.lines.get(message.line)) is not None and sender in line.line.peers:
            if isinstance(message, Open):
                self.counting.learn(message.step, message.counted)
            line.receive(sender, message, now)

    def _take_welcome(self, sender: str, welcome: Welcome, now: float) -> None:
        if self.membership.config is None:
            self.vector.install(tensor(welcome.values))
            self._adopt(welcome.config, now)
        else:
            self._consider(welcome.config, now)
        self._out.send(sender, Ready(welcome.config.stamp))

    # ---- configurations ----

    def _consider(self, config: Config, now: float) -> None:
        """Obey a configuration unless a newer one is known; a node without weights obeys none."""
        if self.membership.config is not None and config.stamp > self.membership.stamp:
            self._adopt(config, now)

    def _adopt(self, config: Config, now: float, *, founding: bool = False) -> None:
        """Obey a configuration: its rounds begin, or the finale."""
        new_master = not founding and config.term != self.membership.stamp[0]
        self.membership.config = config
        self.election.settle(config.term)
        self.counting.learn(config.step, config.counted)
        if new_master:
            self.counting.begin_term(now)
            if self.membership.config is not config:
                return  # the new master has found the goal reached and has issued a final configuration meanwhile
        if config.final:
            self.lines = {}
            if not self.membership.is_master:
                self._out.send(config.master, Ready(config.stamp))
            self._finish(self.finale.begin(now))
        else:
            self.finale.cancel()
            self._begin_rounds(now)
        for sender, message in self._early.release():
            self._receive_of_round(sender, message, now)
        if self.membership.master_is_dead:
            self.election.set_timer()

    def _begin_rounds(self, now: float) -> None:
        self.lines = {
            number: LineRounds(
                number,
                line,
                self.context,
                self._rules,
                membership=self.membership,
                counting=self.counting,
                vector=self.vector,
                patience=self.patience,
                out=self._out,
            )
            for number, line in self.membership.lines().items()
        }
        self.counting.compute()
        for line in self.lines.values():
            line.start(now)

    def _configure(self, members: Iterable[str], now: float, final: str = "") -> None:
        """At the master: issue the next version."""
        term, _, version = self.membership.stamp
        self._issue(term, version + 1, members, final or self.membership.final, now)

    def _issue(self, term: int, version: int, members: Iterable[str], final: str, now: float) -> None:
        """At the master: tell all members of a new configuration, and obey it."""
        config = self.membership.next_config(term, version, self.name, members, *self.counting.known, final=final)
        for name in config.members:
            if name != self.name:
                self._out.send(name, config)
        if not final:
            self._out.add(Record({"term": term, "version": version, "workers": len(config.members)}))
        self._adopt(config, now)

    # ---- coming and going ----

    def _welcome(self, newcomers: Iterable[str]) -> None:
        """At the master: give newcomers weights; the finale takes none in."""
        config = self.membership.config
        if config is not None and not config.final:
            for name in newcomers:
                self._out.send(name, Welcome(config, snapshot()))

    def _lose(self, peer: str, now: float) -> None:
        self.membership.lose(peer)
        if self.membership.config is None:
            self.membership.announce_no_weights()
        elif self.membership.is_master:
            self.counting.lose(peer, now)
            if peer in self.membership.members:
                self._configure(self.membership.members, now)
        else:
            if peer == self.membership.master:
                self.election.set_timer()
            else:
                self._take_office_if_elected(now)
            for line in list(self.lines.values()):
                if peer in line.line.peers:
                    line.peer_lost(now)

    # ---- elections ----

    def _stand(self, now: float) -> None:
        if self.membership.master_is_dead:
            self.election.stand()
            self._take_office_if_elected(now)

    def _take_office_if_elected(self, now: float) -> None:
        """Become master once the election is won: with the members and those who voted, and the rest as newcomers."""
        if not self.election.is_won():
            return
        final = self.membership.final or self._stop_reason
        if self.counting.progress.steps_left <= 0:
            final = final or "all steps made"
        voters = self.election.close()
        self._issue(self.election.term, 1, [*self.membership.members, *voters], final, now)
        self._welcome(sorted(self.membership.living - set(self.membership.members)))

    # ---- the end ----

    def _end(self, reason: str, now: float) -> None:
        """At the master: begin the finale."""
        if not self.membership.final:
            self._configure(self.membership.members, now, final=reason)

    def _restart_finale(self, now: float) -> None:
        """The finale takes too long: begin it again without the nodes that do not answer."""
        if self.membership.is_master and self.membership.final:
            self._configure([name for name in self.membership.members if name in self.finale.informed], now)

    def _finish(self, mean: Tensor | None) -> None:
        """At the master: end the run with the mean over all nodes, once it is known."""
        if mean is None or not self.membership.is_master:
            return
        if len(self.membership.members) > 1:
            self._out.add(Install(mean))
        self._out.add(*self.counting.progress.finish(self.membership.final))

    def check(self) -> None:
        self.counting.check()
        self.membership.check()
        self.election.check()
        self._early.check()
        for line in self.lines.values():
            line.check()
        if self.membership.config is None and self.counting.computing:
            raise InvariantBroken(f"{self.name} computes without weights")
