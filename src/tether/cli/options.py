"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help="A built-in task, file.py:Class, or solver.prototxt.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
RunOrUrlArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or the URL of its checkpoints.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON object on standard output, for other programs.")
]
DataOption = Annotated[Path | None, typer.Option("--data", help="The task's data: a folder or file.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", "-n", help="How many workers.")]
MasterOption = Annotated[
    str | None,
    typer.Option(help="spark: the cluster, such as spark://HOST:7077; a small one on this machine unless given."),
]
AddressOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="ray: the cluster; the one of this machine, or a new one, unless given."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Where workers compute: cuda:0, cuda for all such devices in turns, cpu or auto [auto]."),
]
EpochsOption = Annotated[
    float | None,
    typer.Option(help="Passes over the data, by all workers together; the task's own number unless given."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set an option of the protocol or of the task; may be repeated."),
]
SeedOption = Annotated[int, typer.Option(help="All random numbers follow from it. Change it to repeat with others.")]
LinkOption = Annotated[str | None, typer.Option(help="sim: bandwidth of every network interface [1gbit].")]
LatencyOption = Annotated[str | None, typer.Option(help="sim: latency of the network [0.2ms].")]
StepSecondsOption = Annotated[str | None, typer.Option(help="sim: how long a gradient takes [0.1].")]
ModelBytesOption = Annotated[
    str | None, typer.Option(help="sim: let messages take as long as those of a model of this size.")
]
StepsOption = Annotated[int | None, typer.Option(help="Optimizer steps per worker, instead of epochs.")]
SecondsOption = Annotated[float | None, typer.Option(help="End after this many seconds; sim: virtual seconds.")]
UntilOption = Annotated[str | None, typer.Option(help="End when a metric is reached, such as error<0.05.")]
PatienceOption = Annotated[
    int | None,
    typer.Option(help="End after this many evaluations without a better error, with the best model seen."),
]
LogOption = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="NAME", help="Also write metrics as csv, tensorboard or wandb; may be repeated."),
]
