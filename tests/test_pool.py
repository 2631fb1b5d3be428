"""Threads that change one vector without a lock, as the exchanger does: what may be lost, and what may not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tether.core.effects import Add
from tether.runtimes.interpreter import change_weights
from tether.runtimes.process.pool import Pool

THREADS = 8
LENGTH = 1 << 18
#: elements that an addition has read and not yet made visible, in registers and the store buffer, generously
IN_FLIGHT = 1024


class Centre:
    """As much of a replica as `change` needs."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights


@pytest.fixture(autouse=True)
def one_thread_per_addition() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pool(threads: int = THREADS) -> tuple[Pool, list[Exception]]:
    failures: list[Exception] = []
    return Pool(threads, threading.Lock(), failures.append), failures


def test_lost_updates_are_as_rare_as_hogwild_predicts() -> None:
    """Two additions lose one only where they meet: a share of (P - 1) k / d for P threads, k of d elements at once."""
    centre: Any = Centre(torch.zeros(LENGTH))
    exchanger, failures = pool()
    updates = 2000
    ones = torch.ones(LENGTH)
    for _ in range(updates):
        exchanger.submit(partial(change_weights, centre, Add(ones, unordered=True)), bool)
    exchanger.drain()
    assert not failures
    assert float(centre.weights.max()) <= updates, "an update was counted twice"
    lost = 1 - float(centre.weights.double().mean()) / updates
    assert 0 <= lost <= (THREADS - 1) * IN_FLIGHT / LENGTH


def test_stale_reads_slow_the_centre_by_no_more_than_the_threads_that_read() -> None:
    """An exchange that reads while P - 1 others are under way still moves the centre: as P serial ones at the least.

    All threads read before any of them adds: the stalest that P exchanges at a time can be, on any machine.
    """
    alpha, exchanges = 0.9 / THREADS, 400
    centre: Any = Centre(torch.zeros(LENGTH))
    worker = torch.ones(LENGTH)
    exchanger, failures = pool()
    all_have_read, all_have_added = threading.Barrier(THREADS), threading.Barrier(THREADS)

    def exchange() -> bool:
        read = centre.weights.clone()
        all_have_read.wait(60)
        changed = change_weights(centre, Add(worker - read, alpha, unordered=True))
        all_have_added.wait(60)
        return changed

    for _ in range(exchanges):
        exchanger.submit(exchange, bool)
    exchanger.drain()
    assert not failures
    left = 1 - centre.weights
    assert float(left.min()) >= -1e-5, "the centre went beyond all workers"
    assert float(left.max()) <= (1 - alpha) ** (exchanges / THREADS) + 1e-5


def test_settling_waits_for_all_work_but_not_for_what_follows_under_the_lock() -> None:
    lock = threading.Lock()
    exchanger = Pool(2, lock, lambda error: None)
    gate, done, followed = threading.Event(), [], threading.Event()
    with lock:
        exchanger.submit(lambda: done.append(gate.wait(5)), lambda _: followed.set())
        threading.Timer(0.05, gate.set).start()
        exchanger.drain()
        assert done == [True] and not followed.is_set()
    assert followed.wait(5)


def test_failing_work_is_told_and_does_not_hang() -> None:
    exchanger, failures = pool(1)
    exchanger.submit(lambda: 1 // 0, print)
    exchanger.drain()
    exchanger.submit(lambda: None, lambda _: None)
    exchanger.drain()
    assert [type(failure) for failure in failures] == [ZeroDivisionError]


def test_more_work_than_threads_waits() -> None:
    exchanger, _ = pool(2)
    running, most, lock = [0], [0], threading.Lock()

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        threading.Event().wait(0.01)
        with lock:
            running[0] -= 1

    for _ in range(10):
        exchanger.submit(work, lambda _: None)
    exchanger.drain()
    assert most == [2]
