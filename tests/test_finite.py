"""Values that are not finite never reach a joint model, a checkpoint or a resumed run, even if the loss is finite."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from test_device import StandIn
from tether import Averaging, Elastic, Grid, Local, Mpca, Server, Single, resume
from tether.api import replay_recorded
from tether.core.effects import GradientForm
from tether.core.vector import Vector
from tether.errors import Diverged, UsageError
from tether.execution.directory import RunDirectory
from tether.execution.progress import make_progress
from tether.learner.guard import SKIPPED_MIN
from tether.learner.learner import Learner
from tether.protocols import Options
from tether.task import Task
from tether.testing.conformance import Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim

QUIET = make_progress(quiet=True)
PROTOCOLS = [
    Single(),
    Averaging(tau=3),
    Server(),
    Server(sync="async"),
    Server(sync="async", apply="inline"),
    Server(topology="tree"),
    Elastic(),
    Mpca(),
    Mpca(penalty="gradient"),
    Grid(),
]


def poisoned(loss: Tensor, parameter: Tensor, taken: bool) -> Tensor:
    """The same loss with a NaN in its gradient, by a square root at 0."""
    return loss + (0.0 * parameter).square().sum().sqrt() if taken else loss


class Poisoned(Blobs):
    """The gradients of some steps of every model are NaN; their losses are finite."""

    def __init__(self, when: Callable[[int], bool]) -> None:
        super().__init__()
        self.when = when

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        taken = vars(model)["losses_taken"] = vars(model).get("losses_taken", 0) + 1
        return poisoned(super().loss(model, batch), next(model.parameters()), self.when(taken))


@pytest.mark.parametrize("options", PROTOCOLS, ids=str)
def test_a_gradient_that_is_not_finite_is_left_out_and_counted(options: Options, tmp_path: Path) -> None:
    workers = options.workers_max or 4
    task = Poisoned(lambda step: step % 15 == 4)
    result = train_quietly(task, options, Sim(workers), tmp_path / "run", steps=40, checkpoint_seconds=0.2)
    assert bool(Vector(result.model).weights.isfinite().all())
    assert result.metrics["error"] < 0.1
    assert 2 * workers <= result.figures["gradients_skipped"] <= 4 * workers
    assert resume(tmp_path / "run", Blobs(), steps=50, progress=QUIET).metrics["error"] < 0.1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["gradients_skipped"] for row in rows if row["kind"] == "progress") >= 2


@pytest.mark.parametrize("options", PROTOCOLS, ids=str)
def test_past_a_limit_the_run_ends_with_an_error_that_names_worker_and_step(options: Options, tmp_path: Path) -> None:
    task = Poisoned(lambda step: step > 20)
    message = rf"worker-\d, step {20 + SKIPPED_MIN + 1}: .*{SKIPPED_MIN + 1} of its gradients were not finite"
    with pytest.raises(Diverged, match=message):
        train_quietly(task, options, Sim(options.workers_max or 4), tmp_path / "run", steps=100)


def test_processes_do_the_same(tmp_path: Path) -> None:
    now_and_then = Poisoned(lambda step: step % 15 == 4)
    result = train_quietly(now_and_then, Averaging(tau=3), Local(2), tmp_path / "few", steps=40)
    assert result.figures["gradients_skipped"] == 2 * 3 and result.metrics["error"] < 0.1
    with pytest.raises(Diverged, match=r"worker-\d, step 31"):
        train_quietly(Poisoned(lambda step: step > 20), Server(), Local(2), tmp_path / "many", steps=100)


def test_a_record_with_gradients_that_were_left_out_is_replayed(tmp_path: Path) -> None:
    task = Poisoned(lambda step: step % 15 == 4)
    for i, options in enumerate((Averaging(tau=3), Server())):
        train_quietly(task, options, Sim(3), tmp_path / str(i), steps=20, record=True)
        assert all(count > 0 for count in replay_recorded(tmp_path / str(i), task).values())


# ---- in one learner -------------------------------------------------------------------------------------------------


class Everything(Task):
    """An embedding, a large matrix, a small one and a normalization; in step 3 the gradient of one `part` is NaN."""

    def __init__(self, part: str, make: Any, sparse: bool = True) -> None:
        self.part = part
        self.make = make
        self.sparse = sparse
        self.taken = 0

    def model(self) -> nn.Module:
        model = nn.Module()
        model.words = nn.Embedding(30, 8, sparse=self.sparse)
        model.large = nn.Linear(8, 10_000)
        model.norm = nn.BatchNorm1d(8)
        model.small = nn.Linear(8, 3)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.make([p for p in model.parameters() if p.requires_grad])
        return optimizer

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        self.taken += 1
        words = model.words(batch).sum(1)
        seen = model.norm(words)
        loss = model.small(seen).square().mean() + model.large(seen).square().mean()
        if self.part == "norm" and self.taken == 3:  # as if a mask were applied too late
            masked = torch.where(torch.zeros(8, dtype=torch.bool), model.norm(words * float("inf")), 0.0)
            return loss + masked.sum()
        spoiled = {"words": words, "large": model.large.weight, "small": model.small.bias}.get(self.part, words)
        return poisoned(loss, spoiled, self.taken == 3)


def batches() -> Iterator[Tensor]:
    noise = torch.Generator().manual_seed(3)
    while True:
        yield torch.randint(0, 30, (8, 3), generator=noise)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters)


@pytest.mark.parametrize("device", [None, StandIn], ids=["host", "device"])
@pytest.mark.parametrize("form", ["none", "dense", "rows"])
@pytest.mark.parametrize("make", [sgd, adam, adafactor])
@pytest.mark.parametrize("part", ["words", "large", "small", "norm"])
def test_wherever_a_gradient_is_not_finite_all_of_it_counts_as_zero(
    part: str, make: Any, form: GradientForm, device: type[StandIn] | None
) -> None:
    task = Everything(part, make, sparse=make is not adafactor)
    learner = Learner(task, batches(), node="worker-0", seed=5, device=device and device())
    for step in range(1, 6):
        before = learner.weights.clone()
        taken = learner.compute(form, False)
        assert bool(taken.gradient.isfinite().all())
        assert learner.skipped == (step >= 3)
        if step == 3:
            assert not taken.gradient.any()
            assert torch.equal(learner.weights, before), "what the pass changed in buffers is undone too"
        learner.step(None, 1.0)
        assert bool(learner.weights.isfinite().all())
        if make is sgd:
            count = learner.parameter_count
            assert torch.equal(learner.weights[:count], before[:count]) == (step == 3)


def test_large_values_whose_sum_is_beyond_a_float_are_finite() -> None:
    class Far(Task):
        def model(self) -> nn.Module:
            return nn.Linear(4, 1, bias=False)

        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).sum()

    learner = Learner(Far(), iter([torch.full((1, 4), 3e38)] * 2), node="worker-0", seed=5)
    learner.weights.zero_()
    taken = learner.compute("dense", False)
    assert not bool(taken.gradient.sum().isfinite()) and learner.skipped == 0 and bool(taken.gradient.isfinite().all())


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "a run")


def test_weights_that_are_not_finite_are_never_saved(directory: RunDirectory) -> None:
    directory.save_checkpoint(3, 30, torch.ones(3), {}, {})
    for bad in (float("nan"), float("inf")):
        with pytest.raises(Diverged, match="step 4"):
            directory.save_checkpoint(4, 40, torch.tensor([1.0, bad, 1.0]), {}, {})
    restored = directory.load_checkpoint()
    assert restored is not None and restored.step == 3


def test_a_buffer_may_hold_any_values(directory: RunDirectory) -> None:
    mask = torch.tensor([1.0, float("-inf"), float("nan")])
    directory.save_checkpoint(3, 30, mask, {}, {}, parameters=1)
    restored = directory.load_checkpoint()
    assert restored is not None and restored.notes == ()


def spoil(checkpoint: Path) -> None:
    """As if it had been saved without a check."""
    tensors = load_file(checkpoint / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, checkpoint / "model.safetensors")
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.glob("*.*")}
    (checkpoint / "SHA256SUMS").write_text("".join(f"{found}  {name}\n" for name, found in hashes.items()))


def test_a_checkpoint_that_is_not_finite_is_never_chosen_and_the_run_says_so(tmp_path: Path) -> None:
    train_quietly(Blobs(), Single(), Sim(1), tmp_path / "run", steps=20, checkpoint_seconds=0.5)
    _, newest = sorted((tmp_path / "run" / "checkpoints").glob("at-*"))
    spoil(newest)
    result = resume(tmp_path / "run", Blobs(), steps=40, progress=QUIET)
    assert result.figures["steps"] == 40 and result.metrics["error"] < 0.1
    assert f"{newest.name} holds weights that are not finite" in (tmp_path / "run" / "metrics.jsonl").read_text()
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("at-*"):
        spoil(checkpoint)
    with pytest.raises(UsageError, match="no checkpoint to continue from"):
        resume(tmp_path / "run", Blobs(), steps=60, progress=QUIET)
