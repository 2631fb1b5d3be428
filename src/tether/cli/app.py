"""The program `tether`: its commands, the module that has each, and how errors are shown.

A command's module is imported when the command is called.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module

import typer

from tether.cli.bench import app as benchmarks
from tether.cli.deferred import Group, defer
from tether.cli.output import err
from tether.errors import InternalError, TetherError, UsageError, own_faults

#: by name: the module that has the function of that name, and the line in `tether --help`
COMMANDS = {
    "train": ("train", "Train a task and print the result."),
    "resume": ("train", "Continue a run from its newest checkpoint."),
    "launch": ("launch", "Run a script of your own on several workers that stay tied to one joint model."),
    "worker": ("cluster", "Train on this machine, as a worker of a run that another machine started."),
    "keys": ("cluster", "Make a key for the machines of a cluster."),
    "top": ("top", "Watch a run in the terminal, on this machine or on a cluster."),
    "export": ("model", "Write the model of a run to one file, for use without Tether."),
    "classify": ("model", "Classify texts with a model that task text has trained."),
    "serve": ("serve", "Serve a page and an HTTP interface where people upload texts and get a classifier."),
    "replay": ("train", "Replay the events of a recorded run and check that the protocol does the same again."),
    "protocols": ("lists", "List the protocols: when to choose each, its options and their defaults."),
    "tasks": ("lists", "List the built-in tasks with their options and defaults."),
    "report": ("report", "Compare runs: print a table, write an HTML page and a PNG."),
    "study": ("sweeps", "Simulate how error and time depend on mini-batch size, number of workers and protocol."),
    "tune": ("sweeps", "Search the best alpha of a protocol on a small part of the data."),
    "swarm": ("testing", "Simulate many runs with random clusters and faults, and check every one."),
    "chaos": ("testing", "Kill, stop and starve real processes, and check that every run still finishes."),
    "doctor": ("doctor", "Check that this machine and its devices have what Tether needs."),
    "demo": ("demo", "Train in real processes, then compare protocols on a simulated slow network."),
}

app = typer.Typer(
    name="tether",
    help="Train one PyTorch model on many workers that stay tied to one joint model.",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _function(module: str, name: str) -> Callable[..., None]:
    function: Callable[..., None] = getattr(import_module(f"tether.cli.{module}"), name)
    return function


for _name, (_module, _line) in COMMANDS.items():
    defer(app, _name, _line, partial(_function, _module, _name))
for _group, _help, _commands in (
    (
        "caffe",
        "Inspect Caffe nets, test trained weights, and write files for Caffe.",
        {
            "summary": ("summary", "Show the layers of a net with their shapes, parameters and connections."),
            "score": ("score", "Test trained weights on the data of a net."),
            "snapshot": ("snapshot", "Write the newest checkpoint of a run as .caffemodel and .solverstate."),
        },
    ),
    (
        "data",
        "Convert data from and to LMDB.",
        {
            "to-lmdb": ("to_lmdb_command", "Write arrays of images and labels to an LMDB of Datum records."),
            "from-lmdb": ("from_lmdb_command", "Read an LMDB of Datum records into arrays."),
        },
    ),
):
    _typer = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False)
    for _name, (_target, _line) in _commands.items():
        defer(_typer, _name, _line, partial(_function, "caffe", _target))
    app.add_typer(_typer, name=_group, help=_help)
app.add_typer(
    benchmarks, name="bench", help="Run a benchmark; its results are ratios, which can be compared between machines."
)


def main() -> None:
    """Run the program. An error is shown in one line; only a fault of Tether itself has a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with own_faults():
            app()
    except UsageError as error:
        _fail(error, 2)
    except InternalError as error:
        cause = traceback.format_exception(error.__cause__) if error.__cause__ is not None else []
        err.print("".join([*cause, *getattr(error, "__notes__", [])]).rstrip(), highlight=False, markup=False)
        _fail(error, 1)
    except TetherError as error:
        _fail(error, 1)


def _fail(error: TetherError, status: int) -> None:
    err.print(f"tether: {error}", style="red", highlight=False, markup=False)
    sys.exit(status)


if __name__ == "__main__":
    main()
