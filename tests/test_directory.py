"""A run directory always holds a checkpoint that can be read, exactly as it was saved."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tether import Averaging, Server, Sim, Single
from tether.api import resume, run
from tether.errors import UsageError, WireError
from tether.execution.checkpoint import Evaluated, Restored
from tether.execution.configuration import VERSION
from tether.execution.directory import CHECKPOINTS_KEPT, RunDirectory
from tether.execution.progress import make_progress
from tether.learner.data import Batches
from tether.learner.learner import Learner
from tether.task import Length
from tether.testing.conformance import Blobs, largest_difference, train_quietly


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "a run")


def config(status: str, **more: Any) -> dict[str, Any]:
    """The least that run.json holds."""
    names = {"task": {"name": "blobs"}, "protocol": {"name": "single"}, "runtime": {"name": "sim"}}
    return {"version": VERSION, "status": status, "workers": 1, **names, **more}


def save(directory: RunDirectory, step: int) -> Path:
    return directory.save_checkpoint(step, 10 * step, torch.full((3,), float(step)), {"tau": step}, {})


def newest(directory: RunDirectory) -> Restored:
    restored = directory.load_checkpoint()
    assert restored is not None
    return restored


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_what_was_saved_comes_back(directory: RunDirectory) -> None:
    weights = torch.randn(1000)
    state = {"tau": 4, "waits": [0.1, None], "pair": (1, "two"), "by step": {3: torch.arange(2)}}
    directory.save_checkpoint(7, 70, weights, state, {"momentum": torch.ones(2, dtype=torch.float64)})
    restored = newest(directory)
    assert (restored.step, restored.samples) == (7, 70)
    assert torch.equal(restored.weights, weights)
    assert torch.equal(restored.state.pop("by step")[3], torch.arange(2))
    assert restored.state == {"tau": 4, "waits": [0.1, None], "pair": (1, "two")}
    assert restored.replica_state["momentum"].dtype == torch.float64


def test_a_run_without_checkpoints_has_none(directory: RunDirectory) -> None:
    assert directory.load_checkpoint() is None


def test_the_newest_two_are_kept_and_the_newest_is_read(directory: RunDirectory) -> None:
    saved = [save(directory, step) for step in (5, 50, 500, 5000)]
    assert sorted((directory.path / "checkpoints").iterdir()) == saved[-CHECKPOINTS_KEPT:]
    assert CHECKPOINTS_KEPT == 2
    assert newest(directory).step == 5000


def test_saving_a_step_again_replaces_it(directory: RunDirectory) -> None:
    save(directory, 3)
    directory.save_checkpoint(3, 31, torch.zeros(3), {}, {})
    assert newest(directory).samples == 31


def test_a_partial_checkpoint_is_ignored_and_does_no_harm(directory: RunDirectory) -> None:
    complete = save(directory, 3)
    for name in (".partial-1-9", f"{complete.name}9.tmp", "notes"):
        shutil.copytree(complete, complete.parent / name)
    assert newest(directory).step == 3
    save(directory, 4)
    assert newest(directory).step == 4


class Killed(BaseException):
    """The process ends here."""


def killed_at(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function; the process is killed at the given call of it."""
    calls = itertools.count(1)

    def wrapped(*arguments: Any) -> Any:
        if next(calls) == call:
            raise Killed
        return function(*arguments)

    return wrapped


@pytest.mark.parametrize(("owner", "name", "calls"), [(os, "fsync", 5), (Path, "rename", 1)])
def test_whenever_the_process_is_killed_a_complete_checkpoint_is_there(
    owner: Any, name: str, calls: int, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, 3)
    for call in range(1, calls + 1):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(owner, name, killed_at(getattr(owner, name), call))
            save(directory, 4)
        restored = newest(directory)
        assert restored.step in (3, 4)
        assert torch.equal(restored.weights, torch.full((3,), float(restored.step)))
        assert restored.state == {"tau": restored.step}
    save(directory, 4)
    assert newest(directory).step == 4


def damage_truncated_tensors(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def damage_empty_tensors(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def damage_missing_tensors(path: Path) -> None:
    (path / "model.safetensors").unlink()


def damage_truncated_state(path: Path) -> None:
    file = path / "state.json"
    file.write_bytes(file.read_bytes()[:20])


def damage_missing_state(path: Path) -> None:
    (path / "state.json").unlink()


def damage_incomplete_state(path: Path) -> None:
    (path / "state.json").write_text('{"step": 9}')


def damage_other_state(path: Path) -> None:
    (path / "state.json").write_text("null")


def damage_state_of_other_tensors(path: Path) -> None:
    tree = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**tree, "state": {"$": "tensor", "at": 99}}))


