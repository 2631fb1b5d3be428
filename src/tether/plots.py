"""The figures of a report: what there is to draw of some runs, as lines over time and as bars for each node.

A panel draws itself into any figure: the page gives each one a figure of its own, the picture gives each one a cell of
a large figure, so the two cannot disagree.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from tether.report import SPEEDUP, Row, RunRecord, speedup_grid
from tether.speedup import Fit, fits, most_fall

WIDTH_INCHES = 12.0
#: points drawn of one line; a long run would otherwise make a page of hundreds of megabytes
POINTS_MAX = 1000
#: a line of so few points shows them, so that nobody reads a straight line as a measurement
POINTS_MARKED_MAX = 40
#: of more bars only some are named
BARS_NAMED_MAX = 16

#: what tells the series of a record apart
SERIES = ("node", "shard", "phase")
#: what of a record is no quantity; numbers of rounds and cycles only count
NOT_DRAWN = {*SERIES, "kind", "time", "round", "clock", "workers", "exchange", "cycle", "taus", "rows"}

# Okabe and Ito's colours, which also people with colour-blindness tell apart; the yellow is too pale on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
# The dashes change when the colours are used up.
DASHES = ("-", "--", ":", "-.")
# The same for points.
MARKERS = dict(zip(DASHES, "os^D", strict=True))

#: what an axis shows: sizes of its units and their names, of which the first is taken that the largest value has two of
UNITS = {
    "time": ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds")),
    "samples": ((1e6, "million samples"), (1e3, "thousand samples"), (1, "samples")),
    "traffic": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")),
    "staleness": ((1, "staleness in updates"),),
}

Draw = Callable[[FigureBase], None]
Points = Iterable[tuple["Look", Hashable, float, float | None]]  # run, line, x, y
Parts = Sequence[tuple[str, str, Callable[[Row], float]]]  # meaning, colour, length
# Up to the worker's last row. A gradient's seconds are counted when it is done, a moment apart from the clock, so that
# computing and waiting may exceed the time by a little.
TIME: Parts = (
    ("computing", "#009e73", lambda row: row["compute_seconds"]),
    ("waiting", "#e69f00", lambda row: row["wait_seconds"]),
    ("other", "#d5d9de", lambda row: max(0.0, row["time"] - row["compute_seconds"] - row["wait_seconds"])),
)
TRAFFIC: Parts = (
    ("sent", "#0072b2", lambda row: row["bytes_sent"]),
    ("received", "#9ccbe8", lambda row: row["bytes_received"]),
)

STYLE = {
    "font.family": "DejaVu Sans",  # it comes with matplotlib, so that a report looks the same everywhere
    "font.size": 9,
    "text.color": "#1f2933",
    "text.parse_math": False,  # a name with a dollar sign is a name
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
    "lines.markersize": 3.2,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    "svg.hashsalt": "tether",  # drawn twice, the same run gives the same bytes
}


@dataclass(frozen=True, eq=False)
class Look:
    """A run and how it looks in every panel."""

    run: RunRecord
    label: str
    colour: str
    dashes: str


@dataclass(frozen=True)
class Panel:
    title: str
    height: float  # inches
    draw: Draw


@dataclass(frozen=True)
class Section:
    """Panels about one thing."""

    title: str
    about: str
    panels: Sequence[Panel | None]
    #: a table above them, headings first, and the run of each row
    grid: Sequence[Sequence[str]] = ()
    looks: Sequence[Look] = ()

    @property
    def rows(self) -> list[list[Panel]]:
        """Two panels in a row; the last one of an odd number takes the whole width."""
        panels = [panel for panel in self.panels if panel]
        return [panels[i : i + 2] for i in range(0, len(panels), 2)]

    def svgs(self) -> list[tuple[str, bytes]]:
        """Title and picture of each panel."""
        wide = ((panel, WIDTH_INCHES / len(row)) for row in self.rows for panel in row)
        return [(panel.title, saved(panel.draw, width, panel.height, "svg")) for panel, width in wide]


def looks(runs: Sequence[RunRecord]) -> list[Look]:
    """The runs with colours and labels; those that are labelled alike get the names of their directories."""
    alike = Counter(run.label for run in runs)
    return [
        Look(
            run,
            f"{run.label} {run.name}" if alike[run.label] > 1 else run.label,
            COLOURS[i % len(COLOURS)],
            DASHES[i // len(COLOURS) % len(DASHES)],
        )
        for i, run in enumerate(runs)
    ]


def sections(looks: Sequence[Look]) -> list[Section]:
    """Everything there is to draw; what was not measured is left out."""
    evaluations = [(look, row) for look in looks for row in look.run.evaluations]
    progress = [(look, row) for look in looks for row in look.run.progress]
    records = [(look, tuple(map(row.get, SERIES)), row) for look in looks for row in look.run.records]
    compared = [(look, fit) for fit in fits([look.run for look in looks]) for look in looks if look.run is fit.run]
    metrics = dict.fromkeys(name for _, row in evaluations for name in row["metrics"])
    recorded = dict.fromkeys(name for *_, row in records for name in row if name not in NOT_DRAWN)
    found = [
        Section(
            "The joint model",
            "Evaluated beside training: how good the model is after so much time, and after so many samples.",
            [
                _lines(name, axis, ((look, 0, row[axis], row["metrics"].get(name)) for look, row in evaluations))
                for name in metrics
                for axis in ("time", "samples")
            ],
        ),
        Section(
            "Speedup",
            SPEEDUP,
            [_speedup(compared)],
            speedup_grid([fit for _, fit in compared]),
            [look for look, _ in compared],
        ),
        Section(
            "Training loss",
            "A thin line for each worker: where the lines of a run spread, its workers explore; where they lie on "
            "each other, they agree.",
            [
                _lines(
                    "training loss", "time", ((look, row["node"], row["time"], row["loss"]) for look, row in progress)
                )
            ],
        ),
        Section(
            "Where the time went",
            "Seconds of each worker spent computing gradients, waiting for an exchange, and on all else, such as "
            "starting, loading data and installing values.",
            [_bars("time", look, look.run.workers, TIME) for look in looks],
        ),
        Section(
            "Traffic",
            "Bytes that each node sent and received.",
            [_bars("traffic", look, look.run.nodes, TRAFFIC) for look in looks],
        ),
        Section(
            "Staleness",
            "How many updates the joint model had seen between the time a gradient was begun and the time it was "
            "applied. Runs that never applied a stale gradient are left out.",
            [_lines("% of gradients", "staleness", _staleness(looks))],
        ),
        Section(
            "Protocol",
            "What the protocols recorded about themselves.",
            [
                _lines(name, "time", ((look, series, row["time"], row.get(name)) for look, series, row in records))
                for name in recorded
            ],
        ),
    ]
    return [section for section in found if section.rows]


def png(heading: str, sections: Sequence[Section]) -> bytes:
    """All panels as one picture."""
    rows = [row for section in sections for row in section.rows]
    heights = [0.7, *(max(panel.height for panel in row) + 0.4 for row in rows)]  # room for the titles

    def draw(figure: FigureBase) -> None:
        bands = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)[:, 0]
        bands[0].text(0.01, 0.5, heading, fontsize=16, fontweight="bold")
        for band, row in zip(bands[1:], rows, strict=True):
            for cell, panel in zip(band.subfigures(1, len(row), squeeze=False)[0], row, strict=True):
                cell.suptitle(panel.title, x=0.01 * len(row), ha="left", fontsize=10.5, fontweight="bold")
                panel.draw(cell)

    return saved(draw, WIDTH_INCHES, sum(heights), "png")


def saved(draw: Draw, width: float, height: float, form: str) -> bytes:
    """What `draw` draws, as the bytes of a file."""
    with style.context(["default", STYLE]):  # the default first: a report does not depend on a user's matplotlibrc
        figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
        draw(figure)
        data = io.BytesIO()
        figure.savefig(data, format=form, metadata={"Date": None} if form == "svg" else None)
    return data.getvalue()


def _lines(quantity: str, over: str, points: Points) -> Panel | None:
    """A panel of lines, if there is any; what is no finite number is not drawn."""
    curves: dict[Look, dict[Hashable, list[tuple[float, float]]]] = {}
    for look, line, x, y in points:
        if isinstance(y, int | float) and math.isfinite(y):
            curves.setdefault(look, {}).setdefault(line, []).append((x, y))

    def draw(figure: FigureBase) -> None:
        axes = figure.add_subplot()
        lines = [np.array(line) for curve in curves.values() for line in curve.values()]
        all_x, all_y = np.concatenate(lines).T
        size, unit = _unit(over, all_x.max(), curves)
        for look, curve in curves.items():
            thin: dict[str, Any] = {"linewidth": 0.8, "markersize": 1.6, "alpha": 0.7} if len(curve) > 1 else {}
            for number, line in enumerate(curve.values()):
                x, y = np.array(line[:: -math.ceil(len(line) / POINTS_MAX)]).T  # from the end, which matters most
                marker = "o" if len(x) <= POINTS_MARKED_MAX else ""
                label = None if number else look.label
                axes.plot(x / size, y, look.dashes, color=look.colour, marker=marker, label=label, **thin)
        for axis, values in ((axes.xaxis, all_x / size), (axes.yaxis, all_y)):
            if (values % 1 == 0).all():
                axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        low, high = all_y.min(), all_y.max()
        # What falls (an error, a loss) is read by its ratio; what rises (an accuracy) is not.
        if most_fall([(line[0, 1], line[-1, 1]) for line in lines]) and 0 < 10 * low < high:
            axes.set_yscale("log")
            # Less than three decades have too few powers of ten to be read by.
            subs = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
            axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(left=-0.02 * all_x.max() / size)  # from zero, with room for a point that is there
        axes.set(xlabel=unit, ylabel=quantity)
        # Outside of the axes: no place inside is free of data in every run.
        for key in figure.legend(loc="outside lower left").get_lines():
            key.set(linewidth=1.6, alpha=1.0)

    return Panel(f"{quantity} over {over}", 3.0 + 0.21 * len(curves), draw) if curves else None


def _bars(what: str, look: Look, rows: Mapping[str, Row], parts: Parts) -> Panel | None:
    """A panel with a bar for each node, made of parts, if any has a length."""
    names = list(rows)
    lengths = np.array([[length(row) for row in rows.values()] for _, _, length in parts], float)

    def draw(figure: FigureBase) -> None:
        axes = figure.add_subplot()
        size, unit = _unit(what, lengths.sum(axis=0).max(), [look])
        ends = lengths.cumsum(axis=0)
        for (meaning, colour, _), length, end in zip(parts, lengths / size, ends / size, strict=True):
            thickness = 0.72 if len(names) <= BARS_NAMED_MAX else 1.0
            axes.barh(range(len(names)), length, thickness, left=end - length, color=colour, label=meaning)
        stride = math.ceil(len(names) / BARS_NAMED_MAX)
        axes.set_yticks(range(0, len(names), stride), names[::stride])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel(unit)
        figure.legend(loc="outside lower left", ncols=len(parts))

    height = 1.4 + 0.26 * min(len(names), BARS_NAMED_MAX)
    return Panel(f"{what} of {look.label}", height, draw) if lengths.any() else None


def _speedup(compared: Sequence[tuple[Look, Fit]]) -> Panel | None:
    """A point for each run; on the diagonal the prediction was right."""

    def draw(figure: FigureBase) -> None:
        axes = figure.add_subplot(aspect="equal", anchor="W")
        largest = 1.15 * max(max(fit.predicted, fit.measured) for _, fit in compared)
        axes.plot([0, largest], [0, largest], color="#9aa5b1", linewidth=1.0, label="as predicted")
        for look, fit in compared:
            told = f"{look.label}: {fit.predicted:.2f} predicted, {fit.measured:.2f} measured"
            axes.plot(fit.predicted, fit.measured, MARKERS[look.dashes], color=look.colour, markersize=7, label=told)
        axes.set(xlim=(0, largest), ylim=(0, largest), xlabel="predicted speedup", ylabel="measured speedup")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0))

    height = max(3.6, 1.0 + 0.21 * len(compared))
    return Panel("speedup, measured against predicted", height, draw) if compared else None


def _staleness(looks: Sequence[Look]) -> Iterator[tuple[Look, Hashable, float, float]]:
    """The share of gradients by staleness, in percent."""
    for look in looks:
        counts = {int(value): count for value, count in look.run.figures["staleness"]["histogram"].items()}
        if any(counts):
            for value in range(max(counts) + 1):
                yield look, 0, value, 100 * counts.get(value, 0) / sum(counts.values())


def _unit(axis: str, largest: float, looks: Iterable[Look]) -> tuple[float, str]:
    size, name = next((unit for unit in UNITS[axis] if largest >= 2 * unit[0]), UNITS[axis][-1])
    virtual = axis == "time" and any(look.run.virtual for look in looks)
    return size, f"{name} (virtual in sim)" if virtual else name
