"""Clipping, accumulation and half precision: attributes of a task that mean the same under every protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tether import Averaging, Elastic, Grid, Local, Mpca, Server, Sim, Single, TaskError, Tide, UsageError
from tether.learner.clip import SCALE_FIRST, SCALE_GROWS_AFTER, Scale
from tether.learner.data import Batches, Prefetched
from tether.learner.learner import Learner
from tether.protocols import Options
from tether.tasks import load as load_task
from tether.testing.conformance import Blobs, largest_difference, train_quietly


class Steep(Blobs):
    """Blobs with gradients so long that clipping changes every one of them."""

    def __init__(self, batch_size: int = 16, **attributes: Any) -> None:
        super().__init__(batch_size, norm=False)
        for name, value in attributes.items():
            setattr(self, name, value)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return 20 * super().loss(model, batch)


SETTINGS: list[dict[str, Any]] = [
    {"clip_norm": 0.5},
    {"clip_value": 0.05},
    {"clip_norm": 0.5, "clip_value": 0.2},
    {"accumulate": 4, "clip_norm": 0.5},
    {"precision": "bf16", "clip_norm": 0.01},
    {"precision": "fp16", "clip_norm": 0.02},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_hardsync_of_4_workers_equals_one_big_learner_with_the_same_settings(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    # in half precision a sum over 64 samples is rounded otherwise than four sums over 16: there, steps must be short
    steps = 30
    alone = train_quietly(Steep(64, **settings), Single(), Sim(workers=1), tmp_path / "alone", steps=steps)
    hard = Server(sync="hard", rate="none")
    together = train_quietly(Steep(16, **settings), hard, Sim(workers=4), tmp_path / "together", steps=steps)
    plain = train_quietly(Steep(64), Single(), Sim(workers=1), tmp_path / "plain", steps=steps)
    assert largest_difference(alone.model, together.model) < 1e-5
    assert largest_difference(alone.model, plain.model) > 1e-2, "the settings change nothing"
    assert together.figures["samples"] == alone.figures["samples"] == steps * 64 * settings.get("accumulate", 1)


def test_the_same_holds_in_processes(tmp_path: Path) -> None:
    settings = {"clip_norm": 0.5, "accumulate": 2}
    alone = train_quietly(Steep(64, **settings), Single(), Local(workers=1), tmp_path / "alone", steps=20)
    hard = Server(sync="hard", rate="none")
    together = train_quietly(Steep(16, **settings), hard, Local(workers=4), tmp_path / "together", steps=20)
    assert largest_difference(alone.model, together.model) < 1e-5


def plain_loop(task: Blobs, steps: int) -> nn.Module:
    """What a PyTorch programmer would write."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    batches = Batches(task, task.train_data(), seed=0)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(task.accumulate):
            (task.loss(model, next(batches)) / task.accumulate).backward()  # type: ignore[no-untyped-call]
        if task.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), task.clip_value)
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
    return model


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_one_worker_does_what_a_plain_loop_does(settings: dict[str, Any], tmp_path: Path) -> None:
    result = train_quietly(Steep(16, **settings), Single(), Sim(workers=1), tmp_path, steps=30)
    assert largest_difference(result.model, plain_loop(Steep(16, **settings), 30)) < 1e-5


@pytest.mark.parametrize(
    "protocol",
    [
        Averaging(tau=2),
        Elastic(tau=2),
        Mpca(),
        Mpca(penalty="gradient"),
        Tide(),
        Grid(),
        Server(sync="soft", n=2),
        Server(sync="async"),
        Server(sync="async", hubs=2),
        Server(sync="async", push_every=2, pull_every=2),
        Server(sync="hard", topology="tree", fan_out=2),
    ],
    ids=str,
)
def test_a_clipped_step_is_never_longer_than_the_limit_under_any_protocol(protocol: Options, tmp_path: Path) -> None:
    """Plain SGD with a rate of 1 moves by no more than the limit in a step, and by far more without it."""

    class Plain(Steep):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=1.0)

    steps, limit = 6, 1e-3
    moved = []
    for name, settings in (("clipped", {"clip_norm": limit, "precision": "bf16"}), ("free", {})):
        task = Plain(8, **settings)
        ended = train_quietly(task, protocol, Sim(workers=4), tmp_path / name, steps=steps)
        torch.manual_seed(0)
        first = nn.utils.parameters_to_vector(task.model().parameters())
        moved.append(float((nn.utils.parameters_to_vector(ended.model.parameters()) - first).detach().norm()))
    # gradients of all workers may be applied one after another, and sums of two at once
    assert moved[0] <= 4 * 2 * steps * limit * 1.01 < moved[1]


def test_accumulated_mini_batches_hold_every_sample_of_an_epoch_once() -> None:
    task = Blobs(5)
    task.accumulate = 4
    data = list(range(1000))
    task.collate = list  # type: ignore[method-assign, assignment]
    for batches in (Batches(task, data, seed=3), Prefetched(Batches(task, data, seed=3))):
        seen: list[int] = []
        for number in reversed(range(50)):
            batches.seek(number)
            seen += [index for _ in range(4) for index in next(batches)]
        assert sorted(seen) == data


