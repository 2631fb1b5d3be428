"""A worker's state besides its weights survives whatever happens to the run.

That state is its optimizer's, its random numbers, and what a schedule that follows evaluations has seen. It survives a
resume, a restart, a warm-up and a change of the number of workers. A worker that replaces a dead one begins with it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tether import (
    Averaging,
    Elastic,
    Faults,
    Grid,
    Local,
    Mpca,
    Server,
    Single,
    TaskError,
    UsageError,
    resume,
    run,
)
from tether.core.machine import Node
from tether.execution.checkpoint import Restored
from tether.execution.directory import RunDirectory
from tether.execution.goals import Request
from tether.execution.plan import RunPlan
from tether.execution.progress import make_progress
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Options
from tether.runtimes.base import NullObserver, Observer, Outcome, Plan
from tether.runtimes.process.driver import Driver
from tether.runtimes.process.launcher import NodeExited, NodeStarted
from tether.runtimes.process.local_launcher import LocalLauncher
from tether.runtimes.process.spec import NodeSpec
from tether.runtimes.process.states import StateCollection
from tether.runtimes.sim.costs import StepTime
from tether.testing.conformance import Assassin, Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim

QUIET = make_progress(quiet=True)
INLINE = Server(sync="async", apply="inline")
#: protocols whose workers step with optimizers of their own, one of them with one at the hub too
LOCAL_STEPS = [
    Single(),
    Averaging(tau=5),
    Elastic(tau=3),
    Mpca(),
    Grid(),
    INLINE,
    Server(sync="async", pull_every=2),
]


def momentum_of(optimizer_state: dict[str, Any]) -> float:
    """The length of the momentum in an optimizer's state; 0 if it has none."""
    buffers = [kept["momentum_buffer"] for kept in optimizer_state.get("state", {}).values()]
    return float(sum(buffer.double().square().sum() for buffer in buffers))


class Watched(Blobs):
    """Remembers, for every optimizer that steps, the momentum and the rate at the start of each step.

    Processes write their first step, and every one with another rate, to a file in the folder.
    """

    def __init__(self, folder: Path | None = None, **settings: Any) -> None:
        super().__init__(norm=False, **settings)
        self.folder = folder
        self.steps: list[list[tuple[float, float]]] = []
        #: the rates of all steps, in their order
        self.rates: list[float] = []

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        made = super().optimizer(model)
        own: list[tuple[float, float]] = []

        def watch(*_: Any) -> None:
            if not own:
                self.steps.append(own)
            own.append((momentum_of(made.state_dict()), float(made.param_groups[0]["lr"])))
            self.rates.append(own[-1][1])
            if self.folder is not None and (len(own) == 1 or own[-1][1] != own[-2][1]):
                self.folder.mkdir(exist_ok=True)
                with (self.folder / f"{id(self)}-{torch.initial_seed()}").open("a") as file:
                    file.write(json.dumps(own[-1]) + "\n")

        made.register_step_pre_hook(watch)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "steps": [], "rates": []}

    def first_momenta(self) -> list[float]:
        """The momentum with which each optimizer began its first step."""
        return sorted(own[0][0] for own in self.steps)

    def last_rates(self) -> set[float]:
        return {own[-1][1] for own in self.steps}

    def written(self) -> list[list[tuple[float, float]]]:
        """The same for processes: what they wrote to their files."""
        assert self.folder is not None
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(self.folder.iterdir())]


def saved(run: Path) -> Restored:
    restored = RunDirectory.open(run).load_checkpoint()
    assert restored is not None
    return restored


def saved_momenta(run: Path) -> dict[int, float]:
    """The length of every worker's momentum in the newest checkpoint."""
    found = {index: momentum_of(state["optimizer"]) for index, state in saved(run).workers.items()}
    assert all(value > 0 for value in found.values())
    return found


def further(run: Path, task: Any, steps: int, **options: Any) -> Any:
    return resume(run, task, steps=steps, progress=QUIET, **options)


