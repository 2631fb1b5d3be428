"""A node as a task of a long Spark job.

Each agent has a job of its own: Spark runs it on one executor, and on another when that has died. An agent has a
connection to the driver for as long as it lives, its lifeline: there each proves to the other that it belongs to the
run, the agent is told which node it is, and whichever of the two finds it closed knows that the other is gone, long
before Spark's heartbeats tell. An orphan, whose driver has given it up, ends there as well: whoever takes its place has
another name, so nothing of it is mistaken for the other's.

What an agent is given to build comes with Spark's task, as the code of any task does. Nothing else that crosses the
network is unpickled.
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

from tether.errors import RunError, WireError
from tether.machine import Node
from tether.runtimes import control
from tether.runtimes.driver import DRIVER, GRACE_SECONDS
from tether.runtimes.exchange import Desk, Offers
from tether.runtimes.feed import Intake
from tether.runtimes.handshake import Keys, introduce
from tether.runtimes.link import Outbox
from tether.runtimes.process import Birth, NodeProcess, live, message_types, outbox
from tether.store import Field

#: what the keys of lifelines are for
LIFELINE = "lifeline"
#: how long an agent waits for the driver's first words
GREETING_SECONDS = 30.0
#: how often the driver is told of rows that come in
TELL_SECONDS = 5.0


class Here(msgspec.Struct, frozen=True, array_like=True):
    """Agent to driver: which of the job's tasks it is, and where it keeps its sockets."""

    index: int
    directory: str
    #: where it can be fed
    host: str
    port: int
    #: the directories that its executor keeps blocks in, which no other executor has
    executor: str
    #: its task and the stage of that, as Spark numbers them
    stage: int
    task: int


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver to agent: the node that it is, and those that it has beside itself, such as an aggregator."""

    node: Node
    beside: tuple[Node, ...] = ()


class Fenced(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver to agent: there is no place for it."""

    reason: str


Answer = Welcome | Fenced


@dataclass(frozen=True)
class Feeding:
    """What rows an agent is brought, and how much of its memory they may take."""

    fields: tuple[Field, ...]
    memory_mb: float


def be_agent(index: int, birth: Birth, driver: tuple[str, int], feeding: Feeding | None) -> str:
    """Be the node that the driver says, until the run is over; the name it had, or "" if the driver had none for it."""
    keys = birth.keys
    assert keys is not None, "a run across machines has keys"
    with ExitStack() as at_the_end:
        directory = Path(tempfile.mkdtemp(prefix="tether-"))
        at_the_end.callback(shutil.rmtree, directory, ignore_errors=True)
        lifeline = at_the_end.enter_context(socket.create_connection(driver, GREETING_SECONDS))
        host = lifeline.getsockname()[0]
        birth = replace(birth, directory=directory, host=host, device=_gpu())
        meal = at_the_end.enter_context(_Meal(feeding, keys, host)) if feeding else None
        here = Here(index, str(directory), host, meal.intake.port if meal else 0, *_task())
        answer = greet(lifeline, keys, here)
        if isinstance(answer, Fenced):
            return ""
        node, watched = answer.node, at_the_end.enter_context(_Lifeline(lifeline, directory))
        if meal is not None:
            birth.plan.bring(meal.eat(birth, node))

        def follow(process: NodeProcess) -> None:
            watched.add(process)
            if process.name == node.name and isinstance(process.exchange, Offers):
                types = message_types(birth.plan.messages, compressed=birth.plan.compress != "none")
                at_the_end.callback(Desk(process, process.exchange, directory, types).close)

        for other in answer.beside:
            at_the_end.enter_context(_Beside(birth, other, follow))
        live(birth, node, zmq.Context(), follow)
        return node.name


class _Lifeline:
    """Ends this process when the driver has given its nodes up, or is gone, whatever they are doing then.

    They get no last word: for all others they are dead already. Spark starts another process for whoever comes next.
    """

    def __init__(self, connection: socket.socket, directory: Path) -> None:
        self._connection = connection
        self._directory = directory
        self._nodes: list[NodeProcess] = []
        self._ended = threading.Event()

    def add(self, node: NodeProcess) -> None:
        """A node that has been built."""
        self._nodes.append(node)

    def __enter__(self) -> _Lifeline:
        threading.Thread(target=self._follow, name="lifeline", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _follow(self) -> None:
        with suppress(OSError):
            self._connection.recv(1)
        in_good_order = self._nodes and all(node.is_over for node in self._nodes)
        if not (in_good_order or self._ended.is_set()):
            shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(1)


class _Beside:
    """A node in a thread of its agent, which has the same directory, so that the two share memory.

    It is built before anything else goes on, since building a model seeds what is random in this process.
    """

    def __init__(self, birth: Birth, node: Node, follow: Callable[[NodeProcess], None]) -> None:
        self._process: NodeProcess | None = None
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(birth, node, follow), name=node.name, daemon=True)

    def _live(self, birth: Birth, node: Node, follow: Callable[[NodeProcess], None]) -> None:
        def built(process: NodeProcess) -> None:
            self._process = process
            follow(process)
            self._built.set()

        try:
            live(birth, node, zmq.Context(), built)
        finally:
            self._built.set()  # an error is told to the driver by `live`

    def __enter__(self) -> _Beside:
        self._thread.start()
        self._built.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(GRACE_SECONDS)
        if self._process is not None and self._thread.is_alive():
            self._process.fail(RunError("the agent has ended"))
            self._thread.join()


def _task() -> tuple[str, int, int]:
    """The block directories of this executor, and the numbers of stage and task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return os.environ["SPARK_LOCAL_DIRS"], context.stageId(), context.taskAttemptId()


def _gpu() -> int | None:
    """The GPU that Spark has given to this task, if it does."""
    from pyspark import TaskContext

    context = TaskContext.get()
    given = context.resources().get("gpu") if context is not None else None
    return int(given.addresses[0]) if given is not None else None


def greet(lifeline: socket.socket, keys: Keys, here: Here) -> Answer:
    """Tell the driver who is there; what it answers."""
    told = introduce(lifeline, keys, LIFELINE, msgspec.msgpack.encode(here))
    answer: Answer = decoded(told, Answer)
    lifeline.settimeout(None)
    return answer


def decoded(text: bytes, kind: Any) -> Any:
    """What one end of a lifeline has said; `WireError` if it says something else."""
    try:
        return msgspec.msgpack.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"malformed greeting: {error}") from error


class _Meal:
    """The rows that an agent is brought; the driver is told how they come."""

    def __init__(self, feeding: Feeding, keys: Keys, host: str) -> None:
        memory_mb = feeding.memory_mb
        self.intake = Intake(feeding.fields, keys, host=host, memory_mb=memory_mb, progress=self._progress)
        self._context: zmq.Context[Any] = zmq.Context()
        self._outbox: Outbox | None = None
        self._told_at = time.monotonic()

    def eat(self, birth: Birth, node: Node) -> Any:
        """All of them, once they are there."""
        self._outbox = outbox(birth, node, self._context)
        return self.intake.wait()

    def _progress(self, rows: int, size: int) -> None:
        if self._outbox is not None and time.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at = time.monotonic()
            self._outbox.send(DRIVER, control.Note(f"{rows:,} rows, {size / 1e6:,.0f} MB have come"))

    def __enter__(self) -> _Meal:
        return self

    def __exit__(self, *_: object) -> None:
        self.intake.close()
        self._context.destroy(linger=0)
