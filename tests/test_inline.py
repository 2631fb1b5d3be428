"""Workers that step on one shared vector: counting, halting, deaths, and real processes that share memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from test_local import mapped, nothing_is_left
from tether import Faults, Local, Server, StepTime
from tether.api import resume, run
from tether.core.effects import CancelTimer, Checkpoint, Compute, Effect, Evaluate, Finish, Send, SetTimer, Step
from tether.core.events import Event, GradientReady, PeerJoined, PeerLost, Received, Started, StopRequested, TimerFired
from tether.core.machine import NodeContext, Schedule
from tether.core.message import Timer
from tether.errors import UsageError
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.execution.progress import make_progress
from tether.learner.synthetic import SyntheticTask
from tether.protocols.server.inline import HALT_SECONDS, TALLY_SECONDS, InlineHub, InlineWorker
from tether.protocols.server.messages import Halt, Mark, Push, Tally
from tether.runtimes.base import NullObserver
from tether.tasks.digits import Digits
from tether.testing.conformance import Assassin, Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim

INLINE = Server(sync="async", apply="inline")
ENDS = [Evaluate, Checkpoint, Finish]


def machine(name: str, workers: int = 2, steps: int = 100, options: Server = INLINE) -> Any:
    nodes = options.nodes(workers)
    place = next(node for node in nodes if node.name == name)
    goal = Schedule(steps=steps, evaluate_every=10, batch_size=16)
    built = options.machine(NodeContext(place, nodes, torch.zeros(3), 3, goal))
    play(built, Started(tuple(node.name for node in nodes)))
    return built


def play(built: Any, event: Event, now: float = 0.0) -> list[Effect]:
    if isinstance(event, Received) and isinstance(event.message, Tally):
        ledger = built.progress.ledger
        ledger.deal(event.sender, max(0, event.message.steps - len(ledger.held[event.sender])))
    effects: list[Effect] = built.handle(event, now)
    built.check()
    return effects


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def ready() -> GradientReady:
    return GradientReady(torch.zeros(3), 1.0, 16, 0.01)


def test_a_worker_reports_its_steps_every_now_and_then() -> None:
    worker: InlineWorker = machine("worker-0")
    assert kinds(play(worker, ready(), 0.01)) == [Step, Compute]
    assert kinds(play(worker, ready(), 0.02)) == [Step, Compute]
    effects = play(worker, ready(), TALLY_SECONDS)
    assert effects[1] == Send("hub", Tally(3)), "after the step"
    assert kinds(play(worker, ready(), TALLY_SECONDS + 0.01)) == [Step, Compute]


def test_a_worker_that_halts_reports_its_last_steps_and_never_steps_again() -> None:
    worker: InlineWorker = machine("worker-0")
    play(worker, ready(), 0.01)
    assert play(worker, Received("hub", Halt()), 0.02) == [Send("hub", Tally(1, last=True))]
    assert play(worker, ready(), 0.03) == [], "the gradient under way is discarded"


def test_the_hub_counts_and_finishes_when_all_have_halted() -> None:
    hub: InlineHub = machine("hub", steps=20)
    assert Evaluate(10, 320) in play(hub, Received("worker-0", Tally(20)))
    effects = play(hub, Received("worker-1", Tally(20)))
    assert [e for e in effects if isinstance(e, Send)] == [Send("worker-0", Halt()), Send("worker-1", Halt())]
    assert SetTimer(Timer("halt"), HALT_SECONDS) in effects and not hub.progress.over
    assert not {Finish} & set(kinds(play(hub, Received("worker-0", Tally(2, last=True)))))
    effects = play(hub, Received("worker-1", Tally(0, last=True)))
    assert [kind for kind in kinds(effects) if kind is not CancelTimer] == ENDS
    assert Evaluate(20, 672, final=True) in effects, "steps reported after the goal was reached are in the samples"


def test_neither_a_dead_nor_a_paused_worker_delays_the_end() -> None:
    hub: InlineHub = machine("hub", workers=3)
    play(hub, StopRequested("enough"))
    assert play(hub, StopRequested("again")) == []
    assert play(hub, Received("worker-0", Tally(1, last=True)))[1:] == []
    assert play(hub, PeerLost("worker-1")) == []
    assert kinds(play(hub, TimerFired(Timer("halt")))) == ENDS
    alone: InlineHub = machine("hub", workers=1)
    play(alone, PeerLost("worker-0"))
    assert kinds(play(alone, StopRequested("enough"))) == ENDS


def test_a_worker_that_joins_counts_and_halts_if_the_run_is_ending() -> None:
    hub: InlineHub = machine("hub", workers=1, steps=10)
    assert play(hub, PeerJoined("worker-1", "worker")) == []
    play(hub, Received("worker-1", Tally(4)))
    assert hub.progress.step == 2, "there are two workers now"
    play(hub, StopRequested("enough"))
    assert play(hub, PeerJoined("worker-2", "worker")) == [Send("worker-2", Halt())]


# ---- whole runs -----------------------------------------------------------------------------------------------------


def test_in_the_simulator_all_nodes_have_one_vector() -> None:
    """Steps of one worker are in the other's next gradient, and the sum of all steps is in the model."""
    sim = Sim(workers=4, step_seconds=StepTime(0.1, spread=0.3))
    plan = RunPlan.make(SyntheticTask(noise=0.0, rate=0.1), INLINE, sim, Request(steps=30, trace=False), None)
    outcome = sim.execute(plan, NullObserver())
    assert outcome.reason == "all steps made"
    assert float(outcome.weights.abs().max()) < 0.9**70, "four times the progress of one worker, except for staleness"
    made = sum(meter.samples for meter in outcome.meters.values())
    assert made >= 120 and outcome.meters["hub"].steps == 0


