"""Whatever happens to the files of a run, it resumes from what is undamaged, or is refused with a reason."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tether import Sim, Single, UsageError, resume
from tether.analysis.report import table
from tether.analysis.runs import load_run
from tether.execution.checkpoint import Evaluated
from tether.execution.directory import RunDirectory
from tether.execution.progress import Progress, make_progress
from tether.testing.conformance import Blobs, train_quietly

QUIET = make_progress(quiet=True)


class Listener(Progress):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps, with checkpoints of its end and of some step before."""
    path = tmp_path_factory.mktemp("finished") / "run"
    train_quietly(Blobs(), Single(), Sim(1), path, steps=10)
    resume(path, Blobs(), steps=20, progress=QUIET)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("at-*"))


def zero_page(file: Path) -> None:
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    file.write_bytes(data)


def change_samples(file: Path) -> None:
    tree = json.loads(file.read_bytes())
    file.write_text(json.dumps({**tree, "samples": tree["samples"] ^ 64}))


def change_types(file: Path) -> None:
    tree = json.loads(file.read_bytes())
    file.write_text(json.dumps({**tree, "step": "twenty", "samples": [tree["samples"]]}))


DAMAGES: list[tuple[str, Callable[[Path], Any]]] = [
    ("model.safetensors", zero_page),
    ("workers.safetensors", zero_page),
    ("state.json", change_samples),
    ("state.json", change_types),
    ("state.json", Path.unlink),
    ("model.safetensors", Path.unlink),
    ("SHA256SUMS", Path.unlink),
    ("SHA256SUMS", zero_page),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_checkpoint_is_not_used_and_the_run_names_the_file(
    run: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    older, newest = checkpoints(run)
    damage(newest / name)
    listener = Listener()
    resume(run, Blobs(), steps=40, progress=listener)
    notes = [note for note in listener.notes if newest.name in note]
    assert len(notes) == 1 and name in notes[0] and "is damaged" in notes[0]
    *_, resumed = (row for row in rows(run) if row["kind"] == "resumed")
    assert resumed["samples"] == int(older.name.split("-")[1])


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]


def test_files_of_two_checkpoints_that_were_swapped_are_damage(run: Path) -> None:
    older, newest = checkpoints(run)
    shutil.copyfile(older / "model.safetensors", newest / "model.safetensors")
    restored = RunDirectory.open(run).load_checkpoint()
    assert restored is not None and restored.samples == int(older.name.split("-")[1])


def test_two_checkpoints_whose_names_were_swapped_are_damage(run: Path) -> None:
    older, newest = checkpoints(run)
    shutil.rmtree(newest)
    older.rename(newest)
    assert RunDirectory.open(run).load_checkpoint() is None


def test_a_model_without_whole_states_of_workers_is_better_than_nothing(run: Path) -> None:
    for checkpoint in checkpoints(run):
        zero_page(checkpoint / "workers.safetensors")
    restored = RunDirectory.open(run).load_checkpoint()
    assert restored is not None and restored.workers == {}
    assert restored.samples == int(checkpoints(run)[-1].name.split("-")[1])
    assert any("workers.safetensors" in note for note in restored.notes)


def test_a_checkpoint_of_a_newer_version_is_refused_by_its_version(run: Path) -> None:
    newest = checkpoints(run)[-1]
    tree = json.loads((newest / "state.json").read_bytes())
    (newest / "state.json").write_text(json.dumps({**tree, "version": 99}))
    (newest / "SHA256SUMS").unlink(missing_ok=True)
    with pytest.raises(UsageError, match=r"checkpoint at-.* has version 99.*this Tether reads.*newer Tether"):
        resume(run, Blobs(), steps=40, progress=QUIET)


@pytest.mark.parametrize("version", [0, 1])
def test_a_checkpoint_of_an_older_version_is_refused_by_its_version(run: Path, version: int) -> None:
    newest = checkpoints(run)[-1]
    tree = json.loads((newest / "state.json").read_bytes())
    (newest / "state.json").write_text(json.dumps({**tree, "version": version}))
    (newest / "SHA256SUMS").unlink()
    with pytest.raises(UsageError, match=rf"has version {version}, and this Tether reads version 2: .*older Tether"):
        resume(run, Blobs(), steps=40, progress=QUIET)


def hash_again(checkpoint: Path) -> None:
    """Make the hashes those of the files as they are now."""
    files = [path for path in sorted(checkpoint.iterdir()) if path.name != "SHA256SUMS"]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (checkpoint / "SHA256SUMS").write_text("".join(lines))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "7"),
        ("step", -1),
        ("samples", None),
        ("protocol", 5),
        ("state", [1]),
        ("state", {"$": "tensor", "at": -1}),
        ("state", {"$": "dict", "items": [1, 2]}),
        ("replica_state", "none"),
        ("parameters", "all"),
        ("names", ["0.weight", 3]),
        ("evaluations", {"$": "dict", "items": [["x", 3]]}),
        ("workers_in", "../../elsewhere"),
    ],
)
def test_wrong_types_in_a_checkpoint_with_right_hashes_are_damage_and_no_crash(
    run: Path, key: str, value: Any, tmp_path: Path
) -> None:
    for checkpoint in checkpoints(run):
        tree = json.loads((checkpoint / "state.json").read_bytes())
        (checkpoint / "state.json").write_text(json.dumps({**tree, key: value}))
        hash_again(checkpoint)
    with pytest.raises(UsageError, match=r"no checkpoint to continue from.*state\.json"):
        resume(run, Blobs(), steps=40, progress=QUIET)


