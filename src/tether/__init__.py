"""Tether: one PyTorch model, many workers, tied to one joint model as if by elastic tethers.

Every public name is loaded when it is first used, so that `tether --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from tether.api import Result, Training, resume, run, start
    from tether.caffe import CaffeTask
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
    from tether.execution.callbacks import CsvLogger, TensorBoardLogger, WandbLogger
    from tether.loops import evaluate, is_main, join, rank, sampler, save, world_size
    from tether.protocols import Averaging, Elastic, Grid, Mpca, Server, Single, Streaming, Tide
    from tether.runtimes.cluster import Cluster
    from tether.runtimes.local import Local
    from tether.runtimes.ray.runtime import Ray
    from tether.runtimes.sim.costs import StepTime
    from tether.runtimes.sim.faults import Faults
    from tether.runtimes.sim.runtime import Sim
    from tether.runtimes.spark.runtime import Spark
    from tether.task import Callback, Length, StepInfo, Task

__version__ = "0.1.0"

#: by module, its public names
_PUBLIC = {
    "tether.api": ("Result", "Training", "resume", "run", "start"),
    "tether.caffe": ("CaffeTask",),
    "tether.errors": (
        "InternalError",
        "Interrupted",
        "InvariantBroken",
        "RunError",
        "Stalled",
        "TaskError",
        "TetherError",
        "UsageError",
        "WireError",
    ),
    "tether.loops": ("evaluate", "is_main", "join", "rank", "sampler", "save", "world_size"),
    "tether.protocols": ("Averaging", "Elastic", "Grid", "Mpca", "Server", "Single", "Streaming", "Tide"),
    "tether.runtimes.cluster": ("Cluster",),
    "tether.runtimes.local": ("Local",),
    "tether.runtimes.ray.runtime": ("Ray",),
    "tether.runtimes.sim.costs": ("StepTime",),
    "tether.runtimes.sim.faults": ("Faults",),
    "tether.runtimes.sim.runtime": ("Sim",),
    "tether.runtimes.spark.runtime": ("Spark",),
    "tether.execution.callbacks": ("CsvLogger", "TensorBoardLogger", "WandbLogger"),
    "tether.task": ("Callback", "Length", "StepInfo", "Task"),
}

__all__ = [
    "Averaging",
    "CaffeTask",
    "Callback",
    "Cluster",
    "CsvLogger",
    "Elastic",
    "Faults",
    "Grid",
    "InternalError",
    "Interrupted",
    "InvariantBroken",
    "Length",
    "Local",
    "Mpca",
    "Ray",
    "Result",
    "RunError",
    "Server",
    "Sim",
    "Single",
    "Spark",
    "Stalled",
    "StepInfo",
    "StepTime",
    "Streaming",
    "Task",
    "TaskError",
    "TensorBoardLogger",
    "TetherError",
    "Tide",
    "Training",
    "UsageError",
    "WandbLogger",
    "WireError",
    "evaluate",
    "is_main",
    "join",
    "rank",
    "resume",
    "run",
    "sampler",
    "save",
    "start",
    "world_size",
]


def __getattr__(name: str) -> _Any:
    """Load a public name, or `tether.spark`, which needs pyspark."""
    if name == "spark":
        return _import_module("tether.spark")
    for module, names in _PUBLIC.items():
        if name in names:
            value = getattr(_import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'tether' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for names in _PUBLIC.values() for name in names)})
