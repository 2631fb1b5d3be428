"""Workers on a Spark cluster: one agent on each executor, the hub beside the driver.

Agents are the tasks of one long job, so Spark places, supervises and replaces them. `averaging` and `mpca` exchange by
Spark's own broadcast and treeAggregate, in jobs beside that one. The other protocols use Tether's links.
"""

from __future__ import annotations

import hmac
import os
import pickle
import queue
import secrets
import selectors
import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tether.errors import RunError, UsageError
from tether.machine import Message, Node
from tether.runtimes import exchange, jvm
from tether.runtimes.agent import NONCE_BYTES, Feeding, Fenced, Here, Meeting, Welcome, be_agent, framed
from tether.runtimes.base import Observer, Outcome, Plan
from tether.runtimes.collectives import Collectives, Down, Up
from tether.runtimes.driver import Came, Crew, Died, Driver, check_processes
from tether.runtimes.exchange import Offered, Offers, Opened
from tether.runtimes.feed import NONE
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
#: the largest first word of an agent
GREETING_BYTES_MAX = 4096


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
        jvm.check_session(self.session, self.workers)
        if plan.collective:
            jvm.check_room(self.session, plan.vector_bytes, self.workers)
        host = socket.gethostbyname(self.session.sparkContext.getConf().get("spark.driver.host", "localhost"))
        driver = SparkDriver(self, plan, observer, host)
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

    def __init__(self, settings: Spark, plan: Plan, observer: Observer, host: str) -> None:
        self._by_jobs = plan.collective
        if self._by_jobs and plan.compress != "none":
            raise UsageError(f"Spark moves the bytes of this protocol itself: compress={plan.compress!r} is not for it")
        self._types = message_types(plan.messages, compressed=False) if self._by_jobs else []
        super().__init__(plan, observer, settings.hung_seconds, host=host, types=(Opened, Offered, *self._types))
        self._birth = Birth(
            plan,
            self.directory,
            settings.threads,
            keys=self.keys,
            host=host,
            collectives=Offers if self._by_jobs else Collectives,
        )
        source = plan.source
        feeding = Feeding(source.fields, settings.memory_mb) if source is not None else None
        self._agents = Agents(settings.session, self._birth, self.address, feeding, self._feed)
        self._jobs = Jobs(settings.session, self._agents, observer.note)
        self._codec = Codec([Message])
        #: reductions: who takes part, and who has offered so far
        self._opened: dict[str, tuple[str, ...]] = {}
        self._offered: defaultdict[str, set[str]] = defaultdict(set)

    def execute(self) -> Outcome:
        nodes = self._plan.nodes
        crews: list[tuple[Crew, list[Node]]] = [(self._agents, [node for node in nodes if node.computes])]
        if beside := [node for node in nodes if not node.computes]:
            crews.append((Children(self._birth), beside))
        return self.run(crews)

    def close(self) -> None:
        self._jobs.close()
        super().close()

    def _feed(self, only: list[int] | None, tries: int = TRIES) -> None:
        """Have the agents, or some of them, brought their parts of the data, by a job beside all others."""
        intakes = self._agents.intakes()
        places = list(range(len(intakes))) if only is None else only

        def fed(rows: list[int]) -> None:
            # who was not reached has died, and its successor is fed by itself, or must be tried again
            now = self._agents.intakes()
            missed = [place for place, count in zip(places, rows, strict=True) if count == NONE]
            if again := [place for place in missed if now[place] == intakes[place]]:
                if not tries:
                    raise RunError(f"worker-{again[0]} could not be brought its data: {now[again[0]]} is out of reach")
                self._feed(again, tries - 1)

        self._jobs.submit(partial(self._plan.source.feed, intakes, self._agents.meeting.secret, only), fed)

    def _turn(self, seconds: float) -> None:
        super()._turn(seconds)
        self._jobs.settle()

    def _take_other(self, sender: str, message: Message) -> None:
        match message:
            case Opened(tag=tag, members=members):
                self._opened[tag] = members
                self._reduce_if_offered(tag)
            case Offered(tag=tag):
                self._offered[tag].add(sender)
                self._reduce_if_offered(tag)
            case Down() as down:
                self._deliver(down)

    def _take_death(self, death: Died) -> None:
        super()._take_death(death)
        for tag in list(self._opened):
            self._reduce_if_offered(tag)

    def _deliver(self, down: Down[Any]) -> None:
        frames = [pickle.PickleBuffer(frame) for frame in self._codec.encode(down)]  # written without a copy
        living = partial(self._living_of, set(down.members[1:]))
        self._jobs.submit(partial(self._jobs.broadcast, frames, living), lambda _: None)

    def _living_of(self, names: set[str]) -> set[str]:
        """Those of them who live, as other threads may ask too."""
        return names & frozenset(self._living)

    def _reduce_if_offered(self, tag: str) -> None:
        members = self._opened.get(tag, ())
        if not members or not set(members[1:]) & self._living <= self._offered[tag]:
            return
        del self._opened[tag]
        offered = self._offered.pop(tag)

        def answer(total: exchange.Sum | None) -> None:
            values, weight, covers = total or (None, 0.0, {})
            tensor = torch.empty(0) if values is None else exchange.tensor(values)
            self._outbox.send(members[0], Up(tag, members, tensor, weight, covers))

        self._jobs.submit(partial(self._jobs.reduce, tag, partial(self._living_of, offered)), answer)


