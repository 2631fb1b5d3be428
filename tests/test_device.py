"""A model on a device of its own trains like one in the host's memory; the device here is the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tether.core.device import DeviceReplica, own_device
from tether.core.effects import GradientForm
from tether.core.machine import Machine, Node, Replica
from tether.core.vector import Vector
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.learner import Learner, build_model, evaluate
from tether.protocols import Averaging, Elastic, Options, Server
from tether.runtimes.base import NullObserver, Runtime
from tether.runtimes.local import Local
from tether.runtimes.sim.runtime import Sim
from tether.task import Task
from tether.tasks.digits import Digits

HERE = torch.device("cpu")


class Words(Task):
    """Everything that a model can have: rows, a normalization with buffers, a tied, a frozen and an unused weight."""

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


@pytest.mark.parametrize("form", ["none", "dense", "rows"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_gradients_of_a_device_replica_are_those_of_the_model(form: GradientForm, momentum: float) -> None:
    plain, apart = learner(Words(momentum), None), learner(Words(momentum), HERE)
    for fresh in [True, False] * 5:
        ours, theirs = apart.compute(form, fresh), plain.compute(form, fresh)
        assert ours.loss == theirs.loss
        assert torch.equal(ours.gradient, theirs.gradient)
        assert [rows.tolist() for rows in ours.touched] == [rows.tolist() for rows in theirs.touched]
        for each in (plain, apart):
            each.step(None, 1.0)
        assert torch.equal(plain.weights, apart.weights)
    assert not torch.equal(plain.weights, learner(Words(momentum), None).weights)


def test_a_device_replica_computes_with_what_is_installed_at_the_host() -> None:
    apart = learner(Words(), HERE)
    before = apart.compute("dense", True).loss
    apart.weights[: apart.parameter_count].zero_()
    assert apart.compute("dense", True).loss != before
    frozen = apart.model.frozen.bias  # all that is left of the scores
    assert apart.compute("dense", True).loss == pytest.approx(float(frozen.square().mean()))


def test_gradients_are_copied_back_while_the_backward_pass_is_running() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    replica = DeviceReplica(model, HERE)
    copied: list[bool] = []
    last, first = replica.model[1].weight, replica.model[0].weight
    first.register_hook(lambda _: copied.append(bool(torch.equal(replica._host_gradients[id(last)], last.grad))))
    replica._host_gradient.fill_(7.0)
    with replica.on_stream():
        replica.model(torch.ones(2, 3)).sum().backward()
    assert copied == [True]


class Apart(RunPlan):
    """A plan whose workers compute on a device of their own."""

    def build(self, node: Node, *arguments: Any, **more: Any) -> tuple[Machine, Replica]:
        return super().build(node, *arguments[:2], device=HERE if node.computes else None)


def run(apart: bool, protocol: Options, on: Runtime, epochs: float = 1) -> Tensor:
    plan = RunPlan.make(Digits(), protocol, on, Request(epochs=epochs), None)
    if apart:
        plan.__class__ = Apart
    return on.execute(plan, NullObserver()).weights


@pytest.mark.parametrize("protocol", [Server(), Averaging(), Elastic()], ids=lambda options: options.name)
def test_a_whole_run_is_the_same(protocol: Options) -> None:
    assert torch.equal(run(True, protocol, Sim(2)), run(False, protocol, Sim(2)))


def test_workers_with_devices_share_weights_in_the_host_s_memory() -> None:
    task = Digits()
    model = build_model(task, 0)
    vector = Vector(model)
    vector.weights.copy_(run(True, Server(sync="async", rate="none"), Local(2), epochs=3))
    assert evaluate(task, model)["error"] < 0.1


def test_without_cuda_a_worker_has_no_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    assert own_device(0) is None


def test_workers_take_devices_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [own_device(index) for index in range(3)] == [torch.device("cuda", i) for i in (0, 1, 0)]
