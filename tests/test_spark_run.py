"""Agents on the executors of a real Spark: every protocol trains, whoever is killed is replaced, strangers stay out."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tether import Averaging, Elastic, Grid, Mpca, Server, Spark, Tide, UsageError, resume, run
from tether.core.compress import Compressor, FeedbackKey
from tether.core.effects import Reduce
from tether.core.events import Broadcasted, Event, Reduced
from tether.core.machine import Node
from tether.core.message import Message, Tag
from tether.core.trace import Meter
from tether.core.wire import Codec
from tether.errors import RunError, WireError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.execution.progress import Progress, make_progress
from tether.protocols import Options
from tether.protocols.averaging import ROUND
from tether.runtimes.collectives import CollectiveContext
from tether.runtimes.process.handshake import Keys, authenticate
from tether.runtimes.process.launcher import NodeExited, NodeStarted
from tether.runtimes.process.memory import Memory, PeerMemory
from tether.runtimes.process.spec import NodeSpec
from tether.runtimes.spark import runtime as spark_runtime
from tether.runtimes.spark.agent import LIFELINE, Answer, Assignment, Greeting, Refusal, greet
from tether.runtimes.spark.collectives import (
    AgentServer,
    Announcement,
    Contribution,
    SparkCollectives,
    Sum,
    Total,
    _read,
    add,
    ask,
    deliver_task,
    fetch_task,
)
from tether.runtimes.spark.runtime import Agents, Jobs, SparkDriver
from tether.tasks import load

pytestmark = pytest.mark.spark

#: an executor, its Python workers and the task in one must have started within it
START_SECONDS = 120.0


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What the tasks of exchanges have done to the collector of garbage, where they have run in this process."""
    yield
    gc.unfreeze()


def executors(spark: Any) -> list[int]:
    """The processes of this session's executors."""
    return processes(spark.sparkContext.applicationId.encode(), b"--executor-id")


def processes(*words: bytes) -> list[int]:
    """Those that have all these words in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and set(words) <= set((entry / "cmdline").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return sorted(found)


class Trouble(Progress):
    """Does something to one executor as soon as some worker has made a number of steps, and listens to what is told."""

    def __init__(self, spark: Any, signal_: signal.Signals, steps: int) -> None:
        self._spark = spark
        self._signal = signal_
        self._steps = steps
        self.made_at = 0.0
        self.notes: list[tuple[float, str]] = []

    def meter(self, meter: Meter, time_: float) -> None:
        if not self.made_at and meter.steps >= self._steps:
            victim = executors(self._spark)[0]
            self.made_at = time.monotonic()
            os.kill(victim, self._signal)

    def note(self, text: str) -> None:
        self.notes.append((time.monotonic() - self.made_at if self.made_at else 0.0, text))

    def told(self, what: str) -> float:
        """When something was told, since the trouble."""
        return next(when for when, text in self.notes if what in text)


def train(spark: Any, protocol: Options, directory: Path, progress: Progress | None = None, **goal: Any) -> Any:
    quiet = progress or make_progress(quiet=True)
    return run(load("digits"), protocol, Spark(spark, 3), run_dir=directory / "run", progress=quiet, **goal)


@pytest.mark.parametrize("protocol", [Mpca(compress="int8"), Elastic(), Tide()], ids=str)
def test_digits_are_learned_on_three_executors(spark: Any, protocol: Options, tmp_path: Path) -> None:
    result = train(spark, protocol, tmp_path, epochs=10)
    assert result.metrics["error"] < 0.06 and result.figures["runtime"] == "spark"
    assert result.figures.get("compression", {"share": 0.0})["share"] < 0.3
    assert sorted(result.figures["utilization"]["workers"]) == ["worker-0", "worker-1", "worker-2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol", [Averaging(tau=10), Averaging(tau=10, compress="fp16"), Server(), Server(sync="async"), Grid()], ids=str
)
def test_digits_are_learned_with_every_other_protocol(spark: Any, protocol: Options, tmp_path: Path) -> None:
    assert train(spark, protocol, tmp_path, epochs=10).metrics["error"] < 0.08
    assert not processes(b"tether.runtimes.process.forkserver"), "whoever was started beside the driver has ended"


def test_who_comes_for_a_killed_executor_joins_and_the_others_never_stop(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers: list[Agents] = []
    start = Agents.start
    monkeypatch.setattr(Agents, "start", lambda launcher, nodes: launchers.append(launcher) or start(launcher, nodes))

    class Patient(Trouble):
        """Is content when a successor has worked for a while."""

        def meter(self, meter: Meter, time_: float) -> None:
            super().meter(meter, time_)
            executors = [agent.greeting.executor for agent in launchers[0].living.values()]
            assert len(set(executors)) == len(executors), "no executor ever holds two"
            if "~" in meter.node and meter.steps >= 20:
                (tmp_path / "content").touch()

    class Until(type(load("digits"))):  # type: ignore[misc]
        def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
            return {**super().evaluate(model), "content": float((tmp_path / "content").exists())}

    trouble = Patient(spark, signal.SIGKILL, 50)
    goal: dict[str, Any] = {"until": "content>0", "epochs": 10**5, "evaluate_every": 20}
    result = run(Until(), Mpca(), Spark(spark, 3), run_dir=tmp_path / "run", progress=trouble, **goal)
    assert result.metrics["error"] < 0.06
    assert 0 < trouble.told("has joined") < START_SECONDS


class Harm(Progress):
    """Does something to one worker, and is content when its successor has worked for a while."""

    def __init__(self, directory: Path, harm: Callable[[Agents], str]) -> None:
        """`harm` gives the name of whom it has done something to, or "" if it is not yet time."""
        self.notes: list[str] = []
        self._content = directory / "content"
        self._harm = harm
        self._harmed = ""

    def polled(self, agents: Agents) -> None:
        """Look whether it is time. Meters would not do: when one worker sleeps, all wait, and none reports."""
        self._harmed = self._harmed or self._harm(agents)

    def meter(self, meter: Meter, time_: float) -> None:
        if self._harmed and meter.node == f"{self._harmed}~2" and meter.steps >= 10:
            self._content.touch()

    def note(self, text: str) -> None:
        self.notes.append(text)


class UntilContent(type(load("digits"))):  # type: ignore[misc]
    """Digits that are learned until a file is there."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        return {"content": float((self.directory / "content").exists())}


