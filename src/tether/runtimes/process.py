"""One node in a process of its own.

The training thread takes gradients and feeds them to the node itself; the link's thread feeds what is received. Both do
so under the node's one lock, so a local step costs no thread switch. A third thread, the pulse, tells the driver what
is under way. A child of the driver's has a lifeline, which carries first what to build; when it closes, the driver is
gone and so is this process.
"""

from __future__ import annotations

import heapq
import os
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Union

import cloudpickle
import torch
import zmq
from torch import Tensor

from tether.compress import Packed
from tether.errors import RunError, WireError
from tether.machine import (
    Checkpoint,
    Compute,
    Evaluate,
    Event,
    GradientReady,
    Message,
    Node,
    PeerJoined,
    PeerLost,
    Received,
    Row,
    Started,
    StopRequested,
    Taken,
    TimerFired,
)
from tether.runtimes import control
from tether.runtimes.base import Plan
from tether.runtimes.collectives import Collectives, Down, Exchange, Up
from tether.runtimes.driver import DRIVER, GRACE_SECONDS
from tether.runtimes.handshake import Keys
from tether.runtimes.interpreter import Interpreter, T
from tether.runtimes.link import Inbox, Outbox
from tether.runtimes.liveness import Pulse
from tether.runtimes.memory import Memory, attach
from tether.runtimes.pool import Pool
from tether.runtimes.randomness import random_state, restore_random, seed_all
from tether.trace import Tracer
from tether.twin import own_device
from tether.vector import Shared
from tether.wire import pack_tree, unpack_tree

#: the name of the memory of a vector that all nodes share
SHARED = "shared"
#: exit status of a process that has told the driver about its error
TOLD = 3
REPORT_SECONDS = 0.25
#: how many messages a peer may have under way to a node that does not answer
EARLY_PER_NODE_MAX = 1000
#: how long what a node has said last may take to leave it
LAST_WORDS_SECONDS = 2.0


@dataclass
class Birth:
    """What a process is told when it starts, besides which node it is."""

    plan: Plan
    directory: Path
    threads: int
    #: in a run across machines: what all its processes have, where the driver receives, and where this process can be
    #: reached
    keys: Keys | None = None
    driver: str = ""
    host: str = ""
    collectives: Callable[..., Exchange] = Collectives
    #: the number of the device that it was given; without one, devices are taken in turns
    device: int | None = None


