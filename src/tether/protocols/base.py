"""What every protocol's options have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from tether.compress import Compression
from tether.errors import UsageError
from tether.machine import Checkpoint, Effect, Evaluate, Finish, Machine, Message, Node, Seat, Send
from tether.protocols.ledger import AHEAD, Lease, Ledger, More, Recall, Returned
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
    #: nodes exchange values by broadcasts and reductions only
    collective: ClassVar[bool] = False
    workers_max: ClassVar[int | None] = None

    compress: Compression = option(  # noqa: RUF009 (a field)
        "none", "what is sent: as it is, in half precision, or in 8 bits; losses are made up for later", kw_only=True
    )

    guard: float = option(
        0.0,
        "refuse a worker's gradient that is this many times as long as is usual for it; 100 stops only what is broken; "
        "0: none is refused",
        kw_only=True,
    )

    def __post_init__(self) -> None:
        """Refuse values of a wrong type; a subclass adds what else must hold."""
        check_types(self, f"protocol {self.name}")
        if self.guard and not self.guard > 1:
            raise UsageError(f"guard must be more than 1, such as 100, or 0 for none, not {self.guard}")

    def __str__(self) -> str:
        """What differs from the defaults."""
        set_ = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in set_.items())})"

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        """The settings that the conformance kit and the swarm try."""
        return (cls(),)

    @property
    def steps_at_hub(self) -> bool:
        """The joint node steps with gradients of others, so the optimizer must be elementwise."""
        return False

    @property
    def steps_at_workers(self) -> bool:
        """Whoever computes gradients steps too, with an optimizer of its own."""
        return not self.steps_at_hub

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
    """What the joint node does besides its protocol: deal out the data, count, have the model evaluated and saved, end.

    A run's position is the number of mini-batches that count. Whether it has reached its goal, where it is in its
    learning-rate schedule and when it is evaluated follow from that alone; a goal of `steps` is one of each worker.
    """

    def __init__(self, seat: Seat, state: Callable[[], dict[str, Any]] = dict, ahead: int = AHEAD, **deal: Any) -> None:
        """`state` gives what a checkpoint keeps of the protocol; `ahead` and `deal` are the ledger's."""
        self.schedule = schedule = seat.schedule
        self.ledger = Ledger(seat, ahead, **deal)
        self._state = state
        self.step = schedule.first_step
        self.over = False
        self._step_batches = schedule.step_batches or max(1, len(seat.workers))
        self._gradients = 0
        self._evaluations = self._evaluations_due()
        self._saved_at: float | None = None

    @property
    def position(self) -> int:
        """The mini-batches that count."""
        return self.ledger.counted.total

    @property
    def samples(self) -> int:
        return self.position * self.schedule.batch_size

    @property
    def steps_left(self) -> int:
        return self.schedule.steps - self.step

    def left(self, workers: int) -> int:
        """How many gradients so many workers have still to make."""
        goal = self.schedule.goal
        return self.steps_left * workers if goal is None else max(0, goal - self.position)

    @property
    def complete(self) -> bool:
        """The goal is reached."""
        return self.steps_left <= 0 if self.schedule.goal is None else self.ledger.is_complete

    def advance(self, gradients: int, workers: int, now: float) -> list[Effect]:
        """Further gradients have been counted in the ledger; so many workers are present to make a step of them."""
        self.tally(gradients, workers)
        if self.complete:
            return self.finish(self.reason())
        effects: list[Effect] = []
        if (due := self._evaluations_due()) > self._evaluations:
            self._evaluations = due
            effects.append(Evaluate(self.step, self.samples))
        if self._saved_at is None:
            self._saved_at = now
        if now - self._saved_at >= self.schedule.checkpoint_seconds:
            self._saved_at = now
            effects.append(Checkpoint(self.step, self.samples, self.state()))
        return effects + self.deal_late()

    def tally(self, gradients: int, workers: int) -> None:
        """As `advance`, but nothing follows from it."""
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
        """Why a run ends that has reached its goal."""
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
        """What a checkpoint keeps: the protocol's own, and what counts."""
        counted = [list(span) for span in self.ledger.counted]
        return {**self._state(), "counted": counted, "step_batches": self._step_batches}

    def finish(self, reason: str) -> list[Effect]:
        """End the run with the joint model as it is."""
        self.over = True
        return [
            Evaluate(self.step, self.samples, final=True),
            Checkpoint(self.step, self.samples, self.state(), final=True),
            Finish(reason),
        ]

    # ---- who trains on what ----

    def begin(self, members: Iterable[str]) -> None:
        """The run begins with these; what the others were dealt is dealt anew."""
        for absent in set(self.ledger.members) - set(members):
            self.ledger.lose(absent)

    def join(self, worker: str) -> None:
        """A worker has come."""
        self.ledger.join(worker)

    def lose(self, worker: str, late: bool = False) -> list[Effect]:
        """A worker has died: others get what it had and does not count."""
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
        """If nothing else is left, deal what dead workers had and may still have sent."""
        return self._serve() if self.ledger.late_is_due else []

    def _serve(self) -> list[Effect]:
        """Deal to whoever waits; if nothing is left, have the worker with the most give back."""
        effects: list[Effect] = []
        for worker, more in list(self.ledger.waiting.items()):
            if batches := self.ledger.deal(worker, more.wanted):
                del self.ledger.waiting[worker]
                effects.append(Send(worker, Lease(batches, self.position)))
        while (richest := self.ledger.recall()) is not None:
            effects.append(Send(richest, Recall()))
        return effects
