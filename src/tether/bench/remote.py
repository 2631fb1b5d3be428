"""Runs of Tether and functions of one's own on emulated hosts: workers on some, and the caller's function on one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from tether.errors import RunError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.protocols import Options
from tether.runtimes.base import Observer, Outcome
from tether.runtimes.cluster import Cluster, make_key
from tether.task import Task
from tether.testing.hosts import Host

PORT = 7000
#: of what a failed process printed
BYTES_SHOWN = 2000
#: how often interfaces are read
WATCH_SECONDS = 0.2


def call_on(host: Host, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns that runs in a process of its own on a host, with one thread."""
    with tempfile.TemporaryDirectory(prefix="tether-bench-") as folder:
        given, found, printed = (Path(folder, name) for name in ("given", "found", "printed"))
        given.write_bytes(cloudpickle.dumps((function, arguments)))
        with printed.open("wb") as output:
            status = subprocess.run(
                [*host.words, sys.executable, "-m", "tether.bench.remote", str(given), str(found)],
                stdout=output,
                stderr=output,
                env=_environment(),
                check=False,
            ).returncode
        if status:
            said = printed.read_text(errors="replace")[-BYTES_SHOWN:]
            raise RunError(f"a process on {host.address} ended with status {status}. It printed:\n{said}")
        return cloudpickle.loads(found.read_bytes())


@dataclass(frozen=True)
class Reading:
    """The bytes that each host had sent and received at a time."""

    at: float
    counts: tuple[tuple[int, int], ...]


class Interfaces:
    """The counters of hosts' interfaces, headers of packets included."""

    def __init__(self, places: Sequence[Host]) -> None:
        self._places = places
        self.readings: list[Reading] = []

    def read(self) -> None:
        counts = tuple(host.bytes_sent_and_received() for host in self._places)
        self.readings.append(Reading(time.monotonic(), counts))

    def rates(self, since: float, until: float) -> list[tuple[float, float]]:
        """Bytes per second that each host sent and received in that time."""
        inside = [reading for reading in self.readings if since <= reading.at <= until]
        if len(inside) < 2:
            raise RunError("the interfaces were not read twice in the time that is measured: measure for longer")
        first, last = inside[0], inside[-1]
        seconds = last.at - first.at
        return [
            ((b[0] - a[0]) / seconds, (b[1] - a[1]) / seconds) for a, b in zip(first.counts, last.counts, strict=True)
        ]


@contextmanager
def cluster(driver: Host, others: Sequence[Host], *, encrypt: bool = True) -> Iterator[Cluster]:
    """A worker on each of these hosts, for one run whose driver and hub are on the first."""
    with tempfile.TemporaryDirectory(prefix="tether-bench-") as folder:
        key = Path(folder, "key")
        make_key(key)
        words = ["worker", f"{driver.address}:{PORT}", "--key", str(key), "--accept-code", "--wait", "300"]
        log = Path(folder, "workers").open("wb")  # noqa: SIM115 - closed below
        workers = [
            subprocess.Popen(
                [*host.words, sys.executable, "-m", "tether", *words], stdout=log, stderr=log, env=_environment()
            )
            for host in others
        ]
        try:
            yield Cluster(f"{driver.address}:{PORT}", str(key), workers=len(others), encrypt=encrypt, hung_seconds=60)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait()
            log.close()


def execute(task: Task, options: Options, on: Cluster, request: Request, observer: Any) -> tuple[Outcome, Any]:
    """A run without a directory; to be called on the host of the driver."""
    watched: Observer = observer
    return on.execute(RunPlan.make(task, options, on, request, None), watched), observer


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    given, found = map(Path, sys.argv[1:])
    function, arguments = cloudpickle.loads(given.read_bytes())
    found.write_bytes(cloudpickle.dumps(function(*arguments)))


if __name__ == "__main__":
    _main()
