"""Calls the user's callbacks, and the loggers that come with Tether."""

from __future__ import annotations

import csv
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.errors import UsageError, unknown
from tether.task import Callback, users_code


class Callbacks:
    """Calls a method of all callbacks, one at a time: evaluations and checkpoints happen in threads of their own."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                hint = f"write {callback.__name__}()" if isinstance(callback, type) else "subclass tether.Callback"
                raise UsageError(f"callbacks must be tether.Callback objects, not {callback!r}: {hint}")
        self._callbacks = tuple(callbacks)
        self._lock = threading.Lock()

    @property
    def stepping(self) -> tuple[Callback, ...]:
        """Those that want to know of every mini-batch of a worker."""
        return tuple(each for each in self._callbacks if type(each).on_step is not Callback.on_step)

    def call(self, method: str, *arguments: Any) -> None:
        """Call this method of each; what it raises becomes a TaskError."""
        with self._lock:
            for callback in self._callbacks:
                with users_code(callback, f"{method}() of {type(callback).__name__}"):
                    getattr(callback, method)(*arguments)


class CsvLogger(Callback):
    """Writes a row for every evaluation to a CSV file: step, samples and the metrics."""

    def __init__(self, path: Path | str | None = None) -> None:
        """`path`: the file; metrics.csv in the run directory by default."""
        self._given = path
        self._path = Path()

    def on_begin(self, directory: Path) -> None:
        self._path = Path(self._given) if self._given is not None else directory / "metrics.csv"

    def on_evaluation(self, step: int, samples: int, metrics: dict[str, float]) -> None:
        row = {"step": step, "samples": samples, **metrics}
        is_new = not self._path.exists()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)


class TensorBoardLogger(Callback):
    """Writes event files for TensorBoard: metrics of the joint model, and the loss and rate of each worker."""

    def __init__(self, path: Path | str | None = None) -> None:
        """`path`: the folder; tensorboard in the run directory by default."""
        self._given = path
        self._writer: Any = None

    def on_begin(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(f"{error}: install it with pip install 'tether[tensorboard]'") from None
        self._writer = SummaryWriter(str(self._given or directory / "tensorboard"))

    def on_progress(self, figures: dict[str, Any]) -> None:
        if figures["steps"] and figures["loss"] is not None:
            self._writer.add_scalar(f"loss/{figures['node']}", figures["loss"], figures["steps"])

    def on_evaluation(self, step: int, samples: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"joint model/{name}", value, step)
        self._writer.flush()

    def on_end(self, result: Any) -> None:
        self._writer.close()


class WandbLogger(Callback):
    """Logs metrics of the joint model with Weights & Biases, offline unless told otherwise."""

    def __init__(self, project: str = "tether", mode: str = "offline", **settings: Any) -> None:
        """`mode` and `settings` are arguments of `wandb.init`; files go to the run directory."""
        self._settings = {"project": project, "mode": mode, **settings}
        self._run: Any = None

    def on_begin(self, directory: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError(f"{error}: install it with pip install 'tether[wandb]'") from None
        (directory / "wandb").mkdir(exist_ok=True)
        if self._run is None:
            self._run = wandb.init(**{"dir": str(directory), "name": directory.name, **self._settings})

    def on_evaluation(self, step: int, samples: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "samples": samples}, step=step)

    def on_end(self, result: Any) -> None:
        self._run.summary.update({name: value for name, value in result.metrics.items()})
        self._run.finish()


LOGGERS: dict[str, type[Callback]] = {"csv": CsvLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def make_loggers(names: Sequence[str]) -> list[Callback]:
    """The loggers of these names."""
    for name in names:
        if name not in LOGGERS:
            raise unknown("logger", name, LOGGERS)
    return [LOGGERS[name]() for name in dict.fromkeys(names)]
