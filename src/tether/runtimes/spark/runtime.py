"""Workers on a Spark cluster: one agent on each executor, the hub on the driver's machine.

Agents are tasks of long jobs, so Spark places, supervises and replaces them. `averaging` and `mpca` exchange by
Spark's own broadcast and treeAggregate, in other jobs at the same time. The other protocols use Tether's links.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import socket
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from tether.core.compress import Packed
from tether.core.message import Message, Tag
from tether.core.wire import Codec
from tether.errors import RunError
from tether.runtimes.base import Observer, Outcome, Plan, check_source
from tether.runtimes.collectives import joined
from tether.runtimes.process.agent import Answer, Assignment, Refusal
from tether.runtimes.process.agents import Agent, AgentLauncher, check_apart, launchers
from tether.runtimes.process.driver import Driver, check_processes
from tether.runtimes.process.launcher import NodeExited
from tether.runtimes.process.link import message_types
from tether.runtimes.process.spec import NodeSpec
from tether.runtimes.spark import collectives as exchange
from tether.runtimes.spark import jvm
from tether.runtimes.spark.agent import Greeting, PartitionSpec, run_agent
from tether.runtimes.spark.collectives import Announcement, Contribution, Offered, Opened, SparkCollectives, Total
from tether.runtimes.spark.collectives import message_types as spark_message_types
from tether.runtimes.spark.feed import NO_COUNT

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

#: how long an exchange may take before its job is cancelled
EXCHANGE_SECONDS = 120.0
#: how many exchanges run at a time: more than a protocol has under way, since some may wait for a hung agent
EXCHANGES_MAX = 16
#: how many times agents are tried that were not reached
TRIES = 3
#: how often a place without an agent looks for a free executor
EXECUTOR_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Spark:
    """Where to run: the executors of a Spark session, one worker on each, and the hub on the driver's machine."""

    session: SparkSession = field(repr=False)
    workers: int = 2
    #: intra-operation threads of torch in each agent
    threads: int = 1
    #: how many times a run that has lost its hub or all its workers resumes by itself from its last checkpoint
    restarts: int = 3
    #: an agent that has not responded for this long is given up
    hung_seconds: float = 60.0
    #: how much of an agent's memory the rows of a DataFrame may take; if there are more, they go to its local disk
    memory_mb: float = 1024

    name = "spark"
    virtual = False
    processors = None

    def __post_init__(self) -> None:
        check_processes(self.workers, self.threads, self.restarts, self.hung_seconds)

    @staticmethod
    def at(master: str | None, workers: int = 2, **settings: Any) -> Spark:
        """On the existing session, or on a new one.

        Without a master, the one given to `spark-submit` counts. Without that, one executor for each worker is started
        on this machine.
        """
        if master is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
            master = f"local-cluster[{workers},{jvm.CORES},1024]"
        return Spark(jvm.session(master), workers, **settings)

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        check_apart(plan, "Spark")
        check_source(plan, self.name)
        advice = jvm.check_session(self.session, self.workers)
        part_bytes = 0
        if plan.collective:
            if advice:
                observer.note(advice)
            part_bytes = jvm.check_room(self.session, plan.vector_bytes, self.workers)
        host = socket.gethostbyname(self.session.sparkContext.getConf().get("spark.driver.host", "localhost"))
        driver = SparkDriver(self, plan, observer, host, part_bytes)
        try:
            return driver.execute()
        finally:
            driver.close()

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "master": self.session.sparkContext.master,
            "threads": self.threads,
            "restarts": self.restarts,
            "hung_seconds": self.hung_seconds,
            "memory_mb": self.memory_mb,
        }


