"""What the nodes of protocol server say to each other. Up is towards the hub, down is towards the workers."""

from __future__ import annotations

import msgspec
from torch import Tensor

from tether.core.message import Message
from tether.core.snapshot import State, Values

# ---- requests, up ---------------------------------------------------------------------------------------------------


class Pull(Message, frozen=True):
    """Asks for weights newer than clock `have` (-1: it has none yet). `length` is the length of its vector."""

    have: int
    length: int


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Identifies one gradient: its worker, its number there, the clock of the weights, and the mini-batches in it."""

    worker: str
    number: int
    clock: int
    batches: tuple[int, ...] = ()


class Push(Message, frozen=True):
    """The mean of some gradients and of their workers' buffers, weighted by samples.

    With `have`, it also asks for weights newer than that clock. A gradient that no aggregator averages on its way may
    have `touched` rows.
    """

    marks: tuple[Mark, ...]
    gradient: Tensor
    buffers: Values
    samples: int
    have: int | None
    touched: tuple[Tensor, ...] = ()


# ---- answers, down --------------------------------------------------------------------------------------------------


class Weights(Message, frozen=True):
    """The vector and its clock. `push`: this answers a push. With overlap it is also broadcast, and answers nothing."""

    clock: int
    values: Values
    push: bool = False
    #: with several hubs `values` are only a part of the parameters, and the first hub adds the buffers here
    buffers: Values | None = None


class Current(Message, frozen=True):
    """There is nothing newer to send. `push`: this answers a push. `clock` is the hub's, where weights are shared."""

    push: bool = False
    clock: int = -1


class Refused(Message, frozen=True):
    """The sender of the request cannot take part in the run."""

    reason: str


# ---- overlap --------------------------------------------------------------------------------------------------------


class DowncastArrived(Message, frozen=True):
    """Worker to hub: the weights of this clock, which the hub broadcast, have arrived."""

    clock: int


# ---- several hubs ---------------------------------------------------------------------------------------------------


class Round(Message, frozen=True):
    """First hub to the others, in hardsync: the update of this clock consists of these gradients, at this rate."""

    clock: int
    marks: tuple[Mark, ...]
    rate: float


class GetPart(Message, frozen=True):
    """First hub to the others: send your part of the model, as it is after every `Round` so far.

    `state`: send the state of the optimizer too, for a checkpoint.
    """

    state: bool


class Part(Message, frozen=True):
    """The answer to `GetPart`."""

    values: Values
    state: State | None


# ---- inline ---------------------------------------------------------------------------------------------------------


class Tally(Message, frozen=True):
    """Worker to hub: the number of steps since the last tally. `last`: the worker has halted."""

    steps: int
    last: bool = False


class Halt(Message, frozen=True):
    """Hub to worker: stop stepping, and send the last tally."""
