"""Snapshots: parts of a vector that an effect names and the runtime copies when it performs the effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from tether.core.message import ReplicaState
from tether.core.vector import Empty


class Snapshot(msgspec.Struct, frozen=True):
    """Part of the vector, to be copied when the effect that holds this is performed."""

    start: int
    stop: int | None
    unordered: bool = False
    less: Tensor | None = None

    def take(self, weights: Tensor, empty: Empty = torch.empty) -> Tensor:
        part = weights[self.start : self.stop]
        taken = empty(len(part), dtype=part.dtype, device=part.device)
        return taken.copy_(part) if self.less is None else torch.sub(part, self.less, out=taken)


def snapshot(
    start: int = 0, stop: int | None = None, *, unordered: bool = False, less: Tensor | None = None
) -> Snapshot:
    """Stands for `weights[start:stop]`, minus `less`, at the moment the effect that holds it is performed.

    A message that holds an unordered snapshot may be overtaken by later messages.
    """
    return Snapshot(start, stop, unordered, less)


class StateSnapshot(msgspec.Struct, frozen=True):
    """The state of the node's optimizer, to be copied when the effect that holds this is performed."""


if TYPE_CHECKING:
    Values = Tensor | Snapshot
    State = ReplicaState | StateSnapshot
else:
    #: the type of a message's field that holds a tensor or, until the effect with the message is performed, a snapshot.
    #: A snapshot never travels, so the wire only knows tensors
    Values = Tensor
    #: the same for a field that holds the state of an optimizer
    State = ReplicaState


def tensor(values: Values) -> Tensor:
    """The values of a received message, in which no snapshot is left."""
    assert not isinstance(values, Snapshot)
    return values
