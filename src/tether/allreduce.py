"""Benchmarks of the elastic grid: how it scales, what it costs on the network, and its allreduce against gloo's."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tether import tasks
from tether.cells import Report
from tether.learner import build_model, evaluate
from tether.machine import Machine, Row, Seat
from tether.plan import Request, RunPlan
from tether.protocols import Grid, Options, Single
from tether.protocols.grid import GridNode
from tether.runtimes.base import Outcome, Runtime
from tether.runtimes.faults import Faults
from tether.runtimes.local import Local
from tether.runtimes.sim import Sim, StepTime
from tether.swarm import Nobody
from tether.task import SyntheticTask, Task
from tether.units import bytes_per_second
from tether.vector import Vector

#: AlexNet on the paper's machines (chapter 4)
STEP_SECONDS = 0.66
LINK = "1.24gbit"
MODEL_BYTES = "250MB"
#: for what is learned: so slow that a round of the small stand-in takes some steps
SLOW_LINK = "100mbit"


class Rounds(Nobody):
    """Notes the rounds that line masters tell of, and when."""

    def __init__(self) -> None:
        self.ended: dict[int, list[float]] = defaultdict(list)
        self.seconds: list[float] = []

    def record(self, node: str, values: Row, now: float) -> None:
        if "round" in values:
            self.ended[int(str(values["line"]))].append(now)
            self.seconds.append(float(str(values["seconds"])))

    def apart(self) -> list[float]:
        """The seconds between the ends of two rounds of a line, the first few left out."""
        return [b - a for ends in self.ended.values() for a, b in itertools.pairwise(ends[2:])]


@dataclass(frozen=True)
class Restless(Grid):
    """A grid whose nodes exchange and do not train."""

    def machine(self, seat: Seat) -> Machine:
        return _Restless(seat, self)


class _Restless(GridNode):
    def _compute(self) -> None:
        """Nobody trains."""

    def _report(self, number: int, lane: Any, now: float) -> None:
        lane.steps = 1
        super()._report(number, lane, now)


def grid(data: Path | None = None, nodes: Iterable[int] = (4, 16, 64, 256, 4096)) -> Report:
    """The elastic grid in the simulator: throughput, network use, stragglers, silence and what is learned."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for count in nodes:
        rows.append(_throughput(count))
        ratios[f"throughput of {count} nodes over ideal"] = rows[-1]["share"]
    for count, dimensions in ((4, 1), (4, 2), (16, 2), (27, 3)):
        rows.append(_network(count, dimensions))
        ratios[f"network in use, {count} nodes in {dimensions} dimensions"] = rows[-1]["share"]
    task = tasks.load("fashion", data=data, settings={"batch_size": "16"})
    rows += [_disturbed(task, name, quorum) for name in _DISTURBANCES for quorum in (0.5, 1.0)]
    alone = _learned(task, Single(), 1)
    rows.append({"what": "single, 5 epochs", "error": alone})
    for count in (4, 16):
        rows.append({"what": f"{count} nodes, 5 epochs", "error": _learned(task, Grid(), count)})
        ratios[f"error of {count} nodes less that of one"] = rows[-1]["error"] - alone
    columns = ["what", "share", "MB_per_round", "round_seconds", "error"]
    return {"bench": "grid", "rows": [{c: row.get(c) for c in columns} for row in rows], "ratios": ratios}


def _throughput(count: int) -> dict[str, Any]:
    """Samples per second as a share of as many learners that exchange nothing; the final mean is in the time."""
    steps, dimensions = (400, 2) if count <= 256 else (300, 3)
    options = Grid(dimensions=dimensions, steps_per_round="auto" if count <= 256 else 60)
    sim = Sim(workers=count, step_seconds=STEP_SECONDS, link=LINK, model_bytes=MODEL_BYTES, checked=False)
    outcome, rounds = _execute(SyntheticTask(), options, sim, Request(steps=steps, trace=False))
    made = sum(meter.samples for meter in outcome.meters.values())
    each = max(len(ends) for ends in rounds.ended.values())
    sent = statistics.fmean(meter.bytes_sent for meter in outcome.meters.values())
    return {
        "what": f"{count} nodes in {dimensions} dimensions",
        "share": made / outcome.seconds / (count / STEP_SECONDS),
        "MB_per_round": sent / (each + 1) / dimensions / 1e6,  # the final mean is one more
        "round_seconds": statistics.median(rounds.seconds),
    }


