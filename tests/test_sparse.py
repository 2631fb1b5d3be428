"""Embeddings whose gradients are the touched rows: equal to dense ones where that is promised, otherwise lazy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tether.core.effects import GradientForm
from tether.learner import sparse as sparse_module
from tether.learner.learner import Learner
from tether.task import Task

WORDS = 12


class Sentences(Task):
    """Sums of word vectors against a target; `also` uses the embedding a second time, as a layer."""

    def __init__(self, make: Any, sparse: bool = False, also: bool = False, tied: bool = False) -> None:
        self.make = make
        self.sparse = sparse
        self.also = also
        self.tied = tied

    def model(self) -> nn.Module:
        model = nn.Module()
        model.before = nn.Linear(3, 2)
        model.words = nn.Embedding(WORDS, 3, padding_idx=0, sparse=self.sparse)
        model.after = nn.Linear(3, WORDS, bias=False)
        if self.tied:
            model.after.weight = model.words.weight
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.make(model.parameters())
        return made

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        seen = model.words(batch).sum(1)
        scores = model.after(seen) + (seen @ model.words.weight.T if self.also else 0.0)
        return scores.square().mean() + (model.before(seen) - 1).square().mean()


def batches(seed: int = 3) -> Iterator[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, 6, (2, 4), generator=noise)  # with padding and words twice; 6 to 11 never occur


def learner(task: Task, by_rows: bool = True) -> Learner:
    made = Learner(task, batches(), node="worker-0", seed=5)
    if not by_rows:
        made._embeddings, made._embedding_runs, made._dense = [], [], made.vector.parameters
    return made


def trained(task: Task, by_rows: bool = True, steps: int = 20, rate: float = 1.0) -> Learner:
    made = learner(task, by_rows)
    for _ in range(steps):
        made.compute("dense", False)
        made.step(None, rate)
    return made


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_plain_sgd_by_rows_is_the_dense_result(sparse: bool, rate: float) -> None:
    rows, dense = trained(Sentences(sgd, sparse), rate=rate), trained(Sentences(sgd), by_rows=False, rate=rate)
    assert len(rows._embedding_runs) == 1
    torch.testing.assert_close(rows.weights, dense.weights, rtol=1e-6, atol=1e-7)
    assert not torch.equal(rows.weights, learner(Sentences(sgd)).weights)


def test_a_gradient_is_that_of_a_dense_embedding_and_only_touched_rows_are_looked_at() -> None:
    rows, dense = learner(Sentences(sgd)), learner(Sentences(sgd), by_rows=False)
    for _ in range(5):
        torch.testing.assert_close(rows.compute("dense", False)[0], dense.compute("dense", False)[0])
        embedding = rows._embeddings[0]
        assert embedding.touched is not None and set(embedding.touched.tolist()) <= set(range(6))
        rows.vector.gradient[embedding.start + 6 * 3 : embedding.stop] = 7.0  # of words that no batch has
        before = rows.weights.clone()
        rows.step(None, 1.0)
        dense.step(None, 1.0)
        assert torch.equal(
            rows.weights[embedding.start + 18 : embedding.stop], before[embedding.start + 18 : embedding.stop]
        )
        rows.vector.gradient[embedding.start + 18 : embedding.stop] = 0.0
    torch.testing.assert_close(rows.weights, dense.weights)


def test_the_momentum_of_a_row_does_not_change_until_the_row_is_touched() -> None:
    made = learner(Sentences(momentum, sparse=True))
    embedding = made._embeddings[0]
    expected = made.weights[embedding.start : embedding.stop].view(WORDS, 3).clone()
    moments = torch.zeros(WORDS, 3)
    for _ in range(15):
        gradient = made.compute("dense", False)[0][embedding.start : embedding.stop].view(WORDS, 3).clone()
        assert embedding.touched is not None
        for row in embedding.touched.tolist():
            moments[row] = 0.9 * moments[row] + gradient[row]
            expected[row] -= 0.05 * moments[row]
        made.step(None, 1.0)
    torch.testing.assert_close(made.weights[embedding.start : embedding.stop].view(WORDS, 3), expected)


def test_adam_of_rows_is_that_of_torch_for_sparse_gradients() -> None:
    made = learner(Sentences(adam, sparse=True))
    embedding = made._embeddings[0]
    other = nn.Embedding(WORDS, 3, sparse=True)
    other.weight.data.copy_(made.weights[embedding.start : embedding.stop].view(WORDS, 3))
    theirs = torch.optim.SparseAdam(other.parameters(), lr=0.01)
    for _ in range(15):
        gradient = made.compute("dense", False)[0][embedding.start : embedding.stop].view(WORDS, 3)
        assert embedding.touched is not None
        other.weight.grad = torch.sparse_coo_tensor(
            embedding.touched[None], gradient[embedding.touched], (WORDS, 3), check_invariants=True
        )
        theirs.step()
        made.step(None, 1.0)
        torch.testing.assert_close(
            made.weights[embedding.start : embedding.stop].view(WORDS, 3), other.weight.data, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_a_weight_that_is_also_used_otherwise_is_stepped_as_a_whole(make: Any) -> None:
    rows, dense = trained(Sentences(make, sparse=True, also=True)), trained(Sentences(make, also=True), by_rows=False)
    assert rows._embeddings and rows._embeddings[0].touched is None
    torch.testing.assert_close(rows.weights, dense.weights)


@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_a_gradient_from_elsewhere_touches_all_rows(make: Any) -> None:
    rows, dense = learner(Sentences(make, sparse=True)), learner(Sentences(make, sparse=True), by_rows=False)
    noise = torch.Generator().manual_seed(1)
    for _ in range(5):
        rows.compute("dense", False)
        gradient = torch.randn(rows.parameter_count, generator=noise)
        rows.step(gradient, 1.0)
        dense.step(gradient, 1.0)
    torch.testing.assert_close(rows.weights, dense.weights)


@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_a_gradient_that_is_sent_by_rows_does_at_a_hub_what_it_does_at_home(make: Any) -> None:
    home, away, hub = (learner(Sentences(make, sparse=True)) for _ in range(3))
    for _ in range(10):
        home.compute("none", False)
        home.step(None, 0.5)
        taken = away.compute("rows", True)
        (rows,) = taken.touched
        others = away.parameter_count - WORDS * 3
        assert len(taken.gradient) == others + len(rows) * 3 and len(rows) < WORDS / 2
        kept = taken.gradient.clone()
        hub.step(taken.gradient, 0.5, taken.touched)
        assert torch.equal(taken.gradient, kept)
        away.weights.copy_(hub.weights)
    torch.testing.assert_close(hub.weights, home.weights)


class Counting(Sentences):
    """Assigns a new buffer in every pass."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("passes", torch.zeros(1))
        return model

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        model.passes = model.passes + 1
        return super().loss(model, batch)


