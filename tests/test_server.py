"""The parameter server as Rudra's paper describes it: events in, effects out; then its figures in the simulator."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import test_protocols
from test_protocols import gives, gradient, machine, of_kind, started
from tether import Faults, Server, StepTime
from tether.core.effects import (
    Broadcast,
    Checkpoint,
    Compute,
    Effect,
    Evaluate,
    Fail,
    Finish,
    Install,
    Record,
    Send,
    Step,
)
from tether.core.events import Broadcasted, Event, PeerJoined, PeerLost, Received, Started, StopRequested
from tether.core.message import Stream
from tether.core.snapshot import snapshot
from tether.errors import InvariantBroken, UsageError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.synthetic import SyntheticTask
from tether.protocols.server.messages import Current, DowncastArrived, Mark, Pull, Push, Refused, Weights
from tether.protocols.server.worker import UNANSWERED_MAX
from tether.runtimes.base import NullObserver, Outcome
from tether.testing.conformance import CheckedSim as Sim
from tether.testing.swarm import simulate

ZEROS = [0.0, 0.0]
SOFT = Server(sync="soft")
ASYNC = Server(sync="async")
OVERLAP = Server(sync="async", overlap=True)
TREE = Server(sync="soft", topology="tree", fan_out=2)
#: with the task's own learning rate, so that sums can be compared
HARD = Server(rate="none")
HARD_TREE = Server(topology="tree", fan_out=2, rate="none")


def push(
    worker: str,
    values: list[float] = ZEROS,
    *,
    clock: int = 0,
    number: int | None = None,
    samples: int = 1,
    buffers: Any = (),
    have: int | None = -1,
) -> Received:
    """A worker's own push; it has number clock + 1 and asks for weights newer than those of its clock."""
    mark = Mark(worker, clock + 1 if number is None else number, clock)
    asked = clock if have == -1 else have
    return Received(worker, Push((mark,), torch.tensor(values), torch.tensor(list(buffers)), samples, asked))


def play(machine: Any, *events: Event, now: float = 0.0) -> list[Effect]:
    """As `test_protocols.play`, but a push to a hub is of the next mini-batch that its worker was dealt."""
    effects: list[Effect] = []
    for event in events:
        if hasattr(machine, "progress") and isinstance(event, Received) and isinstance(event.message, Push):
            marks = tuple(with_dealt_batch(machine, mark) for mark in event.message.marks)
            event = Received(event.sender, msgspec.structs.replace(event.message, marks=marks))
        effects = test_protocols.play(machine, event, now=now)
    return effects


def with_dealt_batch(hub: Any, mark: Mark) -> Mark:
    taken, ledger = vars(hub).setdefault("taken", {}), hub.progress.ledger
    key = mark.worker, mark.number
    if key not in taken and mark.worker in ledger.members:
        taken[key] = (ledger.held[mark.worker] or ledger.deal(mark.worker, 1))[0]
    return msgspec.structs.replace(mark, batches=(taken[key],) if key in taken else ())


def bundle(sender: str, marks: list[Mark], values: list[float] = ZEROS, have: int | None = 0) -> Received:
    """An aggregator's push, with one sample of each gradient."""
    return Received(sender, Push(tuple(marks), torch.tensor(values), torch.zeros(0), len(marks), have))


def pull(worker: str, have: int = -1, length: int = 2) -> Received:
    return Received(worker, Pull(have, length))


def weights(clock: int, values: list[float] = ZEROS, push: bool = False) -> Received:
    return Received("hub", Weights(clock, torch.tensor(values), push))


def downcast(clock: int, values: list[float] = ZEROS) -> Broadcasted:
    members = ("hub", "worker-0", "worker-1")
    return Broadcasted(Stream("weights"), members, Weights(clock, torch.tensor(values)))


def everybody(options: Server, workers: int) -> Started:
    return Started(tuple(node.name for node in options.nodes(workers)))


def answers(effects: list[Effect]) -> dict[str, Any]:
    """The message that each node was sent."""
    return {send.to: send.message for send in of_kind(effects, Send)}


def steps(effects: list[Effect]) -> list[tuple[list[float], float]]:
    """The gradient and the rate of each step."""
    return [(step.gradient.tolist(), step.rate) for step in of_kind(effects, Step)]


def pushed(effects: list[Effect]) -> list[Push]:
    return [send.message for send in of_kind(effects, Send) if isinstance(send.message, Push)]


# ---- section 3.1: staleness -----------------------------------------------------------------------------------------


def test_rudra_eq2_average_staleness_is_the_clock_before_the_update_minus_the_mean_of_the_vector_clock() -> None:
    hub = machine(Server(sync="soft", n=1), workers=3)
    play(hub, started(3))
    for update in range(4):
        play(hub, *(push(f"worker-{i}", clock=update) for i in range(3)))
    stale = [push("worker-0", clock=1, number=11), push("worker-1", clock=4), push("worker-2", clock=2, number=12)]
    (record,) = of_kind(play(hub, *stale), Record)
    vector_clock = [1, 4, 2]
    staleness = pytest.approx(4 - statistics.fmean(vector_clock))
    assert record.values == {"clock": 5, "clocks": vector_clock, "staleness": staleness}
    assert record.staleness == (3, 0, 2)


def test_rudra_section_3_2_every_update_has_its_vector_clock_in_the_metrics() -> None:
    hub = machine(ASYNC)
    play(hub, started())
    rows = [
        of_kind(play(hub, event), Record)[0].values
        for event in (push("worker-0"), push("worker-1"), push("worker-0", clock=1), push("worker-1", clock=2))
    ]
    assert [row["clock"] for row in rows] == [1, 2, 3, 4]
    assert [row["clocks"] for row in rows] == [[0], [0], [1], [2]]
    assert [row["staleness"] for row in rows] == [0, 1, 1, 1]


@pytest.mark.parametrize("options", [HARD, SOFT, ASYNC], ids=lambda options: options.sync)
def test_a_gradient_with_a_later_clock_than_the_hub_breaks_an_invariant(options: Server) -> None:
    hub = machine(options)
    with pytest.raises(InvariantBroken, match=r"clock=1, .* was pushed at clock 0"):
        play(hub, started(), push("worker-0", clock=1))


