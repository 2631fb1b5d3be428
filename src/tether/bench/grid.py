"""The elastic grid in the simulator: how it scales, how it uses the network, and what it learns.

Step time, link and model are those of AlexNet on the paper's machines (chapter 4).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from tether import tasks
from tether.bench.common import FashionData, Report, counts
from tether.core import message
from tether.core.effects import Compute, Effect
from tether.core.events import Event
from tether.core.machine import Machine, NodeContext
from tether.core.units import bytes_per_second
from tether.core.vector import Vector
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.learner import build_model, evaluate
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Grid, Options, Single
from tether.protocols.grid.node import GridNode
from tether.runtimes.base import NullObserver, Outcome, Runtime
from tether.runtimes.sim.costs import StepTime
from tether.runtimes.sim.faults import Faults
from tether.runtimes.sim.runtime import Sim
from tether.task import Task

STEP_SECONDS = 0.66
LINK = "1.24gbit"
MODEL_BYTES = "250MB"
#: for runs that learn: slow enough that a round of the small network takes some steps
SLOW_LINK = "100mbit"


def grid(
    data: FashionData = None,
    nodes: Annotated[
        Sequence[int],
        counts("Numbers of nodes whose throughput is measured. 4096 take most of the time; leave them out at first."),
    ] = (4, 16, 64, 256, 4096),
    epochs: Annotated[
        float, typer.Option(help="Length of the runs that learn. Use fewer epochs for a first look.")
    ] = 5,
) -> Report:
    """The elastic grid in the simulator: throughput, network use, stragglers, silent nodes, and what is learned."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for count in nodes:
        rows.append(_throughput(count))
        ratios[f"throughput of {count} nodes over ideal"] = rows[-1]["share"]
    for count, dimensions in ((4, 1), (4, 2), (16, 2), (27, 3)):
        rows.append(_network(count, dimensions))
        ratios[f"network in use, {count} nodes in {dimensions} dimensions"] = rows[-1]["share"]
    task = tasks.load("fashion", data=data, settings={"batch_size": "16"})
    rows += [_disturbed(task, name, quorum, 0.4 * epochs) for name in _DISTURBANCES for quorum in (0.5, 1.0)]
    alone = _learned(task, Single(), 1, epochs)
    rows.append({"what": f"single, {epochs:g} epochs", "error": alone})
    for count in (4, 16):
        rows.append({"what": f"{count} nodes, {epochs:g} epochs", "error": _learned(task, Grid(), count, epochs)})
        ratios[f"error of {count} nodes less that of one"] = rows[-1]["error"] - alone
    columns = ["what", "share", "MB_per_round", "round_seconds", "error"]
    return {"bench": "grid", "rows": [{c: row.get(c) for c in columns} for row in rows], "ratios": ratios}


class RoundTimes(NullObserver):
    """Notes the rounds that line masters report, and when they ended."""

    def __init__(self) -> None:
        self.ended: dict[int, list[float]] = defaultdict(list)
        self.seconds: list[float] = []
        #: when this process heard of each
        self.noted: list[float] = []

    def record(self, node: str, values: message.Row, now: float) -> None:
        if "round" in values:
            self.ended[int(str(values["line"]))].append(now)
            self.noted.append(time.monotonic())
            self.seconds.append(float(str(values["seconds"])))

    def periods(self) -> list[float]:
        """The seconds between the ends of two rounds of a line, without the first few."""
        return [b - a for ends in self.ended.values() for a, b in itertools.pairwise(ends[2:])]


@dataclass(frozen=True)
class ExchangeOnly(Grid):
    """A grid whose nodes exchange and do not train."""

    def machine(self, context: NodeContext) -> Machine:
        return _WithoutTraining(GridNode(context, self.dimensions, replace(self.round_rules, steps_per_round=0)))


class _WithoutTraining:
    """A machine whose node computes no gradients."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        return [effect for effect in self._machine.handle(event, now) if not isinstance(effect, Compute)]

    def check(self) -> None:
        self._machine.check()


def execute(task: Task, options: Options, runtime: Runtime, request: Request) -> tuple[Outcome, RoundTimes]:
    rounds = RoundTimes()
    return runtime.execute(RunPlan.make(task, options, runtime, request, None), rounds), rounds


def _throughput(count: int) -> dict[str, Any]:
    """Samples per second over those of the same workers without exchanges; the time includes the final mean."""
    steps, dimensions = (400, 2) if count <= 256 else (300, 3)
    options = Grid(dimensions=dimensions, steps_per_round="auto" if count <= 256 else 60)
    sim = Sim(workers=count, step_seconds=STEP_SECONDS, link=LINK, model_bytes=MODEL_BYTES)
    outcome, rounds = execute(SyntheticTask(), options, sim, Request(steps=steps, trace=False))
    samples = sum(meter.samples for meter in outcome.meters.values())
    each = max(len(ends) for ends in rounds.ended.values())
    sent = statistics.fmean(meter.bytes_sent for meter in outcome.meters.values())
    return {
        "what": f"{count} nodes in {dimensions} dimensions",
        "share": samples / outcome.seconds / (count / STEP_SECONDS),
        "MB_per_round": sent / (each + 1) / dimensions / 1e6,  # the final mean is one more
        "round_seconds": statistics.median(rounds.seconds),
    }


def _network(count: int, dimensions: int) -> dict[str, Any]:
    """The raw allreduce: the least busy direction of any network interface."""
    sim = Sim(workers=count, link=LINK, latency="0.2ms", model_bytes=MODEL_BYTES)
    options = ExchangeOnly(dimensions=dimensions, rounds_in_flight=5)
    outcome, rounds = execute(SyntheticTask(parameters=1000), options, sim, Request(seconds=1000.0, trace=False))
    capacity = bytes_per_second(LINK) * outcome.seconds
    used = [n / capacity for meter in outcome.meters.values() for n in (meter.bytes_sent, meter.bytes_received)]
    what = f"{count} nodes in {dimensions} dimensions, exchange only"
    return {"what": what, "share": min(used), "round_seconds": statistics.median(rounds.periods())}


_DISTURBANCES = {
    "undisturbed": Faults(),
    "one of 20 ten times slower": Faults().slow("worker-5", 10),
    "2 of 20 silent": Faults().pause("worker-5", at=1.0, seconds=1e6).pause("worker-12", at=1.0, seconds=1e6),
}


def _disturbed(task: Task, name: str, quorum: float, epochs: float) -> dict[str, Any]:
    """20 nodes, with a quorum or waiting for all."""
    sim = Sim(workers=20, step_seconds=StepTime(0.1, spread=0.05), link=SLOW_LINK, faults=_DISTURBANCES[name])
    options = Grid(scatter_quorum=quorum, gather_quorum=quorum, round_quorum=quorum)
    outcome, rounds = execute(task, options, sim, Request(epochs=epochs, trace=False))
    return {
        "what": f"{name}, {'all' if quorum == 1 else 'a quorum'}",
        "round_seconds": max(outcome.seconds / len(ended) for ended in rounds.ended.values()),  # of the slowest line
        "error": _error(task, outcome),
    }


def _learned(task: Task, options: Options, count: int, epochs: float) -> float:
    sim = Sim(workers=count, step_seconds=StepTime(0.1, spread=0.05), link=SLOW_LINK)
    outcome, _ = execute(task, options, sim, Request(epochs=epochs, trace=False))
    return _error(task, outcome)


def _error(task: Task, outcome: Outcome) -> float:
    model = build_model(task, 0)
    Vector(model).weights.copy_(outcome.weights)
    return evaluate(task, model)["error"]
