"""Conformance kits, which every protocol and every runtime must pass; with the helpers that tests of runs share.

`check_protocol`, `check_messages` and `check_runtime` are the kits.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tether.api import Result, replay_recorded, resume, run
from tether.core.message import Message, tensors_of
from tether.core.trace import Meter
from tether.core.wire import Codec
from tether.errors import TaskError
from tether.execution.progress import Progress, make_progress
from tether.protocols import Averaging, Options, Server, Single
from tether.runtimes.base import Runtime
from tether.runtimes.sim.costs import StepTime
from tether.runtimes.sim.faults import Faults
from tether.runtimes.sim.runtime import Sim
from tether.task import Task


@dataclass(frozen=True)
class CheckedSim(Sim):
    """A simulated cluster that checks invariants after every event and tensors after every transfer."""

    checked: bool = True


def check_protocol(options: Options, directory: Path) -> None:
    """Check the promises that every protocol makes, in the simulator.

    A run reaches its goal, learns, repeats bit for bit, replays, stops at a target, resumes, and survives faults.
    """
    workers = options.workers_max or 4
    uneven = CheckedSim(workers=workers, step_seconds=StepTime(0.1, spread=0.5), link="10mbit")
    recorded = not options.shares
    first = train_quietly(Blobs(), options, uneven, directory / "first", steps=40, record=recorded)
    assert first.figures["steps"] == 40, f"made {first.figures['steps']} steps of 40"
    assert first.metrics["error"] < 0.1, f"did not learn: {first.metrics}"

    again = train_quietly(Blobs(), options, uneven, directory / "again", steps=40, trace=False)
    assert again.figures["digest"] == first.figures["digest"], "a seed does not repeat, or tracing changes the result"
    other = train_quietly(Blobs(), options, uneven, directory / "other", steps=40, seed=1)
    assert other.figures["digest"] != first.figures["digest"], "the seed has no influence"

    if recorded:
        events = replay_recorded(directory / "first", Blobs())
        assert all(count > 0 for count in events.values()), f"nothing was recorded: {events}"

    stopped = train_quietly(Blobs(), options, uneven, directory / "stopped", until="error<0.5", evaluate_every=0.1)
    assert stopped.figures["reason"] == "error<0.5 reached", stopped.figures["reason"]

    further = resume(directory / "first", Blobs(), steps=60, progress=make_progress(quiet=True))
    assert further.figures["steps"] == 60, f"resumed to step {further.figures['steps']}, not 60"
    if workers > 1:
        fewer = resume(directory / "again", Blobs(), workers=2, steps=50, progress=make_progress(quiet=True))
        assert fewer.figures["workers"] == 2
        _check_faults(options, uneven, directory)


def _check_faults(options: Options, sim: Sim, directory: Path) -> None:
    schedules = {
        "crash": Faults().crash("worker-1", step=5),
        "first step": Faults().crash("worker-0", step=1).crash("worker-1", at=0.0),
        "restart": Faults().restart("worker-2", step=3, seconds=1.0),
        "pause": Faults().pause("worker-3", at=0.7, seconds=60),
        "slow": Faults().slow("worker-0", 10),
        "cut": Faults().cut("worker-1", options.hub or "worker-0", at=0.5, seconds=5),
    }
    for name, faults in schedules.items():
        result = train_quietly(Blobs(), options, replace(sim, faults=faults), directory / name, steps=40)
        assert result.figures["steps"] == 40, f"{name}: made {result.figures['steps']} steps of 40"
        assert result.metrics["error"] < 0.1, f"{name}: did not learn: {result.metrics}"


def check_messages(options: Options, examples: list[Message]) -> None:
    """Check that a protocol's messages survive the wire; `examples` must hold one of each type."""
    assert {type(example) for example in examples} == set(options.messages), "an example of every message is needed"
    codec = Codec(options.messages)
    for example in examples:
        back = codec.decode([bytes(frame) for frame in codec.encode(example)])
        assert type(back) is type(example)
        for sent, received in zip(tensors_of(example), tensors_of(back), strict=True):
            assert torch.equal(sent, received)


