"""What every protocol's options have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from tether.compress import Compression
from tether.machine import Checkpoint, Effect, Evaluate, Finish, Machine, Message, Node, Schedule, Seat
from tether.settings import check_types


def option(default: Any, doc: str, *, kw_only: bool = False) -> Any:
    """A documented field of an options class; `kw_only` keeps it out of the positional arguments of subclasses."""
    return field(default=default, metadata={"doc": doc}, kw_only=kw_only)


@dataclass(frozen=True)
class Options:
    """A protocol: who takes part, what they say, and the machine of each. Fields are validated when it is made."""

    name: ClassVar[str]
    summary: ClassVar[str]
    messages: ClassVar[tuple[type[Message], ...]] = ()
    #: the node whose vector is the joint model; "": none is special, and whoever finishes first ends the run
    joint: ClassVar[str] = "hub"
    #: the joint node steps with gradients of others, so the optimizer must be elementwise
    steps_at_hub: ClassVar[bool] = False
    #: nodes exchange values by broadcasts and reductions only
    collective: ClassVar[bool] = False
    workers_max: ClassVar[int | None] = None

    compress: Compression = option(  # noqa: RUF009 (a field)
        "none", "what is sent: as it is, in half precision, or in 8 bits; losses are made up for later", kw_only=True
    )

    def __post_init__(self) -> None:
        """Refuse values of a wrong type; a subclass adds what else must hold."""
        check_types(self, f"protocol {self.name}")

    def __str__(self) -> str:
        """What differs from the defaults."""
        set_ = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in set_.items())})"

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        """The settings that the conformance kit and the swarm try."""
        return (cls(),)

    @property
    def shares(self) -> bool:
        """All nodes have one and the same vector, which takes a machine with shared memory."""
        return False

    @property
    def vital(self) -> frozenset[str]:
        """The nodes that a run cannot lose: who holds the joint model, or a part of it."""
        return frozenset({self.joint} - {""})

    def part_of(self, node: Node) -> tuple[int, int] | None:
        """Which part of the vector, of how many, is all that a node steps; None: the whole."""
        return None

    def settled(self, workers: int, processors: int | None) -> Options:
        """With what is left to be chosen by the machine chosen; `processors` is None where each node has its own."""
        return self

    @property
    def pool_threads(self) -> int:
        """How many threads a node of its own process may use for what is marked loose."""
        return 1

    def nodes(self, workers: int) -> tuple[Node, ...]:
        """A hub and its workers, unless a protocol says otherwise."""
        return Node("hub", "hub"), *(Node(f"worker-{i}", "worker", computes=True, index=i) for i in range(workers))

    def machine(self, seat: Seat) -> Machine:
        """The machine for one node."""
        raise NotImplementedError


class Pace:
    """What the joint node does besides its protocol: count, have the model evaluated and saved, and end the run."""

    def __init__(self, schedule: Schedule, state: Callable[[], dict[str, Any]] = dict) -> None:
        """`state` gives what a checkpoint shall keep of the protocol."""
        self.schedule = schedule
        self._state = state
        self.step = schedule.first_step
        self.samples = schedule.first_samples
        self.over = False
        self._gradients = 0
        self._saved_at: float | None = None

    @property
    def steps_left(self) -> int:
        return self.schedule.steps - self.step

    def advance(self, steps: int, samples: int, now: float) -> list[Effect]:
        """Every worker has made so many further steps."""
        every = self.schedule.evaluate_every
        evaluations_before = self.step // every
        self.step += min(steps, self.steps_left)
        self.samples += samples
        if self.steps_left <= 0:
            return self.finish("all steps made")
        effects: list[Effect] = []
        if self.step // every > evaluations_before:
            effects.append(Evaluate(self.step, self.samples))
        if self._saved_at is None:
            self._saved_at = now
        if now - self._saved_at >= self.schedule.checkpoint_seconds:
            self._saved_at = now
            effects.append(Checkpoint(self.step, self.samples, self._state()))
        return effects

    def advance_gradients(self, gradients: int, workers: int, samples: int, now: float) -> list[Effect]:
        """For protocols without rounds: so many gradients, a step being as many as there are workers."""
        return self.advance(self.whole_steps(gradients, workers), samples, now)

    def whole_steps(self, gradients: int, workers: int) -> int:
        """Steps of so many workers that further gradients make; what is left over is kept for the next."""
        steps, self._gradients = divmod(self._gradients + gradients, workers)
        return steps

    def finish(self, reason: str) -> list[Effect]:
        """End the run with the joint model as it is."""
        self.over = True
        return [
            Evaluate(self.step, self.samples, final=True),
            Checkpoint(self.step, self.samples, self._state(), final=True),
            Finish(reason),
        ]
