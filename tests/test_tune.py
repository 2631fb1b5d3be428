"""The search for alpha: its values, the reduced task, the file it keeps, its advice, and the input it refuses."""

from __future__ import annotations

import io
import json
import pickle
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from rich.console import Console
from torch.utils.data import Subset, TensorDataset

from tether import Averaging, Elastic, Local, Sim, tasks
from tether.analysis.sweep_plots import alpha_png
from tether.cli import app as cli
from tether.errors import TaskError, UsageError
from tether.learner.synthetic import SyntheticTask
from tether.protocols import Mpca
from tether.protocols.elastic import ElasticHub
from tether.sweeps import sweep, tune
from tether.sweeps.tune import Point, Tuning, parse_alphas, reduced
from tether.task import Length
from tether.testing.conformance import Blobs

PNG = b"\x89PNG"
QUICK = Sim(4)


def search(alphas: tuple[float, ...], to: Path | None = None, **others: Any) -> Tuning:
    chosen: dict[str, Any] = {"task": tasks.load("digits"), "protocol": Elastic(tau=2), "on": QUICK, "epochs": 4}
    return tune.tune(**{**chosen, **others}, alphas=alphas, to=to, console=Console(file=io.StringIO()))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The values of alpha that are run, in their order."""
    ran: list[float] = []
    measure_run = sweep.measure_run

    def counted(plan: Any, *rest: Any) -> Any:
        ran.append(plan.protocol.alpha)
        return measure_run(plan, *rest)

    monkeypatch.setattr(tune, "measure_run", counted)
    return ran


# ---- the values -----------------------------------------------------------------------------------------------------


def test_a_range_has_equal_ratios_two_digits_and_its_own_ends() -> None:
    assert parse_alphas("0.001..0.5", 5) == (0.001, 0.0047, 0.022, 0.11, 0.5)
    assert parse_alphas("0.123..0.999", 3) == (0.123, 0.35, 0.999)
    assert len(parse_alphas("0.001..0.5")) == 8
    assert parse_alphas("0.1..0.101", 8) == (0.1, 0.101), "values that round to the same are one"
    assert parse_alphas("0.3, 0.1,0.3") == (0.1, 0.3)


# ---- the reduced task -----------------------------------------------------------------------------------------------


class Own(Blobs):
    """Overrides everything, and gets an attribute while it is used."""

    batch_size = 7
    epochs = 3.5

    def train_data(self) -> TensorDataset:
        self.seen = True
        return super().train_data()

    def scheduler(self, optimizer: torch.optim.Optimizer, length: Length) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer)


def test_a_reduced_task_is_the_same_but_for_its_training_data() -> None:
    whole = Own(norm=False)
    part = reduced(whole, 0.1, seed=3)
    data = part.train_data()
    assert isinstance(data, TensorDataset) and len(data) == 100 and len(whole.train_data()) == 1000
    rows = {tuple(row.tolist()) for row in whole.train_data().tensors[0]}
    assert {tuple(row.tolist()) for row in data.tensors[0]} < rows
    assert (part.name, part.batch_size, part.epochs, type(part).__name__) == ("own", 16, 3.5, "Own")
    assert part.seen and isinstance(part, Own)  # type: ignore[attr-defined]
    model = part.model()
    assert part.evaluate(model) == whole.evaluate(model), "it evaluates on the training data, all of it"
    assert isinstance(part.optimizer(model), torch.optim.SGD)
    assert isinstance(part.scheduler(part.optimizer(model), Length(10, 5.0, 1)), torch.optim.lr_scheduler.ConstantLR)


def test_the_part_follows_from_the_seed_here_and_in_other_processes() -> None:
    first, again, other = (reduced(Blobs(), 0.1, seed).train_data().tensors[0] for seed in (1, 1, 2))  # type: ignore[attr-defined]
    assert torch.equal(first, again) and not torch.equal(first, other)
    copied = pickle.loads(cloudpickle.dumps(reduced(Blobs(), 0.1, 1)))
    assert torch.equal(copied.train_data().tensors[0], first)


def test_any_data_with_a_length_can_be_reduced() -> None:
    part = reduced(SyntheticTask(samples=50), 0.1, seed=0)
    data = part.train_data()
    assert isinstance(data, Subset) and len(data) == 5 and isinstance(part, SyntheticTask)


# ---- searches -------------------------------------------------------------------------------------------------------


def test_a_search_finds_the_best_and_draws_it(tmp_path: Path) -> None:
    found = search((0.001, 0.1, 0.3), tmp_path)
    assert found.metric == "error" and found.falling and (found.samples, found.samples_of_all) == (144, 1442)
    values = [point.value for point in found.points]
    assert found.best is not None and found.best.value == min(value for value in values if value is not None)
    assert found.best.alpha > 0.001, "so small an alpha leaves the joint model where it was"
    assert found.protocol == Elastic(tau=2, alpha=found.best.alpha)
    assert all(len(point.curve) > 2 and point.seconds and point.steps == 5 for point in found.points)
    assert (tmp_path / "tune.png").read_bytes().startswith(PNG)
    assert search((0.001, 0.1, 0.3)) == found, "the seed repeats it, and nothing need be kept"


def test_a_second_call_runs_nothing_and_further_values_only_themselves(tmp_path: Path, runs: list[float]) -> None:
    first = search((0.1, 0.3), tmp_path)
    assert runs == [0.1, 0.3]
    assert search((0.1, 0.3), tmp_path) == first and len(runs) == 2
    assert [point.alpha for point in search((0.05, 0.1), tmp_path).points] == [0.05, 0.1]
    assert runs[2:] == [0.05]
    with pytest.raises(UsageError, match=r"seed was 0, now 1, share was 0.1, now 0.2, workers was 4, now 3\. .*--to"):
        search((0.1, 0.3), tmp_path, on=replace(QUICK, workers=3), share=0.2, seed=1)
    with pytest.raises(UsageError, match=r"protocol was .*'tau': 2.*, now .*'tau': 3"):
        search((0.1, 0.3), tmp_path, protocol=Elastic(tau=3))


def test_a_search_that_was_stopped_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_run = sweep.measure_run

    def stopped(plan: Any, *rest: Any) -> Any:
        if plan.protocol.alpha == 0.3:
            raise KeyboardInterrupt
        return measure_run(plan, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(tune, "measure_run", stopped)
        with pytest.raises(KeyboardInterrupt):
            search((0.1, 0.3), tmp_path)
    assert list(json.loads((tmp_path / "tune.json").read_text())["cells"]) == ["alpha=0.1"]
    assert search((0.1, 0.3), tmp_path) == search((0.1, 0.3))


def test_a_value_that_diverges_is_reported_and_does_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers that each pull the centre by 0.95 of the way, without sharing it, throw it further every time."""
    monkeypatch.setattr(ElasticHub, "_rates_under_way", lambda hub: 0.0)
    sgd = tasks.load("digits", settings={"momentum": "0.9", "learning_rate": "0.02"})
    found = search((0.1, 0.95), tmp_path, task=sgd, protocol=Elastic(tau=1), epochs=40)
    good, bad = found.points
    assert bad.value is None and bad.failed is not None and "the loss became" in bad.failed
    assert found.best is good and found.corridor == [good]
    assert "diverged" in shown(found.table()) and (tmp_path / "tune.png").read_bytes().startswith(PNG)


