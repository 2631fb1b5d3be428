"""Kinds of training data: an epoch has each sample once, whatever the data is and however many workers there are."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tether import Averaging, Local, Server, Sim, Single, Task, TaskError, resume, run
from tether.execution.progress import make_progress
from tether.learner.data import Batches, Prefetched, ProcessLoaded, StreamBatches, open_batches
from tether.protocols import Options
from tether.runtimes.base import Runtime
from tether.task import adopt_loader
from tether.testing.conformance import Assassin, train_quietly

QUIET = make_progress(quiet=True)
SAMPLES = 120


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Numbers in another order in every pass; the processes of a loader share them out."""

    def __init__(self, length: int | None = SAMPLES) -> None:
        self.epoch = 0
        if length is not None:
            self.__class__ = SizedStream
        self.length = length or SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(SAMPLES).tolist()
        info = get_worker_info()
        return iter(order if info is None else order[info.id :: info.num_workers])


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class Seen(Task):
    """Writes the samples of every batch that it is given to a file of its worker."""

    batch_size = 4

    def __init__(self, directory: Path, data: Any, **attributes: Any) -> None:
        self.directory, self.data = directory, data
        for name, value in attributes.items():
            setattr(self, name, value)

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        return self.data

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        with (self.directory / f"{self.rank} of {self.world_size}.txt").open("a") as file:
            file.write(" ".join(map(str, batch.tolist())) + "\n")
        outputs: Tensor = model(batch[:, None].float() / SAMPLES)
        return outputs.square().mean()


def lines(directory: Path) -> list[list[int]]:
    """The batches that were trained on, worker by worker."""
    files = sorted(directory.glob("*.txt"))
    return [[int(word) for word in line.split()] for file in files for line in file.read_text().splitlines()]


def seen(directory: Path) -> Counter[int]:
    return Counter(sample for batch in lines(directory) for sample in batch)


def loader(workers: int = 2, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers, **options)


