"""`tether report`: reads run directories and shows them side by side: in a terminal, as a page and as a picture.

A directory is only ever read, so a run that is still going, or that was killed in the middle of a line, can be looked
at like any other.
"""

from __future__ import annotations

import base64
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tether.errors import UsageError, missing_extra
from tether.rundir import RunDirectory
from tether.speedup import Fit, fits
from tether.trace import Meter

if TYPE_CHECKING:
    from tether.plots import Look, Section

#: as many runs fit beside each other into a terminal of 80 columns; a table of ten columns does not
RUNS_BESIDE_MAX = 5

#: what a reader must know about the speedups of a report
SPEEDUP = (
    "Time of one learner over time of several to the target: measured, and predicted as (N C + L) / ((tau C + S) M + "
    "L / workers), equation 8 of DeepSpark. The single run gives N steps of C seconds and L seconds of waiting for "
    "data; the other run gives M rounds of tau steps, between which a worker stood still for S seconds. Left out: "
    "workers that slow each other down on shared processors, starting, installing values, deaths. How many rounds a "
    "run will need, the model cannot tell."
)

Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One run as its directory tells it: run.json, and the rows of metrics.jsonl by their kind."""

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
        return f"{self.config['protocol']['name']} x{self.config['workers']} ({self.config['runtime']['name']})"

    @property
    def virtual(self) -> bool:
        """Whether the run's seconds are those of the simulator."""
        return bool(self.config["runtime"]["name"] == "sim")

    @cached_property
    def nodes(self) -> dict[str, Row]:
        """The latest progress of every node; the shorter names first, so that worker-2 comes before worker-10."""
        latest = {row["node"]: row for row in self.progress}
        return {node: latest[node] for node in sorted(latest, key=lambda node: (len(node), node))}

    @cached_property
    def workers(self) -> dict[str, Row]:
        """The nodes that train; a hub moves bytes but takes no samples."""
        return {node: row for node, row in self.nodes.items() if row["samples"]}

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The figures of its result; of a run that has none (yet), the same as far as its rows tell them."""
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
        """As in a result: what compression spared, if the run compresses."""
        if self.config["protocol"].get("compress", "none") == "none":
            return {}
        sent, saved = (sum(row[name] for row in self.nodes.values()) for name in ("bytes_sent", "bytes_saved"))
        return {"compression": {"bytes_saved": saved, "share": sent / max(1, sent + saved), "relative_error": None}}


def load_run(path: Path | str) -> RunRecord:
    """Reads a run directory."""
    directory = RunDirectory.open(Path(path))
    config, history = directory.read_config(), directory.history()
    progress, evaluations, records = (history.of(kind) for kind in ("progress", "evaluation", "record"))
    # That processes start is no news once they have.
    notes = [*directory.notes, *filter(None, [history.damage]), *(row["text"] for row in history.of("note"))]
    return RunRecord(directory.path, config, progress, evaluations, records, notes)


def table(runs: Sequence[RunRecord]) -> Table:
    """The runs as a table for a terminal: side by side, or one below the other if there are many."""
    return _beside(_heading(runs), _summary(runs), _remarks(runs))


def speedups(runs: Sequence[RunRecord]) -> Group | None:
    """The speedups for a terminal, a table and a few words, if there are runs to compare."""
    found = fits(runs)
    return Group(_beside("Speedup", speedup_grid(found)), Text(SPEEDUP)) if found else None


def speedup_grid(found: Sequence[Fit]) -> list[list[str]]:
    """The headings, then a row for each run that was compared with one learner."""
    headings = ["run", "workers", "target", "N", "C (s)", "L (s)", "tau", "S (s)", "M", "predicted", "measured"]
    return [headings] + [
        [
            fit.run.name,
            str(fit.workers),
            f"{fit.metric} {_number(fit.target)}",
            *map(_number, (fit.steps_alone, fit.step_seconds, fit.load_seconds)),
            *map(_number, (fit.tau, fit.exchange_seconds, fit.rounds)),
            _number(fit.predicted, ".2f"),
            _number(fit.measured, ".2f"),
        ]
        for fit in found
    ]


def _beside(title: str, grid: list[list[str]], remarks: Sequence[str] = ()) -> Table:
    """Headings and rows for a terminal; few rows stand side by side, as columns."""
    if len(grid) - 1 <= RUNS_BESIDE_MAX:
        grid = [list(column) for column in zip(*grid, strict=True)]
    result = Table(box=SIMPLE_HEAD, title=Text(title), title_style="bold", title_justify="left")
    for index, heading in enumerate(grid[0]):  # Text and not str throughout: a name with brackets is no markup
        result.add_column(Text(heading), justify="right" if index else "left", overflow="fold")
    for row in grid[1:]:
        result.add_row(*map(Text, row))
    if remarks:
        result.caption, result.caption_justify = Text("\n".join(remarks)), "left"
    return result


def write_report(runs: Sequence[RunRecord], directory: Path) -> tuple[Path, Path]:
    """Writes report.html, which needs nothing but itself, and report.png into `directory`; returns their paths."""
    if not runs:
        raise UsageError("a report needs at least one run: name one or more run directories")
    try:
        from tether import plots
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    looks = plots.looks(runs)
    sections = plots.sections(looks)
    directory.mkdir(parents=True, exist_ok=True)
    page, picture = directory / "report.html", directory / "report.png"
    page.write_text(_page(looks, sections), encoding="utf-8")
    picture.write_bytes(plots.png(_heading(runs), sections))
    return page, picture


def _heading(runs: Sequence[RunRecord]) -> str:
    tasks = ", ".join(dict.fromkeys(run.config["task"]["name"] for run in runs))
    return f"{tasks}: {len(runs)} runs" if len(runs) > 1 else tasks


def _summary(runs: Sequence[RunRecord]) -> list[list[str]]:
    """The headings, then a row for each run."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.figures["metrics"]))
    headings = ["run", "protocol", "runtime", "workers", "time", "samples/s", "utilization", "overlap", "MB sent"]
    if compressed := any("compression" in run.figures for run in runs):
        headings.append("compressed to")
    grid = [[*headings, *metrics]]
    for run in runs:
        figures, config = run.figures, run.config
        grid.append(
            [
                run.name,
                config["protocol"]["name"],
                config["runtime"]["name"],
                str(config["workers"]),
                f"{_number(figures['seconds'])} {'virtual s' if run.virtual else 's'}",
                _number(figures["samples_per_second"]),
                _number(figures["utilization"]["mean"], ".1%"),
                _number(figures["overlap"], ".1%"),
                _number(figures["bytes_sent"] / 1e6),
                *([_number(figures.get("compression", {}).get("share"), ".1%")] if compressed else []),
                *(_number(figures["metrics"].get(name)) for name in metrics),
            ]
        )
    return grid


