"""Faults of real processes: signals, a full disk and damaged files, at random moments of runs that must survive them.

Each fault strikes a run of its own, which is a command (`tether train`) in a process of its own, so that its driver can
be struck too. If the run ends because of the fault, it is continued as a user would, by `tether resume`. In the end all
samples must count, the error must be close to that of a run without faults, and nothing may be left behind: no process,
no file in /dev/shm or the directory for temporary files.
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

from tether.cells import Report
from tether.errors import RunError, UsageError, unknown
from tether.tasks.digits import Digits

Kind = Literal["kill", "term", "stop", "freeze", "disk-full", "zeros", "flip", "cut-off", "garbage"]

#: how long a stopped process stands still, and how long the disk is full
PAUSE_SECONDS = 1.5
#: a command that takes so much longer than one without faults hangs
HANG_SECONDS = 120.0
#: how long processes may take to end after their driver
END_SECONDS = 10.0
#: how much larger than without faults the error may be
ERROR_MORE = 0.03
EPOCHS = 60
_MARK = "TETHER_CHAOS"
#: options of `tether train`
PROTOCOLS: dict[str, tuple[str, ...]] = {
    "server": ("--set", "sync=async", "--set", "rate=none"),
    "inline": ("--set", "sync=async", "--set", "apply=inline"),
    "averaging": (),
    "elastic": (),
    "mpca": (),
    "grid": (),
}


@dataclass(frozen=True)
class Blow:
    """A fault of real processes or files. It strikes when the share `after` of all steps is made."""

    kind: Kind
    target: str
    protocol: str
    after: float


#: what may be struck, and how; `freeze` stops for good
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
#: damage that is found only by whoever resumes, so the driver is killed right after it
_FILES = ("zeros", "flip", "cut-off", "garbage")


@dataclass(frozen=True)
class Survived:
    """What came of a run that was struck; `fault` is empty if nothing was lost."""

    blow: Blow
    outcome: str
    seconds: float
    error: float = math.nan
    fault: str = ""
    processes_left: int = 0
    files_left: tuple[str, ...] = ()


def schedule(kills: int, seed: int, on: str, protocol: str | None) -> list[Blow]:
    """So many faults, each kind as often as any other."""
    if protocol is not None and protocol not in PROTOCOLS:
        raise unknown("protocol for chaos", protocol, PROTOCOLS)
    chance = random.Random(seed)
    names = [protocol] if protocol else list(PROTOCOLS)
    if on == "spark":  # whose executors share no memory
        names = [name for name in names if name != "inline"]
    blows: list[Blow] = []
    while len(blows) < kills:
        for kind, target in chance.sample(kinds := LOCAL if on == "local" else SPARK, len(kinds)):
            able = [name for name in names if name != "grid" or target != "hub"]  # grid has none
            if able:
                blows.append(Blow(kind, target, chance.choice(able), chance.uniform(0.1, 0.7)))
    return blows[:kills]


def chaos(
    kills: int = 20,
    on: str = "local",
    seconds: float = 600.0,
    seed: int = 0,
    protocol: str | None = None,
    each: Callable[[Survived], None] = lambda survived: None,
) -> Report:
    """Strike runs one after the other, as long as there is time, and report what was lost and what was left behind."""
    if on not in ("local", "spark"):
        raise unknown("runtime for chaos", on, ("local", "spark"))
    if not Path("/proc").exists():
        raise UsageError("chaos finds processes in /proc, which this system does not have")
    deadline = time.monotonic() + seconds
    whole: dict[str, Ended] = {}
    found: list[Survived] = []
    descriptors = len(os.listdir("/proc/self/fd"))
    for blow in schedule(kills, seed, on, protocol):
        if time.monotonic() >= deadline:
            break
        if blow.protocol not in whole:
            whole[blow.protocol] = undisturbed(blow.protocol, on)
        found.append(strike(blow, on, whole[blow.protocol]))
        each(found[-1])
    if not found:
        raise RunError(f"{seconds:g} s are too short for a single fault: give more --seconds")
    return {
        "bench": "chaos",
        "on": on,
        "seed": seed,
        "rows": _rows(found),
        "ratios": {
            "faults": float(len(found)),
            "runs that lost something": float(sum(bool(one.fault) for one in found)),
            "largest error more": max(
                (one.error - whole[one.blow.protocol].error for one in found if math.isfinite(one.error)),
                default=math.nan,
            ),
            "processes left": float(sum(one.processes_left for one in found)),
            "files left": float(sum(len(one.files_left) for one in found)),
            "descriptors left": float(len(os.listdir("/proc/self/fd")) - descriptors),
        },
        "files": [f"{name} after {one.blow.kind} {one.blow.target}" for one in found for name in one.files_left],
        "faults": [
            f"{one.blow.kind} {one.blow.target} under {one.blow.protocol}: {one.fault}" for one in found if one.fault
        ],
    }


def _rows(found: Sequence[Survived]) -> list[dict[str, Any]]:
    kinds = sorted({(one.blow.kind, one.blow.target) for one in found})
    rows = []
    for kind, target in kinds:
        some = [one for one in found if (one.blow.kind, one.blow.target) == (kind, target)]
        outcomes = Counter(one.outcome for one in some)
        rows.append(
            {
                "fault": kind,
                "target": target,
                "count": len(some),
                "outcome": ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items())),
                "seconds_lost": statistics.median(one.seconds for one in some),
                "lost": sum(bool(one.fault) for one in some),
            }
        )
    return rows


# ---- a run in a process of its own ----


@dataclass
class Ended:
    """How a command ended."""

    status: int | None
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    said: str = ""

    @property
    def error(self) -> float:
        return float(self.figures["metrics"]["error"])


class _Command:
    """A `tether` command that runs, and the processes that it has started, which all have a mark."""

    def __init__(self, arguments: Sequence[str], place: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._place = place
        (place / "tmp").mkdir(exist_ok=True)
        environment = {**os.environ, _MARK: self.mark, "TMPDIR": str(place / "tmp")}
        self._files = [(place / name).open("wb") for name in ("out", "err")]
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
        """Its processes, by id, with their names; the driver, the fork server and executors by what they are."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if not entry.name.isdigit() or f"{_MARK}={self.mark}".encode() not in (entry / "environ").read_bytes():
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue
                found[int(entry.name)] = self._name(entry)
        return found

    def _name(self, entry: Path) -> str:
        name, command = (entry / "comm").read_text().strip(), (entry / "cmdline").read_bytes()
        if int(entry.name) == self.process.pid:
            return "driver"
        if b"CoarseGrainedExecutorBackend" in command:
            return "executor"
        is_node = name == "hub" or name.startswith(("hub-", "worker-", "aggregator-"))
        return "fork server" if b"tether.runtimes.launch" in command and not is_node else name

    def wait(self, seconds: float) -> Ended:
        """How it ended; without a status if it has not after so long, and was killed."""
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(seconds)
        took = time.monotonic() - self._began
        if status is None:
            self.kill()
        for file in self._files:
            file.close()
        said = (self._place / "err").read_text(errors="replace").strip().rpartition("\n")[2]
        figures = json.loads((self._place / "out").read_bytes()) if status == 0 else {}
        return Ended(status, took, figures, said)

    def left(self, seconds: float) -> int:
        """How many processes are still there after so long, unless all end earlier."""
        deadline = time.monotonic() + seconds
        while (count := len(self.living())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return count

    def kill(self) -> None:
        """End whatever is left of it."""
        while living := self.living():
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)


