"""The elastic grid of BIDMach (Peng 2018, chapters 2 and 3), with what section 6.1 of the paper leaves as future work.

There is no hub. Every node trains and never waits, and exchanges its vector with the nodes of its lines.

The grid (2.1, 6.1.1; `geometry`). Nodes have places in a box of d dimensions whose sides differ by at most one. Nodes
that differ in one coordinate only form a line, so a node is in d lines. Empty places never share a line, so the
populations of the lines of a dimension differ by at most one. The neighbour of an empty place along the first dimension
also takes part in the lines of that place; without this rule a grid with several empty places can fall apart. So a
change at one node reaches every other in at most d rounds, one along each dimension, whatever the number of nodes.

A round (algorithm 1; `rounds`). The p peers of a line cut the vector into p slices. Each peer sends the i-th slice of
its vector to the i-th peer, which takes the mean of the slices and sends it to all. With all means, a node moves its
vector by

    x <- x + alpha * (mean - s)         s is the vector as it was sent, or (`pull="blend"`, as in line 17) as it is now

With s as it was sent, the sum over a line is conserved, and a round pulls back no step that was made meanwhile. Buffers
are averages themselves, so they always move from where they are and stay between those of the peers. Lines do not wait
for each other, and a line may have several rounds under way.

Line masters (2.1). The first peer of a line starts its rounds. A node reports a round when it has ended there and
`steps_per_round` steps have been made since the last report (6.1.3), or at once if its data has ended. When all peers
have reported, the next round starts. A node that hears of a round in any way takes part in it. It keeps no more rounds
of a line than may be under way: it gives up an older one, since a quorum of the line has ended it. Nor does it send a
peer more rounds than that before the peer answers: further rounds wait for the answer, so a slow link never has a long
queue.

Quorums with patience (2.1, 6.1.4). A node waits for the slices, means and reports of all living peers, and after a
time-out only for those of a quorum. The previous slice or mean of a silent peer then stands in for it, for a few
rounds. Unless it is given, the time-out is three times what half of the peers usually take; until that is measured, it
doubles every time. A node does not wait for a peer that it knows to be dead.

The master and its configurations (2.2; `membership`). The master assigns the places, again whenever a node comes or
goes, and moves as few nodes as the balance allows. A configuration has a stamp: the master's term, the master, and a
version. A node obeys the newest configuration that it has heard of. It ignores messages of an older one, and keeps
those of one that has not come yet until it does. With each configuration, rounds begin again at 1.

Newcomers. The master sends a newcomer its own vector. The newcomer installs it, trains, and says that it is ready; then
it gets a place. Before it has weights, it neither takes part in rounds nor votes nor stands for election, so arbitrary
initial weights never spread, whichever nodes die. If only newcomers without weights are left, they tell each other so,
and the run fails instead of waiting for ever.

Elections (6.1.5; `election`). Deaths are certain: the runtime decides on them, and a node that pauses is not dead. When
the master has died, each node stands for election after a delay that grows with its place in the configuration and
doubles with every attempt. It takes the next term and asks all living nodes for their votes. A node votes once in a
term, never for an older term than it has seen, and never for a candidate whose configuration is older than its own: it
sends its own instead. A candidate wins with the votes of more than half of its configuration, the dead included, as in
Raft, or with those of all its living members. So of the candidates with one configuration, no two that live can win the
same term: two majorities would share a voter, and each living candidate has voted for itself. If the dead master has
told only some nodes of its last configuration, the stamp, and in the end the name in it, decides which candidate
all obey. A vote carries what the voter knows of the count, which line masters spread with every round.

Data (`counting`). The master keeps the ledger of mini-batches. A new master begins it with the newest count that is
known and with what every living node says it has made and still holds; until all have said so, it deals out nothing.
Mini-batches that only dead nodes knew to be made are made again.

The end (`finale`). When all steps are made, or a stop is requested, the master sends a final configuration. Nodes stop
training and reduce along one dimension after the other. Sums carry their weights, so the master gets the exact mean
over all nodes. A node that dies meanwhile is left out by another final configuration, which begins the finale again. So
is a node that stands still: each node says that it has the final configuration, and the master does not wait for ever
for one that does not. Before the end, the joint model of evaluations and checkpoints is the master's own vector.

Invariants: no more rounds of a line are under way than allowed; only the first peer of a line leads it; a node's
configurations only become newer; populations of the lines differ by at most one; a node without weights does not
compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tether.core.machine import Machine, Node, NodeContext
from tether.errors import UsageError
from tether.protocols.base import Options, option
from tether.protocols.grid.messages import (
    Config,
    Holdings,
    Mean,
    NoWeights,
    Open,
    Ready,
    Report,
    RequestVote,
    Slice,
    Tally,
    Vote,
    Welcome,
)
from tether.protocols.grid.node import GridNode
from tether.protocols.grid.rounds import RoundRules

__all__ = ["Grid"]

#: alpha times the number of pulls that may overlap, unless alpha is given
BETA = 0.9


@dataclass(frozen=True)
class Grid(Options):
    """No hub: nodes in a grid train without a pause, and each exchanges its vector along its rows and columns."""

    dimensions: int = option(2, "dimensions of the grid; a node is in this many lines")
    alpha: float | Literal["auto"] = option(
        "auto", "share of the way to the mean of a line; 'auto': 0.9/(dimensions * rounds_in_flight)"
    )
    steps_per_round: int | Literal["auto"] = option(
        "auto",
        "steps of every node between two rounds of a line; 'auto': at least one, more on a slow network",
    )
    rounds_in_flight: int = option(1, "rounds of a line that may be under way at a time")
    scatter_quorum: float = option(0.5, "share of a line whose slices are enough after the time-out")
    gather_quorum: float = option(0.5, "share of a line whose means are enough after the time-out")
    round_quorum: float = option(0.5, "share of a line whose reports are enough after the time-out")
    timeout_seconds: float | Literal["auto"] = option(
        "auto", "how long to wait for silent peers; 'auto': three times what half of the peers usually take"
    )
    pull: Literal["difference", "blend"] = option(
        "difference",
        "move by the difference between the mean and what was sent, or from the present values to the mean",
    )

    name = "grid"
    summary = "no hub: the nodes of each row and column of a grid average by quorum allreduces (BIDMach)"
    suits = "machines that come and go: no machine must stay, because there is no hub"
    messages = (Config, Welcome, Ready, NoWeights, RequestVote, Vote, Open, Slice, Mean, Report, Tally, Holdings)
    hub = ""

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
            raise UsageError(f"timeout_seconds must be a number of seconds or 'auto', not {self.timeout_seconds}")

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

    def machine(self, context: NodeContext) -> Machine:
        return GridNode(context, self.dimensions, self.round_rules)

    @property
    def round_rules(self) -> RoundRules:
        """The options of the rounds, with "auto" resolved."""
        return RoundRules(
            alpha=BETA / (self.dimensions * self.rounds_in_flight) if self.alpha == "auto" else self.alpha,
            pull=self.pull,
            steps_per_round=1 if self.steps_per_round == "auto" else self.steps_per_round,
            rounds_in_flight=self.rounds_in_flight,
            quorums={"slices": self.scatter_quorum, "means": self.gather_quorum, "reports": self.round_quorum},
            timeout_seconds=None if self.timeout_seconds == "auto" else self.timeout_seconds,
        )
