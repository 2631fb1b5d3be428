"""What benchmarks share: their report, their options, runs that leave nothing behind, and ratios."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from tether.api import run
from tether.execution.progress import make_progress
from tether.protocols import Options
from tether.runtimes.base import Runtime
from tether.task import Task

T = TypeVar("T")

Row = dict[str, Any]
#: what a benchmark has found: its name and settings, its `rows`, and the `ratios` that count
Report = dict[str, Any]

#: an interval longer than any run: no evaluations, or no checkpoints
NEVER = 1e9


# ---- options --------------------------------------------------------------------------------------------------------


def parse_list(kind: Callable[[str], T], example: str) -> Callable[[str], Sequence[T]]:
    """A parser of values that are separated by commas."""

    def parse(text: str) -> Sequence[T]:
        try:
            return tuple(kind(part) for part in text.split(",") if part.strip())
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not understood; write it like {example}") from None

    return parse


def list_text(values: Sequence[Any]) -> str:
    """The text that is parsed into these values; a pair is a file and a number."""
    return ",".join(f"{value[0]}:{value[1]:g}" if isinstance(value, tuple) else str(value) for value in values)


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError(text)
    return count


def _file_and_number(text: str) -> tuple[str, float]:
    file, _, number = text.rpartition(":")
    return file, float(number)


def counts(help: str) -> Any:
    """An option that is a list of whole numbers."""
    return typer.Option(help=help, parser=parse_list(_count, "1,4,16"), metavar="N,N,...")


def names(help: str, example: str) -> Any:
    """An option that is a list of names."""
    return typer.Option(help=help, parser=parse_list(str, example), metavar="NAME,...")


def sizes(help: str) -> Any:
    """An option that is a list of numbers."""
    return typer.Option(help=help, parser=parse_list(float, "7,30.5"), metavar="X,X,...")


def files(help: str) -> Any:
    """An option that is a list of files, each with a number."""
    return typer.Option(help=help, parser=parse_list(_file_and_number, "a.csv:2,b.csv:7.5"), metavar="FILE:X,...")


FashionData = Annotated[Path | None, typer.Option(help="The folder with the files of Fashion-MNIST; always needed.")]
Seeds = Annotated[
    int,
    typer.Option(min=1, help="Runs of each kind, each with a seed of its own. One is enough for a first look."),
]
Rounds = Annotated[
    int,
    typer.Option(min=1, help="How often everything is measured, in turns. Use fewer for a first look."),
]
Target = Annotated[
    float,
    typer.Option(help="The error to reach. A larger one, such as 0.2, is reached much sooner."),
]


# ---- runs -----------------------------------------------------------------------------------------------------------


def run_quietly(
    task: Task, protocol: Options, on: Runtime, *, run_dir: Path | None = None, **options: Any
) -> dict[str, Any]:
    """The figures of a run without a display, whose directory is temporary unless given.

    `options` are those of `tether.run`. Unless they say otherwise the model is evaluated only at the end.
    """
    options = {"evaluate_every": NEVER, "trace": False, **options}
    with tempfile.TemporaryDirectory() as directory:
        place = run_dir or Path(directory) / "run"
        return run(task, protocol, on, run_dir=place, progress=make_progress(quiet=True), **options).figures


def in_parallel(work: Callable[[T], Any], trials: Sequence[T], processes: int | None = None) -> Iterator[tuple[T, Any]]:
    """Every trial and its result, in the order in which they finish; by default one process for each core."""
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(work, trial): trial for trial in trials}
        for future in as_completed(futures):
            yield futures[future], future.result()


def ratios_in_turns(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio within each turn, so that what slows the machine down for a while cancels out."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ratios_in_turns(ours, theirs))
