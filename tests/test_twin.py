"""A model on a device of its own trains as one in the host's memory; the device here is the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tether.learner import Learner, build_model, evaluate
from tether.machine import Machine, Node, Replica, Wanted
from tether.plan import Request, RunPlan
from tether.protocols import Averaging, Elastic, Options, Server
from tether.runtimes.base import Runtime
from tether.runtimes.local import Local
from tether.runtimes.sim import Sim
from tether.swarm import Nobody
from tether.task import Task
from tether.tasks.digits import Digits
from tether.twin import Twin, own_device
from tether.vector import Vector

HERE = torch.device("cpu")


class Words(Task):
    """All that a model can have: rows, a normalization with buffers, a tied weight, a frozen one and an unused one."""

    def __init__(self, momentum: float = 0.0) -> None:
        self.momentum = momentum

    def model(self) -> nn.Module:
        model = nn.Module()
        model.words = nn.Embedding(50, 4)
        model.norm = nn.BatchNorm1d(4)
        model.first = nn.Linear(4, 4)
        model.second = nn.Linear(4, 4)
        model.second.weight = model.first.weight
        model.frozen = nn.Linear(4, 3).requires_grad_(False)
        model.unused = nn.Linear(4, 2)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=self.momentum)

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        seen = model.norm(model.words(batch).sum(1))
        return model.frozen(model.second(model.first(seen).relu())).square().mean()


def batches() -> Iterator[Tensor]:
    noise = torch.Generator().manual_seed(3)
    while True:
        yield torch.randint(0, 50, (8, 3), generator=noise)


def learner(task: Task, device: torch.device | None) -> Learner:
    return Learner(task, batches(), node="worker-0", seed=5, device=device)


@pytest.mark.parametrize("wanted", ["step", "flat", "rows"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_twin_s_gradients_are_those_of_the_model(wanted: Wanted, momentum: float) -> None:
    plain, apart = learner(Words(momentum), None), learner(Words(momentum), HERE)
    for fresh in [True, False] * 5:
        ours, theirs = apart.compute(wanted, fresh), plain.compute(wanted, fresh)
        assert ours.loss == theirs.loss
        assert torch.equal(ours.gradient, theirs.gradient)
        assert [rows.tolist() for rows in ours.touched] == [rows.tolist() for rows in theirs.touched]
        for each in (plain, apart):
            each.step(None, 1.0)
        assert torch.equal(plain.weights, apart.weights)
    assert not torch.equal(plain.weights, learner(Words(momentum), None).weights)


def test_what_is_installed_at_the_host_is_what_the_twin_computes_with() -> None:
    apart = learner(Words(), HERE)
    before = apart.compute("flat", True).loss
    apart.weights[: apart.parameter_count].zero_()
    assert apart.compute("flat", True).loss != before
    frozen = apart.model.frozen.bias  # all that is left of the scores
    assert apart.compute("flat", True).loss == pytest.approx(float(frozen.square().mean()))


def test_gradients_come_back_while_the_backward_pass_goes_on() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    twin = Twin(model, HERE)
    came: list[bool] = []
    last, first = twin.model[1].weight, twin.model[0].weight
    first.register_hook(lambda _: came.append(bool(torch.equal(twin._came[id(last)], last.grad))))
    twin._gradient.fill_(7.0)
    with twin.computing():
        twin.model(torch.ones(2, 3)).sum().backward()
    assert came == [True]


class Apart(RunPlan):
    """A plan whose learners compute on a device of their own."""

    def build(self, node: Node, *arguments: Any, **more: Any) -> tuple[Machine, Replica]:
        return super().build(node, *arguments[:2], device=HERE if node.computes else None)


def run(apart: bool, protocol: Options, on: Runtime, epochs: float = 1) -> Tensor:
    plan = RunPlan.make(Digits(), protocol, on, Request(epochs=epochs), None)
    if apart:
        plan.__class__ = Apart
    return on.execute(plan, Nobody()).weights


@pytest.mark.parametrize("protocol", [Server(), Averaging(), Elastic()], ids=lambda options: options.name)
def test_a_whole_run_is_the_same(protocol: Options) -> None:
    assert torch.equal(run(True, protocol, Sim(2)), run(False, protocol, Sim(2)))


def test_processes_whose_learners_have_devices_share_weights_in_the_host_s_memory() -> None:
    task = Digits()
    model = build_model(task, 0)
    vector = Vector(model)
    vector.weights.copy_(run(True, Server(sync="async", rate="none"), Local(2), epochs=3))
    assert evaluate(task, model)["error"] < 0.1


def test_without_a_device_nothing_is_apart() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    assert own_device(0) is None


def test_learners_take_devices_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [own_device(index) for index in range(3)] == [torch.device("cuda", i) for i in (0, 1, 0)]
