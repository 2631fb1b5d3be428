"""Broadcast and reduction over the members of a collective, along a tree of messages.

The members of a collective form a tree by their position; `members[0]` is the root. Broadcasts go down; partial sums go
up, each with the names it covers. The root has two children. Up to `CHAINS_MAX` members the others have one, so that
there are two chains, and beyond that two: a member that passes a broadcast on twice and sends its sum up once is slower
than the root, but chains of many members are long.

Large tensors travel in parts, each on its own: while a node passes one part on it receives the next, so the depth of
the tree costs the time of a part and not of the whole. A vector's buffers are a part of their own.

When a member dies its children are taken over by the nearest living ancestor. Nothing is lost or counted twice:

- a member keeps the partial sums it sent until the root has closed that reduction, and sends them again to its new
  parent;
- a partial sum is taken only if none of the names it covers is covered already;
- a partial sum of a reduction that is known to be closed is ignored. Reductions of one stream follow each other, so the
  number of the latest that is closed tells of all before it;
- a member waits exactly for the living members below it;
- the latest broadcast of each stream is kept and sent again to children that are taken over; a member that has it
  already ignores it.

Of a member that dies while it contributes, some parts may count and others not: each part is brought to the same
weight, so that their mean is that of whoever is in it, and only who is in all of them is named a contributor.

The root may close a reduction before all have contributed, with what has come: somebody does not answer.

This works because a dead name never comes back and nothing of it arrives once its death is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from tether.machine import Broadcast, Broadcasted, Event, Message, Reduce, Reduced, stream_of
from tether.vector import Empty

#: the most members that form two chains instead of a binary tree
CHAINS_MAX = 17
#: a tensor travels in parts of about this size, and in no more than so many
PART_BYTES = 512 * 1024
PARTS_MAX = 8
M = TypeVar("M")


class Up(Message, frozen=True):
    """A partial sum, or a part of it, on its way to the root."""

    tag: str
    members: tuple[str, ...]
    values: Tensor
    weight: float
    #: who is in it, each with the steps it told
    covers: dict[str, int]
    part: int = 0
    parts: int = 1


class Down(Message, Generic[M], frozen=True):
    """A broadcast, or a part of it, on its way from the root, with the latest closed reduction of each stream."""

    stream: str
    number: int
    members: tuple[str, ...]
    closed: tuple[str, ...]
    message: M
    part: int = 0
    parts: int = 1


class _Sum:
    """What a member knows of one part of a reduction."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.weight = 0.0
        self.covered: dict[str, int] = {}
        self.sent: Up | None = None
        self.parent: str | None = None
        self._owned = False

    def add(self, values: Tensor, weight: float, covers: dict[str, int]) -> None:
        if self.covered.keys() & covers.keys():
            return
        if self.total is None:
            self.total = values
        elif self._owned:
            self.total.add_(values)
        else:
            self.total, self._owned = self.total + values, True
        self.weight += weight
        self.covered |= covers


class _Reduction:
    """What a member knows of one reduction."""

    def __init__(self, members: tuple[str, ...]) -> None:
        self.members = members
        self.contributed = False
        #: at the root: close with what has come
        self.cut_short = False
        #: none until somebody's contribution has told how many parts there are
        self.sums: list[_Sum] = []

    def open(self, parts: int) -> list[_Sum]:
        if not self.sums:
            self.sums = [_Sum() for _ in range(parts)]
        return self.sums


def joined(tag: str, members: tuple[str, ...], parts: list[tuple[Tensor | None, float, dict[str, int]]]) -> Reduced:
    """A reduction whose parts have come to these sums, with their weights and who is in each."""
    weight = max((weight for _, weight, _ in parts), default=0.0)
    totals: list[Tensor] = []
    for total, of_part, _ in parts:
        if total is None or (weight and not of_part):
            return Reduced(tag, None, 0.0, ())
        totals.append(total if of_part == weight else total * (weight / of_part))
    if not totals:
        return Reduced(tag, None, 0.0, ())
    first, *others = (covered for _, _, covered in parts)
    names = tuple(name for name in members if name in first and all(name in other for other in others))
    total = totals[0] if len(totals) == 1 else torch.cat(totals)
    return Reduced(tag, total, weight, names, tuple(first[name] for name in names))


