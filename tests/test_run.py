"""What `run`, `start` and `resume` promise beyond the checks that every protocol and runtime passes."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tether import (
    Averaging,
    Elastic,
    Faults,
    Local,
    Mpca,
    RunError,
    Server,
    Sim,
    Single,
    Task,
    TaskError,
    UsageError,
    resume,
    run,
    start,
)
from tether.cli.train import resume as resume_command
from tether.cli.train import train
from tether.core.trace import Meter
from tether.core.vector import Vector, digest
from tether.execution.progress import FollowedProgress, Progress, make_progress
from tether.protocols import Options, known
from tether.task import Length
from tether.testing.conformance import Assassin, Blobs, largest_difference, train_quietly

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("options", [Single(), Server()], ids=str)
def test_a_run_in_two_parts_equals_one_in_one_go(options: Options, tmp_path: Path) -> None:
    workers = options.workers_max or 3
    whole = train_quietly(Blobs(norm=False), options, Sim(workers), tmp_path / "whole", steps=40)
    train_quietly(Blobs(norm=False), options, Sim(workers), tmp_path / "parts", steps=15)
    parts = resume(tmp_path / "parts", Blobs(norm=False), steps=40, progress=make_progress(quiet=True))
    assert parts.figures["digest"] == whole.figures["digest"]
    assert parts.figures["samples"] == whole.figures["samples"]


def endless(directory: Path, on: Any) -> Any:
    return start(Blobs(), Averaging(), on, steps=10**9, run_dir=directory, progress=make_progress(quiet=True))


def test_a_run_in_the_background_goes_on_until_it_is_stopped_and_its_result_never_changes(tmp_path: Path) -> None:
    training = endless(tmp_path / "run", Local(1))
    with pytest.raises(TimeoutError):
        training.wait(0.01)
    for look in (lambda: training.result, lambda: training.model):
        with pytest.raises(UsageError, match=r"the run is not over \(starting.*\): call stop\(\) .* or wait\(\)"):
            look()
    assert not training.is_over, "a look does not end it"
    result = training.stop()
    before = Vector(result.model).weights.clone()
    assert training.is_over and result.figures["reason"] == "asked to end"
    assert training.result is training.stop() is training.wait() is result and training.model is result.model
    assert torch.equal(Vector(training.model).weights, before)


def test_a_run_in_the_background_may_come_to_its_own_end(tmp_path: Path) -> None:
    training = start(Blobs(), Averaging(), Sim(2), steps=4, run_dir=tmp_path / "run", progress=Progress())
    assert training.wait(60).figures["reason"] == "all steps made"
    assert training.model is training.result.model


def test_the_repr_of_a_run_in_the_background_says_how_far_it_is(tmp_path: Path) -> None:
    gate, evaluated = threading.Event(), threading.Event()

    class Gated(Progress):
        """Holds the run after its second evaluation."""

        def evaluation(self, metrics: dict[str, float], time: float, step: int) -> None:
            if step >= 10:
                evaluated.set()
                assert gate.wait(60)

    task = Blobs()
    options: dict[str, Any] = {"steps": 40, "evaluate_every": 5 * 2 * task.batch_size / 1000}
    training = start(task, Averaging(tau=5), Sim(2), run_dir=tmp_path / "run", progress=Gated(), **options)
    assert evaluated.wait(60)
    assert re.fullmatch(r"Training\(training, step 1\d of 40, error=0\.\d+\)", repr(training)), repr(training)
    gate.set()
    result = training.wait()
    assert repr(training) == f"Training(over, all steps made, {result!r})"
    failed = start(task, patience=0, run_dir=tmp_path / "failed", progress=Progress())
    with pytest.raises(UsageError):
        failed.wait()
    assert repr(failed) == "Training(failed, UsageError: patience must be at least 1 evaluation, not 0)"


def test_the_repr_of_a_resumed_part_counts_from_the_start_of_the_run() -> None:
    followed = FollowedProgress(Progress())
    assert str(followed) == "starting"
    followed.begin("digits", ["worker-0", "worker-1"], 300)
    followed.resumed(200)
    for worker in range(2):
        followed.meter(Meter(f"worker-{worker}", steps=100 + 20 * worker), 1.0)
    assert str(followed) == "training, step 310 of 500"


def test_a_run_in_the_background_whose_handle_is_dropped_ends(tmp_path: Path) -> None:
    training = endless(tmp_path / "run", Sim(2))
    thread = training._thread
    del training
    thread.join(60)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["reason"] == "asked to end"


def test_the_error_of_a_run_in_the_background_is_raised_by_everything_that_would_return_its_result(
    tmp_path: Path,
) -> None:
    training = start(Blobs(), patience=0, run_dir=tmp_path / "run", progress=Progress())
    for look in (training.wait, training.stop, lambda: training.result, lambda: training.model):
        with pytest.raises(UsageError, match="patience"):
            look()


def test_start_up_and_training_are_timed_apart(tmp_path: Path) -> None:
    began = time.monotonic()
    figures = train_quietly(Blobs(), Averaging(tau=5), Local(2), tmp_path / "local", seconds=1.0).figures
    wall_seconds = time.monotonic() - began
    # the driver counts the second from when it sends the workers off, and they count from when they begin
    assert figures["startup_seconds"] > 0 and figures["seconds"] >= 0.9
    assert figures["startup_seconds"] + figures["seconds"] <= figures["wall_seconds"] <= wall_seconds
    simulated = train_quietly(Blobs(), Averaging(tau=5), Sim(2), tmp_path / "sim", steps=4).figures
    assert simulated["startup_seconds"] == 0.0


class Loaded(Blobs):
    """Remembers when its data was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded_at: list[float] = []

    def train_data(self) -> Any:
        data = super().train_data()
        self.loaded_at.append(time.monotonic())
        return data


