"""How long protocols take to a target error, beside the tables and figures of the MPCA SGD paper.

The paper's workloads are priced: model size, seconds per batch and gigabit Ethernet are theirs (table 1), in the
simulator. What really learns is a small stand-in that is limited by gradient noise at the target: Fashion-MNIST, a
perceptron, mini-batch 16, Adam. One evaluation is noisy, so the target counts as reached when the mean of the
evaluations of the last epoch is below it. Ratios to a single learner are what can be compared with the paper.

Table 1 of the paper also has what an exchange takes there, a broadcast and a reduction with nothing between them: 2.7
to 4 times as long as the link alone needs, since Spark's jobs and serialization take time too. Averaging and mpca,
whose exchanges are of that kind, are therefore priced twice: with the link alone, and as the paper measured it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from tether.cells import Report, Watcher
from tether.errors import missing_extra, unknown
from tether.plan import Request, RunPlan
from tether.progress import make_progress
from tether.protocols import Averaging, Elastic, Grid, Mpca, Options, Server, Single
from tether.report import load_run
from tether.run import run
from tether.runtimes.sim import Sim, StepTime
from tether.study import parse_counts
from tether.task import SyntheticTask, Task
from tether.tasks.cifar import Cifar
from tether.tasks.fashion import Fashion
from tether.units import bytes_per_second

T = TypeVar("T")

LINK = "1gbit"
#: what a broadcast or a reduction costs beside the link, so that an exchange takes what table 1 has: within 2 % for all
#: four of its models
PRICE: dict[str, Any] = {"exchange_seconds": 0.18, "exchange_rate": "255mbit"}
EVALUATIONS_PER_EPOCH = 20
EPOCHS_MAX = 60


@dataclass(frozen=True)
class Workload:
    """A row of the paper's table 1 with its taus, and the hardest target that table 2 has for all of its columns."""

    model_bytes: str
    step_seconds: float
    protocols: dict[str, Options]
    #: seconds or hours to the target, as the paper has them
    paper: dict[str, float]


def _protocols(averaging: int, elastic: int, mpca: Mpca) -> dict[str, Options]:
    """`mpca` has the paper's settings; what chooses its own comes after it, and what one would take today."""
    return {
        "single": Single(),
        "server": Server(sync="async"),
        "averaging": Averaging(tau=averaging),
        "elastic": Elastic(tau=elastic),
        "mpca": mpca,
        "mpca auto": Mpca(),
        "elastic auto": Elastic(),
        "diloco": Averaging(tau=averaging, outer="nesterov"),
    }


#: sections 6.3 and 7.1 of the paper
_SCHEDULES: dict[str, Any] = {"free_steps": 20, "settle_steps": 200, "beta_cycles": 20, "gamma_cycles": 20}

WORKLOADS = {
    "resnet-110": Workload(
        "7MiB",
        0.095,
        _protocols(58, 20, Mpca(alpha=0.05, **_SCHEDULES)),
        {"single": 10429, "server": 7361, "averaging": 2559, "elastic": 2070, "mpca": 1841},
    ),
    "resnet-152": Workload(
        "223MiB",
        0.809,
        _protocols(146, 50, Mpca(alpha=0.05, **_SCHEDULES)),
        {"single": 103.1, "server": 55.4, "averaging": 30.9, "elastic": 27.2, "mpca": 22.1},
    ),
    # section 7.2.2: tau 539 did not work reliably; the model could not be cut into three shards of like size
    "vgg-a": Workload(
        "491MiB",
        0.474,
        _protocols(100, 95, Mpca(phases=2, alpha=0.005, **_SCHEDULES)),
        {"single": 26.7, "server": 36.0, "averaging": 24.4, "elastic": 14.1, "mpca": 10.5},
    ),
}


