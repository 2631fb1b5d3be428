"""`tether report`: reads run directories and draws them side by side.

`load_run` reads one directory, `table` sums runs up for a terminal, `write_report` draws them as a page that needs
nothing but itself and as one overview picture. A directory is only ever read, so a run that is still going, or that was
killed in the middle of a line, can be looked at like any other.

A drawing is a list of panels. A panel knows how to draw itself into any figure: the page gives each one a figure of its
own, the picture gives each one a cell of a large figure, so the two cannot disagree.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tether.errors import UsageError, missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

T = TypeVar("T")

#: the version of run.json that this module reads
VERSION = 1
EXPECTED = "a run directory holds run.json and metrics.jsonl, as `tether train` writes them"

#: as many runs fit beside each other into a terminal of 80 columns; a table of ten columns does not
RUNS_BESIDE_MAX = 5
#: the columns of the summary that hold words; the others hold figures
WORDS = 3
#: points drawn in one panel; a long run with many workers would otherwise make a page of hundreds of megabytes
POINTS_MAX = 20_000
#: above this, bars are drawn without gaps and only some of them are named
BARS_NAMED_MAX = 16
#: a histogram with more values than this is drawn as a line
STALENESS_BARS_MAX = 16
#: values of a record that say which series it belongs to, although they are numbers
RECORD_DIMENSIONS = frozenset({"shard", "phase"})

# Okabe and Ito's colours, which also people with colour-blindness tell apart; the yellow is too pale on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
# The dashes change when the colours are used up.
DASHES = ("-", "--", ":", "-.")
COMPUTE, WAIT, OTHER = "#009e73", "#e69f00", "#d5d9de"
SENT, RECEIVED = "#0072b2", "#9ccbe8"


# ---- reading --------------------------------------------------------------------------------------------------------


class Reading(msgspec.Struct, frozen=True):
    """The meter of one node at one time. A figure that cannot be written as JSON, such as NaN, is None.

    Counts are read as floats: a simulator that shares bytes out need not round them.
    """

    time: float
    node: str
    steps: float = 0
    samples: float = 0
    loss: float | None = None
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes_sent: float = 0
    bytes_received: float = 0


class Evaluation(msgspec.Struct, frozen=True):
    """The joint model's metrics at one time."""

    time: float
    step: float = 0
    samples: float = 0
    metrics: dict[str, float | None] = {}


class Row(msgspec.Struct, frozen=True):
    """What a protocol recorded: numbers to draw, and words that say what they belong to."""

    time: float
    node: str
    values: dict[str, float | str | None] = {}


@dataclass(frozen=True)
class Totals:
    """The figures of a whole run: those of its result, or what its metrics say so far if it has none."""

    seconds: float
    samples: float
    utilization: float
    overlap: float
    bytes_sent: float
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class RunRecord:
    """One run as its directory tells it."""

    path: Path
    label: str
    config: Mapping[str, Any]
    evaluations: tuple[Evaluation, ...]
    progress: tuple[Reading, ...]
    records: tuple[Row, ...]
    #: lines of metrics.jsonl that could not be read, not counting a last line that was cut off
    unreadable: int = 0

    @property
    def protocol(self) -> str:
        return _name(self.config, "protocol")

    @property
    def runtime(self) -> str:
        return _name(self.config, "runtime")

    @property
    def task(self) -> str:
        return _name(self.config, "task")

    @property
    def virtual(self) -> bool:
        """Whether the run's seconds are those of the simulator."""
        return self.runtime == "sim"

    @property
    def result(self) -> Mapping[str, Any]:
        """What the run ended with; empty as long as it has not ended."""
        return _mapping(self.config, "result")

    @cached_property
    def last(self) -> dict[str, Reading]:
        """The latest reading of every node, in the order of their numbers."""
        latest = {reading.node: reading for reading in self.progress}
        return {node: latest[node] for node in sorted(latest, key=_natural)}

    @cached_property
    def workers(self) -> dict[str, Reading]:
        """The latest reading of every node that trains; a hub moves bytes but takes no samples."""
        return {node: reading for node, reading in self.last.items() if reading.samples > 0}

    @cached_property
    def totals(self) -> Totals:
        result, workers = self.result, self.workers.values()
        lines: list[Reading | Evaluation | Row] = [*self.progress, *self.evaluations, *self.records]
        seconds = _number(result.get("seconds"), max(line.time for line in lines))
        compute = sum(worker.compute_seconds for worker in workers)
        busy = compute + sum(worker.wait_seconds for worker in workers)
        share = compute / len(workers) / seconds if workers and seconds > 0 else math.nan
        evaluated = self.evaluations[-1].metrics if self.evaluations else {}
        return Totals(
            seconds=seconds,
            samples=_number(result.get("samples"), sum(worker.samples for worker in workers)),
            utilization=_number(_mapping(result, "utilization").get("mean"), share),
            overlap=_number(result.get("overlap"), compute / busy if busy > 0 else math.nan),
            bytes_sent=_number(result.get("bytes_sent"), sum(node.bytes_sent for node in self.last.values())),
            metrics={**evaluated, **_mapping(result, "metrics")},
        )


