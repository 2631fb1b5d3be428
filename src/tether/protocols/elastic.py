"""Elastic averaging: EASGD (MPCA SGD, section 3.2), with the rules of DeepSpark (sections 3.4 to 3.6).

The hub holds the joint model, which the papers call the centre variable. A worker steps by itself; after tau steps it
needs the centre c, for which it has asked, and is idle until it has it. Then the worker's vector x and the centre move
towards each other (equations 2 and 3; 4):

    x <- x - alpha * (x - c)        at the worker, at once
    c <- c + alpha' * (x - c)       at the hub, when the difference has arrived

The difference travels while the worker goes on. Other workers may have moved the centre in the meantime: the hub adds
the difference to the centre as it is then. With equal rates the sum of worker and centre is preserved in every case.
With momentum in the worker's optimizer this is EAMSGD.

Asking ahead: a worker knows how long its last request took and asks that much earlier, so that the centre is there when
the tau steps are made. The papers' workers ask after the last step.

Rates: by default alpha is 0.9/K for K present workers, and alpha' is alpha (elastic symmetry). Both rates decay by a
factor every `decay_every` steps (DeepSpark, equation 5), or only the hub's rate does (equation 6). The hub sends a
worker its rate with the centre and keeps its own rate until the difference arrives. Exchanges that overlap have read
the same centre: together they must not move it beyond the workers, or it would oscillate ever more widely. So if the
hub's rates under way would add up to more than 1, the next exchange's rates are scaled by what the others leave of 1.
Without `throttle` every exchange has its full rates, as in DeepSpark, whose figures 4, 5 and 8 have alpha up to 0.99.

tau "auto": a hub with one link serves K workers one after the other, so tau steps must last as long as K downloads
(MPCA SGD, section 3.2.2), plus 30 % for disturbances. The shortest of the latest answers measures a download that had
the link for itself. At the start all workers ask at the same time. Until an answer has been measured, a worker that
asks ahead does not wait for the centre: it exchanges at the end of the step in which the centre arrives.

The exchanger: the hub lets `exchangers` workers exchange at a time, from its answer until the difference arrives; other
requests wait in a queue. Copying the centre and adding to it is unordered: threads do it concurrently without a lock.

BatchNorm's buffers: a worker keeps its own, which follow its weights, and sends them whole; the centre's are their mean
over about one exchange of every worker.

The hub counts the steps of every difference. Near the end it hands out only the steps that are left, and a worker that
gets no more mini-batches exchanges what it has. A worker whose data has ended for good then asks for the centre once
more, outside of any exchange: the answer shows that its last difference has arrived.

The workers of a new run begin at once, since the seed or the checkpoint gives all of them the centre. A worker that
joins later asks for it first. A worker that dies frees its place. Its difference arrived completely or not at all, so
the centre is never partly updated.

Invariants: a worker asks once for every exchange; no more workers exchange than the exchanger has places; no worker
waits while a place is free; with `throttle`, the hub's rates under way add up to at most 1.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

from tether.core.effects import Add, Blend, Contributed, Effect, Install, Record, Send, Step
from tether.core.events import DataEnded, Event, GradientReady, PeerJoined, PeerLost, Received, Started, StopRequested
from tether.core.machine import Machine, NodeContext
from tether.core.message import Message
from tether.core.snapshot import Values, snapshot, tensor
from tether.errors import InvariantBroken, UsageError
from tether.protocols.base import Options, RunProgress, option
from tether.protocols.ledger import Lease, More, Portion, Recall, Returned

#: alpha times the number of workers, by default
BETA = 0.9
#: how much longer tau is than needed to avoid collisions
ROOM = 1.3
#: how many of each worker's answers are remembered
ANSWERS_KEPT = 4


class Ask(Message, frozen=True):
    """Worker to hub: send the centre; `first`: the worker has no weights yet and will install it."""

    first: bool = False


class Centre(Message, frozen=True):
    """Hub to worker: the centre, the worker's rate, and how many steps to make until the next exchange.

    If `early`, tau is a maximum: the next exchange happens as soon as the next centre arrives.
    """

    values: Values
    alpha: float
    tau: int
    early: bool = False
    #: how many mini-batches of the run count
    position: int = 0


class Difference(Message, frozen=True):
    """Worker to hub: its parameters minus the centre's, its buffers, and its work since the last exchange."""

    values: Values
    buffers: Values
    steps: int
    step_seconds: float
    #: the time from the request for the centre to its arrival, and how much of it the worker was idle
    answer_seconds: float
    wait_seconds: float


