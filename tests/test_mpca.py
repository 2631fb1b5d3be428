"""MPCA SGD as its paper tells it: the equations, the cycles of the shards, workers that never stop, and deaths."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether import Faults, Mpca, StepTime
from tether.api import resume
from tether.core.effects import (
    Blend,
    Broadcast,
    Checkpoint,
    Compute,
    Effect,
    Install,
    Record,
    Reduce,
    Send,
    SetTimer,
    Step,
)
from tether.core.events import (
    Broadcasted,
    Event,
    GradientReady,
    PeerJoined,
    PeerLost,
    Received,
    Reduced,
    Started,
    StopRequested,
    TimerFired,
)
from tether.core.machine import Machine, NodeContext, Schedule
from tether.core.message import Tag
from tether.core.snapshot import Snapshot
from tether.errors import UsageError
from tether.execution.directory import RunDirectory
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.execution.progress import make_progress
from tether.learner.synthetic import SyntheticTask
from tether.protocols.circulation import PATIENCE, SHARDS_MAX, tag_of, timer_of
from tether.protocols.ledger import DEALING, More
from tether.protocols.mpca import PULL, AreYouThere, Here, MpcaHub, MpcaWorker, Projected
from tether.runtimes.base import NullObserver, Outcome
from tether.testing.conformance import Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim

FAR = 10**6
#: so small that pulling by it changes nothing
NOTHING = 1e-300


def seat_of(
    options: Mpca,
    node: str,
    vector: Tensor,
    buffers: int = 0,
    workers: int = 2,
    restored: dict[str, Any] | None = None,
    **goal: Any,
) -> NodeContext:
    nodes = options.nodes(workers)
    place = next(candidate for candidate in nodes if candidate.name == node)
    schedule = Schedule(**{"steps": FAR, "evaluate_every": FAR, **goal})
    return NodeContext(place, nodes, vector, len(vector) - buffers, schedule, restored)


def members_of(workers: int) -> tuple[str, ...]:
    return ("hub", *(f"worker-{i}" for i in range(workers)))


def of_kind(effects: list[Effect], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the equations, at the hub --------------------------------------------------------------------------------------


class HubAlone:
    """A hub that is told of reductions; what it installs and broadcasts is kept."""

    def __init__(self, options: Mpca, parameters: int = 7, buffers: int = 0, **more: Any) -> None:
        self.vector = numbers(1, parameters + buffers)
        self.machine = MpcaHub(seat_of(options, "hub", self.vector, buffers, **more), options)
        self.cut = options.cut(self.machine.context)
        self.cycles = list(self.machine.cycles)
        self.sent: dict[int, Projected] = {}
        self.installed: Install | None = None
        self.rows: list[dict[str, Any]] = []
        #: of each shard: the steps that each worker has told
        self.told: dict[int, list[int]] = {}
        self.feed(Started(members_of(len(self.machine.context.workers))))

    def feed(self, event: Event, now: float = 0.0) -> list[Effect]:
        if isinstance(event, Reduced):  # nobody makes more than it was dealt
            ledger = self.machine.progress.ledger
            for name, steps in zip(event.contributors, event.steps, strict=True):
                ledger.deal(name, max(0, steps - len(ledger.held[name])) or 1)
        effects = self.machine.handle(event, now)
        self.machine.check()
        for effect in effects:
            match effect:
                case Install(values=values, start=start):
                    self.installed = effect
                    self.vector[start : start + len(values)] = values
                case Broadcast(message=Projected() as projected):
                    self.sent[projected.shard] = projected
                case Record(values=row):
                    self.rows.append(row)
        return effects

    def reduce(self, shard: int, locals_: Tensor, taus: tuple[int, ...], now: float = 0.0) -> list[Effect]:
        """The workers' own shards, one row each, weighted as they weight them."""
        weights = torch.tensor(
            [float(tau) if self.machine.options.weighted else float(tau > 0) for tau in taus]
        ).double()
        names = members_of(len(taus))[1:]
        total = (weights[:, None] * locals_).sum(0)
        tag = tag_of(shard, self.cycles[shard])
        self.cycles[shard] += 1
        told = self.told.get(shard, [0] * len(taus))
        self.told[shard] = [before + tau for before, tau in zip(told, taus, strict=True)]
        return self.feed(Reduced(tag, total, float(weights.sum()), names, tuple(self.told[shard])), now)


@pytest.mark.parametrize("phases", [1, 2, 3])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_joint_model_follows_equations_4_5_8_and_9(phases: Any, weighted: bool) -> None:
    options = Mpca(phases=phases, weighted=weighted, beta=0.6, gamma=0.7, delta=0.8, beta_cycles=4, gamma_cycles=3)
    hub = HubAlone(options, parameters=8, workers=3)
    joint = hub.vector.clone()
    velocity = torch.zeros(8, dtype=torch.float64)
    for shard in range(phases):
        assert torch.equal(hub.sent[shard].values, joint[hub.cut[shard]]), "the first broadcast is the model itself"
    for cycle in range(8):
        beta, gamma = 0.6 ** min(1, cycle / 4), 0.7 * min(1, cycle / 3)
        for shard, part in enumerate(hub.cut):
            taus = (1 + cycle, 3, 2 * shard)
            locals_ = numbers(100 * cycle + shard, 3, part.stop - part.start)
            mean = sum(tau * own for tau, own in zip(taus, locals_, strict=True)) / sum(taus)
            if not weighted:
                counted = [own for tau, own in zip(taus, locals_, strict=True) if tau]
                mean = sum(counted) / len(counted)
            before = joint[part].clone()
            joint[part] = (1 - beta) * before + beta * mean
            velocity[part] = 0.8 * velocity[part] + 0.2 * (joint[part] - before)
            hub.reduce(shard, locals_, taus)
            assert hub.installed is not None and hub.installed.start == part.start
            assert torch.allclose(hub.installed.values, joint[part], rtol=0, atol=1e-12)
            projected = joint[part] + gamma * velocity[part]
            assert hub.sent[shard].cycle == cycle + 1
            assert torch.allclose(hub.sent[shard].values, projected, rtol=0, atol=1e-12)
    assert torch.allclose(hub.vector, joint, rtol=0, atol=1e-12)


def test_a_row_tells_what_the_cycle_was_made_with() -> None:
    options = Mpca(
        phases=1, alpha=0.1, alpha_start=0.4, free_steps=3, alpha_decay_steps=4, beta_cycles=4, gamma_cycles=2
    )
    hub = HubAlone(options)
    for cycle in range(5):
        hub.reduce(0, numbers(cycle, 2, 7), (cycle + 1, 3), now=1.5 * cycle + 1)
    assert [row["taus"] for row in hub.rows] == [[cycle + 1, 3] for cycle in range(5)]
    assert [row["tau"] for row in hub.rows] == [(cycle + 4) / 2 for cycle in range(5)]
    assert [row["cycle"] for row in hub.rows] == list(range(5))
    assert [row["cycle_seconds"] for row in hub.rows] == [1.0, 1.5, 1.5, 1.5, 1.5]
    assert [row["beta"] for row in hub.rows] == pytest.approx([0.9 ** (cycle / 4) for cycle in range(5)])
    assert [row["gamma"] for row in hub.rows] == pytest.approx([0.0, 0.35, 0.7, 0.7, 0.7])
    # two workers made 4, 9, 15, 22 and 30 gradients: steps 0, 2, 4, 7, 11 when the rows were written
    assert [row["alpha"] for row in hub.rows] == pytest.approx([0.0, 0.0, 0.4 * 0.25 ** (1 / 4), 0.1, 0.1])
    assert {row["workers"] for row in hub.rows} == {2}


