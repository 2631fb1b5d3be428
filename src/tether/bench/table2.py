"""Time to a target error of every protocol, after table 2 of the MPCA SGD paper."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tether.bench.common import FashionData, Report, Seeds, Target
from tether.bench.workloads import WORKLOADS, Trial, reach_all
from tether.errors import unknown


def table2(
    data: FashionData = None,
    workload: Annotated[
        str | None,
        typer.Option(help="Measure only resnet-110, resnet-152 or vgg-a, which takes a third of the time."),
    ] = None,
    workers: Annotated[int, typer.Option(min=2, help="Workers of every protocol except single; the paper has 8.")] = 8,
    seeds: Seeds = 3,
    target: Target = 0.12,
) -> Report:
    """Virtual seconds to a target error of every protocol on the workloads of the MPCA SGD paper, next to its table 2.

    Models, step times and links are priced as in the paper's table 1; what learns is a small network on Fashion-MNIST.
    """
    if workload is not None and workload not in WORKLOADS:
        raise unknown("workload", workload, WORKLOADS)
    names = [workload] if workload is not None else list(WORKLOADS)
    trials = [
        Trial(name, label, protocol, seed, workers, target, data, priced=priced)
        for name in names
        for seed in range(seeds)
        for priced in (False, True)
        for label, protocol in WORKLOADS[name].protocols.items()
        if protocol.collective or (not priced and (label != "single" or name == names[0]))
    ]
    outcomes = reach_all(trials)
    alone = outcomes[names[0], "single", False]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name, priced in ((name, priced) for name in names for priced in (False, True)):
        paper = WORKLOADS[name].paper
        # a worker alone moves nothing, so its time is proportional to that of its steps
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
