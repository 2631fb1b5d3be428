"""Real processes that are really killed: what is noticed, what goes on, and that nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tether import (
    Averaging,
    Elastic,
    Interrupted,
    Local,
    Mpca,
    Result,
    RunError,
    Server,
    Sim,
    TaskError,
    UsageError,
    resume,
    run,
)
from tether.core.message import Message
from tether.core.trace import Meter
from tether.core.vector import Vector, digest
from tether.errors import NodesLost
from tether.execution.progress import Progress, make_progress
from tether.protocols import Options
from tether.runtimes.process import control
from tether.runtimes.process.link import Outbox
from tether.testing.conformance import Assassin, Blobs, at_this_load, descendants, largest_difference, train_quietly

pytestmark = [
    pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc"),
]


def mapped(pid: int, what: str) -> set[str]:
    """The files with this in their names that a process has mapped, but for what only waits to be collected."""
    gc.collect()
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if what in line}


def nothing_is_left() -> bool:
    return not descendants(os.getpid())


class Wide(Blobs):
    """Large enough that its tensors are lent."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8000), nn.BatchNorm1d(8000), nn.ReLU(), nn.Linear(8000, 2))


def test_a_killed_worker_is_noticed_at_once_and_the_others_finish(tmp_path: Path) -> None:
    assassin = Assassin(["worker-1"], steps=5)
    result = run(Wide(), Averaging(tau=2), Local(3), steps=300, run_dir=tmp_path / "run", progress=assassin)
    assert result.figures["steps"] == 300
    assert result.metrics["error"] < 0.1
    noticed_at, text = next(note for note in assassin.notes if "died" in note[1] or "killed" in note[1])
    assert text == "worker-1 was killed by SIGKILL; the others go on"
    assert noticed_at - assassin.killed_at < at_this_load(1.0)
    assert nothing_is_left() and not mapped(os.getpid(), "/memfd:tether-")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    workers = [row["workers"] for row in rows if row["kind"] == "record"]
    assert workers[0] == 3 and workers[-1] == 2


def test_hardsync_goes_on_without_a_killed_learner(tmp_path: Path) -> None:
    assassin = Assassin(["worker-0"], steps=5)
    result = run(Wide(), Server(), Local(2), steps=500, run_dir=tmp_path / "run", progress=assassin)
    assert result.figures["steps"] == 500 and result.metrics["error"] < 0.1
    assert set(result.figures["staleness"]["histogram"]) == {"0"}
    assert assassin.killed_at and nothing_is_left() and not mapped(os.getpid(), "/memfd:tether-")


@pytest.mark.parametrize(
    "options",
    [
        Server(sync="async"),
        Server(sync="async", overlap=True),
        Averaging(tau=2, compress="fp16"),
        Elastic(tau=2),
        Mpca(),
    ],
    ids=str,
)
def test_with_shared_memory_the_others_go_on_when_one_is_killed_and_nothing_is_left(
    options: Options, tmp_path: Path
) -> None:
    assassin = Assassin(["worker-1"], steps=5)
    result = run(Wide(), options, Local(3), steps=800, run_dir=tmp_path / "run", progress=assassin)
    assert result.figures["steps"] >= 800
    assert result.metrics["error"] < 0.3  # of 0.5 by chance; on a busy machine asynchronous steps are very stale
    assert assassin.killed_at and nothing_is_left()
    assert not mapped(os.getpid(), "/memfd:tether-")


def test_hardsync_of_a_large_model_equals_the_simulated(tmp_path: Path) -> None:
    real, simulated = (
        train_quietly(Wide(), Server(), on, tmp_path / on.name, steps=20) for on in (Local(2), Sim(workers=2))
    )
    assert largest_difference(real.model, simulated.model) < 1e-5


