"""What exchanges on a Spark cluster cost, after section 5 of the MPCA SGD paper.

The executors are processes of this machine, unless a master is given. With a link they are on hosts of their own, and
so is the driver: where all share the memory and the processors of one machine, an exchange takes processor time, which
phases beside each other do not make less, and between hosts it takes the time of links, which can be busy both ways.

A worker's step is mostly waiting, as for a GPU, so that the few processors there are do the exchanges. In mpca a step
takes longer the larger the model is, since each has a pull of the whole model that would take all processors;
averaging's workers do nothing between two exchanges, so that its period is an exchange. Systems are measured in turns,
and ratios taken within a turn.

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
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tether.cells import Report
from tether.errors import RunError, UsageError
from tether.hosts import hosts, standalone
from tether.machine import Row
from tether.plan import Request, RunPlan
from tether.progress import make_progress
from tether.protocols import Averaging, Mpca, Options
from tether.run import run
from tether.runtimes import jvm
from tether.runtimes.spark import Spark
from tether.swarm import Nobody
from tether.task import Task

WORKERS = 3
MEGABYTES = 2048
MASTER = f"local-cluster[{WORKERS},{jvm.CORES},{MEGABYTES}]"
#: how often the driver's link is looked at
WATCH_SECONDS = 0.02
#: a direction is in use that carries more than this share of the most that the link was seen to carry
IN_USE = 0.1
#: of the rows that are brought to workers
ROWS_MB, FEATURES = 160, 100
#: periods of an exchange that are measured, after so many that are not
PERIODS, WARM_UP = 4, 2
#: of a step, for each MB of the model
STEP_SECONDS = 0.01
BARE, ONE_PHASE, MPCA, AVERAGING = "bare broadcast and treeAggregate", "mpca, one phase", "mpca", "averaging"
FP16, INT8 = "mpca, fp16", "mpca, int8"
#: each as fast as it can
EXCHANGES: dict[str, Options] = {
    ONE_PHASE: Mpca(phases=1, exchange_share=1.0, free_steps=0),
    MPCA: Mpca(exchange_share=1.0, free_steps=0),
    FP16: Mpca(exchange_share=1.0, free_steps=0, compress="fp16"),
    INT8: Mpca(exchange_share=1.0, free_steps=0, compress="int8"),
    AVERAGING: Averaging(tau=1),
}


class Waiting(Task):
    """A model of a given size whose steps are waiting."""

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


class Periods(Nobody):
    """Notes when the joint model was renewed, piece by piece, and ends the run when that has been often enough."""

    def __init__(self) -> None:
        self._times: dict[int, list[float]] = defaultdict(list)
        #: when what is measured has begun and ended
        self.began = self.ended = 0.0
        #: renewals of a piece meanwhile
        self._meanwhile = 0

    def record(self, node: str, values: Row, now: float) -> None:
        if "round" in values or "shard" in values:
            self._times[int(str(values.get("shard", 0)))].append(now)
            self._meanwhile += bool(self.began and not self.ended)
            if not self.began and self._fewest() > WARM_UP:
                self.began = time.monotonic()

            if not self.ended and self._fewest() > WARM_UP + PERIODS:
                self.ended = time.monotonic()

    def stop_requested(self) -> str | None:
        return "measured" if self.ended else None

    def seconds(self) -> float:
        """Between two renewals of the whole."""
        return statistics.median(
            (times[-1] - times[WARM_UP]) / (len(times) - 1 - WARM_UP) for times in self._times.values()
        )

    def watched_seconds(self) -> float:
        """Of the time that is watched, what one renewal of the whole has taken."""
        return (self.ended - self.began) * len(self._times) / self._meanwhile

    def _fewest(self) -> int:
        return min((len(times) for times in self._times.values()), default=0)


class Traffic(NamedTuple):
    """What went over a host's links: in a period, and the share of time that one direction was in use, or both."""

    received_MB: float
    sent_MB: float
    in_use: float
    both: float


