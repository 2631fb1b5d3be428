"""Checkpoints and models as files, which are verified before they are used.

A checkpoint is a folder:

model.safetensors      the joint model: the tensors of its state_dict, by their names there
average.safetensors    its moving average, if the run has one: the model that is evaluated and returned
state.json             how far the run was, the protocol's state and the run's configuration
tensors.safetensors    the tensors of that state
workers.safetensors    the tensors of each worker's own state, in checkpoints that hold it
SHA256SUMS             a hash of each of the other files, as `sha256sum -c` reads it

This is version 2. Versions 0 and 1 kept the weights as one vector without names, and are refused.
SHA-256 is fast enough: with the processor's own instructions it takes 0.06 s for 100 MB.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.core.vector import Layout, joined, raw_bytes
from tether.core.wire import pack_tree, unpack_tree
from tether.errors import Damaged, UsageError, WireError
from tether.runtimes.interpreter import AVERAGE

VERSION = 2
AVERAGED = "average.safetensors"
MODEL, STATE, TENSORS, WORKERS = "model.safetensors", "state.json", "tensors.safetensors", "workers.safetensors"
HASHES = "SHA256SUMS"
#: the files that hold one model alone
SUFFIXES = (".safetensors", ".pt", ".pth")
#: what other libraries expect in a file of tensors
FORMAT = {"format": "pt"}
#: the name of a checkpoint: the samples that its model has seen, and a number that grows with every checkpoint
NAME = re.compile(r"at-(\d{1,18})-(\d{1,18})")

Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read."""

    step: int
    samples: int
    weights: Tensor
    state: dict[str, Any]
    replica_state: dict[str, Any]
    #: the protocol that `state` belongs to
    protocol: str = ""
    #: each worker's own state, by its index: of its optimizer and of its random generators
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: the metrics of every evaluation until then, by the samples that the model had seen
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    #: what was damaged and could not be used
    notes: tuple[str, ...] = ()
    #: tensors of the model that are not in the weights, by their names in its state_dict
    others: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """A model of a run and its metrics."""

    step: int
    samples: int
    metrics: dict[str, float]
    weights: Tensor


@dataclass(frozen=True)
class NamedModel:
    """A model as a file holds it: all tensors of its state_dict, and which of them are the weights, in order."""

    tensors: dict[str, Tensor]
    names: list[str]

    @property
    def weights(self) -> Tensor:
        return joined(self.tensors, self.names)

    @property
    def others(self) -> dict[str, Tensor]:
        """The tensors that are not in the weights."""
        return {name: value for name, value in self.tensors.items() if name not in set(self.names)}


class State(msgspec.Struct):
    """The content of state.json. Trees are those of `pack_tree`."""

    step: Count
    samples: Count
    protocol: str
    state: Any
    replica_state: Any
    #: the tensors of model.safetensors that are the weights, in order
    names: list[str]
    #: how many of the weights are parameters; None if that is not known, and then all count as such
    parameters: Count | None = None
    evaluations: Any = msgspec.field(default_factory=lambda: pack_tree({}, []))
    workers: Any = None
    #: the name of the checkpoint that holds the states of the workers; perhaps this one
    workers_in: str = ""
    #: whether average.safetensors belongs to it
    averaged: bool = False
    #: what run.json held
    run: dict[str, Any] | None = None
    version: Count = 0


