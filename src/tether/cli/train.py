"""`tether train`, `tether resume` and `tether replay`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from tether import api, protocols, tasks
from tether.caffe import CaffeTask
from tether.cli import slurm
from tether.cli.build import given, protocol_class, runtime, split_settings
from tether.cli.cluster import worker
from tether.cli.options import (
    AddressOption,
    DeviceOption,
    EpochsOption,
    JsonOption,
    LatencyOption,
    LinkOption,
    LogOption,
    MasterOption,
    ModelBytesOption,
    PatienceOption,
    RunArgument,
    RunOrUrlArgument,
    SecondsOption,
    SetOption,
    StepSecondsOption,
    StepsOption,
    TaskArgument,
    UntilOption,
    WorkersOption,
)
from tether.cli.output import err, out, show_result
from tether.core import settings
from tether.errors import Interrupted, UsageError
from tether.execution.callbacks import make_loggers
from tether.execution.checkpoint import SUFFIXES
from tether.runtimes.hosts import HERE
from tether.runtimes.sim.faults import Faults

#: how long the processes of a job that are workers wait for the one that is the driver
JOB_START_SECONDS = 300.0


def train(
    task: TaskArgument,
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol", "-p", help="How workers agree, see 'tether protocols'; by default the task's own choice."
        ),
    ] = None,
    on: Annotated[str, typer.Option(help="Where to run: local, sim, spark, ray or cluster.")] = "local",
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers", "-n", metavar="N", help="The number of workers; on a cluster, MIN:MAX lets more join later."
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="cluster: the address at which workers reach this machine.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="cluster: the file with the key, from 'tether keys'.")] = None,
    no_encryption: Annotated[
        bool,
        typer.Option("--no-encryption", help="cluster: do not encrypt. Use it for speed, on a network that you trust."),
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,...",
            help="cluster: start a worker on each of these by ssh, or by the name slurm on the nodes of this job.",
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="cluster: what runs a command on a host, such as 'ssh -p 2222'."),
    ] = None,
    master: MasterOption = None,
    address: AddressOption = None,
    device: DeviceOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    until: UntilOption = None,
    seconds: SecondsOption = None,
    patience: PatienceOption = None,
    warmup: Annotated[
        str | None,
        typer.Option(
            help="Begin with this protocol. Use it, for example with server, if training is unstable at first."
        ),
    ] = None,
    warmup_epochs: Annotated[float, typer.Option(help="The length of the warm-up in epochs.")] = 1.0,
    set_: SetOption = None,
    seed: Annotated[
        int | None, typer.Option(help="The seed of all random numbers [0, or that of a Caffe solver].")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="The folder or file with the task's data; for a Caffe solver NAME=PATH, may be repeated.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Begin with the weights in this .safetensors or .pt file; a Caffe solver also begins with a "
            ".caffemodel, or continues from a .solverstate."
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="The run directory; by default a new one in runs/.")
    ] = None,
    as_json: JsonOption = False,
    log: LogOption = None,
    record: Annotated[bool, typer.Option("--record", help="Record every event, for 'tether replay'.")] = False,
    evaluate_every: Annotated[
        float | None, typer.Option(help="Epochs between evaluations [1, or as a Caffe solver says].")
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Seconds between checkpoints. Use fewer to lose less work when the machine fails.")
    ] = 30.0,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Keep checkpoints at this URL, such as hdfs://HOST/PATH. Use it to resume on another machine.",
        ),
    ] = None,
    link: LinkOption = None,
    latency: LatencyOption = None,
    step_seconds: StepSecondsOption = None,
    model_bytes: ModelBytesOption = None,
    faults: Annotated[Path | None, typer.Option(help="sim: a JSON file with faults to inject.")] = None,
) -> None:
    """Train a task and print the result."""
    names = [name.strip() for name in hosts.split(",") if name.strip()] if hosts is not None else []
    if names == [slurm.SLURM]:
        job = slurm.allocation(os.environ)
        names = list(job.hosts)
        if job.tasks > 1:
            listen = listen or f"{job.hosts[0]}:{job.port}"
            if key is None:
                raise UsageError(
                    f"srun has started {job.tasks} processes, which need a key that all can read: make one with "
                    "'tether keys FILE' on a disk that the nodes share, and add --key FILE"
                )
            if job.rank:
                worker(listen, key, wait=JOB_START_SECONDS)
                return
            names, workers = [HERE], workers or str(job.tasks)
    if hosts is not None:
        on = "cluster" if on == "local" else on
        if not names:
            raise UsageError("--hosts names no host: write --hosts a,b,c")
    description = {"name": protocol} if protocol is not None else tasks.find(task).protocol
    cls = type(protocols.make(description))
    protocol_settings, task_settings = split_settings(set_ or [], cls, task)
    chosen = settings.arguments(cls, f"protocol {cls.name}", protocol_settings)
    options = protocols.make({**description, **chosen})
    path: Path | None = None
    is_state = (
        tasks.is_solver(task) and weights is not None and weights.name.removesuffix(".h5").endswith(".solverstate")
    )
    if tasks.is_solver(task):
        # a line for each, since a path may have commas
        task_settings |= {"sources": "".join(f"{item}\n" for item in data)} if data else {}
        task_settings |= {"snapshot": str(weights.absolute())} if is_state and weights is not None else {}
    elif data is not None:
        if len(data) > 1:
            raise UsageError(f"--data is given {len(data)} times: task {task} has one folder or file of data")
        path = Path(data[0])
    built = tasks.load(task, data=path, settings=task_settings)
    only_sim = given(
        link=link,
        latency=latency,
        step_seconds=step_seconds,
        model_bytes=model_bytes,
        faults=Faults.load(faults) if faults else None,
    )
    only_cluster = given(
        listen=listen,
        key=str(key.absolute()) if key else None,
        encrypt=False if no_encryption else None,
        hosts=names or None,
        ssh=ssh,
    )
    where = runtime(on, workers, master, options, only_sim, only_cluster, device, address)
    beginning: Path | dict[str, Tensor] | None = weights
    if isinstance(built, CaffeTask) and weights is not None:
        if is_state:
            beginning = None  # the weights that the file names are the task's default
        elif weights.suffix not in SUFFIXES:
            beginning, loaded = built.with_weights([weights], built.seed if seed is None else seed)
            err.print(f"{weights}: {loaded}", highlight=False, markup=False)
    with _result_when_interrupted(as_json):
        result = api.run(
            built,
            options,
            where,
            epochs=epochs,
            steps=steps,
            until=until,
            seconds=seconds,
            patience=patience,
            warmup=protocol_class(warmup)() if warmup else None,
            warmup_epochs=warmup_epochs,
            seed=seed,
            weights=beginning,
            run_dir=run_dir,
            evaluate_every=evaluate_every,
            checkpoint_seconds=checkpoint_seconds,
            checkpoints=checkpoints,
            record=record,
            callbacks=make_loggers(log or []),
            task_spec={"spec": task, "data": path.absolute() if path else None, "settings": task_settings},
        )
    show_result(result, as_json)


def resume(
    run_dir: RunOrUrlArgument,
    workers: WorkersOption = None,
    master: MasterOption = None,
    address: AddressOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    until: UntilOption = None,
    seconds: SecondsOption = None,
    patience: PatienceOption = None,
    as_json: JsonOption = False,
    log: LogOption = None,
) -> None:
    """Continue a run from its newest checkpoint, with the same or another number of workers."""
    with _result_when_interrupted(as_json):
        result = api.resume(
            run_dir,
            workers=workers,
            master=master,
            address=address,
            epochs=epochs,
            steps=steps,
            until=until,
            seconds=seconds,
            patience=patience,
            callbacks=make_loggers(log or []),
        )
    show_result(result, as_json)


def replay(run_dir: RunArgument) -> None:
    """Replay the events of a recorded run and check that the protocol does the same again."""
    for node, events in api.replay_recorded(run_dir).items():
        out.print(f"{node}: {events} events, the same effects")


@contextmanager
def _result_when_interrupted(as_json: bool) -> Iterator[None]:
    """An interrupted run prints the result that it has, and how to continue."""
    try:
        yield
    except Interrupted as interrupted:
        if interrupted.result is not None:
            show_result(interrupted.result, as_json)
        err.print(f"tether: {interrupted}", highlight=False, markup=False)
        raise typer.Exit(130) from None
