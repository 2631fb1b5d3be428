"""What happens at a node: the input of its machine."""

from __future__ import annotations

import msgspec
from torch import Tensor

from tether.core.message import Message, Stream, Tag, Timer


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something that happened at this node."""


class Started(Event, frozen=True):
    """The first event of every node. `members` are the nodes that are present, including this one."""

    members: tuple[str, ...]


class GradientReady(Event, frozen=True):
    """The outstanding `Compute` is done; `seconds` is how long it took.

    `gradient` and `touched` have the form that was asked for; if `touched` holds rows, the two belong together, in a
    `Step` too. `exchange_seconds` is the CPU time that exchanges took from training on the same processors since the
    last gradient. It is 0 where exchanges cost no CPU time, as in the simulator.
    """

    gradient: Tensor
    loss: float
    samples: int
    seconds: float
    exchange_seconds: float = 0.0
    touched: tuple[Tensor, ...] = ()


class DataEnded(Event, frozen=True):
    """At a worker: it makes no further step, and the outstanding `Compute` has no gradient.

    The machine brings the steps made so far into the joint model, performs `Contributed`, and delays no other node.
    """


class Received(Event, frozen=True):
    """A message that another node sent to this one."""

    sender: str
    message: Message


class Reduced(Event, frozen=True):
    """At the root: the weighted sum over the contributors of a reduction. Without contributors the weight is 0.

    `steps` holds the number of steps that each contributor reported.
    """

    tag: Tag
    total: Tensor | None
    weight: float
    contributors: tuple[str, ...]
    steps: tuple[int, ...] = ()


class Broadcasted(Event, frozen=True):
    """At a member: a message that the root (`members[0]`) broadcast."""

    stream: Stream
    members: tuple[str, ...]
    message: Message


class TimerFired(Event, frozen=True):
    """This timer was set, and its time has come."""

    timer: Timer


class PeerJoined(Event, frozen=True):
    """A node has joined the run."""

    peer: str
    role: str


class PeerLost(Event, frozen=True):
    """A node has died."""

    peer: str


class StopRequested(Event, frozen=True):
    """At the hub, or at every node where there is no hub: end the run early, in good order."""

    reason: str