def test_start_up_counts_from_the_call_until_training_first_begins(tmp_path: Path) -> None:
    parts: list[float] = []

    class Restarting(Assassin):
        def training(self, startup_seconds: float, time: float) -> None:
            parts.append(startup_seconds)

    task, killer, began = Loaded(), Restarting(["hub"], steps=300), time.monotonic()
    goal: dict[str, Any] = {"steps": 1000, "checkpoint_seconds": 0.05}
    result = run(task, Averaging(tau=5), Local(2), run_dir=tmp_path / "run", progress=killer, **goal)
    assert len(parts) == 2, "one for each part"
    assert result.figures["startup_seconds"] == parts[0] > task.loaded_at[0] - began, "loading data is a part of it"


class Scheduled(Blobs):
    """Its learning rate falls by half every ten steps."""

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Length) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)


def test_learning_rate_schedules_act_and_are_resumed(tmp_path: Path) -> None:
    task = Scheduled(norm=False)
    whole = train_quietly(task, Single(), Sim(1), tmp_path / "whole", steps=40)
    plain = train_quietly(Blobs(norm=False), Single(), Sim(1), tmp_path / "plain", steps=40)
    train_quietly(task, Single(), Sim(1), tmp_path / "parts", steps=15)
    parts = resume(tmp_path / "parts", task, steps=40, progress=make_progress(quiet=True))
    assert parts.figures["digest"] == whole.figures["digest"] != plain.figures["digest"]


def test_single_equals_a_plain_loop(tmp_path: Path) -> None:
    task = Blobs(norm=False)
    ours = train_quietly(task, Single(), Sim(1), tmp_path / "run", steps=30).model
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    from tether.learner.data import Batches

    for _, batch in zip(range(30), Batches(task, task.train_data(), seed=0), strict=False):
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert largest_difference(ours, model) < 1e-5


class Nosy(Progress):
    """A display that remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def meter(self, meter: Meter, time: float) -> None:
        self.calls.append("meter")

    def evaluation(self, metrics: dict[str, float], time: float, step: int) -> None:
        self.calls.append("evaluation")


class Drops(Blobs):
    """Uses the global random numbers."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * random.random() * np.random.rand()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        torch.rand(5), random.random(), np.random.rand()
        return {"error": 0.0}