# ---- optimizers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", LOCAL_STEPS, ids=str)
def test_every_worker_resumes_with_its_own_momentum(options: Options, tmp_path: Path) -> None:
    workers = options.workers_max or 3
    sim = Sim(workers, link="10mbit", step_seconds=StepTime(0.1, spread=0.3))
    train_quietly(Watched(), options, sim, tmp_path / "run", steps=30)
    task = Watched()
    kept = RunDirectory.open(tmp_path / "run").load_checkpoint()
    further(tmp_path / "run", task, 60)
    found = task.first_momenta()
    assert len(found) >= workers and all(value > 0 for value in found), found
    assert kept is not None and set(kept.workers) == set(range(workers))
    expected = [momentum_of(state["optimizer"]) for state in kept.workers.values()]
    if kept.replica_state:  # the hub steps as well
        expected.append(momentum_of(kept.replica_state["optimizer"]))
    assert found == pytest.approx(sorted(expected), rel=1e-6)


class Gambler(Watched):
    """Draws from every global source of randomness, and remembers what it drew."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.drawn: list[tuple[float, float, float]] = []

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return super().loss(model, batch) * (1 + sum(self.drawn[-1]))


@pytest.mark.parametrize("options", [Single(), Averaging(tau=5), Server()], ids=str)
def test_a_run_in_two_parts_equals_one_in_one_go_with_momentum_and_dropout(options: Options, tmp_path: Path) -> None:
    sim = Sim(options.workers_max or 3)
    whole = train_quietly(Gambler(), options, sim, tmp_path / "whole", steps=40)
    train_quietly(Gambler(), options, sim, tmp_path / "parts", steps=15)
    assert further(tmp_path / "parts", Gambler(), 40).figures["digest"] == whole.figures["digest"]


def test_what_is_random_does_not_repeat_after_a_resume(tmp_path: Path) -> None:
    first = Gambler()
    train_quietly(first, Averaging(tau=5), Sim(3), tmp_path / "run", steps=15)
    for workers, steps in ((3, 30), (2, 45), (4, 60)):
        again = Gambler()
        further(tmp_path / "run", again, steps, workers=workers)
        for source in range(3):
            earlier = {draws[source] for draws in first.drawn}
            assert earlier and not earlier & {draws[source] for draws in again.drawn}
        first.drawn += again.drawn


def test_the_simulators_own_draws_do_not_repeat_after_a_resume(tmp_path: Path) -> None:
    sim = Sim(1, step_seconds=StepTime(0.1, spread=1.0))
    first = train_quietly(Blobs(), Single(), sim, tmp_path / "run", steps=20)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    second = train_quietly(Blobs(), Single(), sim, tmp_path / "again", steps=20)
    assert second.figures["seconds"] == first.figures["seconds"] and rows
    plans = [
        RunPlan.make(SyntheticTask(4), Single(), sim, Request(steps=40), restored)
        for restored in (None, Restored(20, 20, torch.ones(4), {}, {}))
    ]
    noise = [[plan.build(plan.nodes[0])[1].compute("dense", True).gradient for _ in range(5)] for plan in plans]
    assert not any(torch.equal(a, b) for a in noise[0] for b in noise[1])
    seconds = [Sim(1, step_seconds=StepTime(0.1, spread=1.0)).execute(plan, NullObserver()).seconds for plan in plans]
    assert seconds[1] != pytest.approx(20 / 40 * seconds[0]) and plans[0].random_seed != plans[1].random_seed


@pytest.mark.parametrize("options", [Averaging(tau=5), Elastic(tau=3), Mpca(), Grid(), INLINE], ids=str)
def test_a_worker_that_replaces_a_dead_one_begins_with_another_workers_momentum(
    options: Options, tmp_path: Path
) -> None:
    task = Watched()
    faults = Faults().restart("worker-1", step=12, seconds=0.3)
    sim = Sim(3, link="10mbit", step_seconds=0.1, faults=faults, detect_seconds=0.05)
    train_quietly(task, options, sim, tmp_path / "run", steps=40)
    assert len(task.steps) == 4
    newcomer = task.steps[-1][0][0]
    others = {momentum for own in task.steps[:-1] for momentum, _ in own}
    assert newcomer > 0 and newcomer in others


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("options", [Averaging(tau=5), Elastic(tau=3), Mpca(), Grid()], ids=str)
def test_after_a_change_of_their_number_workers_share_the_momenta(
    options: Options, workers: int, tmp_path: Path
) -> None:
    train_quietly(Watched(), options, Sim(3), tmp_path / "run", steps=30)
    task = Watched()
    kept = saved_momenta(tmp_path / "run")
    further(tmp_path / "run", task, 60, workers=workers)
    assert task.first_momenta() == pytest.approx(sorted(kept[i % 3] for i in range(workers)), rel=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "stepping"),
    [(Server(sync="hard"), Averaging(tau=5), 3), (Averaging(tau=5), Server(sync="hard"), 1), (INLINE, Mpca(), 3)],
    ids=["hub to workers", "workers to hub", "workers to workers"],
)
def test_a_warm_up_hands_its_momentum_over(before: Options, after: Options, stepping: int, tmp_path: Path) -> None:
    task = Watched()
    train_quietly(task, after, Sim(3), tmp_path / "run", epochs=3, warmup=before, warmup_epochs=1)
    assert len(task.steps) == stepping + (1 if before == Server(sync="hard") else 3)
    assert all(own[0][0] > 0 for own in task.steps[-stepping:])


class Adaptive(Watched):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)


def test_the_state_of_another_optimizer_is_left_alone(tmp_path: Path) -> None:
    train_quietly(Watched(), Averaging(tau=5), Sim(2), tmp_path / "run", steps=20)
    assert further(tmp_path / "run", Adaptive(), 40).metrics["error"] < 0.2


class Hoarder(torch.optim.SGD):
    """Its state has values that no checkpoint can hold."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = {1, 2}
        return super().step(closure)


