"""Evaluations of a run: all that were asked for, in order, of the model as it was then, and what follows from them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tether import Averaging, Local, Server, Sim, Single, Task, UsageError, resume, run
from tether.core.effects import Checkpoint, Evaluate
from tether.errors import Diverged, TaskError
from tether.execution import evaluation, observer
from tether.execution.directory import RunDirectory
from tether.execution.goals import Request
from tether.execution.observer import RunObserver
from tether.execution.plan import RunPlan
from tether.execution.progress import make_progress
from tether.learner.learner import evaluate
from tether.runtimes.base import NodeStates, Outcome
from tether.testing.conformance import Blobs, train_quietly

QUIET = make_progress(quiet=True)


class Gauge(Task):
    """One parameter, which is its own error. An evaluation waits until the gate is open."""

    batch_size = 1

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.order: list[float] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def train_data(self) -> Any:
        return range(100)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError("nothing is trained here")

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.begun.release()
        assert self.gate.wait(60)
        self.order.append(float(model.weight))
        return {"error": float(model.weight)}


@contextmanager
def observing(task: Gauge, directory: Path, **goal: Any) -> Iterator[RunObserver]:
    plan = RunPlan.make(task, Single(), Sim(1), Request(steps=10**6, **goal), None)
    with RunObserver(plan, RunDirectory.create(directory, "run"), QUIET, background=True) as observer:
        yield observer


def report(observed: RunObserver, errors: list[float], lent: Tensor | None = None) -> Tensor:
    """Report a model at each step from 1 on, in memory that is then used again."""
    lent = torch.zeros(1) if lent is None else lent
    for step, error in enumerate(errors, start=1):
        observed.evaluate(Evaluate(step, 10 * step), lent.fill_(error), float(step))
    return lent.fill_(-1.0)


def finished(observed: RunObserver) -> list[int]:
    """End the run and return the steps in its history, which must be those of the file, in order."""
    observed.finish(Outcome(torch.zeros(1), 1.0, "all steps made"))
    steps = [row["step"] for row in observed.history]
    rows = [json.loads(line) for line in observed.directory.metrics.read_text().splitlines()]
    assert steps == [row["step"] for row in rows if row["kind"] == "evaluation"] == sorted(set(steps))
    return steps


# ---- evaluations that were asked for happen -------------------------------------------------------------------------


def test_evaluations_that_wait_are_done_after_training_with_the_weights_as_they_were(tmp_path: Path) -> None:
    task = Gauge()
    with observing(task, tmp_path / "run") as observed:
        report(observed, [0.5, 0.4, 0.3, 0.2, 0.1])
        task.gate.set()
        assert finished(observed) == [1, 2, 3, 4, 5]
        assert [row["metrics"]["error"] for row in observed.history] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])


def test_a_short_run_in_processes_has_all_its_points(tmp_path: Path) -> None:
    result = train_quietly(Blobs(10), Averaging(tau=5), Local(2), tmp_path / "run", epochs=5, evaluate_every=1)
    assert [row["samples"] for row in result.history] == [1000, 2000, 3000, 4000, 5000]


def test_if_more_models_wait_than_fit_an_even_spread_of_them_and_the_last_are_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "WAITING_BYTES", 8 * 4)
    task = Gauge()
    with observing(task, tmp_path / "run") as observed:
        report(observed, [1.0] * 200)
        task.gate.set()
        steps = finished(observed)
        assert steps[-1] == 200 and 8 <= len(steps) <= 10, "those that waited, and the one under way"
        gaps = [later - earlier for earlier, later in zip([0, *steps], steps, strict=False)]
        assert max(gaps) <= 4 * 200 / 8
    left_out = f"{200 - len(steps)} of 200 evaluations were left out"
    assert left_out in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_with_a_target_the_newest_model_is_evaluated_first_and_rows_stay_in_order(tmp_path: Path) -> None:
    task = Gauge()
    task.gate.set()
    with observing(task, tmp_path / "run", until="error<0.2") as observed:
        observed.begin(Request(until="error<0.2"))
        task.gate.clear()
        task.begun = threading.Semaphore(0)
        task.order.clear()
        lent = report(observed, [0.9])
        task.begun.acquire()  # the evaluator is busy while the others arrive
        for step, error in ((2, 0.8), (3, 0.5), (4, 0.1)):
            observed.evaluate(Evaluate(step, 10 * step), lent.fill_(error), float(step))
        task.gate.set()
        assert finished(observed) == [1, 2, 3, 4]
        assert task.order == pytest.approx([0.9, 0.1, 0.5, 0.8])
        assert observed.stop_requested() == "error<0.2 reached"


def test_patience_counts_models_that_were_the_newest_when_evaluated_and_a_late_one_may_be_the_best(
    tmp_path: Path,
) -> None:
    task = Gauge()
    task.gate.set()
    with observing(task, tmp_path / "run", patience=2) as observed:
        observed.begin(Request(patience=2))
        task.gate.clear()
        task.begun = threading.Semaphore(0)
        lent = report(observed, [0.5])
        task.begun.acquire()
        for step, error in ((2, 0.1), (3, 0.1), (4, 0.7)):
            observed.evaluate(Evaluate(step, 10 * step), lent.fill_(error), float(step))
        task.gate.set()
        model = observed.finish(Outcome(torch.zeros(1), 1.0, "all steps made"))
        assert observed.stop_requested() is None, "one evaluation after the best so far was no better, not two"
        assert model.metrics == pytest.approx({"error": 0.1}) and model.step == 3, "on ties, the most recent"
        assert [row["step"] for row in observed.history] == [1, 2, 3, 4]


# ---- eval mode, no gradients, a device ------------------------------------------------------------------------------


class Dropping(Blobs):
    """Its metrics say in which mode it was evaluated; it leaves the model in training mode."""

    def model(self) -> nn.Module:
        frozen = nn.BatchNorm1d(8).eval()
        return nn.Sequential(nn.Linear(2, 8), frozen, nn.Dropout(0.5), nn.Linear(8, 2))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        training = any(part.training for part in model.modules())
        outputs = model(torch.ones(1, 2))
        model.train()
        return {"error": float(training), "gradients": float(outputs.requires_grad)}


def test_a_model_is_evaluated_in_eval_mode_without_gradients_and_its_modes_are_restored() -> None:
    model = Dropping().model().train()
    model[1].eval()
    assert evaluate(Dropping(), model) == {"error": 0.0, "gradients": 0.0}
    assert [part.training for part in model] == [True, False, True, True]


def test_a_run_evaluates_in_eval_mode_and_its_model_is_in_eval_mode(tmp_path: Path) -> None:
    result = train_quietly(Dropping(10), Single(), Sim(1), tmp_path / "run", epochs=2)
    assert [row["metrics"] for row in result.history] == [{"error": 0.0, "gradients": 0.0}] * 2
    assert not any(part.training for part in result.model.modules())


@pytest.mark.parametrize("returned", [[0.1], {"error": "small"}], ids=["a list", "a word"])
def test_metrics_that_are_not_numbers_are_refused(returned: Any, tmp_path: Path) -> None:
    class Odd(Blobs):
        def evaluate(self, model: nn.Module) -> Any:
            return returned

    with pytest.raises(TaskError, match=r"evaluate\(\) of task Odd returned"):
        train_quietly(Odd(), Single(), Sim(1), tmp_path / "run", steps=2)


class Calling(Blobs):
    """Remembers the devices of the model and of its outputs."""

    seen: list[tuple[str, str]]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        points = torch.ones(4, 2, device="cpu")
        outputs = model(points)
        self.seen.append((next(model.parameters()).device.type, outputs.device.type))
        return {"error": float(outputs.sum())}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_evaluation_on_a_device_returns_what_one_on_the_host_returns(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device meta holds no values, so that evaluating there fails, as on a device without memory."""
    task = Calling(10)
    task.seen = []
    plain = train_quietly(task, Single(), Sim(1), tmp_path / "plain", epochs=2)
    task.seen = []
    monkeypatch.setattr(evaluation, "choose_device", lambda name, index: torch.device(device))
    apart = train_quietly(task, Single(), Sim(1), tmp_path / "apart", epochs=2)
    assert apart.history == plain.history and len(task.seen) == 3
    assert next(apart.model.parameters()).device.type == "cpu"
    rows = (tmp_path / "apart" / "metrics.jsonl").read_text()
    assert rows.count("evaluating on meta failed") == (device == "meta")


