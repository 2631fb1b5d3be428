"""One node in a process of its own.

The training thread computes gradients and feeds them to the node itself; the link's thread feeds what it receives. Both
do so under the node's one lock, so a local step costs no thread switch. A third thread, the pulse, tells the driver
what is under way. A process that the fork server has started has a lifeline: it carries the spec of the node first, and
when it closes, the driver is gone and this process ends.
"""

from __future__ import annotations

import errno
import heapq
import io
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import zmq
from torch import Tensor

from tether.core.device import Device
from tether.core.effects import Checkpoint, Compute, Evaluate
from tether.core.events import Event, GradientReady, PeerJoined, PeerLost, Received, Started, StopRequested, TimerFired
from tether.core.machine import GradientResult, Node
from tether.core.message import Message, Row, Timer
from tether.core.snapshot import snapshot
from tether.core.trace import Tracer
from tether.core.vector import Shared
from tether.core.wire import pack_tree, unpack_tree
from tether.errors import RunError, WireError
from tether.runtimes.collectives import Collectives
from tether.runtimes.interpreter import Interpreter, T
from tether.runtimes.process import control
from tether.runtimes.process.control import DRIVER, GRACE_SECONDS
from tether.runtimes.process.courier import Courier
from tether.runtimes.process.link import FRAME_BYTES_MAX, Inbox, Outbox, frame_bytes_max, is_power_of_ten, message_types
from tether.runtimes.process.liveness import Pulse
from tether.runtimes.process.memory import Memory, attach_region
from tether.runtimes.process.pool import Pool
from tether.runtimes.process.spec import ERROR_REPORTED_STATUS, SHARED_VECTOR, NodeSpec, decode_spec
from tether.runtimes.randomness import random_state, restore_random, seed_all

#: how often a node that computes reports its figures
REPORT_SECONDS = 0.25
#: how many messages of each peer a node keeps until the driver lets it begin
EARLY_PER_NODE_MAX = 1000
#: how long the last messages of a node may take to leave it
LINGER_SECONDS = 2.0


