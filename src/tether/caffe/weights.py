"""Trained weights: .caffemodel files, read into a net and written from one, and the histories in .solverstate files.

Files of snapshot_format HDF5 are read too, which end in .h5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tether.caffe.blobs import Array, blob_array, hdf5_datasets, is_hdf5, numbered, parse_binary, write_blob
from tether.caffe.net import Net
from tether.caffe.schema import message
from tether.errors import UsageError


@dataclass(frozen=True)
class Loaded:
    """What became of the layers of a net when weights were loaded."""

    loaded: tuple[str, ...]
    fresh: tuple[str, ...]
    #: layers of the file that the net does not have
    unused: tuple[str, ...]

    @staticmethod
    def together(parts: Sequence[Loaded]) -> Loaded:
        """What became of them when several files were loaded one after another."""
        loaded = tuple(dict.fromkeys(name for part in parts for name in part.loaded))
        fresh = tuple(name for name in (parts[0].fresh if parts else ()) if name not in loaded)
        return Loaded(loaded, fresh, tuple(dict.fromkeys(name for part in parts for name in part.unused)))

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} layer{'s' if len(self.loaded) != 1 else ''} from the file"]
        if self.fresh:
            parts.append(f"fresh: {', '.join(self.fresh)}")
        if self.unused:
            parts.append(f"in the file only: {', '.join(self.unused)}")
        return "; ".join(parts)


def read_blobs(path: Path) -> dict[str, list[Array]]:
    """The blobs of a .caffemodel, by layer. Layers without blobs are left out."""
    found: dict[str, list[Array]] = {}
    if is_hdf5(path):
        layers: dict[str, dict[str, Any]] = {}
        for name, values in hdf5_datasets(path).items():
            layer, _, number = name.removeprefix("data/").rpartition("/")
            layers.setdefault(layer, {})[number] = values
        return {layer: numbered(arrays, f"{path}: layer {layer!r}") for layer, arrays in layers.items()}
    net = parse_binary(path, "NetParameter")
    # in the oldest files, a layer's name and blobs are inside of it
    oldest = [layer.layer if layer.HasField("layer") else layer for layer in net.layers]
    for layer in [*net.layer, *oldest]:
        if layer.blobs:
            found[layer.name] = [blob_array(blob, f"{path}: layer {layer.name!r}") for blob in layer.blobs]
    if not found:
        raise UsageError(f"{path} has no layer with weights: name a .caffemodel file that Caffe or Tether has written")
    return found


def load_weights(net: Net, path: Path) -> Loaded:
    """Copy the blobs of a .caffemodel into layers of the same name; other layers stay as they are."""
    found = read_blobs(path)
    by_layer: dict[str, list[Any]] = {}
    for blob in net.blobs:
        by_layer.setdefault(blob.layer, []).append(blob)
    loaded = []
    for name, blobs in by_layer.items():
        if name not in found:
            continue
        arrays = found[name]
        if len(arrays) != len(blobs):
            raise UsageError(
                f"{path}: layer {name!r} has {len(arrays)} blobs and that of the net {len(blobs)}: rename the layer in "
                "the net to train it afresh"
            )
        for blob, array in zip(blobs, arrays, strict=True):
            net.value(blob).copy_(torch.from_numpy(_fitted(array, blob.shape, f"{path}: layer {name!r}")))
        loaded.append(name)
    return Loaded(
        tuple(loaded),
        tuple(name for name in by_layer if name not in found),
        tuple(name for name in found if name not in by_layer),
    )


def _fitted(array: Array, shape: tuple[int, ...], what: str) -> Array:
    """The array in a shape that differs at most by the leading ones of older files, whose blobs have four axes."""
    if array.shape == shape:
        return array
    four = (1,) * (4 - len(shape)) + shape
    # a kernel of an older file may have its bias as (1, 1, 1, n), a row of an inner product as (1, 1, m, n)
    if array.ndim == 4 and len(shape) <= 4 and array.shape == four:
        return array.reshape(shape)
    raise UsageError(
        f"{what} has a blob of shape {array.shape} and that of the net {shape}: rename the layer in the net to train "
        "it afresh, or use the net of the file"
    )


def write_weights(net: Net, path: Path) -> None:
    """Write a .caffemodel with every layer of a net, which Caffe reads."""
    _write(path, weights_content(net))


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def weights_content(net: Net) -> bytes:
    """The content of a .caffemodel with every layer of a net."""
    out = message("NetParameter", raw=True)
    out.name = net.title
    for source in net.sources:
        out.layer.add(name=source.name, type=source.type, top=source.tops)
    by_module: dict[str, list[Any]] = {}
    for blob in net.blobs:
        by_module.setdefault(blob.module, []).append(blob)
    for node in net.nodes:
        layer = out.layer.add(name=node.name, type=node.type, bottom=node.bottoms, top=node.tops)
        for blob in by_module.get(node.module, []):
            write_blob(layer.blobs.add(), net.value(blob))
    return bytes(out.SerializeToString())


@dataclass(frozen=True)
class SolverState:
    """How far a solver was: a .solverstate file."""

    iteration: int
    #: the .caffemodel that belongs to it, as the file names it
    learned_net: str
    #: for each parameter that owns its values, statistics included, its history; then the second ones, if the solver
    #: type has two
    histories: tuple[Tensor, ...]


def read_state(path: Path) -> SolverState:
    """Read a .solverstate file."""
    if is_hdf5(path):
        found = hdf5_datasets(path)
        arrays = numbered(
            {name.removeprefix("history/"): value for name, value in found.items() if name.startswith("history/")},
            f"{path}: history",
        )
        try:
            iteration, learned = int(np.ravel(found["iter"])[0]), bytes(found.get("learned_net", b"")).decode()
        except (KeyError, IndexError, TypeError, ValueError):
            raise UsageError(f"{path} has no iteration: name a .solverstate.h5 file that Caffe has written") from None
        return SolverState(iteration, learned.rstrip("\0"), tuple(map(torch.from_numpy, arrays)))
    state = parse_binary(path, "SolverState")
    if not state.HasField("iter") or state.iter < 0:
        raise UsageError(f"{path} has no iteration: name a .solverstate file that Caffe or Tether has written")
    histories = [blob_array(blob, f"{path}: history {number}") for number, blob in enumerate(state.history)]
    return SolverState(state.iter, state.learned_net, tuple(torch.from_numpy(values.copy()) for values in histories))


def write_state(path: Path, state: SolverState, current_step: int = 0) -> None:
    """Write a .solverstate file, which Caffe reads."""
    out = message("SolverState", raw=True)
    out.iter, out.learned_net, out.current_step = state.iteration, state.learned_net, current_step
    for values in state.histories:
        write_blob(out.history.add(), values)
    _write(path, bytes(out.SerializeToString()))
