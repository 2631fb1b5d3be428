"""Faults in real processes: signals, a full disk and damaged files, injected into runs that must survive them.

Each fault has a run of its own, which is a `tether train` command in a process of its own, so that the driver can be a
target too. If the run ends because of the fault, `tether resume` continues it, as a user would. In the end all samples
must count, the error must be close to that of a run without faults, and nothing may be left behind: no process, and no
file in /dev/shm or in the directory for temporary files.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tether.errors import RunError, UsageError, unknown
from tether.tasks.digits import Digits

Kind = Literal["kill", "term", "stop", "freeze", "disk-full", "zeros", "flip", "cut-off", "garbage"]

#: how long a process is stopped, and how long the disk is full
PAUSE_SECONDS = 1.5
#: a command that takes this much longer than one without faults counts as hung
HANG_SECONDS = 120.0
#: how long processes may take to end after their driver
END_SECONDS = 10.0
#: how much larger than without faults the error may be
ERROR_EXCESS_MAX = 0.03
EPOCHS = 60
#: the environment variable that marks the processes of a command
_MARK = "TETHER_CHAOS"
#: the options of `tether train` for each protocol
PROTOCOLS: dict[str, tuple[str, ...]] = {
    "server": ("--set", "sync=async", "--set", "rate=none"),
    "inline": ("--set", "sync=async", "--set", "apply=inline"),
    "averaging": (),
    "streaming": ("--set", "tau=10"),
    "elastic": (),
    "mpca": (),
    "tide": (),
    "grid": (),
}


@dataclass(frozen=True)
class Fault:
    """A fault of a process or a file, injected when a worker has made the share `after` of its steps."""

    kind: Kind
    target: str
    protocol: str
    after: float


#: the kinds of fault with their targets; `stop` is followed by a SIGCONT, `freeze` is not
LOCAL: tuple[tuple[Kind, str], ...] = (
    ("kill", "worker"),
    ("kill", "hub"),
    ("kill", "all workers"),
    ("kill", "fork server"),
    ("kill", "driver"),
    ("stop", "worker"),
    ("stop", "hub"),
    ("stop", "fork server"),
    ("stop", "driver"),
    ("freeze", "fork server"),
    ("term", "worker"),
    ("term", "hub"),
    ("term", "driver"),
    ("disk-full", "driver"),
    ("zeros", "checkpoint"),
    ("flip", "checkpoint"),
    ("cut-off", "checkpoint"),
    ("garbage", "metrics.jsonl"),
    ("garbage", "run.json"),
)
SPARK: tuple[tuple[Kind, str], ...] = (
    ("kill", "executor"),
    ("kill", "all executors"),
    ("kill", "driver"),
    ("stop", "executor"),
)
#: damage that only a resume notices, so the driver is killed first
_FILE_DAMAGE = ("zeros", "flip", "cut-off", "garbage")


@dataclass(frozen=True)
class FaultOutcome:
    """How a run with a fault ended; `failure` is empty if nothing was lost."""

    fault: Fault
    outcome: str
    #: how much longer it took than a run without faults
    seconds: float
    error: float = math.nan
    failure: str = ""
    processes_left: int = 0
    files_left: tuple[str, ...] = ()


def schedule(kills: int, seed: int, on: str, protocol: str | None) -> list[Fault]:
    """A number of faults, in which each kind occurs as often as any other."""
    if protocol is not None and protocol not in PROTOCOLS:
        raise unknown("protocol for chaos", protocol, PROTOCOLS)
    rng = random.Random(seed)
    names = [protocol] if protocol else list(PROTOCOLS)
    if on == "spark":  # executors share no memory
        names = [name for name in names if name != "inline"]
    faults: list[Fault] = []
    while len(faults) < kills:
        for kind, target in rng.sample(kinds := LOCAL if on == "local" else SPARK, len(kinds)):
            possible = [name for name in names if name != "grid" or target != "hub"]  # grid has no hub
            if possible:
                faults.append(Fault(kind, target, rng.choice(possible), rng.uniform(0.1, 0.7)))
    return faults[:kills]


def chaos(
    kills: int = 20,
    on: str = "local",
    seconds: float = 600.0,
    seed: int = 0,
    protocol: str | None = None,
    each: Callable[[FaultOutcome], None] = lambda outcome: None,
) -> dict[str, Any]:
    """Inject faults into runs, one after the other, until the time is up; report what was lost or left behind."""
    if on not in ("local", "spark"):
        raise unknown("runtime for chaos", on, ("local", "spark"))
    if not Path("/proc").exists():
        raise UsageError("chaos finds processes in /proc, which this system does not have")
    deadline = time.monotonic() + seconds
    baselines: dict[str, CommandResult] = {}
    outcomes: list[FaultOutcome] = []
    descriptors = len(os.listdir("/proc/self/fd"))
    for fault in schedule(kills, seed, on, protocol):
        if time.monotonic() >= deadline:
            break
        if fault.protocol not in baselines:
            baselines[fault.protocol] = run_without_faults(fault.protocol, on)
        outcomes.append(inject(fault, on, baselines[fault.protocol]))
        each(outcomes[-1])
    if not outcomes:
        raise RunError(f"{seconds:g} s are too short for a single fault: give more --seconds")
    return {
        "bench": "chaos",
        "on": on,
        "seed": seed,
        "rows": _rows(outcomes),
        "ratios": {
            "faults": float(len(outcomes)),
            "runs that lost something": float(sum(bool(one.failure) for one in outcomes)),
            "largest excess error": max(
                (one.error - baselines[one.fault.protocol].error for one in outcomes if math.isfinite(one.error)),
                default=math.nan,
            ),
            "processes left": float(sum(one.processes_left for one in outcomes)),
            "files left": float(sum(len(one.files_left) for one in outcomes)),
            "descriptors left": float(len(os.listdir("/proc/self/fd")) - descriptors),
        },
        "files": [f"{name} after {one.fault.kind} {one.fault.target}" for one in outcomes for name in one.files_left],
        "faults": [
            f"{one.fault.kind} {one.fault.target} under {one.fault.protocol}: {one.failure}"
            for one in outcomes
            if one.failure
        ],
    }


def _rows(outcomes: Sequence[FaultOutcome]) -> list[dict[str, Any]]:
    """A row for each kind of fault and target."""
    kinds = sorted({(one.fault.kind, one.fault.target) for one in outcomes})
    rows = []
    for kind, target in kinds:
        alike = [one for one in outcomes if (one.fault.kind, one.fault.target) == (kind, target)]
        counts = Counter(one.outcome for one in alike)
        rows.append(
            {
                "fault": kind,
                "target": target,
                "count": len(alike),
                "outcome": ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items())),
                "seconds_lost": statistics.median(one.seconds for one in alike),
                "lost": sum(bool(one.failure) for one in alike),
            }
        )
    return rows


# ---- a run in a process of its own ----


@dataclass
class CommandResult:
    """How a command ended; without a status if it hung and was killed."""

    status: int | None
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    #: the last line of its standard error
    message: str = ""

    @property
    def error(self) -> float:
        return float(self.figures["metrics"]["error"])


def living_processes(variable: str, value: str) -> dict[int, str]:
    """The names by id of the processes whose environment has this; the fork server and executors are called that."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if not entry.name.isdigit() or f"{variable}={value}".encode() not in (entry / "environ").read_bytes():
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            found[int(entry.name)] = _process_name(entry)
    return found