# ---- what the metrics say -------------------------------------------------------------------------------------------


class Stuck(Blobs):
    """Learns nothing, or unlearns after a number of steps."""

    def __init__(self, rate: float = 0.0, unlearn_after: int | None = None) -> None:
        super().__init__(10, norm=False)
        self.rate = rate
        self.unlearn_after = unlearn_after

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.rate)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        taken = vars(model)["losses_taken"] = vars(model).get("losses_taken", 0) + 1
        points, labels = batch
        swapped = self.unlearn_after is not None and taken > self.unlearn_after
        return super().loss(model, (points, 1 - labels if swapped else labels))


def test_a_model_that_is_no_better_than_at_the_start_says_so_with_what_to_try(tmp_path: Path) -> None:
    result = train_quietly(Stuck(), Single(), Sim(1), tmp_path / "run", epochs=2)
    assert result.figures["untrained_metrics"] == result.metrics
    warning = result.figures["warning"]
    assert "no better than before training" in warning and "learning rate" in warning
    assert warning in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert len(result.history) == 2, "the evaluation of the untrained model is not one of them"
    further = resume(tmp_path / "run", Stuck(), epochs=3, progress=QUIET)
    assert further.figures["warning"] == warning
    assert further.figures["untrained_metrics"] == result.figures["untrained_metrics"]


