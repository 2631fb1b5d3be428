"""However many workers read the data, together they read what one would have read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from tether.errors import TaskError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.data import Batches, Prefetched
from tether.learner.learner import build_model
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Averaging
from tether.runtimes.sim.runtime import Sim
from tether.task import Task, check_task
from tether.testing.conformance import Blobs


class Numbers(Task):
    """Batches are lists of sample numbers."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def collate(self, samples: list[Any]) -> Any:
        return samples

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(())


def read(length: int, batch_size: int, steps: int, **place: int) -> list[list[int]]:
    """The first mini-batches of one worker, as sample numbers."""
    return list(islice(Batches(Numbers(batch_size), range(length), **{"seed": 0, **place}), steps))


def joined(parts: Any) -> list[int]:
    return [number for part in parts for number in part]


# ---- sharing --------------------------------------------------------------------------------------------------------


@given(
    workers=st.integers(1, 6),
    batch_size=st.integers(1, 7),
    length=st.integers(1, 60),
    seed=st.integers(0, 3),
)
def test_k_workers_with_batches_of_m_see_in_each_step_what_one_with_k_times_m_sees(
    workers: int, batch_size: int, length: int, seed: int
) -> None:
    steps = 2 + 2 * length // (workers * batch_size)
    together = [read(length, batch_size, steps, index=index, count=workers, seed=seed) for index in range(workers)]
    alone = read(length, workers * batch_size, steps, seed=seed)
    assert [joined(parts) for parts in zip(*together, strict=True)] == alone