def test_a_damaged_checkpoint_does_not_push_a_good_one_out(run: Path) -> None:
    older, newest = checkpoints(run)
    zero_page(newest / "model.safetensors")
    directory = RunDirectory.open(run)
    restored = directory.load_checkpoint()
    assert restored is not None
    directory.save_checkpoint(restored.step, restored.samples, restored.weights, {}, {})
    kept = checkpoints(run)
    assert older in kept and newest not in kept and len(kept) == 2


def test_what_dead_writers_left_behind_is_swept_when_the_run_is_resumed(run: Path) -> None:
    shutil.copytree(checkpoints(run)[0], run / "checkpoints" / ".partial-1-9")
    (run / ".best.safetensors.partial").write_bytes(b"half")
    resume(run, Blobs(), steps=40, progress=QUIET)
    assert not list(run.rglob(".*partial*"))


# ---- the best model -------------------------------------------------------------------------------------------------


def test_a_damaged_best_model_is_reported_and_not_used(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "a run")
    directory.save_best(Evaluated(3, 30, {"error": 0.5}, torch.ones(300)))
    assert directory.load_best() is not None
    zero_page(directory.path / "best.safetensors")
    assert directory.load_best() is None
    assert any("best.safetensors is damaged" in note for note in directory.notes)


def test_a_best_model_of_an_older_version_is_reported_and_not_used(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "a run")
    metadata = {"step": "3", "samples": "30", "metrics": '{"error": 0.5}'}
    save_file({"weights": torch.ones(3)}, directory.path / "best.safetensors", metadata)
    assert directory.load_best() is None
    assert "is not of version 2" in directory.notes[0]


# ---- run.json and metrics.jsonl -------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def without_protocol(file: Path) -> None:
    config = json.loads(file.read_bytes())
    del config["protocol"]
    file.write_text(json.dumps(config))


def other_seed(file: Path) -> None:
    data = file.read_bytes()
    assert data.count(b'"seed": 0') == 2
    file.write_bytes(data.replace(b'"seed": 0', b'"seed": 4'))


def bad_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] = 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, without_protocol, other_seed, bad_byte, Path.unlink], ids=lambda d: d.__name__)
def test_a_run_whose_run_json_is_damaged_is_resumed_from_its_checkpoint(
    run: Path, damage: Callable[[Path], Any]
) -> None:
    damage(run / "run.json")
    listener = Listener()
    resumed = resume(run, Blobs(), steps=40, progress=listener)
    assert resumed.figures["steps"] == 40 and resumed.figures["protocol"] == "single"
    assert any("run.json" in note and "checkpoint" in note for note in listener.notes)
    assert RunDirectory.open(run).read_config()["seed"] == 0


def test_a_damaged_run_json_without_a_checkpoint_is_an_error_that_says_what_is_wrong(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    without_protocol(run / "run.json")
    for read in (lambda: resume(run, Blobs(), steps=40, progress=QUIET), lambda: load_run(run)):
        with pytest.raises(UsageError, match=r"run\.json is damaged"):
            read()


def test_a_new_run_does_not_mix_with_one_that_has_lost_its_run_json(run: Path) -> None:
    (run / "run.json").unlink()
    with pytest.raises(UsageError, match="holds a run already"):
        train_quietly(Blobs(), Single(), Sim(1), run, steps=20)


def test_damage_in_the_metrics_prevents_no_resume(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    bad = [
        b"\xff\xfe",
        b"[" * 100_000,
        b"3",
        b'{"kind": "evaluation", "samples": "many", "metrics": {"error": 0.1}}',
        b'{"kind": "evaluation", "samples": 20, "metrics": 7}',
        b'{"kind": "untrained"}',
        b'{"time": 1e999}',
        b'{"kind": "resumed", "samples": null}',
        b'{"kind": ["list"]}',
    ]
    (run / "metrics.jsonl").write_bytes(b"\n".join([*bad, *lines[:2], *bad, *lines[2:]]) + b"\n")
    listener = Listener()
    resumed = resume(run, Blobs(), steps=40, progress=listener)
    assert resumed.figures["steps"] == 40 and resumed.figures["seconds"] < 1e6
    assert any("18 lines of metrics.jsonl are damaged" in note for note in listener.notes)


def test_a_line_that_a_kill_cut_off_does_not_take_the_next_one_with_it(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "progress", "ti')
    resume(run, Blobs(), steps=40, progress=QUIET)
    assert any(b'"resumed"' in line and json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines())


def test_a_report_tells_of_damage_and_shows_the_rest(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n{"kind": "progress", "time": "late"}\n{"kind": "evaluation"}\n')
    bad_byte(run / "run.json")
    record = load_run(run)
    assert record.config["protocol"]["name"] == "single" and record.evaluations
    remarks = "\n".join(table([record]).remarks)
    assert "run.json is damaged" in remarks and "3 lines of metrics.jsonl are damaged" in remarks
