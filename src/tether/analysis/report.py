"""`tether report`: runs side by side, in a terminal, as an HTML page and as a picture."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from tether.analysis.runs import Row, RunRecord, format_number
from tether.analysis.speedup import SPEEDUP_NOTE, fits, speedup_grid
from tether.errors import UsageError, missing_extra

if TYPE_CHECKING:
    from tether.analysis.plots import RunStyle, Section

#: up to this many runs always stand side by side
COLUMNS_MAX = 5


def table(runs: Sequence[RunRecord]) -> TerminalTable:
    """The runs as a table for a terminal."""
    return TerminalTable(_heading(runs), _summary(runs), _remarks(runs))


def speedups(runs: Sequence[RunRecord]) -> Group | None:
    """The speedups for a terminal, as a table and an explanation, if there are runs to compare."""
    found = fits(runs)
    return Group(TerminalTable("Speedup", speedup_grid(found)), Text(SPEEDUP_NOTE)) if found else None


@dataclass(frozen=True)
class TerminalTable:
    """Headings and rows, laid out for the width of the terminal.

    Runs stand side by side, as columns; those that do not fit follow in further tables. More than `COLUMNS_MAX` runs
    stand one below the other instead, as rows of one table, if the terminal is wide enough for it.
    """

    title: str
    #: the headings, then a row for each run
    grid: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def fits_in(candidate: Table) -> bool:
            wanted = console.measure(candidate, options=options.update(max_width=sys.maxsize)).maximum
            return wanted <= options.max_width

        headings, *rows = self.grid
        title, tables = self.title, list[Table]()
        if len(rows) > COLUMNS_MAX and fits_in(below := _rich_table(title, self.grid)):
            tables, rows = [below], []
        while rows:
            counts = range(len(rows), 1, -1)
            side_by_side = ((count, _rich_table(title, _transposed([headings, *rows[:count]]))) for count in counts)
            alone = 1, _rich_table(title, _transposed([headings, rows[0]]))
            count, found = next((each for each in side_by_side if fits_in(each[1])), alone)
            tables.append(found)
            title, rows = "", rows[count:]
        if self.remarks:
            tables[-1].caption, tables[-1].caption_justify = Text("\n".join(self.remarks)), "left"
        yield from tables


def _transposed(grid: Sequence[Sequence[str]]) -> list[list[str]]:
    return [list(column) for column in zip(*grid, strict=True)]


def _rich_table(title: str, grid: Sequence[Sequence[str]]) -> Table:
    result = Table(box=SIMPLE_HEAD, title=Text(title) if title else None, title_style="bold", title_justify="left")
    for index, heading in enumerate(grid[0]):  # always Text, not str: brackets in a name are not markup
        result.add_column(Text(heading), justify="right" if index else "left", overflow="fold")
    for row in grid[1:]:
        result.add_row(*map(Text, row))
    return result


def check_writable(folder: Path) -> None:
    """Refuse a folder for results, which need not exist yet, if files cannot be written to it."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder with --to") from None


def write_report(runs: Sequence[RunRecord], directory: Path, note: str = "") -> tuple[Path, Path]:
    """Write report.html, which loads no other file, and report.png into `directory`; return their paths.

    `note` says at the top of the page what it shows.
    """
    if not runs:
        raise UsageError("a report needs at least one run: name one or more run directories")
    check_writable(directory)
    try:
        from tether.analysis import plots
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    styles = plots.style_runs(runs)
    sections = plots.sections(styles)
    directory.mkdir(parents=True, exist_ok=True)
    page, picture = directory / "report.html", directory / "report.png"
    page.write_text(_page(styles, sections, note), encoding="utf-8")
    picture.write_bytes(plots.png(_heading(runs), sections))
    return page, picture


def _heading(runs: Sequence[RunRecord]) -> str:
    tasks = ", ".join(dict.fromkeys(run.config["task"]["name"] for run in runs))
    return f"{tasks}: {len(runs)} runs" if len(runs) > 1 else tasks


def _summary(runs: Sequence[RunRecord]) -> list[list[str]]:
    """The headings, then a row for each run."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.figures["metrics"]))
    started = any("startup_seconds" in run.figures for run in runs)
    compressed = any("compression" in run.figures for run in runs)
    return [list(_summary_row(runs[0], metrics, started, compressed))] + [
        list(_summary_row(run, metrics, started, compressed).values()) for run in runs
    ]


def _summary_row(run: RunRecord, metrics: Sequence[str], started: bool, compressed: bool) -> dict[str, str]:
    """The cells of a run by heading. If the start-up of some run is known, it has a column beside that of training."""
    figures, config = run.figures, run.config
    compression: Row = figures.get("compression", {})
    return {
        "run": run.name,
        "protocol": config["protocol"]["name"],
        "runtime": config["runtime"]["name"],
        "workers": str(config["workers"]),
        **({"start-up": _format_seconds(figures.get("startup_seconds"), False)} if started else {}),
        "training" if started else "time": _format_seconds(figures["seconds"], run.virtual),
        "samples/s": format_number(figures["samples_per_second"]),
        "utilization": format_number(figures["utilization"]["mean"], ".1%"),
        "overlap": format_number(figures["overlap"], ".1%"),
        "MB sent": format_number(figures["bytes_sent"] / 1e6),
        **({"compressed to": format_number(compression.get("share"), ".1%")} if compressed else {}),
        **{name: format_number(figures["metrics"].get(name)) for name in metrics},
    }


def _format_seconds(seconds: float | None, virtual: bool) -> str:
    return "-" if seconds is None else f"{format_number(seconds)} {'virtual s' if virtual else 's'}"


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
        if "last_part" in run.figures and run.figures["last_part"]["samples"] != run.figures["samples"]:
            remarks.append(f"{run.name}: samples/s, utilization, overlap and MB sent are those of its last part.")
        remarks += [f"{run.name}: {note}" for note in run.notes]
    return remarks


def _page(styles: Sequence[RunStyle], sections: Sequence[Section], note: str) -> str:
    runs = [style.run for style in styles]
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in _remarks(runs))
    parts = [
        f"<p>{escape(note)}</p>" if note else "",
        f"<h2>Summary</h2>{_html_table(_summary(runs), styles)}",
        f'<ul class="remarks">{remarks}</ul>' if remarks else "",
    ]
    for section in sections:
        parts.append(f"<h2>{section.title}</h2><p>{section.about}</p>")
        if section.grid:
            parts.append(_html_table(section.grid, section.grid_styles))
        parts.append('<div class="cards">')
        for title, svg in section.svgs():
            # An image, not inline SVG: the identifiers inside several SVGs of one document would collide.
            image = f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
            parts.append(f"<figure><figcaption>{escape(title)}</figcaption>{image}</figure>")
        parts.append("</div>")
    parts.append("<h2>Configuration</h2>")
    for style in styles:
        config = escape(json.dumps(style.run.config, indent=2))
        summary = f"{_swatch(style)}{escape(str(style.run.path))}"
        parts.append(f"<details><summary>{summary}</summary><pre>{config}</pre></details>")
    page = Template(files("tether.analysis").joinpath("report.html").read_text("utf-8"))
    return page.substitute(heading=escape(_heading(runs)), body="\n".join(parts))


def _html_table(grid: Sequence[Sequence[str]], styles: Sequence[RunStyle]) -> str:
    """Headings and rows; each row has the colour of its run."""
    headings, *rows = grid
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th>{_swatch(style)}{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for style, (name, *cells) in zip(styles, rows, strict=True)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _swatch(style: RunStyle) -> str:
    return f'<span class="swatch" style="background:{style.colour}"></span>'
