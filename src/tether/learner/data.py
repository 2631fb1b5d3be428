"""The mini-batches of a run, in an order that depends only on the seed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from tether.task import Task


class Batches:
    """The mini-batches of a run: an endless sequence, with a fresh permutation of the data for every epoch.

    Iterating gives every `count`-th mini-batch, beginning with number `index`; `seek` goes to any other.
    """

    def __init__(self, task: Task, data: Any, *, seed: int, index: int = 0, count: int = 1, shared_by: int = 1) -> None:
        """`shared_by`: how many workers number their mini-batches together, if `data` is one worker's own part."""
        self._task = task
        self._data = data
        self._length = len(data)
        self._seed = seed
        self._number = index
        self._stride = count
        self._shared_by = shared_by
        #: whether a batch is a few rows of tensors: picking them costs less than having another thread do it
        self.in_memory = type(data) is TensorDataset and type(task).collate is Task.collate

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        size = self._task.batch_size
        start = self._number // self._shared_by * size
        indices = self._indices(start, start + size)
        self._number += self._stride
        data = self._data
        if self.in_memory:
            picked = torch.from_numpy(indices)
            return [tensor[picked] for tensor in data.tensors]
        if hasattr(data, "__getitems__"):
            return self._task.collate(data.__getitems__(indices.tolist()))
        return self._task.collate([data[i] for i in indices.tolist()])

    def seek(self, number: int, upcoming: tuple[int, ...] = ()) -> None:
        """Go to a mini-batch; `upcoming` are those that will be wanted after it."""
        self._number = number

    def _indices(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self._length)
            order = _permutation(self._seed, epoch, self._length)
            parts.append(order[offset : offset + stop - start])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Prefetched:
    """Mini-batches that another thread loads while the last one is being computed with.

    An error while loading is raised where the mini-batch would have been returned. The thread ends when nothing refers
    to the stream any more.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._loading: dict[int, Future[Any]] = {}
        self._number = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def seek(self, number: int, upcoming: tuple[int, ...] = ()) -> None:
        """Go to a mini-batch, and start loading it and the `upcoming` ones."""
        self._number = number
        wanted = (number, *upcoming)
        for other in self._loading.keys() - set(wanted):
            self._loading.pop(other).cancel()
        for each in wanted:
            if each not in self._loading:
                self._loading[each] = self._loader.submit(self._load, each)

    def __next__(self) -> Any:
        number = self._number
        if number not in self._loading:
            self.seek(number, (number + 1, number + 2))
        self._number += 1
        return self._loading.pop(number).result()

    def _load(self, number: int) -> Any:
        self._batches.seek(number)
        return next(self._batches)


@lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng((seed, epoch)).permutation(length)
