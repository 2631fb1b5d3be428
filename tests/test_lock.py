"""A run directory has one run at a time, and a process that dies leaves it free."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch import nn

from tether import Local, Sim, Single, UsageError, resume, run
from tether.errors import TetherError
from tether.execution.directory import RunDirectory
from tether.execution.progress import Progress, make_progress
from tether.testing.conformance import Blobs, descendants, train_quietly

QUIET = make_progress(quiet=True)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    train_quietly(Blobs(), Single(), Sim(1), tmp_path / "run", steps=10)
    return tmp_path / "run"


class Held(Blobs):
    """A task whose evaluation waits for permission to end."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.may_end = threading.Event(), threading.Event()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.running.set()
        assert self.may_end.wait(60)
        return {"error": 0.5}


def test_two_resumes_in_one_process_do_not_run_at_the_same_time(finished: Path) -> None:
    task, results = Held(), list[int]()
    first = threading.Thread(
        target=lambda: results.append(resume(finished, task, steps=20, progress=QUIET).figures["steps"])
    )
    first.start()
    assert task.running.wait(60)
    try:
        with pytest.raises(UsageError, match=rf"{re.escape(str(finished))} is in use by process {os.getpid()} on .*"):
            resume(finished, Blobs(), steps=30, progress=QUIET)
    finally:
        task.may_end.set()
        first.join(60)
    assert results == [20]
    assert resume(finished, Blobs(), steps=30, progress=QUIET).figures["steps"] == 30


OTHER = """
import sys
from torch import nn
from tether import Local, Single, resume, run
from tether.execution.progress import Progress, make_progress
from tether.execution.directory import RunDirectory
from tether.testing.conformance import Blobs

class Told(Progress):
    def meter(self, meter, time):
        if meter.steps:
            print("running", flush=True)

if sys.argv[1] == "run":
    run(Blobs(), Single(), Local(1), steps=10_000_000, run_dir=sys.argv[2], progress=Told())
else:
    resume(sys.argv[2], Blobs(), steps=10_000_000, progress=Told())
"""


def other_process(what: str, path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", OTHER, what, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    return process


def test_the_error_names_the_process_that_holds_the_directory_and_its_death_frees_it_at_once(finished: Path) -> None:
    config = RunDirectory.open(finished).read_config()
    RunDirectory.open(finished).write_config({**config, "runtime": Local(1).describe()})
    process = other_process("resume", finished)
    nodes = descendants(process.pid)
    assert nodes, "it has a fork server and a node, and neither may keep the lock when the driver dies"
    try:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(UsageError, match=rf"is in use by process {process.pid} on "):
            resume(finished, Blobs(), steps=30, progress=QUIET)
        for pid in nodes.values():
            os.kill(pid, signal.SIGSTOP)  # so that they outlive the driver
        process.kill()
        process.wait()
        with pytest.raises(TetherError) as error:
            resume(finished, Blobs(), steps=1, progress=QUIET)
        assert "steps are made already" in str(error.value)
    finally:
        process.kill()
        for pid in nodes.values():
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_stale_process_id_prevents_no_resume(finished: Path) -> None:
    """The run.json of a killed run says that it is running, with a process id that another process may have now."""
    config = RunDirectory.open(finished).read_config()
    RunDirectory.open(finished).write_config({**config, "status": "running", "pid": os.getppid()})
    assert resume(finished, Blobs(), steps=20, progress=QUIET).figures["steps"] == 20


def test_a_new_run_is_not_started_where_one_is_running(tmp_path: Path) -> None:
    class Second(Progress):
        error: UsageError | None = None

        def begin(self, title: str, workers: object, steps: int) -> None:
            (tmp_path / "run" / "run.json").unlink()
            with pytest.raises(UsageError, match=f"is in use by process {os.getpid()}") as caught:
                train_quietly(Blobs(), Single(), Sim(1), tmp_path / "run", steps=10)
            self.error = caught.value

    second = Second()
    run(Blobs(), Single(), Sim(1), steps=10, run_dir=tmp_path / "run", progress=second)
    assert second.error is not None


def test_a_forked_child_of_the_driver_does_not_keep_the_directory(finished: Path) -> None:
    """Such as a DataLoader's processes, which outlive a killed driver for a while."""
    reading, writing = os.pipe()

    class Forking(Progress):
        child = 0

        def begin(self, title: str, workers: object, steps: int) -> None:
            self.child = os.fork()
            if self.child == 0:
                os.read(reading, 1)
                os._exit(0)

    forking = Forking()
    try:
        resume(finished, Blobs(), steps=20, progress=forking)
        assert forking.child
        assert resume(finished, Blobs(), steps=30, progress=QUIET).figures["steps"] == 30
    finally:
        os.write(writing, b"x")
        os.waitpid(forking.child, 0)
        os.close(reading)
        os.close(writing)
