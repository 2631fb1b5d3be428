"""The run directory: configuration, metrics, trace, checkpoints and logs of one run.

run.json              what was run and how it ended
metrics.jsonl         one JSON object a line: untrained, progress, evaluation, record, note, resumed
trace.json            spans for Perfetto or chrome://tracing
checkpoints/at-N/     after N samples: state.json, tensors.safetensors and, with what each worker has of its own,
                      workers.safetensors; complete or not there at all
best.safetensors      the best weights seen by a run with patience, and of which step they are
logs/NODE.log         what each process printed
record/NODE.events    every event of a node, when the run was recorded

A run may have a storage elsewhere, such as a folder in HDFS. The checkpoints and the best weights are then there alone,
and run.json is there too: it is all that another machine needs to continue the run.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.errors import Diverged, UsageError
from tether.vector import is_finite
from tether.wire import pack_tree, unpack_tree

CHECKPOINTS_KEPT = 2
#: what reading a damaged checkpoint may raise
UNREADABLE = (OSError, ValueError, TypeError, LookupError, SafetensorError)


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
    #: what each worker had of its own, by its index: its optimizer's state and that of its random generators
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: what evaluations had found by then, by the samples that the model had seen
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    #: why it is not the newest, if it is not
    notes: tuple[str, ...] = ()


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
        #: the newest checkpoint that has states of workers; later ones refer to it
        self._workers_in = ""

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

    def evaluations(self, restored: Restored) -> dict[int, dict[str, float]]:
        """What evaluations have found on the way to the model of a checkpoint, by the samples that each had seen.

        The metrics know of those that were not done when it was saved, and the checkpoint of those on another machine.
        """
        found = dict(restored.evaluations)
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        for line in lines:
            with suppress(ValueError):  # the last line of a killed run may be cut off
                match json.loads(line):
                    case {"kind": "evaluation", "samples": samples, "metrics": metrics}:
                        found[samples] = {k: math.nan if v is None else v for k, v in metrics.items()}
                    case {"kind": "resumed", "samples": samples}:  # whatever was found after that is of a lost part
                        found = {at: metrics for at, metrics in found.items() if at <= samples}
        return {at: found[at] for at in sorted(found) if at <= restored.samples}

    def untrained(self) -> dict[str, float] | None:
        """The metrics of the model before training, if they are known."""
        with suppress(FileNotFoundError), self.metrics.open() as lines:
            for line in lines:
                with suppress(ValueError):  # cut off
                    if '"untrained"' in line and (row := json.loads(line))["kind"] == "untrained":
                        return {name: math.nan if value is None else value for name, value in row["metrics"].items()}
        return None

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
        workers: dict[int, dict[str, Any]] | None = None,
        evaluations: dict[int, dict[str, float]] | None = None,
        parameters: int | None = None,
    ) -> Path:
        """Write a checkpoint beside the others and only then give it its name.

        Without states of `workers` it refers to the newest that has some: what they were then is better than nothing.
        The first `parameters` of the weights must be finite, or else all: nothing could be made of others. What is
        behind them are buffers, which may hold what they like.
        """
        if not is_finite(weights[:parameters]):
            raise not_finite(step)
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
            "parameters": parameters,
            "state": pack_tree(state, tensors),
            "replica_state": pack_tree(replica_state, tensors),
            "evaluations": pack_tree(evaluations or {}, tensors),
        }
        workers_in = self._workers_in
        if workers is not None:
            workers_in = final.name
            kept: list[Tensor] = []
            tree["workers"] = pack_tree(workers, kept)
            _save_tensors(kept, partial / "workers.safetensors")
        tree["workers_in"] = workers_in
        _save_tensors(tensors, partial / "tensors.safetensors")
        _write_atomically(partial / "state.json", json.dumps(tree).encode())
        if self.storage is None:
            partial.rename(final)
            _sync(folder)
        else:
            self.storage.put(partial, f"checkpoints/{final.name}")
            shutil.rmtree(partial)
        self._workers_in = workers_in
        for old in self._checkpoints()[:-CHECKPOINTS_KEPT]:
            if old == self._workers_in:
                continue
            if self.storage is None:
                shutil.rmtree(folder / old, ignore_errors=True)
            else:
                self.storage.remove(f"checkpoints/{old}")
        return final

    def has_checkpoint(self) -> bool:
        """Whether there is something to continue from."""
        return bool(self._checkpoints())

    def load_checkpoint(self) -> Restored | None:
        """The newest checkpoint that is readable and whose weights are finite, if there is one."""
        with TemporaryDirectory(prefix="tether-") as fetched:
            return self._newest_readable(Path(fetched))

    def _newest_readable(self, fetched: Path) -> Restored | None:
        notes: list[str] = []
        for name in reversed(self._checkpoints()):
            try:
                path = self._at_hand(name, fetched)
                tree = json.loads((path / "state.json").read_bytes())
                tensors = _load_tensors(path / "tensors.safetensors")
                restored = Restored(
                    tree["step"],
                    tree["samples"],
                    tensors[0],
                    unpack_tree(tree["state"], tensors),
                    unpack_tree(tree["replica_state"], tensors),
                    tree["protocol"],
                    self._load_workers(tree.get("workers_in", ""), fetched),
                    unpack_tree(tree.get("evaluations", {}), tensors),
                    tuple(notes),
                )
            except UNREADABLE:
                continue
            if is_finite(restored.weights[: tree.get("parameters")]):
                return restored
            notes.append(f"checkpoint {path.name} holds weights that are not finite: it is not used")
        return None

    def _at_hand(self, name: str, fetched: Path) -> Path:
        """The folder of a checkpoint; if it is elsewhere, a copy of it."""
        if self.storage is None:
            return self.path / "checkpoints" / name
        if not (fetched / name).exists():
            self.storage.get(f"checkpoints/{name}", fetched / name)
        return fetched / name

    def _load_workers(self, name: str, fetched: Path) -> dict[int, dict[str, Any]]:
        """The states of workers in the checkpoint of that name; without them, another is as good as before."""
        self._workers_in = name
        if not name:
            return {}
        try:
            path = self._at_hand(name, fetched)
            tree = json.loads((path / "state.json").read_bytes())
            found: dict[int, dict[str, Any]] = unpack_tree(tree["workers"], _load_tensors(path / "workers.safetensors"))
            return found
        except UNREADABLE:
            return {}

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


def _save_tensors(tensors: list[Tensor], path: Path) -> None:
    save_file({str(i): tensor.contiguous() for i, tensor in enumerate(tensors)}, path)
    _sync(path)


def _load_tensors(path: Path) -> list[Tensor]:
    found = load_file(path)
    return [found[str(i)] for i in range(len(found))]


def not_finite(step: int) -> Diverged:
    """The error for a joint model that has become useless."""
    return Diverged(
        f"step {step}: the joint model's weights are not finite; lower the learning rate or clip gradients, and start "
        "again or resume from the last checkpoint"
    )


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
