"""Processes on one machine, linked by ZeroMQ and shared memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tether.errors import RunError
from tether.machine import Node
from tether.runtimes.base import Observer, Outcome, Plan
from tether.runtimes.driver import Came, Died, Driver, check_processes
from tether.runtimes.launch import Nursery
from tether.runtimes.liveness import START_SECONDS
from tether.runtimes.memory import Region, create
from tether.runtimes.process import SHARED, TOLD, Birth, birth_certificate


@dataclass(frozen=True)
class Local:
    """Where to run: this machine, one process per worker and one for the hub."""

    workers: int = 2
    #: intra-operation threads of torch in each process
    threads: int = 1
    #: how often a run that has lost its hub or all its workers goes on by itself, from its last backup
    restarts: int = 3
    #: a process that has not responded or made progress for so long is killed; slow steps may take five times as long
    #: as the longest so far
    hung_seconds: float = 60.0

    name = "local"
    virtual = False

    @property
    def processors(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def __post_init__(self) -> None:
        check_processes(self.workers, self.threads, self.restarts, self.hung_seconds)

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        driver = Driver(plan, observer, self.hung_seconds)
        with ExitStack() as at_the_end:
            at_the_end.callback(driver.close)
            if plan.shares:  # the vector of all nodes, which outlives each of them
                shared = _share(driver.directory, plan.vector_bytes)
                at_the_end.callback(lambda: shared.close_descriptor())
            return driver.run([(Children(Birth(plan, driver.directory, self.threads)), list(plan.nodes))])

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "threads": self.threads,
            "restarts": self.restarts,
            "hung_seconds": self.hung_seconds,
        }


class Children:
    """A crew of processes on this machine, forked from a nursery."""

    def __init__(self, birth: Birth) -> None:
        self._birth = birth
        self._logs: dict[str, IO[bytes] | None] = {}
        self._nursery = Nursery(self._log("nursery"))
        self._names: dict[int, str] = {}

    def start(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            pid = self._nursery.bear(
                birth_certificate(self._birth, node, list(sys.path)), self._log(node.name), START_SECONDS
            )
            self._names[pid] = node.name

    def fileno(self) -> int:
        return self._nursery.fileno()

    def news(self) -> list[Came | Died]:
        # one whose status is unknown may have told its error
        return [Died(self._names[pid], _how(status), status in (TOLD, None)) for pid, status in self._nursery.deaths()]

    def end(self, name: str) -> None:
        for pid, other in self._names.items():
            if other == name:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def output(self, name: str) -> str:
        log = self._logs.get(name)
        text = Path(log.name).read_text(errors="replace").strip() if log is not None else ""
        return f"it printed: {text[-1000:]}" if text else ""

    def close(self, seconds: float) -> None:
        self._nursery.close(seconds)
        for log in filter(None, self._logs.values()):
            log.close()

    def _log(self, name: str) -> IO[bytes] | None:
        self._logs[name] = self._birth.plan.log(name)
        return self._logs[name]


def _how(status: int | None) -> str:
    if status is None:
        return "has died, and the fork server has not told how"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _share(directory: Path, size: int) -> Region:
    try:
        return create(directory, SHARED, size)
    except OSError as error:
        raise RunError(
            f"processes cannot share memory here ({error}): use consistent=True and apply='server'"
        ) from error
