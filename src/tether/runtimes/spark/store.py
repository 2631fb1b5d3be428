"""A worker's own rows, as they arrive: in memory while they fit, otherwise on the local disk.

Rows have fixed shapes, so a field of all rows is one array, in memory or mapped from a file, and a mini-batch is a few
of its rows. The files have no name, so they are gone however the process ends.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tether.errors import RunError, UsageError

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Field:
    """One field of every row: values of one type in one shape."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


class MappedDataset(TensorDataset):
    """Rows on the local disk. Reading them may wait for the disk, so a separate thread reads ahead of training."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        chosen = torch.as_tensor(indices)
        return list(zip(*(tensor[chosen] for tensor in self.tensors), strict=True))


class Store:
    """Collects arrays of rows, and makes a Dataset of them when all have arrived."""

    def __init__(
        self,
        fields: Sequence[Field],
        memory_mb: float = 1024,
        directory: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if not memory_mb > 0:
            raise UsageError(f"memory_mb must be more than 0, not {memory_mb}")
        self.fields = tuple(fields)
        self.rows = 0
        self._memory_bytes = memory_mb * 2**20
        self._directory = directory or tempfile.gettempdir()
        self._progress = progress
        self._chunks: list[deque[Array]] = [deque() for _ in self.fields]
        self._files: list[IO[bytes]] = []

    @property
    def bytes(self) -> int:
        """The size of the rows so far."""
        return self.rows * sum(field.row_bytes for field in self.fields)

    @property
    def spilled(self) -> bool:
        """Whether the rows are on disk."""
        return bool(self._files)

    def add(self, arrays: Sequence[Array]) -> None:
        """Add rows: one array per field."""
        for field, array, chunks in zip(self.fields, arrays, self._chunks, strict=True):
            if array.dtype != field.dtype or array.shape != (len(arrays[0]), *field.shape):
                raise UsageError(
                    f"rows of {field.name!r} are {array.dtype} of shape {array.shape[1:]}, "
                    f"not {field.dtype} of shape {field.shape}"
                )
            chunks.append(array)
        self.rows += len(arrays[0])
        if self.spilled or self.bytes > self._memory_bytes:
            self._spill()
        if self._progress is not None:
            self._progress(self.rows, self.bytes)

    def dataset(self) -> TensorDataset:
        """All rows that were added; the store is empty afterwards."""
        kind = MappedDataset if self.spilled else TensorDataset
        arrays = (
            self._map()
            if self.spilled
            else [self._gather(*pair) for pair in zip(self.fields, self._chunks, strict=True)]
        )
        self.close()
        return kind(*(torch.from_numpy(array) for array in arrays))

    def close(self) -> None:
        """Drop all rows."""
        for file in self._files:
            file.close()
        self._files = []
        self._chunks = [deque() for _ in self.fields]

    def _spill(self) -> None:
        try:
            if not self._files:
                self._files = [tempfile.TemporaryFile(dir=self._directory) for _ in self.fields]  # noqa: SIM115
            for file, chunks in zip(self._files, self._chunks, strict=True):
                while chunks:
                    file.write(np.ascontiguousarray(chunks.popleft()).data)
        except OSError as error:
            self.close()
            raise RunError(f"{self.bytes} bytes of data cannot be written to {self._directory}: {error}") from error

    def _map(self) -> list[Array]:
        arrays: list[Array] = []
        for field, file in zip(self.fields, self._files, strict=True):
            file.flush()
            arrays.append(np.memmap(file, field.dtype, mode="r+", shape=(self.rows, *field.shape)))
        return arrays

    def _gather(self, field: Field, chunks: deque[Array]) -> Array:
        """One array of all chunks; each chunk is freed as soon as it is copied."""
        whole = np.empty((self.rows, *field.shape), field.dtype)
        first = 0
        while chunks:
            chunk = chunks.popleft()
            whole[first : first + len(chunk)] = chunk
            first += len(chunk)
        return whole
