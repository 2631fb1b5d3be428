"""Performs the effects of one node's machine: the same code in every runtime.

A runtime gives each node a `Host`, which moves messages, keeps time and computes; everything else about effects is
decided here, so that a protocol meets the same world in the simulator and in a process of its own.

`feed` must not be entered by two threads at once; a runtime with threads holds the node's one lock around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from tether.compress import Compressor, Packed, Stream, unpack
from tether.errors import NodesLost, UsageError, WireError
from tether.machine import (
    Add,
    Blend,
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
    ReplicaState,
    Row,
    Send,
    SetTimer,
    Snapshot,
    StateSnapshot,
    Step,
    change,
    stream_of,
    tensors_of,
)
from tether.runtimes.collectives import Collectives, Down, Exchange, Up
from tether.trace import Meter, RowLimit, Tracer
from tether.vector import Empty
from tether.wire import pack_tree, payload_bytes, unpack_tree

T = TypeVar("T")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Host(Protocol):
    """What a runtime supplies to one node."""

    #: what a byte of this run's vector stands for, where another model is priced
    bytes_scale: float
    #: time stands still while something else is done, so that what takes real time costs nothing
    virtual: bool

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def send(self, to: str, message: Message) -> None:
        """Carry a message; never blocks."""
        ...

    def compute(self, effect: Compute) -> None:
        """Begin a gradient; a `GradientReady` follows."""
        ...

    def beside(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
        """Do the work now or beside what follows, and hand its result on as if an event had brought it."""
        ...

    def settle(self) -> None:
        """Wait until all work that was put beside is done."""
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
        compress: str = "none",
        empty: Empty = torch.empty,
        collectives: Callable[..., Exchange] = Collectives,
    ) -> None:
        """`empty` makes the tensors that the node sends; `collectives` carry out broadcasts and reductions."""
        self.node = node
        self.machine = machine
        self.replica = replica
        self.host = host
        self.meter = Meter(node)
        self.tracer = tracer or Tracer(enabled=False)
        self.finished = False
        self._rows = RowLimit()
        self._empty = empty
        self.collectives: Exchange = collectives(
            node, self._send, host.bytes_scale, replica.parameter_count, len(replica.weights), empty, self._outgoing
        )
        self._recorder = recorder
        self._checked = checked
        self._compressor: Compressor | None = None
        if compress != "none":
            self._compressor = Compressor(compress, replica.parameter_count, len(replica.weights))
        self._lost: set[str] = set()
        self._computing = False
        self._idle_since: float | None = None
        self._reducing: dict[str, float] = {}
        #: copies taken since the weights last changed: equal snapshots share one
        self._snapshots: dict[tuple[int, int | None], Tensor] = {}

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
                if isinstance(message, Packed):
                    try:
                        message = unpack(message)
                    except WireError:
                        self.meter.messages_refused += 1
                        return
                    event = Received(sender, message)
                if isinstance(message, self.collectives.messages):
                    queue.extend(self.collectives.receive(message))
                    return
            case PeerLost(peer=peer):
                self._lost.add(peer)
                if self._compressor is not None:
                    self._compressor.forget(peer)
                queue.extend(self.collectives.lost(peer))
            case GradientReady(loss=loss, samples=samples, seconds=seconds):
                self.meter.took_gradient(loss, samples, seconds)
                self.meter.gradients_skipped = self.replica.skipped
                self.meter.gradients_refused = self.replica.refused
                if not self.host.virtual:
                    self.meter.load_seconds = self.replica.load_seconds
                self.tracer.span("compute", "gradient", now - seconds, now)
                self._computing = False
            case Reduced(tag=tag):
                self.tracer.span("collective", f"reduction of {tag}", self._reducing.pop(tag), now)
            case Broadcasted(stream=stream):
                # a member's share in a reduction ends, as far as it can see, with the broadcast that answers it
                for tag in [tag for tag in self._reducing if stream_of(tag) == stream]:
                    self.tracer.span("collective", f"reduction of {tag}", self._reducing.pop(tag), now)
        effects = self.machine.handle(event, now)
        if self._recorder is not None:
            self._recorder(event, now, effects)
        self._snapshots.clear()
        for effect in effects:
            queue.extend(self._perform(effect, now))
        if isinstance(event, GradientReady) and not self._computing:
            self._idle_since = self.host.now()
        self.meter.spans_dropped = self.tracer.dropped
        if self._checked:
            self.machine.check()

    def _perform(self, effect: Effect, now: float) -> list[Event]:
        match effect:
            case Compute():
                if self._recorder is not None:
                    effect = msgspec.structs.replace(effect, wanted="flat")  # a record holds whole gradients
                if self._idle_since is not None:
                    self.meter.wait_seconds += now - self._idle_since
                    self.tracer.span("compute", "wait", self._idle_since, now)
                    self._idle_since = None
                self._computing = True
                self.host.compute(effect)
            case Add(loose=True) | Blend(loose=True):
                self.host.beside(partial(change, self.replica, effect), bool)
            case Step() | Blend():
                start = self.host.now()
                change(self.replica, effect)
                stop = self.host.now()
                self.meter.compute_seconds += stop - start
                self.tracer.span("compute", "step" if isinstance(effect, Step) else "pull", start, stop)
                self._snapshots.clear()
            case Install() | Add():
                change(self.replica, effect)
                self._snapshots.clear()
            case Send(to=to, message=message):
                if _is_loose(message):
                    self.host.beside(partial(self._resolve, message, {}), partial(self._send, to))
                else:
                    self._send(to, self._resolve(message, self._snapshots))
            case Reduce(tag=tag):
                self._reducing.setdefault(tag, now)
                return self.collectives.reduce(self._resolve(effect, self._snapshots))
            case Broadcast(stream=stream, members=members, message=message):
                self.collectives.broadcast(Broadcast(stream, members, self._resolve(message, self._snapshots)))
            case SetTimer(name=name, seconds=seconds):
                self.host.set_timer(name, seconds)
            case CancelTimer(name=name):
                self.host.set_timer(name, None)
            case Record(values=values, staleness=staleness):
                self.meter.applied(staleness)
                if values and (row := self._rows.take(values, now)):
                    self.host.record(row)
            case Evaluate():
                self.host.settle()
                self.host.evaluate(effect, self._copy_of_weights())
            case Checkpoint(parts=parts):
                self.host.settle()
                others = [unpack_tree(part.values, part.tensors) for part in parts]
                self.host.checkpoint(effect, self._copy_of_weights(), self.replica.state(others))
            case Fail(reason=reason, lost=lost):
                raise NodesLost(reason) if lost else UsageError(reason)
            case Finish(reason=reason):
                self.finished = True
                self.host.settle()
                if row := self._rows.rest():
                    self.host.record(row)
                self.host.finish(reason, self._copy_of_weights())
        return []

    def _copy_of_weights(self) -> Tensor:
        return Snapshot(0, None).take(self.replica.weights, self._empty)

    def _resolve(self, struct: _Struct, known: dict[tuple[int, int | None], Tensor]) -> _Struct:
        """The message with its snapshots taken, those that are `known` not again."""
        taken: dict[str, Any] = {}
        for name in struct.__struct_fields__:
            value = getattr(struct, name)
            if isinstance(value, Snapshot):
                key = value.start, value.stop
                if key in known and value.less is None:
                    taken[name] = known[key]
                else:
                    taken[name] = value.take(self.replica.weights, self._empty)
                if value.less is None:
                    known[key] = taken[name]
            elif isinstance(value, StateSnapshot):
                tensors: list[Tensor] = []
                taken[name] = ReplicaState(pack_tree(self.replica.state(), tensors), tensors)
        return msgspec.structs.replace(struct, **taken) if taken else struct

    def _send(self, to: str, message: Message) -> None:
        if to not in self._lost:
            self.host.send(to, self._outgoing(to, message))

    def _outgoing(self, to: str, message: Message) -> Message:
        """The message as it travels, counted as sent."""
        if self._compressor is not None:
            message = self._pack(self._compressor, to, message)
        self.meter.bytes_sent += round(message_bytes(message) * self.host.bytes_scale)
        self.meter.messages_sent += 1
        return message

    def _pack(self, compressor: Compressor, to: str, message: Message) -> Message:
        match message:
            case Up(tag=tag, part=part):
                stream = Stream("", f"reductions of {stream_of(tag)} {part}")
            case Down(stream=name, part=part):
                stream = Stream("", f"broadcasts of {name} {part}")
            case _:
                stream = Stream(to, f"{type(message).__name__} {getattr(message, 'start', '')}")
        packed = compressor.pack(stream, message)
        self.meter.bytes_saved = round((compressor.raw_bytes - compressor.packed_bytes) * self.host.bytes_scale)
        self.meter.squared_error = compressor.squared_error
        self.meter.squared_values = compressor.squared_values
        return packed


def _is_loose(message: Message) -> bool:
    values = (getattr(message, name) for name in message.__struct_fields__)
    return any(isinstance(value, Snapshot) and value.loose for value in values)


def message_bytes(message: Message) -> int:
    """The weight of the tensors in a message."""
    return payload_bytes(tensors_of(message))