def test_all_may_diverge(tmp_path: Path) -> None:
    found = made(None, None)
    assert found.best is None and not found.corridor and "No alpha converged" in found.recommendation
    assert alpha_png(found).startswith(PNG) and found.figures["alpha"] is None


class Unwell(Blobs):
    """Its first losses are good; later its loss raises an error."""

    def loss(self, model: Any, batch: Any) -> Any:
        calls = vars(model)["calls"] = vars(model).get("calls", 0) + 1
        return super().loss(model, batch) if calls < 6 else batch["nothing"]


def test_another_error_of_the_task_is_not_divergence() -> None:
    with pytest.raises(TaskError, match="in loss"):
        search((0.1, 0.3), task=Unwell(), epochs=20)


def test_a_search_in_processes_gives_them_the_part_only() -> None:
    found = search((0.2,), on=Local(2), protocol=Elastic(tau=5, alpha=0.3), task=Blobs(), epochs=10)
    assert not found.virtual and found.samples == 100
    assert all(point.value is not None and point.steps == 32 for point in found.points)


def test_mpca_6_3_the_schedule_of_alpha_must_leave_room_for_alpha_itself() -> None:
    """The paper's target is reached after 220 steps: in fewer, all values would look alike."""
    short: Any = {"protocol": Mpca(free_steps=20, alpha_decay_steps=200), "task": Blobs()}
    with pytest.raises(UsageError, match=r"from step 220 on, and these runs have 13 steps: .* Give 282 epochs"):
        search((0.01, 0.1), **short, epochs=8, on=replace(QUICK, workers=4))
    quick = {**short, "protocol": Mpca(free_steps=2, alpha_decay_steps=18)}
    found = search((0.01, 0.1), **quick, epochs=None)
    assert all(point.value is not None and point.steps >= 40 for point in found.points)
    by_shares = search((0.01, 0.1), **{**short, "protocol": Mpca()}, epochs=8)
    assert all(point.value is not None for point in by_shares.points)