@pytest.mark.parametrize("rate", ["none", "1/n"])
def test_rate_1_over_n_makes_smaller_steps(rate: Any) -> None:
    sim = Sim(workers=4)
    plan = RunPlan.make(
        SyntheticTask(noise=0.0, rate=0.1),
        replace(INLINE, rate=rate),
        sim,
        Request(steps=10, trace=False),
        None,
    )
    left = float(sim.execute(plan, NullObserver()).weights.abs().max())
    assert (left > 0.9**15) is (rate == "1/n")


@pytest.mark.parametrize("rate", ["auto", "none", "1/n", "staleness"])
def test_an_inline_step_equals_one_at_a_hub_with_the_same_number_of_workers(rate: Any) -> None:
    """Where steps are made must not change how a run learns. While one gradient is computed, all others step once."""
    worker = machine("worker-0", workers=4, options=replace(INLINE, rate=rate))
    (inline,) = [effect for effect in play(worker, ready()) if isinstance(effect, Step)]
    hub = machine("hub", workers=4, options=Server(sync="async", rate=rate))
    for number in range(1, 9):
        mark = Mark(f"worker-{number % 4}", number, max(0, number - 4))
        effects = play(hub, Received(mark.worker, Push((mark,), torch.zeros(3), torch.zeros(0), 1, None)))
    (at_hub,) = [effect for effect in effects if isinstance(effect, Step)]
    assert (inline.rate, inline.staleness) == (at_hub.rate, at_hub.staleness)


@pytest.mark.parametrize("apply", ["inline", "server"])
def test_eight_asynchronous_workers_with_momentum_train_wherever_the_step_is_made(apply: Any, tmp_path: Path) -> None:
    """With the task's own momentum the error would stay at 70 to 90 %: staleness acts as momentum too."""
    sim = Sim(workers=8, step_seconds=StepTime(0.1, spread=0.2), checked=False)
    task = Digits(learning_rate=0.05, momentum=0.9)
    result = train_quietly(task, Server(sync="async", apply=apply), sim, tmp_path / "run", epochs=10)
    assert result.metrics["error"] < 0.1