class FallsAsleep(UntilContent):
    """The first worker that looks for it after some losses never returns from another."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        from pyspark import TaskContext

        taken = vars(model)["losses_taken"] = vars(model).get("losses_taken", 0) + 1
        context = TaskContext.get()
        if taken > 20 and context is not None:
            with suppress(FileExistsError), (self.directory / "asleep").open("x") as file:
                file.write(str(context.taskAttemptId()))
                file.flush()
                threading.Event().wait()
        return super().loss(model, batch)


def train_with_harm(spark: Any, task: UntilContent, harm: Harm, monkeypatch: pytest.MonkeyPatch) -> Any:
    poll = SparkDriver._poll
    monkeypatch.setattr(SparkDriver, "_poll", lambda driver, wait: harm.polled(driver._agents) or poll(driver, wait))
    goal: dict[str, Any] = {"until": "content>0", "epochs": 10**5, "evaluate_every": 2, "seconds": START_SECONDS}
    return run(task, Averaging(tau=5), Spark(spark, 2), run_dir=task.directory / "run", progress=harm, **goal)


def test_who_cannot_be_brought_a_broadcast_dies_and_is_replaced(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a worker waits for ever, and every reduction for that worker."""

    def remove_the_socket_for_tasks(agents: Agents) -> str:
        agent = agents.living.get("worker-1")
        tasks = Path(agent.greeting.directory, "tasks") if agent is not None else None
        if tasks is None or not tasks.exists():
            return ""
        tasks.unlink()
        return "worker-1"

    harm = Harm(tmp_path, remove_the_socket_for_tasks)
    result = train_with_harm(spark, UntilContent(tmp_path), harm, monkeypatch)
    assert result.figures["reason"] == "content>0 reached"
    assert "a broadcast did not reach worker-1 in 3 tries" in harm.notes
    assert "worker-1 is given up; the others go on" in harm.notes


