"""One worker in Tether against a plain PyTorch loop."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader

from tether import tasks
from tether.bench.common import Report, Rounds, ratios_in_turns, run_quietly
from tether.learner.data import Batches
from tether.learner.learner import build_model
from tether.protocols import Single
from tether.runtimes.local import Local
from tether.task import Task


def overhead(
    task: Annotated[
        str, typer.Option(help="The task to train. Choose your own to measure Tether's overhead on it.")
    ] = "fashion",
    data: Annotated[Path | None, typer.Option(help="The task's data: a folder or file. Needed by fashion.")] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of each loop in a turn. Use fewer for a task with slow steps.")
    ] = 1500,
    rounds: Rounds = 7,
) -> Report:
    """One worker in a process against a plain PyTorch loop over the same mini-batches, in turns.

    Both use one thread. A first turn warms up and does not count.
    """
    subject = tasks.load(task, data=data)
    train_data: Any = subject.train_data()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {"plain": [], "tether": []}
    try:
        for turn in range(rounds + 1):
            plain = _plain_loop(subject, Batches(subject, train_data, seed=0), steps)
            figures = run_quietly(subject, Single(), Local(1), steps=steps, trace=True)
            if turn:
                taken["plain"].append(plain / steps)
                taken["tether"].append(figures["seconds"] / steps)
        loader = DataLoader(train_data, batch_size=subject.batch_size, shuffle=True)
        with_loader = _plain_loop(subject, _endless(loader), steps) / steps
    finally:
        torch.set_num_threads(threads)
    rows = [{"loop": name, "ms_per_step": 1e3 * statistics.median(seconds)} for name, seconds in taken.items()]
    rows.append({"loop": "plain with DataLoader", "ms_per_step": 1e3 * with_loader})
    in_turns = ratios_in_turns(taken["tether"], taken["plain"])
    return {
        "bench": "overhead",
        "task": subject.name,
        "steps": steps,
        "rounds": rounds,
        "rows": rows,
        "ratios": {
            "tether_over_plain": statistics.median(in_turns),
            "tether_over_plain_min": min(in_turns),
            "tether_over_plain_max": max(in_turns),
            "tether_over_plain_with_dataloader": statistics.median(taken["tether"]) / with_loader,
        },
    }


def _plain_loop(task: Task, batches: Any, steps: int) -> float:
    """Seconds that an ordinary training loop takes."""
    model = build_model(task, 0)
    optimizer = task.optimizer(model)
    start = time.perf_counter()
    for _, batch in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()
    return time.perf_counter() - start


def _endless(loader: Any) -> Any:
    while True:
        yield from loader