class Settling(Fashion):
    """Fashion with one more metric: the mean error of the last epoch's evaluations."""

    def __init__(self, data: str | Path | None) -> None:
        super().__init__(data, batch_size=16)
        self._errors: deque[float] = deque(maxlen=EVALUATIONS_PER_EPOCH)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        metrics = super().evaluate(model)
        self._errors.append(metrics["error"])
        enough = len(self._errors) == EVALUATIONS_PER_EPOCH
        return {**metrics, "settled": statistics.fmean(self._errors) if enough else 1.0}


@dataclass(frozen=True)
class Trial:
    """One run to the target."""

    workload: str
    label: str
    protocol: Options
    seed: int
    workers: int
    target: float
    data: Path | None
    #: how many times slower some workers are, by name
    slow: tuple[tuple[str, float], ...] = ()
    #: exchanges cost what the paper measured
    priced: bool = False


def reach(trial: Trial) -> dict[str, float]:
    """How long the run takes to its target, in virtual seconds, and how it used its machines."""
    torch.set_num_threads(1)
    workload = WORKLOADS[trial.workload]
    sim = Sim(
        workers=trial.protocol.workers_max or trial.workers,
        step_seconds=StepTime(workload.step_seconds, spread=0.05, factors=dict(trial.slow)),
        link=LINK,
        model_bytes=workload.model_bytes,
        checked=False,
        **(PRICE if trial.priced else {}),
    )
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        result = run(
            Settling(trial.data),
            trial.protocol,
            sim,
            epochs=EPOCHS_MAX,
            until=f"settled<{trial.target}",
            evaluate_every=1 / EVALUATIONS_PER_EPOCH,
            checkpoint_seconds=1e9,
            seed=trial.seed,
            run_dir=Path(directory) / "run",
            trace=False,
            progress=make_progress(quiet=True),
        )
    seconds = result.figures["seconds"]
    return {
        # what does not get there takes for ever
        "seconds": seconds if result.figures["reason"].endswith("reached") else float("inf"),
        "utilization": result.figures["utilization"]["mean"],
        "took": time.perf_counter() - begun,
    }


def _reach_all(trials: list[Trial]) -> dict[tuple[str, str, bool], dict[str, float]]:
    """The medians over the seeds by workload, label and whether exchanges are priced, told as they come."""
    Settling(trials[0].data)  # refuses now if the files are not there
    outcomes: dict[tuple[str, str, bool], list[dict[str, float]]] = defaultdict(list)
    for done, (trial, outcome) in enumerate(_in_parallel(reach, trials), start=1):
        outcomes[trial.workload, trial.label, trial.priced].append(outcome)
        told = (
            f"{trial.workload} {trial.label}{', priced' * trial.priced} seed {trial.seed}: {outcome['seconds']:.0f} s"
        )
        print(f"{done}/{len(trials)}  {told} (computed in {outcome['took']:.0f} s)", file=sys.stderr)
    return {
        key: {name: statistics.median(outcome[name] for outcome in found) for name in found[0]}
        for key, found in outcomes.items()
    }


