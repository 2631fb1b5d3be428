"""The mini-batches of a run, in an order that depends only on the seed and on the data.

A run numbers its mini-batches from 0, and a worker is told which numbers are its own. Data that can be indexed is read
by number: `Batches` knows which samples a mini-batch has, and a thread (`Prefetched`) or processes (`ProcessLoaded`)
load those that will be wanted next. A stream cannot be indexed: `StreamBatches` reads forward, drops what other workers
train on, and begins a pass again where it must go back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from tether.errors import TaskError
from tether.task import Task, describe_error, drops_last, epoch_samples, sampler_of

Indices = np.ndarray[Any, np.dtype[np.int64]]


class MiniBatches(Protocol):
    """What a learner reads: the batches of one mini-batch after another."""

    def seek(self, number: int, upcoming: tuple[int, ...] = ()) -> None:
        """Go to a mini-batch; `upcoming` are those that will be wanted after it."""
        ...

    def __next__(self) -> Any:
        """The next batch. A mini-batch of a task that accumulates is that many batches."""
        ...


def open_batches(task: Task, data: Any, *, seed: int, shared_by: int = 1, ahead: bool = True) -> Any:
    """The mini-batches of what train_data() returned; `ahead`: load them while others are computed with."""
    samples = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(samples, IterableDataset):
        stream = StreamBatches(task, data)
        return Prefetched(stream) if ahead else stream
    batches = Batches(task, data, seed=seed, shared_by=shared_by)
    if batches.in_memory or not ahead:
        return batches
    return ProcessLoaded(batches) if task.num_workers else Prefetched(batches)


class Batches:
    """Mini-batches of data that can be indexed: an endless sequence, with a fresh permutation for every epoch.

    Iterating gives every `count`-th mini-batch, beginning with number `index`; `seek` goes to any other. A mini-batch
    of a task that accumulates is given as that many batches, one after another. A DataLoader's sampler decides the
    order instead of the permutation, and its `collate_fn` makes the batches.
    """

    def __init__(self, task: Task, data: Any, *, seed: int, index: int = 0, count: int = 1, shared_by: int = 1) -> None:
        """`shared_by`: how many workers number their mini-batches together, if `data` is one worker's own part."""
        self.task = task
        #: the DataLoader that the task returned, if it did
        self.loader: DataLoader[Any] | None = data if isinstance(data, DataLoader) else None
        self.data: Any = self.loader.dataset if self.loader is not None else data
        self.collate: Callable[[list[Any]], Any] = self.loader.collate_fn if self.loader is not None else task.collate
        self._length = epoch_samples(task, data)
        self._order: Callable[[int], Indices] = lambda epoch: _permutation(seed, epoch, self._length)
        if self.loader is not None and not _is_plain_shuffle(self.loader):
            self._order = _SampledOrder(self.loader, seed, self._length)
        self._number = index
        #: how many batches of that mini-batch were given
        self._given = 0
        self._stride = count
        self._shared_by = shared_by
        plain = self.loader is None and type(task).collate is Task.collate
        #: whether a batch is a few rows of tensors: picking them costs less than having another thread do it
        self.in_memory = type(data) is TensorDataset and plain

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        indices = self._indices(self._number, self._given)
        self._given += 1
        if self._given == self.task.accumulate:
            self._number, self._given = self._number + self._stride, 0
        if self.in_memory:
            picked = torch.from_numpy(indices)
            return [tensor[picked] for tensor in self.data.tensors]
        return fetch(self.data, self.collate, indices.tolist())

    def seek(self, number: int, upcoming: tuple[int, ...] = ()) -> None:
        """Go to a mini-batch; `upcoming` are those that will be wanted after it."""
        self._number, self._given = number, 0

    def load(self, number: int) -> list[Any]:
        """All batches of a mini-batch."""
        self.seek(number)
        return [next(self) for _ in range(self.task.accumulate)]

    def indices(self, number: int) -> list[list[int]]:
        """The samples of a mini-batch, by batches."""
        return [self._indices(number, batch).tolist() for batch in range(self.task.accumulate)]

    def _indices(self, number: int, batch: int) -> Indices:
        size = self.task.batch_size
        start = (number // self._shared_by * self.task.accumulate + batch) * size
        stop, parts = start + size, []
        while start < stop:
            epoch, offset = divmod(start, self._length)
            parts.append(self._order(epoch)[offset : offset + stop - start])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def fetch(data: Any, collate: Callable[[list[Any]], Any], indices: list[int]) -> Any:
    """One batch of data that can be indexed."""
    if hasattr(data, "__getitems__"):
        return collate(data.__getitems__(indices))
    return collate([data[i] for i in indices])


@lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, length: int) -> Indices:
    return np.random.default_rng((seed, epoch)).permutation(length)


