"""Every sample of an epoch counts exactly once: whoever dies, pauses or comes back, and however often it is resumed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether import Averaging, Elastic, Faults, Grid, Mpca, Server, Single, StepTime
from tether.core.effects import Checkpoint
from tether.execution.checkpoint import Restored
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Options, known
from tether.protocols.ledger import Spans
from tether.runtimes.base import NodeStates, NullObserver, Outcome
from tether.testing.conformance import CheckedSim as Sim
from tether.testing.swarm import BatchRecordingPlan, draw, judge

SAMPLES = 240


class Keeper(NullObserver):
    """Keeps the checkpoints, and ends the run after so many of them."""

    def __init__(self, last: int | None = None) -> None:
        self.kept: list[Restored] = []
        self.last = last

    def checkpoint(self, effect: Checkpoint, weights: Any, state: NodeStates, now: float) -> None:
        self.kept.append(Restored(effect.step, effect.samples, weights, effect.state, state.hub))


def counted(kept: Restored) -> set[int]:
    return {batch for start, stop in kept.state["counted"] for batch in range(start, stop)}


def train(
    options: Options, sim: Sim, restored: Restored | None = None, **goal: Any
) -> tuple[BatchRecordingPlan, Keeper, Outcome]:
    task = SyntheticTask(parameters=6, samples=SAMPLES)
    request = Request(seed=3, trace=False, **{"epochs": 2, "checkpoint_seconds": 1e9, **goal})
    plan = BatchRecordingPlan(**vars(RunPlan.make(task, options, sim, request, restored)))
    keeper = Keeper()
    return plan, keeper, sim.execute(plan, keeper)


def check(plan: BatchRecordingPlan, keeper: Keeper, outcome: Outcome, before: set[int]) -> None:
    """All mini-batches of the goal count; none was made by two that live, nor again if it counted before."""
    goal = plan.schedule.goal
    assert goal is not None
    assert counted(keeper.kept[-1]) >= set(range(goal))
    living = Counter(batch for name, begun in plan.begun.items() if name not in outcome.lost for batch in begun)
    assert not [batch for batch, times in living.items() if times > 1], "made twice"
    assert not living.keys() & before, "made again"
    dead = {batch for name, begun in plan.begun.items() if name in outcome.lost for batch in begun}
    assert before | living.keys() | dead >= set(range(goal)), "never made"
    if not dead and not (isinstance(plan.protocol, Server) and plan.protocol.sync == "hard"):
        assert before | living.keys() == set(range(goal)), "made too much"


PROTOCOLS: list[Options] = [
    Single(),
    Averaging(tau=7),
    Averaging(),
    Elastic(),
    Elastic(tau=4),
    Mpca(),
    Mpca(phases=1),
    Grid(),
    Server(sync="hard"),
    Server(sync="hard", topology="tree", fan_out=2),
    Server(sync="soft", n=2),
    Server(sync="soft", topology="tree", fan_out=2, overlap=True),
    Server(sync="async"),
    Server(sync="async", topology="tree", fan_out=2, overlap=True),
    Server(sync="async", push_every=3, pull_every=2),
    Server(sync="async", consistent=False),
    Server(sync="async", apply="inline"),
]


@pytest.mark.parametrize("options", PROTOCOLS, ids=str)
def test_a_worker_that_dies_hands_its_samples_on(options: Options) -> None:
    workers = min(3, options.workers_max or 3)
    faults = Faults().crash("worker-1", step=10) if workers > 1 else Faults()
    plan, keeper, outcome = train(options, Sim(workers=workers, faults=faults))
    assert outcome.reason == "all steps made"
    check(plan, keeper, outcome, set())


@pytest.mark.parametrize("options", PROTOCOLS, ids=str)
def test_workers_that_are_unequally_fast_share_an_epoch_without_repeating_a_sample(options: Options) -> None:
    workers = min(3, options.workers_max or 3)
    speeds = StepTime(0.1, spread=0.7, factors={"worker-2": 30.0})
    plan, keeper, outcome = train(options, Sim(workers=workers, step_seconds=speeds))
    check(plan, keeper, outcome, set())
    assert not outcome.lost


@pytest.mark.parametrize("options", PROTOCOLS, ids=str)
@pytest.mark.parametrize("workers", [4, 2, 7])
def test_a_resume_repeats_no_sample_and_leaves_none_out(options: Options, workers: int) -> None:
    many = min(4, options.workers_max or 4)
    sim = Sim(workers=many, step_seconds=StepTime(0.1, spread=0.5), faults=Faults())
    _, keeper, _ = train(options, sim, seconds=3.0, checkpoint_seconds=0.5)
    for kept in keeper.kept[:-1][-2:]:
        plan, later, outcome = train(options, replace(sim, workers=min(workers, options.workers_max or workers)), kept)
        check(plan, later, outcome, counted(kept))


@pytest.mark.parametrize("name", sorted(known()))
@pytest.mark.parametrize("block", range(4))
def test_every_sample_counts_once_in_any_schedule_of_faults(name: str, block: int) -> None:
    for seed in range(15 * block, 15 * (block + 1)):
        scenario = msgspec.structs.replace(draw(seed, name), shared=True)
        assert judge(scenario).error == "", str(scenario)


@given(st.lists(st.integers(0, 40), unique=True))
def test_spans_are_the_set_of_what_was_added(numbers: list[int]) -> None:
    spans = Spans()
    for number in numbers:
        assert spans.add(number)
        assert not spans.add(number)
    assert {n for start, stop in spans for n in range(start, stop)} == set(numbers)
    assert spans.total == len(numbers)
    assert set(spans.gaps()) == set(range(spans.stop)) - set(numbers)
    assert all(number in spans for number in numbers) and 41 not in spans
