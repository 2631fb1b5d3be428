"""A node's own vector while it handles an event: what rounds send of it, and how they move it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tether.core.effects import Add, Blend, Install, Step
from tether.core.machine import NodeContext
from tether.core.vector import Empty
from tether.protocols.grid.outbox import Outbox

#: values, and the number of vectors that they stand for
Weighted = tuple[Tensor, float]


class OwnVector:
    """Changes the node's vector by effects, and knows the vector as those effects leave it.

    A round that ends and the next round that begins are often one event. What the next round sends must include what
    the last one has changed, and the machine itself needs it too: for its own slice, and later for the difference
    between the mean and what it sent. So it cannot leave the copy to the runtime with a `snapshot()`.
    """

    def __init__(self, context: NodeContext, out: Outbox) -> None:
        self._weights = context.weights
        self._parameters = context.parameter_count
        self._empty = context.empty
        self._out = out
        #: the buffers at the last gradient; the gradient under way may be changing the live ones
        self._buffers = torch.empty(0)
        #: the changes that this event has asked for, and whether a step is among its effects
        self._changes: list[Install | Add | Blend] = []
        self.stepping = False

    def __len__(self) -> int:
        return len(self._weights)

    def begin_event(self) -> None:
        """All effects so far have been performed."""
        self._changes = []
        self.stepping = False

    def read_buffers(self) -> None:
        """Copy the live buffers: no gradient is under way."""
        self._buffers = self._weights[self._parameters :].clone()

    def copy(self) -> Tensor:
        """A copy of the vector as the changes of this event leave it; its step, if it makes one, is not included."""
        weights = self._weights
        vector = self._empty(len(weights), dtype=weights.dtype, device=weights.device).copy_(weights)
        for change in self._changes:
            part = vector[change.start : change.start + len(change.values)]
            match change:
                case Install(values=values):
                    part.copy_(values)
                case Add(values=values, rate=rate):
                    part.add_(values, alpha=rate)
                case Blend(values=values, rate=rate):
                    part.lerp_(values, rate)
        vector[self._parameters :] = self._buffers
        return vector

    def step(self) -> None:
        """Make an optimizer step with the gradient that has just come."""
        self.stepping = True
        self._out.add(Step())

    def install(self, values: Tensor) -> None:
        """Overwrite the whole vector."""
        self._buffers = values[self._parameters :].clone()
        self._change(Install(values))

    def pull(self, part: slice, mean: Tensor, rate: float, sent: Tensor | None) -> None:
        """Move a part by `rate` of the difference between the mean and `sent`, or without that and the vector itself.

        A node keeps its own buffers, which follow its weights.
        """
        part = slice(part.start, min(part.stop, self._parameters))
        if part.start >= part.stop:
            return
        mean = mean[: part.stop - part.start]
        if sent is None:
            self._change(Blend(mean, rate, part.start))
        else:
            self._change(Add(mean, rate, part.start))
            self._change(Add(sent[part], -rate, part.start))

    def _change(self, change: Install | Add | Blend) -> None:
        self._changes.append(change)
        self._out.add(change)


def weighted_mean(parts: Sequence[Weighted], empty: Empty) -> Weighted:
    """The mean of these values, with their total weight; `empty` makes the tensor, which is going to be sent."""
    total = sum(weight for _, weight in parts)
    (first, weight), *others = parts
    mean = empty(len(first), dtype=first.dtype, device=first.device)
    torch.mul(first, weight / total, out=mean)
    for values, weight in others:
        mean.add_(values, alpha=weight / total)
    return mean, total
