"""Tether: one PyTorch model, many workers, tied to one joint model as if by elastic tethers."""

from __future__ import annotations

from tether.errors import (
    InternalError,
    Interrupted,
    InvariantBroken,
    RunError,
    Stalled,
    TaskError,
    TetherError,
    UsageError,
    WireError,
)
from tether.protocols import Averaging, Elastic, Grid, Mpca, Server, Single
from tether.run import Result, Training, resume, run, start
from tether.runtimes.faults import Faults
from tether.runtimes.local import Local
from tether.runtimes.sim import Sim, StepTime
from tether.runtimes.spark import Spark
from tether.task import Length, Task

__version__ = "0.1.0"

__all__ = [
    "Averaging",
    "Elastic",
    "Faults",
    "Grid",
    "InternalError",
    "Interrupted",
    "InvariantBroken",
    "Length",
    "Local",
    "Mpca",
    "Result",
    "RunError",
    "Server",
    "Sim",
    "Single",
    "Spark",
    "Stalled",
    "StepTime",
    "Task",
    "TaskError",
    "TetherError",
    "Training",
    "UsageError",
    "WireError",
    "resume",
    "run",
    "start",
]
