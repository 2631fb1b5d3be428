"""A node as a task of a long Spark job.

Each agent has a job of its own: Spark runs it on one executor, and on another if that one dies. An agent keeps one
connection to the driver open all its life, its lifeline. On it, each side proves to the other that it belongs to the
run, and the driver assigns the agent a node. When either side finds the lifeline closed, it knows that the other is
gone, long before Spark's heartbeats say so. An agent that the driver has given up, but that still runs, ends in the
same way. Its replacement has another name, so its messages are not mistaken for the replacement's.

An agent's node spec comes with Spark's task, as the code of any task does. Nothing else that crosses the network is
unpickled.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tether.core.machine import Node
from tether.errors import RunError, WireError
from tether.runtimes.process import control
from tether.runtimes.process.control import DRIVER, GRACE_SECONDS
from tether.runtimes.process.handshake import Keys, authenticate
from tether.runtimes.process.link import Outbox, message_types
from tether.runtimes.process.node import NodeProcess, make_outbox, run_node
from tether.runtimes.process.spec import NodeSpec
from tether.runtimes.spark.collectives import AgentServer, SparkCollectives
from tether.runtimes.spark.feed import RowReceiver
from tether.runtimes.spark.store import Field

#: what the keys of lifelines are for
LIFELINE = "lifeline"
#: how long an agent waits for the driver's answer to its greeting
GREETING_SECONDS = 30.0
#: how often an agent reports to the driver how many rows it has received
REPORT_SECONDS = 5.0


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """Agent to driver: which place it is for, and where it can be reached."""

    index: int
    #: where its sockets are
    directory: str
    #: where it receives rows
    host: str
    port: int
    #: the block directories of its executor, which no other executor has
    executor: str
    #: the ids of its stage and task in Spark
    stage: int
    task: int


class Assignment(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver to agent: the node that it runs, and other nodes that run in the same process, such as an aggregator."""

    node: Node
    colocated: tuple[Node, ...] = ()


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver to agent: there is no node for it."""

    reason: str


Answer = Assignment | Refusal


@dataclass(frozen=True)
class PartitionSpec:
    """The fields of the rows that agents receive, and how many MB of memory an agent's rows may take."""

    fields: tuple[Field, ...]
    memory_mb: float


def run_agent(index: int, spec: NodeSpec, driver: tuple[str, int], partition: PartitionSpec | None) -> str:
    """Run the node that the driver assigns until the run is over; its name, or "" if the driver refuses the agent."""
    keys = spec.keys
    assert keys is not None, "a run across machines has keys"
    with ExitStack() as at_the_end:
        directory = Path(tempfile.mkdtemp(prefix="tether-"))
        at_the_end.callback(shutil.rmtree, directory, ignore_errors=True)
        lifeline = at_the_end.enter_context(socket.create_connection(driver, GREETING_SECONDS))
        host = lifeline.getsockname()[0]
        spec = replace(spec, directory=directory, host=host, device=_gpu())
        receiver = at_the_end.enter_context(_PartitionReceiver(partition, keys, host)) if partition else None
        answer = greet(
            lifeline, keys, Greeting(index, str(directory), host, receiver.port if receiver else 0, *_task())
        )
        if isinstance(answer, Refusal):
            return ""
        node, watched = answer.node, at_the_end.enter_context(_Lifeline(lifeline, directory))
        if receiver is not None:
            spec.plan.bring(receiver.wait(spec, node))

        def built(process: NodeProcess) -> None:
            watched.add(process)
            if process.name == node.name and isinstance(process.collectives, SparkCollectives):
                types = message_types(spec.plan, spec.collective_types)
                at_the_end.callback(AgentServer(process, process.collectives, directory, types).close)

        for other in answer.colocated:
            at_the_end.enter_context(_NodeThread(spec, other, built))
        run_node(spec, node, zmq.Context(), built)
        return node.name


class _Lifeline:
    """Ends this process when the driver has given up its nodes or is gone, whatever they are doing.

    The nodes send nothing any more: the others already consider them dead. Spark starts a new process for the
    replacement.
    """

    def __init__(self, connection: socket.socket, directory: Path) -> None:
        self._connection = connection
        self._directory = directory
        self._nodes: list[NodeProcess] = []
        self._ended = threading.Event()

    def add(self, node: NodeProcess) -> None:
        """Count in a node that has been built: the process may only outlive its lifeline when all nodes are over."""
        self._nodes.append(node)

    def __enter__(self) -> _Lifeline:
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
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


def _task() -> tuple[str, int, int]:
    """The block directories of this executor, and the ids of stage and task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return os.environ["SPARK_LOCAL_DIRS"], context.stageId(), context.taskAttemptId()


def _gpu() -> int | None:
    """The GPU that Spark assigns to this task, if any."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assigned = context.resources().get("gpu") if context is not None else None
    return int(assigned.addresses[0]) if assigned is not None else None


def greet(lifeline: socket.socket, keys: Keys, greeting: Greeting) -> Answer:
    """Send the driver a greeting; its answer."""
    text = authenticate(lifeline, keys, LIFELINE, msgspec.msgpack.encode(greeting))
    answer: Answer = decode(text, Answer)
    lifeline.settimeout(None)
    return answer


def decode(text: bytes, kind: Any) -> Any:
    """What the other end of a lifeline has sent; `WireError` if it is not of this kind."""
    try:
        return msgspec.msgpack.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"malformed greeting: {error}") from error


class _PartitionReceiver:
    """Receives an agent's rows, and reports their number to the driver meanwhile."""

    def __init__(self, partition: PartitionSpec, keys: Keys, host: str) -> None:
        memory_mb = partition.memory_mb
        self._rows = RowReceiver(partition.fields, keys, host=host, memory_mb=memory_mb, progress=self._report)
        #: where tasks bring the rows
        self.port = self._rows.port
        self._context: zmq.Context[Any] = zmq.Context()
        self._outbox: Outbox | None = None
        self._reported_at = time.monotonic()

    def wait(self, spec: NodeSpec, node: Node) -> Any:
        """All rows, once they have arrived."""
        self._outbox = make_outbox(spec, node, self._context)
        return self._rows.wait()

    def _report(self, rows: int, size: int) -> None:
        if self._outbox is not None and time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._reported_at = time.monotonic()
            self._outbox.send(DRIVER, control.Note(f"{rows:,} rows, {size / 1e6:,.0f} MB have arrived"))

    def __enter__(self) -> _PartitionReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        self._context.destroy(linger=0)
