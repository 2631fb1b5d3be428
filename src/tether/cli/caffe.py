"""`tether caffe` and `tether data`: nets, weights and data of Caffe."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from tether import tasks
from tether.caffe import CaffeTask, drawing
from tether.caffe.convert import from_lmdb, to_lmdb
from tether.caffe.data import Records, described_shapes, open_feed, read_arrays
from tether.caffe.layers import SOURCES
from tether.caffe.net import Net
from tether.caffe.reading import NetFile, State, included, read_net, state_of
from tether.caffe.solver import CaffeSolver
from tether.caffe.task import measure, open_feeds, parse_sources
from tether.caffe.weights import SolverState, load_weights, write_state, write_weights
from tether.cli.options import JsonOption, RunArgument
from tether.cli.output import err, out
from tether.errors import UsageError, unknown
from tether.execution.directory import RunDirectory
from tether.learner.learner import Learner

NetArgument = Annotated[Path, typer.Argument(metavar="NET", help="A net file.")]
StageOption = Annotated[
    list[str] | None,
    typer.Option("--stage", help="A stage that layers are included in or excluded from; may be repeated."),
]
LevelOption = Annotated[int, typer.Option(help="The level that layers are included or excluded by.")]
PhaseOption = Annotated[str, typer.Option(help="The phase of the net: TRAIN or TEST.")]
SourcesOption = Annotated[
    list[str] | None, typer.Option("--data", metavar="NAME=PATH", help="The data of a layer; may be repeated.")
]


def _state(source: NetFile, phase: str, stages: list[str] | None, level: int) -> State:
    if phase.upper() not in ("TRAIN", "TEST"):
        raise UsageError(f"phase is {phase!r}; it must be TRAIN or TEST")
    return state_of(source.net, phase.upper(), stages=tuple(stages or ()), level=level)


def _sources(data: list[str] | None) -> dict[str, str]:
    return parse_sources("".join(f"{item}\n" for item in data or []))


def summary(
    net: NetArgument,
    phase: PhaseOption = "TRAIN",
    stages: StageOption = None,
    level: LevelOption = 0,
    data: SourcesOption = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="TOP=N,C,H,W",
            help="The shape of a data layer's top. Use it when the data is not there; may be repeated.",
        ),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the graph to this .svg, .png or .pdf.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the layers of a net with their shapes, parameters and connections."""
    source = read_net(net)
    state = _state(source, phase, stages, level)
    built = Net(source, state, _shapes(source, state, data, inputs))
    if draw is not None:
        drawing.draw(built, draw)
    counts: dict[str, int] = {}
    for blob in built.blobs:
        counts[blob.module] = counts.get(blob.module, 0) + math.prod(blob.shape)
    rows: list[dict[str, Any]] = [
        {"layer": s.name, "type": s.type, "bottoms": [], "tops": list(s.tops), "shapes": s.shapes, "parameters": 0}
        for s in built.sources
    ]
    rows += [
        {
            "layer": node.name,
            "type": node.type,
            "bottoms": list(node.bottoms),
            "tops": list(node.tops),
            "shapes": node.shapes,
            "parameters": counts.get(node.module, 0),
        }
        for node in built.nodes
    ]
    if as_json:
        print(json.dumps({"name": built.title, "layers": rows, "parameters": built.parameter_count}))
        return
    table = Table("layer", "type", "from", "to", "shape", "parameters")
    for row in rows:
        shapes = ", ".join("x".join(map(str, shape)) or "1" for shape in row["shapes"])
        count = f"{row['parameters']:,}" if row["parameters"] else ""
        table.add_row(row["layer"], row["type"], ", ".join(row["bottoms"]), ", ".join(row["tops"]), shapes, count)
    out.print(table)
    out.print(f"{built.title}: {built.parameter_count:,} parameters in phase {state.phase}", highlight=False)


def _shapes(source: NetFile, state: State, data: list[str] | None, inputs: list[str] | None) -> dict[str, Any]:
    """The shapes of data layers: from what the user says, or from the data, or from the settings of the layer."""
    given: dict[str, tuple[int, ...]] = {}
    for text in inputs or []:
        name, _, lengths = text.partition("=")
        try:
            given[name] = tuple(int(length) for length in lengths.split(","))
        except ValueError:
            raise UsageError(f"--input {text!r} is not understood; write it like --input data=64,3,32,32") from None
    found: dict[str, Any] = {}
    tops = []
    for index in included(source, state):
        spec = source.net.layer[index]
        if spec.type not in SOURCES:
            continue
        tops += spec.top
        described = described_shapes(spec)
        if spec.type == "Input":
            own = [tuple(shape.dim) for shape in spec.input_param.shape]
            described = own * len(spec.top) if len(own) == 1 else own if len(own) == len(spec.top) else None
        if named := [given[top] for top in spec.top if top in given]:
            # tops that are not named are labels, one for each sample, unless the layer says more
            others = described or [named[0][:1]] * len(spec.top)
            found[spec.name] = [given.get(top, other) for top, other in zip(spec.top, others, strict=True)]
        elif spec.type != "Input":
            try:
                found[spec.name] = open_feed(spec, state.phase, source.path, _sources(data)).shapes
            except UsageError as error:
                if described is None or data:
                    example = f"--input {spec.top[0] if spec.top else spec.name}=N,C,H,W"
                    raise UsageError(f"{source.where(index)}: {error}; or give the shape with {example}") from None
                found[spec.name] = described
                shape = "x".join(map(str, described[0]))
                err.print(f"{spec.name}: taken as {shape}, since its data is not there", highlight=False, markup=False)
    if unknown_names := [name for name in given if name not in tops]:
        raise unknown("input", unknown_names[0], tops)
    return found


