"""Run directories, read for reports and comparisons.

A directory is never written to, so a run that is still training, or that was killed in the middle of a line, can be
read like any other.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tether.core.trace import Meter
from tether.execution.directory import RunDirectory

#: a row of metrics.jsonl, or any other set of named values
Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One run as its directory describes it: run.json, and the rows of metrics.jsonl by kind."""

    path: Path
    config: dict[str, Any]
    progress: list[Row]
    evaluations: list[Row]
    records: list[Row]
    notes: list[str]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def label(self) -> str:
        """The run's name, and in brackets its protocol, unless the name says it, its workers and its runtime."""
        protocol, workers = self.config["protocol"]["name"], self.config["workers"]
        details = [protocol] if protocol not in self.name else []
        details += [f"{workers} worker{'s' if workers != 1 else ''}", self.config["runtime"]["name"]]
        return f"{self.name} ({', '.join(details)})"

    @property
    def virtual(self) -> bool:
        """Whether the run's seconds are the simulator's virtual seconds."""
        return bool(self.config["runtime"]["name"] == "sim")

    @cached_property
    def nodes(self) -> dict[str, Row]:
        """The latest progress of every node; shorter names first, so that worker-2 comes before worker-10."""
        latest = {row["node"]: row for row in self.progress}
        return {node: latest[node] for node in sorted(latest, key=lambda node: (len(node), node))}

    @cached_property
    def workers(self) -> dict[str, Row]:
        """The nodes that train; a hub moves bytes but takes no samples."""
        return {node: row for node, row in self.nodes.items() if row["samples"]}

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The figures of the run's result; without a result, the same figures computed from the rows so far."""
        if self.config.get("result"):
            return dict(self.config["result"])
        seconds = max((row["time"] for row in [*self.progress, *self.evaluations, *self.records]), default=0.0)
        meters = [
            Meter(node, compute_seconds=row["compute_seconds"], wait_seconds=row["wait_seconds"])
            for node, row in self.workers.items()
        ]
        return {
            "seconds": seconds,
            "samples_per_second": sum(row["samples"] for row in self.workers.values()) / max(seconds, 1e-9),
            "utilization": {"mean": statistics.fmean(m.utilization(seconds) for m in meters) if meters else None},
            "overlap": statistics.fmean(meter.overlap for meter in meters) if meters else None,
            "bytes_sent": sum(row["bytes_sent"] for row in self.nodes.values()),
            **self._compression(),
            "staleness": {"histogram": {}},
            "metrics": self.evaluations[-1]["metrics"] if self.evaluations else {},
        }

    def _compression(self) -> dict[str, Any]:
        """As in a result: what compression saved, if the run compresses."""
        if self.config["protocol"].get("compress", "none") == "none":
            return {}
        sent, saved = (sum(row[name] for row in self.nodes.values()) for name in ("bytes_sent", "bytes_saved"))
        return {"compression": {"bytes_saved": saved, "share": sent / max(1, sent + saved), "relative_error": None}}


def load_run(path: Path | str) -> RunRecord:
    """Read a run directory."""
    directory = RunDirectory.open(Path(path))
    config, history = directory.read_config(), directory.history()
    progress, evaluations, records = (history.of(kind) for kind in ("progress", "evaluation", "record"))
    notes = [*directory.notes, *filter(None, [history.damage]), *(row["text"] for row in history.of("note"))]
    return RunRecord(directory.path, config, progress, evaluations, records, notes)


def distinct_labels(runs: Sequence[RunRecord]) -> list[str]:
    """The labels of the runs; runs with equal labels are told apart by their paths."""
    counts = Counter(run.label for run in runs)
    return [f"{run.path}: {run.label}" if counts[run.label] > 1 else run.label for run in runs]


def format_number(value: float | None, form: str = "") -> str:
    """A number as text: four significant digits with a comma between thousands; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return "-"
    return format(value, form or (",.0f" if abs(value) >= 1000 else ".4g"))
