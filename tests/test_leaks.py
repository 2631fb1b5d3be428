"""A process may execute any number of runs: after many it holds no more than after the first."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
from torch import nn

from tether import Averaging, Elastic, Local, Server
from tether.protocols import Options
from tether.testing.conformance import Blobs, train_quietly

pytestmark = [
    pytest.mark.skipif(not Path("/proc").exists(), reason="looks at this process in /proc"),
]


class Large(Blobs):
    """A model of 1.3 MB: its tensors are lent in shared memory, and a leak of them shows soon."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64_000), nn.ReLU(), nn.Linear(64_000, 2))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"parameters": float(sum(parameter.numel() for parameter in model.parameters()))}


def descriptors() -> list[str]:
    """The kinds of files that this process has open, without those that only wait for garbage collection."""
    gc.collect()
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry).partition(":")[0])
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return sorted(found)


def memory_bytes() -> tuple[int, int]:
    """The mapped and the resident memory of this process."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * os.sysconf("SC_PAGESIZE"), int(pages[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("runs", [4, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [Averaging(tau=2), Server(sync="async"), Server(sync="async", apply="inline"), Elastic(tau=2)],
    ids=["averaging", "async", "inline", "elastic"],
)
def test_runs_in_one_process_leave_no_descriptor_no_thread_and_no_memory(
    options: Options, runs: int, tmp_path: Path
) -> None:
    goal = {"steps": 5, "evaluate_every": 1e9, "trace": False}
    train_quietly(Large(), options, Local(1), tmp_path / "first", **goal)
    opened, threads, (mapped, resident) = descriptors(), threading.active_count(), memory_bytes()
    for number in range(runs):
        train_quietly(Large(), options, Local(1), tmp_path / str(number), **goal)
    assert not Counter(descriptors()) - Counter(opened) and threading.active_count() <= threads
    mapped_now, resident_now = memory_bytes()
    # one more arena of the allocator is not a leak
    assert mapped_now - mapped < 160e6 and resident_now - resident < 80e6
