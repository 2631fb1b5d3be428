"""The command line: each command builds a task, a protocol and a runtime, and calls `run`."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tether import bench, chaos, protocols, report, settings, study, swarm, tasks, tune
from tether.errors import InternalError, Interrupted, TetherError, UsageError, own_faults, unknown
from tether.protocols import Averaging, Options, Server, Single
from tether.run import Result, replay_recorded, resume, run
from tether.runtimes.base import Runtime
from tether.runtimes.faults import Faults
from tether.runtimes.local import Local
from tether.runtimes.sim import Sim
from tether.runtimes.spark import Spark

app = typer.Typer(
    name="tether",
    help="Train one PyTorch model on many workers that stay tied to one joint model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

#: how often a long command tells how far it is
TOLD_EVERY_SECONDS = 5.0
#: of how many runs of the swarm that went wrong a smaller scenario is looked for
SHRUNK_MAX = 3

_out = Console(soft_wrap=True)
_err = Console(stderr=True, soft_wrap=True)

TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="A built-in task or file.py:Class.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")]
DataOption = Annotated[Path | None, typer.Option("--data", help="The task's data: a folder or file.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", "-n", help="How many workers.")]
MasterOption = Annotated[
    str | None,
    typer.Option(help="spark: the cluster, such as spark://HOST:7077; a small one on this machine unless given."),
]
EpochsOption = Annotated[
    float | None,
    typer.Option(help="Passes over the data, by all workers together; the task's own number unless given."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="An option of the protocol or of the task; repeat it."),
]
SeedOption = Annotated[int, typer.Option(help="Everything random follows from it.")]
LinkOption = Annotated[str | None, typer.Option(help="sim: bandwidth of every network interface [1gbit].")]
LatencyOption = Annotated[str | None, typer.Option(help="sim: latency of the network [0.2ms].")]
StepSecondsOption = Annotated[str | None, typer.Option(help="sim: how long a gradient takes [0.1].")]
ModelBytesOption = Annotated[str | None, typer.Option(help="sim: price the model as one of this size.")]
StepsOption = Annotated[int | None, typer.Option(help="Optimizer steps per worker.")]
SecondsOption = Annotated[float | None, typer.Option(help="End after so long; sim: virtual seconds.")]
UntilOption = Annotated[str | None, typer.Option(help="End when a metric is reached, such as error<0.05.")]
PatienceOption = Annotated[
    int | None, typer.Option(help="End when the error is no better for so many evaluations, with the best model seen.")
]


@app.command()
def train(
    task: TaskArgument,
    protocol: Annotated[
        str | None, typer.Option("--protocol", "-p", help="How workers agree; what suits the task unless given.")
    ] = None,
    on: Annotated[str, typer.Option(help="Where to run: local, sim or spark.")] = "local",
    workers: WorkersOption = None,
    master: MasterOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    until: UntilOption = None,
    seconds: SecondsOption = None,
    patience: PatienceOption = None,
    warmup: Annotated[str | None, typer.Option(help="Begin with this protocol.")] = None,
    warmup_epochs: Annotated[float, typer.Option(help="How many epochs the warm-up takes.")] = 1.0,
    set_: SetOption = None,
    seed: SeedOption = 0,
    data: DataOption = None,
    run_dir: Annotated[Path | None, typer.Option("--run", help="The run directory; below runs/ unless given.")] = None,
    as_json: JsonOption = False,
    record: Annotated[bool, typer.Option("--record", help="Keep every event, for 'tether replay'.")] = False,
    evaluate_every: Annotated[float, typer.Option(help="Epochs between two evaluations.")] = 1.0,
    checkpoint_seconds: Annotated[float, typer.Option(help="Time between two checkpoints.")] = 30.0,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Keep checkpoints there, such as hdfs://HOST/PATH, for any machine to resume."
        ),
    ] = None,
    link: LinkOption = None,
    latency: LatencyOption = None,
    step_seconds: StepSecondsOption = None,
    model_bytes: ModelBytesOption = None,
    faults: Annotated[Path | None, typer.Option(help="sim: a JSON file of faults.")] = None,
) -> None:
    """Train a task and print what came out."""
    description = {"name": protocol} if protocol is not None else tasks.find(task).protocol
    cls = type(protocols.make(description))
    protocol_settings, task_settings = _split_settings(set_ or [], cls, task)
    chosen = settings.arguments(cls, f"protocol {cls.name}", protocol_settings)
    options = protocols.make({**description, **chosen})
    built = tasks.load(task, data=data, settings=task_settings)
    only_sim = {
        "link": link,
        "latency": latency,
        "step_seconds": step_seconds,
        "model_bytes": model_bytes,
        "faults": Faults.load(faults) if faults else None,
    }
    given = {name: value for name, value in only_sim.items() if value is not None}
    runtime = _runtime(on, workers, master, options, given)
    with _told_when_interrupted(as_json):
        result = run(
            built,
            options,
            runtime,
            epochs=epochs,
            steps=steps,
            until=until,
            seconds=seconds,
            patience=patience,
            warmup=_protocol_class(warmup)() if warmup else None,
            warmup_epochs=warmup_epochs,
            seed=seed,
            run_dir=run_dir,
            evaluate_every=evaluate_every,
            checkpoint_seconds=checkpoint_seconds,
            checkpoints=checkpoints,
            record=record,
            task_spec={"spec": task, "data": data.absolute() if data else None, "settings": task_settings},
        )
    _show(result, as_json)


@app.command("resume")
def resume_(
    run_dir: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or the URL of its checkpoints.")],
    workers: WorkersOption = None,
    master: MasterOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    until: UntilOption = None,
    seconds: SecondsOption = None,
    patience: PatienceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a run from its newest checkpoint, with the same or another number of workers."""
    with _told_when_interrupted(as_json):
        result = resume(
            run_dir,
            workers=workers,
            master=master,
            epochs=epochs,
            steps=steps,
            until=until,
            seconds=seconds,
            patience=patience,
        )
    _show(result, as_json)