class SparkDriver(Driver):
    """One run: its hub is a child of this process, its workers are agents; exchanges may be jobs."""

    def __init__(self, settings: Spark, plan: Plan, observer: Observer, host: str, part_bytes: int) -> None:
        """`part_bytes` is how much of an offer is reduced in one job."""
        self._by_jobs = plan.collective
        types = message_types(plan, spark_message_types) if self._by_jobs else []
        super().__init__(plan, observer, settings.hung_seconds, host=host, types=(Opened, Offered, *types))
        self._spec = NodeSpec(plan, self.directory, settings.threads, keys=self.keys, host=host)
        if self._by_jobs:
            by_jobs = partial(SparkCollectives, part_bytes=part_bytes)
            self._spec = replace(self._spec, collectives=by_jobs, collective_types=spark_message_types)
        source = plan.source
        partition = PartitionSpec(source.fields, settings.memory_mb) if source is not None else None
        self._agents = Agents(settings.session, self._spec, self.address, partition, self._stream_rows)
        self._jobs = Jobs(settings.session, self._agents, observer.note)
        self._streams_under_way = 0
        self._codec = Codec([Message])
        #: reductions: the members, and those that have offered so far, each with its number of parts
        self._opened: dict[Tag, tuple[str, ...]] = {}
        self._offered: defaultdict[Tag, dict[str, int]] = defaultdict(dict)

    def execute(self) -> Outcome:
        return self.run(launchers(self._agents, self._spec))

    def close(self) -> None:
        self._jobs.close()
        super().close()

    def _stream_rows(self, only: list[int] | None, tries: int = TRIES) -> None:
        """Submit a job that streams the agents of these places, or of all, their rows."""
        addresses = self._agents.row_addresses()
        places = list(range(len(addresses))) if only is None else only

        def streamed(rows: list[int]) -> None:
            self._streams_under_way -= 1
            # an agent that was not reached has died, and its replacement has a job of its own, or must be tried again
            now = self._agents.row_addresses()
            missed = [place for place, count in zip(places, rows, strict=True) if count == NO_COUNT]
            if again := [place for place in missed if now[place] == addresses[place]]:
                if not tries:
                    raise RunError(f"worker-{again[0]} could not be sent its rows: {now[again[0]]} cannot be reached")
                self._stream_rows(again, tries - 1)

        self._streams_under_way += 1
        self._jobs.submit(partial(self._plan.source.stream_to, addresses, self._agents.keys, only), streamed)

    def _poll(self, seconds: float) -> None:
        super()._poll(seconds)
        if self._streams_under_way:  # the shuffle may take long before the first row arrives
            self._extend_start()
        self._jobs.drain()

    def _handle_other(self, sender: str, message: Message) -> None:
        match message:
            case Opened(tag=tag, members=members):
                self._opened[tag] = members
                self._reduce_if_offered(tag)
            case Offered(tag=tag, parts=parts):
                self._offered[tag][sender] = parts
                self._reduce_if_offered(tag)
            case Announcement(members=members) | Packed(message=Announcement(members=members)):
                self._deliver(members, message)

    def _handle_exit(self, exited: NodeExited) -> None:
        super()._handle_exit(exited)
        for tag in list(self._opened):
            self._reduce_if_offered(tag)

    def _deliver(self, members: tuple[str, ...], message: Message) -> None:
        frames = [pickle.PickleBuffer(frame) for frame in self._codec.encode(message)]  # written without a copy
        living = partial(self._living_of, set(members[1:]))
        self._jobs.submit(partial(self._jobs.broadcast, frames, living), self._kill_unreached)

    def _kill_unreached(self, names: set[str]) -> None:
        """Give up agents that a broadcast did not reach: without it, the others would wait for them forever."""
        for name in sorted(names & self._living):
            self._observer.note(f"a broadcast did not reach {name} in {TRIES} tries")
            self._agents.kill(name)

    def _living_of(self, names: set[str]) -> set[str]:
        """The living ones of these nodes; other threads may call this."""
        return names & frozenset(self._living)

    def _reduce_if_offered(self, tag: Tag) -> None:
        members = self._opened.get(tag, ())
        if not members or not set(members[1:]) & self._living <= self._offered[tag].keys():
            return
        del self._opened[tag]
        offered = self._offered.pop(tag)

        def answer(parts: list[Contribution | None]) -> None:
            sums = [(part.values, part.weight, part.steps) if part is not None else (None, 0.0, {}) for part in parts]
            reduced = joined(tag, members, sums)
            values = reduced.total if reduced.total is not None else torch.empty(0)
            steps = dict(zip(reduced.contributors, reduced.steps, strict=True))
            self._outbox.send(members[0], Total(tag, values, reduced.weight, steps))

        living = partial(self._living_of, set(offered))
        self._jobs.submit(partial(self._jobs.reduce, tag, max(offered.values(), default=0), living), answer)


@dataclass
class SparkAgent(Agent[Greeting]):
    """What the driver knows of one agent."""

    #: the id of its executor, "" until Spark has been asked
    executor: str = ""