def score(
    model: Annotated[Path, typer.Option(help="The net file.")],
    weights: Annotated[Path, typer.Option(help="The .caffemodel file.")],
    stages: StageOption = None,
    level: LevelOption = 0,
    data: SourcesOption = None,
    batches: Annotated[int | None, typer.Option(help="The number of batches; by default all of the data.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Test trained weights: print the outputs of a net in phase TEST, as means over the data."""
    source = read_net(model)
    state = _state(source, "TEST", stages, level)
    feeds = open_feeds(source, state, _sources(data))
    if not feeds:
        raise UsageError(
            f"{model} has no data layer in phase TEST, so there is nothing to test on: name a train_val file"
        )
    net = Net(source, state, {feed.name: feed.shapes for feed in feeds}).fill()
    err.print(f"{weights}: {load_weights(net, weights)}", highlight=False, markup=False)
    count = batches or max(1, math.ceil(len(feeds[0].data) / feeds[0].batch_size))
    found = measure(net, feeds, count)
    if as_json:
        print(json.dumps({"batches": count, "metrics": found}))
        return
    for name, value in found.items():
        out.print(f"{name}: {value:.6g}", highlight=False, markup=False)


def snapshot(
    run: RunArgument,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="PREFIX", help="The beginning of the file names; by default the solver's snapshot_prefix."
        ),
    ] = None,
) -> None:
    """Write the newest checkpoint of a run as a .caffemodel and a .solverstate, from which Caffe can continue."""
    directory = RunDirectory.open(run)
    config = directory.read_config()
    spec = config["task"]
    if spec.get("spec") is None or not tasks.is_solver(spec["spec"]):
        raise UsageError(f"{run} is not a run of 'tether train' with a solver of Caffe")
    restored = directory.load_checkpoint()
    if restored is None:
        raise UsageError(f"{run} has no checkpoint: let it run longer, or start it with fewer --checkpoint-seconds")
    task = tasks.load(spec["spec"], settings=spec["settings"])
    assert isinstance(task, CaffeTask)
    learner = Learner(task, iter(()), node="snapshot", seed=0)
    learner.weights.copy_(restored.weights)
    with_optimizer = [state for _, state in sorted(restored.workers.items()) if "optimizer" in state]
    for state in [restored.replica_state, *with_optimizer[:1]]:
        learner.restore(state)
    net, solver = learner.model, learner.optimizer
    assert isinstance(net, Net) and isinstance(solver, CaffeSolver)
    batches = restored.samples / (task.batch_size * task.accumulate)
    iteration = task.first_iteration + round(batches if task.iterations == "all" else batches / config["workers"])
    prefix = to or Path(task.snapshot_name)
    weights = prefix.with_name(f"{prefix.name}_iter_{iteration}.caffemodel")
    write_weights(net, weights)
    histories = solver.histories(net)
    write_state(
        weights.with_suffix(".solverstate"),
        SolverState(iteration, str(weights), histories),
        task.policy.current_step(iteration),
    )
    out.print(f"{weights} and {weights.with_suffix('.solverstate').name}: iteration {iteration}", highlight=False)


def to_lmdb_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.npz", help="An .npz file with images and labels.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The LMDB to write.")],
    images: Annotated[str, typer.Option(help="The array of images (n, channels, height, width).")] = "data",
    labels: Annotated[str, typer.Option(help="The array of labels.")] = "label",
) -> None:
    """Write arrays of images and labels to an LMDB of Datum records."""
    arrays = read_arrays(file, (images, labels))
    values, classes = arrays[images], arrays[labels]
    with err.status("") as status:
        count = to_lmdb(values, classes, folder, lambda done: status.update(f"{done} of {len(values)} records"))
    out.print(f"{folder}: {count} records", highlight=False)


def from_lmdb_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The LMDB to read.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE.npz", help="The .npz file to write, with the arrays data and label.")
    ],
) -> None:
    """Read an LMDB of Datum records into arrays of images and labels."""
    total = len(Records(folder))
    with err.status("") as status:
        images, labels = from_lmdb(folder, lambda done: status.update(f"{done} of {total} records"))
    np.savez_compressed(file, data=images, label=labels)
    out.print(f"{file}: {len(images)} images of shape {images.shape[1:]}", highlight=False)
