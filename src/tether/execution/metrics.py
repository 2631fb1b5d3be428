"""metrics.jsonl: rows that a run appends, and that are read back as far as they are undamaged.

Every line is one JSON object. Its `kind` is untrained, progress, evaluation, record, note or resumed.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tether.execution.checkpoint import Restored

#: the most that waits in memory while it cannot be written
WAITING_BYTES = 16 << 20

Row = dict[str, Any]
Count = Annotated[int, msgspec.Meta(ge=0)]
Quantity = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class _Any(msgspec.Struct, tag_field="kind", kw_only=True):
    """What readers rely on; rows may hold more."""

    time: Quantity | None = None


class _Progress(_Any, tag="progress", kw_only=True):
    time: Quantity
    node: str
    samples: Count
    compute_seconds: Quantity
    wait_seconds: Quantity
    bytes_sent: Quantity
    bytes_received: Quantity
    loss: float | None = None
    steps: Count = 0
    load_seconds: Quantity = 0.0
    bytes_saved: float = 0.0


class _Evaluation(_Any, tag="evaluation", kw_only=True):
    time: Quantity
    samples: Count
    metrics: dict[str, float | None]
    step: Count = 0


class _Record(_Any, tag="record", kw_only=True):
    time: Quantity
    tau: Quantity | None = None
    cycle_seconds: Quantity | None = None
    #: how many rows this one stands for
    rows: Annotated[int, msgspec.Meta(ge=1)] = 1


class _Untrained(_Any, tag="untrained", kw_only=True):
    metrics: dict[str, float | None]


class _Resumed(_Any, tag="resumed", kw_only=True):
    samples: Count


class _Note(_Any, tag="note", kw_only=True):
    text: str


_Known = _Progress | _Evaluation | _Record | _Untrained | _Resumed | _Note


@dataclass(frozen=True)
class History:
    """The undamaged rows of a run, in order."""

    rows: list[Row]
    #: a last line that was cut off by a kill is not one of them
    damaged_lines: int

    @property
    def damage(self) -> str:
        """What to tell the user about the file; "" if it is undamaged."""
        several = self.damaged_lines > 1
        found = f"{self.damaged_lines} line{'s' * several} of metrics.jsonl {'are' if several else 'is'} damaged"
        return f"{found} and left out" if self.damaged_lines else ""

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def last_time(self) -> float:
        """The latest time of a row; 0 for a new run."""
        return max((row.get("time") or 0.0 for row in self.rows), default=0.0)

    @property
    def untrained(self) -> dict[str, float] | None:
        """The metrics of the model before training, if they are known."""
        return next((_numbers(row["metrics"]) for row in self.of("untrained")), None)

    def evaluations(self, restored: Restored) -> dict[int, dict[str, float]]:
        """The metrics of the evaluations that led to a checkpoint's model, by the samples that each had seen.

        The rows have those that were not done when the checkpoint was saved; the checkpoint has those that were done
        on another machine.
        """
        found: dict[int, dict[str, float]] = {}
        for row in self.rows:
            if row["kind"] == "evaluation":
                found[row["samples"]] = _numbers(row["metrics"])
            elif row["kind"] == "resumed":  # later evaluations belong to a part that was lost
                found = {at: metrics for at, metrics in found.items() if at <= row["samples"]}
        found |= restored.evaluations  # a hash has verified these
        return {at: found[at] for at in sorted(found) if at <= restored.samples}


def read_history(path: Path) -> History:
    """The rows of a file; none if it does not exist."""
    rows: list[Row] = []
    damaged = 0
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    for line in lines:
        try:
            row = json.loads(line)
            msgspec.convert(row, _Known)
            rows.append(row)
        except (ValueError, RecursionError):  # the errors of msgspec are ValueErrors
            damaged += line.endswith(b"\n")
    return History(rows, damaged)


def _numbers(metrics: dict[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in metrics.items()}


class MetricsWriter:
    """Appends rows. Rows that cannot be written wait in memory for the next attempt.

    Every attempt opens the file again: after a disk failure the path may lead to another disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = bytearray()
        #: rows for which there was no room
        self._left_out = 0
        self._begun = False

    @property
    def unwritten(self) -> int:
        """How many rows are not in the file."""
        return self._left_out + self._waiting.count(b"\n")

    def append(self, row: Row) -> None:
        """Add a row, which the next `flush` writes."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        if len(self._waiting) + len(line) > WAITING_BYTES:
            self._left_out += 1
        else:
            self._waiting += line

    def flush(self) -> None:
        """Write the rows that wait; OSError if that fails."""
        if not self._waiting:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if not self._begun and size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")  # an earlier part of the run was killed in the middle of a line
            self._begun = True
            while self._waiting:
                del self._waiting[: os.write(descriptor, self._waiting)]
        finally:
            os.close(descriptor)