@app.command()
def replay(run_dir: RunArgument) -> None:
    """Feed a recorded run into fresh machines: they must do the same again."""
    for node, events in replay_recorded(run_dir).items():
        _out.print(f"{node}: {events} events, the same effects")


@app.command("protocols")
def protocols_() -> None:
    """List the protocols with their options and defaults."""
    for name, cls in protocols.known().items():
        docs = {field.name: field.metadata.get("doc", "") for field in fields(cls)}
        _list_one(name, cls.summary, settings.options(cls, docs))


@app.command("tasks")
def tasks_() -> None:
    """List the built-in tasks with their options and defaults."""
    for name, cls in tasks.known().items():
        _list_one(name, (cls.__doc__ or "").strip().splitlines()[0], tasks.options(cls))
    _out.print("A task of your own: path/to/file.py:ClassName", style="dim")


@app.command("report")
def report_(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    to: Annotated[Path, typer.Option(help="Where the page and the picture go.")] = Path("report"),
) -> None:
    """Draw runs side by side: a table here, an HTML page and a PNG."""
    loaded = [report.load_run(path) for path in runs]
    _out.print(report.table(loaded))
    if (speedups := report.speedups(loaded)) is not None:
        _out.print(speedups, soft_wrap=False)
    for path in report.write_report(loaded, to):
        _out.print(path.absolute(), highlight=False)


