"""Functions of each value."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tether.caffe.layers.base import Layer
from tether.errors import UsageError


class ReLU(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.slope = spec.relu_param.negative_slope

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.leaky_relu(bottom, self.slope) if self.slope else bottom.relu()


class ELU(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.alpha = spec.elu_param.alpha

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.elu(bottom, self.alpha)


class Sigmoid(Layer):
    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.sigmoid()


class TanH(Layer):
    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.tanh()


class AbsVal(Layer):
    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.abs()


class BNLL(Layer):
    def forward(self, bottom: Tensor) -> Tensor:
        return torch.logaddexp(bottom, torch.zeros_like(bottom))


class Swish(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.beta = spec.swish_param.beta

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom * (self.beta * bottom).sigmoid()


class Clip(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.clip_param
        if not param.HasField("min") or not param.HasField("max"):
            raise UsageError("clip_param needs min and max")
        self.least, self.most = param.min, param.max

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.clamp(self.least, self.most)


class Threshold(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.threshold = spec.threshold_param.threshold

    def forward(self, bottom: Tensor) -> Tensor:
        return (bottom > self.threshold).to(bottom.dtype)


class Power(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.power_param
        self.power, self.scale, self.shift = param.power, param.scale, param.shift

    def forward(self, bottom: Tensor) -> Tensor:
        if self.power == 0 or self.scale == 0:
            # Caffe fills in the constant and passes no gradient
            return torch.full_like(bottom, 1.0 if self.power == 0 else self.shift**self.power)
        values = bottom * self.scale + self.shift
        return values if self.power == 1 else values.pow(self.power)


class Exp(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.exp_param
        self.scale, self.shift, base = param.scale, param.shift, param.base
        if base != -1 and base <= 0:
            raise UsageError(f"base is {base:g}; it must be more than 0, or -1 for e")
        self.log_base = 1.0 if base == -1 else math.log(base)

    def forward(self, bottom: Tensor) -> Tensor:
        return ((bottom * self.scale + self.shift) * self.log_base).exp()


class Log(Exp):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.log_param
        self.scale, self.shift, base = param.scale, param.shift, param.base
        if base != -1 and (base <= 0 or base == 1):
            raise UsageError(f"base is {base:g}; it must be more than 0 and not 1, or -1 for e")
        self.log_base = 1.0 if base == -1 else math.log(base)

    def forward(self, bottom: Tensor) -> Tensor:
        return (bottom * self.scale + self.shift).log() / self.log_base


class Dropout(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.ratio = spec.dropout_param.dropout_ratio
        if not 0 <= self.ratio < 1:
            raise UsageError(f"dropout_ratio is {self.ratio:g}; it must be at least 0 and less than 1")

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.dropout(bottom, self.ratio, self.trains)