def test_a_killed_hub_ends_the_run_with_its_name_and_the_run_resumes_with_other_workers(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"hub, which holds the joint model, was killed by SIGKILL.*tether resume"):
        run(
            Blobs(),
            Server(),
            Local(2, restarts=0),
            epochs=400,
            checkpoint_seconds=0.05,
            run_dir=tmp_path / "run",
            progress=Assassin(["hub"], steps=300),
        )
    assert nothing_is_left()
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert config["status"] == "failed" and "hub" in config["error"]
    result = resume(tmp_path / "run", Blobs(), workers=3, epochs=60, progress=make_progress(quiet=True))
    assert result.figures["workers"] == 3
    assert result.figures["samples"] >= 60 * 1000
    assert result.metrics["error"] < 0.1


def test_when_every_worker_is_killed_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no worker is left"):
        run(
            Blobs(),
            Averaging(tau=5),
            Local(2, restarts=0),
            steps=100_000,
            run_dir=tmp_path / "run",
            progress=Assassin(["worker-0", "worker-1"], steps=20),
        )
    assert nothing_is_left()


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        (Server(sync="async"), ["hub"]),
        (Server(sync="async", apply="inline"), ["worker-0", "worker-1"]),
        (Averaging(tau=5), ["hub", "worker-0", "worker-1"]),
    ],
    ids=["hub", "all learners", "everybody"],
)
def test_a_run_that_has_lost_its_hub_or_all_its_workers_goes_on_by_itself(
    options: Options, victims: list[str], tmp_path: Path
) -> None:
    assassin = Assassin(victims, steps=800)
    # when all workers have died the hub saves what it has, so it needs no other backup
    # and so many steps that it has not made them all when the news of the 800th arrives
    goal = {"steps": 8000, "checkpoint_seconds": 0.05 if "hub" in victims else 1e6, "evaluate_every": 1e9}
    result = run(Blobs(), options, Local(2), run_dir=tmp_path / "run", progress=assassin, **goal)  # type: ignore[arg-type]
    assert result.figures["steps"] == 8000 and result.metrics["error"] < 0.1
    (told,) = [text for _, text in assassin.notes if "resuming from" in text]
    assert int(told.rpartition(" ")[2]) > 100, "and not from the beginning"
    assert nothing_is_left()


def test_a_run_goes_on_by_itself_only_so_often(tmp_path: Path) -> None:
    class Relentless(Assassin):
        def meter(self, meter: Meter, time_: float) -> None:
            self.victims = ["hub"] if "hub" in descendants(os.getpid()) else []
            super().meter(meter, time_)

    relentless = Relentless([], steps=20)
    with pytest.raises(NodesLost, match="hub"):
        run(Blobs(), Server(), Local(2, restarts=1), steps=10**6, run_dir=tmp_path / "run", progress=relentless)
    assert len([text for _, text in relentless.notes if "resuming from" in text]) == 1 and nothing_is_left()


def test_a_process_that_stands_still_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    class Paralyser(Assassin):
        signal = signal.SIGSTOP

    paralyser = Paralyser(["worker-1"], steps=20)
    local = Local(2, hung_seconds=2.0)
    result = run(Blobs(), Averaging(tau=5), local, steps=3000, run_dir=tmp_path / "run", progress=paralyser)
    assert result.figures["steps"] == 3000 and result.metrics["error"] < 0.1
    notes = [text for _, text in paralyser.notes]
    assert "worker-1 has not responded for 2 s and is killed" in notes
    assert any("worker-1 was killed by SIGKILL" in text for text in notes) and nothing_is_left()


def test_in_mpca_the_others_go_on_while_a_process_stands_still(tmp_path: Path) -> None:
    class Paralyser(Assassin):
        signal = signal.SIGSTOP

    paralyser = Paralyser(["worker-1"], steps=20)
    local = Local(3, hung_seconds=600.0)
    result = run(Blobs(), Mpca(), local, steps=300, run_dir=tmp_path / "run", progress=paralyser)
    assert result.figures["reason"] == "all steps made" and result.metrics["error"] < 0.1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    workers = [row["workers"] for row in rows if row["kind"] == "record"]
    assert 3 in workers and max(workers[-5:]) < 3 and nothing_is_left()


