"""A round of the elastic grid against gloo's allreduce, in processes of this machine or between emulated hosts.

Between hosts, what counts is how much of each link is in use, in each direction, as the interfaces count it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed
import typer

from tether.bench.common import Report, Rounds, Row, median_ratio, sizes
from tether.bench.grid import ExchangeOnly, execute
from tether.bench.remote import WATCH_SECONDS, Interfaces, call_on, cluster
from tether.core.units import bytes_per_second
from tether.execution.goals import Request
from tether.learner.synthetic import SyntheticTask
from tether.runtimes.cluster import Cluster
from tether.runtimes.local import Local
from tether.testing.hosts import Host, hosts

#: float32
VALUES_PER_MB = 250_000
GLOO_PORT = 29500
#: exchanges at the beginning that do not count
WARM_UP_ROUNDS = 2


def allreduce(
    workers: Annotated[int, typer.Option(min=2, help="How many processes.")] = 4,
    megabytes: Annotated[Sequence[float], sizes("Sizes of the vector. Choose that of your own model.")] = (7, 30),
    seconds: Annotated[
        float, typer.Option(help="How long each is measured in a turn. Use more if a round takes a second.")
    ] = 6.0,
    rounds: Rounds = 3,
    link: Annotated[
        str | None,
        typer.Option(help="Measure between emulated hosts with links of this speed. Needs root, ip and tc."),
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, help="How many rounds of the grid are under way at once.")] = 2,
) -> Report:
    """A round of the grid in processes of this machine against gloo's all_reduce over loopback, in turns.

    With a link, between emulated hosts; then it shows how much of the links they use too.
    """
    if link is not None:
        return _between_hosts(link, workers, megabytes, seconds, rounds, in_flight)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for size in megabytes:
        values = round(size * VALUES_PER_MB)
        taken: dict[str, list[float]] = {"grid": [], "gloo": []}
        for _ in range(rounds):
            request = Request(seconds=seconds, trace=False)
            options = ExchangeOnly(dimensions=1, rounds_in_flight=in_flight)
            _, times = execute(SyntheticTask(parameters=values), options, Local(workers), request)
            taken["grid"].append(statistics.median(times.periods()))
            taken["gloo"].append(_gloo(workers, values, seconds))
        for name, found in taken.items():
            rows.append({"allreduce": name, "MB": size, "ms": 1e3 * statistics.median(found)})
        ratios[f"grid over gloo, {size:g} MB"] = median_ratio(taken["grid"], taken["gloo"])
    return {"bench": "allreduce", "workers": workers, "rounds": rounds, "rows": rows, "ratios": ratios}


def _between_hosts(
    link: str, workers: int, megabytes: Sequence[float], seconds: float, rounds: int, in_flight: int
) -> Report:
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    with hosts(workers, link) as places:
        for size in megabytes:
            values = round(size * VALUES_PER_MB)
            ways = {"grid": partial(_grid_on, places, in_flight), "gloo": partial(_gloo_on, places)}
            taken: dict[str, list[_Exchanged]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, measure in ways.items():
                    taken[name].append(measure(values, seconds, bytes_per_second(link, "--link")))
                    print(f"{name}, {size:g} MB: {taken[name][-1]}", file=sys.stderr)
            for name, found in taken.items():
                rows.append(
                    {
                        "allreduce": name,
                        "MB": size,
                        "ms": 1e3 * statistics.median(one.seconds for one in found),
                        "sending": statistics.median(one.sending for one in found),
                        "receiving": statistics.median(one.receiving for one in found),
                    }
                )
            ours, theirs = ([one.seconds for one in found] for found in taken.values())
            ratios[f"grid over gloo, {size:g} MB"] = median_ratio(ours, theirs)
            ratios[f"least busy direction of a link under grid, {size:g} MB"] = statistics.median(
                min(one.sending, one.receiving) for one in taken["grid"]
            )
    return {"bench": "allreduce", "workers": workers, "link": link, "rounds": rounds, "rows": rows, "ratios": ratios}


class _Exchanged(NamedTuple):
    """The seconds of an exchange, and the share of the least busy link that is in use in each direction."""

    seconds: float
    sending: float
    receiving: float


def _watched(places: list[Host], speed: float, run: Callable[[], tuple[float, float, float]]) -> _Exchanged:
    """What was exchanged while this ran; it returns the time of an exchange, and when measuring began and ended."""
    interfaces = Interfaces(places)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        while not running.done():
            interfaces.read()
            time.sleep(WATCH_SECONDS)
        seconds, since, until = running.result()
    rates = interfaces.rates(since, until)
    return _Exchanged(seconds, min(rate[0] for rate in rates) / speed, min(rate[1] for rate in rates) / speed)


def _grid_on(places: list[Host], in_flight: int, values: int, seconds: float, speed: float) -> _Exchanged:
    options = ExchangeOnly(dimensions=1, rounds_in_flight=in_flight)

    def run() -> tuple[float, float, float]:
        with cluster(places[0], places) as on:
            found: tuple[float, float, float] = call_on(places[0], _grid_rounds, options, on, values, seconds)
            return found

    return _watched(places, speed, run)


def _grid_rounds(options: ExchangeOnly, on: Cluster, values: int, seconds: float) -> tuple[float, float, float]:
    """The time between two ends of rounds, and when the first and the last that count were."""
    request = Request(seconds=seconds, trace=False)
    _, times = execute(SyntheticTask(parameters=values), options, on, request)
    counted = times.noted[WARM_UP_ROUNDS:]
    return (counted[-1] - counted[0]) / (len(counted) - 1), counted[0], counted[-1]  # rounds end in bunches


def _gloo_on(places: list[Host], values: int, seconds: float, speed: float) -> _Exchanged:
    def run() -> tuple[float, float, float]:
        meet = f"tcp://{places[0].address}:{GLOO_PORT}"
        with ThreadPoolExecutor(len(places)) as pool:
            calls = [
                pool.submit(call_on, host, _gloo_rounds, rank, len(places), values, seconds, meet, "eth0")
                for rank, host in enumerate(places)
            ]
            found: list[list[float]] = [call.result() for call in calls]
        ended = found[0]
        return (ended[-1] - ended[0]) / (len(ended) - 1), ended[0], ended[-1]

    return _watched(places, speed, run)


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
    torch.set_num_threads(1)
    ended = _gloo_rounds(rank, workers, values, seconds, f"file://{store}", "lo")
    if rank == 0:
        result.send(statistics.median(b - a for a, b in pairwise(ended)))


def _gloo_rounds(rank: int, workers: int, values: int, seconds: float, meet: str, interface: str) -> list[float]:
    """When each exchange was over, without the first few."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=workers)
    vector, ended, more = torch.ones(values), [], torch.ones(1)
    begun = time.monotonic()
    while more:
        torch.distributed.all_reduce(vector)
        ended.append(time.monotonic())
        vector.fill_(1.0)
        more.fill_(time.monotonic() < begun + seconds)
        torch.distributed.broadcast(more, 0)
    torch.distributed.destroy_process_group()
    return ended[WARM_UP_ROUNDS:]
