"""Elastic averaging as its papers tell it: the force, its rates, the exchanger's places, deaths in the middle."""

from __future__ import annotations

import json
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tether import Elastic, Faults, Local, StepTime
from tether.core.effects import Add, Blend, Compute, Effect, Install, Record, Send, Step
from tether.core.events import Event, GradientReady, PeerJoined, PeerLost, Received, Started
from tether.core.machine import NodeContext, Schedule
from tether.core.snapshot import Snapshot
from tether.errors import UsageError
from tether.learner.synthetic import SyntheticTask
from tether.protocols.elastic import Ask, Centre, Difference, ElasticHub
from tether.testing.conformance import Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim

MEMBERS = ("hub", "worker-0", "worker-1", "worker-2")


class World:
    """Machines and their vectors without a runtime: whoever tests decides what happens next."""

    def __init__(self, options: Elastic, parameters: int = 3, buffers: int = 0, stepping: bool = True) -> None:
        self.stepping = stepping
        nodes = options.nodes(3)
        noise = torch.Generator().manual_seed(1)
        size = parameters + buffers
        self.vectors = {n.name: torch.rand(size, generator=noise, dtype=torch.float64) for n in nodes}
        schedule = Schedule(steps=1000, evaluate_every=10**6)
        contexts = [NodeContext(node, nodes, self.vectors[node.name], parameters, schedule) for node in nodes]
        self.machines = {context.node.name: options.machine(context) for context in contexts}
        self.parameters = parameters
        self.mail: dict[tuple[str, str], deque[Any]] = {}
        self.computing: set[str] = set()
        self.stepped = torch.zeros(parameters, dtype=torch.float64)
        self.now = 0.0
        for name in MEMBERS:
            self.feed(name, Started(MEMBERS))

    def feed(self, name: str, event: Event) -> None:
        self.now += 0.01
        vector = self.vectors[name]
        for effect in self.machines[name].handle(event, self.now):
            self.perform(name, vector, effect)
        self.machines[name].check()

    def perform(self, name: str, vector: Tensor, effect: Effect) -> None:
        match effect:
            case Compute():
                self.computing.add(name)
            case Step() if self.stepping:
                move = torch.full((self.parameters,), 0.1 * len(name) * self.now, dtype=torch.float64)
                vector[: self.parameters].add_(move)
                self.stepped += move
            case Install(values=values):
                self.stepped += values[: self.parameters] - vector[: self.parameters]
                vector.copy_(values)
            case Add(values=values, rate=rate, start=start):
                vector[start : start + len(values)].add_(values, alpha=rate)
            case Blend(values=values, rate=rate, start=start):
                vector[start : start + len(values)].lerp_(values, rate)
            case Send(to=to, message=message):
                fields = {f: getattr(message, f) for f in message.__struct_fields__}
                taken = {f: v.take(vector) if isinstance(v, Snapshot) else v for f, v in fields.items()}
                self.mail.setdefault((name, to), deque()).append(type(message)(**taken))

    def possible(self) -> list[tuple[str, str]]:
        return [("", name) for name in sorted(self.computing)] + [pair for pair in sorted(self.mail) if self.mail[pair]]

    def happen(self, choice: tuple[str, str]) -> None:
        sender, to = choice
        if sender:
            self.feed(to, Received(sender, self.mail[choice].popleft()))
        else:
            self.computing.remove(to)
            self.feed(to, GradientReady(torch.zeros(self.parameters), 1.0, 16, 0.1))

    def total(self) -> Tensor:
        """The sum of all vectors, with what is on its way to the centre, less what steps have added."""
        hub: Any = self.machines["hub"]
        total = sum((v[: self.parameters] for v in self.vectors.values()), torch.zeros(self.parameters).double())
        for (sender, _), messages in self.mail.items():
            for message in messages:
                if isinstance(message, Difference):
                    total = total + hub._open[sender].master_alpha * message.values
        return total - self.stepped