def test_a_result_does_not_depend_on_display_trace_record_or_evaluation(tmp_path: Path) -> None:
    nosy = Nosy()
    plain = train_quietly(Drops(), Averaging(tau=3), Sim(3), tmp_path / "plain", steps=30, trace=False)
    watched = run(
        Drops(),
        Averaging(tau=3),
        Sim(3),
        run_dir=tmp_path / "watched",
        steps=30,
        progress=nosy,
        record=True,
        evaluate_every=0.01,
        checkpoint_seconds=0.1,
    )
    assert {"meter", "evaluation"} <= set(nosy.calls)
    assert watched.figures["digest"] == plain.figures["digest"]


def test_the_trace_opens_as_json_and_shows_every_node(tmp_path: Path) -> None:
    train_quietly(Blobs(), Averaging(tau=3), Sim(2), tmp_path / "run", steps=9)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"hub", "worker-0", "worker-1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {"gradient", "wait"} <= {span["name"] for span in spans}
    assert any(span["name"].startswith("broadcast of round") for span in spans)
    assert all(span["dur"] >= 0 for span in spans)


def test_the_run_directory_is_named_after_the_run_and_never_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = make_progress(quiet=True)
    first, second = (run(Blobs(), Single(), Sim(1), steps=2, progress=quiet).directory for _ in range(2))
    assert first != second
    assert all(path.parent == Path("runs") and path.name.startswith("blobs-single-") for path in (first, second))
    with pytest.raises(UsageError, match="holds a run already"):
        run(Blobs(), Single(), Sim(1), steps=2, progress=quiet, run_dir=first)


def test_an_object_that_is_not_a_task_or_not_a_protocol_is_refused() -> None:
    with pytest.raises(UsageError, match=r"write Blobs\(\)"):
        run(Blobs, steps=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"such as tether.Averaging\(\)"):
        run(Blobs(), Averaging, steps=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Did you mean 'averaging'"):
        run(Blobs(), "averagin", steps=1)


class Stray(Blobs):
    """Its optimizer holds something that is not part of the model."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)


def test_a_parameter_outside_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="make it part of what model"):
        train_quietly(Stray(), Single(), Sim(1), tmp_path / "run", steps=1)


class Shaped(Blobs):
    """Its optimizer needs the shapes of the parameters."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.01)


@pytest.mark.parametrize("options", [options for kind in known().values() for options in kind.variants()], ids=str)
def test_any_optimizer_trains_where_workers_step_with_their_own_gradients(options: Options, tmp_path: Path) -> None:
    sim = Sim(options.workers_max or 4)
    if options.needs_elementwise:
        with pytest.raises(UsageError, match=r"Adafactor cannot step .* by default averaging, elastic, grid, mpca, s"):
            train_quietly(Shaped(), options, sim, tmp_path / "run", steps=4)
    else:
        assert train_quietly(Shaped(), options, sim, tmp_path / "run", steps=4).figures["steps"] == 4


def test_only_a_hub_that_steps_and_a_penalty_in_the_gradient_need_an_elementwise_optimizer() -> None:
    assert Server().needs_elementwise and Mpca(penalty="gradient").needs_elementwise
    others = [Server(sync="async", apply="inline"), *(kind() for kind in known().values() if kind is not Server)]
    assert not any(options.needs_elementwise for options in others)


class Unlearning(Task):
    """Its metric is not a number."""

    batch_size = 1

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        return [torch.zeros(1)] * 4

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).sum()
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"error": float("nan")}


def test_a_metric_that_is_not_a_number_is_null_in_json(tmp_path: Path) -> None:
    result = train_quietly(Unlearning(), Single(), Sim(1), tmp_path / "run", steps=4)
    assert result.figures["metrics"] == {"error": None}
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


