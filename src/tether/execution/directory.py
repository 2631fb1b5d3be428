"""The run directory: the configuration, metrics, trace, checkpoints and logs of one run.

run.json              what was run and how it ended, with a hash
metrics.jsonl         one JSON object a line: untrained, progress, evaluation, record, note, resumed
trace.json            spans for Perfetto or chrome://tracing
checkpoints/at-N-M/   the M-th checkpoint, after N samples; complete or not there at all
best.safetensors      the best model that a run with patience has seen, by the names of its state_dict, and its step
task/NAME             what the task keeps beside its model, such as labels
logs/NODE.log         what each process printed
record/NODE.events    every event of a node, if the run was recorded
metrics.csv, tensorboard/, wandb/    what loggers write, if they were asked for
lock                  held by the process that executes the run

A run may keep its checkpoints in a storage elsewhere, such as a folder in HDFS. Checkpoints and the best weights are
then only there, and run.json has a copy there: another machine needs nothing else to continue the run.
"""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from torch import Tensor

from tether.core.trace import Span, write_chrome_trace
from tether.core.vector import Layout, is_finite
from tether.core.wire import pack_tree
from tether.errors import Damaged, Diverged, TetherError, UsageError
from tether.execution import checkpoint, configuration
from tether.execution.checkpoint import Evaluated, NamedModel, Restored, State, replacing, sync
from tether.execution.lock import exclusive
from tether.execution.metrics import History, read_history
from tether.runtimes.interpreter import AVERAGE

CHECKPOINTS_KEPT = 2
#: what a run writes, besides the lock
FILES = ("metrics.jsonl", "metrics.csv", "trace.json", "best.safetensors", "run.json")
FOLDERS = ("checkpoints", "logs", "record", "task", "tensorboard", "wandb")