@pytest.mark.parametrize("form", ["none", "dense", "rows"])
def test_buffers_are_in_the_vector_whatever_is_wanted_of_the_gradient(form: Any) -> None:
    made = learner(Counting(sgd))
    for _ in range(3):
        made.compute(form, False)
    assert made.weights[made.parameter_count :].tolist() == [3.0]


def test_a_gradient_of_all_rows_travels_flat() -> None:
    taken = learner(Sentences(sgd, also=True)).compute("rows", True)
    assert taken.touched == () and len(taken.gradient) == learner(Sentences(sgd)).parameter_count


@pytest.mark.parametrize(
    "task",
    [
        Sentences(momentum),
        Sentences(adam),
        Sentences(sgd, tied=True),
        Sentences(lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01), sparse=True),
        Sentences(lambda parameters: torch.optim.RMSprop(parameters, lr=0.01), sparse=True),
    ],
)
def test_what_would_make_a_difference_stays_dense(task: Task) -> None:
    made = trained(task, steps=3)
    assert made._embeddings == []


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01, weight_decay=0.01)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every embedding counts as a large one."""
    monkeypatch.setattr(sparse_module, "LARGE", 1)


@pytest.mark.parametrize("make", [momentum, adam, decaying])
@pytest.mark.parametrize("form", ["none", "dense", "rows"])
def test_the_gradient_of_a_large_embedding_is_rows_and_all_rows_are_stepped(
    make: Any, form: GradientForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = trained(Sentences(make))
    assert dense._embeddings == []
    monkeypatch.setattr(sparse_module, "LARGE", 1)
    made = learner(Sentences(make))
    embedding = made._embeddings[0]
    for fresh in [True, False] * 10:
        made.compute(form, fresh)
        assert embedding.touched is not None and len(embedding.touched) < WORDS / 2
        made.step(None, 1.0)
    torch.testing.assert_close(made.weights, dense.weights)


@pytest.mark.parametrize("make", [momentum, adam, decaying])
def test_rows_of_a_large_embedding_travel_and_the_hub_steps_all(make: Any, large: None) -> None:
    home, away, hub = (learner(Sentences(make)) for _ in range(3))
    for _ in range(10):
        home.compute("none", False)
        home.step(None, 0.5)
        taken = away.compute("rows", True)
        assert len(taken.touched) == 1 and len(taken.gradient) < away.parameter_count
        hub.step(taken.gradient, 0.5, taken.touched)
        away.weights.copy_(hub.weights)
    torch.testing.assert_close(hub.weights, home.weights)


def test_a_step_with_foreign_rows_leaves_the_own_ones_as_they_were(large: None) -> None:
    made, other = learner(Sentences(momentum)), learner(Sentences(momentum))
    other.compute("rows", True)
    foreign = other.compute("rows", True)
    made.compute("none", False)
    own = made._embeddings[0].dense_gradient().clone()
    made.step(foreign.gradient, 1.0, foreign.touched)
    assert torch.equal(made._embeddings[0].dense_gradient(), own)


@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_the_optimizer_resumes_where_it_was(make: Any) -> None:
    whole = trained(Sentences(make, sparse=True), steps=20)
    half = trained(Sentences(make, sparse=True), steps=10)
    other = learner(Sentences(make, sparse=True))
    for _ in range(10):
        other.compute("dense", False)  # the same batches
    other.weights.copy_(half.weights)
    other.restore(half.state())
    for _ in range(10):
        other.compute("dense", False)
        other.step(None, 1.0)
    torch.testing.assert_close(other.weights, whole.weights)


def test_a_fresh_buffer_begins_with_zeros() -> None:
    made = learner(Sentences(sgd))
    first = made.compute("dense", True)[0]
    kept = first.clone()
    second = made.compute("dense", True)[0]
    assert torch.equal(first, kept) and second.data_ptr() != first.data_ptr()
    again = learner(Sentences(sgd), by_rows=False)
    again.compute("dense", False)
    torch.testing.assert_close(second, again.compute("dense", False)[0])


def test_a_step_with_a_foreign_gradient_leaves_both_gradients_as_they_were() -> None:
    made = learner(Sentences(sgd))
    own = made.compute("dense", False)[0].clone()
    before, foreign = made.weights.clone(), torch.ones(made.parameter_count)
    made.step(foreign, 0.5)
    torch.testing.assert_close(made.weights, before - 0.05)
    assert torch.equal(made.vector.gradient, own) and torch.equal(foreign, torch.ones(made.parameter_count))
    made.step(None, 1.0)
    torch.testing.assert_close(made.weights, before - 0.05 - 0.1 * own)