def check_runtime(
    make: Callable[[int], Runtime], directory: Path, *, workers_max: int = 4, records: bool = True
) -> None:
    """Check the promises that every runtime makes, with Tether's own protocols.

    make: builds the runtime for a number of workers.
    workers_max: the largest number of workers it has room for, at least 3.
    records: whether its runs can be recorded.
    """
    _check_hardsync(make, directory, workers_max)
    averaged = train_quietly(Blobs(), Averaging(tau=5), make(3), directory / "averaging", steps=40, record=records)
    assert averaged.metrics["error"] < 0.1, f"did not learn: {averaged.metrics}"
    assert averaged.figures["steps"] == 40
    if records:
        replay_recorded(directory / "averaging", Blobs())
    figures = averaged.figures
    assert figures["bytes_sent"] == figures["bytes_received"] > 0
    assert 0 < figures["utilization"]["mean"] <= 1 and 0 < figures["overlap"] <= 1
    assert (directory / "averaging" / "trace.json").exists()

    automatic = train_quietly(Blobs(), Averaging(), make(2), directory / "auto", steps=60)
    assert automatic.figures["steps"] == 60

    until = train_quietly(Blobs(), Single(), make(1), directory / "until", until="error<0.5", evaluate_every=0.1)
    assert until.figures["reason"] == "error<0.5 reached"

    try:
        train_quietly(_Explodes(), Averaging(tau=2), make(2), directory / "nan", steps=40)
    except TaskError as error:
        assert "worker-" in str(error) and "step 4" in str(error) and "nan" in str(error), str(error)
    else:
        raise AssertionError("a loss of NaN was not noticed")


def _check_hardsync(make: Callable[[int], Runtime], directory: Path, workers: int) -> None:
    """Rudra, equation 7: 4 workers of mini-batch 16 equal one of mini-batch 64 and the same learning rate."""
    alone = train_quietly(Blobs(16 * workers, norm=False), Single(), make(1), directory / "alone", steps=50)
    hard = Server(sync="hard", rate="none")
    together = train_quietly(Blobs(16, norm=False), hard, make(workers), directory / "together", steps=50)
    difference = largest_difference(alone.model, together.model)
    assert difference < 1e-5, f"hardsync differs from one worker by {difference}"
    assert together.figures["staleness"]["histogram"] == {"0": 50 * workers}


# ---- helpers that tests of runs share ----


class Blobs(Task):
    """Two clouds of points and a small network with BatchNorm: it learns within a second, and has buffers."""

    def __init__(self, batch_size: int = 16, norm: bool = True, momentum: float = 0.9) -> None:
        self.batch_size = batch_size
        self.norm = norm
        self.momentum = momentum

    def model(self) -> nn.Module:
        norm: nn.Module = nn.BatchNorm1d(8) if self.norm else nn.Identity()
        return nn.Sequential(nn.Linear(2, 8), norm, nn.ReLU(), nn.Linear(8, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=self.momentum)

    def train_data(self) -> TensorDataset:
        noise = torch.Generator().manual_seed(1)
        labels = torch.arange(1000) % 2
        points = torch.randn(1000, 2, generator=noise) + 3.0 * labels[:, None]
        return TensorDataset(points, labels)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        return nn.functional.cross_entropy(model(points), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        points, labels = self.train_data().tensors
        return {"error": float((model(points).argmax(1) != labels).float().mean())}


class _Explodes(Blobs):
    """The fourth loss of every model is NaN."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        taken = vars(model)["losses_taken"] = vars(model).get("losses_taken", 0) + 1
        return loss * float("nan") if taken == 4 else loss


def train_quietly(task: Task, protocol: Options | None, on: Runtime, directory: Path, **goal: Any) -> Result:
    """Run a task without a display, in the given run directory."""
    return run(task, protocol, on, run_dir=directory, progress=make_progress(quiet=True), **goal)


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """The largest absolute difference between corresponding values of two models."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


class Assassin(Progress):
    """A progress display that kills nodes of a local run, once, when some worker has made a number of steps."""

    signal = signal.SIGKILL

    def __init__(self, victims: list[str], steps: int) -> None:
        self.victims = victims
        self.steps = steps
        self.killed_at = 0.0
        self.notes: list[tuple[float, str]] = []

    def meter(self, meter: Meter, time_: float) -> None:
        if self.victims and meter.steps >= self.steps:
            nodes = descendants(os.getpid())
            for victim in self.victims:
                if victim in nodes:
                    with suppress(ProcessLookupError):  # it ended in the meantime
                        os.kill(nodes[victim], self.signal)
            self.victims = []
            self.killed_at = time.monotonic()

    def note(self, text: str) -> None:
        self.notes.append((time.monotonic(), text))


def descendants(pid: int) -> dict[str, int]:
    """The processes that descend from a process: their ids by name.

    Without the one with which Python's multiprocessing tracks resources: a DataLoader that starts processes by spawn
    leaves it to the end of the program.
    """
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            tracks = b"multiprocessing.resource_tracker" in (entry / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if int(parent) == pid and state != "Z" and not tracks:
            found[name] = int(entry.name)
            found.update(descendants(int(entry.name)))
    return found


def at_this_load(seconds: float) -> float:
    """A time limit, made longer if the machine is busy now.

    It grows by the ratio of elapsed time to processor time in a thread that does nothing but compute.
    """
    began, began_computing = time.monotonic(), time.thread_time()
    while time.thread_time() - began_computing < 0.1:
        pass
    return seconds * max(1.0, (time.monotonic() - began) / 0.1)
