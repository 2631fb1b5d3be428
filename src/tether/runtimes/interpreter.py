"""Performs the effects of one node's machine: the same code in every runtime.

A runtime gives each node a `Host`, which moves messages, keeps time and computes; everything else about effects is
decided here, so that a protocol meets the same world in the simulator and in a process of its own.

`feed` must not be entered by two threads at once; a runtime with threads holds the node's one lock around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
from torch import Tensor

from tether.errors import UsageError
from tether.machine import (
    Broadcast,
    Broadcasted,
    CancelTimer,
    Checkpoint,
    Compute,
    Effect,
    Evaluate,
    Event,
    Fail,
    Finish,
    GradientReady,
    Install,
    Machine,
    Message,
    PeerLost,
    Received,
    Record,
    Reduce,
    Reduced,
    Replica,
    Row,
    Send,
    SetTimer,
    Snapshot,
    Step,
    tensors_of,
)
from tether.runtimes.collectives import Collectives, Down, Up
from tether.trace import Meter, Tracer
from tether.wire import payload_bytes


class Host(Protocol):
    """What a runtime supplies to one node."""

    #: what a byte of this run's vector stands for, where another model is priced
    bytes_scale: float

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def send(self, to: str, message: Message) -> None:
        """Carry a message; never blocks."""
        ...

    def compute(self, fresh: bool) -> None:
        """Begin a gradient; a `GradientReady` follows."""
        ...

    def set_timer(self, name: str, seconds: float | None) -> None:
        """Set, move or (None) cancel a timer; a `TimerFired` follows."""
        ...

    def record(self, values: Row) -> None:
        """Take a row of metrics."""
        ...

    def evaluate(self, effect: Evaluate, weights: Tensor) -> None:
        """Have these weights evaluated."""
        ...

    def checkpoint(self, effect: Checkpoint, weights: Tensor, replica_state: dict[str, Any]) -> None:
        """Have this state saved."""
        ...

    def finish(self, reason: str, weights: Tensor) -> None:
        """This node is done, with these weights."""
        ...


_Struct = TypeVar("_Struct", bound=msgspec.Struct)

#: told of every event given to a machine, when, and the effects it returned
Recorder = Callable[[Event, float, list[Effect]], None]


class Interpreter:
    """One node: its machine, its replica and what it has measured."""

    def __init__(
        self,
        node: str,
        machine: Machine,
        replica: Replica,
        host: Host,
        *,
        tracer: Tracer | None = None,
        recorder: Recorder | None = None,
        checked: bool = False,
    ) -> None:
        self.node = node
        self.machine = machine
        self.replica = replica
        self.host = host
        self.meter = Meter(node)
        self.tracer = tracer or Tracer(enabled=False)
        self.finished = False
        self._collectives = Collectives(node, self._send)
        self._recorder = recorder
        self._checked = checked
        self._lost: set[str] = set()
        self._computing = False
        self._idle_since: float | None = None
        self._reducing: dict[str, float] = {}
        self._snapshots: dict[Snapshot, Tensor] = {}

    def feed(self, event: Event) -> None:
        """Take in one event, and whatever follows from it at once."""
        queue = deque([event])
        while queue:
            self._take(queue.popleft(), queue)

    def _take(self, event: Event, queue: deque[Event]) -> None:
        now = self.host.now()
        match event:
            case Received(sender=sender, message=message):
                if sender in self._lost:
                    self.meter.messages_refused += 1
                    return
                self.meter.bytes_received += round(message_bytes(message) * self.host.bytes_scale)
                if isinstance(message, Up | Down):
                    queue.extend(self._collectives.receive(message))
                    return
            case PeerLost(peer=peer):
                self._lost.add(peer)
                queue.extend(self._collectives.lost(peer))
            case GradientReady(loss=loss, samples=samples, seconds=seconds):
                self.meter.took_gradient(loss, samples, seconds)
                self.tracer.span("compute", "gradient", now - seconds, now)
                self._computing = False
            case Reduced(tag=tag):
                self.tracer.span("collective", f"reduction of {tag}", self._reducing.pop(tag), now)
            case Broadcasted(stream=stream):
                # a member's share in a reduction ends, as far as it can see, with the broadcast that answers it
                for tag, start in self._reducing.items():
                    self.tracer.span("collective", f"{tag} until {stream}", start, now)
                self._reducing.clear()
        effects = self.machine.handle(event, now)
        if self._recorder is not None:
            self._recorder(event, now, effects)
        self._snapshots.clear()
        for effect in effects:
            queue.extend(self._perform(effect, now))
        if isinstance(event, GradientReady) and not self._computing:
            self._idle_since = self.host.now()
        if self._checked:
            self.machine.check()

    def _perform(self, effect: Effect, now: float) -> list[Event]:
        match effect:
            case Compute(fresh=fresh):
                if self._idle_since is not None:
                    self.meter.wait_seconds += now - self._idle_since
                    self.tracer.span("compute", "wait", self._idle_since, now)
                    self._idle_since = None
                self._computing = True
                self.host.compute(fresh)
            case Step(gradient=gradient, rate=rate):
                start = self.host.now()
                self.replica.step(gradient, rate)
                stop = self.host.now()
                self.meter.compute_seconds += stop - start
                self.tracer.span("compute", "step", start, stop)
                self._snapshots.clear()
            case Install(values=values, start=start):
                self.replica.weights[start : start + len(values)].copy_(values)
                self._snapshots.clear()
            case Send(to=to, message=message):
                self._send(to, self._resolve(message))
            case Reduce(tag=tag):
                self._reducing[tag] = now
                return self._collectives.reduce(self._resolve(effect))
            case Broadcast(stream=stream, members=members, message=message):
                self._collectives.broadcast(Broadcast(stream, members, self._resolve(message)))
            case SetTimer(name=name, seconds=seconds):
                self.host.set_timer(name, seconds)
            case CancelTimer(name=name):
                self.host.set_timer(name, None)
            case Record(values=values, staleness=staleness):
                self.meter.applied(staleness)
                if values:
                    self.host.record(values)
            case Evaluate():
                self.host.evaluate(effect, self.replica.weights.clone())
            case Checkpoint():
                self.host.checkpoint(effect, self.replica.weights.clone(), self.replica.state())
            case Fail(reason=reason):
                raise UsageError(reason)
            case Finish(reason=reason):
                self.finished = True
                self.host.finish(reason, self.replica.weights)
        return []

    def _resolve(self, struct: _Struct) -> _Struct:
        """The message with its snapshots taken; equal snapshots between two changes of the weights share one copy."""
        taken = {}
        for name in struct.__struct_fields__:
            value = getattr(struct, name)
            if isinstance(value, Snapshot):
                if value not in self._snapshots:
                    self._snapshots[value] = self.replica.weights[value.start : value.stop].clone()
                taken[name] = self._snapshots[value]
        return msgspec.structs.replace(struct, **taken) if taken else struct

    def _send(self, to: str, message: Message) -> None:
        if to in self._lost:
            return
        self.meter.bytes_sent += round(message_bytes(message) * self.host.bytes_scale)
        self.meter.messages_sent += 1
        self.host.send(to, message)


def message_bytes(message: Message) -> int:
    """The weight of the tensors in a message, those of a broadcast included."""
    return payload_bytes(tensors_of(message.message if isinstance(message, Down) else message))
