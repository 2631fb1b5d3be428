"""Every protocol over networks, numbers of workers, tasks, mini-batches and optimizers: time to a target."""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tether.bench.cells import Cell, Curve, Place, Results, options_of, train
from tether.bench.common import Report, Row, Seeds, counts, in_parallel, names
from tether.bench.suites import HELD_BACK, PARTS, PROTOCOLS, SUITES, Name
from tether.errors import UsageError

#: a metric counts as reached by the mean of this many evaluations
MEAN_OF = 3
#: a time that is longer by more than this share counts as behind
BEHIND = 0.05
#: the target of a disturbed run is what the undisturbed one has reached after this share of its time
UNDISTURBED_SHARE = 0.85
OURS = "tide"


def frontier(
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder with Fashion-MNIST, the CIFAR-10 subset, tinyshakespeare.txt and trec_train.csv; needed "
            "for what is trained."
        ),
    ] = None,
    suite: Annotated[
        Name | None,
        typer.Option(
            help="Make a table of docs/protocols.md: its places and protocols take the place of those named below. "
            "study has all protocols on four tasks, ablations has tide without or with other parts, disturbed has "
            "slow, paused, dying and joining workers."
        ),
    ] = None,
    task: Annotated[Sequence[str], names("The tasks: fashion, cifar, chars, text.", "fashion,chars")] = ("fashion",),
    link: Annotated[Sequence[str], names("The networks.", "100mbit,1gbit")] = ("100mbit", "1gbit"),
    workers: Annotated[Sequence[int], counts("Numbers of workers.")] = (8, 2),
    batch: Annotated[Sequence[str], names("The mini-batches: small, large.", "small,large")] = ("small",),
    optimizer: Annotated[
        Sequence[str],
        names("The optimizers: adam; sgd, with momentum; falling, which is sgd whose rate falls.", "adam,sgd"),
    ] = ("adam",),
    disturbance: Annotated[
        Sequence[str],
        names(
            "What befalls runs: none; slow (three of eight at half speed); pause (of one, for a minute); death; join.",
            "none,death",
        ),
    ] = ("none",),
    grid: Annotated[
        Literal["star", "full"],
        typer.Option(help="star varies one of these at a time around the first of each; full takes all combinations."),
    ] = "star",
    protocol: Annotated[
        Sequence[str],
        names(
            "The protocols, also with settings, such as tide:drift=0+phases=1. Without a suite: what to compare; with "
            "one that has all protocols: which of them.",
            "diloco,mpca,tide",
        ),
    ] = PROTOCOLS,
    length: Annotated[
        float, typer.Option(help="How many times as long as usual runs are. Longer ones reach lower errors.")
    ] = 1.0,
    seeds: Seeds = 1,
    results: Annotated[
        Path | None,
        typer.Option(help="Keep the curve of every run in this file. What is there already is not computed again."),
    ] = None,
    kept: Annotated[
        bool, typer.Option("--kept", help="Compute nothing: report every place that the file of results has.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many runs at a time. By default one for each core.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the times to the targets, to this PNG file.")] = None,
) -> Report:
    """Time to a target and metric at equal samples, all protocols with their defaults, in the simulator.

    Steps and bytes cost as much as those of ResNet-110. The metric is the error, of chars the loss; that of a moment is
    the mean of three evaluations. The target of a row is the best metric of the median protocol. A protocol that does
    not reach it counts with the time at which its run ended.
    """
    if not length > 0:
        raise UsageError(f"--length must be more than 0, not {length}")
    for label in protocol:
        options_of(label)  # raises now if it means nothing
    if kept and results is None:
        raise UsageError("--kept reports what a file of results has: name it with --results")
    if suite is not None:
        places = list(SUITES[suite].places)
        labels = tuple(protocol) if SUITES[suite].labels == PROTOCOLS else SUITES[suite].labels
    else:
        places = arrange(Place(), task, link, workers, batch, optimizer, disturbance, grid == "star")
        labels = tuple(protocol)
    store = Results(results)
    if kept:
        complete = complete_places(store, labels, length, seeds)
        places = [place for place in complete if suite is None or place in places]
    else:
        for place in places:
            place.check(data)
        compute(store, [Cell(p, n, s, length) for p in places for s in range(seeds) for n in labels], data, processes)
    curves = [
        {place: {label: store[Cell(place, label, seed, length)] for label in labels} for place in places}
        for seed in range(seeds)
    ]
    report: Report = {"bench": "frontier", "length": length, "seeds": seeds}
    if suite == "ablations":
        return {**report, "rows": part_rows(curves), "ratios": {}}
    if suite == "disturbed":
        rows, ratios = disturbed_rows(curves)
        return {**report, "rows": rows, "ratios": ratios}
    rows, times = place_rows(curves)
    if picture is not None:
        from tether.analysis.sweep_plots import frontier_png

        apart = [{**row, "held back": place in HELD_BACK} for place, row in zip(places, rows[::2], strict=True)]
        picture.write_bytes(frontier_png(apart, list(labels)))
    ratios = summary(list(times.values()))
    apart_times = [taken for place, taken in times.items() if place in HELD_BACK]
    if suite == "study" and apart_times:
        ratios |= {f"held back: {name}": ratio for name, ratio in summary(apart_times).items()}
    return {**report, "rows": rows, "ratios": ratios}


