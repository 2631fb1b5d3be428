"""Tide: the joint model moves by the workers' mean change and by its drift, and no step of a worker is lost."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tether import Faults, Single, StepTime, Tide, UsageError
from tether.core.effects import Effect, Install, Reduce, Send, SetTimer
from tether.core.events import Broadcasted, Event, GradientReady, Received, Reduced, Started, TimerFired
from tether.core.machine import NodeContext, Schedule
from tether.protocols.circulation import tag_of
from tether.protocols.tide import HORIZON_EXCHANGES, HORIZON_STEPS, Joint, Moved, TideHub, TideWorker
from tether.runtimes.interpreter import change_weights
from tether.testing.conformance import Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim

FAR = 10**6


def context_of(options: Tide, node: str, weights: Tensor, workers: int = 2) -> NodeContext:
    nodes = options.nodes(workers)
    place = next(candidate for candidate in nodes if candidate.name == node)
    return NodeContext(place, nodes, weights, len(weights), Schedule(steps=FAR, evaluate_every=FAR))


def of_kind(effects: list[Effect], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


class Alone:
    """A machine without a network: its vector changes as its effects say; a gradient adds 1 to every weight."""

    def __init__(self, machine: TideHub | TideWorker) -> None:
        self.machine = machine
        self.weights = machine.context.weights

    def feed(self, event: Event, now: float = 0.0) -> list[Effect]:
        effects = self.machine.handle(event, now)
        for effect in effects:
            if isinstance(effect, Install):
                change_weights(self, effect)  # type: ignore[arg-type]
        if isinstance(event, GradientReady):
            self.weights.add_(1.0)
        self.machine.check()
        return effects


# ---- the hub --------------------------------------------------------------------------------------------------------


def reduced(hub: Alone, own: Tensor, taus: tuple[int, ...], told: list[int]) -> list[Effect]:
    """Close the reduction of shard 0 with these shards, one row for each worker."""
    machine = hub.machine
    assert isinstance(machine, TideHub)
    weights = torch.tensor(taus, dtype=own.dtype)
    names = machine.context.workers
    for index, (name, tau) in enumerate(zip(names, taus, strict=True)):
        told[index] += tau
        machine.progress.ledger.deal(name, told[index])
    total = (weights[:, None] * own).sum(0)
    return hub.feed(Reduced(tag_of(0, machine.cycles[0]), total, float(weights.sum()), names, tuple(told)))


def hub_of(options: Tide, workers: int = 2) -> Alone:
    hub = Alone(TideHub(context_of(options, "hub", torch.zeros(6, dtype=torch.float64), workers), options))
    hub.feed(Started(("hub", *hub.machine.context.workers)))
    return hub


def test_the_joint_model_moves_by_the_mean_change_and_by_what_persists() -> None:
    hub, told = hub_of(Tide(phases=1, drift=2.0, horizon=20)), [0, 0]
    generator = torch.Generator().manual_seed(0)
    expected, drift = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for taus in ((4, 4), (6, 2), (10, 0)):
        own = expected + torch.randn(2, 6, generator=generator, dtype=torch.float64)
        tau = sum(taus) / 2
        change = (taus[0] * own[0] + taus[1] * own[1]) / sum(taus) - expected
        kept = math.exp(-min(tau / 20, 1 / HORIZON_EXCHANGES))
        drift = kept * drift + (1 - kept) * change / tau
        expected = expected + change + 2.0 * tau * drift
        reduced(hub, own, taus, told)
        torch.testing.assert_close(hub.weights, expected)


def test_without_drift_the_joint_model_is_the_weighted_mean() -> None:
    hub, told = hub_of(Tide(phases=1, drift=0.0)), [0, 0]
    own = torch.arange(12, dtype=torch.float64).view(2, 6)
    reduced(hub, own, (3, 1), told)
    torch.testing.assert_close(hub.weights, 0.75 * own[0] + 0.25 * own[1])


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.0, 0.0), (1.0, 0.15, 1.5), (100.0, 7.0, 7.0)])
def test_the_drift_follows_from_how_much_the_workers_agree(noise: float, least: float, most: float) -> None:
    """Workers whose changes are equal have no drift, those that differ by noise alone as much as there are others."""
    hub, told = hub_of(Tide(phases=1), workers=8), [0] * 8
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        change = torch.ones(6, dtype=torch.float64)
        changes = change + noise * torch.randn(8, 6, generator=generator, dtype=torch.float64)
        for name, own in zip(hub.machine.context.workers, changes, strict=True):
            hub.feed(Received(name, Moved(0, hub.machine.cycles[0], float(own @ own))))  # type: ignore[union-attr]
        reduced(hub, hub.weights + changes, (1,) * 8, told)
    assert isinstance(hub.machine, TideHub)
    assert least <= hub.machine._figures(0)["drift"] <= most  # type: ignore[operator]


def test_a_report_of_an_earlier_cycle_or_of_no_number_is_ignored() -> None:
    hub = hub_of(Tide(phases=1))
    for moved in (Moved(0, 7, 1.0), Moved(9, 0, 1.0), Moved(0, 0, math.nan)):
        hub.feed(Received("worker-0", moved))
    assert isinstance(hub.machine, TideHub) and hub.machine._squares == [{}]


def test_a_checkpoint_keeps_the_drift_and_the_agreement() -> None:
    options = Tide(phases=1, drift=2.0, horizon=20)
    hub, told = hub_of(options), [0, 0]
    own = torch.arange(12, dtype=torch.float64).view(2, 6)
    reduced(hub, own, (3, 1), told)
    state = hub.machine.progress.state()  # type: ignore[union-attr]
    context = dataclasses.replace(hub.machine.context, restored=state)
    again = TideHub(context, options)
    assert torch.equal(again._drift[0], hub.machine._drift[0])  # type: ignore[union-attr]
    assert again.cycles == hub.machine.cycles  # type: ignore[union-attr]


# ---- a worker -------------------------------------------------------------------------------------------------------


class OneWorker(Alone):
    """worker-0 with one shard, whose every gradient adds 1."""

    def __init__(self, options: Tide, late: bool = False) -> None:
        context = context_of(options, "worker-0", torch.zeros(2, dtype=torch.float64))
        if late:
            context = dataclasses.replace(context, node=context.node.successor())
        super().__init__(TideWorker(context, options))
        self.feed(Started(("hub", "worker-0", "worker-1")))

    def gradient(self) -> list[Effect]:
        """One step, and the contribution that follows it."""
        ready = GradientReady(torch.zeros(2, dtype=torch.float64), loss=1.0, samples=1, seconds=0.1)
        effects = self.feed(ready)
        return [
            *effects,
            *(more for timer in of_kind(effects, SetTimer) for more in self.feed(TimerFired(timer.timer))),
        ]

    def joint(self, value: float, cycle: int, counted: int, others: int = 0) -> list[Effect]:
        """Deliver a joint shard; `counted` and `others` are the steps of this and of the other worker in it."""
        values = torch.full((2,), value, dtype=torch.float64)
        steps = {self.machine.context.node.name: counted, "worker-1": others}
        joint = Joint(0, cycle, 0.1, values, steps=steps)
        return self.feed(Broadcasted(tag_of(0, cycle).stream, ("hub", "worker-0", "worker-1"), joint))


def test_a_worker_adds_the_difference_to_what_it_contributed_and_keeps_its_steps_since() -> None:
    worker = OneWorker(Tide(phases=1))
    worker.joint(0.0, cycle=0, counted=0)
    (contribution,) = of_kind(worker.gradient(), Reduce)  # 1
    assert contribution.weight == 1.0 and contribution.steps == 1 and contribution.values.tolist() == [1.0, 1.0]
    worker.gradient()
    worker.gradient()  # 3, of which 2 came after the contribution
    worker.joint(10.0, cycle=1, counted=1)
    assert worker.weights.tolist() == [12.0, 12.0]


def test_a_worker_reports_its_change_before_the_contribution_that_may_close_the_reduction() -> None:
    """With two workers, the report of the second would always come too late, and no drift be seen to be worth it."""
    worker = OneWorker(Tide(phases=1))
    worker.joint(0.0, cycle=0, counted=0)
    kinds = [type(effect) for effect in worker.gradient() if isinstance(effect, Reduce | Send)]
    assert kinds[-2:] == [Send, Reduce]


def test_with_a_given_interval_a_worker_contributes_after_so_many_steps() -> None:
    worker = OneWorker(Tide(phases=1, every=3))
    worker.joint(0.0, cycle=0, counted=0)
    worker.joint(0.0, cycle=1, counted=0)
    assert [len(of_kind(worker.gradient(), Reduce)) for _ in range(3)] == [0, 0, 1]


def test_who_contributed_too_late_keeps_all_its_steps() -> None:
    worker = OneWorker(Tide(phases=1))
    worker.joint(0.0, cycle=0, counted=0)
    worker.gradient()
    worker.gradient()
    worker.joint(10.0, cycle=1, counted=0, others=10)  # the hub had closed without it
    assert worker.weights.tolist() == [12.0, 12.0]


def test_what_later_steps_have_taken_back_is_not_taken_back_twice() -> None:
    """The joint shard stays at 0 while this worker's contribution was at 1; one weight has returned since."""
    worker = OneWorker(Tide(phases=1))
    worker.joint(0.0, cycle=0, counted=0)
    worker.gradient()  # 1
    worker.weights.copy_(torch.tensor([0.25, 1.5]))
    worker.joint(0.0, cycle=1, counted=1, others=1)
    assert worker.weights.tolist() == [0.0, 0.5]