def test_a_stale_gradient_of_a_living_worker_breaks_an_invariant_of_hardsync() -> None:
    hub = machine(HARD)
    play(hub, started(), push("worker-0"), push("worker-1"))
    with pytest.raises(InvariantBroken, match=r"clock=0, .* was pushed at clock 1 of hardsync"):
        play(hub, push("worker-0", number=2))


# ---- section 3.1: hardsync ------------------------------------------------------------------------------------------


def test_rudra_eq3_hardsync_averages_one_gradient_of_each_worker() -> None:
    hub = machine(HARD, workers=3)
    play(hub, started(3))
    assert play(hub, push("worker-2", [1.0, 0.0]), push("worker-0", [2.0, 4.0])) == []
    assert gives(
        play(hub, push("worker-1", [3.0, 2.0])),
        Step(torch.tensor([2.0, 2.0])),
        Record({"clock": 1, "clocks": [0, 0, 0], "staleness": 0.0}, staleness=(0, 0, 0)),
        *(Send(f"worker-{i}", Weights(1, snapshot(), push=True)) for i in range(3)),
    )


def test_rudra_eq7_gradients_count_by_their_samples() -> None:
    hub = machine(HARD)
    effects = play(hub, started(), push("worker-0", [4.0, 8.0], samples=3), push("worker-1", [8.0, 0.0]))
    assert steps(effects) == [([5.0, 6.0], 1.0)]
    assert hub.progress.position == 2


def test_buffers_are_averaged_by_their_samples_and_installed_behind_the_parameters() -> None:
    hub = machine(HARD, vector=(0.0, 0.0, 0.0), buffers=1)
    first = push("worker-0", samples=3, buffers=[2.0])
    effects = play(hub, started(), first, push("worker-1", buffers=[6.0]))
    assert gives(effects[:2], Step(torch.zeros(2)), Install(torch.tensor([3.0]), start=2))


@pytest.mark.parametrize(("options", "node"), [(HARD, "hub"), (HARD_TREE, "aggregator-0")])
def test_no_receiver_writes_into_the_gradients_that_were_sent(options: Server, node: str) -> None:
    receiver = machine(options, node, vector=(0.0, 0.0, 0.0), buffers=1)
    pushes = [push(f"worker-{i}", [1.0, 2.0], samples=2, buffers=[3.0]) for i in range(2)]
    play(receiver, everybody(options, 2), *pushes)
    for received in pushes:
        assert gives([received], push(received.sender, [1.0, 2.0], samples=2, buffers=[3.0]))


def test_every_round_starts_from_nothing() -> None:
    hub = machine(HARD)
    play(hub, started(), push("worker-0", [9.0, 9.0]), push("worker-1", [9.0, 9.0]))
    effects = play(hub, push("worker-0", [1.0, 0.0], clock=1), push("worker-1", [0.0, 1.0], clock=1))
    assert steps(effects) == [([0.5, 0.5], 1.0)]
    assert {message.clock for message in answers(effects).values()} == {2}


def test_the_hub_ends_the_run_after_the_last_round_and_sends_nothing_more() -> None:
    hub = machine(HARD, steps=1, batch_size=8)
    effects = play(hub, started(), push("worker-0", [2.0, 0.0], samples=8), push("worker-1", [0.0, 2.0], samples=8))
    assert gives(
        effects,
        Step(torch.tensor([1.0, 1.0])),
        Record({"clock": 1, "clocks": [0, 0], "staleness": 0.0}, staleness=(0, 0)),
        Evaluate(1, 16, final=True),
        Checkpoint(1, 16, {"clock": 1}, final=True),
        Finish("all steps made"),
    )
    for event in (
        PeerLost("worker-0"),
        pull("worker-1"),
        push("worker-1", clock=1),
        Received("worker-0", DowncastArrived(1)),
    ):
        assert play(hub, event) == []


def test_a_resumed_hub_continues_with_its_clock() -> None:
    hub = machine(HARD, first_step=12, restored={"clock": 30})
    assert answers(play(hub, started(), pull("worker-0")))["worker-0"].clock == 30
    (checkpoint,) = of_kind(play(hub, StopRequested("enough")), Checkpoint)
    assert checkpoint.state["clock"] == 30


# ---- section 3.1: async and softsync --------------------------------------------------------------------------------


def test_rudra_eq4_async_applies_each_gradient_at_once() -> None:
    hub = machine(Server(sync="async", rate="none"), workers=3)
    play(hub, started(3))
    for clock, worker in enumerate(["worker-1", "worker-1", "worker-0"]):
        number = clock + 1
        effects = play(hub, push(worker, [float(number), 0.0], clock=clock))
        assert gives(
            effects,
            Step(torch.tensor([float(number), 0.0])),
            Record({"clock": number, "clocks": [clock], "staleness": 0.0}, staleness=(0,)),
            Send(worker, Weights(number, snapshot(), push=True)),
        )


@pytest.mark.parametrize(("workers", "n"), [(5, 1), (5, 2), (5, 3), (5, 5), (8, 3), (30, 4)])
def test_rudra_eq5_softsync_averages_c_gradients(workers: int, n: int) -> None:
    hub = machine(Server(sync="soft", n=n, rate="none"), workers=workers)
    play(hub, started(workers))
    c = workers // n
    for i in range(c - 1):
        waiting = play(hub, push(f"worker-{i}", [float(i), 1.0]))
        assert gives(waiting, Send(f"worker-{i}", Current(push=True))), "nothing newer yet, and no worker waits"
    effects = play(hub, push(f"worker-{c - 1}", [float(c - 1), 1.0]))
    assert steps(effects) == [([pytest.approx((c - 1) / 2), pytest.approx(1.0)], 1.0)]
    assert answers(effects) == {f"worker-{c - 1}": Weights(1, snapshot(), push=True)}


def test_softsync_takes_several_gradients_of_one_worker() -> None:
    hub = machine(Server(sync="soft", rate="none"), workers=2)
    play(hub, started(2), push("worker-0", [2.0, 0.0]))
    assert steps(play(hub, push("worker-0", [4.0, 2.0], number=2))) == [([3.0, 1.0], 1.0)]


