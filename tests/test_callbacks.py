"""Callbacks are called where and when they say, and loggers write what their readers read."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tether import (
    Averaging,
    Callback,
    CsvLogger,
    Local,
    Sim,
    Single,
    StepInfo,
    TaskError,
    TensorBoardLogger,
    UsageError,
    WandbLogger,
    resume,
)
from tether.cli.app import app
from tether.execution.progress import make_progress
from tether.runtimes.base import Runtime
from tether.testing.conformance import Blobs, train_quietly

QUIET = make_progress(quiet=True)


class Listener(Callback):
    """Keeps what it is told; steps go to a file of each worker, since workers have copies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.told: list[tuple[Any, ...]] = []

    def on_begin(self, directory: Path) -> None:
        self.told.append(("begin", directory))

    def on_step(self, step: StepInfo) -> None:
        with (self.directory / f"{step.rank} of {step.world_size}").open("a") as file:
            file.write(f"{step.step} {step.samples} {step.loss}\n")

    def on_progress(self, figures: dict[str, Any]) -> None:
        self.told.append(("progress", figures["node"], figures["steps"]))

    def on_evaluation(self, step: int, samples: int, metrics: dict[str, float]) -> None:
        self.told.append(("evaluation", step, samples, metrics))

    def on_checkpoint(self, step: int, samples: int, path: str) -> None:
        assert (Path(path) / "model.safetensors").exists()
        self.told.append(("checkpoint", step, samples))

    def on_end(self, result: Any) -> None:
        self.told.append(("end", result))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [told[1:] for told in self.told if told[0] == kind]


@pytest.mark.parametrize("on", [Sim(workers=2), Local(workers=2)], ids=lambda on: on.name)
def test_callbacks_are_told_of_every_step_evaluation_checkpoint_and_the_end(on: Runtime, tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    result = train_quietly(
        Blobs(), Averaging(tau=5), on, tmp_path / "run", steps=62, evaluate_every=0.5, callbacks=[listener]
    )
    assert listener.of("begin") == [(tmp_path / "run",)] and listener.of("end") == [(result,)]
    evaluations = [(row["step"], row["samples"], row["metrics"]) for row in result.history]
    assert listener.of("evaluation") == evaluations and len(evaluations) > 2
    assert listener.of("checkpoint")[-1] == (62, 62 * 2 * 16)
    assert {node for node, _ in listener.of("progress")} >= {"worker-0", "worker-1"}
    for name in ("0 of 2", "1 of 2"):
        steps = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        assert [int(step) for step, _, _ in steps] == list(range(1, 63))
        assert {int(samples) for _, samples, _ in steps} == {16} and all(float(loss) > 0 for _, _, loss in steps)


def test_a_run_is_the_same_with_callbacks_and_without(tmp_path: Path) -> None:
    digests = [
        train_quietly(Blobs(), Averaging(tau=5), Sim(2), tmp_path / str(number), steps=20, callbacks=given)
        for number, given in enumerate(([], [Listener(tmp_path), CsvLogger()]))
    ]
    assert digests[0].figures["digest"] == digests[1].figures["digest"]


@pytest.mark.parametrize("method", ["on_begin", "on_step", "on_progress", "on_evaluation", "on_checkpoint", "on_end"])
@pytest.mark.parametrize("on", [Sim(workers=1)], ids=lambda on: on.name)
def test_an_error_in_a_callback_ends_the_run_and_names_the_method(method: str, on: Runtime, tmp_path: Path) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("not today")

    broken = type("Broken", (Callback,), {method: fail})()
    with pytest.raises(TaskError, match=rf"{method}\(\) of Broken failed: ValueError: not today \(.*test_callbacks"):
        train_quietly(Blobs(), Single(), on, tmp_path, steps=70, callbacks=[broken])


def test_what_is_no_callback_or_cannot_travel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not <class .*CsvLogger'>: write CsvLogger\(\)"):
        train_quietly(Blobs(), Single(), Sim(1), tmp_path, steps=1, callbacks=[CsvLogger])
    listener = Listener(tmp_path)
    listener.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TaskError, match="attribute 'lock' of callback Listener cannot be copied"):
        train_quietly(Blobs(), Single(), Local(1), tmp_path, steps=1, callbacks=[listener])


# ---- loggers --------------------------------------------------------------------------------------------------------


def test_the_csv_has_a_row_for_every_evaluation_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = train_quietly(Blobs(), Single(), Sim(1), run, epochs=2, callbacks=[CsvLogger()])
    second = resume(run, Blobs(), epochs=4, progress=QUIET, callbacks=[CsvLogger()])
    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    expected = [*first.history, *second.history]
    assert [int(row["samples"]) for row in rows] == [row["samples"] for row in expected] and len(rows) >= 4
    assert [float(row["error"]) for row in rows] == [row["metrics"]["error"] for row in expected]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = train_quietly(
        Blobs(), Averaging(tau=5), Sim(2), tmp_path / "run", epochs=3, callbacks=[TensorBoardLogger()]
    )
    events = loading.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    points = events.Scalars("joint model/error")
    assert [point.step for point in points] == [row["step"] for row in result.history] and len(points) == 3
    assert [point.value for point in points] == pytest.approx([row["metrics"]["error"] for row in result.history])
    assert events.Scalars("loss/worker-1")[-1].step == result.figures["steps"]


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_keeps_an_offline_run_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_quietly(Blobs(), Single(), Sim(1), tmp_path / "run", epochs=2, callbacks=[WandbLogger()])
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"error" in kept.read_bytes()


def test_the_command_line_names_loggers(tmp_path: Path) -> None:
    arguments = ["train", "digits", "--on", "sim", "--epochs", "1", "-n", "1", "--run", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(app, [*arguments, "--log", "csv"])
    assert done.exit_code == 0 and json.loads(done.stdout)["steps"]
    assert (tmp_path / "run" / "metrics.csv").read_text().startswith("step,samples,error,loss\n")
    refused = CliRunner().invoke(app, [*arguments, "--log", "tensorbord"])
    assert isinstance(refused.exception, UsageError) and "Did you mean 'tensorboard'" in str(refused.exception)