def test_a_mini_batch_that_overflows_in_half_precision_is_tried_again_with_a_smaller_scale() -> None:
    task = Steep(16, precision="fp16")
    batches = Batches(task, task.train_data(), seed=0)
    learner = Learner(task, batches, node="worker-0", seed=0)
    full = Learner(Steep(16), Batches(task, task.train_data(), seed=0), node="worker-0", seed=0)
    learner._scale.factor = 2.0**30
    for _ in range(3):
        half_result, result = learner.compute("dense", False), full.compute("dense", False)
        assert torch.allclose(half_result.gradient, result.gradient, rtol=0.01, atol=0.01)
        assert half_result.samples == 16
    assert 1.0 < learner._scale.factor < 2.0**30 and learner.skipped == 0


def test_small_gradients_do_not_vanish_in_half_precision() -> None:
    class Faint(Blobs):
        precision = "fp16"

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return 1e-7 * super().loss(model, batch)

    task = Faint(16, norm=False)
    learner = Learner(task, Batches(task, task.train_data(), seed=0), node="worker-0", seed=0)
    gradient = learner.compute("dense", False).gradient.clone()
    assert int((gradient != 0).sum()) > len(gradient) / 2
    unscaled = Learner(task, Batches(task, task.train_data(), seed=0), node="worker-0", seed=0)
    unscaled._scale.factor = 1.0
    assert int((unscaled.compute("dense", False).gradient != 0).sum()) < int((gradient != 0).sum()) / 2


def test_the_scale_grows_after_many_gradients_without_an_overflow_and_is_never_less_than_1() -> None:
    scale = Scale("fp16")
    for _ in range(SCALE_GROWS_AFTER):
        scale.good()
    assert scale.factor == 2 * SCALE_FIRST
    while scale.reduce():
        pass
    assert scale.factor == 1.0
    other = Scale("bf16")
    assert other.factor == 1.0 and not other.reduce()


def test_a_gradient_that_is_not_finite_for_another_reason_is_left_out_in_half_precision_too(tmp_path: Path) -> None:
    class Rooted(Blobs):
        precision = "fp16"

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            taken = vars(model)["taken"] = vars(model).get("taken", 0) + 1
            loss = super().loss(model, batch)
            return loss + (0 * loss).sqrt() if taken == 1 else loss

    result = train_quietly(Rooted(), Single(), Sim(workers=1), tmp_path, steps=5)
    assert result.figures["gradients_skipped"] == 0  # the second try had no root
    Rooted.precision = "bf16"
    result = train_quietly(Rooted(), Single(), Sim(workers=1), tmp_path / "bf16", steps=5)
    assert result.figures["gradients_skipped"] == 1


class Words(Blobs):
    """A large embedding, whose gradients are rows."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(9000, 8), nn.Flatten(), nn.Linear(32, 2))

    def train_data(self) -> TensorDataset:
        draw = torch.Generator().manual_seed(2)
        return TensorDataset(torch.randint(9000, (400, 4), generator=draw), torch.arange(400) % 2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return 50 * super().loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("protocol", [Single(), Server(sync="async"), Server(sync="hard", rate="none")], ids=str)
def test_the_norm_counts_the_rows_of_embeddings_once(protocol: Options, tmp_path: Path) -> None:
    task = Words(10)
    task.clip_norm, task.accumulate = 0.3, 2
    result = train_quietly(task, protocol, Sim(workers=1), tmp_path, steps=10)
    assert largest_difference(result.model, plain_loop(task, 10)) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0},
        {"clip_norm": "1"},
        {"clip_value": -1.0},
        {"accumulate": 0},
        {"accumulate": 1.5},
        {"precision": "fp8"},
    ],
    ids=str,
)
def test_an_impossible_value_is_refused_before_training(settings: dict[str, Any], tmp_path: Path) -> None:
    (name,) = settings
    with pytest.raises(TaskError, match=f"{name} of task Steep is .*; it must be "):
        train_quietly(Steep(16, **settings), Single(), Sim(workers=1), tmp_path, steps=1)


def test_a_norm_that_no_hub_can_know_is_refused_and_a_limit_of_values_is_not(tmp_path: Path) -> None:
    protocol = Server(sync="hard", hubs=2)
    with pytest.raises(UsageError, match=r"each hub of .* has only a part: use hubs=1"):
        train_quietly(Steep(16, clip_norm=1.0), protocol, Sim(workers=2), tmp_path, steps=1)
    train_quietly(Steep(16, clip_value=1.0), protocol, Sim(workers=2), tmp_path, steps=1)


def test_the_command_line_sets_attributes_of_every_task_by_their_names(tmp_path: Path) -> None:
    task = load_task("digits", settings={"clip_norm": "0.5", "precision": "bf16", "accumulate": "2"})
    assert (task.clip_norm, task.precision, task.accumulate) == (0.5, "bf16", 2)
    assert load_task("digits", settings={"clip_norm": "none"}).clip_norm is None
    with pytest.raises(UsageError, match="precision of task digits is 'fp8'; expected fp32"):
        load_task("digits", settings={"precision": "fp8"})
    with pytest.raises(UsageError, match="unknown option of task synthetic 'clip_norm'"):
        load_task("synthetic", settings={"clip_norm": "1"})
    synthetic = load_task("synthetic")
    synthetic.clip_norm = 1.0
    with pytest.raises(UsageError, match="clip_norm: a synthetic task has no model"):
        train_quietly(synthetic, Averaging(), Sim(workers=2), tmp_path, steps=1)
