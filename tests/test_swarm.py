"""Seeds draw whole runs with faults: all go well, and a bug that is planted does not stay hidden."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest

from test_collectives import never_resend_broadcasts, never_resend_sums
from tether.errors import UsageError
from tether.learner import SyntheticLearner
from tether.protocols import known
from tether.swarm import Verdict, draw, judge, simulate, swarm
from tether.vector import digest


def test_sixty_seeds_go_well() -> None:
    seen: list[Verdict] = []
    assert swarm(range(60), each=seen.append) == []
    assert [verdict.seed for verdict in seen] == list(range(60))
    assert all(verdict.events > 0 for verdict in seen)


def test_the_seeds_try_every_protocol_and_every_fault() -> None:
    scenarios = [draw(seed) for seed in range(60)]
    assert {scenario.protocol.name for scenario in scenarios} == set(known())
    kinds = {fault.kind for scenario in scenarios for fault in scenario.sim.faults.schedule}
    assert kinds == {"crash", "restart", "pause", "slow", "cut"}
    assert {scenario.sim.workers for scenario in scenarios} == set(range(1, 10))


def test_a_seed_stands_for_one_run() -> None:
    for seed in range(8):
        assert str(draw(seed)) == str(draw(seed))
        assert digest(simulate(draw(seed)).weights) == digest(simulate(draw(seed)).weights)
    assert len({str(draw(seed)) for seed in range(8)}) == 8


@pytest.mark.parametrize("protocol", sorted(known()))
def test_a_swarm_can_keep_to_one_protocol(protocol: str) -> None:
    assert {draw(seed, protocol).protocol.name for seed in range(10)} == {protocol}


@pytest.fixture(scope="module")
def wrong() -> list[Verdict]:
    """What a planted loss leads to within a few seeds."""
    return swarm(range(20), plant="drop")


def test_a_planted_loss_is_found_and_its_seed_fails_the_same_way_again(wrong: list[Verdict]) -> None:
    assert wrong
    for verdict in wrong:
        assert verdict.error.startswith(("Stalled: ", "RunError: the model did not learn"))
        assert judge(draw(verdict.seed, plant="drop")).error == verdict.error
        assert judge(draw(verdict.seed)).error == "", "without the plant the seed goes well"


def test_a_verdict_reads_the_same_in_every_process() -> None:
    """Whatever order sets have there."""
    code = "from tether.swarm import draw, judge; print(judge(draw(13, 'server', plant='drop')).error)"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    assert done.stdout.startswith("Stalled: ")
    assert done.stdout == judge(draw(13, "server", plant="drop")).error + "\n"


def test_a_verdict_tells_what_its_seed_stands_for(wrong: list[Verdict]) -> None:
    verdict = wrong[0]
    text = str(verdict.scenario)
    assert str(verdict.scenario.protocol) in text and "drop " in text
    assert f"{verdict.scenario.sim.workers} workers" in text


@pytest.mark.parametrize("mutate", [never_resend_broadcasts, never_resend_sums], ids=lambda mutate: mutate.__name__)
def test_collectives_that_forget_to_send_again_are_found(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are added twice leave a mean that is merely less exact: test_collectives finds those."""
    mutate(monkeypatch)
    assert any(judge(draw(seed, "averaging")).error.startswith("Stalled: ") for seed in range(110))


def test_a_model_that_does_not_learn_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyntheticLearner, "step", lambda *arguments: None)
    assert "RunError: the model did not learn: its error went from 1 to 1" in judge(draw(1)).error


def test_a_run_that_does_not_repeat_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_ever, step = itertools.count(), SyntheticLearner.step

    def drifting(self: SyntheticLearner, gradient: Any, rate: float, *others: Any) -> None:
        step(self, gradient, rate * (1 + 1e-6 * next(steps_ever)), *others)

    monkeypatch.setattr(SyntheticLearner, "step", drifting)
    assert judge(draw(10)).error == "RunError: a second run with the same seed gave another model"


def test_an_unknown_plant_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown bug to plant 'weed'; known: drop"):
        swarm(range(1), plant="weed")
