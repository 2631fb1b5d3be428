"""What all layers share: the module, and checks of shapes and settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tether.caffe.fillers import Filler
from tether.errors import UsageError

#: Caffe counts the values of a blob in 32 bits
COUNT_MAX = 2**31 - 1


def check_count(shape: Sequence[int], what: str) -> tuple[int, ...]:
    """Refuse a shape that no blob can have."""
    if any(not isinstance(length, int) or length < 0 for length in shape):
        raise UsageError(f"{what} has the shape {tuple(shape)}: lengths must not be negative")
    if len(shape) > 32 or math.prod(shape) > COUNT_MAX:
        raise UsageError(f"{what} has the shape {tuple(shape)}: a blob has at most 32 axes and {COUNT_MAX} values")
    return tuple(shape)


def canonical(axis: int, axes: int) -> int:
    """An axis counted from the front; negative ones count from the back."""
    if not -axes <= axis < axes:
        raise UsageError(f"axis {axis} is out of range for a blob with {axes} axes")
    return axis % axes


class Layer(nn.Module):
    """One layer of a net. `forward` takes its bottoms and returns its tops."""

    #: how many bottoms and tops there must be: least and most
    bottoms_range: tuple[int, int] = (1, 1)
    tops_range: tuple[int, int] = (1, 1)
    #: the loss weight of the first top unless the file gives one
    default_loss_weight = 0.0

    def __getattr__(self, name: str) -> Any:
        """Parameters and statistics. A shared parameter has the shape of this layer, whatever that of its owner."""
        value: Any = super().__getattr__(name)
        shape = self.__dict__.get("views", {}).get(name)
        return value if shape is None else value.view(shape)

    def __init__(self, spec: Any, bottoms: list[Tensor], phase: str, near: Path = Path()) -> None:
        super().__init__()
        self.phase = phase
        #: the file of the net, which may name others
        self.near = near
        self.top_count = len(spec.top)
        #: the names of the parameters and statistics, in Caffe's order, and how each is filled
        self.blobs: dict[str, Filler] = {}
        #: the shapes of parameters whose owner, another layer, has them in another shape
        self.views: dict[str, tuple[int, ...]] = {}
        self.set_up(spec, bottoms)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        """Take the settings from the message, and add parameters."""

    def add_parameter(self, name: str, shape: Sequence[int], filler: Filler) -> None:
        check_count(shape, f"parameter {name}")
        if 0 in shape:
            raise UsageError(f"parameter {name} would have the shape {tuple(shape)}, which has no values")
        self.register_parameter(name, nn.Parameter(torch.empty(tuple(shape), device="meta")))
        self.blobs[name] = filler

    def infer(self, bottoms: list[Tensor]) -> tuple[Tensor, ...]:
        """The shapes of the tops, as tensors on the device "meta"."""
        return as_tuple(self(*bottoms))

    @property
    def trains(self) -> bool:
        """Whether the layer acts as in training; `eval()` on a training net makes it act as in a test."""
        return self.phase == "TRAIN" and self.training


def as_tuple(tops: Any) -> tuple[Tensor, ...]:
    return tops if isinstance(tops, tuple) else (tops,)


def positive(value: int, name: str) -> int:
    if value < 1:
        raise UsageError(f"{name} is {value}; it must be at least 1")
    return int(value)


def shapes(tensors: Sequence[Tensor]) -> str:
    """Shapes for an error."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
