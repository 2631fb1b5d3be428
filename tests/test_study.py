"""The study: its cells, the file that keeps them, the input it refuses, and the words that follow from the numbers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tether.cli import app as cli
from tether.errors import UsageError
from tether.sweeps import study

BLOBS = """
import tether.testing.conformance

class Small(tether.testing.conformance.Blobs):
    epochs = 1

class Plain(Small):  # the size of its mini-batches is not an option
    def __init__(self): super().__init__(batch_size=32, norm=False)
    def evaluate(self, model): return {"mistakes": super().evaluate(model)["error"], "other": 1.0}

class Wild(Small):
    def optimizer(self, model):
        import torch
        return torch.optim.SGD(model.parameters(), lr=1e30)
    def __init__(self, batch_size=1): super().__init__(batch_size=batch_size, norm=False)
"""


@pytest.fixture
def blobs(tmp_path: Path) -> str:
    (tmp_path / "blobs.py").write_text(BLOBS)
    return f"{tmp_path / 'blobs.py'}"


def run(task: str, to: Path, **others: Any) -> dict[str, Any]:
    grid = {"mu": (16, 64), "workers": (1, 4), "protocols": ("hard", "1-soft")}
    grid = {name: others.pop(name, value) for name, value in grid.items()}
    settings = study.Settings.make(task, **{"step_seconds": "16=0.01,64=0.02", **others})
    return study.study(settings, **grid, to=to, console=Console(file=io.StringIO()))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cells that are simulated, in their order."""
    ran: list[str] = []
    simulate = study._simulate

    def counted(cell: study.Cell, *rest: Any) -> Any:
        ran.append(str(cell))
        return simulate(cell, *rest)

    monkeypatch.setattr(study, "_simulate", counted)
    return ran


def test_a_study_of_two_by_two_by_two_runs_one_worker_once(blobs: str, tmp_path: Path, runs: list[str]) -> None:
    outcome = run(f"{blobs}:Small", tmp_path / "to")
    assert len(runs) == len(set(runs)) == len(outcome["rows"]) == 6
    by = {(row["protocol"], row["mu"], row["lambda"]): row for row in outcome["rows"]}
    assert by["hard", 16, 1]["seconds"] > by["hard", 16, 4]["seconds"] > 0
    assert by["hard", 16, 1]["seconds"] == pytest.approx(63 * 0.01, rel=0.1), "1000 samples, plus the network"
    assert by["hard", 16, 4]["staleness"] == 0 < by["1-soft", 16, 4]["staleness"] < 2
    assert all(0 <= row["error"] < 0.6 and row["failed"] is None for row in outcome["rows"])
    assert (tmp_path / "to" / "study.png").read_bytes().startswith(b"\x89PNG")


def test_rudra_eq7_hardsync_cells_of_equal_mu_lambda_have_equal_error(blobs: str, tmp_path: Path) -> None:
    outcome = run(f"{blobs}:Plain", tmp_path, protocols=("hard",))
    assert outcome["metric"] == "mistakes", "the first metric, where there is no error"
    assert outcome["ratios"]["spread_hard_mu_lambda_64"] == 0
    assert outcome["settings"]["reference_batch"] == 32


def test_a_second_call_runs_nothing_and_a_larger_grid_only_what_is_new(
    blobs: str, tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "TIMING_SECONDS", 0.01)
    first = run(f"{blobs}:Small", tmp_path, step_seconds=None, workers=(1, 2))
    kept = (tmp_path / "study.json").read_bytes()
    assert json.loads(kept)["measured_seconds"].keys() == {"16", "64"}
    runs.clear()
    assert run(f"{blobs}:Small", tmp_path, step_seconds=None, workers=(1, 2)) == first
    assert not runs and (tmp_path / "study.json").read_bytes() == kept
    run(f"{blobs}:Small", tmp_path, step_seconds=None, workers=(1, 2), protocols=("hard", "lambda-soft"))
    assert runs == ["2-soft mu=16 lambda=2", "2-soft mu=64 lambda=2"]


