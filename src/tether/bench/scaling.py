"""Time to a target error of mpca by the number of workers, after figure 13c of the MPCA SGD paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tether.bench.common import FashionData, Report, Seeds, Target, counts
from tether.bench.workloads import Trial, reach_all
from tether.errors import missing_extra
from tether.protocols import Mpca, Single

WORKLOAD = "resnet-110"


def scaling(
    data: FashionData = None,
    workers: Annotated[
        Sequence[int],
        counts("Numbers of workers. One alone is always measured too. Use fewer numbers for a first look."),
    ] = (1, 2, 4, 8, 16, 32, 64),
    seeds: Seeds = 3,
    target: Target = 0.12,
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("scaling.png"),
) -> Report:
    """Virtual seconds to a target error of mpca with 1 to 64 workers, as a table and a picture.

    The workload is ResNet-110 as the MPCA SGD paper prices it (figure 13c); what learns is a small network on
    Fashion-MNIST.
    """
    try:
        from tether.analysis.sweep_plots import scaling_png
    except ImportError:
        raise missing_extra("matplotlib", "plot") from None
    numbers = sorted({1, *workers})
    trials = [
        Trial(WORKLOAD, str(count), Single() if count == 1 else Mpca(), seed, count, target, data)
        for seed in range(seeds)
        for count in numbers
    ]
    outcomes = reach_all(trials)
    seconds = {count: outcomes[WORKLOAD, str(count), False]["seconds"] for count in numbers}
    rows = [{"workers": count, "seconds": seconds[count], "speedup": seconds[1] / seconds[count]} for count in numbers]
    ratios = {f"share of the ideal with {count}": seconds[1] / seconds[count] / count for count in numbers}
    picture.write_bytes(scaling_png(rows, target))
    return {"bench": "scaling", "target": target, "seeds": seeds, "rows": rows, "ratios": ratios}