def _train(protocol: str, on: str, place: Path) -> _Command:
    name = "server" if protocol == "inline" else protocol
    goal = ("--epochs", str(EPOCHS), "--evaluate-every", "1000000", "--checkpoint-seconds", "0.3")
    where = ("--on", on, "--workers", "2", "--run", str(place / "run"), "--json")
    return _Command(["train", "digits", "-p", name, *PROTOCOLS[protocol], *goal, *where], place)


def undisturbed(protocol: str, on: str) -> Ended:
    """A run without faults, to compare others with."""
    with tempfile.TemporaryDirectory(prefix="tether-chaos-") as directory:
        ended = _train(protocol, on, Path(directory)).wait(10 * HANG_SECONDS)
    if ended.status != 0:
        raise RunError(f"{protocol} does not even train without faults: {ended.said}")
    return ended


def strike(blow: Blow, on: str, whole: Ended) -> Survived:
    """Strike a run of its own, and say what came of it, compared with the `whole` one."""
    shared = set(_shared_files())
    with tempfile.TemporaryDirectory(prefix="tether-chaos-") as directory:
        place = Path(directory)
        command = _train(blow.protocol, on, place)
        steps = blow.after * whole.figures["steps"]
        if not _await_steps(place / "run", steps, _checkpoints(blow), command, whole.seconds + HANG_SECONDS):
            return Survived(blow, "ended before it was struck", 0.0, fault="the run ended or hung by itself")
        damaged = _deal(blow, command, place / "run")
        ended = command.wait(whole.seconds + HANG_SECONDS)
        seconds, left, hung = ended.seconds, command.left(END_SECONDS), ended.status is None
        command.kill()
        outcome = "went on"
        if ended.status != 0:
            again = _Command(["resume", str(place / "run"), "--json"], place)
            ended = again.wait(whole.seconds + HANG_SECONDS)
            seconds, left = seconds + ended.seconds, left + again.left(END_SECONDS)
            again.kill()
            outcome = ("hung, " if hung else "") + ("resumed" if ended.status == 0 else "failed")
        files = (*sorted(set(_shared_files()) - shared), *(path.name for path in (place / "tmp").glob("tether*")))
        unnoticed = damaged is not None and damaged in _resumed_at(place / "run")
    error = ended.error if ended.status == 0 else math.nan
    fault = fault_of(ended, whole, hung=hung, left=left, unnoticed=unnoticed)
    return Survived(blow, outcome, seconds - whole.seconds, error, fault, left, files)


