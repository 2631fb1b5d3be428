"""`tether bench`: every benchmark is a command whose options are the parameters of its function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import typer

from tether.cli.deferred import Group, defer
from tether.cli.options import JsonOption
from tether.cli.output import show_report

#: by name: the line in `tether bench --help`; `tether.bench.NAME` has the function of that name
BENCHMARKS = {
    "accuracy": "Accuracy with more workers on one machine (GaDei).",
    "allreduce": "A round of the grid against an allreduce by gloo, in processes or between hosts.",
    "checkpoint": "How much checkpoints slow down training.",
    "cycles": "Errors after equal samples when exchanges are slow, in the simulator.",
    "fidelity": "Cycle times between hosts against those of the simulator, for every protocol.",
    "frontier": "Time to a target for every protocol, over networks, workers and tasks, in the simulator.",
    "grid": "How the grid scales, uses the network and learns, in the simulator.",
    "loops": "A script under 'tether launch' against the script alone.",
    "mpca": "MPCA SGD without each of its parts, in the simulator.",
    "network": "Time to a target for every protocol, DDP and DiLoCo between hosts with slow links.",
    "overhead": "One worker in Tether against a plain PyTorch loop.",
    "rudra": "Staleness and overlap of the parameter server, in the simulator (Rudra).",
    "scaleup": "Two workers on one machine against DDP, Hogwild and others (GaDei).",
    "scaling": "Time to a target error for mpca with 1 to 64 workers, in the simulator.",
    "service": "How fast `tether serve` answers under load while it trains, and what is lost when it is killed.",
    "sim": "Events per second of the simulator.",
    "spark": "The time of exchanges on a Spark cluster.",
    "table2": "Time to a target error for every protocol, in the simulator (MPCA SGD).",
    "text": "Accuracy and training time of task text against TF-IDF with a linear SVM.",
    "transfer": "Messages over loopback against a raw socket, and their processor time.",
    "utilization": "The share of their time that workers in processes compute under mpca.",
}


class Benchmarks(Group):
    """The group `tether bench`."""

    kind = "benchmark"


def _function(name: str) -> Callable[..., None]:
    """A benchmark as the function of a command: with the option --json, and printing its report."""
    from tether.bench.common import list_text

    measure = getattr(import_module(f"tether.bench.{name}"), name)

    def command(as_json: bool, **options: Any) -> None:
        show_report(measure(**options), as_json)

    signature = inspect.signature(measure, eval_str=True)
    json_option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)
    parameters = [
        # a list is parsed from a text, also where it is the default
        parameter.replace(default=list_text(parameter.default)) if isinstance(parameter.default, tuple) else parameter
        for parameter in (*signature.parameters.values(), json_option)
    ]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = measure.__doc__
    return command


app = typer.Typer(cls=Benchmarks, no_args_is_help=True, pretty_exceptions_enable=False)
for _name, _line in BENCHMARKS.items():
    defer(app, _name, _line, partial(_function, _name))