def _process_name(entry: Path) -> str:
    name, command = (entry / "comm").read_text().strip(), (entry / "cmdline").read_bytes()
    if b"CoarseGrainedExecutorBackend" in command:
        return "executor"
    is_node = name == "hub" or name.startswith(("hub-", "worker-", "aggregator-"))
    return "fork server" if b"tether.runtimes.process.forkserver" in command and not is_node else name


class _Command:
    """A running `tether` command with the processes that it has started; its environment marks them all."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        environment = {**os.environ, _MARK: self.mark, "TMPDIR": str(folder / "tmp")}
        self._files = [(folder / name).open("wb") for name in ("out", "err")]
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tether", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            env=environment,
            start_new_session=True,
        )

    def living(self) -> dict[int, str]:
        """The names of its processes by id; the driver, the fork server and executors are called just that."""
        living = living_processes(_MARK, self.mark)
        return {pid: "driver" if pid == self.process.pid else name for pid, name in living.items()}

    def wait(self, seconds: float) -> CommandResult:
        """Wait for the command to end; kill it after this many seconds."""
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(seconds)
        took = time.monotonic() - self._began
        if status is None:
            self.kill()
        for file in self._files:
            file.close()
        message = (self._folder / "err").read_text(errors="replace").strip().rpartition("\n")[2]
        figures = json.loads((self._folder / "out").read_bytes()) if status == 0 else {}
        return CommandResult(status, took, figures, message)

    def count_left(self, seconds: float) -> int:
        """The number of processes that are still alive after this many seconds."""
        deadline = time.monotonic() + seconds
        while (count := len(self.living())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return count

    def kill(self) -> None:
        """Kill all its processes."""
        while living := self.living():
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)


def _train(protocol: str, on: str, folder: Path) -> _Command:
    name = "server" if protocol == "inline" else protocol
    goal = ("--epochs", str(EPOCHS), "--evaluate-every", "1000000", "--checkpoint-seconds", "0.3")
    where = ("--on", on, "--workers", "2", "--run", str(folder / "run"), "--json")
    return _Command(["train", "digits", "-p", name, *PROTOCOLS[protocol], *goal, *where], folder)


def run_without_faults(protocol: str, on: str) -> CommandResult:
    """The baseline that runs with faults are compared with."""
    with tempfile.TemporaryDirectory(prefix="tether-chaos-") as directory:
        result = _train(protocol, on, Path(directory)).wait(10 * HANG_SECONDS)
    if result.status != 0:
        raise RunError(f"{protocol} does not even train without faults: {result.message}")
    return result


def inject(fault: Fault, on: str, baseline: CommandResult) -> FaultOutcome:
    """Inject a fault into a new run, resume the run if it ended, and compare it with the baseline."""
    shared = set(_shared_files())
    with tempfile.TemporaryDirectory(prefix="tether-chaos-") as directory:
        folder = Path(directory)
        command = _train(fault.protocol, on, folder)
        steps = fault.after * baseline.figures["steps"]
        timeout = baseline.seconds + HANG_SECONDS
        if not _await_steps(folder / "run", steps, _checkpoints_needed(fault), command, timeout):
            return FaultOutcome(fault, "ended before the fault", 0.0, failure="the run ended or hung by itself")
        damaged = _inject_now(fault, command, folder / "run")
        result = command.wait(timeout)
        seconds, left, hung = result.seconds, command.count_left(END_SECONDS), result.status is None
        command.kill()
        outcome = "continued"
        if result.status != 0:
            resumed = _Command(["resume", str(folder / "run"), "--json"], folder)
            result = resumed.wait(timeout)
            seconds, left = seconds + result.seconds, left + resumed.count_left(END_SECONDS)
            resumed.kill()
            outcome = ("hung, " if hung else "") + ("resumed" if result.status == 0 else "failed")
        files = (*sorted(set(_shared_files()) - shared), *(path.name for path in (folder / "tmp").glob("tether*")))
        unnoticed = damaged is not None and damaged in _resumed_at(folder / "run")
    error = result.error if result.status == 0 else math.nan
    failure = failure_of(result, baseline, hung=hung, left=left, unnoticed=unnoticed)
    return FaultOutcome(fault, outcome, seconds - baseline.seconds, error, failure, left, files)


def failure_of(
    result: CommandResult, baseline: CommandResult, *, hung: bool = False, left: int = 0, unnoticed: bool = False
) -> str:
    """What is wrong with the end of a run, or ''; `unnoticed` means that it was resumed from a damaged checkpoint."""
    task = Digits()
    samples = math.ceil(EPOCHS * len(task.train_data()) / task.batch_size) * task.batch_size
    if result.status != 0:
        return result.message or "it hung"
    if hung:
        return f"it hung for {HANG_SECONDS:g} s"
    if result.figures["samples"] < samples:
        return f"only {result.figures['samples']} of {samples} samples count"
    if not result.error <= baseline.error + ERROR_EXCESS_MAX:
        return f"an error of {result.error:.3g} instead of {baseline.error:.3g}"
    if unnoticed:
        return "it was resumed from a damaged checkpoint"
    return f"{left} processes are left" if left else ""


def _resumed_at(run: Path) -> set[int]:
    """The number of samples that counted, at each resume of the run."""
    lines = (run / "metrics.jsonl").read_text(errors="replace").splitlines()
    return {int(json.loads(line)["samples"]) for line in lines if line.startswith('{"kind": "resumed"')}


def _shared_files() -> Iterator[str]:
    return (path.name for path in Path("/dev/shm").glob("*tether*"))


def _checkpoints_needed(fault: Fault) -> int:
    """The number of checkpoints that a run needs to survive the fault: one more if the newest is damaged."""
    return 2 if fault.target == "checkpoint" else 1


def _await_steps(run: Path, steps: float, checkpoints: int, command: _Command, seconds: float) -> bool:
    """Wait until a worker has made this many steps and this many checkpoints exist; False if the run ended first."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and command.process.poll() is None:
        with suppress(OSError):
            rows = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"progress"' in line]
            saved = len(list((run / "checkpoints").glob("at-*")))
            if any(_steps(row) >= steps for row in rows[-20:]) and saved >= checkpoints:
                return True
        time.sleep(0.02)
    command.wait(0.0)
    command.kill()
    return False