class Hub(Blobs):
    """An optimizer of the caller's choice, over two groups of parameters."""

    def __init__(self, cls: type[torch.optim.Optimizer], **settings: Any) -> None:
        super().__init__(norm=False)
        self.cls = cls
        self.settings = settings

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": weights, "weight_decay": 1e-3}, {"params": biases, "lr": 0.02}]
        return self.cls(groups, **self.settings)


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.RMSprop], ids=lambda c: c.__name__)
def test_the_optimizer_at_the_hub_is_the_tasks_own_with_its_groups(
    cls: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    task = Hub(cls, lr=0.05)
    asynchronous = train_quietly(task, Server(sync="async", rate="none"), Sim(3), tmp_path / "async", steps=40)
    assert asynchronous.metrics["error"] < 0.1
    task.batch_size = 48
    alone = train_quietly(task, Single(), Sim(1), tmp_path / "alone", steps=20)
    task.batch_size = 16
    together = train_quietly(task, Server(rate="none"), Sim(3), tmp_path / "together", steps=20)
    assert largest_difference(alone.model, together.model) < 1e-5


def test_a_warm_up_trains_with_the_other_protocol_and_hands_over_its_model(tmp_path: Path) -> None:
    hard, soft = Server(sync="hard"), Server(sync="async")
    goal = {"epochs": 4, "warmup": hard, "warmup_epochs": 2}
    result = train_quietly(Blobs(), soft, Sim(3), tmp_path / "run", **goal)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "record"]
    gradients = [len(row["clocks"]) for row in updates]
    assert set(gradients[:42]) == {3} and set(gradients[42:]) == {1}
    clocks = [row["clock"] for row in updates]
    assert clocks == list(range(1, len(clocks) + 1))
    times = [row["time"] for row in rows]
    assert times == sorted(times) and result.figures["seconds"] == times[-1]
    with pytest.raises(UsageError, match="cannot be recorded"):
        train_quietly(Blobs(), soft, Sim(3), tmp_path / "recorded", record=True, **goal)


def test_a_target_that_is_reached_in_the_warm_up_ends_the_run_only_after_it(tmp_path: Path) -> None:
    goal = {"until": "error<0.5", "warmup": Server(sync="hard"), "warmup_epochs": 2, "evaluate_every": 0.1}
    result = train_quietly(Blobs(), Server(sync="async"), Sim(3), tmp_path / "run", **goal)
    assert result.figures["reason"] == "error<0.5 reached"
    assert result.figures["samples"] > 2 * 1000


