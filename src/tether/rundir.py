"""The run directory: configuration, metrics, trace, checkpoints and logs of one run.

run.json              what was run and how it ended
metrics.jsonl         one JSON object a line: progress, evaluation, record
trace.json            spans for Perfetto or chrome://tracing
checkpoints/at-N/     after N samples: state.json and tensors.safetensors; complete or not there at all
best.safetensors      the best weights seen by a run with patience, and of which step they are
logs/NODE.log         what each process printed
record/NODE.events    every event of a node, when the run was recorded

A run may have a storage elsewhere, such as a folder in HDFS. The checkpoints and the best weights are then there alone,
and run.json is there too: it is all that another machine needs to continue the run.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.errors import UsageError
from tether.wire import pack_tree, unpack_tree

CHECKPOINTS_KEPT = 2


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read."""

    step: int
    samples: int
    weights: Tensor
    state: dict[str, Any]
    replica_state: dict[str, Any]
    #: whose state it is
    protocol: str = ""


@dataclass(frozen=True)
class Evaluated:
    """A model of a run and what was found about it."""

    step: int
    samples: int
    metrics: dict[str, float]
    weights: Tensor


class Storage(Protocol):
    """Files and folders somewhere else, by names with slashes."""

    url: str

    def put(self, made: Path, name: str) -> None:
        """Copy a local file or folder there; it has its name once it is there as a whole. A file is replaced."""
        ...

    def get(self, name: str, to: Path) -> None:
        """Copy a file or folder from there; FileNotFoundError if it is not there."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """What there is in a folder, which need not exist."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file or folder."""
        ...