class Hoarding(Watched):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Hoarder(model.parameters(), lr=0.05)


def test_an_optimizer_whose_state_cannot_be_saved_still_trains_and_resumes_with_an_empty_state(tmp_path: Path) -> None:
    train_quietly(Hoarding(), Averaging(tau=5), Sim(2), tmp_path / "run", steps=20)
    assert not any("optimizer" in state for state in saved(tmp_path / "run").workers.values())
    assert further(tmp_path / "run", Hoarding(), 40).metrics["error"] < 0.2


def test_only_nodes_that_step_have_an_optimizer_state_in_a_checkpoint(tmp_path: Path) -> None:
    train_quietly(Watched(), Averaging(tau=5), Sim(2), tmp_path / "workers", steps=10)
    assert not saved(tmp_path / "workers").replica_state
    train_quietly(Watched(), Server(), Sim(2), tmp_path / "hub", steps=10)
    kept = saved(tmp_path / "hub")
    assert kept.replica_state and not any("optimizer" in state for state in kept.workers.values())


# ---- in processes ---------------------------------------------------------------------------------------------------


def test_processes_resume_with_their_momentum_and_their_dropout(tmp_path: Path) -> None:
    whole = train_quietly(Gambler(), Averaging(tau=5), Local(2), tmp_path / "whole", steps=30)
    train_quietly(Gambler(), Averaging(tau=5), Local(2), tmp_path / "parts", steps=15)
    assert all("random" in state for state in saved(tmp_path / "parts").workers.values())
    assert further(tmp_path / "parts", Gambler(), 30).figures["digest"] == whole.figures["digest"]


@pytest.mark.parametrize("options", [Elastic(tau=3), INLINE, Grid()], ids=str)
def test_processes_of_other_protocols_resume_with_their_momentum(options: Options, tmp_path: Path) -> None:
    # enough steps for every process to make some, however late it gets to compute
    train_quietly(Watched(), options, Local(2), tmp_path / "run", steps=500)
    kept = saved_momenta(tmp_path / "run")
    task = Watched(tmp_path / "steps")
    further(tmp_path / "run", task, 1000, workers=3)
    found = sorted(own[0][0] for own in task.written())
    assert found == pytest.approx(sorted(kept[i % 2] for i in range(3)), rel=1e-6)


def test_a_run_that_restarts_by_itself_keeps_its_momentum(tmp_path: Path) -> None:
    task = Watched(tmp_path / "steps")
    killer = Assassin(["hub"], steps=300)
    run(
        task,
        Averaging(tau=5),
        Local(2),
        run_dir=tmp_path / "run",
        steps=1000,
        checkpoint_seconds=0.05,
        progress=killer,
    )
    found = sorted(own[0][0] for own in task.written())
    assert len(found) == 4 and found[:2] == [0.0, 0.0] and found[2] > 0


class Replacing(LocalLauncher):
    """A launcher that starts a successor of a process that has exited, as on Spark."""

    def poll_events(self) -> list[NodeStarted | NodeExited]:
        found: list[NodeStarted | NodeExited] = []
        for died in super().poll_events():
            assert isinstance(died, NodeExited)
            found.append(died)
            if died.name == "worker-1":
                successor = Node("worker-1", "worker", computes=True, index=1).successor()
                self.start([successor])
                found.append(NodeStarted(successor))
        return found