def tether_train(directory: Path, arguments: list[str], temporary: str | None = None) -> subprocess.Popen[bytes]:
    """A run on the command line that would take long, once it is under way; `temporary` is for its temporary files."""
    file = directory / "task.py"
    file.write_text("from tether.testing.conformance import Blobs\nclass Small(Blobs): ...\n")
    command = [sys.executable, "-m", "tether", "train", f"{file}:Small", "--epochs", "1e6", "--run", "run", *arguments]
    environment = {**os.environ, **({"TMPDIR": temporary} if temporary else {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=directory, start_new_session=True, env=environment, **pipes)
    metrics = directory / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"evaluation"' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, "did not get under way"
        time.sleep(0.05)  # another process is waited for
    return process


def gone(processes: dict[str, int], within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    while any(Path(f"/proc/{pid}").exists() for pid in processes.values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_run_ends_within_3_seconds_with_its_result_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = tether_train(tmp_path, ["--workers", "2"])
    nodes = descendants(process.pid)
    assert {"hub", "worker-0", "worker-1"} <= set(nodes)
    began = time.monotonic()
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < at_this_load(3.0)
    assert process.returncode == 130
    assert gone(nodes, at_this_load(0.5))
    assert b"interrupted by the user" in said and b"error " in said
    assert b"Traceback" not in errors and errors.count(b"continue with 'tether resume run'") == 1
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (config["status"], config["reason"]) == ("interrupted", "interrupted by the user")
    assert config["result"]["metrics"]["error"] < 0.1
    further = resume(
        tmp_path / "run", epochs=config["result"]["samples"] / 1000 + 3, progress=make_progress(quiet=True)
    )
    assert further.figures["samples"] > config["result"]["samples"]


def test_a_run_in_the_background_of_a_shell_ignores_ctrl_c_as_it_should_and_ends_when_it_is_terminated(
    tmp_path: Path,
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `command &` does in a script
    try:
        process = tether_train(tmp_path, ["--workers", "2"])
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    under_way = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    while (tmp_path / "run" / "metrics.jsonl").stat().st_size == under_way:
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and b"interrupted by the user" in said


class Impatient(Progress):
    """A display that interrupts its own program, so many times, once a worker has made some steps."""

    def __init__(self, steps: int, times: int = 1) -> None:
        self.steps = steps
        self.times = times
        self.interrupted_at = 0.0

    def meter(self, meter: Meter, time_: float) -> None:
        self._interrupt(meter.steps)

    def evaluation(self, metrics: dict[str, float], time_: float, step: int) -> None:
        self._interrupt(step)

    def _interrupt(self, step: int) -> None:
        while self.times and step >= self.steps:
            self.times -= 1
            self.interrupted_at = time.monotonic()
            signal.raise_signal(signal.SIGINT)

    def was_obeyed(self) -> bool:
        """Whether the run has ended as soon as is promised."""
        return time.monotonic() - self.interrupted_at < at_this_load(3.0)


def result_of(interrupted: Interrupted) -> Result:
    """What a run had come to. A run that ends in time comes first: on a machine that is very busy, it may have none."""
    if interrupted.result is None and at_this_load(1.0) > 3.0:
        pytest.skip("the machine is too busy for a run to end in good order within 3 seconds")
    assert isinstance(interrupted.result, Result)
    return interrupted.result


@pytest.mark.parametrize("on", [Sim(2), Local(2)], ids=["sim", "local"])
def test_ctrl_c_in_a_program_carries_the_model_that_the_run_had_come_to(on: Any, tmp_path: Path) -> None:
    goal = {"steps": 10**6, "evaluate_every": 1.0 if on.virtual else 1e9, "run_dir": tmp_path / "run"}
    impatient = Impatient(200)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(Blobs(), Averaging(tau=5), on, progress=impatient, **goal)
    assert impatient.was_obeyed()
    assert isinstance(stopped.value, Interrupted)
    result = result_of(stopped.value)
    assert result.figures["reason"] == "interrupted by the user" and 100 < result.figures["steps"] < 10**6
    assert result.metrics["error"] < 0.1 and digest(Vector(result.model).weights) == result.figures["digest"]
    assert result.directory == stopped.value.directory == tmp_path / "run" and nothing_is_left()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    further = resume(tmp_path / "run", Blobs(), steps=result.figures["steps"] + 10, progress=make_progress(quiet=True))
    assert further.figures["steps"] == result.figures["steps"] + 10


class Slow(Blobs):
    """After some steps a gradient takes far longer than anybody waits, and its caller is interrupted in it."""

    def __init__(self, told: Path) -> None:
        super().__init__()
        self.caller = os.getpid()
        self.told = told

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        taken = vars(model)["losses_taken"] = vars(model).get("losses_taken", 0) + 1
        if taken == 2000:
            with suppress(FileExistsError):  # the other worker has
                self.told.touch(exist_ok=False)
                os.kill(self.caller, signal.SIGINT)
            time.sleep(1000.0)
        return super().loss(model, batch)


def test_ctrl_c_does_not_wait_for_a_slow_gradient_and_carries_the_model_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as stopped:
        train_quietly(
            Slow(tmp_path / "told"), Averaging(tau=5), Local(2), tmp_path / "run", steps=10**6, evaluate_every=1e9
        )
    assert result_of(stopped.value).figures["steps"] >= 1000 and nothing_is_left()


class Thorough(Blobs):
    """The evaluation of a trained model takes longer than anybody waits."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if vars(self).setdefault("evaluated", False):
            time.sleep(10.0)
        self.evaluated = True
        return super().evaluate(model)


def test_ctrl_c_does_not_wait_for_a_slow_evaluation_and_carries_the_model_without_metrics(tmp_path: Path) -> None:
    impatient, goal = Impatient(200), {"steps": 10**6, "evaluate_every": 1e9, "run_dir": tmp_path / "run"}
    with pytest.raises(Interrupted) as stopped:
        run(Thorough(), Averaging(tau=5), Local(2), progress=impatient, **goal)  # type: ignore[arg-type]
    assert impatient.was_obeyed()
    result = result_of(stopped.value)
    assert result.figures["steps"] > 100 and result.metrics == {}


def test_a_second_ctrl_c_ends_a_run_at_once_without_a_result(tmp_path: Path) -> None:
    # no evaluation on the way: both signals come in the main thread, where two are not one
    goal = {"steps": 10**6, "evaluate_every": 1e9, "run_dir": tmp_path / "run"}
    with pytest.raises(Interrupted, match="without a result") as stopped:
        run(Blobs(), Averaging(tau=5), Local(2), progress=Impatient(1, times=2), **goal)  # type: ignore[arg-type]
    assert stopped.value.result is None and nothing_is_left()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"


class Hasty(Progress):
    """Interrupts its own program while processes start."""

    def starting(self, processes: int) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_the_processes_start_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        Interrupted, match=r"interrupted without a result and without a checkpoint: start the run again"
    ):
        run(Blobs(), Averaging(tau=5), Local(2), steps=10**6, run_dir=tmp_path / "run", progress=Hasty())
    assert nothing_is_left()


class Lengthy(Blobs):
    """Its evaluation in the simulator takes far longer than anybody waits."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if vars(self).setdefault("evaluated", False):
            signal.raise_signal(signal.SIGINT)
            time.sleep(1000.0)
        self.evaluated = True
        return {"error": 0.5}


def test_ctrl_c_in_an_evaluation_that_takes_too_long_ends_the_run_without_a_result(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as stopped:
        train_quietly(Lengthy(), Averaging(tau=5), Sim(2), tmp_path / "run", epochs=4)
    assert stopped.value.result is None


def test_a_handler_of_the_programs_own_is_left_alone(tmp_path: Path) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        result = run(Blobs(), Averaging(tau=5), Sim(2), steps=50, run_dir=tmp_path / "run", progress=Impatient(20))
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT] and result.figures["reason"] == "all steps made"


def test_after_kill_9_of_the_driver_no_process_is_left_and_the_run_resumes(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:  # of a short name, since the paths of sockets cannot be long
        process = tether_train(tmp_path, ["--workers", "2", "--checkpoint-seconds", "0.1"], temporary)
        nodes = descendants(process.pid)
        for name in ("hub", "worker-0", "worker-1"):
            assert mapped(nodes[name], "/memfd:tether-") and not mapped(nodes[name], "/dev/shm")
        assert list(Path(temporary).glob("tether-*"))
        while not list((tmp_path / "run" / "checkpoints").glob("at-*")):
            time.sleep(0.05)
        with pytest.raises(UsageError, match="is in use by process"):
            resume(tmp_path / "run")
        process.kill()
        process.communicate()
        assert gone(nodes, at_this_load(3.0))
        assert not list(Path(temporary).glob("tether-*"))
    states = (tmp_path / "run" / "checkpoints").glob("at-*/state.json")
    samples = max(json.loads(state.read_text())["samples"] for state in states)
    result = resume(tmp_path / "run", epochs=samples / 1000 + 10, progress=make_progress(quiet=True))
    assert result.metrics["error"] < 0.05


SESSION = """
import tether, torch, os, signal, threading, time
from torch import nn
from torch.utils.data import TensorDataset
from tether.execution.progress import make_progress

class Here(tether.Task):
    def model(self): return nn.Linear(2, 2)
    def train_data(self): return TensorDataset(torch.randn(100, 2), torch.arange(100) % 2)
    def loss(self, model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])

def go(name, **goal):
    quiet = make_progress(quiet=True)
    return tether.run(Here(), tether.Averaging(tau=2), tether.Local(2), run_dir=name, progress=quiet, **goal)

print(go("one", epochs=2).figures["steps"])
def interrupt_soon():
    while not os.path.exists("two/metrics.jsonl") or not os.path.getsize("two/metrics.jsonl"):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt_soon).start()
try:
    go("two", steps=10_000_000)
except KeyboardInterrupt:
    print("interrupted")

print(go("three", epochs=2).figures["steps"])
print(len([t for t in threading.enumerate() if t is not threading.main_thread()]), "threads left")
"""


def test_a_task_defined_in_a_session_runs_is_interrupted_and_runs_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=textwrap.dedent(SESSION), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4", "interrupted", "4", "0 threads left"]


class Chatty(Blobs):
    """Prints, and fails in the worker's own code."""

    def loss(self, model, batch):  # type: ignore[no-untyped-def]
        print("something the user prints")
        raise ValueError("no such thing")


def test_an_exception_in_the_task_names_worker_step_and_line_and_its_output_is_kept(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"worker-\d, step 1: ValueError: no such thing \(.*test_local.py:\d+, in loss\)"
    ):
        train_quietly(Chatty(), Averaging(tau=5), Local(2), tmp_path / "run", steps=10)
    printed = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("worker-*.log"))
    assert "something the user prints" in printed
    assert nothing_is_left()


def test_a_node_that_is_spoken_to_before_it_is_told_to_begin_keeps_it_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of different senders overtake each other; the first event of every node is that it is started."""
    send = Outbox.send

    def late(self: Outbox, to: str, message: Message) -> None:
        if to == "hub" and isinstance(message, control.Begin):
            threading.Timer(0.5, send, (self, to, message)).start()
        else:
            send(self, to, message)

    monkeypatch.setattr(Outbox, "send", late)
    result = train_quietly(Blobs(), Elastic(tau=2), Local(2), tmp_path / "run", steps=20)
    assert result.figures["steps"] == 20
