"""Two workers on one machine against other ways to use it, after section 6 of the GaDei paper.

The model is the paper's convolutional one for sentences, on public texts. Its embedding has enough rows to make the
model as large as the paper's. The optimizer is plain SGD. Only Tether can step just the rows of an embedding that a
mini-batch has touched, so in the comparison it steps all of them, as it does for any other optimizer; what the touched
rows are worth is measured separately.

A figure is the number of samples trained on in a window of time over the length of that window. Starting processes,
reading data and the first steps are outside the window. Systems are measured in turns, and ratios are taken within a
turn.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed
import torch.multiprocessing
import typer
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from tether.bench.common import NEVER, Report, Rounds, Row, counts, files, median_ratio
from tether.core.trace import Meter
from tether.core.vector import Vector, raw_bytes
from tether.errors import UsageError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.data import Batches
from tether.learner.learner import Learner, build_model
from tether.protocols import Options, Server
from tether.runtimes.base import NullObserver
from tether.runtimes.local import Local
from tether.runtimes.process.node import REPORT_SECONDS
from tether.tasks.networks import TextCnn
from tether.tasks.text import Text

WORKERS = 2
WARM_UP_SECONDS = 0.5
#: texts, and the size in MB of a model in the paper's table 6: Joule and Watt
MODELS = (("banking77_train.csv", 7.69), ("trec_train.csv", 20.72))
#: Age and Yelp, and a mini-batch size for them
LARGE_MODELS = (("trec_train.csv", 72.86), ("trec_train.csv", 98.60))
LARGE_BATCH_SIZE = 2
#: more than any cache holds
COPIED_VALUES = 1 << 26

ONE, TWO_THREADS = "one process, 1 thread", "one process, 2 threads"
INLINE, SERVER, BY_ROWS = "tether inline", "tether server", "tether inline, touched rows"
COLUMNS = ("what", "MB", "mini_batch", "samples_per_second", "over_one", "over_best_single", "ms", "GB_per_second")


def scaleup(
    data: Annotated[Path | None, typer.Option(help="The folder with the texts; always needed.")] = None,
    models: Annotated[
        Sequence[tuple[str, float]],
        files("Models to compare all systems on: a file in that folder and a size in MB. Use one for a first look."),
    ] = MODELS,
    batch_sizes: Annotated[
        Sequence[int], counts("Mini-batch sizes to compare all systems at. Each takes as long as the others.")
    ] = (1, 2, 4, 16, 64),
    large_models: Annotated[
        Sequence[tuple[str, float]],
        files('Models on which only the steps of touched rows and of a hub are measured; "" for none.'),
    ] = LARGE_MODELS,
    rounds: Rounds = 5,
    seconds: Annotated[
        float, typer.Option(help="The window of one measurement. Use more if a step takes a tenth of a second.")
    ] = 1.2,
) -> Report:
    """Two workers on one machine against other systems; what stepping only touched rows is worth; how fast a hub steps.

    The others are one process with one and two threads, DDP, Hogwild and a parameter server over pipes.
    """
    if data is None:
        raise UsageError("benchmark 'scaleup' needs a folder with banking77_train.csv and trec_train.csv: --data DIR")
    if not models and not large_models:
        raise UsageError(
            "benchmark 'scaleup' has nothing to measure: give --models or --large-models, or leave both out"
        )
    small = [(data / file, megabytes) for file, megabytes in models]
    large = [(data / file, megabytes) for file, megabytes in large_models]
    rows: list[Row] = []
    ratios: dict[str, float | None] = {}
    for path, megabytes in small:
        _against_others(path, megabytes, sorted(batch_sizes), rounds, seconds, rows, ratios)
    for path, megabytes in large:
        _touched_rows(path, megabytes, rounds, seconds, rows, ratios)
    for path, megabytes in [*small, *large]:
        _stepping(path, megabytes, rounds, seconds, rows, ratios)
    copied = statistics.median(row["GB_per_second"] for row in rows if row["what"] == "copy")
    for row in rows:
        if row["what"] == SERVER:
            where = f"{row['MB']} MB, mini-batch {row['mini_batch']}"
            ratios[f"traffic of {SERVER} over a copy in bandwidth, {where}"] = row["GB_per_second"] / copied
    rows = [{column: row.get(column) for column in COLUMNS} for row in rows]
    return {"bench": "scaleup", "rounds": rounds, "seconds": seconds, "rows": rows, "ratios": ratios}


def _against_others(
    path: Path,
    megabytes: float,
    batch_sizes: list[int],
    rounds: int,
    seconds: float,
    rows: list[Row],
    ratios: dict[str, float | None],
) -> None:
    """Samples per second of every system, and the smallest mini-batch at which it beats one process (table 8)."""
    faster: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for batch_size in batch_sizes:
        task = Sized(path, megabytes, batch_size)
        where = f"{megabytes} MB, mini-batch {batch_size}"
        found = _in_turns(where, {name: partial(speed, task, seconds) for name, speed in SYSTEMS.items()}, rounds)
        best = max(ONE, TWO_THREADS, key=lambda name: statistics.median(found[name]))
        for name, speeds in found.items():
            over_one, over_best = median_ratio(speeds, found[ONE]), median_ratio(speeds, found[best])
            rows.append(_row(name, task, speeds) | {"over_one": over_one, "over_best_single": over_best})
            if name == SERVER:  # for table 7: a step of the hub reads gradient and weights, and writes weights
                rows[-1]["GB_per_second"] = 3 * megabytes / 1e3 * statistics.median(speeds) / batch_size
            if over_one > 1:
                faster[name].append(batch_size)
            if name in (INLINE, SERVER):
                ratios[f"{name} over one process, {where}"] = over_one
                ratios[f"{name} over the best single process, {where}"] = over_best
    for name in SYSTEMS:
        if name != ONE:
            ratios[f"smallest mini-batch with a speedup, {name}, {megabytes} MB"] = min(faster[name], default=None)


def _touched_rows(
    path: Path, megabytes: float, rounds: int, seconds: float, rows: list[Row], ratios: dict[str, float | None]
) -> None:
    """Two workers that step the touched rows of the embedding against two that step all of it."""
    tasks = {name: Sized(path, megabytes, LARGE_BATCH_SIZE, by_rows=name == BY_ROWS) for name in (INLINE, BY_ROWS)}
    measures = {name: partial(SYSTEMS[INLINE], task, seconds) for name, task in tasks.items()}
    found = _in_turns(f"{megabytes} MB, touched rows", measures, rounds)
    rows += [_row(name, tasks[name], speeds) for name, speeds in found.items()]
    ratios[f"touched rows over all rows, {megabytes} MB"] = median_ratio(found[BY_ROWS], found[INLINE])


def _stepping(
    path: Path, megabytes: float, rounds: int, seconds: float, rows: list[Row], ratios: dict[str, float | None]
) -> None:
    """A hub's step with a gradient that was pushed, against torch's own and what the memory can do (table 7)."""
    hub = Learner(Sized(path, megabytes), iter(()), node="hub", seed=0)
    pushed = torch.randn(hub.parameter_count).mul_(1e-3)
    weights = nn.Parameter(hub.weights.clone())
    weights.grad = pushed.clone()
    fused = torch.optim.SGD([weights], lr=0.01, fused=True)
    source = torch.ones(COPIED_VALUES)
    target = torch.empty_like(source)
    #: the work, and how many values it reads and writes: weights and gradient in, weights out
    works: dict[str, tuple[Callable[[], Any], int]] = {
        "hub's step": (lambda: hub.step(pushed, 1.0), 3 * hub.parameter_count),
        "torch's fused SGD": (fused.step, 3 * hub.parameter_count),
        "copy": (lambda: target.copy_(source), 2 * COPIED_VALUES),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measures = {name: partial(_rate, work, seconds / 3) for name, (work, _) in works.items()}
        found = _in_turns(f"{megabytes} MB, steps of a hub", measures, rounds)
    finally:
        torch.set_num_threads(threads)
    moved = {name: [4 * works[name][1] * rate / 1e9 for rate in rates] for name, rates in found.items()}
    for name, rates in found.items():
        taken = {"ms": 1e3 / statistics.median(rates), "GB_per_second": statistics.median(moved[name])}
        rows.append({"what": name, "MB": megabytes if name != "copy" else 4 * COPIED_VALUES / 1e6, **taken})
    ratios[f"hub's step over torch's fused SGD in time, {megabytes} MB"] = median_ratio(
        found["torch's fused SGD"], found["hub's step"]
    )
    ratios[f"hub's step over a copy in bandwidth, {megabytes} MB"] = median_ratio(moved["hub's step"], moved["copy"])


def _in_turns(title: str, measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each measure finds in every turn; prints it."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
        latest = ", ".join(f"{name} {speeds[-1]:.4g}/s" for name, speeds in found.items())
        print(f"{title}, {turn + 1}/{rounds}: {latest}", file=sys.stderr)
    return found


def _row(name: str, task: Sized, speeds: list[float]) -> Row:
    speed = statistics.median(speeds)
    return {"what": name, "MB": task.megabytes, "mini_batch": task.batch_size, "samples_per_second": speed}


class Sized(Text):
    """Texts for a model of a given size: its embedding has more rows than there are words."""

    def __init__(self, data: Path, megabytes: float, batch_size: int = 1, *, by_rows: bool = False) -> None:
        super().__init__(data, batch_size=batch_size, momentum=0.0)
        self.megabytes = megabytes
        self.by_rows = by_rows

    def model(self) -> nn.Module:
        smallest = TextCnn(1, len(self.labels), self.embedding, self.filters)
        missing = self.megabytes * 1e6 / 4 - sum(p.numel() for p in smallest.parameters())
        rows = max(1 + round(missing / self.embedding), 1 + max(self.words.values()))
        model = TextCnn(rows, len(self.labels), self.embedding, self.filters)
        if not self.by_rows:
            weight = model.embedding.weight.detach()
            model.embedding = DenseEmbedding(rows, self.embedding, padding_idx=0, _weight=weight)
        return model


class DenseEmbedding(nn.Embedding):
    """Not of class Embedding itself, so Tether steps all of its rows."""


# ---- Tether ---------------------------------------------------------------------------------------------------------


class Samples(NullObserver):
    """Notes how many samples each worker had trained on, and when, as it reports."""

    def __init__(self) -> None:
        self._reports: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def meter(self, meter: Meter, now: float) -> None:
        if now >= WARM_UP_SECONDS:
            self._reports[meter.node].append((now, meter.samples))

    def per_second(self) -> float:
        """Between the first and the last report of each worker, the sum over all."""
        ends = [(reports[0], reports[-1]) for reports in self._reports.values()]
        return sum((samples - first) / (stop - start) for (start, first), (stop, samples) in ends)


def _tether(protocol: Options, task: Sized, seconds: float) -> float:
    local, samples = Local(WORKERS), Samples()
    request = Request(
        steps=10**9,
        seconds=WARM_UP_SECONDS + REPORT_SECONDS + seconds,
        evaluate_every=NEVER,
        checkpoint_seconds=NEVER,
        trace=False,
    )
    local.execute(RunPlan.make(task, protocol, local, request, None), samples)
    return samples.per_second()


# ---- the others, each in processes of its own -----------------------------------------------------------------------


def _spawned(work: Callable[..., None], processes: int, *arguments: Any) -> float:
    """The sum of what the processes find. If one fails, the others are ended."""
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    spawn(work, (results, *arguments), processes, daemon=True)  # type: ignore[no-untyped-call]
    found = 0.0
    while not results.empty():
        found += results.get()
    return found


def _rate(work: Callable[[], Any], seconds: float, agree: Callable[[bool], bool] = bool) -> float:
    """How many times per second the work is done, after a warm-up; `agree` makes processes continue or end together."""
    for window in (WARM_UP_SECONDS, seconds):
        begun = time.perf_counter()
        count, taken = 0, 0.0
        while agree(taken < window):
            work()
            count += 1
            taken = time.perf_counter() - begun
    return count / taken


def _plain_step(task: Sized, model: nn.Module, rank: int = 0, workers: int = 1) -> Callable[[], None]:
    """One step of an ordinary training loop."""
    batches = _batches(task, rank, workers)
    optimizer = task.optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _batches(task: Sized, rank: int, workers: int) -> Batches:
    torch.manual_seed(rank)
    return Batches(task, task.train_data(), seed=0, index=rank, count=workers)


def _one_process(threads: int, task: Sized, seconds: float) -> float:
    return _spawned(_one_rank, 1, task, seconds, threads)


def _one_rank(rank: int, results: Any, task: Sized, seconds: float, threads: int) -> None:
    torch.set_num_threads(threads)
    results.put(task.batch_size * _rate(_plain_step(task, build_model(task, 0)), seconds))


def _ddp(task: Sized, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as directory:
        return _spawned(_ddp_rank, WORKERS, task, seconds, f"file://{directory}/store")


def _ddp_rank(rank: int, results: Any, task: Sized, seconds: float, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=WORKERS)
    step = _plain_step(task, DistributedDataParallel(build_model(task, 0)), rank, WORKERS)
    more, steps = torch.ones(1), 5

    def work() -> None:
        for _ in range(steps):
            step()

    def agree(continues: bool) -> bool:
        more.fill_(continues)
        torch.distributed.broadcast(more, 0)
        return bool(more)

    results.put(steps * task.batch_size * _rate(work, seconds, agree))
    torch.distributed.destroy_process_group()


def _hogwild(task: Sized, seconds: float) -> float:
    """As in torch's own example: the weights are shared, and every process steps with an optimizer of its own."""
    barrier = torch.multiprocessing.get_context("spawn").Barrier(WORKERS)
    return _spawned(_hogwild_rank, WORKERS, task, seconds, build_model(task, 0).share_memory(), barrier)


