"""One learner: the baseline that everything is compared with.

Rules: take a gradient, step, and so on. Invariant: never more steps than scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tether.errors import InvariantBroken, UsageError
from tether.machine import Compute, Effect, Event, GradientReady, Machine, Node, Seat, Started, Step, StopRequested
from tether.protocols.base import Options, Pace


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
    """The only node."""

    def __init__(self, seat: Seat) -> None:
        self.pace = Pace(seat.schedule)

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.pace.over:
            return []
        match event:
            case Started():
                return [Compute()]
            case GradientReady(samples=samples):
                effects = [Step(), *self.pace.advance(1, samples, now)]
                return effects if self.pace.over else [*effects, Compute()]
            case StopRequested(reason=reason):
                return self.pace.finish(reason)
        return []

    def check(self) -> None:
        if self.pace.step > self.pace.schedule.steps:
            raise InvariantBroken(f"{self.pace.step} steps made, {self.pace.schedule.steps} scheduled")
