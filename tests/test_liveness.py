"""What has stopped is noticed, nothing waits for it: tasks that hang, processes that are stopped, callers that go."""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tether import Averaging, Local, Mpca, RunError, Server, Spark, start
from tether.api import Result
from tether.core.trace import Meter
from tether.errors import NodesLost
from tether.execution.progress import make_progress
from tether.protocols import Options
from tether.runtimes.process import liveness, local_launcher
from tether.runtimes.process.control import Alive, Work
from tether.runtimes.process.forkserver import _EXITED, _REPORT, _STATUS, ForkServer
from tether.runtimes.process.liveness import LOOP, Watchdog
from tether.testing.conformance import Assassin, Blobs, descendants

pytestmark = [
    pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc"),
]

#: how long a run may take that must notice something on its way: a bound against waiting for ever, not a measurement
PATIENCE_SECONDS = 90.0


def is_process(name: str) -> bool:
    """Whether this is the process of that node."""
    return Path("/proc/self/comm").read_text().strip() == name


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> None:
    """Processes that are not children can only be looked at."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def nothing_is_left() -> bool:
    return not descendants(os.getpid())


def trained(task: Blobs, options: Options, on: Local, directory: Path, watcher: Assassin, **goal: Any) -> Result:
    """A run that must end within a time, whatever happens in it."""
    goal = {"evaluate_every": 1e9, **goal}
    return start(task, options, on, run_dir=directory, progress=watcher, **goal).wait(PATIENCE_SECONDS)


class HangsInLoss(Blobs):
    """The twentieth loss of worker-1 never comes. Others take so long that a run without it does not end at once."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.02)
        self.losses_taken = vars(self).get("losses_taken", 0) + 1
        if self.losses_taken == 20 and is_process("worker-1"):
            threading.Event().wait()
        return super().loss(model, batch)


class HangsInData(Blobs):
    """Of worker-1, one row never comes after some hundred others."""

    def train_data(self) -> TensorDataset:
        points, labels = super().train_data().tensors
        given = iter(range(400))

        class Rows(TensorDataset):
            def __getitem__(self, index: int) -> Any:
                if next(given, None) is None and is_process("worker-1"):
                    threading.Event().wait()
                return super().__getitem__(index)

        return Rows(points, labels)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (HangsInLoss(), Averaging(tau=5)),
        (HangsInLoss(), Server()),
        (HangsInLoss(), Mpca()),
        (HangsInData(), Averaging(tau=5)),
    ],
    ids=["averaging", "hardsync", "mpca", "data"],
)
def test_a_worker_whose_step_never_ends_is_killed_and_the_others_go_on(
    task: Blobs, options: Options, tmp_path: Path
) -> None:
    watcher = Assassin([], 0)
    result = trained(task, options, Local(2, hung_seconds=2.0), tmp_path / "run", watcher, steps=200)
    assert result.figures["steps"] >= 200 and result.metrics["error"] < 0.1
    notes = [text for _, text in watcher.notes]
    assert any(text.startswith("worker-1 has been at one gradient for ") for text in notes), notes
    assert "worker-1 was killed by SIGKILL; the others go on" in notes and nothing_is_left()


class HangsInStep(Blobs):
    """The hub's twentieth step never ends, once in all."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = marker

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        marker, steps = self.marker, itertools.count(1)

        def before_step(*_: object) -> None:
            if is_process("hub") and next(steps) == 20 and not marker.exists():
                marker.touch()
                threading.Event().wait()

        optimizer = super().optimizer(model)
        optimizer.register_step_pre_hook(before_step)
        return optimizer


def test_a_hub_whose_step_never_ends_is_killed_and_the_run_restarts(tmp_path: Path) -> None:
    task, watcher = HangsInStep(tmp_path / "hung"), Assassin([], 0)
    result = trained(task, Server(), Local(2, hung_seconds=2.0), tmp_path / "run", watcher, steps=200)
    assert result.figures["steps"] == 200 and task.marker.exists()
    assert any("hub has been at one event for " in text for _, text in watcher.notes), watcher.notes


class Slow(Blobs):
    """Each step of worker-1 takes longer than a process may be silent, so worker-0 waits that long too."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if is_process("worker-1"):
            time.sleep(3.0)
        return super().loss(model, batch)


def test_steps_that_are_usually_slow_are_waited_for_and_so_is_whoever_waits_for_them(tmp_path: Path) -> None:
    watcher = Assassin([], 0)
    result = trained(Slow(), Server(), Local(2, hung_seconds=2.0), tmp_path / "run", watcher, steps=4)
    assert result.figures["steps"] == 4 and not any("killed" in text for _, text in watcher.notes), watcher.notes


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def are_gone(processes: dict[str, int]) -> bool:
    """Whether all have ended, though whoever has adopted some of them may not have waited for them yet."""
    for pid in processes.values():
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
    return True


