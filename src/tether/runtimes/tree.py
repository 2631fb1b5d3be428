"""Collectives by messages between the members, along a tree.

The members of a collective form a tree by their position; `members[0]` is the root. Broadcasts go down. Partial sums go
up, each with the names of the members it covers. The root has two children. Up to `CHAINS_MAX` members, every other
member has one child, which makes two chains; beyond that it has two. A member that relays a broadcast twice and sends
its sum once is slower than the root, but chains of many members are long.

Large tensors travel in parts: while a node relays one part it receives the next, so each level of the tree costs the
time of one part and not of the whole. A vector's buffers are a part of their own.

When a member dies, its nearest living ancestor takes over its children. Nothing is lost or counted twice:

- a member keeps the partial sums that it sent until the root has closed the reduction, and sends them again to its new
  parent;
- a partial sum is accepted only if none of the names it covers is already covered;
- a partial sum of a closed reduction is ignored. Reductions of one stream follow each other, so the number of the
  latest closed one tells that all before it are closed;
- a member waits exactly for the living members below it;
- the latest broadcast of each stream is kept and sent again to children that are taken over; a member that already has
  it ignores it.

If a member dies while it contributes, some of its parts may count and others not. Each part is scaled to the same
weight, so that its mean is the mean over the members in it. Only members that are in all parts are contributors.

The root may close a reduction before all members have contributed, if a member does not answer.

This works because a dead name is never used again, and nothing from it arrives once its death is known.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Generic, TypeVar, Union

import msgspec
import torch
from torch import Tensor

from tether.core.effects import Broadcast, Reduce
from tether.core.events import Broadcasted, Event
from tether.core.message import Message, Stream, Tag
from tether.runtimes.collectives import CollectiveContext, CompressibleMessage, joined, weighted

#: the most members that form two chains instead of a binary tree
CHAINS_MAX = 17
#: a tensor travels in parts of about this size, and in at most `PARTS_MAX` of them
PART_BYTES = 512 * 1024
PARTS_MAX = 8
M = TypeVar("M")


class Up(CompressibleMessage, frozen=True):
    """A partial sum, or a part of it, on its way to the root."""

    tag: Tag
    members: tuple[str, ...]
    values: Tensor
    weight: float
    #: the members in it, each with the steps that it reported
    covers: dict[str, int]
    part: int = 0
    parts: int = 1

    @property
    def title(self) -> str:
        return f"reduction of {self.tag}"

    @property
    def lane(self) -> str:
        return f"reductions of {self.tag.stream} {self.part}"


class Down(CompressibleMessage, Generic[M], frozen=True):
    """A broadcast, or a part of it, on its way from the root, with the latest closed reduction of each stream."""

    stream: Stream
    number: int
    members: tuple[str, ...]
    closed: tuple[Tag, ...]
    message: M
    part: int = 0
    parts: int = 1

    @property
    def title(self) -> str:
        return f"broadcast of {self.stream}"

    @property
    def lane(self) -> str:
        return f"broadcasts of {self.stream} {self.part}"


def message_types(types: tuple[type[Message], ...]) -> tuple[Any, ...]:
    """What travels along the tree when a protocol has messages of these types."""
    return Up, Down[Union[types]] if types else Down[None]  # type: ignore[valid-type]  # noqa: UP007


class _Sum:
    """A member's view of one part of a reduction."""

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
    """A member's view of one reduction."""

    def __init__(self, members: tuple[str, ...]) -> None:
        self.members = members
        self.contributed = False
        #: at the root: close with what has arrived
        self.cut_short = False
        #: empty until a contribution shows how many parts there are
        self.sums: list[_Sum] = []

    def open(self, parts: int) -> list[_Sum]:
        if not self.sums:
            self.sums = [_Sum() for _ in range(parts)]
        return self.sums


class _Incoming:
    """The parts of a stream's latest broadcast that have arrived."""

    def __init__(self, down: Down[Any]) -> None:
        self.number = down.number
        self.parts: list[Down[Any] | None] = [None] * down.parts

    def known(self) -> list[Down[Any]]:
        return [part for part in self.parts if part is not None]


class _Place:
    """Where a node stands in the tree of a collective's living members."""

    def __init__(self, node: str, members: tuple[str, ...], dead: set[str]) -> None:
        self.members = members
        index = members.index(node)
        #: the nearest living ancestor; the root counts as one even if it is dead
        self.parent = members[_parent_index(index, members, dead)]
        #: the living children, including those of dead children
        self.children: list[str] = []
        #: every living member below the node
        self.below: set[str] = set()
        adopted, further = deque([index]), deque[int]()
        while adopted:
            for child in _child_indices(adopted.popleft(), len(members)):
                (adopted if members[child] in dead else further).append(child)
                if members[child] not in dead:
                    self.children.append(members[child])
        while further:
            child = further.popleft()
            further.extend(_child_indices(child, len(members)))
            if members[child] not in dead:
                self.below.add(members[child])