@app.command("swarm")
def swarm_(
    seeds: Annotated[int, typer.Option(min=1, help="How many runs.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this seed, told in full.")] = None,
    scenario: Annotated[
        Path | None, typer.Option(help="Only the run in this JSON file, as printed for a run that failed.")
    ] = None,
    protocol: Annotated[str | None, typer.Option("--protocol", "-p", help="Only this protocol.")] = None,
    plant: Annotated[str | None, typer.Option(help="Plant a bug that must be found: drop loses one message.")] = None,
) -> None:
    """Simulate many runs with random clusters and faults; every one must reach its goal and keep its invariants."""
    if protocol is not None:
        _protocol_class(protocol)
    tally = swarm.Tally()
    alone = seed is not None or scenario is not None
    chosen = range(seed, seed + 1) if seed is not None else range(first, first + seeds)
    told_at = time.monotonic()

    def each(verdict: swarm.Verdict) -> None:
        nonlocal told_at
        tally.add(verdict)
        if alone or verdict.error:
            _out.print(f"seed {verdict.seed}: {verdict.scenario}", highlight=False, markup=False)
            _out.print(f"  {verdict.error or 'reaches its goal, no invariant broken'}", highlight=False, markup=False)
        if time.monotonic() - told_at >= TOLD_EVERY_SECONDS:
            told_at = time.monotonic()
            _err.print(f"{tally.runs} of {len(chosen)} runs, {tally.failures} wrong", highlight=False)

    if scenario is not None:
        each(verdict := swarm.judge(swarm.Scenario.load(scenario)))
        wrong = [verdict] if verdict.error else []
    else:
        wrong = swarm.swarm(chosen, protocol, plant, each, processes=1 if len(chosen) < 100 else os.cpu_count() or 1)
    _out.print(tally.table())
    for verdict in wrong[:SHRUNK_MAX]:
        small = swarm.shrink(verdict)
        _out.print(f"seed {verdict.seed}, smaller: {small.error}", highlight=False, markup=False)
        _out.print("keep this file, 'tether swarm --scenario FILE' runs it again:", highlight=False)
        print(small.scenario.dump())
    if wrong:
        raise typer.Exit(1)


