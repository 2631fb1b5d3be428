"""Layers with weights."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import functional

from tether.caffe.fillers import Filler
from tether.caffe.layers.base import Layer, canonical, positive
from tether.errors import UsageError


def _spatial(param: Any, name: str, axes: int, default: int | None) -> list[int]:
    """A setting for each spatial axis: from name_h and name_w, or from one value for all, or from one for each."""
    short = name.removesuffix("_size")
    listed = list(getattr(param, name))
    if hasattr(param, f"{short}_h") and (param.HasField(f"{short}_h") or param.HasField(f"{short}_w")):
        if axes != 2 or listed:
            raise UsageError(f"{short}_h and {short}_w are for two spatial axes, and exclude {name}")
        return [int(getattr(param, f"{short}_h")), int(getattr(param, f"{short}_w"))]
    if not listed:
        if default is None:
            raise UsageError(f"{name} is missing")
        return [default] * axes
    if len(listed) not in (1, axes):
        raise UsageError(f"{name} has {len(listed)} values for {axes} spatial axes: give 1 or {axes}")
    return [int(value) for value in (listed * axes if len(listed) == 1 else listed)]


class Convolution(Layer):
    bottoms_range, tops_range = (1, 1 << 20), (1, 1 << 20)
    transposed = False

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.convolution_param
        shape = bottoms[0].shape
        axis = canonical(param.axis, len(shape))
        if axis != 1 or not 1 <= len(shape) - 2 <= 3:
            raise UsageError(
                f"axis {param.axis} of a bottom of shape {tuple(shape)}: supported are 1 to 3 spatial axes"
            )
        axes = len(shape) - 2
        kernel = _spatial(param, "kernel_size", axes, None)
        self.stride = [positive(value, "stride") for value in _spatial(param, "stride", axes, 1)]
        self.pad = _spatial(param, "pad", axes, 0)
        self.dilation = [positive(value, "dilation") for value in _spatial(param, "dilation", axes, 1)]
        self.group = positive(param.group, "group")
        outputs = positive(param.num_output, "num_output")
        for length in kernel:
            positive(length, "kernel_size")
        if shape[1] % self.group or outputs % self.group:
            raise UsageError(f"group {self.group} must divide the {shape[1]} channels and num_output {outputs}")
        first, second = (shape[1], outputs) if self.transposed else (outputs, shape[1])
        self.add_parameter("weight", (first, second // self.group, *kernel), Filler.of(param, "weight_filler"))
        if param.bias_term:
            self.add_parameter("bias", (outputs,), Filler.of(param, "bias_filler"))
        else:
            self.bias = None
        for size, length, pad, dilation in zip(shape[2:], kernel, self.pad, self.dilation, strict=True):
            if not self.transposed and size + 2 * pad < dilation * (length - 1) + 1:
                raise UsageError(f"the kernel is larger than the bottom of shape {tuple(shape)} with its padding")

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._one(bottom) for bottom in bottoms)

    def _one(self, bottom: Tensor) -> Tensor:
        function = (functional.conv1d, functional.conv2d, functional.conv3d)[bottom.ndim - 3]
        return function(bottom, self.weight, self.bias, self.stride, self.pad, self.dilation, self.group)


class Deconvolution(Convolution):
    transposed = True

    def _one(self, bottom: Tensor) -> Tensor:
        functions = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
        function: Any = functions[bottom.ndim - 3]
        top: Tensor = function(bottom, self.weight, self.bias, self.stride, self.pad, 0, self.group, self.dilation)
        return top


class Im2col(Layer):
    """The windows of a convolution as columns."""

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.convolution_param
        if bottoms[0].ndim != 4 or param.axis != 1:
            raise UsageError("the bottom must have the axes (n, channel, height, width)")
        self.kernel = tuple(positive(value, "kernel_size") for value in _spatial(param, "kernel_size", 2, None))
        self.stride = tuple(positive(value, "stride") for value in _spatial(param, "stride", 2, 1))
        self.dilation = tuple(positive(value, "dilation") for value in _spatial(param, "dilation", 2, 1))
        self.pad = tuple(_spatial(param, "pad", 2, 0))

    def forward(self, bottom: Tensor) -> Tensor:
        columns = functional.unfold(bottom, self.kernel, self.dilation, self.pad, self.stride)
        height, width = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, pad, dilation, kernel, stride in zip(
                bottom.shape[2:], self.pad, self.dilation, self.kernel, self.stride, strict=True
            )
        )
        return columns.view(*columns.shape[:2], height, width)


class InnerProduct(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.inner_product_param
        self.axis = canonical(param.axis, bottoms[0].ndim)
        outputs, inputs = positive(param.num_output, "num_output"), math.prod(bottoms[0].shape[self.axis :])
        self.transpose = bool(param.transpose)
        shape = (inputs, outputs) if self.transpose else (outputs, inputs)
        self.add_parameter("weight", shape, Filler.of(param, "weight_filler"))
        if param.bias_term:
            self.add_parameter("bias", (outputs,), Filler.of(param, "bias_filler"))
        else:
            self.bias = None

    def forward(self, bottom: Tensor) -> Tensor:
        weight: Any = self.weight.t() if self.transpose else self.weight
        return functional.linear(bottom.flatten(self.axis), weight, self.bias)


class Embed(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.embed_param
        outputs, inputs = positive(param.num_output, "num_output"), positive(param.input_dim, "input_dim")
        self.add_parameter("weight", (inputs, outputs), Filler.of(param, "weight_filler"))
        if param.bias_term:
            self.add_parameter("bias", (outputs,), Filler.of(param, "bias_filler"))
        else:
            self.bias = None

    def forward(self, bottom: Tensor) -> Tensor:
        found = functional.embedding(bottom.long(), self.weight)
        return found if self.bias is None else found + self.bias


def broadcast(values: Tensor, axis: int, axes: int) -> Tensor:
    """A tensor whose first axis meets the axis of a blob with that many axes."""
    return values.view(*values.shape, *[1] * (axes - axis - values.ndim))


class Scale(Layer):
    bottoms_range = (1, 2)
    adds = False

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.bias_param if self.adds else spec.scale_param
        shape = tuple(bottoms[0].shape)
        self.axis = 0 if len(bottoms) == 2 and bottoms[1].ndim == 0 else canonical(param.axis, len(shape))
        if len(bottoms) == 1:
            if param.num_axes < -1 or self.axis + param.num_axes > len(shape):
                raise UsageError(f"num_axes {param.num_axes} from axis {param.axis} goes beyond the shape {shape}")
            end = len(shape) if param.num_axes == -1 else self.axis + param.num_axes
            self.shape = shape[self.axis : end]
            self.add_parameter("weight", self.shape, Filler.of(param, "filler", 0.0 if self.adds else 1.0))
        else:
            self.shape = tuple(bottoms[1].shape)
        if shape[self.axis : self.axis + len(self.shape)] != self.shape:
            raise UsageError(
                f"a factor of shape {self.shape} does not fit a bottom of shape {shape} at axis {self.axis}"
            )
        self.bias = None
        if not self.adds and param.bias_term:
            del self.bias
            self.add_parameter("bias", self.shape, Filler.of(param, "bias_filler"))

    def forward(self, bottom: Tensor, factor: Tensor | None = None) -> Tensor:
        values = broadcast(self.weight if factor is None else factor, self.axis, bottom.ndim)
        if self.adds:
            return bottom + values
        scaled = bottom * values
        return scaled if self.bias is None else scaled + broadcast(self.bias, self.axis, bottom.ndim)


class Bias(Scale):
    adds = True


class PReLU(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.prelu_param
        if bottoms[0].ndim < 2:
            raise UsageError("the bottom must have at least 2 axes")
        self.add_parameter(
            "weight", () if param.channel_shared else (bottoms[0].shape[1],), Filler.of(param, "filler", 0.25)
        )

    def forward(self, bottom: Tensor) -> Tensor:
        slope: Any = self.weight
        slope = slope if slope.ndim == 0 else broadcast(slope, 1, bottom.ndim)
        return bottom.clamp(min=0) + slope * bottom.clamp(max=0)
