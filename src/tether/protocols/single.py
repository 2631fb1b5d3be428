"""One worker: the baseline for every comparison.

Rule: compute a gradient, step, repeat. Invariant: never more steps than scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tether.core.effects import Contributed, Effect, Step
from tether.core.events import DataEnded, Event, GradientReady, Started, StopRequested
from tether.core.machine import Machine, Node, NodeContext
from tether.errors import InvariantBroken, UsageError
from tether.protocols.base import Options, RunProgress
from tether.protocols.ledger import Lease, More, Portion


@dataclass(frozen=True)
class Single(Options):
    """Ordinary training in one place."""

    name = "single"
    summary = "one worker, no exchange: the baseline"
    suits = "one machine, or a baseline to compare with"
    hub = "worker-0"
    workers_max = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compress != "none":
            raise UsageError(f"single sends nothing, so compress={self.compress!r} would do nothing: remove it")

    def nodes(self, workers: int) -> tuple[Node, ...]:
        return (Node("worker-0", "worker", computes=True),)

    def machine(self, context: NodeContext) -> Machine:
        return Alone(context)


class Alone:
    """The only node: it deals to itself."""

    def __init__(self, context: NodeContext) -> None:
        self.name = context.node.name
        self.progress = RunProgress(context)
        self.portion = Portion(context, self._deal)

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.progress.over:
            return []
        match event:
            case Started():
                return self.portion.compute()
            case GradientReady():
                self.progress.ledger.count(self.name, 1)
                effects = [Step(), *self.progress.advance(1, 1, now)]
                return effects if self.progress.over else [*effects, *self.portion.compute()]
            case DataEnded():
                return [Contributed()]
            case StopRequested(reason=reason):
                return self.progress.finish(reason)
        return []

    def _deal(self, more: More) -> list[Effect]:
        batches = self.progress.ledger.deal(self.name, more.wanted)
        return self.portion.take(Lease(batches, self.progress.position)) if batches else []

    def check(self) -> None:
        self.progress.ledger.check()
        if self.progress.step > self.progress.schedule.steps:
            raise InvariantBroken(f"{self.progress.step} steps made, {self.progress.schedule.steps} scheduled")
