"""A benchmark of what kills cost: real processes, killed at random moments, and what the run comes to nevertheless."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from pathlib import Path

from tether.cells import Report
from tether.protocols import Options, Server
from tether.run import run
from tether.runtimes.local import Local
from tether.tasks.digits import Digits
from tether.testing import Assassin, descendants

_PROTOCOLS: dict[str, Options] = {
    "server": Server(sync="async", rate="none"),
    "inline": Server(sync="async", apply="inline"),
}
_VICTIMS = {"one learner": ["worker-0"], "the hub": ["hub"], "all learners": ["worker-0", "worker-1"]}


def survival(kills: int = 50, steps: int = 3000, seed: int = 0) -> Report:
    """Two learners on digits; kill -9 of a learner, of the hub and of all learners at random moments, in turns."""
    chance = random.Random(seed)
    whole = {name: _error(options, steps, Assassin([], 0)) for name, options in _PROTOCOLS.items()}
    found: dict[tuple[str, str], list[float]] = {}
    settings = [(name, victim) for name in _PROTOCOLS for victim in _VICTIMS]
    for i in range(kills):
        name, victim = settings[i % len(settings)]
        assassin = Assassin(list(_VICTIMS[victim]), chance.randrange(1, 3 * steps // 4))
        found.setdefault((name, victim), []).append(_error(_PROTOCOLS[name], steps, assassin))
        if not assassin.killed_at or descendants(os.getpid()):
            raise AssertionError(f"{name}, {victim}: nobody was killed, or processes are left")
    rows = [
        {
            "apply": name,
            "killed": victim,
            "runs": len(errors),
            "error": statistics.median(errors),
            "largest": max(errors),
            "undisturbed": whole[name],
        }
        for (name, victim), errors in sorted(found.items())
    ]
    worst = max(error - whole[name] for (name, _), errors in found.items() for error in errors)
    left = len([path for path in Path("/dev/shm").iterdir() if "tether" in path.name])
    return {"bench": "survival", "rows": rows, "ratios": {"largest error more": worst, "files left in /dev/shm": left}}


def _error(options: Options, steps: int, assassin: Assassin) -> float:
    with tempfile.TemporaryDirectory() as directory:
        result = run(
            Digits(),
            options,
            Local(2),
            steps=steps,
            evaluate_every=1e9,
            checkpoint_seconds=0.2,
            trace=False,
            run_dir=Path(directory) / "run",
            progress=assassin,
        )
    if result.figures["steps"] != steps:
        raise AssertionError(f"{options} made {result.figures['steps']} steps, not {steps}")
    return result.metrics["error"]