class NodeProcess:
    """The host of one node: its threads, its links and its clock."""

    bytes_scale = 1.0
    virtual = False

    def __init__(self, birth: Birth, node: Node, context: zmq.Context[Any]) -> None:
        plan, self.name, self._computes = birth.plan, node.name, node.computes
        types = message_types(plan.messages, compressed=plan.compress != "none")
        self._inbox = Inbox(
            context, birth.directory, self.name, [*control.FROM_DRIVER, *types], keys=birth.keys, host=birth.host
        )
        #: where what it sends is lent from
        self.memory = Memory(birth.directory, self.name)
        self._outbox = outbox(birth, node, context, self.memory)
        to_driver = outbox(birth, node, context)  # of its own, since the node's may be in use for long
        self._pulse = Pulse(partial(to_driver.send, DRIVER), to_driver.close)
        self._link = threading.Thread(target=self._listen, name="link", daemon=True)
        #: held by whoever feeds the node
        self.lock = threading.Lock()
        self._wanted = threading.Condition(self.lock)
        self._compute: Compute | None = None
        self._over = False
        self._failure: BaseException | None = None
        self._began: float | None = None
        #: what came from others before the driver said to begin
        self._early: list[Received] = []
        self._early_max = EARLY_PER_NODE_MAX * len(plan.nodes)
        self._reported_at = 0.0
        #: the processor's time that the link's thread has taken, which the training thread reads
        self._link_seconds = 0.0
        self._timers: list[tuple[float, str, int]] = []
        self._settings: dict[str, int] = {}
        shared = None
        if plan.shares:
            # nobody computes before all are there, so it is early enough if the joint node gives the values
            region = torch.frombuffer(attach(birth.directory, SHARED), dtype=torch.uint8)
            shared = Shared(region, first=self.name == plan.joint)
        device = own_device(node.index if birth.device is None else birth.device) if node.computes else None
        machine, replica = plan.build(node, self.memory.empty, shared, device)
        recorder = plan.recorder(node, replica)
        # a record tells of the weights at every event, so nothing may change them in between
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
            collectives=birth.collectives,
        )

    @property
    def is_over(self) -> bool:
        """It has been told to end, or has failed."""
        return self._over

    @property
    def exchange(self) -> Exchange:
        """The node's part in collectives."""
        return self._interpreter.collectives

    # ---- what the interpreter asks for, always under the lock ----

    def now(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def send(self, to: str, message: Message) -> None:
        self._outbox.send(to, message)

    def compute(self, effect: Compute) -> None:
        self._compute = effect
        self._wanted.notify()

    def beside(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
        if self._pool is None:
            then(work())
        else:
            self._pool.submit(work, then)

    def settle(self) -> None:
        if self._pool is not None:
            self._pool.settle()

    def set_timer(self, name: str, seconds: float | None) -> None:
        setting = self._settings[name] = self._settings.get(name, 0) + 1
        if seconds is not None:
            heapq.heappush(self._timers, (self.now() + seconds, name, setting))

    def record(self, values: Row) -> None:
        self._tell(control.Row(values, self.now()))

    def evaluate(self, effect: Evaluate, weights: Tensor) -> None:
        self._tell(control.Evaluation(effect.step, effect.samples, effect.final, weights, self.now()))

    def checkpoint(self, effect: Checkpoint, weights: Tensor, replica_state: dict[str, Any]) -> None:
        tensors: list[Tensor] = []
        state = pack_tree(effect.state, tensors)
        packed = pack_tree(self._with_random(replica_state), tensors)
        self._tell(
            control.Saved(effect.step, effect.samples, effect.final, weights, state, packed, tensors, self.now())
        )

    def _with_random(self, replica_state: dict[str, Any]) -> dict[str, Any]:
        return {**replica_state, "random": random_state()} if self._computes else replica_state

    def finish(self, reason: str, weights: Tensor) -> None:
        self._tell(control.Finished(reason, weights, self.now()))

    def _tell(self, message: Message) -> None:
        self._outbox.send(DRIVER, message)

    # ---- the two threads ----

    def run(self) -> None:
        """The training thread, from hello to goodbye."""
        self._tell(control.Hello(self._inbox.address))
        self._link.start()
        self._pulse.start()
        try:
            self._train()
        except Exception as error:
            self._failure = error
        if self._failure is not None:
            raise self._failure
        with self.lock:
            self._tell(control.Bye(self._interpreter.meter, self._interpreter.tracer.spans))

    def close(self) -> bool:
        """End the threads, each of which closes its own sockets. False if one does not end, and uses them still."""
        self._over = True  # without the lock, which a thread that does not end may hold
        if self._link.ident is not None:
            self._link.join(GRACE_SECONDS)
            self._pulse.stop()
        if self._link.is_alive():
            return False
        if self._pool is not None:
            self._pool.close()
        with self.lock:  # what the pool still does may want to send something
            self._outbox.close(LAST_WORDS_SECONDS)
        self.memory.close()
        return True

    def _train(self) -> None:
        interpreter, replica = self._interpreter, self._interpreter.replica
        exchanged = 0.0
        taken: Taken | None = None
        while True:
            with self.lock:
                while self._compute is None and not self._over:
                    self._wanted.wait()
                if self._compute is None or self._over:
                    return
                effect, self._compute = self._compute, None
            # somebody may be still reading the last one
            fresh = effect.fresh or (taken is not None and self.memory.is_lent(taken.gradient))
            start = time.monotonic()
            with self._pulse.doing("gradient"):
                replica.seek(effect.batch, effect.upcoming, effect.position)
                taken = replica.compute(effect.wanted, fresh)
            seconds = time.monotonic() - start
            exchanged, before = self._link_seconds, exchanged
            ready = GradientReady(taken.gradient, taken.loss, taken.samples, seconds, exchanged - before, taken.touched)
            with self.lock:
                if self._over:
                    return
                self._feed(ready)
                if (now := self.now()) - self._reported_at >= REPORT_SECONDS:
                    self._reported_at = now
                    self._tell(control.Report(interpreter.meter, now))

    def _listen(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        try:
            while not self._over:
                if poller.poll(self._milliseconds_to_next_timer()):
                    self._take_message()
                self._fire_timers()
                self._link_seconds = time.thread_time()
        except Exception as error:
            self.fail(error)
        finally:
            self._inbox.close()

    def _take_message(self) -> None:
        try:
            sender, message = self._inbox.receive()
        except WireError as error:
            print(f"refused: {error}", file=sys.stderr)
            with self.lock:
                self._interpreter.meter.messages_refused += 1
            return
        with self.lock:
            self.receive(sender, message)

    def receive(self, sender: str, message: Message) -> None:
        """Take a message in, under the lock."""
        with self._pulse.doing("event"):
            self._take_in(sender, message)

    def _feed(self, event: Event) -> None:
        with self._pulse.doing("event"):
            self._interpreter.feed(event)

    def _take_in(self, sender: str, message: Message) -> None:
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
            case control.StateWanted(number=number):
                kept: list[Tensor] = []
                self._tell(control.State(number, pack_tree(self._with_random(replica.state()), kept), kept))
                return
            case control.Observed(metrics=found):
                for metrics in found:
                    replica.observe(metrics)
                return
            case control.Stop(reason=reason):
                event = StopRequested(reason)
            case control.End():
                self._end()
                return
            case _:
                event = Received(sender, message)
                if self._began is None:
                    self._keep_early(event)
                    return
        self._interpreter.feed(event)

    def _keep_early(self, event: Received) -> None:
        if len(self._early) == self._early_max:
            raise RunError(
                f"{self.name} was sent {self._early_max + 1} messages before it was told to begin: the driver does not "
                "respond, or a peer sends without waiting for answers"
            )
        self._early.append(event)

    def fail(self, error: Exception) -> None:
        """End as soon as possible, and raise that where the node runs."""
        with self.lock:
            self._failure = error
            self._end()

    def _end(self) -> None:
        self._over = True
        self._wanted.notify()

    def _milliseconds_to_next_timer(self) -> int | None:
        with self.lock:
            return min(100, max(0, round((self._timers[0][0] - self.now()) * 1000) + 1)) if self._timers else 100

    def _fire_timers(self) -> None:
        with self.lock:
            while self._timers and self._timers[0][0] <= self.now():
                _, name, setting = heapq.heappop(self._timers)
                if self._settings[name] == setting:
                    self._feed(TimerFired(name))


def message_types(types: tuple[type[Message], ...], compressed: bool) -> list[Any]:
    """What nodes can send each other in a protocol with these messages."""
    down = Down[Union[types]] if types else Down[None]  # type: ignore[valid-type]  # noqa: UP007
    plain = (*types, Up, down)
    packed: Any = Packed[Union[plain]]  # type: ignore[valid-type]  # noqa: UP007
    return [*plain, packed] if compressed else [*plain]


def outbox(birth: Birth, node: Node, context: zmq.Context[Any], memory: Memory | None = None) -> Outbox:
    """A node's way out, which can reach the driver."""
    made = Outbox(context, birth.directory, node.name, memory=memory, keys=birth.keys)
    if birth.driver:
        made.addresses[DRIVER] = birth.driver
    return made


def live(birth: Birth, node: Node, context: zmq.Context[Any], follow: Callable[[NodeProcess], None]) -> bool:
    """Be a node until the run is over. False if it was an error that ended it, which the driver has been told.

    `follow` is given the node before it begins, to see to it that it ends with the driver.
    """
    torch.set_num_threads(birth.threads)
    seed_all((birth.plan.random_seed * 1_000_003 + node.index * 7919 + node.life) % 2**32)
    doorman = birth.keys.guard(context) if birth.keys else None
    process: NodeProcess | None = None
    try:
        process = NodeProcess(birth, node, context)
        follow(process)
        process.run()
        return True
    except Exception as error:
        _tell_failure(birth, node, error)
        return False
    finally:
        closed = process is None or process.close()
        if doorman is not None:
            doorman.stop()
        if closed:  # else a thread that hangs would find its sockets gone
            context.destroy(linger=round(LAST_WORDS_SECONDS * 1000))


def _tell_failure(birth: Birth, node: Node, error: Exception) -> None:
    """In a context of its own, since a thread that hangs may keep that of the node from ever ending."""
    told = traceback.format_exc()
    print(told, file=sys.stderr)
    context: zmq.Context[Any] = zmq.Context()
    to_driver = outbox(birth, node, context)
    to_driver.send(DRIVER, control.Failed(type(error).__name__, str(error), told))
    to_driver.close(LAST_WORDS_SECONDS)
    context.term()


def birth_certificate(birth: Birth, node: Node, path: list[str]) -> bytes:
    """What `main` reads. It goes through a pipe to a child of ours; no pickle ever comes from elsewhere."""
    parts = (cloudpickle.dumps(path), cloudpickle.dumps((birth, node)))
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _read_certificate(stream: BinaryIO) -> tuple[Birth, Node]:
    """The module path comes first, so that the rest can be imported."""
    path, rest = (stream.read(struct.unpack("<Q", stream.read(8))[0]) for _ in range(2))
    sys.path[:] = cloudpickle.loads(path)
    birth, node = cloudpickle.loads(rest)
    return birth, node


def _follow_lifeline(stream: BinaryIO, directory: Path) -> None:
    with suppress(OSError):
        stream.read()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def main(lifeline: BinaryIO) -> NoReturn:
    """Be the node that the lifeline describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    birth, node = _read_certificate(lifeline)
    with suppress(OSError):  # so that ps and top tell the nodes apart
        Path("/proc/self/comm").write_text(node.name)
    threading.Thread(target=_follow_lifeline, args=(lifeline, birth.directory), daemon=True).start()
    well = live(birth, node, zmq.Context(), lambda process: None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if well else TOLD)
