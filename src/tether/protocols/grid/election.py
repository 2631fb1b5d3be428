"""How the nodes elect a new master when the old one has died (6.1.5): stand, vote, win."""

from __future__ import annotations

from tether.core.effects import CancelTimer, SetTimer
from tether.core.message import Timer
from tether.errors import InvariantBroken
from tether.protocols.grid.membership import Membership
from tether.protocols.grid.messages import Counted, RequestVote, Vote
from tether.protocols.grid.outbox import Outbox

#: the time between the attempts of two nodes to be elected
STAND_SECONDS = 0.2
#: the timer after which a node stands for election
STAND = Timer("stand")


class Election:
    """A node's part in elections: the term it has reached, its own vote, and the votes it gets as a candidate."""

    def __init__(self, membership: Membership, out: Outbox) -> None:
        self._membership = membership
        self._name = membership.name
        self._out = out
        #: the highest term seen, and the candidate that this node voted for in it
        self.term = 0
        self._voted_for = ""
        #: at a candidate: the nodes that voted for it, itself included, and those that abstained
        self.votes: set[str] = set()
        self._abstained: set[str] = set()
        self._attempts = 0

    def settle(self, term: int) -> None:
        """The node obeys a configuration of this term: whatever election was under way is over."""
        if term > self.term:
            self.term, self._voted_for = term, ""
        self.votes, self._abstained, self._attempts = set(), set(), 0

    def set_timer(self) -> None:
        """Stand for election after a delay that grows with the node's place and doubles with every attempt."""
        alive = [name for name in self._membership.members if name not in self._membership.dead]
        rank = alive.index(self._name) if self._name in alive else len(alive)
        turns = rank if not self._attempts else rank + 1
        self._out.add(SetTimer(STAND, STAND_SECONDS * turns * 2**self._attempts))

    def stand(self) -> None:
        """Become a candidate of the next term: vote for oneself and ask all living nodes."""
        self.term += 1
        self._voted_for = self._name
        self._attempts += 1
        self.votes, self._abstained = {self._name}, set()
        for peer in sorted(self._membership.living - {self._name}):
            self._out.send(peer, RequestVote(self.term, self._membership.stamp))
        self.set_timer()

    def answer(self, candidate: str, request: RequestVote, step: int, counted: Counted) -> None:
        """Vote once a term, never for an older term, nor for a candidate whose configuration is older."""
        self._see(request.term)
        config = self._membership.config
        if config is not None and request.stamp < config.stamp:
            self._out.send(candidate, config)
            return
        granted = request.term == self.term and self._voted_for in ("", candidate) and config is not None
        if granted:
            self._voted_for = candidate
            if self._membership.master_is_dead:
                self.set_timer()
        self._out.send(candidate, Vote(self.term, granted, config is None, step, counted))

    def take_vote(self, voter: str, vote: Vote) -> None:
        """At a candidate: count the answer of another node."""
        self._see(vote.term)
        if vote.term == self.term and self.votes:
            if vote.granted:
                self.votes.add(voter)
            elif vote.abstains:
                self._abstained.add(voter)

    def is_won(self) -> bool:
        """More than half of the configuration, the dead included, or all of its living members have voted for it."""
        if not self.votes:
            return False
        members, living = set(self._membership.members), self._membership.living
        electorate = members & living or living - self._abstained
        return 2 * len(self.votes & members) > len(members) or electorate <= self.votes

    def close(self) -> list[str]:
        """At the winner: stand no more. The living nodes that have voted for it."""
        self._out.add(CancelTimer(STAND))
        return sorted(self.votes & self._membership.living)

    def _see(self, term: int) -> None:
        """A newer term ends a candidacy in an older one."""
        if term > self.term:
            self.term, self._voted_for = term, ""
            self.votes = set()

    def check(self) -> None:
        """Raise `InvariantBroken` if the node obeys a term that it has not seen."""
        if (term := self._membership.stamp[0]) > self.term:
            raise InvariantBroken(f"{self._name} obeys term {term} and has seen only {self.term}")