@dataclass(frozen=True)
class Elastic(Options):
    """Workers train alone and are tied to the joint model: every tau steps the two pull each other."""

    tau: int | Literal["auto"] = option(
        "auto",
        "steps between two exchanges; 'auto': 30 % more than exchanges need to avoid collisions on the hub's link",
    )
    alpha: float | Literal["auto"] = option(
        "auto", "share of the difference by which worker and centre move; 'auto': 0.9/workers"
    )
    master_alpha: float | None = option(None, "the centre's rate, if it differs from the workers'")
    decay: float = option(1.0, "factor of the rates at every decay_every steps (DeepSpark, equation 5)")
    decay_every: int | None = option(None, "steps of each worker between two decays")
    decay_limit: int | None = option(None, "the largest number of decays; none: no limit")
    decays: Literal["both", "master"] = option("both", "which rates decay: both, or only the centre's (equation 6)")
    ahead: bool = option(True, "ask for the centre early enough that it is there when it is needed")
    throttle: bool = option(
        True,
        "scale the rates of exchanges that overlap, so that together they move the centre no further than the workers "
        "are; without it a large alpha acts in full, as in DeepSpark, and may diverge",
    )
    exchangers: int = option(8, "how many workers exchange at a time; others wait in a queue")

    name = "elastic"
    summary = "workers train alone, each tied to a centre by an elastic force (EASGD, DeepSpark)"
    suits = "workers that should contact the hub rarely, each at its own time"
    messages = (Ask, Centre, Difference)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau != "auto" and self.tau < 1:
            raise UsageError(f"tau must be at least 1 or 'auto', not {self.tau}")
        for name in ("alpha", "master_alpha"):
            value = getattr(self, name)
            if value not in ("auto", None) and not 0 < value < 1:
                raise UsageError(
                    f"{name} must be between 0 and 1, not {value}: it is the share of the way towards the other"
                )
        if not 0 < self.decay <= 1:
            raise UsageError(f"decay must be above 0 and at most 1, not {self.decay}: rates do not grow")
        for name in ("decay_every", "decay_limit", "exchangers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        if self.decay < 1 and self.decay_every is None:
            raise UsageError(f"decay={self.decay} needs decay_every: the steps between two decays")
        if self.decay == 1 and (self.decay_every, self.decay_limit, self.decays) != (None, None, "both"):
            raise UsageError("decay_every, decay_limit and decays say how rates decay: give decay, such as 0.5, too")

    @classmethod
    def variants(cls) -> tuple[Options, ...]:
        return (
            cls(),
            cls(tau=1, alpha=0.3),
            cls(tau=4, ahead=False, exchangers=1),
            cls(tau=3, decay=0.8, decay_every=10, decay_limit=2),
            cls(tau=6, alpha=0.2, throttle=False),
            cls(tau=5, alpha=0.4, master_alpha=0.3, decay=0.7, decay_every=15, decays="master"),
        )

    @property
    def pool_threads(self) -> int:
        return self.exchangers

    def machine(self, context: NodeContext) -> Machine:
        return ElasticHub(context, self) if context.node.role == "hub" else ElasticWorker(context, self)

    def tau_at_start(self, context: NodeContext) -> int:
        """The tau that a run begins with; 0 if it must be measured first."""
        if self.tau != "auto":
            return self.tau
        return int(context.restored["tau"]) if context.restored else int(not self.ahead)

    def first_steps(self, context: NodeContext) -> tuple[int, bool]:
        """How many steps a worker makes until its first exchange, and whether the exchange may come earlier."""
        tau, left = self.tau_at_start(context), max(1, context.schedule.steps - context.schedule.first_step)
        return min(tau, left) or left, not tau

    def rates(self, workers: int, step: int) -> tuple[float, float]:
        """The worker's and the centre's rate at a step."""
        alpha = BETA / workers if self.alpha == "auto" else self.alpha
        master = alpha if self.master_alpha is None else self.master_alpha
        if self.decay_every is None:
            return alpha, master
        decays = step // self.decay_every
        factor = self.decay ** (decays if self.decay_limit is None else min(decays, self.decay_limit))
        return (alpha * factor if self.decays == "both" else alpha), master * factor


@dataclass
class _Request:
    """A worker in the queue."""

    worker: str
    since: float
    #: how many requests were ahead of it
    ahead: int


@dataclass
class _Exchange:
    """A worker that was sent the centre and whose difference has not arrived."""

    request: _Request
    granted_at: float
    alpha: float
    master_alpha: float
    #: the steps that come with the difference
    steps: int


class ElasticHub:
    """Holds the centre and serves the workers one exchange after the other."""

    def __init__(self, context: NodeContext, options: Elastic) -> None:
        self.context = context
        self.options = options
        self.progress = RunProgress(context, lambda: {"tau": self.tau})
        self.present: set[str] = set()
        self.exchanges = 0
        self._auto = options.tau == "auto"
        #: 0: not known
        self.tau = options.tau_at_start(context)
        self._queue: deque[_Request] = deque()
        self._open: dict[str, _Exchange] = {}
        #: steps that each worker is making, or has made and not reported
        self._issued: dict[str, int] = {}
        #: how long each worker's latest answers took, and its mean step
        self._answers: dict[str, deque[float]] = {}
        self._step_seconds: dict[str, float] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.progress.over:
            return []
        match event:
            case Started(members=members):
                self.present = {worker for worker in self.context.workers if worker in members}
                self.progress.begin(members)
                tau, early = self.options.first_steps(self.context)
                self._issued = dict.fromkeys(self.present, 1 if early else tau)
            case Received(sender=worker, message=Ask(first=True)):
                return self._send_centre(worker, 1.0)
            case Received(sender=worker, message=Ask()):
                self._queue.append(_Request(worker, now, len(self._queue)))
                return self._serve(now)
            case Received(sender=worker, message=Difference() as difference):
                return self._take(worker, difference, now)
            case Received(sender=worker, message=More() | Returned() as message):
                return self.progress.deal(worker, message)
            case PeerJoined(peer=peer, role="worker"):
                self.present.add(peer)
                self.progress.join(peer)
            case PeerLost(peer=peer) if peer in self.present:
                self.present.remove(peer)
                self._queue = deque(request for request in self._queue if request.worker != peer)
                for kept in (self._open, self._issued, self._answers, self._step_seconds):
                    kept.pop(peer, None)
                return [*self.progress.lose(peer), *self._serve(now)]
            case StopRequested(reason=reason):
                return self.progress.finish(reason)
        return []

    def _serve(self, now: float) -> list[Effect]:
        """Answer the next workers in the queue while places are free."""
        effects: list[Effect] = []
        while self._queue and len(self._open) < self.options.exchangers:
            request = self._queue.popleft()
            alpha, master_alpha = self.options.rates(len(self.present), self.progress.step)
            taken = self._rates_under_way()
            if self.options.throttle and taken + master_alpha > 1:
                alpha, master_alpha = alpha * (1 - taken), master_alpha * (1 - taken)
            made = self._issued.pop(request.worker)
            self._open[request.worker] = _Exchange(request, now, alpha, master_alpha, made)
            effects += self._send_centre(request.worker, alpha)
        return effects

    def _rates_under_way(self) -> float:
        return sum(exchange.master_alpha for exchange in self._open.values())

    def _send_centre(self, worker: str, alpha: float) -> list[Effect]:
        tau, early = self._issue(worker)
        return [Send(worker, Centre(snapshot(unordered=True), alpha, tau, early, self.progress.position))]

    def _issue(self, worker: str) -> tuple[int, bool]:
        """How many steps a worker makes until its next exchange, and whether the exchange may come earlier."""
        self._issued.pop(worker, None)
        under_way = sum(self._issued.values()) + sum(exchange.steps for exchange in self._open.values())
        left = max(1, self.progress.left(len(self.present)) - under_way)
        if not self.tau:
            self._issued[worker] = 1
            return max(1, left // len(self.present)), True
        tau = self._issued[worker] = min(self.tau, left)
        return tau, False

    def _take(self, worker: str, difference: Difference, now: float) -> list[Effect]:
        exchange = self._open.pop(worker)
        self.exchanges += 1
        self._answers.setdefault(worker, deque(maxlen=ANSWERS_KEPT)).append(difference.answer_seconds)
        self._step_seconds[worker] = difference.step_seconds
        if self._auto:
            self.tau = self._choose_tau()
        row = Record(
            {
                "exchange": self.exchanges,
                "tau": difference.steps,
                "alpha": exchange.alpha,
                "master_alpha": exchange.master_alpha,
                "queue": exchange.request.ahead,
                "queue_seconds": exchange.granted_at - exchange.request.since,
                "answer_seconds": difference.answer_seconds,
                "wait_seconds": difference.wait_seconds,
                "workers": len(self.present),
            }
        )
        moves: list[Effect] = [
            Add(tensor(difference.values), exchange.master_alpha, unordered=True),
            Blend(tensor(difference.buffers), self._buffer_rate(), self.context.parameter_count, unordered=True),
            row,
        ]
        self.progress.ledger.count(worker, difference.steps)
        moves += self.progress.advance(difference.steps, len(self.present), now)
        return moves if self.progress.over else moves + self._serve(now)

    def _buffer_rate(self) -> float:
        """The centre's buffers are the mean of those that have come so far, and later of the latest few."""
        return 1 / min(self.exchanges, max(1, len(self.present)))

    def _choose_tau(self) -> int:
        download = min(answer for answers in self._answers.values() for answer in answers)
        step = statistics.median(self._step_seconds.values())
        return max(1, math.ceil(ROOM * len(self.present) * download / step)) if step > 0 else self.tau

    def check(self) -> None:
        places = self.options.exchangers
        if len(self._open) > places:
            raise InvariantBroken(f"{len(self._open)} workers exchange; there are {places} places")
        if self._queue and len(self._open) < places and not self.progress.over:
            raise InvariantBroken(f"{self._queue[0].worker} waits while a place is free")
        if self.options.throttle and self._rates_under_way() > 1 + 1e-9:
            raise InvariantBroken(f"the rates under way add up to {self._rates_under_way()}")
        known = [*self._open, *(request.worker for request in self._queue)]
        if len(set(known)) != len(known):
            raise InvariantBroken(f"a worker exchanges twice at a time: {known}")
        if not set(known) <= self.present:
            raise InvariantBroken(f"an absent worker exchanges: {set(known) - self.present}")
        self.progress.ledger.check()


class ElasticWorker:
    """Steps by itself and exchanges with the centre after every tau steps."""

    def __init__(self, context: NodeContext, options: Elastic) -> None:
        self.context = context
        self.ahead = options.ahead
        self._options = options
        self.portion = Portion(context, lambda more: [Send("hub", more)])
        self.tau = 0
        #: it exchanges as soon as the centre arrives
        self.early = False
        self.steps = 0
        self.asked = False
        self._centre: Centre | None = None
        self._step_seconds = 0.0
        self._asked_at = 0.0
        #: how long the last request took, and since when the worker is idle
        self._answer_seconds = 0.0
        self._idle_since = 0.0
        #: its data has ended; it has asked for the centre a last time
        self._ended = False
        self._asked_last = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = self._handle(event, now)
        if self._ended and not self._asked_last and not self.asked and not self.steps:
            self._asked_last = True
            effects += self._ask(now, first=True)
        return effects

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return self._start(now)
            case GradientReady(seconds=seconds):
                self.steps += 1
                self._step_seconds += (seconds - self._step_seconds) / self.steps
                self._idle_since = now
                return [Step(), *self._go_on(now)]
            case Received(message=Centre() as centre) if self._asked_last:
                return [Install(tensor(centre.values)), Contributed()]
            case Received(message=Centre() as centre):
                self._answer_seconds = now - self._asked_at
                self._centre = centre
                if not self.tau:
                    self._take_up(centre)
                    return [Install(tensor(centre.values)), *self._compute(now)]
                return self._go_on(now) if self.steps == self.tau or self.portion.idle else []
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case DataEnded():
                self._ended, self._idle_since = True, now
                self.portion.end()
                return self._go_on(now) if self.steps or self._centre is not None else []
        return []

    def _start(self, now: float) -> list[Effect]:
        """Begin at once with the model that all workers begin with, unless this worker joins later."""
        if self.context.joins_late:
            return self._ask(now, first=True)
        self.tau, self.early = self._options.first_steps(self.context)
        return self._compute(now)

    def _go_on(self, now: float) -> list[Effect]:
        """Continue after a step, or after the centre has arrived."""
        effects: list[Effect] = []
        if self.steps < self.tau and not (self.early and self._centre is not None):
            effects = self._compute(now)
            if not self.portion.idle:
                return effects
        if self._centre is None:
            return effects or self._ask_in_time(now)
        effects += self._exchange(self._centre, now - self._idle_since)
        self._take_up(self._centre)
        return effects + self._compute(now)

    def _compute(self, now: float) -> list[Effect]:
        compute = self.portion.compute()
        return [*self._ask_in_time(now), *compute]

    def _ask_in_time(self, now: float) -> list[Effect]:
        """Ask for the centre if, judging by the last answer, it would otherwise arrive after the last step.

        A worker that has nothing to train on exchanges what it has, and does not ask again until it has more.
        """
        if self.asked or (self.portion.idle and not self.steps):
            return []
        left = (self.tau - self.steps) * self._step_seconds
        late = self.ahead and 0 < left < self._answer_seconds + self._step_seconds
        return self._ask(now) if late or self.early or self.steps == self.tau or self.portion.idle else []

    def _ask(self, now: float, first: bool = False) -> list[Effect]:
        self.asked = True
        self._asked_at = now
        return [Send("hub", Ask(first))]

    def _exchange(self, centre: Centre, wait_seconds: float) -> list[Effect]:
        parameters = self.context.parameter_count
        difference = Difference(
            snapshot(0, parameters, less=tensor(centre.values)[:parameters]),
            snapshot(parameters),
            self.steps,
            self._step_seconds,
            self._answer_seconds,
            wait_seconds,
        )
        return [Send("hub", difference), Blend(tensor(centre.values)[:parameters], centre.alpha)]

    def _take_up(self, centre: Centre) -> None:
        self.tau, self.early, self._centre, self.asked = centre.tau, centre.early, None, False
        self.portion.position = max(self.portion.position, centre.position)
        self.steps = 0

    def check(self) -> None:
        if self.steps > self.tau:
            raise InvariantBroken(f"{self.steps} steps without an exchange; tau is {self.tau}")
        if self._centre is not None and not self.asked:
            raise InvariantBroken("a centre came that was not asked for")