def _is_plain_shuffle(loader: DataLoader[Any]) -> bool:
    """Whether a loader's sampler does nothing but shuffle, which a permutation of Tether's own does as well."""
    sampler = sampler_of(loader)
    whole = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return whole and not drops_last(loader)


class _SampledOrder:
    """The order of the samples of every epoch as a sampler gives it: the same one in every process."""

    def __init__(self, loader: DataLoader[Any], seed: int, length: int) -> None:
        self._sampler, self._seed, self._length = sampler_of(loader), seed, length
        self._drops_last = drops_last(loader)
        self._known: dict[int, Indices] = {}

    def __call__(self, epoch: int) -> Indices:
        if epoch not in self._known:
            found = self._draw(epoch)
            if self._drops_last:
                found = found[: self._length]
            if len(found) != self._length:
                raise TaskError(
                    f"the sampler {type(self._sampler).__name__} gave {len(found)} samples in epoch {epoch} and has a "
                    f"length of {self._length}: it must give as many in every epoch"
                )
            # mini-batches may be made in any order, and two epochs meet in one of them
            self._known = {known: order for known, order in self._known.items() if known >= epoch - 1} | {epoch: found}
        return self._known[epoch]

    def _draw(self, epoch: int) -> Indices:
        """What the sampler gives if all random generators begin with a number that follows from seed and epoch."""
        seed = int(np.random.default_rng((self._seed, epoch)).integers(2**31))
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        if isinstance(generator := getattr(self._sampler, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        before, before_numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
                return np.fromiter(self._sampler, np.int64)
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)


# ---- loading ahead --------------------------------------------------------------------------------------------------


class Prefetched:
    """Mini-batches that another thread loads while the last one is being computed with.

    An error while loading is raised where the mini-batch would have been returned. The thread ends when nothing refers
    to the stream any more.
    """

    def __init__(self, batches: Batches | StreamBatches) -> None:
        self._batches = batches
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._loading: dict[int, Future[list[Any]]] = {}
        self._number = 0
        #: the batches of the last mini-batch that were not given yet
        self._left: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def seek(self, number: int, upcoming: tuple[int, ...] = ()) -> None:
        """Go to a mini-batch, and start loading it and the `upcoming` ones."""
        self._number, self._left = number, []
        wanted = (number, *upcoming)
        for other in self._loading.keys() - set(wanted):
            self._loading.pop(other).cancel()
        for each in wanted:
            if each not in self._loading:
                self._loading[each] = self._loader.submit(self._batches.load, each)

    def __next__(self) -> Any:
        if not self._left:
            number = self._number
            if number not in self._loading:
                self.seek(number, (number + 1, number + 2))
            self._number += 1
            self._left = self._loading.pop(number).result()
        return self._left.pop(0)

    def close(self) -> None:
        """End the thread, and the processes that it reads from."""
        self._loader.shutdown(cancel_futures=True)
        if isinstance(self._batches, StreamBatches):
            self._batches.close()


class _Requests:
    """The batches that the processes of a loader are still to load, as lists of indices. Empty is not the end."""

    def __init__(self) -> None:
        self.waiting: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if not self.waiting:
            raise StopIteration
        return self.waiting.popleft()


class _Failed:
    """Stands for a batch that could not be loaded."""

    def __init__(self, why: str) -> None:
        self.why = why


class _Fetcher:
    """Loads batches in another process, which need not know the user's classes: they are pickled by value."""

    def __init__(self, task: Task, data: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._task, self._data, self._collate = task, data, collate

    def __getitems__(self, indices: list[int]) -> Any:
        try:
            return fetch(self._data, self._collate, indices)
        except Exception as error:  # the user's code may raise anything
            return _Failed(describe_error(self._task, error))

    def __getstate__(self) -> bytes:
        return bytes(cloudpickle.dumps((self._task, self._data, self._collate)))

    def __setstate__(self, state: bytes) -> None:
        self._task, self._data, self._collate = cloudpickle.loads(state)


def _unchanged(batch: Any) -> Any:
    return batch


class ProcessLoaded:
    """Mini-batches that the worker processes of a DataLoader load while others are being computed with.

    The DataLoader is asked for mini-batches by number, in the order in which they will be wanted. If the run changes
    its mind about some that are under way, these are dropped when they come.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._requests = _Requests()
        #: mini-batches that were asked for and have not come yet, in order
        self._asked: deque[int] = deque()
        #: those that have come and are wanted
        self._ready: dict[int, list[Any]] = {}
        self._wanted: tuple[int, ...] = (0,)
        self._left: list[Any] = []
        task, own = batches.task, batches.loader
        self._loader: DataLoader[Any] | None = DataLoader(
            _Fetcher(task, batches.data, batches.collate),  # type: ignore[arg-type]
            batch_sampler=self._requests,
            collate_fn=_unchanged,
            num_workers=task.num_workers,
            prefetch_factor=task.prefetch,
            persistent_workers=True,
            generator=torch.Generator().manual_seed(torch.initial_seed()),
            timeout=own.timeout if own is not None else 0,
            worker_init_fn=own.worker_init_fn if own is not None else None,
            multiprocessing_context=own.multiprocessing_context if own is not None else None,
        )
        self._incoming: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self

    def seek(self, number: int, upcoming: tuple[int, ...] = ()) -> None:
        """Go to a mini-batch, and ask for it and the `upcoming` ones."""
        self._wanted, self._left = (number, *upcoming), []
        self._ready = {ready: batches for ready, batches in self._ready.items() if ready in self._wanted}
        for each in self._wanted:
            if each not in self._asked and each not in self._ready:
                self._asked.append(each)
                self._requests.waiting.extend(self._batches.indices(each))

    def __next__(self) -> Any:
        if not self._left:
            number = self._wanted[0]
            if number not in self._ready and number not in self._asked:
                self.seek(number, (number + 1, number + 2))
            while number not in self._ready:
                came = self._asked.popleft()
                batches = [self._receive() for _ in range(self._batches.task.accumulate)]
                if came in self._wanted:
                    self._ready[came] = batches
            self._left = self._ready.pop(number)
            self._wanted = self._wanted[1:] or (number + 1,)
        return self._left.pop(0)

    def _receive(self) -> Any:
        try:
            batch = next(self._incoming)
        except StopIteration:  # nothing was under way; the loader takes up the requests when it begins again
            assert self._loader is not None
            self._incoming = iter(self._loader)
            batch = next(self._incoming)
        if isinstance(batch, _Failed):
            raise TaskError(f"loading a batch failed: {batch.why}; correct the task's data")
        return batch

    def close(self) -> None:
        """End the processes."""
        self._incoming, self._loader = iter(()), None


# ---- streams --------------------------------------------------------------------------------------------------------


class StreamBatches:
    """Mini-batches of an IterableDataset: of one pass over it after another, without a gap between passes.

    Mini-batch number n has the samples from n times its size on. Every worker reads the stream from the beginning of a
    pass and drops the samples of mini-batches that are not its own, so each sample of a pass is trained on once,
    whichever workers there are. Going back begins a pass again.
    """

    def __init__(self, task: Task, data: Any) -> None:
        self._task = task
        self._loader: DataLoader[Any] | None = data if isinstance(data, DataLoader) else None
        self._data: Any = self._loader.dataset if self._loader is not None else data
        self._collate = self._loader.collate_fn if self._loader is not None else task.collate
        #: of a pass, if the stream says so
        self._length: int | None = len(self._data) if hasattr(self._data, "__len__") else None
        self._samples: Iterator[Any] | None = None
        #: the pass that is being read, how many samples of it were read, and how many of all passes until now
        self._pass, self._in_pass, self._position = 0, 0, 0
        self._wanted = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def seek(self, number: int, upcoming: tuple[int, ...] = ()) -> None:
        """Go to a mini-batch; what lies between is read when the mini-batch is."""
        self._wanted = number * self._task.accumulate * self._task.batch_size

    def load(self, number: int) -> list[Any]:
        """All batches of a mini-batch."""
        self.seek(number)
        return [next(self) for _ in range(self._task.accumulate)]

    def __next__(self) -> Any:
        # a whole pass that is not wanted need not be read, and of one that is, the end shows whether it is complete
        if self._wanted < self._position or (self._length and self._wanted >= (self._pass + 2) * self._length):
            first = self._wanted // self._length if self._length else 0
            self._samples, self._pass, self._in_pass = None, first, 0
            self._position = first * (self._length or 0)
        self._read(self._wanted - self._position, keep=False)
        batch = self._read(self._task.batch_size, keep=True)
        self._wanted = self._position
        return self._collate(batch)

    def _read(self, count: int, *, keep: bool) -> list[Any]:
        """The next samples, from the next pass too; without `keep` they are dropped."""
        found: list[Any] = []
        while count:
            if self._samples is None:
                self._samples, self._in_pass = self._begin_pass(), 0
            piece = islice(self._samples, count)
            read = 0
            for read, sample in enumerate(piece, 1):  # noqa: B007 (it counts)
                if keep:
                    found.append(sample)
            self._in_pass += read
            self._position += read
            if read < count or (self._length is not None and self._in_pass > self._length):
                self._end_pass()
            count -= read
        return found

    def _begin_pass(self) -> Iterator[Any]:
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(self._pass)
        if self._loader is None or not self._loader.num_workers:
            return iter(self._data)
        chunks = DataLoader(
            self._data,
            batch_size=self._task.batch_size,
            collate_fn=_unchanged,
            num_workers=self._loader.num_workers,
            prefetch_factor=self._loader.prefetch_factor,
            generator=torch.Generator().manual_seed(self._pass),
            worker_init_fn=self._loader.worker_init_fn,
            timeout=self._loader.timeout,
            multiprocessing_context=self._loader.multiprocessing_context,
        )
        return (sample for chunk in chunks for sample in chunk)

    def _end_pass(self) -> None:
        name = type(self._data).__name__
        if not self._in_pass:
            raise TaskError(f"{name}, which train_data() returned, gave no samples in pass {self._pass}")
        if self._length is not None and self._in_pass != self._length:
            hint = ""
            if self._loader is not None and self._loader.num_workers > 1:
                hint = "; with several num_workers it must share its samples out by torch.utils.data.get_worker_info()"
            more = "at least " if self._in_pass > self._length else ""
            raise TaskError(
                f"{name}, which train_data() returned, has a length of {self._length} and gave {more}{self._in_pass} "
                f"samples in pass {self._pass}: correct __len__() or __iter__(){hint}"
            )
        self._samples = None
        self._pass += 1

    def close(self) -> None:
        """End the processes that read the stream."""
        self._samples = None
