"""A script under `tether launch` against the script alone."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from tether.bench.common import Report, Rounds, ratios_in_turns
from tether.errors import RunError

#: a small network on images like those of Fashion-MNIST, one thread; it writes down how long its steps took
SCRIPT = """
import sys, time
import torch
from torch import nn
import tether

torch.set_num_threads(1)
torch.manual_seed(0)
steps = int(sys.argv[1])
images, labels = torch.randn(2048, 1, 28, 28), torch.randint(0, 10, (2048,))
model = nn.Sequential(
    nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(count):
    for _ in range(count):
        chosen = torch.randint(0, 2048, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()


with tether.join(model, optimizer):
    train(20)
    began = time.perf_counter()
    train(steps)
    seconds = time.perf_counter() - began
if tether.is_main():
    open("seconds", "w").write(str(seconds))
"""


def loops(
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of each process in a turn. Use fewer for a first look.")
    ] = 500,
    rounds: Rounds = 5,
) -> Report:
    """A loop launched as one process against the script alone, and under mpca in two processes, in turns.

    Every process has one thread. `exchange nothing` are two processes under averaging that exchange only at the end.
    """
    kinds = {
        "alone": [],
        "one process": ["-n", "1"],
        "exchange nothing": ["-n", "2", "-p", "averaging", "--set", f"tau={steps + 20}"],
        "mpca": ["-n", "2", "-p", "mpca"],
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    shares: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, options in kinds.items():
            taken, figures = _turn(options, steps)
            seconds[kind].append(taken)
            if figures:
                shares[kind].append(figures["overlap"])
    rows = [
        {
            "loop": kind,
            "ms_per_step": 1e3 * statistics.median(seconds[kind]) / steps,
            "overlap": statistics.median(shares[kind]) if shares[kind] else 1.0,
        }
        for kind in kinds
    ]
    one = ratios_in_turns(seconds["one process"], seconds["alone"])
    two = ratios_in_turns(seconds["mpca"], seconds["exchange nothing"])
    ratios = {
        "one_process_over_alone": statistics.median(one),
        "one_process_over_alone_min": min(one),
        "one_process_over_alone_max": max(one),
        "mpca_over_exchanging_nothing": statistics.median(two),
    }
    return {"bench": "loops", "steps": steps, "rounds": rounds, "rows": rows, "ratios": ratios}


def _turn(options: list[str], steps: int) -> tuple[float, dict[str, Any]]:
    """How long the steps took, and the figures of the run if there was one."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        launched = ["-m", "tether", "launch", *options, "--threads", "1", "--run", "run", "--json"] if options else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, *launched, str(script), str(steps)]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
        if ended.returncode:
            raise RunError(f"a loop of the benchmark failed: {ended.stderr[-1000:]}")
        return float(Path(folder, "seconds").read_text()), json.loads(ended.stdout) if options else {}
