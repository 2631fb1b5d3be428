"""Accuracy with more workers (learners) on one machine, after figure 7 of the GaDei paper.

One, two and four workers see the same number of texts, with the optimizer and the mini-batches that the task chooses.
Their learning rate is that of one worker, since a smaller one would only train less in as many epochs. An accuracy is
the mean over the evaluations at the end of a run and over the seeds, since a single evaluation is noisy.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tether.bench.common import NEVER, Report, Row, Seeds, counts, files
from tether.errors import UsageError, unknown
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.protocols import Options, Server
from tether.runtimes.base import Runtime
from tether.runtimes.local import Local
from tether.runtimes.sim.runtime import Sim
from tether.sweeps.sweep import EvaluatingObserver
from tether.tasks.text import Text

#: texts, and the epochs after which the accuracy of one worker no longer grows
TEXTS = (("mr_polarity.csv", 2), ("trec_train.csv", 3), ("banking77_train.csv", 4))
EVALUATIONS = 12
PROTOCOLS: dict[str, Options] = {
    "inline": Server(sync="async", apply="inline", rate="none"),
    "server": Server(sync="async", apply="server", rate="none"),
}
RUNTIMES = {"local": Local, "sim": Sim}


def accuracy(
    data: Annotated[Path | None, typer.Option(help="The folder with the texts; always needed.")] = None,
    texts: Annotated[
        Sequence[tuple[str, float]],
        files("Files in that folder, and how many epochs to train on each. Use one file for a first look."),
    ] = TEXTS,
    workers: Annotated[Sequence[int], counts("Numbers of workers; all are compared with the smallest.")] = (1, 2, 4),
    seeds: Seeds = 3,
    on: Annotated[
        str, typer.Option(help="Where to run: local, or sim where the machine has fewer cores than workers.")
    ] = "local",
) -> Report:
    """Accuracy by the number of workers after equally many texts, and how many points more than with the fewest."""
    if data is None:
        names = ", ".join(file for file, _ in texts)
        raise UsageError(f"benchmark 'accuracy' needs a folder with {names}: --data DIR")
    if on not in RUNTIMES:
        raise unknown("runtime", on, RUNTIMES)
    numbers = sorted(workers)
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for seed in range(seeds):
        for file, epochs in texts:
            task = Text(data / file, validation=0)
            for name, protocol in PROTOCOLS.items():
                for count in numbers:
                    right = 100 * (1 - _error(task, protocol, RUNTIMES[on](count), epochs, seed))
                    found[file, name, count].append(right)
                    print(f"{file}, {name}, workers: {count}, seed {seed}: {right:.2f} %", file=sys.stderr)
    rows: list[Row] = []
    fewest = dict.fromkeys(PROTOCOLS, 0.0)
    for (file, name, count), rights in found.items():
        more = [several - one for several, one in zip(rights, found[file, name, numbers[0]], strict=True)]
        points = statistics.fmean(more)
        fewest[name] = min(fewest[name], points)
        rows.append(
            {
                "texts": file,
                "apply": name,
                "workers": count,
                "accuracy": statistics.fmean(rights),
                "points_more": points,
                "least": min(more),
                "most": max(more),
            }
        )
    ratios = {f"fewest points more, {name}": points for name, points in fewest.items()}
    return {"bench": "accuracy", "seeds": seeds, "rows": rows, "ratios": ratios}


def _error(task: Text, protocol: Options, on: Runtime, epochs: float, seed: int) -> float:
    request = Request(
        epochs=epochs, seed=seed, evaluate_every=epochs / EVALUATIONS, checkpoint_seconds=NEVER, trace=False
    )
    plan = RunPlan.make(task, protocol, on, request, None)
    watcher = EvaluatingObserver(plan)
    on.execute(plan, watcher)
    return watcher.tail_mean("error")