class _Incoming:
    """The latest broadcast of a stream, as far as it has come."""

    def __init__(self, down: Down[Any]) -> None:
        self.number = down.number
        self.parts: list[Down[Any] | None] = [None] * down.parts

    def known(self) -> list[Down[Any]]:
        return [part for part in self.parts if part is not None]


class Exchange(Protocol):
    """One node's part in all collectives. Most methods return the events that its machine must now be given."""

    #: what is for `receive`
    messages: tuple[type[Message], ...]

    def broadcast(self, effect: Broadcast) -> None:
        """At the root: a message for all others."""
        ...

    def reduce(self, effect: Reduce) -> list[Event]:
        """Take part in a sum."""
        ...

    def receive(self, message: Any) -> list[Event]:
        """A message of another node's part."""
        ...

    def lost(self, peer: str) -> list[Event]:
        """A member has died."""
        ...


class Collectives:
    """Broadcast and reduction by messages along the tree."""

    messages: tuple[type[Message], ...] = (Up, Down)

    def __init__(
        self,
        node: str,
        send: Callable[[str, Message], Any],
        bytes_scale: float = 1.0,
        parameter_count: int = 0,
        length: int = 0,
        empty: Empty = torch.empty,
        *_: Any,
    ) -> None:
        """`length` is that of the vector, whose buffers begin at `parameter_count`; `empty` makes tensors to send."""
        self.node = node
        self._send = send
        self._bytes_scale = bytes_scale
        self._parameter_count = parameter_count
        self._length = length
        self._empty = empty
        self._dead: set[str] = set()
        self._reductions: dict[str, _Reduction] = {}
        self._broadcasts: dict[str, _Incoming] = {}
        #: the latest closed reduction of each stream
        self._closed: dict[str, str] = {}

    def broadcast(self, effect: Broadcast) -> None:
        last = self._broadcasts.get(effect.stream)
        number, closed = last.number + 1 if last else 0, tuple(self._closed.values())
        pieces = self._cut_message(effect.message)
        downs = [
            Down(effect.stream, number, effect.members, closed, piece, part, len(pieces))
            for part, piece in enumerate(pieces)
        ]
        incoming = self._broadcasts[effect.stream] = _Incoming(downs[0])
        for down in downs:
            incoming.parts[down.part] = down
            self._pass_down(down)

    def reduce(self, effect: Reduce) -> list[Event]:
        reduction = self._reductions.setdefault(effect.tag, _Reduction(effect.members))
        reduction.contributed = True
        reduction.cut_short = effect.members == (self.node,)
        if effect.values is not None:
            values = effect.values
            if effect.weight != 1.0:
                scaled = self._empty(len(values), dtype=values.dtype, device=values.device)
                values = torch.mul(values, effect.weight, out=scaled)
            pieces = self._cut(values)
            for part, piece in zip(reduction.open(len(pieces)), pieces, strict=True):
                part.add(piece, effect.weight, {self.node: effect.steps})
        return self._advance(effect.tag)

    def receive(self, message: Up | Down[Any]) -> list[Event]:
        return self._receive_up(message) if isinstance(message, Up) else self._receive_down(message)

    def _receive_up(self, up: Up) -> list[Event]:
        if self._is_closed(up.tag):
            return []
        sums = self._reductions.setdefault(up.tag, _Reduction(up.members)).open(up.parts)
        sums[up.part].add(up.values, up.weight, up.covers)
        return self._advance(up.tag)

    def _receive_down(self, down: Down[Any]) -> list[Event]:
        incoming = self._broadcasts.get(down.stream)
        if incoming is None or incoming.number < down.number:
            incoming = self._broadcasts[down.stream] = _Incoming(down)
        if incoming.number > down.number or incoming.parts[down.part] is not None:
            return []
        incoming.parts[down.part] = down
        for tag in down.closed:
            self._close(tag)
        self._pass_down(down)
        pieces = incoming.known()
        if len(pieces) < down.parts:
            return []
        return [Broadcasted(down.stream, down.members, _join_message([piece.message for piece in pieces]))]

    def _cut(self, values: Tensor) -> list[Tensor]:
        """The parts that a tensor travels in."""
        if 0 < self._parameter_count < self._length == values.numel():
            return [*self._cut(values[: self._parameter_count]), values[self._parameter_count :]]
        if values.numel() == self._length - self._parameter_count:  # the buffers
            return [values]
        size = values.numel() * values.element_size() * self._bytes_scale
        return list(values.tensor_split(max(1, min(PARTS_MAX, math.ceil(size / PART_BYTES), values.numel()))))

    def _cut_message(self, message: Message) -> list[Message]:
        """The message in as many pieces as its largest tensor needs; every piece has its share of each tensor."""
        named = {
            name: value for name in message.__struct_fields__ if isinstance(value := getattr(message, name), Tensor)
        }
        if not named:
            return [message]
        largest = max(named, key=lambda name: named[name].numel())
        cuts = {largest: self._cut(named[largest])}
        parts = len(cuts[largest])
        cuts |= {name: list(tensor.tensor_split(parts)) for name, tensor in named.items() if name != largest}
        return [
            msgspec.structs.replace(message, **{name: cut[part] for name, cut in cuts.items()}) for part in range(parts)
        ]

    def lost(self, peer: str) -> list[Event]:
        latest = [incoming.known() for incoming in self._broadcasts.values()]
        before = [self._children(downs[0].members) for downs in latest]
        self._dead.add(peer)
        for downs, had in zip(latest, before, strict=True):
            for child in self._children(downs[0].members):
                if child not in had:
                    for down in downs:
                        self._send(child, down)
        return [event for tag in list(self._reductions) for event in self._advance(tag)]

    def _advance(self, tag: str) -> list[Event]:
        """Close the reduction at the root, or send its sums up, once all that can come has come."""
        reduction = self._reductions[tag]
        below = self._below(reduction.members)
        if not reduction.contributed:
            return []
        if reduction.members[0] == self.node:
            complete = all(below <= part.covered.keys() for part in reduction.sums) and (reduction.sums or not below)
            if not complete and not reduction.cut_short:
                return []
            self._close(tag)
            return [joined(tag, reduction.members, [(s.total, s.weight, s.covered) for s in reduction.sums])]
        parent = self._parent(reduction.members)
        for index, part in enumerate(reduction.sums):
            if part.sent is None and below <= part.covered.keys():
                assert part.total is not None
                parts = len(reduction.sums)
                part.sent = Up(tag, reduction.members, part.total, part.weight, part.covered, index, parts)
            if part.sent is not None and part.parent != parent:
                part.parent = parent
                self._send(parent, part.sent)
        return []

    def _is_closed(self, tag: str) -> bool:
        latest = self._closed.get(stream_of(tag))
        return latest is not None and _number(tag) <= _number(latest)

    def _close(self, tag: str) -> None:
        """Forget a reduction, and those of its stream before it."""
        if not self._is_closed(tag):
            self._closed[stream_of(tag)] = tag
            self._reductions = {open_: kept for open_, kept in self._reductions.items() if not self._is_closed(open_)}

    def _pass_down(self, down: Down[Any]) -> None:
        for child in self._children(down.members):
            self._send(child, down)

    def _parent(self, members: tuple[str, ...]) -> str:
        """The nearest living ancestor; the root, if it should be dead, stays the parent in name."""
        index = members.index(self.node)
        while index > 0:
            index = max(0, index - 2) if len(members) <= CHAINS_MAX else (index - 1) // 2
            if members[index] not in self._dead:
                break
        return members[index]

    def _children(self, members: tuple[str, ...]) -> list[str]:
        """The living children, those of dead children taken over."""
        found: list[str] = []
        open_ = [members.index(self.node)]
        while open_:
            for child in _child_indices(open_.pop(0), len(members)):
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
            for child in _child_indices(open_.pop(), len(members)):
                open_.append(child)
                if members[child] not in self._dead:
                    found.add(members[child])
        return found


def _number(tag: str) -> int:
    """Where a reduction is in its stream."""
    last = tag.rpartition(" ")[2]
    return int(last) if last.isdecimal() else 0


def _child_indices(index: int, count: int) -> range:
    first, last = (index + 2, index + 2) if index and count <= CHAINS_MAX else (2 * index + 1, 2 * index + 2)
    return range(first, min(last + 1, count))


def _join_message(pieces: list[Any]) -> Any:
    """The inverse of `Collectives._cut_message`."""
    if len(pieces) == 1:
        return pieces[0]
    names = [name for name in pieces[0].__struct_fields__ if isinstance(getattr(pieces[0], name), Tensor)]
    joined = {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in names}
    return msgspec.structs.replace(pieces[0], **joined)
