"""A live view of a run, made of the rows of its metrics: workers, rates, losses, bytes, joins and deaths."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tether.analysis.runs import format_number
from tether.execution.directory import RunDirectory

#: seconds of the run over which rates are averaged
RATE_SECONDS = 10.0
#: a worker that has not reported for this long is shown as silent
SILENT_SECONDS = 5.0
EVALUATIONS_SHOWN, NOTES_SHOWN = 4, 8

Row = dict[str, Any]


class RunView:
    """What is known of a run, and its picture."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._time = 0.0
        self._past: dict[str, deque[Row]] = {}
        self._staleness: dict[str, float] = {}
        self._evaluations: deque[Row] = deque(maxlen=EVALUATIONS_SHOWN)
        self._notes: deque[str] = deque(maxlen=NOTES_SHOWN)

    def take(self, rows: Iterable[Row]) -> None:
        """Add rows of metrics; those that are not understood are left out."""
        for row in rows:
            with suppress(KeyError, TypeError, ValueError):
                self._take(row)

    def _take(self, row: Row) -> None:
        self._time = max(self._time, float(row.get("time") or 0.0))
        match row["kind"]:
            case "progress":
                past = self._past.setdefault(row["node"], deque())
                past.append({**row, "time": float(row["time"]), "samples": int(row["samples"])})
                while len(past) > 2 and past[-1]["time"] - past[1]["time"] >= RATE_SECONDS:
                    past.popleft()
            case "record":
                if "staleness" in row:
                    self._staleness[row["node"]] = float(row["staleness"])
            case "evaluation":
                self._evaluations.append(row)
            case "note":
                self._notes.append(str(row["text"]))
            case "resumed":
                self._past.clear()
                self._notes.append(f"resumed after {int(row['samples']):,} samples")

    def rate(self, node: str, of: str = "samples") -> float:
        """Recent samples, or bytes, per second of the run's own time."""
        first, last = self._past[node][0], self._past[node][-1]
        seconds = float(last["time"] - first["time"])
        if seconds <= 0:
            return float(last[of] / last["time"]) if last["time"] else 0.0
        return float(last[of] - first[of]) / seconds

    def __rich__(self) -> RenderableType:
        nodes = sorted(self._past, key=lambda node: (len(node), node))
        workers = [node for node in nodes if self._past[node][-1]["samples"]]
        total = sum(self.rate(node) for node in workers if not self._silent(node))
        title = Text.assemble(
            (self._title, "bold"), f"  {self._time:,.0f} s, {len(workers)} workers, {total:,.0f} samples/s"
        )
        names = ("node", "steps", "loss", "samples/s", "computing", "sent MB/s", "received MB/s", "staleness", "")
        table = Table(*names, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in table.columns[1:-1]:
            column.justify = "right"
        for node in nodes:
            last = self._past[node][-1]
            computing = float(last["compute_seconds"]) / last["time"] if last["time"] else 0.0
            table.add_row(
                node,
                f"{last.get('steps', 0):,}",
                format_number(last.get("loss")),
                format_number(self.rate(node)),
                f"{computing:.0%}",
                format_number(self.rate(node, "bytes_sent") / 1e6),
                format_number(self.rate(node, "bytes_received") / 1e6),
                format_number(self._staleness.get(node)),
                "silent" if self._silent(node) else "",
                style="dim" if self._silent(node) else "",
            )
        lines: list[RenderableType] = [title, table]
        for row in self._evaluations:
            found = "  ".join(f"{name} {format_number(value)}" for name, value in row["metrics"].items())
            lines.append(Text(f"joint model at step {row.get('step', 0):,}, {row['time']:,.1f} s: {found}"))
        lines += [Text(note, style="dim", no_wrap=True, overflow="ellipsis") for note in self._notes]
        return Group(*lines)

    def _silent(self, node: str) -> bool:
        return self._time - float(self._past[node][-1]["time"]) > SILENT_SECONDS


class MetricsTail:
    """The rows that a run appends to its metrics, those that are already there first. It never writes."""

    def __init__(self, run: Path) -> None:
        directory = RunDirectory.open(run)
        self._directory = directory
        self._read = 0

    @property
    def is_over(self) -> bool:
        return bool(self._directory.read_config().get("status") != "running")

    def new(self) -> list[Row]:
        """The rows since the last call; damaged lines are left out, and one that is being written waits."""
        try:
            with self._directory.metrics.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        rows = []
        for line in complete.splitlines():
            with suppress(ValueError, RecursionError):
                if isinstance(row := json.loads(line), dict):
                    rows.append(row)
        return rows
