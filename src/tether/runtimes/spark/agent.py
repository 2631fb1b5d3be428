"""A node as a task of a long Spark job.

Each agent has a job of its own: Spark runs it on one executor, and on another if that one dies. Lifelines report a
death long before Spark's heartbeats do.

An agent's node spec comes with Spark's task, as the code of any task does. Nothing else that crosses the network is
unpickled.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tether.core.machine import Node
from tether.runtimes.process import control
from tether.runtimes.process.agent import GREETING_SECONDS, Lifeline, Refusal, greet, host_nodes
from tether.runtimes.process.control import DRIVER
from tether.runtimes.process.handshake import Keys
from tether.runtimes.process.link import Outbox, message_types
from tether.runtimes.process.node import NodeProcess, make_outbox
from tether.runtimes.process.spec import NodeSpec
from tether.runtimes.spark.collectives import AgentServer, SparkCollectives
from tether.runtimes.spark.feed import RowReceiver
from tether.runtimes.spark.store import Field

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
        node, watched = answer.node, at_the_end.enter_context(Lifeline(lifeline, directory))
        if receiver is not None:
            spec.plan.bring(receiver.wait(spec, node))

        def built(process: NodeProcess) -> None:
            if process.name == node.name and isinstance(process.collectives, SparkCollectives):
                types = message_types(spec.plan, spec.collective_types)
                at_the_end.callback(AgentServer(process, process.collectives, directory, types).close)

        host_nodes(spec, answer, watched, built)
        return node.name


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
