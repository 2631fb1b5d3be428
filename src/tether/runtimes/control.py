"""What the driver of a run and its node processes say to each other, besides the protocol's own messages."""

from __future__ import annotations

from typing import Any

import msgspec
from torch import Tensor

from tether.machine import Message
from tether.machine import Row as RowOfMetrics
from tether.trace import Meter, Span

# ---- node to driver -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The node is built and its socket is bound; `address` is where it is reached from other machines."""

    address: str = ""


class Work(msgspec.Struct, frozen=True, array_like=True):
    """What a node is doing, for how long, and how long that took at most before; None if it never ended yet."""

    what: str
    seconds: float
    longest_seconds: float | None


class Alive(Message, frozen=True):
    """The node's process responds, and this is under way in it."""

    work: tuple[Work, ...]


class Note(Message, frozen=True):
    """Something a person should know."""

    text: str


class Report(Message, frozen=True):
    """The node's figures so far."""

    meter: Meter
    now: float


class Row(Message, frozen=True):
    """A row of metrics."""

    values: RowOfMetrics
    now: float


class Evaluation(Message, frozen=True):
    """The joint model at a moment, to be evaluated."""

    step: int
    samples: int
    final: bool
    weights: Tensor
    now: float


class Saved(Message, frozen=True):
    """A state to be saved."""

    step: int
    samples: int
    final: bool
    weights: Tensor
    state: Any
    replica_state: Any
    tensors: list[Tensor]
    now: float


class State(Message, frozen=True):
    """The answer to a `StateWanted` of that number: the state of the node's optimizer and of its random generators."""

    number: int
    state: Any
    tensors: list[Tensor]


class Finished(Message, frozen=True):
    """The node's machine has finished."""

    reason: str
    weights: Tensor
    now: float


class Failed(Message, frozen=True):
    """The node ends because of an error; `kind` is the class of the error."""

    kind: str
    text: str
    traceback: str


class Bye(Message, frozen=True):
    """The last word of a node: all it has measured."""

    meter: Meter
    spans: list[Span]


# ---- driver to node -------------------------------------------------------------------------------------------------


class Begin(Message, frozen=True):
    """All members are there, some of them at addresses of other machines."""

    members: tuple[str, ...]
    addresses: dict[str, str]


class Joined(Message, frozen=True):
    """A node has come while the run goes on."""

    peer: str
    role: str
    address: str = ""


class Lost(Message, frozen=True):
    """A member has died."""

    peer: str


class Restore(Message, frozen=True):
    """Before it begins: the state that the node's optimizer, and perhaps its random generators, shall begin with."""

    state: Any
    tensors: list[Tensor]


class StateWanted(Message, frozen=True):
    """Tell your state, under that number."""

    number: int


class Observed(Message, frozen=True):
    """What the latest evaluations of the joint model have found."""

    metrics: list[dict[str, float]]


class Stop(Message, frozen=True):
    """End early, in good order."""

    reason: str


class End(Message, frozen=True):
    """The run is over."""


FROM_NODE = (Hello, Alive, Note, Report, Row, Evaluation, Saved, State, Finished, Failed, Bye)
FROM_DRIVER = (Begin, Joined, Lost, Restore, StateWanted, Observed, Stop, End)
