"""How pushes are sent until they are answered, counted once, and averaged; and how mini-batches are dealt."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tether.core.effects import Effect, Send
from tether.core.machine import NodeContext
from tether.core.snapshot import tensor
from tether.protocols.ledger import Portion
from tether.protocols.server.messages import Mark, Pull, Push, Refused


class Requester:
    """What a worker and an aggregator have in common: they pull from and push to the node above them.

    A request is kept until it is answered. If the node above dies, all unanswered requests go to the next one above.
    At most one push is under way. The exception is an aggregator in hardsync: a worker that joins during a round adds
    another push.
    """

    def __init__(self, context: NodeContext) -> None:
        self.context = context
        self.above = context.node.parent
        self.clock = -1
        self.under_way: list[Push] = []
        self.pull_under_way = False
        self._lost: set[str] = set()

    def _start(self, members: tuple[str, ...]) -> list[Effect]:
        """Send the first pull, to the first node above that is present."""
        absent = {node.name for node in self.context.nodes} - set(members)
        effects = [effect for peer in sorted(absent) for effect in self._lose(peer)]
        return effects or self._send_pull()

    def _send_pull(self) -> list[Effect]:
        self.pull_under_way = True
        return [Send(self.above, Pull(self.clock, len(self.context.weights)))]

    def _send_push(self, push: Push) -> list[Effect]:
        self.under_way.append(push)
        return [Send(self.above, push)]

    def _mark_answered(self, push: bool) -> None:
        if push:
            self.under_way = []
        else:
            self.pull_under_way = False

    def _lose(self, peer: str) -> list[Effect]:
        """If the node above has died, send what it has not answered to the next one above."""
        self._lost.add(peer)
        if peer != self.above:
            return []
        parents = {node.name: node.parent for node in self.context.nodes}
        while self.above in self._lost and self.above != "hub":
            self.above = parents[self.above]
        again: list[Effect] = [Send(self.above, push) for push in self.under_way]
        return again + (self._send_pull() if self.pull_under_way else [])


class GradientSum:
    """Pushed gradients and buffers on their way into one mean, weighted by their samples.

    The first push is not copied: most often the event that brought it uses it up. If that event does not,
    `copy_borrowed` must follow, since the sender will write to the same memory again.
    """

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.samples = 0
        self._borrowed: tuple[Push, float] | None = None
        self._gradient: Tensor | None = None
        self._buffers: Tensor | None = None

    def add(self, push: Push, scale: float = 1.0) -> None:
        self.copy_borrowed()
        self.marks += push.marks
        self.samples += push.samples
        if self._gradient is None or self._buffers is None:
            self._borrowed = push, scale
        else:
            self._gradient.add_(push.gradient, alpha=push.samples * scale)
            self._buffers.add_(tensor(push.buffers), alpha=push.samples)

    def copy_borrowed(self) -> None:
        """Copy what still lies in the memory of its sender."""
        if self._borrowed is not None:
            push, scale = self._borrowed
            self._gradient, self._buffers = push.gradient * (push.samples * scale), tensor(push.buffers) * push.samples
            self._borrowed = None

    def means(self) -> tuple[Tensor, Tensor]:
        """The mean gradient and the mean buffers."""
        if self._borrowed is not None:
            push, scale = self._borrowed
            return push.gradient if scale == 1.0 else push.gradient * scale, tensor(push.buffers)
        assert self._gradient is not None and self._buffers is not None
        return self._gradient.div_(self.samples), self._buffers.div_(self.samples)

    @property
    def touched(self) -> tuple[Tensor, ...]:
        """The touched rows of a push that is alone in the sum; averages have none."""
        return self._borrowed[0].touched if self._borrowed is not None else ()

    @property
    def workers(self) -> set[str]:
        return {mark.worker for mark in self.marks}

    @property
    def batch_count(self) -> int:
        return sum(len(mark.batches) for mark in self.marks)


class PushLog:
    """Remembers the number of the last gradient of each worker, so that none counts twice."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def add_if_new(self, marks: tuple[Mark, ...]) -> bool:
        """Whether none of these gradients has been counted before; if so, they are from now on."""
        if any(mark.number <= self._last.get(mark.worker, 0) for mark in marks):
            return False
        self._last.update((mark.worker, mark.number) for mark in marks)
        return True


def refusal(sender: str, length: int, expected: int) -> Send:
    """Tells a node that its model is not the one that this run trains."""
    reason = f"{sender} has a model of {length} values and the hub one of {expected}: all must train the same model"
    return Send(sender, Refused(reason))


def dealing_options(hard: bool) -> dict[str, Any]:
    """How the ledger deals mini-batches. In hardsync all workers wait for each other, so none may ever run out."""
    return {"ahead": 16, "overshoots": True} if hard else {}


def make_portion(context: NodeContext, hard: bool = False) -> Portion:
    """The mini-batches of a worker, which asks the hub for more."""
    return Portion(context, lambda more: [Send("hub", more)], **dealing_options(hard))
