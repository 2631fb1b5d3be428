"""Readers for the file formats of image data sets. A bad file raises a `UsageError` that names it."""

from __future__ import annotations

import gzip
import lzma
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from tether.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]

_GZIP = b"\x1f\x8b"
_CIFAR_IMAGE_BYTES = 3 * 32 * 32


def read_idx(path: Path) -> Array:
    """An IDX file of unsigned bytes, gzipped or not: 0, 0, 8, the number of axes, their lengths, the bytes."""
    raw = _read(path)
    if raw[:3] != b"\0\0\x08" or len(raw) < 4:
        raise UsageError(
            f"{path} is not an IDX file of unsigned bytes: it starts with {raw[:4].hex(' ') or 'nothing'} "
            "instead of 00 00 08 and the number of axes"
        )
    start = 4 + 4 * raw[3]
    if len(raw) < start:
        raise UsageError(f"{path} is truncated: it ends inside its header. Fetch it again")
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    if len(raw) - start != math.prod(shape):
        raise UsageError(
            f"{path} is truncated or damaged: its header promises {math.prod(shape)} bytes of data "
            f"({' x '.join(map(str, shape))}) and {len(raw) - start} follow. Fetch it again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_npz(path: Path, *names: str) -> list[Array]:
    """The named arrays of an .npz file; other arrays are not decompressed."""
    try:
        # np.load does not close a file that it opened itself if that is not a zip file
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = [file[name] for name in names]
    except KeyError as error:
        raise UsageError(f"{path} lacks an array: {error.args[0]}; expected {', '.join(names)}") from error
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise UsageError(f"{path} cannot be read as .npz: {error}") from error
    return arrays


def read_cifar(path: Path) -> tuple[Array, Array]:
    """A binary CIFAR-10 batch, as (images, labels): records of one label byte and a red, a green and a blue plane."""
    raw = np.frombuffer(_read(path), np.uint8)
    record = 1 + _CIFAR_IMAGE_BYTES
    if raw.size == 0 or raw.size % record:
        raise UsageError(
            f"{path} is truncated or not a binary CIFAR-10 batch: it has {raw.size} bytes, "
            f"which is not a multiple of {record}. Fetch it again"
        )
    records = raw.reshape(-1, record)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def dataset(images: Array, labels: Array, *, shape: tuple[int, ...], classes: int, source: Path) -> TensorDataset:
    """Images and their labels, still bytes, after a check that they belong together."""
    if images.shape[1:] != shape or labels.shape != images.shape[:1] or not labels.size:
        raise UsageError(
            f"{source}: images of shape {images.shape} and labels of shape {labels.shape} do not belong together; "
            f"expected {('n', *shape)} and ('n',)".replace("'", "")
        )
    if images.dtype != np.uint8 or labels.dtype.kind not in "iu":
        raise UsageError(
            f"{source}: images are {images.dtype} and labels {labels.dtype}; expected uint8 images and integer labels"
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise UsageError(f"{source}: labels go from {labels.min()} to {labels.max()}; expected 0 to {classes - 1}")
    # np.array copies, since torch warns about the read-only memory of np.frombuffer
    return TensorDataset(torch.from_numpy(np.array(images)), torch.from_numpy(labels.astype(np.int64)))


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw.startswith(_GZIP) else raw
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}. Fetch it again") from error
