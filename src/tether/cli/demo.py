"""`tether demo`: what Tether is for, in about a minute.

First the digits are trained in real processes, by one worker and by four. Then the simulator trains them on a slow
network with several protocols, each until it reaches the same error. Its seconds are virtual: those that eight machines
would take.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tether import tasks
from tether.analysis.report import check_writable, write_report
from tether.analysis.runs import load_run
from tether.api import Result, run
from tether.cli.output import err, out
from tether.execution.progress import make_progress
from tether.protocols import Averaging, Mpca, Options, Server, Single, Tide
from tether.runtimes.base import Runtime
from tether.runtimes.local import Local
from tether.runtimes.sim.runtime import Sim

#: the simulated cluster; one with links and a model ten times as large behaves the same
WORKERS, LINK, MODEL_BYTES, STEP_SECONDS = 8, "100mbit", "1MiB", 0.1
#: small mini-batches have noisy gradients, so that there is something to gain from several workers
BATCH_SIZE = 2
TARGET = 0.03
#: the title of the runs in real processes
PROCESSES = "digits, in processes of this machine"
#: the length of a simulated run that does not reach the target; most runs reach it within 5 epochs
EPOCHS_MAX = 15
#: by name of the run: its title, the protocol, and what its workers do
SIMULATED: Mapping[str, tuple[str, Options, str]] = {
    "single": ("one worker", Single(), "trains alone"),
    "server": ("server", Server(), "exchange at every step"),
    "averaging": ("averaging", Averaging(), "average now and then"),
    "diloco": ("DiLoCo", Averaging(outer="nesterov"), "the same, with momentum"),
    "mpca": ("mpca", Mpca(), "exchange while training"),
    "tide": ("tide", Tide(), "both; the default"),
}


def demo(
    to: Annotated[Path, typer.Option(help="The folder for runs and reports.")] = Path("runs/demo"),
    epochs: Annotated[
        float, typer.Option(help="The length of the runs in real processes. Use fewer epochs on a slow machine.")
    ] = 20,
) -> None:
    """Train the digits in real processes, then compare protocols on a simulated slow network.

    Each part prints a table and writes a report to open in a browser. The demo takes about a minute.
    """
    check_writable(to)
    real = {
        name: _train(to / f"{name}-processes", options, Local(workers), epochs=epochs)
        for name, options, workers in (("single", Single(), 1), ("averaging", Averaging(tau=10), 4))
    }
    out.print(_processes_table(real))
    simulated = {}
    for name, (title, options, _) in SIMULATED.items():
        err.print(f"simulating: {title}", highlight=False)
        simulated[name] = _train(
            to / f"{name}-slow-network",
            options,
            Sim(
                options.workers_max or WORKERS,
                link=LINK,
                step_seconds=STEP_SECONDS,
                model_bytes=MODEL_BYTES,
            ),
            settings={"batch_size": str(BATCH_SIZE)},
            until=f"error<{TARGET}",
            epochs=EPOCHS_MAX,
            evaluate_every=0.2,
            progress=make_progress(quiet=True),
        )
    out.print(_network_table(simulated))
    out.print(_meaning(simulated), highlight=False)
    for title, results, place, note in (
        ("open first, the slow network", simulated, to / "report", f"{_network()}. {_meaning(simulated)}"),
        ("then, real processes", real, to / "report-processes", f"{PROCESSES}, by one worker and by four."),
    ):
        page, _ = write_report([load_run(result.directory) for result in results.values()], place, note)
        out.print(f"{title}: {page.absolute()}", highlight=False)


def _train(
    place: Path, options: Options, on: Runtime, *, settings: dict[str, str] | None = None, **goal: Any
) -> Result:
    """Train the digits, in the first directory of that name that is free."""
    candidates = [place, *(place.with_name(f"{place.name}-{number}") for number in range(2, 10_000))]
    free = next(candidate for candidate in candidates if not candidate.exists())
    spec = {"spec": "digits", "data": None, "settings": settings or {}}
    return run(tasks.load("digits", settings=settings), options, on, run_dir=free, task_spec=spec, **goal)


def _processes_table(results: Mapping[str, Result]) -> Table:
    table = Table("protocol", "workers", "seconds", "samples/s", "test error", title=PROCESSES)
    for result in results.values():
        figures = result.figures
        table.add_row(
            figures["protocol"],
            str(figures["workers"]),
            f"{figures['seconds']:.2f}",
            f"{figures['samples_per_second']:,.0f}",
            f"{result.metrics['error']:.2%}",
        )
    return table


def _network_table(results: Mapping[str, Result]) -> Table:
    table = Table("protocol", "its workers", "virtual seconds", "speedup", "computing", title=_network())
    for name, result in results.items():
        label, _, what = SIMULATED[name]
        speedup = _speedup(results, name)
        table.add_row(
            label,
            what,
            f"{result.figures['seconds']:.0f}" if speedup else "not reached",
            f"{speedup:.1f}" if speedup else "",
            f"{result.figures['utilization']['mean']:.0%}",
        )
    return table


def _network() -> str:
    """The target and the simulated cluster."""
    return f"digits to {TARGET:.0%} error: {WORKERS} simulated workers, links of {LINK}, a model of {MODEL_BYTES}"


def _speedup(results: Mapping[str, Result], name: str) -> float | None:
    """How many times sooner than one worker the target was reached, if it was."""
    figures = results[name].figures
    if not figures["reason"].endswith("reached"):
        return None
    return float(results["single"].figures["seconds"] / figures["seconds"])


def _meaning(results: Mapping[str, Result]) -> str:
    """The table in words."""
    waiting = 1 - results["server"].figures["utilization"]["mean"]
    found = {name: f"{_speedup(results, name) or 0:.1f}" for name in results}
    return (
        f"{WORKERS} workers that exchange gradients at every step spend {waiting:.0%} of their time waiting for this "
        f"network, and are {found['server']} times as fast as one worker alone. Workers that exchange less often, or "
        f"while they train, use it well: averaging is {found['averaging']}, DiLoCo {found['diloco']}, mpca "
        f"{found['mpca']} and tide {found['tide']} times as fast as one worker."
    )
