"""What the benchmark of all protocols runs, keeps in its file, and makes of the curves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tether import Averaging, Tide, UsageError
from tether.analysis.sweep_plots import frontier_png
from tether.bench import cells
from tether.bench import frontier as bench
from tether.bench.cells import Cell, Place, Results, Subject, options_of
from tether.bench.frontier import (
    arrange,
    compare,
    complete_places,
    compute,
    disturbed_rows,
    part_rows,
    seconds_to,
    summary,
)
from tether.bench.suites import HELD_BACK, PARTS, PROTOCOLS, SUITES
from tether.tasks.digits import Digits


def test_the_target_is_the_best_of_the_median_protocol_by_the_mean_of_three_evaluations() -> None:
    fast = [(float(time), error) for time, error in enumerate([0.9, 0.6, 0.3, 0.3, 0.3, 0.1])]
    slow = [(10.0 * time, error) for time, error in enumerate([0.9, 0.9, 0.9, 0.6, 0.3, 0.9])]
    target, times, ends = compare({"fast": fast, "slow": slow})
    assert target == pytest.approx(0.6)
    assert times == pytest.approx({"fast": 2.0, "slow": 40.0})  # the first moment, though the last is worse again
    assert ends == pytest.approx({"fast": 0.7 / 3, "slow": 0.6})


def test_a_target_is_reached_between_two_evaluations_or_counts_with_the_end_of_the_run() -> None:
    curve = [(10.0, 0.9), (20.0, 0.5), (30.0, 0.4)]
    assert seconds_to(0.6, curve) == pytest.approx(17.5)
    assert seconds_to(0.95, curve) == 10.0
    assert seconds_to(0.1, curve) == 30.0
    assert seconds_to(0.1, []) == math.inf


def test_a_star_varies_one_axis_at_a_time_and_the_full_grid_all() -> None:
    axes = (["chars", "text"], ["1gbit"], [8, 2], ["small"], ["adam"], ["none"])
    star = arrange(Place(), *axes, star=True)
    assert [(place.task, place.workers) for place in star] == [("chars", 8), ("text", 8), ("chars", 2)]
    assert len(arrange(Place(), *axes, star=False)) == 4


def test_a_label_may_have_settings() -> None:
    assert options_of("diloco") == Averaging(outer="nesterov")
    assert options_of("tide:drift=0+phases=1") == Tide(drift=0.0, phases=1)
    with pytest.raises(UsageError, match="unknown protocol 'tied'"):
        options_of("tied")


def test_one_learner_alone_makes_the_samples_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = Subject(lambda data, **given: Digits(**given), "", {"small": 32}, 0.05, 2.0)  # type: ignore[arg-type]
    monkeypatch.setitem(cells.SUBJECTS, "digits", digits)
    place = Place("digits", workers=4)
    alone, together = (cells.train(Cell(place, label, 0, 0.5), None) for label in ("single", "tide"))
    steps = 1437 / 32
    assert alone[-1][0] == pytest.approx(steps * cells.STEP_SECONDS, rel=0.05)
    assert steps / 4 * cells.STEP_SECONDS < together[-1][0] < alone[-1][0]
    assert alone[-1][1] < 0.5


def test_a_study_is_continued_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def train_now(work: object, cells: list[Cell], processes: int | None) -> list[tuple[Cell, object]]:
        computed.extend(cell.label for cell in cells)
        return [(cell, [(1.0, 0.5)]) for cell in cells]

    monkeypatch.setattr(bench, "in_parallel", train_now)
    path = tmp_path / "results.jsonl"
    cells = [Cell(Place(), label, 0) for label in ("mpca", "tide")]
    compute(Results(path), cells[:1], None, 1)
    compute(Results(path), cells, None, 1)
    assert computed == ["mpca", "tide"]
    assert Results(path).cells() == cells and Results(path)[cells[1]] == [(1.0, 0.5)]
    assert complete_places(Results(path), ["mpca", "tide"], 1.0, 1) == [Place()]
    with pytest.raises(UsageError, match="has no place with all these"):
        complete_places(Results(path), ["grid"], 1.0, 1)
    path.write_text("something else\n")
    with pytest.raises(UsageError, match="line 1 is not a result"):
        Results(path)


def test_the_summary_says_how_far_ahead_and_where_behind() -> None:
    found = summary([{"mpca": 4.0, "tide": 2.0}, {"mpca": 8.0, "tide": 16.0}])
    assert found["seconds of mpca over tide's"] == pytest.approx(1.0)
    assert found["most seconds of tide over the best other's"] == pytest.approx(2.0)
    assert found["share of places in which tide is over 5 % behind"] == 0.5
    assert summary([{"mpca": 4.0}]) == {}


def test_every_protocol_is_in_the_picture() -> None:
    times = {label: 10.0 + number for number, label in enumerate(PROTOCOLS)}
    rows = [{"task": "fashion", "link": "1gbit", "workers": 8, "what": "seconds to 0.12", **times}]
    assert frontier_png(rows, list(PROTOCOLS)).startswith(b"\x89PNG")


def test_a_disturbed_run_is_measured_by_what_the_same_protocol_reaches_undisturbed() -> None:
    calm = [(float(time), 1.0 - time / 10) for time in range(1, 11)]
    late = [(2 * seconds, error) for seconds, error in calm]
    rows, ratios = disturbed_rows([{Place(disturbance="slow"): {"tide": late}, Place(): {"tide": calm}}])
    first = rows[0]
    # the mean of three evaluations, 0.3 after 8 of 10 seconds
    assert (first["disturbance"], first["tide"]) == ("none", pytest.approx(8.0))
    assert ratios == {"slow, tide": pytest.approx(2.0)}


def test_every_part_of_tide_has_a_row_with_all_tasks() -> None:
    curves = {label: [(1.0, 0.5), (2.0, 0.1 + number / 100)] for number, label in enumerate(PARTS)}
    rows = part_rows([{place: curves for place in SUITES["ablations"].places}])
    assert [row["protocol"] for row in rows] == list(PARTS)
    assert all(any(name.startswith(f"{task}: seconds") for name in rows[0]) for task in ("fashion", "chars"))


def test_suites_name_places_and_protocols_that_there_are_and_hold_some_places_back() -> None:
    for suite in SUITES.values():
        assert len(set(suite.places)) == len(suite.places)
        for label in suite.labels:
            options_of(label)
    study = SUITES["study"].places
    assert set(HELD_BACK) < set(study)
    assert {place.task for place in HELD_BACK} == {place.task for place in study}


def test_what_was_kept_of_a_suite_is_reported_with_the_places_held_back_apart(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for number, place in enumerate((Place(), HELD_BACK[0])):
        for label, seconds in (("mpca", 8.0), ("tide", 4.0 * (number + 1))):
            Results(path).add(Cell(place, label, 0), [(seconds, 0.5)])
    found = bench.frontier(suite="study", protocol=("mpca", "tide"), results=path, kept=True)
    assert len(found["rows"]) == 4
    assert found["ratios"]["seconds of mpca over tide's"] == pytest.approx(2**0.5)
    assert found["ratios"]["held back: seconds of mpca over tide's"] == pytest.approx(1.0)
