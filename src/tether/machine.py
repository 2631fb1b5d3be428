"""The contract between a protocol and a runtime: events in, effects out.

A protocol is a set of machines, one for each node of a run. A machine changes its state only in `handle`, which is
given one event and the time, and returns the effects it wants, in order. It does no input or output and has neither
clock nor source of randomness, so the same machine runs in the simulator and in a process of its own.

What holds for every machine and every runtime:

- Effects are performed in the order they are returned, all of them before the next event is handled.
- A machine may read `Seat.weights`, the live vector of its node, while it handles an event; it changes the vector only
  by effects (`Step`, `Install`, `Add`, `Blend`). `snapshot()` inside a message stands for the weights as they are when
  that effect is performed: `[Step(), Send(to, Push(values=snapshot()))]` sends the weights after the step.
- What is marked `loose` may be done beside later events, by several threads at once and without a lock on the vector
  (Hogwild): where two changes meet at one element, one of them may be lost there. It is done before the next
  `Evaluate`, `Checkpoint` or `Finish`.
- What a gradient is wanted for is said with `Compute`: a machine that only steps with it is not given it, which saves a
  copy; one that passes it on as it is may have the touched rows of embeddings instead of all.
- A tensor inside a `Send`, `Broadcast` or `Reduce` is read-only from then on. A gradient that was sent stays untouched
  until the next `Compute`; `Compute(fresh=True)` leaves it alone for good and uses another buffer.
- At most one `Compute` is outstanding per node.
- Messages between two nodes arrive in the order they were sent, or not at all if one of the two died.
- After `PeerLost(p)` nothing more of `p` arrives. Names are never used twice: who comes back has a new one.
- The run ends when the joint node, the one whose vector is the joint model, performs `Finish`. A protocol may have no
  such node: then any may evaluate, save and finish, the first that finishes ends the run with its vector, and the run
  survives the death of each as long as another computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from tether.vector import Empty

M = TypeVar("M")
#: a row of metrics
Row = dict[str, float | int | str | list[int]]


class Message(msgspec.Struct, frozen=True, tag=True):
    """What nodes say to each other. Subclasses name their fields; tensors travel as raw frames."""


class ReplicaState(Message, frozen=True):
    """What `Replica.state` gives, as it travels: its plain values, and the tensors that they refer to."""

    values: Any
    tensors: list[Tensor]


# ---- events ---------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something that happened at this node."""


class Started(Event, frozen=True):
    """The first event of every node. `members` are the nodes present now, this one included."""

    members: tuple[str, ...]


class GradientReady(Event, frozen=True):
    """The outstanding `Compute` is done; `seconds` is how long it took.

    `gradient` and `touched` are what was wanted of it; with rows in `touched` the two go together, in a `Step` too.
    `exchange_seconds` are the processor's that the node has spent on exchanges since the gradient before, and that
    training on the same processors went without. Where exchanges take none, as in the simulator, it is 0.
    """

    gradient: Tensor
    loss: float
    samples: int
    seconds: float
    exchange_seconds: float = 0.0
    touched: tuple[Tensor, ...] = ()


class Received(Event, frozen=True):
    """A message that another node sent to this one."""

    sender: str
    message: Message


class Reduced(Event, frozen=True):
    """At the root: the weighted sum over the contributors of the reduction `tag`. Nobody left gives weight 0.

    `steps` are those that each of the contributors told.
    """

    tag: str
    total: Tensor | None
    weight: float
    contributors: tuple[str, ...]
    steps: tuple[int, ...] = ()


class Broadcasted(Event, frozen=True):
    """At a member: a message that the root (`members[0]`) broadcast."""

    stream: str
    members: tuple[str, ...]
    message: Message


class TimerFired(Event, frozen=True):
    """The timer that was set under this name."""

    name: str


class PeerJoined(Event, frozen=True):
    """A node has come while the run goes on."""

    peer: str
    role: str


class PeerLost(Event, frozen=True):
    """A node has died."""

    peer: str


class StopRequested(Event, frozen=True):
    """At the joint node, or at every node where none is special: the run shall end early, in good order."""

    reason: str


# ---- effects --------------------------------------------------------------------------------------------------------


class Effect(msgspec.Struct, frozen=True, tag=True):
    """Something a machine wants done."""


#: of a gradient: that the node's own `Step` has it, no more; the flat tensor; or that tensor without the embeddings
#: that are stepped by rows, and behind it the rows that were touched
Wanted = Literal["step", "flat", "rows"]


class Compute(Effect, frozen=True):
    """Take the gradient of a mini-batch at the weights as they are now.

    `batch` is its number in the run's sequence of mini-batches; `upcoming` are those that this node is likely to take
    next, so that they can be loaded ahead. `position` is how far the run is, in mini-batches: a step with this gradient
    has the learning rate that the schedule gives there.
    """

    wanted: Wanted = "step"
    fresh: bool = False
    batch: int = 0
    upcoming: tuple[int, ...] = ()
    position: int = 0


