"""Many simulated runs, each drawn from a seed: protocol, options, cluster, delays and faults.

A run goes on in parts: when its hub dies, or all its workers, the next part resumes from the newest checkpoint that is
readable, perhaps with another number of workers. First comes safety: no invariant is broken after any event, every
checkpoint is finite and can be read again, and every mini-batch counts once. Then comes progress: faults heal, and the
run must reach its goal within a number of events after the last of them, with a model that has learned something. Every
tenth run is made twice and must repeat bit for bit.

A seed that fails is shrunk to a smaller scenario that fails in the same way. A scenario is data: its JSON file says all
that the run needs.
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

from tether.checkpoint import Restored
from tether.errors import InvariantBroken, NodesLost, RunError, UsageError
from tether.machine import Checkpoint, Compute, Effect, Evaluate, Event, Node, Replica, Row
from tether.plan import Request, RunPlan
from tether.protocols import Options, known
from tether.protocols import make as make_protocol
from tether.rundir import RunDirectory
from tether.runtimes.base import NodeStates, Outcome
from tether.runtimes.faults import DISK, Fault, Faults, Kind
from tether.runtimes.interpreter import Recorder
from tether.runtimes.sim import Sim, StepTime
from tether.task import SyntheticTask, Task
from tether.trace import Meter
from tether.vector import digest

#: bugs that can be planted to see that the swarm finds them
PLANTS = ("drop",)
#: how many runs the shrinking of a scenario may take
SHRINK_RUNS_MAX = 300
STEP_SECONDS = 0.1


class Cluster(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A simulated cluster."""

    #: of each part of the run; further parts have as many as the last
    workers: tuple[int, ...]
    link: float = 1e9
    latency: float = 0.0
    #: price the model as one of this size
    model_bytes: str | None = None
    spread: float = 0.0
    straggle_chance: float = 0.0
    detect_seconds: float = 0.01


