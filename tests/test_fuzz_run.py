"""Every file of a run, damaged in thousands of ways: intact files are used, damaged ones are refused with a reason.

`python tests/test_fuzz_run.py 20000` tries 20,000 inputs for each decoder; names after the number choose decoders.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mutate import mutations
from tether import Averaging, Sim
from tether.analysis.report import table
from tether.analysis.runs import load_run
from tether.errors import RunError, UsageError
from tether.execution.checkpoint import Evaluated, Restored
from tether.execution.configuration import VERSION
from tether.execution.directory import RunDirectory
from tether.runtimes.record import _entries
from tether.testing.conformance import Blobs, train_quietly

COUNT = 400
#: the time that decoding one input may take on a busy machine, and the memory that all of them may add
SECONDS_MAX, MEMORY_MAX = 10.0, 200 << 20

#: may damage one file in place, and returns a word for the result
Try = Callable[[random.Random], str]


def same(found: Restored | None, original: Restored) -> bool:
    """Whether a checkpoint was restored exactly, apart from its notes."""
    return found is not None and json.dumps(plain(found)) == json.dumps(plain(original))


def plain(value: Any) -> Any:
    match value:
        case Tensor():
            return [str(value.dtype), value.tolist()]
        case Restored():
            return {name: plain(item) for name, item in vars(value).items() if name != "notes"}
        case dict():
            return [[key, plain(item)] for key, item in value.items()]
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def make(path: Path) -> RunDirectory:
    directory = RunDirectory.create(path, "a run")
    names = {"task": {"name": "blobs"}, "protocol": {"name": "single"}, "runtime": {"name": "sim"}}
    directory.write_config({"version": VERSION, "status": "running", "workers": 1, "seed": 5, "request": {}, **names})
    for step in (3, 9):
        state = {"tau": step, "pair": (1, "two"), "by step": {step: torch.arange(2)}}
        workers = {i: {"optimizer": {0: torch.full((3,), float(step))}, "random": torch.zeros(40)} for i in range(2)}
        weights = torch.full((1500,), float(step))
        directory.save_checkpoint(step, 10 * step, weights, state, {"rate": 0.1}, "single", workers, {30: {"e": 0.5}})
    return directory


def checkpoints(path: Path) -> Try:
    """With a damaged newest checkpoint, exactly that checkpoint or exactly the one before is restored."""
    directory = make(path)
    older, newest = directory._names()
    folder = path / "checkpoints" / newest
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    others = [file.read_bytes() for file in (path / "checkpoints" / older).iterdir()] + list(files.values())
    whole = RunDirectory(path).load_checkpoint()
    assert whole is not None and whole.step == 9
    (folder / "state.json").unlink()
    before = RunDirectory(path).load_checkpoint()
    assert before is not None and before.step == 3
    (folder / "state.json").write_bytes(files["state.json"])

    def attempt(rng: random.Random) -> str:
        name = rng.choice(list(files))
        (folder / name).write_bytes(rng.choice(others) if rng.random() < 0.1 else mutations(files[name], rng))
        found = RunDirectory(path).load_checkpoint()
        (folder / name).write_bytes(files[name])
        if same(found, whole):
            assert found is not None and found.notes == ()
            return "harmless"
        assert same(found, before), f"{name}: {found}"
        assert found is not None and len(found.notes) == 1 and newest in found.notes[0]
        return "fell back"

    return attempt


def old_checkpoints(path: Path) -> Try:
    """Without hashes some damage cannot be noticed, but nothing crashes."""
    make(path)
    for sums in path.rglob("SHA256SUMS"):
        sums.unlink()
    for file in path.rglob("state.json"):
        tree = json.loads(file.read_bytes())
        file.write_text(json.dumps({name: value for name, value in tree.items() if name not in ("version", "run")}))
    files = [file for file in sorted(path.rglob("at-*/*")) if "000090" in str(file)]
    originals = {file: file.read_bytes() for file in files}

    def attempt(rng: random.Random) -> str:
        file = rng.choice(files)
        file.write_bytes(mutations(originals[file], rng))
        try:
            found = RunDirectory(path).load_checkpoint()
        except UsageError as error:
            assert "has version" in str(error)
            return "refused"
        finally:
            file.write_bytes(originals[file])
        assert found is not None, "the older one is whole"
        return "fell back" if found.step == 3 and found.notes else "taken"

    return attempt


def best_models(path: Path) -> Try:
    directory = RunDirectory.create(path, "a run")
    directory.save_best(Evaluated(3, 30, {"error": 0.5}, torch.arange(500.0)))
    file = path / "best.safetensors"
    original = file.read_bytes()

    def attempt(rng: random.Random) -> str:
        file.write_bytes(mutations(original, rng))
        reader = RunDirectory(path)
        found = reader.load_best()
        if found is None:
            assert "best.safetensors is damaged" in reader.notes[0]
            return "refused"
        assert torch.equal(found.weights, torch.arange(500.0)) and found.metrics == {"error": 0.5}
        return "harmless"

    return attempt


def configurations(path: Path) -> Try:
    original = make(path).read_config()
    data = (path / "run.json").read_bytes()

    def attempt(rng: random.Random) -> str:
        (path / "run.json").write_bytes(mutations(data, rng))
        reader = RunDirectory(path)
        assert reader.read_config() == original
        return "fell back" if reader.notes else "harmless"

    return attempt


def metrics(path: Path) -> Try:
    """Also through a report, which reads more of the rows than a resume."""
    train_quietly(Blobs(), Averaging(tau=2), Sim(2), path, steps=12, evaluate_every=0.05)
    directory = RunDirectory.open(path)
    restored = directory.load_checkpoint()
    assert restored is not None
    directory.write_config({**directory.read_config(), "result": None})
    original = directory.metrics.read_bytes()
    rows = len(directory.history().rows)

    def attempt(rng: random.Random) -> str:
        directory.metrics.write_bytes(mutations(original, rng))
        history = directory.history()
        history.evaluations(restored)
        assert history.last_time <= 1e18 and all(
            isinstance(value, int | float) for value in (history.untrained or {}).values()
        )
        record = load_run(path)
        assert record.figures["seconds"] >= 0 and record.workers.keys() <= record.nodes.keys()
        if rng.random() < 0.05:  # this takes longer than all the rest
            table([record])
        return "left out" if len(history.rows) < rows else "taken"

    return attempt


def records(path: Path) -> Try:
    train_quietly(Blobs(), Averaging(tau=2), Sim(2), path, steps=3, record=True)
    file = path / "record" / "hub.events"
    original = file.read_bytes()

    def attempt(rng: random.Random) -> str:
        file.write_bytes(mutations(original, rng))
        try:
            list(_entries(file, Averaging().messages))
        except RunError as error:
            assert "is damaged" in str(error)
            return "refused"
        return "taken"

    return attempt


DECODERS = [checkpoints, old_checkpoints, best_models, configurations, metrics, records]


def fuzz(decoder: Callable[[Path], Try], folder: Path, count: int) -> Counter[str]:
    """How often each result occurred."""
    attempt = decoder(folder / "run")
    found: Counter[str] = Counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(count):
        begun = time.thread_time()
        try:
            found[attempt(random.Random(seed))] += 1
        except BaseException as error:
            error.add_note(f"{decoder.__name__}: seed {seed}")
            raise
        assert time.thread_time() - begun < SECONDS_MAX, f"seed {seed}"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < MEMORY_MAX
    return found


@pytest.fixture
def quiet_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.__name__)
def test_damaged_files_give_intact_data_or_a_clear_error(decoder: Callable[[Path], Try], quiet_disk: Path) -> None:
    found = fuzz(decoder, quiet_disk, COUNT)
    assert found.total() == COUNT and found.keys() & {"fell back", "refused", "left out"}, found


if __name__ == "__main__":
    for each in [each for each in DECODERS if each.__name__ in sys.argv[2:] or not sys.argv[2:]]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            print(each.__name__, dict(fuzz(each, Path(place), int(sys.argv[1]))), flush=True)