def test_buffers_are_a_shard_of_their_own_that_is_not_projected() -> None:
    hub = HubAlone(Mpca(phases=2, beta_cycles=0, gamma_cycles=0), parameters=5, buffers=3)
    assert hub.cut == [slice(0, 2), slice(2, 5), slice(5, 8)]
    assert set(hub.sent) == {0, 1, 2}, "it does not count as a phase"
    before = hub.vector[5:].clone()
    mean = torch.tensor([1.0, 2.0, 3.0]).double()
    for cycle in range(3):
        hub.reduce(2, mean.repeat(2, 1), (2, 2))
        before = 0.1 * before + 0.9 * mean
        assert torch.allclose(hub.sent[2].values, before, atol=1e-12)
        assert torch.equal(hub.sent[2].values, hub.vector[5:])
        assert hub.sent[2].cycle == cycle + 1
    hub.reduce(0, numbers(3, 2, 2), (2, 2))
    assert not torch.allclose(hub.sent[0].values, hub.vector[:2]), "a shard of parameters is"


def test_a_reduction_without_anybodys_steps_changes_nothing() -> None:
    hub = HubAlone(Mpca(phases=1, beta_cycles=0, gamma_cycles=0))
    hub.reduce(0, numbers(2, 2, 7), (1, 1))
    before, sent = hub.vector.clone(), hub.sent[0]
    hub.cycles[0] += 1
    effects = hub.feed(Reduced(tag_of(0, 1), None, 0.0, ()))
    assert not of_kind(effects, Install) and not of_kind(effects, Record)
    effects = hub.reduce(0, numbers(3, 2, 7), (0, 0))
    assert not of_kind(effects, Install) and not of_kind(effects, Record)
    assert torch.equal(hub.vector, before) and torch.equal(hub.sent[0].values, sent.values)
    assert hub.sent[0].cycle == 3


def test_a_gradient_counts_once_every_shard_has_been_reduced_after_it() -> None:
    hub = HubAlone(Mpca(phases=3), parameters=6, buffers=1, batch_size=16)
    progress = hub.machine.progress
    for shard, taus in ((0, (4, 6)), (1, (5, 5)), (3, (9, 9)), (0, (3, 3))):
        hub.reduce(shard, numbers(shard, 2, hub.cut[shard].stop - hub.cut[shard].start), taus)
        assert progress.step == 0 and progress.samples == 0
    hub.reduce(2, numbers(2, 2, 2), (6, 7))
    assert (progress.step, progress.samples) == (5, 10 * 16), "shard 1 has 10 of the gradients"
    hub.reduce(1, numbers(1, 2, 2), (9, 9))
    assert (progress.step, progress.samples) == (6, 13 * 16), "shard 2 has 13"


def test_shards_take_turns() -> None:
    hub = HubAlone(Mpca(phases=1, shards=4))
    shard, turns = 0, []
    for _ in range(12):
        turns.append(shard)
        (reduce,) = of_kind(hub.reduce(shard, numbers(1, 2, len(hub.vector[hub.cut[shard]])), (1, 1)), Reduce)
        shard = reduce.tag.stream.shard
    assert turns == [0, 1, 2, 3] * 3


def test_checkpoints_on_the_way_keep_the_same_as_the_last() -> None:
    hub = HubAlone(Mpca(phases=1), checkpoint_seconds=1.0)
    hub.reduce(0, numbers(1, 2, 7), (1, 1), now=0.0)
    (saved,) = of_kind(hub.reduce(0, numbers(2, 2, 7), (1, 1), now=1.0), Checkpoint)
    assert saved.state["cycles"] == [2] and saved.state["velocity"].abs().max() > 0


def test_checkpoints_keep_cycles_and_velocity() -> None:
    options = Mpca(phases=2, beta_cycles=4, gamma_cycles=3)
    hub = HubAlone(options, parameters=5, buffers=2)
    for cycle, shard in itertools.product(range(2), range(3)):
        hub.reduce(shard, numbers(cycle + 7 * shard, 2, hub.cut[shard].stop - hub.cut[shard].start), (1, 2))
    (saved,) = of_kind(hub.feed(StopRequested("enough")), Checkpoint)
    kept = {"cycles": list(saved.state["cycles"]), "velocity": saved.state["velocity"].clone()}
    assert kept["cycles"] == [2, 2, 2]

    again = HubAlone(options, parameters=5, buffers=2, restored=saved.state, workers=5)
    assert [again.sent[shard].cycle for shard in range(3)] == [2, 2, 2]
    part = again.cut[1]
    before, own = again.vector[part].clone(), numbers(9, 1, 3)
    again.reduce(1, own, (4,))
    beta, gamma = 0.9 ** (2 / 4), 0.7 * 2 / 3
    joint = (1 - beta) * before + beta * own[0]
    velocity = 0.8 * kept["velocity"][part] + 0.2 * (joint - before)
    assert torch.allclose(again.sent[1].values, joint + gamma * velocity, atol=1e-12)
    assert kept["velocity"][part].abs().min() > 1e-3, "else the velocity would not show"
    assert torch.equal(saved.state["velocity"], kept["velocity"]), "what was saved is not changed by who continues"


# ---- the equations, at a worker -------------------------------------------------------------------------------------