# ---- the words, against made-up points ------------------------------------------------------------------------------


def made(*values: float | None, metric: str = "error", falling: bool = True) -> Tuning:
    points = [
        Point(0.01 * 2**i, value, None if value is None else 1.0, 5, "nan" if value is None else None, [])
        for i, value in enumerate(values)
    ]
    return Tuning("x", Elastic(), metric, falling, 0.1, True, 4, 100, 1000, points)


def shown(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_corridor_is_what_lies_around_the_best_without_a_gap() -> None:
    found = made(0.105, 0.2, 0.109, 0.1, 0.11, None, 0.1001)
    assert [point.alpha for point in found.corridor] == [0.04, 0.08, 0.16]
    assert found.figures["corridor"] == [0.04, 0.16] and not found.figures["at_edge"]
    assert "Take alpha=0.08: error 10.00%." in found.recommendation
    assert "Corridor: 0.04 to 0.16, at most 10% worse than the best (3 of 7 values)." in found.recommendation
    assert "was tried" not in found.recommendation


def test_a_best_or_a_corridor_at_the_edge_is_mentioned() -> None:
    assert "The best is the smallest value that was tried: a smaller one" in made(0.1, 0.2, 0.3).recommendation
    largest = made(0.3, 0.2, 0.1)
    assert "The best is the largest value that was tried: a larger one" in largest.recommendation
    assert "No neighbour is in the corridor" in largest.recommendation and largest.figures["at_edge"]
    assert "reaches the largest value that was tried: it may be wider" in made(0.3, 0.1, 0.105).recommendation
    assert "was tried" not in made(0.3, 0.1, None).recommendation, "beyond it lies what diverges"


def test_of_equal_values_the_middle_is_the_best() -> None:
    best = made(0.4, 0.0, 0.0, 0.0, 0.4).best
    assert best is not None and best.alpha == 0.04


def test_an_accuracy_is_better_the_larger_it_is() -> None:
    found = made(0.5, 0.86, 0.9, 0.7, metric="accuracy", falling=False)
    assert [point.alpha for point in found.corridor] == [0.02, 0.04]
    assert found.recommendation.startswith("Take alpha=0.04: accuracy 0.9.")


class Right(Blobs):
    def evaluate(self, model: Any) -> dict[str, float]:
        return {"right": 1 - super().evaluate(model)["error"]}


def test_whether_larger_is_better_follows_from_the_untrained_model() -> None:
    assert not search((0.1, 0.3), task=Right(), epochs=10).falling


# ---- the command line -----------------------------------------------------------------------------------------------

Command = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def tether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tether", *shlex.split(line)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return run


def test_the_command_says_what_to_choose_and_how_to_continue(tether: Command, tmp_path: Path) -> None:
    line = "tune digits --alpha 0.05..0.3 --points 2 -n 3 --epochs 3 --set tau=2 --set batch_size=16 --link 2gbit"
    status, out, err = tether(f"{line} --seed 4 --json")
    assert status == 0
    told = json.loads(out)
    assert told["alpha"] in (0.05, 0.3) and len(told["points"]) == 2 and told["at_edge"] is True
    assert "1/2  alpha=0.05: error " in err and "best " in err.splitlines()[1]
    assert (tmp_path / "tune" / "tune.png").read_bytes().startswith(PNG)
    assert told["picture"] == str(tmp_path / "tune" / "tune.png")
    status, out, err = tether(f"{line} --seed 4")
    assert status == 0 and not err, "all is kept"
    assert told["recommendation"] in out and "tune.png" in out and "worse by" in out
    command = next(text for text in out.splitlines() if "tether train" in text).strip()
    assert (
        command
        == told["command"]
        == (
            "tether train digits --protocol elastic --on sim --workers 3 --link 2gbit --seed 4 "
            f"--set tau=2 --set batch_size=16 --set alpha={told['alpha']}"
        )
    )
    assert tether(command.removeprefix("tether ") + " --steps 2")[0] == 0


WRONG = [
    ("--alpha x..y", "--alpha 'x..y' is not understood; write a range like 0.001..0.5"),
    ("--alpha 0.1,", "is not understood"),
    ("--alpha 0.5..0.1", "must go from a smaller to a larger value"),
    ("--alpha 0..0.5", "every value must be more than 0"),
    ("--alpha nan,0.5", "every value must be more than 0"),
    ("--alpha 0.1..2", "alpha must be between 0 and 1, not 2"),
    ("--alpha 0.1", "a search needs at least two values"),
    ("--alpha 0.1..0.2 --points 1", "--points 1: a range needs at least 2 points, its ends"),
    ("--alpha 0.1,0.2 --share 0", "share must be more than 0 and at most 1, not 0"),
    ("--alpha 0.1,0.2 --share 1.5", "share must be more than 0 and at most 1, not 1.5"),
    ("--alpha 0.1,0.2 -n 20", "144 of 1442 samples are too few: 20 workers with mini-batches of 32 take 640"),
    ("--alpha 0.1,0.2 -n 20", "give a share of at least 0.45"),
    ("--alpha 0.1,0.2 --tolerance -1", "tolerance must be at least 0"),
    ("--alpha 0.1,0.2 -p averaging", "protocol 'averaging' has no alpha to search for; these have: elastic"),
    ("--alpha 0.1,0.2 -p elastik", "unknown protocol 'elastik'"),
    ("--alpha 0.1,0.2 --set alpha=0.3", "a search sets alpha itself; use --alpha"),
    ("--alpha 0.1,0.2 --set tao=3", "Did you mean 'tau'?"),
    ("--alpha 0.1,0.2 --epochs 0", "epochs must be more than 0"),
    ("--alpha 0.1,0.2 --on local --link 1gbit", "add --on sim"),
    ("", "Missing option '--alpha'"),
]


@pytest.mark.parametrize(("words", "told"), WRONG, ids=[words for words, _ in WRONG])
def test_bad_input_is_refused_in_words_with_status_2(tether: Command, tmp_path: Path, words: str, told: str) -> None:
    status, out, err = tether(f"tune digits {words}")
    assert status == 2 and told in err.replace("\n", " ") and "Traceback" not in err
    assert not out and not (tmp_path / "tune").exists()


def test_python_use_is_refused_in_the_same_words() -> None:
    with pytest.raises(UsageError, match=r"write Blobs\(\)"):
        search((0.1, 0.2), task=Blobs)
    with pytest.raises(UsageError, match="has no alpha"):
        search((0.1, 0.2), protocol=Averaging())
    with pytest.raises(UsageError, match="some values"):
        search(())
