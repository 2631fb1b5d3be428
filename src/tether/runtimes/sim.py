"""A cluster in virtual time, in one process.

Gradients are real and charged with modelled compute time; every host has a full-duplex network interface with bandwidth
and latency. Events are handled in the order of (time, sequence number) and all randomness comes from the run's seed, so
a run repeats bit for bit. After every event the node's invariants are checked, and every tensor is checksummed when it
is sent and when it is delivered.

The network: a message occupies the sender's interface for bytes/bandwidth, in the order of sending; its head reaches
the receiver `latency` later and then occupies the receiver's interface for bytes/bandwidth, in the order of arrival.

Broadcasts and reductions may have a price beside that, such as that of Spark's jobs and of serialization: the root
prepares broadcasts one after the other before they leave it, and takes in finished reductions one after the other, each
for `exchange_seconds` and for bytes/`exchange_rate`.
"""

from __future__ import annotations

import heapq
import json
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tether import units
from tether.compress import Packed
from tether.errors import InvariantBroken, NodesLost, Stalled, UsageError
from tether.machine import (
    Broadcast,
    Checkpoint,
    Compute,
    Evaluate,
    Event,
    GradientReady,
    Machine,
    Message,
    Node,
    PeerJoined,
    PeerLost,
    Received,
    Reduce,
    Reduced,
    Row,
    Started,
    StopRequested,
    Taken,
    TimerFired,
    tensors_of,
)
from tether.runtimes.base import NodeStates, Observer, Outcome, Plan
from tether.runtimes.collectives import Collectives, Down, Up
from tether.runtimes.faults import Fault, Faults
from tether.runtimes.interpreter import Interpreter, T, message_bytes
from tether.runtimes.randomness import random_state, randomness_kept, restore_random, seed_all
from tether.trace import Tracer
from tether.vector import Shared, raw_bytes
from tether.wire import payload_bytes

#: what a message weighs besides its tensors
HEADER_BYTES = 200


@dataclass(frozen=True)
class StepTime:
    """How long a gradient takes: fixed, drawn, per worker, with stragglers."""

    seconds: float = 0.1
    #: standard deviation over mean of a log-normal draw; 0 is fixed
    spread: float = 0.0
    #: workers that are always so many times slower, by name
    factors: Mapping[str, float] = field(default_factory=dict)
    #: the chance that a step straggles, and how many times longer it then takes
    straggle_chance: float = 0.0
    straggle_factor: float = 10.0

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise UsageError(f"a step takes some time: step_seconds cannot be {self.seconds}")
        if self.spread < 0 or not 0 <= self.straggle_chance <= 1:
            raise UsageError("the spread of step times cannot be negative, nor a chance outside 0..1")

    def draw(self, node: Node, rng: np.random.Generator) -> float:
        seconds = self.seconds * self.factors.get(node.name, 1.0)
        if self.spread:
            sigma = np.sqrt(np.log1p(self.spread**2))
            seconds *= float(rng.lognormal(-(sigma**2) / 2, sigma))
        if self.straggle_chance and rng.random() < self.straggle_chance:
            seconds *= self.straggle_factor
        return seconds


