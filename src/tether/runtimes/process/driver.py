"""The caller's side of a run whose nodes are processes.

The driver has the processes started by launchers, tells all nodes when one has joined or died, and passes what they
report to the observer. Protocol messages go straight from process to process.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq
from torch import Tensor

from tether import errors
from tether.core.effects import Evaluate
from tether.core.machine import Node
from tether.core.message import Message
from tether.core.wire import pack_tree, unpack_tree
from tether.errors import NodesLost, RunError, TetherError, UsageError, WireError
from tether.runtimes.base import Observer, Outcome, Plan, check_count
from tether.runtimes.process import control
from tether.runtimes.process.control import DRIVER, GRACE_SECONDS
from tether.runtimes.process.handshake import Keys
from tether.runtimes.process.launcher import Launcher, NodeExited, NodeStarted
from tether.runtimes.process.link import FRAME_BYTES_MAX, Inbox, Outbox, frame_bytes_max, is_power_of_ten
from tether.runtimes.process.liveness import Watchdog
from tether.runtimes.process.memory import Memory
from tether.runtimes.process.states import CheckpointAssembly, StateCollection

#: when an interrupted run has less time left than this, a checkpoint waits for states no longer
SAVE_SECONDS = 1.0
#: how long the driver waits for the error of a process that has reported one and exited
ERROR_SECONDS = 2.0


def check_processes(workers: int, threads: int, restarts: int, hung_seconds: float) -> None:
    """Refuse settings that no run in processes can have."""
    check_count("workers", workers)
    check_count("threads", threads)
    check_count("restarts", restarts, least=0)
    if not (isinstance(hung_seconds, int | float) and hung_seconds >= 2):
        raise UsageError(f"hung_seconds must be a number of at least 2, not {hung_seconds!r}")


class Driver:
    """One run."""

    def __init__(
        self,
        plan: Plan,
        observer: Observer,
        hung_seconds: float,
        *,
        host: str = "",
        keys: Keys | None = None,
        types: Iterable[type[Message]] = (),
    ) -> None:
        """A process that has not responded or made progress for `hung_seconds` or more is killed.

        With a `host` nodes may be on other machines; they have these `keys`, or new ones. `types` are
        those of messages for `_handle_other`.
        """
        self._plan = plan
        self._observer = observer
        self.directory = Path(tempfile.mkdtemp(prefix="tether-"))
        self._context: zmq.Context[Any] = zmq.Context()
        self.keys = (keys or Keys.make()) if host else None
        self._authenticator = self.keys.start_authenticator(self._context) if self.keys else None
        types = (*control.FROM_NODE, *types)
        limit = frame_bytes_max(plan) if self.keys else FRAME_BYTES_MAX
        self._inbox = Inbox(
            self._context, self.directory, DRIVER, types, keys=self.keys, host=host, frame_bytes_max=limit
        )
        self._refused = 0
        self.address = self._inbox.address
        self._memory = Memory(self.directory, DRIVER)
        self._outbox = Outbox(self._context, self.directory, DRIVER, memory=self._memory, keys=self.keys)
        #: the launcher of each node, by name
        self._launchers: dict[str, Launcher] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        #: all nodes by name, including those that have died
        self._nodes = {node.name: node for node in plan.nodes}
        self._living: set[str] = set()
        #: the nodes that have said hello and, if the run had begun, were given a state to begin with
        self._ready: set[str] = set()
        self._said_bye: set[str] = set()
        self._began = False
        self._stopping = False
        self._outcome: Outcome | None = None
        self._meters: dict[str, Any] = {}
        self._spans: dict[str, Any] = {}
        #: when no worker is left: the error, and until when the hub may save what it has
        self._no_workers_error = ""
        self._no_workers_deadline = math.inf
        self._checkpoints = CheckpointAssembly(self._nodes, observer, self._request_states)
        #: nodes that join while the run goes on: the address of each, and the peer whose state it will begin with
        self._joining: dict[str, tuple[str, str, StateCollection]] = {}
        #: how many evaluations each node knows of
        self._observed: defaultdict[str, int] = defaultdict(int)
        self._watchdog = Watchdog(hung_seconds)

    def run(self, launchers: Iterable[tuple[Launcher, list[Node]]]) -> Outcome:
        """From the start of the processes to the end of the run. Each launcher starts some of the nodes."""
        launchers = list(launchers)
        for launcher, nodes in launchers:
            self._poller.register(launcher.fileno(), zmq.POLLIN)
            self._launchers |= {node.name: launcher for node in nodes}
            self._living |= {node.name for node in nodes}
        for launcher, nodes in launchers:
            launcher.start(nodes)
            self._watchdog.tick()
            self._watchdog.started(node.name for node in nodes)
        self._wait_until_ready()
        self._began = True
        # protocols begin with the nodes of the plan; others that are ready already join as later ones do
        others = [name for name in self._members() if name not in {node.name for node in self._plan.nodes}]
        self._ready -= set(others)
        members = self._members()
        self._send_evaluations()
        for name in members:
            self._outbox.send(name, control.Begin(members, self._addresses_for(name)))
        for name in others:
            self._admit(name, self._outbox.addresses.get(name, ""))
        try:
            self._run_until_finished()
        finally:
            self._checkpoints.save_pending()
        if self._no_workers_error:
            raise NodesLost(self._no_workers_error)
        assert self._outcome is not None
        ending = frozenset(self._living)  # a node that exits from now on has not died of anything
        for name in ending:
            self._outbox.send(name, self._end_message(name))
        deadline = time.monotonic() + min(4 * GRACE_SECONDS, self._observer.seconds_left() / 2)
        while not ending <= self._said_bye and time.monotonic() < deadline:
            self._poll(0.1)
        self._outcome.lost = frozenset(self._nodes) - ending
        self._outcome.meters = self._meters
        self._outcome.spans = self._spans
        return self._outcome

    def _end_message(self, name: str) -> control.End:
        """What tells a node that the run is over."""
        return control.End()

    def close(self) -> None:
        """End every process, however the run ended, and leave nothing behind."""
        try:
            for launcher in self._all_launchers():
                launcher.close(GRACE_SECONDS)
        finally:  # sockets that stay open would make the interpreter wait for them when it ends
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=0)
            self._memory.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        """Until every node is ready, each within its own time."""
        while not self._is_complete():
            late = sorted(name for name in self._living - self._ready if self._watchdog.why_overdue(name, ready=False))
            if late:
                why = self._watchdog.why_overdue(late[0], ready=False)
                raise RunError(f"{', '.join(late)} {why}{self._output(late[0])}")
            self._poll(0.1)

    def _run_until_finished(self) -> None:
        """Until the run has ended, or cannot go on."""
        limit = self._plan.seconds
        deadline = math.inf if limit is None else time.monotonic() + limit
        while (self._outcome is None or self._checkpoints.is_pending) and time.monotonic() < self._no_workers_deadline:
            self._poll(0.1)
            self._kill_overdue()
            self._send_evaluations()
            self._admit_joining()
            if self._observer.seconds_left() < SAVE_SECONDS:
                self._checkpoints.save_pending()
            else:
                self._checkpoints.save_if_done(time.monotonic())
            late = f"{limit:g} s have passed" if time.monotonic() > deadline else None
            if not self._stopping and (reason := self._observer.stop_requested() or late):
                self._stopping = True
                for name in [self._plan.hub] if self._plan.hub else sorted(self._living):
                    self._outbox.send(name, control.Stop(reason))

    def _poll(self, seconds: float) -> None:
        """Wait up to this long for something to happen, and handle all that has."""
        self._poller.poll(round(seconds * 1000))
        self._watchdog.tick()
        while self._inbox.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._receive()
        for launcher in self._all_launchers():
            for event in launcher.poll_events():
                match event:
                    case NodeStarted(node=node):
                        self._nodes[node.name] = node
                        self._launchers[node.name] = launcher
                        self._living.add(node.name)
                        self._watchdog.started([node.name])
                    case NodeExited():
                        self._handle_exit(event)

    def _kill_overdue(self) -> None:
        """Kill processes that have stopped; what follows is the same as after any other death."""
        for name in sorted(self._living):
            since_kill = self._watchdog.seconds_since_kill(name)
            if since_kill is not None:
                if since_kill > GRACE_SECONDS:  # a process in an uninterruptible sleep dies when it wakes up
                    self._handle_exit(NodeExited(name, "could not be killed yet"))
            elif why := self._watchdog.why_overdue(name, ready=name in self._ready):
                self._observer.note(f"{name} {why} and is killed")
                self._watchdog.killed(name)
                self._launchers[name].kill(name)

    def _receive(self) -> None:
        try:
            sender, message = self._inbox.receive()
        except WireError as error:
            self._refused += 1
            if is_power_of_ten(self._refused):
                self._observer.note(f"{self._refused} messages were refused, the last: {error}")
            return
        if sender not in self._living:
            return  # the sender was already declared dead
        observer = self._observer
        self._watchdog.heard(sender)
        match message:
            case control.Hello(address=address):
                self._handle_hello(sender, address)
            case control.Alive(work=work):
                self._watchdog.reported(sender, work)
            case control.Note(text=text):
                observer.note(f"{sender}: {text}")
                if sender not in self._ready:
                    self._extend_start()
            case control.Report(meter=meter, now=now):
                self._meters[sender] = meter
                observer.meter(meter, now)
            case control.Row(values=values, now=now):
                observer.record(sender, values, now)
            case control.Evaluation(step=step, samples=samples, final=final, weights=weights, now=now):
                observer.evaluate(Evaluate(step, samples, final), weights, now)
            case control.Checkpoint() as checkpoint:
                self._checkpoints.add(sender, checkpoint, self._workers(), time.monotonic())
            case control.State(number=number, state=packed, tensors=tensors):
                state = unpack_tree(packed, tensors)
                for collection in self._state_collections():
                    collection.add(sender, number, state, time.monotonic())
            case control.Finished(reason=reason, weights=weights, now=now):
                if self._plan.hub in ("", sender) and self._outcome is None:
                    # a copy, since a borrowed tensor would keep all of the node's memory
                    self._outcome = Outcome(weights.clone(), now, reason)
            case control.Bye(meter=meter, spans=spans):
                self._said_bye.add(sender)
                self._meters[sender] = meter
                self._spans[sender] = spans
            case control.Failed(kind=kind, text=text, traceback=traceback):
                raise _error(sender, kind, text, traceback)
            case _:
                self._handle_other(sender, message)

    def _handle_other(self, sender: str, message: Message) -> None:
        """Handle a message that only some drivers know."""
        raise NotImplementedError

    def _extend_start(self) -> None:
        """Data is on its way. One job brings it to all workers, perhaps in turns, so none of them is late meanwhile."""
        self._watchdog.started(name for name in self._living if self._nodes[name].computes)

    # ---- states of workers ----

    def _state_collections(self) -> list[StateCollection]:
        return [self._checkpoints.collection, *(collection for _, _, collection in self._joining.values())]

    def _request_states(self, collection: StateCollection, names: set[str]) -> None:
        number = collection.request(names, time.monotonic())
        for name in sorted(names):
            self._outbox.send(name, control.StateRequest(number))

    def _restore(self, name: str, state: dict[str, Any]) -> None:
        if state:
            tensors: list[Tensor] = []
            self._outbox.send(name, control.Restore(pack_tree(state, tensors), tensors))

    def _send_evaluations(self) -> None:
        """Send every node the evaluations that it does not know of."""
        found = self._observer.observed()
        for name in self._members():
            if new := list(found[self._observed[name] :]):
                self._observed[name] += len(new)
                self._outbox.send(name, control.Observed(new))

    # ---- membership ----

    def _handle_hello(self, name: str, address: str) -> None:
        """A node is built. A worker that joins while the run goes on begins with the state of a peer."""
        if address:
            self._outbox.addresses[name] = address
        self._joining.pop(name, None)
        peers = self._workers() if self._began and self._nodes[name].computes and self._outcome is None else set()
        if peers:
            peer, collection = min(peers), StateCollection()
            self._joining[name] = address, peer, collection
            self._request_states(collection, {peer})
        else:
            self._restore(name, self._plan.state_of(self._nodes[name]))
            self._admit(name, address)

    def _admit_joining(self) -> None:
        """Admit the nodes whose peers have sent their states, or have had the time to."""
        for name, (address, peer, collection) in list(self._joining.items()):
            if peer not in self._living and not collection.states:
                self._handle_hello(name, address)  # there may be another peer
            elif collection.is_done(time.monotonic()):
                del self._joining[name]
                of_peer: dict[str, Any] = next(iter(collection.states.values()), {})
                state = of_peer if "optimizer" in of_peer else self._plan.state_of(self._nodes[name])
                self._restore(name, {key: value for key, value in state.items() if key != "random"})
                self._admit(name, address)

    def _admit(self, name: str, address: str) -> None:
        """Count a node as ready; if the run has begun, let it begin and tell the others."""
        self._ready.add(name)
        if not self._began or self._outcome is not None:
            return
        self._send_evaluations()
        self._outbox.send(name, control.Begin(self._members(), self._addresses_for(name)))
        for dead in self._nodes.keys() - self._living:
            self._outbox.send(name, control.Lost(dead))  # others may still list it as a member
        self._send_all(control.Joined(name, self._nodes[name].role, address), except_to=name)
        self._observer.note(f"{name} has joined")

    def _handle_exit(self, exited: NodeExited) -> None:
        name, how = exited.name, exited.how
        if name not in self._living:
            return  # it was declared dead when it could not be killed
        self._joining.pop(name, None)
        for collection in self._state_collections():
            collection.forget(name, time.monotonic())
        if exited.error_reported:
            deadline = time.monotonic() + ERROR_SECONDS
            while time.monotonic() < deadline and self._inbox.socket.poll(100):
                self._receive()  # raises the error that it has reported
        if self._outcome is not None or name in self._said_bye:
            return  # its last messages may still be on their way
        self._living.discard(name)
        if name not in self._ready:
            if exited.replaced:
                return
            when = "it had joined" if self._plan.scripted else "it was ready"
            raise RunError(f"{name} {how} before {when}{self._output(name)}")
        if name in self._plan.vital:
            held = "the joint model" if name == self._plan.hub else "a part of the joint model"
            raise NodesLost(f"{name}, which holds {held}, {how}{self._output(name)}")
        if any(self._nodes[other].computes for other in self._living):
            self._observer.note(f"{name} {how}; the others go on")
        else:
            self._no_workers_error = f"no worker is left: {name} was the last and {how}{self._output(name)}"
            if self._plan.hub not in self._living:
                raise NodesLost(self._no_workers_error)
            self._no_workers_deadline = time.monotonic() + GRACE_SECONDS
        self._outbox.forget(name)
        self._send_all(control.Lost(name))
        if self._no_workers_error:
            self._outbox.send(self._plan.hub, control.Stop("no worker is left"))

    def _is_complete(self) -> bool:
        """Whether every living node is ready, and at least one worker is among them."""
        return self._living <= self._ready and any(self._nodes[name].computes for name in self._living)

    def _members(self) -> tuple[str, ...]:
        """The nodes that take part: those that live and are ready."""
        return tuple(name for name in self._nodes if name in self._living & self._ready)

    def _workers(self) -> set[str]:
        return {name for name in self._members() if self._nodes[name].computes}

    def _addresses_for(self, name: str) -> dict[str, str]:
        """The addresses of the others, where they have one."""
        return {other: address for other, address in self._outbox.addresses.items() if other != name}

    def _send_all(self, message: Message, except_to: str = "") -> None:
        for name in sorted(self._living & self._ready - {except_to}):
            self._outbox.send(name, message)

    def _all_launchers(self) -> list[Launcher]:
        return list({id(launcher): launcher for launcher in self._launchers.values()}.values())

    def _output(self, name: str) -> str:
        """The end of what a process printed, for an error message."""
        text = self._launchers[name].output(name).strip()
        return f"; {text[-1000:]}" if text else ""


def _error(node: str, kind: str, text: str, traceback: str) -> TetherError:
    """The error of a node, as the caller sees it."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, TetherError):
        return known(text if text.startswith(node) else f"{node}: {text}")
    error = errors.internal(f"{kind}: {text}", node)
    error.add_note(f"in {node}:\n{traceback}")
    return error