def test_a_softsync_step_is_one_gradient_for_each_worker() -> None:
    hub = machine(Server(sync="soft", n=2), workers=4)
    play(hub, started(4))
    made = []
    for number in range(8):
        play(hub, push(f"worker-{number % 4}", number=number + 1, clock=0))
        made.append(hub.progress.step)
    assert made == [0, 0, 0, 1, 1, 1, 1, 2]


# ---- sections 3.2 and 5.1: learning rates ---------------------------------------------------------------------------


def rate_of(options: Server, *events: Event, workers: int = 2, **goal: Any) -> float:
    (step,) = of_kind(play(machine(options, workers=workers, **goal), started(workers), *events), Step)
    return float(step.rate)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_rudra_eq6_softsync_divides_the_rate_by_n(n: int) -> None:
    assert (
        rate_of(Server(sync="soft", n=n, rate="1/n"), *(push(f"worker-{i}") for i in range(6 // n)), workers=6) == 1 / n
    )


def test_rudra_eq6_async_divides_the_rate_by_the_number_of_workers() -> None:
    options = replace(ASYNC, rate="1/n")
    assert rate_of(options, push("worker-3"), workers=5) == 1 / 5
    assert rate_of(options, PeerLost("worker-0"), push("worker-3"), workers=5) == 1 / 4


@pytest.mark.parametrize("options", [ASYNC, SOFT], ids=lambda options: options.sync)
def test_by_default_the_rate_is_the_tasks_own_and_momentum_is_reduced_by_staleness(options: Server) -> None:
    hub = machine(options, workers=1)
    play(hub, started(1))
    pushes = [push("worker-0", clock=0, number=number) for number in range(1, 5)]
    made = [step for event in pushes for step in of_kind(play(hub, event), Step)]
    assert [(step.rate, step.staleness) for step in made] == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_beyond_eight_workers_the_rate_falls_with_staleness_as_rudra_found_necessary() -> None:
    hub = machine(ASYNC, workers=1)
    play(hub, started(1))
    pushes = [push("worker-0", clock=0, number=number) for number in range(1, 33)]
    rates = [step.rate for event in pushes for step in of_kind(play(hub, event), Step)]
    assert set(rates[:8]) == {1.0} and rates[15] == 1 / 2 and rates[31] == 1 / 4


def test_in_hardsync_momentum_is_the_tasks_own() -> None:
    (step,) = of_kind(play(machine(Server(), workers=1), started(1), push("worker-0")), Step)
    assert step.staleness == 0 and step.rate == 1


@pytest.mark.parametrize("batch", [1, 4, 128])
def test_rudra_section_3_2_hardsync_multiplies_the_rate_by_the_root_of_lambda_mu_over_b(batch: int) -> None:
    everyone = [push(f"worker-{i}") for i in range(3)]
    rate = rate_of(Server(reference_batch=128), *everyone, workers=3, batch_size=batch)
    assert rate == pytest.approx(math.sqrt(3 * batch / 128))
    assert rate_of(Server(rate="none"), *everyone, workers=3, batch_size=batch) == 1.0


@pytest.mark.parametrize("batch", [1, 4, 128])
def test_by_default_the_rate_was_chosen_for_the_mini_batch_of_the_task(batch: int) -> None:
    everyone = [push(f"worker-{i}") for i in range(3)]
    assert rate_of(Server(), *everyone, workers=3, batch_size=batch) == pytest.approx(math.sqrt(3))
    assert rate_of(Server(), push("worker-0"), workers=1, batch_size=batch) == 1.0


def test_the_root_counts_the_workers_present() -> None:
    events = [PeerLost("worker-0"), push("worker-1"), push("worker-2")]
    assert rate_of(Server(reference_batch=8), *events, workers=3, batch_size=4) == 1.0


def test_the_rate_can_be_divided_by_the_average_staleness_of_each_update() -> None:
    hub = machine(Server(sync="async", rate="average"), workers=1)
    play(hub, started(1))
    pushes = [push("worker-0", clock=0, number=number) for number in range(1, 6)]
    rates = [rate for event in pushes for _, rate in steps(play(hub, event))]
    assert rates == [1, 1, 1 / 2, 1 / 3, 1 / 4], "fresh gradients are not sped up"


def test_rudra_footnote_3_each_gradient_can_be_scaled_by_its_own_staleness() -> None:
    hub = machine(Server(sync="soft", rate="gradient"), workers=2)
    play(hub, started(2))
    for update in range(4):
        play(hub, push("worker-0", clock=update), push("worker-1", clock=update))
    events = [push("worker-0", [8.0, 0.0], clock=0, number=11), push("worker-1", [0.0, 8.0], clock=4)]
    assert steps(play(hub, *events)) == [([8 / 4 / 2, 8 / 2], 1.0)]


def test_footnote_3_scales_a_bundle_by_the_mean_of_its_gradients() -> None:
    hub = machine(Server(sync="async", rate="gradient", topology="tree"))
    play(hub, started(), *(push("worker-0", clock=clock) for clock in range(4)))
    marks = [Mark("worker-0", 11, 2), Mark("worker-1", 11, 0)]
    assert steps(play(hub, bundle("aggregator-0", marks, [8.0, 16.0]))) == [([3.0, 6.0], 1.0)]


# ---- section 3.2: pulling -------------------------------------------------------------------------------------------


def test_rudra_section_3_1_a_worker_pulls_computes_and_pushes() -> None:
    worker = machine(HARD, "worker-0", vector=(0.0, 0.0, 5.0), buffers=1)
    assert gives(play(worker, started()), Send("hub", Pull(-1, 3)))
    pulled = Weights(4, torch.tensor([1.0, 2.0, 3.0]))
    assert gives(play(worker, Received("hub", pulled)), Install(pulled.values), Compute("dense"))
    expected = Push((Mark("worker-0", 1, 4, (0,)),), torch.tensor([0.5, 0.25]), snapshot(2), samples=16, have=4)
    assert gives(play(worker, gradient((0.5, 0.25), samples=16)), Send("hub", expected))
    answer = Weights(5, torch.tensor([6.0, 6.0, 6.0]), push=True)
    assert gives(play(worker, Received("hub", answer)), Install(answer.values), Compute("dense"))


def test_rudra_section_3_2_weights_that_are_current_are_not_pulled() -> None:
    hub = machine(SOFT)
    play(hub, started(), push("worker-0"), push("worker-1"))
    assert answers(play(hub, pull("worker-0", have=0))) == {"worker-0": Weights(1, snapshot())}
    assert answers(play(hub, pull("worker-0", have=1))) == {"worker-0": Current()}
    worker = machine(SOFT, "worker-0")
    play(worker, started(), weights(1), gradient())
    assert gives(play(worker, Received("hub", Current(push=True))), Compute("dense"))


def test_a_hardsync_worker_never_takes_two_gradients_at_one_clock() -> None:
    worker = machine(HARD, "worker-0")
    play(worker, started(), weights(1), gradient())
    assert play(worker, Received("hub", Current(push=True))) == []
    assert of_kind(play(worker, weights(2)), Compute)


def test_older_weights_are_never_installed() -> None:
    worker = machine(OVERLAP, "worker-0")
    play(worker, started(), weights(3), downcast(5), downcast(4))
    assert of_kind(play(worker, gradient()), Install) and worker.clock == 5
    play(worker, weights(4))
    assert not of_kind(play(worker, gradient()), Install) and worker.clock == 5


@pytest.mark.parametrize(("options", "node"), [(HARD, "hub"), (TREE, "aggregator-0")])
def test_a_worker_with_a_model_of_another_length_is_refused_and_fails(options: Server, node: str) -> None:
    above = machine(options, node)
    play(above, everybody(options, 2))
    (send,) = play(above, pull("worker-1", length=3))
    assert send.to == "worker-1" and isinstance(send.message, Refused)
    assert "worker-1 has a model of 3 values and the hub one of 2" in send.message.reason
    for refused in ("worker-1", "aggregator-0"):
        below = machine(TREE, refused)
        assert gives(play(below, everybody(TREE, 2), Received(node, send.message))[-1:], Fail(send.message.reason))


# ---- deaths and newcomers -------------------------------------------------------------------------------------------


def test_a_dead_worker_is_no_longer_waited_for() -> None:
    hub = machine(HARD)
    play(hub, started(), push("worker-0", [2.0, 0.0]))
    effects = play(hub, PeerLost("worker-1"))
    assert steps(effects) == [([2.0, 0.0], 1.0)]
    assert answers(effects) == {"worker-0": Weights(1, snapshot(), push=True)}


def test_softsync_needs_fewer_gradients_when_fewer_workers_are_present() -> None:
    hub = machine(SOFT, workers=4)
    play(hub, started(4), push("worker-0"), push("worker-1"), PeerLost("worker-3"))
    assert len(steps(play(hub, PeerLost("worker-2")))) == 1


def test_what_a_worker_pushed_before_it_died_counts() -> None:
    hub = machine(HARD)
    assert play(hub, started(), push("worker-1", [4.0, 0.0]), PeerLost("worker-1")) == []
    effects = play(hub, push("worker-0", [2.0, 2.0]))
    assert steps(effects) == [([3.0, 1.0], 1.0)]
    assert list(answers(effects)) == ["worker-0"]


def test_what_a_dead_worker_left_behind_is_discarded_if_its_round_is_over() -> None:
    hub = machine(HARD_TREE, workers=3)
    play(hub, everybody(HARD_TREE, 3), PeerLost("worker-2"), push("worker-0"), push("worker-1"))
    late = play(hub, bundle("aggregator-1", [Mark("worker-2", 1, 0)], [9.0, 9.0]))
    assert gives(late, Send("aggregator-1", Weights(1, snapshot(), push=True)))
    effects = play(hub, push("worker-0", [1.0, 0.0], clock=1), push("worker-1", [1.0, 0.0], clock=1))
    assert steps(effects) == [([1.0, 0.0], 1.0)]


def test_a_newcomer_pulls_the_weights_and_counts_from_this_round_on() -> None:
    hub = machine(HARD)
    play(hub, started(), PeerLost("worker-1"))
    assert play(hub, PeerJoined("worker-1~2", "worker")) == []
    assert answers(play(hub, pull("worker-1~2"))) == {"worker-1~2": Weights(0, snapshot())}
    assert play(hub, push("worker-0", [2.0, 0.0])) == []
    effects = play(hub, push("worker-1~2", [0.0, 2.0]))
    assert steps(effects) == [([1.0, 1.0], 1.0)]
    assert list(answers(effects)) == ["worker-0", "worker-1~2"]


def test_a_hub_whose_workers_all_died_continues_with_one_that_joins() -> None:
    hub = machine(HARD, workers=1)
    assert play(hub, started(1), PeerLost("worker-0"), PeerJoined("worker-0~2", "worker")) == []
    play(hub, pull("worker-0~2"))
    assert steps(play(hub, push("worker-0~2"))) == [(ZEROS, 1.0)]


def test_a_newcomer_of_another_role_is_not_waited_for() -> None:
    hub = machine(HARD)
    assert play(hub, started(), PeerJoined("aggregator-0~2", "aggregator")) == []
    assert steps(play(hub, push("worker-0"), push("worker-1")))


# ---- nothing counts twice -------------------------------------------------------------------------------------------


def test_a_push_that_arrives_again_is_answered_and_not_counted_again() -> None:
    hub = machine(Server(sync="soft", rate="none"))
    play(hub, started(), push("worker-0", [2.0, 0.0]))
    assert gives(play(hub, push("worker-0", [2.0, 0.0])), Send("worker-0", Current(push=True)))
    effects = play(hub, push("worker-1", [4.0, 0.0]))
    assert steps(effects) == [([3.0, 0.0], 1.0)]
    assert gives(play(hub, push("worker-0", [2.0, 0.0])), Send("worker-0", Weights(1, snapshot(), push=True)))


def test_in_hardsync_a_push_that_arrives_again_waits_for_its_update() -> None:
    hub = machine(HARD_TREE, workers=3)
    first = [Mark("worker-0", 1, 0), Mark("worker-1", 1, 0)]
    play(hub, everybody(HARD_TREE, 3), bundle("aggregator-0", first, [2.0, 0.0]))
    assert play(hub, PeerLost("aggregator-0"), push("worker-0", [1.0, 0.0]), push("worker-1", [3.0, 0.0])) == []
    effects = play(hub, bundle("aggregator-1", [Mark("worker-2", 1, 0)], [5.0, 0.0]))
    assert steps(effects) == [([3.0, 0.0], 1.0)]
    assert list(answers(effects)) == ["aggregator-1", "worker-0", "worker-1"]


@pytest.mark.parametrize("options", [HARD_TREE, TREE], ids=lambda options: options.sync)
def test_a_bundle_that_overlaps_with_what_was_counted_is_refused_whole(options: Server) -> None:
    """Its mean cannot be taken apart. Its workers push again, since their aggregator has died."""
    hub = machine(options, workers=3)
    play(hub, everybody(options, 3), push("worker-0", [6.0, 0.0]))
    play(hub, bundle("aggregator-0", [Mark("worker-0", 1, 0), Mark("worker-1", 1, 0)], [60.0, 60.0]))
    assert [mark.worker for mark in hub.sum.marks] == ["worker-0"]
    effects = play(hub, PeerLost("aggregator-0"), push("worker-1", [3.0, 0.0]), push("worker-2", [0.0, 3.0]))
    assert [values for values, _ in steps(effects)] == [[3.0, 1.0]]


@pytest.mark.parametrize("options", [HARD_TREE, TREE], ids=lambda options: options.sync)
def test_a_worker_whose_aggregator_dies_pushes_again_to_the_next_one_above(options: Server) -> None:
    """With five workers, worker-0 is below aggregator-0, which is below aggregator-3, which is below the hub."""
    worker = machine(options, "worker-0", workers=5)
    assert [send.to for send in play(worker, everybody(options, 5))] == ["aggregator-0"]
    assert [send.to for send in play(worker, PeerLost("aggregator-0"))] == ["aggregator-3"], "it pulls again"
    play(worker, weights(0))
    (first,) = play(worker, gradient())
    assert play(worker, PeerLost("aggregator-1")) == []
    assert gives(play(worker, PeerLost("aggregator-3")), Send("hub", first.message))
    play(worker, weights(1, push=True))
    assert worker.under_way == []


def test_a_newcomer_pulls_from_the_first_node_above_that_is_alive() -> None:
    worker = machine(HARD_TREE, "worker-0", workers=5)
    members = tuple(name for name in everybody(HARD_TREE, 5).members if name != "aggregator-0")
    assert gives(play(worker, Started(members)), Send("aggregator-3", Pull(-1, 2)))


# ---- section 3.3: the tree ------------------------------------------------------------------------------------------


@given(workers=st.integers(1, 200), fan_out=st.integers(2, 20))
def test_rudra_section_3_3_aggregators_are_on_hosts_of_their_workers_and_no_node_has_too_many_below(
    workers: int, fan_out: int
) -> None:
    nodes = {node.name: node for node in Server(topology="tree", fan_out=fan_out).nodes(workers)}
    below: dict[str, set[str]] = {name: set() for name in nodes}
    workers_below: dict[str, set[str]] = {name: set() for name in nodes}
    for node in nodes.values():
        if node.parent:
            below[node.parent].add(node.name)
        above = node.parent
        while node.computes and above:
            workers_below[above].add(node.name)
            above = nodes[above].parent
    aggregators = [node for node in nodes.values() if node.role == "aggregator"]
    assert workers_below["hub"] == {f"worker-{i}" for i in range(workers)}
    assert [node.index for node in nodes.values() if node.computes] == list(range(workers))
    assert nodes["hub"].parent == "" and nodes["hub"].host == "", "the hub is on a host of its own"
    for name in ("hub", *(node.name for node in aggregators)):
        assert 1 <= len(below[name]) <= fan_out
    for node in aggregators:
        assert node.host and node.host in {nodes[worker].host for worker in workers_below[node.name]}
        if below[node.name] <= workers_below["hub"]:
            assert {nodes[worker].host for worker in below[node.name]} == {node.host}


def test_in_a_star_the_workers_are_below_the_hub_and_on_hosts_of_their_own() -> None:
    hub, *workers = HARD.nodes(3)
    assert (hub.name, hub.computes) == ("hub", False)
    assert all((node.parent, node.host, node.computes) == ("hub", "", True) for node in workers)


def test_an_aggregator_pulls_once_for_all_below_it() -> None:
    aggregator = machine(TREE, "aggregator-0", workers=3)
    assert gives(play(aggregator, everybody(TREE, 3)), Send("hub", Pull(-1, 2)))
    assert play(aggregator, pull("worker-0"), pull("worker-1")) == []
    values = Weights(7, torch.tensor([1.0, 2.0]))
    assert answers(play(aggregator, Received("hub", values))) == {"worker-0": values, "worker-1": values}
    assert gives(play(aggregator, pull("worker-0", have=7)), Send("hub", Pull(7, 2)))
    assert gives(play(aggregator, Received("hub", Current())), Send("worker-0", Current()))


def test_a_hardsync_aggregator_passes_on_one_mean_of_all_below_it() -> None:
    aggregator = machine(HARD_TREE, "aggregator-0", workers=3)
    play(aggregator, everybody(HARD_TREE, 3), weights(4))
    assert play(aggregator, push("worker-1", [4.0, 0.0], clock=4, samples=3)) == []
    marks = Mark("worker-1", 5, 4), Mark("worker-0", 5, 4)
    expected = Push(marks, torch.tensor([5.0, 1.0]), torch.zeros(0), samples=4, have=4)
    assert gives(play(aggregator, push("worker-0", [8.0, 4.0], clock=4)), Send("hub", expected))
    answer = Weights(5, torch.ones(2), push=True)
    assert answers(play(aggregator, Received("hub", answer))) == {"worker-0": answer, "worker-1": answer}


def test_a_hardsync_aggregator_waits_for_newcomers_and_not_for_dead_workers() -> None:
    aggregator = machine(HARD_TREE, "aggregator-0", workers=3)
    play(aggregator, everybody(HARD_TREE, 3), weights(0), push("worker-0", [2.0, 0.0]))
    (first,) = pushed(play(aggregator, PeerLost("worker-1")))
    assert [mark.worker for mark in first.marks] == ["worker-0"]
    play(aggregator, weights(1, push=True), PeerJoined("worker-1~2", "worker"))
    assert pushed(play(aggregator, push("worker-0", clock=1))) == []
    (second,) = pushed(play(aggregator, push("worker-1~2", clock=1)))
    assert [mark.worker for mark in second.marks] == ["worker-0", "worker-1~2"]


def test_a_newcomer_in_the_middle_of_a_hardsync_round_is_passed_on_by_itself() -> None:
    aggregator = machine(HARD_TREE, "aggregator-0", workers=3)
    play(aggregator, everybody(HARD_TREE, 3), weights(0), push("worker-0"), PeerLost("worker-1"))
    play(aggregator, PeerJoined("worker-1~2", "worker"))
    (more,) = pushed(play(aggregator, push("worker-1~2")))
    assert [mark.worker for mark in more.marks] == ["worker-1~2"]
    answer = Weights(1, torch.ones(2), push=True)
    assert answers(play(aggregator, Received("hub", answer))) == {"worker-0": answer, "worker-1~2": answer}


def test_a_softsync_aggregator_collects_while_its_push_is_under_way() -> None:
    aggregator = machine(TREE, "aggregator-3", workers=5)
    play(aggregator, everybody(TREE, 5), weights(0))
    (first,) = pushed(play(aggregator, bundle("aggregator-0", [Mark("worker-0", 1, 0)], [1.0, 0.0])))
    assert [mark.worker for mark in first.marks] == ["worker-0"]
    later = [Mark("worker-2", 1, 0), Mark("worker-3", 1, 0)]
    assert play(aggregator, bundle("aggregator-1", later, [2.0, 0.0])) == []
    effects = play(aggregator, weights(1, push=True))
    assert list(answers(effects)) == ["aggregator-0", "hub"]
    (second,) = pushed(effects)
    assert (second.marks, second.gradient.tolist(), second.have) == (tuple(later), [2.0, 0.0], 1)


def test_an_aggregator_counts_nothing_twice_and_answers_a_second_push() -> None:
    aggregator = machine(TREE, "aggregator-3", workers=5)
    play(aggregator, everybody(TREE, 5), weights(0))
    play(aggregator, bundle("aggregator-0", [Mark("worker-0", 1, 0), Mark("worker-1", 1, 0)], have=0))
    assert play(aggregator, PeerLost("aggregator-0"), push("worker-0"), push("worker-1")) == []
    answer = Weights(1, torch.ones(2), push=True)
    effects = play(aggregator, Received("hub", answer))
    assert answers(effects) == {"worker-0": answer, "worker-1": answer}
    assert gives(play(aggregator, push("worker-0")), Send("worker-0", answer))


def test_an_aggregator_whose_parent_dies_sends_unanswered_requests_again() -> None:
    aggregator = machine(TREE, "aggregator-0", workers=5)
    play(aggregator, everybody(TREE, 5), weights(0), push("worker-0"), pull("worker-1", have=0))
    again = play(aggregator, PeerLost("aggregator-3"))
    assert {send.to for send in again} == {"hub"}
    assert [type(send.message) for send in again] == [Push, Pull]


# ---- section 3.3: overlap -------------------------------------------------------------------------------------------


def test_rudra_section_3_3_a_worker_computes_while_its_push_is_under_way() -> None:
    worker = machine(OVERLAP, "worker-0")
    assert gives(play(worker, started(), weights(0)), Install(torch.zeros(2)), Compute("rows", True))
    expected = Push((Mark("worker-0", 1, 0, (0,)),), torch.ones(2), snapshot(2), samples=1, have=None)
    assert gives(play(worker, gradient()), Send("hub", expected), Compute("rows", True))


def test_rudra_section_3_3_at_most_one_push_is_under_way_and_no_two_gradients_are_merged() -> None:
    worker = machine(OVERLAP, "worker-0")
    play(worker, started(), weights(0), gradient((1.0, 1.0)))
    assert play(worker, gradient((2.0, 2.0))) == [], "the second waits, and so does computing"
    assert gives(play(worker, downcast(3)), Send("hub", DowncastArrived(3))), "new weights do not help"
    effects = play(worker, Received("hub", Current(push=True)))
    (second,) = pushed(effects)
    assert second.gradient.tolist() == [2.0, 2.0] and second.marks == (Mark("worker-0", 2, 0, (2,)),)
    assert gives(effects[1:], Install(torch.zeros(2)), Compute("rows", True))
    assert len(worker.under_way) == 1


def test_rudra_section_3_3_the_newest_weights_are_installed_between_two_gradients() -> None:
    worker = machine(OVERLAP, "worker-0")
    play(worker, started(), weights(0))
    for clock in (1, 2):
        assert gives(play(worker, downcast(clock, [float(clock)] * 2)), Send("hub", DowncastArrived(clock)))
    effects = play(worker, gradient())
    assert pushed(effects)[0].marks[0].clock == 0, "it was computed at the weights before"
    assert gives(effects[1:], Install(torch.tensor([2.0, 2.0])), Compute("rows", True))


def test_rudra_section_3_3_the_hub_broadcasts_new_weights_when_all_workers_have_the_last() -> None:
    hub = machine(OVERLAP)
    play(hub, started())
    members = ("hub", "worker-0", "worker-1")
    effects = play(hub, push("worker-0", have=None))
    assert gives(of_kind(effects, Broadcast), Broadcast(Stream("weights"), members, Weights(1, snapshot())))
    assert answers(effects) == {"worker-0": Current(push=True)}
    for event in (
        push("worker-1", have=None),
        Received("worker-1", DowncastArrived(1)),
        push("worker-1", have=None, number=2),
    ):
        assert of_kind(play(hub, event), Broadcast) == []
    effects = play(hub, Received("worker-0", DowncastArrived(1)))
    assert gives(effects, Broadcast(Stream("weights"), members, Weights(3, snapshot())))
    for name in members[1:]:
        assert play(hub, Received(name, DowncastArrived(3))) == [], "there are no newer weights"


def test_a_downcast_reaches_newcomers_and_does_not_wait_for_dead_workers() -> None:
    hub = machine(OVERLAP, workers=3)
    play(hub, started(3), push("worker-0", have=None), PeerJoined("worker-3", "worker"))
    play(
        hub,
        push("worker-1", have=None),
        Received("worker-0", DowncastArrived(1)),
        Received("worker-1", DowncastArrived(1)),
    )
    (cast,) = of_kind(play(hub, PeerLost("worker-2")), Broadcast)
    assert cast.members == ("hub", "worker-0", "worker-1", "worker-3") and cast.message.clock == 2


def test_with_overlap_a_hardsync_worker_waits_for_the_downcast() -> None:
    worker = machine(Server(overlap=True), "worker-0")
    play(worker, started(), weights(0))
    assert [type(effect) for effect in play(worker, gradient())] == [Send]
    assert play(worker, Received("hub", Current(push=True))) == []
    assert gives(
        play(worker, downcast(1)), Send("hub", DowncastArrived(1)), Install(torch.zeros(2)), Compute("dense", True)
    )


# ---- Downpour -------------------------------------------------------------------------------------------------------


def test_downpour_a_worker_pushes_sums_and_steps_by_itself_between_pulls() -> None:
    worker = machine(Server(sync="async", push_every=2, pull_every=3), "worker-0")
    play(worker, started(), weights(0))

    assert gives(play(worker, gradient((1.0, 0.0))), Step(), Compute("dense"))

    first = Push((Mark("worker-0", 2, 0, (0, 2)),), torch.tensor([3.0, 0.0]), snapshot(2), samples=2, have=None)
    assert gives(play(worker, gradient((2.0, 0.0))), Step(), Send("hub", first))
    assert gives(play(worker, Received("hub", Current(push=True))), Compute("dense"))

    assert gives(play(worker, gradient((4.0, 0.0))), Step(), Send("hub", Pull(0, 2)))
    assert gives(play(worker, weights(5, [7.0, 7.0])), Install(torch.tensor([7.0, 7.0])), Compute("dense"))

    second = Push((Mark("worker-0", 4, 5, (4, 6)),), torch.tensor([12.0, 0.0]), snapshot(2), samples=2, have=None)
    assert gives(play(worker, gradient((8.0, 0.0))), Step(), Send("hub", second))
    play(worker, Received("hub", Current(push=True)), gradient())
    (both,) = pushed(play(worker, gradient()))
    assert both.have == 5, "the sixth step pushes and pulls in one message"


def test_downpour_a_sum_is_not_kept_in_the_buffer_of_a_gradient() -> None:
    worker = machine(Server(sync="async", push_every=2), "worker-0")
    first = gradient((1.0, 1.0))
    play(worker, started(), weights(0), first, weights(1))
    first.gradient.zero_()  # its buffer is used again
    assert pushed(play(worker, gradient((2.0, 2.0))))[0].gradient.tolist() == [3.0, 3.0]
    assert not of_kind(play(worker, weights(2, push=True)), Step), (
        "a worker that pulls every step does not step by itself"
    )


def test_downpour_the_hub_steps_with_the_sum_and_counts_all_its_gradients() -> None:
    hub = machine(Server(sync="async", push_every=2, rate="none"))
    play(hub, started())
    two = Push((Mark("worker-0", 2, 0, (0, 2)),), torch.tensor([3.0, 0.0]), torch.zeros(0), 8, None)
    assert steps(test_protocols.play(hub, Received("worker-0", two))) == [([3.0, 0.0], 1.0)]
    assert (hub.progress.step, hub.progress.position) == (1, 2), "two gradients of two workers are a step"


# ---- GaDei: shared weights ------------------------------------------------------------------------------------------

SHARED = Server(sync="async", rate="none", consistent=False)


def clock_answer(clock: int, push: bool = True) -> Received:
    return Received("hub", Current(push, clock))


def test_a_sharing_worker_computes_while_one_push_is_unanswered_and_waits_with_two() -> None:
    worker = machine(SHARED, "worker-0")
    assert gives(play(worker, started()), Send("hub", Pull(-1, 2)))
    assert gives(play(worker, clock_answer(3, push=False)), Compute("rows", True)), "no weights to install"
    first, second, third = (
        Mark("worker-0", number, clock, (batch,)) for number, clock, batch in ((1, 3, 0), (2, 3, 2), (3, 5, 4))
    )
    effects = play(worker, gradient())
    assert pushed(effects)[0].marks == (first,) and gives(effects[1:], Compute("rows", True))
    effects = play(worker, gradient())
    assert [one.marks for one in pushed(effects)] == [(second,)] and len(effects) == 1, "two are unanswered"
    assert gives(play(worker, clock_answer(5)), Compute("rows", True))
    assert play(worker, clock_answer(6)) == [], "it computes already"
    assert pushed(play(worker, gradient()))[0].marks == (third,), "the newest clock it knew when it began"


def test_a_hub_with_shared_weights_steps_without_a_copy_and_answers_with_its_clock() -> None:
    hub = machine(SHARED, vector=(0.0, 0.0, 5.0), buffers=1)
    assert answers(play(hub, started(), pull("worker-0", length=3))) == {"worker-0": Current(clock=0)}
    for number in (1, 2):
        event = push("worker-0", [1.0, 2.0], clock=0, number=number, have=None)
        effects = play(hub, event)
        assert of_kind(effects, Step)[0].gradient is event.message.gradient, "no copy and no pass over it"
        assert gives(effects[1:2], Record({"clock": number, "clocks": [0], "staleness": number - 1.0}, (number - 1,)))
        assert gives(effects[2:], Send("worker-0", Current(True, number))), "buffers are shared too: nothing to install"


def test_gadei_theorem_3_each_gradient_is_applied_once() -> None:
    """Whichever worker dies, the hub makes one step for each pushed gradient."""
    faults = Faults().crash("worker-1", at=0.5).restart("worker-2", at=0.7, seconds=0.3)
    sim = Sim(workers=3, faults=faults, detect_seconds=0.05, step_seconds=StepTime(0.1, spread=0.5))
    outcome = sim.execute(
        RunPlan.make(SyntheticTask(samples=120), SHARED, sim, Request(epochs=1, trace=False), None), NullObserver()
    )
    assert outcome.reason == "all steps made"
    taken = sum(meter.steps for name, meter in outcome.meters.items() if name != "hub")
    stepped = sum(outcome.meters["hub"].staleness.values())
    assert stepped == 120 and stepped <= taken <= stepped + 4 * UNANSWERED_MAX
    assert max(outcome.meters["hub"].staleness) <= 3 * (UNANSWERED_MAX + 1) + 3


def test_weights_are_shared_where_they_can_be_unless_consistent_is_set() -> None:
    assert ASYNC.resolved_for(2, 2) == replace(ASYNC, consistent=False)
    assert ASYNC.resolved_for(2, None) == ASYNC and not ASYNC.shares
    for options in (replace(ASYNC, consistent=True), replace(ASYNC, compress="fp16"), SOFT, OVERLAP):
        assert options.resolved_for(2, 2) == options and not options.shares


def test_softsync_copies_what_it_cannot_use_at_once() -> None:
    hub = machine(Server(sync="soft", rate="none"))
    first = push("worker-0", [2.0, 4.0])
    play(hub, started(), first)
    first.message.gradient.fill_(9.0)  # its sender was answered and writes to it again
    assert steps(play(hub, push("worker-1"))) == [([1.0, 2.0], 1.0)]


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"sync": "soft", "n": 0}, "n must be at least 1, not 0"),
        ({"n": 2}, "n=2 is for sync='soft', not for sync='hard'"),
        ({"sync": "async", "n": 2}, "n=2 is for sync='soft', not for sync='async'"),
        ({"fan_out": 1}, "fan_out must be at least 2, not 1"),
        ({"reference_batch": 0}, "reference_batch must be at least 1, not 0"),
        ({"sync": "async", "push_every": 0}, "push_every must be at least 1, not 0"),
        ({"sync": "async", "pull_every": -1}, "pull_every must be at least 1, not -1"),
        ({"push_every": 2}, "use them with sync='soft' or 'async'"),
        ({"pull_every": 2}, "use them with sync='soft' or 'async'"),
        ({"sync": "async", "overlap": True, "push_every": 2}, "without overlap"),
        ({"consistent": False}, "consistent=False needs sync='async', not 'hard'"),
        ({"sync": "async", "consistent": False, "compress": "int8"}, "nothing is sent that compress='int8'"),
        ({"sync": "soft", "overlap": True, "pull_every": 2}, "without overlap"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        Server(**settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("sync", value) for value in ("tight", None, 1)),
        *(("n", value) for value in ("2", 1.5, True, None)),
        *(("topology", value) for value in ("ring", None)),
        *(("fan_out", value) for value in (2.0, "8")),
        *(("overlap", value) for value in (1, "yes", None)),
        *(("rate", value) for value in ("fast", 0.5)),
        *(("reference_batch", value) for value in ("128", 1.5)),
    ],
)
def test_settings_of_a_wrong_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(f"option {name} of protocol server is {value!r}; expected")):
        Server(**{name: value})