DAMAGES = [
    damage_truncated_tensors,
    damage_empty_tensors,
    damage_missing_tensors,
    damage_truncated_state,
    damage_missing_state,
    damage_incomplete_state,
    damage_other_state,
    damage_state_of_other_tensors,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(damage: Any, directory: RunDirectory) -> None:
    before = save(directory, 3)
    damage(save(directory, 9))
    assert newest(directory).step == 3
    damage(before)
    assert directory.load_checkpoint() is None


def test_a_state_that_cannot_be_saved_leaves_the_checkpoints_as_they_are(directory: RunDirectory) -> None:
    save(directory, 3)
    with pytest.raises(WireError, match="a set cannot be saved"):
        directory.save_checkpoint(4, 40, torch.zeros(3), {"seen": {1, 2}}, {})
    assert newest(directory).step == 3


class Groups(Blobs):
    """Adam over two groups, with a schedule."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.children()
        rest = [p for other in others for p in other.parameters()]
        groups = [{"params": list(first.parameters()), "lr": 0.02, "betas": (0.8, 0.9)}, {"params": rest}]
        return torch.optim.Adam(groups, lr=0.01, amsgrad=True)

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Length) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)


def make_learner() -> Learner:
    task = Groups(batch_size=8)
    return Learner(task, Batches(task, task.train_data(), seed=0), node="worker-0", seed=0)


def advance(learner: Learner, steps: range) -> None:
    for step in steps:
        learner.seek(step, (), step)
        learner.compute("dense", fresh=False)
        learner.step(None, rate=1.0)


def test_an_optimizer_continues_exactly_where_its_checkpoint_left_it(directory: RunDirectory) -> None:
    original = make_learner()
    advance(original, range(3))
    directory.save_checkpoint(3, 24, original.weights, {}, original.state())
    restored = newest(directory)
    further = make_learner()
    further.weights.copy_(restored.weights)
    further.restore(restored.replica_state)
    advance(original, range(3, 8))
    advance(further, range(3, 8))
    assert torch.equal(original.weights, further.weights)
    ours, theirs = further.optimizer.param_groups, original.optimizer.param_groups
    assert [group["lr"] for group in ours] == [group["lr"] for group in theirs] == pytest.approx([2e-5, 1e-5])
    assert ours[0]["betas"] == (0.8, 0.9)


# ---- resuming -------------------------------------------------------------------------------------------------------


def test_a_single_worker_that_was_resumed_equals_one_that_never_stopped(tmp_path: Path) -> None:
    sim, task = Sim(workers=1), Blobs(norm=False)
    train_quietly(task, Single(), sim, tmp_path / "halves", steps=10)
    resumed = resume(tmp_path / "halves", task, steps=25, progress=make_progress(quiet=True))
    whole = train_quietly(task, Single(), sim, tmp_path / "whole", steps=25)
    assert largest_difference(resumed.model, whole.model) == 0.0
    assert resumed.figures["samples"] == whole.figures["samples"] == 25 * 16


def test_hardsync_that_was_resumed_equals_hardsync_that_never_stopped(tmp_path: Path) -> None:
    sim, task = Sim(workers=3), Blobs(norm=False)
    train_quietly(task, Server(), sim, tmp_path / "halves", steps=10)
    resumed = resume(tmp_path / "halves", task, steps=20, progress=make_progress(quiet=True))
    whole = train_quietly(task, Server(), sim, tmp_path / "whole", steps=20)
    assert largest_difference(resumed.model, whole.model) == 0.0


def test_a_run_resumed_with_more_workers_keeps_its_newest_checkpoint(tmp_path: Path) -> None:
    """A resumed run keeps the size of its steps, so that their count continues."""
    run = tmp_path / "run"
    first = train_quietly(Blobs(), Averaging(tau=4), Sim(workers=2), run, epochs=2, checkpoint_seconds=1.0)
    resumed = resume(run, Blobs(), workers=4, epochs=3, progress=make_progress(quiet=True))
    assert (first.figures["steps"], resumed.figures["steps"]) == (63, 94)
    assert newest(RunDirectory.open(run)).samples == resumed.figures["samples"]


def test_a_finished_run_without_a_further_goal_is_not_resumed(tmp_path: Path) -> None:
    train_quietly(Blobs(), Averaging(tau=2), Sim(workers=2), tmp_path / "run", steps=4)
    with pytest.raises(UsageError, match="the run has made its 4 steps"):
        resume(tmp_path / "run", Blobs(), progress=make_progress(quiet=True))


def test_a_goal_that_is_passed_already_is_refused_with_both_numbers(tmp_path: Path) -> None:
    train_quietly(Blobs(), Averaging(tau=2), Sim(workers=2), tmp_path / "run", steps=20)
    with pytest.raises(UsageError, match=r"^20 steps are made already, more than the 10 asked for: give more epochs"):
        resume(tmp_path / "run", Blobs(), steps=10, progress=make_progress(quiet=True))


@pytest.mark.parametrize("length", [{"epochs": 500}, {"steps": 8000}, {}], ids=str)
def test_a_resume_with_only_a_time_or_a_target_keeps_the_length_of_the_run(
    length: dict[str, Any], tmp_path: Path
) -> None:
    class Long(Blobs):
        epochs = 500

    begun = {"stop": lambda: "that is enough", "trace": False, "run_dir": tmp_path / "run"}
    run(Long(), Single(), Sim(1), progress=make_progress(quiet=True), **begun, **length)
    for goal in ({"seconds": 1.0}, {"until": "error<2"}, {"patience": 1}):
        resume(tmp_path / "run", Long(), progress=make_progress(quiet=True), **goal)  # type: ignore[arg-type]
        kept = RunDirectory.open(tmp_path / "run").read_config()["request"]
        assert {name: kept[name] for name in ("epochs", "steps") if kept[name]} == (length or {"epochs": 500})


# ---- the directory itself -------------------------------------------------------------------------------------------


def test_a_directory_that_holds_a_run_is_refused(directory: RunDirectory) -> None:
    directory.write_config(config("finished"))
    with pytest.raises(UsageError, match=r"holds a run already.*'tether resume "):
        RunDirectory.create(directory.path, "another")
    assert directory.read_config() == config("finished")


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_run_that_ended_without_a_checkpoint_gives_way_to_a_new_one(directory: RunDirectory, status: str) -> None:
    directory.write_config(config(status))
    directory.metrics.write_text('{"kind": "note", "text": "of the old run"}\n')
    (directory.path / "logs").mkdir()
    (directory.path / "checkpoints" / ".partial-1-1").mkdir(parents=True)
    (directory.path / "mine.txt").write_text("not of a run")
    taken = RunDirectory.create(directory.path, "another")
    assert {path.name for path in directory.path.iterdir()} == {"mine.txt", "lock"}
    assert taken.notes == [f"{directory.path} held a run that ended without a checkpoint: its files were removed"]


def test_a_run_gives_way_only_if_nothing_of_it_is_lost_and_nobody_runs_it(directory: RunDirectory) -> None:
    directory.write_config(config("running"))
    with directory.lock(), pytest.raises(UsageError, match=r"is in use by process \d+"):
        RunDirectory.create(directory.path, "another")
    directory.write_config(config("interrupted", checkpoints="hdfs://elsewhere"))
    with pytest.raises(UsageError, match="holds a run already"):
        RunDirectory.create(directory.path, "another")
    directory.write_config(config("interrupted"))
    save(directory, 3)
    with pytest.raises(UsageError, match="holds a run already"):
        RunDirectory.create(directory.path, "another")
    assert newest(directory).step == 3


def test_a_run_that_failed_at_once_is_not_resumed_but_started_again_in_its_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"

    class Failing(Blobs):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            raise ValueError("a fault of the user")

    with pytest.raises(UsageError, match="a fault of the user"):
        train_quietly(Failing(), Averaging(), Sim(2), run, steps=4)
    expected = rf"no checkpoint to continue from: start the run again, with --run {run} \(run_dir\)"
    with pytest.raises(UsageError, match=expected):
        resume(run, Blobs(), progress=make_progress(quiet=True))
    assert train_quietly(Blobs(), Averaging(), Sim(2), run, steps=4).figures["steps"] == 4


def test_unnamed_runs_get_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {RunDirectory.create(None, "digits-server").path for _ in range(3)}
    assert len(paths) == 3
    assert all(path.parent == Path("runs") and path.name.startswith("digits-server-") for path in paths)


def test_the_error_names_the_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot make the run directory .*file/run"):
        RunDirectory.create(tmp_path / "file" / "run", "a run")


def test_only_a_run_can_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run directory: it has no run\.json"):
        RunDirectory.open(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match=r"run\.json is damaged"):
        RunDirectory.open(tmp_path).read_config()


def test_a_configuration_is_replaced_as_a_whole(directory: RunDirectory) -> None:
    directory.write_config(config("running", many=list(range(1000))))
    directory.write_config(config("finished"))
    assert directory.read_config() == config("finished")
    assert [path.name for path in directory.path.iterdir()] == ["run.json"]


def test_a_kill_while_the_same_place_is_saved_again_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path / "run", "a run")
    save(directory, 3)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", killed_at(Path.rename, 1))
        save(directory, 3)
    assert newest(directory).step == 3


# ---- checkpoints elsewhere ------------------------------------------------------------------------------------------


class Folder:
    """A storage that is another folder, and remembers what it was asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"folder://{path}"
        self.asked: list[str] = []

    def put(self, made: Path, name: str) -> None:
        self.asked.append(f"put {name}")
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if made.is_dir():
            shutil.copytree(made, target)
        else:
            shutil.copyfile(made, target)

    def get(self, name: str, to: Path) -> None:
        self.asked.append(f"get {name}")
        if (self.path / name).is_dir():
            shutil.copytree(self.path / name, to)
        else:
            shutil.copyfile(self.path / name, to)

    def names(self, folder: str = "") -> list[str]:
        return [path.name for path in (self.path / folder).iterdir()] if (self.path / folder).exists() else []

    def remove(self, name: str) -> None:
        shutil.rmtree(self.path / name)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "elsewhere")


