"""Workers on a Spark cluster: one agent on each executor, the hub beside the driver.

Agents are tasks of long jobs, so Spark places, supervises and replaces them. `averaging` and `mpca` exchange by
Spark's own broadcast and treeAggregate, in jobs beside that one. The other protocols use Tether's links.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import selectors
import socket
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
import torch

from tether.compress import Packed
from tether.errors import RunError, UsageError, WireError
from tether.machine import Message, Node
from tether.runtimes import exchange, jvm
from tether.runtimes.agent import LIFELINE, Feeding, Fenced, Here, Welcome, be_agent, decoded
from tether.runtimes.base import Observer, Outcome, Plan
from tether.runtimes.collectives import Collectives, Down, Up, joined
from tether.runtimes.driver import Came, Crew, Died, Driver, check_processes
from tether.runtimes.exchange import Offered, Offers, Opened
from tether.runtimes.feed import NONE
from tether.runtimes.handshake import Listener, Visitor
from tether.runtimes.local import Children
from tether.runtimes.process import Birth, message_types
from tether.wire import Codec

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

#: how long an exchange may take before its job is cancelled
EXCHANGE_SECONDS = 120.0
#: how many exchanges run at a time; more than a protocol has under way, since some may be waiting for a hung agent
EXCHANGES_MAX = 16
#: how often those who were not reached are tried again
TRIES = 3
#: how often an agent that finds no executor free looks for one
CLAIM_SECONDS = 0.25


@dataclass(frozen=True)
class Spark:
    """Where to run: the executors of a Spark session, one worker on each, and the hub beside the driver."""

    session: SparkSession = field(repr=False)
    workers: int = 2
    #: intra-operation threads of torch in each agent
    threads: int = 1
    #: how often a run that has lost its hub or all its workers goes on by itself, from its last backup
    restarts: int = 3
    #: an agent that has shown no sign of life for so long is given up
    hung_seconds: float = 60.0
    #: how much of an agent's memory the rows of a DataFrame may take; more of them go to the executor's local disk
    memory_mb: float = 1024

    name = "spark"
    virtual = False
    processors = None

    def __post_init__(self) -> None:
        check_processes(self.workers, self.threads, self.restarts, self.hung_seconds)

    @staticmethod
    def at(master: str | None, workers: int = 2, **settings: Any) -> Spark:
        """On the session that there is, or else on a new one.

        Without a master, what `spark-submit` was given counts; without that, as many executors as workers are started
        on this machine.
        """
        if master is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
            master = f"local-cluster[{workers},{jvm.CORES},1024]"
        return Spark(jvm.session(master), workers, **settings)

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        if plan.shares:
            raise UsageError("executors have no memory in common: use apply='server'")
        if plan.record:
            raise UsageError("a run on Spark cannot be recorded: its nodes do not share the run's directory")
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
        """`part_bytes` is as much as is reduced of an offer in one job."""
        self._by_jobs = plan.collective
        types = message_types(plan.messages, compressed=plan.compress != "none") if self._by_jobs else []
        super().__init__(plan, observer, settings.hung_seconds, host=host, types=(Opened, Offered, *types))
        self._birth = Birth(
            plan,
            self.directory,
            settings.threads,
            keys=self.keys,
            host=host,
            collectives=partial(Offers, part_bytes=part_bytes) if self._by_jobs else Collectives,
        )
        source = plan.source
        feeding = Feeding(source.fields, settings.memory_mb) if source is not None else None
        self._agents = Agents(settings.session, self._birth, self.address, feeding, self._feed)
        self._jobs = Jobs(settings.session, self._agents, observer.note)
        self._feeds_under_way = 0
        self._codec = Codec([Message])
        #: reductions: who takes part, and who has offered so far, each in how many parts
        self._opened: dict[str, tuple[str, ...]] = {}
        self._offered: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def execute(self) -> Outcome:
        nodes = self._plan.nodes
        hosts = {node.host for node in nodes if node.computes and node.host}
        on_executors = [node for node in nodes if node.computes or node.host in hosts]
        crews: list[tuple[Crew, list[Node]]] = [(self._agents, on_executors)]
        if here := [node for node in nodes if node not in on_executors]:
            crews.append((Children(self._birth), here))
        return self.run(crews)

    def close(self) -> None:
        self._jobs.close()
        super().close()

    def _feed(self, only: list[int] | None, tries: int = TRIES) -> None:
        """Have the agents, or some of them, brought their parts of the data, by a job beside all others."""
        intakes = self._agents.intakes()
        places = list(range(len(intakes))) if only is None else only

        def fed(rows: list[int]) -> None:
            self._feeds_under_way -= 1
            # who was not reached has died, and its successor is fed by itself, or must be tried again
            now = self._agents.intakes()
            missed = [place for place, count in zip(places, rows, strict=True) if count == NONE]
            if again := [place for place in missed if now[place] == intakes[place]]:
                if not tries:
                    raise RunError(f"worker-{again[0]} could not be brought its data: {now[again[0]]} is out of reach")
                self._feed(again, tries - 1)

        self._feeds_under_way += 1
        self._jobs.submit(partial(self._plan.source.feed, intakes, self._agents.keys, only), fed)

    def _turn(self, seconds: float) -> None:
        super()._turn(seconds)
        if self._feeds_under_way:  # rows may be shuffled for long before the first of them comes
            self._wait_for_data()
        self._jobs.settle()

    def _take_other(self, sender: str, message: Message) -> None:
        match message:
            case Opened(tag=tag, members=members):
                self._opened[tag] = members
                self._reduce_if_offered(tag)
            case Offered(tag=tag, parts=parts):
                self._offered[tag][sender] = parts
                self._reduce_if_offered(tag)
            case Down(members=members) | Packed(message=Down(members=members)):
                self._deliver(members, message)

    def _take_death(self, death: Died) -> None:
        super()._take_death(death)
        for tag in list(self._opened):
            self._reduce_if_offered(tag)

    def _deliver(self, members: tuple[str, ...], message: Message) -> None:
        frames = [pickle.PickleBuffer(frame) for frame in self._codec.encode(message)]  # written without a copy
        living = partial(self._living_of, set(members[1:]))
        self._jobs.submit(partial(self._jobs.broadcast, frames, living), self._end_unreached)

    def _end_unreached(self, names: set[str]) -> None:
        """Give up those that a broadcast could not be brought to: without it they would be waited for without end."""
        for name in sorted(names & self._living):
            self._observer.note(f"{name} could not be brought a broadcast in {TRIES} tries")
            self._agents.end(name)

    def _living_of(self, names: set[str]) -> set[str]:
        """Those of them who live, as other threads may ask too."""
        return names & frozenset(self._living)

    def _reduce_if_offered(self, tag: str) -> None:
        members = self._opened.get(tag, ())
        if not members or not set(members[1:]) & self._living <= self._offered[tag].keys():
            return
        del self._opened[tag]
        offered = self._offered.pop(tag)

        def answer(parts: list[Up | None]) -> None:
            sums = [(up.values, up.weight, up.covers) if up is not None else (None, 0.0, {}) for up in parts]
            found = joined(tag, members, sums)
            values = found.total if found.total is not None else torch.empty(0)
            covers = dict(zip(found.contributors, found.steps, strict=True))
            self._outbox.send(members[0], Up(tag, members, values, found.weight, covers))

        living = partial(self._living_of, set(offered))
        self._jobs.submit(partial(self._jobs.reduce, tag, max(offered.values(), default=0), living), answer)


@dataclass
class _Agent:
    """What the driver knows of one agent."""

    node: Node
    here: Here
    lifeline: socket.socket
    #: the nodes that it has beside its own
    beside: tuple[Node, ...] = ()
    #: where it runs, as soon as that has been asked
    executor: str = ""

    @property
    def names(self) -> list[str]:
        """Of all nodes that die with it, its own last."""
        return [*(node.name for node in self.beside), self.node.name]


class Agents:
    """A crew of agents, one on each executor, or one for each GPU of it.

    Each place has a job of one task that prefers an executor which has no agent, and takes one core of it. Where Spark
    has put it elsewhere, beside another agent, which mostly is because its executor has died, the driver sends it away;
    the job ends, and the next one for this place waits for an executor that is free.

    A node that does not compute, such as an aggregator, is had by the agent of the first worker of its host, and dies
    with it. Who comes for that agent has no such node: protocols go on without.
    """

    def __init__(
        self,
        session: SparkSession,
        birth: Birth,
        driver: str,
        feeding: Feeding | None,
        feed: Callable[[list[int] | None], None],
    ) -> None:
        """`driver` is the address of the driver's inbox. `feed` has data brought to all agents, or to some."""
        self._context = session.sparkContext
        self._session = session
        self._birth = birth
        self._driver = driver
        self._feeding = feeding
        self._feed = feed
        self._fed = False
        self._group = f"tether agents {uuid.uuid4().hex[:8]}"
        assert birth.keys is not None, "a run across machines has keys"
        self.keys = birth.keys
        self._listener = Listener(self.keys, LIFELINE, birth.host)
        #: where agents find the driver
        self.address = birth.host, self._listener.port
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        #: wakes the driver up for what happens in other threads
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._places: dict[int, Node] = {}
        #: who is beside the first agent of each place
        self._beside: dict[int, tuple[Node, ...]] = {}
        self.living: dict[str, _Agent] = {}
        self._news: list[Came | Died] = []
        self._failure = ""
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sent: Any = None
        #: the executor that each place's job prefers, and what guards it
        self._claims: dict[int, str] = {}
        self._claiming = threading.Lock()

    # ---- the crew ----

    def start(self, nodes: Iterable[Node]) -> None:
        from pyspark import InheritableThread

        self.place(list(nodes))
        birth = replace(self._birth, driver=self._driver)
        self._sent = self._context.broadcast(cloudpickle.dumps((birth, self.address, self._feeding)))
        for index in self._places:
            self._threads.append(InheritableThread(target=self._keep, args=(index,), daemon=True))
            self._threads[-1].start()

    def place(self, nodes: list[Node]) -> None:
        """Settle which agent has which of the nodes."""
        self._places = {node.index: node for node in nodes if node.computes}
        firsts = {node.host: index for index, node in sorted(self._places.items(), reverse=True)}
        for node in nodes:
            if not node.computes:
                index = firsts[node.host]
                self._beside[index] = (*self._beside.get(index, ()), node)

    def _keep(self, index: int) -> None:
        """Have an agent in this place until the run is over."""
        sent = self._sent

        def agent(places: Iterable[int]) -> Iterable[str]:
            for index in places:
                yield be_agent(index, *cloudpickle.loads(sent.value))

        self._context.setJobGroup(self._group, "the agents of a run", interruptOnCancel=True)
        try:
            while place := self._claim(index):
                if any(jvm.agent_places(self._session, [(index, place)]).mapPartitions(agent).collect()):
                    break  # it was there until the end
        except Exception as error:
            if not self._over.is_set():
                self._failure = str(error)
        self.wake()

    def _claim(self, index: int) -> str:
        """The name of an executor without an agent, as soon as there is one; "" when the run is over."""
        each = jvm.agents_each(self._session)
        while not self._over.is_set():
            with self._claiming:
                there = jvm.executors(self._session)
                claims = {place: executor for place, executor in self._claims.items() if place != index}
                claims |= {place: executor for place, executor in self._executors().items() if executor}
                taken = Counter(claims.values())
                if free := [executor for executor in there if taken[executor] < each]:
                    self._claims[index] = min(free, key=lambda executor: taken[executor])
                    return there[self._claims[index]].place
                self._claims.pop(index, None)
            self._over.wait(CLAIM_SECONDS)
        return ""

    def fileno(self) -> int:
        return self._selector.fileno()

    def wake(self) -> None:
        """Have the driver look for news; from any thread."""
        with suppress(OSError):
            self._wake.send(b".")

    def news(self) -> list[Came | Died]:
        for key, _ in self._selector.select(0):
            if key.fileobj is self._woken:
                self._woken.recv(4096)
            elif key.data is not None:
                self._part(key.data, "has died with its executor or its task")
        for visitor in self._listener.accept():
            self._take(visitor)
        if self._failure:
            raise RunError(f"Spark has given up the agents: {self._failure}")
        news, self._news = self._news, []
        return news

    def end(self, name: str) -> None:
        for agent in [agent for agent in self.living.values() if name in agent.names]:
            self._part(agent, "is given up")

    def output(self, name: str) -> str:
        if any(name in agent.names for agent in self.living.values()):
            return ""
        return (
            f"Spark has brought up {len(self.living)} of {len(self._places)} agents: is another run holding executors?"
        )

    def close(self, seconds: float) -> None:
        self._over.set()
        for agent in self.living.values():
            agent.lifeline.close()
        self._join(seconds)
        if any(thread.is_alive() for thread in self._threads):
            self._context.cancelJobGroup(self._group)
            self._join(2 * seconds)
        if self._sent is not None:
            self._sent.destroy()
        self._selector.close()
        for end in (self._listener, self._woken, self._wake):
            end.close()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- lifelines ----

    def _take(self, visitor: Visitor) -> None:
        """Give an agent its place, if there is one."""
        lifeline = visitor.connection
        try:
            here = decoded(visitor.text, Here)
            welcome = self._answer(here)
            visitor.answer(msgspec.msgpack.encode(welcome))
        except (OSError, WireError):  # it has gone already, or speaks another version of this
            lifeline.close()
            return
        if isinstance(welcome, Fenced):
            lifeline.close()
            return
        node = welcome.node
        self._beside.pop(here.index, None)
        self.living[node.name] = agent = _Agent(node, here, lifeline, welcome.beside)
        self._selector.register(lifeline, selectors.EVENT_READ, agent)
        if node.life > 1:
            self._news.append(Came(node))
        if self._feeding is not None and (self._fed or len(self.living) == len(self._places)):
            self._feed([here.index] if self._fed else None)
            self._fed = True

    def _answer(self, here: Here) -> Welcome | Fenced:
        """Whether there is a place for an agent."""
        node = self._places.get(here.index)
        neighbours = sum(agent.here.executor == here.executor for agent in self.living.values())
        if neighbours >= jvm.agents_each(self._session):
            return Fenced("its executor has an agent already")
        if node is None or self._over.is_set() or node.name in self.living:
            return Fenced("its place is taken")
        return Welcome(node, self._beside.get(here.index, ()))

    def _part(self, agent: _Agent, how: str) -> None:
        """Cut the lifeline; who comes for this place next has another name."""
        self._selector.unregister(agent.lifeline)
        agent.lifeline.close()
        del self.living[agent.node.name]
        self._places[agent.node.index] = agent.node.successor()
        self._news += [Died(name, how, replaced=True) for name in agent.names]

    # ---- where they are ----

    def intakes(self) -> list[tuple[str, int]]:
        """Where each place's agent takes in data; nowhere, if there is none."""
        found = {agent.node.index: (agent.here.host, agent.here.port) for agent in self.living.values()}
        return [found.get(index, ("", 0)) for index in sorted(self._places)]

    def locations(self) -> dict[str, tuple[str, str]]:
        """Of each living agent: its executor, as Spark's scheduler names it, and its directory."""
        there, executors = jvm.executors(self._session), self._executors()
        found = {}
        for name, agent in list(self.living.items()):
            executor = executors.get(agent.node.index, "")
            found[name] = (there[executor].place if executor in there else "", agent.here.directory)
        return found

    def _executors(self) -> dict[int, str]:
        """The executor of each living agent's place; "" for one whose task Spark does not tell of yet."""
        store = self._context._jsc.sc().statusStore()
        found = {}
        for agent in list(self.living.values()):
            if not agent.executor:
                tasks = store.taskList(agent.here.stage, 0, 1 << 10)
                for task in (tasks.apply(position) for position in range(tasks.size())):
                    if task.taskId() == agent.here.task:
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
        #: the job groups of what is under way
        self._groups: set[str] = set()
        self._pool = ThreadPoolExecutor(max_workers=EXCHANGES_MAX, thread_name_prefix="exchange")
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        #: held by what brings sums to the driver
        self._room = threading.BoundedSemaphore(jvm.REDUCTIONS)
        self._placed: tuple[frozenset[str], RDD[tuple[str, str]]] | None = None
        self._over = False

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do the work in another thread, and then something with its result in the driver's."""

        def done() -> None:
            try:
                with self._group():
                    self._results.put(partial(then, work()))
            except Exception as error:
                self._results.put(partial(_raise, error))
            self._agents.wake()

        self._pool.submit(done)

    def settle(self) -> None:
        """In the driver's thread: take in what has been done."""
        while not self._results.empty():
            self._results.get()()

    def close(self) -> None:
        self._over = True
        for group in list(self._groups):
            self._context.cancelJobGroup(group)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def broadcast(self, frames: list[pickle.PickleBuffer], members: Callable[[], set[str]]) -> set[str]:
        """Bring frames to all members that live; those that could not be reached."""
        variable = self._context.broadcast(frames)
        reached: set[str] = set()
        for _ in range(TRIES):
            if missing := members() - reached:
                reached |= set(self._run(missing, exchange.delivered(variable), lambda rdd: rdd.collect()) or ())
        variable.destroy()
        return members() - reached

    def reduce(self, tag: str, parts: int, members: Callable[[], set[str]]) -> list[Up | None]:
        """The sums of what all members offer that live, part by part; None of a part that nobody has brought."""
        return [self._reduce_part(tag, part, members) for part in range(parts)]

    def _reduce_part(self, tag: str, part: int, members: Callable[[], set[str]]) -> Up | None:
        total: exchange.Sum | None = None
        with self._room:
            for _ in range(TRIES):
                if missing := members() - set(total.up.covers if total else ()):
                    visit = exchange.fetched(tag, part, self._name)
                    more = self._run(missing, visit, lambda rdd: rdd.treeAggregate(None, exchange.add, exchange.add))
                    total = exchange.add(total, more)
        return total.up if total is not None else None

    def _run(self, names: set[str], visit: Any, action: Callable[[RDD[Any]], Any]) -> Any:
        """A job whose tasks visit these agents, each on its own executor; None if it failed or took too long."""
        if self._over:
            return None
        try:
            with self._group(EXCHANGE_SECONDS):
                return action(self._visitors(frozenset(names)).mapPartitions(visit))
        except Exception as error:
            if not self._over:
                self._results.put(partial(self._note, f"an exchange has failed: {str(error).splitlines()[0]}"))
            return None

    @contextmanager
    def _group(self, seconds: float | None = None) -> Iterator[None]:
        """A job group for what this thread does meanwhile, which is cancelled after that time or with the run."""
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

    def _visitors(self, names: frozenset[str]) -> RDD[Any]:
        """A partition for each of these agents, with its name and directory, that Spark runs where the agent is."""
        with self._lock:
            if self._placed is None or self._placed[0] != names:
                located = self._agents.locations()
                visits = [
                    ((name, directory), executor)
                    for name, (executor, directory) in sorted(located.items())
                    if name in names
                ]
                self._placed = names, jvm.placed(self._session, visits)
            return self._placed[1]


def _raise(error: Exception) -> None:
    raise error
