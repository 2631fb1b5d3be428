"""The simulator's cycle times against those that are measured between hosts, for the same link, workers and step time.

The hub has a host of its own, as in the simulator. A step waits, as for a device, so that the few cores of this machine
do the exchanges; the simulator is given the time that steps have really taken. What a cycle is depends on the protocol:
the time between two renewals of a shard, two rounds, two exchanges of a worker, or two updates of the parameter server.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tether.bench.cells import options_of
from tether.bench.common import NEVER, Report, Row, names
from tether.bench.remote import call_on, cluster, execute
from tether.bench.spark import Waiting
from tether.core import message
from tether.core.trace import Meter
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.synthetic import SyntheticTask
from tether.runtimes.base import NullObserver
from tether.runtimes.cluster import Cluster
from tether.runtimes.sim.runtime import Sim
from tether.testing.hosts import hosts

#: the part of a run at its beginning whose cycles do not count: protocols measure the network then
WARM_UP = 0.4
#: with exchanges that are short enough to be measured often
PROTOCOLS = (
    "server",
    "server:sync=async",
    "averaging:tau=20",
    "averaging:tau=20+outer=nesterov",
    "elastic:tau=10",
    "mpca",
    "streaming",
    "grid",
    "tide",
)
#: a round trip between two emulated hosts
LATENCY = "0.1ms"


class Cycles(NullObserver):
    """Notes when each kind of cycle ended."""

    def __init__(self) -> None:
        self.ended: dict[str, list[float]] = defaultdict(list)

    def record(self, node: str, values: message.Row, now: float) -> None:
        if kind := next((name for name in ("shard", "line", "round", "exchange", "clock") if name in values), ""):
            several = kind in ("shard", "line")
            self.ended[f"{kind} {values[kind]}" if several else kind].append(now)

    def seconds(self, until: float) -> float:
        """The mean time between two ends in the part of the run that counts."""
        means = []
        for times in self.ended.values():
            counted = [time for time in times if time > WARM_UP * until]
            if len(counted) > 2:
                means.append((counted[-1] - counted[0]) / (len(counted) - 1))
        return statistics.fmean(means) if means else float("nan")


def fidelity(
    workers: Annotated[int, typer.Option(min=1, help="How many hosts have a worker; the hub has another.")] = 4,
    link: Annotated[str, typer.Option(help="The speed of each host's link.")] = "100mbit",
    megabytes: Annotated[float, typer.Option(help="Size of the model.")] = 7.0,
    step: Annotated[float, typer.Option(help="Seconds that a step waits.")] = 0.1,
    seconds: Annotated[float, typer.Option(help="How long each protocol runs. More for slow exchanges.")] = 30.0,
    protocols: Annotated[
        Sequence[str], names("Protocols to measure; with settings as tide:drift=0+phases=1.", "mpca,tide")
    ] = PROTOCOLS,
) -> Report:
    """Cycle times between emulated hosts over those of the simulator, of every protocol.

    Needs root, and the programs ip and tc.
    """
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    with hosts(workers + 1, link) as places:
        for name in protocols:
            options = options_of(name)
            with cluster(places[0], places[1:]) as on:
                measured, step_seconds = call_on(places[0], _measure, megabytes, step, options, on, seconds)
            simulated = _simulate(options, workers, link, megabytes, step_seconds, seconds)
            rows.append(
                {"protocol": name, "measured": measured, "simulated": simulated, "ms_per_step": 1e3 * step_seconds}
            )
            ratios[f"{name}, measured over simulated"] = measured / simulated
            print(f"{name}: {measured:.3f} s, simulated {simulated:.3f} s", file=sys.stderr)
    return {"bench": "fidelity", "workers": workers, "link": link, "MB": megabytes, "rows": rows, "ratios": ratios}


def _request(seconds: float) -> Request:
    return Request(seconds=seconds, evaluate_every=NEVER, checkpoint_seconds=NEVER, trace=False)


def _measure(megabytes: float, step: float, options: Any, on: Cluster, seconds: float) -> tuple[float, float]:
    """The duration of a cycle, and of a step."""
    outcome, cycles = execute(Waiting(megabytes, step), options, on, _request(seconds), Cycles())
    return cycles.seconds(outcome.seconds), _step_seconds(outcome.meters.values())


def _step_seconds(meters: Any) -> float:
    trained: list[Meter] = [meter for meter in meters if meter.compute_seconds]
    return sum(meter.compute_seconds for meter in trained) / sum(meter.steps for meter in trained)


def _simulate(options: Any, workers: int, link: str, megabytes: float, step_seconds: float, seconds: float) -> float:
    sim = Sim(
        workers=workers, link=link, latency=LATENCY, step_seconds=step_seconds, model_bytes=round(megabytes * 1e6)
    )
    cycles = Cycles()
    plan = RunPlan.make(SyntheticTask(parameters=3000), options, sim, _request(seconds), None)
    outcome = sim.execute(plan, cycles)
    return cycles.seconds(outcome.seconds)
