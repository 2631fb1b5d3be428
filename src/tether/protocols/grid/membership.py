"""Which nodes take part: configurations, newcomers and deaths (2.2), as one node knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tether.core.effects import Fail
from tether.core.machine import NodeContext
from tether.errors import InvariantBroken
from tether.protocols.grid.geometry import Line, lines, lines_of, rearranged
from tether.protocols.grid.messages import Config, Counted, NoWeights, RoundMessage, Stamp
from tether.protocols.grid.outbox import Outbox


class Membership:
    """The configuration that this node obeys, and the nodes that it knows to be alive or dead."""

    def __init__(self, context: NodeContext, dimensions: int, out: Outbox) -> None:
        self.name = context.node.name
        self.founders = tuple(node.name for node in context.nodes)
        self._dimensions = dimensions
        self._out = out
        #: None while this node is a newcomer without weights
        self.config: Config | None = None
        #: nodes that the runtime has announced and that are not known to be dead, and the dead
        self.living: set[str] = {self.name}
        self.dead: set[str] = set()
        #: newcomers without weights, and the nodes that each of them knows to be dead
        self._no_weights: dict[str, set[str]] = {}
        self._checked = self.stamp

    # ---- the configuration ----

    @property
    def stamp(self) -> Stamp:
        return self.config.stamp if self.config is not None else (0, "", 0)

    @property
    def members(self) -> tuple[str, ...]:
        return self.config.members if self.config is not None else ()

    @property
    def master(self) -> str:
        return self.config.master if self.config is not None else ""

    @property
    def is_master(self) -> bool:
        return self.master == self.name

    @property
    def master_is_dead(self) -> bool:
        return self.master in self.dead

    @property
    def final(self) -> str:
        """Why the run ends; empty while it goes on."""
        return self.config.final if self.config is not None else ""

    def lines(self) -> dict[int, Line]:
        """The lines of this node by their numbers."""
        all_lines = lines(self.members, self._dimensions)
        return {number: all_lines[number] for number in lines_of(self.members, self._dimensions).get(self.name, [])}

    def next_config(
        self, term: int, version: int, master: str, members: Iterable[str], step: int, counted: Counted, final: str
    ) -> Config:
        """A configuration of these members, without the dead, that moves as few of them as the balance allows."""
        present = [name for name in dict.fromkeys(members) if name not in self.dead]
        placed = rearranged(self.members, present, self._dimensions)
        return Config(term, master, version, placed, step, counted, final)

    # ---- coming and going ----

    def join(self, *nodes: str) -> None:
        """These nodes are alive, unless they are known to be dead."""
        self.living.update(name for name in nodes if name not in self.dead)

    def lose(self, node: str) -> None:
        self.dead.add(node)
        self.living.discard(node)

    def announce_no_weights(self) -> None:
        """At a newcomer without weights: tell the others, unless a founder is left, since founders have weights."""
        if self.living.isdisjoint(self.founders):
            for peer in sorted(self.living - {self.name}):
                self._out.send(peer, NoWeights(tuple(sorted(self.dead))))
            self._fail_without_weights()

    def note_no_weights(self, sender: str, dead: Iterable[str]) -> None:
        """At a newcomer without weights: another one has none either, and knows of these deaths."""
        self._no_weights[sender] = set(dead)
        self._fail_without_weights()

    def _fail_without_weights(self) -> None:
        """End the run if no living node has weights, and no dead one can have sent any that are still to come."""
        others = self.living - {self.name}
        if all(peer in self._no_weights and self._no_weights[peer] >= self.dead for peer in others):
            self._out.add(Fail(f"{self.name} joined after every node that had the model had died", lost=True))

    def check(self) -> None:
        """Raise `InvariantBroken` if the node went back to an older configuration, or is a master without a place."""
        if self.stamp < self._checked:
            raise InvariantBroken(f"{self.name} went back from configuration {self._checked} to {self.stamp}")
        self._checked = self.stamp
        if self.is_master and self.name not in self.members:
            raise InvariantBroken(f"{self.name} is master of a grid without a place for it")


class EarlyMessages:
    """Messages of configurations that have not come yet."""

    def __init__(self, name: str, dimensions: int, rounds_in_flight: int) -> None:
        self._name = name
        self._kept: list[tuple[str, RoundMessage]] = []
        # a peer has only `rounds_in_flight` rounds under way with a node that does not answer, in each line they share
        kinds, lines_max = 4, 2 * dimensions
        self._allowed = kinds * lines_max * rounds_in_flight

    def keep(self, sender: str, message: RoundMessage) -> None:
        """Keep a message until its configuration comes; what its sender said in an earlier one is void by now."""
        still = [(other, kept) for other, kept in self._kept if other != sender or kept.stamp == message.stamp]
        self._kept = [*still, (sender, message)]
        self.check()

    def release(self) -> list[tuple[str, RoundMessage]]:
        """All of them, with their senders; none is kept any longer."""
        kept, self._kept = self._kept, []
        return kept

    def check(self) -> None:
        """Raise `InvariantBroken` if a peer has sent more than it may."""
        for sender, count in Counter(sender for sender, _ in self._kept).items():
            if count > self._allowed:
                raise InvariantBroken(
                    f"{self._name} holds {count} early messages of {sender}; {self._allowed} may come"
                )