def _in_parallel(work: Callable[[T], Any], trials: list[T]) -> Iterator[tuple[T, Any]]:
    """Every trial and what came of it, as they come; as many at a time as there are cores."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(work, trial): trial for trial in trials}
        for future in as_completed(futures):
            yield futures[future], future.result()


def table2(data: Path | None = None, workload: str | None = None, seeds: int = 3, target: float = 0.12) -> Report:
    """Time to a target error of every protocol on the workloads of the MPCA SGD paper, beside its table 2."""
    if workload is not None and workload not in WORKLOADS:
        raise unknown("workload", workload, WORKLOADS)
    names = [workload] if workload is not None else list(WORKLOADS)
    trials = [
        Trial(name, label, protocol, seed, 8, target, data, priced=priced)
        for name in names
        for seed in range(seeds)
        for priced in (False, True)
        for label, protocol in WORKLOADS[name].protocols.items()
        if protocol.collective or (not priced and (label != "single" or name == names[0]))
    ]
    outcomes = _reach_all(trials)
    alone = outcomes[names[0], "single", False]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name, priced in ((name, priced) for name in names for priced in (False, True)):
        paper = WORKLOADS[name].paper
        # a learner alone moves nothing, so its time goes with that of its steps
        longer = WORKLOADS[name].step_seconds / WORKLOADS[names[0]].step_seconds
        single = alone["seconds"] * longer
        for label, protocol in WORKLOADS[name].protocols.items():
            outcome = outcomes.get((name, label, priced and protocol.collective), alone)
            seconds = outcome["seconds"] if label != "single" else single
            rows.append(
                {
                    "workload": name,
                    "exchanges": "as in table 1" if priced else "link alone",
                    "protocol": label,
                    "options": str(protocol),
                    "seconds": seconds,
                    "utilization": outcome["utilization"],
                    "faster_than_single": single / seconds,
                    "paper": paper["single"] / paper[label] if label in paper else None,
                }
            )
        own = {row["protocol"]: row["seconds"] for row in rows if row["workload"] == name}
        for label, seconds in own.items():
            ratios[f"{name} {label} over mpca{', priced' * priced}"] = seconds / own["mpca"]
    return {"bench": "table2", "target": target, "seeds": seeds, "rows": rows, "ratios": ratios}


def mpca(data: Path | None = None, seeds: int = 3, target: float = 0.12) -> Report:
    """What the parts of MPCA SGD are worth: extrapolation, weights, phases (figures 10a, 10c and 5 to 8)."""
    workload = "resnet-152"
    half_speed = tuple((f"worker-{index}", 2.0) for index in range(3))
    variants: dict[str, tuple[Mpca, tuple[tuple[str, float], ...]]] = {
        "gamma 0.7": (Mpca(), ()),
        "gamma 0": (Mpca(gamma=0.0), ()),
        "3 of 8 at half speed, weighted": (Mpca(), half_speed),
        "3 of 8 at half speed, unweighted": (Mpca(weighted=False), half_speed),
    }
    trials = [
        Trial(workload, label, options, seed, 8, target, data, slow=slow)
        for seed in range(seeds)
        for label, (options, slow) in variants.items()
    ]
    outcomes = _reach_all(trials)
    seconds = {label: outcomes[workload, label, False]["seconds"] for label in variants}
    rows = [{"what": label, "seconds": seconds[label], "cycle_seconds": None, "hub_link": None} for label in variants]
    rows += [_phases(name, phases) for name in WORKLOADS for phases in (1, 2, 3)]
    ratios = {
        "without extrapolation over with": seconds["gamma 0"] / seconds["gamma 0.7"],
        "unweighted over weighted": seconds["3 of 8 at half speed, unweighted"]
        / seconds["3 of 8 at half speed, weighted"],
    }
    return {"bench": "mpca", "workload": workload, "target": target, "seeds": seeds, "rows": rows, "ratios": ratios}


def _phases(name: str, phases: Literal[1, 2, 3]) -> dict[str, Any]:
    """How long a shard takes round its cycle, and the share of the hub's link in use; nothing is learned for that."""
    workload = WORKLOADS[name]
    sim = Sim(
        workers=8,
        step_seconds=StepTime(workload.step_seconds, spread=0.05),
        link=LINK,
        model_bytes=workload.model_bytes,
        checked=False,
    )
    with tempfile.TemporaryDirectory() as directory:
        result = run(
            SyntheticTask(),
            Mpca(phases=phases),
            sim,
            steps=300,
            run_dir=Path(directory) / "run",
            trace=False,
            progress=make_progress(quiet=True),
        )
        kept = load_run(Path(directory) / "run")
    sent = kept.nodes["hub"]["bytes_sent"] / bytes_per_second(LINK) / result.figures["seconds"]
    cycle = statistics.median(row["cycle_seconds"] for row in kept.records)
    return {"what": f"{name}, {phases} phases", "seconds": None, "cycle_seconds": cycle, "hub_link": sent}


