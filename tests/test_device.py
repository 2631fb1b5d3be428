"""A model on a device of its own trains like one in the host's memory; the device here is the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tether.core.device import Device, DeviceReplica, choose_device
from tether.core.effects import Effect, GradientForm
from tether.core.events import Broadcasted, Event, Received
from tether.core.machine import Machine, Node, Replica
from tether.core.message import tensors_of
from tether.core.vector import Shared, Vector
from tether.errors import UsageError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.learner import Learner, build_model, evaluate
from tether.protocols import Averaging, Elastic, Grid, Mpca, Options, Server, Single, Tide
from tether.runtimes.base import NullObserver, Outcome
from tether.runtimes.local import Local
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


class Point:
    """A point in the work of a stand-in, which is reached when a thread waits for it. The training thread never may."""

    def __init__(self) -> None:
        self.reached = False

    def synchronize(self) -> None:
        if threading.current_thread() is threading.main_thread():
            raise AssertionError("the training thread waits for a copy")
        self.reached = True

    def query(self) -> bool:
        return self.reached


class StandIn(Device):
    """The CPU as a device with memory of its own: it knows which tensors are in that memory."""

    def __init__(self) -> None:
        super().__init__(HERE)

    def _open(self) -> None:
        self.own: list[Tensor] = []

    def adopt_thread(self) -> None:
        pass

    def mark(self) -> Point:
        return Point()

    def follow(self, mark: Any) -> None:
        assert isinstance(mark, Point)

    @contextmanager
    def on_copying_stream(self, after: Any) -> Iterator[None]:
        yield

    def empty(self, count: int, *, dtype: torch.dtype, device: Any = None) -> Tensor:
        self.own.append(torch.empty(count, dtype=dtype))
        return self.own[-1]

    def holds(self, values: Tensor) -> bool:
        first = values.untyped_storage().data_ptr()
        return any(tensor.untyped_storage().data_ptr() == first for tensor in self.own)


def learner(task: Task, apart: bool) -> Learner:
    """A learner in the host's memory, or one whose gradients a device computes for a vector that all nodes share."""
    if not apart:
        return Learner(task, batches(), node="worker-0", seed=5)
    shared = Shared(torch.empty(1 << 16, dtype=torch.uint8), first=True)
    return Learner(task, batches(), node="worker-0", seed=5, device=StandIn(), shared=shared)


@pytest.mark.parametrize("form", ["none", "dense", "rows"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_gradients_of_a_device_replica_are_those_of_the_model(form: GradientForm, momentum: float) -> None:
    plain, apart = learner(Words(momentum), False), learner(Words(momentum), True)
    for fresh in [True, False] * 5:
        ours, theirs = apart.compute(form, fresh), plain.compute(form, fresh)
        assert ours.loss == theirs.loss
        assert torch.equal(ours.gradient, theirs.gradient)
        assert [rows.tolist() for rows in ours.touched] == [rows.tolist() for rows in theirs.touched]
        for each in (plain, apart):
            each.step(None, 1.0)
        assert torch.equal(plain.weights, apart.weights)
    assert not torch.equal(plain.weights, learner(Words(momentum), False).weights)


def test_a_device_replica_computes_with_what_is_installed_at_the_host() -> None:
    apart = learner(Words(), True)
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


class Watched:
    """A machine that must be given only values on the device of its node."""

    def __init__(self, machine: Machine, device: StandIn) -> None:
        self.machine = machine
        self.device = device

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Received | Broadcasted):
            assert all(map(self.device.holds, tensors_of(event.message))), f"{event} has values of the host"
        return self.machine.handle(event, now)

    def check(self) -> None:
        self.machine.check()


class Apart(RunPlan):
    """A plan whose workers have a device of their own."""

    def device(self, node: Node, number: int | None) -> Device | None:
        return StandIn() if node.computes else None

    def build(self, node: Node, *arguments: Any, **more: Any) -> tuple[Machine, Replica]:
        machine, replica = super().build(node, *arguments, **more)
        device = arguments[2] if len(arguments) > 2 else None
        if isinstance(device, StandIn) and not self.shares:
            machine = Watched(machine, device)
        return machine, replica


def run(apart: bool, protocol: Options, **goal: Any) -> Outcome:
    on = Local(1 if isinstance(protocol, Single) else 2)
    plan = RunPlan.make(Digits(), protocol, on, Request(**goal), None)
    if apart:
        plan.__class__ = Apart
    return on.execute(plan, NullObserver())


def test_what_crosses_between_device_and_host_is_the_least_that_a_round_of_averaging_needs() -> None:
    apart = run(True, Averaging(tau=5), steps=20)
    assert torch.equal(apart.weights, run(False, Averaging(tau=5), steps=20).weights)
    for name in ("worker-0", "worker-1"):
        meter = apart.meters[name]
        assert meter.bytes_to_device == 4 * apart.weights.nbytes  # the joint model of each of four rounds
        assert meter.bytes_to_host == 4 * apart.weights.nbytes  # the worker's own after each


def test_with_hardsync_a_gradient_leaves_and_the_weights_arrive_at_every_step() -> None:
    apart = run(True, Server(sync="hard"), steps=10)
    assert torch.allclose(apart.weights, run(False, Server(sync="hard"), steps=10).weights, atol=1e-6)
    gradient = apart.weights.nbytes  # the network has no buffers
    for name in ("worker-0", "worker-1"):
        assert apart.meters[name].bytes_to_host == 10 * gradient
        assert apart.meters[name].bytes_to_device <= 11 * gradient


def test_a_worker_that_exchanges_nothing_is_given_nothing() -> None:
    apart = run(True, Single(), steps=20)
    assert torch.equal(apart.weights, run(False, Single(), steps=20).weights)
    assert apart.meters["worker-0"].bytes_to_device == 0


@pytest.mark.parametrize("protocol", [Elastic(), Mpca(), Tide(), Grid()], ids=lambda options: options.name)
def test_workers_on_devices_learn_and_their_training_thread_never_waits_for_a_copy(protocol: Options) -> None:
    task, apart = Digits(), run(True, protocol, epochs=4)
    model = build_model(task, 0)
    Vector(model).weights.copy_(apart.weights)
    assert evaluate(task, model)["error"] < 0.15
    for meter in (meter for name, meter in apart.meters.items() if name != "hub"):
        assert meter.bytes_to_device <= meter.bytes_received + apart.weights.nbytes
        # the last copies, and those that a later one replaces, are never sent
        assert 0 < meter.bytes_to_host <= 2 * meter.bytes_sent + 3 * apart.weights.nbytes


def test_workers_with_devices_share_weights_in_the_host_s_memory() -> None:
    task = Digits()
    model = build_model(task, 0)
    vector = Vector(model)
    vector.weights.copy_(run(True, Server(sync="async", rate="none"), epochs=3).weights)
    assert evaluate(task, model)["error"] < 0.1


def test_without_an_accelerator_a_worker_has_the_cpu() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert choose_device("auto", 0) is None
    assert choose_device("cpu", 0) is None
    with pytest.raises(UsageError, match="has none besides the CPU"):
        choose_device("cuda:0", 0)


def test_workers_take_devices_in_turns_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for name in ("auto", "cuda"):
        assert [choose_device(name, index) for index in range(3)] == [torch.device("cuda", i) for i in (0, 1, 0)]
    assert [choose_device("cuda:1", index) for index in range(2)] == [torch.device("cuda", 1)] * 2
    with pytest.raises(UsageError, match="has 2 of the kind 'cuda'"):
        choose_device("cuda:2", 0)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", 0])
def test_a_name_that_is_no_device_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="device"):
        Local(device=name)
