"""Several hubs: what each sends and does, that together they equal one hub, and what happens when one dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from test_protocols import of_kind
from tether import Faults, Local, RunError, Server, Single, UsageError, resume, run
from tether.core.effects import Checkpoint, Compute, Effect, Finish, Install, Send, Step
from tether.core.events import Event, GradientReady, PeerLost, Received, Started, StopRequested
from tether.core.machine import NodeContext, Schedule
from tether.core.message import ReplicaState
from tether.execution.directory import RunDirectory
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.execution.progress import make_progress
from tether.learner.synthetic import SyntheticTask
from tether.protocols.server.messages import GetPart, Mark, Part, Pull, Push, Round, Weights
from tether.runtimes.base import NullObserver
from tether.testing.conformance import Assassin, Blobs, largest_difference, train_quietly
from tether.testing.conformance import CheckedSim as Sim

HARD, ASYNC = Server(hubs=3, rate="none"), Server(sync="async", hubs=3, rate="none")
#: a vector of 7, without buffers, has parts of 2, 2 and 3
LENGTH = 7


def machine(options: Server, name: str, workers: int = 2, steps: int = 100) -> Any:
    nodes = options.nodes(workers)
    place = next(node for node in nodes if node.name == name)
    schedule = Schedule(steps=steps, evaluate_every=10)
    built = options.machine(NodeContext(place, nodes, torch.zeros(LENGTH), LENGTH, schedule))
    play(built, Started(tuple(node.name for node in nodes)))
    return built


def play(built: Any, *events: Event) -> list[Effect]:
    effects: list[Effect] = []
    for event in events:
        effects += built.handle(event, 0.0)
        built.check()
    return effects


def weights(hub: str, clock: int, start: int, stop: int) -> Received:
    return Received(hub, Weights(clock, torch.arange(float(LENGTH))[start:stop], push=True))


def push(worker: str, values: list[float], clock: int = 0, number: int = 1) -> Received:
    marks = (Mark(worker, number, clock),)
    return Received(worker, Push(marks, torch.tensor(values), torch.zeros(0), 1, clock))


def sent(effects: list[Effect]) -> list[tuple[str, Any]]:
    return [(send.to, send.message) for send in of_kind(effects, Send)]


# ---- workers --------------------------------------------------------------------------------------------------------


def test_a_worker_computes_when_it_has_the_parts_of_all_hubs() -> None:
    worker = machine(ASYNC, "worker-0")
    asked = play(worker, weights("hub", 0, 0, 2))
    assert [to for to, _ in sent(asked)] == ["hub-1", "hub-2"]
    assert not of_kind(play(worker, weights("hub-2", 5, 4, 7)), Compute)
    effects = play(worker, weights("hub-1", 3, 2, 4))
    assert [install.start for install in of_kind(effects, Install)] == [2] and of_kind(effects, Compute)


def test_every_hub_is_pushed_its_part_of_a_gradient_with_its_own_clock() -> None:
    worker = machine(ASYNC, "worker-0")
    play(worker, weights("hub", 7, 0, 2), weights("hub-1", 8, 2, 4), weights("hub-2", 9, 4, 7))
    pushed = sent(play(worker, GradientReady(torch.arange(7.0), 1.0, 16, 0.1)))
    assert [(to, message.gradient.tolist(), message.marks[0].clock) for to, message in pushed] == [
        ("hub", [0, 1], 7),
        ("hub-1", [2, 3], 8),
        ("hub-2", [4, 5, 6], 9),
    ]


def test_in_hardsync_a_worker_that_joins_asks_the_others_for_the_clock_of_the_first_hub() -> None:
    worker = machine(HARD, "worker-0")
    assert {message.have for _, message in sent(play(worker, weights("hub", 6, 0, 2)))} == {5}
    hub = machine(HARD, "hub-1")
    assert not play(hub, Received("worker-9", Pull(0, LENGTH))), "clock 0 is not newer than 0"
    update = Round(0, (Mark("worker-0", 1, 0), Mark("worker-1", 1, 0)), 1.0)
    effects = play(hub, push("worker-0", [1, 2]), push("worker-1", [3, 4]), Received("hub", update))
    assert dict(sent(effects))["worker-9"].clock == 1


# ---- hubs -----------------------------------------------------------------------------------------------------------


def test_in_hardsync_a_hub_makes_the_update_that_the_first_one_announces_when_it_has_its_parts() -> None:
    hub = machine(HARD, "hub-1")
    update = Round(0, (Mark("worker-0", 1, 0), Mark("worker-1", 1, 0)), 0.5)
    assert not play(hub, push("worker-0", [1, 2]), Received("hub", update))
    effects = play(hub, push("worker-1", [3, 6]))
    assert [(step.gradient.tolist(), step.rate) for step in of_kind(effects, Step)] == [([2, 4], 0.5)]
    assert {(to, message.clock) for to, message in sent(effects)} == {("worker-0", 1), ("worker-1", 1)}


def test_what_a_dying_worker_sent_only_to_the_first_hub_is_not_waited_for() -> None:
    hub = machine(HARD, "hub-1")
    update = Round(0, (Mark("worker-0", 1, 0), Mark("worker-1", 1, 0)), 1.0)
    play(hub, push("worker-0", [1, 2]), Received("hub", update))
    effects = play(hub, PeerLost("worker-1"))
    assert [step.gradient.tolist() for step in of_kind(effects, Step)] == [[1, 2]]
    assert [to for to, _ in sent(effects)] == ["worker-0"]


def test_what_a_dying_worker_sent_only_to_another_hub_is_discarded() -> None:
    hub = machine(HARD, "hub-1")
    play(hub, push("worker-0", [1, 2]), Received("hub", Round(0, (Mark("worker-0", 1, 0),), 1.0)))
    assert not play(hub, push("worker-1", [3, 4], clock=0)) and not hub.pushes


def test_in_async_each_hub_steps_at_once_by_the_staleness_of_its_own_part() -> None:
    hub = machine(Server(sync="async", hubs=3), "hub-2")
    made = of_kind(play(hub, *(push("worker-0", [1, 2, 3], number=number) for number in (1, 2, 3))), Step)
    assert [step.staleness for step in made] == [0, 1, 2]


def test_the_end_waits_for_the_parts_of_all_hubs() -> None:
    hub = machine(ASYNC, "hub")
    asked = play(hub, StopRequested("enough"))
    assert sent(asked) == [("hub-1", GetPart(True)), ("hub-2", GetPart(True))] and len(asked) == 2
    state = ReplicaState({}, [])
    assert not play(hub, Received("hub-2", Part(torch.ones(3), state)))
    effects = play(hub, Received("hub-1", Part(torch.ones(2), state)))
    assert [(install.start, len(install.values)) for install in of_kind(effects, Install)] == [(2, 2), (4, 3)]
    assert [save.parts for save in of_kind(effects, Checkpoint)] == [(state, state)] and of_kind(effects, Finish)


def test_in_hardsync_no_part_proceeds_to_another_update_while_the_model_is_gathered() -> None:
    hub = machine(HARD, "hub", steps=20)
    for clock in range(10):
        pushes = [push(f"worker-{i}", [0, 0], clock, clock + 1) for i in range(2)]
        effects = play(hub, *pushes)
    assert [type(message) for _, message in sent(effects)] == [Round, Round, GetPart, GetPart], "an evaluation is due"
    play(hub, Received("hub-1", Part(torch.ones(2), None)))
    answered = sent(play(hub, Received("hub-2", Part(torch.ones(3), None))))
    assert {(to, message.clock) for to, message in answered} == {("worker-0", 10), ("worker-1", 10)}


# ---- whole runs -----------------------------------------------------------------------------------------------------


class WithAdam(Blobs):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        slow = {"params": list(model.parameters())[:1], "lr": 0.003}
        return torch.optim.Adam([{"params": list(model.parameters())[1:]}, slow], lr=0.01)


@pytest.mark.parametrize("task", [Blobs, WithAdam], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("hubs", [2, 5])
def test_rudra_eq7_holds_with_several_hubs(task: type[Blobs], hubs: int, tmp_path: Path) -> None:
    alone = train_quietly(task(64, norm=False), Single(), Sim(1), tmp_path / "alone", steps=20)
    options = Server(sync="hard", rate="none", hubs=hubs)
    together = train_quietly(task(16, norm=False), options, Sim(4), tmp_path / "together", steps=20)
    assert largest_difference(alone.model, together.model) < 1e-5
    assert together.figures["staleness"]["max"] == 0


@pytest.mark.parametrize("task", [WithAdam(norm=False), Blobs(norm=True)], ids=["Adam", "buffers"])
def test_a_run_with_several_hubs_that_was_resumed_equals_one_in_one_go(task: Blobs, tmp_path: Path) -> None:
    options = Server(hubs=3)
    whole = train_quietly(task, options, Sim(3), tmp_path / "whole", steps=24)
    train_quietly(task, options, Sim(3), tmp_path / "parts", steps=10)
    parts = resume(tmp_path / "parts", task, steps=24, progress=make_progress(quiet=True))
    assert largest_difference(parts.model, whole.model) < 1e-5


def test_a_checkpoint_of_several_hubs_equals_that_of_one(tmp_path: Path) -> None:
    """So a run with any number of hubs can resume from it."""
    states = []
    for hubs in (1, 3):
        train_quietly(WithAdam(norm=False), Server(hubs=hubs), Sim(2), tmp_path / f"{hubs}", steps=10)
        restored = RunDirectory.open(tmp_path / f"{hubs}").load_checkpoint()
        assert restored is not None
        states.append(restored.replica_state["optimizer"])
    one, three = states
    assert [group["params"] for group in one["param_groups"]] == [group["params"] for group in three["param_groups"]]
    assert one["state"].keys() == three["state"].keys() and one["state"]
    for number, state in one["state"].items():
        for name, value in state.items():
            assert torch.allclose(value, three["state"][number][name], atol=1e-6), (number, name)


def test_a_dead_hub_ends_the_run_and_a_dead_worker_does_not(tmp_path: Path) -> None:
    for options in (Server(hubs=3), Server(sync="async", hubs=3)):
        with pytest.raises(RunError, match="hub-1, which holds a part of the joint model, died"):
            simulate(options, Sim(3, faults=Faults().crash("hub-1", at=0.35)), steps=20)
        faults = Faults().crash("worker-1", at=0.35).restart("worker-2", at=0.5, seconds=0.2)
        outcome = simulate(options, Sim(3, faults=faults, detect_seconds=0.05), steps=20)
        assert outcome.reason.startswith("all steps made") and outcome.meters["worker-2~2"].steps > 3


def simulate(options: Server | Single, sim: Sim, steps: int) -> Any:
    plan = RunPlan.make(SyntheticTask(), options, sim, Request(steps=steps, trace=False), None)
    return sim.execute(plan, NullObserver())


def test_with_a_hub_for_every_worker_resnet_152_is_no_longer_slower_than_one_worker() -> None:
    """The workload of the MPCA SGD paper, table 2, on gigabit Ethernet: gradients per second of 8 workers."""
    speeds = {}
    for options, workers in ((Single(), 1), (Server(sync="async"), 8), (Server(sync="async", hubs=8), 8)):
        sim = Sim(workers, link="1gbit", step_seconds=0.809, model_bytes="223MiB")
        outcome = simulate(options, sim, steps=12)
        speeds[str(options)] = workers * 12 / outcome.seconds
    alone, one_hub, eight_hubs = speeds.values()
    assert one_hub < alone < eight_hubs and eight_hubs > 3 * one_hub


def test_hubs_in_processes_of_their_own_equal_simulated_ones(tmp_path: Path) -> None:
    options = Server(rate="none", hubs=3)
    made = [
        train_quietly(Blobs(norm=False), options, on, tmp_path / on.name, steps=20) for on in (Local(2), Sim(workers=2))
    ]
    assert largest_difference(*(result.model for result in made)) < 1e-5


def test_a_run_resumes_from_its_checkpoint_when_any_of_its_hubs_was_killed(tmp_path: Path) -> None:
    assassin = Assassin(["hub-1"], steps=30)
    options = Server(sync="async", hubs=2)
    result = run(Blobs(), options, Local(2), steps=600, run_dir=tmp_path / "run", progress=assassin)
    assert result.figures["steps"] == 600 and result.metrics["error"] < 0.1
    assert any("hub-1, which holds a part of the joint model, was killed" in text for _, text in assassin.notes)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hubs": 0}, "hubs must be at least 1, not 0"),
        ({"hubs": 2, "sync": "soft"}, "hubs=2 is for sync='hard' or 'async'"),
        ({"hubs": 2, "topology": "tree"}, "hubs=2 needs topology='star', not 'tree'"),
        ({"hubs": 2, "overlap": True}, "hubs=2 needs overlap=False"),
        ({"hubs": 2, "sync": "async", "push_every": 2}, "hubs=2 needs push_every=1"),
        ({"hubs": 2, "sync": "async", "apply": "inline"}, "hubs=2 needs apply='server'"),
        ({"hubs": 2, "sync": "async", "consistent": False}, "hubs=2 is for weights that travel"),
        ({"hubs": 2, "compress": "int8"}, "hubs=2 needs compress='none'"),
        ({"hubs": 2, "rate": "gradient"}, "hubs=2 has no rate='gradient': use rate='average'"),
    ],
)
def test_what_several_hubs_cannot_do_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Server(**options)
