"""The caller's side of a run whose nodes are processes.

The driver has the processes started, tells all nodes when one has come or died, and takes in what they report. Protocol
messages go straight from process to process. Who starts processes, and knows of their deaths, is a `Crew`: the
nursery of this machine, or a cluster's scheduler.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zmq
from torch import Tensor

from tether import errors
from tether.errors import NodesLost, RunError, TetherError, UsageError, WireError
from tether.machine import Checkpoint, Evaluate, Message, Node
from tether.runtimes import control
from tether.runtimes.base import NodeStates, Observer, Outcome, Plan
from tether.runtimes.handshake import Keys
from tether.runtimes.link import Inbox, Outbox
from tether.runtimes.liveness import START_SECONDS, AwakeClock, overdue_seconds
from tether.runtimes.memory import Memory
from tether.wire import pack_tree, unpack_tree

#: the name under which the driver of a run receives
DRIVER = "driver"
#: how long processes are given to end by themselves
GRACE_SECONDS = 1.5
#: how much of the time states of workers may take on their way to the driver, and how long they are waited for at first
STATES_SHARE = 0.02
STATES_SECONDS = 10.0
#: how much of the time that an interrupted run has left is for saving what there is
SAVE_SECONDS = 1.0


@dataclass(frozen=True)
class Came:
    """A process has begun to become this node, whose place is that of one which has died."""

    node: Node


@dataclass(frozen=True)
class Died:
    """A node's process is gone.

    `told` if it has sent its error before; `replaced` if another will come for it, or the run can begin without.
    """

    name: str
    how: str
    told: bool = False
    replaced: bool = False


class Crew(Protocol):
    """Starts the processes of some nodes and knows when they die."""

    def start(self, nodes: Iterable[Node]) -> None:
        """Begin to make a process of each."""
        ...

    def fileno(self) -> int:
        """Readable when there is news."""
        ...

    def news(self) -> list[Came | Died]:
        """What has happened since the last call."""
        ...

    def end(self, name: str) -> None:
        """Have done with a process that shows no sign of life; its death is news."""
        ...

    def output(self, name: str) -> str:
        """What a process has printed, as far as that is known, or why there is none yet."""
        ...

    def close(self, seconds: float) -> None:
        """End every process, after a while by force."""
        ...


class Census:
    """Asks nodes for something large, so seldom that the answers take little of the time.

    A question is due when everybody has answered the last one and that is long enough ago. Who takes longer than the
    patience that there is, twice what the last answers took or more, is left out.
    """

    _numbers = itertools.count(1)

    def __init__(self, share: float = STATES_SHARE, patience_seconds: float = STATES_SECONDS) -> None:
        """`share`: of the time, that answers may take."""
        self._share = share
        self._patience_seconds = patience_seconds
        self.answers: dict[str, Any] = {}
        self._missing: set[str] = set()
        self._number = 0
        self._asked_at = -math.inf
        self._took_seconds = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is time to ask again."""
        return not self._missing and (now - self._asked_at) * self._share >= self._took_seconds

    def ask(self, names: set[str], now: float) -> int:
        """Begin to wait for the answers of these; the number of the question, for `take`."""
        self.answers, self._missing = {}, set(names)
        self._number, self._asked_at = next(self._numbers), now
        return self._number

    def take(self, name: str, number: int, answer: Any, now: float) -> None:
        """An answer has come, perhaps to an earlier question."""
        if number == self._number and name in self._missing:
            if not self.is_over(now):
                self.answers[name] = answer
            self.forget(name, now)

    def forget(self, name: str, now: float) -> None:
        """Do not wait for somebody any longer."""
        if name in self._missing:
            self._missing.remove(name)
            if not self._missing:
                self._took_seconds = now - self._asked_at

    def is_over(self, now: float) -> bool:
        """Whether all have answered who will, or could have."""
        patience_seconds = max(self._patience_seconds, 2 * self._took_seconds)
        return not self._missing or now - self._asked_at >= patience_seconds


