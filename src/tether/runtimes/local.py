"""Processes on one machine, linked by ZeroMQ and shared memory."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.core.device import check_device
from tether.errors import RunError
from tether.runtimes.base import Observer, Outcome, Plan
from tether.runtimes.process.driver import Driver, check_processes
from tether.runtimes.process.local_launcher import LocalLauncher
from tether.runtimes.process.memory import Region, create_region
from tether.runtimes.process.script_driver import ScriptDriver
from tether.runtimes.process.spec import SHARED_VECTOR, NodeSpec


@dataclass(frozen=True)
class Local:
    """Where to run: this machine, one process per worker and one for the hub."""

    workers: int = 2
    #: intra-operation threads of torch in each process
    threads: int = 1
    #: how often a run that has lost its hub or all its workers resumes by itself, from its last checkpoint, and how
    #: often the script of a launched process that has died is started again
    restarts: int = 3
    #: a process that has not responded or made progress for this long is killed; a step may take five times as long as
    #: the longest so far if that is more
    hung_seconds: float = 60.0
    #: where workers compute: "cuda:0", "cuda" for all such devices in turns, "cpu" or "auto"; by default the task says
    device: str | None = None

    name = "local"
    virtual = False

    @property
    def processors(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def __post_init__(self) -> None:
        check_processes(self.workers, self.threads, self.restarts, self.hung_seconds)
        if self.device is not None:
            check_device(self.device)

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        driver: Driver
        if plan.scripted:
            driver = ScriptDriver(plan, observer, self.hung_seconds, self.restarts)
        else:
            driver = Driver(plan, observer, self.hung_seconds)
        with ExitStack() as at_the_end:
            at_the_end.callback(driver.close)
            if plan.shares:  # the vector of all nodes, which outlives each of them
                shared = _create_shared_vector(driver.directory, plan.vector_bytes)
                at_the_end.callback(lambda: shared.close_descriptor())
            return driver.run([(LocalLauncher(NodeSpec(plan, driver.directory, self.threads)), list(plan.nodes))])

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "threads": self.threads,
            "restarts": self.restarts,
            "hung_seconds": self.hung_seconds,
            "device": self.device,
        }


def _create_shared_vector(directory: Path, size: int) -> Region:
    try:
        return create_region(directory, SHARED_VECTOR, size)
    except OSError as error:
        raise RunError(
            f"processes cannot share memory here ({error}): use consistent=True and apply='server'"
        ) from error