class TreeCollectives:
    """Broadcast and reduction by messages along the tree."""

    def __init__(self, context: CollectiveContext) -> None:
        self.node = context.node
        self._send = context.send
        self._context = context
        self._dead: set[str] = set()
        #: in the tree of the latest collective, since most have the same members
        self._latest_place: _Place | None = None
        self._reductions: dict[Tag, _Reduction] = {}
        self._broadcasts: dict[Stream, _Incoming] = {}
        #: the latest closed reduction of each stream
        self._closed: dict[Stream, Tag] = {}

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
            values = weighted(effect.values, effect.weight, self._context.empty)
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
        """The parts in which a tensor travels."""
        parameter_count, length = self._context.parameter_count, self._context.length
        if 0 < parameter_count < length == values.numel():
            return [*self._cut(values[:parameter_count]), values[parameter_count:]]
        if values.numel() == length - parameter_count:  # the buffers
            return [values]
        size = values.numel() * values.element_size() * self._context.bytes_scale
        return list(values.tensor_split(max(1, min(PARTS_MAX, math.ceil(size / PART_BYTES), values.numel()))))

    def _cut_message(self, message: Message) -> list[Message]:
        """The message in as many pieces as its largest tensor needs; each piece has its share of every tensor."""
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
        before = [self._place(downs[0].members).children for downs in latest]
        self._dead.add(peer)
        self._latest_place = None
        for downs, had in zip(latest, before, strict=True):
            for child in self._place(downs[0].members).children:
                if child not in had:
                    for down in downs:
                        self._send(child, down)
        return [event for tag in list(self._reductions) for event in self._advance(tag)]

    def _advance(self, tag: Tag) -> list[Event]:
        """At the root close the reduction, elsewhere send its sums up, once everything has arrived that can arrive."""
        reduction = self._reductions[tag]
        if not reduction.contributed:
            return []
        place = self._place(reduction.members)
        below = place.below
        if reduction.members[0] == self.node:
            complete = all(below <= part.covered.keys() for part in reduction.sums) and (reduction.sums or not below)
            if not complete and not reduction.cut_short:
                return []
            self._close(tag)
            return [joined(tag, reduction.members, [(s.total, s.weight, s.covered) for s in reduction.sums])]
        for index, part in enumerate(reduction.sums):
            if part.sent is None and below <= part.covered.keys():
                assert part.total is not None
                parts = len(reduction.sums)
                part.sent = Up(tag, reduction.members, part.total, part.weight, part.covered, index, parts)
            if part.sent is not None and part.parent != place.parent:
                part.parent = place.parent
                self._send(place.parent, part.sent)
        return []

    def _is_closed(self, tag: Tag) -> bool:
        latest = self._closed.get(tag.stream)
        return latest is not None and tag.number <= latest.number

    def _close(self, tag: Tag) -> None:
        """Forget a reduction and all earlier ones of its stream."""
        if not self._is_closed(tag):
            self._closed[tag.stream] = tag
            self._reductions = {open_: kept for open_, kept in self._reductions.items() if not self._is_closed(open_)}

    def _pass_down(self, down: Down[Any]) -> None:
        for child in self._place(down.members).children:
            self._send(child, down)

    def _place(self, members: tuple[str, ...]) -> _Place:
        if self._latest_place is None or self._latest_place.members != members:
            self._latest_place = _Place(self.node, members, self._dead)
        return self._latest_place


def _parent_index(index: int, members: tuple[str, ...], dead: set[str]) -> int:
    while index > 0:
        index = max(0, index - 2) if len(members) <= CHAINS_MAX else (index - 1) // 2
        if members[index] not in dead:
            break
    return index


def _child_indices(index: int, count: int) -> range:
    first, last = (index + 2, index + 2) if index and count <= CHAINS_MAX else (2 * index + 1, 2 * index + 2)
    return range(first, min(last + 1, count))


def _join_message(pieces: list[Any]) -> Any:
    """The inverse of `TreeCollectives._cut_message`."""
    if len(pieces) == 1:
        return pieces[0]
    names = [name for name in pieces[0].__struct_fields__ if isinstance(getattr(pieces[0], name), Tensor)]
    joined = {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in names}
    return msgspec.structs.replace(pieces[0], **joined)
