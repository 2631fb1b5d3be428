"""Pooling. Windows begin in the picture or its padding; the last ones may go beyond it, which rounding up allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tether.caffe.layers.base import Layer, check_count, positive
from tether.caffe.schema import enum_name
from tether.errors import UsageError

#: what Caffe has as the maximum over nothing
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Windows:
    """Where the windows are: lengths along height and width."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    rounds_up: bool = True

    def counts(self, shape: Sequence[int]) -> list[int]:
        """How many windows there are along both axes."""
        counts = []
        for size, kernel, pad, stride in zip(shape[2:], self.kernel, self.pad, self.stride, strict=True):
            span = size + 2 * pad - kernel
            counts.append((-(-span // stride) if self.rounds_up else span // stride) + 1)
        if any(self.pad):
            # the last window must begin in the picture, or in the padding before it
            for axis in (0, 1):
                if (counts[axis] - 1) * self.stride[axis] >= shape[2 + axis] + self.pad[axis]:
                    counts[axis] -= 1
        if min(counts) < 1:
            raise UsageError(f"the kernel is larger than the bottom of shape {tuple(shape)} with its padding")
        return counts

    def padded(self, bottom: Tensor, counts: Sequence[int], value: float = 0.0) -> Tensor:
        """The picture with values around it, as far as windows reach."""
        ends = [
            (count - 1) * stride + kernel - size - pad
            for count, stride, kernel, size, pad in zip(
                counts, self.stride, self.kernel, bottom.shape[2:], self.pad, strict=True
            )
        ]
        # negative ends are rows and columns that no window reaches
        around = [self.pad[1], max(0, ends[1]), self.pad[0], max(0, ends[0])]
        return functional.pad(bottom, around, value=value) if any(around) else bottom

    def maximum(self, bottom: Tensor) -> Tensor:
        counts = self.counts(bottom.shape)
        found = functional.max_pool2d(self.padded(bottom, counts, _LOWEST), self.kernel, self.stride)
        return found[:, :, : counts[0], : counts[1]]

    def mask(self, bottom: Tensor) -> Tensor:
        """The place of each maximum in its picture."""
        padded = self.padded(bottom, self.counts(bottom.shape), _LOWEST)
        index = functional.max_pool2d(padded, self.kernel, self.stride, return_indices=True)[1]
        row, column = index // padded.shape[3] - self.pad[0], index % padded.shape[3] - self.pad[1]
        return (row * bottom.shape[3] + column).to(bottom.dtype)

    def mean(self, bottom: Tensor) -> Tensor:
        counts = self.counts(bottom.shape)
        sums = functional.avg_pool2d(self.padded(bottom, counts), self.kernel, self.stride, divisor_override=1)
        rows, columns = (self._lengths(axis, counts[axis], bottom) for axis in (0, 1))
        return sums[:, :, : counts[0], : counts[1]] / (rows[:, None] * columns)

    def _lengths(self, axis: int, count: int, bottom: Tensor) -> Tensor:
        """How long each window is: the padding counts, what is beyond it does not."""
        starts = torch.arange(count, device=bottom.device, dtype=bottom.dtype) * self.stride[axis] - self.pad[axis]
        return (starts + self.kernel[axis]).clamp(max=bottom.shape[2 + axis] + self.pad[axis]) - starts

    def stochastic(self, bottom: Tensor, draws: bool) -> Tensor:
        """A value of each window, drawn with a chance that is its share of the window's sum, or the mean over draws."""
        counts = self.counts(bottom.shape)
        columns = functional.unfold(self.padded(bottom, counts), self.kernel, stride=self.stride)
        values = columns.view(*bottom.shape[:2], math.prod(self.kernel), -1)
        sums = values.sum(2, keepdim=True)
        if draws:
            place = (values.cumsum(2) < torch.rand_like(sums) * sums).sum(2, keepdim=True)
            found = values.gather(2, place.clamp(max=values.shape[2] - 1))
        else:
            found = values.square().sum(2, keepdim=True) / sums.clamp(min=torch.finfo(torch.float32).tiny)
        return found.view(*bottom.shape[:2], *self._unfolded(bottom, counts))[:, :, : counts[0], : counts[1]]

    def _unfolded(self, bottom: Tensor, counts: Sequence[int]) -> list[int]:
        """How many windows fit into the padded picture, which may be more than there are."""
        lengths = self.padded(bottom, counts).shape[2:]
        return [(n - k) // s + 1 for n, k, s in zip(lengths, self.kernel, self.stride, strict=True)]


def _four_axes(bottom: Tensor) -> None:
    if bottom.ndim != 4:
        raise UsageError(
            f"the bottom has the shape {tuple(bottom.shape)}; it must have the axes (n, channel, height, width)"
        )


class Pooling(Layer):
    tops_range = (1, 2)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.pooling_param
        _four_axes(bottoms[0])
        self.method = enum_name("PoolMethod", param.pool)
        if self.top_count == 2 and self.method != "MAX":
            raise UsageError("a second top, the mask, is for pool: MAX only")
        sides = [param.HasField("kernel_h"), param.HasField("kernel_w")]
        if param.global_pooling:
            if param.HasField("kernel_size") or any(sides):
                raise UsageError("global_pooling takes the whole picture: leave out the kernel's size")
        elif param.HasField("kernel_size") == any(sides) or any(sides) != all(sides):
            raise UsageError("give kernel_size, or kernel_h and kernel_w")
        has_pad = param.HasField("pad_h") or param.HasField("pad_w")
        pad = (param.pad_h, param.pad_w) if has_pad else (param.pad, param.pad)
        has_stride = param.HasField("stride_h") or param.HasField("stride_w")
        stride = (param.stride_h, param.stride_w) if has_stride else (param.stride, param.stride)
        kernel = (param.kernel_h, param.kernel_w) if any(sides) else (param.kernel_size, param.kernel_size)
        if param.global_pooling and (pad != (0, 0) or stride != (1, 1)):
            raise UsageError("global_pooling takes the whole picture: leave out pad and stride")
        if self.method == "STOCHASTIC" and pad != (0, 0):
            raise UsageError("pad is for pool: MAX and AVE only")
        for value in [*stride, *([] if param.global_pooling else kernel)]:
            positive(value, "the length of kernel or stride")
        if not param.global_pooling and any(p >= k for p, k in zip(pad, kernel, strict=True)):
            raise UsageError("pad must be less than the kernel's size")
        rounds_up = enum_name("RoundMode", param.round_mode) == "CEIL"
        #: none if the window is the whole picture, whatever its size
        self.windows = None if param.global_pooling else Windows(kernel, stride, pad, rounds_up)

    def forward(self, bottom: Tensor) -> Tensor | tuple[Tensor, ...]:
        windows = self.windows or Windows((bottom.shape[2], bottom.shape[3]), (1, 1), (0, 0))
        if self.method == "AVE":
            return windows.mean(bottom)
        if self.method == "STOCHASTIC":
            return windows.stochastic(bottom, self.trains)
        found = windows.maximum(bottom)
        return found if self.top_count == 1 else (found, windows.mask(bottom))


class SPP(Layer):
    """A pyramid: windows that cut the picture into one, four, sixteen parts and so on, one behind the other."""

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        _four_axes(bottoms[0])
        self.levels = positive(spec.spp_param.pyramid_height, "pyramid_height")
        if self.levels > 15:
            raise UsageError(f"pyramid_height is {self.levels}; it must be at most 15")
        self.method = enum_name("PoolMethod", spec.spp_param.pool)
        for level in range(self.levels):
            windows = self._windows(level, bottoms[0])
            if any(pad >= kernel for pad, kernel in zip(windows.pad, windows.kernel, strict=True)):
                raise UsageError(
                    f"the bottom of shape {tuple(bottoms[0].shape)} is too small for pyramid_height {self.levels}"
                )
        check_count([*bottoms[0].shape[:2], 4**self.levels], "the top")

    def forward(self, bottom: Tensor) -> Tensor:
        levels = []
        for level in range(self.levels):
            windows = self._windows(level, bottom)
            match self.method:
                case "MAX":
                    levels.append(windows.maximum(bottom))
                case "AVE":
                    levels.append(windows.mean(bottom))
                case _:
                    levels.append(windows.stochastic(bottom, self.trains))
        return levels[0] if self.levels == 1 else torch.cat([level.flatten(1) for level in levels], 1)

    @staticmethod
    def _windows(level: int, bottom: Tensor) -> Windows:
        parts, sizes = 1 << level, bottom.shape[2:]
        height, width = (math.ceil(size / parts) for size in sizes)
        pads = [(kernel * parts - size + 1) // 2 for kernel, size in zip((height, width), sizes, strict=True)]
        return Windows((height, width), (height, width), (pads[0], pads[1]))