def load_run(path: Path | str) -> RunRecord:
    """Reads a run directory. Raises `UsageError` that says what was expected if it is none."""
    path = Path(path)
    config = _read_config(path)
    evaluations, progress, records, unreadable = _read_metrics(path / "metrics.jsonl")
    label = f"{_name(config, 'protocol')} x{config.get('workers', '?')} ({_name(config, 'runtime')})"
    return RunRecord(path, label, config, tuple(evaluations), tuple(progress), tuple(records), unreadable)


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_dir():
        raise UsageError(f"{path} is no directory; {EXPECTED}")
    file = path / "run.json"
    if not file.is_file():
        inside = sorted(child.parent.name for child in path.glob("*/run.json"))
        hint = f". It contains runs: name one of them, such as {path / inside[-1]}" if inside else ""
        raise UsageError(f"{path} has no run.json; {EXPECTED}{hint}")
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise UsageError(f"{file} is no JSON ({error}); {EXPECTED}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds a {type(config).__name__}, not an object; {EXPECTED}")
    if config.get("version") != VERSION:
        raise UsageError(
            f"{file} has version {config.get('version')!r}, and this Tether reads version {VERSION}: "
            "use the Tether that wrote it"
        )
    return config


def _read_metrics(file: Path) -> tuple[list[Evaluation], list[Reading], list[Row], int]:
    if not file.is_file():
        raise UsageError(f"{file.parent} has no metrics.jsonl; {EXPECTED}")
    evaluations: list[Evaluation] = []
    progress: list[Reading] = []
    records: list[Row] = []
    unreadable: list[int] = []
    lines = file.read_bytes().splitlines()
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            match raw.pop("kind", None) if isinstance(raw, dict) else None:
                case "evaluation":
                    evaluations.append(msgspec.convert(raw, Evaluation))
                case "progress":
                    progress.append(msgspec.convert(raw, Reading))
                case "record":
                    head = {"time": raw.pop("time", None), "node": raw.pop("node", None)}
                    records.append(msgspec.convert({**head, "values": raw}, Row))
        except ValueError:  # no JSON, no text, or (msgspec.ValidationError) not of the shape that is drawn here
            unreadable.append(number)
    if unreadable and unreadable[-1] == len(lines) - 1:
        unreadable.pop()
    if not (evaluations or progress or records):
        raise UsageError(
            f"{file} has no metrics; expected lines of the kinds progress and evaluation, which a run writes "
            "from its first seconds on"
        )
    return evaluations, progress, records, len(unreadable)


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _name(config: Mapping[str, Any], key: str) -> str:
    return str(_mapping(config, key).get("name", "?"))


