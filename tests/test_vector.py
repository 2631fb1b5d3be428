"""A module and its flat vector are one thing seen in two ways, and optimizers cannot tell the difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tether.core.vector import Vector, digest, shards
from tether.errors import TaskError
from tether.learner.learner import Learner
from tether.learner.optimizer import ELEMENTWISE, flatten
from tether.testing.conformance import Blobs


def seeded(make: Callable[[], nn.Module]) -> Any:
    """The same new model at every call."""
    torch.manual_seed(0)
    return make()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def half_frozen() -> nn.Module:
    model = small()
    model[2].weight.requires_grad_(False)
    return model


class Tied(nn.Module):
    """Words in and words out through the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words))


class Words(nn.Module):
    """An embedding, perhaps with sparse gradients, and a layer that is never used."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=sparse)
        self.unused = nn.Linear(2, 2)
        self.out = nn.Linear(2, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words))


class Mean(nn.Module):
    """Replaces its buffer instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x)


def inputs(count: int = 5) -> Iterator[Tensor]:
    noise = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(7, 3, generator=noise)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


# ---- views ----------------------------------------------------------------------------------------------------------


def test_changing_the_vector_changes_the_module() -> None:
    model = seeded(small)
    vector = Vector(model)
    vector.weights.copy_(torch.arange(float(len(vector.weights))))
    assert torch.equal(flat(model.parameters()), torch.arange(float(vector.parameter_count)))
    assert model[0].weight[1, 2] == 5.0


def test_changing_the_module_changes_the_vector() -> None:
    model = seeded(small)
    vector = Vector(model)
    with torch.no_grad():
        model[4].bias.fill_(7.0)
    assert vector.weights[-2:].tolist() == [7.0, 7.0]


def test_backward_passes_are_gathered_into_the_flat_gradient() -> None:
    model, ordinary = seeded(small), seeded(small)
    vector = Vector(model)
    for x in inputs(2):  # gradients add up, as they do without a vector
        model(x).square().mean().backward()
        ordinary(x).square().mean().backward()
    assert vector.gather_gradient() is vector.gradient
    assert torch.equal(vector.gradient, flat(p.grad for p in ordinary.parameters()))


def test_a_model_gives_the_same_outputs_after_adoption() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.LazyLinear(2)))
    x = torch.randn(4, 2, 5, 5)
    before = model.eval()(x)
    Vector(model)
    assert torch.equal(model(x), before)