@dataclass(frozen=True)
class Sim:
    """Where to run: a simulated cluster. `model_bytes` and `step_seconds` may be those of another, larger model."""

    workers: int = 4
    link: str | float = "1gbit"
    latency: str | float = "0.2ms"
    #: a number, a text with a unit, or a `StepTime`, perhaps as the mapping that `describe` gives
    step_seconds: str | float | StepTime | Mapping[str, Any] = 0.1
    model_bytes: str | int | None = None
    #: what a broadcast or a reduction costs beside the link: per use, and as a bandwidth; None is nothing
    exchange_seconds: str | float = 0.0
    exchange_rate: str | float | None = None
    faults: Faults = field(default_factory=Faults)
    #: check invariants after every event and tensors after every transfer
    checked: bool = True
    #: how long it takes until a death is known
    detect_seconds: float = 0.5
    #: give up after so many events since the last fault struck or healed; 0 is never
    events_max: int = 0
    #: intra-operation threads of torch; the number can change the last bits of a result
    threads: int = 1

    name = "sim"
    virtual = True
    processors = None
    restarts = 0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers must be at least 1, not {self.workers}")
        if units.bytes_per_second(self.link, "the link") <= 0:
            raise UsageError("the link needs some bandwidth, such as 1gbit")
        units.seconds(self.latency, "the latency")
        units.seconds(self.exchange_seconds, "exchange_seconds")
        if self.exchange_rate is not None and units.bytes_per_second(self.exchange_rate, "exchange_rate") <= 0:
            raise UsageError("exchange_rate is a bandwidth, such as 200mbit; leave it out if bytes cost nothing more")
        self.step_time  # noqa: B018 (refuses a bad value now)
        if self.model_bytes is not None and units.byte_count(self.model_bytes, "model_bytes") <= 0:
            raise UsageError("model_bytes must be more than 0, such as 7MiB")

    @property
    def step_time(self) -> StepTime:
        if isinstance(self.step_seconds, StepTime):
            return self.step_seconds
        if isinstance(self.step_seconds, Mapping):
            return StepTime(**self.step_seconds)
        return StepTime(units.seconds(self.step_seconds, "step_seconds"))

    @property
    def priced(self) -> bool:
        """Whether broadcasts and reductions cost more than the link."""
        return units.seconds(self.exchange_seconds) > 0 or self.exchange_rate is not None

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with randomness_kept():
                seed_all(plan.random_seed)
                return Simulation(self, plan, observer).run()
        finally:
            torch.set_num_threads(threads)

    def describe(self) -> dict[str, Any]:
        """All that a resumed run needs; its faults have struck already."""
        return {
            "name": self.name,
            "link": self.link,
            "latency": self.latency,
            "step_seconds": {**asdict(self.step_time), "factors": dict(self.step_time.factors)},
            "detect_seconds": self.detect_seconds,
            "model_bytes": self.model_bytes,
            "exchange_seconds": self.exchange_seconds,
            "exchange_rate": self.exchange_rate,
            "threads": self.threads,
        }


class _Interface:
    """A host's network interface: until when each direction is taken."""

    def __init__(self) -> None:
        self.out_free = 0.0
        self.in_free = 0.0