@dataclass(frozen=True)
class Replaced(Local):
    """Processes on this machine; worker-1 is replaced when it dies."""

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        driver = Driver(plan, observer, self.hung_seconds)
        try:
            return driver.run([(Replacing(NodeSpec(plan, driver.directory, self.threads)), list(plan.nodes))])
        finally:
            driver.close()


def test_a_process_that_replaces_a_dead_one_begins_with_another_workers_momentum(tmp_path: Path) -> None:
    task = Watched(tmp_path / "steps")
    killer = Assassin(["worker-1"], steps=100)
    result = run(task, Averaging(tau=5), Replaced(3), run_dir=tmp_path / "run", steps=3000, progress=killer)
    assert any("worker-1~2 has joined" in text for _, text in killer.notes), killer.notes
    found = sorted(own[0][0] for own in task.written())
    assert len(found) == 4 and found[:3] == [0.0] * 3 and found[3] > 0
    assert result.figures["steps"] == 3000


def test_states_are_asked_for_so_seldom_that_they_take_little_of_the_time() -> None:
    collection = StateCollection(share=0.02, timeout_seconds=10.0)
    assert collection.is_due(0.0)
    first = collection.request({"worker-0", "worker-1"}, 0.0)
    assert not collection.is_done(1.0)
    collection.add("worker-0", first, "a", 1.0)
    assert not collection.is_done(2.0)
    collection.add("worker-1", first, "b", 3.0)
    assert collection.is_done(3.0) and collection.states == {"worker-0": "a", "worker-1": "b"}
    assert not collection.is_due(149.0) and collection.is_due(150.0)


def test_who_does_not_answer_in_time_is_left_out_and_is_given_longer_the_next_time() -> None:
    collection = StateCollection(share=0.02, timeout_seconds=10.0)
    first = collection.request({"worker-0", "worker-1"}, 0.0)
    collection.add("worker-0", first, "a", 1.0)
    assert not collection.is_done(9.9) and collection.is_done(10.0) and collection.states == {"worker-0": "a"}
    assert not collection.is_due(400.0)  # it is still on its way, and nobody knows how long it takes
    collection.add("worker-1", first, "late", 15.0)
    assert not collection.is_due(749.0) and collection.is_due(750.0)
    second = collection.request({"worker-0", "worker-1"}, 800.0)
    collection.add("worker-1", first, "from before", 801.0)
    assert not collection.is_done(829.0) and collection.is_done(830.0) and not collection.states
    assert second != first


def test_nobody_waits_for_the_dead() -> None:
    collection = StateCollection(share=0.02, timeout_seconds=10.0)
    first = collection.request({"worker-0", "worker-1"}, 0.0)
    collection.add("worker-0", first, "a", 1.0)
    collection.forget("worker-1", 2.0)
    assert collection.is_done(2.0) and collection.states == {"worker-0": "a"}


# ---- schedules that follow evaluations ------------------------------------------------------------------------------


class Plateau(Watched):
    """Its error never changes, so every evaluation of the joint model but the first halves its rate."""

    def __init__(self, folder: Path | None = None, metrics: tuple[str, ...] = ("error",), **scheduler: Any) -> None:
        super().__init__(folder)
        self.metrics = metrics
        self.settings = {"factor": 0.5, "patience": 0, **scheduler}

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Any) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **self.settings)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return dict.fromkeys(self.metrics, 0.5)