def _network(count: int, dimensions: int) -> dict[str, Any]:
    """The raw allreduce: the least busy direction of any network interface."""
    sim = Sim(workers=count, link=LINK, latency="0.2ms", model_bytes=MODEL_BYTES, checked=False)
    options = Restless(dimensions=dimensions, rounds_in_flight=5)
    outcome, rounds = _execute(SyntheticTask(parameters=1000), options, sim, Request(seconds=1000.0, trace=False))
    able = bytes_per_second(LINK) * outcome.seconds
    used = [n / able for meter in outcome.meters.values() for n in (meter.bytes_sent, meter.bytes_received)]
    what = f"{count} nodes in {dimensions} dimensions, exchange only"
    return {"what": what, "share": min(used), "round_seconds": statistics.median(rounds.apart())}


_DISTURBANCES = {
    "undisturbed": Faults(),
    "one of 20 ten times slower": Faults().slow("worker-5", 10),
    "2 of 20 silent": Faults().pause("worker-5", at=1.0, seconds=1e6).pause("worker-12", at=1.0, seconds=1e6),
}


def _disturbed(task: Task, name: str, quorum: float) -> dict[str, Any]:
    """Two epochs of 20 nodes, with a quorum or waiting for all."""
    sim = Sim(workers=20, step_seconds=StepTime(0.1, spread=0.05), link=SLOW_LINK, faults=_DISTURBANCES[name])
    options = Grid(scatter_quorum=quorum, gather_quorum=quorum, round_quorum=quorum)
    outcome, rounds = _execute(task, options, sim, Request(epochs=2, trace=False))
    return {
        "what": f"{name}, {'all' if quorum == 1 else 'a quorum'}",
        "round_seconds": max(outcome.seconds / len(ended) for ended in rounds.ended.values()),  # of the slowest line
        "error": _error(task, outcome),
    }


def _learned(task: Task, options: Options, count: int) -> float:
    sim = Sim(workers=count, step_seconds=StepTime(0.1, spread=0.05), link=SLOW_LINK)
    outcome, _ = _execute(task, options, sim, Request(epochs=5, trace=False))
    return _error(task, outcome)


def _error(task: Task, outcome: Outcome) -> float:
    model = build_model(task, 0)
    Vector(model).weights.copy_(outcome.weights)
    return evaluate(task, model)["error"]


def _execute(task: Task, options: Options, runtime: Runtime, request: Request) -> tuple[Outcome, Rounds]:
    rounds = Rounds()
    return runtime.execute(RunPlan.make(task, options, runtime, request, None), rounds), rounds


# ---- real processes -------------------------------------------------------------------------------------------------


def allreduce(workers: int = 4, seconds: float = 6.0, repeats: int = 3) -> Report:
    """A round of the grid in processes of this machine against gloo's all_reduce over loopback, in turns."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for megabytes in (7, 30):
        taken: dict[str, list[float]] = {"grid": [], "gloo": []}
        for _ in range(repeats):
            task = SyntheticTask(parameters=megabytes * 250_000)
            options = Restless(dimensions=1)
            _, rounds = _execute(task, options, Local(workers), Request(seconds=seconds, trace=False))
            taken["grid"].append(statistics.median(rounds.apart()))
            taken["gloo"].append(_gloo(workers, megabytes * 250_000, seconds))
        for name, found in taken.items():
            rows.append({"allreduce": name, "MB": megabytes, "ms": 1e3 * statistics.median(found)})
        in_turns = [ours / theirs for ours, theirs in zip(taken["grid"], taken["gloo"], strict=True)]
        ratios[f"grid over gloo, {megabytes} MB"] = statistics.median(in_turns)
    return {"bench": "allreduce", "workers": workers, "repeats": repeats, "rows": rows, "ratios": ratios}


def _gloo(workers: int, values: int, seconds: float) -> float:
    """The median seconds of torch's all_reduce in as many processes."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        arguments = [(rank, workers, values, seconds, f"{directory}/store", theirs) for rank in range(workers)]
        processes = [context.Process(target=_gloo_rank, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        found: float = ours.recv()
        for process in processes:
            process.join()
    return found


def _gloo_rank(rank: int, workers: int, values: int, seconds: float, store: str, result: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    vector, taken, more = torch.ones(values), [], torch.ones(1)
    begun = time.perf_counter()
    while more:
        start = time.perf_counter()
        torch.distributed.all_reduce(vector)
        taken.append(time.perf_counter() - start)
        vector.fill_(1.0)
        more.fill_(time.perf_counter() < begun + seconds)
        torch.distributed.broadcast(more, 0)
    if rank == 0:
        result.send(statistics.median(taken[2:]))
    torch.distributed.destroy_process_group()
