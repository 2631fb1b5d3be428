"""`tether launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tether import protocols
from tether.cli.build import protocol_class
from tether.cli.options import JsonOption
from tether.cli.output import err, show_result
from tether.core import settings
from tether.errors import Interrupted, UsageError
from tether.loops.launch import launch as launch_script
from tether.protocols import Options


def launch(
    script: Annotated[
        str | None, typer.Argument(metavar="[SCRIPT", help="A Python file that calls tether.join(model, optimizer).")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS...]", help="The script's own.")] = None,
    is_module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="How many processes run the script [2].")
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option("--protocol", "-p", help="How they agree; what the script gives to join unless given, or tide."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set an option of the protocol; may be repeated."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue this run, by default with its own script."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="The run directory; by default a new one in runs/.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The seed of the order in which tether.sampler draws samples [0].")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of torch in each process; by default an equal share of the cores.")
    ] = None,
    checkpoint_seconds: Annotated[
        float | None,
        typer.Option(help="Seconds between checkpoints [30]. Use fewer to lose less work when the machine fails."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,...",
            help="Train on these machines by ssh, or by the name slurm on those of this job. Instead of a script, give "
            "a task and options of 'tether train'.",
        ),
    ] = None,
    hung_seconds: Annotated[
        float | None,
        typer.Option(
            help="Kill a process that goes without a step for so long, and start its script again; never unless given. "
            "Allow for what your loop does between steps, such as evaluation."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a script of your own on several workers that stay tied to one joint model."""
    if hosts is not None:
        _train_on(hosts, script, arguments or [])
        return
    try:
        result = launch_script(
            script,
            tuple(arguments or ()),
            is_module=is_module,
            workers=workers,
            protocol=_protocol(protocol, set_ or []),
            run_dir=run_dir,
            resume=resume,
            seed=seed,
            checkpoint_seconds=checkpoint_seconds,
            hung_seconds=hung_seconds,
            threads=threads,
        )
    except Interrupted as interrupted:
        err.print(f"tether: {interrupted}", highlight=False, markup=False)
        raise typer.Exit(130) from None
    if as_json:
        show_result(result, as_json)
    else:
        figures: dict[str, Any] = result.figures
        workers_in_words = "1 worker" if figures["workers"] == 1 else f"{figures['workers']} workers"
        err.print(
            f"tether: {figures['reason']} after {figures['samples']} steps of {workers_in_words}; the run is in "
            f"{result.directory}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _train_on(hosts: str, task: str | None, arguments: list[str]) -> None:
    """`tether train` on hosts."""
    from tether.cli.app import app  # which imports this module when `tether launch` is called

    if task is None or task.endswith(".py"):
        raise UsageError(
            "an own loop runs on one machine; for several, write a tether.Task and name it: tether launch --hosts "
            "a,b,c my_task.py:MyTask"
        )
    app(["train", task, "--hosts", hosts, *arguments])


#: everything after the script belongs to the script
launch.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]


def _protocol(name: str | None, texts: list[str]) -> Options | None:
    if name is None:
        if texts:
            raise UsageError("--set sets an option of a protocol: name it with --protocol")
        return None
    cls = protocol_class(name)
    given = {}
    for text in texts:
        option, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text!r} is not understood; write it like --set tau=10")
        given[option.strip()] = value
    return protocols.make({"name": name, **settings.arguments(cls, f"protocol {name}", given)})
