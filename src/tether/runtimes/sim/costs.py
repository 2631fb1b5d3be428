"""What computing and exchanging cost in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tether.core.machine import Node
from tether.errors import UsageError


@dataclass(frozen=True)
class StepTime:
    """How long a gradient takes: fixed, drawn, per worker, with stragglers."""

    seconds: float = 0.1
    #: standard deviation over mean of a log-normal draw; 0 is fixed
    spread: float = 0.0
    #: how many times slower some workers always are, by name
    factors: Mapping[str, float] = field(default_factory=dict)
    #: the probability that a step straggles, and how many times longer it then takes
    straggle_chance: float = 0.0
    straggle_factor: float = 10.0

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise UsageError(f"a step takes some time: step_seconds must be more than 0, not {self.seconds}")
        if self.spread < 0 or not 0 <= self.straggle_chance <= 1:
            raise UsageError(
                "spread must be at least 0 and straggle_chance from 0 to 1, "
                f"not {self.spread} and {self.straggle_chance}"
            )

    def draw(self, node: Node, rng: np.random.Generator) -> float:
        """The seconds of one gradient of this node."""
        seconds = self.seconds * self.factors.get(node.name, 1.0)
        if self.spread:
            sigma = np.sqrt(np.log1p(self.spread**2))
            seconds *= float(rng.lognormal(-(sigma**2) / 2, sigma))
        if self.straggle_chance and rng.random() < self.straggle_chance:
            seconds *= self.straggle_factor
        return seconds


@dataclass(frozen=True)
class Costs:
    """All costs of one run, as plain numbers."""

    step_time: StepTime
    #: of a link, in each direction
    bytes_per_second: float
    latency_seconds: float
    #: how many bytes a byte of the vector stands for, where another model is priced
    bytes_scale: float
    #: what a broadcast or a reduction costs in addition to the links
    exchange_seconds: float
    exchange_seconds_per_byte: float

    @property
    def has_exchange_price(self) -> bool:
        """Whether broadcasts and reductions cost more than the links."""
        return self.exchange_seconds > 0 or self.exchange_seconds_per_byte > 0
