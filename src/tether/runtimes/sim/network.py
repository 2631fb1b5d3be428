"""The simulated network: interfaces, links that are cut or slow, and collectives that have a price.

A message occupies the sender's interface for bytes/bandwidth, in the order of sending. Its head reaches the receiver
`latency` later and then occupies the receiver's interface for bytes/bandwidth, in the order of arrival.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any, Protocol

from tether.core.compress import Packed
from tether.core.effects import Broadcast, Reduce
from tether.core.events import Event, Received, Reduced
from tether.core.machine import Node
from tether.core.message import Message, tensors_of
from tether.core.trace import Tracer
from tether.core.vector import raw_bytes
from tether.core.wire import payload_bytes
from tether.errors import InvariantBroken
from tether.runtimes.collectives import CollectiveContext, CollectiveMessage
from tether.runtimes.interpreter import message_bytes
from tether.runtimes.sim.costs import Costs
from tether.runtimes.sim.timeline import Gate, Timeline
from tether.runtimes.tree import Down, TreeCollectives, Up

#: the size of a message besides its tensors
HEADER_BYTES = 200


class Endpoint(Protocol):
    """What the network needs to know about a node."""

    node: Node
    tracer: Tracer
    died_at: float | None

    def deliver(self, event: Event) -> None:
        """Hand an event to the node."""
        ...


class Network:
    """Carries messages between nodes; nodes of the same host share its interface and skip the network."""

    def __init__(self, timeline: Timeline, costs: Costs, *, checked: bool) -> None:
        """`checked`: checksum every tensor when it is sent and when it is delivered."""
        self._timeline = timeline
        self._costs = costs
        self._checked = checked
        self._interfaces: defaultdict[str, _Interface] = defaultdict(_Interface)
        #: by sender and receiver, as are the next two: closed while the link is cut
        self._cuts: dict[tuple[str, str], Gate] = {}
        #: when the head of the last message reaches the receiver
        self._last_head: dict[tuple[str, str], float] = {}
        #: which messages are still to be dropped, counted from the next one
        self._drops: dict[tuple[str, str], list[int]] = {}
        #: by node: until when its messages are late, and by how much
        self._delays: dict[str, tuple[float, float]] = {}

    def cut(self, sender: str, receiver: str, seconds: float) -> None:
        """Hold messages from one node to the other back from now on."""
        self._cuts.setdefault((sender, receiver), Gate(self._timeline)).close(seconds)

    def delay(self, node: str, latency: float, seconds: float) -> None:
        """From now on, messages from and to this node take longer."""
        self._delays[node] = self._timeline.now + seconds, latency

    def drop(self, sender: str, receiver: str, nth: int) -> None:
        """Lose the nth message from one node to the other."""
        self._drops.setdefault((sender, receiver), []).append(nth)

    def transmit(self, sender: Endpoint, receiver: Endpoint, message: Message) -> None:
        timeline, pair = self._timeline, (sender.node.name, receiver.node.name)
        if pair in self._drops:
            self._drops[pair] = [nth - 1 for nth in self._drops[pair]]
            if 0 in self._drops[pair]:
                return
        checksum = _checksum(message) if self._checked else 0
        if (sender.node.host or sender.node.name) == (receiver.node.host or receiver.node.name):
            timeline.at(timeline.now, self._deliver, sender, receiver, message, checksum, timeline.now)
            return
        duration = (message_bytes(message) * self._costs.bytes_scale + HEADER_BYTES) / self._costs.bytes_per_second
        interface = self._interface(sender.node)
        start = max(timeline.now, interface.out_free)
        interface.out_free = start + duration
        if sender.tracer.enabled:
            sender.tracer.span("out", f"{_label(message)} to {receiver.node.name}", start, start + duration)
        head = start + self._costs.latency_seconds
        if self._delays:  # messages of one link stay in order
            head = self._last_head[pair] = max(self._last_head.get(pair, 0.0), head + self._extra_latency(pair))
        timeline.at(head, self._arrive, sender, receiver, message, checksum, duration, start + duration)

    def _extra_latency(self, pair: tuple[str, str]) -> float:
        """How much longer a message between the two takes if it is sent now."""
        delays = (self._delays.get(name, (0.0, 0.0)) for name in pair)
        return sum(latency for until, latency in delays if self._timeline.now < until)

    def _arrive(
        self, sender: Endpoint, receiver: Endpoint, message: Message, checksum: int, duration: float, sent_at: float
    ) -> None:
        """The head of a message is at the receiver's interface."""
        cut = self._cuts.get((sender.node.name, receiver.node.name))
        if cut is not None and cut.is_closed():
            cut.hold(self._arrive, sender, receiver, message, checksum, duration, sent_at)
            return
        interface = self._interface(receiver.node)
        start = max(self._timeline.now, interface.in_free)
        interface.in_free = start + duration
        if receiver.tracer.enabled:
            receiver.tracer.span("in", f"{_label(message)} from {sender.node.name}", start, start + duration)
        self._timeline.at(interface.in_free, self._deliver, sender, receiver, message, checksum, sent_at)

    def _deliver(self, sender: Endpoint, receiver: Endpoint, message: Message, checksum: int, sent_at: float) -> None:
        if sender.died_at is not None and sender.died_at < sent_at:
            return  # it died before the message had left it completely
        if self._checked and _checksum(message) != checksum:
            raise InvariantBroken(
                f"{sender.node.name} changed a tensor of {_label(message)} after sending it to {receiver.node.name}"
            )
        receiver.deliver(Received(sender.node.name, message))

    def _interface(self, node: Node) -> _Interface:
        return self._interfaces[node.host or node.name]


