"""The pictures of sweeps: a study as in figures 6 and 7 of the Rudra paper, a search for alpha, scaling, a frontier."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import FigureBase
from matplotlib.patheffects import withStroke

from tether.analysis.plots import WIDTH_INCHES, label_decimally, render
from tether.analysis.runs import Row
from tether.analysis.tuning import Tuning

#: the axes, the row at the end of a line, the line's name and its colour
LineEnd = tuple[Any, Row, str, Any]
#: of protocols in one picture
MARKERS = "osv^DPX"


def tradeoff_png(outcome: Row, curves: dict[str, list[Row]]) -> bytes:
    """A panel for each protocol as in figures 6 and 7: solid lines of equal mu, dashed lines of equal lambda."""
    rows = [row for row in outcome["rows"] if row["error"] is not None]
    percent = outcome["metric"] == "error"
    mus = sorted({row["mu"] for row in rows})
    colours = {mu: colormaps["viridis"](0.8 * i / max(1, len(mus) - 1)) for i, mu in enumerate(mus)}
    across = min(3, len(curves))
    down = math.ceil(len(curves) / across)

    def draw(figure: FigureBase) -> None:
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(curves) :]:
            axes.set_axis_off()
        ends: list[LineEnd] = []
        for axes, (protocol, curve) in zip(grid.flat, curves.items(), strict=False):
            ends += _draw_tradeoff(axes, [row for row in curve if row["error"] is not None], colours, percent)
            best = [row for row in outcome["front"] if row in curve]
            x = [row["seconds"] for row in best]
            axes.plot(x, [_scaled(row, percent) for row in best], "o", ms=10, mfc="none", mec="#d55e00", mew=1.3)
            if "baseline_error" in outcome["ratios"]:
                error = outcome["ratios"]["baseline_error"]
                axes.axhline(100 * error if percent else error, color="#1f2933", linestyle=":", linewidth=1.0)
            axes.set_title(protocol, loc="left", fontweight="bold")
        first = grid[0, 0]
        first.set_xscale("log")
        first.margins(0.14, 0.12)
        if rows and 0 < 10 * min(row["error"] for row in rows) < max(row["error"] for row in rows):
            first.set_yscale("log")
        for axis in (first.xaxis, first.yaxis):
            if axis.get_scale() == "log":
                label_decimally(axis)
        for axes in grid[-1]:
            axes.set_xlabel("seconds (virtual)")
        for axes in grid[:, 0]:
            axes.set_ylabel(f"{outcome['metric']} in %" if percent else outcome["metric"])
        heading = f"{outcome['task']}: {outcome['metric']} against time"
        figure.suptitle(heading, x=0.01, ha="left", fontsize=14, fontweight="bold")
        key = "solid: equal \u03bc (mini-batch)   dashed: equal \u03bb (workers)   dotted: one worker, usual batch   "
        figure.supxlabel(key + "ringed: no other is both faster and better", fontsize=9)
        _label_ends(figure, ends, percent)

    return render(draw, max(6.5, 4.6 * across), 4.4 * down + 0.6, "png")


def _draw_tradeoff(axes: Any, curve: list[Row], colours: dict[int, Any], percent: bool) -> list[LineEnd]:
    """Draw the lines of one protocol, and return where each of them is to be labelled."""
    ends: list[LineEnd] = []
    for name, other, symbol in (("lambda", "mu", "\u03bb"), ("mu", "lambda", "\u03bc")):
        for value in sorted({row[name] for row in curve}):
            line = sorted((row for row in curve if row[name] == value), key=lambda row: row[other])
            look: Row = {"color": "#9aa5b1", "linestyle": "--", "linewidth": 1.0}
            if name == "mu":
                look = {"color": colours[value], "marker": "o", "markersize": 5}
            axes.plot([row["seconds"] for row in line], [_scaled(row, percent) for row in line], **look)
            colour = colours[value] if name == "mu" else "#52606d"
            ends.append((axes, line[0 if name == "mu" else -1], f"{symbol}={value}", colour))
    return ends


def alpha_png(tuning: Tuning) -> bytes:
    """The metric over alpha, with the corridor; to the right, the metric of every run over time."""
    scale = 100 if tuning.percent else 1
    label = f"{tuning.metric} in %" if tuning.percent else tuning.metric
    points = [point for point in tuning.points if point.value is not None]
    ends = {point.alpha: scale * point.value for point in points if point.value is not None}
    best, corridor = tuning.best, tuning.corridor
    colours = {
        point.alpha: colormaps["viridis"](0.92 * i / max(1, len(tuning.points) - 1))
        for i, point in enumerate(tuning.points)
    }

    def draw(figure: FigureBase) -> None:
        over_alpha, over_time = figure.subplots(1, 2, width_ratios=(1, 1))
        over_alpha.set_xscale("log")
        low, high = tuning.points[0].alpha, tuning.points[-1].alpha
        over_alpha.set_xlim(low * (low / high) ** 0.06, high * (high / low) ** 0.06)
        label_decimally(over_alpha.xaxis)
        if best is not None:
            first, last = corridor[0].alpha, corridor[-1].alpha
            room = (high / low) ** 0.012  # makes a corridor of one value visible
            over_alpha.axvspan(first / room, last * room, color="#009e73", alpha=0.13, lw=0, label="corridor")
            over_alpha.axhline(scale * tuning.limit, color="#1f2933", ls=":", lw=1.0, label=tuning.limit_text)
        over_alpha.plot(list(ends), list(ends.values()), color="#9aa5b1", zorder=2)
        for alpha, end in ends.items():
            over_alpha.plot(alpha, end, "o", ms=6, color=colours[alpha], zorder=3)
        if best is not None:
            look: Row = {"ms": 12, "mfc": "none", "mec": "#d55e00", "mew": 1.6, "zorder": 4}
            over_alpha.plot(best.alpha, ends[best.alpha], "o", label=f"\u03b1 = {best.alpha:g}, the best", **look)
        failed = [point.alpha for point in tuning.points if point.value is None]
        top = over_alpha.get_xaxis_transform()
        if failed:
            over_alpha.plot(
                failed, [0.96] * len(failed), "x", ms=8, mew=2, color="#d55e00", transform=top, label="diverged"
            )
        over_alpha.set(xlabel="\u03b1", ylabel=label)
        over_alpha.set_title("at the end of each run", loc="left", fontsize=10.5, fontweight="bold")
        values = [value for point in points for _, value in point.curve]
        for point in points:
            chosen = point in corridor
            times, curve = [at for at, _ in point.curve], [scale * value for _, value in point.curve]
            width = {"lw": 2.0 if chosen else 1.0, "ls": "-" if chosen else "--"}
            over_time.plot(times, curve, color=colours[point.alpha], label=f"{point.alpha:g}", **width)
        if values and 0 < 10 * min(values) < max(values):
            over_time.set_yscale("log")
            label_decimally(over_time.yaxis)
        over_time.set(xlabel="seconds (virtual)" if tuning.virtual else "seconds", ylabel=label)
        over_time.set_title("over time; solid: in the corridor", loc="left", fontsize=10.5, fontweight="bold")
        if points:
            over_time.legend(title="\u03b1", loc="upper left", bbox_to_anchor=(1.0, 1.0))
        over_alpha.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)
        heading = f"{tuning.task}: {tuning.metric} over \u03b1 of {tuning.protocol.name}"
        figure.suptitle(heading, x=0.01, ha="left", fontsize=14, fontweight="bold")

    return render(draw, WIDTH_INCHES, 4.9, "png")


def scaling_png(rows: list[Row], target: float) -> bytes:
    """Speedup over the number of workers as in figure 13c of the MPCA SGD paper, with the ideal."""
    counts = [row["workers"] for row in rows]

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.plot(counts, counts, color="#9aa5b1", ls="--", lw=1.0, label="ideal")
        axes.plot(counts, [row["speedup"] for row in rows], "o-", color="#0072b2", label="mpca")
        for row in rows:
            axes.annotate(
                f"{row['speedup']:.3g}",
                (row["workers"], row["speedup"]),
                (0, -14),
                textcoords="offset points",
                fontsize=9,
            )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xticks(counts)
        axes.set(xlabel="workers", ylabel=f"times faster to an error of {target:.0%} than one worker")
        axes.legend()

    return render(draw, 7.0, 4.6, "png")


def frontier_png(rows: list[Row], protocols: list[str]) -> bytes:
    """The time of each protocol to the target of each row, relative to the last protocol, on a logarithmic axis."""
    ours = protocols[-1]
    rows = sorted(rows, key=lambda row: bool(row.get("held back")))
    looks = {label: (colormaps["tab10"](index), MARKERS[index % len(MARKERS)]) for index, label in enumerate(protocols)}

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for position, row in enumerate(rows):
            for label, (colour, marker) in looks.items():
                look: Row = {"color": colour, "marker": marker, "ms": 8 if label == ours else 6, "alpha": 0.85}
                axes.plot(row[label] / row[ours], position, ls="", label=label if position == 0 else None, **look)
        axes.axvline(1.0, color=looks[ours][0], linewidth=1.0)
        axes.set_xscale("log")
        label_decimally(axes.xaxis)
        axes.set_yticks(range(len(rows)), [_place_name(row) for row in rows])
        axes.invert_yaxis()
        axes.grid(axis="x", which="both", alpha=0.3)
        axes.set_xlabel(f"time to the target, relative to {ours}")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return render(draw, WIDTH_INCHES, 1.6 + 0.26 * len(rows), "png")


def _place_name(row: Row) -> str:
    """What a row of the frontier is called: its usual values go without saying."""
    unusual = [f"{row['batch']} mini-batch"] if row.get("batch", "small") != "small" else []
    unusual += [row["optimizer"]] if row.get("optimizer", "adam") != "adam" else []
    name = ", ".join([row["task"], row["link"], f"{row['workers']} workers", *unusual])
    return f"{name} (held back)" if row.get("held back") else name


def _scaled(row: Row, percent: bool) -> float:
    return float(100 * row["error"] if percent else row["error"])


def _label_ends(figure: Any, ends: list[LineEnd], percent: bool) -> None:
    """Label each line at its end, in the place that covers the fewest points, lines and other labels."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # from here on, nothing moves
    covered = {axes: [_pixels(line) for line in axes.lines] for axes, *_ in ends}
    halo = [withStroke(linewidth=2.5, foreground="white")]
    for axes, row, text, colour in ends:
        at = (row["seconds"], _scaled(row, percent))
        label = axes.annotate(
            text, at, (0, 0), textcoords="offset points", color=colour, fontsize=8.5, path_effects=halo
        )
        taken = np.concatenate(covered[axes])
        places: list[tuple[float, int, Row]] = []
        for away, x, y in product((8, 13, 19, 26), (1, 0, -1), (0, 1, -1)):
            place: Row = {"ha": ("center", "left", "right")[x], "va": ("center", "bottom", "top")[y]}
            place["position"] = (away * x * 0.75 ** abs(y), away * y * 0.75 ** abs(x))
            label.set(**place)
            box = label.get_window_extent().padded(1)
            outside = sum(not axes.bbox.contains(*corner) for corner in box.corners())
            hit = ((taken > box.min) & (taken < box.max)).all(axis=1).sum()
            places.append((1000 * outside + hit + away / 10, len(places), place))
        label.set(**min(places)[2])
        box = label.get_window_extent()
        covered[axes].append(np.mgrid[box.x0 : box.x1 : 2, box.y0 : box.y1 : 2].reshape(2, -1).T)


def _pixels(line: Any) -> Any:
    """Where a plotted line and its markers are, as a point every few pixels."""
    points = line.get_transform().transform(line.get_xydata())
    radius = 6 if line.get_marker() == "o" else 0
    around = [points + np.array(offset) for offset in product((-radius, 0, radius), repeat=2)]
    steps = np.linspace(0, 1, 100)[:, None]
    joined = () if line.get_linestyle() == "None" else pairwise(points)
    return np.concatenate([*around, *(a + steps * (b - a) for a, b in joined)])
