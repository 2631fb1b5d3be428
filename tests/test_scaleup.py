"""The scale-up benchmark: every system makes samples, and those beside Tether really train."""

from __future__ import annotations

import itertools
import math
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from tether.bench import scaleup
from tether.core.vector import Vector
from tether.errors import UsageError
from tether.learner.learner import build_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = [f"word{number}" for number in range(40)]
    lines = [f"{first} {second} and so on,{first < second}" for first, second in itertools.permutations(words[:9], 2)]
    (tmp_path / "few_train.csv").write_text("\n".join(["text,label", *lines]))
    return tmp_path


def shared_by_processes() -> set[Path]:
    """What processes of multiprocessing and of torch share."""
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(("torch_", "psm_", "sem.mp-"))}


def test_every_system_makes_samples(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = shared_by_processes()
    few = [("few_train.csv", 0.6)]
    report = scaleup.scaleup(folder, models=few, batch_sizes=[2], large_models=[], rounds=1, seconds=0.3)
    speeds = {row["what"]: row["samples_per_second"] for row in report["rows"] if row["samples_per_second"]}
    assert speeds.keys() == scaleup.SYSTEMS.keys() and all(speed > 0 for speed in speeds.values())
    steps = {row["what"]: row["GB_per_second"] for row in report["rows"] if row["GB_per_second"]}
    assert steps.keys() == {"tether server", "hub's step", "torch's fused SGD", "copy"} and all(
        rate > 0 for rate in steps.values()
    )
    ratios = report["ratios"]
    assert "tether inline over one process, 0.6 MB, mini-batch 2" in ratios
    assert "tether server over the best single process, 0.6 MB, mini-batch 2" in ratios
    assert ratios["smallest mini-batch with a speedup, hogwild, 0.6 MB"] in (2, None)
    assert all(math.isfinite(value) for name, value in ratios.items() if not name.startswith("smallest"))
    assert ratios["traffic of tether server over a copy in bandwidth, 0.6 MB, mini-batch 2"] > 0
    deadline = time.monotonic() + 60
    while shared_by_processes() - before:  # those of another test end with it
        assert time.monotonic() < deadline, "memory is left behind"
        time.sleep(0.1)
    assert "1/1: one process, 1 thread" in capfd.readouterr().err


def test_touched_rows_are_compared_with_all_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scaleup.SYSTEMS, scaleup.INLINE, lambda task, seconds: 10.0 if task.by_rows else 2.0)
    few = [("few_train.csv", 0.6)]
    report = scaleup.scaleup(folder, models=[], large_models=few, rounds=1, seconds=0.01)
    assert report["ratios"]["touched rows over all rows, 0.6 MB"] == 5


def test_a_model_is_as_large_as_told(folder: Path) -> None:
    for megabytes in (0.6, 3.0):
        for by_rows in (False, True):
            model = scaleup.Sized(folder / "few_train.csv", megabytes, by_rows=by_rows).model()
            assert sum(4 * p.numel() for p in model.parameters()) == pytest.approx(megabytes * 1e6, rel=0.001)


def test_the_parameter_server_over_pipes_learns(folder: Path) -> None:
    task = scaleup.Sized(folder / "few_train.csv", 0.6, batch_size=16)
    model = build_model(task, 0).eval()
    ours, theirs = Pipe()
    server = threading.Thread(target=scaleup._serve, args=(Vector(model), 0.1, [theirs]))
    everything = task.train_data().tensors
    before = task.loss(model, everything).item()
    step = scaleup._pipe_step(task, ours, rank=0)
    server.start()
    for _ in range(400):
        step()
    ours.send_bytes(b"")
    server.join()
    assert task.loss(model, everything).item() < before / 2


def test_one_that_fails_ends_the_others(folder: Path) -> None:
    task = scaleup.Sized(folder / "few_train.csv", 0.6)
    task.labels = task.labels[:1]  # too few answers, which the first loss finds out
    with pytest.raises(torch.multiprocessing.ProcessRaisedException):
        scaleup.SYSTEMS["hogwild"](task, 0.3)


def test_the_folder_must_be_given() -> None:
    with pytest.raises(UsageError, match="--data DIR"):
        scaleup.scaleup()
