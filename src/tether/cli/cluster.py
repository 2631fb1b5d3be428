"""`tether worker` and `tether keys`."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tether import tasks
from tether.cli.options import DataOption
from tether.cli.output import err
from tether.errors import UsageError
from tether.execution import portable
from tether.runtimes.cluster import make_key, parse_address, parse_key, read_key, run_worker
from tether.runtimes.hosts import REFUSED_STATUS
from tether.task import Task

KeyOption = Annotated[
    Path,
    typer.Option("--key", help="The file with the key, which 'tether keys' has made; - reads it from standard input."),
]


def worker(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="The address at which 'tether train --on cluster' listens.")
    ],
    key: KeyOption,
    data: DataOption = None,
    accept_code: Annotated[
        bool,
        typer.Option(
            "--accept-code",
            help="Also run code that the driver sends. Use it for tasks that are defined in a notebook.",
        ),
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait until the driver listens.")] = 60.0,
    stay: Annotated[
        bool, typer.Option("--stay", help="Join again after a lost connection, and join the next run when one ends.")
    ] = False,
) -> None:
    """Train on this machine, as a worker of a run that another machine started, until that run ends."""
    host = parse_address(address)
    from_input = str(key) == "-"
    if from_input and stay:
        raise UsageError("--stay starts worker after worker, each of which reads the key: give --key FILE")
    keys = parse_key(sys.stdin.readline(), "standard input") if from_input else read_key(key)
    if stay:
        _stay([address, "--key", str(key), *(["--data", str(data)] if data else []), "--wait", "1e9"], accept_code)

    def load(spec: str, path: str, settings: dict[str, str]) -> Task:
        return tasks.load(spec, data=data or (Path(path) if path else None), settings=settings)

    name = run_worker(
        host,
        keys,
        lambda values, tensors: portable.unpack(values, tensors, _file_of, load),
        accept_code=accept_code,
        wait_seconds=min(wait, 1e9) if not math.isnan(wait) else 0.0,
    )
    err.print(f"tether: {name}: the run is over", highlight=False, markup=False)


def keys(path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write the key to.")]) -> None:
    """Make a key for the machines of a cluster."""
    make_key(path)
    err.print(
        f"tether: {path} is the key. Copy it to every machine. Anyone who has it can join runs and read their traffic.",
        highlight=False,
    )


def _file_of(spec: str) -> Path:
    """The file that has a task: one that comes with Tether, or one below the directory in which the worker runs."""
    if spec in tasks.known():
        return Path(inspect.getfile(tasks.known()[spec]))
    path = Path(spec.rpartition(":")[0]).resolve()
    if not path.is_relative_to(Path.cwd()):
        raise UsageError(
            f"the driver names the task {spec}, which is not below {Path.cwd()}: start the worker above it"
        )
    if not path.is_file():
        raise UsageError(f"the driver names the task {spec}, and there is no file {path} on this machine")
    return path


def _stay(arguments: list[str], accept_code: bool) -> None:
    """Run one worker after the other, each in a process of its own, until one is refused."""
    flags = ["--accept-code"] if accept_code else []
    while True:
        with subprocess.Popen([sys.executable, "-m", "tether", "worker", *arguments, *flags]) as child:
            try:
                status = child.wait()
            except KeyboardInterrupt:
                child.terminate()
                child.wait()
                raise typer.Exit(0) from None
        if status == REFUSED_STATUS:
            raise typer.Exit(status)
        time.sleep(1.0)
