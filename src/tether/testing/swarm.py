"""Many simulated runs, each drawn from a seed: protocol, options, cluster, delays and faults.

A run has parts: when its hub dies, or all its workers, the next part resumes from the newest readable checkpoint,
perhaps with another number of workers. The first requirement is safety: no invariant is broken after any event, every
checkpoint is finite and can be read again, and every mini-batch counts once. The second is progress: faults heal, and
the run must reach its goal within a number of events after the last fault, with a model that has learned something.
Every tenth run is made twice and must repeat bit for bit.

A seed that fails is shrunk to a smaller scenario that fails in the same way. A scenario is data: its JSON file holds
everything that the run needs.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
from rich.table import Table
from torch import Tensor

from tether.core.effects import Checkpoint, Compute, Effect
from tether.core.events import Event
from tether.core.machine import Node, Recorder, Replica
from tether.core.vector import digest
from tether.errors import InvariantBroken, NodesLost, RunError, UsageError
from tether.execution.checkpoint import Restored
from tether.execution.directory import RunDirectory
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Options, known
from tether.protocols import make as make_protocol
from tether.runtimes.base import NodeStates, NullObserver, Outcome
from tether.runtimes.sim.costs import StepTime
from tether.runtimes.sim.faults import DISK, Fault, Faults, Kind
from tether.runtimes.sim.runtime import Sim
from tether.task import Task

#: bugs that can be planted, to show that the swarm finds them
PLANTS = ("drop",)
#: how many runs shrinking a scenario may take
SHRINK_RUNS_MAX = 300
STEP_SECONDS = 0.1
WORKERS_MAX = 9


class Cluster(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A simulated cluster."""

    #: the number of workers in each part of the run; further parts have the number of the last
    workers: tuple[int, ...]
    link: float = 1e9
    latency: float = 0.0
    #: price the model as one of this size
    model_bytes: str | None = None
    spread: float = 0.0
    straggle_chance: float = 0.0
    detect_seconds: float = 0.01