class NodeProcess:
    """The host of one node: its threads, its links and its clock."""

    bytes_scale = 1.0
    virtual = False

    def __init__(self, spec: NodeSpec, node: Node, context: zmq.Context[Any]) -> None:
        plan, self.name, self._computes = spec.plan, node.name, node.computes
        types = message_types(plan, spec.collective_types)
        types = [*control.FROM_DRIVER, *control.BETWEEN_NODES, *types]
        limit = frame_bytes_max(plan) if spec.keys is not None else FRAME_BYTES_MAX
        self._inbox = Inbox(
            context, spec.directory, self.name, types, keys=spec.keys, host=spec.host, frame_bytes_max=limit
        )
        #: the tensors that it sends are lent from here
        self.memory = Memory(spec.directory, self.name)
        self._outbox = make_outbox(spec, node, context, self.memory)
        to_driver = make_outbox(spec, node, context)  # a second one, since the node's may be in use for long
        self._pulse = Pulse(partial(to_driver.send, DRIVER), to_driver.close)
        self._link = threading.Thread(target=self._listen, name="link", daemon=True)
        #: held by the thread that feeds the node
        self.lock = threading.Lock()
        #: notified when there is a gradient to compute, or the node is over
        self._training_wakeup = threading.Condition(self.lock)
        self._compute: Compute | None = None
        self._over = False
        self._failure: BaseException | None = None
        self._began: float | None = None
        #: messages of peers that came before the driver let this node begin
        self._early: list[Received] = []
        self._early_max = EARLY_PER_NODE_MAX * len(plan.nodes)
        self._reported_at = 0.0
        #: the processor time of the link's thread, which the training thread reads
        self._link_seconds = 0.0
        #: a heap of timers by the time when they fire
        self._timers: list[tuple[float, Timer, int]] = []
        #: how often each timer has been set or cancelled: only its last setting may fire
        self._timer_settings: dict[Timer, int] = {}
        shared = None
        if plan.shares:
            # no node computes before all are ready, so it is early enough for the hub to write the values now
            region = torch.frombuffer(attach_region(spec.directory, SHARED_VECTOR), dtype=torch.uint8)
            shared = Shared(region, first=self.name == plan.hub)
        device = plan.device(node, spec.device)
        #: where the vector is, if it is not in the host's memory
        self.device: Device | None = device if shared is None else None
        self._courier: Courier | None = None
        empty = self.memory.empty if self.device is None else self.device.empty
        machine, replica = plan.build(node, empty, shared, device)
        if self.device is not None:
            self.device.may_pin = self.memory.holds
            self._courier = Courier(self.device, self.memory.empty, self.lock, self.fail)
        recorder = plan.recorder(node, replica)
        # a replay must find the same weights at every event, so nothing may change them in between
        self._pool = Pool(plan.pool_threads, self.lock, self.fail) if recorder is None else None
        self._interpreter = Interpreter(
            self.name,
            machine,
            replica,
            self,
            tracer=Tracer(plan.traced),
            recorder=recorder,
            compress=plan.compress,
            empty=self.memory.empty,
            collectives=spec.collectives,
            carrier=self._courier,
            copies=empty,
        )

    @property
    def is_over(self) -> bool:
        """Whether it ends: the driver has said so, or it has failed."""
        return self._over

    @property
    def collectives(self) -> Collectives:
        """The node's part in broadcasts and reductions."""
        return self._interpreter.collectives

    # ---- what the interpreter asks for, under the lock ----

    def now(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def send(self, to: str, message: Message) -> None:
        self._outbox.send(to, message)

    def compute(self, effect: Compute) -> None:
        self._compute = effect
        self._training_wakeup.notify()

    def run_unordered(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
        if self._pool is None:
            then(work())
        else:
            self._pool.submit(work, then)

    def drain(self) -> None:
        if self._pool is not None:
            self._pool.drain()

    def set_timer(self, timer: Timer, seconds: float | None) -> None:
        setting = self._timer_settings[timer] = self._timer_settings.get(timer, 0) + 1
        if seconds is not None:
            heapq.heappush(self._timers, (self.now() + seconds, timer, setting))

    def record(self, values: Row) -> None:
        self._report(control.Row(values, self.now()))

    def evaluate(self, effect: Evaluate, weights: Tensor) -> None:
        self._report(control.Evaluation(effect.step, effect.samples, effect.final, weights, self.now()))

    def checkpoint(self, effect: Checkpoint, weights: Tensor, replica_state: dict[str, Any]) -> None:
        tensors: list[Tensor] = []
        state = pack_tree(effect.state, tensors)
        packed = pack_tree(self._with_random(replica_state), tensors)
        self._report(
            control.Checkpoint(effect.step, effect.samples, effect.final, weights, state, packed, tensors, self.now())
        )

    def _with_random(self, replica_state: dict[str, Any]) -> dict[str, Any]:
        return {**replica_state, "random": random_state()} if self._computes else replica_state

    def contributed(self) -> None:
        self._report(control.Contributed())

    def finish(self, reason: str, weights: Tensor) -> None:
        self._report(control.Finished(reason, weights, self.now()))

    def _report(self, message: Message) -> None:
        if self._courier is None:
            self._outbox.send(DRIVER, message)
        else:
            self._courier.leave(message, partial(self._outbox.send, DRIVER))

    # ---- the two threads ----

    def run(self) -> None:
        """Train in this thread, from hello to bye."""
        self._report(control.Hello(self._inbox.address))
        self._link.start()
        self._pulse.start()
        try:
            self._train()
        except Exception as error:
            self._failure = error
        if self._failure is not None:
            raise self._failure
        with self.lock:
            self._report(control.Bye(self._interpreter.meter, self._interpreter.tracer.spans))

    def close(self) -> bool:
        """End the threads, each of which closes its own sockets.

        False if the link's thread does not end, and still uses its sockets.
        """
        self._over = True  # without the lock: a thread that does not end may hold it
        if self._link.ident is not None:
            self._link.join(GRACE_SECONDS)
            self._pulse.stop()
        if self._link.is_alive():
            return False
        self._interpreter.replica.close()
        if self._courier is not None:
            self._courier.close()
        if self.device is not None:
            self.device.close()
        if self._pool is not None:
            self._pool.close()
        with self.lock:  # the pool's last work may still send something
            self._outbox.close(LINGER_SECONDS)
        self.memory.close()
        return True

    def _train(self) -> None:
        interpreter, replica = self._interpreter, self._interpreter.replica
        exchange_seconds = 0.0
        result: GradientResult | None = None
        while True:
            with self.lock:
                while self._compute is None and not self._over:
                    self._training_wakeup.wait()
                if self._compute is None or self._over:
                    return
                effect, self._compute = self._compute, None
            # a peer may still be reading the last gradient
            fresh = effect.fresh or (result is not None and self.memory.is_lent(result.gradient))
            if self.device is not None:
                self.device.follow_turns()
                fresh = True  # the last gradient may still be on its way to the host
            start = time.monotonic()
            with self._pulse.doing("gradient"):
                replica.seek(effect.batch, effect.upcoming, effect.position)
                result = replica.compute(effect.form, fresh)
            seconds = time.monotonic() - start
            exchange_seconds, before = self._link_seconds, exchange_seconds
            ready = GradientReady(
                result.gradient, result.loss, result.samples, seconds, exchange_seconds - before, result.touched
            )
            with self.lock:
                if self._over:
                    return
                self._feed(ready)
                if (now := self.now()) - self._reported_at >= REPORT_SECONDS:
                    self._reported_at = now
                    self._report(control.Report(interpreter.meter, now))

    def _listen(self) -> None:
        if self.device is not None:
            self.device.adopt_thread()
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        try:
            while not self._over:
                if poller.poll(self._milliseconds_to_next_timer()):
                    self._receive()
                self._fire_timers()
                self._link_seconds = time.thread_time()
        except Exception as error:
            self.fail(error)
        finally:
            self._inbox.close()

    def _receive(self) -> None:
        try:
            sender, message = self._inbox.receive()
            if isinstance(message, control.FROM_DRIVER) and sender != DRIVER:
                raise WireError(f"a {type(message).__name__} of {sender}, which only the driver may send")
        except WireError as error:
            with self.lock:
                meter = self._interpreter.meter
                meter.messages_refused += 1
            if is_power_of_ten(meter.messages_refused):
                with suppress(OSError):
                    print(f"{meter.messages_refused} messages were refused, the last: {error}", file=sys.stderr)
            return
        with self.lock:
            self.handle(sender, message)

    def handle(self, sender: str, message: Message) -> None:
        """Handle a message, under the lock."""
        with self._pulse.doing("event"), self._turn():
            self._dispatch(sender, message)

    def _feed(self, event: Event) -> None:
        with self._pulse.doing("event"), self._turn():
            self._interpreter.feed(event)
        if self.device is not None:
            meter = self._interpreter.meter
            meter.bytes_to_host, meter.bytes_to_device = self.device.bytes_to_host, self.device.bytes_to_device

    def _turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self.device is None else self.device.turn()

    def _dispatch(self, sender: str, message: Message) -> None:
        event: Event
        replica = self._interpreter.replica
        match message:
            case control.Begin(members=members, addresses=addresses):
                self._began = time.monotonic()
                self._outbox.addresses |= addresses
                self._interpreter.feed(Started(members))
                early, self._early = self._early, []
                for event in early:
                    self._interpreter.feed(event)
                return
            case control.Joined(peer=peer, role=role, address=address):
                if address:
                    self._outbox.addresses[peer] = address
                event = PeerJoined(peer, role)
            case control.Lost(peer=peer):
                self._outbox.forget(peer)
                self._inbox.forget(peer)
                event = PeerLost(peer)
            case control.Restore(state=packed, tensors=tensors):
                state = unpack_tree(packed, tensors)
                replica.restore(state)
                if "random" in state:
                    restore_random(state["random"])
                return
            case control.StateRequest(number=number):
                found: list[Tensor] = []
                self._report(control.State(number, pack_tree(self._with_random(replica.state()), found), found))
                return
            case control.Observed(metrics=evaluations):
                for metrics in evaluations:
                    replica.observe(metrics)
                return
            case control.Stop(reason=reason):
                event = StopRequested(reason)
            case control.End(weights=weights):
                self._take_joint(weights[0] if weights else None)
                self._end()
                return
            case control.JointRequest():
                copied = snapshot().take(replica.weights, self.memory.empty)
                self._outbox.send(sender, control.JointWeights(copied))
                return
            case control.JointWeights(weights=joint):
                self._take_joint(joint)
                return
            case _:
                event = Received(sender, message)
                if self._began is None:
                    self._keep_early(event)
                    return
        self._interpreter.feed(event)

    def _take_joint(self, weights: Tensor | None) -> None:
        """The joint model has come; only a user's own loop asks for it."""

    def _keep_early(self, event: Received) -> None:
        if len(self._early) == self._early_max:
            raise RunError(
                f"{self.name} received {self._early_max + 1} messages before the driver let it begin: the driver does "
                "not respond, or a peer sends without waiting for answers"
            )
        self._early.append(event)

    def fail(self, error: Exception) -> None:
        """End as soon as possible; `run` raises this error."""
        with self.lock:
            self._failure = error
            self._end()

    def _end(self) -> None:
        self._over = True
        self._training_wakeup.notify()

    def _milliseconds_to_next_timer(self) -> int | None:
        with self.lock:
            return min(100, max(0, round((self._timers[0][0] - self.now()) * 1000) + 1)) if self._timers else 100

    def _fire_timers(self) -> None:
        with self.lock:
            while self._timers and self._timers[0][0] <= self.now():
                _, timer, setting = heapq.heappop(self._timers)
                if self._timer_settings[timer] == setting:
                    self._feed(TimerFired(timer))


def make_outbox(spec: NodeSpec, node: Node, context: zmq.Context[Any], memory: Memory | None = None) -> Outbox:
    """An outbox of a node, which can reach the driver."""
    outbox = Outbox(context, spec.directory, node.name, memory=memory, keys=spec.keys)
    if spec.driver:
        outbox.addresses[DRIVER] = spec.driver
    return outbox


def run_node(spec: NodeSpec, node: Node, context: zmq.Context[Any], on_built: Callable[[NodeProcess], None]) -> bool:
    """Run a node until the run is over. False if an error ended it, which it has reported to the driver.

    `on_built` is given the node before it begins, so that the caller can end it with the driver.
    """
    torch.set_num_threads(spec.threads)
    seed_all((spec.plan.random_seed * 1_000_003 + node.index * 7919 + node.life) % 2**32)
    authenticator = spec.keys.start_authenticator(context) if spec.keys else None
    process: NodeProcess | None = None
    try:
        process = NodeProcess(spec, node, context)
        on_built(process)
        process.run()
        return True
    except Exception as error:
        report_failure(spec, node, error)
        return False
    finally:
        closed = process is None or process.close()
        if authenticator is not None:
            authenticator.stop()
        if closed:  # otherwise a thread that hangs would lose its sockets
            context.destroy(linger=round(LINGER_SECONDS * 1000))


def report_failure(spec: NodeSpec, node: Node, error: Exception) -> None:
    """Print the error that is being handled, and tell the driver.

    In a context of its own, since a thread that hangs may keep the node's context from ending."""
    text = traceback.format_exc()
    with suppress(OSError):
        print(text, file=sys.stderr)
    context: zmq.Context[Any] = zmq.Context()
    to_driver = make_outbox(spec, node, context)
    to_driver.send(DRIVER, control.Failed(type(error).__name__, str(error), text))
    to_driver.close(LINGER_SECONDS)
    context.term()


class _Output(io.FileIO):
    """Standard output or standard error of a node. What a full disk does not take is lost, and nothing else."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
                raise
            return len(data)


def _open_outputs() -> None:
    """Have what user code prints go to outputs that never fail for want of room, line by line.

    A node may be ended at any moment, and what it has printed is the first thing that its user looks at.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(_Output(number, "w", closefd=False))
        old = getattr(sys, name)
        setattr(sys, name, io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=True))


def _exit_with_driver(lifeline: BinaryIO, directory: Path) -> None:
    """Wait until the driver is gone, then end this process at once."""
    with suppress(OSError):
        lifeline.read()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def main(lifeline: BinaryIO) -> NoReturn:
    """Run the node whose spec the lifeline carries."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _open_outputs()
    spec, node = decode_spec(lifeline)
    with suppress(OSError):  # so that ps and top tell the nodes apart
        Path("/proc/self/comm").write_text(node.name)
    threading.Thread(target=_exit_with_driver, args=(lifeline, spec.directory), daemon=True).start()
    program = spec.plan.program(node)
    if program is not None:
        succeeded = program(spec, node)
    else:
        succeeded = run_node(spec, node, zmq.Context(), lambda process: None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if succeeded else ERROR_REPORTED_STATUS)