class _Interface:
    """A host's network interface: until when each direction is occupied."""

    def __init__(self) -> None:
        self.out_free = 0.0
        self.in_free = 0.0


class PricedCollectives(TreeCollectives):
    """TreeCollectives with a price, such as that of Spark's jobs and of serialization.

    The root prepares broadcasts one after the other before they leave it, and takes in finished reductions one after
    the other, each for `exchange_seconds` and for its bytes times `exchange_seconds_per_byte`.
    """

    def __init__(self, context: CollectiveContext, endpoint: Endpoint, timeline: Timeline, costs: Costs) -> None:
        super().__init__(context)
        self._endpoint = endpoint
        self._timeline = timeline
        self._costs = costs
        #: until when the root is busy with earlier ones, in each direction
        self._out_free = self._in_free = 0.0

    def broadcast(self, effect: Broadcast) -> None:
        self._out_free = max(self._out_free, self._timeline.now) + self._price(message_bytes(effect.message))
        self._timeline.at(self._out_free, super().broadcast, effect)

    def reduce(self, effect: Reduce) -> list[Event]:
        return self._postpone_reduced(super().reduce(effect))

    def receive(self, message: Up | Down[Any]) -> list[Event]:
        return self._postpone_reduced(super().receive(message))

    def lost(self, peer: str) -> list[Event]:
        return self._postpone_reduced(super().lost(peer))

    def _price(self, size: int) -> float:
        return self._costs.exchange_seconds + size * self._costs.exchange_seconds_per_byte

    def _postpone_reduced(self, events: list[Event]) -> list[Event]:
        """Deliver finished reductions later; the other events."""
        for event in events:
            if isinstance(event, Reduced):
                size = 0 if event.total is None else payload_bytes([event.total])
                self._in_free = max(self._in_free, self._timeline.now) + self._price(size)
                self._timeline.at(self._in_free, self._endpoint.deliver, event)
        return [event for event in events if not isinstance(event, Reduced)]


def _label(message: Message) -> str:
    """What a transfer is called in the trace and in errors."""
    match message:
        case CollectiveMessage(title=title):
            return title
        case Packed(message=packed):
            return _label(packed)
    return type(message).__name__


def _checksum(message: Message) -> int:
    checksum = 0
    for tensor in tensors_of(message):
        checksum = zlib.crc32(raw_bytes(tensor), checksum)
    return checksum
