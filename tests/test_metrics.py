"""What a long run writes about itself stays small, and what is left out is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tether import Averaging, Local, Server, Sim
from tether.core.trace import ROWS_AT_FIRST, ROWS_PER_SECOND
from tether.learner.synthetic import SyntheticTask
from tether.testing.conformance import train_quietly


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_the_rate_of_a_nodes_rows_is_bounded_and_their_number_is_still_exact(tmp_path: Path) -> None:
    sim = Sim(workers=2, step_seconds=0.001, link="100gbit", latency=0.0)
    result = train_quietly(SyntheticTask(parameters=4), Server(sync="async"), sim, tmp_path / "run", steps=5_000)
    rows, updates = rows_of(tmp_path / "run", "record"), sum(result.figures["staleness"]["histogram"].values())
    seconds = result.figures["seconds"]
    assert updates == 10_000 and seconds == pytest.approx(5.0, rel=0.2), "in virtual time"
    assert ROWS_AT_FIRST < len(rows) <= ROWS_AT_FIRST + ROWS_PER_SECOND * (seconds + 1) + 1
    assert sum(row.get("rows", 1) for row in rows) == updates
    assert rows[-1]["clock"] == updates, "the last one is there"
    times = [row["time"] for row in rows]
    assert times == sorted(times)


def test_rows_of_processes_are_bounded_too(tmp_path: Path) -> None:
    result = train_quietly(SyntheticTask(parameters=4), Server(sync="async"), Local(2), tmp_path / "run", steps=2_000)
    rows, updates = rows_of(tmp_path / "run", "record"), sum(result.figures["staleness"]["histogram"].values())
    assert len(rows) <= ROWS_AT_FIRST + ROWS_PER_SECOND * (result.figures["seconds"] + 1) + 1 < updates
    assert sum(row.get("rows", 1) for row in rows) == updates


def test_a_run_of_few_rows_keeps_them_all(tmp_path: Path) -> None:
    train_quietly(SyntheticTask(parameters=4), Server(sync="async"), Sim(workers=2), tmp_path / "run", steps=100)
    rows = rows_of(tmp_path / "run", "record")
    assert [row["clock"] for row in rows] == list(range(1, 201)) and not any("rows" in row for row in rows)


def test_a_note_counts_the_spans_that_were_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.core.trace.SPANS_MAX", 50)
    train_quietly(SyntheticTask(parameters=4), Averaging(tau=5), Sim(workers=2), tmp_path / "run", steps=100)
    kept = len(json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"])
    (note,) = (row["text"] for row in rows_of(tmp_path / "run", "note") if "trace.json" in row["text"])
    assert kept < 200 and int(note.split()[0]) > 100