@app.command("chaos")
def chaos_(
    kills: Annotated[int, typer.Option(min=1, help="How many faults, each in a run of its own.")] = 20,
    on: Annotated[str, typer.Option(help="Where the runs are: local or spark.")] = "local",
    seconds: Annotated[float, typer.Option(help="Begin no further run after so long.")] = 600.0,
    seed: SeedOption = 0,
    protocol: Annotated[
        str | None, typer.Option("--protocol", "-p", help=f"Only this one of {', '.join(chaos.PROTOCOLS)}.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Kill, stop and starve real processes and damage their files; every run must come to its end nevertheless."""

    def each(survived: chaos.Survived) -> None:
        blow = survived.blow
        told = f"{blow.kind} {blow.target} under {blow.protocol}: {survived.outcome}, {survived.seconds:+.1f} s"
        _err.print(f"{told}{'; ' if survived.fault else ''}{survived.fault}", highlight=False, markup=False)

    outcome = chaos.chaos(kills, on, seconds, seed, protocol, each)
    _show_report(outcome, as_json)
    if outcome["faults"]:
        raise typer.Exit(1)


@app.command("bench")
def bench_(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="accuracy, allreduce, checkpoint, cycles, grid, mpca, overhead, rudra, scaleup, scaling, sim, spark, "
            "table2 or utilization.",
        ),
    ],
    task: Annotated[str | None, typer.Option(help="overhead: the task; fashion unless given. cycles: several.")] = None,
    data: DataOption = None,
    workload: Annotated[str | None, typer.Option(help="table2: one of its workloads; all three unless given.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="accuracy, cycles, mpca, scaling, table2: runs of each that count together; 3 unless given."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="scaling: where its picture goes; scaling.png here.")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="checkpoint, overhead, spark, utilization: how many turns are made.")
    ] = None,
    master: Annotated[str | None, typer.Option(help="spark: a cluster to measure, instead of processes here.")] = None,
    link: Annotated[
        str | None,
        typer.Option(help="spark: on hosts with links of this speed, such as 1gbit, made of network namespaces."),
    ] = None,
    workers: Annotated[str | None, typer.Option(help="cycles: numbers of workers; 3,8 unless given.")] = None,
    steps: Annotated[
        str | None, typer.Option(help="cycles: lengths of runs, in steps; 100,400,2000,10000 unless given.")
    ] = None,
    cycle: Annotated[
        str | None, typer.Option(help="cycles: how many steps an exchange takes; 1,10,50,100 unless given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure something, as ratios."""
    measure = bench.named(name)
    given = {"task": task, "data": data, "workload": workload, "seeds": seeds, "picture": picture}
    given |= {"rounds": rounds, "master": master, "link": link}
    given |= {"workers": workers, "steps": steps, "cycle": cycle}
    options = {option: value for option, value in given.items() if value is not None}
    if foreign := sorted(options.keys() - inspect.signature(measure).parameters):
        raise UsageError(f"benchmark {name!r} has no option --{foreign[0]}")
    _show_report(measure(**options), as_json)


@app.command("study")
def study_(
    task: TaskArgument,
    mu: Annotated[str, typer.Option(help="Mini-batch sizes of a learner.")] = "4,8,16,32,64,128",
    learners: Annotated[str, typer.Option("--lambda", help="Numbers of learners.")] = "1,2,4,10,18,30",
    protocol: Annotated[
        str, typer.Option("--protocol", "-p", help="hard, lambda-soft and N-soft, such as 1-soft.")
    ] = "hard,1-soft,lambda-soft",
    epochs: EpochsOption = None,
    link: Annotated[str, typer.Option(help="Bandwidth of every network interface.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="Latency of the network.")] = "0.2ms",
    step_seconds: Annotated[
        str | None,
        typer.Option(
            help="How long a gradient takes: 0.05, or by mini-batch 4=0.01,128=0.05; measured here unless given."
        ),
    ] = None,
    model_bytes: Annotated[str | None, typer.Option(help="Price the model as one of this size.")] = None,
    data: DataOption = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An option of protocol server or of the task; repeat it."),
    ] = None,
    seed: SeedOption = 0,
    reference_batch: Annotated[
        int | None, typer.Option(help="The batch that the learning rate was chosen for; the task's own unless given.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Where results and picture go; what is finished there is kept.")] = Path(
        "study"
    ),
    as_json: JsonOption = False,
) -> None:
    """Simulate error against time over mini-batch size, number of learners and protocol."""
    grid = study.parse_counts(mu, "--mu"), study.parse_counts(learners, "--lambda"), study.parse_protocols(protocol)
    server_settings, task_settings = _split_settings(set_ or [], Server, task)
    chosen = study.Settings.make(
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
    outcome = study.study(chosen, *grid, to)
    if as_json:
        print(json.dumps(outcome))
        return
    _out.print(study.table(outcome))
    _out.print(outcome["recommendation"], highlight=False, markup=False)
    _out.print((to / "study.png").absolute(), highlight=False)


@app.command("tune")
def tune_(
    task: TaskArgument,
    alpha: Annotated[str, typer.Option(help="A range such as 0.001..0.5, or values such as 0.01,0.05,0.1.")],
    protocol: Annotated[
        str, typer.Option("--protocol", "-p", help=f"Whose alpha: {' or '.join(tune.tunable())}.")
    ] = "elastic",
    points: Annotated[int, typer.Option(help="How many values of a range, at equal ratios.")] = 8,
    share: Annotated[float, typer.Option(help="How much of the training data, drawn at random.")] = 0.1,
    tolerance: Annotated[
        float, typer.Option(help="How much worse than the best, as a share of it, is good enough.")
    ] = tune.TOLERANCE,
    on: Annotated[str, typer.Option(help="Where to run: local or sim.")] = "sim",
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
        Path, typer.Option("--to", "--run-dir", help="Where results and picture go; what is finished there is kept.")
    ] = Path("tune"),
    as_json: JsonOption = False,
) -> None:
    """Search a protocol's alpha on a small part of the data: the best value and the corridor of good ones."""
    cls = _protocol_class(protocol)
    tune.check_tunable(cls)
    alphas = tune.parse_alphas(alpha, points)
    protocol_settings, task_settings = _split_settings(set_ or [], cls, task)
    if "alpha" in protocol_settings:
        raise UsageError("--set alpha: a search sets alpha itself; use --alpha")
    options = cls(**settings.arguments(cls, f"protocol {protocol}", protocol_settings))
    only_sim = {"link": link, "latency": latency, "step_seconds": step_seconds, "model_bytes": model_bytes}
    only_sim = {name: value for name, value in only_sim.items() if value is not None}
    runtime = _runtime(on, workers, None, options, {**only_sim, "checked": False} if on == "sim" else only_sim)
    place = data.absolute() if data else None
    found = tune.tune(
        tasks.load(task, data=data, settings=task_settings),
        options,
        runtime,
        alphas=alphas,
        share=share,
        epochs=epochs,
        seed=seed,
        tolerance=tolerance,
        to=to,
        task_spec={"spec": task, "data": place, "settings": task_settings},
    )
    flags = {"protocol": protocol, "on": on, "workers": runtime.workers, **only_sim, "data": data, "seed": seed or None}
    words = ["tether", "train", task]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    for text in [*(set_ or []), f"alpha={found.best.alpha:g}"] if found.best else []:
        words += ["--set", text]
    command = shlex.join(words) if found.best else None
    picture = (to / "tune.png").absolute()
    if as_json:
        print(json.dumps({**found.figures, "command": command, "picture": str(picture)}))
        return
    _out.print(found.table())
    _out.print(found.recommendation, highlight=False, markup=False)
    if command:
        _out.print(f"Go on with all of the data:\n  {command}", highlight=False, markup=False)
    _out.print(picture, highlight=False)


@app.command()
def demo(
    to: Annotated[Path, typer.Option(help="Where runs and report go.")] = Path("runs/demo"),
    epochs: Annotated[float, typer.Option(help="How long each run is.")] = 30,
) -> None:
    """Train the digits alone and with 4 workers, and compare."""
    plan: list[tuple[Options, int]] = [(Single(), 1), (Averaging(tau=10), 4)]
    results = []
    for options, workers in plan:
        place = _free(to / f"{options.name}-{workers}")
        spec: dict[str, Any] = {"spec": "digits", "data": None, "settings": {}}
        task = tasks.load("digits")
        results.append(run(task, options, Local(workers), epochs=epochs, run_dir=place, task_spec=spec))
    table = Table("protocol", "workers", "seconds", "samples/s", "test error", title="digits")
    for result in results:
        figures = result.figures
        table.add_row(
            figures["protocol"],
            str(figures["workers"]),
            f"{figures['seconds']:.2f}",
            f"{figures['samples_per_second']:,.0f}",
            f"{100 * result.metrics['error']:.2f} %",
        )
    _out.print(table)
    page, _ = report.write_report([report.load_run(result.directory) for result in results], to / "report")
    _out.print(f"open {page.absolute()}", highlight=False)


def _free(path: Path) -> Path:
    """The path itself, or the first of its kind that holds no run yet."""
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 10_000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def _protocol_class(name: str) -> type[Options]:
    if name not in protocols.known():
        raise unknown("protocol", name, protocols.known())
    return protocols.known()[name]


def _split_settings(texts: list[str], protocol: type[Options], task: str) -> tuple[dict[str, str], dict[str, str]]:
    """Which settings are the protocol's and which the task's; task.NAME is always the task's."""
    for_protocol: dict[str, str] = {}
    for_task: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"--set {text!r} is not understood; write it like --set tau=10")
        if name.startswith("task."):
            for_task[name.removeprefix("task.")] = value
        elif name in settings.parameters(protocol):
            for_protocol[name] = value
        elif name in (of_task := settings.parameters(tasks.find(task)).keys() - {"data"}):
            for_task[name] = value
        else:
            known = [*settings.parameters(protocol), *of_task]
            raise unknown(f"option of protocol {protocol.name} or task {task}", name, known)
    return for_protocol, for_task


def _runtime(on: str, workers: int | None, master: str | None, protocol: Options, only_sim: dict[str, Any]) -> Runtime:
    if on not in ("local", "sim", "spark"):
        raise unknown("runtime", on, ("local", "sim", "spark"))
    count = workers if workers is not None else protocol.workers_max or 2
    if on == "sim":
        return Sim(workers=count, **only_sim)
    if only_sim:
        flags = ", ".join("--" + name.replace("_", "-") for name in only_sim)
        raise UsageError(f"{flags}: only a simulated cluster has that; add --on sim")
    if on == "spark":
        return Spark.at(master, count)
    if master is not None:
        raise UsageError("--master: only a Spark cluster has that; add --on spark")
    return Local(workers=count)


@contextmanager
def _told_when_interrupted(as_json: bool) -> Iterator[None]:
    """An interrupted run shows what it had come to, and how to continue."""
    try:
        yield
    except Interrupted as interrupted:
        if interrupted.result is not None:
            _show(interrupted.result, as_json)
        _err.print(f"tether: {interrupted}", highlight=False, markup=False)
        raise typer.Exit(130) from None


def _show_report(outcome: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(outcome))
        return
    table = Table(*(name.replace("_", " ") for name in outcome["rows"][0]))
    for row in outcome["rows"]:
        table.add_row(*(_text(value) for value in row.values()))
    _out.print(table)
    for ratio, value in outcome["ratios"].items():
        _out.print(f"{ratio}: {'none' if value is None else f'{value:.4f}'}", highlight=False)


def _show(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.figures))
        return
    figures = result.figures
    table = Table(show_header=False, box=None)
    virtual = " (virtual)" if figures["runtime"] == "sim" else ""
    for name, value in {
        "protocol": f"{figures['protocol']} on {figures['runtime']}, workers: {figures['workers']}",
        "steps": f"{figures['steps']} per worker, {figures['samples']} samples, {figures['reason']}",
        **({"model": f"of step {figures['model_step']}"} if figures["model_step"] != figures["steps"] else {}),
        "seconds": f"{figures['seconds']:.4g}{virtual}, {figures['samples_per_second']:,.0f} samples/s",
        "utilization": f"{figures['utilization']['mean']:.1%} computing, overlap {figures['overlap']:.1%}",
        "sent": f"{figures['bytes_sent'] / 1e6:,.1f} MB{_compressed(figures)}",
        **{metric: f"{value:.4g}" for metric, value in figures["metrics"].items()},
        **(
            {"left out": f"{skipped} gradients that were not finite"}
            if (skipped := figures["gradients_skipped"])
            else {}
        ),
        **(
            {"refused": f"gradients by the guard: {refused}"}
            if (refused := _counts(figures["gradients_refused"]))
            else {}
        ),
        **({"warning": figures["warning"]} if figures["warning"] else {}),
        **({"not kept": ", ".join(figures["unsaved"])} if figures["unsaved"] else {}),
        "run": figures["run"],
    }.items():
        table.add_row(name, value)
    _out.print(table)


def _counts(by_name: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in by_name.items())


def _compressed(figures: dict[str, Any]) -> str:
    if (compression := figures.get("compression")) is None:
        return ""
    error = compression["relative_error"]
    return f", {compression['share']:.1%} of what it was" + (f", relative error {error:.2g}" if error else "")


def _text(value: object) -> str:
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)


def _list_one(name: str, summary: str, options: list[settings.Option]) -> None:
    _out.print(f"[bold]{name}[/bold]  {summary}", highlight=False)
    for option in options:
        line = f"  {option.name} = {option.default}  ({option.type})  {option.doc}".rstrip()
        _out.print(line, highlight=False, markup=False)


def main() -> None:
    """The program `tether`. Errors are told in a line; only a fault of Tether's own has a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with own_faults():
            app()
    except UsageError as error:
        _fail(error, 2)
    except InternalError as error:
        cause = traceback.format_exception(error.__cause__) if error.__cause__ is not None else []
        _err.print("".join([*cause, *getattr(error, "__notes__", [])]).rstrip(), highlight=False, markup=False)
        _fail(error, 1)
    except TetherError as error:
        _fail(error, 1)


def _fail(error: TetherError, status: int) -> None:
    _err.print(f"tether: {error}", style="red", highlight=False, markup=False)
    sys.exit(status)


if __name__ == "__main__":
    main()
