"""The actions that a machine asks for: its output, which the interpreter performs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from torch import Tensor

from tether.core.message import Message, ReplicaState, Row, Stream, Tag, Timer
from tether.core.snapshot import Values


class Effect(msgspec.Struct, frozen=True, tag=True):
    """Something a machine wants done."""


#: the form in which a machine gets a gradient. "none": only the node's own `Step` uses it; "dense": the flat tensor;
#: "rows": that tensor without the embeddings that are stepped by rows, and the rows that the batch touched
GradientForm = Literal["none", "dense", "rows"]


class Compute(Effect, frozen=True):
    """Take the gradient of a mini-batch at the weights as they are now.

    `batch` is its number in the run's sequence of mini-batches; `upcoming` are the ones that this node will probably
    take next, so that they can be loaded ahead. `position` is how far the run is, in mini-batches: a step with this
    gradient has the learning rate that the schedule gives at that position.
    """

    form: GradientForm = "none"
    fresh: bool = False
    batch: int = 0
    upcoming: tuple[int, ...] = ()
    position: int = 0


class Step(Effect, frozen=True):
    """One optimizer step, with the given gradient or the node's own; `rate` scales the learning rate of this step.

    `position` is how far the run is, in mini-batches, for the schedule; by default that of the last `Compute`.
    `staleness` is the number of updates that the gradient missed: for this step, momentum is reduced accordingly.
    """

    gradient: Tensor | None = None
    rate: float = 1.0
    touched: tuple[Tensor, ...] = ()
    position: int | None = None
    staleness: float = 0.0


class Install(Effect, frozen=True):
    """Overwrite the vector from position `start`."""

    values: Tensor
    start: int = 0


class Add(Effect, frozen=True):
    """Add `rate` times the values to the vector from position `start`."""

    values: Tensor
    rate: float = 1.0
    start: int = 0
    unordered: bool = False


class Blend(Effect, frozen=True):
    """Move the vector, from position `start`, the share `rate` of the way to the values."""

    values: Tensor
    rate: float
    start: int = 0
    unordered: bool = False


class Send(Effect, frozen=True):
    """A message to one other node. If it carries part of the vector, its field `start` says where the part begins."""

    to: str
    message: Message


class Reduce(Effect, frozen=True):
    """Take part in the weighted sum `tag` over `members`. The root, `members[0]`, opens it and contributes nothing.

    What compression loses of one sum is added to the next sum of the same stream.

    A root that does not want to wait any longer performs it again with itself as the only member. The reduction then
    closes with the contributions that have arrived.
    """

    tag: Tag
    members: tuple[str, ...]
    values: Values | None = None
    weight: float = 0.0
    #: the number of steps that the member reports to the root
    steps: int = 0


class Broadcast(Effect, frozen=True):
    """At the root, `members[0]`: one message for all other members, relayed by them.

    A later broadcast on the same stream supersedes an earlier one: a member may never see the earlier one.
    """

    stream: Stream
    members: tuple[str, ...]
    message: Message


class SetTimer(Effect, frozen=True):
    """Fire once after that time; setting a timer again moves it."""

    timer: Timer
    seconds: float


class CancelTimer(Effect, frozen=True):
    """Forget a timer; one that was never set is fine."""

    timer: Timer


class Record(Effect, frozen=True):
    """Put a row into the run's metrics, and the staleness of each applied gradient into its histogram."""

    values: Row = {}
    staleness: tuple[int, ...] = ()


class Average(Effect, frozen=True):
    """Move the average of the joint model towards the node's vector: what is left of it is this share."""

    decay: float


class Evaluate(Effect, frozen=True):
    """Evaluate the node's vector as the joint model while training goes on."""

    step: int
    samples: int
    final: bool = False


class Checkpoint(Effect, frozen=True):
    """Save the node's vector, its optimizer and the protocol's own state while training goes on."""

    step: int
    samples: int
    state: dict[str, Any] = {}
    final: bool = False
    #: the states of other nodes that step parts of the vector, in the order of the parts
    parts: tuple[ReplicaState, ...] = ()


class Contributed(Effect, frozen=True):
    """After `DataEnded`: all steps of this worker are in the joint model, or will be when the run ends."""


class Fail(Effect, frozen=True):
    """The run ends with this error. With `lost`, it can resume from its last checkpoint."""

    reason: str
    lost: bool = False


class Finish(Effect, frozen=True):
    """This node is done."""

    reason: str
