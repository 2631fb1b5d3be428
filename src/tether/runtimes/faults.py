"""Faults as data: what goes wrong in a simulated run, where and when."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from tether.errors import UsageError

Kind = Literal["crash", "restart", "pause", "slow", "cut", "drop"]


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fault. It strikes `at` a time, or when `node` has computed `step` gradients."""

    kind: Kind
    node: str
    at: float | None = None
    step: int | None = None
    #: how long a pause, a slow phase or a cut lasts, or how long after a crash the restart comes
    seconds: float = 0.0
    #: the other end of a cut link, or the receiver of a dropped message
    peer: str = ""
    #: how many times slower
    factor: float = 1.0
    #: which message between the two is dropped, from 1
    nth: int = 1


@dataclass(frozen=True)
class Faults:
    """A schedule of faults: `Faults().crash("worker-2", step=5).cut("hub", "worker-1", at=2, seconds=3)`."""

    schedule: tuple[Fault, ...] = ()

    def crash(self, node: str, *, at: float | None = None, step: int | None = None) -> Faults:
        """The node dies."""
        return self._with(Fault("crash", node, at=at, step=step))

    def restart(self, node: str, *, at: float | None = None, step: int | None = None, seconds: float = 1.0) -> Faults:
        """The node dies and a successor joins after `seconds`."""
        return self._with(Fault("restart", node, at=at, step=step, seconds=seconds))

    def pause(self, node: str, *, at: float | None = None, step: int | None = None, seconds: float) -> Faults:
        """The node stands still; what reaches it waits."""
        return self._with(Fault("pause", node, at=at, step=step, seconds=seconds))

    def slow(self, node: str, factor: float, *, at: float = 0.0, seconds: float = float("inf")) -> Faults:
        """The node computes `factor` times slower."""
        return self._with(Fault("slow", node, at=at, seconds=seconds, factor=factor))

    def cut(self, node: str, peer: str, *, at: float, seconds: float) -> Faults:
        """The link between two nodes is down; messages are held until it is back."""
        return self._with(Fault("cut", node, at=at, seconds=seconds, peer=peer))

    def drop(self, node: str, peer: str, *, nth: int = 1) -> Faults:
        """The nth message from `node` to `peer` is lost. No link does that: it plants a bug that must be found."""
        return self._with(Fault("drop", node, peer=peer, nth=nth))

    def _with(self, fault: Fault) -> Faults:
        if fault.kind != "drop" and fault.at is None and fault.step is None:
            raise UsageError(f"a {fault.kind} of {fault.node} needs a time (at) or a step")
        return Faults((*self.schedule, fault))

    def check(self, nodes: set[str]) -> None:
        """Refuse faults of nodes that do not exist; worker-2~2 may come to exist."""
        for fault in self.schedule:
            for name in filter(None, (fault.node, fault.peer)):
                if name.partition("~")[0] not in nodes:
                    raise UsageError(f"a fault names the node {name!r}; this run has {', '.join(sorted(nodes))}")

    @staticmethod
    def load(path: Path) -> Faults:
        """Faults from a JSON file: a list such as [{"kind": "crash", "node": "worker-2", "step": 5}]."""
        try:
            return Faults(tuple(msgspec.json.decode(path.read_bytes(), type=list[Fault])))
        except OSError as error:
            raise UsageError(f"cannot read the faults in {path}: {error.strerror}") from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # besides msgspec's own: bad UTF-8, nesting
            example = json.dumps([{"kind": "crash", "node": "worker-2", "step": 5}])
            raise UsageError(f"{path} is no list of faults ({error}); expected something like {example}") from None

    @staticmethod
    def draw(
        rng: np.random.Generator,
        workers: tuple[str, ...],
        hub: str | None,
        horizon_seconds: float,
        helpers: tuple[str, ...] = (),
    ) -> Faults:
        """Random faults in the first part of a run: at least one worker is never killed, and the hub never dies.

        Links are cut between a worker and the hub, or between two workers where no node is special (hub "").
        Helpers, such as aggregators, are mortal too. Everybody, the hub included, may stand still for a while.
        """
        faults = Faults()
        mortal = list(rng.permutation([*rng.permutation(list(workers))[1:], *helpers]))
        for _ in range(int(rng.integers(0, 5))):
            at = float(rng.uniform(0, horizon_seconds))
            seconds = float(rng.exponential(horizon_seconds / 8))
            worker = str(rng.choice(list(workers)))
            linked = hub or (hub == "" and len(workers) > 1)
            kinds = ["pause", "slow"] + (["cut"] if linked else []) + (["crash", "restart"] if mortal else [])
            match str(rng.choice(kinds)):
                case "pause":
                    anybody = str(rng.choice([*workers, *helpers, *filter(None, (hub,))]))
                    faults = faults.pause(anybody, at=at, seconds=seconds)
                case "slow":
                    faults = faults.slow(worker, float(rng.uniform(2, 20)), at=at, seconds=seconds)
                case "cut":
                    peer = hub or str(rng.choice([other for other in workers if other != worker]))
                    faults = faults.cut(worker, peer, at=at, seconds=seconds)
                case "crash":
                    faults = faults.crash(str(mortal.pop()), at=at)
                case "restart":
                    faults = faults.restart(str(mortal.pop()), at=at, seconds=seconds)
        return faults

    @staticmethod
    def churn(
        rng: np.random.Generator, workers: tuple[str, ...], horizon_seconds: float, every_seconds: float
    ) -> Faults:
        """Workers, their successors and the successors of those die and come back all the time; one is spared."""
        faults = Faults()
        mortal = [str(worker) for worker in rng.permutation(list(workers))[1:]]
        lives = dict.fromkeys(mortal, 1)
        back_at = dict.fromkeys(mortal, 0.0)
        at = 0.0
        while (at := at + float(rng.exponential(every_seconds))) < horizon_seconds:
            seconds = float(rng.exponential(every_seconds / 2))
            present = [worker for worker in mortal if back_at[worker] <= at]
            if not present:
                continue
            worker = str(rng.choice(present))
            life = f"{worker}~{lives[worker]}" if lives[worker] > 1 else worker
            faults = faults.restart(life, at=at, seconds=seconds)
            lives[worker] += 1
            back_at[worker] = at + seconds + every_seconds
        return faults