KINDS: dict[str, Any] = {
    "map-style": Numbers,
    "a stream": Stream,
    "a stream without a length": lambda: Stream(None),
    "a loader of a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a loader": lambda: loader(0),
    "a loader of two workers": loader,
}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_each_sample_once_and_so_have_the_next_after_a_resume(
    kind: str, workers: int, tmp_path: Path
) -> None:
    task = Seen(tmp_path, KINDS[kind](), epoch_samples=SAMPLES)
    protocol: Options = Averaging(tau=3) if workers > 1 else Single()
    result = train_quietly(task, protocol, Sim(workers=workers), tmp_path / "run", epochs=1)
    assert seen(tmp_path) == Counter(range(SAMPLES)) and result.figures["samples"] == SAMPLES
    assert len(list(tmp_path.glob("*.txt"))) == workers, "every worker had its share"
    other = {1: 1, 2: 3, 4: 2}[workers]
    resumed = resume(tmp_path / "run", task, workers=other, epochs=2.5, progress=QUIET)
    counts = seen(tmp_path)
    assert resumed.figures["samples"] == 2.5 * SAMPLES and sorted(counts) == list(range(SAMPLES))
    assert sorted(counts.values()) == [2] * (SAMPLES // 2) + [3] * (SAMPLES // 2)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("kind", ["a stream", "a loader of two workers"])
def test_the_same_holds_in_processes(kind: str, workers: int, tmp_path: Path) -> None:
    task = Seen(tmp_path, KINDS[kind]())
    protocol: Options = Averaging(tau=3) if workers > 1 else Single()
    train_quietly(task, protocol, Local(workers=workers), tmp_path / "run", epochs=1)
    assert seen(tmp_path) == Counter(range(SAMPLES))
    if workers == 2:
        resume(tmp_path / "run", task, epochs=2, progress=QUIET)
        assert seen(tmp_path) == Counter([*range(SAMPLES), *range(SAMPLES)])


def test_samples_of_a_worker_that_dies_are_loaded_by_others(tmp_path: Path) -> None:
    class Slow(Seen):
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            time.sleep(0.02)
            return super().loss(model, batch)

    task = Slow(tmp_path, loader(1))
    killer = Assassin(["worker-1"], steps=3)
    run(task, Server(sync="async"), Local(workers=2), epochs=3, run_dir=tmp_path / "run", progress=killer)
    assert killer.killed_at
    counts = seen(tmp_path)
    assert sorted(counts) == list(range(SAMPLES)) and min(counts.values()) >= 3
    assert sum(counts.values()) <= 3 * SAMPLES + 16, "more than what was under way was made again"


# ---- loaders --------------------------------------------------------------------------------------------------------


def adopted(given: DataLoader[Any], **attributes: Any) -> Seen:
    task = Seen(Path(), given, **attributes)
    adopt_loader(task, given)
    return task


def epoch(batches: Any, count: int, first: int = 0) -> list[list[int]]:
    found = []
    for number in range(first, first + count):
        batches.seek(number, (number + 1, number + 2))
        found.append(next(batches).tolist())
    return found


def test_a_loader_decides_batch_size_collate_and_number_of_processes() -> None:
    given: DataLoader[int] = DataLoader(
        Numbers(), batch_size=6, collate_fn=lambda samples: -torch.tensor(samples), num_workers=1, prefetch_factor=3
    )
    task = adopted(given)
    assert (task.batch_size, task.num_workers, task.prefetch) == (6, 1, 3)
    assert epoch(Batches(task, given, seed=0), 2) == [[0, -1, -2, -3, -4, -5], [-6, -7, -8, -9, -10, -11]]


def test_samplers_decide_the_order_and_the_same_one_in_every_process() -> None:
    class Odd:
        """Draws from all generators."""

        def __len__(self) -> int:
            return SAMPLES // 2

        def __iter__(self) -> Iterator[int]:
            order = list(range(1, SAMPLES, 2))
            random.shuffle(order)
            np.random.shuffle(order)
            return iter([order[i] for i in torch.randperm(len(order)).tolist()])

    weighted = WeightedRandomSampler([1.0] * 10 + [0.0] * (SAMPLES - 10), 40, generator=torch.Generator())
    subset = SubsetRandomSampler(range(20))
    sequential = SequentialSampler(Numbers())
    for sampler, samples, allowed in (
        (weighted, 40, range(10)),
        (subset, 20, range(20)),
        (Odd(), 60, range(1, SAMPLES, 2)),
        (sequential, SAMPLES, range(SAMPLES)),
    ):
        orders = []
        for _ in range(2):
            torch.rand(3), random.random(), np.random.rand()  # another process has drawn other numbers
            given: DataLoader[int] = DataLoader(Numbers(), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
            found = epoch(Batches(adopted(given), given, seed=1), 2 * samples // 4)
            orders.append([sample for batch in found for sample in batch])
        assert orders[0] == orders[1] and set(orders[0]) <= set(allowed)
        first, second = orders[0][:samples], orders[0][samples:]
        if sampler is not weighted:
            assert sorted(first) == sorted(second) == list(allowed)
        assert (first == second) == (sampler is sequential)


def test_samples_that_fill_no_batch_are_dropped_only_if_the_loader_says_so() -> None:
    for drop_last, count in ((True, 119), (False, 120)):
        given: DataLoader[int] = DataLoader(Numbers(), batch_size=7, shuffle=True, drop_last=drop_last)
        task = adopted(given)
        found = epoch(Batches(task, given, seed=0), 17 if drop_last else 120)
        assert Counter(len(batch) for batch in found) == {7: len(found)}
        first = [sample for batch in found for sample in batch][:count]
        assert len(set(first)) == count


def test_processes_load_what_is_wanted_in_any_order_and_say_what_failed() -> None:
    class Faulty(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 77:
                raise ValueError("no such sample")
            return index

    given: DataLoader[int] = DataLoader(Faulty(), batch_size=4, num_workers=2)
    task = adopted(given, accumulate=2)
    batches = open_batches(task, given, seed=0)
    assert isinstance(batches, ProcessLoaded)
    try:
        for number, upcoming in ((0, (1, 2, 3)), (1, (2, 8)), (8, (2, 3)), (2, ()), (14, (0,)), (0, (1,)), (1, ())):
            batches.seek(number, upcoming)
            got = [next(batches).tolist() for _ in range(2)]
            assert got == [list(range(8 * number, 8 * number + 4)), list(range(8 * number + 4, 8 * number + 8))]
        batches.seek(9)
        with pytest.raises(TaskError, match=r"loading a batch failed: ValueError: no such sample \(.*test_data\.py:"):
            next(batches), next(batches)
    finally:
        batches.close()


def test_a_task_may_have_processes_for_a_plain_dataset_too() -> None:
    task = Seen(Path(), Numbers(), num_workers=1)
    batches, plain = open_batches(task, Numbers(), seed=5), Batches(task, Numbers(), seed=5)
    try:
        assert isinstance(batches, ProcessLoaded) and epoch(batches, 40) == epoch(plain, 40)
    finally:
        batches.close()
    assert isinstance(open_batches(Seen(Path(), Numbers()), Numbers(), seed=5), Prefetched)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: DataLoader(Numbers(), batch_size=None), "has no batch size"),
        (lambda: DataLoader(Numbers(), batch_sampler=[[0, 1], [2]]), "has no batch size"),
        (lambda: DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), 2, 0)), "has a DistributedSampler"),
        (lambda: DataLoader(Stream(), batch_size=4, drop_last=True), "has drop_last=True and an IterableDataset"),
    ],
)
def test_a_loader_that_cannot_be_followed_is_refused(make: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=complaint):
        train_quietly(Seen(tmp_path, make()), Single(), Sim(workers=1), tmp_path / "run", epochs=1)


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_is_shuffled_anew_in_every_pass_and_can_be_read_again_from_any_place() -> None:
    task = Seen(Path(), Stream(), batch_size=7)
    stream = StreamBatches(task, Stream())
    forward = epoch(stream, 40)
    passes = [sample for batch in forward for sample in batch]
    assert sorted(passes[:SAMPLES]) == sorted(passes[SAMPLES : 2 * SAMPLES]) == list(range(SAMPLES))
    assert passes[:SAMPLES] != passes[SAMPLES : 2 * SAMPLES]
    for number in (39, 3, 20, 20, 0, 17):
        assert epoch(stream, 1, first=number) == [forward[number]]


