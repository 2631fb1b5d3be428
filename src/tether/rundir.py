"""The run directory: configuration, metrics, trace, checkpoints and logs of one run.

run.json              what was run and how it ended, with a hash
metrics.jsonl         one JSON object a line: untrained, progress, evaluation, record, note, resumed
trace.json            spans for Perfetto or chrome://tracing
checkpoints/at-N-M/   the M-th checkpoint, after N samples; complete or not there at all
best.safetensors      the best weights seen by a run with patience, and of which step they are
logs/NODE.log         what each process printed
record/NODE.events    every event of a node, when the run was recorded
lock                  held by the process that runs it

A run may have a storage elsewhere, such as a folder in HDFS. The checkpoints and the best weights are then there alone,
and run.json is there too: it is all that another machine needs to continue the run.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import msgspec
from torch import Tensor

from tether import checkpoint
from tether.checkpoint import Count, Evaluated, Restored, State, replacing, sync
from tether.errors import Damaged, Diverged, UsageError
from tether.metrics import History, read_history
from tether.trace import Span, write_chrome_trace
from tether.vector import is_finite
from tether.wire import pack_tree

CHECKPOINTS_KEPT = 2
#: of run.json; 1 had no hash
VERSION = 2


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


class _Named(msgspec.Struct):
    name: str


class _Config(msgspec.Struct):
    """What a reader of run.json relies on; it may hold more."""

    version: Count
    status: str
    task: _Named
    protocol: _Named
    runtime: _Named
    workers: Count
    reason: str = ""
    error: str | None = None
    request: dict[str, Any] = {}
    result: dict[str, Any] | None = None
    checkpoints: str | None = None


class RunDirectory:
    """Where a run is kept."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        self.path = path
        #: where the checkpoints are, if not here
        self.storage = storage
        #: what was found to be damaged, for whoever reads it
        self.notes: list[str] = []
        #: the newest checkpoint that has states of workers; later ones refer to it
        self._workers_in = ""
        #: checkpoints that cannot be used; they go when there is a newer one
        self._unusable: set[str] = set()
        self._config: dict[str, Any] | None = None

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
        elif (path / "run.json").exists() or (path / "checkpoints").exists():
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
            copy = Path(folder, "run.json")
            try:
                storage.get("run.json", copy)
            except FileNotFoundError:
                if not storage.names("checkpoints"):  # which have copies
                    raise UsageError(f"{storage.url} holds no run: it has no run.json") from None
            directory = RunDirectory.create(None, storage.url.rpartition("/")[2])
            if copy.exists():
                shutil.copyfile(copy, directory.path / "run.json")
        directory.storage = storage
        return directory

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """An existing run."""
        if not (path / "run.json").is_file() and not (path / "checkpoints").is_dir():
            raise UsageError(f"{path} is no run directory: it has no run.json")
        return RunDirectory(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Have the directory to oneself, and sweep up what dead writers have left.

        The system releases the lock when the process ends, however it ends: it is not inherited by programs that the
        process starts, and processes that it forks give it up at once.
        """
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._cannot_be_used(error) from None
        _held().add(descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = (self.path / "lock").read_text(errors="replace").strip() or "another process"
                raise UsageError(f"{self.path} is in use by {holder}: wait until it ends, or stop it first") from None
            except OSError as error:
                self.notes.append(f"{self.path} cannot be locked ({error.strerror}): do not run it twice at once")
            with suppress(OSError):  # it tells others who we are, no more
                (self.path / "lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._sweep()
            yield
        finally:
            if descriptor in _held():  # not in a process that was forked meanwhile
                _held().remove(descriptor)
                os.close(descriptor)

    def _sweep(self) -> None:
        for left in self.path.glob(".*.partial"):
            left.unlink(missing_ok=True)
        for left in (self.path / "checkpoints").glob(".partial-*"):
            shutil.rmtree(left, ignore_errors=True)

    def _cannot_be_used(self, error: OSError) -> UsageError:
        return UsageError(f"the run directory {self.path} cannot be used: {error.strerror or error}")

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def history(self) -> History:
        """What the metrics tell of the run so far."""
        return read_history(self.metrics)

    def write_trace(self, spans: dict[str, list[Span]]) -> None:
        """Replace trace.json."""
        with replacing(self.path / "trace.json") as partial:
            write_chrome_trace(partial, spans)

    def below(self, folder: str, name: str) -> Path:
        """A file in one of the folders, which is made if need be."""
        (self.path / folder).mkdir(exist_ok=True)
        return self.path / folder / name

    # ---- configuration ----

    def write_config(self, config: dict[str, Any]) -> None:
        """Replace run.json. Every checkpoint from now on has a copy."""
        self._config = config
        plain = json.loads(json.dumps(config, default=str))
        with replacing(self.path / "run.json") as partial:
            partial.write_text(json.dumps({**plain, "sha256": _config_hash(plain)}, indent=2))
        if self.storage is not None:
            self.storage.put(self.path / "run.json", "run.json")

    def begin(self, config: dict[str, Any]) -> None:
        """As `write_config`, before training: where this cannot be written, nothing can."""
        try:
            self.write_config(config)
        except OSError as error:
            raise self._cannot_be_used(error) from None

    def read_config(self) -> dict[str, Any]:
        """What run.json holds or, if it is damaged, the copy in the newest checkpoint that has one."""
        try:
            return _read_config(self.path / "run.json")
        except Damaged as error:
            damage = str(error)
        with self._folders() as folder:
            for name in reversed(self._names()):
                with suppress(Damaged):
                    if (config := checkpoint.read_state(folder(name)).run) is not None:
                        self.notes.append(f"{damage}; the copy in checkpoint {name} is used")
                        return config
        raise Damaged(
            f"{self.path}/{damage}, and no checkpoint here has a copy of it: if the checkpoints are elsewhere, resume "
            "by their URL, else start the run again"
        )

    # ---- checkpoints ----

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
        # samples only grow, also when the number of workers changes; the number says which was written last
        number = 1 + max(map(_number, self._names()), default=0)
        name = f"at-{samples:015d}-{number:06d}"
        tensors: list[Tensor] = [weights]
        kept: list[Tensor] | None = None if workers is None else []
        saved = State(
            step,
            samples,
            protocol,
            pack_tree(state, tensors),
            pack_tree(replica_state, tensors),
            parameters,
            pack_tree(evaluations or {}, tensors),
            None if kept is None else pack_tree(workers, kept),
            self._workers_in if kept is None else name,
            self._config,
        )
        self._put(name, saved, tensors, kept)
        self._workers_in = saved.workers_in
        usable = [name for name in self._names() if name not in self._unusable]
        for old in {*self._names()} - {*usable[-CHECKPOINTS_KEPT:], self._workers_in}:
            with suppress(OSError):  # the next checkpoint will try again
                self._remove(old)
        return self.path / "checkpoints" / name

    def _put(self, name: str, state: State, tensors: list[Tensor], workers: list[Tensor] | None) -> None:
        folder = self.path / "checkpoints"
        partial = folder / f".partial-{os.getpid()}-{state.step}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            checkpoint.write(partial, state, tensors, workers)
            if self.storage is None:
                partial.rename(folder / name)
                sync(folder)
            else:
                self.storage.put(partial, f"checkpoints/{name}")
                shutil.rmtree(partial)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _remove(self, name: str) -> None:
        if self.storage is None:
            shutil.rmtree(self.path / "checkpoints" / name)
        else:
            self.storage.remove(f"checkpoints/{name}")

    def has_checkpoint(self) -> bool:
        """Whether there is something to continue from."""
        return bool(self._names())

    def load_checkpoint(self) -> Restored | None:
        """The newest checkpoint that is whole and whose weights are finite, if there is one.

        A whole one is better than a newer one that has lost the states of its workers, and that is better than nothing.
        """
        notes: list[str] = []
        without_workers: Restored | None = None
        with self._folders() as folder:
            for name in reversed(self._names()):
                try:
                    state = checkpoint.read_state(folder(name))
                    restored = checkpoint.read(folder(name), state)
                    if not is_finite(restored.weights[: state.parameters]):
                        self._unusable.add(name)
                        notes.append(f"checkpoint {name} holds weights that are not finite: it is not used")
                        continue
                except Damaged as error:
                    self._unusable.add(name)
                    notes.append(f"checkpoint {name} is damaged ({error}): it is not used")
                    continue
                try:
                    workers = checkpoint.read_workers(folder(state.workers_in)) if state.workers_in else {}
                except Damaged as error:
                    notes.append(f"checkpoint {name} is damaged ({error}, in {state.workers_in}): it is not used")
                    without_workers = without_workers or restored
                    continue
                self._workers_in = state.workers_in
                return replace(restored, workers=workers, notes=tuple(notes))
        if without_workers is not None:
            self._workers_in = ""
            notes.append(f"the model of step {without_workers.step} is used without the states of its workers")
            return replace(without_workers, notes=tuple(notes))
        self.notes += notes
        return None

    @contextmanager
    def _folders(self) -> Iterator[Callable[[str], Path]]:
        """Where the files of a checkpoint are, by its name; those of a storage are copied for as long as this lasts."""
        if (storage := self.storage) is None:
            yield (self.path / "checkpoints").joinpath
            return

        def fetched(name: str) -> Path:
            if not Path(copies, name).exists():
                try:
                    storage.get(f"checkpoints/{name}", Path(copies, name))
                except OSError as error:
                    raise Damaged(f"{name} cannot be fetched: {error}") from error
            return Path(copies, name)

        with TemporaryDirectory(prefix="tether-") as copies:
            yield fetched

    def _names(self) -> list[str]:
        """The checkpoints that are complete, in the order in which they were written."""
        if self.storage is not None:
            names = self.storage.names("checkpoints")
        else:
            folder = self.path / "checkpoints"
            names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return sorted(filter(checkpoint.NAME.fullmatch, names), key=_number)

    # ---- the best model ----

    def save_best(self, best: Evaluated) -> None:
        """Keep these weights in place of those that were the best before."""
        checkpoint.write_model(self._best, best)
        if self.storage is not None:
            self.storage.put(self._best, self._best.name)

    def load_best(self) -> Evaluated | None:
        """The best weights seen, if the run keeps them and they are whole."""
        if not self._best.exists():
            if self.storage is None or self._best.name not in self.storage.names():
                return None
            self.storage.get(self._best.name, self._best)
        try:
            return checkpoint.read_model(self._best)
        except Damaged as error:
            self.notes.append(f"{self._best.name} is damaged ({error}): it is not used")
            return None

    @property
    def _best(self) -> Path:
        return self.path / "best.safetensors"

    def __getstate__(self) -> dict[str, Any]:
        """Only the driver of a run writes to the storage."""
        return {**self.__dict__, "storage": None}


def not_finite(step: int) -> Diverged:
    """The error for a joint model that has become useless."""
    return Diverged(
        f"step {step}: the joint model's weights are not finite; lower the learning rate or clip gradients, and start "
        "again or resume from the last checkpoint"
    )


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        version = msgspec.convert(config, _Config).version
    except OSError as error:
        raise Damaged(f"run.json cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"run.json is damaged: {error}") from None
    said = config.pop("sha256", None)
    if (said is not None or version == VERSION) and said != _config_hash(config):
        raise Damaged("run.json is damaged: it does not have the hash that is in it")
    if version > VERSION:
        raise UsageError(f"{path} has version {version}, and this Tether reads up to {VERSION}: use the newer Tether")
    return config


def _config_hash(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


@cache
def _held() -> set[int]:
    """The descriptors of locks, which a process that was forked closes; for a fork shares what it holds."""
    held: set[int] = set()

    def close() -> None:
        for descriptor in held:
            os.close(descriptor)
        held.clear()

    os.register_at_fork(after_in_child=close)
    return held