class Scenario(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All that a run of the swarm needs."""

    seed: int
    #: its name and options
    protocol: dict[str, Any]
    cluster: Cluster
    #: the goal, for each worker; `shared`: as many for all together as the workers of the first part make in so many
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
        """How many take part in a part of the run."""
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
            # of 400 seeds the busiest needs 27 for a worker's step
            events_max=5_000 + 60 * max(cluster.workers) * self.steps,
        )

    @staticmethod
    def load(path: Path) -> Scenario:
        """From its JSON file."""
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
    """How a run went; `error` is empty if all was well."""

    scenario: Scenario
    events: int = 0
    #: how many parts the run had
    parts: int = 1
    #: how many faults of each kind have struck
    faults: dict[str, int] = {}
    error: str = ""

    @property
    def seed(self) -> int:
        return self.scenario.seed


class Nobody:
    """An observer that wants to know nothing."""

    def meter(self, meter: Meter, now: float) -> None: ...

    def record(self, node: str, values: Row, now: float) -> None: ...

    def evaluate(self, effect: Evaluate, weights: Tensor, now: float) -> None: ...

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None: ...

    def observed(self) -> Sequence[dict[str, float]]:
        return ()

    def note(self, text: str) -> None: ...

    def stop_requested(self) -> str | None:
        return None

    def seconds_left(self) -> float:
        return math.inf


def simulate(task: Task, protocol: Options, sim: Sim, request: Request) -> Outcome:
    """A simulated run without a run directory."""
    return sim.execute(RunPlan.make(task, protocol, sim, request, None), Nobody())


# ---- what a seed stands for ----


def draw(seed: int, protocol: str | None = None, plant: str | None = None) -> Scenario:
    """The run that a seed stands for."""
    rng = np.random.default_rng(seed)
    names = [protocol] if protocol else sorted(known())
    variants = [options for name in names for options in known()[name].variants()]
    options = variants[int(rng.integers(len(variants)))]
    parameters = int(rng.integers(1, 40))
    if rng.random() < 0.3:
        with suppress(UsageError):  # of a protocol that sends nothing
            options = make_protocol({**_described(options), "compress": str(rng.choice(["fp16", "bf16", "int8"]))})
            parameters = int(rng.integers(250, 600))  # short tensors are not encoded
    most = options.workers_max or 9
    workers = [min(int(rng.integers(1, 10)), most)]
    while rng.random() < 0.4:
        workers.append(min(int(rng.integers(1, 10)), most))
    steps = int(rng.integers(10, 60))
    link = float(rng.choice([1e4, 1e6, 1e9]))
    cluster = Cluster(
        tuple(workers),
        link=link,
        latency=float(rng.choice([0.0, 0.0002, 0.05])),
        model_bytes="2MiB" if link == 1e9 and seed % 2 else None,  # so large that it travels in parts
        spread=float(rng.choice([0.0, 0.1, 1.0])),
        straggle_chance=float(rng.choice([0.0, 0.05])),
        detect_seconds=float(rng.choice([0.01, 0.5])),
    )
    nodes = options.nodes(workers[0])
    computing = tuple(node.name for node in nodes if node.computes)
    hubs = tuple(sorted(options.vital - set(computing)))
    helpers = tuple(node.name for node in nodes if not node.computes and node.name not in hubs)
    seconds = steps * STEP_SECONDS
    faults = Faults.draw(rng, computing, hubs, helpers, 0.7 * seconds, joins=options.workers_max is None)
    if options.joint == "" and rng.random() < 0.5:
        faults = Faults.churn(rng, computing, seconds, float(rng.uniform(0.2, 2.0)))
    if plant == "drop" and len(nodes) > 1:
        pair = (options.joint or computing[0], str(rng.choice(computing)))
        faults = faults.drop(*(pair if rng.random() < 0.5 else pair[::-1]), nth=int(rng.integers(1, 8)))
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


def _described(options: Options) -> dict[str, Any]:
    """A protocol's name and what differs from its defaults."""
    usual = {field.name: field.default for field in fields(options)}
    return {"name": options.name, **{k: v for k, v in asdict(options).items() if v != usual[k]}}


# ---- a run and what is checked in it ----


class Census(RunPlan):
    """A plan that listens to which mini-batches each node begins."""

    def recorder(self, node: Node, replica: Replica) -> Recorder | None:
        begun = self.begun.setdefault(node.name, [])

        def listen(event: Event, now: float, effects: list[Effect]) -> None:
            begun.extend(effect.batch for effect in effects if isinstance(effect, Compute))

        return listen

    @property
    def begun(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = vars(self).setdefault("_begun", {})
        return found


class _Keeper(Nobody):
    """Saves checkpoints on a disk that has faults, and requires that each can be read again."""

    def __init__(self, directory: RunDirectory, disk: Sequence[Fault], plan: RunPlan, began: float) -> None:
        self.directory = directory
        self._disk = disk
        self._plan = plan
        self._began = began
        self.died: list[str] = []
        self.last: Checkpoint | None = None
        #: of this and earlier parts: checkpoints that were damaged
        self.damaged: set[str] = set()

    def checkpoint(self, effect: Checkpoint, weights: Tensor, state: NodeStates, now: float) -> None:
        _require_sense(effect, self.last, self._plan)
        self.last = effect
        at = self._began + now
        faults = {
            fault.kind for fault in self._disk if fault.at is not None and fault.at <= at < fault.at + fault.seconds
        }
        if "disk-full" in faults:
            return
        saved = self.directory.save_checkpoint(
            effect.step, effect.samples, weights, effect.state, state.hub, self._plan.protocol.name, state.workers
        )
        if "disk-damage" in faults:
            os.truncate(saved / "tensors.safetensors", (saved / "tensors.safetensors").stat().st_size // 2)
            self.damaged.add(saved.name)
            return
        found = self.directory.load_checkpoint()
        if found is not None and found.samples > effect.samples and not self._plan.joint:
            return  # a new master of a grid counts what the living know, which may be less than was saved before
        if found is None or (found.samples, digest(found.weights)) != (effect.samples, digest(weights)):
            raise InvariantBroken(f"the checkpoint of step {effect.step} cannot be read again")

    def note(self, text: str) -> None:
        name, _, what = text.partition(" ")
        if what.startswith("died"):
            self.died.append(name)

    def newest(self) -> Restored | None:
        """What the next part resumes from: the newest checkpoint that is not damaged."""
        folder = self.directory.path / "checkpoints"
        intact = sorted(path.name for path in folder.glob("at-*") if path.name not in self.damaged)
        found = self.directory.load_checkpoint()
        if (found.samples if found is not None else None) != (int(intact[-1].split("-")[1]) if intact else None):
            raise InvariantBroken(f"of the checkpoints {intact}, that of {found and found.samples} samples was resumed")
        return found


def _require_sense(effect: Checkpoint, last: Checkpoint | None, plan: RunPlan) -> None:
    """A checkpoint must tell what counts, and no less than the one before it."""
    spans = effect.state["counted"]
    total = sum(stop - start for start, stop in spans)
    if total * plan.task.batch_size != effect.samples or any(a[1] >= b[0] for a, b in itertools.pairwise(spans)):
        raise InvariantBroken(f"{effect.samples} samples count at step {effect.step}, and the mini-batches {spans}")
    if last is not None and plan.joint and (effect.samples < last.samples or effect.step < last.step):
        raise InvariantBroken(f"a checkpoint of {effect.samples} samples follows one of {last.samples}")


def _require_census(plan: Census, keeper: _Keeper) -> None:
    """Every mini-batch that counts was made, none by two that live, and none that counted before."""
    before = {batch for start, stop in plan.schedule.counted for batch in range(start, stop)}
    begun = Counter(b for name, batches in plan.begun.items() for b in batches)
    living = Counter(b for name, batches in plan.begun.items() if name not in keeper.died for b in batches)
    if twice := sorted(batch for batch, times in living.items() if times > 1):
        raise InvariantBroken(f"mini-batches {twice[:5]} were made twice")
    if again := sorted(living.keys() & before):
        raise InvariantBroken(f"mini-batches {again[:5]} were made again, although they counted before")
    if keeper.last is not None:
        counted = {batch for start, stop in keeper.last.state["counted"] for batch in range(start, stop)}
        if never := sorted(counted - before - begun.keys()):
            raise InvariantBroken(f"mini-batches {never[:5]} count and were never made")


def play(scenario: Scenario, directory: Path) -> tuple[Outcome, Verdict]:
    """Run a scenario, part after part, with its checkpoints below a directory."""
    options, task, request = scenario.options, scenario.task, scenario.request
    disk = [fault for fault in scenario.faults if fault.kind in DISK]
    nodal = Faults(tuple(fault for fault in scenario.faults if fault.kind not in DISK))
    directory.mkdir()
    kept = RunDirectory(directory)
    restored: Restored | None = None
    began, events, damaged = 0.0, 0, set[str]()
    for part in itertools.count():
        nodes = {node.name for node in options.nodes(scenario.workers(part))}
        sim = scenario.sim(part, nodal.after(began, nodes) if part else nodal)
        plan = Census(**vars(RunPlan.make(task, options, sim, request, restored)))
        keeper = _Keeper(kept, disk, plan, began)
        keeper.damaged = damaged
        try:
            outcome = sim.execute(plan, keeper)
        except NodesLost as lost:
            began += lost.seconds
            events += lost.events
            _require_census(plan, keeper)
            restored = keeper.newest()
            continue
        _require_census(plan, keeper)
        _require_end(scenario, plan, keeper, outcome)
        struck = Counter[str](fault.kind for fault in scenario.faults if (fault.at or 0.0) <= began + outcome.seconds)
        return outcome, Verdict(scenario, events + outcome.events, part + 1, dict(struck))
    raise AssertionError("endless")


def _require_end(scenario: Scenario, plan: RunPlan, keeper: _Keeper, outcome: Outcome) -> None:
    """The run has reached its goal, and its model has learned something."""
    if not outcome.reason.startswith("all steps made"):
        raise RunError(f"the run ended because of: {outcome.reason}")
    if keeper.last is None or not keeper.last.final:
        raise RunError("the run ended without a last checkpoint")
    if scenario.shared and not any(start == 0 and stop >= plan.samples for start, stop in keeper.last.state["counted"]):
        raise InvariantBroken(f"of {plan.samples} mini-batches only {keeper.last.state['counted']} count at the end")
    error = float(outcome.weights.square().mean())
    if not math.isfinite(error) or error >= 1.0:
        raise RunError(f"the model did not learn: its error went from 1 to {error:.4g}")


def judge(scenario: Scenario) -> Verdict:
    """Run a scenario and say what was wrong with it."""
    # memory rather than a disk: checkpoints are written through to the disk, which would take most of the time
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix="swarm-", dir=memory) as directory:
            outcome, verdict = play(scenario, Path(directory) / "one")
            if scenario.seed % 10 == 0:
                again, _ = play(scenario, Path(directory) / "two")
                if digest(again.weights) != digest(outcome.weights):
                    raise RunError("a second run with the same seed gave another model")
    except Exception as error:  # whatever a protocol raises is a fault of it
        return Verdict(scenario, error=f"{type(error).__name__}: {error}")
    return verdict


def swarm(
    seeds: range,
    protocol: str | None = None,
    plant: str | None = None,
    each: Callable[[Verdict], None] = lambda verdict: None,
    processes: int = 1,
) -> list[Verdict]:
    """Judge every seed; the verdicts that found something wrong."""
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
    context = multiprocessing.get_context("spawn")  # torch has threads, which a fork would lose
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(_judge_drawn, drawn, chunksize=8)


def _judge_drawn(drawn: tuple[int, str | None, str | None]) -> Verdict:
    return judge(draw(*drawn))


class Tally:
    """What the runs of a swarm have come to, by protocol."""

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
        """A column for each protocol, and one for all."""
        names = sorted(self._counts)
        table = Table("", *names, *(["all"] if len(names) > 1 else []))
        kinds = [kind for kind in get_args(Kind) if any(counts[kind] for counts in self._counts.values())]
        for row in ("runs", "parts", *kinds, "events", "failures"):
            counts = [self._counts[name][row] for name in names]
            table.add_row(row, *map(str, counts), *([str(sum(counts))] if len(names) > 1 else []))
        return table


# ---- shrinking ----


def shrink(verdict: Verdict, runs_max: int = SHRINK_RUNS_MAX) -> Verdict:
    """A smaller scenario that fails with the same kind of error, found greedily."""
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
    """Scenarios that have a little less of something, the largest steps first."""
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