class Scenario(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything that a run of the swarm needs."""

    seed: int
    #: the protocol's name and options
    protocol: dict[str, Any]
    cluster: Cluster
    #: the goal in steps of each worker; if `shared`, all workers together make the steps of the first part's
    steps: int
    shared: bool = False
    parameters: int = 8
    checkpoint_seconds: float = 1.0
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        faults = ", ".join(map(str, self.faults))
        workers = " then ".join(map(str, self.cluster.workers))
        return (
            f"{self.options}, {workers} workers, {self.steps} steps, link {self.cluster.link:g}; "
            f"faults: {faults or 'none'}"
        )

    @property
    def options(self) -> Options:
        return make_protocol(self.protocol)

    def workers(self, part: int) -> int:
        """The number of workers in a part of the run."""
        return self.cluster.workers[min(part, len(self.cluster.workers) - 1)]

    @property
    def task(self) -> SyntheticTask:
        return SyntheticTask(parameters=self.parameters, samples=self.steps * self.workers(0))

    @property
    def request(self) -> Request:
        goal: dict[str, Any] = {"epochs": 1} if self.shared else {"steps": self.steps}
        return Request(**goal, seed=self.seed, checkpoint_seconds=self.checkpoint_seconds, trace=False)

    def sim(self, part: int, faults: Faults) -> Sim:
        cluster, workers = self.cluster, self.workers(part)
        return Sim(
            workers=workers,
            link=cluster.link,
            latency=cluster.latency,
            model_bytes=cluster.model_bytes,
            step_seconds=StepTime(STEP_SECONDS, spread=cluster.spread, straggle_chance=cluster.straggle_chance),
            faults=faults,
            detect_seconds=cluster.detect_seconds,
            # the busiest of 400 seeds needs 27 events for a worker's step
            events_max=5_000 + 60 * max(cluster.workers) * self.steps,
            checked=True,
        )

    @staticmethod
    def load(path: Path) -> Scenario:
        """Read a scenario from its JSON file."""
        try:
            scenario = msgspec.json.decode(path.read_bytes(), type=Scenario)
        except OSError as error:
            raise UsageError(f"cannot read the scenario in {path}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{path} is not a scenario ({error}): 'tether swarm' prints one for a run that fails"
            ) from None
        if not scenario.cluster.workers or min(scenario.cluster.workers) < 1:
            raise UsageError(f"{path}: each part of the run needs at least 1 worker")
        scenario.options, scenario.request  # noqa: B018 (refuses bad values now)
        return scenario

    def dump(self) -> str:
        """The text of its JSON file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


class Verdict(msgspec.Struct, frozen=True):
    """The result of a run; `error` is empty if nothing was wrong."""

    scenario: Scenario
    events: int = 0
    #: the number of parts of the run
    parts: int = 1
    #: the number of faults of each kind that were injected
    faults: dict[str, int] = {}
    error: str = ""

    @property
    def seed(self) -> int:
        return self.scenario.seed


def simulate(task: Task, protocol: Options, sim: Sim, request: Request) -> Outcome:
    """Run a task in the simulator, without a run directory."""
    return sim.execute(RunPlan.make(task, protocol, sim, request, None), NullObserver())


# ---- what a seed stands for ----


def draw(seed: int, protocol: str | None = None, plant: str | None = None) -> Scenario:
    """The run that a seed stands for."""
    rng = np.random.default_rng(seed)
    options, parameters = _draw_protocol(rng, protocol)
    most = options.workers_max or WORKERS_MAX
    workers = [min(int(rng.integers(1, WORKERS_MAX + 1)), most)]
    while rng.random() < 0.4:
        workers.append(min(int(rng.integers(1, WORKERS_MAX + 1)), most))
    steps = int(rng.integers(10, 60))
    cluster = _draw_cluster(rng, workers, seed)
    faults = _draw_faults(rng, options, workers[0], steps * STEP_SECONDS, plant)
    return Scenario(
        seed,
        _described(options),
        cluster,
        steps,
        shared=bool(rng.random() < 0.5),
        parameters=parameters,
        checkpoint_seconds=float(rng.choice([0.3, 1.0, 3.0])),
        faults=faults.schedule,
    )


def _draw_protocol(rng: np.random.Generator, protocol: str | None) -> tuple[Options, int]:
    """A protocol with its options, and the number of parameters of the model."""
    names = [protocol] if protocol else sorted(known())
    variants = [options for name in names for options in known()[name].variants()]
    options = variants[int(rng.integers(len(variants)))]
    parameters = int(rng.integers(1, 40))
    if rng.random() < 0.3:
        with suppress(UsageError):  # the protocol sends nothing
            options = make_protocol({**_described(options), "compress": str(rng.choice(["fp16", "bf16", "int8"]))})
            parameters = int(rng.integers(250, 600))  # short tensors are not compressed
    return options, parameters


def _draw_cluster(rng: np.random.Generator, workers: Sequence[int], seed: int) -> Cluster:
    link = float(rng.choice([1e4, 1e6, 1e9]))
    return Cluster(
        tuple(workers),
        link=link,
        latency=float(rng.choice([0.0, 0.0002, 0.05])),
        model_bytes="2MiB" if link == 1e9 and seed % 2 else None,  # large enough to be sent in parts
        spread=float(rng.choice([0.0, 0.1, 1.0])),
        straggle_chance=float(rng.choice([0.0, 0.05])),
        detect_seconds=float(rng.choice([0.01, 0.5])),
    )


def _draw_faults(rng: np.random.Generator, options: Options, workers: int, seconds: float, plant: str | None) -> Faults:
    """Faults of the first part of a run of about this many seconds."""
    nodes = options.nodes(workers)
    computing = tuple(node.name for node in nodes if node.computes)
    hubs = tuple(sorted(options.vital - set(computing)))
    helpers = tuple(node.name for node in nodes if not node.computes and node.name not in hubs)
    faults = Faults.draw(rng, computing, hubs, helpers, 0.7 * seconds, joins=options.workers_max is None)
    if options.hub == "" and rng.random() < 0.5:
        faults = Faults.churn(rng, computing, seconds, float(rng.uniform(0.2, 2.0)))
    if plant == "drop" and len(nodes) > 1:
        pair = (options.hub or computing[0], str(rng.choice(computing)))
        faults = faults.drop(*(pair if rng.random() < 0.5 else pair[::-1]), nth=int(rng.integers(1, 8)))
    return faults


def _described(options: Options) -> dict[str, Any]:
    """A protocol's name and the options that differ from their defaults."""
    usual = {field.name: field.default for field in fields(options)}
    return {"name": options.name, **{k: v for k, v in asdict(options).items() if v != usual[k]}}


# ---- a run and its checks ----


class BatchRecordingPlan(RunPlan):
    """A plan that records which mini-batches each node begins."""

    def recorder(self, node: Node, replica: Replica) -> Recorder | None:
        begun = self.begun.setdefault(node.name, [])

        def record(event: Event, now: float, effects: list[Effect]) -> None:
            begun.extend(effect.batch for effect in effects if isinstance(effect, Compute))

        return record

    @property
    def begun(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = vars(self).setdefault("_begun", {})
        return found


class _CheckpointingObserver(NullObserver):
    """Saves checkpoints on a faulty disk, and checks that each can be read again."""

    def __init__(
        self, directory: RunDirectory, disk_faults: Sequence[Fault], plan: RunPlan, began: float, damaged: set[str]
    ) -> None:
        self.directory = directory
        self._disk_faults = disk_faults
        self._plan = plan
        self._began = began
        self.died: list[str] = []
        self.last: Checkpoint | None = None
        #: the checkpoints that were damaged, in this part and earlier ones
        self.damaged = damaged

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None:
        _check_checkpoint(effect, self.last, self._plan)
        self.last = effect
        at = self._began + now
        faults = {
            fault.kind
            for fault in self._disk_faults
            if fault.at is not None and fault.at <= at < fault.at + fault.seconds
        }
        if "disk-full" in faults:
            return
        saved = self.directory.save_checkpoint(
            effect.step, effect.samples, weights, effect.state, state.hub, self._plan.protocol.name, state.workers
        )
        if "disk-damage" in faults:
            os.truncate(saved / "model.safetensors", (saved / "model.safetensors").stat().st_size // 2)
            self.damaged.add(saved.name)
            return
        found = self.directory.load_checkpoint()
        if found is not None and found.samples > effect.samples and not self._plan.hub:
            return  # a new master of a grid counts what living nodes know, which may be less than was saved before
        if found is None or (found.samples, digest(found.weights)) != (effect.samples, digest(weights)):
            raise InvariantBroken(f"the checkpoint of step {effect.step} cannot be read again")

    def note(self, text: str) -> None:
        name, _, what = text.partition(" ")
        if what.startswith("died"):
            self.died.append(name)

    def newest(self) -> Restored | None:
        """The newest checkpoint that is not damaged, from which the next part resumes."""
        folder = self.directory.path / "checkpoints"
        intact = sorted(path.name for path in folder.glob("at-*") if path.name not in self.damaged)
        found = self.directory.load_checkpoint()
        if (found.samples if found is not None else None) != (int(intact[-1].split("-")[1]) if intact else None):
            raise InvariantBroken(f"of the checkpoints {intact}, the one of {found and found.samples} samples was used")
        return found


def _check_checkpoint(effect: Checkpoint, last: Checkpoint | None, plan: RunPlan) -> None:
    """Check that a checkpoint says which mini-batches count, and has no fewer than the one before it."""
    spans = effect.state["counted"]
    total = sum(stop - start for start, stop in spans)
    if total * plan.schedule.batch_size != effect.samples or any(a[1] >= b[0] for a, b in itertools.pairwise(spans)):
        raise InvariantBroken(
            f"at step {effect.step}, {effect.samples} samples count, which are not the mini-batches {spans}"
        )
    if last is not None and plan.hub and (effect.samples < last.samples or effect.step < last.step):
        raise InvariantBroken(f"a checkpoint of {effect.samples} samples follows one of {last.samples}")


def _check_batches(plan: BatchRecordingPlan, observer: _CheckpointingObserver) -> None:
    """Check that every mini-batch that counts was made, none by two living nodes, and none that counted before."""
    before = {batch for start, stop in plan.schedule.counted for batch in range(start, stop)}
    begun = Counter(b for name, batches in plan.begun.items() for b in batches)
    living = Counter(b for name, batches in plan.begun.items() if name not in observer.died for b in batches)
    if twice := sorted(batch for batch, times in living.items() if times > 1):
        raise InvariantBroken(f"mini-batches {twice[:5]} were made twice")
    if again := sorted(living.keys() & before):
        raise InvariantBroken(f"mini-batches {again[:5]} were made again, although they counted before")
    if observer.last is not None:
        counted = {batch for start, stop in observer.last.state["counted"] for batch in range(start, stop)}
        if never := sorted(counted - before - begun.keys()):
            raise InvariantBroken(f"mini-batches {never[:5]} count but were never made")


def play(scenario: Scenario, directory: Path) -> tuple[Outcome, Verdict]:
    """Run a scenario, part after part, with its checkpoints in a new directory."""
    options, task, request = scenario.options, scenario.task, scenario.request
    disk_faults = [fault for fault in scenario.faults if fault.kind in DISK]
    node_faults = Faults(tuple(fault for fault in scenario.faults if fault.kind not in DISK))
    directory.mkdir()
    run_directory = RunDirectory(directory)
    restored: Restored | None = None
    began, events, damaged = 0.0, 0, set[str]()
    for part in itertools.count():
        nodes = {node.name for node in options.nodes(scenario.workers(part))}
        sim = scenario.sim(part, node_faults.after(began, nodes) if part else node_faults)
        plan = BatchRecordingPlan(**vars(RunPlan.make(task, options, sim, request, restored)))
        observer = _CheckpointingObserver(run_directory, disk_faults, plan, began, damaged)
        try:
            outcome = sim.execute(plan, observer)
        except NodesLost as lost:
            began += lost.seconds
            events += lost.events
            _check_batches(plan, observer)
            restored = observer.newest()
            continue
        _check_batches(plan, observer)
        _check_end(scenario, plan, observer, outcome)
        ended = began + outcome.seconds
        injected = Counter[str](fault.kind for fault in scenario.faults if (fault.at or 0.0) <= ended)
        return outcome, Verdict(scenario, events + outcome.events, part + 1, dict(injected))
    raise AssertionError("not reached: every part ends, or raises")


def _check_end(scenario: Scenario, plan: RunPlan, observer: _CheckpointingObserver, outcome: Outcome) -> None:
    """Check that the run has reached its goal, and that its model has learned something."""
    if not outcome.reason.startswith("all steps made"):
        raise RunError(f"the run ended because of: {outcome.reason}")
    if observer.last is None or not observer.last.final:
        raise RunError("the run ended without a last checkpoint")
    if scenario.shared and not any(
        start == 0 and stop >= plan.samples for start, stop in observer.last.state["counted"]
    ):
        raise InvariantBroken(f"of {plan.samples} mini-batches only {observer.last.state['counted']} count at the end")
    error = float(outcome.weights.square().mean())
    if not math.isfinite(error) or error >= 1.0:
        raise RunError(f"the model did not learn: its error went from 1 to {error:.4g}")


def judge(scenario: Scenario) -> Verdict:
    """Run a scenario and check it; every tenth seed twice."""
    # memory, not a disk: checkpoints are flushed to the disk, which would take most of the time
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix="swarm-", dir=memory) as directory:
            outcome, verdict = play(scenario, Path(directory) / "one")
            if scenario.seed % 10 == 0:
                again, _ = play(scenario, Path(directory) / "two")
                if digest(again.weights) != digest(outcome.weights):
                    raise RunError("a second run with the same seed gave another model")
    except Exception as error:  # any exception from a protocol is a bug in it
        return Verdict(scenario, error=f"{type(error).__name__}: {error}")
    return verdict


def swarm(
    seeds: range,
    protocol: str | None = None,
    plant: str | None = None,
    each: Callable[[Verdict], None] = lambda verdict: None,
    processes: int = 1,
) -> list[Verdict]:
    """Judge every seed, and return the verdicts with errors."""
    if plant is not None and plant not in PLANTS:
        raise UsageError(f"unknown bug to plant {plant!r}; known: {', '.join(PLANTS)}")
    wrong = []
    for verdict in _verdicts([(seed, protocol, plant) for seed in seeds], processes):
        each(verdict)
        if verdict.error:
            wrong.append(verdict)
    return wrong


def _verdicts(drawn: list[tuple[int, str | None, str | None]], processes: int) -> Iterator[Verdict]:
    if processes == 1:
        yield from map(_judge_drawn, drawn)
        return
    context = multiprocessing.get_context("spawn")  # a fork would lose torch's threads
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(_judge_drawn, drawn, chunksize=8)


def _judge_drawn(drawn: tuple[int, str | None, str | None]) -> Verdict:
    return judge(draw(*drawn))


class Tally:
    """Counts the runs of a swarm, their faults and their failures, by protocol."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def add(self, verdict: Verdict) -> None:
        counts = self._counts.setdefault(str(verdict.scenario.protocol["name"]), Counter())
        counts.update({"runs": 1, "parts": verdict.parts, "events": verdict.events, "failures": bool(verdict.error)})
        counts.update(verdict.faults)

    @property
    def runs(self) -> int:
        return sum(counts["runs"] for counts in self._counts.values())

    @property
    def failures(self) -> int:
        return sum(counts["failures"] for counts in self._counts.values())

    def table(self) -> Table:
        """A table with a column for each protocol, and one for all together."""
        names = sorted(self._counts)
        table = Table("", *names, *(["all"] if len(names) > 1 else []))
        kinds = [kind for kind in get_args(Kind) if any(counts[kind] for counts in self._counts.values())]
        for row in ("runs", "parts", *kinds, "events", "failures"):
            counts = [self._counts[name][row] for name in names]
            table.add_row(row, *map(str, counts), *([str(sum(counts))] if len(names) > 1 else []))
        return table


# ---- shrinking ----


def shrink(verdict: Verdict, runs_max: int = SHRINK_RUNS_MAX) -> Verdict:
    """Search greedily for a smaller scenario that fails with the same kind of error."""
    kind = verdict.error.partition(":")[0]
    runs = 0
    smaller = True
    while smaller and runs < runs_max:
        smaller = False
        for candidate in _smaller(verdict.scenario):
            runs += 1
            if (found := judge(candidate)).error.partition(":")[0] == kind:
                verdict, smaller = found, True
                break
            if runs >= runs_max:
                break
    return verdict


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with a little less of something, the largest reductions first."""
    change = msgspec.structs.replace
    faults, cluster = scenario.faults, scenario.cluster
    if len(faults) > 2:
        yield change(scenario, faults=faults[len(faults) // 2 :])
        yield change(scenario, faults=faults[: len(faults) // 2])
    for i in range(len(faults)):
        yield change(scenario, faults=faults[:i] + faults[i + 1 :])
    if len(cluster.workers) > 1:
        yield change(scenario, cluster=change(cluster, workers=cluster.workers[:-1]))
    for i, workers in enumerate(cluster.workers):
        for fewer in sorted({1, workers // 2, workers - 1} - {0, workers}):
            counts = (*cluster.workers[:i], fewer, *cluster.workers[i + 1 :])
            if all(_has_nodes(scenario, fault, fewer) for fault in faults) or i:
                yield change(scenario, cluster=change(cluster, workers=counts))
    for steps in sorted({scenario.steps // 2, scenario.steps - 1} - {0}):
        yield change(scenario, steps=steps)
    usual = Cluster(cluster.workers)
    for name in ("link", "latency", "model_bytes", "spread", "straggle_chance", "detect_seconds"):
        if getattr(cluster, name) != getattr(usual, name):
            yield change(scenario, cluster=change(cluster, **{name: getattr(usual, name)}))
    if "compress" in scenario.protocol:
        plain = {name: value for name, value in scenario.protocol.items() if name != "compress"}
        yield change(scenario, protocol=plain)
    if scenario.parameters > 1:
        yield change(scenario, parameters=1)


def _has_nodes(scenario: Scenario, fault: Fault, workers: int) -> bool:
    names = {node.name for node in scenario.options.nodes(workers)}
    return fault.kind == "join" or all(name.partition("~")[0] in names for name in (fault.node, fault.peer) if name)
