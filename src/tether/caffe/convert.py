"""Converters between arrays or folders of images and LMDBs of Datum records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tether.caffe.data import Records, decode_datum
from tether.caffe.schema import message
from tether.errors import UsageError, missing_extra

#: records in one transaction
TOGETHER = 1000


def to_lmdb(images: Any, labels: Any, path: Path, progress: Callable[[int], None] = lambda done: None) -> int:
    """Write images (n, channels, height, width), as bytes or numbers, and their labels; returns how many there are."""
    try:
        import lmdb
    except ImportError:
        raise missing_extra("lmdb", "caffe") from None
    if images.ndim != 4 or labels.shape != images.shape[:1] or not len(images):
        raise UsageError(
            f"images of shape {images.shape} and labels of shape {labels.shape} do not belong together: expected (n, "
            "channels, height, width) and (n,)"
        )
    if (path / "data.mdb").exists():
        raise UsageError(f"{path} has an LMDB already: name another folder, or delete it")
    path.mkdir(parents=True, exist_ok=True)
    # the map is only address space; the file grows as it is written
    size = 2 * images.nbytes + len(images) * 4096 + (64 << 20)
    with lmdb.open(str(path), map_size=size) as environment:
        for start in range(0, len(images), TOGETHER):
            with environment.begin(write=True) as transaction:
                for index in range(start, min(start + TOGETHER, len(images))):
                    transaction.put(f"{index:08d}".encode(), _record(images[index], int(labels[index])))
            progress(min(start + TOGETHER, len(images)))
    return len(images)


def _record(image: Any, label: int) -> bytes:
    datum = message("Datum")
    datum.channels, datum.height, datum.width = image.shape
    datum.label = label
    if image.dtype == np.uint8:
        datum.data = np.ascontiguousarray(image).tobytes()
    else:
        datum.float_data.extend(image.reshape(-1).astype(np.float32).tolist())
    return bytes(datum.SerializeToString())


def from_lmdb(path: Path, progress: Callable[[int], None] = lambda done: None) -> tuple[Any, Any]:
    """All images and labels of an LMDB; the images must have one shape."""
    data = Records(path)

    def records() -> Iterator[tuple[Any, int]]:
        for index in range(len(data)):
            yield decode_datum(data.record(index), f"{path}: record {data.keys[index]!r}")
            if (index + 1) % TOGETHER == 0 or index + 1 == len(data):
                progress(index + 1)

    found = list(records())
    if not found:
        raise UsageError(f"{path} has no records")
    if len({image.shape for image, _ in found}) > 1:
        raise UsageError(f"{path} has images of several shapes, which one array cannot hold")
    return np.stack([image for image, _ in found]), np.array([label for _, label in found], np.int64)