def test_a_weight_that_has_gone_past_the_joint_one_stays() -> None:
    worker = OneWorker(Tide(phases=1))
    worker.joint(0.0, cycle=0, counted=0)
    worker.gradient()
    worker.weights.copy_(torch.tensor([-0.25, 1.0]))
    worker.joint(0.0, cycle=1, counted=1, others=1)
    assert worker.weights.tolist() == [-0.25, 0.0]


def test_who_missed_a_broadcast_knows_that_its_contribution_counts() -> None:
    worker = OneWorker(Tide(phases=1))
    worker.joint(0.0, cycle=0, counted=0)
    worker.gradient()
    worker.gradient()
    worker.joint(10.0, cycle=5, counted=1)
    assert worker.weights.tolist() == [11.0, 11.0]


def test_a_contribution_comes_with_the_length_of_the_change() -> None:
    worker = OneWorker(Tide(phases=1))
    worker.joint(0.0, cycle=0, counted=0)
    (sent,) = [send.message for send in of_kind(worker.gradient(), Send) if isinstance(send.message, Moved)]
    assert sent == Moved(0, 0, 2.0)


def test_who_has_nothing_left_to_train_on_contributes_its_last_step() -> None:
    worker = OneWorker(Tide(phases=1))
    assert isinstance(worker.machine, TideWorker)
    worker.machine.least = 10**4  # as if exchanges took most of the processor's time
    worker.joint(0.0, cycle=0, counted=0)
    contributions: list[Reduce] = []
    while not worker.machine.portion.idle:
        assert not contributions
        contributions = of_kind(worker.gradient(), Reduce)
    (last,) = contributions
    assert isinstance(last.values, Tensor) and last.steps == worker.machine.steps == float(last.values[0])