@given(st.lists(st.integers(0, 100), min_size=40, max_size=200), st.sampled_from([1, 8]))
def test_the_elastic_pair_keeps_the_sum_of_worker_and_centre(choices: list[int], exchangers: int) -> None:
    """Equations 2 and 3: whatever comes between, what a worker gives up the centre gains."""
    world = World(Elastic(tau=2, alpha=0.3, exchangers=exchangers))
    before = world.total()
    for choice in choices:
        possible = world.possible()
        world.happen(possible[choice % len(possible)])
        assert torch.allclose(world.total(), before, atol=1e-9)


def test_unequal_rates_do_not_keep_the_sum() -> None:
    """Equation 6; the test above could fail."""
    world = World(Elastic(tau=1, alpha=0.3, master_alpha=0.1))
    before = world.total()
    for choice in range(60):
        possible = world.possible()
        world.happen(possible[choice % len(possible)])
    assert not torch.allclose(world.total(), before, atol=1e-3)


@given(st.lists(st.integers(0, 100), min_size=40, max_size=200))
def test_buffers_stay_between_those_of_workers_and_centre(choices: list[int]) -> None:
    """A variance that left that range could become negative."""
    world = World(Elastic(tau=1, alpha=0.95), buffers=2)
    buffers = torch.stack([vector[3:] for vector in world.vectors.values()])
    low, high = buffers.amin(0), buffers.amax(0)
    for choice in choices:
        possible = world.possible()
        world.happen(possible[choice % len(possible)])
        for vector in world.vectors.values():
            assert (vector[3:] >= low - 1e-12).all() and (vector[3:] <= high + 1e-12).all()


def test_overlapping_exchanges_share_the_way_to_the_workers() -> None:
    machine = hub(Elastic(tau=4, alpha=0.8))
    told = [answers(machine.handle(Received(f"worker-{i}", Ask()), 1.0))[f"worker-{i}"].alpha for i in range(3)]
    assert told == [0.8, pytest.approx(0.8 * 0.2), pytest.approx(0.8 * 0.04)]
    machine.check()
    for i in range(3):
        machine.handle(Received(f"worker-{i}", difference()), 2.0)
    assert answers(machine.handle(Received("worker-0", Ask()), 3.0))["worker-0"].alpha == 0.8


@given(st.lists(st.integers(0, 100), min_size=40, max_size=200))
def test_the_centre_stays_among_the_workers_whatever_overlaps(choices: list[int]) -> None:
    world = World(Elastic(tau=1, alpha=0.95), stepping=False)
    while len(world.computing) < 3:
        world.happen(next(choice for choice in world.possible() if choice[0]))
    for at, worker in enumerate(MEMBERS[1:]):
        world.vectors[worker].fill_(float(at))
    vectors = torch.stack(list(world.vectors.values()))
    low, high = vectors.amin(0), vectors.amax(0)
    for choice in choices:
        possible = world.possible()
        world.happen(possible[choice % len(possible)])
        centre = world.vectors["hub"]
        assert (centre >= low - 1e-9).all() and (centre <= high + 1e-9).all()


def test_without_the_throttle_every_exchange_has_its_full_rates() -> None:
    """As in DeepSpark, whose figures have alpha up to 0.99 with sixteen workers."""
    machine = hub(Elastic(tau=4, alpha=0.99, throttle=False))
    told = [answers(machine.handle(Received(f"worker-{i}", Ask()), 1.0))[f"worker-{i}"].alpha for i in range(3)]
    assert told == [0.99] * 3
    machine.check()
    effects = machine.handle(Received("worker-1", difference()), 2.0)
    assert [effect.rate for effect in effects if isinstance(effect, Add)] == [0.99]


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def test_the_workers_of_a_new_run_begin_at_once_and_who_comes_late_asks_first() -> None:
    options = Elastic(tau=2, ahead=False)
    nodes = options.nodes(2)
    schedule = Schedule(steps=10, evaluate_every=10**6)
    worker = options.machine(NodeContext(nodes[1], nodes, torch.zeros(3), 3, schedule))
    assert kinds(worker.handle(Started(MEMBERS), 0.0)) == [Compute]
    ready = GradientReady(torch.zeros(3), 1.0, 16, 0.1)
    assert kinds(worker.handle(ready, 0.1)) == [Step, Compute]
    assert worker.handle(ready, 0.2) == [Step(), Send("hub", Ask())]
    late = options.machine(NodeContext(nodes[1].successor(), nodes, torch.zeros(3), 3, schedule))
    assert late.handle(Started(MEMBERS), 0.0) == [Send("hub", Ask(first=True))]


