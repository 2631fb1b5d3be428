"""Faults of machines and of the network between them: `tether chaos --on cluster`.

One run after the other trains on emulated hosts. The first host has the driver; each of the others has a `tether worker
--stay`. Many faults strike one run, one after the other: links go down and up again, processes are stopped or killed,
workers leave and join. After each fault all hosts must train again. A run that ended is resumed, as a user would resume
it. A process that was given up must have exited by itself. In the end the joint model must be as good as one that was
trained without faults.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.errors import RunError
from tether.testing.chaos import ERROR_EXCESS_MAX, living_processes
from tether.testing.hosts import Host, hosts

#: how many hosts have a worker
WORKERS = 4
LINK = "100mbit"
PORT = 7000
#: how long a link is down: shorter and longer than the driver waits for a machine that is silent
BLINK_SECONDS, OUTAGE_SECONDS = 2.0, 12.0
#: how long all hosts may take to train at first: all processes import torch at once
START_SECONDS = 300.0
#: how long all hosts may take to train again after a fault is over
RECOVERY_SECONDS = 120.0
#: how long a process that was given up may take to exit
FENCE_SECONDS = 20.0
#: an error that digits reach without faults within a few seconds
USUAL_ERROR = 0.04
#: the environment variable that marks all processes
_MARK = "TETHER_OUTAGES"


@dataclass(frozen=True)
class Outage:
    """What is done to a run, under which protocol."""

    kind: str
    protocol: str


#: the kinds of events, each of which occurs as often as any other
KINDS = (
    "link of a worker blinks",
    "link of a worker down and up",
    "link of the driver down and up",
    "worker stopped",
    "worker killed",
    "hub killed",
    "fork server killed",
    "driver killed",
    "worker joins",
    "half of the workers leave",
)


@dataclass(frozen=True)
class OutageOutcome:
    """How a run went on after an event; `failure` is empty if it did as it should."""

    outage: Outage
    #: from the end of the event until all hosts trained again
    seconds: float
    failure: str = ""


def schedule(events: int, seed: int, protocols: Sequence[str]) -> list[list[Outage]]:
    """Events in the order in which they strike; those of a list strike one run."""
    rng = random.Random(seed)
    kinds = [kind for start in range(0, events, len(KINDS)) for kind in rng.sample(KINDS, len(KINDS))][:events]
    each = math.ceil(events / len(protocols))
    return [
        [Outage(kind, protocol) for kind in kinds[number * each : (number + 1) * each]]
        for number, protocol in enumerate(protocols)
    ]


def outages(
    events: int,
    seconds: float,
    seed: int,
    protocols: Sequence[str],
    pause_seconds: float,
    each: Callable[[OutageOutcome], None],
) -> dict[str, Any]:
    """Let events strike runs until the time is up; report how the runs went on."""
    deadline = time.monotonic() + seconds
    outcomes: list[OutageOutcome] = []
    failures: list[str] = []
    errors: list[float] = []
    rng = random.Random(seed)
    for planned in schedule(events, seed, protocols):
        if not planned or time.monotonic() >= deadline:
            continue
        with _Cluster.start(planned[0].protocol, rng, pause_seconds) as cluster:
            cluster.await_training(WORKERS, START_SECONDS)
            for outage in planned:
                if time.monotonic() >= deadline:
                    break
                outcomes.append(cluster.strike(outage))
                each(outcomes[-1])
            found = cluster.finish()
        errors.append(found.error)
        failures += [f"{planned[0].protocol}: {text}" for text in found.failures]
    if not outcomes:
        raise RunError(f"{seconds:g} s are too short for a single event: give more --seconds")
    failures += [f"{one.outage.kind} under {one.outage.protocol}: {one.failure}" for one in outcomes if one.failure]
    rows = []
    for kind in KINDS:
        if alike := [one for one in outcomes if one.outage.kind == kind]:
            rows.append(
                {
                    "event": kind,
                    "count": len(alike),
                    "seconds_until_all_train": sum(one.seconds for one in alike) / len(alike),
                    "longest": max(one.seconds for one in alike),
                    "lost": sum(bool(one.failure) for one in alike),
                }
            )
    return {
        "bench": "chaos",
        "on": "cluster",
        "seed": seed,
        "rows": rows,
        "ratios": {
            "events": float(len(outcomes)),
            "failures": float(len(failures)),
            "largest error in the end": max(errors),
        },
        "faults": failures,
    }


@dataclass(frozen=True)
class _End:
    error: float
    failures: list[str]


class _Cluster:
    """One run on emulated hosts, and what strikes it."""

    def __init__(self, places: list[Host], folder: Path, protocol: str, rng: random.Random, pause: float) -> None:
        self._driver_host, *self._hosts = places
        self._folder = folder
        self._protocol = protocol
        self._rng = rng
        self._pause_seconds = pause
        self._mark = uuid.uuid4().hex
        self._address = f"{self._driver_host.address}:{PORT}"
        self._workers: dict[Host, subprocess.Popen[bytes]] = {}
        self._tether(self._driver_host, "keys", "key").wait()
        goal = ("--epochs", "1000000000", "--evaluate-every", "1000000000", "--checkpoint-seconds", "1")
        where = ("--on", "cluster", "--listen", self._address, "--key", "key", "--workers", f"2:{len(places)}")
        self._driver = self._tether(
            self._driver_host, "train", "digits", "-p", protocol, *goal, *where, "--run", "run", "--json"
        )
        for host in self._hosts:
            self._start_worker(host)

    @staticmethod
    @contextmanager
    def start(protocol: str, rng: random.Random, pause: float) -> Iterator[_Cluster]:
        with ExitStack() as cleanup:
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tether-chaos-")))
            (folder / "tmp").mkdir()
            cluster = _Cluster(cleanup.enter_context(hosts(1 + WORKERS, LINK)), folder, protocol, rng, pause)
            cleanup.callback(cluster.kill)
            yield cluster

    # ---- processes ----

    def _tether(self, host: Host, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, _MARK: self._mark, "TMPDIR": str(self._folder / "tmp"), "OMP_NUM_THREADS": "1"}
        name = words[0] if words[0] != "worker" else f"worker of {host.address}"
        with (self._folder / f"{name} out").open("wb") as out, (self._folder / f"{name} err").open("ab") as err:
            return subprocess.Popen(
                [*host.words, sys.executable, "-m", "tether", *words],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )

    def _start_worker(self, host: Host) -> None:
        self._workers[host] = self._tether(host, "worker", self._address, "--key", "key", "--stay")

    def _living(self) -> dict[int, str]:
        return living_processes(_MARK, self._mark)

    def _training_process(self, host: Host) -> int | None:
        """The process that trains on a host: the child of the one that stays."""
        stays = self._workers[host].pid
        with suppress(OSError, ValueError):
            return int(Path(f"/proc/{stays}/task/{stays}/children").read_text().split()[0])
        return None

    def kill(self) -> None:
        """Kill all processes."""
        while living := self._living():
            _send(signal.SIGKILL, living)
            for process in (self._driver, *self._workers.values()):
                process.poll()
            time.sleep(0.05)

    # ---- events ----

    def strike(self, outage: Outage) -> OutageOutcome:
        """Let an event happen and wait until all hosts train again."""
        fenced = _EVENTS[outage.kind](self)
        since = time.monotonic()
        failure = self._not_fenced(fenced)
        try:
            self.await_training(WORKERS, RECOVERY_SECONDS)
        except RunError as error:
            failure = failure or str(error)
        return OutageOutcome(outage, time.monotonic() - since, failure)

    def _not_fenced(self, given_up: list[int]) -> str:
        deadline = time.monotonic() + FENCE_SECONDS
        while time.monotonic() < deadline:
            if not any(pid in self._living() for pid in given_up):
                return ""
            time.sleep(0.1)
        return f"a worker that was given up still runs after {FENCE_SECONDS:g} s" if given_up else ""

    def _any_host(self) -> Host:
        return self._rng.choice(self._hosts)

    def _blink(self) -> list[int]:
        host = self._any_host()
        _down_and_up(host, BLINK_SECONDS)
        return []

    def _cut_worker(self) -> list[int]:
        host = self._any_host()
        trains = self._training_process(host)
        _down_and_up(host, OUTAGE_SECONDS)
        return [trains] if trains is not None else []

    def _cut_driver(self) -> list[int]:
        training = [self._training_process(host) for host in self._hosts]
        _down_and_up(self._driver_host, OUTAGE_SECONDS)
        return [pid for pid in training if pid is not None]

    def _stop_worker(self) -> list[int]:
        pid = self._training_process(self._any_host())
        if pid is None:
            return []
        _send(signal.SIGSTOP, [pid])
        time.sleep(self._pause_seconds)
        _send(signal.SIGCONT, [pid])
        return [pid]

    def _kill_worker(self) -> list[int]:
        pid = self._training_process(self._any_host())
        _send(signal.SIGKILL, [pid] if pid is not None else [])
        return []

    def _kill_named(self, name: str) -> list[int]:
        _send(signal.SIGKILL, [pid for pid, found in self._living().items() if found.partition("-")[0] == name])
        return []

    def _kill_driver(self) -> list[int]:
        _send(signal.SIGKILL, [self._driver.pid])
        return []

    def _join(self) -> list[int]:
        """One more worker trains for a while on the driver's host, then it leaves."""
        self._start_worker(self._driver_host)
        self.await_training(WORKERS + 1, RECOVERY_SECONDS)
        self._leave([self._driver_host])
        return []

    def _halve(self) -> list[int]:
        leaving = self._rng.sample(self._hosts, WORKERS // 2)
        self._leave(leaving)
        self.await_training(WORKERS - len(leaving), RECOVERY_SECONDS)
        for host in leaving:
            self._start_worker(host)
        return []

    def _leave(self, leaving: list[Host]) -> None:
        for host in leaving:
            _send(signal.SIGTERM, [self._workers[host].pid])
        for host in leaving:
            self._workers.pop(host).wait()

    # ---- how the run goes on ----

    def await_training(self, workers: int, seconds: float) -> None:
        """Until this many workers make steps; RunError after this many seconds. A run that ended is resumed."""
        deadline = time.monotonic() + seconds
        rows = _NewRows(self._folder / "run" / "metrics.jsonl")
        while time.monotonic() < deadline:
            if self._driver.poll() is not None:
                self._driver = self._tether(self._driver_host, "resume", "run", "--json")
            if len(rows.training()) >= workers:
                return
            time.sleep(0.1)
        names = ", ".join(sorted(rows.training())) or "none"
        raise RunError(f"after {seconds:g} s these workers train, and not {workers}: {names}; {self._last_words()}")

    def _last_words(self) -> str:
        files = [self._folder / f"{name} err" for name in ("train", "resume")]
        lines = [line for file in files if file.exists() for line in file.read_text(errors="replace").splitlines()]
        return " / ".join(lines[-3:])

    def finish(self) -> _End:
        """Interrupt the run, as Ctrl-C does, and look at what it leaves."""
        failures = []
        _send(signal.SIGINT, [self._driver.pid])
        with suppress(subprocess.TimeoutExpired):
            self._driver.wait(60)
        for host in list(self._workers):
            self._leave([host])
        run = json.loads((self._folder / "run" / "run.json").read_text())
        error = float((run.get("result") or {}).get("metrics", {}).get("error", math.nan))
        if not error <= USUAL_ERROR + ERROR_EXCESS_MAX:
            failures.append(f"the error in the end is {error:.3g}; {self._last_words()}")
        if left := sorted(self._living().values()):
            failures.append(f"these processes are left: {', '.join(left)}")
        if files := sorted(path.name for path in (self._folder / "tmp").glob("tether*")):
            print(f"left in the directory for temporary files: {', '.join(files)}", file=sys.stderr)
        return _End(error, failures)


_EVENTS: dict[str, Callable[[_Cluster], list[int]]] = {
    "link of a worker blinks": _Cluster._blink,
    "link of a worker down and up": _Cluster._cut_worker,
    "link of the driver down and up": _Cluster._cut_driver,
    "worker stopped": _Cluster._stop_worker,
    "worker killed": _Cluster._kill_worker,
    "hub killed": lambda cluster: cluster._kill_named("hub"),
    "fork server killed": lambda cluster: cluster._kill_named("fork server"),
    "driver killed": _Cluster._kill_driver,
    "worker joins": _Cluster._join,
    "half of the workers leave": _Cluster._halve,
}


class _NewRows:
    """The rows that a run appends to its metrics from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0
        self._first: dict[str, int] = {}
        self._training: set[str] = set()

    def training(self) -> set[str]:
        """The workers that have made steps between two of these rows."""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._read += len(complete)
            for line in complete.splitlines():
                with suppress(ValueError, KeyError):
                    self._take(json.loads(line))
        return self._training

    def _take(self, row: dict[str, Any]) -> None:
        if row["kind"] == "resumed":
            self._first.clear()
            self._training.clear()
        elif row["kind"] == "progress" and row["steps"] > self._first.setdefault(row["node"], row["steps"]):
            self._training.add(row["node"])


def _down_and_up(host: Host, seconds: float) -> None:
    host.set_link(up=False)
    time.sleep(seconds)
    host.set_link(up=True)


def _send(number: signal.Signals, pids: Sequence[int] | dict[int, str]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