def test_softsync_splits_gradients_into_no_more_updates_than_there_are_workers() -> None:
    assert len(Server(sync="soft", n=4).nodes(4)) == 5
    with pytest.raises(UsageError, match="n must be from 1 to the number of workers, 3, not 4"):
        Server(sync="soft", n=4).nodes(3)


# ---- the paper's figures, in the simulator --------------------------------------------------------------------------


def simulated(options: Server, workers: int, steps: int, **cluster: Any) -> Outcome:
    sim = Sim(workers=workers, checked=False, **cluster)
    return simulate(SyntheticTask(parameters=8), options, sim, Request(steps=steps, trace=False))


def test_rudra_figure_4_the_average_staleness_of_n_softsync_is_n_and_hardly_ever_above_2n() -> None:
    for n, steps in ((1, 120), (2, 120), (30, 340)):
        equal = StepTime(0.1, spread=0.05)
        hub = simulated(Server(sync="soft", n=n), 30, steps, link="10gbit", step_seconds=equal).meters["hub"]
        gradients = sum(hub.staleness.values())
        above = sum(times for staleness, times in hub.staleness.items() if staleness > 2 * n)
        mean = sum(staleness * times for staleness, times in hub.staleness.items()) / gradients
        assert mean == pytest.approx(n, rel=0.1)
        assert above < gradients / 10_000


