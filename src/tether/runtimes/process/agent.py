"""The agent's side of a run across machines: an agent hosts a node, wherever it runs and however it was started.

An agent keeps one connection to the driver open all its life, its lifeline. On it, each side proves to the other that
it belongs to the run, and the driver assigns the agent a node. When either side finds the lifeline closed, it knows
that the other is gone. A machine that is cut off closes nothing: the system then ends the connection after a few
seconds without an answer. An agent that the driver has given up, but that still runs, ends in the same way. Its
replacement has another name, so its messages are not mistaken for the replacement's.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tether.core.machine import Node
from tether.errors import RunError, WireError
from tether.runtimes.process.control import GRACE_SECONDS
from tether.runtimes.process.handshake import Keys, authenticate
from tether.runtimes.process.node import NodeProcess, run_node
from tether.runtimes.process.spec import NodeSpec

#: what the keys of lifelines are for
LIFELINE = "lifeline"
#: how long an agent waits for the driver's answer to its greeting
GREETING_SECONDS = 30.0
#: a lifeline whose other end's machine has not answered for this long is closed
SILENCE_SECONDS = 6


class Assignment(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver to agent: the node that it runs, and other nodes that run in the same process, such as an aggregator."""

    node: Node
    colocated: tuple[Node, ...] = ()


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver to agent: there is no node for it."""

    reason: str


Answer = Assignment | Refusal


def greet(lifeline: socket.socket, keys: Keys, greeting: msgspec.Struct) -> Answer:
    """Send the driver a greeting; its answer."""
    text = authenticate(lifeline, keys, LIFELINE, msgspec.msgpack.encode(greeting))
    answer: Answer = decode(text, Answer)
    lifeline.settimeout(None)
    close_after_silence(lifeline)
    return answer


def decode(text: bytes, kind: Any) -> Any:
    """What the other end of a lifeline has sent; `WireError` if it is not of this kind."""
    try:
        return msgspec.msgpack.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"malformed greeting: {error}") from error


def close_after_silence(connection: socket.socket, seconds: int = SILENCE_SECONDS) -> None:
    """Have the system close a connection whose other end's machine no longer answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", seconds - 1),
        ("TCP_USER_TIMEOUT", seconds * 1000),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def host_nodes(
    spec: NodeSpec,
    assigned: Assignment,
    lifeline: Lifeline,
    built: Callable[[NodeProcess], None] = lambda process: None,
) -> bool:
    """Run the nodes of an agent until the run is over. False if an error ended its own, which it has reported.

    `built` is given each node before it begins.
    """

    def keep(process: NodeProcess) -> None:
        lifeline.add(process)
        built(process)

    with ExitStack() as at_the_end:
        for other in assigned.colocated:
            at_the_end.enter_context(_NodeThread(spec, other, keep))
        return run_node(spec, assigned.node, zmq.Context(), keep)


class Lifeline:
    """Ends this process when the driver has given up its nodes or is gone, whatever they are doing.

    The nodes send nothing any more: the others already consider them dead. The replacement is another process.
    """

    def __init__(self, connection: socket.socket, directory: Path) -> None:
        self._connection = connection
        self._directory = directory
        self._nodes: list[NodeProcess] = []
        self._ended = threading.Event()

    def add(self, node: NodeProcess) -> None:
        """Count in a node that has been built: the process may only outlive its lifeline when all nodes are over."""
        self._nodes.append(node)

    def __enter__(self) -> Lifeline:
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the process end by itself: its connection may close from now on."""
        self._ended.set()

    def _watch(self) -> None:
        with suppress(OSError):
            self._connection.recv(1)
        all_over = self._nodes and all(node.is_over for node in self._nodes)
        if not (all_over or self._ended.is_set()):
            shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(1)


class _NodeThread:
    """A second node in an agent's process, such as an aggregator. It uses the agent's directory and shared memory.

    Entering waits until the node is built, since building a model seeds the random generators of the process.
    """

    def __init__(self, spec: NodeSpec, node: Node, built: Callable[[NodeProcess], None]) -> None:
        self._process: NodeProcess | None = None
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(spec, node, built), name=node.name, daemon=True)

    def _run(self, spec: NodeSpec, node: Node, built: Callable[[NodeProcess], None]) -> None:
        def keep(process: NodeProcess) -> None:
            self._process = process
            built(process)
            self._built.set()

        try:
            run_node(spec, node, zmq.Context(), keep)
        finally:
            self._built.set()  # `run_node` reports an error to the driver

    def __enter__(self) -> _NodeThread:
        self._thread.start()
        self._built.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(GRACE_SECONDS)
        if self._process is not None and self._thread.is_alive():
            self._process.fail(RunError("the agent has ended"))
            self._thread.join()