def test_a_model_in_another_memory_format_gives_the_same_outputs_after_adoption() -> None:
    model = seeded(lambda: nn.Conv2d(2, 3, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(1, 2, 4, 4)
    before = model(x)
    Vector(model)
    assert torch.allclose(model(x), before, atol=1e-6)


# ---- what is in it --------------------------------------------------------------------------------------------------


def test_a_tied_weight_is_in_the_vector_once() -> None:
    model = seeded(Tied)
    vector = Vector(model)
    assert vector.parameter_count == 15
    vector.weights.zero_()
    assert not model.table.weight.any() and not model.out.weight.any()


def test_the_gradient_of_a_tied_weight_is_that_of_both_uses() -> None:
    model, ordinary = seeded(Tied), seeded(Tied)
    vector = Vector(model)
    for net in (model, ordinary):
        net(torch.tensor([0, 3])).square().mean().backward()
    assert torch.equal(vector.gather_gradient(), flat([ordinary.table.weight.grad]))


def test_a_frozen_parameter_is_left_out_and_left_alone() -> None:
    model = seeded(half_frozen)
    frozen = model[2].weight.clone()
    vector = Vector(model)
    vector.weights.zero_()
    assert vector.parameter_count == sum(p.numel() for p in model.parameters()) - frozen.numel()
    assert torch.equal(model[2].weight, frozen)


def test_the_running_mean_and_variance_ride_along_behind_the_parameters() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    vector = Vector(model)
    assert vector.parameter_count == 3 * 4 + 4 + 4 + 4
    assert vector.weights[vector.parameter_count :].tolist() == [0.0] * 4 + [1.0] * 4
    assert len(vector.gradient) == vector.parameter_count
    model(next(inputs()))
    norm = model[1]
    assert norm.running_mean.any()
    assert torch.equal(vector.weights[vector.parameter_count :], flat([norm.running_mean, norm.running_var]))


def test_counters_and_passing_buffers_stay_with_the_module() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    model.register_buffer("scratch", torch.zeros(100), persistent=False)
    model.register_buffer("precise", torch.zeros(50, dtype=torch.float64))
    assert len(Vector(model).weights) == 3 * 4 + 4 + 4 + 4 + 8
    assert int(model[1].num_batches_tracked) == 0


def test_a_buffer_that_is_replaced_stays_in_the_vector() -> None:
    model, ordinary = seeded(Mean), seeded(Mean)
    vector = Vector(model)
    for x in inputs(3):
        model(x).sum().backward()
        ordinary(x)
        vector.gather_gradient()
        assert torch.equal(vector.weights[vector.parameter_count :], ordinary.mean)
    vector.weights.zero_()
    assert not model.mean.any()


def test_a_buffer_that_two_modules_share_is_carried_once() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    model[2].running_mean = model[1].running_mean
    vector = Vector(model)
    assert len(vector.weights) == vector.parameter_count + 3 * 4
    vector.weights.fill_(7.0)
    assert model[1].running_mean.tolist() == model[2].running_mean.tolist() == [7.0] * 4


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(TaskError, match="ReLU has no trainable parameter"):
        Vector(nn.ReLU())
    with pytest.raises(TaskError, match="no trainable parameter"):
        Vector(small().requires_grad_(False))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_that_has_not_seen_data_is_refused() -> None:
    with pytest.raises(TaskError, match="parameter 'weight' has no shape yet"):
        Vector(nn.LazyLinear(2))


def test_an_odd_parameter_is_named() -> None:
    with pytest.raises(TaskError, match=r"'1\.weight' is torch\.float64 .* '0\.weight' is torch\.float32"):
        Vector(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
    with pytest.raises(TaskError, match=r"'1\.weight' is torch\.float32 on meta but '0\.weight' .* on cpu"):
        Vector(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with pytest.raises(TaskError, match=r"'weight' is torch\.complex64"):
        Vector(nn.Linear(2, 2, dtype=torch.complex64))


def test_a_frozen_parameter_may_be_odd() -> None:
    odd = nn.Linear(2, 2).double().requires_grad_(False)
    assert Vector(nn.Sequential(nn.Linear(2, 2), odd)).parameter_count == 6


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_gradients_and_unused_parameters_are_gathered(sparse: bool) -> None:
    model, ordinary = seeded(lambda: Words(sparse)), seeded(lambda: Words(False))
    vector = Vector(model)
    for words in ([0, 2, 2], [5]):  # the second pass must show nothing of the first
        vector.gradient.zero_()
        ordinary.zero_grad()
        for net in (model, ordinary):
            net(torch.tensor(words)).sum().backward()
        expected = flat(torch.zeros_like(p) if p.grad is None else p.grad for p in ordinary.parameters())
        assert torch.equal(vector.gather_gradient(), expected)


def test_gradients_that_the_task_took_away_count_as_zero() -> None:
    model = seeded(small)
    vector = Vector(model)
    model(next(inputs())).sum().backward()
    model.zero_grad(set_to_none=True)
    assert not vector.gather_gradient().any()
    model(next(inputs())).sum().backward()
    assert vector.gradient.any()


def test_a_renewed_gradient_leaves_the_old_buffer_its_values() -> None:
    model = seeded(small)
    vector = Vector(model)
    first, second = inputs(2)
    model(first).square().mean().backward()
    old = vector.gather_gradient()
    kept = old.clone()
    vector.renew_gradient()
    model(second).square().mean().backward()
    assert torch.equal(old, kept)
    assert vector.gather_gradient() is not old and not torch.equal(vector.gradient, old)


# ---- shards ---------------------------------------------------------------------------------------------------------


@given(length=st.integers(0, 10_000), count=st.integers(1, 200))
def test_shards_cover_the_vector_and_differ_by_at_most_one(length: int, count: int) -> None:
    cut = shards(length, count)
    assert len(cut) == count
    assert [position for part in cut for position in range(part.start, part.stop)] == list(range(length))
    sizes = [part.stop - part.start for part in cut]
    assert max(sizes) - min(sizes) <= 1


def test_a_digest_tells_values_apart_and_does_not_mind_the_layout() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    assert digest(values) == digest(values.t().contiguous().t())
    assert digest(values) != digest(values.clone().index_fill_(0, torch.tensor([1]), 0.0))


# ---- optimizers on the flat vector ----------------------------------------------------------------------------------


def settings_of(cls: type[torch.optim.Optimizer]) -> dict[str, float]:
    known = inspect.signature(cls).parameters
    return {name: value for name, value in {"momentum": 0.9, "weight_decay": 0.05}.items() if name in known}


def grouped(cls: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """Groups that are not in the order of the vector, one of them with nothing to train."""
    first, middle, last = model[0], model[2], model[4]
    groups: list[dict[str, Any]] = [
        {"params": [last.bias, *first.parameters()], "lr": 0.05},
        {"params": [middle.bias, last.weight]},
        {"params": [middle.weight], "lr": 1.0},
    ]
    if "weight_decay" in settings_of(cls):
        groups[1]["weight_decay"] = 0.3
    return cls(groups, lr=0.01, **settings_of(cls))


@pytest.mark.parametrize("cls", sorted(ELEMENTWISE, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_a_flat_optimizer_equals_an_ordinary_one(cls: type[torch.optim.Optimizer]) -> None:
    model, ordinary = seeded(half_frozen), seeded(half_frozen)
    vector = Vector(model)
    flat_optimizer, ordinary_optimizer = grouped(cls, model), grouped(cls, ordinary)
    runs = flatten(flat_optimizer, vector)
    assert runs is not None
    start = flat(model.parameters())
    for x in inputs(8):
        vector.gradient.zero_()
        model(x).square().mean().backward()
        for run in runs:
            run.grad = vector.gather_gradient()[run.start : run.start + len(run)]
        flat_optimizer.step()
        ordinary_optimizer.zero_grad()
        ordinary(x).square().mean().backward()
        ordinary_optimizer.step()
    assert not torch.equal(flat(model.parameters()), start)
    assert torch.allclose(flat(model.parameters()), flat(ordinary.parameters()), rtol=0, atol=1e-6)


def test_neighbours_in_one_group_become_one_run() -> None:
    model = seeded(half_frozen)
    vector = Vector(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flatten(optimizer, vector)
    assert [len(run) for run in optimizer.param_groups[0]["params"]] == [vector.parameter_count]


class Rotated(torch.optim.SGD):
    """Looks like SGD, but a subclass may do anything with shapes."""


@pytest.mark.parametrize("cls", [Rotated, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Adafactor])
def test_other_optimizers_stay_as_they_were_made(cls: type[torch.optim.Optimizer]) -> None:
    model = seeded(small)
    vector = Vector(model)
    optimizer = cls(model.parameters(), lr=0.1)
    before = [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups]
    assert flatten(optimizer, vector) is None
    assert [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups] == before


def test_an_optimizer_of_foreign_parameters_is_refused() -> None:
    vector = Vector(seeded(small))
    with pytest.raises(TaskError, match="a parameter that is not the model's"):
        flatten(torch.optim.SGD(small().parameters(), lr=0.1), vector)


def test_a_learner_steps_with_its_newest_gradient_buffer() -> None:
    task = Blobs(norm=False, momentum=0.0)
    points, labels = task.train_data().tensors
    batches = [[points[start : start + 16], labels[start : start + 16]] for start in (0, 16)]
    learner = Learner(task, iter(batches), node="worker-0", seed=3)
    sent, *_ = learner.compute("dense", fresh=False)
    first = sent.clone()
    newest, _, samples, _ = learner.compute("dense", fresh=True)
    before = learner.weights.clone()
    learner.step(None, rate=0.5)
    assert torch.equal(sent, first) and samples == 16
    assert torch.allclose(learner.weights, before - 0.5 * 0.05 * newest)
    assert learner.optimizer.param_groups[0]["lr"] == 0.05


def test_a_stale_step_lessens_momentum_and_its_rate_and_leaves_the_optimizer_as_it_was() -> None:
    task = Blobs(norm=False, momentum=0.9)
    points, labels = task.train_data().tensors
    learner = Learner(task, iter([[points[:16], labels[:16]]] * 2), node="worker-0", seed=3)
    first = learner.compute("dense", fresh=True).gradient
    learner.step(None, 1.0)
    second = learner.compute("dense", fresh=True).gradient
    before = learner.weights.clone()
    learner.step(None, 1.0, staleness=3)
    assert torch.allclose(learner.weights, before - 0.05 / 2 * (second + 0.9**4 * first))
    (group,) = learner.optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (0.05, 0.9)


def test_a_stale_step_without_momentum_is_a_step() -> None:
    task = Blobs(norm=False, momentum=0.0)
    points, labels = task.train_data().tensors
    learner = Learner(task, iter([[points[:16], labels[:16]]]), node="worker-0", seed=3)
    gradient, before = learner.compute("dense", fresh=True).gradient, learner.weights.clone()
    learner.step(None, 1.0, staleness=3)
    assert torch.allclose(learner.weights, before - 0.05 * gradient)
