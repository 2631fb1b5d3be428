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

from tether.core.compress import Compressor, FeedbackKey, Packed, unpack
from tether.core.effects import (
    Add,
    Average,
    Blend,
    Broadcast,
    CancelTimer,
    Checkpoint,
    Compute,
    Contributed,
    Effect,
    Evaluate,
    Fail,
    Finish,
    Install,
    Record,
    Reduce,
    Send,
    SetTimer,
    Step,
)
from tether.core.events import Broadcasted, Event, GradientReady, PeerLost, Received, Reduced
from tether.core.machine import Machine, Recorder, Replica
from tether.core.message import Message, ReplicaState, Row, Tag, Timer, tensors_of
from tether.core.snapshot import Snapshot, StateSnapshot
from tether.core.trace import Meter, RowLimit, Tracer
from tether.core.vector import Empty
from tether.core.wire import pack_tree, payload_bytes, unpack_tree
from tether.errors import NodesLost, UsageError, WireError
from tether.runtimes.collectives import CollectiveContext, CollectiveMessage, CompressibleMessage, MakeCollectives
from tether.runtimes.tree import TreeCollectives

#: where a checkpoint's state has the joint model's moving average
AVERAGE = "average"

T = TypeVar("T")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Host(Protocol):
    """What a runtime supplies to one node."""

    #: how many bytes a byte of this run's vector stands for, if another model's size is simulated
    bytes_scale: float
    #: time is virtual: work that takes real time costs nothing
    virtual: bool

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def send(self, to: str, message: Message) -> None:
        """Send a message; never blocks."""
        ...

    def compute(self, effect: Compute) -> None:
        """Begin a gradient; a `GradientReady` follows."""
        ...

    def run_unordered(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
        """Do the work now or concurrently with later events, and pass its result to `then` under the node's lock."""
        ...

    def drain(self) -> None:
        """Wait until all unordered work is done."""
        ...

    def set_timer(self, timer: Timer, seconds: float | None) -> None:
        """Set, move or, with None, cancel a timer. `TimerFired` follows."""
        ...

    def record(self, values: Row) -> None:
        """Add a row to the run's metrics."""
        ...

    def evaluate(self, effect: Evaluate, weights: Tensor) -> None:
        """Evaluate these weights."""
        ...

    def checkpoint(self, effect: Checkpoint, weights: Tensor, replica_state: dict[str, Any]) -> None:
        """Save this state."""
        ...

    def contributed(self) -> None:
        """The node's data has ended, and its steps are in the joint model."""
        ...

    def finish(self, reason: str, weights: Tensor) -> None:
        """The node is done and ends with these weights."""
        ...


class Carrier(Protocol):
    """Brings values between the host's memory and the device where a node's vector lives, if that is elsewhere."""

    def begin_event(self) -> None:
        """The values of earlier events may change from now on."""
        ...

    def leave(self, message: Any, then: Callable[[Any], Any]) -> None:
        """Call `then` with the message when its values are in the host's memory, after all earlier messages."""
        ...

    def arrive(self, event: Event) -> Event:
        """The event with its values on the device."""
        ...


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
        collectives: MakeCollectives = TreeCollectives,
        carrier: Carrier | None = None,
        copies: Empty | None = None,
    ) -> None:
        """`empty` allocates the tensors that the node sends; `collectives` carry out broadcasts and reductions.

        `carrier`: the node's vector is on a device, where `copies` allocates copies of it.
        """
        self.node = node
        self.machine = machine
        self.replica = replica
        self.host = host
        self.meter = Meter(node)
        self.tracer = tracer or Tracer(enabled=False)
        self.finished = False
        self._rows = RowLimit()
        self._empty = empty if copies is None else copies
        self._carrier = carrier
        self.collectives = collectives(
            CollectiveContext(
                node=node,
                send=self._send,
                bytes_scale=host.bytes_scale,
                parameter_count=replica.parameter_count,
                length=len(replica.weights),
                empty=empty,
                outgoing=self._outgoing,
            )
        )
        self._recorder = recorder
        self._checked = checked
        self._compressor: Compressor | None = None
        if compress != "none":
            self._compressor = Compressor(compress, replica.parameter_count, len(replica.weights))
        self._lost: set[str] = set()
        self._computing = False
        self._idle_since: float | None = None
        self._reducing: dict[Tag, float] = {}
        #: copies taken since the last change of the weights: equal snapshots share one
        self._snapshots: dict[tuple[int, int | None], Tensor] = {}

    def feed(self, event: Event) -> None:
        """Handle one event and all events that follow from it at once."""
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
                if isinstance(message, CollectiveMessage):
                    queue.extend(self.collectives.receive(message))
                    return
            case PeerLost(peer=peer):
                self._lost.add(peer)
                if self._compressor is not None:
                    self._compressor.forget(peer)
                queue.extend(self.collectives.lost(peer))
            case GradientReady(loss=loss, samples=samples, seconds=seconds):
                self.meter.count_gradient(loss, samples, seconds)
                self.meter.gradients_skipped = self.replica.skipped
                self.meter.gradients_refused = self.replica.refused
                if not self.host.virtual:
                    self.meter.load_seconds = self.replica.load_seconds
                self.tracer.span("compute", "gradient", now - seconds, now)
                self._computing = False
            case Reduced(tag=tag):
                self.tracer.span("collective", f"reduction of {tag}", self._reducing.pop(tag), now)
            case Broadcasted(stream=stream):
                # for a member, a reduction ends with the broadcast that answers it
                for tag in [tag for tag in self._reducing if tag.stream == stream]:
                    self.tracer.span("collective", f"reduction of {tag}", self._reducing.pop(tag), now)
        if self._carrier is not None:
            self._carrier.begin_event()
            event = self._carrier.arrive(event)
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
                    effect = msgspec.structs.replace(effect, form="dense")  # a record holds whole gradients
                if self._idle_since is not None:
                    self.meter.wait_seconds += now - self._idle_since
                    self.tracer.span("compute", "wait", self._idle_since, now)
                    self._idle_since = None
                self._computing = True
                self.host.compute(effect)
            case Add(unordered=True) | Blend(unordered=True):
                self.host.run_unordered(partial(change_weights, self.replica, effect), bool)
            case Step() | Blend():
                start = self.host.now()
                change_weights(self.replica, effect)
                stop = self.host.now()
                self.meter.compute_seconds += stop - start
                self.tracer.span("compute", "step" if isinstance(effect, Step) else "pull", start, stop)
                self._snapshots.clear()
            case Install() | Add():
                change_weights(self.replica, effect)
                self._snapshots.clear()
            case Send(to=to, message=message):
                if _is_unordered(message):
                    self.host.run_unordered(partial(self._resolve, message, {}), partial(self._send_values, to))
                else:
                    self._send_values(to, self._resolve(message, self._snapshots))
            case Reduce(tag=tag):
                self._reducing.setdefault(tag, now)
                resolved = self._resolve(effect, self._snapshots)
                if self._carrier is None:
                    return self.collectives.reduce(resolved)
                self._carrier.leave(resolved, self._reduce)
            case Broadcast(stream=stream, members=members, message=message):
                self._leave(
                    self._resolve(message, self._snapshots),
                    lambda sent: self.collectives.broadcast(Broadcast(stream, members, sent)),
                )
            case SetTimer(timer=timer, seconds=seconds):
                self.host.set_timer(timer, seconds)
            case CancelTimer(timer=timer):
                self.host.set_timer(timer, None)
            case Record(values=values, staleness=staleness):
                self.meter.count_staleness(staleness)
                if values and (row := self._rows.admit(values, now)):
                    self.host.record(row)
            case Average(decay=decay):
                self.replica.average(decay)
            case Evaluate():
                self.host.drain()
                self.host.evaluate(effect, self._copy_of_joint())
            case Checkpoint(parts=parts):
                self.host.drain()
                if self.replica.averaged is not None:
                    effect = msgspec.structs.replace(effect, state={**effect.state, AVERAGE: self._copy_of_joint()})
                others = [unpack_tree(part.values, part.tensors) for part in parts]
                self.host.checkpoint(effect, self._copy_of_weights(), self.replica.state(others))
                self.tracer.span("compute", "checkpoint", now, self.host.now())
            case Contributed():
                self.host.contributed()
            case Fail(reason=reason, lost=lost):
                raise NodesLost(reason) if lost else UsageError(reason)
            case Finish(reason=reason):
                self.finished = True
                self.host.drain()
                if row := self._rows.flush():
                    self.host.record(row)
                self.host.finish(reason, self._copy_of_joint())
        return []

    def _copy_of_weights(self) -> Tensor:
        return Snapshot(0, None).take(self.replica.weights, self._empty)

    def _copy_of_joint(self) -> Tensor:
        """The joint model: the weights, or their moving average if the run has one."""
        averaged = self.replica.averaged
        return self._copy_of_weights() if averaged is None else Snapshot(0, None).take(averaged, self._empty)

    def _resolve(self, struct: _Struct, known: dict[tuple[int, int | None], Tensor]) -> _Struct:
        """The message with tensors in place of its snapshots; `known` holds the copies that exist already."""
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

    def _leave(self, message: Message, then: Callable[[Message], Any]) -> None:
        """Call `then` with the message when its values are in the host's memory."""
        if self._carrier is None:
            then(message)
        else:
            self._carrier.leave(message, then)

    def _reduce(self, effect: Reduce) -> None:
        for event in self.collectives.reduce(effect):
            self.feed(event)

    def _send_values(self, to: str, message: Message) -> None:
        self._leave(message, partial(self._send, to))

    def _send(self, to: str, message: Message) -> None:
        if to not in self._lost:
            self.host.send(to, self._outgoing(to, message))

    def _outgoing(self, to: str, message: Message) -> Message:
        """The message as it travels; counts it as sent."""
        if self._compressor is not None:
            message = self._pack(self._compressor, to, message)
        self.meter.bytes_sent += round(message_bytes(message) * self.host.bytes_scale)
        self.meter.messages_sent += 1
        return message

    def _pack(self, compressor: Compressor, to: str, message: Message) -> Message:
        match message:
            case CompressibleMessage(lane=lane):
                key = FeedbackKey("", lane)
            case CollectiveMessage():
                return message
            case _:
                key = FeedbackKey(to, f"{type(message).__name__} {getattr(message, 'start', '')}")
        packed = compressor.pack(key, message)
        self.meter.bytes_saved = round((compressor.raw_bytes - compressor.packed_bytes) * self.host.bytes_scale)
        self.meter.squared_error = compressor.squared_error
        self.meter.squared_values = compressor.squared_values
        return packed


def change_weights(replica: Replica, effect: Effect) -> bool:
    """Perform an effect if it changes the node's own vector; True if it does."""
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


def _is_unordered(message: Message) -> bool:
    values = (getattr(message, name) for name in message.__struct_fields__)
    return any(isinstance(value, Snapshot) and value.unordered for value in values)


def message_bytes(message: Message) -> int:
    """The size of the tensors in a message."""
    return payload_bytes(tensors_of(message))