def scaling(
    data: Path | None = None, seeds: int = 3, target: float = 0.12, picture: Path = Path("scaling.png")
) -> Report:
    """Time to a target error of mpca with 1 to 64 workers (figure 13c), and its picture."""
    try:
        from tether.tradeoff import scaling_png
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    counts = (1, 2, 4, 8, 16, 32, 64)
    trials = [
        Trial("resnet-110", str(count), Single() if count == 1 else Mpca(), seed, count, target, data)
        for seed in range(seeds)
        for count in counts
    ]
    outcomes = _reach_all(trials)
    seconds = {count: outcomes["resnet-110", str(count), False]["seconds"] for count in counts}
    rows = [{"workers": count, "seconds": seconds[count], "speedup": seconds[1] / seconds[count]} for count in counts]
    ratios = {f"share of the ideal with {count}": seconds[1] / seconds[count] / count for count in counts}
    picture.write_bytes(scaling_png(rows, target))
    return {"bench": "scaling", "target": target, "seeds": seeds, "rows": rows, "ratios": ratios}


#: with all defaults
DEFAULTS: dict[str, Options] = {"averaging": Averaging(), "elastic": Elastic(), "mpca": Mpca(), "grid": Grid()}
TASKS: dict[str, Callable[[Path | None], Task]] = {"fashion": Fashion, "cifar": Cifar}
CYCLE_STEP_SECONDS = 0.1


@dataclass(frozen=True)
class Cell:
    """One run over given samples, on a link on which a cycle of mpca lasts so many steps."""

    task: str
    workers: int
    steps: int
    cycle: int
    label: str
    seed: int
    data: Path | None


def end_error(cell: Cell) -> float:
    """The error of the joint model at the end, in percent."""
    torch.set_num_threads(1)
    # the hub sends a broadcast down two chains, which takes its link twice as long as the model
    size = cell.cycle * CYCLE_STEP_SECONDS * bytes_per_second(LINK) / 2
    sim = Sim(
        workers=cell.workers,
        step_seconds=StepTime(CYCLE_STEP_SECONDS, spread=0.05),
        link=LINK,
        model_bytes=round(size),
        checked=False,
    )
    request = Request(steps=cell.steps, seed=cell.seed, evaluate_every=1e9, checkpoint_seconds=1e9, trace=False)
    plan = RunPlan.make(TASKS[cell.task](cell.data), DEFAULTS[cell.label], sim, request, None)
    watcher = Watcher(plan)
    sim.execute(plan, watcher)
    return 100 * watcher.evaluations[-1][2]["error"]


def cycles(
    data: Path | None = None,
    task: str = "fashion,cifar",
    workers: str = "3,8",
    steps: str = "100,400,2000,10000",
    cycle: str = "1,10,50,100",
    seeds: int = 3,
) -> Report:
    """Errors at equal samples, all protocols with their defaults, where exchanges take 1 to 100 steps."""
    names = task.split(",")
    for name in names:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
        TASKS[name](data)  # refuses now if the files are not there
    grid = [
        (name, count, length, long)
        for name in names
        for count in parse_counts(workers, "--workers")
        for length in parse_counts(steps, "--steps")
        for long in parse_counts(cycle, "--cycle")
    ]
    cells = [Cell(*place, label, seed, data) for place in grid for seed in range(seeds) for label in DEFAULTS]
    errors: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for done, (cell, error) in enumerate(_in_parallel(end_error, cells), start=1):
        errors[cell.task, cell.workers, cell.steps, cell.cycle, cell.label].append(error)
        print(f"{done}/{len(cells)}  {cell}: {error:.2f} %", file=sys.stderr)
    means = {key: statistics.fmean(found) for key, found in errors.items()}
    rows: list[dict[str, Any]] = [
        {
            **dict(zip(("task", "workers", "steps", "cycle"), place, strict=True)),
            **{label: means[*place, label] for label in DEFAULTS},
        }
        for place in grid
    ]
    ratios = {
        f"most points above averaging, {label}": max(row[label] - row["averaging"] for row in rows)
        for label in DEFAULTS
        if label != "averaging"
    }
    return {"bench": "cycles", "seeds": seeds, "rows": rows, "ratios": ratios}
