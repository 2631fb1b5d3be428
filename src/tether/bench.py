"""Benchmarks that a user can repeat: ratios of things measured in turns within one run."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tether import accuracy, allreduce, comparison, exchanges, scaleup, tasks
from tether.cells import Report
from tether.errors import unknown
from tether.learner import build_model
from tether.plan import Request
from tether.progress import make_progress
from tether.protocols import Averaging, Mpca, Options, Server, Single
from tether.run import run
from tether.runtimes.base import Outcome
from tether.runtimes.local import Local
from tether.runtimes.sim import Sim, StepTime
from tether.swarm import simulate
from tether.task import Batches, SyntheticTask, Task


def overhead(task: str = "fashion", data: Path | None = None, steps: int = 1500, rounds: int = 7) -> Report:
    """One worker under `local` against a plain PyTorch loop over the same batches, in turns."""
    subject = tasks.load(task, data=data)
    train_data = subject.train_data()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {"plain": [], "tether": []}
    try:
        for round_ in range(rounds + 1):
            plain = _plain_loop(subject, Batches(subject, train_data, seed=0), steps)
            with tempfile.TemporaryDirectory() as directory:
                result = run(
                    subject,
                    Single(),
                    Local(1),
                    steps=steps,
                    evaluate_every=1e9,
                    run_dir=Path(directory) / "run",
                    progress=make_progress(quiet=True),
                )
            if round_:  # the first round only warms up
                taken["plain"].append(plain / steps)
                taken["tether"].append(result.figures["seconds"] / steps)
        loader = DataLoader(train_data, batch_size=subject.batch_size, shuffle=True)
        with_loader = _plain_loop(subject, _endless(loader), steps) / steps
    finally:
        torch.set_num_threads(threads)
    rows = [{"loop": name, "ms_per_step": 1e3 * statistics.median(seconds)} for name, seconds in taken.items()]
    rows.append({"loop": "plain with DataLoader", "ms_per_step": 1e3 * with_loader})
    in_turns = [ours / plain for ours, plain in zip(taken["tether"], taken["plain"], strict=True)]
    return {
        "bench": "overhead",
        "task": subject.name,
        "steps": steps,
        "rounds": rounds,
        "rows": rows,
        "ratios": {
            "tether_over_plain": statistics.median(in_turns),
            "tether_over_plain_min": min(in_turns),
            "tether_over_plain_max": max(in_turns),
            "tether_over_plain_with_dataloader": statistics.median(taken["tether"]) / with_loader,
        },
    }


def _plain_loop(task: Task, batches: Any, steps: int) -> float:
    """Seconds that an ordinary training loop takes."""
    model = build_model(task, 0)
    optimizer = task.optimizer(model)
    start = time.perf_counter()
    for _, batch in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()
    return time.perf_counter() - start


def _endless(loader: Any) -> Any:
    while True:
        yield from loader


def simulator(workers: int = 1000, steps: int = 20) -> Report:
    """Events per second, with few workers and with many."""
    rows = []
    protocols: tuple[Options, ...] = (Server(), Averaging(tau=5))
    for count in (8, workers):
        for protocol in protocols:
            task = SyntheticTask()
            begun = time.perf_counter()
            with tempfile.TemporaryDirectory() as directory:
                result = run(
                    task,
                    protocol,
                    Sim(workers=count),
                    steps=steps * (workers // count if count == 8 else 1),
                    run_dir=Path(directory) / "run",
                    evaluate_every=1e9,
                    trace=False,
                    progress=make_progress(quiet=True),
                )
            seconds = time.perf_counter() - begun
            rows.append(
                {
                    "protocol": protocol.name,
                    "workers": count,
                    "steps": result.figures["steps"],
                    "events": result.figures["events"],
                    "seconds": seconds,
                    "events_per_second": result.figures["events"] / seconds,
                    "virtual_seconds": result.figures["seconds"],
                }
            )
    by = {(row["protocol"], row["workers"]): row["events_per_second"] for row in rows}
    ratios = {f"{p.name}_{workers}_over_8_workers": by[p.name, workers] / by[p.name, 8] for p in protocols}
    return {"bench": "sim", "rows": rows, "ratios": ratios}


def rudra(steps: int = 700) -> Report:
    """Rudra's staleness (figure 4) and communication overlap (table 1), in the simulator."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    even = StepTime(0.1, spread=0.05)
    for n in (1, 2, 30):
        outcome = _simulated(Server(sync="soft", n=n), Sim(workers=30, step_seconds=even, link="10gbit"), steps)
        histogram = _staleness(outcome)
        mean = sum(k * count for k, count in histogram.items()) / histogram.total()
        above = sum(count for k, count in histogram.items() if k > 2 * n) / histogram.total()
        rows.append({"what": f"{n}-softsync, 30 learners", "staleness": mean, "above_2n": above, "overlap": None})
        ratios[f"staleness_over_n_{n}_softsync"] = mean / n
    large = Sim(workers=60, step_seconds=StepTime(0.2, spread=0.05), link="240gbit", model_bytes="300MB")
    architectures = {
        "base": Server(sync="async"),
        "adv": Server(sync="async", topology="tree"),
        "adv*": Server(sync="async", topology="tree", overlap=True),
    }
    for label, server in architectures.items():
        outcome = _simulated(server, large, steps // 10)
        meters = [meter for name, meter in outcome.meters.items() if name.startswith("worker")]
        share = statistics.fmean(meter.overlap for meter in meters)
        histogram = _staleness(outcome)
        mean = sum(k * count for k, count in histogram.items()) / histogram.total()
        rows.append({"what": f"{label}, 60 learners, 300 MB", "staleness": mean, "above_2n": None, "overlap": share})
        ratios[f"overlap_{label}"] = share
    return {"bench": "rudra", "rows": rows, "ratios": ratios}


def utilization(data: Path | None = None, workers: int = 4, steps: int = 1500, rounds: int = 5) -> Report:
    """How much of their time workers in processes compute under mpca, against workers that exchange nothing.

    They share the machine's processors with the exchange, so what it costs shows in the samples per second too.
    """
    task = tasks.load("fashion", data=data)
    alone = Averaging(tau=steps)  # one exchange, when all is over
    shares: dict[str, list[float]] = {"alone": [], "mpca": []}
    speeds: dict[str, list[float]] = {"alone": [], "mpca": []}
    for round_ in range(rounds + 1):
        for label, protocol in (("alone", alone), ("mpca", Mpca())):
            with tempfile.TemporaryDirectory() as directory:
                result = run(
                    task,
                    protocol,
                    Local(workers),
                    steps=steps,
                    evaluate_every=1e9,
                    run_dir=Path(directory) / "run",
                    trace=False,
                    progress=make_progress(quiet=True),
                )
            if round_:  # the first round only warms up
                shares[label].append(result.figures["utilization"]["mean"])
                speeds[label].append(result.figures["samples_per_second"])
    rows = [
        {
            "workers": label,
            "utilization": statistics.median(shares[label]),
            "samples_per_second": statistics.median(speeds[label]),
        }
        for label in shares
    ]
    in_turns, speed_in_turns = (
        [mpca / alone for mpca, alone in zip(taken["mpca"], taken["alone"], strict=True)] for taken in (shares, speeds)
    )
    ratios = {
        "mpca_over_alone": statistics.median(in_turns),
        "min": min(in_turns),
        "max": max(in_turns),
        "samples_per_second": statistics.median(speed_in_turns),
    }
    return {"bench": "utilization", "rounds": rounds, "rows": rows, "ratios": ratios}


class Wide(Task):
    """One square layer, of as many megabytes as are asked for."""

    batch_size = 16

    def __init__(self, megabytes: int) -> None:
        self.width = round((megabytes * 1e6 / 4) ** 0.5)

    def model(self) -> nn.Module:
        return nn.Linear(self.width, self.width, bias=False)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randn(64, self.width, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = model(batch[0])
        return outputs.square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"error": 0.0}


def checkpoint(megabytes: int = 100, seconds: float = 100, rounds: int = 3) -> Report:
    """Steps per second with checkpoints at their usual interval over those without any, in turns.

    Under single the worker itself holds the model that is saved, and under averaging a hub does; both have momentum to
    save. The interval is 30 s: a turn that is shorter than three of them says little.
    """
    task, usual, never = Wide(megabytes), Request().checkpoint_seconds, 1e9
    rows, ratios = [], {}
    for protocol, workers in ((Single(), 1), (Averaging(tau=10), 2)):
        speeds: dict[float, list[float]] = {usual: [], never: []}
        for turn in range(rounds):
            for interval in (usual, never) if turn % 2 else (never, usual):
                with tempfile.TemporaryDirectory() as directory:
                    result = run(
                        task,
                        protocol,
                        Local(workers),
                        seconds=seconds,
                        epochs=1e9,
                        evaluate_every=1e9,
                        checkpoint_seconds=interval,
                        run_dir=Path(directory) / "run",
                        trace=False,
                        progress=make_progress(quiet=True),
                    )
                speeds[interval].append(result.figures["steps"] / result.figures["seconds"])
        in_turns = [saved / alone for saved, alone in zip(speeds[usual], speeds[never], strict=True)]
        rows += [
            {"protocol": protocol.name, "interval_seconds": interval, "steps_per_second": statistics.median(found)}
            for interval, found in speeds.items()
        ]
        ratios[protocol.name] = statistics.median(in_turns)
        ratios |= {f"{protocol.name}_min": min(in_turns), f"{protocol.name}_max": max(in_turns)}
    return {"bench": "checkpoint", "megabytes": megabytes, "rounds": rounds, "rows": rows, "ratios": ratios}


def _simulated(protocol: Options, sim: Sim, steps: int) -> Outcome:
    task = SyntheticTask(parameters=16, rate=0.01)
    return simulate(task, protocol, sim, Request(steps=steps, trace=False))


def _staleness(outcome: Outcome) -> Counter[int]:
    return sum((Counter(meter.staleness) for meter in outcome.meters.values()), Counter())


def named(name: str) -> Callable[..., Report]:
    """The benchmark of that name; its arguments are the options that it has."""
    known: dict[str, Callable[..., Report]] = {
        "accuracy": accuracy.accuracy,
        "allreduce": allreduce.allreduce,
        "checkpoint": checkpoint,
        "cycles": comparison.cycles,
        "grid": allreduce.grid,
        "overhead": overhead,
        "rudra": rudra,
        "spark": exchanges.spark,
        "sim": simulator,
        "mpca": comparison.mpca,
        "scaleup": scaleup.scaleup,
        "scaling": comparison.scaling,
        "table2": comparison.table2,
        "utilization": utilization,
    }
    if name not in known:
        raise unknown("benchmark", name, known)
    return known[name]
