"""Synchronous model averaging (SparkNet; MPCA SGD, section 3.1), and with an outer optimizer (DiLoCo).

A round: the hub broadcasts the joint model and deals mini-batches; every worker installs the model and makes tau steps
of its own; the workers' vectors are reduced to their mean, which becomes the joint model. Workers are idle while
parameters travel.

An outer optimizer treats the joint model minus the mean as a gradient and steps with heavy-ball momentum or, as in
DiLoCo, with Nesterov's. With rate 1 and no momentum the result is the mean itself. BatchNorm's buffers are always the
mean.

tau "auto" follows the 1:5 rule: computing takes five times as long as communicating. The first round has tau 1. A
worker reports how long it waited between its last step and the next joint model, and how long its steps took. The
slowest worker of a round waits for no other worker, so the shortest wait measures communication alone.

A worker that dies is left out of the current round, and its mini-batches are dealt again in the next. A worker that
joins takes part from the next round on. A worker whose data ends contributes the steps that it has made in the round,
and from then on answers every round at once, with weight 0.

Invariants: a worker computes only inside a round, on what it was dealt for it; rounds never overlap.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from torch import Tensor

from tether.core.effects import Broadcast, Compute, Contributed, Effect, Install, Record, Reduce, Send, Step
from tether.core.events import (
    Broadcasted,
    DataEnded,
    Event,
    GradientReady,
    PeerJoined,
    PeerLost,
    Received,
    Reduced,
    Started,
    StopRequested,
)
from tether.core.machine import Machine, NodeContext
from tether.core.message import Message, Stream, Tag
from tether.core.snapshot import Values, snapshot, tensor
from tether.errors import InvariantBroken, UsageError
from tether.protocols.base import Options, RunProgress, option

#: computing takes this many times as long as communicating (SparkNet's rule)
COMPUTE_PER_COMMUNICATION = 5


#: the stream of the joint model and of the reductions that make it
ROUND = Stream("round")


class Joint(Message, frozen=True):
    """Hub to all: the joint model, and the mini-batches that each worker trains on in this round.

    In the last round of a run some workers may get fewer. `position` is how many mini-batches count.
    """

    round: int
    values: Values
    batches: dict[str, tuple[int, ...]]
    position: int


class Effort(Message, frozen=True):
    """Worker to hub, if tau is automatic: how long it waited for the round, and how long a step took."""

    wait_seconds: float | None
    step_seconds: float


@dataclass(frozen=True)
class Averaging(Options):
    """Every tau steps the workers' models are replaced by their average."""

    tau: int | Literal["auto"] = option(
        "auto",
        "steps between two averages; 'auto': computing takes five times as long as communicating. Raise "
        "it on a slow network",
    )

    outer: Literal["none", "momentum", "nesterov"] = option(
        "none",
        "optimizer that steps with the averaged difference as its gradient; 'nesterov' is DiLoCo; 'none': the average "
        "becomes the joint model",
    )
    outer_rate: float = option(0.7, "learning rate of the outer optimizer")
    outer_momentum: float = option(0.9, "momentum of the outer optimizer")

    name = "averaging"
    summary = "workers train alone for tau steps, then all continue from the average (SparkNet)"
    suits = "the simplest rule, or DiLoCo as published (outer=nesterov); all workers wait for the slowest"
    messages = (Joint, Effort)
    collective = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau != "auto" and self.tau < 1:
            raise UsageError(f"tau must be at least 1 or 'auto', not {self.tau}")
        if self.outer_rate <= 0:
            raise UsageError(f"outer_rate must be more than 0, not {self.outer_rate}")
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(f"outer_momentum must be at least 0 and below 1, not {self.outer_momentum}")
        if self.outer == "none" and (self.outer_rate, self.outer_momentum) != (0.7, 0.9):
            raise UsageError("outer_rate and outer_momentum are for an outer optimizer: give outer='nesterov' too")

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        return cls(tau=1), cls(tau=4), cls(), cls(tau=4, outer="nesterov"), cls(tau=2, outer="momentum", outer_rate=0.3)

    def machine(self, context: NodeContext) -> Machine:
        if context.node.role == "hub":
            return AveragingHub(context, self)
        return AveragingWorker(context, measures=self.tau == "auto")