class Step(Effect, frozen=True):
    """One optimizer step, with the given gradient or the node's own; `rate` scales the learning rate this once.

    `position` is how far the run is, in mini-batches, for the schedule; without it, the position of the last `Compute`.
    `staleness`: where the optimizer has momentum, it is lessened this once by the updates that the gradient has missed.
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
    loose: bool = False


class Blend(Effect, frozen=True):
    """Move the vector, from position `start`, the share `rate` of the way to the values."""

    values: Tensor
    rate: float
    start: int = 0
    loose: bool = False


class Send(Effect, frozen=True):
    """A message to one other node. One that carries a part of the vector says where that begins in a field `start`."""

    to: str
    message: Message


class Reduce(Effect, frozen=True):
    """Take part in the weighted sum `tag` over `members`. The root, `members[0]`, opens it and contributes nothing.

    The last word of a tag numbers the reduction; the words before it are the stream of the broadcasts that answer it,
    such as "shard 2" in "shard 2 7". Reductions of one stream follow each other, with growing numbers. What compression
    loses of one sum is added to the next of the same stream.

    A root that does not want to wait any longer performs it again with itself as the only member: the reduction closes
    with what has come.
    """

    tag: str
    members: tuple[str, ...]
    values: Tensor | None = None
    weight: float = 0.0
    #: steps that the member tells the root
    steps: int = 0


class Broadcast(Effect, frozen=True):
    """At the root, `members[0]`: one message for all other members, relayed by them.

    A later broadcast on the same stream supersedes an earlier one: a member may be spared the earlier. Different parts
    of the vector have streams of their own.
    """

    stream: str
    members: tuple[str, ...]
    message: Message


class SetTimer(Effect, frozen=True):
    """Fire once after that time; setting a name again moves it."""

    name: str
    seconds: float


class CancelTimer(Effect, frozen=True):
    """Forget a timer; an unknown name is fine."""

    name: str


class Record(Effect, frozen=True):
    """Put a row into the run's metrics, and the staleness of each applied gradient into its histogram."""

    values: Row = {}
    staleness: tuple[int, ...] = ()


class Evaluate(Effect, frozen=True):
    """Have the node's vector evaluated as the joint model, beside training."""

    step: int
    samples: int
    final: bool = False


class Checkpoint(Effect, frozen=True):
    """Save the node's vector, its optimizer and the protocol's own state, beside training."""

    step: int
    samples: int
    state: dict[str, Any] = {}
    final: bool = False
    #: the states of other nodes that step parts of the vector, in the order of the parts
    parts: tuple[ReplicaState, ...] = ()


class Fail(Effect, frozen=True):
    """This node cannot take part: the run ends with this error. `lost`: it can resume from its last checkpoint."""

    reason: str
    lost: bool = False


class Finish(Effect, frozen=True):
    """This node is done."""

    reason: str


# ---- snapshots ------------------------------------------------------------------------------------------------------


class Snapshot(msgspec.Struct, frozen=True):
    """A copy of part of the vector, yet to be taken."""

    start: int
    stop: int | None
    loose: bool = False
    less: Tensor | None = None

    def take(self, weights: Tensor, empty: Empty = torch.empty) -> Tensor:
        part = weights[self.start : self.stop]
        taken = empty(len(part), dtype=part.dtype, device=part.device)
        return taken.copy_(part) if self.less is None else torch.sub(part, self.less, out=taken)


def snapshot(start: int = 0, stop: int | None = None, *, loose: bool = False, less: Tensor | None = None) -> Tensor:
    """Stands for `weights[start:stop]`, less something, at the moment the effect that holds it is performed.

    A message with a loose one may be overtaken by later ones.
    """
    return cast(Tensor, Snapshot(start, stop, loose, less))


class StateSnapshot(msgspec.Struct, frozen=True):
    """A copy of the state of the node's optimizer, yet to be taken."""


def replica_state() -> ReplicaState:
    """Stands for the state of the node's optimizer at the moment the effect that holds it is performed."""
    return cast(ReplicaState, StateSnapshot())