#: for each seed: the curves of all labels in each place
Curves = list[dict[Place, dict[str, Curve]]]


def place_rows(curves: Curves) -> tuple[list[Row], dict[Place, dict[str, float]]]:
    """For each place, a row of seconds to its target and one of metrics at the end; and the seconds by place."""
    rows, times = [], {}
    for place in curves[0]:
        found = [compare(of_seed[place]) for of_seed in curves]
        seconds, ends = _mean([taken for _, taken, _ in found]), _mean([last for _, _, last in found])
        target = statistics.fmean(target for target, _, _ in found)
        rows.append({**asdict(place), "what": f"seconds to {target:.4g}", **seconds})
        rows.append({**asdict(place), "what": "metric at the end", **ends})
        times[place] = seconds
    return rows, times


def part_rows(curves: Curves) -> list[Row]:
    """A row for each variant of tide: its time to the target and its last metric in each place."""
    rows: dict[str, Row] = {label: {"protocol": label, "tide": what} for label, what in PARTS.items()}
    for place in curves[0]:
        found = [compare(of_seed[place]) for of_seed in curves]
        seconds, ends = _mean([taken for _, taken, _ in found]), _mean([last for _, _, last in found])
        target = statistics.fmean(target for target, _, _ in found)
        for label, row in rows.items():
            row[f"{place.task}: seconds to {target:.4g}"] = seconds[label]
            row[f"{place.task}: at the end"] = ends[label]
    return list(rows.values())


def disturbed_rows(curves: Curves) -> tuple[list[Row], dict[str, float]]:
    """For each disturbance, the seconds of each protocol to what it reaches by itself undisturbed, and its last metric.

    The ratios are the seconds over those of the undisturbed run.
    """
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    undisturbed: dict[str, float] = {}
    for place in sorted(curves[0], key=lambda place: place.disturbance != "none"):
        calm = replace(place, disturbance="none")
        if calm not in curves[0]:
            continue  # nothing to compare with
        seconds = _mean(
            [
                {
                    label: seconds_to(own_target(of_seed[calm][label]), _smooth(curve))
                    for label, curve in of_seed[place].items()
                }
                for of_seed in curves
            ]
        )
        ends = _mean([compare(of_seed[place])[2] for of_seed in curves])
        rows.append({"disturbance": place.disturbance, "what": "seconds to its own target", **seconds})
        rows.append({"disturbance": place.disturbance, "what": "metric at the end", **ends})
        if place == calm:
            undisturbed = seconds
        else:
            ratios |= {f"{place.disturbance}, {label}": taken / undisturbed[label] for label, taken in seconds.items()}
    return rows, ratios


def own_target(curve: Curve) -> float:
    """What a run has reached when only a last part of it is left."""
    smooth = _smooth(curve)
    end = smooth[-1][0] if smooth else 0.0
    return min((value for seconds, value in smooth if seconds <= UNDISTURBED_SHARE * end), default=math.inf)


def _mean(of_seeds: list[dict[str, float]]) -> dict[str, float]:
    return {label: statistics.fmean(found[label] for found in of_seeds) for label in of_seeds[0]}


