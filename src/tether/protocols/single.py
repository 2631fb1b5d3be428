"""One learner: the baseline that everything is compared with.

Rules: take a gradient, step, and so on. Invariant: never more steps than scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tether.errors import InvariantBroken, UsageError
from tether.machine import Effect, Event, GradientReady, Machine, Node, Seat, Started, Step, StopRequested
from tether.protocols.base import Options, Pace
from tether.protocols.ledger import Lease, More, Portion


@dataclass(frozen=True)
class Single(Options):
    """Ordinary training in one place."""

    name = "single"
    summary = "one learner, no exchange: the baseline"
    joint = "worker-0"
    workers_max = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compress != "none":
            raise UsageError(f"single sends nothing, so compress={self.compress!r} would do nothing: leave it out")

    def nodes(self, workers: int) -> tuple[Node, ...]:
        return (Node("worker-0", "worker", computes=True),)

    def machine(self, seat: Seat) -> Machine:
        return Alone(seat)


class Alone:
    """The only node: it deals to itself."""

    def __init__(self, seat: Seat) -> None:
        self.name = seat.node.name
        self.pace = Pace(seat)
        self.portion = Portion(seat, self._deal)

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.pace.over:
            return []
        match event:
            case Started():
                return self.portion.compute()
            case GradientReady():
                self.pace.ledger.count(self.name, 1)
                effects = [Step(), *self.pace.advance(1, 1, now)]
                return effects if self.pace.over else [*effects, *self.portion.compute()]
            case StopRequested(reason=reason):
                return self.pace.finish(reason)
        return []

    def _deal(self, more: More) -> list[Effect]:
        batches = self.pace.ledger.deal(self.name, more.wanted)
        return self.portion.take(Lease(batches, self.pace.position)) if batches else []

    def check(self) -> None:
        self.pace.ledger.check()
        if self.pace.step > self.pace.schedule.steps:
            raise InvariantBroken(f"{self.pace.step} steps made, {self.pace.schedule.steps} scheduled")