class RunDirectory:
    """Where a run is kept."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        self.path = path
        #: where the checkpoints are, if not here
        self.storage = storage

    @staticmethod
    def create(path: Path | None, name: str, storage: Storage | None = None) -> RunDirectory:
        """A new directory: the given one, which must hold no run yet, or one below `runs`, named after the run."""
        if storage is not None and "run.json" in storage.names():
            raise UsageError(
                f"{storage.url} holds a run already: name another place, or continue it with "
                f"'tether resume {storage.url}'"
            )
        if path is None:
            stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            candidates = (
                Path("runs") / f"{name}-{stamp}{suffix}" for suffix in ["", *(f"-{i}" for i in range(2, 10_000))]
            )
            path = next(candidate for candidate in candidates if not candidate.exists())
        elif (path / "run.json").exists():
            raise UsageError(
                f"{path} holds a run already: name another directory, or continue it with 'tether resume {path}'"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the run directory {path}: {error.strerror}") from None
        return RunDirectory(path, storage)

    @staticmethod
    def fetch(storage: Storage) -> RunDirectory:
        """A new directory for an existing run of which only the storage is known here."""
        with TemporaryDirectory(prefix="tether-") as folder:
            try:
                storage.get("run.json", Path(folder, "run.json"))
            except FileNotFoundError:
                raise UsageError(f"{storage.url} holds no run: it has no run.json") from None
            directory = RunDirectory.create(None, storage.url.rpartition("/")[2])
            shutil.copyfile(Path(folder, "run.json"), directory.path / "run.json")
        directory.storage = storage
        return directory

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """An existing run."""
        if not (path / "run.json").is_file():
            raise UsageError(f"{path} is no run directory: it has no run.json")
        return RunDirectory(path)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def last_time(self) -> float:
        """The latest time in the metrics; 0 for a new run."""
        try:
            lines = self.metrics.read_text().splitlines()
        except FileNotFoundError:
            return 0.0
        latest = 0.0
        for line in lines:
            with suppress(ValueError):  # the last line of a killed run may be cut off
                latest = max(latest, json.loads(line).get("time") or 0.0)
        return latest

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    def below(self, folder: str, name: str) -> Path:
        """A file in one of the folders, which is made if need be."""
        (self.path / folder).mkdir(exist_ok=True)
        return self.path / folder / name

    def write_config(self, config: dict[str, Any]) -> None:
        _write_atomically(self.path / "run.json", json.dumps(config, indent=2, default=str).encode())
        if self.storage is not None:
            self.storage.put(self.path / "run.json", "run.json")

    def read_config(self) -> dict[str, Any]:
        try:
            config: dict[str, Any] = json.loads((self.path / "run.json").read_bytes())
        except ValueError as error:
            raise UsageError(f"{self.path / 'run.json'} is damaged: {error}") from None
        return config

    def save_checkpoint(
        self,
        step: int,
        samples: int,
        weights: Tensor,
        state: dict[str, Any],
        replica_state: dict[str, Any],
        protocol: str = "",
    ) -> Path:
        """Write a checkpoint beside the others and only then give it its name."""
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        # samples only grow, also when the number of workers changes; the number tells two at the same place apart
        number = 1 + max((int(name.rpartition("-")[2]) for name in self._checkpoints()), default=0)
        final = folder / f"at-{samples:015d}-{number:06d}"
        partial = folder / f".partial-{os.getpid()}-{step}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        tensors: list[Tensor] = [weights]
        tree = {
            "step": step,
            "samples": samples,
            "protocol": protocol,
            "state": pack_tree(state, tensors),
            "replica_state": pack_tree(replica_state, tensors),
        }
        save_file({str(i): tensor.contiguous() for i, tensor in enumerate(tensors)}, partial / "tensors.safetensors")
        _sync(partial / "tensors.safetensors")
        _write_atomically(partial / "state.json", json.dumps(tree).encode())
        if self.storage is None:
            partial.rename(final)
            _sync(folder)
        else:
            self.storage.put(partial, f"checkpoints/{final.name}")
            shutil.rmtree(partial)
        for old in self._checkpoints()[:-CHECKPOINTS_KEPT]:
            if self.storage is None:
                shutil.rmtree(folder / old, ignore_errors=True)
            else:
                self.storage.remove(f"checkpoints/{old}")
        return final

    def load_checkpoint(self) -> Restored | None:
        """The newest checkpoint that is readable, if there is one."""
        with TemporaryDirectory(prefix="tether-") as fetched:
            return self._newest_readable(Path(fetched))

    def _newest_readable(self, fetched: Path) -> Restored | None:
        for name in reversed(self._checkpoints()):
            try:
                path = self.path / "checkpoints" / name
                if self.storage is not None:
                    path = fetched / name
                    self.storage.get(f"checkpoints/{name}", path)
                tree = json.loads((path / "state.json").read_bytes())
                found = load_file(path / "tensors.safetensors")
                tensors = [found[str(i)] for i in range(len(found))]
                return Restored(
                    tree["step"],
                    tree["samples"],
                    tensors[0],
                    unpack_tree(tree["state"], tensors),
                    unpack_tree(tree["replica_state"], tensors),
                    tree["protocol"],
                )
            except (OSError, ValueError, TypeError, LookupError, SafetensorError):
                continue
        return None

    def save_best(self, best: Evaluated) -> None:
        """Keep these weights in place of those that were the best before."""
        partial = self._best.with_name(f".{self._best.name}.partial")
        told = {"step": best.step, "samples": best.samples, "metrics": best.metrics}
        save_file({"weights": best.weights.contiguous()}, partial, {name: json.dumps(told[name]) for name in told})
        _sync(partial)
        partial.replace(self._best)
        if self.storage is not None:
            self.storage.put(self._best, self._best.name)

    def load_best(self) -> Evaluated | None:
        """The best weights seen, if the run keeps them."""
        if not self._best.exists():
            if self.storage is None or self._best.name not in self.storage.names():
                return None
            self.storage.get(self._best.name, self._best)
        with safe_open(self._best, "pt") as file:
            told = {name: json.loads(text) for name, text in file.metadata().items()}
            return Evaluated(told["step"], told["samples"], told["metrics"], file.get_tensor("weights"))

    @property
    def _best(self) -> Path:
        return self.path / "best.safetensors"

    def _checkpoints(self) -> list[str]:
        """The names of those that are complete, the oldest first."""
        if self.storage is not None:
            names = self.storage.names("checkpoints")
        else:
            folder = self.path / "checkpoints"
            names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return sorted(name for name in names if re.fullmatch(r"at-\d+-\d+", name))

    def __getstate__(self) -> dict[str, Any]:
        """Only the driver of a run writes to the storage."""
        return {**self.__dict__, "storage": None}


def _write_atomically(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
