"""How many events per second the simulator handles."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tether.bench.common import Report, run_quietly
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Averaging, Options, Server
from tether.runtimes.sim.runtime import Sim

FEW_WORKERS = 8


def sim(
    workers: Annotated[
        int, typer.Option(min=FEW_WORKERS, help="The larger number of workers. Use fewer for a first look.")
    ] = 1000,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of each of the many workers. More make the figures steadier.")
    ] = 20,
) -> Report:
    """Events per second of the simulator, with 8 workers and with many, which make equally many steps in all."""
    rows = []
    protocols: tuple[Options, ...] = (Server(), Averaging(tau=5))
    for count in (FEW_WORKERS, workers):
        for protocol in protocols:
            begun = time.perf_counter()
            figures = run_quietly(SyntheticTask(), protocol, Sim(workers=count), steps=steps * (workers // count))
            seconds = time.perf_counter() - begun
            rows.append(
                {
                    "protocol": protocol.name,
                    "workers": count,
                    "steps": figures["steps"],
                    "events": figures["events"],
                    "seconds": seconds,
                    "events_per_second": figures["events"] / seconds,
                    "virtual_seconds": figures["seconds"],
                }
            )
    by = {(row["protocol"], row["workers"]): row["events_per_second"] for row in rows}
    ratios = {
        f"{protocol.name}_{workers}_over_{FEW_WORKERS}_workers": by[protocol.name, workers]
        / by[protocol.name, FEW_WORKERS]
        for protocol in protocols
    }
    return {"bench": "sim", "rows": rows, "ratios": ratios}
