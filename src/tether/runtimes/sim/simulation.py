"""One run in virtual time: its nodes, and the faults that strike them.

Gradients are real and charged with modelled compute time; every host has a full-duplex network interface with bandwidth
and latency. Events are handled in the order of (time, sequence number) and all randomness comes from the run's seed, so
a run repeats bit for bit. Tests also have the node's invariants checked after every event, and every tensor checksummed
when it is sent and when it is delivered.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tether.core.effects import Checkpoint, Compute, Evaluate
from tether.core.events import Event, GradientReady, PeerJoined, PeerLost, Started, StopRequested, TimerFired
from tether.core.machine import GradientResult, Machine, Node
from tether.core.message import Message, Row, Timer
from tether.core.trace import Tracer
from tether.core.vector import Shared
from tether.errors import NodesLost, Stalled
from tether.runtimes.base import NodeStates, Observer, Outcome, Plan
from tether.runtimes.interpreter import Interpreter, T
from tether.runtimes.randomness import random_state, randomness_kept, restore_random
from tether.runtimes.sim.costs import Costs
from tether.runtimes.sim.faults import Fault, Faults
from tether.runtimes.sim.network import Network, PricedCollectives
from tether.runtimes.sim.timeline import Gate, Timeline
from tether.runtimes.tree import TreeCollectives


class Simulation:
    """One run."""

    def __init__(
        self,
        plan: Plan,
        observer: Observer,
        costs: Costs,
        faults: Faults,
        *,
        checked: bool,
        detect_seconds: float,
        events_max: int,
    ) -> None:
        """`Sim` documents the settings."""
        self.plan = plan
        self.observer = observer
        self.costs = costs
        self.checked = checked
        self.timeline = Timeline()
        self.network = Network(self.timeline, costs, checked=checked)
        #: how many events nodes have handled
        self.events = 0
        #: why the run has ended, and the node that ended it
        self.reason: str | None = None
        #: those of the node that has finished
        self.final_weights = torch.empty(0)
        #: the memory of the vector, if all nodes share one
        self.shared: Shared | None = None
        self._detect_seconds = detect_seconds
        self._events_max = events_max
        #: the number of events when a fault last struck or healed
        self._events_at_fault = 0
        self._stopping = False
        #: how many workers have crashed and will be replaced
        self._restarts_due = 0
        self._report_every = max(1, plan.steps // 100)
        faults.check({node.name for node in plan.nodes})
        self._faults = faults.schedule
        self._faults_by_step = [fault for fault in faults.schedule if fault.step is not None]
        #: all nodes by name, including those that have died
        self.nodes = {node.name: SimulatedNode(self, node) for node in plan.nodes}
        for simulated in self.nodes.values():
            state = plan.state_of(simulated.node)
            simulated.interpreter.replica.restore(state)
            if "random" in state:
                simulated.restore_random(state["random"])

    def run(self) -> Outcome:
        timeline = self.timeline
        for fault in self._faults:
            if fault.kind == "drop":
                self.network.drop(fault.node, fault.peer, fault.nth)
            elif fault.at is not None:
                timeline.at(fault.at, self._strike, fault)
        if (limit := self.plan.seconds) is not None:
            timeline.at(limit, self.request_stop, f"{limit:g} s have passed")
        members = tuple(self.nodes)
        for simulated in list(self.nodes.values()):
            timeline.at(0.0, simulated.deliver, Started(members))
        while self.reason is None:
            if not timeline:
                raise Stalled(
                    f"nothing can happen after {timeline.now:.6g} s and {self.events} events; {self._describe_nodes()}"
                )
            if self._events_max and self.events - self._events_at_fault >= self._events_max:
                raise Stalled(f"not finished after {self._events_max} events; {self._describe_nodes()}")
            try:
                timeline.advance()
            except NodesLost as lost:
                lost.seconds, lost.events = timeline.now, self.events
                raise
        return Outcome(
            weights=self.final_weights,
            seconds=timeline.now,
            reason=self.reason,
            meters={name: simulated.interpreter.meter for name, simulated in self.nodes.items()},
            spans={name: simulated.tracer.spans for name, simulated in self.nodes.items()},
            lost=frozenset(name for name, simulated in self.nodes.items() if simulated.died_at is not None),
            events=self.events,
        )

    def living(self) -> list[SimulatedNode]:
        """The nodes that have not died."""
        return [simulated for simulated in self.nodes.values() if simulated.died_at is None]

    def stop_if_requested(self, again: bool = False) -> None:
        """Ask the observer whether the run is to end. `again`: repeat the request for nodes that have joined since."""
        if (again or not self._stopping) and (reason := self.observer.stop_requested()):
            self._stopping = True
            self.request_stop(reason)

    def request_stop(self, reason: str) -> None:
        """Ask the hub to end the run, or every node if there is no hub."""
        for name, simulated in self.nodes.items():
            if self.plan.hub in ("", name):
                self.timeline.at(self.timeline.now, simulated.deliver, StopRequested(reason))

    def after_gradient(self, simulated: SimulatedNode) -> None:
        """Report figures to the observer, and let faults strike that were waiting for this step."""
        meter = simulated.interpreter.meter
        if meter.steps % self._report_every == 0:
            self.observer.meter(meter, self.timeline.now)
        self.stop_if_requested()
        for fault in self._faults_by_step:
            if fault.step == meter.steps and fault.node == simulated.node.name:
                self.timeline.at(self.timeline.now, self._strike, fault)

    # ---- faults ----

    def _strike(self, fault: Fault) -> None:
        self._restart_event_limit()
        if fault.kind == "join":
            self._add_worker(fault.node)
            return
        simulated = self.nodes.get(fault.node)
        if simulated is None:
            return  # a successor that has not joined
        if 0 < fault.seconds < float("inf"):
            self.timeline.at(self.timeline.now + fault.seconds, self._restart_event_limit)
        match fault.kind:
            case "crash" | "restart":
                self._crash(simulated, restarts=fault.kind == "restart", after=fault.seconds)
            case "pause":
                simulated.pause(fault.seconds)
            case "slow":
                simulated.slow(fault.factor, fault.seconds)
            case "delay":
                self.network.delay(fault.node, fault.latency, fault.seconds)
            case "cut":
                self.network.cut(fault.node, fault.peer, fault.seconds)
                self.network.cut(fault.peer, fault.node, fault.seconds)
            case "one-way-cut":
                self.network.cut(fault.node, fault.peer, fault.seconds)

    def _restart_event_limit(self) -> None:
        """From now on the run may take as many events as if it had only just begun."""
        self._events_at_fault = self.events

    def _crash(self, simulated: SimulatedNode, restarts: bool, after: float) -> None:
        if simulated.died_at is not None:
            return
        name, now = simulated.node.name, self.timeline.now
        simulated.died_at = now
        self.observer.note(f"{name} died at {now:.6g} s")
        if name in self.plan.vital:
            held = "the joint model" if name == self.plan.hub else "a part of the joint model"
            raise NodesLost(f"{name}, which holds {held}, died at {now:.6g} s")
        if restarts:
            self._restarts_due += simulated.node.computes
            successor = simulated.node.successor()
            self.timeline.at(now + after + 2 * self._detect_seconds, self._replace, successor)
        living = self.living()
        if not self._restarts_due and not any(other.node.computes for other in living):
            raise NodesLost(f"no worker is left: {name} was the last and died at {now:.6g} s")
        for other in living:
            delay = self._detect_seconds * (1 + float(other.rng.random()))
            self.timeline.at(now + delay, other.deliver, PeerLost(name))

    def _replace(self, successor: Node) -> None:
        self._restarts_due -= successor.computes
        self._restart_event_limit()
        self._join(successor)

    def _add_worker(self, name: str) -> None:
        """A worker joins that did not exist when the run began; it has no aggregator above it."""
        if name in self.nodes:
            return
        like = next(node for node in self.plan.nodes if node.computes)
        above = self.plan.hub if like.parent else ""
        self._join(replace(like, name=name, index=int(name.rpartition("-")[2]), host="", parent=above))

    def _join(self, node: Node) -> None:
        now, others = self.timeline.now, self.living()
        newcomer = self.nodes[node.name] = SimulatedNode(self, node)
        peers = (other.interpreter.replica.state() for other in others if other.node.computes)
        newcomer.interpreter.replica.restore(next(filter(None, peers), self.plan.state_of(node)))
        self.observer.note(f"{node.name} joined at {now:.6g} s")
        self.timeline.at(now, newcomer.deliver, Started((*(other.node.name for other in others), node.name)))
        for dead in self.nodes.values():
            if dead.died_at is not None:  # nodes that do not know of the death yet may still list it as a member
                self.timeline.at(now, newcomer.deliver, PeerLost(dead.node.name))
        for other in others:
            self.timeline.at(now, other.deliver, PeerJoined(node.name, node.role))

    def _describe_nodes(self) -> str:
        """What every living node knows, for the error of a run that hangs."""
        living = self.living()
        described = [f"{simulated.node.name}: {_describe(simulated.interpreter.machine)}" for simulated in living[:6]]
        return "; ".join(described + ([f"and {len(living) - 6} more"] if len(living) > 6 else []))


class SimulatedNode:
    """A node in the simulation: its interpreter's host, and an endpoint of the network."""

    virtual = True

    def __init__(self, simulation: Simulation, node: Node) -> None:
        plan = simulation.plan
        self._simulation = simulation
        self._timeline = simulation.timeline
        self.node = node
        self.bytes_scale = simulation.costs.bytes_scale
        self.died_at: float | None = None
        #: closed while the node is paused
        self._pause = Gate(self._timeline)
        #: since when a gradient is under way, and when it will be ready
        self._computing_since: float | None = None
        self._gradient_at = 0.0
        self._slow_until = 0.0
        self._slow_factor = 1.0
        #: draws step times
        self.rng = np.random.default_rng((plan.random_seed, zlib.crc32(node.name.encode())))
        #: how often each timer has been set or cancelled: only its last setting may fire
        self._timer_settings: dict[Timer, int] = {}
        machine, replica = plan.build(node, shared=simulation.shared)
        if plan.shares:
            simulation.shared = Shared(replica.weights.view(torch.uint8))
        self.tracer = Tracer(plan.traced)
        priced = partial(PricedCollectives, endpoint=self, timeline=self._timeline, costs=simulation.costs)
        self.interpreter = Interpreter(
            node.name,
            machine,
            replica,
            self,
            tracer=self.tracer,
            recorder=plan.recorder(node, replica),
            checked=simulation.checked,
            compress=plan.compress,
            collectives=priced if simulation.costs.has_exchange_price else TreeCollectives,
        )
        #: how many evaluations its replica has seen
        self._observed = 0
        self.observe_evaluations()

    def restore_random(self, state: dict[str, Any]) -> None:
        """Draw step times as if the run had never been interrupted; the first worker has the process's generators."""
        if "step_seconds" in state:
            self.rng.bit_generator.state = json.loads(state["step_seconds"])
        restore_random(state)

    def observe_evaluations(self) -> None:
        """Show the replica the evaluations that it has not seen."""
        for metrics in self._simulation.observer.observed()[self._observed :]:
            self._observed += 1
            self.interpreter.replica.observe(metrics)

    def deliver(self, event: Event) -> None:
        """Hand an event to the node, later if it is paused, never if it is dead."""
        if self.died_at is not None:
            return
        if self._pause.is_closed():
            self._pause.hold(self.deliver, event)
            return
        self._simulation.events += 1
        self.interpreter.feed(event)
        if isinstance(event, GradientReady):
            self._simulation.after_gradient(self)

    def pause(self, seconds: float) -> None:
        """Stand still for this long from now on, or as long as an earlier pause lasts, whichever is longer."""
        before = max(self._pause.until, self._timeline.now)
        self._pause.close(seconds)
        if self._computing_since is not None:
            self._gradient_at += self._pause.until - before

    def slow(self, factor: float, seconds: float) -> None:
        """For gradients that begin within this time: take `factor` times as long."""
        self._slow_until, self._slow_factor = self._timeline.now + seconds, factor

    # ---- what the interpreter asks for ----

    def now(self) -> float:
        return self._timeline.now

    def send(self, to: str, message: Message) -> None:
        self._simulation.network.transmit(self, self._simulation.nodes[to], message)

    def compute(self, effect: Compute) -> None:
        replica = self.interpreter.replica
        replica.seek(effect.batch, effect.upcoming, effect.position)
        result = replica.compute(effect.form, effect.fresh)
        seconds = self._simulation.costs.step_time.draw(self.node, self.rng)
        if self._timeline.now < self._slow_until:
            seconds *= self._slow_factor
        self._computing_since = self._timeline.now
        self._gradient_at = self._timeline.now + seconds
        self._timeline.at(self._gradient_at, self._gradient_ready, result)

    def _gradient_ready(self, result: GradientResult) -> None:
        if self._timeline.now < self._gradient_at:  # a pause has postponed it
            self._timeline.at(self._gradient_at, self._gradient_ready, result)
            return
        assert self._computing_since is not None
        seconds, self._computing_since = self._timeline.now - self._computing_since, None
        self.deliver(GradientReady(result.gradient, result.loss, result.samples, seconds, touched=result.touched))

    def run_unordered(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
        then(work())

    def drain(self) -> None:
        """Nothing is ever postponed."""

    def set_timer(self, timer: Timer, seconds: float | None) -> None:
        setting = self._timer_settings[timer] = self._timer_settings.get(timer, 0) + 1
        if seconds is not None:
            self._timeline.at(self._timeline.now + seconds, self._fire, timer, setting)

    def _fire(self, timer: Timer, setting: int) -> None:
        if self._timer_settings[timer] != setting:
            return
        if self._pause.is_closed():
            self._pause.hold(self._fire, timer, setting)
        else:
            self.deliver(TimerFired(timer))

    def record(self, values: Row) -> None:
        self._simulation.observer.record(self.node.name, values, self._timeline.now)

    def evaluate(self, effect: Evaluate, weights: Tensor) -> None:
        with randomness_kept():
            self._simulation.observer.evaluate(effect, weights, self._timeline.now)
        for simulated in self._simulation.living():
            simulated.observe_evaluations()
        if not effect.final:
            self._simulation.stop_if_requested(again=True)

    def checkpoint(self, effect: Checkpoint, weights: Tensor, replica_state: dict[str, Any]) -> None:
        workers = {
            simulated.node.index: {
                **(replica_state if simulated is self else simulated.interpreter.replica.state()),
                # as text, since its numbers are too large for messages
                "random": {"step_seconds": json.dumps(simulated.rng.bit_generator.state)},
            }
            for simulated in self._simulation.living()
            if simulated.node.computes
        }
        if workers:  # all draw from the generators of this process: the first has their state
            workers[min(workers)]["random"] |= random_state()
        states = NodeStates({} if self.node.computes else replica_state, workers)
        self._simulation.observer.checkpoint(effect, weights, states, self._timeline.now)

    def contributed(self) -> None:
        """Data never ends in a simulated run."""

    def finish(self, reason: str, weights: Tensor) -> None:
        simulation = self._simulation
        if simulation.plan.hub in ("", self.node.name) and simulation.reason is None:
            simulation.reason, simulation.final_weights = reason, weights


def _describe(machine: Machine) -> str:
    """The public attributes of a machine that are plain values or collections of them."""
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