def test_who_has_nothing_left_to_train_on_does_not_hold_up_the_last_steps_of_others() -> None:
    """It once waited for the steps that a contribution needs, at a speed measured while it had none to make."""
    worker = OneWorker(Tide(phases=1))
    assert isinstance(worker.machine, TideWorker)
    worker.machine.least = 10**4
    worker.joint(0.0, cycle=0, counted=0)
    while not worker.machine.portion.idle:
        worker.gradient()
    effects = worker.joint(1.0, cycle=1, counted=worker.machine.steps, others=1)
    (contribution,) = of_kind(effects, Reduce)
    assert contribution.weight == 0.0


def test_who_comes_late_begins_with_the_joint_model() -> None:
    worker = OneWorker(Tide(phases=1), late=True)
    worker.joint(10.0, cycle=3, counted=0)
    assert worker.weights.tolist() == [10.0, 10.0]
    worker.joint(20.0, cycle=4, counted=0)
    assert worker.weights.tolist() == [20.0, 20.0]


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_one_worker_alone_learns_what_single_learns(tmp_path: Path) -> None:
    """There is nobody to agree with, so there is no drift, and the joint model is the worker's."""
    sim = Sim(workers=1, step_seconds=0.1, link="1mbit")
    runs = [train_quietly(Blobs(), options, sim, tmp_path / options.name, steps=30) for options in (Tide(), Single())]
    tide, single = (torch.nn.utils.parameters_to_vector(run.model.parameters()) for run in runs)
    torch.testing.assert_close(tide, single)


@pytest.mark.parametrize(
    "faults",
    [
        Faults().pause("worker-1", at=1.0, seconds=3.0),
        Faults().slow("worker-2", at=0.5, factor=20.0, seconds=60.0),
        Faults().crash("worker-0", at=1.5).restart("worker-3", at=2.0, seconds=0.5),
    ],
    ids=["pause", "slow", "deaths"],
)
def test_nobody_waits_and_the_model_learns_whoever_stops(faults: Faults, tmp_path: Path) -> None:
    sim = Sim(workers=4, step_seconds=StepTime(0.1, spread=0.3), link="1mbit", faults=faults)
    result = train_quietly(Blobs(), Tide(), sim, tmp_path / "run", epochs=4)
    undisturbed = train_quietly(Blobs(), Tide(), dataclasses.replace(sim, faults=Faults()), tmp_path / "calm", epochs=4)
    # untrained it is above 0.5; in a run this short the steps of a worker that stood still come late
    assert result.metrics["error"] < 0.2
    assert result.figures["seconds"] < 1.7 * undisturbed.figures["seconds"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"drift": -1.0}, "drift must be within 0 and 100, or 'auto', not -1.0"),
        ({"horizon": 0}, "horizon must be at least 1 step, or 'auto', not 0"),
        ({"phases": 2, "shards": 1}, "shards must be within phases"),
        ({"exchange_share": 0.0}, "exchange_share must be above 0"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Tide(**options)


def test_a_short_run_has_a_short_horizon() -> None:
    assert Tide().horizon_of(100) == 25 and Tide().horizon_of(FAR) == HORIZON_STEPS
    assert Tide(horizon=7).horizon_of(100) == 7
