"""`tether report`: reads run directories and shows them side by side: in a terminal, as a page and as a picture.

A directory is only ever read, so a run that is still going, or that was killed in the middle of a line, can be looked
at like any other.
"""

from __future__ import annotations

import base64
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tether.errors import UsageError, missing_extra
from tether.rundir import RunDirectory
from tether.trace import Meter

if TYPE_CHECKING:
    from tether.plots import Look, Section

#: as many runs fit beside each other into a terminal of 80 columns; a table of ten columns does not
RUNS_BESIDE_MAX = 5

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
            "staleness": {"histogram": {}},
            "metrics": self.evaluations[-1]["metrics"] if self.evaluations else {},
        }


def load_run(path: Path | str) -> RunRecord:
    """Reads a run directory."""
    directory = RunDirectory.open(Path(path))
    config = directory.read_config()
    if config.get("version") != 1:
        raise UsageError(f"{path} is a run of version {config.get('version')}, not 1: use the Tether that wrote it")
    rows: dict[str, list[Row]] = defaultdict(list)
    if directory.metrics.exists():
        for line in directory.metrics.read_bytes().splitlines():
            with suppress(ValueError):  # whoever is killed leaves a line that is cut off
                row = json.loads(line)
                rows[row["kind"]].append(row)
    # That processes start is no news once they have.
    notes = [row["text"] for row in rows["note"]]
    return RunRecord(directory.path, config, rows["progress"], rows["evaluation"], rows["record"], notes)


def table(runs: Sequence[RunRecord]) -> Table:
    """The runs as a table for a terminal: side by side, or one below the other if there are many."""
    grid = _summary(runs)
    if len(runs) <= RUNS_BESIDE_MAX:
        grid = [list(column) for column in zip(*grid, strict=True)]
    result = Table(box=SIMPLE_HEAD, title=Text(_heading(runs)), title_style="bold", title_justify="left")
    for index, heading in enumerate(grid[0]):  # Text and not str throughout: a name with brackets is no markup
        result.add_column(Text(heading), justify="right" if index else "left", overflow="fold")
    for row in grid[1:]:
        result.add_row(*map(Text, row))
    if remarks := _remarks(runs):
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
    swatches = [f'<span class="swatch" style="background:{look.colour}"></span>' for look in looks]
    headings, *rows = _summary(runs)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th>{swatch}{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for swatch, (name, *cells) in zip(swatches, rows, strict=True)
    )
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in _remarks(runs))
    parts = [
        f'<h2>Summary</h2><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>',
        f'<ul class="remarks">{remarks}</ul>' if remarks else "",
    ]
    for section in sections:
        parts.append(f'<h2>{section.title}</h2><p>{section.about}</p><div class="cards">')
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
