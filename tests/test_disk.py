"""On a full or read-only disk a run loses what it would have written, and nothing else."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tether import Averaging, Local, Result, Server, Sim, Single, UsageError, resume, run
from tether.errors import RunError, TaskError
from tether.execution.directory import RunDirectory
from tether.execution.progress import Progress, make_progress
from tether.testing.conformance import Blobs

QUIET = make_progress(quiet=True)


class Disk:
    """A file system of its own, of half a megabyte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.filler = path / "filler"

    def fill(self) -> None:
        """Write until nothing more fits."""
        with self.filler.open("ab", buffering=0) as file:
            for size in (65536, 4096, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        self.filler.unlink(missing_ok=True)

    def remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.path)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield Disk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


class At(Progress):
    """Does something once, when a worker has made a number of steps, and keeps the notes."""

    def __init__(self, steps: int, do: Callable[[], None], later: tuple[int, Callable[[], None]] | None = None) -> None:
        self.due = [(steps, do), *([later] if later else [])]
        self.notes: list[str] = []

    def meter(self, meter: Any, time: float) -> None:
        while self.due and meter.steps >= self.due[0][0]:
            self.due.pop(0)[1]()

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(disk: Disk, progress: Progress, steps: int = 200, **options: Any) -> Result:
    settings = {"checkpoint_seconds": 0.2, "evaluate_every": 0.2, **options}
    return run(Blobs(), Single(), Sim(1), steps=steps, run_dir=disk.path / "run", progress=progress, **settings)


def broken(run: Path) -> list[str]:
    return [path.name for path in run.rglob("*") if "partial" in path.name]


def test_a_disk_that_fills_up_during_a_run_costs_no_step(disk: Disk) -> None:
    progress = At(60, disk.fill)
    # a checkpoint that was being written then is removed: again and again, so that the room it leaves is filled too
    progress.due += [(steps, disk.fill) for steps in range(70, 200, 10)]
    result = train(disk, progress)
    assert result.figures["steps"] == 200 and result.metrics["error"] < 0.2
    for what in ("metrics.jsonl", "checkpoint", "trace.json", "run.json"):
        notes = [note for note in progress.notes if what in note and "No space left on device" in note]
        assert len(notes) == 1, f"{what}: {progress.notes}"
    assert len(progress.notes) < 10
    assert {"the last checkpoint", "trace.json", "run.json"} <= set(result.figures["unsaved"])
    assert not broken(disk.path / "run")


def test_what_could_not_be_written_is_written_when_there_is_room_again(disk: Disk) -> None:
    progress = At(60, disk.fill, later=(150, disk.free))
    result = train(disk, progress)
    assert result.figures["unsaved"] == []
    restored = RunDirectory.open(disk.path / "run").load_checkpoint()
    assert restored is not None and restored.step == 200
    rows = [json.loads(line) for line in (disk.path / "run" / "metrics.jsonl").read_bytes().splitlines()]
    evaluated = [row["step"] for row in rows if row["kind"] == "evaluation"]
    assert evaluated == [row["step"] for row in result.history], "no row is lost or cut"
    assert json.loads((disk.path / "run" / "run.json").read_bytes())["status"] == "finished"


def test_a_disk_that_becomes_read_only_costs_no_step_and_what_is_there_can_be_resumed(disk: Disk) -> None:
    progress = At(100, lambda: disk.remount("ro"))
    result = train(disk, progress, steps=200)
    assert result.figures["steps"] == 200 and result.figures["unsaved"]
    assert sum("checkpoint" in note and "Read-only file system" in note for note in progress.notes) == 1
    with pytest.raises(UsageError, match="cannot be used: Read-only file system") as error:
        resume(disk.path / "run", Blobs(), steps=300, progress=QUIET)
    assert "\n" not in str(error.value)
    disk.remount("rw")
    assert resume(disk.path / "run", Blobs(), steps=300, progress=QUIET).figures["steps"] == 300


