"""The end of a run: an exact mean over all nodes, reduced along one dimension after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.core.effects import SetTimer
from tether.core.machine import NodeContext
from tether.core.message import Timer
from tether.protocols.grid.geometry import Line
from tether.protocols.grid.membership import Membership
from tether.protocols.grid.messages import Mean, RoundMessage, Slice, Stamp
from tether.protocols.grid.outbox import Outbox
from tether.protocols.grid.rounds import Patience
from tether.protocols.grid.vector import OwnVector, Weighted, weighted_mean

#: the time-out of the finale: at least this long, and this many times what a round usually takes
FINAL_SECONDS = 10.0
FINAL_PATIENCE = 20.0
#: the timer after which the master restarts the finale
FINAL = Timer("final")
#: a line has one round in the finale
ROUND = 1


@dataclass
class _LineSum:
    """The reduction along one line. Unlike a round of training it waits for every peer, and has no stand-ins."""

    line: Line
    parts: dict[str, slice]
    #: when this node first heard of it
    since: float | None = None
    slices: dict[str, Weighted] = field(default_factory=dict)
    means: dict[str, Weighted] = field(default_factory=dict)
    sent: bool = False
    reduced: bool = False


class Finale:
    """A node's part in the final reduction; a final configuration begins it, and another one begins it again."""

    def __init__(
        self,
        context: NodeContext,
        dimensions: int,
        *,
        membership: Membership,
        vector: OwnVector,
        patience: Patience,
        out: Outbox,
    ) -> None:
        self._name = context.node.name
        self._empty = context.empty
        self._dimensions = dimensions
        self._membership = membership
        self._vector = vector
        self._patience = patience
        self._out = out
        self._lines: dict[int, _LineSum] = {}
        #: the dimension along which it reduces now
        self._dimension = 0
        #: it begins with the next event, after the step that this one makes
        self._postponed = False
        #: at the master: the nodes that have the final configuration, and how often the finale has begun
        self.informed: set[str] = set()
        self._attempts = 0

    def begin(self, now: float) -> Tensor | None:
        """Begin with the final configuration that has just come. Here as below: the mean over all nodes, once known."""
        self._lines = {
            number: _LineSum(line, line.slices(len(self._vector))) for number, line in self._membership.lines().items()
        }
        self._postponed = len(self._membership.members) > 1 and self._vector.stepping
        if self._membership.is_master:
            self._set_timer()
        if self._name in self._membership.members and not self._postponed:
            return self._reduce_along(0, self._vector.copy(), 1.0, now)
        return None

    def cancel(self) -> None:
        """The run goes on: a new master did not know that it was to end."""
        self._lines = {}
        self._postponed = False

    def resume(self, now: float) -> Tensor | None:
        """Begin now if the last event had to postpone it."""
        if not self._postponed:
            return None
        self._postponed = False
        return self._reduce_along(0, self._vector.copy(), 1.0, now)

    def receive(self, sender: str, message: RoundMessage, now: float) -> Tensor | None:
        """Take a message of the final configuration."""
        line = self._lines.get(message.line)
        if line is None or sender not in line.line.peers or not isinstance(message, Slice | Mean):
            return None
        part = line.parts[self._name if isinstance(message, Slice) else sender]
        if message.start != part.start or message.values.shape != (part.stop - part.start,):
            return None
        line.since = now if line.since is None else line.since
        if isinstance(message, Slice):
            line.slices[sender] = message.values, message.weight
        else:
            line.means[sender] = message.values, message.weight
            if len(line.means.keys() - {self._name}) == line.line.half:
                self._patience.measure("means", now - line.since)
        return self._proceed(message.line, line, now)

    def acknowledge(self, sender: str, stamp: Stamp) -> None:
        """At the master: a node has the final configuration."""
        if stamp == self._membership.stamp:
            self.informed.add(sender)

    def _set_timer(self) -> None:
        """At the master: wait for the others, twice as long with every attempt."""
        self.informed = {self._name}
        if len(self._membership.members) > 1:
            seconds = max(FINAL_SECONDS, FINAL_PATIENCE * self._patience.usual_seconds("means"))
            self._out.add(SetTimer(FINAL, seconds * 2**self._attempts))
        self._attempts += 1

    def _reduce_along(self, dimension: int, values: Tensor, weight: float, now: float) -> Tensor | None:
        """Reduce along this dimension; after the last one the values are the mean over all nodes."""
        self._dimension = dimension
        if dimension == self._dimensions:
            return values
        lines = {number: line for number, line in self._lines.items() if line.line.dimension == dimension}
        if not lines:
            return self._reduce_along(dimension + 1, values, weight, now)
        for number, line in lines.items():
            self._scatter(number, line, values, weight, now)
        return None

    def _scatter(self, number: int, line: _LineSum, values: Tensor, weight: float, now: float) -> None:
        """Send each peer its slice. The line cannot be complete yet: the peers' means wait for these slices."""
        line.since = now if line.since is None else line.since
        line.sent = True
        line.slices[self._name] = values[line.parts[self._name]], weight
        for peer in line.line.peers_after(self._name):
            part = line.parts[peer]
            self._out.send(peer, Slice(self._membership.stamp, number, ROUND, part.start, weight, values[part]))
        self._proceed(number, line, now)

    def _proceed(self, number: int, line: _LineSum, now: float) -> Tensor | None:
        """Send the mean when all slices have come; go on to the next dimension when all means have."""
        everybody = len(line.line.peers)
        if line.sent and not line.reduced and len(line.slices) == everybody:
            line.reduced = True
            mean, weight = weighted_mean([line.slices[peer] for peer in line.line.peers], self._empty)
            line.means[self._name] = mean, weight
            start = line.parts[self._name].start
            for peer in line.line.peers_after(self._name):
                self._out.send(peer, Mean(self._membership.stamp, number, ROUND, start, weight, mean))
        if not line.reduced or len(line.means) < everybody:
            return None
        if self._dimension > line.line.dimension:
            return None  # another line of this dimension gave the same
        means = [line.means[peer] for peer in line.line.peers]
        values = torch.cat([values for values, _ in means])
        return self._reduce_along(self._dimension + 1, values, means[0][1], now)