def _number(value: float | None, form: str = "") -> str:
    """For people: four significant digits, thousands apart, a dash for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return format(value, form or (",.0f" if abs(value) >= 1000 else ".4g"))


def _remarks(runs: Sequence[RunRecord]) -> list[str]:
    """What a reader must know before comparing these runs."""
    remarks = []
    if len({run.virtual for run in runs}) == 2:
        remarks.append(
            "Some of these runs were simulated: their seconds are virtual, modelled for the simulated machines, and "
            "those of the other runs are real. Compare curves over time only within one kind."
        )
    for run in runs:
        status, reason = run.config["status"], run.config["error"] or run.config["reason"]
        if status != "finished":
            remarks.append(f"{run.name}: {status}{f' ({reason})' if reason else ''}; the figures are those so far.")
        remarks += [f"{run.name}: {note}" for note in run.notes]
    return remarks


def _page(looks: Sequence[Look], sections: Sequence[Section]) -> str:
    runs = [look.run for look in looks]
    swatches = [_swatch(look) for look in looks]
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in _remarks(runs))
    parts = [
        f"<h2>Summary</h2>{_html(_summary(runs), looks)}",
        f'<ul class="remarks">{remarks}</ul>' if remarks else "",
    ]
    for section in sections:
        parts.append(f"<h2>{section.title}</h2><p>{section.about}</p>")
        if section.grid:
            parts.append(_html(section.grid, section.looks))
        parts.append('<div class="cards">')
        for title, svg in section.svgs():
            # An image and not inline SVG: the identifiers inside several SVGs of one document would collide.
            image = f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
            parts.append(f"<figure><figcaption>{escape(title)}</figcaption>{image}</figure>")
        parts.append("</div>")
    parts.append("<h2>Configuration</h2>")
    for run, swatch in zip(runs, swatches, strict=True):
        told = escape(json.dumps(run.config, indent=2))
        parts.append(f"<details><summary>{swatch}{escape(str(run.path))}</summary><pre>{told}</pre></details>")
    page = Template(files("tether").joinpath("report.html").read_text("utf-8"))
    return page.substitute(heading=escape(_heading(runs)), body="\n".join(parts))


def _html(grid: Sequence[Sequence[str]], looks: Sequence[Look]) -> str:
    """Headings and rows, each with the colour of its run."""
    headings, *rows = grid
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th>{_swatch(look)}{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for look, (name, *cells) in zip(looks, rows, strict=True)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _swatch(look: Look) -> str:
    return f'<span class="swatch" style="background:{look.colour}"></span>'