class WorkerAlone:
    """A worker and its vector; it has been given all shards of `target`."""

    def __init__(
        self, options: Mpca, parameters: int = 5, buffers: int = 2, alpha: float = 0.25, late: bool = False
    ) -> None:
        self.vector = numbers(1, parameters + buffers)
        self.target = numbers(2, parameters + buffers)
        context = seat_of(options, "worker-0", self.vector, buffers)
        if late:
            context = dataclasses.replace(context, node=context.node.successor())
        self.machine = MpcaWorker(context, options)
        self.cut = options.cut(self.machine.context)
        self.contributions: list[tuple[str, float, int, Tensor]] = []
        self.now = 0.0
        #: what a step takes the usual worker
        self.step_seconds = 0.1
        self.effects = self.feed(Started(members_of(2)))
        if self.machine.running:
            self.vector.copy_(self.target)
        for shard in range(len(self.cut)):
            self.effects = self.broadcast(shard, 0, alpha)
            if self.machine.running:
                self.feed(TimerFired(timer_of(shard)))

    def broadcast(self, shard: int, cycle: int, alpha: float, values: Tensor | None = None) -> list[Effect]:
        values = self.target[self.cut[shard]].clone() if values is None else values
        projected = Projected(shard, cycle, self.step_seconds, values, alpha=alpha)
        return self.feed(Broadcasted(tag_of(shard, 0).stream, members_of(2), projected))

    def feed(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.machine.check()
        for effect in effects:
            match effect:
                case Install(values=values, start=start):
                    self.vector[start : start + len(values)] = values
                case Blend(values=values, rate=rate, start=start):
                    self.vector[start : start + len(values)].lerp_(values, rate)
                case Step(gradient=gradient):
                    own = torch.ones(self.machine.context.parameter_count).double()
                    self.vector[: self.machine.context.parameter_count] -= own if gradient is None else gradient
                case Reduce(tag=tag, values=Snapshot(start=start, stop=stop), weight=weight, steps=steps):
                    self.contributions.append((tag, weight, steps, self.vector[start:stop].clone()))
        return effects

    def gradient(self, exchange_seconds: float = 0.0) -> list[Effect]:
        gradient = torch.ones(self.machine.context.parameter_count).double()
        effects = self.feed(GradientReady(gradient, 1.0, 16, 0.1, exchange_seconds))
        assert (gradient == 1.0).all(), "what an event brings is not the machine's to change"
        return effects


def test_the_workers_of_a_new_run_begin_at_once() -> None:
    options = Mpca(phases=3)
    vector = numbers(1, 7)
    worker = MpcaWorker(seat_of(options, "worker-0", vector), options)
    assert [type(effect) for effect in worker.handle(Started(members_of(2)), 0.0)] == [Compute]
    effects = worker.handle(GradientReady(torch.ones(7), 1.0, 16, 0.1), 0.1)
    assert [type(effect) for effect in effects] == [Step, Compute], "nothing pulls where nothing was told yet"
    projected = Projected(0, 0, 0.0, numbers(2, 2), alpha=0.25)
    (contribution,) = worker.handle(Broadcasted(tag_of(0, 0).stream, members_of(2), projected), 0.15)
    assert isinstance(contribution, Reduce) and (contribution.weight, contribution.steps) == (1.0, 1)
    assert len(of_kind(worker.handle(GradientReady(torch.ones(7), 1.0, 16, 0.1), 0.2), Blend)) == 1


def test_who_comes_late_begins_with_the_joint_model_once_it_has_every_shard() -> None:
    worker = WorkerAlone(Mpca(phases=3), late=True)
    assert [type(effect) for effect in worker.effects] == [Reduce, Install, Send]
    assert worker.effects[-1].message.idle, "it was dealt nothing yet"
    assert torch.equal(worker.vector, worker.target)
    assert [(weight, steps) for _, weight, steps, _ in worker.contributions] == [(0.0, 0)] * 4, "it holds nobody up"


def test_who_has_not_begun_yet_does_not_send_the_same_shard_round_without_end() -> None:
    options = Mpca(phases=3)
    context = seat_of(options, "worker-0", numbers(1, 9))
    worker = MpcaWorker(dataclasses.replace(context, node=context.node.successor()), options)
    worker.handle(Started(members_of(2)), 0.0)
    first, again = (
        worker.handle(Broadcasted(tag_of(2, 0).stream, members_of(2), Projected(2, cycle, 0.1, numbers(2, 3))), 0.01)
        for cycle in (4, 5)
    )
    assert [type(effect) for effect in first] == [Reduce], "it holds nobody up"
    assert again == [SetTimer(timer_of(2), pytest.approx(0.1))], "what it gives has not changed since"
    assert [type(effect) for effect in worker.handle(TimerFired(timer_of(2)), 0.11)] == [Reduce]


def test_a_worker_is_displaced_before_every_gradient() -> None:
    """Equation 7, over the whole vector."""
    worker = WorkerAlone(Mpca(phases=2), alpha=0.25)
    expected = worker.target.clone()
    for _ in range(3):
        effects = worker.gradient()
        expected[:5] -= 1.0
        expected -= 0.25 * (expected - worker.target)
        assert torch.allclose(worker.vector, expected, atol=1e-12)
        assert isinstance(effects[0], Step) and effects[0].gradient is None and isinstance(effects[-1], Compute)
    # the newest target of each shard, and the newest alpha for all of them
    worker.target[2:5] = 7.0
    worker.broadcast(1, 1, 0.5)
    worker.gradient()
    expected[:5] -= 1.0
    expected -= 0.5 * (expected - worker.target)
    assert torch.allclose(worker.vector, expected, atol=1e-12)


def test_the_pull_may_be_a_part_of_the_gradient() -> None:
    """Equation 6; buffers have no gradient."""
    worker = WorkerAlone(Mpca(phases=2, penalty="gradient"), alpha=0.25)
    worker.vector += numbers(5, 7)
    expected = worker.vector.clone()
    for _ in range(3):
        effects = worker.gradient()
        expected[:5] -= 1.0 + 0.25 * (expected[:5] - worker.target[:5])
        assert torch.allclose(worker.vector, expected, atol=1e-12)
        assert [type(effect) for effect in effects] == [Step, Compute]


@pytest.mark.parametrize("penalty", ["displace", "gradient"])
def test_without_alpha_nothing_pulls(penalty: Any) -> None:
    worker = WorkerAlone(Mpca(penalty=penalty), alpha=0.0)
    worker.vector += 1.0
    expected = worker.vector.clone()
    assert not of_kind(worker.gradient(), Blend)
    expected[:5] -= 1.0
    assert torch.equal(worker.vector, expected)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_worker_weights_its_shard_by_the_steps_since_the_last_contribution(weighted: bool) -> None:
    worker = WorkerAlone(Mpca(phases=2, weighted=weighted), buffers=0)
    worker.contributions.clear()
    for _ in range(3):
        worker.gradient()
    assert not worker.contributions
    worker.broadcast(0, 1, 0.25)  # has made steps: contributes at once
    worker.gradient()
    worker.broadcast(1, 1, 0.25)
    worker.broadcast(0, 2, 0.25)
    assert [(tag, weight, steps) for tag, weight, steps, _ in worker.contributions] == [
        (tag_of(0, 1), 3.0 if weighted else 1.0, 3),
        (tag_of(1, 1), 4.0 if weighted else 1.0, 4),
        (tag_of(0, 2), 1.0, 4),
    ]


def test_who_has_made_no_step_contributes_after_the_next_before_it_is_displaced() -> None:
    worker = WorkerAlone(Mpca(phases=2), buffers=0)
    worker.contributions.clear()
    worker.now = 0.04
    assert worker.broadcast(0, 1, 0.25) == [SetTimer(timer_of(0), pytest.approx(0.06))]
    assert worker.broadcast(1, 1, 0.25) == [SetTimer(timer_of(1), pytest.approx(0.06))]
    stepped = worker.vector - 1.0
    effects = worker.gradient()
    assert [type(effect) for effect in effects] == [Step, Reduce, Reduce, Blend, Blend, Compute]
    assert [(tag, weight, steps) for tag, weight, steps, _ in worker.contributions] == [
        (tag_of(0, 1), 1.0, 1),
        (tag_of(1, 1), 1.0, 1),
    ]
    assert torch.equal(torch.cat([values for *_, values in worker.contributions]), stepped)


def test_who_is_slower_than_the_usual_contributes_nothing_instead_of_holding_the_others_up() -> None:
    worker = WorkerAlone(Mpca(phases=1), buffers=0)
    worker.contributions.clear()
    worker.now = 0.04
    assert worker.broadcast(0, 1, 0.25) == [SetTimer(timer_of(0), pytest.approx(0.06))]
    worker.now = 0.1
    worker.feed(TimerFired(timer_of(0)))
    assert [(tag, weight, steps) for tag, weight, steps, _ in worker.contributions] == [(tag_of(0, 1), 0.0, 0)]
    worker.now = 0.25  # its turn is over before the broadcast is there
    assert [type(effect) for effect in worker.broadcast(0, 2, 0.25)] == [Reduce]
    assert not of_kind(worker.gradient(), Reduce), "nothing is awaited"
    assert not worker.feed(TimerFired(timer_of(0))), "a timer that comes late does nothing"


def test_as_long_as_nobody_has_made_a_step_all_wait_longer_each_time_but_never_for_long() -> None:
    hub = HubAlone(Mpca(phases=1))
    assert (hub.sent[0].step_seconds, hub.sent[0].lull_seconds) == (0.0, 0.0)
    told = []
    for cycle in range(6):
        hub.reduce(0, numbers(cycle, 2, 7), (0, 0), now=0.01 * (cycle + 1))
        told.append(hub.sent[0].lull_seconds)
    assert told == pytest.approx([0.01, 0.04, 0.16, 0.64, 1.0, 1.0])
    hub.reduce(0, numbers(7, 2, 7), (1, 1), now=0.12)
    assert 0.08 < hub.sent[0].step_seconds < 0.16, "what a step took, and a tenth more"
    assert hub.sent[0].lull_seconds == 0.0


def test_who_has_nothing_left_to_train_on_contributes_its_last_steps_at_once() -> None:
    """Fewer steps than its exchanges are worth are all that there will ever be."""
    worker = WorkerAlone(Mpca(phases=2), buffers=0)
    worker.gradient(exchange_seconds=10.0)  # so costly that the next contribution needs thousands of steps
    worker.contributions.clear()
    worker.broadcast(0, 1, 0.25)
    assert worker.machine.least > 1000 and not worker.contributions
    held = worker.machine.portion._held
    while len(held) > 1:
        held.pop()
    worker.gradient()
    assert not worker.contributions, "it has another mini-batch under way"
    worker.gradient()
    assert worker.machine.portion.idle
    assert [(tag, weight) for tag, weight, *_ in worker.contributions] == [(tag_of(0, 1), 3.0)]
    worker.broadcast(1, 1, 0.25)
    assert [(tag, weight) for tag, weight, *_ in worker.contributions][1:] == [(tag_of(1, 1), 3.0)]
    worker.broadcast(1, 2, 0.25)
    assert worker.contributions[2][1] == 0.0, "nothing new, and nothing to wait for"


def test_the_usual_worker_is_the_one_in_the_middle() -> None:
    hub = HubAlone(Mpca(phases=1), workers=3)
    for cycle in range(1, 40):
        hub.reduce(0, numbers(cycle, 3, 7), (10, 5, int(cycle % 10 == 0)), now=float(cycle))
    assert hub.sent[0].step_seconds == pytest.approx(1.1 / 5)


def test_a_shard_that_is_overdue_closes_with_what_has_come_and_those_missing_are_asked() -> None:
    hub = HubAlone(Mpca(phases=1), workers=3)
    (timer,) = of_kind(hub.reduce(0, numbers(1, 3, 7), (1, 1, 1), now=0.1), SetTimer)
    assert timer == SetTimer(timer_of(0), pytest.approx(PATIENCE * 0.1 + hub.sent[0].step_seconds))
    assert hub.feed(TimerFired(timer_of(0)), 0.5) == [Reduce(tag_of(0, 1), ("hub",))]
    effects = hub.feed(Reduced(tag_of(0, 1), 2 * numbers(2, 7), 2.0, ("worker-0", "worker-2"), (3, 2)), 0.5)
    assert of_kind(effects, Send) == [Send("worker-1", AreYouThere())]
    (without,) = of_kind(effects, Broadcast)
    assert without.members == ("hub", "worker-0", "worker-2")
    (timer,) = of_kind(effects, SetTimer)
    assert timer.seconds == pytest.approx(2 * PATIENCE * 0.1 + hub.sent[0].step_seconds), "it may have been wrong"
    assert hub.rows[-1]["taus"] == [2, 1]
    assert not hub.feed(Reduced(tag_of(0, 1), None, 0.0, ()), 0.6), "an answer that came twice"
    assert not hub.feed(Received("worker-1", Here()), 0.7)
    effects = hub.feed(Reduced(tag_of(0, 2), 2 * numbers(3, 7), 2.0, ("worker-0", "worker-2"), (4, 3)), 0.7)
    (together,) = of_kind(effects, Broadcast)
    assert together.members == members_of(3)
    (timer,) = of_kind(effects, SetTimer)
    assert timer.seconds == pytest.approx(PATIENCE * 0.2 + hub.sent[0].step_seconds)


def test_who_answers_but_is_missing_again_is_left_out_longer_each_time() -> None:
    hub = HubAlone(Mpca(phases=1), workers=2)
    hub.reduce(0, numbers(1, 2, 7), (1, 1), now=0.1)
    now, steps, tried = 0.1, 1, []
    for cycle in range(1, 120):
        (flight,) = hub.machine._under_way.values()
        both, steps = len(flight.members) == 3, steps + 1
        tried += [cycle] if both else []
        now += 0.1
        if both:
            hub.feed(TimerFired(timer_of(0)), now)
        hub.feed(Reduced(tag_of(0, cycle), numbers(cycle, 7), 1.0, ("worker-0",), (steps,)), now)
        if both:
            hub.feed(Received("worker-1", Here()), now)
    gaps = [b - a for a, b in itertools.pairwise(tried)]
    assert gaps[0] == 2 and gaps[1] >= PATIENCE**2 and gaps[2] >= PATIENCE**3, tried


def test_if_nobody_answers_the_first_who_does_goes_on() -> None:
    hub = HubAlone(Mpca(phases=2), workers=2)
    for shard in (0, 1):
        hub.reduce(shard, numbers(1, 2, len(hub.vector[hub.cut[shard]])), (1, 1), now=0.1)
    for shard in (0, 1):
        hub.feed(TimerFired(timer_of(shard)), 0.5)
        assert not of_kind(hub.feed(Reduced(tag_of(shard, 1), None, 0.0, ()), 0.5), Broadcast)
    effects = hub.feed(Received("worker-1", Here()), 9.0)
    assert [broadcast.members for broadcast in of_kind(effects, Broadcast)] == [("hub", "worker-1")] * 2


def test_a_contribution_that_came_too_late_is_told_with_the_next() -> None:
    hub = HubAlone(Mpca(phases=1), batch_size=16)
    hub.feed(Reduced(tag_of(0, 0), numbers(1, 7), 1.0, ("worker-0",), (4,)))
    assert hub.machine.progress.samples == 4 * 16
    hub.feed(Reduced(tag_of(0, 1), 2 * numbers(1, 7), 2.0, ("worker-0", "worker-1"), (5, 6)))
    assert hub.machine.progress.samples == 11 * 16 and hub.rows[-1]["taus"] == [1, 6]


def test_who_was_left_out_counts_no_more_than_the_others_when_it_is_back() -> None:
    worker = WorkerAlone(Mpca(phases=1), buffers=0)
    worker.contributions.clear()
    for _ in range(50):
        worker.gradient()
    worker.broadcast(0, 9, 0.25)
    assert [(weight, steps) for _, weight, steps, _ in worker.contributions] == [(1.0, 50)]
    assert worker.feed(Received("hub", AreYouThere())) == [Send("hub", Here())]


# ---- schedules and settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phases", "share", "steps_paid"), [(1, 0.02, 20), (3, 0.02, 20), (2, 0.1, 4)])
def test_exchanges_that_take_the_processor_may_take_a_share_of_it(phases: Any, share: float, steps_paid: int) -> None:
    worker = WorkerAlone(Mpca(phases=phases, exchange_share=share), buffers=0)
    spent, steps = 0.0, 0
    for cycle in range(1, 40):
        for shard in range(phases):
            worker.broadcast(shard, cycle, 0.1)
        before = len(worker.contributions)
        cost = 0.039  # for each cycle; gradients take 0.1 s
        while len(worker.contributions) < before + phases:
            worker.gradient(cost)
            spent, steps, cost = spent + cost, steps + 1, 0.0
    assert worker.machine.least == steps_paid
    assert spent / (0.1 * steps) == pytest.approx(share, rel=0.1)


def test_alpha_is_nothing_then_high_then_decays_by_a_constant_factor() -> None:
    """Section 6.3."""
    options = Mpca(alpha=0.05, alpha_start=0.5, free_steps=20, alpha_decay_steps=200)

    def alphas(options: Mpca, steps: Any, run: int = FAR) -> list[float]:
        return [options.alpha_at(step, run, 7.0) for step in steps]

    assert alphas(options, (0, 10, 19)) == [0.0] * 3
    assert alphas(options, (20,)) == [0.5]
    falling = alphas(options, range(20, 221))
    assert all(b / a == pytest.approx(0.1 ** (1 / 200)) for a, b in itertools.pairwise(falling))
    assert alphas(options, (220, 221, FAR)) == pytest.approx([0.05] * 3)
    assert alphas(Mpca(alpha=0.05, free_steps=0, alpha_decay_steps=10), (0,)) == [0.5]
    assert alphas(Mpca(alpha=0.05, free_steps=2, alpha_decay_steps=0), range(4)) == [0.0, 0.0, 0.05, 0.05]
    assert alphas(Mpca(alpha=0.05, free_steps=0, alpha_decay_steps=0), (0,)) == [0.05]
    assert alphas(Mpca(alpha=0.6, alpha_start=0.5, free_steps=1), (0, 1, 2, 300)) == [0.0, 0.6, 0.6, 0.6]
    assert alphas(Mpca(alpha=0.05), (19, 20, 220)) == pytest.approx([0.0, 0.5, 0.05]), "the paper's in a long run"
    assert alphas(Mpca(alpha=0.05), (4, 5, 25), run=100) == pytest.approx([0.0, 0.5, 0.05]), "shares of a short one"


@pytest.mark.parametrize("tau", [1.0, 3.3, 12.0, 100.0])
def test_the_automatic_alpha_pulls_as_far_in_a_cycle_whatever_its_length(tau: float) -> None:
    options = Mpca(free_steps=10)
    assert options.alpha_at(9, 1000, tau) == 0.0
    assert 1 - (1 - options.alpha_at(10, 1000, tau)) ** tau == pytest.approx(PULL)
    assert options.alpha_at(10, 1000, 0.2) == pytest.approx(PULL), "a cycle has at least one step"
    assert options.alpha_at(10, 1000, 0.0) == 0.0, "nothing is measured yet"


def test_the_automatic_alpha_follows_the_steps_of_the_usual_worker_in_a_cycle() -> None:
    hub = HubAlone(Mpca(phases=1, free_steps=0), workers=3)
    assert hub.sent[0].alpha == 0.0
    for cycle in range(1, 60):
        hub.reduce(0, numbers(cycle, 3, 7), (20, 10, 0), now=float(cycle))
    assert hub.sent[0].alpha == pytest.approx(1 - (1 - PULL) ** (1 / 10))


def test_beta_falls_from_one_by_a_constant_factor() -> None:
    """Section 4.5."""
    options = Mpca(beta=0.5, beta_cycles=10)
    falling = [options.beta_at(cycle, 0.0) for cycle in range(11)]
    assert falling[0] == 1.0 and falling[10] == 0.5
    assert all(b / a == pytest.approx(0.5**0.1) for a, b in itertools.pairwise(falling))
    assert options.beta_at(11, 0.0) == options.beta_at(FAR, 0.0) == 0.5
    assert Mpca(beta=0.5, beta_cycles=0).beta_at(0, 0.0) == 0.5
    assert {Mpca(beta=1.0).beta_at(cycle, 0.0) for cycle in range(40)} == {1.0}
    assert Mpca(beta=0.5).beta_at(10, 0.0) == pytest.approx(0.5**0.5), "20 cycles, as in the paper"
    assert Mpca(beta=0.5).beta_at(1, 0.1) == pytest.approx(0.5**0.5), "or a fifth of a short run"


def test_gamma_grows_from_nothing_by_as_much_per_cycle() -> None:
    """Section 4.3."""
    options = Mpca(gamma=0.7, gamma_cycles=10)
    assert [options.gamma_at(cycle, 0.0) for cycle in range(13)] == pytest.approx(
        [0.07 * cycle for cycle in range(11)] + [0.7, 0.7]
    )
    assert Mpca(gamma=0.7, gamma_cycles=0).gamma_at(0, 0.0) == 0.7
    assert {Mpca(gamma=0.0).gamma_at(cycle, 0.0) for cycle in range(40)} == {0.0}
    assert Mpca(gamma=0.8).gamma_at(10, 0.0) == Mpca(gamma=0.8).gamma_at(1, 0.1) == pytest.approx(0.4)


def test_every_worker_is_told_the_alpha_of_the_step_that_the_hub_is_at() -> None:
    options = Mpca(phases=1, alpha=0.1, alpha_start=0.4, free_steps=2, alpha_decay_steps=4)
    hub = HubAlone(options)
    told = [hub.sent[0].alpha]
    for cycle in range(5):
        hub.reduce(0, numbers(cycle, 2, 7), (2, 2))
        told.append(hub.sent[0].alpha)
    assert told == pytest.approx([0.0, 0.4, 0.2, 0.1, 0.1, 0.1])
    assert HubAlone(options, first_step=4).sent[0].alpha == pytest.approx(0.2), "a continued run goes on"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"alpha": 0.0}, "alpha must be between 0 and 1, not 0.0"),
        ({"alpha": 1.0}, "alpha must be between 0 and 1, not 1.0"),
        ({"alpha": float("nan")}, "alpha must be between"),
        ({"alpha_start": 0.0}, "alpha_start must be between 0 and 1, not 0.0"),
        ({"alpha_start": 1.2}, "alpha_start must be between"),
        ({"beta": 0.0}, "beta must be above 0 and at most 1, not 0.0"),
        ({"beta": 1.1}, "beta must be above 0"),
        ({"delta": 1.0}, "delta must be at least 0 and below 1, not 1.0"),
        ({"delta": -0.1}, "delta must be at least 0"),
        ({"gamma": -0.1}, "gamma must be within 0 and 10, not -0.1"),
        ({"gamma": float("nan")}, "gamma must be within 0 and 10"),
        ({"gamma": 11.0}, "gamma must be within 0 and 10"),
        ({"free_steps": -1}, "free_steps cannot be negative: -1"),
        ({"alpha_decay_steps": -1}, "alpha_decay_steps cannot be negative: -1"),
        ({"beta_cycles": -1}, "beta_cycles cannot be negative: -1"),
        ({"gamma_cycles": -1}, "gamma_cycles cannot be negative: -1"),
        ({"exchange_share": 0.0}, "exchange_share must be above 0 and at most 1, not 0.0"),
        ({"phases": 0}, "phases"),
        ({"phases": 4}, "phases"),
        ({"shards": 2}, r"shards must be within phases \(3\) and 16, not 2"),
        ({"shards": SHARDS_MAX + 1}, r"shards must be within phases \(3\) and 16, not 17"),
        ({"penalty": "pull"}, "penalty"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Mpca(**options)


# ---- whatever happens in whatever order -----------------------------------------------------------------------------


class Reduction:
    """A reduction under way: what has been contributed so far."""

    def __init__(self, shard: int, cycle: int, members: tuple[str, ...]) -> None:
        self.shard, self.cycle, self.members = shard, cycle, members
        self.given: dict[str, tuple[Tensor, float, int]] = {}


class World:
    """Machines and their vectors without a runtime: whoever tests decides what happens next.

    As long as nothing pulls, all values are small odd multiples of 1/16: sums are exact and no value is 0.
    """

    def __init__(self, options: Mpca, workers: int = 3, parameters: int = 7, buffers: int = 0) -> None:
        self.options, self.parameters, self.size = options, parameters, parameters + buffers
        self.vectors: dict[str, Tensor] = {}
        self.machines: dict[str, Any] = {}
        self.contexts: dict[str, NodeContext] = {}
        self.computing: set[str] = set()
        self.timers: set[tuple[str, str]] = set()
        self.inboxes: dict[tuple[str, str], deque[Broadcasted]] = {}
        self.open: dict[str, Reduction] = {}
        self.history: dict[int, list[tuple[str, int]]] = {}
        self.made: dict[str, int] = {}
        #: steps that a worker had made when it last contributed a shard, and those in all closed reductions of a shard
        self.contributed: dict[tuple[str, int], int] = {}
        self.closed: dict[int, int] = {}
        self.counted: dict[tuple[str, int], int] = {}
        self.reduced: Reduced | None = None
        self.deaths = 0
        self.names = list(members_of(workers))
        for name in self.names:
            self._add(name, options.nodes(workers)[self.names.index(name)])
        self.cut = options.cut(self.contexts["hub"])
        for name in self.names:
            self.feed(name, Started(tuple(self.names)))

    def _add(self, name: str, node: Any) -> None:
        noise = torch.Generator().manual_seed(len(self.vectors))
        self.vectors[name] = torch.randint(-64, 64, (self.size,), generator=noise).double() / 8 + 1 / 16
        schedule = Schedule(steps=FAR, evaluate_every=FAR)
        nodes = self.options.nodes(len(self.names) - 1)
        self.contexts[name] = NodeContext(node, nodes, self.vectors[name], self.parameters, schedule)
        self.machines[name] = self.options.machine(self.contexts[name])
        self.made[name] = 0

    @property
    def hub(self) -> MpcaHub:
        machine = self.machines["hub"]
        assert isinstance(machine, MpcaHub)
        return machine

    @property
    def workers(self) -> list[str]:
        return [name for name in self.machines if name != "hub"]

    def feed(self, name: str, event: Event) -> None:
        machine = self.machines[name]
        for effect in machine.handle(event, 0.0):
            self.perform(name, effect)
        machine.check()
        if name != "hub" and machine.running:
            assert name in self.computing, f"{name} stands still after {type(event).__name__}"
        if name == "hub":
            self._check_under_way()

    def _check_under_way(self) -> None:
        shards = [reduction.shard for reduction in self.open.values()]
        assert len(set(shards)) == len(shards), f"a shard is under way twice: {shards}"
        parameters = [shard for shard in shards if self.cut[shard].stop <= self.parameters]
        assert len(parameters) <= self.options.phases
        if self.workers:
            assert len(parameters) == self.options.phases, "a phase is not used"
            assert len(shards) - len(parameters) == len(self.cut) - (self.options.shards or self.options.phases)

    def perform(self, name: str, effect: Effect) -> None:
        vector = self.vectors[name]
        match effect:
            case Compute():
                assert name not in self.computing
                self.computing.add(name)
            case Step():
                self.made[name] += 1
                vector[: self.parameters] += (1 + self.names.index(name)) / 8
            case Install(values=values, start=start):
                vector[start : start + len(values)] = values
            case Blend(values=values, rate=rate, start=start):
                vector[start : start + len(values)].lerp_(values, rate)
            case Broadcast(stream=stream, members=members, message=Projected(shard=shard, cycle=cycle) as projected):
                assert name == "hub" and projected.values.shape == vector[self.cut[shard]].shape
                assert members == ("hub", *self.workers)
                self.history.setdefault(shard, []).append(("broadcast", cycle))
                for member in members[1:]:
                    event = Broadcasted(stream, members, projected)
                    self.inboxes.setdefault((member, stream), deque()).append(event)
            case Reduce(tag=tag, members=members, values=None):
                assert name == "hub" and tag not in self.open
                shard, cycle = self.history_of(tag)
                self.history[shard].append(("reduction", cycle))
                self.open[tag] = Reduction(shard, cycle, members)
            case Reduce(tag=tag, members=members, values=Snapshot() as values, weight=weight, steps=steps):
                reduction = self.open[tag]
                assert name not in reduction.given and members == reduction.members
                part = self.cut[reduction.shard]
                assert (values.start, values.stop) == (part.start, part.stop)
                reduction.given[name] = vector[part].clone(), weight, steps
                new = self.made[name] - self.contributed.get((name, reduction.shard), 0)
                assert weight == (new if self.options.weighted else float(new > 0))
                assert steps == self.made[name], f"{name} tells {steps} steps"
                self.contributed[name, reduction.shard] = self.made[name]
            case SetTimer(timer=timer):
                self.timers.add((name, timer))
            case Send(to=to, message=message) if isinstance(message, DEALING):
                self.feed(to, Received(name, message))

    def history_of(self, tag: Tag) -> tuple[int, int]:
        return tag.stream.shard, tag.number

    def possible(self) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = [("gradient", name) for name in sorted(self.computing)]
        found += [("timer", *timer) for timer in sorted(self.timers) if timer[0] != "hub"]
        found += [("broadcast", *key) for key in sorted(self.inboxes) if self.inboxes[key]]
        found += [("close", tag) for tag in sorted(self.open) if self._complete(self.open[tag])]
        return found

    def _complete(self, reduction: Reduction) -> bool:
        return all(name in reduction.given for name in reduction.members[1:] if name in self.machines)

    def happen(self, choice: tuple[str, ...]) -> None:
        match choice:
            case ("gradient", name):
                self.computing.remove(name)
                self.feed(name, GradientReady(torch.zeros(self.parameters).double(), 1.0, 16, 0.1))
            case ("timer", name, timer):
                self.timers.remove((name, timer))
                self.feed(name, TimerFired(timer))
            case ("broadcast", name, stream):
                self.feed(name, self.inboxes[name, stream].popleft())
            case ("close", tag):
                self.close(tag)

    def close(self, tag: Tag) -> None:
        reduction = self.open.pop(tag)
        self.history[reduction.shard].append(("closed", reduction.cycle))
        names = tuple(name for name in reduction.members if name in reduction.given)
        given = [reduction.given[name] for name in names]
        steps = tuple(told for _, _, told in given)
        for name, told in zip(names, steps, strict=True):
            counted = self.counted.get((name, reduction.shard), 0)
            self.closed[reduction.shard] = self.closed.get(reduction.shard, 0) + told - counted
            self.counted[name, reduction.shard] = told
        total = sum((values * weight for values, weight, _ in given), torch.zeros(1).double()) if given else None
        self.reduced = Reduced(tag, total, sum(weight for _, weight, _ in given), names, steps)
        self.feed("hub", self.reduced)

    def kill(self, name: str) -> None:
        """What it has contributed counts; what was on its way to it does not arrive."""
        self.deaths += 1
        del self.machines[name]
        self.computing.discard(name)
        self.timers = {timer for timer in self.timers if timer[0] != name}
        for key in [key for key in self.inboxes if key[0] == name]:
            del self.inboxes[key]
        self.feed("hub", PeerLost(name))

    def join(self) -> str:
        name = f"worker-{len(self.names) - 1}~2"
        self.names.append(name)
        node = dataclasses.replace(self.options.nodes(1)[1], name=name, index=len(self.names) - 2, life=2)
        self._add(name, node)
        self.feed(name, Started(tuple(self.machines)))
        self.feed("hub", PeerJoined(name, "worker"))
        return name


#: settings in which nothing pulls, the mean replaces the joint model, and nothing is projected
PLAIN: dict[str, Any] = {"alpha": NOTHING, "alpha_start": NOTHING, "beta": 1.0, "gamma": 0.0, "free_steps": 0}
CUTS: list[tuple[Any, int | None, int]] = [
    (1, None, 7),
    (2, None, 7),
    (3, None, 7),
    (3, None, 2),  # a shard without a parameter
    (1, 16, 5),
    (1, 4, 7),
    (2, 5, 11),
    (3, 16, 50),
    (3, 4, 1),
]
EVENTS = st.lists(st.integers(0, 10**6), min_size=30, max_size=300)


@settings(max_examples=60)
@given(EVENTS, st.sampled_from(CUTS), st.integers(1, 4), st.sampled_from([0, 2]), st.booleans())
def test_in_any_order_every_step_is_reduced_once_and_nobody_stands_still(
    choices: list[int], cut: tuple[Any, int | None, int], workers: int, buffers: int, weighted: bool
) -> None:
    """That nobody stands still, and how many shards are under way, is asserted in `World` after every event."""
    phases, shards, parameters = cut
    world = World(Mpca(phases=phases, shards=shards, weighted=weighted), workers, parameters, buffers)
    for choice in choices:
        possible = world.possible()
        assert possible, "nothing can happen"
        world.happen(possible[choice % len(possible)])
    under_way = {
        r.shard: sum(steps - world.counted.get((name, r.shard), 0) for name, (_, _, steps) in r.given.items())
        for r in world.open.values()
    }
    for shard in range(len(world.cut)):
        contributed = sum(world.contributed.get((name, shard), 0) for name in world.workers)
        assert world.closed.get(shard, 0) + under_way.get(shard, 0) == contributed
        for name in world.workers:
            assert world.machines[name].taus[shard] == world.made[name] - world.contributed.get((name, shard), 0)
        history = world.history.get(shard, [])
        expected = [(kind, cycle) for cycle in range(len(history)) for kind in ("broadcast", "reduction", "closed")]
        assert history == expected[: len(history)]
    shards = range(len(world.cut))
    counted = sum(min(world.counted.get((name, shard), 0) for shard in shards) for name in world.workers)
    assert world.hub.progress.step == counted // workers and world.hub.progress.samples == counted


@settings(max_examples=60)
@given(EVENTS, st.sampled_from(CUTS), st.sampled_from([0, 2]))
def test_alone_and_without_a_pull_the_joint_model_is_the_workers_snapshot(
    choices: list[int], cut: tuple[Any, int | None, int], buffers: int
) -> None:
    phases, shards, parameters = cut
    world = World(Mpca(phases=phases, shards=shards, **PLAIN), 1, parameters, buffers)
    for choice in choices:
        possible = world.possible()
        chosen = possible[choice % len(possible)]
        if chosen[0] == "close":
            reduction = world.open[chosen[1]]
            ((snapshot, weight, _),) = reduction.given.values()
            before = world.vectors["hub"].clone()
            if weight:
                before[world.cut[reduction.shard]] = snapshot
            world.happen(chosen)
            assert torch.equal(world.vectors["hub"], before)
        else:
            world.happen(chosen)


@settings(max_examples=30)
@given(EVENTS, st.sampled_from(CUTS), st.sampled_from([0, 2]), st.integers(0, 10**6))
def test_whoever_dies_or_comes_cycles_go_on_and_who_comes_begins_with_the_joint_model(
    choices: list[int], cut: tuple[Any, int | None, int], buffers: int, seed: int
) -> None:
    phases, shards, parameters = cut
    world = World(Mpca(phases=phases, shards=shards, **PLAIN), 3, parameters, buffers)
    chance = random.Random(seed)
    for choice in choices:
        if world.workers and chance.random() < 0.02:
            world.kill(chance.choice(world.workers))
        if chance.random() < 0.02:
            world.join()
        if possible := world.possible():
            world.happen(possible[choice % len(possible)])
        else:
            assert not world.workers, "nothing can happen"
    last = world.join()
    cycles = list(world.hub.cycles)
    for _ in range(40 * len(world.cut) * len(world.machines)):
        possible = world.possible()
        told = world.machines[last]._received[:]
        was_running = world.machines[last].running
        world.happen(chance.choice(possible))
        if world.machines[last].running and not was_running:
            told = [b if a is None else a for a, b in zip(told, world.machines[last]._received, strict=True)]
            assert torch.equal(world.vectors[last], torch.cat(told))
    assert world.machines[last].running and world.made[last] > 0
    assert all(now > then + 1 for now, then in zip(world.hub.cycles, cycles, strict=True)), "a shard stands still"
    assert world.hub.progress.step > 0


# ---- in the simulator -----------------------------------------------------------------------------------------------


class Observed(NullObserver):
    """Keeps the rows of a run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def record(self, node: str, values: Any, now: float) -> None:
        self.rows.append({**values, "time": now})


class _Overheard:
    """A machine and all that it is told and does."""

    def __init__(self, machine: Machine, log: list[tuple[float, Event, list[Effect]]]) -> None:
        self.machine = machine
        self.log = log

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = self.machine.handle(event, now)
        self.log.append((now, event, effects))
        return effects

    def check(self) -> None:
        self.machine.check()


@dataclasses.dataclass(frozen=True)
class Watched(Mpca):
    """The protocol, overheard at every node."""

    logs: ClassVar[dict[str, list[tuple[float, Event, list[Effect]]]]] = {}

    def machine(self, context: NodeContext) -> Machine:
        return _Overheard(super().machine(context), self.logs.setdefault(context.node.name, []))


def simulate(
    options: Mpca, sim: Sim, steps: int, parameters: int = 64, seed: int = 0
) -> tuple[Outcome, list[dict[str, Any]]]:
    """A run without a directory; Watched.logs has what each node was told and did."""
    Watched.logs.clear()
    observed = Observed()
    task = SyntheticTask(parameters=parameters)
    sim = dataclasses.replace(sim, events_max=200_000)
    plan = RunPlan.make(task, options, sim, Request(steps=steps, seed=seed, trace=False), None)
    Watched.logs.clear()  # of the machine that only was tried out
    return sim.execute(plan, observed), observed.rows


@pytest.mark.parametrize("phases", [1, 3])
def test_workers_never_wait_on_a_slow_link(phases: Any) -> None:
    sim = Sim(workers=8, link="1gbit", model_bytes="223MiB", step_seconds=0.809, checked=False)
    outcome, rows = simulate(Mpca(phases=phases), sim, steps=900)
    for i in range(8):
        meter = outcome.meters[f"worker-{i}"]
        assert meter.utilization(outcome.seconds) > 0.99 and meter.wait_seconds == 0.0
    assert max(row["cycle"] for row in rows) > 50


def test_more_phases_make_shorter_cycles_and_use_more_of_the_hubs_link() -> None:
    """Section 4.2: both directions at once."""
    seconds, busy = [], []
    for phases in (1, 2, 3):
        sim = Sim(workers=8, link="1gbit", model_bytes="223MiB", step_seconds=0.809)
        outcome, rows = simulate(Mpca(phases=phases), sim, steps=100)
        late = [row["cycle_seconds"] for row in rows if row["cycle"] >= 2]
        seconds.append(sum(late) / len(late))
        busy.append(outcome.meters["hub"].bytes_sent / 125e6 / outcome.seconds)
    assert seconds[1] < 0.8 * seconds[0] and seconds[2] < 0.9 * seconds[1], seconds
    assert busy[0] < 0.45 and busy[1] > 0.5 and busy[2] > 0.6, busy


@pytest.mark.parametrize(("shards", "parameters"), [(3, 1), (3, 2), (4, 13), (7, 64), (16, 1), (16, 13)])
def test_the_model_may_be_cut_anywhere(shards: int, parameters: int) -> None:
    """A shard may even be empty."""
    sim = Sim(workers=3, link="1mbit", step_seconds=0.1)
    outcome, rows = simulate(Mpca(shards=shards), sim, steps=60, parameters=parameters)
    assert float(outcome.weights.square().mean()) < 0.05
    assert {row["shard"] for row in rows} == set(range(shards))


@pytest.mark.parametrize("compress", ["fp16", "int8"])
def test_shards_are_compressed_one_by_one(compress: Any) -> None:
    sim = Sim(workers=3, link="10mbit", step_seconds=0.1)
    outcome, _ = simulate(Mpca(shards=5, compress=compress), sim, steps=40, parameters=2000)
    assert float(outcome.weights.square().mean()) < 0.05
    assert all(meter.bytes_saved > 0 for meter in outcome.meters.values())


def test_who_comes_late_begins_with_the_joint_model_and_takes_part() -> None:
    faults = Faults().restart("worker-1", at=4.0, seconds=1.0)
    sim = Sim(workers=3, link="1mbit", latency=0.01, step_seconds=0.1, faults=faults, model_bytes="40kB")
    outcome, rows = simulate(Watched(), sim, steps=150)
    hub: list[Projected] = []
    begun = 0
    joined = Watched.logs["worker-1~2"]
    for now, event, effects in joined:
        if isinstance(event, Broadcasted):
            hub.append(event.message)  # type: ignore[arg-type]
        for install in of_kind(effects, Install):
            begun += 1
            newest = {projected.shard: projected.values for projected in hub}
            assert torch.equal(install.values, torch.cat([newest[shard] for shard in sorted(newest)]))
            assert len(install.values) == 64 and install.start == 0
            assert now < 12.0 and isinstance(effects[-1].message, More)  # type: ignore[attr-defined]
            assert float(install.values.square().mean()) < 0.2, "trained, not the initial model of ones"
    assert begun == 1
    told = [effect.steps for _, _, effects in joined for effect in of_kind(effects, Reduce)]
    assert told[:3] == [0, 0, 0] and sum(told) > 200 and outcome.meters["worker-1~2"].steps > 80
    assert [row["workers"] for row in rows[-3:]] == [3, 3, 3]


@pytest.mark.parametrize("phases", [1, 3])
def test_a_worker_may_die_at_any_time(phases: Any) -> None:
    """Two cycles of about 0.5 s, in small steps."""
    sim = Sim(workers=4, link="1mbit", latency=0.005, step_seconds=0.07, model_bytes="12kB", detect_seconds=0.1)
    _, rows = simulate(Mpca(phases=phases), sim, steps=30)
    two_cycles = max(row["time"] for row in rows if row["cycle"] <= 1) + 0.1
    for i in range(36):
        at = two_cycles * i / 35
        faults = Faults().crash("worker-0", at=at)  # has children in the tree
        if i % 3 == 1:
            faults = faults.crash("worker-2", at=at + 0.03)
        if i % 3 == 2:
            faults = Faults().restart("worker-0", at=at, seconds=0.1)
        outcome, rows = simulate(Mpca(phases=phases), dataclasses.replace(sim, faults=faults), steps=40, seed=i)
        assert outcome.reason.startswith("all steps made"), f"death at {at}"
        assert float(outcome.weights.square().mean()) < 0.3, f"death at {at}"
        assert rows[-1]["workers"] == (2 if i % 3 == 1 else 4 if i % 3 == 2 else 3), f"death at {at}"
        for name in ("worker-1", "worker-3"):
            assert outcome.meters[name].wait_seconds == 0.0


@pytest.mark.parametrize(
    ("factor", "pause_seconds"),
    [(10.0, 0.0), (100.0, 0.0), (1.0, 60.0)],
    ids=["10 times slower", "100 times slower", "paused for 60 s"],
)
def test_nobody_waits_for_a_straggler(factor: float, pause_seconds: float) -> None:
    """Section 4.6: the others' cycles last at most 1.2 times as long as without it."""
    victim = "worker-2"  # others are above and below it in its chain
    sim = Sim(workers=8, link="1gbit", model_bytes="7MiB", step_seconds=0.095, checked=False)
    speeds = StepTime(0.095, factors={victim: factor})
    faults = Faults().pause(victim, at=5.0, seconds=pause_seconds) if pause_seconds else Faults()
    disturbed = dataclasses.replace(sim, step_seconds=speeds, faults=faults)
    _, rows = simulate(Mpca(), sim, steps=50)
    undisturbed = sum(row["cycle_seconds"] for row in rows) / len(rows)
    _, rows = simulate(Mpca(), disturbed, steps=110)
    assert rows[-1]["time"] > 10
    assert sum(row["cycle_seconds"] for row in rows) / len(rows) < 1.2 * undisturbed
    after = [row["cycle_seconds"] for row in rows if row["time"] > 6]
    assert len(after) > 80 and max(after) < 1.2 * undisturbed


def test_who_is_paused_is_left_out_and_takes_part_again() -> None:
    faults = Faults().pause("worker-1", at=5.0, seconds=20)
    sim = Sim(workers=4, link="100mbit", step_seconds=0.1, faults=faults)
    outcome, rows = simulate(Mpca(), sim, steps=400)
    for name in ("worker-0", "worker-2", "worker-3"):
        meter = outcome.meters[name]
        assert meter.wait_seconds == 0.0 and meter.utilization(outcome.seconds) > 0.98
    assert {row["workers"] for row in rows if 6 < row["time"] < 25} == {3}
    assert {row["workers"] for row in rows if row["time"] > 26} == {4}
    assert float(outcome.weights.square().mean()) < 0.05


def test_unchanged_shards_do_not_circulate_without_end() -> None:
    """On a network that is much faster than a step, a worker's contributions have a step each."""
    sim = Sim(workers=3, link="10gbit", latency=1e-5, step_seconds=1.0, checked=False)
    outcome, rows = simulate(Mpca(), sim, steps=50)
    cycles = max(row["cycle"] for row in rows)
    assert 45 < cycles < 80 and outcome.meters["hub"].messages_sent < 3 * 2 * 80


def test_shards_do_not_circulate_between_the_hub_and_one_who_has_not_begun() -> None:
    """The others are dead, which nobody knows yet, and a newcomer has not got every shard."""
    faults = Faults().restart("worker-0", at=0.163, seconds=0.16).restart("worker-1", at=0.5126, seconds=0.32)
    sim = Sim(workers=3, link=1e9, latency=0.0, step_seconds=StepTime(0.1, spread=0.1), faults=faults)
    sim = dataclasses.replace(sim, detect_seconds=0.5)
    outcome, rows = simulate(Mpca(), sim, steps=58, seed=382)
    assert outcome.reason.startswith("all steps made") and max(row["cycle"] for row in rows) < 120


def test_taus_follow_the_speeds() -> None:
    speeds = StepTime(0.1, factors={"worker-1": 2.0, "worker-2": 4.0})
    sim = Sim(workers=3, link="1mbit", latency=0.0, step_seconds=speeds, model_bytes="200kB")
    _, rows = simulate(Watched(), sim, steps=400)
    late = [row["taus"] for row in rows if row["cycle"] >= 2]
    sums = [sum(taus[i] for taus in late) for i in range(3)]
    assert sums[0] / sums[1] == pytest.approx(2.0, rel=0.05) and sums[0] / sums[2] == pytest.approx(4.0, rel=0.05)
    given = [effect for _, _, effects in Watched.logs["worker-0"] for effect in of_kind(effects, Reduce)]
    for shard in range(3):
        own = [effect for effect in given if effect.tag.stream.shard == shard]
        assert sum(effect.weight for effect in own) == own[-1].steps > 100
    simulate(Watched(weighted=False), sim, steps=400)
    alike = [effect.weight for _, _, effects in Watched.logs["worker-0"] for effect in of_kind(effects, Reduce)]
    assert set(alike) <= {0.0, 1.0} and sum(alike) > 10


def test_unweighted_the_slow_pull_the_joint_model_as_much_as_the_fast() -> None:
    """Section 4.6: a worker that lags behind holds the mean back, unless it is weighted by its steps."""
    speeds = StepTime(0.1, factors={"worker-1": 20.0, "worker-2": 20.0})
    sim = Sim(workers=3, link="1mbit", step_seconds=speeds, model_bytes="100kB")
    options = {"free_steps": FAR, "beta": 1.0}
    left = {}
    for weighted in (True, False):
        outcome, rows = simulate(Mpca(weighted=weighted, **options), sim, steps=15)  # type: ignore[arg-type]
        left[weighted] = float(outcome.weights.mean())
        assert max(rows[-1]["taus"]) > 10 * min(rows[-1]["taus"])
    assert left[True] < 0.5 * left[False], left


def test_all_may_die_and_one_come_back() -> None:
    faults = Faults().restart("worker-2", at=4.0, seconds=2.0).crash("worker-0", at=4.0).crash("worker-1", at=4.05)
    sim = Sim(workers=3, link="1mbit", step_seconds=0.1, faults=faults)
    outcome, rows = simulate(Mpca(), sim, steps=100)
    assert outcome.reason.startswith("all steps made") and outcome.lost == {"worker-0", "worker-1", "worker-2"}
    assert [row["workers"] for row in rows[-3:]] == [1, 1, 1]
    assert float(outcome.weights.square().mean()) < 0.05
    cycles = {shard: [row["cycle"] for row in rows if row["shard"] == shard] for shard in range(3)}
    assert all(found == sorted(set(found)) for found in cycles.values())


@pytest.mark.parametrize("workers", [1, 5])
def test_a_run_goes_on_with_another_number_of_workers(workers: int, tmp_path: Path) -> None:
    sim = Sim(workers=3, link="1mbit", step_seconds=0.1)
    train_quietly(Blobs(), Mpca(), sim, tmp_path / "run", steps=60)
    saved = RunDirectory.open(tmp_path / "run").load_checkpoint()
    assert saved is not None and len(saved.state["cycles"]) == 4 and min(saved.state["cycles"]) > 2
    assert saved.state["velocity"].shape == saved.weights.shape and saved.state["velocity"].abs().max() > 0
    result = resume(tmp_path / "run", Blobs(), workers=workers, steps=100, progress=make_progress(quiet=True))
    assert result.figures["steps"] == 100 and result.metrics["error"] < 0.1
    further = RunDirectory.open(tmp_path / "run").load_checkpoint()
    assert further is not None
    assert all(b > a for a, b in zip(saved.state["cycles"], further.state["cycles"], strict=True))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_a_run_goes_on_with_another_number_of_shards(before: Any, after: Any, tmp_path: Path) -> None:
    sim = Sim(workers=3, link="1mbit")
    warm, further = Mpca(phases=before), Mpca(phases=after)
    result = train_quietly(Blobs(), further, sim, tmp_path / "run", epochs=3, warmup=warm, warmup_epochs=1)
    assert result.metrics["error"] < 0.1
