"""The speedup model of DeepSpark: the function, its fit to run directories, and where reports show it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tether.learner.learner
from tether import Averaging, Local, Server, Sim, Single, UsageError
from tether.analysis.report import speedups
from tether.analysis.runs import RunRecord, load_run
from tether.analysis.speedup import falls, fit, fits, speedup
from tether.learner.learner import Learner
from tether.runtimes.sim.costs import StepTime
from tether.tasks import load as load_task
from tether.testing.conformance import Blobs, train_quietly

# ---- the function ---------------------------------------------------------------------------------------------------

ROUNDS = {"steps_alone": 100, "step_seconds": 0.5, "tau": 5, "exchange_seconds": 1.5, "rounds": 10, "workers": 4}


def test_deepspark_eq7_and_eq8_by_hand() -> None:
    assert speedup(**ROUNDS) == pytest.approx(50 / 40)
    assert speedup(**ROUNDS, load_seconds=10.0) == pytest.approx(60 / 42.5)


def test_without_communication_k_workers_that_need_a_kth_of_the_steps_are_k_times_faster() -> None:
    ideal = {"steps_alone": 120, "step_seconds": 0.3, "tau": 1, "exchange_seconds": 0.0}
    for workers in (1, 2, 8):
        assert speedup(**ideal, rounds=120 / workers, workers=workers) == pytest.approx(workers)
        assert speedup(**ideal, rounds=120 / workers, workers=workers, load_seconds=7.0) == pytest.approx(workers)


def test_where_only_loading_takes_time_the_speedup_is_the_number_of_shards() -> None:
    assert speedup(**ROUNDS, load_seconds=1e9) == pytest.approx(4, rel=1e-6)


def test_rare_exchanges_cost_little_and_slow_ones_make_many_workers_slower_than_one() -> None:
    rare = {**ROUNDS, "tau": 1000, "rounds": 100 / 4 / 1000}
    assert 3.9 < speedup(**rare) < 4
    assert speedup(**{**ROUNDS, "exchange_seconds": 100.0}) < 0.06


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("steps_alone", 0, "more than 0"),
        ("step_seconds", 0.0, "more than 0"),
        ("tau", 0.5, "at least 1"),
        ("exchange_seconds", -1.0, "at least 0"),
        ("rounds", 0, "more than 0"),
        ("rounds", float("nan"), "more than 0"),
        ("workers", 0, "at least 1"),
        ("load_seconds", float("inf"), "at least 0"),
    ],
)
def test_impossible_quantities_are_refused_by_name(name: str, value: Any, told: str) -> None:
    with pytest.raises(UsageError, match=f"{name} must be {told}, not {value}"):
        speedup(**{**ROUNDS, name: value})


# ---- the fit to made-up runs ----------------------------------------------------------------------------------------


def run_in(path: Path, protocol: str, lines: list[dict[str, Any]], runtime: str = "local", **config: Any) -> RunRecord:
    path.mkdir(parents=True)
    named = {"task": {"name": "digits"}, "protocol": {"name": protocol}, "runtime": {"name": runtime}}
    workers = 1 if protocol == "single" else 2
    ended = {"workers": workers, "status": "finished", "reason": "", "error": None, "result": None}
    (path / "run.json").write_text(json.dumps({"version": 1, **named, **ended, **config}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(path)


def progress(node: str, steps: int, compute: float, wait: float = 0.0, **more: float) -> dict[str, Any]:
    seconds = {"time": 99.0, "compute_seconds": compute, "wait_seconds": wait, **more}
    counts = {"samples": 8 * steps, "bytes_sent": 0, "bytes_received": 0}
    return {"kind": "progress", "node": node, "steps": steps, "loss": 1.0, **counts, **seconds}


def evaluations(seconds_per_step: float, steps: int, **metrics: list[float | None]) -> list[dict[str, Any]]:
    """An evaluation after every `steps` steps."""
    rows = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    return [
        {"kind": "evaluation", "time": i * steps * seconds_per_step, "step": i * steps, "samples": i, "metrics": row}
        for i, row in enumerate(rows, start=1)
    ]


#: reaches 0.3 after 40 steps of 0.6 s, 0.1 s of which it waited for data
ALONE = [
    progress("worker-0", 5, 4.0, load_seconds=1.5),  # an earlier row does not count
    progress("worker-0", 50, 30.0, load_seconds=5.0),
    *evaluations(0.6, 20, error=[0.6, 0.3, 0.2], accuracy=[0.4, 0.7, 0.8]),
]
#: reaches 0.3 after 8 rounds of 4 steps; the last round is shorter
TOGETHER = [
    *({"kind": "record", "time": 3.0 * t, "node": "hub", "round": t, "tau": 4} for t in range(1, 10)),
    {"kind": "record", "time": 28.5, "node": "hub", "round": 10, "tau": 2},
    {"kind": "record", "time": 28.5, "node": "hub", "other": 1.0},
    progress("hub", 0, 0.0, wait=1000.0),
    progress("worker-0", 38, 19.0, wait=7.0),
    progress("worker-1", 38, 19.0, wait=11.0),
    *evaluations(0.75, 16, error=[0.5, 0.3], accuracy=[0.5, 0.7]),
]


def test_every_quantity_comes_from_what_the_runs_recorded(tmp_path: Path) -> None:
    alone, run = run_in(tmp_path / "a", "single", ALONE), run_in(tmp_path / "b", "averaging", TOGETHER)
    [found] = fits([run, alone])
    assert (found.run, found.alone) == (run, alone)
    assert (found.metric, found.target) == ("error", 0.3)
    assert found.steps_alone == 40
    assert found.step_seconds == pytest.approx(0.5)
    assert found.load_seconds == pytest.approx(4.0)
    assert (found.tau, found.rounds, found.workers) == (4, 8, 2)
    assert found.exchange_seconds == pytest.approx(1.0)  # 10 rounds of 3.8 steps on average, 9 waits
    assert found.measured == pytest.approx(24 / 24)
    assert found.predicted == pytest.approx((40 * 0.5 + 4) / ((4 * 0.5 + 1.0) * 8 + 4 / 2))


def test_without_recorded_tau_or_load_every_step_is_a_round_and_data_costs_nothing(tmp_path: Path) -> None:
    lines = [progress("worker-0", 41, 20.0, wait=8.0), *evaluations(0.7, 20, error=[0.5, 0.1])]
    run = run_in(tmp_path / "b", "server", lines)
    plain = [progress("worker-0", 50, 30.0), *evaluations(0.6, 20, error=[0.6, 0.3, 0.1])]
    [found] = fits([run_in(tmp_path / "a", "single", plain), run])
    assert (found.tau, found.rounds, found.load_seconds) == (1, 40, 0)
    assert found.exchange_seconds == pytest.approx(0.2)
    assert found.predicted == pytest.approx(60 * 0.6 / (40 * 0.8))


def test_the_target_is_the_hardest_that_all_reach_whether_the_metric_falls_or_rises(tmp_path: Path) -> None:
    for metric, values in {"error": ([0.6, 0.3, 0.2], [0.3, 0.4]), "accuracy": ([0.4, 0.7, 0.8], [0.7, 0.6])}.items():
        alone, other = ([progress("worker-0", 50, 30.0), *evaluations(0.6, 20, **{metric: v})] for v in values)
        runs = [run_in(tmp_path / metric / "a", "single", alone), run_in(tmp_path / metric / "b", "server", other)]
        [found] = fits(runs)
        assert (found.target, found.steps_alone, found.rounds) == (values[1][0], 40, 20)


def test_the_direction_of_a_metric_is_in_its_name_or_else_in_its_curves() -> None:
    rising, falling = [0.1, 0.2], [0.2, 0.1]
    assert falls("test_error", [rising]) and falls("Loss", [rising]) and not falls("accuracy", [falling])
    assert falls("perplexity", [falling, falling, rising]) and not falls("bleu", [rising, falling])


def test_a_diverged_run_and_one_that_began_with_another_protocol_are_left_out(tmp_path: Path) -> None:
    alone, run = run_in(tmp_path / "a", "single", ALONE), run_in(tmp_path / "b", "averaging", TOGETHER)
    lost = run_in(tmp_path / "c", "server", [progress("worker-0", 20, 9.0), *evaluations(1, 9, error=[None, None])])
    easy = [progress("worker-0", 20, 9.0), *evaluations(1, 9, error=[0.9, 0.9])]
    warmed = run_in(tmp_path / "d", "server", easy, request={"warmup": {"name": "averaging"}})
    assert [(found.run.name, found.target) for found in fits([alone, run, lost, warmed])] == [("b", 0.3)]
    with pytest.raises(UsageError, match="d began with another protocol"):
        fit(alone, warmed, "error", 0.9)


def test_real_and_virtual_time_and_other_tasks_are_not_compared(tmp_path: Path) -> None:
    alone, run = run_in(tmp_path / "a", "single", ALONE), run_in(tmp_path / "b", "averaging", TOGETHER)
    virtual = run_in(tmp_path / "c", "averaging", TOGETHER, "sim")
    other = run_in(tmp_path / "d", "averaging", TOGETHER, task={"name": "digits", "settings": {"batch_size": "8"}})
    assert [found.run.name for found in fits([alone, virtual, run, other])] == ["b"]
    assert fits([run, virtual]) == fits([alone]) == fits([alone, virtual]) == fits([]) == []
    for unlike in (virtual, other):
        with pytest.raises(UsageError, match="differ in their task, or only one of them was simulated"):
            fit(alone, unlike, "error", 0.3)


def test_what_cannot_be_fitted_is_refused_in_words(tmp_path: Path) -> None:
    alone, run = run_in(tmp_path / "a", "single", ALONE), run_in(tmp_path / "b", "averaging", TOGETHER)
    with pytest.raises(UsageError, match="b is not a run of one worker"):
        fit(run, alone, "error", 0.3)
    with pytest.raises(UsageError, match=r"b never reached error <= 0\.2"):
        fit(alone, run, "error", 0.2)
    begun = run_in(tmp_path / "c", "averaging", [progress("worker-0", 1, 0.5), *evaluations(1, 1, error=[0.1])])
    with pytest.raises(UsageError, match="too few steps"):
        fit(alone, begun, "error", 0.3)
    assert fits([alone, begun]) == []


# ---- the fit to simulated runs --------------------------------------------------------------------------------------


def test_the_prediction_for_simulated_runs_is_within_a_tenth_of_what_was_measured(tmp_path: Path) -> None:
    task = load_task("digits", data=None, settings={})

    def trained(name: str, protocol: Any, workers: int, **how: Any) -> RunRecord:
        on = Sim(workers, step_seconds=how.pop("step", 0.1), link="100mbit", model_bytes="500kB")
        how = {"epochs": 5, "evaluate_every": 0.25, "trace": False, **how}
        return load_run(train_quietly(task, protocol, on, tmp_path / name, **how).directory)

    runs = [
        trained("alone", Single(), 1),
        trained("averaging", Averaging(tau=5), 4),
        trained("auto", Averaging(), 4, step=StepTime(0.1, spread=0.3)),
        trained("server", Server(sync="async"), 4),
    ]
    found = {fit.run.name: fit for fit in fits(runs)}
    assert set(found) == {"averaging", "auto", "server"}
    for each in found.values():
        assert each.predicted == pytest.approx(each.measured, rel=0.1)
        assert each.load_seconds == 0
        assert each.step_seconds == pytest.approx(0.1)
    averaging = found["averaging"]
    assert averaging.exchange_seconds > 0.3 * averaging.tau * averaging.step_seconds, "communication must matter"
    free = speedup(
        steps_alone=averaging.steps_alone,
        step_seconds=averaging.step_seconds,
        tau=averaging.tau,
        exchange_seconds=0.0,
        rounds=averaging.rounds,
        workers=4,
    )
    assert free > 1.25 * averaging.measured, "without S the prediction would be wrong"
    assert all(row["load_seconds"] == 0 for run in runs for row in run.progress)


# ---- seconds spent waiting for data ---------------------------------------------------------------------------------


def test_a_learner_counts_only_the_time_in_which_it_waits_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        @staticmethod
        def perf_counter() -> float:
            return Clock.now

    class Slow(Blobs):
        def loss(self, model: Any, batch: Any) -> Any:
            Clock.now += 100.0
            return super().loss(model, batch)

    def batches() -> Any:
        points, labels = Blobs().train_data()[:16]
        while True:
            Clock.now += 3.0
            yield points, labels

    monkeypatch.setattr(tether.learner.learner, "time", Clock)
    learner = Learner(Slow(), batches(), node="worker-0", seed=0)
    assert learner.load_seconds == 0
    for _ in range(2):
        learner.compute("dense", False)
    assert learner.load_seconds == 6.0


def test_processes_report_how_long_they_waited_for_data(tmp_path: Path) -> None:
    how = {"steps": 3000, "evaluate_every": 100.0, "trace": False}  # long enough for a report on the way
    run = load_run(train_quietly(Blobs(), Single(), Local(1), tmp_path / "run", **how).directory)
    assert run.progress
    for row in run.progress:
        assert 0 < row["load_seconds"] < row["compute_seconds"]


# ---- reports --------------------------------------------------------------------------------------------------------


def shown(runs: list[RunRecord], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    if (told := speedups(runs)) is not None:
        console.print(told)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_shows_the_quantities_in_80_columns(tmp_path: Path) -> None:
    alone, run = run_in(tmp_path / "a", "single", ALONE), run_in(tmp_path / "[b]", "averaging", TOGETHER)
    text = shown([alone, run])
    rows = {name: cells for name, *cells in (re.split(r"  +", line.strip()) for line in text.splitlines())}
    assert max(map(len, text.splitlines())) <= 80
    assert rows["run"] == ["[b]"]
    assert rows["target"] == ["error 0.3"]
    numbers = {
        "workers": "2",
        "steps alone (N)": "40",
        "seconds per step (C)": "0.5",
        "seconds waiting for data (L)": "4",
        "steps per round (tau)": "4",
        "seconds idle per round (S)": "1",
        "rounds (M)": "8",
    }
    assert {name: rows[name] for name in numbers} == {name: [cell] for name, cell in numbers.items()}
    assert (rows["speedup predicted"], rows["speedup measured"]) == (["0.92"], ["1.00"])
    assert "The model leaves out workers that slow each other down" in " ".join(text.split())
    assert shown([run]) == ""


def test_the_page_has_a_table_and_a_plot_only_where_runs_can_be_compared(tmp_path: Path) -> None:
    plots = pytest.importorskip("tether.analysis.plots")
    from matplotlib.figure import Figure

    from tether.analysis.report import write_report

    alone, run = run_in(tmp_path / "a", "single", ALONE), run_in(tmp_path / "b", "averaging", TOGETHER)
    page = write_report([alone, run], tmp_path / "both")[0].read_text("utf-8")
    part = page[page.index("<h2>Speedup</h2>") :]
    part = part[: part.index("<h2>", 1)]
    assert re.findall(r"<td>(.*?)</td>", part) == ["2", "error 0.3", "40", "0.5", "4", "4", "1", "8", "0.92", "1.00"]
    assert plots.COLOURS[1] in part and plots.COLOURS[0] not in part  # the colour of the run, not of the baseline
    assert part.count("<figure>") == 1
    assert "Speedup" not in write_report([run], tmp_path / "one")[0].read_text("utf-8")

    section = next(s for s in plots.sections(plots.style_runs([alone, run])) if s.title == "Speedup")
    figure = Figure(layout="constrained")
    section.panels[0].draw(figure)
    diagonal, point = figure.axes[0].lines
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())
    assert (*point.get_xdata(), *point.get_ydata()) == pytest.approx((24 / 26, 1.0))
    assert point.get_label() == "b (averaging, 2 workers, local): 0.92 predicted, 1.00 measured"
