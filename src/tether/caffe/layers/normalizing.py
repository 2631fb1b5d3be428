"""Layers that normalize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tether.caffe.fillers import Filler
from tether.caffe.layers.base import Layer, check_count
from tether.caffe.schema import enum_name
from tether.errors import UsageError


class BatchNorm(Layer):
    """Normalizes only; Caffe's nets have a Scale layer behind it. Its statistics are sums with a common factor."""

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.batch_norm_param
        self.fraction, self.eps = param.moving_average_fraction, param.eps
        self.use_global: bool | None = param.use_global_stats if param.HasField("use_global_stats") else None
        channels = bottoms[0].shape[1] if bottoms[0].ndim > 1 else 1
        for name, length in (("mean", channels), ("variance", channels), ("factor", 1)):
            self.register_buffer(name, torch.empty(check_count((length,), name), device="meta"))
            self.blobs[name] = Filler()

    def forward(self, bottom: Tensor) -> Tensor:
        shape = bottom.shape
        values = bottom.reshape(shape[0], 1, -1) if len(shape) == 1 else bottom.flatten(2) if len(shape) > 2 else bottom
        values = values.unsqueeze(2) if values.ndim == 2 else values
        if self.use_global if self.use_global is not None else not self.trains:
            # before any training the factor is 0, and so are mean and variance
            factor = torch.where(self.factor == 0, 0.0, 1 / self.factor)
            mean, variance = self.mean * factor, self.variance * factor
        else:
            mean = values.mean((0, 2))
            variance = (values - mean.view(1, -1, 1)).square().mean((0, 2))
            if self.trains:
                self._follow(mean.detach(), variance.detach(), values.numel() / max(1, values.shape[1]))
        normal = (values - mean.view(1, -1, 1)) * (variance + self.eps).rsqrt().view(1, -1, 1)
        return normal.view(shape)

    def _follow(self, mean: Tensor, variance: Tensor, count: float) -> None:
        with torch.no_grad():
            self.factor.mul_(self.fraction).add_(1)
            self.mean.mul_(self.fraction).add_(mean)
            self.variance.mul_(self.fraction).add_(variance, alpha=count / (count - 1) if count > 1 else 1)


class LRN(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.lrn_param
        self.size, self.alpha, self.beta, self.k = param.local_size, param.alpha, param.beta, param.k
        self.within = enum_name("NormRegion", param.norm_region) == "WITHIN_CHANNEL"
        if self.size % 2 == 0:
            raise UsageError(f"local_size is {self.size}; it must be odd")
        if bottoms[0].ndim != 4:
            raise UsageError("the bottom must have the axes (n, channel, height, width)")
        if self.size > 1 << 16:
            raise UsageError(f"local_size is {self.size}; it must be at most {1 << 16}")

    def forward(self, bottom: Tensor) -> Tensor:
        pad = self.size // 2
        squares = bottom.square()
        if self.within:
            mean = functional.avg_pool2d(functional.pad(squares, [pad] * 4), self.size, 1)
            return bottom * (1 + self.alpha * mean).pow(-self.beta)
        # windows over channels, as columns of one picture
        columns = functional.pad(squares.flatten(2).unsqueeze(1), [0, 0, pad, pad])
        mean = functional.avg_pool2d(columns, (self.size, 1), 1).view(bottom.shape)
        return bottom * (self.k + self.alpha * mean).pow(-self.beta)


class MVN(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.mvn_param
        self.variance, self.eps = param.normalize_variance, param.eps
        self.axis = 1 if param.across_channels else 2

    def forward(self, bottom: Tensor) -> Tensor:
        axes = list(range(self.axis, bottom.ndim))
        if not axes:
            raise UsageError("the bottom has no axes to normalize")
        centred = bottom - bottom.mean(axes, keepdim=True)
        if not self.variance:
            return centred
        return centred / (centred.square().mean(axes, keepdim=True).sqrt() + self.eps)
