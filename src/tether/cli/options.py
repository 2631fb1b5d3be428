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
DataOption = Annotated[Path | None, typer.Option("--data", help="The folder or file with the task's data.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", "-n", help="The number of workers.")]
MasterOption = Annotated[
    str | None,
    typer.Option(
        help="spark: the URL of the cluster, such as spark://HOST:7077; by default a small one on this machine."
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="ray: the address of the cluster; by default the one on this machine, or a new one."
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="The device of each worker: cuda:0, cuda (all such devices in turn), cpu, or auto, which is the default."
    ),
]
EpochsOption = Annotated[
    float | None,
    typer.Option(help="Passes over the data, by all workers together; by default the task's own number."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set an option of the protocol or of the task; may be repeated."),
]
SeedOption = Annotated[
    int, typer.Option(help="The seed of all random numbers. Change it to repeat an experiment with other draws.")
]
LinkOption = Annotated[str | None, typer.Option(help="sim: the bandwidth of every network interface [1gbit].")]
LatencyOption = Annotated[str | None, typer.Option(help="sim: the latency of the network [0.2ms].")]
StepSecondsOption = Annotated[str | None, typer.Option(help="sim: the seconds that a gradient takes [0.1].")]
ModelBytesOption = Annotated[
    str | None,
    typer.Option(help="sim: price messages as for a model of this size; by default, of the task's own size."),
]
StepsOption = Annotated[int | None, typer.Option(help="Optimizer steps of each worker; use it instead of --epochs.")]
SecondsOption = Annotated[float | None, typer.Option(help="Stop after this many seconds; sim: virtual seconds.")]
UntilOption = Annotated[str | None, typer.Option(help="Stop when a metric reaches a value, such as error<0.05.")]
PatienceOption = Annotated[
    int | None,
    typer.Option(help="Stop after this many evaluations without improvement, and keep the best model."),
]
LogOption = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="NAME", help="Also write metrics as csv, tensorboard or wandb; may be repeated."),
]