def _natural(name: str) -> list[tuple[int, str]]:
    """A sorting key that puts worker-2 before worker-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# ---- figures and words ----------------------------------------------------------------------------------------------


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


def _finite(value: float | None) -> float:
    """What is drawn for a value: nothing (NaN) where there is none."""
    return value if value is not None and math.isfinite(value) else math.nan


def _ordered(names: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(names))


def _figure(value: float | None) -> str:
    """A number for people: four significant digits, thousands apart, a dash for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else _figure(None)


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """One label for each run, all different: by the name of the directory, then its path, then a number if need be."""
    labels = [run.label for run in runs]
    for detail in (lambda run: run.path.resolve().name, lambda run: str(run.path)):
        counts = Counter(labels)
        labels = [
            f"{run.label} {detail(run)}" if counts[label] > 1 else label
            for run, label in zip(runs, labels, strict=True)
        ]
    counts = Counter(labels)
    return [f"{label} #{number}" if counts[label] > 1 else label for number, label in enumerate(labels, start=1)]


def _summary(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the summary; the first `WORDS` columns are words, the others figures."""
    totals = [run.totals for run in runs]
    metrics = _ordered(name for total in totals for name in total.metrics)
    headings = ["run", "protocol", "runtime", "workers", "time", "samples/s", "utilization", "overlap", "MB sent"]
    rows = []
    for run, total in zip(runs, totals, strict=True):
        rows.append(
            [
                run.path.resolve().name,
                run.protocol,
                run.runtime,
                str(run.config.get("workers", "?")),
                f"{_figure(total.seconds)} {'virtual s' if run.virtual else 's'}",
                _figure(total.samples / total.seconds if total.seconds > 0 else None),
                _percent(total.utilization),
                _percent(total.overlap),
                _figure(total.bytes_sent / 1e6),
                *(_figure(total.metrics.get(name)) for name in metrics),
            ]
        )
    return [*headings, *metrics], rows


def _notes(runs: Sequence[RunRecord]) -> list[str]:
    """What a reader must know before comparing these runs."""
    notes = []
    if len({run.virtual for run in runs}) == 2:
        notes.append(
            "Some of these runs were simulated: their seconds are virtual, modelled for the simulated machines, and "
            "those of the other runs are real. Compare curves over time only within one kind."
        )
    tasks = _ordered(run.task for run in runs)
    if len(tasks) > 1:
        notes.append(f"These runs trained different tasks: {', '.join(tasks)}.")
    for run in runs:
        name, status = run.path.resolve().name, run.config.get("status")
        if status != "finished":
            reason = run.config.get("error") or run.config.get("reason")
            notes.append(f"{name}: {status}" + (f" ({reason})" if reason else "") + "; the figures are those so far.")
        if run.unreadable:
            notes.append(f"{name}: {run.unreadable} unreadable lines of metrics.jsonl were left out.")
    return notes


def table(runs: Sequence[RunRecord]) -> Table:
    """The runs as a table for a terminal: side by side, or one below the other if there are many."""
    headings, rows = _summary(runs)
    result = Table(box=SIMPLE_HEAD, title=Text(_heading(runs)), title_style="bold", title_justify="left")
    # Text and not str throughout: a name with brackets is no markup.
    if len(runs) <= RUNS_BESIDE_MAX:
        result.add_column(Text(headings[0]))
        for row in rows:
            result.add_column(Text(row[0]), justify="right", overflow="fold")
        for index, heading in enumerate(headings[1:], start=1):
            result.add_row(Text(heading), *(Text(row[index]) for row in rows))
    else:
        for index, heading in enumerate(headings):
            result.add_column(Text(heading), justify="left" if index < WORDS else "right", overflow="fold")
        for row in rows:
            result.add_row(*map(Text, row))
    notes = _notes(runs)
    if notes:
        result.caption, result.caption_justify = Text("\n".join(notes)), "left"
    return result


def _heading(runs: Sequence[RunRecord]) -> str:
    tasks = ", ".join(_ordered(run.task for run in runs))
    return f"{tasks}: {len(runs)} runs" if len(runs) > 1 else tasks


# ---- panels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curve:
    """A run and how it looks in every panel."""

    run: RunRecord
    label: str
    colour: str
    dashes: str


@dataclass(frozen=True)
class _Panel:
    title: str
    draw: Callable[[FigureBase], None]
    height: float  # inches
    #: whether the title is understood without that of the section
    tells_all: bool = True


@dataclass(frozen=True)
class _Section:
    title: str
    about: str
    panels: list[_Panel]

    @property
    def columns(self) -> int:
        """Panels stand two in a row; one that is alone takes the whole width."""
        return 1 if len(self.panels) == 1 else 2


def _curves(runs: Sequence[RunRecord]) -> list[_Curve]:
    return [
        _Curve(run, label, COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)])
        for i, (run, label) in enumerate(zip(runs, _labels(runs), strict=True))
    ]


def _sections(curves: Sequence[_Curve]) -> list[_Section]:
    """Everything there is to draw; a section without anything is left out."""
    runs = [curve.run for curve in curves]
    legend = 0.21 * len(curves) + 0.1
    metrics = _ordered(name for run in runs for evaluation in run.evaluations for name in evaluation.metrics)
    quantities = _ordered(
        name
        for run in runs
        for row in run.records
        for name, value in row.values.items()
        if isinstance(value, int | float) and name not in RECORD_DIMENSIONS
    )
    sections = [
        _Section(
            "The joint model",
            "Evaluated beside training: how good the model is after so much time, and after so many samples.",
            [
                _Panel(f"{name} over {axis}", partial(_draw_metric, curves, name, axis), 3.0 + legend)
                for name in metrics
                for axis in ("time", "samples")
            ],
        ),
        _Section(
            "Training loss",
            "A thin line for each worker: where the lines of a run spread, its workers explore; where they lie on "
            "each other, they agree.",
            [_Panel("training loss over time", partial(_draw_loss, curves), 3.2 + legend)]
            if any(math.isfinite(_finite(reading.loss)) for run in runs for reading in run.progress)
            else [],
        ),
        _Section(
            "Where the time went",
            "Seconds of each worker spent computing gradients, waiting for an exchange, and on all else, such as "
            "starting, loading data and installing values.",
            [
                _Panel(curve.label, partial(_draw_seconds, curve), _bars_height(curve.run.workers), tells_all=False)
                for curve in curves
                if curve.run.workers
            ],
        ),
        _Section(
            "Traffic",
            "Bytes that each node sent and received.",
            [
                _Panel(curve.label, partial(_draw_bytes, curve), _bars_height(curve.run.last), tells_all=False)
                for curve in curves
                if any(node.bytes_sent or node.bytes_received for node in curve.run.last.values())
            ],
        ),
        _Section(
            "Staleness",
            "How many updates the joint model had seen between the time a gradient was begun and the time it was "
            "applied, as a share of all applied gradients. Runs that never applied a stale one are left out.",
            [_Panel("staleness of applied gradients", partial(_draw_staleness, curves), 2.8 + legend)]
            if any(set(_staleness(run)) - {0} for run in runs)
            else [],
        ),
        _Section(
            "Protocol",
            "What the protocols recorded about themselves.",
            [_Panel(f"{name} over time", partial(_draw_record, curves, name), 2.8 + legend) for name in quantities],
        ),
    ]
    return [section for section in sections if section.panels]


def _bars_height(bars: Mapping[str, Reading]) -> float:
    return 1.4 + 0.26 * min(len(bars), BARS_NAMED_MAX)


def _draw_metric(curves: Sequence[_Curve], name: str, axis: str, figure: FigureBase) -> None:
    axes = figure.add_subplot()
    unit = _TimeUnit.of(curve.run for curve in curves)
    drawn: list[list[float]] = []
    for curve in curves:
        evaluations = [point for point in curve.run.evaluations if name in point.metrics]
        if not evaluations:
            continue
        points = _thinned(evaluations, POINTS_MAX // len(curves))
        x = [point.time / unit.seconds if axis == "time" else point.samples for point in points]
        y = [_finite(point.metrics[name]) for point in points]
        # A curve of few points shows them, so that nobody reads a straight line as a measurement.
        marker = "o" if len(points) <= 40 else ""
        axes.plot(x, y, curve.dashes, color=curve.colour, marker=marker, markersize=3, label=curve.label)
        drawn.append(y)
    # A quantity that falls (an error, a loss) is read by its ratio; one that rises (an accuracy) is not.
    if sum(y[-1] < y[0] for y in drawn) * 2 > len(drawn):
        _log_if_wide(axes, [value for y in drawn for value in y])
    axes.set_ylabel(name)
    _label_x(axes, unit.label if axis == "time" else "samples")
    _legend(figure, axes)


def _draw_loss(curves: Sequence[_Curve], figure: FigureBase) -> None:
    axes = figure.add_subplot()
    unit = _TimeUnit.of(curve.run for curve in curves)
    count = sum(len(curve.run.workers) for curve in curves)
    drawn: list[float] = []
    for curve in curves:
        by_node: dict[str, list[Reading]] = {}
        for reading in curve.run.progress:
            if reading.loss is not None:
                by_node.setdefault(reading.node, []).append(reading)
        for readings in by_node.values():
            points = _thinned(readings, max(50, POINTS_MAX // max(1, count)))
            x, y = [point.time / unit.seconds for point in points], [_finite(point.loss) for point in points]
            axes.plot(x, y, curve.dashes, color=curve.colour, linewidth=0.8, alpha=0.75 if count <= 16 else 0.4)
            drawn += y
        axes.plot([], [], curve.dashes, color=curve.colour, label=curve.label)
    _log_if_wide(axes, drawn)
    axes.set_ylabel("loss")
    _label_x(axes, unit.label)
    _legend(figure, axes)


def _draw_seconds(curve: _Curve, figure: FigureBase) -> None:
    axes = figure.add_subplot()
    workers = curve.run.workers
    compute = [worker.compute_seconds for worker in workers.values()]
    wait = [worker.wait_seconds for worker in workers.values()]
    # Up to the worker's last reading: of the time after it, or after its death, nothing is known. A gradient's seconds
    # are counted when it is done, a moment apart from the clock, so that the two may exceed the time by a little.
    other = [max(0.0, worker.time - worker.compute_seconds - worker.wait_seconds) for worker in workers.values()]
    unit = _TimeUnit.for_seconds(max(c + w + o for c, w, o in zip(compute, wait, other, strict=True)), curve.run)
    left = [0.0] * len(workers)
    for label, colour, seconds in (("computing", COMPUTE, compute), ("waiting", WAIT, wait), ("other", OTHER, other)):
        widths = [value / unit.seconds for value in seconds]
        axes.barh(range(len(workers)), widths, _bar_thickness(workers), left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _name_bars(axes, list(workers))
    _label_x(axes, unit.label)
    _legend(figure, axes, columns=3)


def _draw_bytes(curve: _Curve, figure: FigureBase) -> None:
    axes = figure.add_subplot()
    nodes = curve.run.last
    largest = max(max(node.bytes_sent, node.bytes_received) for node in nodes.values())
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    scale, unit = next(((scale, unit) for scale, unit in units if largest >= scale), (1, "bytes"))
    thickness = _bar_thickness(nodes) / 2
    for label, colour, offset, count in (
        ("sent", SENT, -thickness / 2, [node.bytes_sent for node in nodes.values()]),
        ("received", RECEIVED, thickness / 2, [node.bytes_received for node in nodes.values()]),
    ):
        places = [place + offset for place in range(len(nodes))]
        axes.barh(places, [value / scale for value in count], thickness, color=colour, label=label)
    _name_bars(axes, list(nodes))
    _label_x(axes, unit)
    _legend(figure, axes, columns=2)


def _draw_staleness(curves: Sequence[_Curve], figure: FigureBase) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    shares = {curve.label: _staleness(curve.run) for curve in curves}
    shown = [curve for curve in curves if set(shares[curve.label]) - {0}]
    highest = max(max(shares[curve.label]) for curve in shown)
    for place, curve in enumerate(shown):
        share = shares[curve.label]
        if highest < STALENESS_BARS_MAX:
            thickness = 0.8 / len(shown)
            places = [value - 0.4 + thickness * (place + 0.5) for value in share]
            axes.bar(places, list(share.values()), thickness, color=curve.colour, label=curve.label)
        else:
            values = range(highest + 1)
            y = [share.get(value, 0.0) for value in values]
            axes.plot(values, y, curve.dashes, color=curve.colour, drawstyle="steps-mid", label=curve.label)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}" if y >= 0.01 or y == 0 else f"{y:.1%}")
    axes.set_ylabel("share of gradients")
    _label_x(axes, "staleness in updates", from_zero=False)
    _legend(figure, axes)


def _draw_record(curves: Sequence[_Curve], name: str, figure: FigureBase) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    unit = _TimeUnit.of(curve.run for curve in curves)
    drawn: list[float] = []
    for curve in curves:
        series: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        for row in curve.run.records:
            value = row.values.get(name)
            if isinstance(value, int | float):
                words = [v for k, v in row.values.items() if isinstance(v, str) or k in RECORD_DIMENSIONS]
                series.setdefault((row.node, *words), []).append((row.time / unit.seconds, _finite(value)))
        for pairs in series.values():
            points = _thinned(pairs, max(50, POINTS_MAX // len(curves) // len(series)))
            x, y = [x for x, _ in points], [y for _, y in points]
            # What counts something (tau) stays at its value until the next record; what measures something does not.
            steps = "steps-post" if all(value.is_integer() for value in map(float, y)) else "default"
            alpha = 0.8 if len(series) <= 8 else 0.4
            axes.plot(x, y, curve.dashes, color=curve.colour, linewidth=1.0, alpha=alpha, drawstyle=steps)
            drawn += y
        if series:
            axes.plot([], [], curve.dashes, color=curve.colour, label=curve.label)
    if all(value.is_integer() for value in map(float, drawn)):
        axes.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    _log_if_wide(axes, drawn, ratio=100)
    axes.set_ylabel(name)
    _label_x(axes, unit.label)
    _legend(figure, axes)


def _staleness(run: RunRecord) -> dict[int, float]:
    """The share of gradients by staleness."""
    histogram = _mapping(_mapping(run.result, "staleness"), "histogram")
    total = sum(histogram.values())
    return {value: histogram[str(value)] / total for value in sorted(map(int, histogram))} if total else {}


@dataclass(frozen=True)
class _TimeUnit:
    """The unit in which a time axis has numbers that can be read."""

    seconds: float
    label: str

    @classmethod
    def of(cls, runs: Iterable[RunRecord]) -> _TimeUnit:
        runs = list(runs)
        return cls.for_seconds(max(run.totals.seconds for run in runs), *runs)

    @classmethod
    def for_seconds(cls, longest: float, *runs: RunRecord) -> _TimeUnit:
        units = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (600, 60, "minutes"), (0.5, 1, "seconds"))
        size, word = next(((size, word) for least, size, word in units if longest >= least), (1e-3, "milliseconds"))
        if all(run.virtual for run in runs):
            return cls(size, f"virtual {word}")
        return cls(size, f"{word} (virtual for sim)" if any(run.virtual for run in runs) else word)


def _thinned(points: Sequence[T], most: int) -> Sequence[T]:
    """Every k-th point and the last one, so that no more than about `most` are drawn."""
    stride = -(-len(points) // max(1, most))
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def _log_if_wide(axes: Axes, values: Sequence[float], ratio: float = 10) -> None:
    """A logarithmic axis if all values are positive and span more than `ratio`, with numbers written out."""
    from matplotlib.ticker import LogLocator, NullFormatter

    known = [value for value in values if not math.isnan(value)]
    if not known or min(known) <= 0 or max(known) / min(known) <= ratio:
        return
    axes.set_yscale("log")
    # Less than three decades have too few powers of ten to be read by.
    subs = (1.0, 2.0, 5.0) if max(known) / min(known) < 1000 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_x(axes: Axes, label: str, from_zero: bool = True) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(label)
    if from_zero:
        axes.set_xlim(left=0)
    if label == "samples":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _bar_thickness(bars: Mapping[str, Reading]) -> float:
    return 0.72 if len(bars) <= BARS_NAMED_MAX else 1.0


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    stride = -(-len(names) // BARS_NAMED_MAX)
    axes.set_yticks(range(0, len(names), stride), names[::stride])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _legend(figure: FigureBase, axes: Axes, columns: int = 1) -> None:
    # Outside of the axes: no place inside is free of data in every run.
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)


# ---- page and picture -----------------------------------------------------------------------------------------------

WIDTH_INCHES = 6.0  # of one column

STYLE = {
    "font.family": "DejaVu Sans",  # it comes with matplotlib, so that a report looks the same everywhere
    "font.size": 9,
    "text.color": "#1f2933",
    "axes.labelcolor": "#52606d",
    "axes.edgecolor": "#9aa5b1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "text.parse_math": False,  # a name with a dollar sign is a name
    "legend.fontsize": 8.5,
    "legend.borderaxespad": 0.4,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    # Drawn twice, the same run gives the same bytes.
    "svg.hashsalt": "tether",
    "svg.fonttype": "path",
}


def write_report(runs: Sequence[RunRecord], directory: Path) -> tuple[Path, Path]:
    """Writes report.html and report.png into `directory` and returns their paths."""
    if not runs:
        raise UsageError("a report needs at least one run: name one or more run directories")
    try:
        from matplotlib import style
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    curves = _curves(runs)
    sections = _sections(curves)
    with style.context(["default", STYLE]):  # the default first: a report does not depend on a user's matplotlibrc
        page = _page(curves, sections)
        picture = _picture(curves, sections)
    directory.mkdir(parents=True, exist_ok=True)
    html_path, png_path = directory / "report.html", directory / "report.png"
    html_path.write_text(page, encoding="utf-8")
    png_path.write_bytes(picture)
    return html_path, png_path


def _new_figure(width: float, height: float) -> Figure:
    """A figure without pyplot, which would keep it in a global list and might open a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _picture(curves: Sequence[_Curve], sections: Sequence[_Section]) -> bytes:
    rows = [
        (section, section.panels[i : i + section.columns])
        for section in sections
        for i in range(0, len(section.panels), section.columns)
    ]
    heights = [0.7, *(max(panel.height for panel in panels) + 0.4 for _, panels in rows)]  # room for the titles
    figure = _new_figure(2 * WIDTH_INCHES, sum(heights))
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    indent_inches = 0.12
    head = figure.add_subfigure(grid[0, :])
    heading = _heading([curve.run for curve in curves])
    head.text(indent_inches / (2 * WIDTH_INCHES), 0.5, heading, fontsize=16, fontweight="bold")
    for i, (section, panels) in enumerate(rows, start=1):
        for j, panel in enumerate(panels):
            cell = figure.add_subfigure(grid[i, j] if section.columns == 2 else grid[i, :])
            x = indent_inches * section.columns / (2 * WIDTH_INCHES)
            title = panel.title if panel.tells_all else f"{section.title}: {panel.title}"
            cell.suptitle(title, x=x, ha="left", fontsize=10.5, fontweight="bold")
            panel.draw(cell)
    data = io.BytesIO()
    # Agg refuses pictures of 2**16 pixels and more on a side.
    figure.savefig(data, format="png", dpi=min(130.0, 60_000 / sum(heights)), metadata={"Software": "tether"})
    return data.getvalue()


def _panel_image(panel: _Panel, section: _Section) -> str:
    figure = _new_figure(2 * WIDTH_INCHES / section.columns, panel.height)
    panel.draw(figure)
    data = io.BytesIO()
    figure.savefig(data, format="svg", metadata={"Date": None, "Creator": "tether"})
    # An image and not inline SVG: the identifiers inside several SVGs of one document would collide.
    source = f"data:image/svg+xml;base64,{base64.b64encode(data.getvalue()).decode()}"
    return f'<img alt="{escape(f"{section.title}: {panel.title}")}" src="{source}">'


def _page(curves: Sequence[_Curve], sections: Sequence[_Section]) -> str:
    runs = [curve.run for curve in curves]
    heading = escape(_heading(runs))
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(runs))
    parts = [
        f'<header><p class="brand">Tether report</p><h1>{heading}</h1></header>',
        f"<section><h2>Summary</h2>{_summary_html(curves)}{f'<ul class=notes>{notes}</ul>' if notes else ''}</section>",
    ]
    for section in sections:
        cards = "".join(
            f"<figure><figcaption>{escape(panel.title)}</figcaption>{_panel_image(panel, section)}</figure>"
            for panel in section.panels
        )
        parts.append(
            f"<section><h2>{escape(section.title)}</h2><p>{escape(section.about)}</p>"
            f'<div class="cards{" wide" if section.columns == 1 else ""}">{cards}</div></section>'
        )
    parts.append(f"<section><h2>Configuration</h2>{''.join(map(_configuration_html, curves))}</section>")
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{heading} · Tether report</title>
<style>{CSS}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _summary_html(curves: Sequence[_Curve]) -> str:
    headings, rows = _summary([curve.run for curve in curves])
    head = "".join(
        f'<th scope="col"{"" if i < WORDS else " class=number"}>{escape(heading)}</th>'
        for i, heading in enumerate(headings)
    )
    body = ""
    for curve, (name, *cells) in zip(curves, rows, strict=True):
        status = str(curve.run.config.get("status", "?"))
        badge = "" if status == "finished" else f' <span class="badge">{escape(status)}</span>'
        body += f'<tr><th scope="row">{_swatch(curve)}{escape(name)}{badge}</th>'
        body += "".join(
            f"<td{'' if i < WORDS - 1 else ' class=number'}>{escape(cell)}</td>" for i, cell in enumerate(cells)
        )
        body += "</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _configuration_html(curve: _Curve) -> str:
    items = ""
    for key, value in curve.run.config.items():
        if key in ("result", "version") or value is None:
            continue
        words = ", ".join(f"{k} = {_plain(v)}" for k, v in value.items()) if isinstance(value, dict) else _plain(value)
        items += f"<dt>{escape(key)}</dt><dd>{escape(words)}</dd>"
    items += f"<dt>directory</dt><dd>{escape(str(curve.run.path))}</dd>"
    return f"<details><summary>{_swatch(curve)}{escape(curve.label)}</summary><dl>{items}</dl></details>"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _swatch(curve: _Curve) -> str:
    return f'<span class="swatch" style="background:{curve.colour}"></span>'