class _Outer:
    """The outer optimizer, over the parameters alone."""

    def __init__(self, options: Averaging, context: NodeContext) -> None:
        self._options = options
        self._weights = context.weights
        self._parameters = context.parameter_count
        self._velocity: Tensor | None = (context.restored or {}).get("velocity")

    def step(self, mean: Tensor) -> Tensor:
        """The joint model after a round with this mean, which may be overwritten."""
        options = self._options
        if options.outer == "none":
            return mean
        joint = self._weights[: self._parameters]
        gradient = joint - mean[: self._parameters]
        if self._velocity is None:
            self._velocity = gradient.clone()
        else:
            self._velocity = self._velocity * options.outer_momentum + gradient
        move = self._velocity
        if options.outer == "nesterov":
            move = gradient.add_(self._velocity, alpha=options.outer_momentum)
        mean[: self._parameters] = joint - options.outer_rate * move
        return mean

    def state(self) -> dict[str, Any]:
        return {} if self._velocity is None else {"velocity": self._velocity}


class AveragingHub:
    """Opens rounds and averages."""

    def __init__(self, context: NodeContext, options: Averaging) -> None:
        self.context = context
        self.progress = RunProgress(context, self._state, dealt=False)
        self.present: list[str] = []
        self.round = -1
        self.in_round = False
        self._auto = options.tau == "auto"
        self._outer = _Outer(options, context)
        #: the tau of a full round, and that of the current round: the last one may be shorter
        self.tau = options.tau if options.tau != "auto" else context.restored["tau"] if context.restored else 1
        self.round_tau = 0
        self._efforts: list[Effort] = []
        self._communication_seconds: float | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.progress.over:
            return []
        match event:
            case Started(members=members):
                self.present = [worker for worker in self.context.workers if worker in members]
                return self._open_round()
            case Received(message=Effort() as effort):
                self._efforts.append(effort)
            case Reduced(tag=tag):
                if not self.in_round or tag != Tag(ROUND, self.round):
                    raise InvariantBroken(f"the reduction of {tag} closed outside of round {self.round}")
                return self._close_round(event, now)
            case PeerJoined(peer=peer, role="worker"):
                self.present.append(peer)
                self.progress.join(peer)
                return [] if self.in_round else self._open_round()
            case PeerLost(peer=peer) if peer in self.present:
                self.present.remove(peer)
            case StopRequested(reason=reason):
                return self.progress.finish(reason)
        return []

    def _open_round(self) -> list[Effect]:
        if not self.present:
            return []
        self.round += 1
        self.in_round = True
        self.progress.begin(self.present)
        batches = self.progress.ledger.deal_round(min(self.tau, self.progress.steps_left))
        self.round_tau = max(map(len, batches.values()))
        members = ("hub", *self.present)
        return [
            Broadcast(ROUND, members, Joint(self.round, snapshot(), batches, self.progress.position)),
            Reduce(Tag(ROUND, self.round), members),
        ]

    def _close_round(self, reduced: Reduced, now: float) -> list[Effect]:
        self.in_round = False
        total, weight, contributors = reduced.total, reduced.weight, reduced.contributors
        if total is None or not weight:
            return self._open_round()
        made = dict(zip(contributors, reduced.steps, strict=True))
        for worker, steps in made.items():
            self.progress.ledger.count(worker, steps)
        self.progress.begin(self.present)
        self._choose_tau()
        effects: list[Effect] = [
            Install(self._outer.step(total / weight)),
            Record({"round": self.round, "tau": self.round_tau, "workers": len(contributors)}),
            *self.progress.advance(sum(made.values()), len(contributors), now),
        ]
        return effects if self.progress.over else [*effects, *self._open_round()]

    def _choose_tau(self) -> None:
        efforts, self._efforts = self._efforts, []
        waits = [effort.wait_seconds for effort in efforts if effort.wait_seconds is not None]
        if not self._auto or not waits:
            return
        if self._communication_seconds is None:
            self._communication_seconds = min(waits)
        else:
            self._communication_seconds = (self._communication_seconds + min(waits)) / 2
        step_seconds = statistics.median(effort.step_seconds for effort in efforts)
        if step_seconds > 0:
            self.tau = max(1, math.ceil(COMPUTE_PER_COMMUNICATION * self._communication_seconds / step_seconds))

    def _state(self) -> dict[str, Any]:
        return {"tau": self.tau, **self._outer.state()}

    def check(self) -> None:
        if self.in_round and not 1 <= self.round_tau <= self.progress.schedule.steps:
            raise InvariantBroken(f"round {self.round} has tau {self.round_tau}")
        if len(set(self.present)) != len(self.present):
            raise InvariantBroken(f"a worker is present twice: {self.present}")
        self.progress.ledger.check()


