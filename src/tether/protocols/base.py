"""What all protocols share: the options' base class, and the bookkeeping of a run's progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from tether.core.compress import Compression
from tether.core.effects import Average, Checkpoint, Effect, Evaluate, Finish, Send
from tether.core.machine import Machine, Node, NodeContext
from tether.core.message import Message
from tether.core.settings import check_types
from tether.errors import UsageError
from tether.protocols.ledger import AHEAD, Lease, Ledger, More, Recall, Returned


def option(default: Any, doc: str, *, kw_only: bool = False) -> Any:
    """A documented field of an options class; `kw_only` keeps it out of the positional arguments of subclasses."""
    return field(default=default, metadata={"doc": doc}, kw_only=kw_only)


@dataclass(frozen=True)
class Options:
    """The options of a protocol, and how it builds its nodes and their machines. Values are validated at once."""

    name: ClassVar[str]
    summary: ClassVar[str]
    #: when to take it
    suits: ClassVar[str]
    messages: ClassVar[tuple[type[Message], ...]] = ()
    #: the node whose vector is the joint model; "": there is none, and the first node that finishes ends the run
    hub: ClassVar[str] = "hub"
    #: nodes exchange values only by broadcasts and reductions
    collective: ClassVar[bool] = False
    workers_max: ClassVar[int | None] = None

    compress: Compression = option(  # noqa: RUF009 (a field)
        "none",
        "send values in half precision or in 8 bits; the rounding error is added to the next message. Use it where the "
        "network is slow",
        kw_only=True,
    )

    guard: float = option(
        0.0,
        "refuse a gradient that is this many times longer than usual for its worker; 100 refuses only broken ones, "
        "0 refuses none",
        kw_only=True,
    )

    def __post_init__(self) -> None:
        """Refuse values of a wrong type; subclasses check the rest."""
        check_types(self, f"protocol {self.name}")
        if self.guard and not self.guard > 1:
            raise UsageError(f"guard must be more than 1, such as 100, or 0 for none, not {self.guard}")

    def __str__(self) -> str:
        """The options that differ from the defaults."""
        set_ = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in set_.items())})"

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        """The settings that the conformance kit and the swarm try."""
        return (cls(),)

    @property
    def steps_at_hub(self) -> bool:
        """The hub steps with the gradients of others."""
        return False

    @property
    def steps_at_workers(self) -> bool:
        """Workers step with optimizers of their own."""
        return not self.steps_at_hub

    @property
    def clips_mean(self) -> bool:
        """A hub steps with the mean of several gradients, so the mean is clipped, and not each gradient."""
        return False

    @property
    def needs_elementwise(self) -> bool:
        """A machine hands the optimizer a gradient, which is flat, so the optimizer must be elementwise."""
        return self.steps_at_hub

    @property
    def shares(self) -> bool:
        """All nodes have one and the same vector, which needs shared memory."""
        return False

    @property
    def vital(self) -> frozenset[str]:
        """The nodes that a run cannot lose: those that hold the joint model or a part of it."""
        return frozenset({self.hub} - {""})

    def part_of(self, node: Node) -> tuple[int, int] | None:
        """(index, count) of the part of the vector that a node steps; None: the whole vector."""
        return None

    def resolved_for(self, workers: int, processors: int | None) -> Options:
        """These options with every "auto" that depends on the machine resolved.

        `processors` is how many processors the nodes share; None: each node has its own.
        """
        return self

    @property
    def pool_threads(self) -> int:
        """How many threads a node's process may use for unordered effects."""
        return 1

    def nodes(self, workers: int) -> tuple[Node, ...]:
        """A hub and its workers, unless a protocol says otherwise."""
        return Node("hub", "hub"), *(Node(f"worker-{i}", "worker", computes=True, index=i) for i in range(workers))

    def machine(self, context: NodeContext) -> Machine:
        """The machine for one node."""
        raise NotImplementedError