def fault_of(ended: Ended, whole: Ended, *, hung: bool = False, left: int = 0, unnoticed: bool = False) -> str:
    """What is wrong with how a run ended; `unnoticed`: it was resumed from a damaged checkpoint."""
    task = Digits()
    samples = math.ceil(EPOCHS * len(task.train_data()) / task.batch_size) * task.batch_size
    if ended.status != 0:
        return ended.said or "it hung"
    if hung:
        return f"it hung for {HANG_SECONDS:g} s"
    if ended.figures["samples"] < samples:
        return f"{ended.figures['samples']} of {samples} samples count"
    if not ended.error <= whole.error + ERROR_MORE:
        return f"an error of {ended.error:.3g} instead of {whole.error:.3g}"
    if unnoticed:
        return "it was resumed from a damaged checkpoint"
    return f"{left} processes are left" if left else ""


def _resumed_at(run: Path) -> set[int]:
    """How many samples counted whenever the run was resumed."""
    lines = (run / "metrics.jsonl").read_text(errors="replace").splitlines()
    return {int(json.loads(line)["samples"]) for line in lines if line.startswith('{"kind": "resumed"')}


def _shared_files() -> Iterator[str]:
    return (path.name for path in Path("/dev/shm").glob("*tether*"))


def _checkpoints(blow: Blow) -> int:
    """How many checkpoints a run must have to survive this: without another one, a damaged one is the end of it."""
    return 2 if blow.target == "checkpoint" else 1


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


def _deal(blow: Blow, command: _Command, run: Path) -> int | None:
    """Strike now; how many samples the checkpoint has that is damaged, if one is."""
    driver = command.process.pid
    if blow.kind in _FILES:
        _send(signal.SIGKILL, [driver])
        command.process.wait()
        return _damage(blow, run)
    if blow.kind == "disk-full":
        # a write beyond the limit fails, as one to a full disk does
        usual = resource.prlimit(driver, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        time.sleep(PAUSE_SECONDS)
        with suppress(ProcessLookupError):
            resource.prlimit(driver, resource.RLIMIT_FSIZE, usual)
        return None
    victims = _victims(blow.target, command.living())
    match blow.kind:
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
    """The processes that are struck: of several alike, the first."""
    singular = target.removeprefix("all ").removesuffix("s") if target.startswith("all ") else target
    alike = sorted(pid for pid, name in living.items() if name.partition("-")[0] == singular)
    return alike if target.startswith("all ") else alike[:1]


def _damage(blow: Blow, run: Path) -> int | None:
    if blow.kind == "garbage":
        path = run / blow.target
        path.write_bytes(path.read_bytes()[:-20] + b"\xff\xfe{]\n")
        return None
    newest = max((run / "checkpoints").glob("at-*"))
    tensors = newest / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    match blow.kind:
        case "zeros":
            data[len(data) // 2 : len(data) // 2 + 4096] = bytes(min(4096, len(data) - len(data) // 2))
        case "flip":
            data[-3] ^= 0x40
        case "cut-off":
            del data[len(data) // 2 :]
    tensors.write_bytes(data)
    return int(newest.name.split("-")[1])
