"""What learners, aggregators and hubs of protocol server say to each other, and the sum that pushes go into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from torch import Tensor

from tether.machine import Message, Seat, Send
from tether.protocols.ledger import Portion


class Pull(Message, frozen=True):
    """Upwards: I have weights of this clock (-1: none), for a vector of that length."""

    have: int
    length: int


class Weights(Message, frozen=True):
    """Downwards: the vector and its clock; `push` if it answers a push."""

    clock: int
    values: Tensor
    push: bool = False
    #: where `values` are only a part of the parameters and do not have the buffers behind them
    buffers: Tensor | None = None


class Current(Message, frozen=True):
    """Downwards: there is nothing newer for you; `push` if it answers a push. `clock`: where weights do not travel."""

    push: bool = False
    clock: int = -1


class Refused(Message, frozen=True):
    """Downwards: you cannot take part."""

    reason: str


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """One gradient: whose, its number there, the clock of the weights it was taken at, and of which mini-batches."""

    learner: str
    number: int
    clock: int
    batches: tuple[int, ...] = ()


class Push(Message, frozen=True):
    """Upwards: the mean of some gradients and of their learners' buffers. `have` asks for weights newer than that.

    A gradient that nobody averages on its way may have `touched` rows.
    """

    marks: tuple[Mark, ...]
    gradient: Tensor
    buffers: Tensor
    samples: int
    have: int | None
    touched: tuple[Tensor, ...] = ()


class Got(Message, frozen=True):
    """Learner to hub, with overlap: the downcast of this clock has arrived."""

    clock: int


class Sum:
    """Gradients on their way into one mean, weighted by their samples.

    A lone push is looked at where it lies: most often it is used up by the event that brought it. If it is not, `keep`
    copies it, for its sender will write there again.
    """

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.samples = 0
        self._lone: tuple[Push, float] | None = None
        self._gradient: Tensor | None = None
        self._buffers: Tensor | None = None

    def add(self, push: Push, scale: float = 1.0) -> None:
        self.keep()
        self.marks += push.marks
        self.samples += push.samples
        if self._gradient is None or self._buffers is None:
            self._lone = push, scale
        else:
            self._gradient.add_(push.gradient, alpha=push.samples * scale)
            self._buffers.add_(push.buffers, alpha=push.samples)

    def keep(self) -> None:
        if self._lone is not None:
            push, scale = self._lone
            self._gradient, self._buffers = push.gradient * (push.samples * scale), push.buffers * push.samples
            self._lone = None

    @property
    def touched(self) -> tuple[Tensor, ...]:
        return self._lone[0].touched if self._lone is not None else ()

    def means(self) -> tuple[Tensor, Tensor]:
        if self._lone is not None:
            push, scale = self._lone
            return push.gradient if scale == 1.0 else push.gradient * scale, push.buffers
        assert self._gradient is not None and self._buffers is not None
        return self._gradient.div_(self.samples), self._buffers.div_(self.samples)

    @property
    def learners(self) -> set[str]:
        return {mark.learner for mark in self.marks}


class PushLog:
    """The number of the last gradient counted of each learner."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def count(self, marks: Iterable[Mark]) -> bool:
        """Whether all of these are new; if so they are counted."""
        marks = tuple(marks)
        if any(mark.number <= self._last.get(mark.learner, 0) for mark in marks):
            return False
        self._last.update((mark.learner, mark.number) for mark in marks)
        return True


def refuse(sender: str, length: int, expected: int) -> Send:
    reason = f"{sender} has a model of {length} values and the hub one of {expected}: all must train the same model"
    return Send(sender, Refused(reason))


def dealing(hard: bool) -> dict[str, Any]:
    """How mini-batches are dealt. In hardsync all wait for each other, so nobody may ever be without one."""
    return {"ahead": 16, "overshoots": True} if hard else {}


def portion(seat: Seat, hard: bool = False) -> Portion:
    """What a learner trains on."""
    return Portion(seat, lambda more: [Send("hub", more)], **dealing(hard))