def test_an_agent_whose_loss_never_returns_ends_when_it_is_given_up_and_another_comes(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up_who_sleeps(agents: Agents) -> str:
        asleep = (tmp_path / "asleep").read_text() if (tmp_path / "asleep").exists() else ""
        for name in [name for name, agent in agents.living.items() if str(agent.greeting.task) == asleep]:
            agents.kill(name)
            return name
        return ""

    harm = Harm(tmp_path, give_up_who_sleeps)
    result = train_with_harm(spark, FallsAsleep(tmp_path), harm, monkeypatch)
    assert result.figures["reason"] == "content>0 reached"


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "after"), [("broadcast", 0.1), ("reduce", 0.1), ("reduce", 0.5)])
def test_a_kill_in_the_middle_of_a_phase_loses_nothing(
    spark: Any, phase: str, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After half a second a reduction is over, and its result on its way into the joint model."""
    trouble = Trouble(spark, signal.SIGKILL, 10**9)
    done = getattr(Jobs, phase)
    calls = itertools.count()

    def kill() -> None:
        trouble.made_at = time.monotonic()
        os.kill(executors(spark)[0], signal.SIGKILL)

    def begun(*arguments: Any) -> Any:
        if next(calls) == 4:
            threading.Timer(after, kill).start()
        return done(*arguments)

    monkeypatch.setattr(Jobs, phase, begun)
    result = train(spark, Mpca(), tmp_path, trouble, steps=10**6, seconds=50, evaluate_every=1e9)
    assert result.metrics["error"] < 0.06 and trouble.told("has died with its executor") < 10


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [Averaging(tau=10), Elastic(), Server(sync="soft"), Grid()], ids=str)
def test_the_others_go_on_without_a_killed_executor(spark: Any, protocol: Options, tmp_path: Path) -> None:
    trouble = Trouble(spark, signal.SIGKILL, 30)
    result = train(spark, protocol, tmp_path, trouble, steps=10**6, seconds=40, evaluate_every=1e9)
    assert result.metrics["error"] < 0.06 and trouble.told("has died with its executor") < 10


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["hard", "async"])
def test_a_tree_goes_on_when_an_executor_dies_that_has_an_aggregator(
    spark: Any, sync: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers: list[Agents] = []
    start = Agents.start
    monkeypatch.setattr(Agents, "start", lambda launcher, nodes: launchers.append(launcher) or start(launcher, nodes))

    class Host(Trouble):
        """Kills the executor that has an aggregator."""

        def meter(self, meter: Meter, time_: float) -> None:
            if not self.made_at and meter.steps >= 30 and meter.node.startswith("worker"):
                names = {entry.read_text().strip() for entry in Path("/proc").glob("[0-9]*/comm")}
                assert "hub" in names and not any(name.startswith("aggregator") for name in names), "none is here"
                agent = next(agent for agent in launchers[0].living.values() if agent.colocated)
                lost.append(agent.colocated[0].name)
                (victim,) = (
                    pid
                    for pid in executors(spark)
                    for setting in Path(f"/proc/{pid}/environ").read_text().split("\0")
                    if setting.startswith("SPARK_EXECUTOR_DIRS=")
                    and setting.partition("=")[2] in agent.greeting.executor
                )
                self.made_at = time.monotonic()
                os.kill(victim, signal.SIGKILL)

    lost: list[str] = []
    trouble = Host(spark, signal.SIGKILL, 30)
    protocol = Server(sync=sync, topology="tree", fan_out=2)
    result = train(spark, protocol, tmp_path, trouble, steps=10**6, seconds=40, evaluate_every=1e9)
    assert trouble.told(f"{lost[0]} has died with its executor") < 10 and result.metrics["error"] < 0.06


@pytest.mark.slow
def test_an_executor_that_stands_still_for_half_a_minute_costs_only_its_share(spark: Any, tmp_path: Path) -> None:
    class Pause(Trouble):
        def meter(self, meter: Meter, time_: float) -> None:
            super().meter(meter, time_)
            if self.made_at and time.monotonic() - self.made_at > 30:
                os.kill(executors(self._spark)[0], signal.SIGCONT)

    trouble = Pause(spark, signal.SIGSTOP, 50)
    result = train(spark, Mpca(), tmp_path, trouble, steps=10**6, seconds=70, evaluate_every=1e9)
    assert result.metrics["error"] < 0.06 and not any("died" in text for _, text in trouble.notes)
    assert min(result.figures["utilization"]["workers"].values()) > 0.3, "nobody has waited for it"


def test_a_run_whose_driver_was_killed_goes_on_with_another_number_of_executors(spark: Any, tmp_path: Path) -> None:
    """The driver that is killed has a cluster of its own; the run goes on in this one's session."""
    goal = ["--epochs", "100000", "--checkpoint-seconds", "1", "--run", str(tmp_path / "run")]
    words = ["train", "digits", "--on", "spark", "-n", "1", "-p", "mpca", "--master", "local-cluster[1,3,1024]", *goal]
    with subprocess.Popen([sys.executable, "-m", "tether", *words], stdout=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + START_SECONDS
        try:
            while not list((tmp_path / "run").glob("checkpoints/at-*")) and driver.poll() is None:
                assert time.monotonic() < deadline, "there never was a checkpoint"
                time.sleep(0.2)
        finally:
            driver.kill()
    saved = max(int(path.name.split("-")[1]) for path in (tmp_path / "run" / "checkpoints").glob("at-*"))
    further = 2 + saved / len(load("digits").train_data())
    result = resume(tmp_path / "run", workers=2, epochs=further, progress=make_progress(quiet=True))
    assert result.figures["workers"] == 2 and result.figures["samples"] > saved > 0
    assert result.metrics["error"] < 0.2


def test_what_spark_cannot_do_is_refused(spark: Any, tmp_path: Path) -> None:
    for protocol, options, says in (
        (Server(sync="async", apply="inline"), {}, "do not share memory"),
        (Averaging(), {"record": True}, "cannot be recorded"),
    ):
        with pytest.raises(UsageError, match=says):
            train(spark, protocol, tmp_path / says, epochs=1, **options)


# ---- lifelines ------------------------------------------------------------------------------------------------------


class Caller:
    """Somebody who connects to the driver as an agent does."""

    def __init__(self, agents: Agents, index: int, keys: Keys | None = None, executor: str = "one") -> None:
        self.socket = socket.create_connection(agents.address)
        greeting = Greeting(index, "/nowhere", "127.0.0.1", 0, executor, 0, 0)
        with ThreadPoolExecutor(1) as beside:
            self._answer = beside.submit(greet, self.socket, keys or agents.keys, greeting)
            self.news = agents.poll_events()
            while not self._answer.done():
                self.news += agents.poll_events()

    def answer(self) -> Answer | None:
        """What the driver has said, if it has listened."""
        return None if isinstance(self._answer.exception(), ConnectionError) else self._answer.result()


@pytest.fixture
def agents(spark: Any, tmp_path: Path) -> Iterator[Agents]:
    plan = RunPlan.make(load("digits"), Averaging(), Spark(spark, 1), Request(steps=1), None)
    made = Agents(spark, NodeSpec(plan, tmp_path, 1, keys=Keys.make(), host="127.0.0.1"), "", None, lambda only: None)
    made.place([Node(f"worker-{index}", "worker", True, index) for index in range(2)])
    yield made
    made.close(0.1)


def test_a_place_is_given_once_and_again_under_another_name(agents: Agents) -> None:
    first = Caller(agents, 0)
    assert first.answer() == Assignment(Node("worker-0", "worker", True, 0)) and first.news == []
    orphan = Caller(agents, 0)
    assert isinstance(orphan.answer(), Refusal) and orphan.socket.recv(1) == b""
    first.socket.close()
    (death,) = agents.poll_events()
    assert isinstance(death, NodeExited) and death.name == "worker-0" and death.replaced
    second = Caller(agents, 0)
    (came,) = second.news
    assert isinstance(came, NodeStarted) and second.answer().node.name == "worker-0~2" == came.node.name
    agents.kill("worker-0~2")
    assert [type(news) for news in agents.poll_events()] == [NodeExited] and second.socket.recv(1) == b""
    for caller in (orphan, second):
        caller.socket.close()


def test_an_executor_is_given_one_agent_at_a_time(agents: Agents) -> None:
    first = Caller(agents, 0)
    misplaced = Caller(agents, 1)
    assert first.answer() and misplaced.answer() == Refusal("its executor has an agent already")
    elsewhere = Caller(agents, 1, executor="another")
    assert elsewhere.answer() == Assignment(Node("worker-1", "worker", True, 1))
    for caller in (first, misplaced, elsewhere):
        caller.socket.close()


def test_an_aggregator_runs_in_the_agent_of_the_first_worker_of_its_host_and_dies_with_it(agents: Agents) -> None:
    _, *others = Server(topology="tree", fan_out=2).nodes(3)
    agents.place(others)
    callers = [Caller(agents, index, executor=f"executor {index}") for index in range(3)]
    answers = [caller.answer() for caller in callers]
    assert [[node.name for node in answer.colocated] for answer in answers] == [["aggregator-0"], [], ["aggregator-1"]]
    callers[0].socket.close()
    assert [death.name for death in agents.poll_events()] == ["aggregator-0", "worker-0"]  # type: ignore[union-attr]
    again = Caller(agents, 0, executor="executor 0")
    assert again.answer().colocated == (), "its workers have turned to the hub"
    for caller in (*callers[1:], again):
        caller.socket.close()


def test_strangers_get_no_place(agents: Agents) -> None:
    stranger = Caller(agents, 0, Keys.make())
    assert stranger.answer() is None and agents.living == {}
    stranger.socket.close()


@pytest.mark.parametrize("text", [b"\x97\x00\xa1\xff\xa0\x00\xa0\x00\x00", b"\x98" + b"\x91" * 4000, b""])
def test_an_agent_of_another_version_gets_no_place_and_harms_nobody(agents: Agents, text: bytes) -> None:
    with socket.create_connection(agents.address) as other, ThreadPoolExecutor(1) as beside:
        told = beside.submit(authenticate, other, agents.keys, LIFELINE, text)
        while not told.done():
            assert agents.poll_events() == []
        assert isinstance(told.exception(), ConnectionError) and agents.living == {}
    friend = Caller(agents, 0)
    assert isinstance(friend.answer(), Assignment)
    friend.socket.close()


# ---- jobs ----------------------------------------------------------------------------------------------------------


def test_the_deadline_of_one_exchange_cancels_no_other(
    spark: Any, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = [Caller(agents, index, executor=f"executor {index}") for index in range(2)]
    notes: list[str] = []
    jobs = Jobs(spark, agents, notes.append)

    def until(file: str) -> Any:
        def visit(visited: Iterator[tuple[str, str]]) -> Iterator[str]:
            for name, _ in visited:
                (tmp_path / name).touch()
                wait_for(tmp_path / file)
                yield name

        return visit

    def collect(rdd: Any) -> Any:
        return rdd.collect()

    both = {"worker-0", "worker-1"}
    assert set(jobs._run(both, lambda visited: (name for name, _ in visited), collect)) == both
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(spark_runtime, "EXCHANGE_SECONDS", 3.0)
        slow = pool.submit(jobs._run, {"worker-0"}, until("never"), collect)
        wait_for(tmp_path / "worker-0")
        monkeypatch.setattr(spark_runtime, "EXCHANGE_SECONDS", START_SECONDS)
        other = pool.submit(jobs._run, {"worker-1"}, until("slow is over"), collect)
        wait_for(tmp_path / "worker-1")
        assert slow.result() is None
        (tmp_path / "slow is over").touch()
        assert other.result() == ["worker-1"]
    jobs.drain()
    assert len(notes) == 1 and "an exchange has failed" in notes[0]
    jobs.close()
    for caller in callers:
        caller.socket.close()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not file.exists():
        assert time.monotonic() < deadline, f"there never was a {file.name}"
        time.sleep(0.05)


# ---- the agent's server ---------------------------------------------------------------------------------------------


class Word(Message, frozen=True):
    """Something to broadcast."""

    values: torch.Tensor


class Node_:
    """As much of a node as its server uses."""

    def __init__(self, offers: SparkCollectives, memory: Memory) -> None:
        self.lock = threading.Lock()
        self.offers = offers
        self.memory = memory
        self.events: list[Event] = []

    def handle(self, sender: str, message: Message) -> None:
        self.events += self.offers.receive(message)


@pytest.mark.parametrize("count", [4, 10**5])
def test_tasks_fetch_offers_and_hand_over_broadcasts(count: int, tmp_path: Path) -> None:
    sent: list[tuple[str, Message]] = []
    offers = SparkCollectives(CollectiveContext("worker-0", lambda to, message: sent.append((to, message))))
    node = Node_(offers, Memory(tmp_path, "worker-0"))
    server = AgentServer(node, offers, tmp_path, [Announcement[Word]])  # type: ignore[arg-type]
    members = ("hub", "worker-0")
    try:
        assert offers.reduce(Reduce(Tag(ROUND, 1), members, torch.arange(count).float(), 2.0, 5)) == []
        assert [type(message).__name__ for _, message in sent] == ["Offered"]
        here = [("worker-0", str(tmp_path))]
        for _ in range(2):
            (total,) = fetch_task(Tag(ROUND, 1), 0, "a run")(iter(here))
            assert total is not None and total.contribution.values.tolist() == list(range(0, 2 * count, 2))
            assert total.contribution.weight == 2.0 and total.contribution.steps == {"worker-0": 5}
            del total
        assert node.memory.used_bytes == 0, "what was lent to a task has been returned"
        assert list(fetch_task(Tag(ROUND, 2), 0, "a run")(iter(here))) == [None]
        assert list(fetch_task(Tag(ROUND, 1), 0, "a run")(iter([("worker-1", str(tmp_path / "gone"))]))) == [None]
        frames = Codec([Message]).encode(Announcement(ROUND, 0, members, Word(torch.ones(3))))
        (tmp_path / "file").write_bytes(pickle.dumps([pickle.PickleBuffer(frame) for frame in frames], protocol=5))
        for variable in ({"value": frames, "_path": None}, {"_path": str(tmp_path / "file")}):
            # a task that runs again brings nothing new
            assert list(deliver_task(type("Variable", (), variable))(iter(here))) == ["worker-0"]
        (event,) = node.events
        assert isinstance(event, Broadcasted) and event.message.values.tolist() == [1, 1, 1]  # type: ignore[attr-defined]
        again = Codec([Message]).encode(Announcement(ROUND, 1, members, Word(torch.zeros(3))))
        (tmp_path / "file").write_bytes(pickle.dumps([pickle.PickleBuffer(frame) for frame in again], protocol=5))
        assert list(deliver_task(type("Variable", (), {"_path": str(tmp_path / "file")}))(iter(here))) == ["worker-0"]
        assert len(node.events) == 2
    finally:
        server.close()
    assert ask(str(tmp_path), frames) is None


def test_an_agent_reads_bytes_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps([b"", os.system]))
    with pytest.raises(WireError, match="not a list of bytes"):
        _read(str(tmp_path / "file"))


@pytest.mark.parametrize("lost", [RunError, WireError])
def test_where_memory_is_out_of_sight_offers_come_along(
    lost: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = SparkCollectives(CollectiveContext("worker-0", lambda to, message: None))
    server = AgentServer(Node_(offers, Memory(tmp_path, "worker-0")), offers, tmp_path, [Announcement[Word]])  # type: ignore[arg-type]

    def refuse(*_: Any) -> Any:
        raise lost("no access")

    monkeypatch.setattr(PeerMemory, "borrow", refuse)
    try:
        offers.reduce(Reduce(Tag(ROUND, 1), ("hub", "worker-0"), torch.ones(10**5), 2.0, 5))
        (total,) = fetch_task(Tag(ROUND, 1), 0, "a run")(iter([("worker-0", str(tmp_path))]))
        assert total is not None and total.contribution.values.sum() == 2 * 10**5
    finally:
        server.close()


def offered(node: str, values: torch.Tensor, weight: float = 1.0, steps: int = 1, code: str = "none") -> Sum:
    """What a task fetches of a node's offer, as it comes out of the task."""
    return Offerer(node, code).offer(values, weight, steps)


class Offerer:
    """A node that offers its vector, again and again."""

    def __init__(self, node: str, code: str = "none") -> None:
        compressor = Compressor(code) if code != "none" else None

        def outgoing(_: str, message: Message) -> Message:
            return compressor.pack(FeedbackKey("", "reductions"), message) if compressor else message

        self._offers = SparkCollectives(CollectiveContext(node, lambda to, message: None, outgoing=outgoing))
        self._number = itertools.count()

    def offer(self, values: torch.Tensor, weight: float, steps: int) -> Sum:
        tag = Tag(ROUND, next(self._number))
        self._offers.reduce(Reduce(tag, ("hub", self._offers.node), values, weight, steps))
        return travelled(Sum(self._offers.offer(tag, 0), "a run"))  # type: ignore[arg-type]


def travelled(total: Sum) -> Sum:
    """As it is where Spark has brought it."""
    revived: Sum = pickle.loads(pickle.dumps(total, protocol=5))
    return revived


def test_sums_add_up_whoever_is_missing() -> None:
    one, other = offered("a", torch.ones(2)), offered("b", torch.ones(2), weight=2.0, steps=3)
    total = add(add(None, one), add(other, None))
    assert total is not None and total.contribution.values.tolist() == [3, 3]
    assert total.contribution.weight == 3.0 and total.contribution.steps == {"a": 1, "b": 3} and add(None, None) is None


def test_a_task_that_adds_to_an_offer_leaves_the_offer_as_it_is() -> None:
    mine = torch.ones(3)
    one = Sum(Contribution(Tag(ROUND, 1), mine, 1.0, {"a": 1}), "a run")
    total = add(one, offered("b", torch.ones(3)))
    assert total is not None and total.contribution.values.tolist() == [2, 2, 2] and mine.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_of_any_type_travels_as_it_is(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(travelled(offered("a", values)).contribution.values, values)


@pytest.mark.parametrize(("code", "share"), [("fp16", 0.5), ("bf16", 0.5), ("int8", 0.26)])
def test_sums_travel_compressed_and_what_rounding_loses_comes_with_the_next(code: str, share: float) -> None:
    """Five members and a tree of two levels, as Spark's treeAggregate makes it: over the rounds the sums are right."""
    count, rounds = 10_000, 40
    generator = torch.Generator().manual_seed(1)
    members = [Offerer(name, code) for name in "abcde"]
    weights = [1.0, 2.0, 3.0, 1.0, 5.0]
    meant, got, first = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64), 0.0
    for number in range(rounds):
        values = [torch.randn(count, generator=generator) for _ in members]
        offers = [m.offer(v, w, 1) for m, v, w in zip(members, values, weights, strict=True)]
        assert len(pickle.dumps(offers[0], protocol=5)) < (share + 0.01) * 4 * count
        partial = [add(add(offers[0], offers[1]), offers[2]), add(offers[3], offers[4])]
        assert len(pickle.dumps(partial[1], protocol=5)) < (share + 0.01) * 4 * count
        total = add(*(travelled(part) for part in partial if part is not None))
        assert total is not None and total.contribution.weight == 12 and total.contribution.steps.keys() == set("abcde")
        assert total.contribution.values.dtype == torch.float32
        meant += sum(v.double() * w for v, w in zip(values, weights, strict=True))
        got += total.contribution.values.double()
        first = first or float((meant - got).norm())
        assert number or first > 0, "the code loses something"
    assert float((meant - got).norm()) < 3 * first, "what is lost does not add up"


@pytest.mark.parametrize("code", ["none", "int8"])
def test_a_large_offer_comes_in_parts_with_its_buffers_as_they_are(code: str) -> None:
    parameters, buffers = 5000, 300
    vector = torch.randn(parameters + buffers, generator=torch.Generator().manual_seed(1))
    compressor = Compressor(code, parameters, len(vector)) if code != "none" else None

    def outgoing(_: str, message: Any) -> Message:
        return compressor.pack(FeedbackKey("", f"{message.part}"), message) if compressor else message

    sent: list[Any] = []
    context = CollectiveContext("a", lambda _, m: sent.append(m), 1.0, parameters, len(vector), outgoing=outgoing)
    offers = SparkCollectives(context, part_bytes=8000)
    offers.reduce(Reduce(Tag(ROUND, 1), ("hub", "a"), vector, 1.0, 1))
    assert sent[0].parts == 4, "three of the parameters, and the buffers"
    parts = [Sum(offers.offer(Tag(ROUND, 1), part), "a run").contribution.values for part in range(4)]  # type: ignore[arg-type]
    assert offers.offer(Tag(ROUND, 1), 4) is None and max(map(len, parts)) * 4 <= 8000
    assert torch.equal(parts[-1], vector[parameters:])
    assert float((torch.cat(parts) - vector).abs().max()) < (0.02 if code == "int8" else 1e-9)


def test_a_root_learns_of_a_sum_or_that_nobody_is_left() -> None:
    root = SparkCollectives(CollectiveContext("hub", lambda to, message: None))
    for tag in (Tag(ROUND, 1), Tag(ROUND, 2)):
        root.reduce(Reduce(tag, ("hub", "a", "b")))
    (reduced,) = root.receive(Total(Tag(ROUND, 1), torch.ones(2), 3.0, {"b": 3, "a": 1}))
    assert isinstance(reduced, Reduced) and reduced.contributors == ("a", "b") and reduced.steps == (1, 3)
    (reduced,) = root.receive(Total(Tag(ROUND, 2), torch.empty(0), 0.0, {}))
    assert isinstance(reduced, Reduced) and reduced.total is None and reduced.weight == 0
