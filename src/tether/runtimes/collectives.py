"""Broadcast and reduction over the members of a collective, along a tree of messages.

The members of a collective form a tree by their position: `members[0]` is the root and member i has the children
`fanout*i + 1 ... fanout*i + fanout`. Broadcasts go down; partial sums go up, each with the names it covers.

When a member dies its children are taken over by the nearest living ancestor. Nothing is lost or counted twice:

- a member keeps the partial sum it sent until the root has closed that reduction, and sends it again to its new parent;
- a partial sum is taken only if none of the names it covers is covered already;
- a partial sum of a reduction that is known to be closed is ignored;
- a member waits exactly for the living members below it;
- the latest broadcast of each stream is kept and sent again to children that are taken over; a member that has it
  already ignores it.

This works because a dead name never comes back and nothing of it arrives once its death is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from tether.machine import Broadcast, Broadcasted, Event, Message, Reduce, Reduced

FANOUT = 2
#: closed reductions that are remembered, and told with every broadcast, so that nothing is kept of them
CLOSED_KEPT = 16
M = TypeVar("M")


class Up(Message, frozen=True):
    """A partial sum on its way to the root."""

    tag: str
    members: tuple[str, ...]
    values: Tensor
    weight: float
    covers: tuple[str, ...]


class Down(Message, Generic[M], frozen=True):
    """A broadcast on its way from the root, with the reductions that the root has closed lately."""

    stream: str
    number: int
    members: tuple[str, ...]
    closed: tuple[str, ...]
    message: M


class _Reduction:
    """What a member knows of one reduction."""

    def __init__(self, members: tuple[str, ...]) -> None:
        self.members = members
        self.contributed = False
        self.total: Tensor | None = None
        self.weight = 0.0
        self.covered: set[str] = set()
        self.sent: Up | None = None
        self.parent: str | None = None

    def add(self, values: Tensor, weight: float, covers: tuple[str, ...]) -> None:
        if self.covered & set(covers):
            return
        self.total = values if self.total is None else self.total + values
        self.weight += weight
        self.covered |= set(covers)


class Collectives:
    """One node's part in all collectives. Every method returns the events that its machine must now be given."""

    def __init__(self, node: str, send: Callable[[str, Message], Any]) -> None:
        self.node = node
        self._send = send
        self._dead: set[str] = set()
        self._reductions: dict[str, _Reduction] = {}
        self._broadcasts: dict[str, Down[Message]] = {}
        self._closed: deque[str] = deque(maxlen=CLOSED_KEPT)

    def broadcast(self, effect: Broadcast) -> None:
        last = self._broadcasts.get(effect.stream)
        down = Down(effect.stream, last.number + 1 if last else 0, effect.members, tuple(self._closed), effect.message)
        self._broadcasts[effect.stream] = down
        self._pass_down(down)

    def reduce(self, effect: Reduce) -> list[Event]:
        reduction = self._reductions.setdefault(effect.tag, _Reduction(effect.members))
        reduction.contributed = True
        if effect.values is not None:
            values = effect.values if effect.weight == 1.0 else effect.values * effect.weight
            reduction.add(values, effect.weight, (self.node,))
        return self._advance(effect.tag)

    def receive(self, message: Up | Down[Any]) -> list[Event]:
        if isinstance(message, Up):
            if message.tag in self._closed:
                return []
            reduction = self._reductions.setdefault(message.tag, _Reduction(message.members))
            reduction.add(message.values, message.weight, message.covers)
            return self._advance(message.tag)
        known = self._broadcasts.get(message.stream)
        if known is not None and known.number >= message.number:
            return []
        self._broadcasts[message.stream] = message
        for tag in message.closed:
            self._reductions.pop(tag, None)
            if tag not in self._closed:
                self._closed.append(tag)
        self._pass_down(message)
        return [Broadcasted(message.stream, message.members, message.message)]

    def lost(self, peer: str) -> list[Event]:
        orphaned = [(down, self._children(down.members)) for down in self._broadcasts.values()]
        self._dead.add(peer)
        for down, before in orphaned:
            for child in self._children(down.members):
                if child not in before:
                    self._send(child, down)
        return [event for tag in list(self._reductions) for event in self._advance(tag)]

    def _advance(self, tag: str) -> list[Event]:
        """Close the reduction at the root, or send its sum up, once all that can come has come."""
        reduction = self._reductions[tag]
        if reduction.sent is None:
            below = self._below(reduction.members)
            if not reduction.contributed or not below <= reduction.covered:
                return []
            if reduction.members[0] == self.node:
                del self._reductions[tag]
                self._closed.append(tag)
                covered = tuple(name for name in reduction.members if name in reduction.covered)
                return [Reduced(tag, reduction.total, reduction.weight, covered)]
            assert reduction.total is not None
            covers = tuple(sorted(reduction.covered))
            reduction.sent = Up(tag, reduction.members, reduction.total, reduction.weight, covers)
        parent = self._parent(reduction.members)
        if parent != reduction.parent:
            reduction.parent = parent
            self._send(parent, reduction.sent)
        return []

    def _pass_down(self, down: Down[Any]) -> None:
        for child in self._children(down.members):
            self._send(child, down)

    def _parent(self, members: tuple[str, ...]) -> str:
        """The nearest living ancestor; the root, if it should be dead, stays the parent in name."""
        index = members.index(self.node)
        while index > 0:
            index = (index - 1) // FANOUT
            if members[index] not in self._dead:
                break
        return members[index]

    def _children(self, members: tuple[str, ...]) -> list[str]:
        """The living children, those of dead children taken over."""
        found: list[str] = []
        open_ = [members.index(self.node)]
        while open_:
            index = open_.pop(0)
            for child in range(FANOUT * index + 1, min(FANOUT * index + FANOUT + 1, len(members))):
                if members[child] in self._dead:
                    open_.append(child)
                else:
                    found.append(members[child])
        return found

    def _below(self, members: tuple[str, ...]) -> set[str]:
        """Every living member below this one."""
        found: set[str] = set()
        open_ = [members.index(self.node)]
        while open_:
            index = open_.pop()
            for child in range(FANOUT * index + 1, min(FANOUT * index + FANOUT + 1, len(members))):
                open_.append(child)
                if members[child] not in self._dead:
                    found.add(members[child])
        return found
