"""What Slurm tells a job about itself, in the environment."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tether.errors import UsageError

#: what `--hosts` is for the nodes of the job that the command is part of
SLURM = "slurm"
#: jobs listen at one of this many ports from the first, so that two of them on a machine do not meet
FIRST_PORT, PORTS = 20_000, 10_000
#: the most names that a list of nodes may stand for
NODES_MAX = 100_000


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, and which of the processes that srun has started this one is."""

    hosts: tuple[str, ...]
    rank: int
    #: 1 in the script of a batch job
    tasks: int
    port: int


def allocation(environment: Mapping[str, str]) -> Allocation:
    """The job that this process is part of."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UsageError(
            "--hosts slurm: this is not a job of Slurm, since SLURM_JOB_NODELIST is not set; start it by sbatch, "
            "salloc or srun, or name the hosts"
        )
    number = {}
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        text = environment.get(name, "1" if name.endswith("TASKS") else "0")
        if not text.isdecimal():
            raise UsageError(f"--hosts slurm: {name} is {text!r}, which is not a number as Slurm sets it")
        number[name] = int(text)
    return Allocation(
        tuple(expand(nodes)),
        rank=number["SLURM_PROCID"],
        tasks=number["SLURM_STEP_NUM_TASKS"],
        # the steps of a job may run side by side
        port=FIRST_PORT + (10 * number["SLURM_JOB_ID"] + number["SLURM_STEP_ID"]) % PORTS,
    )


def expand(nodes: str) -> list[str]:
    """The names in a list of nodes, such as node[1-3,07] or rack[0-1]n[1-2],login."""
    found: list[str] = []
    for part in re.split(r",(?![^\[]*\])", nodes):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # every second is what was in brackets
        plain = "".join(pieces[::2])
        if not part or re.search(r"[\[\]\s]", plain):
            raise _not_nodes(nodes)
        choices = [list(_ranges(piece, nodes)) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        found += map("".join, itertools.product(*choices))
        if len(found) > NODES_MAX:
            raise _not_nodes(nodes)
    return found


def _ranges(text: str, nodes: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not int(first) <= int(last) < int(first) + NODES_MAX:
            raise _not_nodes(nodes)
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _not_nodes(nodes: str) -> UsageError:
    return UsageError(f"{nodes!r} is not a list of nodes: it must be like node[1-3,7], as Slurm writes it")
