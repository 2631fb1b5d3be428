"""`tether study` and `tether tune`: many runs over a grid of settings."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from tether import tasks
from tether.cli.build import given, protocol_class, runtime, split_settings
from tether.cli.options import (
    DataOption,
    EpochsOption,
    JsonOption,
    LatencyOption,
    LinkOption,
    ModelBytesOption,
    SeedOption,
    SetOption,
    StepSecondsOption,
    TaskArgument,
    WorkersOption,
)
from tether.cli.output import out
from tether.core import settings
from tether.errors import UsageError
from tether.protocols import Server
from tether.sweeps import study as studies
from tether.sweeps import tune as searches


def study(
    task: TaskArgument,
    mu: Annotated[str, typer.Option(help="The mini-batch sizes of a worker.")] = "4,8,16,32,64,128",
    workers: Annotated[
        str, typer.Option("--lambda", help="The numbers of workers (lambda learners in the Rudra paper).")
    ] = "1,2,4,10,18,30",
    protocol: Annotated[
        str,
        typer.Option("--protocol", "-p", help="The protocols: any of hard, lambda-soft and N-soft, such as 1-soft."),
    ] = "hard,1-soft,lambda-soft",
    epochs: EpochsOption = None,
    link: Annotated[str, typer.Option(help="The bandwidth of every network interface.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="The latency of the network.")] = "0.2ms",
    step_seconds: Annotated[
        str | None,
        typer.Option(
            help="The seconds that a gradient takes: 0.05, or 4=0.01,128=0.05 by mini-batch size; by default measured."
        ),
    ] = None,
    model_bytes: Annotated[
        str | None, typer.Option(help="Price messages as for a model of this size; by default, of the task's own size.")
    ] = None,
    data: DataOption = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Set an option of protocol server or of the task; may be repeated."
        ),
    ] = None,
    seed: SeedOption = 0,
    reference_batch: Annotated[
        int | None,
        typer.Option(help="The mini-batch size that the learning rate was chosen for; by default the task's own."),
    ] = None,
    to: Annotated[
        Path, typer.Option(help="The folder for results and the picture. Finished runs in it are not repeated.")
    ] = Path("study"),
    as_json: JsonOption = False,
) -> None:
    """Simulate how error and time depend on mini-batch size, number of workers and protocol."""
    grid = (
        studies.parse_counts(mu, "--mu"),
        studies.parse_counts(workers, "--lambda"),
        studies.parse_protocols(protocol),
    )
    server_settings, task_settings = split_settings(set_ or [], Server, task)
    chosen = studies.Settings.make(
        task,
        data=str(data.absolute()) if data else None,
        task_settings=task_settings,
        server_settings=server_settings,
        epochs=epochs,
        reference_batch=reference_batch,
        seed=seed,
        link=link,
        latency=latency,
        step_seconds=step_seconds,
        model_bytes=model_bytes,
    )
    outcome = studies.study(chosen, *grid, to)
    if as_json:
        print(json.dumps(outcome))
        return
    out.print(studies.table(outcome))
    out.print(outcome["recommendation"], highlight=False, markup=False)
    out.print((to / "study.png").absolute(), highlight=False)


def tune(
    task: TaskArgument,
    alpha: Annotated[
        str, typer.Option(help="The values to try: a range such as 0.001..0.5, or a list such as 0.01,0.05,0.1.")
    ],
    protocol: Annotated[
        str,
        typer.Option(
            "--protocol", "-p", help=f"The protocol whose alpha is searched: {' or '.join(searches.tunable())}."
        ),
    ] = "elastic",
    points: Annotated[int, typer.Option(help="The number of values in a range, at equal ratios.")] = 8,
    share: Annotated[
        float,
        typer.Option(help="The share of the training data to use, drawn at random. Use more of a small data set."),
    ] = 0.1,
    tolerance: Annotated[
        float, typer.Option(help="How much worse than the best a good value may be, as a share of the best.")
    ] = searches.TOLERANCE,
    on: Annotated[str, typer.Option(help="The runtime: local or sim.")] = "sim",
    workers: WorkersOption = None,
    epochs: EpochsOption = None,
    set_: SetOption = None,
    seed: SeedOption = 0,
    data: DataOption = None,
    link: LinkOption = None,
    latency: LatencyOption = None,
    step_seconds: StepSecondsOption = None,
    model_bytes: ModelBytesOption = None,
    to: Annotated[
        Path,
        typer.Option(
            "--to", "--run-dir", help="The folder for results and the picture. Finished runs in it are not repeated."
        ),
    ] = Path("tune"),
    as_json: JsonOption = False,
) -> None:
    """Search the best alpha of a protocol, and the range of good values, on a small part of the data."""
    cls = protocol_class(protocol)
    searches.check_tunable(cls)
    alphas = searches.parse_alphas(alpha, points)
    protocol_settings, task_settings = split_settings(set_ or [], cls, task)
    if "alpha" in protocol_settings:
        raise UsageError("--set alpha: a search sets alpha itself; use --alpha")
    options = cls(**settings.arguments(cls, f"protocol {protocol}", protocol_settings))
    only_sim = given(link=link, latency=latency, step_seconds=step_seconds, model_bytes=model_bytes)
    place = runtime(on, str(workers) if workers is not None else None, None, options, only_sim, {})
    found = searches.tune(
        tasks.load(task, data=data, settings=task_settings),
        options,
        place,
        alphas=alphas,
        share=share,
        epochs=epochs,
        seed=seed,
        tolerance=tolerance,
        to=to,
        task_spec={"spec": task, "data": data.absolute() if data else None, "settings": task_settings},
    )
    flags = given(protocol=protocol, on=on, workers=place.workers, **only_sim, data=data, seed=seed or None)
    words = ["tether", "train", task]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    for text in [*(set_ or []), f"alpha={found.best.alpha:g}"] if found.best else []:
        words += ["--set", text]
    command = shlex.join(words) if found.best else None
    picture = (to / "tune.png").absolute()
    if as_json:
        print(json.dumps({**found.figures, "command": command, "picture": str(picture)}))
        return
    out.print(found.table())
    out.print(found.recommendation, highlight=False, markup=False)
    if command:
        out.print(f"To train on all of the data:\n  {command}", highlight=False, markup=False)
    out.print(picture, highlight=False)
