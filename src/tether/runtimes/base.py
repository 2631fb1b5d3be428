"""The interface of runtimes: what a run passes to a runtime, and what it gets back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from tether.core.device import Device
from tether.core.effects import Checkpoint, Evaluate
from tether.core.machine import Machine, Node, Recorder, Replica
from tether.core.message import Message, Row
from tether.core.trace import Meter, Span
from tether.core.vector import Empty, Shared
from tether.errors import UsageError


class Plan(Protocol):
    """The nodes of a run and how each is built. A runtime may build nodes in other processes."""

    nodes: tuple[Node, ...]
    seed: int
    vector_bytes: int
    traced: bool
    record: bool
    #: the hub is asked to stop after this time
    seconds: float | None

    @property
    def hub(self) -> str:
        """The node that holds the joint model, or "" if there is none."""
        ...

    @property
    def vital(self) -> frozenset[str]:
        """The nodes that the run cannot lose: those that hold the joint model or a part of it."""
        ...

    @property
    def messages(self) -> tuple[type[Message], ...]:
        """The messages that nodes send to each other."""
        ...

    @property
    def compress(self) -> str:
        """How nodes compress what they send, or "none"."""
        ...

    @property
    def steps(self) -> int:
        """How many steps each worker makes."""
        ...

    @property
    def pool_threads(self) -> int:
        """How many threads a node's process may use for unordered effects."""
        ...

    @property
    def shares(self) -> bool:
        """All nodes have one and the same vector."""
        ...

    @property
    def collective(self) -> bool:
        """Nodes exchange values only by broadcasts and reductions."""
        ...

    def build(
        self,
        node: Node,
        empty: Empty = torch.empty,
        shared: Shared | None = None,
        device: Device | None = None,
    ) -> tuple[Machine, Replica]:
        """The machine and the replica of one node.

        `empty` allocates the tensors that it may send. `shared` is its vector, if all nodes share one. `device`
        computes its gradients, if it has one; its vector is there too, unless it is shared.
        """
        ...

    def device(self, node: Node, number: int | None) -> Device | None:
        """The device of a node; None: the CPU. `number` is that of the device that the node's process was given."""
        ...

    @property
    def source(self) -> Any:
        """Brings each worker its own part of the data; None if all workers read the same data."""
        ...

    @property
    def first_round(self) -> int:
        """If workers have data of their own: how many mini-batches of each place count already."""
        ...

    @property
    def scripted(self) -> bool:
        """Workers run a script of the user's, whose own loop makes the steps."""
        ...

    @property
    def loop_seconds(self) -> float:
        """How long such a loop may go without a step before its process is killed."""
        ...

    def program(self, node: Node) -> Callable[[Any, Node], bool] | None:
        """What a node's process runs, given its spec, instead of the node; False if it has reported an error."""
        ...

    def is_shown(self, node: Node) -> bool:
        """Whether a node prints where the caller prints, and not into a log."""
        ...

    def complete(self, directory: Path) -> tuple[Node, ...] | None:
        """In a scripted run: the nodes besides the workers, which start now. None while no worker has joined.

        `directory` is the run's own, where the first worker has described its model.
        """
        ...

    @property
    def random_seed(self) -> int:
        """The seed of this part of the run. Every part has another one, so that no random draw repeats."""
        ...

    def state_of(self, node: Node) -> dict[str, Any]:
        """The state that an earlier part of the run saved for a node, for `Replica.restore`.

        Its entry `random` is the state of the process's random generators. Only the process that made the plan has it.
        """
        ...

    def portable(self) -> tuple[Any, list[Tensor]] | None:
        """The plan as plain values and tensors, for machines that have the task's code; None if it must be pickled."""
        ...

    def bring(self, data: Any) -> None:
        """Give this process's node its own part of the data, before the node is built."""
        ...

    def log(self, name: str) -> IO[bytes] | None:
        """A file for the output of a process."""
        ...

    def recorder(self, node: Node, replica: Replica) -> Recorder | None:
        """Writes the node's events, if the run is recorded."""
        ...


@dataclass(frozen=True)
class NodeStates:
    """The states of nodes besides their vectors, for a checkpoint."""

    #: the state of the hub, if it computes no gradients
    hub: dict[str, Any]
    #: the states of the workers by index: the result of `Replica.state`, and `random`, the state of the process's
    #: random generators. None if the workers were not asked this time
    workers: dict[int, dict[str, Any]] | None


class Observer(Protocol):
    """Receives what happens in a run. Times are seconds since the run began."""

    def meter(self, meter: Meter, now: float) -> None:
        """The current figures of a node."""
        ...

    def record(self, node: str, values: Row, now: float) -> None:
        """A row of metrics."""
        ...

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None:
        """The joint model is to be evaluated."""
        ...

    def measured(self, step: int, metrics: dict[str, float], now: float, *, final: bool) -> None:
        """A user's own loop has evaluated the joint model; `final`: after the end of the run."""
        ...

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None:
        """A state to save."""
        ...

    def observed(self) -> Sequence[dict[str, float]]:
        """The metrics of all evaluations so far, in order, including earlier parts of the run."""
        ...

    def note(self, text: str) -> None:
        """Something a person should know, such as the death of a worker."""
        ...

    def recent_rows(self, after: int) -> list[tuple[int, Any]]:
        """The latest rows of metrics with their numbers, of those with a larger number than this."""
        ...

    def stop_requested(self) -> str | None:
        """The reason to end the run early, if there is one."""
        ...

    def seconds_left(self) -> float:
        """How long the run may still take to end; infinite unless it was interrupted."""
        ...


class NullObserver:
    """An observer that ignores everything."""

    def meter(self, meter: Meter, now: float) -> None: ...

    def record(self, node: str, values: Row, now: float) -> None: ...

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None: ...

    def measured(self, step: int, metrics: dict[str, float], now: float, *, final: bool) -> None: ...

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None: ...

    def observed(self) -> Sequence[dict[str, float]]:
        return ()

    def note(self, text: str) -> None: ...

    def recent_rows(self, after: int) -> list[tuple[int, Any]]:
        return []

    def stop_requested(self) -> str | None:
        return None

    def seconds_left(self) -> float:
        return math.inf


@dataclass
class Outcome:
    """How a run ended."""

    weights: Tensor
    seconds: float
    reason: str
    meters: dict[str, Meter] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    #: the nodes that died
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
        """Time is virtual: it does not pass while the caller works."""
        ...

    @property
    def restarts(self) -> int:
        """How often a run that has lost its hub or all its workers restarts by itself."""
        ...

    @property
    def processors(self) -> int | None:
        """How many processors all nodes share; None if each node has its own."""
        ...

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        """Run all nodes until the hub has finished or, without a hub, the first node."""
        ...

    def describe(self) -> dict[str, Any]:
        """The settings, for the run directory."""
        ...


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse a setting of a runtime that is not a whole number, or too small."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise UsageError(f"{name} must be at least {least}, not {value}")


def check_source(plan: Plan, name: str) -> None:
    """Refuse a task whose rows another runtime than that of this name brings."""
    if plan.source is not None and plan.source.engine != name:
        engine = plan.source.engine
        raise UsageError(f"{engine.title()} brings this task its rows: run it with on=tether.{engine.title()}(...)")