def test_a_study_that_was_stopped_continues(blobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(f"{blobs}:Small", tmp_path / "whole")
    simulate, ran = study._simulate, []

    def stopped(cell: study.Cell, *rest: Any) -> Any:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(cell)
        return simulate(cell, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(study, "_simulate", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(f"{blobs}:Small", tmp_path / "parts")
    assert len(json.loads((tmp_path / "parts" / "study.json").read_text())["cells"]) == 3
    assert run(f"{blobs}:Small", tmp_path / "parts")["rows"] == whole["rows"]


def test_other_settings_are_refused_by_name(blobs: str, tmp_path: Path) -> None:
    run(f"{blobs}:Small", tmp_path, mu=(64,), protocols=("hard",))
    with pytest.raises(UsageError, match=r"epochs was 1, now 2\. .*--to"):
        run(f"{blobs}:Small", tmp_path, mu=(64,), protocols=("hard",), epochs=2)
    with pytest.raises(UsageError, match=r"link was '1gbit', now '2gbit', seed was 0, now 1"):
        run(f"{blobs}:Small", tmp_path, seed=1, link="2gbit")
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(UsageError, match="not a study of this version"):
        run(f"{blobs}:Small", tmp_path)


def test_a_configuration_that_diverges_is_reported_and_does_not_end_the_study(blobs: str, tmp_path: Path) -> None:
    outcome = run(f"{blobs}:Wild", tmp_path, mu=(500,), workers=(1,), epochs=8)
    assert [row["error"] for row in outcome["rows"]] == [None] and "loss became" in outcome["rows"][0]["failed"]
    assert "No configuration converged" in outcome["recommendation"]
    assert "diverged" in shown(study.table(outcome))


def test_cells_with_fewer_workers_than_updates_are_left_out_and_named(blobs: str, tmp_path: Path) -> None:
    outcome = run(f"{blobs}:Small", tmp_path, mu=(64,), workers=(1, 2, 4), protocols=("4-soft", "lambda-soft"))
    assert outcome["left_out"] == ["4-soft with lambda=2"]
    assert "4-soft with lambda=2" in shown(study.table(outcome))
    found = {(row["protocol"], row["lambda"]): row["error"] for row in outcome["rows"]}
    assert found["4-soft", 4] == found["lambda-soft", 4], "with four workers they are the same run"


def shown(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---- the words, against made-up cells -------------------------------------------------------------------------------


def findings(errors: dict[tuple[int, int], float], batch: int = 128) -> dict[str, Any]:
    """Time is as in a perfect cluster: proportional to 1/lambda."""
    rows = [
        {"protocol": "hard", "mu": mu, "lambda": k, "mu_lambda": mu * k, "seconds": 100 / k + mu / 100, "error": error}
        for (mu, k), error in errors.items()
    ]
    settings = study.Settings("x", reference_batch=batch)
    return study._findings(rows, {"hard": rows}, settings, "error")


def test_rudra_table2_the_rule_is_recommended_where_mu_lambda_decides() -> None:
    """Hardly any spread at about 128, much between 128 and 1024: 30 workers should take mu = 128 / 30."""
    told = findings({(128, 1): 0.179, (4, 30): 0.181, (8, 18): 0.189, (32, 30): 0.272, (64, 18): 0.283})
    ratios = told["ratios"]
    assert ratios["spread_hard_mu_lambda_128"] == pytest.approx(1.0)
    assert ratios["spread_hard_mu_lambda_1024"] == pytest.approx(1.1)
    assert ratios["spread_hard"] == pytest.approx(1.05) and ratios["between_hard"] == pytest.approx(9.45)
    assert ratios["speedup_at_baseline_error"] == pytest.approx((100 + 1.28) / (100 / 30 + 0.04))
    assert "differs by 1.05 percentage points on average (at most 1.10)" in told["recommendation"]
    assert "take mu=4. The nearest cell that was run, hard mu=4 lambda=30, has 18.10%" in told["recommendation"]
    assert [(row["mu"], row["lambda"]) for row in told["front"]] == [(4, 30), (128, 1)]


def test_the_rule_is_not_recommended_where_the_cells_do_not_support_it() -> None:
    told = findings({(128, 1): 0.1, (4, 32): 0.4, (256, 1): 0.1, (8, 32): 0.42})
    assert "'keep mu*lambda constant' is not supported" in told["recommendation"]
    assert "Nothing faster is as good." in told["recommendation"]
    few = findings({(128, 1): 0.1, (4, 2): 0.4})
    assert "Too few cells" in few["recommendation"] and "spread_hard" not in few["ratios"]
    many = findings({(8, 1): 0.1, (1, 8): 0.1, (16, 1): 0.2, (1, 16): 0.2}, batch=8)
    assert "cannot be kept at 8 with 16 workers" in many["recommendation"]


# ---- the command line -----------------------------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["tether", "study", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_json_is_one_object_and_progress_a_line_for_each_cell(
    blobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--mu", "16,64", "--lambda", "1,4", "--protocol", "hard,1-soft", "--step-seconds", "10ms"]
    options = ["--set", "momentum=0.5", "--set", "topology=tree", "--to", str(tmp_path / "to")]
    assert command(monkeypatch, f"{blobs}:Small", *grid, *options, "--json") == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert {"rows", "ratios", "recommendation"} <= told.keys() and len(told["rows"]) == 6
    assert told["settings"]["task_settings"] == {"momentum": "0.5"}
    assert "6/6  1-soft mu=64 lambda=4: error" in said.err
    assert command(monkeypatch, f"{blobs}:Small", *grid, *options) == 0
    said = capsys.readouterr()
    assert told["recommendation"] in said.out and "study.png" in said.out and not said.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--mu", "4,x"], "--mu '4,x' is not understood"),
        (["--mu", ""], "--mu '' is not understood"),
        (["--lambda", "0,4"], "--lambda '0,4': every number must be at least 1"),
        (["--protocol", "hard,weak"], "unknown protocol 'weak' of a study; known: hard, 1-soft, N-soft"),
        (["--protocol", "0-soft"], "unknown protocol '0-soft'"),
        (["--protocol", "9-soft", "--lambda", "2,4"], "no cell is left"),
        (["--lambda", "2000", "--mu", "1"], "1000 training samples for 2000 workers"),
        (["--step-seconds", "4=0.01,x"], "--step-seconds '4=0.01,x' is not understood"),
        (["--step-seconds", "0"], "a step takes some time"),
        (["--link", "fast"], "the link cannot be 'fast'"),
        (["--epochs", "0"], "epochs must be more than 0"),
        (["--reference-batch", "0"], "reference_batch must be at least 1"),
        (["--set", "n=2"], "a study sets n itself; use --protocol"),
        (["--set", "tau=2"], "protocol server has no option 'tau'"),
    ],
)
def test_bad_input_is_refused_in_a_line_with_status_2(
    words: list[str],
    expected: str,
    blobs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, f"{blobs}:Small", "--to", str(tmp_path / "to"), *words) == 2
    said = capsys.readouterr()
    assert expected in said.err and not said.out and not (tmp_path / "to").exists()


def test_step_seconds_are_linear_between_pairs_and_proportional_outside() -> None:
    seconds = study.parse_step_seconds("4=0.01,128=10ms,16=0.04")
    assert [seconds(mu) for mu in (2, 4, 10, 16, 128, 256)] == pytest.approx([0.005, 0.01, 0.025, 0.04, 0.01, 0.02])
    assert study.parse_step_seconds("50ms")(4) == study.parse_step_seconds("0.05")(128) == 0.05
