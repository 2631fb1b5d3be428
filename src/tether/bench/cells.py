"""The single runs of a study of protocols: what each trains, how and where, and a file of their curves."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from tether import protocols
from tether.bench.ablation import PulledTide
from tether.bench.common import NEVER
from tether.core import settings
from tether.core.units import bytes_per_second
from tether.errors import Diverged, UsageError, unknown
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.protocols import Averaging, Options
from tether.runtimes.sim.costs import StepTime
from tether.runtimes.sim.faults import Faults
from tether.runtimes.sim.runtime import Sim
from tether.sweeps.sweep import EvaluatingObserver
from tether.task import Length
from tether.tasks.chars import Chars
from tether.tasks.cifar import Cifar
from tether.tasks.classification import Classification
from tether.tasks.fashion import Fashion
from tether.tasks.text import Text

#: ResNet-110, the smallest workload of the MPCA SGD paper
STEP_SECONDS, MODEL_BYTES = 0.095, "7MiB"
#: how often a run is evaluated
EVALUATIONS = 24
#: the metric over time, in virtual seconds
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Subject:
    """A task of the study."""

    make: type[Classification]
    #: the file within the folder of data, if the task wants one
    file: str
    #: its mini-batches
    sizes: dict[str, int]
    #: the rate of SGD with momentum 0.9
    rate: float
    #: the length of a run, in epochs
    epochs: float
    #: what is compared
    metric: str = "error"


SUBJECTS = {
    "fashion": Subject(Fashion, "", {"small": 16, "large": 128}, 0.01, 3.0),
    "cifar": Subject(Cifar, "", {"small": 16, "large": 128}, 0.01, 4.0),
    "chars": Subject(Chars, "", {"small": 8, "large": 64}, 0.1, 1.0, "loss"),
    # what is trained is the convolution alone; the error is that of it and of a linear model
    "text": Subject(Text, "trec_train.csv", {"small": 8, "large": 64}, 0.05, 6.0, "validation_error"),
}
#: a large mini-batch makes fewer steps an epoch, so that its runs have more epochs
LARGE_EPOCHS = 3.0
OPTIMIZERS = ("adam", "sgd", "falling")
#: names for protocols with settings
ALIASES: dict[str, Options] = {
    "diloco": Averaging(outer="nesterov"),
    # a fair choice for runs of this length: its momentum lasts for a number of exchanges, not of steps
    "diloco-50": Averaging(tau=50, outer="nesterov"),
    "tide-pull": PulledTide(),
}


class _Falling:
    """A task whose learning rate falls to zero along half a cosine."""

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Length) -> LRScheduler:
        return CosineAnnealingLR(optimizer, length.steps)


def _slow(workers: int, seconds: float) -> Faults:
    faults = Faults()
    for rank in range(round(3 / 8 * workers)):
        faults = faults.slow(f"worker-{rank}", 2.0)
    return faults


#: by name: the faults of a run, given its number of workers and the seconds that it would last without waiting
DISTURBANCES: dict[str, Callable[[int, float], Faults]] = {
    "none": lambda workers, seconds: Faults(),
    "slow": _slow,
    "pause": lambda workers, seconds: Faults().pause("worker-0", at=seconds / 4, seconds=60.0),
    "death": lambda workers, seconds: Faults().crash("worker-0", at=seconds / 2),
    "join": lambda workers, seconds: Faults().join(f"worker-{workers}", at=seconds / 2),
}


@dataclass(frozen=True)
class Place:
    """Where and what protocols are compared on."""

    task: str = "fashion"
    link: str = "100mbit"
    workers: int = 8
    batch: str = "small"
    optimizer: str = "adam"
    disturbance: str = "none"

    def check(self, data: Path | None) -> None:
        """Refuse what does not exist, files included."""
        for what, name, known in (
            ("task", self.task, SUBJECTS),
            ("mini-batch", self.batch, {"small", "large"}),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("disturbance", self.disturbance, DISTURBANCES),
        ):
            if name not in known:
                raise unknown(what, name, known)
        bytes_per_second(self.link, "--link")
        self.make_task(data)

    def make_task(self, data: Path | None) -> Classification:
        subject = SUBJECTS[self.task]
        if data is not None and subject.file and data.is_dir():
            data = data / subject.file
        given: dict[str, Any] = {"batch_size": subject.sizes[self.batch]}
        if self.optimizer != "adam":
            given |= {"learning_rate": subject.rate, "momentum": 0.9}
        make: Any = subject.make
        if self.optimizer == "falling":
            make = type(f"Falling{subject.make.__name__}", (_Falling, subject.make), {})
        task: Classification = make(data, **given)
        return task

    @property
    def epochs(self) -> float:
        return SUBJECTS[self.task].epochs * (LARGE_EPOCHS if self.batch == "large" else 1.0)


@dataclass(frozen=True)
class Cell:
    """One run."""

    place: Place
    #: a protocol, an alias, or a protocol with settings: tide:drift=0+phases=1
    label: str
    seed: int
    #: how many times as long as usual the run is
    length: float = 1.0

    @property
    def key(self) -> str:
        """What the file of results knows it by."""
        return json.dumps({**asdict(self.place), "protocol": self.label, "seed": self.seed, "length": self.length})


def options_of(label: str) -> Options:
    """The protocol that a label means."""
    if label in ALIASES:
        return ALIASES[label]
    name, _, given = label.partition(":")
    if name not in protocols.known():
        raise unknown("protocol", name, [*protocols.known(), *ALIASES])
    cls = protocols.known()[name]
    texts = dict(part.partition("=")[::2] for part in given.split("+") if part)
    return cls(**settings.arguments(cls, f"protocol {name}", texts))


def train(cell: Cell, data: Path | None) -> Curve:
    """The metric of the joint model over time; a run that diverges ends early.

    A protocol that has one worker only, `single`, makes the samples of all of them.
    """
    torch.set_num_threads(1)
    place, epochs, options = cell.place, cell.place.epochs * cell.length, options_of(cell.label)
    workers = min(place.workers, options.workers_max or place.workers)
    task = place.make_task(data)
    samples = len(task.train_data())  # type: ignore[arg-type]
    steps = epochs * samples / task.batch_size / workers
    sim = Sim(
        workers=workers,
        step_seconds=StepTime(STEP_SECONDS, spread=0.05),
        link=place.link,
        model_bytes=MODEL_BYTES,
        faults=DISTURBANCES[place.disturbance](workers, steps * STEP_SECONDS),
    )
    request = Request(
        epochs=epochs, seed=cell.seed, evaluate_every=epochs / EVALUATIONS, checkpoint_seconds=NEVER, trace=False
    )
    plan = RunPlan.make(task, options, sim, request, None)
    watcher = EvaluatingObserver(plan)
    metric = SUBJECTS[place.task].metric
    with suppress(Diverged):
        sim.execute(plan, watcher)
    return [(seconds, metrics[metric]) for seconds, _, metrics in watcher.evaluations]


class Results:
    """The curves of finished cells, one in each line of a file; without a path they are kept in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._curves: dict[str, Curve] = {}
        if path is None or not path.exists():
            return
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            try:
                key, curve = json.loads(line)
                cell_of(key)
                self._curves[key] = [(seconds, value) for seconds, value in curve]
            except (ValueError, KeyError, TypeError):
                raise UsageError(
                    f"{path}, line {number} is not a result of this benchmark: remove the line, or give another file"
                ) from None

    def __contains__(self, cell: Cell) -> bool:
        return cell.key in self._curves

    def __getitem__(self, cell: Cell) -> Curve:
        return self._curves[cell.key]

    def add(self, cell: Cell, curve: Curve) -> None:
        self._curves[cell.key] = curve
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([cell.key, curve]) + "\n")

    def cells(self) -> list[Cell]:
        """The cells that are there, in the order in which they came."""
        return [cell_of(key) for key in self._curves]


def cell_of(key: str) -> Cell:
    """The cell of a key."""
    values = json.loads(key)
    rest = [values.pop(name) for name in ("protocol", "seed", "length")]
    return Cell(Place(**values), *rest)