class Measured(NamedTuple):
    """What a period of an exchange takes, and what goes over the driver's link meanwhile, if that is watched."""

    seconds: float
    received_MB: float | None = None
    sent_MB: float | None = None
    in_use: float | None = None
    both: float | None = None


class Look(NamedTuple):
    """What a host had received and sent at a time."""

    at: float
    received: int
    sent: int


class Watch:
    """Watches what goes over the links of this host."""

    def __init__(self) -> None:
        self._looks: list[Look] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, since: float, until: float, period: float) -> Traffic:
        """What went over the links in that time, and in a period of it on average."""
        looks = [look for look in self._looks if since <= look.at <= until]
        spans = list(itertools.pairwise(looks))
        rates = [[(b[way] - a[way]) / (b.at - a.at) for way in (1, 2)] for a, b in spans]
        least = IN_USE * max(max(rate) for rate in rates)
        seconds = looks[-1].at - looks[0].at
        in_use, both = (
            sum(b.at - a.at for rate, (a, b) in zip(rates, spans, strict=True) if which(rate) > least) / seconds
            for which in (max, min)
        )
        received, sent = ((looks[-1][way] - looks[0][way]) * period / seconds / 1e6 for way in (1, 2))
        return Traffic(received, sent, in_use, both)

    def _look(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            lines = Path("/proc/net/dev").read_text().splitlines()[2:]
            counts = [line.split(":")[1].split() for line in lines if line.split(":")[0].strip() != "lo"]
            received, sent = (sum(int(count[place]) for count in counts) for place in (0, 8))
            self._looks.append(Look(time.monotonic(), received, sent))


def spark(
    megabytes: Iterable[float] = (7.0, 30.0, 100.0),
    rounds: int = 5,
    steps: int = 300,
    master: str | None = None,
    link: str | None = None,
) -> Report:
    """What exchanges cost against Spark's bare primitives and leave of training; how long rows take to be brought."""
    if master is not None and link is not None:
        raise UsageError("a cluster has the links that it has: give --master or --link, not both")
    if link is not None:
        return _between_hosts(link, rounds)
    session = jvm.session(master or MASTER)
    on = Spark(session, WORKERS)
    watched = master is not None and not master.startswith("local")
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for size in megabytes:
        found: dict[str, list[Measured]] = {BARE: []}
        for round_ in range(rounds):
            found[BARE].append(Measured(_bare(session, size)))
            for name, protocol in EXCHANGES.items():
                found.setdefault(name, []).append(_period(size, protocol, on, watched))
            told = ", ".join(f"{name} {taken[-1].seconds:.2f} s" for name, taken in found.items())
            print(f"{size:g} MB, {round_ + 1}/{rounds}: {told}", file=sys.stderr)
        for name, taken in found.items():
            rows.append({"what": name, "MB": size, **_medians(taken)})
        seconds = {name: [one.seconds for one in taken] for name, taken in found.items()}
        for name in (ONE_PHASE, MPCA):
            ratios[f"{name}, over bare, {size:g} MB"] = _ratio(seconds[name], seconds[BARE])
        ratios[f"mpca over averaging, {size:g} MB"] = _ratio(seconds[MPCA], seconds[AVERAGING])
        if watched:
            moved = {
                name: [(one.received_MB or 0) + (one.sent_MB or 0) for one in taken] for name, taken in found.items()
            }
            for name in (FP16, INT8):
                ratios[f"bytes, {name} over mpca, {size:g} MB"] = _ratio(moved[name], moved[MPCA])
    shares: dict[str, list[float]] = {"alone": [], MPCA: []}
    for _ in range(rounds):
        for name, protocol in (("alone", Averaging(tau=steps)), (MPCA, Mpca())):
            shares[name].append(_utilization(protocol, on, steps))
    rows += [{"what": f"computing, {name}", "MB": 20.0, "share": statistics.median(s)} for name, s in shares.items()]
    ratios["utilization of mpca over that without exchanges, 20 MB"] = _ratio(shares[MPCA], shares["alone"])
    _rows(session, on)  # only warms up
    places = {"memory": replace(on, memory_mb=2 * ROWS_MB), "disk": replace(on, memory_mb=1)}
    turns = [{where: _rows(session, place) for where, place in places.items()} for _ in range(rounds)]
    for where in places:
        brought, trained = ([turn[where][part] for turn in turns] for part in (0, 1))
        rows.append({"what": f"rows brought to {where}", "MB": ROWS_MB, "seconds": statistics.median(brought)})
        rows.append({"what": f"an epoch on rows in {where}", "MB": ROWS_MB, "seconds": statistics.median(trained)})
        ratios[f"bringing rows to {where} over an epoch on them"] = _ratio(brought, trained)
    columns = ("what", "MB", "seconds", *Measured._fields[1:], "share")
    rows = [{column: row.get(column) for column in columns} for row in rows]  # type: ignore[misc]
    return {"bench": "spark", "rounds": rounds, "rows": rows, "ratios": ratios}


def _between_hosts(link: str, rounds: int) -> Report:
    """The same on a standalone cluster whose master, with the driver, and workers have hosts of their own."""
    words = ["-m", "tether", "bench", "spark", "--rounds", str(rounds), "--json", "--master"]
    with hosts(1 + WORKERS, link) as places, standalone(places, jvm.CORES, MEGABYTES) as master:
        done = subprocess.run(
            [*places[0].words, sys.executable, *words, master],
            env={**os.environ, "SPARK_LOCAL_IP": places[0].address, "PYSPARK_PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            check=False,
        )
    if done.returncode:
        raise RunError("the benchmark has failed on the hosts, as it says above")
    outcome: Report = json.loads(done.stdout)
    return outcome


def _bare(session: Any, megabytes: float) -> float:
    """Seconds of one broadcast to all executors and one sum of as many bytes of each, by the shortest way."""
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
    request = Request(steps=10**9, evaluate_every=1e9, checkpoint_seconds=1e9, trace=False)
    seconds = 0.0 if isinstance(protocol, Averaging) else STEP_SECONDS * megabytes
    plan = RunPlan.make(Waiting(megabytes, seconds), protocol, on, request, None)
    with Watch() as watch:
        on.execute(plan, periods)
    taken = periods.seconds()
    if not watched:
        return Measured(taken)
    return Measured(taken, *watch.between(periods.began, periods.ended, periods.watched_seconds()))


def _medians(taken: list[Measured]) -> dict[str, float]:
    """Of each figure that there is."""
    columns = zip(Measured._fields, zip(*taken, strict=True), strict=True)
    return {name: statistics.median(values) for name, values in columns if None not in values}


def _utilization(protocol: Options, on: Spark, steps: int) -> float:
    """How much of their time workers with a model of 20 MB compute."""
    with tempfile.TemporaryDirectory() as directory:
        result = run(
            Waiting(20.0, STEP_SECONDS * 20.0),
            protocol,
            on,
            steps=steps,
            evaluate_every=1e9,
            run_dir=Path(directory) / "run",
            trace=False,
            progress=make_progress(quiet=True),
        )
    return float(result.figures["utilization"]["mean"])


def _rows(session: Any, on: Spark) -> tuple[float, float]:
    """Seconds until workers have been started and brought the rows of a frame, and of one epoch on them."""
    from tether.spark import FrameTask

    names = [f"x{number}" for number in range(FEATURES)]
    numbers = [f"rand({seed}) AS {name}" for seed, name in enumerate(names)]
    frame = session.range(round(ROWS_MB * 1e6 / 4 / FEATURES)).selectExpr(*numbers)
    frame = frame.selectExpr("*", "int(x0 > x1) AS label")
    task = FrameTask(frame, features=names, model=partial(nn.Linear, FEATURES, 2), batch_size=64)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        progress = make_progress(quiet=True)
        result = run(task, Averaging(tau=100), on, epochs=1, run_dir=Path(directory) / "run", progress=progress)
    seconds = float(result.figures["seconds"])
    return time.monotonic() - begun - seconds, seconds


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