class Agents(AgentLauncher[Greeting]):
    """A launcher of agents, one on each executor, or one for each GPU of it.

    Each place has a job with one task, which prefers an executor without an agent and takes one core of it. Spark may
    put the task on an executor that already has an agent, mostly because the preferred one has died. The driver then
    refuses the agent, the job ends, and the next job for this place waits for a free executor.
    """

    greeting_type = Greeting
    gone = "has died with its executor or its task"
    living: dict[str, SparkAgent]  # type: ignore[assignment]

    def __init__(
        self,
        session: SparkSession,
        spec: NodeSpec,
        driver: str,
        partition: PartitionSpec | None,
        stream_rows: Callable[[list[int] | None], None],
    ) -> None:
        """`driver` is the address of the driver's inbox. `stream_rows` sends these agents, or all, their rows."""
        assert spec.keys is not None, "a run across machines has keys"
        super().__init__(spec.keys, spec.host)
        self._context = session.sparkContext
        self._session = session
        self._spec = spec
        self._driver = driver
        self._partition = partition
        self._stream_rows = stream_rows
        #: whether rows have been sent to the first agents
        self._streamed = False
        self._group = f"tether agents {uuid.uuid4().hex[:8]}"
        self._failure = ""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        #: a broadcast variable with the arguments of all agents
        self._arguments: Any = None
        #: the executor that each place's job prefers
        self._preferred: dict[int, str] = {}
        self._preferred_lock = threading.Lock()

    # ---- the launcher ----

    def _start_agents(self) -> None:
        from pyspark import InheritableThread

        spec = replace(self._spec, driver=self._driver)
        self._arguments = self._context.broadcast(cloudpickle.dumps((spec, self.address, self._partition)))
        for index in self._places:
            self._threads.append(InheritableThread(target=self._run_jobs, args=(index,), daemon=True))
            self._threads[-1].start()

    def _run_jobs(self, index: int) -> None:
        """Run jobs with an agent for this place, one after another, until the run is over."""
        arguments = self._arguments

        def agent(places: Iterable[int]) -> Iterable[str]:
            for index in places:
                yield run_agent(index, *cloudpickle.loads(arguments.value))

        self._context.setJobGroup(self._group, "the agents of a run", interruptOnCancel=True)
        try:
            while location := self._wait_for_executor(index):
                if any(jvm.agent_partitions(self._session, [(index, location)]).mapPartitions(agent).collect()):
                    break  # the agent ran until the end of the run
        except Exception as error:
            if not self._closing.is_set():
                self._failure = str(error)
        self.wake()

    def _wait_for_executor(self, index: int) -> str:
        """The location of an executor without an agent, as soon as there is one; "" when the run is over."""
        agents_max = jvm.agents_per_executor(self._session)
        while not self._closing.is_set():
            with self._preferred_lock:
                executors = jvm.executors(self._session)
                used = {place: executor for place, executor in self._preferred.items() if place != index}
                used |= {place: executor for place, executor in self._executors().items() if executor}
                agents = Counter(used.values())
                if free := [executor for executor in executors if agents[executor] < agents_max]:
                    self._preferred[index] = min(free, key=lambda executor: agents[executor])
                    return executors[self._preferred[index]].location
                self._preferred.pop(index, None)
            self._closing.wait(EXECUTOR_POLL_SECONDS)
        return ""

    def _check(self) -> None:
        if self._failure:
            raise RunError(f"Spark has given up the agents: {self._failure}")

    def output(self, name: str) -> str:
        if any(name in agent.names for agent in self.living.values()):
            return ""
        return f"Spark has started {len(self.living)} of {len(self._places)} agents: does another run occupy executors?"

    def close(self, seconds: float) -> None:
        self._closing.set()
        super().close(seconds)

    def _end_agents(self, seconds: float) -> None:
        self._join(seconds)
        if any(thread.is_alive() for thread in self._threads):
            self._context.cancelJobGroup(self._group)
            self._join(2 * seconds)
        if self._arguments is not None:
            self._arguments.destroy()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- lifelines ----

    def _make_agent(self, answer: Assignment, greeting: Greeting, lifeline: socket.socket) -> SparkAgent:
        return SparkAgent(answer.node, greeting, lifeline, answer.colocated)

    def _admitted(self, agent: Agent[Greeting]) -> None:
        if self._partition is not None and (self._streamed or len(self.living) == len(self._places)):
            self._stream_rows([agent.node.index] if self._streamed else None)
            self._streamed = True

    def _answer(self, greeting: Greeting) -> Answer:
        """The node for an agent, or why there is none."""
        node = self._places.get(greeting.index)
        neighbours = sum(agent.greeting.executor == greeting.executor for agent in self.living.values())
        if neighbours >= jvm.agents_per_executor(self._session):
            return Refusal("its executor has an agent already")
        if node is None or self._closing.is_set() or node.name in self.living:
            return Refusal("its place is taken")
        return Assignment(node, self._colocated.get(greeting.index, ()))

    # ---- where agents are ----

    def row_addresses(self) -> list[tuple[str, int]]:
        """Where the agent of each place receives rows; ("", 0) for a place without an agent."""
        found = {agent.node.index: (agent.greeting.host, agent.greeting.port) for agent in self.living.values()}
        return [found.get(index, ("", 0)) for index in sorted(self._places)]

    def locations(self) -> dict[str, tuple[str, str]]:
        """For each living agent, the location of its executor for Spark's scheduler, and its directory."""
        living, executors = jvm.executors(self._session), self._executors()
        found = {}
        for name, agent in list(self.living.items()):
            executor = executors.get(agent.node.index, "")
            found[name] = (living[executor].location if executor in living else "", agent.greeting.directory)
        return found

    def _executors(self) -> dict[int, str]:
        """The executor of each living agent's place; "" if Spark does not list the agent's task yet."""
        store = self._context._jsc.sc().statusStore()
        found = {}
        for agent in list(self.living.values()):
            if not agent.executor:
                tasks = store.taskList(agent.greeting.stage, 0, 1 << 10)
                for task in (tasks.apply(position) for position in range(tasks.size())):
                    if task.taskId() == agent.greeting.task:
                        agent.executor = task.executorId()
            found[agent.node.index] = agent.executor
        return found