def test_until_an_answer_is_measured_nobody_stands_still_for_it() -> None:
    options = Elastic()
    nodes = options.nodes(2)
    worker = options.machine(NodeContext(nodes[1], nodes, torch.zeros(3), 3, Schedule(steps=10, evaluate_every=10**6)))
    assert kinds(worker.handle(Started(MEMBERS), 0.0)) == [Send, Compute]
    ready = GradientReady(torch.zeros(3), 1.0, 16, 0.1)
    for step in range(1, 4):
        assert kinds(worker.handle(ready, 0.1 * step)) == [Step, Compute]
    assert worker.handle(Received("hub", Centre(torch.ones(3), 0.5, 40)), 0.35) == [], "a step is under way"
    step, sent, pulled, *further = worker.handle(ready, 0.4)
    assert isinstance(sent, Send) and isinstance(sent.message, Difference) and isinstance(pulled, Blend)
    assert (sent.message.steps, sent.message.answer_seconds) == (4, pytest.approx(0.35))
    assert kinds(further) == [Compute], "from now on it has its tau"


def hub(options: Elastic, workers: int = 3, **schedule: Any) -> ElasticHub:
    nodes = options.nodes(workers)
    goal = Schedule(**{"steps": 1000, "evaluate_every": 10**6, **schedule})
    machine = options.machine(NodeContext(nodes[0], nodes, torch.zeros(3), 3, goal))
    assert isinstance(machine, ElasticHub)
    machine.handle(Started(tuple(node.name for node in nodes)), 0.0)
    for node in nodes[1:]:
        machine.handle(Received(node.name, Ask(first=True)), 0.0)
    return machine


def difference(steps: int = 4, wait: float = 0.05, step: float = 0.1) -> Difference:
    return Difference(torch.ones(3), torch.zeros(0), steps, step, wait, wait)


def answers(effects: list[Effect]) -> dict[str, Centre]:
    return {e.to: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Centre)}


def test_a_worker_is_answered_at_once_and_the_centre_moves_when_its_difference_is_back() -> None:
    machine = hub(Elastic(tau=4, alpha=0.25))
    assert answers(machine.handle(Received("worker-1", Ask()), 1.0))["worker-1"].alpha == 0.25
    effects = machine.handle(Received("worker-1", difference()), 1.5)
    assert [(e.rate, e.unordered) for e in effects if isinstance(e, Add)] == [(0.25, True)]


def test_alpha_follows_the_number_of_workers() -> None:
    machine = hub(Elastic(tau=4))
    assert answers(machine.handle(Received("worker-0", Ask()), 1.0))["worker-0"].alpha == pytest.approx(0.9 / 3)
    machine.handle(PeerLost("worker-2"), 1.1)
    assert answers(machine.handle(Received("worker-1", Ask()), 1.2))["worker-1"].alpha == pytest.approx(0.9 / 2)
    machine.handle(PeerJoined("worker-2~2", "worker"), 1.3)
    machine.handle(PeerJoined("worker-3", "worker"), 1.3)
    machine.handle(Received("worker-3", Ask(first=True)), 1.3)
    assert answers(machine.handle(Received("worker-3", Ask()), 1.4))["worker-3"].alpha == pytest.approx(0.9 / 4)
    # the rate that a worker was told is the one that the centre uses for it, whoever came or went since
    effects = machine.handle(Received("worker-0", difference()), 1.5)
    assert [e.rate for e in effects if isinstance(e, Add)] == [pytest.approx(0.9 / 3)]


