"""A worker's own part of the data, in memory or on the local disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tether.errors import RunError, UsageError
from tether.learner.data import Batches
from tether.runtimes.spark.store import Field, MappedDataset, Store
from tether.task import Task

FIELDS = (Field("features", "float32", (8,)), Field("label", "int64"))


def chunk(first: int, count: int) -> list[Any]:
    label = np.arange(first, first + count)
    return [np.repeat(label[:, None], 8, axis=1).astype(np.float32), label]


def filled(**options: Any) -> Store:
    store = Store(FIELDS, **options)
    for first in range(0, 1000, 100):
        store.add(chunk(first, 100))
    return store


def test_what_fits_the_budget_is_kept_in_memory_as_tensors() -> None:
    store = filled()
    assert (store.rows, store.bytes, store.spilled) == (1000, 40_000, False)
    data = store.dataset()
    assert Batches(Task(), data, seed=0).in_memory
    assert torch.equal(data.tensors[1], torch.arange(1000))
    assert torch.equal(data.tensors[0], torch.arange(1000.0)[:, None].expand(-1, 8))


def test_what_does_not_fit_is_read_from_a_file_without_a_name(tmp_path: Path) -> None:
    told = []
    store = filled(memory_mb=0.01, directory=str(tmp_path), progress=lambda *so_far: told.append(so_far))
    assert store.spilled and told[-1] == (1000, 40_000)
    data = store.dataset()
    assert isinstance(data, MappedDataset) and list(tmp_path.iterdir()) == []
    assert f"{tmp_path}" in Path("/proc/self/maps").read_text()
    assert len(data) == 1000 and data[7][1] == 7
    spilled = next(Batches(Task(), data, seed=3))
    kept = next(Batches(Task(), filled().dataset(), seed=3))
    assert all(torch.equal(a, b) for a, b in zip(spilled, kept, strict=True))


def test_files_are_closed_when_the_data_is_let_go(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    filled(memory_mb=0.01, directory=str(tmp_path)).close()
    data = filled(memory_mb=0.01, directory=str(tmp_path)).dataset()
    del data
    assert len(os.listdir("/proc/self/fd")) == before
    assert f"{tmp_path}" not in Path("/proc/self/maps").read_text()


def test_rows_of_another_shape_or_type_are_refused() -> None:
    store = Store(FIELDS)
    with pytest.raises(UsageError, match="rows of 'features' are float32 of shape \\(7,\\), not float32 of shape"):
        store.add([np.zeros((2, 7), np.float32), np.zeros(2, np.int64)])
    with pytest.raises(UsageError, match="rows of 'label' are float64"):
        store.add([np.zeros((2, 8), np.float32), np.zeros(2)])


def test_a_disk_that_cannot_take_the_data_is_named(tmp_path: Path) -> None:
    store = Store(FIELDS, memory_mb=1e-6, directory=str(tmp_path / "missing"))
    with pytest.raises(RunError, match="missing"):
        store.add(chunk(0, 10))


def test_no_rows_are_a_dataset_of_length_zero() -> None:
    data = Store(FIELDS).dataset()
    assert type(data) is TensorDataset and len(data) == 0
