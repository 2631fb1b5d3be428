"""How much of their time workers in processes compute under mpca."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer

from tether import tasks
from tether.bench.common import FashionData, Report, Rounds, median_ratio, ratios_in_turns, run_quietly
from tether.protocols import Averaging, Mpca, Options
from tether.runtimes.local import Local


def utilization(
    data: FashionData = None,
    workers: Annotated[int, typer.Option(min=1, help="How many workers, each a process of this machine.")] = 4,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of each worker in a turn. Use fewer for a first look.")
    ] = 1500,
    rounds: Rounds = 5,
) -> Report:
    """The share of time that workers compute under mpca, against workers that exchange nothing, in turns.

    Workers share the machine's cores with the exchange, so its cost also shows in the samples per second. A first turn
    warms up and does not count.
    """
    task = tasks.load("fashion", data=data)
    # alone: one exchange, at the very end
    protocols: dict[str, Options] = {"alone": Averaging(tau=steps), "mpca": Mpca()}
    shares: dict[str, list[float]] = {label: [] for label in protocols}
    speeds: dict[str, list[float]] = {label: [] for label in protocols}
    for turn in range(rounds + 1):
        for label, protocol in protocols.items():
            figures = run_quietly(task, protocol, Local(workers), steps=steps)
            if turn:
                shares[label].append(figures["utilization"]["mean"])
                speeds[label].append(figures["samples_per_second"])
    rows = [
        {
            "workers": label,
            "utilization": statistics.median(shares[label]),
            "samples_per_second": statistics.median(speeds[label]),
        }
        for label in protocols
    ]
    in_turns = ratios_in_turns(shares["mpca"], shares["alone"])
    ratios = {
        "mpca_over_alone": statistics.median(in_turns),
        "min": min(in_turns),
        "max": max(in_turns),
        "samples_per_second": median_ratio(speeds["mpca"], speeds["alone"]),
    }
    return {"bench": "utilization", "rounds": rounds, "rows": rows, "ratios": ratios}