def _hogwild_rank(rank: int, results: Any, task: Sized, seconds: float, model: nn.Module, barrier: Any) -> None:
    torch.set_num_threads(1)
    step = _plain_step(task, model, rank, WORKERS)
    barrier.wait()
    results.put(task.batch_size * _rate(step, seconds))


def _pipes(task: Sized, seconds: float) -> float:
    """A plain parameter server, like the paper's mpiT: gradients and weights go through pipes."""
    context = torch.multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(WORKERS)]
    try:
        return _spawned(_pipes_rank, WORKERS + 1, task, seconds, pipes, context.Barrier(WORKERS))
    finally:
        for end in itertools.chain(*pipes):
            end.close()


def _pipes_rank(rank: int, results: Any, task: Sized, seconds: float, pipes: Any, barrier: Any) -> None:
    torch.set_num_threads(1)
    if rank == WORKERS:
        _serve(Vector(build_model(task, 0)), task.learning_rate, [theirs for _, theirs in pipes])
        return
    server = pipes[rank][0]
    step = _pipe_step(task, server, rank)
    barrier.wait()
    results.put(task.batch_size * _rate(step, seconds))
    server.send_bytes(b"")


def _pipe_step(task: Sized, server: Connection[bytes, bytes], rank: int) -> Callable[[], None]:
    model = build_model(task, 0)
    vector = Vector(model)
    batches = _batches(task, rank, WORKERS)

    def step() -> None:
        vector.gradient.zero_()
        task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        server.send_bytes(raw_bytes(vector.gather_gradient()))
        server.recv_bytes_into(raw_bytes(vector.weights))

    return step


def _serve(vector: Vector, learning_rate: float, workers: list[Connection[bytes, bytes]]) -> None:
    """Step with every gradient and send the weights back, until each worker has sent an empty message."""
    while workers:
        ready = wait(workers)
        for worker in [worker for worker in workers if worker in ready]:
            if worker.recv_bytes_into(raw_bytes(vector.gradient)):
                vector.weights.sub_(vector.gradient, alpha=learning_rate)
                worker.send_bytes(raw_bytes(vector.weights))
            else:
                workers.remove(worker)


#: each gives the samples per second of a task, measured for a number of seconds
SYSTEMS: dict[str, Callable[[Sized, float], float]] = {
    ONE: partial(_one_process, 1),
    TWO_THREADS: partial(_one_process, 2),
    INLINE: partial(_tether, Server(sync="async", apply="inline")),
    SERVER: partial(_tether, Server(sync="async")),
    "torch DDP": _ddp,
    "hogwild": _hogwild,
    "parameter server over pipes": _pipes,
}