class RunProgress:
    """The hub's bookkeeping in every protocol: it deals out the data, counts, and says when to evaluate, save and end.

    A run's position is the number of mini-batches that count. The goal, the learning-rate schedule and the evaluations
    depend on the position alone. A goal in `steps` applies to each worker.
    """

    def __init__(
        self, context: NodeContext, state: Callable[[], dict[str, Any]] = dict, ahead: int = AHEAD, **deal: Any
    ) -> None:
        """`state` returns what a checkpoint keeps of the protocol; `ahead` and `deal` are passed to the ledger."""
        self.schedule = schedule = context.schedule
        self.ledger = Ledger(context, ahead, **deal)
        self._state = state
        self.step = schedule.first_step
        self.over = False
        self._step_batches = schedule.step_batches or max(1, len(context.workers))
        self._gradients = 0
        self._evaluations = self._evaluations_due()
        self._saved_at: float | None = None
        self._averaged_at = self.position

    @property
    def position(self) -> int:
        """The number of mini-batches that count."""
        return self.ledger.counted.total

    @property
    def samples(self) -> int:
        return self.position * self.schedule.batch_size

    @property
    def steps_left(self) -> int:
        return self.schedule.steps - self.step

    def left(self, workers: int) -> int:
        """How many gradients the workers still have to make, if there are that many workers."""
        goal = self.schedule.goal
        return self.steps_left * workers if goal is None else max(0, goal - self.position)

    @property
    def complete(self) -> bool:
        """The goal is reached."""
        return self.steps_left <= 0 if self.schedule.goal is None else self.ledger.is_complete

    def advance(self, gradients: int, workers: int, now: float) -> list[Effect]:
        """Continue after `gradients` more were counted in the ledger, with this many workers present."""
        self.tally(gradients, workers)
        effects = self._average()
        if self.complete:
            return effects + self.finish(self.reason())
        if (due := self._evaluations_due()) > self._evaluations:
            self._evaluations = due
            effects.append(Evaluate(self.step, self.samples))
        if self._saved_at is None:
            self._saved_at = now
        if now - self._saved_at >= self.schedule.checkpoint_seconds:
            self._saved_at = now
            effects.append(Checkpoint(self.step, self.samples, self.state()))
        return effects + self.deal_late()

    def _average(self) -> list[Effect]:
        """Have the joint model's moving average follow, by the steps of the run since it last did."""
        steps = (self.position - self._averaged_at) / self._step_batches
        if not self.schedule.ema or not steps:
            return []
        self._averaged_at = self.position
        return [Average(self.schedule.ema**steps)]

    def tally(self, gradients: int, workers: int) -> None:
        """Update the step as `advance` does, without effects."""
        if self.schedule.goal is None:
            steps, self._gradients = divmod(self._gradients + gradients, workers)
            self.step = min(self.schedule.steps, self.step + steps)
        elif self.complete:
            self.step = self.schedule.steps
        else:
            self.step = min(self.schedule.steps - 1, self.position // self._step_batches)

    def _evaluations_due(self) -> int:
        return self.step // self.schedule.evaluate_every

    def reason(self) -> str:
        """The reason that a run gives for its end when it has reached its goal."""
        if self.schedule.goal is not None:
            return "all steps made"
        wanted = self.schedule.steps - self.schedule.first_step
        absent = set(self.ledger.made) | set(self.ledger.places)
        short = {place: self.ledger.made[place] for place in sorted(absent - set(self.ledger.members.values()))}
        told = ", ".join(
            f"worker-{place} made {made} of its {wanted}" for place, made in short.items() if made < wanted
        )
        return f"all steps made, except that {told}" if told else "all steps made"

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the protocol's own state and the mini-batches that count."""
        counted = [list(span) for span in self.ledger.counted]
        # where workers have data of their own, how much of it each has used in this part of the run
        made = {"made": dict(self.ledger.made)} if self.schedule.data_bound else {}
        return {**self._state(), **made, "counted": counted, "step_batches": self._step_batches}

    def finish(self, reason: str) -> list[Effect]:
        """End the run with the joint model as it is."""
        self.over = True
        return [
            Evaluate(self.step, self.samples, final=True),
            Checkpoint(self.step, self.samples, self.state(), final=True),
            Finish(reason),
        ]

    # ---- dealing mini-batches ----

    def begin(self, members: Iterable[str]) -> None:
        """The run begins with these members; what absent workers were dealt is dealt again."""
        for absent in set(self.ledger.members) - set(members):
            self.ledger.lose(absent)

    def join(self, worker: str) -> None:
        """A worker has joined."""
        self.ledger.join(worker)

    def lose(self, worker: str, late: bool = False) -> list[Effect]:
        """A worker has died: its mini-batches that do not count yet go to others."""
        self.ledger.lose(worker, late)
        return self._serve()

    def deal(self, worker: str, message: Message) -> list[Effect]:
        """A worker asks for mini-batches, or gives some back."""
        match message:
            case More() if worker in self.ledger.members:
                self.ledger.waiting[worker] = message
            case Returned(batches=batches):
                self.ledger.take_back(worker, batches)
        return self._serve()

    def deal_late(self) -> list[Effect]:
        """If nothing else is left, deal the mini-batches of dead workers whose gradients may still arrive."""
        return self._serve() if self.ledger.late_is_due else []

    def _serve(self) -> list[Effect]:
        """Deal to the workers that wait; if nothing is left, ask the worker with the most to give some back."""
        effects: list[Effect] = []
        for worker, more in list(self.ledger.waiting.items()):
            if batches := self.ledger.deal(worker, more.wanted):
                del self.ledger.waiting[worker]
                effects.append(Send(worker, Lease(batches, self.position)))
        while (richest := self.ledger.recall()) is not None:
            effects.append(Send(richest, Recall()))
        return effects
