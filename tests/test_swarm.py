"""Seeds draw whole runs with faults: all of them succeed, and a planted bug does not stay hidden."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from test_collectives import never_resend_broadcasts, never_resend_sums
from tether.core.vector import digest
from tether.errors import UsageError
from tether.execution.directory import RunDirectory
from tether.learner.synthetic import SyntheticLearner
from tether.protocols import known
from tether.protocols.ledger import Ledger
from tether.runtimes.base import Outcome
from tether.runtimes.sim.faults import Faults, Kind
from tether.testing.swarm import Cluster, Scenario, Verdict, draw, judge, play, shrink, swarm

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.json"))


def played(scenario: Scenario, directory: Path) -> Outcome:
    return play(scenario, directory)[0]


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_a_scenario_that_once_failed_succeeds(file: Path) -> None:
    assert judge(Scenario.load(file)).error == ""


def test_sixty_seeds_succeed() -> None:
    seen: list[Verdict] = []
    assert swarm(range(60), each=seen.append) == []
    assert [verdict.seed for verdict in seen] == list(range(60))
    assert all(verdict.events > 0 for verdict in seen)
    assert max(verdict.parts for verdict in seen) > 1, "no run lost its hub or all its workers"


def test_seeds_are_judged_alike_by_several_processes() -> None:
    alone: list[Verdict] = []
    together: list[Verdict] = []
    swarm(range(12), plant="drop", each=alone.append)
    swarm(range(12), plant="drop", each=together.append, processes=2)
    assert alone == together


def test_the_seeds_try_every_protocol_and_every_fault() -> None:
    scenarios = [draw(seed) for seed in range(100)]
    assert {scenario.options.name for scenario in scenarios} == set(known())
    kinds = {fault.kind for scenario in scenarios for fault in scenario.faults}
    assert kinds == set(get_args(Kind)) - {"drop"}
    dead = {fault.node for scenario in scenarios for fault in scenario.faults if fault.kind == "crash"}
    assert {"hub", "worker-0", "aggregator-0"} <= dead
    assert {scenario.workers(0) for scenario in scenarios} == set(range(1, 10))
    assert {scenario.options.compress for scenario in scenarios} == {"none", "fp16", "bf16", "int8"}
    assert any(scenario.workers(1) != scenario.workers(0) for scenario in scenarios)


def test_a_seed_stands_for_one_run(tmp_path: Path) -> None:
    for seed in range(8):
        assert draw(seed) == draw(seed)
        once, twice = (digest(played(draw(seed), tmp_path / f"{seed} {i}").weights) for i in range(2))
        assert once == twice
    assert len({str(draw(seed)) for seed in range(8)}) == 8


LOST_HUB = Scenario(1, {"name": "averaging", "tau": 2}, Cluster((3, 2)), steps=30, checkpoint_seconds=0.3)


def losing(faults: Faults) -> Scenario:
    return msgspec.structs.replace(LOST_HUB, faults=faults.schedule)


def test_a_run_that_loses_its_hub_or_all_workers_resumes_with_other_workers(tmp_path: Path) -> None:
    hub = losing(Faults().crash("hub", at=1.5))
    outcome, verdict = play(hub, tmp_path / "hub")
    assert verdict.parts == 2 and set(outcome.meters) == {"hub", "worker-0", "worker-1"}
    assert outcome.meters["worker-0"].steps < 30, "it began again"
    everybody = Faults().crash("worker-0", at=1.0).crash("worker-1", at=1.1).crash("worker-2", at=1.2)
    assert play(losing(everybody), tmp_path / "everybody")[1].parts == 2


@pytest.mark.parametrize("damages", [False, True], ids=["full", "damage"])
def test_older_checkpoints_replace_those_that_the_disk_has_lost(damages: bool, tmp_path: Path) -> None:
    """The later the last good checkpoint, the fewer steps are made again."""
    lost = Faults().crash("hub", at=1.5)
    intact = played(losing(lost), tmp_path / "intact").meters["worker-0"].steps
    spoilt = played(losing(lost.disk(at=1.2, seconds=1.0, damages=damages)), tmp_path / "spoilt")
    nothing = played(losing(lost.disk(at=0.0, seconds=2.0, damages=damages)), tmp_path / "nothing")
    assert intact < spoilt.meters["worker-0"].steps < nothing.meters["worker-0"].steps


def test_a_checkpoint_that_cannot_be_read_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunDirectory, "load_checkpoint", lambda self: None)
    assert "InvariantBroken: the checkpoint of step" in judge(LOST_HUB).error


def test_a_mini_batch_that_is_made_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    deal = Ledger.deal_round

    def all_alike(self: Ledger, steps: int) -> dict[str, tuple[int, ...]]:
        dealt = deal(self, steps)
        return dict.fromkeys(dealt, next(iter(dealt.values())))

    monkeypatch.setattr(Ledger, "deal_round", all_alike)
    assert "were made twice" in judge(LOST_HUB).error


@pytest.mark.parametrize("protocol", sorted(known()))
def test_a_swarm_can_keep_to_one_protocol(protocol: str) -> None:
    assert {draw(seed, protocol).options.name for seed in range(10)} == {protocol}


@pytest.fixture(scope="module")
def wrong() -> list[Verdict]:
    """The failures that a planted loss causes within a few seeds."""
    return swarm(range(20), plant="drop")


def test_a_planted_loss_is_found_and_its_seed_fails_the_same_way_again(wrong: list[Verdict]) -> None:
    assert wrong
    for verdict in wrong:
        assert verdict.error.startswith(("Stalled: ", "RunError: the model did not learn", "InvariantBroken: "))
        assert judge(draw(verdict.seed, plant="drop")).error == verdict.error
        assert judge(draw(verdict.seed)).error == "", "without the plant the seed succeeds"


def test_a_verdict_reads_the_same_in_every_process() -> None:
    """The order of sets differs from process to process."""
    code = "from tether.testing.swarm import draw, judge; print(judge(draw(9, 'server', plant='drop')).error)"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    assert done.stdout.startswith("Stalled: ")
    assert done.stdout == judge(draw(9, "server", plant="drop")).error + "\n"


def test_a_verdict_says_what_its_seed_stands_for(wrong: list[Verdict]) -> None:
    verdict = wrong[0]
    text = str(verdict.scenario)
    assert str(verdict.scenario.options) in text and "drop " in text
    assert f"{verdict.scenario.workers(0)} " in text


def test_a_failing_seed_is_shrunk_to_a_scenario_file_that_fails_the_same_way(
    wrong: list[Verdict], tmp_path: Path
) -> None:
    large = max(wrong, key=lambda verdict: len(verdict.scenario.faults))
    small = shrink(large)
    assert small.error.partition(":")[0] == large.error.partition(":")[0]
    assert [fault.kind for fault in small.scenario.faults] == ["drop"]
    assert small.scenario.workers(0) <= large.scenario.workers(0) and small.scenario.steps < large.scenario.steps
    assert shrink(large).scenario == small.scenario, "shrinking does not repeat"
    (file := tmp_path / "small.json").write_text(small.scenario.dump())
    assert Scenario.load(file) == small.scenario
    assert judge(Scenario.load(file)).error == small.error


def test_shrinking_is_bounded(wrong: list[Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    monkeypatch.setattr("tether.testing.swarm.judge", lambda scenario: judged.append(scenario) or judge(scenario))
    shrink(wrong[0], runs_max=5)
    assert len(judged) == 5


def test_a_file_that_is_not_a_scenario_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "none.json").write_text('{"seed": 1, "protocol": {"name": "thing"}}')
    with pytest.raises(UsageError, match="is not a scenario"):
        Scenario.load(file)
    file.write_text(LOST_HUB.dump().replace("averaging", "thing"))
    with pytest.raises(UsageError, match="unknown protocol 'thing'"):
        Scenario.load(file)
    with pytest.raises(UsageError, match="cannot read the scenario"):
        Scenario.load(tmp_path / "nowhere.json")


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