def test_a_model_that_has_lost_what_it_had_learned_says_so(tmp_path: Path) -> None:
    task = Stuck(rate=0.05, unlearn_after=250)
    result = train_quietly(task, Single(), Sim(1), tmp_path / "run", steps=500, evaluate_every=0.5)
    best = min(row["metrics"]["error"] for row in result.history)
    assert result.metrics["error"] > 0.3 > 0.1 > best
    assert f"better than before training (error {result.metrics['error']:.4g}, " in result.figures["warning"]
    assert f"and {best:.4g} at step" in result.figures["warning"] and "patience" in result.figures["warning"]


def test_a_model_that_has_learned_has_no_warning(tmp_path: Path) -> None:
    result = train_quietly(Blobs(), Server(), Sim(2), tmp_path / "run", epochs=2)
    assert result.figures["warning"] is None
    assert result.figures["untrained_metrics"]["error"] > result.metrics["error"]


def test_a_task_without_metrics_has_no_warning(tmp_path: Path) -> None:
    class Silent(Blobs):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {}

    result = train_quietly(Silent(), Single(), Sim(1), tmp_path / "run", steps=2)
    assert result.figures["warning"] is None and result.figures["untrained_metrics"] == {}


class Untrainable(Blobs):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError("training has begun")


@pytest.mark.parametrize("warmup", [None, Server()], ids=["plain", "after a warm-up"])
def test_a_target_that_the_task_does_not_measure_is_refused_before_training(warmup: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the metric 'accuracy'; the task has error"):
        train_quietly(Untrainable(), Single(), Sim(1), tmp_path / "run", until="accuracy>0.9", warmup=warmup)


def test_patience_is_refused_before_training_if_it_is_unknown_which_metrics_are_better(tmp_path: Path) -> None:
    class Scored(Untrainable):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"score": 1.0}

    with pytest.raises(UsageError, match="does not know what is better"):
        train_quietly(Scored(), Single(), Sim(1), tmp_path / "run", patience=2)


# ---- weights that are not finite ------------------------------------------------------------------------------------


class Overflowing(Blobs):
    """Its last step makes weights that are too large for a float."""

    def __init__(self) -> None:
        super().__init__(norm=False)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e38)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return 1e3 * super().loss(model, batch)


def test_a_run_that_ends_with_weights_that_are_not_finite_fails_and_saves_none(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"step 1: .* not finite"):
        run(Overflowing(), Single(), Sim(1), steps=1, run_dir=tmp_path / "run", progress=QUIET)
    assert RunDirectory(tmp_path / "run").load_checkpoint() is None
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_a_checkpoint_of_weights_that_are_not_finite_ends_the_run(tmp_path: Path) -> None:
    task = Gauge()
    task.gate.set()
    with pytest.raises(Diverged, match="step 3"), observing(task, tmp_path / "run") as observed:
        observed.checkpoint(Checkpoint(3, 30), torch.tensor([float("nan")]), NodeStates({}, None), 1.0)
        observed.finish(Outcome(torch.zeros(1), 1.0, "all steps made"))
    assert RunDirectory(tmp_path / "run").load_checkpoint() is None
