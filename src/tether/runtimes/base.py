"""What a run hands to a runtime, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from tether.machine import Checkpoint, Evaluate, Machine, Message, Node, Replica, Row
from tether.runtimes.interpreter import Recorder
from tether.trace import Meter, Span
from tether.vector import Empty, Shared


class Plan(Protocol):
    """Who takes part in a run and how each is built. A runtime may build nodes in other processes."""

    nodes: tuple[Node, ...]
    seed: int
    vector_bytes: int
    traced: bool
    record: bool
    #: the joint node is asked to stop after so long
    seconds: float | None

    @property
    def joint(self) -> str:
        """The node that holds the joint model, or "" if none is special."""
        ...

    @property
    def vital(self) -> frozenset[str]:
        """The nodes that the run cannot go on without: those that hold the joint model, each perhaps a part of it."""
        ...

    @property
    def messages(self) -> tuple[type[Message], ...]:
        """What nodes say to each other."""
        ...

    @property
    def compress(self) -> str:
        """The code of what nodes send, or "none"."""
        ...

    @property
    def steps(self) -> int:
        """How many steps each worker makes."""
        ...

    @property
    def pool_threads(self) -> int:
        """How many threads a node of its own process may use for loose work."""
        ...

    @property
    def shares(self) -> bool:
        """All nodes have one and the same vector."""
        ...

    @property
    def collective(self) -> bool:
        """Nodes exchange values by broadcasts and reductions only."""
        ...

    def build(
        self,
        node: Node,
        empty: Empty = torch.empty,
        shared: Shared | None = None,
        device: torch.device | None = None,
    ) -> tuple[Machine, Replica]:
        """The machine and the replica of one node.

        `empty` makes the tensors that it may send; its vector is `shared`, if there is such a thing; `device` computes
        its gradients, if it has one.
        """
        ...

    @property
    def source(self) -> Any:
        """What brings each worker a part of the data of its own; None if all read the same."""
        ...

    @property
    def random_seed(self) -> int:
        """What draws begin with: another number for every part of a run, so that none is made twice."""
        ...

    def state_of(self, node: Node) -> dict[str, Any]:
        """What an earlier part of the run has left for a node: a state for `Replica.restore`.

        With `random` in it, that of the generators of its process. A plan has it where it was made, and nowhere else.
        """
        ...

    def bring(self, data: Any) -> None:
        """Give the node of this process its own part of the data, before it is built."""
        ...

    def log(self, name: str) -> IO[bytes] | None:
        """A file for what a process prints."""
        ...

    def recorder(self, node: Node, replica: Replica) -> Recorder | None:
        """Where the node's events are written, if they are."""
        ...


@dataclass(frozen=True)
class NodeStates:
    """What nodes have besides their vectors, for a checkpoint."""

    #: of the node that holds the joint model, if it computes no gradients
    hub: dict[str, Any]
    #: of those that do, by their index: what `Replica.state` gives, and `random` of the generators of its process. None
    #: if they were not asked this time
    workers: dict[int, dict[str, Any]] | None


class Observer(Protocol):
    """The run, as the runtime tells it what happens. Times are seconds since the run began."""

    def meter(self, meter: Meter, now: float) -> None:
        """The figures of a node so far."""
        ...

    def record(self, node: str, values: Row, now: float) -> None:
        """A row of metrics."""
        ...

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        """The joint model at a moment."""
        ...

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None:
        """A state to save."""
        ...

    def observed(self) -> Sequence[dict[str, float]]:
        """What every evaluation of the joint model has found so far, in order, earlier parts of the run included."""
        ...

    def note(self, text: str) -> None:
        """Something a person should know: a worker died."""
        ...

    def stop_requested(self) -> str | None:
        """Why the run shall end early, if it shall."""
        ...

    def seconds_left(self) -> float:
        """How long the run may still take to end: without limit unless somebody waits for that."""
        ...


@dataclass
class Outcome:
    """How a run ended."""

    weights: Tensor
    seconds: float
    reason: str
    meters: dict[str, Meter] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    #: who died on the way
    lost: frozenset[str] = frozenset()
    events: int = 0


class Runtime(Protocol):
    """Where nodes run and how messages, time and computation happen."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def workers(self) -> int:
        """How many workers it has."""
        ...

    @property
    def virtual(self) -> bool:
        """Time is virtual: it stands still while something else is done."""
        ...

    @property
    def restarts(self) -> int:
        """How often a run that has lost its hub or all its workers goes on by itself."""
        ...

    @property
    def processors(self) -> int | None:
        """How many processors all nodes share; None where each has its own."""
        ...

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        """Run all nodes until the joint node has finished, or the first where none is special."""
        ...

    def describe(self) -> dict[str, Any]:
        """The settings, for the run directory."""
        ...