class AveragingWorker:
    """Makes tau steps from every joint model that it receives."""

    def __init__(self, context: NodeContext, measures: bool) -> None:
        self.name = context.node.name
        self.measures = measures
        self.round = -1
        self.position = 0
        self.members: tuple[str, ...] = ()
        #: the mini-batches of the round that are left, and the steps made so far
        self.batches: deque[int] = deque()
        self.steps = 0
        self._upcoming = context.schedule.upcoming
        self.computing = False
        #: its data has ended, and it has said so
        self._ended = False
        self._told = False
        self._compute_seconds = 0.0
        self._done_at: float | None = None
        self._wait_seconds: float | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Broadcasted(members=members, message=Joint() as joint):
                if self.batches or self.computing:
                    raise InvariantBroken(f"round {joint.round} began while round {self.round} lacked steps")
                self.round, self.members, self.position = joint.round, members, joint.position
                self.batches = deque(joint.batches.get(self.name, ()))
                self.steps, self._compute_seconds = 0, 0.0
                self._wait_seconds = None if self._done_at is None else now - self._done_at
                install = Install(tensor(joint.values))
                return [install, *self._answer_empty(now)] if self._ended else [install, *self._go_on(now)]
            case GradientReady(seconds=seconds):
                self.computing = False
                self.steps += 1
                self._compute_seconds += seconds
                return [Step(), *self._go_on(now)]
            case DataEnded():
                self._ended = True
                if not self.batches and not self.computing:
                    return []  # between two rounds: the next joint model has all its steps
                self.batches, self.computing = deque(), False
                return self._contribute(now)
        return []

    def _answer_empty(self, now: float) -> list[Effect]:
        """The joint model has all steps of this worker, which takes part in the round without any."""
        self.batches.clear()
        first, self._told = not self._told, True
        return [*self._contribute(now), *([Contributed()] if first else [])]

    def _go_on(self, now: float) -> list[Effect]:
        if not self.batches:
            return self._contribute(now)
        self.computing = True
        batch = self.batches.popleft()
        self.position = max(self.position, batch)
        return [Compute(batch=batch, upcoming=tuple(islice(self.batches, self._upcoming)), position=self.position)]

    def _contribute(self, now: float) -> list[Effect]:
        self._done_at = now
        contribution = Reduce(Tag(ROUND, self.round), self.members, snapshot(), float(self.steps > 0), self.steps)
        if not self.measures or not self.steps:
            return [contribution]
        return [Send("hub", Effort(self._wait_seconds, self._compute_seconds / self.steps)), contribution]

    def check(self) -> None:
        if self.batches and not self.computing:
            raise InvariantBroken(f"idle with {len(self.batches)} mini-batches of round {self.round} left")