CSS = """
:root { --ground: #f5f7fa; --card: #fff; --ink: #1f2933; --soft: #52606d; --line: #dfe4ea; --accent: #0072b2;
  --warn: #fff4e0; --warn-ink: #7a4a00; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #12171d; --card: #1b222b; --ink: #e8ecf1; --soft: #a3b0bd; --line: #303a46; --accent: #6cb8e6;
    --warn: #33270f; --warn-ink: #f2cf8d; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 20px 64px; }
.brand { margin: 0; color: var(--accent); font-weight: 600; letter-spacing: .02em; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 40px 0 4px; font-size: 20px; }
section > p { margin: 0 0 12px; color: var(--soft); max-width: 100ch; }
.scroll { overflow-x: auto; margin-top: 8px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 11px; text-align: left; white-space: nowrap; }
thead th { color: var(--soft); font-size: 13px; font-weight: 600; border-bottom: 1px solid var(--line); }
tbody th { font-weight: 600; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.number { text-align: right; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 9px; border-radius: 3px; }
.badge { margin-left: 6px; padding: 1px 8px; border-radius: 9px; background: var(--warn); color: var(--warn-ink);
  font-size: 12px; font-weight: 600; }
.notes { margin: 12px 0 0; padding: 10px 14px 10px 32px; border-radius: 10px; background: var(--warn);
  color: var(--warn-ink); overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; align-items: start; }
.cards.wide { grid-template-columns: minmax(0, 1fr); }
@media (max-width: 760px) { .cards { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0; padding: 14px 16px 12px; background: #fff; color: #1f2933; border: 1px solid var(--line);
  border-radius: 10px; }
figcaption { margin-bottom: 8px; font-weight: 600; font-size: 14px; overflow-wrap: anywhere; }
figure img { display: block; width: 100%; height: auto; }
details { margin-top: 8px; padding: 10px 14px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 10px 0 2px; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media print { details { break-inside: avoid; } figure { break-inside: avoid; } }
"""