class Jobs:
    """Exchanges as Spark jobs, several at a time."""

    def __init__(self, session: SparkSession, agents: Agents, note: Callable[[str], None]) -> None:
        self._context = session.sparkContext
        self._session = session
        self._agents = agents
        self._note = note
        self._name = f"tether exchange {uuid.uuid4().hex[:8]}"
        self._numbers = itertools.count(1)
        #: the job groups of exchanges under way
        self._groups: set[str] = set()
        self._pool = ThreadPoolExecutor(max_workers=EXCHANGES_MAX, thread_name_prefix="exchange")
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        #: limits how many jobs bring sums to the driver at a time
        self._reductions = threading.BoundedSemaphore(jvm.REDUCTIONS)
        self._partitions: tuple[frozenset[str], RDD[tuple[str, str]]] | None = None
        self._closed = False

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do the work in another thread, then call `then` with its result in the driver's thread."""

        def done() -> None:
            try:
                with self._group():
                    self._results.put(partial(then, work()))
            except Exception as error:
                self._results.put(partial(_raise, error))
            self._agents.wake()

        self._pool.submit(done)

    def drain(self) -> None:
        """In the driver's thread: handle the results of finished work."""
        while not self._results.empty():
            self._results.get()()

    def close(self) -> None:
        self._closed = True
        for group in list(self._groups):
            self._context.cancelJobGroup(group)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def broadcast(self, frames: list[pickle.PickleBuffer], members: Callable[[], set[str]]) -> set[str]:
        """Deliver frames to all living members; those that could not be reached."""
        variable = self._context.broadcast(frames)
        reached: set[str] = set()
        for _ in range(TRIES):
            if missing := members() - reached:
                reached |= set(self._run(missing, exchange.deliver_task(variable), lambda rdd: rdd.collect()) or ())
        variable.destroy()
        return members() - reached

    def reduce(self, tag: Tag, parts: int, members: Callable[[], set[str]]) -> list[Contribution | None]:
        """The sums of the offers of all living members, part by part; None for a part that no member offers."""
        return [self._reduce_part(tag, part, members) for part in range(parts)]

    def _reduce_part(self, tag: Tag, part: int, members: Callable[[], set[str]]) -> Contribution | None:
        total: exchange.Sum | None = None
        with self._reductions:
            for _ in range(TRIES):
                if missing := members() - set(total.contribution.steps if total else ()):
                    fetch = exchange.fetch_task(tag, part, self._name)
                    more = self._run(missing, fetch, lambda rdd: rdd.treeAggregate(None, exchange.add, exchange.add))
                    total = exchange.add(total, more)
        return total.contribution if total is not None else None

    def _run(self, names: set[str], task: Any, action: Callable[[RDD[Any]], Any]) -> Any:
        """The result of a job with a task on each of these agents' executors; None if it failed or took too long."""
        if self._closed:
            return None
        try:
            with self._group(EXCHANGE_SECONDS):
                return action(self._partitions_of(frozenset(names)).mapPartitions(task))
        except Exception as error:
            if not self._closed:
                self._results.put(partial(self._note, f"an exchange has failed: {str(error).splitlines()[0]}"))
            return None

    @contextmanager
    def _group(self, seconds: float | None = None) -> Iterator[None]:
        """A group for the jobs that this thread runs meanwhile; they are cancelled after that time or with the run."""
        group = f"{self._name} {next(self._numbers)}"
        self._context.setJobGroup(group, "an exchange of a run", interruptOnCancel=True)
        self._groups.add(group)
        watchdog = threading.Timer(seconds or 0.0, self._context.cancelJobGroup, (group,))
        watchdog.daemon = True
        if seconds is not None:
            watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()
            self._groups.discard(group)

    def _partitions_of(self, names: frozenset[str]) -> RDD[Any]:
        """A partition for each of these agents, its name and directory, which Spark runs on the agent's executor."""
        with self._lock:
            if self._partitions is None or self._partitions[0] != names:
                located = [
                    ((name, directory), location)
                    for name, (location, directory) in sorted(self._agents.locations().items())
                    if name in names
                ]
                self._partitions = names, jvm.located_partitions(self._session, located)
            return self._partitions[1]


def _raise(error: Exception) -> None:
    raise error