class Storage(Protocol):
    """Files and folders somewhere else, by names with slashes."""

    url: str

    def put(self, made: Path, name: str) -> None:
        """Copy a local file or folder there; it gets its name when it is complete. A file is replaced."""
        ...

    def get(self, name: str, to: Path) -> None:
        """Copy a file or folder from there; FileNotFoundError if it is not there."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder; none if the folder does not exist."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file or folder."""
        ...


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        self.path = path
        #: where the checkpoints are, if they are not here
        self.storage = storage
        #: what was found to be damaged; the observer passes it on to the user
        self.notes: list[str] = []
        #: the newest checkpoint that holds the states of workers; later ones refer to it
        self._workers_in = ""
        #: for the checkpoints that were written or read: the one that holds the states of its workers
        self._refers: dict[str, str] = {}
        #: checkpoints that cannot be used; the next checkpoint deletes them
        self._unusable: set[str] = set()
        self._config: dict[str, Any] | None = None

    @staticmethod
    def create(path: Path | None, name: str, storage: Storage | None = None) -> RunDirectory:
        """A new directory: the given one, or one below `runs`, named after the run.

        The given one must not hold a run yet, unless that run has ended without a checkpoint: its files are removed.
        """
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
        directory = RunDirectory(path, storage)
        if (path / "run.json").exists() or (path / "checkpoints").exists():
            directory._remove_abandoned()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make the run directory {path}: {error.strerror}; choose another one with --run (run_dir)"
            ) from None
        return directory

    @staticmethod
    def fetch(storage: Storage) -> RunDirectory:
        """A new directory for an existing run of which this machine knows only the storage."""
        with TemporaryDirectory(prefix="tether-") as folder:
            copy = Path(folder, "run.json")
            try:
                storage.get("run.json", copy)
            except FileNotFoundError:
                if not storage.names("checkpoints"):  # which hold copies of it
                    raise UsageError(f"{storage.url} holds no run: it has no run.json") from None
            directory = RunDirectory.create(None, storage.url.rpartition("/")[2])
            if copy.exists():
                shutil.copyfile(copy, directory.path / "run.json")
        directory.storage = storage
        return directory

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """An existing run."""
        if not path.is_dir():
            raise UsageError(f"there is no folder {path}: name a run directory, such as one below runs/")
        if not (path / "run.json").is_file() and not (path / "checkpoints").is_dir():
            raise UsageError(f"{path} is not a run directory: it has no run.json")
        return RunDirectory(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory alone, and remove what dead writers have left in it."""
        with ExitStack() as held:
            try:
                held.enter_context(exclusive(self.path, self.notes.append))
            except OSError as error:
                raise self._cannot_be_used(error) from None
            self._remove_partial()
            yield

    def is_abandoned(self) -> bool:
        """Whether the run has ended, or was killed, before it left anything to resume from or to look at.

        Only the holder of the lock can know that it is not running.
        """
        try:
            config = configuration.read_config(self.path / "run.json")
        except Damaged:
            return False  # the run cannot be identified
        elsewhere = self.storage is not None or config.get("checkpoints")
        kept = self.has_checkpoint() or (self.path / "best.safetensors").exists()
        return config["status"] != "finished" and not elsewhere and not kept

    def _remove_abandoned(self) -> None:
        """Remove the files of an abandoned run; UsageError if it is running, or not abandoned."""
        with self.lock():
            if not RunDirectory(self.path).is_abandoned():
                raise UsageError(
                    f"{self.path} holds a run already: name another directory, or continue it with "
                    f"'{self.resume_command()}'"
                )
            for folder in FOLDERS:
                shutil.rmtree(self.path / folder, ignore_errors=True)
            for file in FILES:  # run.json is the last, so that an interrupted removal can be repeated
                (self.path / file).unlink(missing_ok=True)
        self.notes.append(f"{self.path} held a run that ended without a checkpoint: its files were removed")

    def _remove_partial(self) -> None:
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
        """What metrics.jsonl says about the run so far."""
        return read_history(self.metrics)

    def write_trace(self, spans: dict[str, list[Span]]) -> None:
        """Replace trace.json."""
        with replacing(self.path / "trace.json") as partial:
            write_chrome_trace(partial, spans)

    def below(self, folder: str, name: str) -> Path:
        """A file in one of the folders; the folder is created if it does not exist."""
        (self.path / folder).mkdir(exist_ok=True)
        return self.path / folder / name

    def write_files(self, files: Mapping[str, str | bytes]) -> None:
        """Replace what the task keeps beside its model."""
        for name, content in files.items():
            with replacing(self.below("task", name)) as partial:
                partial.write_bytes(content.encode() if isinstance(content, str) else content)
            if self.storage is not None:
                self.storage.put(self.path / "task" / name, f"task/{name}")

    def read_files(self) -> dict[str, bytes]:
        """What the task keeps beside its model, by file name."""
        if self.storage is not None and not (self.path / "task").exists():
            for name in self.storage.names("task"):
                self.storage.get(f"task/{name}", self.below("task", name))
        folder = self.path / "task"
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.exists() else {}

    # ---- configuration ----

    def write_config(self, config: dict[str, Any]) -> None:
        """Replace run.json. Every later checkpoint holds a copy."""
        self._config = config
        configuration.write_config(self.path / "run.json", config)
        if self.storage is not None:
            self.storage.put(self.path / "run.json", "run.json")

    def begin(self, config: dict[str, Any]) -> None:
        """As `write_config`, before training; UsageError if it cannot be written, since nothing else could be."""
        try:
            self.write_config(config)
        except OSError as error:
            raise self._cannot_be_used(error) from None

    def read_config(self) -> dict[str, Any]:
        """What run.json holds; if it is damaged, the copy in the newest checkpoint that has one."""
        try:
            return configuration.read_config(self.path / "run.json")
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
        layout: Layout | None = None,
    ) -> Path:
        """Write a checkpoint under a temporary name and rename it when it is complete.

        Without states of `workers` it refers to the newest checkpoint that has some: old states are better than none.
        The first `parameters` of the weights, or all of them if that is None, must be finite: no run could resume from
        others. The values behind the parameters are buffers, which may hold anything. `layout` names the tensors of the
        model; without it, they are one.
        """
        layout = layout or Layout.flat(weights)
        if not is_finite(weights[:parameters]):
            raise not_finite(step)
        # samples only grow, even when the number of workers changes; the number says which was written last
        number = 1 + max(map(_number, self._names()), default=0)
        name = f"at-{samples:015d}-{number:06d}"
        average = state.get(AVERAGE)
        state = {name: value for name, value in state.items() if name != AVERAGE}
        tensors: list[Tensor] = []
        kept: list[Tensor] | None = None if workers is None else []
        saved = State(
            step,
            samples,
            protocol,
            pack_tree(state, tensors),
            pack_tree(replica_state, tensors),
            list(layout.shapes),
            parameters,
            pack_tree(evaluations or {}, tensors),
            None if kept is None else pack_tree(workers, kept),
            self._workers_in if kept is None else name,
            average is not None,
            self._config,
        )
        model = layout.named(weights.contiguous())
        self._put(name, saved, model, layout.named(average) if average is not None else None, tensors, kept)
        self._workers_in = self._refers[name] = saved.workers_in
        newest = [name for name in self._names() if name not in self._unusable][-CHECKPOINTS_KEPT:]
        for old in {*self._names()} - {*newest, *(self._refers.get(name, "") for name in newest)}:
            with suppress(OSError):  # the next checkpoint will try again
                self._remove(old)
        return self.path / "checkpoints" / name

    def _put(
        self,
        name: str,
        state: State,
        model: dict[str, Tensor],
        average: dict[str, Tensor] | None,
        tensors: list[Tensor],
        workers: list[Tensor] | None,
    ) -> None:
        folder = self.path / "checkpoints"
        partial = folder / f".partial-{os.getpid()}-{state.step}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            checkpoint.write(partial, state, model, average, tensors, workers)
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

    def resume_command(self) -> str:
        """The command that continues this run."""
        try:
            of_script = "script" in self.read_config()["task"]
        except (TetherError, OSError):  # it is damaged
            of_script = False
        return f"tether {'launch --resume' if of_script else 'resume'} {self.path}"

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return bool(self._names())

    def load_checkpoint(self) -> Restored | None:
        """The newest checkpoint that is complete and whose weights are finite, if there is one.

        A complete one is preferred to a newer one without the states of its workers, and that one is better than none.
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
                self._workers_in = self._refers[name] = state.workers_in
                return replace(restored, workers=workers, notes=tuple(notes))
        if without_workers is not None:
            self._workers_in = ""
            notes.append(f"the model of step {without_workers.step} is used without the states of its workers")
            return replace(without_workers, notes=tuple(notes))
        self.notes += notes
        return None

    @contextmanager
    def _folders(self) -> Iterator[Callable[[str], Path]]:
        """Where the files of a checkpoint are, by its name. Those of a storage are copied, and the copies deleted."""
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
        """The names of complete checkpoints, in the order in which they were written."""
        if self.storage is not None:
            names = self.storage.names("checkpoints")
        else:
            folder = self.path / "checkpoints"
            names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return sorted(filter(checkpoint.NAME.fullmatch, names), key=_number)

    # ---- the best model ----

    def save_best(self, best: Evaluated, layout: Layout | None = None) -> None:
        """Store these weights in place of the previous best."""
        checkpoint.write_model(self._best, best, layout or Layout.flat(best.weights))
        if self.storage is not None:
            self.storage.put(self._best, self._best.name)

    def load_best(self) -> Evaluated | None:
        """The best weights seen, if the run has stored them and they are undamaged."""
        found = self._read_best()
        return found[0] if found is not None else None

    def load_model(self) -> NamedModel | None:
        """The model that the run returned or would return: the best one, or else that of the newest checkpoint."""
        result = self.read_config().get("result") or {}
        best = self._read_best()
        if best is not None and result.get("model_step", best[0].step) == best[0].step:
            return best[1]
        with self._folders() as folder:
            for name in reversed(self._names()):
                try:
                    state = checkpoint.read_state(folder(name))
                    file = checkpoint.AVERAGED if state.averaged else checkpoint.MODEL
                    return checkpoint.read_named(folder(name), state, file)
                except Damaged as error:
                    self.notes.append(f"checkpoint {name} is damaged ({error}): it is not used")
        return None

    def _read_best(self) -> tuple[Evaluated, NamedModel] | None:
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
    """The error for a joint model whose weights are not finite."""
    return Diverged(
        f"step {step}: the joint model's weights are not finite; lower the learning rate or clip gradients, and start "
        "again or resume from the last checkpoint"
    )


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
