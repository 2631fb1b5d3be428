"""Faults as data: what goes wrong in a simulated run, where and when."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from tether.errors import UsageError

Kind = Literal[
    "crash",
    "restart",
    "join",
    "pause",
    "slow",
    "cut",
    "one-way-cut",
    "delay",
    "disk-full",
    "disk-damage",
    "drop",
]
#: faults of the disk that holds the checkpoints; a simulated cluster has no disk
DISK: tuple[Kind, ...] = ("disk-full", "disk-damage")


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fault. It strikes `at` a time, or when `node` has computed `step` gradients."""

    kind: Kind
    node: str = ""
    at: float | None = None
    step: int | None = None
    #: how long it lasts, or how long after the crash a restart happens
    seconds: float = 0.0
    #: the other end of a cut link, or the receiver of a dropped message
    peer: str = ""
    #: how many times slower
    factor: float = 1.0
    #: how many seconds longer a delayed message takes
    latency: float = 0.0
    #: which message between the two is dropped, from 1
    nth: int = 1

    def __str__(self) -> str:
        who = " to ".join(filter(None, (self.node, self.peer)))
        when = f"at {self.at:.3g} s" if self.at is not None else f"step {self.step}" if self.step else f"nth {self.nth}"
        lasts = f" for {self.seconds:.3g} s" if 0 < self.seconds < float("inf") else ""
        return " ".join(filter(None, (self.kind, who, when))) + lasts


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

    def join(self, node: str, *, at: float) -> Faults:
        """A worker joins that did not exist when the run began."""
        return self._with(Fault("join", node, at=at))

    def pause(self, node: str, *, at: float | None = None, step: int | None = None, seconds: float) -> Faults:
        """The node stands still; messages to it wait."""
        return self._with(Fault("pause", node, at=at, step=step, seconds=seconds))

    def slow(self, node: str, factor: float, *, at: float = 0.0, seconds: float = float("inf")) -> Faults:
        """The node computes `factor` times slower."""
        return self._with(Fault("slow", node, at=at, seconds=seconds, factor=factor))

    def cut(self, node: str, peer: str, *, at: float, seconds: float, one_way: bool = False) -> Faults:
        """The link between two nodes is down; messages are held until it is back. One way: only those to `peer`."""
        return self._with(Fault("one-way-cut" if one_way else "cut", node, at=at, seconds=seconds, peer=peer))

    def delay(self, node: str, latency: float, *, at: float, seconds: float) -> Faults:
        """For a while, messages from and to the node take `latency` seconds longer. They stay in order."""
        return self._with(Fault("delay", node, at=at, seconds=seconds, latency=latency))

    def disk(self, *, at: float, seconds: float, damages: bool = False) -> Faults:
        """Checkpoints written in this time fail, or are damaged afterwards."""
        return self._with(Fault("disk-damage" if damages else "disk-full", at=at, seconds=seconds))

    def drop(self, node: str, peer: str, *, nth: int = 1) -> Faults:
        """The nth message from `node` to `peer` is lost. No real link does this: it plants a bug for tests."""
        return self._with(Fault("drop", node, peer=peer, nth=nth))

    def _with(self, fault: Fault) -> Faults:
        if fault.kind != "drop" and fault.at is None and fault.step is None:
            raise UsageError(f"a {fault.kind} of {fault.node} needs a time (at) or a step")
        return Faults((*self.schedule, fault))

    def check(self, nodes: set[str]) -> None:
        """Refuse faults of nodes that do not exist; worker-2~2 may exist later."""
        known = nodes | {fault.node for fault in self.schedule if fault.kind == "join"}
        for fault in self.schedule:
            if fault.kind in DISK:
                raise UsageError(
                    f"a {fault.kind} needs a disk, which a simulated run does not have: use 'tether swarm'"
                )
            for name in filter(None, (fault.node, fault.peer)):
                if name.partition("~")[0] not in known:
                    raise UsageError(f"a fault names the node {name!r}; this run has {', '.join(sorted(nodes))}")

    def after(self, seconds: float, nodes: set[str]) -> Faults:
        """The faults that are still to come after `seconds`, in a part of the run that has these nodes."""
        known = nodes | {fault.node for fault in self.schedule if fault.kind == "join"}
        return Faults(
            tuple(
                msgspec.structs.replace(fault, at=fault.at - seconds)
                for fault in self.schedule
                if fault.at is not None
                and fault.at > seconds
                and all(name.partition("~")[0] in known for name in (fault.node, fault.peer) if name)
            )
        )

    @staticmethod
    def load(path: Path) -> Faults:
        """Faults from a JSON file: a list such as [{"kind": "crash", "node": "worker-2", "step": 5}]."""
        try:
            return Faults(tuple(msgspec.json.decode(path.read_bytes(), type=list[Fault])))
        except OSError as error:
            raise UsageError(f"cannot read the faults in {path}: {error.strerror}") from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # beyond msgspec's own: bad UTF-8, nesting
            example = json.dumps([{"kind": "crash", "node": "worker-2", "step": 5}])
            raise UsageError(f"{path} is not a list of faults ({error}); expected something like {example}") from None

    @staticmethod
    def draw(
        rng: np.random.Generator,
        workers: tuple[str, ...],
        hubs: tuple[str, ...],
        helpers: tuple[str, ...],
        horizon_seconds: float,
        joins: bool = True,
    ) -> Faults:
        """Random faults in the first part of a run; each heals, or the run survives it.

        Links are cut between a worker and a hub, or between two workers if there is no hub. `helpers`, such as
        aggregators, die as workers do. A part of the run ends when a hub dies, or all workers at about the same time.
        `joins`: more workers may join.
        """
        faults = Faults()
        mortal = [str(name) for name in rng.permutation([*workers, *helpers])]
        all_nodes = [*workers, *helpers, *hubs]
        linked = bool(hubs) or len(workers) > 1
        kinds = ["pause", "slow", "delay", "disk", "crash", "restart", "end"] + ["join"] * joins + 2 * ["cut"] * linked
        newcomers = 0
        for _ in range(int(rng.integers(0, 7))):
            at = float(rng.uniform(0, horizon_seconds))
            seconds = float(rng.exponential(horizon_seconds / 8))
            worker = str(rng.choice(list(workers)))
            match str(rng.choice(kinds)):
                case "pause":
                    faults = faults.pause(str(rng.choice(all_nodes)), at=at, seconds=seconds)
                case "slow":
                    faults = faults.slow(worker, float(rng.uniform(2, 20)), at=at, seconds=seconds)
                case "delay":
                    late = float(rng.exponential(horizon_seconds / 8))
                    faults = faults.delay(str(rng.choice(all_nodes)), late, at=at, seconds=seconds)
                case "join":
                    faults = faults.join(f"worker-{len(workers) + newcomers}", at=at)
                    newcomers += 1
                case "disk":
                    faults = faults.disk(at=at, seconds=4 * seconds, damages=bool(rng.random() < 0.5))
                case "cut":
                    peer = str(rng.choice([name for name in hubs or workers if name != worker]))
                    ends = (worker, peer) if rng.random() < 0.5 else (peer, worker)
                    faults = faults.cut(*ends, at=at, seconds=seconds, one_way=bool(rng.random() < 0.5))
                case "crash" if mortal:
                    faults = faults.crash(mortal.pop(), at=at)
                case "restart" if mortal:
                    faults = faults.restart(mortal.pop(), at=at, seconds=seconds)
                case "end" if hubs and rng.random() < 0.5:
                    faults = faults.crash(str(rng.choice(list(hubs))), at=at)
                case "end":
                    for name in rng.permutation(list(workers)):
                        faults = faults.crash(str(name), at=at + float(rng.exponential(0.05)))
        return faults

    @staticmethod
    def churn(
        rng: np.random.Generator, workers: tuple[str, ...], horizon_seconds: float, every_seconds: float
    ) -> Faults:
        """Workers and their successors keep dying and being replaced; one worker is spared."""
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
