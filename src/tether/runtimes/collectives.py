"""One node's part in broadcasts and reductions over the members of a run: the interface.

`runtimes/tree.py` implements it with messages between the nodes, `runtimes/spark/collectives.py` with Spark's own jobs.
A machine cannot tell which of the two carries out its `Broadcast` and `Reduce` effects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tether.core.effects import Broadcast, Reduce
from tether.core.events import Event, Reduced
from tether.core.message import Message, Tag
from tether.core.snapshot import Values, tensor
from tether.core.vector import Empty

#: the types of what an implementation sends for a protocol with messages of given types
MessageTypes = Callable[[tuple[type[Message], ...]], tuple[Any, ...]]


class CollectiveMessage(Message, frozen=True):
    """What an implementation sends. The interpreter hands such messages to it and not to the machine."""

    @property
    def title(self) -> str:
        """What it is part of, for the trace and for errors."""
        raise NotImplementedError


class CompressibleMessage(CollectiveMessage, frozen=True):
    """A collective message that is encoded in a run that compresses; others travel as they are."""

    @property
    def lane(self) -> str:
        """Messages of one lane follow each other: the rounding error of one is added to the next."""
        raise NotImplementedError


@dataclass(frozen=True)
class CollectiveContext:
    """What an implementation is given about its node."""

    node: str
    send: Callable[[str, Message], Any]
    #: how many bytes a byte of the vector stands for
    bytes_scale: float = 1.0
    #: where in the vector its buffers begin, and the length of the vector
    parameter_count: int = 0
    length: int = 0
    #: allocates tensors to send, in memory that can be lent
    empty: Empty = torch.empty
    #: the message as it travels to a node, which may be encoded; `send` does that by itself
    outgoing: Callable[[str, Message], Message] = lambda _, message: message


class Collectives(Protocol):
    """One node's part in all collectives. Most methods return the events that its machine must be given now."""

    def broadcast(self, effect: Broadcast) -> None:
        """At the root: send a message to all other members."""
        ...

    def reduce(self, effect: Reduce) -> list[Event]:
        """Contribute to a sum or, at the root, open it."""
        ...

    def receive(self, message: Any) -> list[Event]:
        """Handle a collective message of another node."""
        ...

    def lost(self, peer: str) -> list[Event]:
        """A member has died."""
        ...


#: how a node gets its collectives
MakeCollectives = Callable[[CollectiveContext], Collectives]


def weighted(values: Values, weight: float, empty: Empty) -> Tensor:
    """A member's values times its weight, in memory of `empty`; the values themselves if the weight is 1."""
    plain = tensor(values)
    if weight == 1.0:
        return plain
    return torch.mul(plain, weight, out=empty(len(plain), dtype=plain.dtype, device=plain.device))


def joined(tag: Tag, members: tuple[str, ...], parts: list[tuple[Tensor | None, float, dict[str, int]]]) -> Reduced:
    """The reduction that has these parts: for each its sum, its weight, and the steps of the members in it."""
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
