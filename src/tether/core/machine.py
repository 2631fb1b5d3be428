"""The contract between a protocol and a runtime: events in, effects out.

A protocol is a set of machines, one for each node of a run. A machine changes its state only in `handle`, which takes
one event and the time and returns the effects it wants, in order. A machine does no input or output and has no clock
and no randomness of its own, so the same machine runs in the simulator and in a process of its own.

What every machine and every runtime can rely on:

- Effects are performed in the order they are returned, all of them before the next event is handled.
- A machine may read `NodeContext.weights`, the live vector of its node, while it handles an event; it changes the
  vector only by effects (`Step`, `Install`, `Add`, `Blend`). `snapshot()` inside a message stands for the weights as
  they are when that effect is performed: `[Step(), Send(to, Push(values=snapshot()))]` sends the weights after the
  step.
- Effects marked `unordered` may run concurrently with later events, in several threads and without a lock on the vector
  (Hogwild): where two changes meet at one element, one of them may be lost. They are done before the next `Evaluate`,
  `Checkpoint` or `Finish`.
- `Compute` says in which form the machine wants the gradient. A machine that only steps with it does not get it, which
  saves a copy; one that passes it on unchanged may ask for the touched rows of embeddings instead of all rows.
- A tensor inside a `Send`, `Broadcast` or `Reduce` is read-only from then on. A gradient that was sent stays unchanged
  until the next `Compute`; `Compute(fresh=True)` uses another buffer, so the gradient never changes.
- At most one `Compute` is outstanding per node. After `DataEnded` none is answered any more.
- Messages between two nodes arrive in the order they were sent, or not at all if one of the two died.
- After `PeerLost(p)` nothing more from `p` arrives. Names are never used twice: a node that comes back has a new name.
- The run ends when the hub, the node whose vector is the joint model, performs `Finish`. A protocol may have no hub:
  then any node may evaluate, save and finish. The first node that finishes ends the run with its vector, and the run
  survives the death of any node while another one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tether.core.effects import Effect, GradientForm
from tether.core.events import Event
from tether.core.vector import Empty


@dataclass(frozen=True)
class Node:
    """A participant in a run. Nodes on one `host` share its network interface, and messages between them cost nothing.

    `index` numbers the workers: it selects a worker's part of the data, and its successor inherits it.
    """

    name: str
    role: str
    computes: bool = False
    index: int = 0
    host: str = ""
    #: the node above this one, in protocols with a tree
    parent: str = ""
    life: int = 1

    def successor(self) -> Node:
        """The node that replaces this one after its death: the same index and host under a new name."""
        first = self.name.partition("~")[0]
        return replace(self, name=f"{first}~{self.life + 1}", life=self.life + 1, host=self.host or first)


@dataclass(frozen=True)
class Schedule:
    """How far a run goes, and where an earlier part of it stopped.

    A run's position is counted in mini-batches. A step of the run has as many mini-batches as the run had workers when
    it began. The goal is a number of mini-batches or, without one, a number of steps for each worker.
    """

    steps: int
    evaluate_every: int
    batch_size: int = 1
    checkpoint_seconds: float = 30.0
    #: the total number of mini-batches; None if the goal is `steps` for each worker
    goal: int | None = None
    #: mini-batches in a step of the run; None: the number of workers
    step_batches: int | None = None
    first_step: int = 0
    #: the mini-batches that already count, as ranges (first, last + 1)
    counted: tuple[tuple[int, int], ...] = ()
    #: each worker has data of its own, so no other worker can train on its mini-batches
    data_bound: bool = False
    #: how many mini-batches a worker may load before it needs them
    upcoming: int = 2
    #: the share of the joint model's moving average that a step of the run leaves; 0: there is no average
    ema: float = 0.0

    @property
    def first_samples(self) -> int:
        """The number of samples that already count."""
        return sum(stop - start for start, stop in self.counted) * self.batch_size


@dataclass(frozen=True)
class NodeContext:
    """What a machine knows about its node and the run when it is made."""

    node: Node
    nodes: tuple[Node, ...]
    weights: Tensor
    parameter_count: int
    schedule: Schedule
    restored: dict[str, Any] | None = None
    #: allocates a tensor where sending it needs no copy
    empty: Empty = torch.empty

    @property
    def workers(self) -> tuple[str, ...]:
        """The nodes that compute gradients."""
        return tuple(node.name for node in self.nodes if node.computes)

    @property
    def joins_late(self) -> bool:
        """The node was not present when the run began: it replaces another node or is an additional one."""
        return all(node.name != self.node.name for node in self.nodes)


class Machine(Protocol):
    """One role of a protocol at one node."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; return what to do."""
        ...

    def check(self) -> None:
        """Raise `InvariantBroken` if the state is impossible."""
        ...


#: is called with every event that a machine handles, the time, and the effects that it returned
Recorder = Callable[[Event, float, list[Effect]], None]


class GradientResult(NamedTuple):
    """A gradient in the form that was asked for, with its loss and its number of samples."""

    gradient: Tensor
    loss: float
    samples: int
    touched: tuple[Tensor, ...] = ()


class Replica(Protocol):
    """Performs `Compute`, `Step` and `Install` at a node: a learner, or one with synthetic gradients."""

    weights: Tensor
    parameter_count: int
    #: how long `compute` has waited for data in total
    load_seconds: float
    #: how many gradients were not finite and were replaced by zero
    skipped: int
    #: how many were refused by the guard as far too long and were replaced by zero
    refused: int

    def seek(self, batch: int, upcoming: tuple[int, ...], position: int) -> None:
        """Set which mini-batch the next `compute` takes, which ones follow, and how far the run is."""
        ...

    def compute(self, form: GradientForm, fresh: bool) -> GradientResult:
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
        """Use this gradient as if `compute` had just computed it."""
        ...

    def average(self, decay: float) -> None:
        """Move the average of the weights towards them; the first call begins it."""
        ...

    @property
    def averaged(self) -> Tensor | None:
        """The average, if there is one: it is evaluated and returned instead of the weights."""
        ...

    def close(self) -> None:
        """End what loads data: the node is over."""
        ...

    def observe(self, metrics: dict[str, float]) -> None:
        """Pass on the metrics of an evaluation, for a learning-rate schedule that depends on them."""
        ...

    def state(self, others: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        """A copy of the optimizer's state: nested dictionaries and lists of tensors and plain values.

        Empty if the optimizer has never stepped. If it steps only the first part of the vector, the states of the
        `others`, which step the rest, are merged into it.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the optimizer from `state`, a state of the whole vector, if it is of the same kind."""
        ...
