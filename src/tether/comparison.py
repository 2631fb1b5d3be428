"""How long protocols take to a target error, beside the tables and figures of the MPCA SGD paper.

The paper's workloads are priced: model size, seconds per batch and gigabit Ethernet are theirs (table 1), in the
simulator. What really learns is a small stand-in that is limited by gradient noise at the target: Fashion-MNIST, a
perceptron, mini-batch 16, Adam. One evaluation is noisy, so the target counts as reached when the mean of the
evaluations of the last epoch is below it. Ratios to a single learner are what can be compared with the paper.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tether.cells import Report
from tether.errors import missing_extra, unknown
from tether.progress import make_progress
from tether.protocols import Averaging, Elastic, Mpca, Options, Server, Single
from tether.report import load_run
from tether.run import run
from tether.runtimes.sim import Sim, StepTime
from tether.task import SyntheticTask
from tether.tasks.fashion import Fashion
from tether.units import bytes_per_second

LINK = "1gbit"
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


def _protocols(averaging: int, elastic: int) -> dict[str, Options]:
    return {
        "single": Single(),
        "server": Server(sync="async"),
        "averaging": Averaging(tau=averaging),
        "elastic": Elastic(tau=elastic),
        "mpca": Mpca(),
    }


WORKLOADS = {
    "resnet-110": Workload(
        "7MiB",
        0.095,
        _protocols(58, 20) | {"elastic auto": Elastic()},
        {"single": 10429, "server": 7361, "averaging": 2559, "elastic": 2070, "mpca": 1841},
    ),
    "resnet-152": Workload(
        "223MiB",
        0.809,
        _protocols(146, 50),
        {"single": 103.1, "server": 55.4, "averaging": 30.9, "elastic": 27.2, "mpca": 22.1},
    ),
    "vgg-a": Workload(
        "491MiB",
        0.474,
        _protocols(539, 95),
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


def _reach_all(trials: list[Trial]) -> dict[tuple[str, str], dict[str, float]]:
    """The medians over the seeds by workload and label, told as they come; as many at a time as there are cores."""
    Settling(trials[0].data)  # refuses now if the files are not there
    outcomes: dict[tuple[str, str], list[dict[str, float]]] = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(reach, trial): trial for trial in trials}
        for done, future in enumerate(as_completed(futures), start=1):
            trial, outcome = futures[future], future.result()
            outcomes.setdefault((trial.workload, trial.label), []).append(outcome)
            told = f"{trial.workload} {trial.label} seed {trial.seed}: {outcome['seconds']:.0f} s"
            print(f"{done}/{len(trials)}  {told} (computed in {outcome['took']:.0f} s)", file=sys.stderr)
    return {
        key: {name: statistics.median(outcome[name] for outcome in found) for name in found[0]}
        for key, found in outcomes.items()
    }


def table2(data: Path | None = None, workload: str | None = None, seeds: int = 3, target: float = 0.12) -> Report:
    """Time to a target error of every protocol on the workloads of the MPCA SGD paper, beside its table 2."""
    if workload is not None and workload not in WORKLOADS:
        raise unknown("workload", workload, WORKLOADS)
    names = [workload] if workload is not None else list(WORKLOADS)
    trials = [
        Trial(name, label, protocol, seed, 8, target, data)
        for name in names
        for seed in range(seeds)
        for label, protocol in WORKLOADS[name].protocols.items()
        if label != "single" or name == names[0]
    ]
    outcomes = _reach_all(trials)
    for name in names[1:]:  # a learner alone moves nothing, so its time goes with that of its steps
        longer = WORKLOADS[name].step_seconds / WORKLOADS[names[0]].step_seconds
        alone = outcomes[names[0], "single"]
        outcomes[name, "single"] = {**alone, "seconds": alone["seconds"] * longer}
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name in names:
        paper = WORKLOADS[name].paper
        medians = {label: outcomes[name, label]["seconds"] for label in WORKLOADS[name].protocols}
        for label, protocol in WORKLOADS[name].protocols.items():
            rows.append(
                {
                    "workload": name,
                    "protocol": str(protocol),
                    "seconds": medians[label],
                    "utilization": outcomes[name, label]["utilization"],
                    "faster_than_single": medians["single"] / medians[label],
                    "paper": paper["single"] / paper[label] if label in paper else None,
                }
            )
            ratios[f"{name} {label} over mpca"] = medians[label] / medians["mpca"]
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
    seconds = {label: outcomes[workload, label]["seconds"] for label in variants}
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
    seconds = {count: outcomes["resnet-110", str(count)]["seconds"] for count in counts}
    rows = [{"workers": count, "seconds": seconds[count], "speedup": seconds[1] / seconds[count]} for count in counts]
    ratios = {f"share of the ideal with {count}": seconds[1] / seconds[count] / count for count in counts}
    picture.write_bytes(scaling_png(rows, target))
    return {"bench": "scaling", "target": target, "seeds": seeds, "rows": rows, "ratios": ratios}