def test_rates_decay_by_steps_up_to_the_limit() -> None:
    """DeepSpark, equations 5 and 6."""
    both = Elastic(alpha=0.8, decay=0.5, decay_every=100, decay_limit=2)
    assert [both.rates(8, step) for step in (0, 99, 100, 250, 900)] == [
        (0.8, 0.8),
        (0.8, 0.8),
        (0.4, 0.4),
        (0.2, 0.2),
        (0.2, 0.2),
    ]
    master = Elastic(alpha=0.8, decay=0.5, decay_every=100, decays="master")
    assert [master.rates(8, step) for step in (0, 100, 300)] == [(0.8, 0.8), (0.8, 0.4), (0.8, 0.1)]
    assert Elastic(alpha=0.8, master_alpha=0.1).rates(8, 10**6) == (0.8, 0.1)
    assert Elastic(decay=0.5, decay_every=10).rates(9, 10) == (pytest.approx(0.05), pytest.approx(0.05))


def test_further_requests_wait_in_a_queue_in_order() -> None:
    machine = hub(Elastic(tau=4, exchangers=1), workers=4)
    assert list(answers(machine.handle(Received("worker-2", Ask()), 1.0))) == ["worker-2"]
    for worker in ("worker-3", "worker-0", "worker-1"):
        assert machine.handle(Received(worker, Ask()), 2.0) == []
    effects = machine.handle(Received("worker-2", difference()), 2.5)
    assert list(answers(effects)) == ["worker-3"]
    assert list(answers(machine.handle(PeerLost("worker-3"), 3.0))) == ["worker-0"]  # a death in the middle frees it
    effects = machine.handle(Received("worker-0", difference()), 4.0)
    (row,) = [effect.values for effect in effects if isinstance(effect, Record)]
    assert (row["queue"], row["queue_seconds"]) == (1, pytest.approx(1.0))
    assert machine.handle(PeerLost("worker-1"), 5.0) == []
    machine.check()


def test_a_newcomer_is_given_the_centre_outside_of_the_queue() -> None:
    machine = hub(Elastic(tau=4, exchangers=1))
    machine.handle(Received("worker-0", Ask()), 1.0)
    assert list(answers(machine.handle(Received("worker-1", Ask(first=True)), 1.0))) == ["worker-1"]


def test_a_death_in_the_middle_of_an_exchange_leaves_the_centre_whole() -> None:
    machine = hub(Elastic(tau=4, alpha=0.25))
    machine.handle(Received("worker-1", Ask()), 1.0)
    effects = machine.handle(PeerLost("worker-1"), 1.2)
    assert not [effect for effect in effects if isinstance(effect, Add | Blend | Install)]
    assert machine.progress.samples == 0
    machine.check()


def test_only_what_is_left_to_make_is_handed_out() -> None:
    machine = hub(Elastic(tau=4), workers=2, steps=5)
    making = {w: answers(machine.handle(Received(w, Ask(first=True)), 0.0))[w].tau for w in ("worker-0", "worker-1")}
    made = 0
    while not machine.progress.over:
        worker = max(making, key=lambda name: (making[name], name))
        made += making[worker]
        told = answers(machine.handle(Received(worker, Ask()), 1.0))[worker].tau
        machine.handle(Received(worker, difference(steps=making[worker])), 1.1)
        making[worker] = told
    assert made == 10, "two workers, five steps each"


