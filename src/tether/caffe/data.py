"""What data layers read: databases, lists of images, HDF5 files and arrays; and Caffe's transformation of images.

Samples are read raw, so that a batch is transformed at once, where the model computes. They are tuples of the tops.
"""

from __future__ import annotations

import io
import math
import os
import random
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from tether.caffe.blobs import blob_array, parse_binary
from tether.caffe.reading import find_file
from tether.caffe.schema import message
from tether.errors import UsageError, missing_extra

Array = np.ndarray[Any, np.dtype[Any]]


def decode_datum(content: bytes, what: str, color: bool | None = None) -> tuple[Array, int]:
    """The image of a Datum record, as (channels, height, width) in the order blue, green, red, and its label."""
    from google.protobuf.message import DecodeError

    datum = message("Datum")
    try:
        datum.ParseFromString(content)
    except (DecodeError, ValueError):
        raise UsageError(f"{what} is not a Datum record of Caffe") from None
    if datum.encoded:
        return decode_image(datum.data, what, color), datum.label
    shape = (datum.channels, datum.height, datum.width)
    values = np.frombuffer(datum.data, np.uint8) if datum.data else np.array(datum.float_data, np.float32)
    if min(shape) < 1 or values.size != shape[0] * shape[1] * shape[2]:
        raise UsageError(f"{what} has {values.size} values for the shape {shape}: the record is damaged")
    return values.reshape(shape), datum.label


def decode_image(content: bytes, what: str, color: bool | None = None) -> Array:
    """An encoded image in the order blue, green, red; `color` None keeps the number of its channels."""
    try:
        from PIL import Image
    except ImportError:
        raise missing_extra("pillow", "caffe") from None
    try:
        with Image.open(io.BytesIO(content)) as image:
            mode = image.mode
            if color is None:
                wanted = mode if mode in ("L", "RGB", "RGBA") else "L" if mode == "1" else "RGB"
            else:
                wanted = "RGB" if color else "L"
            pixels = np.asarray(image.convert(wanted))
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise UsageError(f"{what} is not an image that can be read: {error}") from None
    if pixels.ndim == 2:
        return pixels[None]
    order = [2, 1, 0, 3][: pixels.shape[2]]
    return np.ascontiguousarray(pixels[:, :, order].transpose(2, 0, 1))


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """An image of bytes in another size: bilinear without smoothing, with OpenCV's integers and their rounding."""
    rows, columns = _neighbours(image.shape[1], height), _neighbours(image.shape[2], width)
    values = image.to(torch.int64)
    across = sum(values[:, :, place] * share for place, share in columns)
    assert isinstance(across, Tensor)
    down = sum(((across[:, place] >> 4) * share.unsqueeze(1)) >> 16 for place, share in rows)
    return ((down + 2) >> 2).clamp(0, 255).to(torch.uint8)


def _neighbours(size: int, wanted: int) -> list[tuple[Tensor, Tensor]]:
    """For each place along an axis, the two that it lies between, and their shares of 2048."""
    places = ((torch.arange(wanted, dtype=torch.float64) + 0.5) * (size / wanted) - 0.5).float()
    first = places.floor()
    part = torch.where((first < 0) | (first >= size - 1), 0.0, places - first)
    first = first.long().clamp(0, size - 1)
    shares = ((1 - part) * 2048).round().long(), (part * 2048).round().long()
    return [(first, shares[0]), ((first + 1).clamp(max=size - 1), shares[1])]


def read_mean(path: Path) -> Tensor:
    """The mean image of a .binaryproto file."""
    values = blob_array(parse_binary(path, "BlobProto"), str(path))
    return torch.from_numpy(values.reshape(values.shape[-3:]).copy())


