"""`tether swarm` and `tether chaos`: faults in simulated runs and in real ones."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from tether.cli.build import protocol_class
from tether.cli.options import JsonOption, SeedOption
from tether.cli.output import err, out, show_report
from tether.errors import unknown
from tether.testing import chaos as faults
from tether.testing import swarm as scenarios
from tether.testing.outages import OutageOutcome, outages

#: the protocols that `tether chaos --on cluster` disturbs, one after the other
ON_HOSTS = ("averaging", "elastic", "grid")
#: how often a long command prints how far it is
PROGRESS_SECONDS = 5.0
#: for this many of the runs that failed, a smaller scenario is searched
SHRUNK_MAX = 3


def swarm(
    seeds: Annotated[
        int, typer.Option(min=1, help="The number of runs. Use thousands after a change to a protocol.")
    ] = 200,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Run only this seed, and print its scenario.")] = None,
    scenario: Annotated[
        Path | None, typer.Option(help="Run only the scenario in this JSON file, as printed for a run that failed.")
    ] = None,
    protocol: Annotated[str | None, typer.Option("--protocol", "-p", help="Test only this protocol.")] = None,
    plant: Annotated[
        str | None, typer.Option(help="Plant a bug, to check that the swarm finds it: drop loses one message.")
    ] = None,
) -> None:
    """Simulate many runs with random clusters and faults; each must reach its goal and keep its invariants."""
    if protocol is not None:
        protocol_class(protocol)
    tally = scenarios.Tally()
    alone = seed is not None or scenario is not None
    chosen = range(seed, seed + 1) if seed is not None else range(first, first + seeds)
    printed_at = time.monotonic()

    def each(verdict: scenarios.Verdict) -> None:
        nonlocal printed_at
        tally.add(verdict)
        if alone or verdict.error:
            out.print(f"seed {verdict.seed}: {verdict.scenario}", highlight=False, markup=False)
            out.print(
                f"  {verdict.error or 'reaches its goal, and no invariant is broken'}", highlight=False, markup=False
            )
        if time.monotonic() - printed_at >= PROGRESS_SECONDS:
            printed_at = time.monotonic()
            err.print(f"{tally.runs} of {len(chosen)} runs, {tally.failures} failed", highlight=False)

    if scenario is not None:
        each(verdict := scenarios.judge(scenarios.Scenario.load(scenario)))
        failed = [verdict] if verdict.error else []
    else:
        processes = 1 if len(chosen) < 100 else os.cpu_count() or 1
        failed = scenarios.swarm(chosen, protocol, plant, each, processes=processes)
    out.print(tally.table())
    for verdict in failed[:SHRUNK_MAX]:
        small = scenarios.shrink(verdict)
        out.print(f"seed {verdict.seed}, a smaller scenario: {small.error}", highlight=False, markup=False)
        out.print("Save this file; 'tether swarm --scenario FILE' runs it again:", highlight=False)
        print(small.scenario.dump())
    if failed:
        raise typer.Exit(1)


def chaos(
    kills: Annotated[int, typer.Option(min=1, help="The number of faults, each in a run of its own.")] = 20,
    on: Annotated[
        str,
        typer.Option(help="The runtime: local, spark, or cluster, which emulates hosts and faults of their links."),
    ] = "local",
    seconds: Annotated[float, typer.Option(help="Start no further run after this many seconds.")] = 600.0,
    seed: SeedOption = 0,
    protocol: Annotated[
        str | None, typer.Option("--protocol", "-p", help=f"Test only this one of {', '.join(faults.PROTOCOLS)}.")
    ] = None,
    pause: Annotated[
        float, typer.Option(help="cluster: seconds for which a worker is stopped. A worker counts as dead after 15.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Kill, stop and starve real processes and damage their files, and check that every run still finishes."""

    def each(found: faults.FaultOutcome) -> None:
        fault = found.fault
        line = f"{fault.kind} {fault.target} under {fault.protocol}: {found.outcome}, {found.seconds:+.1f} s"
        err.print(f"{line}{'; ' if found.failure else ''}{found.failure}", highlight=False, markup=False)

    def each_event(found: OutageOutcome) -> None:
        line = f"{found.outage.kind} under {found.outage.protocol}: all train again after {found.seconds:.1f} s"
        err.print(f"{line}{'; ' if found.failure else ''}{found.failure}", highlight=False, markup=False)

    if on == "cluster":
        if protocol is not None and protocol not in ON_HOSTS:
            raise unknown("protocol for chaos on a cluster", protocol, ON_HOSTS)
        outcome = outages(kills, seconds, seed, [protocol] if protocol else ON_HOSTS, pause, each_event)
    else:
        outcome = faults.chaos(kills, on, seconds, seed, protocol, each)
    show_report(outcome, as_json)
    if outcome["faults"]:
        raise typer.Exit(1)