def check_processes(workers: int, threads: int, restarts: int, hung_seconds: float) -> None:
    """Refuse settings that no run in processes can have."""
    if workers < 1 or threads < 1:
        raise UsageError(f"workers and threads must be at least 1, not {workers} and {threads}")
    if restarts < 0 or not hung_seconds >= 2:
        raise UsageError(f"restarts must be at least 0 and hung_seconds at least 2, not {restarts} and {hung_seconds}")


class Driver:
    """One run."""

    def __init__(
        self,
        plan: Plan,
        observer: Observer,
        hung_seconds: float,
        *,
        host: str = "",
        types: Iterable[type[Message]] = (),
    ) -> None:
        """A process that has not responded or made progress for `hung_seconds` or more is killed.

        With a `host` nodes may be on other machines. `types` are those of messages for `_take_other`.
        """
        self._plan = plan
        self._observer = observer
        self._hung_seconds = hung_seconds
        self.directory = Path(tempfile.mkdtemp(prefix="tether-"))
        self._context: zmq.Context[Any] = zmq.Context()
        self.keys = Keys.make() if host else None
        self._doorman = self.keys.guard(self._context) if self.keys else None
        types = (*control.FROM_NODE, *types)
        self._inbox = Inbox(self._context, self.directory, DRIVER, types, keys=self.keys, host=host)
        self.address = self._inbox.address
        self._memory = Memory(self.directory, DRIVER)
        self._outbox = Outbox(self._context, self.directory, DRIVER, memory=self._memory, keys=self.keys)
        self._crews: dict[str, Crew] = {}
        self._nodes = {node.name: node for node in plan.nodes}
        self._living: set[str] = set()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._outcome: Outcome | None = None
        self._began = False
        self._said_hello: set[str] = set()
        self._said_bye: set[str] = set()
        self._meters: dict[str, Any] = {}
        self._spans: dict[str, Any] = {}
        self._stopping = False
        #: who died last when no worker was left, and until when the joint node may save what it has
        self._bereft = ""
        self._bereft_until = math.inf
        #: the checkpoint that waits for the states of the workers, and who told it
        self._saving: tuple[str, control.Saved] | None = None
        self._census = Census()
        #: who has come while the run goes on, and where; it is welcome when a peer has told what it shall begin with
        self._arrivals: dict[str, tuple[str, str, Census]] = {}
        #: of how many evaluations each node has been told
        self._observed: defaultdict[str, int] = defaultdict(int)
        self._clock = AwakeClock()
        #: by that clock: when each process was started or brought some of its data, last responded, and was killed
        self._started: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._killed: dict[str, float] = {}
        #: what each process was doing when it last responded
        self._work: dict[str, tuple[control.Work, ...]] = {}

    def run(self, crews: Iterable[tuple[Crew, list[Node]]]) -> Outcome:
        """From the start of the processes to the end of the run; each crew has some of the nodes."""
        crews = list(crews)
        for crew, nodes in crews:
            self._poller.register(crew.fileno(), zmq.POLLIN)
            self._crews |= {node.name: crew for node in nodes}
            self._living |= {node.name for node in nodes}
        for crew, nodes in crews:
            crew.start(nodes)
            self._started |= dict.fromkeys((node.name for node in nodes), self._clock.tick())
        self._await_all()
        self._began = True
        members = self._members()
        self._tell_evaluations()
        for name in members:
            self._outbox.send(name, control.Begin(members, self._addresses_for(name)))
        try:
            self._go_on()
        finally:
            self._save_at_last()
        if self._bereft:
            raise NodesLost(self._bereft)
        assert self._outcome is not None
        ending = frozenset(self._living)  # who ends from now on has not died of anything
        for name in ending:
            self._outbox.send(name, control.End())
        deadline = time.monotonic() + min(4 * GRACE_SECONDS, self._observer.seconds_left() / 2)
        while not ending <= self._said_bye and time.monotonic() < deadline:
            self._turn(0.1)
        self._outcome.lost = frozenset(self._nodes) - ending
        self._outcome.meters = self._meters
        self._outcome.spans = self._spans
        return self._outcome

    def _go_on(self) -> None:
        """Until the run has ended, or cannot go on."""
        limit = self._plan.seconds
        deadline = math.inf if limit is None else time.monotonic() + limit
        while (self._outcome is None or self._saving is not None) and time.monotonic() < self._bereft_until:
            self._turn(0.1)
            self._watch()
            self._tell_evaluations()
            self._admit()
            hurried = self._observer.seconds_left() < SAVE_SECONDS
            if self._saving is not None and (hurried or self._census.is_over(time.monotonic())):
                self._save_at_last()
            late = f"{limit:g} s have passed" if time.monotonic() > deadline else None
            if not self._stopping and (reason := self._observer.stop_requested() or late):
                self._stopping = True
                for name in [self._plan.joint] if self._plan.joint else sorted(self._living):
                    self._outbox.send(name, control.Stop(reason))

    def close(self) -> None:
        """End every process, however the run ended, and leave nothing behind."""
        for crew in self._all_crews():
            crew.close(GRACE_SECONDS)
        if self._doorman is not None:
            self._doorman.stop()
        self._context.destroy(linger=0)
        self._memory.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _all_crews(self) -> list[Crew]:
        return list({id(crew): crew for crew in self._crews.values()}.values())

    def _is_complete(self) -> bool:
        return self._living <= self._said_hello and any(self._nodes[name].computes for name in self._living)

    def _members(self) -> tuple[str, ...]:
        return tuple(name for name in self._nodes if name in self._living & self._said_hello)

    def _addresses_for(self, name: str) -> dict[str, str]:
        """Where the others are, as far as that needs to be told."""
        return {other: address for other, address in self._outbox.addresses.items() if other != name}

    def _tell_all(self, message: Message, but: str = "") -> None:
        for name in sorted(self._living & self._said_hello - {but}):
            self._outbox.send(name, message)

    def _await_all(self) -> None:
        """Until every node has come up, each within its own time."""
        while not self._is_complete():
            if late := [name for name in sorted(self._living) if self._is_late(name)]:
                raise RunError(f"{', '.join(late)} did not come up within {START_SECONDS:g} s{self._output(late[0])}")
            self._turn(0.1)

    def _is_late(self, name: str) -> bool:
        return name not in self._said_hello and self._clock.seconds - self._started[name] > START_SECONDS

    def _turn(self, seconds: float) -> None:
        """Wait for something to happen and take it in."""
        self._poller.poll(round(seconds * 1000))
        self._clock.tick()
        while self._inbox.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._take_message()
        for crew in self._all_crews():
            for news in crew.news():
                match news:
                    case Came(node=node):
                        self._nodes[node.name] = node
                        self._crews[node.name] = crew
                        self._living.add(node.name)
                        self._started[node.name] = self._clock.seconds
                    case Died():
                        self._take_death(news)

    def _watch(self) -> None:
        """Kill processes that have stopped; what follows from that is what follows from any death."""
        now = self._clock.seconds
        for name in sorted(self._living):
            if name in self._killed:
                if now - self._killed[name] > GRACE_SECONDS:  # one in an uninterruptible sleep dies when it wakes up
                    self._take_death(Died(name, "could not be killed yet"))
            elif stopped := self._how_stopped(name):
                self._observer.note(f"{name} {stopped} and is killed")
                self._killed[name] = now
                self._crews[name].end(name)

    def _how_stopped(self, name: str) -> str:
        """Why this process is to be killed, or "" if all is well."""
        if name not in self._said_hello:
            return f"did not come up within {START_SECONDS:g} s" if self._is_late(name) else ""
        if self._clock.seconds - self._heard.setdefault(name, self._clock.seconds) > self._hung_seconds:
            return f"has not responded for {self._hung_seconds:g} s"
        for work in self._work.get(name, ()):
            if limit := overdue_seconds(work, self._hung_seconds):
                return f"has been at one {work.what} for {work.seconds:.0f} s, longer than the {limit:.0f} s allowed,"
        return ""

    def _take_message(self) -> None:
        try:
            sender, message = self._inbox.receive()
        except WireError as error:
            self._observer.note(f"a message was refused: {error}")
            return
        if sender not in self._living:
            return  # it is of somebody who is dead for all others
        observer = self._observer
        self._heard[sender] = self._clock.seconds
        match message:
            case control.Hello(address=address):
                self._arrive(sender, address)
            case control.Alive(work=work):
                self._work[sender] = work
            case control.Note(text=text):
                observer.note(f"{sender}: {text}")
                if sender not in self._said_hello:
                    self._wait_for_data()
            case control.Report(meter=meter, now=now):
                self._meters[sender] = meter
                observer.meter(meter, now)
            case control.Row(values=values, now=now):
                observer.record(sender, values, now)
            case control.Evaluation(step=step, samples=samples, final=final, weights=weights, now=now):
                observer.evaluate(Evaluate(step, samples, final), weights, now)
            case control.Saved() as saved:
                self._save(sender, saved)
            case control.State(number=number, state=packed, tensors=tensors):
                state = unpack_tree(packed, tensors)
                for census in self._censuses():
                    census.take(sender, number, state, time.monotonic())
            case control.Finished(reason=reason, weights=weights, now=now):
                if self._plan.joint in ("", sender) and self._outcome is None:
                    # a copy, for what is lent would keep all of the node's memory
                    self._outcome = Outcome(weights.clone(), now, reason)
            case control.Bye(meter=meter, spans=spans):
                self._said_bye.add(sender)
                self._meters[sender] = meter
                self._spans[sender] = spans
            case control.Failed(kind=kind, text=text, traceback=told):
                raise _error(sender, kind, text, told)
            case _:
                self._take_other(sender, message)

    def _wait_for_data(self) -> None:
        """Data is on its way. One job brings it to all workers, perhaps in turns, so none of them is late meanwhile."""
        for name in self._living:
            if self._nodes[name].computes:
                self._started[name] = self._clock.seconds

    def _take_other(self, sender: str, message: Message) -> None:
        """A message that only some drivers know."""
        raise NotImplementedError

    # ---- states of workers ----

    def _workers(self) -> set[str]:
        return {name for name in self._members() if self._nodes[name].computes}

    def _censuses(self) -> list[Census]:
        return [self._census, *(census for _, _, census in self._arrivals.values())]

    def _ask(self, census: Census, names: set[str]) -> None:
        number = census.ask(names, time.monotonic())
        for name in sorted(names):
            self._outbox.send(name, control.StateWanted(number))

    def _save(self, sender: str, saved: control.Saved) -> None:
        """Have a checkpoint saved once the workers have told their states, if it is time to ask for them.

        One that still waits gives way to a newer one.
        """
        waits = self._saving is not None
        self._saving = sender, saved
        if saved.final or (not waits and self._census.is_due(time.monotonic())):
            self._ask(self._census, self._workers() - {sender})
        elif not waits:
            self._save_at_last(asked=False)

    def _save_at_last(self, asked: bool = True) -> None:
        """Have the checkpoint that waits saved, with the states that have come."""
        if self._saving is None:
            return
        (sender, saved), self._saving = self._saving, None
        effect = Checkpoint(saved.step, saved.samples, unpack_tree(saved.state, saved.tensors), saved.final)
        hub, workers = unpack_tree(saved.replica_state, saved.tensors), None
        if asked:
            told, self._census.answers = self._census.answers, {}
            if self._nodes[sender].computes:
                told, hub = {**told, sender: hub}, {}
            workers = {self._nodes[name].index: state for name, state in told.items()} or None
        self._observer.checkpoint(effect, saved.weights, NodeStates(hub, workers), saved.now)

    def _arrive(self, name: str, address: str) -> None:
        """A node is ready. One that comes while the run goes on shall begin with what a peer has."""
        if address:
            self._outbox.addresses[name] = address
        self._arrivals.pop(name, None)
        peers = self._workers() if self._began and self._nodes[name].computes and self._outcome is None else set()
        if peers:
            peer, census = min(peers), Census()
            self._arrivals[name] = address, peer, census
            self._ask(census, {peer})
        else:
            self._restore(name, self._plan.state_of(self._nodes[name]))
            self._welcome(name, address)

    def _admit(self) -> None:
        """Welcome those whose peers have told what they have."""
        for name, (address, peer, census) in list(self._arrivals.items()):
            if peer not in self._living and not census.answers:
                self._arrive(name, address)  # there may be another peer
            elif census.is_over(time.monotonic()):
                del self._arrivals[name]
                told: dict[str, Any] = next(iter(census.answers.values()), {})
                state = told if "optimizer" in told else self._plan.state_of(self._nodes[name])
                self._restore(name, {key: value for key, value in state.items() if key != "random"})
                self._welcome(name, address)

    def _restore(self, name: str, state: dict[str, Any]) -> None:
        if state:
            tensors: list[Tensor] = []
            self._outbox.send(name, control.Restore(pack_tree(state, tensors), tensors))

    def _tell_evaluations(self) -> None:
        """Tell every node what evaluations have found that it has not been told of."""
        found = self._observer.observed()
        for name in self._members():
            if new := list(found[self._observed[name] :]):
                self._observed[name] += len(new)
                self._outbox.send(name, control.Observed(new))

    # ---- who is there ----

    def _welcome(self, name: str, address: str) -> None:
        """If the run has begun already, a node that is ready and the others are told of each other."""
        self._said_hello.add(name)
        if not self._began or self._outcome is not None:
            return
        self._tell_evaluations()
        self._outbox.send(name, control.Begin(self._members(), self._addresses_for(name)))
        for dead in self._nodes.keys() - self._living:
            self._outbox.send(name, control.Lost(dead))  # others may still speak of them
        self._tell_all(control.Joined(name, self._nodes[name].role, address), but=name)
        self._observer.note(f"{name} has joined")

    def _take_death(self, death: Died) -> None:
        name, how = death.name, death.how
        if name not in self._living:
            return  # it was counted as dead when it could not be killed
        self._arrivals.pop(name, None)
        for census in self._censuses():
            census.forget(name, time.monotonic())
        if death.told:
            deadline = time.monotonic() + 2.0
            while time.monotonic() < deadline and self._inbox.socket.poll(100):
                self._take_message()  # raises what it told
        if self._outcome is not None or name in self._said_bye:
            return  # its last words may still be on their way
        self._living.discard(name)
        if name not in self._said_hello:
            if death.replaced:
                return
            raise RunError(f"{name} {how} before it was ready{self._output(name)}")
        if name in self._plan.vital:
            held = "the joint model" if name == self._plan.joint else "a part of the joint model"
            raise NodesLost(f"{name}, which holds {held}, {how}{self._output(name)}")
        if any(self._nodes[other].computes for other in self._living):
            self._observer.note(f"{name} {how}; the others go on")
        else:
            self._bereft = f"no worker is left: {name} was the last and {how}{self._output(name)}"
            if self._plan.joint not in self._living:
                raise NodesLost(self._bereft)
            self._bereft_until = time.monotonic() + GRACE_SECONDS
        self._outbox.forget(name)
        self._tell_all(control.Lost(name))
        if self._bereft:
            self._outbox.send(self._plan.joint, control.Stop("no worker is left"))

    def _output(self, name: str) -> str:
        """The end of what a process printed, for an error message."""
        text = self._crews[name].output(name).strip()
        return f"; {text[-1000:]}" if text else ""


def _error(node: str, kind: str, text: str, told: str) -> TetherError:
    """The error of a node, as the caller sees it."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, TetherError):
        return known(text if text.startswith(node) else f"{node}: {text}")
    error = errors.internal(f"{kind}: {text}", node)
    error.add_note(f"in {node}:\n{told}")
    return error
