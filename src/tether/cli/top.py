"""`tether top`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live

from tether.analysis.live import MetricsTail, RunView
from tether.cli.output import out
from tether.errors import UsageError
from tether.runtimes.cluster import parse_address, read_key, watch

#: how often the metrics of a run on this machine are read
READ_SECONDS = 0.5


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="A run directory, or HOST:PORT of a run on a cluster; by default the newest in runs/."
        ),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="The file with the key of the cluster, for HOST:PORT.")
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print the state once and exit. Without a terminal this is the default."),
    ] = False,
) -> None:
    """Watch a run: its workers, rates, losses, bytes, joins and deaths. It changes nothing."""
    once = once or not out.is_terminal
    view = RunView(run or str(_newest()))
    with Live(view, console=out, refresh_per_second=2, auto_refresh=not once, transient=once) as live:
        for rows in _rows(run, key):
            view.take(rows)
            if once and rows:
                break
            live.refresh()
    if once:
        out.print(view)


def _rows(run: str | None, key: Path | None) -> Iterator[list[dict[str, Any]]]:
    if run is not None and not Path(run).exists() and ":" in run:
        if key is None:
            raise UsageError(f"{run} can be watched only with the key of its cluster: add --key FILE")
        yield from watch(parse_address(run), read_key(key))
        return
    tail = MetricsTail(Path(run) if run is not None else _newest())
    while True:
        over = tail.is_over
        yield tail.new()
        if over:
            return
        time.sleep(READ_SECONDS)


def _newest() -> Path:
    found = [path for path in Path("runs").glob("*") if (path / "run.json").is_file()]
    if not found:
        raise UsageError("there is no run below runs/: name a run directory, or HOST:PORT")
    return max(found, key=lambda path: path.stat().st_mtime)
