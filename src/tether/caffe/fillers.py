"""Caffe's fillers: how the values of a new parameter are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.caffe.schema import enum_name
from tether.errors import UsageError, unknown


@dataclass(frozen=True)
class Filler:
    """A FillerParameter."""

    type: str = "constant"
    value: float = 0.0
    min: float = 0.0
    max: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    sparse: int = -1
    variance_norm: str = "FAN_IN"

    @staticmethod
    def of(parent: Any, field: str, default: float = 0.0) -> Filler:
        """The filler in a field of a message or, if it has none, a constant."""
        if not parent.HasField(field):
            return Filler(value=default)
        return Filler.read(getattr(parent, field))

    @staticmethod
    def read(given: Any) -> Filler:
        if given.type not in _FILLERS:
            raise unknown("filler", given.type, _FILLERS)
        norm = enum_name("VarianceNorm", given.variance_norm)
        return Filler(given.type, given.value, given.min, given.max, given.mean, given.std, given.sparse, norm)

    def fill(self, values: Tensor) -> None:
        """Overwrite a tensor with new values, drawn from torch's global generator."""
        with torch.no_grad():
            _FILLERS[self.type](self, values)


def _constant(filler: Filler, values: Tensor) -> None:
    values.fill_(filler.value)


def _uniform(filler: Filler, values: Tensor) -> None:
    if filler.max < filler.min:
        raise UsageError(f"a uniform filler has min {filler.min:g} and max {filler.max:g}: min must not be larger")
    values.uniform_(filler.min, filler.max)


def _gaussian(filler: Filler, values: Tensor) -> None:
    if filler.std < 0:
        raise UsageError(f"a gaussian filler has std {filler.std:g}: it must not be negative")
    values.normal_(filler.mean, filler.std)
    if filler.sparse >= 0:
        # each output keeps about `sparse` of its inputs
        share = min(1.0, filler.sparse / values.shape[0])
        values.mul_(torch.bernoulli(torch.full_like(values, share)))


def _fan(filler: Filler, values: Tensor) -> float:
    count = values.numel()
    into = count / values.shape[0] if values.ndim else count
    out = count / values.shape[1] if values.ndim > 1 else count
    return {"FAN_IN": into, "FAN_OUT": out, "AVERAGE": (into + out) / 2}[filler.variance_norm]


def _xavier(filler: Filler, values: Tensor) -> None:
    scale = math.sqrt(3 / _fan(filler, values))
    values.uniform_(-scale, scale)


def _msra(filler: Filler, values: Tensor) -> None:
    values.normal_(0, math.sqrt(2 / _fan(filler, values)))


def _bilinear(filler: Filler, values: Tensor) -> None:
    if values.ndim != 4 or values.shape[2] != values.shape[3]:
        raise UsageError(f"a bilinear filler needs square kernels with two axes, and not {tuple(values.shape)}")
    size = values.shape[3]
    factor = math.ceil(size / 2)
    centre = (2 * factor - 1 - factor % 2) / (2 * factor)
    line = 1 - (torch.arange(size, dtype=values.dtype) / factor - centre).abs()
    values.copy_((line[:, None] * line[None, :]).expand_as(values))


def _positive_unitball(filler: Filler, values: Tensor) -> None:
    values.uniform_(0, 1)
    rows = values.view(values.shape[0], -1)
    rows.div_(rows.sum(1, keepdim=True))


_FILLERS = {
    "constant": _constant,
    "uniform": _uniform,
    "gaussian": _gaussian,
    "xavier": _xavier,
    "msra": _msra,
    "bilinear": _bilinear,
    "positive_unitball": _positive_unitball,
}
