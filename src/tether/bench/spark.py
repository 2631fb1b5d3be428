"""The time of exchanges on a Spark cluster, after section 5 of the MPCA SGD paper.

The executors are processes of this machine, unless a master is given. With a link they have hosts of their own, and so
has the driver. Where all share the memory and the cores of one machine, an exchange takes CPU time, which phases that
overlap do not reduce. Between hosts it takes time on links, which can be busy in both directions at once.

A worker's step is mostly waiting, as for a GPU, so that the few cores of this machine do the exchanges. In mpca a step
takes longer the larger the model is, since each step pulls the whole model, which would otherwise take all cores.
Averaging's workers do nothing between two exchanges, so that its period is an exchange. Systems are measured in turns,
and ratios are taken within a turn.

Between hosts the driver's link is watched too: what goes over it in a period, and for how much of the time both
directions are in use, with executors as `session` asks for them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tether.bench.common import NEVER, Report, Rounds, Row, list_text, median_ratio, run_quietly, sizes
from tether.bench.hosts import standalone
from tether.core import message
from tether.errors import RunError, UsageError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.protocols import Averaging, Mpca, Options
from tether.runtimes.base import NullObserver
from tether.runtimes.spark import jvm
from tether.runtimes.spark.runtime import Spark
from tether.task import Task
from tether.testing.hosts import hosts

WORKERS = 3
MEGABYTES = 2048
MASTER = f"local-cluster[{WORKERS},{jvm.CORES},{MEGABYTES}]"
#: how often the counters of the driver's link are read
WATCH_SECONDS = 0.02
#: a direction is in use while it carries more than this share of the most that the link has carried
IN_USE = 0.1
#: size and columns of the rows that are brought to workers
ROWS_MB, FEATURES = 160, 100
#: periods of an exchange that are measured, and those before them that are not
PERIODS, WARM_UP = 4, 2
#: the duration of a step, for each MB of the model
STEP_SECONDS = 0.01
#: of what a failed command printed
LINES_SHOWN = 40
BARE, ONE_PHASE, MPCA, AVERAGING = "bare broadcast and treeAggregate", "mpca, one phase", "mpca", "averaging"
FP16, INT8 = "mpca, fp16", "mpca, int8"
#: each exchanges as fast as it can
EXCHANGES: dict[str, Options] = {
    ONE_PHASE: Mpca(phases=1, exchange_share=1.0, free_steps=0),
    MPCA: Mpca(exchange_share=1.0, free_steps=0),
    FP16: Mpca(exchange_share=1.0, free_steps=0, compress="fp16"),
    INT8: Mpca(exchange_share=1.0, free_steps=0, compress="int8"),
    AVERAGING: Averaging(tau=1),
}


def spark(
    megabytes: Annotated[
        Sequence[float], sizes("Sizes of the model whose exchanges are measured. 7 alone is enough for a first look.")
    ] = (7.0, 30.0, 100.0),
    rounds: Rounds = 5,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Steps of a worker where it is measured how much workers compute. Use fewer at first."
        ),
    ] = 300,
    master: Annotated[
        str | None,
        typer.Option(help="A cluster to measure, such as spark://HOST:7077, instead of processes of this machine."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Measure between emulated hosts with links of this speed, such as 1gbit. Needs root, ip and tc, since "
            "the hosts are network namespaces."
        ),
    ] = None,
) -> Report:
    """Exchanges against Spark's own broadcast and treeAggregate, in turns, with models of several sizes.

    It also measures the share of time that workers compute, and how long it takes to bring rows to workers.
    """
    if master is not None and link is not None:
        raise UsageError("a cluster has links of its own: give --master or --link, not both")
    if link is not None:
        return _between_hosts(link, megabytes, rounds, steps)
    session = jvm.session(master or MASTER)
    on = Spark(session, WORKERS)
    watched = master is not None and not master.startswith("local")
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for size in megabytes:
        found: dict[str, list[Measured]] = {BARE: []}
        for turn in range(rounds):
            found[BARE].append(Measured(_bare(session, size)))
            for name, protocol in EXCHANGES.items():
                found.setdefault(name, []).append(_period(size, protocol, on, watched))
            latest = ", ".join(f"{name} {taken[-1].seconds:.2f} s" for name, taken in found.items())
            print(f"{size:g} MB, {turn + 1}/{rounds}: {latest}", file=sys.stderr)
        for name, taken in found.items():
            rows.append({"what": name, "MB": size, **_medians(taken)})
        seconds = {name: [one.seconds for one in taken] for name, taken in found.items()}
        for name in (ONE_PHASE, MPCA):
            ratios[f"{name}, over bare, {size:g} MB"] = median_ratio(seconds[name], seconds[BARE])
        ratios[f"mpca over averaging, {size:g} MB"] = median_ratio(seconds[MPCA], seconds[AVERAGING])
        if watched:
            moved = {
                name: [(one.received_MB or 0) + (one.sent_MB or 0) for one in taken] for name, taken in found.items()
            }
            for name in (FP16, INT8):
                ratios[f"bytes, {name} over mpca, {size:g} MB"] = median_ratio(moved[name], moved[MPCA])
    shares: dict[str, list[float]] = {"alone": [], MPCA: []}
    for _ in range(rounds):
        for name, protocol in (("alone", Averaging(tau=steps)), (MPCA, Mpca())):
            shares[name].append(_utilization(protocol, on, steps))
    rows += [{"what": f"computing, {name}", "MB": 20.0, "share": statistics.median(s)} for name, s in shares.items()]
    ratios["utilization of mpca over that without exchanges, 20 MB"] = median_ratio(shares[MPCA], shares["alone"])
    _bring_rows(session, on)  # only warms up
    places = {"memory": replace(on, memory_mb=2 * ROWS_MB), "disk": replace(on, memory_mb=1)}
    turns = [{where: _bring_rows(session, place) for where, place in places.items()} for _ in range(rounds)]
    for where in places:
        brought, trained = ([turn[where][part] for turn in turns] for part in (0, 1))
        rows.append({"what": f"rows brought to {where}", "MB": ROWS_MB, "seconds": statistics.median(brought)})
        rows.append({"what": f"an epoch on rows in {where}", "MB": ROWS_MB, "seconds": statistics.median(trained)})
        ratios[f"bringing rows to {where} over an epoch on them"] = median_ratio(brought, trained)
    columns = ("what", "MB", "seconds", *Measured._fields[1:], "share")
    rows = [{column: row.get(column) for column in columns} for row in rows]
    return {"bench": "spark", "rounds": rounds, "rows": rows, "ratios": ratios}


def _between_hosts(link: str, megabytes: Sequence[float], rounds: int, steps: int) -> Report:
    """The same on a standalone cluster: one host has the master and the driver, each worker has one of its own."""
    words = [
        "bench",
        "spark",
        "--megabytes",
        list_text(megabytes),
        "--rounds",
        str(rounds),
        "--steps",
        str(steps),
        "--json",
    ]
    with hosts(1 + WORKERS, link) as places, standalone(places, jvm.CORES, MEGABYTES) as master:
        environment = {**os.environ, "SPARK_LOCAL_IP": places[0].address, "PYSPARK_PYTHON": sys.executable}
        command = [*places[0].words, sys.executable, "-m", "tether", *words, "--master", master]
        outcome: Report = json.loads(output_of(command, environment))
        return outcome


def output_of(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """What a command prints on standard output; passes on what it prints on standard error.

    If the command fails, the error has the end of both.
    """
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            errors: deque[str] = deque(maxlen=LINES_SHOWN)
            try:
                for line in process.stderr:
                    errors.append(line)
                    sys.stderr.write(line)
            except BaseException:  # such as Ctrl-C: the hosts will be gone
                process.kill()
                raise
        output.seek(0)
        printed = output.read()
    if process.returncode:
        shown = [*printed.splitlines(keepends=True)[-LINES_SHOWN:], *errors]
        raise RunError(
            f"the benchmark failed on the emulated hosts, with status {process.returncode}. It printed:\n"
            f"{''.join(shown).rstrip() or '(nothing)'}"
        )
    return printed


class Waiting(Task):
    """A model of a given size whose steps are mostly waiting."""

    batch_size = 1

    def __init__(self, megabytes: float, seconds: float) -> None:
        self.values = round(megabytes * 1e6 / 4)
        self.seconds = seconds

    def model(self) -> nn.Module:
        model = nn.Module()
        model.register_parameter("ballast", nn.Parameter(torch.zeros(self.values - 1)))
        model.register_parameter("weight", nn.Parameter(torch.ones(1)))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.get_parameter("weight")], lr=0.01)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.zeros(1000, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.seconds)
        return model.get_parameter("weight").square().sum()


class Periods(NullObserver):
    """Notes when each shard of the joint model was renewed, and ends the run when that was often enough."""

    def __init__(self) -> None:
        self._times: dict[int, list[float]] = defaultdict(list)
        #: when measuring began and ended
        self.began = self.ended = 0.0
        #: renewals of a shard in between
        self._renewals = 0

    def record(self, node: str, values: message.Row, now: float) -> None:
        if "round" in values or "shard" in values:
            self._times[int(str(values.get("shard", 0)))].append(now)
            self._renewals += bool(self.began and not self.ended)
            if not self.began and self._fewest() > WARM_UP:
                self.began = time.monotonic()
            if not self.ended and self._fewest() > WARM_UP + PERIODS:
                self.ended = time.monotonic()

    def stop_requested(self) -> str | None:
        return "measured" if self.ended else None

    def seconds(self) -> float:
        """The time between two renewals of the whole model."""
        return statistics.median(
            (times[-1] - times[WARM_UP]) / (len(times) - 1 - WARM_UP) for times in self._times.values()
        )

    def watched_seconds(self) -> float:
        """The same, over the time in which the link is watched."""
        return (self.ended - self.began) * len(self._times) / self._renewals

    def _fewest(self) -> int:
        return min((len(times) for times in self._times.values()), default=0)


class Traffic(NamedTuple):
    """What went over a host's links in a period, and the share of time in which one direction, or both, were in use."""

    received_MB: float
    sent_MB: float
    in_use: float
    both: float