def arrange(
    first: Place,
    task: Sequence[str],
    link: Sequence[str],
    workers: Sequence[int],
    batch: Sequence[str],
    optimizer: Sequence[str],
    disturbance: Sequence[str],
    star: bool,
) -> list[Place]:
    """All combinations; or, as a star, those that differ from the first of each in one value at most."""
    axes: dict[str, Sequence[Any]] = {
        "task": task,
        "link": link,
        "workers": workers,
        "batch": batch,
        "optimizer": optimizer,
        "disturbance": disturbance,
    }
    for name, values in axes.items():
        if not values:
            raise UsageError(f"--{name} has no value: give one or several, separated by commas")
    if not star:
        return [Place(*values) for values in product(*axes.values())]
    centre = replace(first, **{name: values[0] for name, values in axes.items()})
    around = [replace(centre, **{name: value}) for name, values in axes.items() for value in values[1:]]
    return list(dict.fromkeys([centre, *around]))


def complete_places(store: Results, labels: Sequence[str], length: float, seeds: int) -> list[Place]:
    """The places for which the file has every protocol and every seed."""
    cells = set(store.cells())
    places = dict.fromkeys(cell.place for cell in store.cells())
    complete = [
        place
        for place in places
        if all(Cell(place, label, seed, length) in cells for label in labels for seed in range(seeds))
    ]
    if not complete:
        raise UsageError("the file of results has no place with all these protocols and seeds: compute some first")
    return complete


def compute(store: Results, cells: Sequence[Cell], data: Path | None, processes: int | None) -> None:
    """Train the cells that are not in the store yet."""
    missing = [cell for cell in cells if cell not in store]
    work = partial(train, data=data)
    for done, (cell, curve) in enumerate(in_parallel(work, missing, processes), start=1):
        store.add(cell, curve)
        where = ", ".join(str(value) for value in asdict(cell.place).values() if value != "none")
        last = f"{curve[-1][1]:.4g} at {curve[-1][0]:.0f} s" if curve else "diverged"
        print(f"{done}/{len(missing)}  {where}: {cell.label}, seed {cell.seed}: {last}", file=sys.stderr)


def compare(curves: dict[str, Curve]) -> tuple[float, dict[str, float], dict[str, float]]:
    """The target of these runs, the seconds that each takes to it, and the metric of each at the end."""
    smooth = {label: _smooth(curve) for label, curve in curves.items()}
    best = sorted(min((value for _, value in curve), default=float("inf")) for curve in smooth.values())
    target = best[len(best) // 2]
    times = {label: seconds_to(target, curve) for label, curve in smooth.items()}
    return target, times, {label: curve[-1][1] if curve else float("nan") for label, curve in smooth.items()}


def seconds_to(target: float, curve: Curve) -> float:
    """When a curve first is at the target, on a straight line between two values; its end if it never is."""
    for index, (seconds, value) in enumerate(curve):
        if value <= target:
            if not index:
                return seconds
            before, higher = curve[index - 1]
            return before + (seconds - before) * (higher - target) / (higher - value)
    return curve[-1][0] if curve else float("inf")


def summary(times: list[dict[str, float]]) -> dict[str, float]:
    """What our protocol is worth against each other, over all places."""
    if any(OURS not in taken or len(taken) < 2 for taken in times):
        return {}
    slower: dict[str, list[float]] = defaultdict(list)
    behind = []
    for taken in times:
        for label, seconds in taken.items():
            slower[label].append(seconds / taken[OURS])
        behind.append(taken[OURS] / min(seconds for label, seconds in taken.items() if label != OURS))
    ratios = {
        f"seconds of {label} over {OURS}'s": statistics.geometric_mean(found)
        for label, found in slower.items()
        if label != OURS
    }
    return {
        **ratios,
        f"most seconds of {OURS} over the best other's": max(behind),
        f"share of places in which {OURS} is over 5 % behind": sum(b > 1 + BEHIND for b in behind) / len(behind),
    }


def _smooth(curve: Curve) -> Curve:
    """The means of successive evaluations; a run that exchanges rarely may have only a few."""
    count = min(MEAN_OF, len(curve))
    return [
        (curve[last][0], statistics.fmean(value for _, value in curve[last - count + 1 : last + 1]))
        for last in range(count - 1, len(curve))
    ]