class Fell(Assassin):
    """As soon as a worker has made some steps: a signal to the fork server, and then one kill after the other."""

    def __init__(self, number: signal.Signals, victims: list[str]) -> None:
        super().__init__(victims, steps=20)
        self.number = number
        self.signalled: dict[str, int] = {}

    def meter(self, meter: Meter, time_: float) -> None:
        if not self.signalled and meter.steps >= self.steps:
            nodes = descendants(os.getpid())
            self.signalled = {**nodes, "fork server": parent_of(nodes["worker-0"])}
            os.kill(self.signalled["fork server"], self.number)
            for victim in self.victims:
                os.kill(nodes[victim], signal.SIGKILL)


@pytest.mark.parametrize("victims", [[], ["worker-1"]], ids=["all live", "one dies"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_run_goes_on_without_its_fork_server_and_notices_deaths_all_the_same(
    number: signal.Signals, victims: list[str], tmp_path: Path
) -> None:
    fell = Fell(number, victims)
    result = trained(Blobs(), Averaging(tau=5), Local(3), tmp_path / "run", fell, steps=2000)
    assert result.figures["steps"] == 2000 and result.metrics["error"] < 0.1
    died = [text for _, text in fell.notes if "died" in text]
    assert died == [f"{name} died, and the fork server did not report how; the others go on" for name in victims]
    assert nothing_is_left()
    wait_for(lambda: are_gone(fell.signalled), seconds=5.0)


def test_a_hub_that_dies_beside_a_stopped_fork_server_is_replaced_by_a_restart(tmp_path: Path) -> None:
    fell = Fell(signal.SIGSTOP, ["hub"])
    result = trained(Blobs(), Averaging(tau=5), Local(2), tmp_path / "run", fell, steps=2000)
    assert result.figures["steps"] == 2000 and nothing_is_left()
    wait_for(lambda: are_gone(fell.signalled), seconds=5.0)


def test_a_fork_server_that_never_responds_is_replaced_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped before it can do anything, each time."""

    class Stopped(ForkServer):
        def __init__(self, log: IO[bytes] | None) -> None:
            super().__init__(log)
            os.kill(self._process.pid, signal.SIGSTOP)

    monkeypatch.setattr(local_launcher, "START_SECONDS", 1.0)
    monkeypatch.setattr(local_launcher, "ForkServer", Stopped)
    watcher = Assassin([], 0)
    with pytest.raises(NodesLost, match="the fork server has not responded for 1 s"):
        trained(Blobs(), Averaging(), Local(2, restarts=1), tmp_path / "run", watcher, steps=10)
    assert len([text for _, text in watcher.notes if "resuming from" in text]) == 1 and nothing_is_left()


def test_a_node_that_does_not_come_up_is_not_waited_for_because_others_are_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "START_SECONDS", 3.0)

    class NeverBuilt(Blobs):
        def model(self) -> nn.Module:
            if is_process("worker-1"):
                threading.Event().wait()
            return super().model()

    with pytest.raises(RunError, match=r"worker-1 did not become ready within 3 s"):
        trained(NeverBuilt(), Averaging(tau=5), Local(2), tmp_path / "run", Assassin([], 0), steps=10)
    assert nothing_is_left()


PROGRAM = """
import tether
from tether.execution.progress import make_progress
from tether.testing.conformance import Blobs
on = tether.Local(2, hung_seconds=2.0)
tether.run(Blobs(), tether.Averaging(tau=5), on, steps=10**9, run_dir="run", progress=make_progress(quiet=True))
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int]]]:
    """A program with a run that never ends, and the processes of that; whatever is left of it is killed."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=tmp_path)
    nodes: dict[str, int] = {}
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and '"progress"' in metrics.read_text())
        nodes |= descendants(process.pid)
        nodes["fork server"] = parent_of(nodes["worker-0"])
        yield process, nodes
    finally:
        process.kill()
        process.wait()
        for pid in nodes.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "stopped", [["worker-1"], ["fork server"], ["worker-1", "fork server"]], ids=lambda names: " and ".join(names)
)
def test_when_the_driver_is_killed_the_processes_that_were_stopped_end_too(
    program: tuple[subprocess.Popen[bytes], dict[str, int]], stopped: list[str]
) -> None:
    process, nodes = program
    for name in stopped:
        os.kill(nodes[name], signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_for(lambda: are_gone(nodes), seconds=20.0)


def test_a_run_that_was_stopped_as_a_whole_goes_on_with_all_its_nodes(
    program: tuple[subprocess.Popen[bytes], dict[str, int]], tmp_path: Path
) -> None:
    """As a laptop's is whose lid was closed; for longer than a process may be silent."""
    process, nodes = program
    everybody = {**nodes, "driver": process.pid}
    for pid in everybody.values():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)  # nothing happens in it
    for pid in everybody.values():
        os.kill(pid, signal.SIGCONT)
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.stat().st_size
    wait_for(lambda: metrics.stat().st_size > before + 20_000)
    assert "killed" not in metrics.read_text() and not are_gone({"worker-1": nodes["worker-1"]})