class Measured(NamedTuple):
    """The duration of an exchange's period, and what goes over the driver's link in it, if that is watched."""

    seconds: float
    received_MB: float | None = None
    sent_MB: float | None = None
    in_use: float | None = None
    both: float | None = None


class Reading(NamedTuple):
    """The bytes that a host had received and sent at a time."""

    at: float
    received: int
    sent: int


class LinkWatch:
    """Watches what goes over the links of this host."""

    def __init__(self) -> None:
        self._readings: list[Reading] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="watch", daemon=True)

    def __enter__(self) -> LinkWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, since: float, until: float, period: float) -> Traffic:
        """What went over the links in that time, and in a period on average."""
        readings = [reading for reading in self._readings if since <= reading.at <= until]
        spans = list(itertools.pairwise(readings))
        rates = [[(b[way] - a[way]) / (b.at - a.at) for way in (1, 2)] for a, b in spans]
        least = IN_USE * max(max(rate) for rate in rates)
        seconds = readings[-1].at - readings[0].at
        in_use, both = (
            sum(b.at - a.at for rate, (a, b) in zip(rates, spans, strict=True) if which(rate) > least) / seconds
            for which in (max, min)
        )
        received, sent = ((readings[-1][way] - readings[0][way]) * period / seconds / 1e6 for way in (1, 2))
        return Traffic(received, sent, in_use, both)

    def _read(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            lines = Path("/proc/net/dev").read_text().splitlines()[2:]
            counts = [line.split(":")[1].split() for line in lines if line.split(":")[0].strip() != "lo"]
            received, sent = (sum(int(count[place]) for count in counts) for place in (0, 8))
            self._readings.append(Reading(time.monotonic(), received, sent))


def _bare(session: Any, megabytes: float) -> float:
    """Seconds of one broadcast to all executors and one sum of as many bytes from each, in the shortest way."""
    context = session.sparkContext
    count = round(megabytes * 1e6 / 4)
    places = context.parallelize(range(WORKERS), WORKERS)

    def add(one: Any, other: Any) -> Any:
        if one is None:
            return other
        one += other
        return one

    taken = []
    for _ in range(1 + PERIODS):
        begun = time.monotonic()
        variable = context.broadcast([np.ones(count, np.float32).tobytes()])
        places.map(lambda _, variable=variable: len(variable.value[0])).collect()
        places.map(lambda _, count=count: np.ones(count, np.float32)).treeAggregate(None, add, add)
        taken.append(time.monotonic() - begun)
        variable.destroy()
    return statistics.median(taken[1:])


def _period(megabytes: float, protocol: Options, on: Spark, watched: bool) -> Measured:
    periods = Periods()
    request = Request(steps=10**9, evaluate_every=NEVER, checkpoint_seconds=NEVER, trace=False)
    seconds = 0.0 if isinstance(protocol, Averaging) else STEP_SECONDS * megabytes
    plan = RunPlan.make(Waiting(megabytes, seconds), protocol, on, request, None)
    with LinkWatch() as watch:
        on.execute(plan, periods)
    taken = periods.seconds()
    if not watched:
        return Measured(taken)
    return Measured(taken, *watch.between(periods.began, periods.ended, periods.watched_seconds()))


def _medians(taken: list[Measured]) -> dict[str, float]:
    """The median of each figure that was measured."""
    columns = zip(Measured._fields, zip(*taken, strict=True), strict=True)
    return {name: statistics.median(values) for name, values in columns if None not in values}


def _utilization(protocol: Options, on: Spark, steps: int) -> float:
    """The share of their time that workers with a model of 20 MB compute."""
    figures = run_quietly(Waiting(20.0, STEP_SECONDS * 20.0), protocol, on, steps=steps)
    return float(figures["utilization"]["mean"])


def _bring_rows(session: Any, on: Spark) -> tuple[float, float]:
    """Seconds until workers run and have the rows of a data frame, and seconds of one epoch on them."""
    from tether.spark.frame import FrameTask

    names = [f"x{number}" for number in range(FEATURES)]
    numbers = [f"rand({seed}) AS {name}" for seed, name in enumerate(names)]
    frame = session.range(round(ROWS_MB * 1e6 / 4 / FEATURES)).selectExpr(*numbers)
    frame = frame.selectExpr("*", "int(x0 > x1) AS label")
    task = FrameTask(frame, features=names, model=partial(nn.Linear, FEATURES, 2), batch_size=64)
    begun = time.monotonic()
    seconds = float(run_quietly(task, Averaging(tau=100), on, epochs=1, evaluate_every=1.0, trace=True)["seconds"])
    return time.monotonic() - begun - seconds, seconds