def rate_after(evaluations: int) -> float:
    """The rate of `Plateau` after this many evaluations."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.05)
    scheduler = Plateau().scheduler(optimizer, None)
    for _ in range(evaluations):
        scheduler.step(0.5)
    return float(optimizer.param_groups[0]["lr"])


def evaluations_of(run: Path) -> int:
    directory = RunDirectory.open(run)
    restored = directory.load_checkpoint()
    assert restored is not None
    return len(directory.history().evaluations(restored))


ASYNC = Server(sync="async", rate="none")
PLATEAU = [
    Single(),
    Averaging(tau=2),
    Server(rate="none"),
    ASYNC,
    Elastic(tau=2),
    Mpca(),
    Grid(),
    Server(sync="async", apply="inline", rate="none"),
]


@pytest.mark.parametrize("options", PLATEAU, ids=str)
def test_all_nodes_that_step_follow_the_evaluations_of_the_joint_model(options: Options, tmp_path: Path) -> None:
    sim = Sim(options.workers_max or 3, link="100mbit")
    first, then, other = Plateau(), Plateau(), Plateau()
    train_quietly(first, options, sim, tmp_path / "run", steps=40, evaluate_every=0.2)
    made = evaluations_of(tmp_path / "run")
    assert made >= 3
    # the final evaluation is made after the last step
    assert first.last_rates() <= {rate_after(made - 2), rate_after(made - 1)} and max(first.last_rates()) < 0.05
    further(tmp_path / "run", then, 60)
    assert {own[0][1] for own in then.steps} == {rate_after(made)}
    made = evaluations_of(tmp_path / "run")
    further(tmp_path / "run", other, 80, workers=options.workers_max or 2)
    assert {own[0][1] for own in other.steps} == {rate_after(made)}


@pytest.mark.parametrize("options", [Averaging(tau=2), Mpca(), Grid()], ids=str)
def test_a_worker_that_replaces_a_dead_one_has_seen_all_evaluations(options: Options, tmp_path: Path) -> None:
    task = Plateau()
    faults = Faults().restart("worker-1", step=25, seconds=0.3)
    sim = Sim(3, link="100mbit", faults=faults, detect_seconds=0.05)
    train_quietly(task, options, sim, tmp_path / "run", steps=40, evaluate_every=0.2)
    assert len(task.steps) == 4 and task.steps[-1][0][1] < 0.05
    assert task.rates == sorted(task.rates, reverse=True)  # the newcomer always has the rate of the others


@pytest.mark.parametrize("options", [Averaging(tau=2), ASYNC], ids=str)
def test_processes_follow_the_evaluations_and_replay_them_after_a_resume(options: Options, tmp_path: Path) -> None:
    first, then = Plateau(tmp_path / "first"), Plateau(tmp_path / "then")
    train_quietly(first, options, Local(2), tmp_path / "run", steps=800, evaluate_every=5)
    made = evaluations_of(tmp_path / "run")
    assert all(own[-1][1] < 0.05 for own in first.written())
    further(tmp_path / "run", then, 810)
    assert {own[0][1] for own in then.written()} == {rate_after(made)}


@pytest.mark.parametrize(
    ("metrics", "settings", "falls"),
    [(("loss", "error"), {}, True), (("accuracy",), {"mode": "max"}, True), (("error",), {"patience": 99}, False)],
)
def test_a_schedule_follows_the_tasks_first_metric_by_its_own_rules(
    metrics: tuple[str, ...], settings: dict[str, Any], falls: bool, tmp_path: Path
) -> None:
    task = Plateau(None, metrics, **settings)
    train_quietly(task, Averaging(tau=2), Sim(2), tmp_path / "run", steps=40, evaluate_every=0.2)
    assert (max(task.last_rates()) < 0.05) is falls


def test_a_schedule_that_follows_evaluations_needs_a_metric(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"ReduceLROnPlateau.*evaluate\(\).*no metrics"):
        train_quietly(Plateau(None, ()), Averaging(tau=2), Sim(2), tmp_path / "run", steps=40, evaluate_every=0.2)


def test_a_run_whose_schedule_follows_evaluations_cannot_be_recorded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau.*cannot be recorded"):
        train_quietly(Plateau(), Averaging(tau=2), Sim(2), tmp_path / "run", steps=4, record=True)


# ---- in the run directory -------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "a run")


def keep(directory: RunDirectory, step: int, workers: dict[int, dict[str, Any]] | None) -> Restored:
    directory.save_checkpoint(step, 10 * step, torch.zeros(3), {}, {}, "averaging", workers)
    restored = directory.load_checkpoint()
    assert restored is not None and restored.step == step
    return restored


def test_states_of_workers_come_back_as_they_were_saved(directory: RunDirectory) -> None:
    states = {i: {"optimizer": {"state": {0: {"momentum_buffer": torch.full((2,), float(i))}}}} for i in (0, 3)}
    restored = keep(directory, 1, states)
    assert set(restored.workers) == {0, 3}
    assert torch.equal(restored.workers[3]["optimizer"]["state"][0]["momentum_buffer"], torch.full((2,), 3.0))


def test_without_new_states_of_workers_a_checkpoint_refers_to_the_last_ones(directory: RunDirectory) -> None:
    assert keep(directory, 1, None).workers == {}
    keep(directory, 2, {0: {"kept": 2}})
    assert keep(directory, 3, None).workers == {0: {"kept": 2}}
    for step in range(4, 9):
        assert keep(directory, step, None).workers == {0: {"kept": 2}}
    assert len(list((directory.path / "checkpoints").iterdir())) == 3
    assert keep(RunDirectory(directory.path), 9, None).workers == {}  # it has not read the earlier ones
    assert keep(directory, 10, {1: {"kept": 4}}).workers == {1: {"kept": 4}}
    assert len(list((directory.path / "checkpoints").iterdir())) == 2


def test_a_checkpoint_that_is_kept_keeps_the_states_to_which_it_refers(directory: RunDirectory) -> None:
    keep(directory, 1, {0: {"kept": 1}})
    keep(directory, 2, None)
    keep(directory, 3, None)
    keep(directory, 4, {0: {"kept": 4}})
    (newest,) = (directory.path / "checkpoints").glob("at-*40-*")
    (newest / "model.safetensors").write_bytes(b"damaged")
    restored = RunDirectory(directory.path).load_checkpoint()
    assert restored is not None and (restored.step, restored.workers) == (3, {0: {"kept": 1}})


def test_a_resumed_run_keeps_the_states_that_it_found(directory: RunDirectory) -> None:
    keep(directory, 1, {0: {"kept": 1}})
    again = RunDirectory(directory.path)
    assert again.load_checkpoint() is not None
    assert keep(again, 2, None).workers == {0: {"kept": 1}}


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"")], ids=["gone", "cut off"])
def test_a_checkpoint_that_has_lost_the_states_of_its_workers_is_still_used(
    directory: RunDirectory, damage: Any
) -> None:
    keep(directory, 1, {0: {"kept": torch.ones(2)}})
    (file,) = (directory.path / "checkpoints").glob("*/workers.safetensors")
    damage(file)
    restored = directory.load_checkpoint()
    assert restored is not None and restored.step == 1 and restored.workers == {}


def test_a_checkpoint_of_an_earlier_version_is_refused(directory: RunDirectory) -> None:
    keep(directory, 1, {0: {"kept": 1}})
    (file,) = (directory.path / "checkpoints").glob("*/state.json")
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({key: tree[key] for key in ("step", "samples", "protocol", "state", "replica_state")}))
    (file.parent / "SHA256SUMS").unlink()
    with pytest.raises(UsageError, match="has version 0, and this Tether reads version 2"):
        RunDirectory(directory.path).load_checkpoint()


def write(directory: RunDirectory, *rows: dict[str, Any]) -> None:
    with directory.metrics.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def evaluated(samples: int, error: float | None) -> dict[str, Any]:
    return {"kind": "evaluation", "time": 1.0, "samples": samples, "metrics": {"error": error}}


def errors(directory: RunDirectory, samples: int, *known: int) -> list[float]:
    restored = Restored(0, samples, torch.zeros(1), {}, {}, evaluations={at: {"error": 0.9} for at in known})
    return [metrics["error"] for metrics in directory.history().evaluations(restored).values()]


def test_only_evaluations_that_lead_to_the_checkpoint_are_replayed(directory: RunDirectory) -> None:
    assert errors(directory, 100) == [] and errors(directory, 100, 50, 60) == [0.9, 0.9]
    write(directory, {"kind": "note", "text": "begun"}, evaluated(100, 0.5), evaluated(200, 0.4), evaluated(240, 0.3))
    assert errors(directory, 200) == [0.5, 0.4]
    assert errors(directory, 200, 100, 300) == [0.9, 0.4], "a checkpoint has a hash, and metrics have none"
    write(directory, {"kind": "resumed", "samples": 200}, evaluated(250, 0.6), evaluated(350, None))
    with directory.metrics.open("a") as file:
        file.write('{"kind": "evaluation", "samp')  # it was killed
    found = errors(directory, 350, 50)
    assert found[:4] == [0.9, 0.5, 0.4, 0.6] and len(found) == 5 and np.isnan(found[4])


def test_a_checkpoint_alone_has_the_evaluations_that_led_to_it(tmp_path: Path) -> None:
    """Another machine may have nothing else of the run."""
    train_quietly(Plateau(), Averaging(tau=2), Sim(2), tmp_path / "run", steps=40, evaluate_every=0.2)
    made, task = evaluations_of(tmp_path / "run"), Plateau()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    further(tmp_path / "run", task, 60)
    assert made > 3 and {own[0][1] for own in task.steps} == {rate_after(made)}