@dataclass(frozen=True)
class Transform:
    """Caffe's transform_param: subtract the mean, crop, mirror, scale."""

    scale: float = 1.0
    mirror: bool = False
    crop: int = 0
    mean: Tensor | None = None
    mean_values: tuple[float, ...] = ()
    random_crop: bool = False

    @staticmethod
    def of(param: Any, phase: str, near: Path) -> Transform:
        mean = None
        if param.mean_file:
            if param.mean_value:
                raise UsageError("give mean_file or mean_value, not both")
            if (path := find_file(param.mean_file, near)) is None:
                raise UsageError(f"there is no mean_file {param.mean_file!r}: make it, or correct the name")
            mean = read_mean(path)
        return Transform(param.scale, param.mirror, param.crop_size, mean, tuple(param.mean_value), phase == "TRAIN")

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What a sample of this shape becomes."""
        if self.crop and min(shape[1:]) < self.crop:
            raise UsageError(f"crop_size {self.crop} is larger than an image of shape {shape}")
        return (shape[0], self.crop, self.crop) if self.crop else shape

    def __call__(self, images: Tensor | list[Tensor]) -> Tensor:
        if isinstance(images, list):
            return torch.cat([self(image.unsqueeze(0)) for image in images])
        count, channels, height, width = images.shape
        self.shape((channels, height, width))
        values = images.float()
        if self.mean is not None:
            if self.mean.shape != images.shape[1:]:
                raise UsageError(
                    f"the mean has the shape {tuple(self.mean.shape)} and an image {tuple(images.shape[1:])}"
                )
            values = values - self.mean.to(values.device)
        elif self.mean_values:
            if len(self.mean_values) not in (1, channels):
                raise UsageError(
                    f"{len(self.mean_values)} mean_value for {channels} channels: give one, or one for each"
                )
            values = values - values.new_tensor(self.mean_values).view(-1, 1, 1)
        if size := self.crop:
            if self.random_crop:
                rows = torch.randint(height - size + 1, (count,)).tolist()
                columns = torch.randint(width - size + 1, (count,)).tolist()
                cuts = zip(values, rows, columns, strict=True)
                values = torch.stack([image[:, r : r + size, c : c + size] for image, r, c in cuts])
            else:
                top, left = (height - size) // 2, (width - size) // 2
                values = values[:, :, top : top + size, left : left + size]
        if self.mirror:
            mirrored = (torch.rand(count) < 0.5).to(values.device)
            values = torch.where(mirrored.view(-1, 1, 1, 1), values.flip(3), values)
        return values * self.scale if self.scale != 1 else values


class Records:
    """Datum records of a database, by number, in the order of their keys."""

    def __init__(self, path: Path, color: bool | None = None) -> None:
        if not (path.is_file() or any((path / name).is_file() for name in ("data.mdb", "CURRENT"))):
            raise UsageError(f"{path} is not an LMDB, which has a data.mdb, nor a LevelDB, which has a file CURRENT")
        self.path, self.color = path, color
        self._keys: list[bytes] | None = None
        self._database: _Lmdb | _LevelDb | None = None
        self._process = 0

    def _open(self) -> _Lmdb | _LevelDb:
        if self._database is None or self._process != os.getpid():
            key = (str(self.path.resolve()), os.getpid())
            kind = _LevelDb if (self.path / "CURRENT").is_file() else _Lmdb
            self._database, self._process = _OPEN.get(key) or kind(self.path.resolve()), os.getpid()
            _OPEN[key] = self._database
        return self._database

    @property
    def keys(self) -> list[bytes]:
        if self._keys is None:
            self._keys = self._open().keys()
        return self._keys

    def __len__(self) -> int:
        return len(self.keys)

    def record(self, index: int) -> bytes:
        return self._open().get(self.keys[index])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        what = f"{self.path}: record {self.keys[index]!r}"
        image, label = decode_datum(self.record(index), what, self.color)
        return torch.from_numpy(image.copy()), torch.tensor(float(label))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_database": None, "_keys": None}


class _Lmdb:
    """An LMDB that is open, until nothing refers to it."""

    def __init__(self, path: Path) -> None:
        try:
            import lmdb
        except ImportError:
            raise missing_extra("lmdb", "caffe") from None
        try:
            self.opened = lmdb.open(
                str(path), readonly=True, lock=False, readahead=False, subdir=path.is_dir(), max_readers=64
            )
        except lmdb.Error as error:
            raise UsageError(f"{path} cannot be opened as LMDB: {error}") from None

    def keys(self) -> list[bytes]:
        with self.opened.begin() as transaction, transaction.cursor() as cursor:
            return list(cursor.iternext(values=False))

    def get(self, key: bytes) -> bytes:
        with self.opened.begin() as transaction:
            return bytes(transaction.get(key) or b"")


class _LevelDb:
    """A LevelDB that is open, until nothing refers to it.

    Only one process can have a LevelDB open, which writes to it even if it only reads. So every process opens a folder
    of its own, with links to the tables, which never change, and copies of the small files.
    """

    def __init__(self, path: Path) -> None:
        try:
            import plyvel
        except ImportError:
            raise missing_extra("plyvel", "caffe") from None
        copy = Path(tempfile.mkdtemp(prefix="tether-leveldb-"))
        weakref.finalize(self, _remove, copy, os.getpid())
        try:
            for file in path.iterdir():
                if file.suffix in (".ldb", ".sst"):
                    (copy / file.name).symlink_to(file)
                elif file.name != "LOCK":
                    shutil.copyfile(file, copy / file.name)
            self.opened = plyvel.DB(str(copy), create_if_missing=False)
        except (OSError, plyvel.Error) as error:
            raise UsageError(f"{path} cannot be opened as LevelDB: {error}") from None

    def keys(self) -> list[bytes]:
        return list(self.opened.iterator(include_value=False))

    def get(self, key: bytes) -> bytes:
        return bytes(self.opened.get(key))


def _remove(folder: Path, process: int) -> None:
    if process == os.getpid():  # a child after a fork has the same duty on its list
        shutil.rmtree(folder, ignore_errors=True)


#: by path and process: a database must not be opened twice in a process, or be used in a child after a fork
_OPEN: weakref.WeakValueDictionary[tuple[str, int], _Lmdb | _LevelDb] = weakref.WeakValueDictionary()


class ImageListData:
    """Images that a text file lists, each with a label behind it."""

    def __init__(self, path: Path, param: Any) -> None:
        self.root = param.root_folder
        self.near, self.color = path, param.is_color
        self.size = (param.new_height, param.new_width)
        if bool(self.size[0]) != bool(self.size[1]):
            raise UsageError("give new_height and new_width, or neither")
        try:
            lines = [line.rsplit(maxsplit=1) for line in path.read_text().splitlines() if line.strip()]
            self.items = [(name, int(label)) for name, label in lines]
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} must have lines of a file's name and a label: {error}") from None
        if not self.items:
            raise UsageError(f"{path} lists no images")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        name, label = self.items[index]
        found = find_file(self.root + name, self.near)
        if found is None:
            raise UsageError(f"{self.near} lists {name!r}, and there is no {self.root + name}")
        image = torch.from_numpy(decode_image(found.read_bytes(), str(found), bool(self.color)).copy())
        if self.size[0]:
            image = resize(image, *self.size)
        return image, torch.tensor(float(label))


class ArrayData:
    """Arrays in memory: one for each top."""

    def __init__(self, arrays: list[Tensor]) -> None:
        if len({len(array) for array in arrays}) != 1 or not len(arrays[0]):
            raise UsageError(f"the arrays have {', '.join(str(len(a)) for a in arrays)} samples: each needs as many")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(array[index] for array in self.arrays)


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Arrays of an .npz file, by name."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, Mapping):
                raise ValueError
            if missing := [name for name in names if name not in file]:
                raise UsageError(f"{path} lacks the arrays {', '.join(missing)}; it has {', '.join(file)}")
            return {name: file[name] for name in names}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, BadZipFile, KeyError, EOFError, AttributeError, TypeError):
        raise UsageError(f"{path} is not an .npz file of arrays, or is damaged: write one with numpy.savez") from None


def read_hdf5(path: Path, tops: tuple[str, ...]) -> ArrayData:
    """The datasets named after the tops, from all files that a text file lists, or from one HDF5 file."""
    try:
        import h5py
    except ImportError:
        raise missing_extra("h5py", "caffe") from None
    try:
        names = [str(path)] if h5py.is_hdf5(path) else path.read_text().split()
        parts: list[list[Array]] = []
        for name in names:
            if (found := find_file(name, path)) is None:
                raise UsageError(f"{path} lists {name!r}, which does not exist")
            with h5py.File(found, "r") as file:
                if missing := [top for top in tops if top not in file]:
                    raise UsageError(f"{found} lacks the datasets {', '.join(missing)}; it has {', '.join(file)}")
                parts.append([np.asarray(file[top], np.float32) for top in tops])
        if not parts:
            raise UsageError(f"{path} lists no HDF5 files")
        return ArrayData([torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)])
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as HDF5 data: {error}") from None


@dataclass
class Feed:
    """A data layer with its samples."""

    name: str
    tops: tuple[str, ...]
    batch_size: int
    data: Any
    transform: Transform | None
    shapes: tuple[tuple[int, ...], ...]
    #: how many samples tests leave out at first, drawn once below rand_skip; training begins at random places anyway
    skip: int = 0

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        """The tops of a batch of samples."""
        first = batch[0] if self.transform is None else self.transform(batch[0])
        return dict(zip(self.tops, [first, *batch[1:]], strict=False))


#: where data layers have their settings
_PARAMS = {
    "Data": "data_param",
    "HDF5Data": "hdf5_data_param",
    "ImageData": "image_data_param",
    "MemoryData": "memory_data_param",
    "WindowData": "window_data_param",
}


def open_feed(spec: Any, phase: str, near: Path, elsewhere: Mapping[str, str]) -> Feed:
    """The samples of a data layer. `elsewhere` says where the data is, by the names of layers, tops or sources."""
    tops = tuple(spec.top)
    param = getattr(spec, _PARAMS[spec.type])
    source = getattr(param, "source", "")
    known = [spec.name, *tops, *([source] if source else [])]
    named = next((elsewhere[name] for name in known if name in elsewhere), source)
    if spec.type == "MemoryData" and not named:
        raise UsageError("MemoryData has no data of its own: name an .npz file or an LMDB with --data NAME=PATH")
    if spec.type == "WindowData" and named == source:
        raise UsageError(
            f"windows of images are not cut out here: write them to an LMDB, and name it with --data {spec.name}=PATH"
        )
    path = find_file(named, near)
    if path is None:
        raise UsageError(f"there is no data at {named!r}: make it, or name it with --data {spec.name}=PATH")
    if param.batch_size < 1:
        raise UsageError("batch_size is missing")
    transform: Transform | None = Transform.of(spec.transform_param, phase, near)
    if path.suffix == ".npz":
        found = read_arrays(path, tops)
        arrays = [torch.from_numpy(found[top]) for top in tops]
        if spec.type == "HDF5Data" or arrays[0].ndim != 4:
            if spec.HasField("transform_param"):
                raise UsageError(f"transform_param is for images; {tops[0]!r} has the shape {tuple(arrays[0].shape)}")
            arrays[0], transform = arrays[0].float(), None
        data: Any = ArrayData([arrays[0], *(array.float() for array in arrays[1:])])
    elif spec.type == "HDF5Data":
        data, transform = read_hdf5(path, tops), None
    elif spec.type == "ImageData":
        data = ImageListData(path, param)
    else:
        force = spec.transform_param
        color = True if force.force_color or getattr(param, "force_encoded_color", False) else None
        data = Records(path, False if force.force_gray else color)
    if not len(data):
        raise UsageError(f"{path} has no samples")
    first = data[0]
    shapes = [tuple(value.shape) for value in first]
    if transform is not None:
        shapes[0] = transform.shape(shapes[0])
    if len(tops) > len(shapes):
        raise UsageError(f"it has {len(tops)} tops, and its data {len(shapes)}")
    batched = tuple((int(param.batch_size), *shape) for shape in shapes[: len(tops)])
    skip = random.Random(spec.name).randrange(max(1, min(len(data), getattr(param, "rand_skip", 0))))
    return Feed(spec.name, tops, int(param.batch_size), data, transform, batched, skip)


def described_shapes(spec: Any) -> list[tuple[int, ...]] | None:
    """The shapes of a data layer's tops as far as its settings tell them, without its data: images, and labels."""
    if spec.type not in ("Data", "ImageData", "MemoryData", "WindowData"):
        return None
    param, transform = getattr(spec, _PARAMS[spec.type]), spec.transform_param
    colours = 1 if transform.force_gray or not getattr(param, "is_color", True) else 3
    sides = (getattr(param, "new_height", 0), getattr(param, "new_width", 0))
    if spec.type == "MemoryData":
        colours, sides = param.channels, (param.height, param.width)
    if transform.crop_size:
        sides = (transform.crop_size, transform.crop_size)
    if min(param.batch_size, colours, *sides) < 1:
        return None
    return [(param.batch_size, colours, *sides), *[(param.batch_size,)] * (len(spec.top) - 1)]


class Together:
    """Samples of several data layers, side by side."""

    def __init__(self, feeds: list[Feed], least: int) -> None:
        """`least`: how many samples there must be; a smaller data set is there several times."""
        self.feeds, self.least = feeds, least

    def __len__(self) -> int:
        count = max((len(feed.data) for feed in self.feeds), default=1)
        return count * max(1, math.ceil(self.least / count))

    def __getitem__(self, index: int) -> list[tuple[Tensor, ...]]:
        return [feed.data[index % len(feed.data)] for feed in self.feeds]


def collate(samples: list[list[tuple[Tensor, ...]]]) -> list[list[Any]]:
    """Batches of every data layer; images of different sizes stay a list."""
    batches = []
    for rows in zip(*samples, strict=True):
        columns = zip(*rows, strict=True)
        batches.append([torch.stack(c) if len({v.shape for v in c}) == 1 else list(c) for c in map(list, columns)])
    return batches
