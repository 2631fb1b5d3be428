"""What the nodes train on and what of it counts: the master's ledger, and what every other node tells the master."""

from __future__ import annotations

import math
from collections.abc import Callable

from tether.core.effects import Effect, Send
from tether.core.machine import NodeContext
from tether.protocols.base import RunProgress
from tether.protocols.grid.membership import Membership
from tether.protocols.grid.messages import Counted, Holdings, Tally
from tether.protocols.grid.outbox import Outbox
from tether.protocols.ledger import Lease, More, Portion, Recall, Returned, Spans

#: a node reports after at most this many steps, and half as often for every further `TALLY_NODES` nodes
TALLY_STEPS = 8
TALLY_NODES = 64
#: how many mini-batches of its own a node remembers before it forgets those that count
MADE_KEPT = 64


class Counting:
    """A node's mini-batches and its knowledge of the count; at the master, the ledger of all."""

    def __init__(
        self, context: NodeContext, membership: Membership, out: Outbox, end: Callable[[str, float], None]
    ) -> None:
        """The master calls `end` with a reason and the time when the goal is reached."""
        self._membership = membership
        self._name = membership.name
        self._out = out
        self._end = end
        #: how far the run is; only the master's ledger is up to date
        self.progress = RunProgress(context)
        self.portion = Portion(context, self._ask)
        self.computing = False
        self.ended = False
        #: the newest count that this node knows, and the mini-batches made here that may not be in it
        self.counted: Counted = context.schedule.counted
        self._made: list[int] = []
        #: the steps since the last tally, and whether a round has ended since
        self._untallied = 0
        self._round_ended = False
        #: at a new master: the nodes whose holdings are still to come, and what the others have
        self._awaited: set[str] = set()
        self._holdings: dict[str, Holdings] = {}
        #: at a new master: the tallies and requests that came meanwhile
        self._tallies: list[tuple[str, int]] = []
        self._requests: dict[str, More] = {}

    # ---- at every node ----

    @property
    def known(self) -> tuple[int, Counted]:
        """The step of the run and the mini-batches that count, as far as this node knows."""
        return self.progress.step, self.counted

    def learn(self, step: int, counted: Counted) -> None:
        """Take over a newer count from another node."""
        self.progress.step = max(self.progress.step, step)
        if not self._membership.is_master and Spans(counted).total > Spans(self.counted).total:
            self.counted = counted
            self.portion.position = max(self.portion.position, Spans(counted).total)
            if len(self._made) > MADE_KEPT:
                known = Spans(counted)
                self._made = [batch for batch in self._made if batch not in known]

    def compute(self) -> None:
        """Take the next gradient, unless one is under way."""
        if not self.computing:
            self.computing = True
            self._out.add(*self.portion.compute())

    def end(self, now: float) -> None:
        """The node makes no further steps."""
        self.ended = True
        self.portion.end()
        self.tally(now)

    def gradient_came(self) -> None:
        """No gradient is under way any longer."""
        self.computing = False

    def step_made(self) -> None:
        """The gradient that has just come makes a step."""
        self._untallied += 1
        self._made.append(self.portion.batch)

    def round_ended(self) -> None:
        """A round has ended here: the master hears of the steps before it soon."""
        self._round_ended = True

    def tally(self, now: float) -> None:
        """Tell the master of the steps made: after a round, after many, or when there is nothing left to do."""
        steps = self._untallied
        seldom = math.ceil(len(self._membership.members) / TALLY_NODES)
        enough = 1 if self.portion.idle else seldom if self._round_ended else seldom * TALLY_STEPS
        if self._membership.is_master:
            self._untallied = 0
            self.count(self._name, steps, now)
        elif not self._membership.master_is_dead and steps >= enough:
            self._untallied = 0
            self._round_ended = False
            self._out.send(self._membership.master, Tally(steps))

    def take_lease(self, lease: Lease) -> None:
        self._out.add(*self.portion.take(lease))

    def give_back(self, master: str) -> None:
        """Return half of the mini-batches that this node has not begun."""
        self._out.send(master, self.portion.give())

    def begin_term(self, now: float) -> None:
        """Tell a new master what was made here and what this node still has; at the new master, wait for the others."""
        holdings = self._own_holdings()
        if self._membership.is_master:
            self.progress.ledger.counted = Spans(self.counted)
            self._awaited, self._tallies, self._requests = self._membership.living - {self._name}, [], {}
            self._holdings = {self._name: holdings}
            self._rebuild_ledger(now)
        else:
            self._awaited = set()
            self._out.send(self._membership.master, holdings)
        self._out.add(*self.portion.ask_again())

    def _own_holdings(self) -> Holdings:
        self._untallied = 0  # the holdings tell of these steps too
        known = Spans(self.counted)
        begun = (self.portion.batch,) if self.computing and not self.portion.idle else ()
        made = tuple(batch for batch in self._made if batch not in known)
        return Holdings(self._membership.stamp[0], made, (*begun, *self.portion.held))

    def _ask(self, more: More) -> list[Effect]:
        """Ask the master for mini-batches; a master asks itself."""
        if self._membership.is_master:
            self.deal(self._name, more)
            return []
        return [] if self._membership.master_is_dead else [Send(self._membership.master, more)]

    # ---- at the master ----

    def count(self, worker: str, steps: int, now: float) -> None:
        """A node has made this many steps."""
        if self._awaited:
            self._tallies.append((worker, steps))
        elif worker in self.progress.ledger.members:
            self.progress.ledger.count(worker, steps)
            self._advance(steps, now)

    def deal(self, sender: str, message: More | Returned) -> None:
        """A node asks for mini-batches, or gives some back."""
        if self._awaited:
            if isinstance(message, More):
                self._requests[sender] = message
            return
        if sender not in self.progress.ledger.members and sender in self._membership.living:
            self.progress.join(sender)
        self._hand_out(self.progress.deal(sender, message))

    def take_holdings(self, sender: str, holdings: Holdings, now: float) -> None:
        """A node says what it has made and what it has; the ledger is known again when all have."""
        if holdings.term == self._membership.stamp[0] and sender in self._awaited:
            self._holdings[sender] = holdings
            self._awaited.discard(sender)
            self._rebuild_ledger(now)

    def lose(self, worker: str, now: float) -> None:
        """A node has died: others get its mini-batches that do not count yet."""
        if worker in self._awaited:
            self._awaited.discard(worker)
            self._rebuild_ledger(now)
        elif not self._awaited:
            self._hand_out(self.progress.lose(worker))

    def _hand_out(self, effects: list[Effect]) -> None:
        """Send what the ledger deals; what it says to this node itself needs no message."""
        for effect in effects:
            match effect:
                case Send(to=self._name, message=Lease() as lease):
                    self.take_lease(lease)
                case Send(to=self._name, message=Recall()):
                    self._hand_out(self.progress.deal(self._name, self.portion.give()))
                case _:
                    self._out.add(effect)

    def _rebuild_ledger(self, now: float) -> None:
        if self._awaited or not self._holdings:
            return
        made = {sender: holdings.made for sender, holdings in self._holdings.items()}
        dead = self._membership.dead
        held = {sender: holdings.held for sender, holdings in self._holdings.items() if sender not in dead}
        tallies, requests = self._tallies, self._requests
        self._holdings, self._tallies, self._requests = {}, [], {}
        self._advance(self.progress.ledger.rebuild(self.counted, made, held), now)
        for sender, steps in tallies:
            self.count(sender, steps, now)
        for sender, more in requests.items():
            if sender not in dead:
                self.deal(sender, more)

    def _advance(self, gradients: int, now: float) -> None:
        """This many more gradients are in the ledger."""
        self.counted = tuple(self.progress.ledger.counted)
        workers = len(self._membership.members)
        self.progress.tally(gradients, workers)
        if self._membership.final:
            return
        if self.progress.complete:
            self._end(self.progress.reason(), now)
        else:
            self._out.add(*self.progress.advance(0, workers, now))

    def check(self) -> None:
        """Raise `InvariantBroken` if the master's ledger does not add up."""
        if self._membership.is_master and not self._awaited:
            self.progress.ledger.check()
