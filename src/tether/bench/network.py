"""Time to a target error on hosts with slow links: every protocol beside torch's own ways, in one run.

All train the same network on the same mini-batches with the same optimizer and one thread. A step takes a pause beside
the real gradient, as on a machine whose device computes, so that the few cores of this one are enough for all. Each
system has one worker on each host; the hub, where there is one, is on the first host with a worker. Bytes are those
that the interfaces count.

gloo's systems are DistributedDataParallel, plain and with torch's hook that sends half precision, and DiLoCo, written
here with torch.distributed: torchft's needs a server of its own for every group. Their errors are measured as Tether's
are, beside training, of the newest weights.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tether.bench.cells import options_of
from tether.bench.common import NEVER, FashionData, Report, Row, Target, names, run_quietly
from tether.bench.remote import Interfaces, call_on, cluster
from tether.errors import UsageError
from tether.learner.data import Batches
from tether.learner.learner import build_model, evaluate
from tether.protocols import Single
from tether.runtimes.cluster import Cluster
from tether.runtimes.local import Local
from tether.tasks.fashion import Fashion
from tether.tasks.networks import mlp
from tether.testing.hosts import Host, hosts

DDP, DDP_FP16, DILOCO = "ddp", "ddp-fp16", "diloco-gloo"
PROTOCOLS = ("server", "averaging", "diloco", "elastic", "mpca", "streaming", "grid", "tide")
GLOO_PORT = 29500
#: mini-batches of all workers between two evaluations
EVALUATE_EVERY = 100
#: held-out samples that are evaluated
EVALUATED = 2000
#: steps after which the processes of gloo agree whether to go on
AGREE_EVERY = 5
#: DiLoCo's outer optimizer, as its authors chose it
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


class Paused(Fashion):
    """Fashion with a network of 7 MB, whose steps take a pause."""

    networks: ClassVar = {"mlp": partial(mlp, 784, 1100, 800, 10)}

    def __init__(self, data: str | Path | None, batch_size: int, pause_seconds: float) -> None:
        super().__init__(data, batch_size=batch_size)
        self.pause_seconds = pause_seconds

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.pause_seconds)
        return super().loss(model, batch)

    def test_data(self) -> TensorDataset:
        return TensorDataset(*(tensor[:EVALUATED] for tensor in super().test_data().tensors))


@dataclass(frozen=True)
class Trial:
    """What each system does."""

    task: Paused
    target: float
    seconds: float
    seed: int


@dataclass(frozen=True)
class Found:
    """How a system did."""

    #: when the target was reached; infinite if it was not
    seconds: float
    samples_per_second: float
    #: samples and error of each evaluation
    curve: list[tuple[int, float]]


def network(
    data: FashionData = None,
    workers: Annotated[int, typer.Option(min=2, help="How many hosts.")] = 4,
    link: Annotated[str, typer.Option(help="The speed of each host's link.")] = "100mbit",
    target: Target = 0.12,
    pause: Annotated[float, typer.Option(min=0, help="Seconds of a step beside its real computing.")] = 0.03,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a mini-batch.")] = 16,
    sync_every: Annotated[int, typer.Option(min=1, help="Steps between two exchanges of DiLoCo on gloo.")] = 20,
    protocols: Annotated[
        Sequence[str], names("Protocols to measure; with settings as tide:drift=0+phases=1.", "mpca,tide")
    ] = PROTOCOLS,
    systems: Annotated[Sequence[str], names("What they are compared with.", "ddp,ddp-fp16")] = (
        DDP,
        DDP_FP16,
        DILOCO,
    ),
    seconds: Annotated[float, typer.Option(help="End a system that has not reached the target by then.")] = 1800.0,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order of the data.")] = 0,
) -> Report:
    """Time to a target error of every protocol and of torch's DDP and DiLoCo, between emulated hosts with slow links.

    Needs root, and the programs ip and tc.
    """
    ways: dict[str, Callable[..., Any]] = {DDP: _ddp, DDP_FP16: _ddp_fp16, DILOCO: partial(_diloco, sync_every)}
    for name in systems:
        if name not in ways:
            raise UsageError(f"unknown system {name!r}: choose of {', '.join(ways)}")
    options = {name: options_of(name) for name in protocols}
    trial = Trial(Paused(data, batch, pause), target, seconds, seed)
    found: dict[str, Found] = {}
    rows: list[Row] = []
    with hosts(workers, link) as places:
        measures: dict[str, Callable[[], Found]] = {
            **{name: partial(_gloo, places, trial, ways[name]) for name in systems},
            **{name: partial(_ours, places, trial, options[name]) for name in options},
        }
        for name, measure in measures.items():
            interfaces = Interfaces(places)
            interfaces.read()
            found[name] = one = measure()
            interfaces.read()
            before, after = (reading.counts for reading in interfaces.readings)
            moved = sum(b[0] - a[0] for a, b in zip(before, after, strict=True))
            samples = one.curve[-1][0] if one.curve else 0
            rows.append(
                {
                    "system": name,
                    "seconds": one.seconds,
                    "samples_per_second": one.samples_per_second,
                    "kB_per_sample": moved / samples / 1e3 if samples else math.nan,
                    "error": one.curve[-1][1] if one.curve else math.nan,
                }
            )
            print(f"{name}: {_line(rows[-1])}", file=sys.stderr)
    alone = _alone(trial, max(one.curve[-1][0] for one in found.values() if one.curve))
    for row, one in zip(rows, found.values(), strict=True):
        row["error_of_one"] = _interpolate(alone, one.curve[-1][0]) if one.curve else math.nan
    return {
        "bench": "network",
        "workers": workers,
        "link": link,
        "target": target,
        "rows": rows,
        "ratios": _ratios(found, list(options), list(systems), rows),
    }


def _ratios(found: dict[str, Found], ours: list[str], theirs: list[str], rows: list[Row]) -> dict[str, float]:
    if not ours:
        return {}
    best = min(ours, key=lambda name: found[name].seconds)
    ratios = {f"{name} over {best}, seconds": found[name].seconds / found[best].seconds for name in theirs}
    row = next(row for row in rows if row["system"] == best)
    return {**ratios, f"error of {best} less that of one at equal samples": row["error"] - row["error_of_one"]}


def _line(row: Row) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in row.items() if name != "system")


# ---- Tether ---------------------------------------------------------------------------------------------------------


def _ours(places: list[Host], trial: Trial, options: Any) -> Found:
    with cluster(places[0], places) as on:
        found: Found = call_on(places[0], _train, trial, options, on)
    return found


def _train(trial: Trial, options: Any, on: Cluster | Local, samples: int | None = None) -> Found:
    """One run of Tether, to the target or to a number of samples."""
    size, batch = len(trial.task.train_data()), trial.task.batch_size
    until = {"until": f"error<{trial.target}"} if samples is None else {"epochs": samples / size}
    with tempfile.TemporaryDirectory() as folder:
        figures = run_quietly(
            trial.task,
            options,
            on,
            run_dir=Path(folder, "run"),
            evaluate_every=EVALUATE_EVERY * batch / size,
            checkpoint_seconds=NEVER,
            seconds=trial.seconds,
            seed=trial.seed,
            **until,
        )
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if row["kind"] == "evaluation"]
    reached = [row["time"] for row in evaluated if row["metrics"]["error"] < trial.target]
    curve = [(row["samples"], row["metrics"]["error"]) for row in evaluated]
    return Found(min(reached, default=math.inf), figures["samples"] / figures["seconds"], curve)


def _alone(trial: Trial, samples: int) -> list[tuple[int, float]]:
    """Samples and error of one worker without pauses."""
    task = Paused(trial.task.data, trial.task.batch_size, 0.0)
    without_limit = Trial(task, 0.0, NEVER, trial.seed)
    return _train(without_limit, Single(), Local(1), samples + EVALUATE_EVERY * task.batch_size).curve


def _interpolate(curve: list[tuple[int, float]], samples: int) -> float:
    """The error after this number of samples, as the mean of the evaluations around it."""
    nearest = sorted(curve, key=lambda point: abs(point[0] - samples))[:3]
    return statistics.fmean(error for _, error in nearest)


# ---- gloo -----------------------------------------------------------------------------------------------------------


def _gloo(places: list[Host], trial: Trial, way: Callable[..., Any]) -> Found:
    with ThreadPoolExecutor(len(places)) as pool:
        calls = [
            pool.submit(call_on, host, _rank, rank, len(places), f"tcp://{places[0].address}:{GLOO_PORT}", trial, way)
            for rank, host in enumerate(places)
        ]
        found: list[Found] = [call.result() for call in calls]
    return found[0]


def _rank(rank: int, world: int, meet: str, trial: Trial, way: Callable[..., Any]) -> Found:
    """One process of a run on gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    task = trial.task
    model = build_model(task, trial.seed)
    optimizer = task.optimizer(model)
    batches = Batches(task, task.train_data(), seed=trial.seed, index=rank, count=world)
    tied, after_step = way(model)
    evaluator = _Evaluator(trial) if rank == 0 else None
    torch.distributed.barrier()
    begun, steps, evaluated = time.monotonic(), 0, 0
    for batch in batches:
        optimizer.zero_grad()
        task.loss(tied, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
        exchanged = after_step(steps)
        if evaluator is not None and exchanged and steps - evaluated >= EVALUATE_EVERY // world:
            evaluated = steps
            evaluator.offer(time.monotonic() - begun, steps * world * task.batch_size, model)
        if steps % AGREE_EVERY == 0:
            over = time.monotonic() - begun > trial.seconds or (evaluator is not None and evaluator.reached < math.inf)
            ends = torch.tensor(float(over))
            torch.distributed.broadcast(ends, 0)
            if ends:
                break
    seconds = time.monotonic() - begun
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if evaluator is None:
        return Found(math.inf, 0.0, [])
    evaluator.close()
    return Found(evaluator.reached, steps * world * task.batch_size / seconds, evaluator.curve)


def _ddp(model: nn.Module) -> tuple[nn.Module, Callable[[int], bool]]:
    """The module to train, and what is done after a step; it says whether all processes have one model now."""
    return nn.parallel.DistributedDataParallel(model), lambda steps: True


def _ddp_fp16(model: nn.Module) -> tuple[nn.Module, Callable[[int], bool]]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    tied = nn.parallel.DistributedDataParallel(model)
    tied.register_comm_hook(None, fp16_compress_hook)
    return tied, lambda steps: True


def _diloco(sync_every: int, model: nn.Module) -> tuple[nn.Module, Callable[[int], bool]]:
    parameters = list(model.parameters())
    joint = torch.cat([parameter.detach().flatten() for parameter in parameters])
    outer = torch.optim.SGD([joint], lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    world = torch.distributed.get_world_size()

    def after_step(steps: int) -> bool:
        if steps % sync_every:
            return False
        with torch.no_grad():
            mean = torch.cat([parameter.flatten() for parameter in parameters])
            torch.distributed.all_reduce(mean)
            joint.grad = joint - mean / world
            outer.step()
            start = 0
            for parameter in parameters:
                parameter.copy_(joint[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
        return True

    return model, after_step


class _Evaluator:
    """Evaluates the newest weights in a thread of its own."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._model = build_model(trial.task, trial.seed)
        self._wanted = threading.Condition()
        self._newest: tuple[float, int, dict[str, Tensor]] | None = None
        self._over = False
        self.reached = math.inf
        self.curve: list[tuple[int, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def offer(self, seconds: float, samples: int, model: nn.Module) -> None:
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        with self._wanted:
            self._newest = seconds, samples, state
            self._wanted.notify()

    def close(self) -> None:
        with self._wanted:
            self._over = True
            self._wanted.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._newest is not None or self._over)
                if self._newest is None:
                    return
                (seconds, samples, state), self._newest = self._newest, None
            self._model.load_state_dict(state)
            error = evaluate(self._trial.task, self._model)["error"]
            self.curve.append((samples, error))
            if error < self._trial.target:
                self.reached = min(self.reached, seconds)