class _Held:
    """What waits, in order, until a node is no longer paused or a link no longer cut."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._until = 0.0
        self._releasing = False

    def holds(self, until: float) -> bool:
        """Whether something that comes now must wait: for that time, or behind what waits already."""
        return not self._releasing and (self._simulation.now < until or bool(self._waiting))

    def add(self, until: float, action: Callable[..., None], *arguments: Any) -> None:
        self._waiting.append((action, arguments))
        self.extend(until)

    def extend(self, until: float) -> None:
        """It lasts longer than was known."""
        if self._waiting and until > self._until:
            self._until = until
            self._simulation.at(until, self._release)

    def _release(self) -> None:
        if self._simulation.now < self._until:
            return  # a later release has been set
        self._releasing = True
        while self._waiting:
            action, arguments = self._waiting.popleft()
            action(*arguments)
        self._releasing = False


@dataclass
class _Cut:
    """A link that is down."""

    held: _Held
    until: float = 0.0


class _Priced(Collectives):
    """Collectives with a price at the root: broadcasts leave it later, and reductions close later."""

    def __init__(self, place: _Place, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._place = place
        settings = place.simulation.settings
        self._seconds = units.seconds(settings.exchange_seconds)
        rate = settings.exchange_rate
        self._seconds_per_byte = 0.0 if rate is None else place.bytes_scale / units.bytes_per_second(rate)
        #: until when the root is busy with earlier ones, in each direction
        self._out_free = self._in_free = 0.0

    def broadcast(self, effect: Broadcast) -> None:
        simulation = self._place.simulation
        self._out_free = max(self._out_free, simulation.now) + self._price(message_bytes(effect.message))
        simulation.at(self._out_free, super().broadcast, effect)

    def reduce(self, effect: Reduce) -> list[Event]:
        return self._later(super().reduce(effect))

    def receive(self, message: Up | Down[Any]) -> list[Event]:
        return self._later(super().receive(message))

    def lost(self, peer: str) -> list[Event]:
        return self._later(super().lost(peer))

    def _price(self, size: int) -> float:
        return self._seconds + size * self._seconds_per_byte

    def _later(self, events: list[Event]) -> list[Event]:
        simulation = self._place.simulation
        for event in events:
            if isinstance(event, Reduced):
                size = 0 if event.total is None else payload_bytes([event.total])
                self._in_free = max(self._in_free, simulation.now) + self._price(size)
                simulation.at(self._in_free, self._place.deliver, event)
        return [event for event in events if not isinstance(event, Reduced)]


class _Place:
    """A node in the simulation; also its interpreter's host."""

    virtual = True

    def __init__(self, simulation: Simulation, node: Node) -> None:
        self.simulation = simulation
        self.node = node
        self.bytes_scale = simulation.bytes_scale
        self.died_at: float | None = None
        self.paused_until = 0.0
        self.held = _Held(simulation)
        self.computing_since: float | None = None
        self.gradient_at = 0.0
        self.slow_until = 0.0
        self.slow_factor = 1.0
        self.rng = np.random.default_rng((simulation.plan.random_seed, zlib.crc32(node.name.encode())))
        self.timers: dict[str, int] = {}
        machine, replica = simulation.plan.build(node, shared=simulation.shared)
        if simulation.plan.shares:
            simulation.shared = Shared(replica.weights.view(torch.uint8))
        self.interpreter = Interpreter(
            node.name,
            machine,
            replica,
            self,
            tracer=Tracer(simulation.plan.traced),
            recorder=simulation.plan.recorder(node, replica),
            checked=simulation.settings.checked,
            compress=simulation.plan.compress,
            collectives=partial(_Priced, self) if simulation.settings.priced else Collectives,
        )
        #: how many evaluations its replica has been told of
        self._observed = 0
        self.observe()

    def restore_random(self, state: dict[str, Any]) -> None:
        """Draw step times as if the run had never been interrupted; the first worker has the process's generators."""
        if "step_seconds" in state:
            self.rng.bit_generator.state = json.loads(state["step_seconds"])
        restore_random(state)

    def observe(self) -> None:
        """Take in the evaluations that are new."""
        for metrics in self.simulation.observer.observed()[self._observed :]:
            self._observed += 1
            self.interpreter.replica.observe(metrics)

    def now(self) -> float:
        return self.simulation.now

    def send(self, to: str, message: Message) -> None:
        self.simulation.transmit(self, to, message)

    def compute(self, effect: Compute) -> None:
        replica = self.interpreter.replica
        replica.seek(effect.batch, effect.upcoming, effect.position)
        taken = replica.compute(effect.wanted, effect.fresh)
        seconds = self.simulation.settings.step_time.draw(self.node, self.rng)
        if self.simulation.now < self.slow_until:
            seconds *= self.slow_factor
        self.computing_since = self.simulation.now
        self.gradient_at = self.simulation.now + seconds
        self.simulation.at(self.gradient_at, self._gradient_ready, taken)

    def _gradient_ready(self, taken: Taken) -> None:
        if self.simulation.now < self.gradient_at:  # a pause has put it off
            self.simulation.at(self.gradient_at, self._gradient_ready, taken)
            return
        assert self.computing_since is not None
        seconds, self.computing_since = self.simulation.now - self.computing_since, None
        self.deliver(GradientReady(taken.gradient, taken.loss, taken.samples, seconds, touched=taken.touched))

    def pause(self, seconds: float) -> None:
        """Stand still for so long from now on, or as long as an earlier pause lasts."""
        until = max(self.paused_until, self.simulation.now + seconds)
        longer = until - max(self.paused_until, self.simulation.now)
        self.paused_until = until
        if self.computing_since is not None:
            self.gradient_at += longer

    def beside(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
        then(work())

    def settle(self) -> None:
        """Nothing is ever put off."""

    def set_timer(self, name: str, seconds: float | None) -> None:
        setting = self.timers[name] = self.timers.get(name, 0) + 1
        if seconds is not None:
            self.simulation.at(self.simulation.now + seconds, self._fire, name, setting)

    def _fire(self, name: str, setting: int) -> None:
        if self.timers[name] != setting:
            return
        if self.held.holds(self.paused_until):
            self.held.add(self.paused_until, self._fire, name, setting)
        else:
            self.deliver(TimerFired(name))

    def record(self, values: Row) -> None:
        self.simulation.observer.record(self.node.name, values, self.simulation.now)

    def evaluate(self, effect: Evaluate, weights: Tensor) -> None:
        with randomness_kept():
            self.simulation.observer.evaluate(effect, weights, self.simulation.now)
        for place in self.simulation.living():
            place.observe()
        if not effect.final:
            self.simulation.stop_if_requested(again=True)

    def checkpoint(self, effect: Checkpoint, weights: Tensor, replica_state: dict[str, Any]) -> None:
        workers = {
            place.node.index: {
                **(replica_state if place is self else place.interpreter.replica.state()),
                # as text, since its numbers are too large for messages
                "random": {"step_seconds": json.dumps(place.rng.bit_generator.state)},
            }
            for place in self.simulation.living()
            if place.node.computes
        }
        if workers:  # all draw from the generators of this process: the first has their state
            workers[min(workers)]["random"] |= random_state()
        states = NodeStates({} if self.node.computes else replica_state, workers)
        self.simulation.observer.checkpoint(effect, weights, states, self.simulation.now)

    def finish(self, reason: str, weights: Tensor) -> None:
        if self.simulation.plan.joint in ("", self.node.name) and self.simulation.reason is None:
            self.simulation.reason, self.simulation.finisher = reason, self.node.name

    def deliver(self, event: Event) -> None:
        """Hand an event to the node, later if it is paused, never if it is dead."""
        simulation = self.simulation
        if self.died_at is not None:
            return
        if self.held.holds(self.paused_until):
            self.held.add(self.paused_until, self.deliver, event)
            return
        simulation.events += 1
        self.interpreter.feed(event)
        if isinstance(event, GradientReady):
            simulation.gradient_taken(self)


class Simulation:
    """One run: the heap of things to come."""

    def __init__(self, settings: Sim, plan: Plan, observer: Observer) -> None:
        self.settings = settings
        self.plan = plan
        self.observer = observer
        self.now = 0.0
        self.events = 0
        self.reason: str | None = None
        #: who ended the run
        self.finisher = ""
        self._stopping = False
        #: the vector of all nodes, if they have one
        self.shared: Shared | None = None
        model_bytes = settings.model_bytes
        self.bytes_scale = 1.0 if model_bytes is None else units.byte_count(model_bytes) / plan.vector_bytes
        self._bandwidth = units.bytes_per_second(settings.link)
        self._latency = units.seconds(settings.latency)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        #: by sender and receiver
        self._cuts: dict[tuple[str, str], _Cut] = {}
        #: until when messages of a node are late, and by how much
        self._delays: dict[str, tuple[float, float]] = {}
        self._last_head: dict[tuple[str, str], float] = {}
        #: the events before the last fault struck or healed
        self._events_disturbed = 0
        self._drops: dict[tuple[str, str], list[int]] = {}
        #: workers that will come back
        self._restarts_due = 0
        self._report_every = max(1, plan.steps // 100)
        settings.faults.check({node.name for node in plan.nodes})
        self._by_step = [fault for fault in settings.faults.schedule if fault.step is not None]
        self._places = {node.name: _Place(self, node) for node in plan.nodes}
        for place in self._places.values():
            state = plan.state_of(place.node)
            place.interpreter.replica.restore(state)
            if "random" in state:
                place.restore_random(state["random"])
        self._interfaces: dict[str, _Interface] = {}

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Something to do at a time; what is due at the same time is done in the order it was asked for."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, action, arguments))

    def run(self) -> Outcome:
        for fault in self.settings.faults.schedule:
            if fault.kind == "drop":
                self._drops.setdefault((fault.node, fault.peer), []).append(fault.nth)
            elif fault.at is not None:
                self.at(fault.at, self._strike, fault)
        if (limit := self.plan.seconds) is not None:
            self.at(limit, self.request_stop, f"{limit:g} s have passed")
        members = tuple(self._places)
        for place in list(self._places.values()):
            self.at(0.0, place.deliver, Started(members))
        while self.reason is None:
            if not self._heap:
                raise Stalled(f"nothing can happen after {self.now:.6g} s and {self.events} events; {self._standing()}")
            if self.settings.events_max and self.events - self._events_disturbed >= self.settings.events_max:
                raise Stalled(f"not finished after {self.settings.events_max} events; {self._standing()}")
            self.now, _, action, arguments = heapq.heappop(self._heap)
            try:
                action(*arguments)
            except NodesLost as lost:
                lost.seconds, lost.events = self.now, self.events
                raise
        joint = self._places[self.finisher].interpreter
        return Outcome(
            weights=joint.replica.weights,
            seconds=self.now,
            reason=self.reason,
            meters={name: place.interpreter.meter for name, place in self._places.items()},
            spans={name: place.interpreter.tracer.spans for name, place in self._places.items()},
            lost=frozenset(name for name, place in self._places.items() if place.died_at is not None),
            events=self.events,
        )

    def living(self) -> list[_Place]:
        """The nodes that have not died."""
        return [place for place in self._places.values() if place.died_at is None]

    def stop_if_requested(self, again: bool = False) -> None:
        """Ask the observer whether the run shall end; `again`: whoever has come since must be told too."""
        if (again or not self._stopping) and (reason := self.observer.stop_requested()):
            self._stopping = True
            self.request_stop(reason)

    def request_stop(self, reason: str) -> None:
        """Tell the joint node, or everybody where none is special."""
        for name, place in self._places.items():
            if self.plan.joint in ("", name):
                self.at(self.now, place.deliver, StopRequested(reason))

    def transmit(self, sender: _Place, to: str, message: Message) -> None:
        pair = (sender.node.name, to)
        if pair in self._drops:
            self._drops[pair] = [nth - 1 for nth in self._drops[pair]]
            if 0 in self._drops[pair]:
                return
        receiver = self._places[to]
        checksum = _checksum(message) if self.settings.checked else 0
        if (sender.node.host or sender.node.name) == (receiver.node.host or to):
            self.at(self.now, self._hand_over, sender, receiver, message, checksum, self.now)
            return
        duration = (message_bytes(message) * self.bytes_scale + HEADER_BYTES) / self._bandwidth
        interface = self._interface(sender.node)
        start = max(self.now, interface.out_free)
        interface.out_free = start + duration
        name = _title(message)
        sender.interpreter.tracer.span("out", f"{name} to {to}", start, start + duration)
        head = start + self._latency
        if self._delays:
            head = self._last_head[pair] = max(self._last_head.get(pair, 0.0), head + self._delayed(pair))
        self.at(head, self._arrive, sender, receiver, message, checksum, duration, start + duration)

    def _delayed(self, pair: tuple[str, str]) -> float:
        """How much longer a message between the two takes that is sent now."""
        delays = (self._delays.get(name, (0.0, 0.0)) for name in pair)
        return sum(latency for until, latency in delays if self.now < until)

    def _arrive(
        self, sender: _Place, receiver: _Place, message: Message, checksum: int, duration: float, sent_at: float
    ) -> None:
        """The head of a message is at the receiver's interface."""
        cut = self._cuts.get((sender.node.name, receiver.node.name))
        if cut is not None and cut.held.holds(cut.until):
            cut.held.add(cut.until, self._arrive, sender, receiver, message, checksum, duration, sent_at)
            return
        interface = self._interface(receiver.node)
        start = max(self.now, interface.in_free)
        interface.in_free = start + duration
        name = _title(message)
        receiver.interpreter.tracer.span("in", f"{name} from {sender.node.name}", start, start + duration)
        self.at(interface.in_free, self._hand_over, sender, receiver, message, checksum, sent_at)

    def _hand_over(self, sender: _Place, receiver: _Place, message: Message, checksum: int, sent_at: float) -> None:
        if sender.died_at is not None and sender.died_at < sent_at:
            return
        if self.settings.checked and _checksum(message) != checksum:
            raise InvariantBroken(
                f"{sender.node.name} changed a tensor of {_title(message)} after sending it to {receiver.node.name}"
            )
        receiver.deliver(Received(sender.node.name, message))

    def _interface(self, node: Node) -> _Interface:
        return self._interfaces.setdefault(node.host or node.name, _Interface())

    def gradient_taken(self, place: _Place) -> None:
        """After each gradient: figures for the observer, and faults that were waiting for this step."""
        steps = place.interpreter.meter.steps
        if steps % self._report_every == 0:
            self.observer.meter(place.interpreter.meter, self.now)
        self.stop_if_requested()
        for fault in self._by_step:
            if fault.step == steps and fault.node == place.node.name:
                self.at(self.now, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        self._disturbed()
        if fault.kind == "join":
            self._admit(fault.node)
            return
        place = self._places.get(fault.node)
        if place is None:
            return  # a successor that has not come
        if 0 < fault.seconds < float("inf"):
            self.at(self.now + fault.seconds, self._disturbed)
        match fault.kind:
            case "crash" | "restart":
                self._crash(place, restarts=fault.kind == "restart", after=fault.seconds)
            case "pause":
                place.pause(fault.seconds)
                place.held.extend(place.paused_until)
            case "slow":
                place.slow_until, place.slow_factor = self.now + fault.seconds, fault.factor
            case "delay":
                self._delays[fault.node] = self.now + fault.seconds, fault.latency
            case "cut":
                self._cut(fault.node, fault.peer, fault.seconds)
                self._cut(fault.peer, fault.node, fault.seconds)
            case "one-way-cut":
                self._cut(fault.node, fault.peer, fault.seconds)

    def _disturbed(self) -> None:
        """From now on the run is given as much time as if it had only begun."""
        self._events_disturbed = self.events

    def _cut(self, sender: str, receiver: str, seconds: float) -> None:
        cut = self._cuts.setdefault((sender, receiver), _Cut(_Held(self)))
        cut.until = max(cut.until, self.now + seconds)
        cut.held.extend(cut.until)

    def _crash(self, place: _Place, restarts: bool, after: float) -> None:
        if place.died_at is not None:
            return
        name = place.node.name
        place.died_at = self.now
        self.observer.note(f"{name} died at {self.now:.6g} s")
        if name in self.plan.vital:
            held = "the joint model" if name == self.plan.joint else "a part of the joint model"
            raise NodesLost(f"{name}, which holds {held}, died at {self.now:.6g} s")
        if restarts:
            self._restarts_due += place.node.computes
            successor = place.node.successor()
            self.at(self.now + after + 2 * self.settings.detect_seconds, self._succeed, successor)
        living = self.living()
        if not self._restarts_due and not any(other.node.computes for other in living):
            raise NodesLost(f"no worker is left: {name} was the last and died at {self.now:.6g} s")
        for other in living:
            delay = self.settings.detect_seconds * (1 + float(other.rng.random()))
            self.at(self.now + delay, other.deliver, PeerLost(name))

    def _succeed(self, node: Node) -> None:
        self._restarts_due -= node.computes
        self._disturbed()
        self._join(node)

    def _admit(self, name: str) -> None:
        """A worker that was not there when the run began; it has no aggregator above it."""
        if name in self._places:
            return
        like = next(node for node in self.plan.nodes if node.computes)
        above = self.plan.joint if like.parent else ""
        self._join(replace(like, name=name, index=int(name.rpartition("-")[2]), host="", parent=above))

    def _join(self, node: Node) -> None:
        others = self.living()
        place = self._places[node.name] = _Place(self, node)
        peers = (other.interpreter.replica.state() for other in others if other.node.computes)
        place.interpreter.replica.restore(next(filter(None, peers), self.plan.state_of(node)))
        self.observer.note(f"{node.name} joined at {self.now:.6g} s")
        self.at(self.now, place.deliver, Started((*(other.node.name for other in others), node.name)))
        for dead in self._places.values():
            if dead.died_at is not None:  # some may still be listed as members by nodes that do not know yet
                self.at(self.now, place.deliver, PeerLost(dead.node.name))
        for other in others:
            self.at(self.now, other.deliver, PeerJoined(node.name, node.role))

    def _standing(self) -> str:
        """What every living node knows, for the error of a run that hangs."""
        living = self.living()
        told = [f"{place.node.name}: {_describe(place.interpreter.machine)}" for place in living[:6]]
        return "; ".join(told + ([f"and {len(living) - 6} more"] if len(living) > 6 else []))


def _describe(machine: Machine) -> str:
    shown = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in vars(machine).items()
        if not name.startswith("_")
        and (
            isinstance(value, int | float | str)
            or (isinstance(value, set | list | tuple) and all(isinstance(item, str | int) for item in value))
        )
    }
    return f"{type(machine).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _title(message: Message) -> str:
    """What a transfer is called in the trace and in errors."""
    match message:
        case Up(tag=tag):
            return f"reduction of {tag}"
        case Down(stream=stream):
            return f"broadcast of {stream}"
        case Packed(message=packed):
            return _title(packed)
    return type(message).__name__


def _checksum(message: Message) -> int:
    checksum = 0
    for tensor in tensors_of(message):
        checksum = zlib.crc32(raw_bytes(tensor), checksum)
    return checksum
