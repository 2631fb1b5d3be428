"""What this process is in a run: alone, one of the scripts that `tether launch` has started, or a child of one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tether.core.machine import Node
from tether.errors import UsageError

if TYPE_CHECKING:
    from tether.loops.plan import LoopPlan
    from tether.runtimes.process.spec import NodeSpec

#: set for the children of a script, such as the workers of a DataLoader, which may ask for their rank too
RANK, WORLD_SIZE = "TETHER_RANK", "TETHER_WORLD_SIZE"


@dataclass(frozen=True)
class Place:
    """The place of a script in the run that started it."""

    spec: NodeSpec
    node: Node
    plan: LoopPlan


#: of this process, if `tether launch` has started it
_place: Place | None = None
_place_pid = 0


def take(place: Place) -> None:
    """This process runs the script of a worker."""
    global _place, _place_pid
    _place, _place_pid = place, os.getpid()
    os.environ[RANK], os.environ[WORLD_SIZE] = str(place.node.index), str(place.plan.world)


def place() -> Place | None:
    """The place of this process; None if the script was started alone."""
    if _place is not None and _place_pid == os.getpid():
        return _place
    if RANK in os.environ:
        raise UsageError(
            "tether.join() was called in a child process of the script: call it in the process that 'tether launch' "
            "has started, once, under if __name__ == '__main__' if the script starts processes by spawn"
        )
    return None


def rank() -> int:
    """The number of this process among those of the run, from 0; 0 in a script that was started alone."""
    return int(os.environ.get(RANK, "0"))


def world_size() -> int:
    """How many processes the run was started with; 1 in a script that was started alone."""
    return int(os.environ.get(WORLD_SIZE, "1"))