def test_the_processes_of_a_loader_share_a_stream() -> None:
    given: DataLoader[int] = DataLoader(Stream(), batch_size=4, num_workers=2)
    stream = StreamBatches(adopted(given), given)
    found = epoch(stream, SAMPLES // 4)
    stream.close()
    assert sorted(sample for batch in found for sample in batch) == list(range(SAMPLES))


def test_a_stream_that_is_not_as_long_as_it_says_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"SizedStream, .* has a length of 100 and gave at least 10\d samples in pass 0"
    ):
        train_quietly(Seen(tmp_path, Stream(100)), Single(), Sim(workers=1), tmp_path / "run", epochs=2)

    with pytest.raises(TaskError, match=r"has a length of 200 and gave 120 samples in pass 0"):
        train_quietly(Seen(tmp_path, Stream(200)), Single(), Sim(workers=1), tmp_path / "short", epochs=2)

    class Empty(Stream):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(TaskError, match=r"Empty, which .* gave no samples in pass 0"):
        train_quietly(Seen(tmp_path, Empty(None), epoch_samples=8), Single(), Sim(1), tmp_path / "other", epochs=2)


def test_an_endless_stream_has_epochs_as_long_as_the_task_says(tmp_path: Path) -> None:
    class Endless(Stream):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10**9))

    task = Seen(tmp_path, Endless(None), epoch_samples=40)
    result = train_quietly(task, Averaging(tau=2), Sim(workers=2), tmp_path / "run", epochs=3)
    assert sorted(seen(tmp_path)) == list(range(120)) and result.figures["samples"] == 120


def runtimes(workers: int) -> list[Runtime]:
    return [Sim(workers=workers), Local(workers=workers)]


@pytest.mark.parametrize("on", runtimes(2), ids=lambda on: on.name)
def test_a_task_knows_its_rank_and_the_number_of_workers(on: Runtime, tmp_path: Path) -> None:
    train_quietly(Seen(tmp_path, Numbers()), Averaging(tau=2), on, tmp_path / "run", epochs=1)
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == ["0 of 2.txt", "1 of 2.txt"]