def test_a_directory_that_cannot_be_used_at_all_is_an_error_before_training(disk: Disk) -> None:
    class Untouched(Blobs):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            raise AssertionError("trained")

    disk.fill()
    for path in (disk.path, disk.path / "run"):
        with pytest.raises(UsageError, match="No space left on device") as error:
            run(Untouched(), Single(), Sim(1), steps=3, run_dir=path, progress=QUIET)
        assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_run_with_patience_returns_its_best_model_even_if_it_could_not_be_written(disk: Disk) -> None:
    class Worse(Blobs):
        """Its third evaluation is the best."""

        seen = 0

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            Worse.seen += 1
            if Worse.seen == 2:
                disk.fill()
            return {"error": abs(Worse.seen - 4) / 10}

    progress = At(0, list)
    result = run(
        Worse(),
        Single(),
        Sim(1),
        patience=3,
        evaluate_every=0.2,
        run_dir=disk.path / "run",
        progress=progress,
    )
    assert result.metrics["error"] == 0.0 and result.figures["model_step"] < result.figures["steps"]
    assert sum("best.safetensors cannot be written" in note for note in progress.notes) == 1


def test_the_model_of_a_warm_up_is_not_lost_on_a_full_disk(disk: Disk) -> None:
    """Its last checkpoint cannot be written, and the next phase still begins with it."""
    progress = At(60, disk.fill)
    result = train(disk, progress, steps=200, warmup=Single(), warmup_epochs=2.0, checkpoint_seconds=1e9)
    assert RunDirectory.open(disk.path / "run").load_checkpoint() is None
    assert result.figures["steps"] == 200 and result.history[0]["step"] > 100, "the first phase made the others"


@pytest.mark.parametrize("protocol", [Averaging(tau=5), Server(sync="async")], ids=lambda p: p.name)
def test_processes_train_to_their_end_on_a_full_disk(disk: Disk, protocol: Any) -> None:
    progress = At(20, disk.fill)
    result = run(
        Blobs(), protocol, Local(2), steps=400, checkpoint_seconds=0.1, run_dir=disk.path / "run", progress=progress
    )
    assert result.figures["steps"] == 400 and result.figures["unsaved"]
    assert any("checkpoint" in note and "No space left on device" in note for note in progress.notes)


class Talking(Blobs):
    """Its workers print, and one of them fails in the end."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        print("still computing", flush=True)
        if self.fails and self.calls == 300:
            raise ValueError("a bad row")
        return super().loss(model, batch)


@pytest.mark.parametrize("fails", [False, True])
def test_what_workers_print_on_a_full_disk_is_lost_but_not_their_errors(disk: Disk, fails: bool) -> None:
    progress = At(20, disk.fill)
    goal: dict[str, Any] = {"steps": 400, "run_dir": disk.path / "run", "progress": progress}
    if fails:
        with pytest.raises(TaskError, match=r"worker-\d, .*a bad row"):
            run(Talking(fails), Averaging(tau=5), Local(2), **goal)
    else:
        assert run(Talking(fails), Averaging(tau=5), Local(2), **goal).figures["steps"] == 400
        assert not any("go on" in note for note in progress.notes)


def test_a_limit_on_the_size_of_files_is_like_a_full_disk(tmp_path: Path) -> None:
    """For users who may not mount a file system: this limit needs no privilege."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    progress = At(60, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1])))
    try:
        result = run(
            Blobs(), Single(), Sim(1), steps=200, checkpoint_seconds=0.2, run_dir=tmp_path / "run", progress=progress
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert result.figures["steps"] == 200 and result.figures["unsaved"]
    assert any("checkpoint" in note and os.strerror(27) in note for note in progress.notes)
    assert not broken(tmp_path / "run")
    assert resume(tmp_path / "run", Blobs(), steps=300, progress=QUIET).figures["steps"] == 300


def test_processes_that_cannot_have_a_log_run_without_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("this is a file")
    result = run(Blobs(), Averaging(tau=5), Local(1), steps=10, run_dir=tmp_path / "run", progress=QUIET)
    assert result.figures["steps"] == 10 and result.figures["unsaved"] == []


def test_a_record_that_cannot_be_written_ends_the_run_with_a_reason(disk: Disk) -> None:
    """A record with holes is useless, since it cannot be replayed."""
    with pytest.raises(RunError, match=r"record/.*\.events cannot be written: No space left on device") as error:
        train(disk, At(0, list), steps=20_000, record=True)
    assert "\n" not in str(error.value)
