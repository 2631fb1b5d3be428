"""The figures of a report: lines over time and samples, and bars for each node.

A panel draws itself into any figure. The page gives each panel a figure of its own and the picture gives each a cell of
one large figure, so the two always agree.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import style as mpl_style
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from tether.analysis.runs import Row, RunRecord, distinct_labels
from tether.analysis.speedup import SPEEDUP_NOTE, Fit, fits, most_fall, speedup_grid

WIDTH_INCHES = 12.0
#: points drawn per line; without a limit, the page of a long run would take hundreds of megabytes
POINTS_MAX = 1000
#: a line with at most this many points marks each of them, so that readers do not take a straight line for measurements
POINTS_MARKED_MAX = 40
#: with more bars than this, only some are labelled
BARS_NAMED_MAX = 16
#: the time axis is logarithmic if the longest run in a panel takes more than this many times as long as the shortest
LINEAR_DURATIONS_MAX = 5
#: a logarithmic time axis begins at this share of the shortest run, even if some points are earlier
LOG_TIME_FROM = 0.01

#: the fields that identify a series of a record
SERIES = ("node", "shard", "phase")
#: fields of a record that are not quantities; the numbers of rounds and cycles only count
NOT_DRAWN = {*SERIES, "kind", "time", "round", "clock", "workers", "exchange", "cycle", "taus", "rows"}

# Okabe and Ito's colours, which colour-blind people can tell apart; their yellow is too pale on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
# The dashes change when the colours are used up.
DASHES = ("-", "--", ":", "-.")
MARKERS = "os^DvPX"

#: for each kind of axis, the sizes and names of its units; the first unit is used that fits into the value twice
UNITS = {
    "time": ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds")),
    "samples": ((1e6, "million samples"), (1e3, "thousand samples"), (1, "samples")),
    "traffic": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")),
    "staleness": ((1, "staleness in updates"),),
}

Draw = Callable[[FigureBase], None]
Points = Iterable[tuple["RunStyle", Hashable, float, float | None]]  # run, line, x, y
Parts = Sequence[tuple[str, str, Callable[[Row], float]]]  # meaning, colour, length
# Up to the worker's last row. A gradient's seconds are counted when it is done, slightly later than the clock is read,
# so the sum of computing and waiting may exceed the time a little.
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
    "font.family": "DejaVu Sans",  # matplotlib includes it, so a report looks the same everywhere
    "font.size": 9,
    "text.color": "#1f2933",
    "text.parse_math": False,  # a dollar sign in a name is not TeX
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
    "svg.hashsalt": "tether",  # the same run gives the same bytes every time
}


@dataclass(frozen=True, eq=False)
class RunStyle:
    """A run and the way every panel draws it."""

    run: RunRecord
    label: str
    colour: str
    dashes: str
    marker: str


@dataclass(frozen=True)
class Panel:
    title: str
    height: float  # inches
    draw: Draw


@dataclass(frozen=True)
class Section:
    """The panels about one subject."""

    title: str
    about: str
    panels: Sequence[Panel | None]
    #: a table above the panels, headings first, and the run of each row
    grid: Sequence[Sequence[str]] = ()
    grid_styles: Sequence[RunStyle] = ()

    @property
    def rows(self) -> list[list[Panel]]:
        """Two panels in each row; if their number is odd, the last takes the whole width."""
        panels = [panel for panel in self.panels if panel]
        return [panels[i : i + 2] for i in range(0, len(panels), 2)]

    def svgs(self) -> list[tuple[str, bytes]]:
        """Title and picture of each panel."""
        wide = ((panel, WIDTH_INCHES / len(row)) for row in self.rows for panel in row)
        return [(panel.title, render(panel.draw, width, panel.height, "svg")) for panel, width in wide]


def style_runs(runs: Sequence[RunRecord]) -> list[RunStyle]:
    """The runs with their labels, colours, dashes and markers."""
    return [
        RunStyle(
            run,
            label,
            COLOURS[i % len(COLOURS)],
            DASHES[i // len(COLOURS) % len(DASHES)],
            MARKERS[(i + i // len(COLOURS)) % len(MARKERS)],  # another one when a colour comes a second time
        )
        for i, (run, label) in enumerate(zip(runs, distinct_labels(runs), strict=True))
    ]


def sections(styles: Sequence[RunStyle]) -> list[Section]:
    """All sections of a report that have something to draw."""
    evaluations = [(style, row) for style in styles for row in style.run.evaluations]
    progress = [(style, row) for style in styles for row in style.run.progress]
    records = [(style, tuple(map(row.get, SERIES)), row) for style in styles for row in style.run.records]
    compared = [
        (style, fit) for fit in fits([style.run for style in styles]) for style in styles if style.run is fit.run
    ]
    metrics = dict.fromkeys(name for _, row in evaluations for name in row["metrics"])
    recorded = dict.fromkeys(name for *_, row in records for name in row if name not in NOT_DRAWN)
    found = [
        Section(
            "The joint model",
            "Evaluated during training: how good the model is over time, and over the samples it was trained on.",
            [
                _lines(name, axis, ((style, 0, row[axis], row["metrics"].get(name)) for style, row in evaluations))
                for name in metrics
                for axis in ("time", "samples")
            ],
        ),
        Section(
            "Speedup",
            SPEEDUP_NOTE,
            [_speedup(compared)],
            speedup_grid([fit for _, fit in compared]),
            [style for style, _ in compared],
        ),
        Section(
            "Training loss",
            "A thin line for each worker. Where the lines of a run spread, its workers explore; where they coincide, "
            "the workers agree.",
            [
                _lines(
                    "training loss",
                    "time",
                    ((style, row["node"], row["time"], row["loss"]) for style, row in progress),
                )
            ],
        ),
        Section(
            "Where the time went",
            "Seconds that each worker spent computing gradients, waiting for an exchange, and on everything else, such "
            "as starting, loading data and installing values.",
            [_bars("time", style, style.run.workers, TIME) for style in styles],
        ),
        Section(
            "Traffic",
            "Bytes that each node sent and received.",
            [_bars("traffic", style, style.run.nodes, TRAFFIC) for style in styles],
        ),
        Section(
            "Staleness",
            "How many updates the joint model received between the time a gradient was begun and the time it was "
            "applied. Runs that never applied a stale gradient are left out.",
            [_lines("% of gradients", "staleness", _staleness(styles))],
        ),
        Section(
            "Protocol",
            "What the protocols recorded about themselves.",
            [
                _lines(name, "time", ((style, series, row["time"], row.get(name)) for style, series, row in records))
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

    return render(draw, WIDTH_INCHES, sum(heights), "png")


def render(draw: Draw, width: float, height: float, form: str) -> bytes:
    """The bytes of an image file with what `draw` draws."""
    with mpl_style.context(["default", STYLE]):  # the default first: a report does not depend on a user's matplotlibrc
        figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
        draw(figure)
        data = io.BytesIO()
        figure.savefig(data, format=form, metadata={"Date": None} if form == "svg" else None)
    return data.getvalue()


def _lines(quantity: str, over: str, points: Points) -> Panel | None:
    """A panel of lines, if there are any; only finite numbers are drawn."""
    curves: dict[RunStyle, dict[Hashable, list[tuple[float, float]]]] = {}
    for style, line, x, y in points:
        if isinstance(y, int | float) and math.isfinite(y):
            curves.setdefault(style, {}).setdefault(line, []).append((x, y))

    def draw(figure: FigureBase) -> None:
        axes = figure.add_subplot()
        lines = [np.array(line) for curve in curves.values() for line in curve.values()]
        all_x, all_y = np.concatenate(lines).T
        ends = [max(line[-1][0] for line in curve.values()) for curve in curves.values()]
        log_time = over == "time" and max(ends) > LINEAR_DURATIONS_MAX * min(ends) > 0
        size, unit = _unit(over, min(ends) if log_time else all_x.max(), curves)
        for style, curve in curves.items():
            thin: dict[str, Any] = {"linewidth": 0.8, "markersize": 1.6, "alpha": 0.7} if len(curve) > 1 else {}
            for number, line in enumerate(curve.values()):
                x, y = np.array(line[:: -math.ceil(len(line) / POINTS_MAX)]).T  # from the end, which matters most
                marker = style.marker if len(x) <= POINTS_MARKED_MAX else ""
                label = None if number else style.label
                axes.plot(x / size, y, style.dashes, color=style.colour, marker=marker, label=label, **thin)
        for axis, values in ((axes.xaxis, all_x / size), (axes.yaxis, all_y)):
            if (values % 1 == 0).all():
                axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        low, high = all_y.min(), all_y.max()
        # A quantity that falls (an error, a loss) is read by its ratio; one that rises (an accuracy) is not.
        if most_fall([(line[0, 1], line[-1, 1]) for line in lines]) and 0 < 10 * low < high:
            axes.set_yscale("log")
            label_decimally(axes.yaxis, decades=math.log10(high / low))
        if log_time:
            begin = max(LOG_TIME_FROM * min(ends), all_x[all_x > 0].min())
            axes.set_xscale("log")
            axes.set_xlim(left=0.9 * begin / size)
            label_decimally(axes.xaxis, decades=math.log10(max(ends) / begin))
        else:
            axes.set_xlim(left=-0.02 * all_x.max() / size)  # from zero, with room for a point at zero
        axes.set(xlabel=f"{unit}, logarithmic" if log_time else unit, ylabel=quantity)
        # Outside the axes: inside, no place is free of data in every run.
        for key in figure.legend(loc="outside lower left").get_lines():
            key.set(linewidth=1.6, alpha=1.0)

    return Panel(f"{quantity} over {over}", 3.0 + 0.21 * len(curves), draw) if curves else None


def label_decimally(axis: Any, decades: float = 1.0) -> None:
    """Label a logarithmic axis with plain numbers: 1, 2 and 5 times each power of ten, or the powers if it is long."""
    subs = (1.0, 2.0, 5.0) if decades < 3 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(NullFormatter())


def _bars(what: str, style: RunStyle, rows: Mapping[str, Row], parts: Parts) -> Panel | None:
    """A panel with a bar of several parts for each node, if any part has a length."""
    names = list(rows)
    lengths = np.array([[length(row) for row in rows.values()] for _, _, length in parts], float)

    def draw(figure: FigureBase) -> None:
        axes = figure.add_subplot()
        size, unit = _unit(what, lengths.sum(axis=0).max(), [style])
        ends = lengths.cumsum(axis=0)
        for (meaning, colour, _), length, end in zip(parts, lengths / size, ends / size, strict=True):
            thickness = 0.72 if len(names) <= BARS_NAMED_MAX else 1.0
            axes.barh(range(len(names)), length, thickness, left=end - length, color=colour, label=meaning)
        stride = math.ceil(len(names) / BARS_NAMED_MAX)
        axes.set_yticks(range(0, len(names), stride), names[::stride])
        axes.set_ylim(max(len(names), 3) - 0.5, -0.5)  # a single bar does not fill the panel
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel(unit)
        figure.legend(loc="outside lower left", ncols=len(parts))

    height = 1.4 + 0.26 * min(len(names), BARS_NAMED_MAX)
    return Panel(f"{what} of {style.label}", height, draw) if lengths.any() else None


def _speedup(compared: Sequence[tuple[RunStyle, Fit]]) -> Panel | None:
    """A point for each run; on the diagonal the prediction was right."""

    def draw(figure: FigureBase) -> None:
        axes = figure.add_subplot(aspect="equal", anchor="W")
        largest = 1.15 * max(max(fit.predicted, fit.measured) for _, fit in compared)
        axes.plot([0, largest], [0, largest], color="#9aa5b1", linewidth=1.0, label="as predicted")
        for style, fit in compared:
            label = f"{style.label}: {fit.predicted:.2f} predicted, {fit.measured:.2f} measured"
            axes.plot(fit.predicted, fit.measured, style.marker, color=style.colour, markersize=7, label=label)
        axes.set(xlim=(0, largest), ylim=(0, largest), xlabel="predicted speedup", ylabel="measured speedup")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0))

    height = max(3.6, 1.0 + 0.21 * len(compared))
    return Panel("speedup, measured against predicted", height, draw) if compared else None


def _staleness(styles: Sequence[RunStyle]) -> Iterator[tuple[RunStyle, Hashable, float, float]]:
    """The share of gradients by staleness, in percent."""
    for style in styles:
        counts = {int(value): count for value, count in style.run.figures["staleness"]["histogram"].items()}
        if any(counts):
            for value in range(max(counts) + 1):
                yield style, 0, value, 100 * counts.get(value, 0) / sum(counts.values())


def _unit(axis: str, typical: float, styles: Iterable[RunStyle]) -> tuple[float, str]:
    """The size and the name of the unit that suits a typical value."""
    size, name = next((unit for unit in UNITS[axis] if typical >= 2 * unit[0]), UNITS[axis][-1])
    virtual = axis == "time" and any(style.run.virtual for style in styles)
    return size, f"{name} (virtual in sim)" if virtual else name