def write(
    folder: Path,
    state: State,
    model: dict[str, Tensor],
    average: dict[str, Tensor] | None,
    tensors: list[Tensor],
    workers: list[Tensor] | None,
) -> None:
    """Write the files of a checkpoint into an empty folder, and wait until they are on the disk."""
    state.version = VERSION
    with _disk_errors():
        save_file(model, folder / MODEL, FORMAT)
        sync(folder / MODEL)
        if average is not None:
            save_file(average, folder / AVERAGED, FORMAT)
            sync(folder / AVERAGED)
        if workers is not None:
            _save_tensors(workers, folder / WORKERS)
        _save_tensors(tensors, folder / TENSORS)
    # not with msgspec, which would turn infinities and NaN, as in a metric, into null
    write_synced(folder / STATE, json.dumps(msgspec.structs.asdict(state), default=str).encode())
    lines = [f"{_hash(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    write_synced(folder / HASHES, "".join(lines).encode())
    sync(folder)


def read_state(folder: Path) -> State:
    """The content of state.json, if its hash is right; UsageError if a newer Tether wrote it."""
    hashes = _read_hashes(folder)
    with _reading(STATE):
        data = (folder / STATE).read_bytes()
        if hashes is not None and hashlib.sha256(data).hexdigest() != hashes.get(STATE):
            raise Damaged(f"{STATE} does not match its hash in {HASHES}")
        tree = json.loads(data)
        version = tree.get("version", 0) if isinstance(tree, dict) else VERSION
        if isinstance(version, int) and version != VERSION:
            age = "newer" if version > VERSION else "older"
            raise UsageError(
                f"checkpoint {folder.name} has version {version}, and this Tether reads version {VERSION}: resume the "
                f"run with the {age} Tether that wrote it, or start it again"
            )
        state = msgspec.convert(tree, State)
        if state.workers_in and not NAME.fullmatch(state.workers_in):
            raise Damaged(f"{STATE} refers to {state.workers_in!r}, which is not the name of a checkpoint")
    if hashes is None:
        raise Damaged(f"{HASHES} is missing")
    if (name := NAME.fullmatch(folder.name)) and int(name[1]) != state.samples:
        raise Damaged(f"{STATE} belongs to another checkpoint: it is of {state.samples} samples")
    return state


def read(folder: Path, state: State) -> Restored:
    """The checkpoint with this state, without the states of its workers."""
    tensors = _load_tensors(folder, TENSORS)
    with _reading(STATE):
        trees = unpack_tree([state.state, state.replica_state, state.evaluations], tensors)
        kept, replica_state = (msgspec.convert(tree, dict[str, Any]) for tree in trees[:2])
        evaluations = msgspec.convert(trees[2], dict[int, dict[str, float]])
    model = read_named(folder, state)
    if state.averaged:
        kept[AVERAGE] = read_named(folder, state, AVERAGED).weights
    return Restored(
        state.step,
        state.samples,
        model.weights,
        kept,
        replica_state,
        state.protocol,
        evaluations=evaluations,
        others=model.others,
    )


def read_named(folder: Path, state: State, file: str = MODEL) -> NamedModel:
    """The model of the checkpoint with this state, or its average."""
    tensors = _load_file(folder, file)
    if missing := [name for name in state.names if name not in tensors]:
        raise Damaged(f"{file} has no tensor {missing[0]!r}")
    return _checked(NamedModel(tensors, state.names), file)


def _checked(model: NamedModel, file: str) -> NamedModel:
    kinds = {model.tensors[name].dtype for name in model.names}
    if len(kinds) != 1 or not next(iter(kinds)).is_floating_point or not model.weights.numel():
        raise Damaged(f"{file} does not hold the weights of a model")
    return model


def read_workers(folder: Path) -> dict[int, dict[str, Any]]:
    """The states of workers that the checkpoint in this folder holds."""
    state = read_state(folder)
    tensors = _load_tensors(folder, WORKERS)
    with _reading(STATE):
        return msgspec.convert(unpack_tree(state.workers, tensors), dict[int, dict[str, Any]])


# ---- one model in one file ------------------------------------------------------------------------------------------


def write_model(path: Path, model: Evaluated, layout: Layout) -> None:
    """Store a model in place of what the file held."""
    known = {
        "step": model.step,
        "samples": model.samples,
        "metrics": model.metrics,
        "names": list(layout.shapes),
    }
    metadata = FORMAT | {"version": str(VERSION), **{name: json.dumps(value) for name, value in known.items()}}
    tensors = layout.named(model.weights.contiguous())
    with replacing(path) as partial, _disk_errors():
        save_file(tensors, partial, {**metadata, "sha256": _model_hash(metadata, tensors)})


def read_model(path: Path) -> tuple[Evaluated, NamedModel]:
    """The model in this file; Damaged if it is not what was written."""
    with _reading(path.name), safe_open(path, "pt") as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)
        stored = metadata.pop("sha256", None)
        if metadata.get("version") != str(VERSION):
            raise Damaged(f"{path.name} is not of version {VERSION}, which this Tether reads")
        if stored != _model_hash(metadata, tensors):
            raise Damaged(f"{path.name} does not match the hash in it")
        step, samples = (msgspec.convert(json.loads(metadata[name]), Count) for name in ("step", "samples"))
        metrics = msgspec.convert(json.loads(metadata["metrics"]), dict[str, float])
        names = msgspec.convert(json.loads(metadata["names"]), list[str])
        named = _checked(NamedModel(tensors, names), path.name)
        return Evaluated(step, samples, metrics, named.weights), named


def _model_hash(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    hashed = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        hashed.update(name.encode())
        hashed.update(raw_bytes(tensors[name]))
    return hashed.hexdigest()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The state_dict in a file that ends in .safetensors, .pt or .pth."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: weights are read from .safetensors, .pt or .pth; the name must end with one of them")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} does not hold a state_dict: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UsageError(f"{path} does not hold a state_dict, which is a dict of tensors by their names")
    return found


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a state_dict as the name of the file says: .safetensors, or .pt or .pth as torch.save writes them."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: a model is saved as .safetensors, .pt or .pth; end the name with one of them")
    # safetensors refuses tensors that share memory, such as tied weights
    own = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}")
    try:
        with replacing(path) as partial, _disk_errors():
            if path.suffix == ".safetensors":
                save_file(own, partial, FORMAT)
            else:
                torch.save(own, partial)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


# ---- files ----------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to write to, which then replaces the given one as a whole, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file, and wait until it is on the disk."""
    path.write_bytes(data)
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn whatever decoding a damaged file raises into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, SafetensorError, WireError) as error:
        raise Damaged(f"{name} cannot be decoded: {error}") from error


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn the file errors of safetensors into those of Python."""
    try:
        yield
    except SafetensorError as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def _read_hashes(folder: Path) -> dict[str, str] | None:
    with _reading(HASHES):
        try:
            text = (folder / HASHES).read_text("ascii")
        except FileNotFoundError:
            return None
        if not re.fullmatch(r"([0-9a-f]{64}  [\w.]+\n)+", text):
            raise Damaged(f"{HASHES} is not a list of hashes")
        return {line[66:]: line[:64] for line in text.splitlines()}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save_tensors(tensors: list[Tensor], path: Path) -> None:
    save_file({str(i): tensor.contiguous() for i, tensor in enumerate(tensors)}, path)
    sync(path)


def _load_tensors(folder: Path, name: str) -> list[Tensor]:
    found = _load_file(folder, name)
    with _reading(name):
        return [found[str(i)] for i in range(len(found))]


def _load_file(folder: Path, name: str) -> dict[str, Tensor]:
    hashes = _read_hashes(folder)
    with _reading(name):
        if hashes is not None and _hash(folder / name) != hashes.get(name):
            raise Damaged(f"{name} does not match its hash in {HASHES}")
        return load_file(folder / name)
