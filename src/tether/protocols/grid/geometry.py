"""The places of a grid: a box of d dimensions, its lines, and which node keeps its place when nodes come and go."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from tether.core.vector import shards

Place = tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """The nodes that differ in one coordinate, in the order of that coordinate; the first is the line master."""

    dimension: int
    peers: tuple[str, ...]

    @property
    def master(self) -> str:
        return self.peers[0]

    @property
    def half(self) -> int:
        """Half of a node's peers, rounded up."""
        return math.ceil((len(self.peers) - 1) / 2)

    def peers_after(self, name: str) -> list[str]:
        """The other peers, beginning with the next one, so that the nodes do not all send to the same peer first."""
        here = self.peers.index(name)
        return [*self.peers[here + 1 :], *self.peers[:here]]

    def slices(self, length: int) -> dict[str, slice]:
        """The slice of a vector of this length that each peer reduces."""
        return dict(zip(self.peers, shards(length, len(self.peers)), strict=True))


def sides(count: int, dimensions: int) -> Place:
    """The smallest box whose sides differ by at most one, longer sides first."""
    box = [1] * dimensions
    for dimension in itertools.cycle(range(dimensions)):
        if math.prod(box) >= count:
            break
        box[dimension] += 1
    return tuple(box)


@lru_cache(maxsize=256)
def places(count: int, dimensions: int) -> tuple[Place, ...]:
    """The places of `count` nodes.

    Places whose coordinates have the same sum, modulo the longest side, share no line, and each line along that side
    has one of them. There are more such places than the smallest box has empty ones, so the empty places are the last
    of these.
    """
    box = sides(count, dimensions)
    last = box[0] - 1
    everywhere = list(itertools.product(*map(range, box)))
    firm = [place for place in everywhere if sum(place) % box[0] != last]
    spare = [place for place in everywhere if sum(place) % box[0] == last]
    return (*firm, *spare[: count - len(firm)])


def rearranged(before: tuple[str, ...], now: Iterable[str], dimensions: int) -> tuple[str, ...]:
    """The nodes that are present now, in the order of their places; a node that can keep its place keeps it."""
    now = list(now)
    was = dict(zip(before, places(len(before), dimensions), strict=True))
    target = places(len(now), dimensions)
    kept = {was[name]: name for name in now if name in was}
    stays = {place: kept[place] for place in target if place in kept}
    movers = iter([name for name in now if was.get(name) not in stays])
    return tuple(stays[place] if place in stays else next(movers) for place in target)


@lru_cache(maxsize=16)
def lines(members: tuple[str, ...], dimensions: int) -> tuple[Line, ...]:
    """All lines of at least two nodes; the neighbour along the first dimension also occupies an empty place."""
    box = sides(len(members), dimensions)
    at = dict(zip(places(len(members), dimensions), members, strict=True))

    def occupant(place: Place) -> str:
        first, rest = place[0], place[1:]
        return at[place] if place in at else at[(first - 1 if first else 1, *rest)]

    found = []
    for dimension, side in enumerate(box):
        others = [range(length) if k != dimension else range(1) for k, length in enumerate(box)]
        for origin in itertools.product(*others):
            line = [occupant((*origin[:dimension], i, *origin[dimension + 1 :])) for i in range(side)]
            found.append(Line(dimension, tuple(dict.fromkeys(line))))
    return tuple(line for line in found if len(line.peers) > 1)


@lru_cache(maxsize=16)
def lines_of(members: tuple[str, ...], dimensions: int) -> dict[str, list[int]]:
    """The numbers of each node's lines."""
    numbers: dict[str, list[int]] = {name: [] for name in members}
    for number, line in enumerate(lines(members, dimensions)):
        for peer in line.peers:
            numbers[peer].append(number)
    return numbers
