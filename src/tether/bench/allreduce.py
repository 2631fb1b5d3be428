"""A round of the elastic grid against gloo's allreduce, in processes of this machine."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
import torch.distributed
import typer

from tether.bench.common import Report, Rounds, median_ratio, sizes
from tether.bench.grid import ExchangeOnly, execute
from tether.execution.goals import Request
from tether.learner.synthetic import SyntheticTask
from tether.runtimes.local import Local

#: float32
VALUES_PER_MB = 250_000


def allreduce(
    workers: Annotated[int, typer.Option(min=2, help="How many processes.")] = 4,
    megabytes: Annotated[Sequence[float], sizes("Sizes of the vector. Choose that of your own model.")] = (7, 30),
    seconds: Annotated[
        float, typer.Option(help="How long each is measured in a turn. Use more if a round takes a second.")
    ] = 6.0,
    rounds: Rounds = 3,
) -> Report:
    """A round of the grid in processes of this machine against gloo's all_reduce over loopback, in turns."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for size in megabytes:
        values = round(size * VALUES_PER_MB)
        taken: dict[str, list[float]] = {"grid": [], "gloo": []}
        for _ in range(rounds):
            request = Request(seconds=seconds, trace=False)
            _, times = execute(SyntheticTask(parameters=values), ExchangeOnly(dimensions=1), Local(workers), request)
            taken["grid"].append(statistics.median(times.periods()))
            taken["gloo"].append(_gloo(workers, values, seconds))
        for name, found in taken.items():
            rows.append({"allreduce": name, "MB": size, "ms": 1e3 * statistics.median(found)})
        ratios[f"grid over gloo, {size:g} MB"] = median_ratio(taken["grid"], taken["gloo"])
    return {"bench": "allreduce", "workers": workers, "rounds": rounds, "rows": rows, "ratios": ratios}


def _gloo(workers: int, values: int, seconds: float) -> float:
    """The median seconds of torch's all_reduce in the same number of processes."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        arguments = [(rank, workers, values, seconds, f"{directory}/store", theirs) for rank in range(workers)]
        processes = [context.Process(target=_gloo_rank, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        found: float = ours.recv()
        for process in processes:
            process.join()
    return found


def _gloo_rank(rank: int, workers: int, values: int, seconds: float, store: str, result: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    vector, taken, more = torch.ones(values), [], torch.ones(1)
    begun = time.perf_counter()
    while more:
        start = time.perf_counter()
        torch.distributed.all_reduce(vector)
        taken.append(time.perf_counter() - start)
        vector.fill_(1.0)
        more.fill_(time.perf_counter() < begun + seconds)
        torch.distributed.broadcast(more, 0)
    if rank == 0:
        result.send(statistics.median(taken[2:]))
    torch.distributed.destroy_process_group()
