"""The learning rate of an update (Rudra, sections 3.2 and 5.1), and the staleness that its momentum is reduced by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: up to this many asynchronous workers, rule "staleness" keeps the rate of one
FULL_RATE_WORKERS = 8


@dataclass(frozen=True)
class RateRule:
    """How updates scale the task's learning rate. `Server.rate` says what each rule does."""

    rule: Literal["none", "sqrt", "1/n", "average", "gradient", "staleness"]
    #: mu, and B, the batch size that the task's learning rate was chosen for
    batch_size: int
    reference_batch: int
    #: into how many updates the workers' gradients are split; None: one for each worker present
    n: int | None

    def for_update(self, workers: int, staleness: float) -> tuple[float, float]:
        """The factor of the learning rate, and the staleness that momentum is reduced by.

        `workers` is the number present, `staleness` the average over the gradients of the update.
        """
        match self.rule:
            case "sqrt":
                return math.sqrt(workers * self.batch_size / self.reference_batch), 0.0
            case "1/n":
                return 1 / (self.n or workers), 0.0
            case "average":
                return 1 / max(1.0, staleness), 0.0
            case "staleness":
                return min(1.0, FULL_RATE_WORKERS / (1 + staleness)), staleness
        return 1.0, 0.0

    def for_push(self, staleness: Iterable[int]) -> float:
        """The factor of one push: in rule "gradient", the mean of one over the staleness of each gradient in it."""
        return statistics.fmean(1 / max(1, stale) for stale in staleness) if self.rule == "gradient" else 1.0