def test_a_worker_may_die_and_another_join() -> None:
    faults = Faults().crash("worker-1", at=0.5).restart("worker-2", at=0.7, seconds=0.3)
    sim = Sim(workers=3, faults=faults, detect_seconds=0.05)
    plan = RunPlan.make(SyntheticTask(), INLINE, sim, Request(steps=40, trace=False), None)
    outcome = sim.execute(plan, NullObserver())
    assert outcome.reason.startswith("all steps made, except that worker-1 made ")
    assert outcome.meters["worker-2~2"].steps > 10


class WithBallast(Blobs):
    """Has a large parameter, so that the vector is longer than a page of memory."""

    def model(self) -> torch.nn.Module:
        model = super().model()
        model.register_parameter("ballast", torch.nn.Parameter(torch.zeros(100_000)))
        return model

    def loss(self, model: Any, batch: Any) -> Tensor:
        return super().loss(model, batch) + 0.0 * model.ballast[0]


def test_processes_share_one_vector_and_nothing_is_left(tmp_path: Path) -> None:
    result = train_quietly(WithBallast(), INLINE, Local(2), tmp_path / "run", steps=400)
    assert result.figures["steps"] == 400 and result.metrics["error"] < 0.1
    assert result.figures["bytes_sent"] == 0, "no weights and no gradients travel"
    assert result.figures["samples"] >= 2 * 400 * 16
    assert nothing_is_left() and not mapped(os.getpid(), "/memfd:tether-")
    further = resume(tmp_path / "run", WithBallast(), workers=3, steps=500, progress=make_progress(quiet=True))
    assert further.figures["steps"] == 500 and further.metrics["error"] < 0.1


def test_a_killed_worker_costs_its_share_and_its_steps_are_kept(tmp_path: Path) -> None:
    assassin = Assassin(["worker-1"], steps=50)
    result = run(Blobs(), INLINE, Local(2), steps=4000, run_dir=tmp_path / "run", progress=assassin)
    assert result.figures["steps"] == 4000 and result.metrics["error"] < 0.1
    assert any("worker-1 was killed" in text for _, text in assassin.notes)


def test_auto_chooses_by_the_processors_that_are_left_and_says_so(tmp_path: Path) -> None:
    auto = Server(sync="async", apply="auto")
    assert auto.resolved_for(2, 2) == replace(auto, apply="inline")
    assert auto.resolved_for(2, 3) == replace(auto, apply="server", consistent=False)
    assert replace(auto, consistent=True).resolved_for(2, 2) == Server(sync="async", consistent=True)
    assert auto.resolved_for(2, None) == replace(auto, apply="server")
    assert replace(auto, compress="int8").resolved_for(2, 2) == replace(auto, apply="server", compress="int8")
    assert INLINE.resolved_for(1, 64) == INLINE
    train_quietly(Blobs(), auto, Sim(workers=2), tmp_path / "run", steps=5)
    assert "chosen: Server(sync='async')" in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sync": "hard"}, "apply='inline' needs sync='async', not 'hard'"),
        ({"topology": "tree"}, "needs topology='star'"),
        ({"overlap": True}, "needs overlap=False"),
        ({"push_every": 2}, "needs push_every=1"),
        ({"compress": "int8"}, "nothing is sent that compress='int8'"),
        ({"rate": "gradient"}, "rate='gradient' needs what the hub knows"),
        ({"consistent": True}, "read what others write: use apply='server'"),
        ({"apply": "there"}, "apply"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Server(**{"sync": "async", "apply": "inline", **options})


def test_a_run_with_one_vector_cannot_be_recorded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"share one vector cannot be recorded.*consistent=True"):
        train_quietly(Blobs(), INLINE, Sim(workers=2), tmp_path / "run", steps=5, record=True)