def test_tau_auto_is_the_least_without_collisions_and_a_third_more(tmp_path: Path) -> None:
    """MPCA SGD, sections 3.2.2 and 7.1: with ResNet-110, eight workers and gigabit Ethernet it comes out as 7."""
    sim = Sim(workers=8, step_seconds=0.095, link="1gbit", model_bytes="7MiB")
    result = train_quietly(SyntheticTask(parameters=64), Elastic(), sim, tmp_path / "run", steps=200)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    taus = [row["tau"] for row in rows if row["kind"] == "record"]
    assert statistics.mode(taus) == 7
    assert result.figures["overlap"] > 0.85


def test_all_asking_at_the_start_is_not_taken_for_a_slow_link(tmp_path: Path) -> None:
    """A download takes 0.59 s, so eight take 94 steps; those that queued at the start took eight times as long."""
    sim = Sim(workers=8, step_seconds=0.05, link="100mbit", model_bytes="7MiB", checked=False)
    result = train_quietly(SyntheticTask(parameters=64), Elastic(), sim, tmp_path / "run", steps=400)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    taus = [row["tau"] for row in rows if row["kind"] == "record"]
    assert max(taus) == 123
    assert result.figures["utilization"]["mean"] > 0.8


def test_the_queue_is_recorded_where_places_are_few(tmp_path: Path) -> None:
    sim = Sim(workers=8, step_seconds=StepTime(0.01), link="1gbit", model_bytes="7MiB")
    train_quietly(SyntheticTask(parameters=64), Elastic(tau=2, exchangers=2), sim, tmp_path / "run", steps=40)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    queued = [row for row in rows if row["kind"] == "record" and row["queue"]]
    assert max(row["queue"] for row in queued) == 5  # eight workers, two places, and one that has its answer
    assert all(row["queue_seconds"] <= row["answer_seconds"] for row in queued)


@pytest.mark.parametrize("at", [0.05 * i for i in range(1, 16)])
def test_a_worker_may_die_at_any_time(at: float, tmp_path: Path) -> None:
    sim = Sim(workers=3, step_seconds=0.05, link="10mbit", faults=Faults().crash("worker-1", at=at), detect_seconds=0.2)
    result = train_quietly(Blobs(), Elastic(tau=2), sim, tmp_path / "run", steps=60)
    assert result.figures["steps"] == 60 and result.metrics["error"] < 0.1


def test_processes_exchange_through_the_pool(tmp_path: Path) -> None:
    result = train_quietly(Blobs(), Elastic(tau=3), Local(3), tmp_path / "run", steps=90)
    assert result.figures["steps"] == 90 and result.metrics["error"] < 0.1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    exchanges = [row for row in rows if row["kind"] == "record"]
    assert sum(row["tau"] for row in exchanges) >= 3 * 89  # steps of all workers, but for the last ones under way
    assert all(row["queue_seconds"] >= 0 and row["alpha"] == pytest.approx(0.3) for row in exchanges)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"alpha": 0.0}, "alpha must be between 0 and 1, not 0.0"),
        ({"alpha": 1.0}, "alpha must be between 0 and 1, not 1.0"),
        ({"alpha": -0.1}, "alpha must be between"),
        ({"alpha": float("nan")}, "alpha must be between"),
        ({"master_alpha": 1.5}, "master_alpha must be between 0 and 1, not 1.5"),
        ({"tau": 0}, "tau must be at least 1 or 'auto', not 0"),
        ({"tau": "often"}, "tau"),
        ({"decay": 1.1, "decay_every": 5}, "decay must be above 0 and at most 1, not 1.1"),
        ({"decay": 0.0, "decay_every": 5}, "decay must be above 0"),
        ({"decay": 0.5}, "needs decay_every"),
        ({"decay_every": 5}, "give decay"),
        ({"decay_limit": 5}, "give decay"),
        ({"decays": "master"}, "give decay"),
        ({"decay": 0.5, "decay_every": 0}, "decay_every must be at least 1"),
        ({"exchangers": 0}, "exchangers must be at least 1, not 0"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Elastic(**settings)