def test_checkpoints_go_to_the_storage_and_come_back_on_a_machine_that_knows_only_it(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = RunDirectory.create(tmp_path / "run", "a run", folder)
    here.write_config(config("running"))
    for step in range(1, 5):
        save(here, step)
    here.save_best(Evaluated(3, 30, {"error": 0.5}, torch.ones(3)))
    assert len(folder.names("checkpoints")) == CHECKPOINTS_KEPT, "the older ones are removed"
    assert not list((tmp_path / "run" / "checkpoints").iterdir()), "the run directory keeps none"
    shutil.rmtree(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    there = RunDirectory.fetch(folder)
    assert there.path.parent.name == "runs" and there.read_config() == config("running")
    assert newest(there).step == 4 and torch.equal(newest(there).weights, torch.full((3,), 4.0))
    best = there.load_best()
    assert best is not None and best.step == 3 and torch.equal(best.weights, torch.ones(3))
    save(there, 5)
    assert newest(there).step == 5


def test_a_damaged_newest_checkpoint_in_a_storage_falls_back_to_the_one_before(folder: Folder, tmp_path: Path) -> None:
    here = RunDirectory.create(tmp_path / "run", "a run", folder)
    for step in (1, 2):
        save(here, step)
    last = sorted((folder.path / "checkpoints").iterdir())[-1]
    (last / "model.safetensors").unlink()
    assert newest(here).step == 1


def test_damage_in_a_storage_is_noticed_and_reported(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = RunDirectory.create(tmp_path / "run", "a run", folder)
    here.write_config(config("running"))
    for step in (1, 2):
        save(here, step)
    last = sorted((folder.path / "checkpoints").iterdir())[-1]
    data = bytearray((last / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (last / "model.safetensors").write_bytes(data)
    (folder.path / "run.json").write_bytes(b"{")
    monkeypatch.chdir(tmp_path)
    there = RunDirectory.fetch(folder)
    assert there.read_config() == config("running")
    assert "run.json is damaged" in there.notes[0] and last.name in there.notes[0]
    restored = newest(there)
    assert restored.step == 1 and "model.safetensors" in restored.notes[0]
    (folder.path / "run.json").unlink()
    assert RunDirectory.fetch(folder).read_config() == config("running")


class Full(Folder):
    """Nothing can be copied to it."""

    def put(self, made: Path, name: str) -> None:
        raise OSError("quota exceeded")


def test_a_storage_that_accepts_nothing_leaves_nothing_behind_here(tmp_path: Path) -> None:
    here = RunDirectory.create(tmp_path / "run", "a run", Full(tmp_path / "elsewhere"))
    with pytest.raises(OSError, match="quota exceeded"):
        save(here, 1)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(UsageError, match=r"the run directory .* cannot be used: quota exceeded"):
        here.begin(config("running"))


def test_a_new_run_needs_a_storage_without_a_run_and_a_resumed_one_needs_a_storage_with_one(
    folder: Folder, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"folder://.*elsewhere holds no run"):
        RunDirectory.fetch(folder)
    RunDirectory.create(tmp_path / "run", "a run", folder).write_config({})
    with pytest.raises(UsageError, match=r"holds a run already.*tether resume folder://"):
        RunDirectory.create(tmp_path / "another", "a run", folder)


def test_processes_of_a_run_are_not_given_its_storage(folder: Folder, tmp_path: Path) -> None:
    here = RunDirectory.create(tmp_path / "run", "a run", folder)
    assert pickle.loads(pickle.dumps(here)).storage is None and here.storage is folder
