"""Arrays in Caffe's binary files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tether.caffe.schema import message
from tether.errors import UsageError, missing_extra

Array = np.ndarray[Any, np.dtype[np.float32]]


#: how HDF5 files begin
HDF5 = b"\x89HDF\r\n\x1a\n"


def is_hdf5(path: Path) -> bool:
    """Whether a file is a snapshot with snapshot_format HDF5."""
    try:
        with path.open("rb") as file:
            return file.read(len(HDF5)) == HDF5
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None


def hdf5_datasets(path: Path) -> dict[str, Any]:
    """All datasets of an HDF5 file, by their paths in it."""
    try:
        import h5py
    except ImportError:
        raise missing_extra("h5py", "caffe") from None
    found: dict[str, Any] = {}

    def visit(name: str | bytes, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            if item.nbytes > 100 * size:
                raise ValueError(f"{name!r} has the shape {item.shape}, and the file {size} bytes")
            found[name if isinstance(name, str) else name.decode("latin-1")] = item[()]

    try:
        size = path.stat().st_size
        with h5py.File(path, "r") as file:
            file.visititems(visit)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged, or is not an HDF5 file: {error}") from None
    return found


def numbered(datasets: dict[str, Any], what: str) -> list[Array]:
    """Arrays whose names are their numbers."""
    try:
        ordered = sorted(((int(name), value) for name, value in datasets.items()), key=lambda item: item[0])
        arrays = [np.array(value, np.float32) for _, value in ordered]
    except (ValueError, TypeError):
        raise UsageError(f"{what} has arrays {', '.join(datasets)}, which should be numbers 0, 1 and so on") from None
    if [number for number, _ in ordered] != list(range(len(ordered))):
        raise UsageError(f"{what} lacks some of its arrays: the file is damaged")
    return arrays


def parse_binary(path: Path, kind: str) -> Any:
    """A message from a binary file; arrays of blobs are bytes."""
    parsed = message(kind, raw=True)
    from google.protobuf.message import DecodeError

    try:
        content = path.read_bytes()
        if content[: len(HDF5)] == HDF5:
            raise UsageError(f"{path} is an HDF5 file, and should be a binary {kind}")
        parsed.ParseFromString(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (DecodeError, RecursionError, ValueError):
        raise UsageError(f"{path} is damaged, or is not a binary {kind} of Caffe") from None
    return parsed


def blob_shape(blob: Any) -> tuple[int, ...]:
    """The shape of a blob; older ones always have four axes."""
    if any(blob.HasField(name) for name in ("num", "channels", "height", "width")) or not blob.HasField("shape"):
        return (blob.num, blob.channels, blob.height, blob.width)
    return tuple(int(length) for length in blob.shape.dim)


def blob_array(blob: Any, what: str) -> Array:
    """The values of a blob that was parsed with bytes for arrays."""
    shape = blob_shape(blob)
    singles, doubles = b"".join(blob.data), b"".join(blob.double_data)
    count = 1
    for length in shape:
        count *= max(0, length)
    for content, kind in ((singles, "<f4"), (doubles, "<f8")):
        size = np.dtype(kind).itemsize
        if content and len(content) == count * size:
            return np.frombuffer(content, kind).astype(np.float32).reshape(shape)
    if not singles and not doubles and count <= 1 << 16:
        plain = message("BlobProto")  # numbers that are not packed are written one by one
        plain.ParseFromString(blob.SerializeToString())
        values = plain.data or plain.double_data
        if len(values) == count:
            return np.array(values, np.float32).reshape(shape)
    raise UsageError(
        f"{what} has a blob of shape {shape} with {len(singles) // 4 + len(doubles) // 8} values: the file is damaged"
    )


def write_blob(blob: Any, values: Tensor) -> None:
    """Write values into a blob whose arrays are bytes."""
    blob.shape.dim.extend(values.shape)
    blob.data.append(values.detach().cpu().contiguous().numpy().astype("<f4").tobytes())