def test_a_run_that_was_stopped_in_its_warm_up_is_resumed_there(tmp_path: Path) -> None:
    goal = {"epochs": 4, "warmup": Server(sync="hard"), "warmup_epochs": 2}
    cluster = Sim(3, faults=Faults().crash("hub", at=3.0))
    with pytest.raises(RunError, match="hub"):
        train_quietly(Blobs(), Server(sync="async"), cluster, tmp_path / "run", checkpoint_seconds=0.5, **goal)
    result = resume(tmp_path / "run", Blobs(), progress=make_progress(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    counts = [len(row["clocks"]) for row in rows if row["kind"] == "record"]
    assert set(counts) == {1, 3} and counts == sorted(counts, reverse=True)
    assert result.metrics["error"] < 0.1


EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


# the README contains digits.py, and its programs run in a test of their own
@pytest.mark.parametrize("example", [name for name in EXAMPLES if name != "digits.py"])
def test_every_example_runs(example: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_first_program_of_the_readme_is_the_example() -> None:
    assert (ROOT / "examples" / "digits.py").read_text().partition('"""\n\n')[2] in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("on", [Sim(workers=2, step_seconds=0.1), Local(2)], ids=["sim", "local"])
def test_a_run_ends_when_its_time_has_passed(on: Any, tmp_path: Path) -> None:
    result = train_quietly(Blobs(), Mpca(), on, tmp_path / "run", epochs=1_000_000, seconds=1.5)
    assert result.figures["reason"] == "1.5 s have passed"
    assert result.figures["seconds"] >= 1.5 and (not on.virtual or result.figures["seconds"] < 4)
    further = resume(tmp_path / "run", Blobs(), seconds=1.5, progress=make_progress(quiet=True))
    assert further.figures["samples"] > result.figures["samples"]


class Staged(Blobs):
    """Its evaluations return the metrics of a list in turn; the untrained model has the first of them too."""

    def __init__(self, *metrics: dict[str, float]) -> None:
        super().__init__()
        self.metrics = [metrics[0], *metrics]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]


@pytest.mark.parametrize(
    ("metrics", "evaluations"),
    [
        ([{"error": e} for e in (0.5, 0.6, 0.4, 0.4, 0.5, 0.3)], 5),
        ([{"loss": e, "error": 1 - e} for e in (0.9, 0.7, 0.6, 0.5)], 3),
        ([{"accuracy": a} for a in (0.5, 0.6, 0.55, 0.5, 0.9)], 4),
        ([{"error": e} for e in (float("nan"), 0.5, float("nan"), float("nan"), 0.1)], 4),
    ],
    ids=["error", "error-before-loss", "accuracy-rises", "nan"],
)
def test_a_run_with_patience_ends_after_that_many_evaluations_without_improvement(
    metrics: list[dict[str, float]], evaluations: int, tmp_path: Path
) -> None:
    result = train_quietly(Staged(*metrics), Single(), Sim(1), tmp_path / "run", patience=2)
    assert result.figures["reason"] == "no better for 2 evaluations"
    assert len(result.history) == evaluations + 1  # and one more, of the final model
    assert json.loads((tmp_path / "run" / "run.json").read_text())["request"]["patience"] == 2


def test_a_run_with_patience_gives_the_best_model_seen_and_is_resumed_from_the_newest(tmp_path: Path) -> None:
    falling = [{"error": error} for error in (0.5, 0.3, 0.4, 0.3, 0.4, 0.5)]  # the last but one ends it
    best = train_quietly(Staged(*falling), Single(), Sim(1), tmp_path / "run", patience=3)
    assert best.metrics == {"error": 0.3} and best.history[3]["step"] == best.figures["model_step"]
    assert best.figures["steps"] == best.history[-1]["step"] > best.figures["model_step"], "on ties, the most recent"
    until_then = train_quietly(Blobs(), Single(), Sim(1), tmp_path / "then", steps=best.figures["model_step"])
    assert until_then.figures["digest"] == best.figures["digest"] == digest(Vector(best.model).weights)
    assert until_then.figures["model_step"] == until_then.figures["steps"]
    note = f"the model is that of step {best.figures['model_step']}, the best that was seen"
    assert note in (tmp_path / "run" / "metrics.jsonl").read_text()

    quiet = make_progress(quiet=True)
    further = resume(tmp_path / "run", Staged({"error": 0.35}), progress=quiet)
    assert further.history[0]["step"] > best.figures["steps"]
    assert further.figures["digest"] == best.figures["digest"], "no better model was found"
    better = resume(tmp_path / "run", Staged({"error": 0.2}), progress=quiet)
    assert better.metrics == {"error": 0.2} and better.figures["model_step"] == better.figures["steps"]


def test_a_target_that_is_reached_counts_for_more_than_the_best_model(tmp_path: Path) -> None:
    staged = Staged({"error": 0.1, "loss": 3}, {"error": 0.2, "loss": 1})
    result = train_quietly(staged, Single(), Sim(1), tmp_path / "run", patience=5, until="loss<2")
    assert result.metrics == {"error": 0.2, "loss": 1} and result.figures["model_step"] == result.figures["steps"]


def test_the_tasks_patience_applies_only_if_the_run_is_given_no_goal(tmp_path: Path) -> None:
    task = Staged({"error": 0.5})
    task.patience = 3
    assert train_quietly(task, Single(), Sim(1), tmp_path / "own").figures["reason"] == "no better for 3 evaluations"
    goals: list[dict[str, Any]] = [{"epochs": 6}, {"steps": 300}, {"patience": 1}]
    for i, goal in enumerate(goals):
        reason = train_quietly(task, Single(), Sim(1), tmp_path / str(i), **goal).figures["reason"]
        assert reason == ("no better for 1 evaluation" if "patience" in goal else "all steps made")


def test_a_resumed_run_counts_its_patience_from_the_resume(tmp_path: Path) -> None:
    train_quietly(Staged({"error": 0.5}), Single(), Sim(1), tmp_path / "run", patience=2)
    quiet = make_progress(quiet=True)
    further = resume(tmp_path / "run", Staged({"error": 0.5}), progress=quiet)
    assert further.figures["reason"] == "no better for 2 evaluations" and len(further.history) == 4


def test_invalid_patience_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1 evaluation, not 0"):
        train_quietly(Blobs(), Single(), Sim(1), tmp_path / "zero", patience=0)
    for metrics in ({}, {"score": 1.0}):
        with pytest.raises(UsageError, match="does not know what is better"):
            train_quietly(Staged(metrics), Single(), Sim(1), tmp_path / f"{len(metrics)}", patience=2)


class Talkative(Blobs):
    def note(self) -> str:
        return "eight rows were chosen"


def test_the_note_of_a_task_is_shown_and_stored_once(tmp_path: Path) -> None:
    run(Talkative(), Server(), Sim(2), epochs=2, warmup=Server(sync="hard"), run_dir=tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("eight rows were chosen") == 1


class Asynchronous(Blobs):
    protocol = {"name": "server", "sync": "async"}  # noqa: RUF012


def test_a_task_says_which_protocol_suits_it_and_a_run_may_say_otherwise(tmp_path: Path) -> None:
    chosen = train_quietly(Asynchronous(), None, Sim(2), tmp_path / "chosen", steps=4)
    given = train_quietly(Asynchronous(), Averaging(tau=2), Sim(2), tmp_path / "given", steps=4)
    assert (chosen.figures["protocol"], given.figures["protocol"]) == ("server", "averaging")
    assert chosen.figures["staleness"]["max"] > 0


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ({"name": "servers"}, "unknown protocol 'servers'.*Did you mean 'server'"),
        ({}, "unknown protocol 'None'"),
        ({"name": "server", "synch": "async"}, "unknown option of protocol server 'synch'.*Did you mean 'sync'"),
    ],
)
def test_a_task_that_names_an_unknown_protocol_is_refused(
    tmp_path: Path, description: dict[str, str], reason: str
) -> None:
    task = Blobs()
    task.protocol = description  # type: ignore[misc]
    with pytest.raises(UsageError, match=reason):
        train_quietly(task, None, Sim(2), tmp_path / "run", steps=4)


def test_names_mean_the_same_in_python_and_on_the_command_line(tmp_path: Path) -> None:
    quiet = make_progress(quiet=True)
    named = run(Blobs(), "elastic", "sim", workers=3, steps=10, run_dir=tmp_path / "named", progress=quiet)
    made = run(Blobs(), Elastic(), Sim(workers=3), steps=10, run_dir=tmp_path / "made", progress=quiet)
    assert named.figures["digest"] == made.figures["digest"] and named.figures["workers"] == 3
    options = {option for command in (train, resume_command) for option in inspect.signature(command).parameters}
    for function in (run, resume):
        lasting = {"epochs", "steps", "until", "seconds", "patience", "workers", "master"}
        assert lasting <= set(inspect.signature(function).parameters) and lasting <= options
    for wrong, complaint in (
        ({"on": "cloud"}, "unknown runtime 'cloud'; known: cluster, local, ray, sim, spark"),
        ({"on": Sim(workers=2), "workers": 3}, "workers, master, address and device belong to the runtime"),
        ({"on": "sim", "master": "local"}, "master: only a Spark cluster has that"),
        ({"protocol": "mcpa"}, "Did you mean 'mpca'"),
    ):
        with pytest.raises(UsageError, match=complaint):
            run(Blobs(), steps=1, **wrong)  # type: ignore[arg-type]