def _steps(row: str) -> int:
    try:
        return int(json.loads(row)["steps"])
    except (ValueError, KeyError):
        return 0  # it is being written


# ---- faults ----


def _inject_now(fault: Fault, command: _Command, run: Path) -> int | None:
    """Inject a fault; return the number of samples in the checkpoint that it damages, if it damages one."""
    driver = command.process.pid
    if fault.kind in _FILE_DAMAGE:
        _send(signal.SIGKILL, [driver])
        command.process.wait()
        return _damage(fault, run)
    if fault.kind == "disk-full":
        # a write beyond the limit fails, as does a write to a full disk
        usual = resource.prlimit(driver, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        time.sleep(PAUSE_SECONDS)
        with suppress(ProcessLookupError):
            resource.prlimit(driver, resource.RLIMIT_FSIZE, usual)
        return None
    victims = _victims(fault.target, command.living())
    match fault.kind:
        case "kill":
            _send(signal.SIGKILL, victims)
        case "term":
            _send(signal.SIGTERM, victims)
        case "freeze":
            _send(signal.SIGSTOP, victims)
        case "stop":
            _send(signal.SIGSTOP, victims)
            time.sleep(PAUSE_SECONDS)
            _send(signal.SIGCONT, victims)
    return None


def _send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _victims(target: str, living: dict[int, str]) -> list[int]:
    """The ids of the target's processes; only the first if there are several, unless the target is all of them."""
    singular = target.removeprefix("all ").removesuffix("s") if target.startswith("all ") else target
    alike = sorted(pid for pid, name in living.items() if name.partition("-")[0] == singular)
    return alike if target.startswith("all ") else alike[:1]


def _damage(fault: Fault, run: Path) -> int | None:
    if fault.kind == "garbage":
        path = run / fault.target
        path.write_bytes(path.read_bytes()[:-20] + b"\xff\xfe{]\n")
        return None
    newest = max((run / "checkpoints").glob("at-*"))
    tensors = newest / "model.safetensors"
    data = bytearray(tensors.read_bytes())
    match fault.kind:
        case "zeros":
            data[len(data) // 2 : len(data) // 2 + 4096] = bytes(min(4096, len(data) - len(data) // 2))
        case "flip":
            data[-3] ^= 0x40
        case "cut-off":
            del data[len(data) // 2 :]
    tensors.write_bytes(data)
    return int(newest.name.split("-")[1])
