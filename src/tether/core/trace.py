"""What is measured: a meter for every node, and spans of time that a browser can draw.

A `Meter` counts what the section "What is measured" of ARCHITECTURE.md lists; the node sends it to the run's caller.
`write_chrome_trace` writes spans in the format that Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

#: spans kept per node; later ones are only counted
SPANS_MAX = 50_000
#: rows that a node may add to the metrics: this many at first, then this many in every second of the run
ROWS_AT_FIRST, ROWS_PER_SECOND = 1000, 20


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time at a node, on one of its lanes (compute, out, in, collective)."""

    lane: str
    name: str
    start: float
    stop: float


class Meter(msgspec.Struct):
    """The figures of one node so far. Seconds are virtual in the simulator."""

    node: str
    steps: int = 0
    samples: int = 0
    loss: float = float("nan")
    #: computing gradients, stepping, and being pulled towards the joint model
    compute_seconds: float = 0.0
    #: the part of them spent waiting for the next mini-batch; in the simulator data costs nothing
    load_seconds: float = 0.0
    #: time in which the node could have computed but waited for an exchange
    wait_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    #: what was exchanged, between the node's device and the host's memory
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    messages_refused: int = 0
    #: gradients that were not finite and count as zero
    gradients_skipped: int = 0
    #: gradients that were far longer than usual for the node and count as zero
    gradients_refused: int = 0
    staleness: dict[int, int] = {}
    #: the bytes that compression saved, and the squares of what it lost and of the values that it encoded
    bytes_saved: int = 0
    squared_error: float = 0.0
    squared_values: float = 0.0
    #: spans that are not in the trace
    spans_dropped: int = 0

    def utilization(self, seconds: float) -> float:
        """Compute seconds over all seconds."""
        return self.compute_seconds / seconds if seconds > 0 else 0.0

    @property
    def overlap(self) -> float:
        """Compute seconds over compute seconds plus those spent waiting for an exchange (Rudra, table 1)."""
        busy = self.compute_seconds + self.wait_seconds
        return self.compute_seconds / busy if busy > 0 else 1.0

    @property
    def relative_error(self) -> float:
        """What compression lost, relative to what it encoded, as a ratio of vector lengths."""
        return relative_error([self])

    def count_gradient(self, loss: float, samples: int, seconds: float) -> None:
        self.steps += 1
        self.samples += samples
        self.compute_seconds += seconds
        self.loss = loss if self.steps == 1 else 0.95 * self.loss + 0.05 * loss

    def count_staleness(self, staleness: Iterable[int]) -> None:
        for value in staleness:
            self.staleness[value] = self.staleness.get(value, 0) + 1


def relative_error(meters: Iterable[Meter]) -> float:
    """What compression lost at these nodes, relative to what they encoded, as a ratio of vector lengths."""
    squares = [(meter.squared_error, meter.squared_values) for meter in meters]
    error, values = (sum(column) for column in zip(*squares, strict=True))
    return math.sqrt(error / values) if values else 0.0


class RowLimit:
    """Thins out the rows of one node, by the node's own clock, so that a simulated run repeats.

    A row that follows rows which were left out has the field `rows`, the number of rows that it stands for, itself
    included; so their sum is exact. In every second the first rows are kept, without gaps: where the rows of several
    shards take turns, all shards are seen.
    """

    def __init__(self) -> None:
        self._kept = 0
        self._second = -1
        self._kept_in_second = 0
        self._left_out = 0
        self._last: dict[str, Any] = {}

    def admit(self, row: dict[str, Any], now: float) -> dict[str, Any] | None:
        """The row as it is to be written, or None if it is left out."""
        if int(now) != self._second:
            self._second, self._kept_in_second = int(now), 0
        self._left_out, self._last = self._left_out + 1, row
        if self._kept >= ROWS_AT_FIRST and self._kept_in_second >= ROWS_PER_SECOND:
            return None
        self._kept, self._kept_in_second = self._kept + 1, self._kept_in_second + 1
        return self.flush()

    def flush(self) -> dict[str, Any] | None:
        """The last row on behalf of all that were left out, or None if none were."""
        count, self._left_out = self._left_out, 0
        return None if not count else self._last if count == 1 else {**self._last, "rows": count}


class Tracer:
    """Collects the spans of one node."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.spans: list[Span] = []
        self.dropped = 0

    def span(self, lane: str, name: str, start: float, stop: float) -> None:
        if not self.enabled:
            return
        if len(self.spans) < SPANS_MAX:
            self.spans.append(Span(lane, name, start, stop))
        else:
            self.dropped += 1


def write_chrome_trace(path: Path, spans: dict[str, list[Span]], origin: float = 0.0) -> None:
    """Write a trace with one process per node, one thread per lane, and times in microseconds since `origin`."""
    events: list[dict[str, object]] = []
    for pid, node in enumerate(sorted(spans)):
        lanes = sorted({span.lane for span in spans[node]})
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": node}})
        for tid, lane in enumerate(lanes):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        for span in spans[node]:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "pid": pid,
                    "tid": lanes.index(span.lane),
                    "ts": round((span.start - origin) * 1e6, 3),
                    "dur": round((span.stop - span.start) * 1e6, 3),
                }
            )
    path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