@dataclass
class _Agent:
    """What the driver knows of one agent."""

    node: Node
    here: Here
    lifeline: socket.socket


class Agents:
    """A crew of agents: the tasks of one long job, one on each executor."""

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
        self._listener = socket.create_server((birth.host, 0))
        self.meeting = Meeting(birth.host, self._listener.getsockname()[1], secrets.token_bytes(32))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        #: wakes the driver up for what happens in other threads
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        #: who has not said yet which agent it is: what was sent to it, and what came
        self._strangers: dict[socket.socket, tuple[bytes, bytearray]] = {}
        self._places: dict[int, Node] = {}
        self.living: dict[str, _Agent] = {}
        self._news: list[Came | Died] = []
        self._failure = ""
        self._over = False
        self._thread: threading.Thread | None = None

    # ---- the crew ----

    def start(self, nodes: Iterable[Node]) -> None:
        from pyspark import InheritableThread

        self._places = {node.index: node for node in nodes}
        birth = replace(self._birth, driver=self._driver)
        meeting, feeding = self.meeting, self._feeding

        def agents(index: int, _: Any) -> Iterable[str]:
            yield be_agent(index, birth, meeting, feeding)

        def work() -> None:
            self._context.setJobGroup(self._group, "the agents of a run", interruptOnCancel=True)
            count = len(self._places)
            try:
                places = self._context.parallelize(range(count), count).withResources(jvm.agent_profile(self._session))
                places.mapPartitionsWithIndex(agents).collect()
            except Exception as error:
                if not self._over:
                    self._failure = str(error)
            self.wake()

        self._thread = InheritableThread(target=work, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._selector.fileno()

    def wake(self) -> None:
        """Have the driver look for news; from any thread."""
        with suppress(OSError):
            self._wake.send(b".")

    def news(self) -> list[Came | Died]:
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._greet()
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]
        if self._failure:
            raise RunError(f"Spark has given up the agents: {self._failure}")
        news, self._news = self._news, []
        return news

    def end(self, name: str) -> None:
        self._part(self.living[name], "is given up")

    def output(self, name: str) -> str:
        if name in self.living:
            return ""
        return (
            f"Spark has brought up {len(self.living)} of {len(self._places)} agents: is another run holding executors?"
        )

    def close(self, seconds: float) -> None:
        self._over = True
        for agent in self.living.values():
            agent.lifeline.close()
        for stranger in self._strangers:
            stranger.close()
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._context.cancelJobGroup(self._group)
                self._thread.join(2 * seconds)
        self._selector.close()
        for end in (self._listener, self._woken, self._wake):
            end.close()

    # ---- lifelines ----

    def _greet(self) -> None:
        stranger, _ = self._listener.accept()
        stranger.setblocking(False)
        nonce = os.urandom(NONCE_BYTES)
        stranger.send(nonce)
        self._strangers[stranger] = nonce, bytearray()
        self._selector.register(stranger, selectors.EVENT_READ)

    def _read(self, lifeline: socket.socket) -> None:
        try:
            text = lifeline.recv(GREETING_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        if lifeline not in self._strangers:
            agent = next(agent for agent in self.living.values() if agent.lifeline is lifeline)
            self._part(agent, "has died with its executor or its task")
        elif text:
            nonce, said = self._strangers[lifeline]
            said += text
            length = int.from_bytes(said[:4], "big")
            if length > GREETING_BYTES_MAX:
                self._send_away(lifeline)
            elif len(said) >= 4 + length:
                self._take(lifeline, nonce, bytes(said[4 : 4 + length]))
        else:
            self._send_away(lifeline)

    def _take(self, lifeline: socket.socket, nonce: bytes, said: bytes) -> None:
        """Give an agent its place, if it is one and there is one."""
        signature, text = said[:32], said[32:]
        try:
            here = msgspec.msgpack.decode(text, type=Here)
        except msgspec.MsgspecError:
            here = None
        if here is None or not hmac.compare_digest(signature, self.meeting.sign(nonce, text)):
            self._send_away(lifeline)
            return
        node = self._places.get(here.index)
        if node is None or self._over or node.name in self.living:
            lifeline.send(framed(msgspec.msgpack.encode(Fenced("its place is taken"))))
            self._send_away(lifeline)
            return
        del self._strangers[lifeline]
        self.living[node.name] = _Agent(node, here, lifeline)
        if node.life > 1:
            self._news.append(Came(node))
        lifeline.send(framed(msgspec.msgpack.encode(Welcome(node))))
        if self._feeding is not None and (self._fed or len(self.living) == len(self._places)):
            self._feed([here.index] if self._fed else None)
            self._fed = True

    def _send_away(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        self._strangers.pop(stranger, None)
        stranger.close()

    def _part(self, agent: _Agent, how: str) -> None:
        """Cut the lifeline; who comes for this place next has another name."""
        self._selector.unregister(agent.lifeline)
        agent.lifeline.close()
        del self.living[agent.node.name]
        self._places[agent.node.index] = agent.node.successor()
        self._news.append(Died(agent.node.name, how, replaced=True))

    # ---- where they are ----

    def intakes(self) -> list[tuple[str, int]]:
        """Where each place's agent takes in data; nowhere, if there is none."""
        found = {agent.node.index: (agent.here.host, agent.here.port) for agent in self.living.values()}
        return [found.get(index, ("", 0)) for index in sorted(self._places)]

    def locations(self) -> dict[str, tuple[str, str]]:
        """Of each living agent: its executor, as Spark's scheduler names it, and its directory."""
        tracker = self._context.statusTracker()
        store = self._context._jsc.sc().statusStore()
        hosts = jvm.executors(self._session)
        running = {}
        for job in tracker.getJobIdsForGroup(self._group):
            for stage in info.stageIds if (info := tracker.getJobInfo(job)) else ():
                tasks = store.taskList(stage, 0, 1 << 20)
                for task in (tasks.apply(position) for position in range(tasks.size())):
                    if task.status() == "RUNNING" and task.executorId() in hosts:
                        running[task.index()] = f"executor_{hosts[task.executorId()][0]}_{task.executorId()}"
        return {
            name: (running.get(agent.node.index, ""), agent.here.directory) for name, agent in list(self.living.items())
        }


class Jobs:
    """Exchanges as Spark jobs, several at a time."""

    def __init__(self, session: SparkSession, agents: Agents, note: Callable[[str], None]) -> None:
        self._context = session.sparkContext
        self._agents = agents
        self._note = note
        self._group = f"tether exchange {uuid.uuid4().hex[:8]}"
        self._pool = ThreadPoolExecutor(max_workers=EXCHANGES_MAX, thread_name_prefix="exchange")
        self._pending: list[Future[None]] = []
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._placed: tuple[frozenset[str], RDD[tuple[str, str]]] | None = None
        self._over = False

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do the work in another thread, and then something with its result in the driver's."""

        def done() -> None:
            try:
                self._results.put(partial(then, work()))
            except Exception as error:
                self._results.put(partial(_raise, error))
            self._agents.wake()

        self._pending = [*(other for other in self._pending if not other.done()), self._pool.submit(done)]

    def settle(self) -> None:
        """In the driver's thread: take in what has been done."""
        while not self._results.empty():
            self._results.get()()

    def close(self) -> None:
        self._over = True
        if not all(work.done() for work in self._pending):
            self._context.cancelJobGroup(self._group)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def broadcast(self, frames: list[pickle.PickleBuffer], members: Callable[[], set[str]]) -> None:
        """Bring frames to all members that live."""
        variable = self._context.broadcast(frames)
        reached: set[str] = set()
        for _ in range(TRIES):
            if missing := members() - reached:
                reached |= set(self._run(missing, exchange.delivered(variable), lambda rdd: rdd.collect()) or ())
        variable.destroy()

    def reduce(self, tag: str, members: Callable[[], set[str]]) -> exchange.Sum | None:
        """The sum of what all members offer that live."""
        total: exchange.Sum | None = None
        for _ in range(TRIES):
            if missing := members() - set(total[2] if total else ()):
                more = self._run(
                    missing, exchange.fetched(tag), lambda rdd: rdd.treeAggregate(None, exchange.add, exchange.add)
                )
                total = exchange.add(total, more)
        return total

    def _run(self, names: set[str], visit: Any, action: Callable[[RDD[Any]], Any]) -> Any:
        """A job whose tasks visit these agents, each on its own executor; None if it failed or took too long."""
        watchdog = threading.Timer(EXCHANGE_SECONDS, self._context.cancelJobGroup, (self._group,))
        watchdog.daemon = True
        watchdog.start()
        try:
            self._context.setJobGroup(self._group, "an exchange of a run", interruptOnCancel=True)
            return action(self._visitors(frozenset(names)).mapPartitions(visit))
        except Exception as error:
            if not self._over:
                self._results.put(partial(self._note, f"an exchange has failed: {str(error).splitlines()[0]}"))
            return None
        finally:
            watchdog.cancel()

    def _visitors(self, names: frozenset[str]) -> RDD[Any]:
        """A partition for each of these agents, with its name and directory, that Spark runs where the agent is."""
        with self._lock:
            if self._placed is None or self._placed[0] != names:
                located = self._agents.locations()
                self._placed = (
                    names,
                    self._placed_rdd([(name, *located[name]) for name in sorted(names & located.keys())]),
                )
            return self._placed[1]

    def _placed_rdd(self, desks: list[tuple[str, str, str]]) -> RDD[Any]:
        from pyspark import RDD
        from pyspark.serializers import CPickleSerializer

        context, java = self._context, self._context._jvm
        assert java is not None
        pairs = java.scala.collection.mutable.ArrayBuffer()
        for name, executor, directory in desks:
            preferred = java.scala.collection.mutable.ArrayBuffer()
            if executor:
                preferred.append(executor)
            pairs.append(java.scala.Tuple2(bytearray(pickle.dumps((name, directory))), preferred.toSeq()))
        kind = java.scala.reflect.ClassTag.apply(java.java.lang.Class.forName("[B"))
        made = context._jsc.sc().makeRDD(pairs.toSeq(), kind)
        return RDD(made.toJavaRDD(), context, CPickleSerializer())


def _raise(error: Exception) -> None:
    raise error
