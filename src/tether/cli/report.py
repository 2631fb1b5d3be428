"""`tether report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tether.analysis.report import check_writable, speedups, table, write_report
from tether.analysis.runs import load_run
from tether.cli.output import out


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    to: Annotated[Path, typer.Option(help="The folder to write the page and the picture to.")] = Path("report"),
) -> None:
    """Compare runs: print a table, write an HTML page and a PNG."""
    check_writable(to)
    loaded = [load_run(path) for path in runs]
    out.print(table(loaded))
    if (compared := speedups(loaded)) is not None:
        out.print(compared, soft_wrap=False)
    for path in write_report(loaded, to):
        out.print(path.absolute(), highlight=False)