# ---- machines and where they sit ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One place in a run. Nodes on one `host` share its network interface and talk for nothing.

    `index` numbers the workers: it picks a worker's part of the data, and a successor inherits it.
    """

    name: str
    role: str
    computes: bool = False
    index: int = 0
    host: str = ""
    #: who is above, in protocols with a tree
    parent: str = ""
    life: int = 1

    def successor(self) -> Node:
        """Who comes back when this node has died: the same place, another name."""
        first = self.name.partition("~")[0]
        return replace(self, name=f"{first}~{self.life + 1}", life=self.life + 1, host=self.host or first)


@dataclass(frozen=True)
class Schedule:
    """How far a run goes, and where an earlier part of it left off.

    A run's position is counted in mini-batches, and a step of the run is as many of them as it had workers when it
    began. The goal is a number of mini-batches, or, without one, of steps that each worker makes.
    """

    steps: int
    evaluate_every: int
    batch_size: int = 1
    checkpoint_seconds: float = 30.0
    #: mini-batches in all; None if the goal is `steps` of each worker
    goal: int | None = None
    #: mini-batches in a step of the run; None: as many as there are workers
    step_batches: int | None = None
    first_step: int = 0
    #: the mini-batches that count already: pairs of the first and the one after the last
    counted: tuple[tuple[int, int], ...] = ()
    #: each worker has data of its own, so nobody can train on another's mini-batches
    data_bound: bool = False

    @property
    def first_samples(self) -> int:
        """The samples that count already."""
        return sum(stop - start for start, stop in self.counted) * self.batch_size


@dataclass(frozen=True)
class Seat:
    """All that a machine is told about its place in a run."""

    node: Node
    nodes: tuple[Node, ...]
    weights: Tensor
    parameter_count: int
    schedule: Schedule
    restored: dict[str, Any] | None = None
    #: makes a tensor that will be sent, where that costs no copy
    empty: Empty = torch.empty

    @property
    def workers(self) -> tuple[str, ...]:
        """The nodes that compute gradients."""
        return tuple(node.name for node in self.nodes if node.computes)

    @property
    def joins_late(self) -> bool:
        """The node was not there when the run began: it succeeds another, or is one more."""
        return all(node.name != self.node.name for node in self.nodes)


class Machine(Protocol):
    """One role of a protocol at one node."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; return what to do."""
        ...

    def check(self) -> None:
        """Raise `InvariantBroken` if the state is impossible."""
        ...


class Taken(NamedTuple):
    """A gradient, or what was wanted of it, with its loss and its number of samples."""

    gradient: Tensor
    loss: float
    samples: int
    touched: tuple[Tensor, ...] = ()


class Replica(Protocol):
    """What performs `Compute`, `Step` and `Install` at a node: a learner, or a stand-in with synthetic gradients."""

    weights: Tensor
    parameter_count: int
    #: how long `compute` has waited for data so far
    load_seconds: float
    #: how many gradients were not finite, and are zero therefore
    skipped: int
    #: how many were far longer than is usual here, and are zero therefore
    refused: int

    def seek(self, batch: int, upcoming: tuple[int, ...], position: int) -> None:
        """Say which mini-batch the next `compute` takes, which ones follow, and how far the run is."""
        ...

    def compute(self, wanted: Wanted, fresh: bool) -> Taken:
        """Take the gradient of the next mini-batch."""
        ...

    def step(
        self,
        gradient: Tensor | None,
        rate: float,
        touched: tuple[Tensor, ...] = (),
        position: int | None = None,
        staleness: float = 0.0,
    ) -> None:
        """One optimizer step."""
        ...

    def load_gradient(self, gradient: Tensor) -> None:
        """Take a gradient as if it had just been computed."""
        ...

    def observe(self, metrics: dict[str, float]) -> None:
        """Take in what an evaluation of the joint model has found, for a learning rate that depends on it."""
        ...

    def state(self, others: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        """A copy of the optimizer's state: nested dictionaries and lists of tensors and plain values.

        Empty if the optimizer has never stepped. Where it steps only the first part of the vector: with the states of
        the `others`, that of the whole.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Take up the optimizer where `state`, one of the whole vector, left it, if it is of the same kind."""
        ...


def stream_of(tag: str) -> str:
    """The stream of the broadcasts that answer a reduction."""
    return tag.rpartition(" ")[0] or tag


def change(replica: Replica, effect: Effect) -> bool:
    """Perform an effect that changes the node's own vector; whether it was one."""
    match effect:
        case Step(gradient=gradient, rate=rate, touched=touched, position=position, staleness=staleness):
            replica.step(gradient, rate, touched, position, staleness)
        case Install(values=values, start=start):
            replica.weights[start : start + len(values)].copy_(values)
        case Add(values=values, rate=rate, start=start):
            replica.weights[start : start + len(values)].add_(values, alpha=rate)
        case Blend(values=values, rate=rate, start=start):
            replica.weights[start : start + len(values)].lerp_(values, rate)
        case _:
            return False
    return True


_PLAIN = frozenset((bool, int, float, str, type(None)))


def tensors_of(message: Message) -> list[Tensor]:
    """The tensors in a message: its fields, what tuples and lists of tensors hold, and those of messages inside it."""
    found: list[Tensor] = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if type(value) in _PLAIN:  # most fields are, and isinstance is slow for tensors
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Message):
            found += tensors_of(value)
        elif isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor):
            found += value
    return found


def with_tensors(message: M, tensors: Iterable[Tensor]) -> M:
    """The same message with other tensors, in the order of `tensors_of`."""
    left = iter(tensors)

    def renewed(value: Any) -> Any:
        match value:
            case Tensor():
                return next(left)
            case Message():
                fields = {name: renewed(getattr(value, name)) for name in value.__struct_fields__}
                return msgspec.structs.replace(value, **fields)
            case [Tensor(), *_]:
                return type(value)(next(left) for _ in value)
        return value

    return cast(M, renewed(message))
