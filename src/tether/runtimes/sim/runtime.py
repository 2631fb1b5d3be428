"""`Sim`: the simulated cluster, as a user describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tether.core import units
from tether.errors import UsageError
from tether.runtimes.base import Observer, Outcome, Plan, check_count
from tether.runtimes.randomness import randomness_kept, seed_all
from tether.runtimes.sim.costs import Costs, StepTime
from tether.runtimes.sim.faults import Faults
from tether.runtimes.sim.simulation import Simulation


@dataclass(frozen=True)
class Sim:
    """Where to run: a simulated cluster. `model_bytes` and `step_seconds` may be those of another, larger model."""

    workers: int = 4
    link: str | float = "1gbit"
    latency: str | float = "0.2ms"
    #: a number, a text with a unit, a `StepTime`, or the mapping that `describe` gives for one
    step_seconds: str | float | StepTime | Mapping[str, Any] = 0.1
    model_bytes: str | int | None = None
    #: what a broadcast or a reduction costs in addition to the link: a time for each, and a bandwidth; None is no cost
    exchange_seconds: str | float = 0.0
    exchange_rate: str | float | None = None
    faults: Faults = field(default_factory=Faults)
    #: check invariants after every event and tensors after every transfer, for tests of protocols; it costs time
    checked: bool = False
    #: how long it takes until the other nodes learn of a death
    detect_seconds: float = 0.5
    #: stop with an error after this many events since the last fault struck or healed; 0 is never
    events_max: int = 0
    #: intra-operation threads of torch; the number can change the last bits of a result
    threads: int = 1

    name = "sim"
    virtual = True
    processors = None
    restarts = 0

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_count("threads", self.threads)
        if units.bytes_per_second(self.link, "the link") <= 0:
            raise UsageError("the link needs some bandwidth, such as 1gbit")
        units.seconds(self.latency, "the latency")
        units.seconds(self.exchange_seconds, "exchange_seconds")
        if self.exchange_rate is not None and units.bytes_per_second(self.exchange_rate, "exchange_rate") <= 0:
            raise UsageError(
                "exchange_rate is a bandwidth, such as 200mbit; leave it out if bytes cost nothing beyond the link"
            )
        self.step_time  # noqa: B018 (refuses a bad value now)
        if self.model_bytes is not None and units.byte_count(self.model_bytes, "model_bytes") <= 0:
            raise UsageError("model_bytes must be more than 0, such as 7MiB")

    @property
    def step_time(self) -> StepTime:
        if isinstance(self.step_seconds, StepTime):
            return self.step_seconds
        if isinstance(self.step_seconds, Mapping):
            return StepTime(**self.step_seconds)
        return StepTime(units.seconds(self.step_seconds, "step_seconds"))

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with randomness_kept():
                seed_all(plan.random_seed)
                return Simulation(
                    plan,
                    observer,
                    self._costs(plan.vector_bytes),
                    self.faults,
                    checked=self.checked,
                    detect_seconds=self.detect_seconds,
                    events_max=self.events_max,
                ).run()
        finally:
            torch.set_num_threads(threads)

    def describe(self) -> dict[str, Any]:
        """The settings that a resumed run needs. Faults are not among them: they have struck already."""
        return {
            "name": self.name,
            "link": self.link,
            "latency": self.latency,
            "step_seconds": {**asdict(self.step_time), "factors": dict(self.step_time.factors)},
            "detect_seconds": self.detect_seconds,
            "model_bytes": self.model_bytes,
            "exchange_seconds": self.exchange_seconds,
            "exchange_rate": self.exchange_rate,
            "threads": self.threads,
        }

    def _costs(self, vector_bytes: int) -> Costs:
        scale = 1.0 if self.model_bytes is None else units.byte_count(self.model_bytes) / vector_bytes
        rate = self.exchange_rate
        return Costs(
            step_time=self.step_time,
            bytes_per_second=units.bytes_per_second(self.link),
            latency_seconds=units.seconds(self.latency),
            bytes_scale=scale,
            exchange_seconds=units.seconds(self.exchange_seconds),
            exchange_seconds_per_byte=0.0 if rate is None else scale / units.bytes_per_second(rate),
        )
