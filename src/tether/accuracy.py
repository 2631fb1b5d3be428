"""A benchmark of what more learners on one machine cost in accuracy, after figure 7 of the GaDei paper.

One, two and four learners see the same number of texts, with the optimizer and the mini-batches that the task chooses.
Their learning rate is that of one learner, since a smaller one would only train less in as many epochs. An accuracy is
the mean over the evaluations at the end of a run and over the seeds, since one evaluation is much by chance.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from tether.cells import Report, Row, Watcher
from tether.errors import UsageError
from tether.plan import Request, RunPlan
from tether.protocols import Options, Server
from tether.runtimes.base import Runtime
from tether.runtimes.local import Local
from tether.tasks.text import Text

#: texts, and the epochs after which the accuracy of one learner has settled
TEXTS = (("mr_polarity.csv", 2), ("trec_train.csv", 3), ("banking77_train.csv", 4))
EVALUATIONS = 12
PROTOCOLS: dict[str, Options] = {
    "inline": Server(sync="async", apply="inline", rate="none"),
    "server": Server(sync="async", apply="server", rate="none"),
}


def accuracy(
    data: Path | None = None,
    seeds: int = 3,
    texts: Iterable[tuple[str, float]] = TEXTS,
    learners: Iterable[int] = (1, 2, 4),
    on: Callable[[int], Runtime] = Local,
) -> Report:
    """Accuracy by the number of learners, and how many points more than with the first number of them."""
    if data is None:
        names = ", ".join(file for file, _ in texts)
        raise UsageError(f"benchmark 'accuracy' needs a folder with {names}: --data DIR")
    counts = sorted(learners)
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for seed in range(seeds):
        for file, epochs in texts:
            task = Text(data / file, validation=0)
            for name, protocol in PROTOCOLS.items():
                for count in counts:
                    right = 100 * (1 - _error(task, protocol, on(count), epochs, seed))
                    found[file, name, count].append(right)
                    print(f"{file}, {name}, learners: {count}, seed {seed}: {right:.2f} %", file=sys.stderr)
    rows: list[Row] = []
    fewest = dict.fromkeys(PROTOCOLS, 0.0)
    for (file, name, count), rights in found.items():
        more = [several - one for several, one in zip(rights, found[file, name, counts[0]], strict=True)]
        points = statistics.fmean(more)
        fewest[name] = min(fewest[name], points)
        rows.append(
            {
                "texts": file,
                "apply": name,
                "learners": count,
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
        epochs=epochs, seed=seed, evaluate_every=epochs / EVALUATIONS, checkpoint_seconds=1e9, trace=False
    )
    plan = RunPlan.make(task, protocol, on, request, None)
    watcher = Watcher(plan)
    on.execute(plan, watcher)
    return watcher.settled("error")
