"""Places of a grid: a box of d dimensions, its lines, and who stays where when nodes come and go."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

Place = tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """The nodes that differ in one coordinate, in its order; the first is the line's master."""

    dimension: int
    peers: tuple[str, ...]


def sides(count: int, dimensions: int) -> Place:
    """The smallest box whose sides differ by at most one, longer ones first."""
    box = [1] * dimensions
    for dimension in itertools.cycle(range(dimensions)):
        if math.prod(box) >= count:
            break
        box[dimension] += 1
    return tuple(box)


@lru_cache(maxsize=256)
def places(count: int, dimensions: int) -> tuple[Place, ...]:
    """The places of so many nodes.

    Places whose coordinates have the same sum, modulo the longest side, share no line, and each line along that side
    has one. There are more of them than empty places in the smallest box, so the empty places are the last of these.
    """
    box = sides(count, dimensions)
    last = box[0] - 1
    everywhere = list(itertools.product(*map(range, box)))
    firm = [place for place in everywhere if sum(place) % box[0] != last]
    spare = [place for place in everywhere if sum(place) % box[0] == last]
    return (*firm, *spare[: count - len(firm)])


def rearranged(before: tuple[str, ...], now: Iterable[str], dimensions: int) -> tuple[str, ...]:
    """The nodes that are there now, in the order of their places; who can stay where it was stays."""
    now = list(now)
    was = dict(zip(before, places(len(before), dimensions), strict=True))
    target = places(len(now), dimensions)
    kept = {was[name]: name for name in now if name in was}
    stays = {place: kept[place] for place in target if place in kept}
    movers = iter([name for name in now if was.get(name) not in stays])
    return tuple(stays[place] if place in stays else next(movers) for place in target)


@lru_cache(maxsize=16)
def lines(members: tuple[str, ...], dimensions: int) -> tuple[Line, ...]:
    """All lines of at least two nodes; an empty place is its neighbour's along the first dimension."""
    box = sides(len(members), dimensions)
    at = dict(zip(places(len(members), dimensions), members, strict=True))

    def who(place: Place) -> str:
        first, rest = place[0], place[1:]
        return at[place] if place in at else at[(first - 1 if first else 1, *rest)]

    found = []
    for dimension, side in enumerate(box):
        others = [range(length) if k != dimension else range(1) for k, length in enumerate(box)]
        for origin in itertools.product(*others):
            line = [who((*origin[:dimension], i, *origin[dimension + 1 :])) for i in range(side)]
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
