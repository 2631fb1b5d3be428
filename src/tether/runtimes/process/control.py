"""What the driver of a run and its node processes say to each other, besides the protocol's own messages."""

from __future__ import annotations

from typing import Any

import msgspec
from torch import Tensor

from tether.core.message import Message
from tether.core.message import Row as RowOfMetrics
from tether.core.trace import Meter, Span

#: the name under which the driver of a run receives
DRIVER = "driver"
#: how long processes are given to end by themselves
GRACE_SECONDS = 1.5

# ---- node to driver -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The node is built and its socket is bound. Other machines reach it at `address`."""

    address: str = ""


class Work(msgspec.Struct, frozen=True, array_like=True):
    """A kind of work that is under way, for how long, and the longest that it took before; None the first time."""

    what: str
    seconds: float
    longest_seconds: float | None


class Alive(Message, frozen=True):
    """The node's process responds, and this work is under way in it."""

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


class Checkpoint(Message, frozen=True):
    """The joint model and the states of its node at a moment, to be saved."""

    step: int
    samples: int
    final: bool
    weights: Tensor
    state: Any
    replica_state: Any
    tensors: list[Tensor]
    now: float


class State(Message, frozen=True):
    """The answer to the `StateRequest` of this number: the state of the node's optimizer and its random generators."""

    number: int
    state: Any
    tensors: list[Tensor]


class Contributed(Message, frozen=True):
    """The node's data has ended, and its steps are in the joint model."""


class Measured(Message, frozen=True):
    """Metrics of the joint model, which the user's own code has computed; `final`: the run was over by then."""

    step: int
    metrics: dict[str, float]
    final: bool
    now: float


class Finished(Message, frozen=True):
    """The node's machine has finished."""

    reason: str
    weights: Tensor
    now: float


class Failed(Message, frozen=True):
    """The node ends because of an error; `kind` is the name of its class."""

    kind: str
    text: str
    traceback: str


class Bye(Message, frozen=True):
    """The last message of a node: all that it has measured."""

    meter: Meter
    spans: list[Span]


# ---- driver to node -------------------------------------------------------------------------------------------------


class Begin(Message, frozen=True):
    """All members are ready. `addresses` are those of members on other machines."""

    members: tuple[str, ...]
    addresses: dict[str, str]


class Joined(Message, frozen=True):
    """A node has joined while the run goes on."""

    peer: str
    role: str
    address: str = ""


class Lost(Message, frozen=True):
    """A member has died."""

    peer: str


class Restore(Message, frozen=True):
    """Before the node begins: the initial state of its optimizer and perhaps of its random generators."""

    state: Any
    tensors: list[Tensor]


class StateRequest(Message, frozen=True):
    """Send your state, under this number."""

    number: int


class Observed(Message, frozen=True):
    """The metrics of the latest evaluations of the joint model."""

    metrics: list[dict[str, float]]


class Stop(Message, frozen=True):
    """End the run early and in good order."""

    reason: str


class End(Message, frozen=True):
    """The run is over. The user's own loop is given the joint model."""

    weights: tuple[Tensor, ...] = ()


# ---- between nodes --------------------------------------------------------------------------------------------------


class JointRequest(Message, frozen=True):
    """Send the weights of the joint model as they are now."""


class JointWeights(Message, frozen=True):
    """The answer to a `JointRequest`."""

    weights: Tensor


FROM_NODE = (Hello, Alive, Note, Report, Row, Evaluation, Checkpoint, State, Finished, Failed, Bye)
#: only from nodes that run a script of the user's
FROM_SCRIPT = (Contributed, Measured)
FROM_DRIVER = (Begin, Joined, Lost, Restore, StateRequest, Observed, Stop, End)
BETWEEN_NODES = (JointRequest, JointWeights)
