"""Workers of one hub: `ServerWorker` trains on weights that travel, `SharingWorker` on the hub's own."""

from __future__ import annotations

from torch import Tensor

from tether.core.effects import Effect, Fail, GradientForm, Install, Send, Step
from tether.core.events import Broadcasted, Event, GradientReady, PeerLost, Received, Started
from tether.core.machine import NodeContext
from tether.core.snapshot import snapshot, tensor
from tether.errors import InvariantBroken
from tether.protocols.ledger import Lease, Recall
from tether.protocols.server.messages import Current, DowncastArrived, Mark, Pull, Push, Refused, Weights
from tether.protocols.server.pushes import Requester, make_portion

#: how many pushes of a worker that shares the hub's weights may be unanswered: with two it need not wait for the hub,
#: and does not run away from it
UNANSWERED_MAX = 2


class ServerWorker(Requester):
    """Computes gradients and pushes each of them, or in Downpour the sum of several."""

    def __init__(
        self,
        context: NodeContext,
        *,
        hard: bool,
        overlap: bool,
        push_every: int,
        pull_every: int,
        form: GradientForm,
    ) -> None:
        super().__init__(context)
        self.hard = hard
        self.overlap = overlap
        self.push_every = push_every
        self.pull_every = pull_every
        self.form: GradientForm = form
        self.steps = 0
        self.computing = False
        #: weights that have arrived and are not installed yet
        self.newest: Weights | None = None
        #: a push that waits until the one under way is answered
        self.outgoing: Push | None = None
        #: the clock of the weights that the last gradient was computed at
        self.gradient_clock = -1
        self.portion = make_portion(context, hard)
        #: what the next push will consist of: in Downpour a sum, its samples, and its mini-batches
        self._summed: Tensor | None = None
        self._summed_samples = 0
        self._batches: tuple[int, ...] = ()

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started(members=members):
                return self._start(members)
            case Received(message=Weights() as weights):
                self._mark_answered(weights.push)
                self._keep_if_newer(weights)
                return self._proceed()
            case Received(message=Current(push=push)):
                self._mark_answered(push)
                return self._proceed()
            case Broadcasted(message=Weights() as weights):
                self._keep_if_newer(weights)
                return [Send("hub", DowncastArrived(weights.clock)), *self._proceed()]
            case GradientReady():
                self.computing = False
                return [*self._use_gradient(event.gradient, event.touched, event.samples), *self._proceed()]
            case PeerLost(peer=peer):
                return self._lose(peer)
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case Received(message=Refused(reason=reason)):
                return [Fail(reason)]
        return []

    def _keep_if_newer(self, weights: Weights) -> None:
        if weights.clock > max(self.clock, self.newest.clock if self.newest else -1):
            self.newest = weights

    def _use_gradient(self, gradient: Tensor, touched: tuple[Tensor, ...], samples: int) -> list[Effect]:
        """Prepare a push, step by itself and pull, as far as each is due."""
        self.steps += 1
        self.gradient_clock = self.clock
        self._batches += (self.portion.batch,)
        if self.push_every > 1:
            self._summed = gradient.clone() if self._summed is None else self._summed.add_(gradient)
            self._summed_samples += samples
            gradient, samples = self._summed, self._summed_samples
        pull_due = self.steps % self.pull_every == 0
        if self.steps % self.push_every == 0:
            self._prepare_push(gradient, touched, samples, pull_due)
            pull_due = False
        effects: list[Effect] = [Step()] if self.pull_every > 1 else []
        return [*effects, *self._send_pull()] if pull_due else effects

    def _prepare_push(self, gradient: Tensor, touched: tuple[Tensor, ...], samples: int, pulls: bool) -> None:
        """`pulls`: the push asks for newer weights too. With overlap they come by themselves."""
        mark = Mark(self.context.node.name, self.steps, self.gradient_clock, self._batches)
        have = self.clock if pulls and not self.overlap else None
        self.outgoing = Push((mark,), gradient, snapshot(self.context.parameter_count), samples, have, touched)
        self._summed, self._summed_samples, self._batches = None, 0, ()

    def _proceed(self) -> list[Effect]:
        """Send the push that waits, if none is under way; compute, if there is nothing to wait for."""
        effects: list[Effect] = []
        if self.outgoing is not None and not self.under_way:
            effects += self._send_push(self.outgoing)
            self.outgoing = None
        if not self._may_compute():
            return effects
        if self.newest is not None:
            effects.append(Install(tensor(self.newest.values)))
            self.clock, self.newest = self.newest.clock, None
        self.computing = True
        effects += self.portion.compute(self.form, self.overlap)
        if self.portion.idle and self._summed is not None:  # perhaps no further gradient will complete the sum
            self._prepare_push(self._summed, (), self._summed_samples, pulls=False)
            effects += self._proceed()
        return effects

    def _may_compute(self) -> bool:
        if self.computing or self.pull_under_way or self.outgoing is not None:
            return False
        clock = self.newest.clock if self.newest is not None else self.clock
        if clock < 0 or (self.hard and clock <= self.gradient_clock):
            return False
        return self.overlap or not self.under_way

    def check(self) -> None:
        if len(self.under_way) > 1:
            raise InvariantBroken(f"{len(self.under_way)} pushes are under way")
        if self.computing and self.clock < 0:
            raise InvariantBroken("computes before any weights came")
        if self.computing and self.outgoing is not None and not self.portion.idle:
            raise InvariantBroken("computes while a gradient waits: the two would be merged")


class SharingWorker:
    """Computes gradients at the hub's own weights, as they are at that moment, and pushes each."""

    def __init__(self, context: NodeContext) -> None:
        self.context = context
        self.clock = -1
        self.steps = 0
        self.portion = make_portion(context)
        self.unanswered = 0
        #: the newest clock that this worker knew when it began the gradient under way; None: it computes nothing
        self.begun_at: int | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return [Send("hub", Pull(self.clock, len(self.context.weights)))]
            case Received(message=Current(push=push, clock=clock)):
                self.clock = clock
                self.unanswered -= push
                return self._compute_if_allowed()
            case GradientReady(gradient=gradient, touched=touched, samples=samples):
                assert self.begun_at is not None
                self.steps += 1
                self.unanswered += 1
                mark = Mark(self.context.node.name, self.steps, self.begun_at, (self.portion.batch,))
                self.begun_at = None
                message = Push((mark,), gradient, gradient[:0], samples, None, touched)
                return [Send("hub", message), *self._compute_if_allowed()]
            case Received(message=Lease() as lease):
                return self.portion.take(lease)
            case Received(message=Recall()):
                return [Send("hub", self.portion.give())]
            case Received(message=Refused(reason=reason)):
                return [Fail(reason)]
        return []

    def _compute_if_allowed(self) -> list[Effect]:
        if self.begun_at is not None or self.unanswered >= UNANSWERED_MAX:
            return []
        self.begun_at = self.clock
        return self.portion.compute("rows", fresh=True)

    def check(self) -> None:
        if not 0 <= self.unanswered <= UNANSWERED_MAX:
            raise InvariantBroken(f"{self.unanswered} pushes are unanswered")
        if self.begun_at is not None and self.begun_at < 0:
            raise InvariantBroken("computes before it knows the clock")