@given(batch_size=st.integers(1, 9), length=st.integers(1, 40))
def test_each_epoch_is_a_permutation_of_the_data(batch_size: int, length: int) -> None:
    sequence = joined(read(length, batch_size, -(-3 * length // batch_size)))
    for epoch in range(3):
        assert sorted(sequence[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_epochs_and_seeds_have_different_orders() -> None:
    first, second = read(100, 100, 2)
    (other,) = read(100, 100, 1, seed=1)
    assert first != second and first != other
    assert read(100, 100, 2) == [first, second]


def test_reading_on_after_so_many_samples_gives_what_comes_next() -> None:
    assert read(50, 5, 4, index=7) == read(50, 5, 11)[7:]


# ---- kinds of data --------------------------------------------------------------------------------------------------

POINTS = torch.arange(40.0).reshape(20, 2)
LABELS = torch.arange(20)


class MapStyle(Dataset[tuple[Tensor, Tensor]]):
    """The least a dataset can be."""

    def __len__(self) -> int:
        return len(POINTS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return POINTS[index], LABELS[index]


class AtOnce(MapStyle):
    """Fetches a whole mini-batch at a time."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("one by one although __getitems__ is there")

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [MapStyle.__getitem__(self, index) for index in indices]


class Doubling(Task):
    """A collate of its own must be used for tensors too."""

    def collate(self, samples: list[Any]) -> Any:
        points, labels = super().collate(samples)
        return [2 * points, labels]


@pytest.mark.parametrize("data", [MapStyle(), AtOnce(), TensorDataset(POINTS, LABELS)], ids=lambda d: type(d).__name__)
@pytest.mark.parametrize(("task", "factor"), [(Task(), 1), (Doubling(), 2)], ids=["plain", "own collate"])
def test_every_kind_of_dataset_gives_the_same_batches(data: Any, task: Task, factor: int) -> None:
    task.batch_size = 6
    numbers = read(20, 6, 5)
    for (points, labels), expected in zip(Batches(task, data, seed=0), numbers, strict=False):
        assert torch.equal(points, factor * POINTS[expected]) and labels.tolist() == expected


# ---- what is refused ------------------------------------------------------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_data_without_a_length_is_refused() -> None:
    with pytest.raises(
        TaskError, match="task Numbers returned Endless, an IterableDataset without a length: set epoch"
    ):
        check_task(Numbers(1), Endless(), workers=1)
    for data in (iter([1, 2, 3]), {1, 2, 3}):
        with pytest.raises(TaskError, match=f"task Numbers returned {type(data).__name__}.* map-style Dataset"):
            check_task(Numbers(1), data, workers=1)


def test_fewer_samples_than_workers_are_refused() -> None:
    with pytest.raises(TaskError, match=r"3 training samples for 4 workers.* at most 3 workers"):
        check_task(Numbers(1), range(3), workers=4)
    assert check_task(Numbers(1), range(4), workers=4) == 4


def test_no_samples_at_all_are_refused_as_such() -> None:
    with pytest.raises(TaskError, match=r"^train_data\(\) of task Numbers returned no samples: "):
        check_task(Numbers(1), range(0), workers=4)


def test_a_mini_batch_larger_than_the_data_is_refused_with_the_numbers() -> None:
    with pytest.raises(TaskError, match=r"mini-batches of 11 samples, .* 10 training samples.* at most 10"):
        check_task(Numbers(11), range(10), workers=1)
    assert check_task(Numbers(10), range(10), workers=4) == 10, "a step of all workers may be more than an epoch"


def test_a_mini_batch_larger_than_the_part_of_the_data_that_a_worker_is_brought_is_refused() -> None:
    task = Numbers(5)
    task.source = "rows from elsewhere"
    with pytest.raises(TaskError, match=r"mini-batches of 5 samples, .* 4 training samples.* at most 4"):
        check_task(task, range(14), workers=3)
    assert check_task(task, range(15), workers=3) == 15
    plan = RunPlan.make(Blobs(), Averaging(), Sim(2), Request(steps=1), None)
    plan.bring(TensorDataset(POINTS[:15], LABELS[:15]))
    with pytest.raises(TaskError, match=r"task Blobs has mini-batches of 16 samples, and a worker has 15"):
        plan.build(plan.nodes[1])


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(TaskError, match="batch_size of task Numbers is 0"):
        check_task(Numbers(0), range(3), workers=1)


@pytest.mark.parametrize("method", ["model", "train_data", "loss"])
def test_a_missing_method_is_named(method: str) -> None:
    arguments = (nn.Identity(), []) if method == "loss" else ()
    with pytest.raises(TaskError, match=rf"task Task lacks the method {method}\(\)"):
        getattr(Task(), method)(*arguments)


def test_a_missing_loss_is_noticed_before_anything_runs() -> None:
    with pytest.raises(TaskError, match=r"lacks the method loss\(\)"):
        check_task(Task(), range(3), workers=1)


def test_every_replica_starts_equal_and_the_global_random_state_is_left_alone() -> None:
    class Linear(Task):
        def model(self) -> nn.Module:
            return nn.Linear(4, 4)

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    models = [build_model(Linear(), seed=1), build_model(Linear(), seed=1), build_model(Linear(), seed=2)]
    assert torch.equal(torch.rand(3), expected)
    weights = [model.weight for model in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_synthetic_task_starts_at_an_error_of_one() -> None:
    task = SyntheticTask(parameters=9)
    assert task.evaluate(task.model()) == {"error": 1.0}
    assert check_task(task, task.train_data(), workers=10) == 10_000


class Counting(Dataset[int]):
    """Numbers; the last one cannot be read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise OSError("a bad sector")
        return index


def test_prefetched_batches_are_the_same_in_the_same_order_and_errors_come_where_they_would_have() -> None:
    task = Task()
    task.batch_size = 1

    def read(batches: Iterator[Any]) -> list[Any]:
        found: list[Any] = []
        try:
            for batch in batches:
                found.append(batch.tolist())
        except OSError as error:
            found.append(str(error))
        return found

    plain = read(Batches(task, Counting(), seed=3))
    assert plain[-1] == "a bad sector"
    assert read(Prefetched(Batches(task, Counting(), seed=3))) == plain


def test_the_prefetching_thread_ends_with_its_stream() -> None:
    task = Task()
    before = set(threading.enumerate())  # may hold threads of other tests, which end at any time
    stream = Prefetched(Batches(task, list(range(100)), seed=0))
    next(stream)
    (thread,) = set(threading.enumerate()) - before
    assert thread.name.startswith("loader")
    del stream
    thread.join(5)
    assert not thread.is_alive()
