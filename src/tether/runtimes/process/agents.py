"""The driver's side of agents: a launcher that waits for agents, assigns each a node, and notices when one is gone.

Who starts the agents, who replaces them and which agent may have which place is up to a subclass.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from tether.core.machine import Node
from tether.errors import UsageError, WireError
from tether.runtimes.base import Plan
from tether.runtimes.process.agent import LIFELINE, Answer, Assignment, Refusal, close_after_silence, decode
from tether.runtimes.process.handshake import AuthenticatedConnection, Keys, Listener
from tether.runtimes.process.launcher import Launcher, NodeExited, NodeStarted
from tether.runtimes.process.local_launcher import LocalLauncher
from tether.runtimes.process.spec import NodeSpec

G = TypeVar("G", bound=msgspec.Struct)


@dataclass
class Agent(Generic[G]):
    """What the driver knows of one agent."""

    node: Node
    greeting: G
    lifeline: socket.socket
    #: other nodes in its process
    colocated: tuple[Node, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of all nodes that die with it, its own last."""
        return [*(node.name for node in self.colocated), self.node.name]


def split_nodes(nodes: Iterable[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes that run in agents, and those that run beside the driver.

    Workers run in agents, and so does a node that shares a host with a worker, such as an aggregator.
    """
    nodes = list(nodes)
    hosts = {node.host for node in nodes if node.computes and node.host}
    remote = [node for node in nodes if node.computes or node.host in hosts]
    return remote, [node for node in nodes if node not in remote]


def launchers(agents: AgentLauncher[Any], spec: NodeSpec) -> list[tuple[Launcher, list[Node]]]:
    """What starts the nodes of a plan: agents, and this machine for those that run beside the driver."""
    remote, local = split_nodes(spec.plan.nodes)
    beside: list[tuple[Launcher, list[Node]]] = [(LocalLauncher(spec), local)] if local else []
    return [(agents, remote), *beside]


def check_apart(plan: Plan, where: str) -> None:
    """Refuse a plan that needs all nodes on one machine; `where` follows "on"."""
    if plan.shares:
        raise UsageError(f"workers on {where} do not share memory: use apply='server'")
    if plan.record:
        raise UsageError(f"a run on {where} cannot be recorded: its nodes do not share the run's directory")
    if plan.scripted:
        raise UsageError(f"a script of your own does not run on {where}: run it on this machine")


class AgentLauncher(Generic[G]):
    """A launcher whose processes are agents, which connect to it.

    A node that does not compute, such as an aggregator, runs in the agent of the first worker of its host and dies with
    it. The replacement of that agent does not have the node: protocols continue without it.

    A subclass says what a greeting is (`greeting_type`), has agents started (`_start_agents`), chooses the place of an
    agent that greets (`_answer`), and ends them (`_end_agents`).
    """

    #: what agents say first
    greeting_type: type[G]
    #: what happened to an agent whose lifeline has closed
    gone = "has died, or its connection has"

    def __init__(self, keys: Keys, host: str, port: int = 0) -> None:
        self.keys = keys
        self._listener = Listener(keys, LIFELINE, host, port)
        #: where agents reach the driver
        self.address = host, self._listener.port
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        #: other threads wake up the driver through this pair
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        #: by index: the node that the next agent in this place becomes, or that its present agent is
        self._places: dict[int, Node] = {}
        #: other nodes in the process of each place's first agent
        self._colocated: dict[int, tuple[Node, ...]] = {}
        self.living: dict[str, Agent[G]] = {}
        self._events: list[NodeStarted | NodeExited] = []

    # ---- what differs between engines ----

    def _start_agents(self) -> None:
        """Have an agent started for each place."""

    def _answer(self, greeting: G) -> Answer:
        """The node for an agent, or why there is none."""
        raise NotImplementedError

    def _admitted(self, agent: Agent[G]) -> None:
        """An agent has been told its node."""

    def _check(self) -> None:
        """Raise an error if no more agents can be expected. Called with every poll."""

    def _end_agents(self, seconds: float) -> None:
        """End what has started the agents; all lifelines are closed."""

    # ---- the launcher ----

    def start(self, nodes: Iterable[Node]) -> None:
        self.place(list(nodes))
        self._start_agents()

    def place(self, nodes: list[Node]) -> None:
        """Assign the nodes to agents."""
        self._places |= {node.index: node for node in nodes if node.computes}
        firsts = {node.host: index for index, node in sorted(self._places.items(), reverse=True)}
        for node in nodes:
            if not node.computes:
                index = firsts[node.host]
                self._colocated[index] = (*self._colocated.get(index, ()), node)

    def fileno(self) -> int:
        return self._selector.fileno()

    def wake(self) -> None:
        """Make the driver poll for events; from any thread."""
        with suppress(OSError):
            self._wake.send(b".")

    def poll_events(self) -> list[NodeStarted | NodeExited]:
        for key, _ in self._selector.select(0):
            if key.fileobj is self._woken:
                self._woken.recv(4096)
            elif key.data is not None:
                self._read(key.data)
        for accepted in self._listener.accept():
            self._admit(accepted)
        self._check()
        events, self._events = self._events, []
        return events

    def kill(self, name: str) -> None:
        for agent in [agent for agent in self.living.values() if name in agent.names]:
            self._remove(agent, "is given up")

    def output(self, name: str) -> str:
        return ""

    def close(self, seconds: float) -> None:
        for agent in self.living.values():
            agent.lifeline.close()
        self._end_agents(seconds)
        self._selector.close()
        for end in (self._listener, self._woken, self._wake):
            end.close()

    # ---- lifelines ----

    def _read(self, agent: Agent[G]) -> None:
        """A lifeline is readable: it has closed, since agents send nothing on it."""
        self._remove(agent, self.gone)

    def _admit(self, accepted: AuthenticatedConnection) -> None:
        """Assign a new agent its node, or refuse it."""
        lifeline = accepted.connection
        try:
            greeting: G = decode(accepted.text, self.greeting_type)
            answer = self._answer(greeting)
            accepted.answer(msgspec.msgpack.encode(answer))
        except (OSError, WireError):  # it has already gone, or is of another version of Tether
            lifeline.close()
            return
        if isinstance(answer, Refusal):
            lifeline.close()
            return
        close_after_silence(lifeline)
        node = answer.node
        self._colocated.pop(node.index, None)
        self.living[node.name] = agent = self._make_agent(answer, greeting, lifeline)
        self._selector.register(lifeline, selectors.EVENT_READ, agent)
        if self._is_new(node):
            self._events.append(NodeStarted(node))
        self._admitted(agent)

    def _make_agent(self, answer: Assignment, greeting: G, lifeline: socket.socket) -> Any:
        return Agent(answer.node, greeting, lifeline, answer.colocated)

    def _is_new(self, node: Node) -> bool:
        """Whether the driver did not have this node started itself."""
        return node.life > 1

    def _remove(self, agent: Agent[G], how: str) -> None:
        """Close the lifeline; the next agent in this place has another name."""
        self._selector.unregister(agent.lifeline)
        agent.lifeline.close()
        del self.living[agent.node.name]
        self._places[agent.node.index] = agent.node.successor()
        self._events += [NodeExited(name, how, replaced=True) for name in agent.names]
