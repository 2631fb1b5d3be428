"""What the tables in docs/protocols.md compare: all protocols, the parts of tide, and runs that are disturbed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tether.bench.cells import DISTURBANCES, Place

PROTOCOLS = ("averaging", "diloco", "diloco-50", "elastic", "grid", "mpca", "streaming", "tide")
Name = Literal["study", "ablations", "disturbed"]

#: places on which tide was tuned: the first of each task, and what differs from it in one value
_STUDY = (
    Place(),
    *(Place(link=link) for link in ("10mbit", "1gbit", "10gbit")),
    *(Place(workers=workers) for workers in (2, 4, 16, 32)),
    Place(batch="large"),
    *(Place(optimizer=optimizer) for optimizer in ("sgd", "falling")),
    *(
        place
        for task in ("chars", "text")
        for place in (
            Place(task),
            *(Place(task, link) for link in ("10mbit", "1gbit")),
            *(Place(task, workers=workers) for workers in (2, 32)),
            Place(task, batch="large"),
            Place(task, optimizer="sgd"),
        )
    ),
    Place("cifar"),
    Place("cifar", "1gbit"),
    Place("cifar", batch="large"),
)
#: places that nothing was chosen by: reported apart
HELD_BACK = (
    Place("fashion", "10mbit", 16, "large", "sgd"),
    Place("chars", "1gbit", 4, "small", "falling"),
    Place("text", "1gbit", 32),
    Place("cifar", "1gbit", 2, "small", "sgd"),
)
#: by label: what is different from tide as it is
PARTS = {
    "tide": "tide",
    "tide:drift=0": "without outer momentum",
    "tide-pull": "with the pull of mpca instead of the difference",
    "tide:phases=1": "one phase",
    "tide:phases=2": "two phases",
    **{f"tide:every={steps}": f"contributions after at least {steps} steps" for steps in (10, 20, 50, 100, 200)},
    "tide:drift=1": "drift fixed at 1",
    "tide:drift=3": "drift fixed at 3",
    "tide:horizon=100": "horizon fixed at 100 steps",
    "tide:horizon=1000": "horizon fixed at 1000 steps",
}


@dataclass(frozen=True)
class Suite:
    """Places, and the labels of what is compared on them."""

    places: tuple[Place, ...]
    labels: tuple[str, ...]


SUITES: dict[Name, Suite] = {
    "study": Suite(_STUDY + HELD_BACK, PROTOCOLS),
    "ablations": Suite((Place(), Place("chars")), tuple(PARTS)),
    "disturbed": Suite(tuple(Place(disturbance=name) for name in DISTURBANCES), PROTOCOLS),
}