def test_a_run_whose_handle_is_dropped_ends_and_leaves_nothing(tmp_path: Path) -> None:
    handle = start(
        Blobs(), Averaging(tau=5), Local(2), run_dir=tmp_path / "run", progress=make_progress(quiet=True), steps=10**9
    )
    wait_for(lambda: "worker-1" in descendants(os.getpid()))
    del handle
    wait_for(nothing_is_left)
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "training"])


class Parent(Blobs):
    """Its hub leaves a child that keeps what it has inherited, so that nobody can tell whether the hub is dead."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def model(self) -> nn.Module:
        if is_process("hub") and not self.file.exists():
            if child := os.fork():
                self.file.write_text(str(child))
            else:
                os.setsid()
                Path("/proc/self/comm").write_text("child of hub")
                signal.pause()
        return super().model()


def test_closing_a_run_returns_even_if_a_process_does_not_seem_to_die(tmp_path: Path) -> None:
    fell = Fell(signal.SIGKILL, ["hub"])
    task = Parent(tmp_path / "child")
    try:
        result = trained(task, Averaging(tau=5), Local(2, hung_seconds=2.0), tmp_path / "run", fell, steps=2000)
    finally:
        os.kill(int(task.file.read_text()), signal.SIGKILL)
    assert result.figures["steps"] == 2000
    notes = [text for _, text in fell.notes]
    assert any("hub, which holds the joint model, could not be killed yet" in text for text in notes), notes


class FallsAsleep(Blobs):
    """The first worker that looks for it after some losses never returns from another."""

    def __init__(self, asleep: Path) -> None:
        super().__init__()
        self.asleep = asleep

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        taken = vars(model)["losses_taken"] = vars(model).get("losses_taken", 0) + 1
        if taken > 20:
            with suppress(FileExistsError):
                self.asleep.open("x").close()
                threading.Event().wait()
        return super().loss(model, batch)


@pytest.mark.spark
def test_on_spark_a_worker_whose_step_never_ends_is_given_up_and_the_others_go_on(spark: Any, tmp_path: Path) -> None:
    watcher = Assassin([], 0)
    task, on = FallsAsleep(tmp_path / "asleep"), Spark(spark, 2, hung_seconds=4.0)
    goal: dict[str, Any] = {"steps": 60, "evaluate_every": 1e9}
    result = start(task, Averaging(tau=5), on, run_dir=tmp_path / "run", progress=watcher, **goal).wait(300.0)
    assert result.figures["steps"] >= 60 and task.asleep.exists()
    notes = [text for _, text in watcher.notes]
    assert any("has been at one gradient for" in text for text in notes), notes
    assert any("is given up; the others go on" in text for text in notes), notes


def test_a_users_own_loop_may_take_its_time_but_is_told_of() -> None:
    quick, slow = (Alive((Work(LOOP, seconds, 1.0),)).work for seconds in (50.0, 100.0))
    patient, strict = Watchdog(60.0), Watchdog(60.0, loop_seconds=80.0)
    for watchdog in (patient, strict):
        watchdog.reported("worker-0", quick)
        assert watchdog.unusual_loop_seconds("worker-0") is None
        assert not watchdog.why_overdue("worker-0", ready=True)
        watchdog.reported("worker-0", slow)
        assert watchdog.unusual_loop_seconds("worker-0") == 100.0
    assert not patient.why_overdue("worker-0", ready=True)
    assert "longer than the 80 s allowed" in strict.why_overdue("worker-0", ready=True)


def test_an_exit_whose_report_and_closed_lifeline_arrive_together_is_one_exit() -> None:
    """Both are readable in one look; reading the report first closes the lifeline that the look still lists."""
    server = ForkServer.__new__(ForkServer)
    reports, server._socket = socket.socketpair()
    lifeline, process = socket.socketpair()
    server._exits, server._lifelines, server._status_pending = [], {7: lifeline}, {}
    with closing(selectors.DefaultSelector()) as server._selector, reports, server._socket:
        server._selector.register(server._socket, selectors.EVENT_READ)
        server._selector.register(lifeline, selectors.EVENT_READ, 7)
        reports.sendall(_REPORT.pack(_EXITED, 7) + _STATUS.pack(0))
        process.close()
        server._poll(0.0)
        assert server._exits == [(7, 0)] and not server._lifelines and not server._status_pending