def test_rudra_table_1_computing_overlaps_with_communicating_best_in_adv_star() -> None:
    architectures = [
        Server(sync="async"),
        Server(sync="async", topology="tree", fan_out=8),
        Server(sync="async", topology="tree", fan_out=8, overlap=True),
    ]
    overlaps = []
    for options in architectures:
        step = StepTime(0.2, spread=0.05)
        outcome = simulated(options, 60, 30, link="240gbit", model_bytes="300MB", step_seconds=step)
        meters = [outcome.meters[f"worker-{i}"] for i in range(60)]
        overlaps.append(statistics.fmean(meter.overlap for meter in meters))
    base, adv, adv_star = overlaps
    assert base < adv < adv_star
    assert adv_star >= 0.99


def test_a_hardsync_aggregator_never_mixes_two_clocks() -> None:
    aggregator = machine(HARD_TREE, "aggregator-0", workers=4)
    play(aggregator, everybody(HARD_TREE, 4), weights(0), push("worker-0"), PeerLost("worker-0"))
    play(aggregator, PeerJoined("worker-0~2", "worker"), weights(1), push("worker-0~2", clock=1))
    play(aggregator, PeerLost("worker-1"))
    assert {mark.clock for sent in aggregator.under_way for mark in sent.marks} == {1}


@pytest.mark.parametrize("seed", [21, 27, 35])
def test_a_successor_under_an_aggregator_that_lags_behind_the_hub_does_no_harm(seed: int) -> None:
    faults = Faults().slow("worker-1", 100).restart("worker-0", at=0.35, seconds=0.01).crash("worker-1", at=0.45)
    sim = Sim(workers=4, step_seconds=0.1, faults=faults)
    request = Request(steps=30, seed=seed, trace=False)
    assert simulate(SyntheticTask(parameters=4), HARD_TREE, sim, request).reason.startswith("all steps made")


def test_a_newcomer_is_not_given_weights_of_a_round_that_is_over() -> None:
    aggregator = machine(HARD_TREE, "aggregator-0", workers=4)
    play(aggregator, everybody(HARD_TREE, 4), PeerLost("worker-0"), PeerJoined("worker-0~2", "worker"))
    play(aggregator, Received("worker-0~2", Pull(-1, 2)))  # the aggregator's own first Pull is still unanswered
    effects = play(aggregator, Received("hub", Weights(0, torch.zeros(2))))
    assert [effect.to for effect in effects if isinstance(effect, Send)] == ["hub"], "it must pull again first"
