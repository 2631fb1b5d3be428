"""Caffe's layers as torch modules, with Caffe's own rules for shapes, edges, divisors and defaults.

A layer is made from its message and from tensors on the device "meta" that have the shapes of its bottoms. It copies
the settings that it needs, since messages cannot be copied to other processes. Parameters are `blobs`, in the order
that a .caffemodel has; they hold no values until the net fills them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tether.caffe.fillers import Filler
from tether.caffe.schema import enum_name
from tether.errors import UsageError

#: Caffe counts the values of a blob in 32 bits
COUNT_MAX = 2**31 - 1
#: what Caffe has as the maximum over nothing
_LOWEST = torch.finfo(torch.float32).min


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

    def __init__(self, spec: Any, bottoms: list[Tensor], phase: str) -> None:
        super().__init__()
        self.phase = phase
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


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise UsageError(f"{name} is {value}; it must be at least 1")
    return int(value)


# ---- layers with weights --------------------------------------------------------------------------------------------


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
        self.stride = [_positive(value, "stride") for value in _spatial(param, "stride", axes, 1)]
        self.pad = _spatial(param, "pad", axes, 0)
        self.dilation = [_positive(value, "dilation") for value in _spatial(param, "dilation", axes, 1)]
        self.group = _positive(param.group, "group")
        outputs = _positive(param.num_output, "num_output")
        for length in kernel:
            _positive(length, "kernel_size")
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


class InnerProduct(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.inner_product_param
        self.axis = canonical(param.axis, bottoms[0].ndim)
        outputs, inputs = _positive(param.num_output, "num_output"), math.prod(bottoms[0].shape[self.axis :])
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
        outputs, inputs = _positive(param.num_output, "num_output"), _positive(param.input_dim, "input_dim")
        self.add_parameter("weight", (inputs, outputs), Filler.of(param, "weight_filler"))
        if param.bias_term:
            self.add_parameter("bias", (outputs,), Filler.of(param, "bias_filler"))
        else:
            self.bias = None

    def forward(self, bottom: Tensor) -> Tensor:
        found = functional.embedding(bottom.long(), self.weight)
        return found if self.bias is None else found + self.bias


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


def _broadcast(values: Tensor, axis: int, axes: int) -> Tensor:
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
        values = _broadcast(self.weight if factor is None else factor, self.axis, bottom.ndim)
        if self.adds:
            return bottom + values
        scaled = bottom * values
        return scaled if self.bias is None else scaled + _broadcast(self.bias, self.axis, bottom.ndim)


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
        slope = slope if slope.ndim == 0 else _broadcast(slope, 1, bottom.ndim)
        return bottom.clamp(min=0) + slope * bottom.clamp(max=0)


class Parameter(Layer):
    bottoms_range = (0, 0)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.add_parameter("weight", tuple(spec.parameter_param.shape.dim), Filler())

    def forward(self) -> Tensor:
        return self.weight


class Recurrent(Layer):
    """A recurrent layer over time steps: bottoms are x (T, N, ...), cont (T, N) and perhaps a static input.

    cont is 0 where a sequence begins. What a sequence has left behind is kept for the next mini-batch, as in Caffe.
    """

    bottoms_range, tops_range = (2, 5), (1, 3)
    states = 1
    gates = 1

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.recurrent_param
        self.size = _positive(param.num_output, "num_output")
        self.exposes = bool(param.expose_hidden)
        hidden = self.states if self.exposes else 0
        if bottoms[0].ndim < 3 or bottoms[1].shape != bottoms[0].shape[:2]:
            raise UsageError("bottoms must be x with the axes time, sequence and values, and cont with the first two")
        if len(bottoms) - hidden not in (2, 3) or self.top_count != 1 + hidden:
            raise UsageError(f"with {hidden} exposed states there are {2 + hidden} or {3 + hidden} bottoms")
        self.static = len(bottoms) - hidden == 3
        weight, bias = Filler.of(param, "weight_filler"), Filler.of(param, "bias_filler")
        rows = self.gates * self.size
        self.add_parameter("input_weight", (rows, math.prod(bottoms[0].shape[2:])), weight)
        self.add_parameter("input_bias", (rows,), bias)
        if self.static:
            self.add_parameter("static_weight", (rows, math.prod(bottoms[2].shape[1:])), weight)
        self.add_parameter("hidden_weight", (rows, self.size), weight)
        self.more_parameters(weight, bias)
        self._carried: tuple[Tensor, ...] | None = None

    def more_parameters(self, weight: Filler, bias: Filler) -> None:
        pass

    def infer(self, bottoms: list[Tensor]) -> tuple[Tensor, ...]:
        steps, count = bottoms[0].shape[:2]
        top = torch.empty(check_count((steps, count, self.size), "the top"), device="meta")
        state = torch.empty((1, count, self.size), device="meta")
        return (top, *[state] * (self.states if self.exposes else 0))

    def forward(self, inputs: Tensor, cont: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        projected = functional.linear(inputs.flatten(2), self.input_weight, self.input_bias)
        if self.static:
            projected = projected + functional.linear(more[0].flatten(1), self.static_weight)
            more = more[1:]
        count = inputs.shape[1]
        states = tuple(state[0] for state in more)
        if not states:
            kept = self._carried
            fits = kept is not None and kept[0].shape[0] == count and kept[0].device == inputs.device
            states = (
                kept
                if fits and kept is not None
                else tuple(inputs.new_zeros(count, self.size) for _ in range(self.states))
            )
        outputs = []
        for step in range(inputs.shape[0]):
            output, states = self.one_step(projected[step], cont[step].unsqueeze(1), states)
            outputs.append(output)
        self._carried = tuple(state.detach() for state in states)
        return (torch.stack(outputs), *([state.unsqueeze(0) for state in states] if self.exposes else []))

    def one_step(self, given: Tensor, cont: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError


class LSTM(Recurrent):
    states, gates = 2, 4

    def one_step(self, given: Tensor, cont: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden, cell = states
        gates = given + functional.linear(hidden * cont, self.hidden_weight)
        into, forget, out, new = gates.chunk(4, dim=1)
        cell = cont * forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        hidden = out.sigmoid() * cell.tanh()
        return hidden, (hidden, cell)


class RNN(Recurrent):
    def more_parameters(self, weight: Filler, bias: Filler) -> None:
        self.add_parameter("output_weight", (self.size, self.size), weight)
        self.add_parameter("output_bias", (self.size,), bias)

    def one_step(self, given: Tensor, cont: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden = (given + functional.linear(states[0] * cont, self.hidden_weight)).tanh()
        return functional.linear(hidden, self.output_weight, self.output_bias).tanh(), (hidden,)


# ---- functions of each value ----------------------------------------------------------------------------------------


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
        if not 0 < self.ratio < 1:
            raise UsageError(f"dropout_ratio is {self.ratio:g}; it must be between 0 and 1")

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.dropout(bottom, self.ratio, self.trains)


# ---- pooling and normalizing ----------------------------------------------------------------------------------------


class Pooling(Layer):
    """Windows begin in the picture or its padding; the last ones may go beyond it, which rounding up allows."""

    tops_range = (1, 2)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.pooling_param
        shape = bottoms[0].shape
        if len(shape) != 4:
            raise UsageError(
                f"the bottom has the shape {tuple(shape)}; it must have the axes (n, channel, height, width)"
            )
        self.method = enum_name("PoolMethod", param.pool)
        if self.method == "STOCHASTIC":
            raise UsageError("pool: STOCHASTIC is not supported; use MAX or AVE")
        if self.top_count == 2 and self.method != "MAX":
            raise UsageError("a second top, the mask, is for pool: MAX only")
        self.rounds_up = enum_name("RoundMode", param.round_mode) == "CEIL"
        self.is_global = bool(param.global_pooling)
        sides = [param.HasField("kernel_h"), param.HasField("kernel_w")]
        if self.is_global:
            if param.HasField("kernel_size") or any(sides):
                raise UsageError("global_pooling takes the whole picture: leave out the kernel's size")
        elif param.HasField("kernel_size") == any(sides) or any(sides) != all(sides):
            raise UsageError("give kernel_size, or kernel_h and kernel_w")
        self.kernel = [param.kernel_h, param.kernel_w] if any(sides) else [param.kernel_size] * 2
        has_pad = param.HasField("pad_h") or param.HasField("pad_w")
        self.pad = [param.pad_h, param.pad_w] if has_pad else [param.pad] * 2
        has_stride = param.HasField("stride_h") or param.HasField("stride_w")
        self.stride = [param.stride_h, param.stride_w] if has_stride else [param.stride] * 2
        if self.is_global and (self.pad != [0, 0] or self.stride != [1, 1]):
            raise UsageError("global_pooling takes the whole picture: leave out pad and stride")
        for value in [*self.stride, *([] if self.is_global else self.kernel)]:
            _positive(value, "the length of kernel or stride")
        if not self.is_global and any(p >= k for p, k in zip(self.pad, self.kernel, strict=True)):
            raise UsageError("pad must be less than the kernel's size")
        self.pooled(shape)

    def pooled(self, shape: Sequence[int]) -> list[int]:
        """How many windows there are along both axes."""
        sizes = []
        for size, kernel, pad, stride in zip(shape[2:], self._kernel(shape), self.pad, self.stride, strict=True):
            span = size + 2 * pad - kernel
            if span < 0 and -(-span // stride) < 0:
                raise UsageError(f"the kernel is larger than the bottom of shape {tuple(shape)} with its padding")
            sizes.append((-(-span // stride) if self.rounds_up else span // stride) + 1)
        if any(self.pad):
            # the last window must begin in the picture, or in the padding before it
            for axis in (0, 1):
                if (sizes[axis] - 1) * self.stride[axis] >= shape[2 + axis] + self.pad[axis]:
                    sizes[axis] -= 1
        if min(sizes) < 1:
            raise UsageError(f"the kernel is larger than the bottom of shape {tuple(shape)} with its padding")
        return sizes

    def _kernel(self, shape: Sequence[int]) -> list[int]:
        return [shape[2], shape[3]] if self.is_global else self.kernel

    def forward(self, bottom: Tensor) -> Tensor | tuple[Tensor, ...]:
        kernel, sizes = self._kernel(bottom.shape), self.pooled(bottom.shape)
        ends = [
            (count - 1) * stride + length - size - pad
            for count, stride, length, size, pad in zip(
                sizes, self.stride, kernel, bottom.shape[2:], self.pad, strict=True
            )
        ]
        # negative ends are rows and columns that no window reaches
        around = [self.pad[1], max(0, ends[1]), self.pad[0], max(0, ends[0])]
        if self.method == "MAX":
            padded = functional.pad(bottom, around, value=_LOWEST) if any(around) else bottom
            if self.top_count == 1:
                return functional.max_pool2d(padded, kernel, self.stride)[:, :, : sizes[0], : sizes[1]]
            found, index = functional.max_pool2d(padded, kernel, self.stride, return_indices=True)
            row, column = index // padded.shape[3] - self.pad[0], index % padded.shape[3] - self.pad[1]
            return found, (row * bottom.shape[3] + column).to(bottom.dtype)
        padded = functional.pad(bottom, around) if any(around) else bottom
        sums = functional.avg_pool2d(padded, kernel, self.stride, divisor_override=1)[:, :, : sizes[0], : sizes[1]]
        rows, columns = (self._lengths(axis, sizes[axis], kernel[axis], bottom) for axis in (0, 1))
        return sums / (rows[:, None] * columns)

    def _lengths(self, axis: int, count: int, kernel: int, bottom: Tensor) -> Tensor:
        """How long each window is: the padding counts, what is beyond it does not."""
        starts = torch.arange(count, device=bottom.device, dtype=bottom.dtype) * self.stride[axis] - self.pad[axis]
        return (starts + kernel).clamp(max=bottom.shape[2 + axis] + self.pad[axis]) - starts


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


# ---- shapes ---------------------------------------------------------------------------------------------------------


class Split(Layer):
    tops_range = (1, 1 << 20)

    def forward(self, bottom: Tensor) -> tuple[Tensor, ...]:
        return (bottom,) * self.top_count


class Silence(Layer):
    bottoms_range, tops_range = (1, 1 << 20), (0, 0)

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:
        return ()


class Flatten(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.first = canonical(spec.flatten_param.axis, bottoms[0].ndim)
        self.last = canonical(spec.flatten_param.end_axis, bottoms[0].ndim)
        if self.last < self.first:
            raise UsageError(f"axis {self.first} is behind end_axis {self.last}")

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.flatten(self.first, self.last)


class Reshape(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param, axes = spec.reshape_param, bottoms[0].ndim
        self.first = param.axis if param.axis >= 0 else axes + param.axis + 1
        self.last = axes if param.num_axes == -1 else self.first + param.num_axes
        self.dims = [int(length) for length in param.shape.dim]
        if param.num_axes < -1 or not 0 <= self.first <= self.last <= axes:
            raise UsageError(f"axis {param.axis} and num_axes {param.num_axes} are out of range for {axes} axes")
        if self.dims.count(-1) > 1 or any(length < -1 for length in self.dims):
            raise UsageError("a dim is a length, 0 to keep the bottom's, or once -1 for what is left")
        if any(length == 0 and self.first + place >= axes for place, length in enumerate(self.dims)):
            raise UsageError("a dim of 0 keeps the bottom's length, and the bottom has no such axis")

    def forward(self, bottom: Tensor) -> Tensor:
        shape = bottom.shape
        middle = [shape[self.first + place] if length == 0 else length for place, length in enumerate(self.dims)]
        wanted = [*shape[: self.first], *middle, *shape[self.last :]]
        known = math.prod(length for length in wanted if length != -1)
        fits = known == bottom.numel() if -1 not in wanted else known and bottom.numel() % known == 0
        if not fits:
            raise UsageError(f"{bottom.numel()} values of the shape {tuple(shape)} cannot have the shape {wanted}")
        return bottom.reshape(wanted)


def _axis(param: Any, older: str, axes: int) -> int:
    if param.HasField(older):
        if param.HasField("axis"):
            raise UsageError(f"give axis or {older}, not both")
        return canonical(getattr(param, older), axes)
    return canonical(param.axis, axes)


class Concat(Layer):
    bottoms_range = (1, 1 << 20)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.axis = _axis(spec.concat_param, "concat_dim", bottoms[0].ndim)
        rests = {(*b.shape[: self.axis], *b.shape[self.axis + 1 :]) for b in bottoms}
        if len(rests) > 1 or len({b.ndim for b in bottoms}) > 1:
            raise UsageError(f"bottoms of shapes {shapes(bottoms)} differ in other axes than {self.axis}")

    def forward(self, *bottoms: Tensor) -> Tensor:
        return torch.cat(bottoms, self.axis)


def shapes(tensors: Sequence[Tensor]) -> str:
    """Shapes for an error."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


class Slice(Layer):
    tops_range = (1, 1 << 20)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.axis = _axis(spec.slice_param, "slice_dim", bottoms[0].ndim)
        length, points = bottoms[0].shape[self.axis], [int(p) for p in spec.slice_param.slice_point]
        if points:
            edges = [0, *points, length]
            if len(points) != self.top_count - 1 or any(a >= b for a, b in itertools.pairwise(edges)):
                raise UsageError(f"slice_point {points} must cut {length} values into {self.top_count} tops, in order")
            self.sizes = [b - a for a, b in itertools.pairwise(edges)]
        elif length % self.top_count:
            raise UsageError(f"{self.top_count} tops cannot share {length} values evenly: give slice_point")
        else:
            self.sizes = [length // self.top_count] * self.top_count

    def forward(self, bottom: Tensor) -> tuple[Tensor, ...]:
        # a batch may be shorter or longer than the one that the net was made for
        equal = len(set(self.sizes)) == 1
        sizes = [bottom.shape[self.axis] // self.top_count] * self.top_count if equal else self.sizes
        return tuple(torch.split(bottom, sizes, self.axis))


class Tile(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.axis = canonical(spec.tile_param.axis, bottoms[0].ndim)
        self.tiles = _positive(spec.tile_param.tiles, "tiles")
        check_count([*bottoms[0].shape, self.tiles], "the top")

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.repeat([self.tiles if axis == self.axis else 1 for axis in range(bottom.ndim)])


class Crop(Layer):
    bottoms_range = (2, 2)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        axes = bottoms[0].ndim
        self.axis = canonical(spec.crop_param.axis, axes)
        offsets = [int(offset) for offset in spec.crop_param.offset]
        if len(offsets) not in (0, 1, axes - self.axis) or bottoms[1].ndim != axes:
            raise UsageError(f"crop needs bottoms with equal axes, and no offset, one, or {axes - self.axis}")
        self.offsets = offsets if len(offsets) > 1 else (offsets or [0]) * (axes - self.axis)
        for axis, offset in enumerate(self.offsets, self.axis):
            if bottoms[1].shape[axis] + offset > bottoms[0].shape[axis]:
                raise UsageError(f"the crop of {shapes(bottoms)} goes beyond the first bottom at axis {axis}")

    def forward(self, bottom: Tensor, like: Tensor) -> Tensor:
        for axis, offset in enumerate(self.offsets, self.axis):
            bottom = bottom.narrow(axis, offset, like.shape[axis])
        return bottom


class Eltwise(Layer):
    bottoms_range = (2, 1 << 20)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.eltwise_param
        self.operation = enum_name("EltwiseOp", param.operation)
        self.factors = list(param.coeff) or [1.0] * len(bottoms)
        if len(self.factors) != len(bottoms):
            raise UsageError(f"{len(self.factors)} coeff for {len(bottoms)} bottoms: give one for each, or none")
        if self.operation == "PROD" and param.coeff:
            raise UsageError("coeff is for operation SUM")
        if len({tuple(bottom.shape) for bottom in bottoms}) > 1:
            raise UsageError(f"bottoms must have equal shapes, and not {shapes(bottoms)}")

    def forward(self, *bottoms: Tensor) -> Tensor:
        if self.operation == "SUM":
            bottoms = tuple(b if f == 1 else b * f for b, f in zip(bottoms, self.factors, strict=True))
        combine: Any = {"SUM": torch.add, "PROD": torch.mul, "MAX": torch.maximum}[self.operation]
        result = bottoms[0]
        for bottom in bottoms[1:]:
            result = combine(result, bottom)
        return result


class Reduction(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.reduction_param
        self.axis = canonical(param.axis, bottoms[0].ndim)
        self.operation, self.factor = enum_name("ReductionOp", param.operation), param.coeff

    def forward(self, bottom: Tensor) -> Tensor:
        values = bottom.flatten(self.axis)
        if self.operation == "MEAN":
            return values.mean(-1) * self.factor
        values = {"SUM": values, "ASUM": values.abs(), "SUMSQ": values.square()}[self.operation]
        return values.sum(-1) * self.factor


class ArgMax(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.argmax_param
        self.values, self.top_k = bool(param.out_max_val), param.top_k
        self.axis = canonical(param.axis, bottoms[0].ndim) if param.HasField("axis") else None
        most = bottoms[0].shape[self.axis] if self.axis is not None else math.prod(bottoms[0].shape[1:])
        if not 1 <= self.top_k <= most:
            raise UsageError(f"top_k is {self.top_k}; it must be from 1 to {most}")

    def forward(self, bottom: Tensor) -> Tensor:
        flat = bottom.flatten(1) if self.axis is None else bottom.movedim(self.axis, -1)
        # of equal values Caffe takes the last first
        order = torch.sort(flat.flip(-1), stable=True, dim=-1, descending=True)
        best, index = order.values[..., : self.top_k], flat.shape[-1] - 1 - order.indices[..., : self.top_k]
        if self.axis is not None:
            return (best if self.values else index.to(bottom.dtype)).movedim(-1, self.axis)
        parts = [index.to(bottom.dtype), best] if self.values else [index.to(bottom.dtype)]
        found = torch.stack(parts, 1)
        return found.view(*found.shape, *[1] * (bottom.ndim - 3))


# ---- losses ---------------------------------------------------------------------------------------------------------


class Softmax(Layer):
    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.axis = canonical(spec.softmax_param.axis, bottoms[0].ndim)

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.softmax(self.axis)


def _normalization(param: Any, default: str) -> str:
    if param.HasField("normalization"):
        return enum_name("NormalizationMode", param.normalization)
    if param.HasField("normalize"):
        return "VALID" if param.normalize else "BATCH_SIZE"
    return default


def _normalizer(mode: str, outer: int, every: int, valid: Tensor) -> Tensor | float:
    if mode == "VALID":
        return valid.sum().clamp(min=1)
    return max(1.0, {"FULL": float(every), "BATCH_SIZE": float(outer), "NONE": 1.0}[mode])


def _check_labels(scores: Tensor, labels: Tensor, axis: int) -> None:
    count = scores.numel() // max(1, scores.shape[axis])
    if labels.numel() != count:
        raise UsageError(
            f"{labels.numel()} labels of the shape {tuple(labels.shape)} for {count} predictions of the shape "
            f"{tuple(scores.shape)}: there must be one for each, and classes are axis {axis}"
        )


class SoftmaxWithLoss(Layer):
    bottoms_range, tops_range = (2, 3), (1, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        if len(bottoms) > 2:
            raise UsageError("a third bottom, with weights, is not supported")
        self.axis = canonical(spec.softmax_param.axis, bottoms[0].ndim)
        self.ignored: int | None = spec.loss_param.ignore_label if spec.loss_param.HasField("ignore_label") else None
        self.normalization = _normalization(spec.loss_param, "VALID")
        _check_labels(bottoms[0], bottoms[1], self.axis)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, ...]:
        logs = scores.movedim(self.axis, -1)
        logs = logs.reshape(-1, logs.shape[-1]).log_softmax(1)
        wanted = labels.reshape(-1).long()
        valid = torch.ones_like(wanted, dtype=torch.bool) if self.ignored is None else wanted != self.ignored
        found = -logs.gather(1, torch.where(valid, wanted, 0).unsqueeze(1)).squeeze(1)
        outer = math.prod(scores.shape[: self.axis])
        total = torch.where(valid, found, 0.0).sum()
        loss = total / _normalizer(self.normalization, outer, wanted.numel(), valid)
        return loss if self.top_count == 1 else (loss, scores.softmax(self.axis))


class MultinomialLogisticLoss(Layer):
    bottoms_range = (2, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        _check_labels(bottoms[0].flatten(1), bottoms[1], 1)

    def forward(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        found = probabilities.flatten(1).gather(1, labels.reshape(-1, 1).long())
        return -found.clamp(min=1e-20).log().sum() / len(probabilities)


class SigmoidCrossEntropyLoss(Layer):
    bottoms_range, tops_range = (2, 2), (1, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.ignored: int | None = spec.loss_param.ignore_label if spec.loss_param.HasField("ignore_label") else None
        self.normalization = _normalization(spec.loss_param, "BATCH_SIZE")
        if bottoms[0].numel() != bottoms[1].numel():
            raise UsageError(f"bottoms must have as many values each, and not the shapes {shapes(bottoms)}")

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, ...]:
        targets = targets.reshape(scores.shape)
        each = functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        valid = torch.ones_like(scores, dtype=torch.bool)
        if self.ignored is not None:
            valid = targets.to(torch.int64) != self.ignored
        total = torch.where(valid, each, 0.0).sum()
        loss = total / _normalizer(self.normalization, scores.shape[0], scores.numel(), valid)
        return loss if self.top_count == 1 else (loss, scores.sigmoid())


class EuclideanLoss(Layer):
    bottoms_range = (2, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        if bottoms[0].numel() != bottoms[1].numel() or not bottoms[0].ndim:
            raise UsageError(f"bottoms must have as many values each, and not the shapes {shapes(bottoms)}")

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return (one - other.reshape(one.shape)).square().sum() / (2 * one.shape[0])


class HingeLoss(Layer):
    bottoms_range = (2, 2)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.norm = enum_name("Norm", spec.hinge_loss_param.norm)
        _check_labels(bottoms[0].flatten(1), bottoms[1], 1)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        flat = scores.flatten(1)
        own = functional.one_hot(labels.reshape(-1).long(), flat.shape[1]).to(flat.dtype) if not flat.is_meta else flat
        margins = (1 + flat * (1 - 2 * own)).clamp(min=0)
        return (margins if self.norm == "L1" else margins.square()).sum() / scores.shape[0]


class ContrastiveLoss(Layer):
    bottoms_range = (3, 3)
    default_loss_weight = 1.0

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.margin, self.legacy = spec.contrastive_loss_param.margin, spec.contrastive_loss_param.legacy_version
        if bottoms[0].shape != bottoms[1].shape or bottoms[2].numel() != bottoms[0].shape[0]:
            raise UsageError(f"bottoms must be two of equal shape and a label for each pair, and not {shapes(bottoms)}")

    def forward(self, one: Tensor, other: Tensor, similar: Tensor) -> Tensor:
        squares = (one - other).flatten(1).square().sum(1)
        if self.legacy:
            apart = (self.margin - squares).clamp(min=0)
        else:
            # the root has no derivative at 0
            distance = torch.where(squares > 0, torch.where(squares > 0, squares, 1.0).sqrt(), 0.0)
            apart = (self.margin - distance).clamp(min=0).square()
        return torch.where(similar.reshape(-1) != 0, squares, apart).sum() / (2 * len(one))


class Accuracy(Layer):
    bottoms_range, tops_range = (2, 2), (1, 2)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.accuracy_param
        self.top_k = param.top_k
        self.axis = canonical(param.axis, bottoms[0].ndim)
        self.ignored: int | None = param.ignore_label if param.HasField("ignore_label") else None
        _check_labels(bottoms[0], bottoms[1], self.axis)
        if not 1 <= self.top_k <= bottoms[0].shape[self.axis]:
            raise UsageError(f"top_k is {self.top_k}; it must be from 1 to {bottoms[0].shape[self.axis]}, the classes")

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, ...]:
        flat = scores.detach().movedim(self.axis, -1)
        flat = flat.reshape(-1, flat.shape[-1])
        wanted = labels.reshape(-1).long()
        valid = torch.ones_like(wanted, dtype=torch.bool) if self.ignored is None else wanted != self.ignored
        wanted = torch.where(valid, wanted, 0)
        # a class that scores as much as the right one counts as better, as in Caffe
        better = (flat >= flat.gather(1, wanted.unsqueeze(1))).sum(1) - 1
        right = ((better < self.top_k) & valid).to(scores.dtype)
        accuracy = right.sum() / valid.sum().clamp(min=1)
        if self.top_count == 1:
            return accuracy
        zeros = torch.zeros(flat.shape[1], dtype=scores.dtype, device=scores.device)
        counts = zeros.index_add(0, wanted, valid.to(scores.dtype))
        return accuracy, zeros.index_add(0, wanted, right) / counts.clamp(min=1)


class DummyData(Layer):
    """Values from fillers; constants are the same in every mini-batch, others are drawn anew."""

    bottoms_range, tops_range = (0, 0), (1, 1 << 20)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.dummy_data_param
        dims = [list(shape.dim) for shape in param.shape]
        if not dims:
            sides = (param.num, param.channels, param.height, param.width)
            if not all(len(side) in (1, self.top_count) for side in sides):
                raise UsageError("give one shape, or num, channels, height and width, for all tops or for each")
            dims = [[int(s[i if len(s) > 1 else 0]) for s in sides] for i in range(self.top_count)]
        if len(dims) not in (1, self.top_count) or len(param.data_filler) not in (0, 1, self.top_count):
            raise UsageError(f"give {self.top_count} tops one shape and filler, or one for each")
        self.dims = [check_count(d, "a top") for d in (dims * self.top_count if len(dims) == 1 else dims)]
        fillers = [Filler.read(filler) for filler in param.data_filler] or [Filler()]
        self.fillers = fillers * self.top_count if len(fillers) == 1 else fillers
        self.register_buffer("like", torch.empty(0, device="meta"), persistent=False)

    def forward(self) -> tuple[Tensor, ...]:
        tops = []
        for shape, filler in zip(self.dims, self.fillers, strict=True):
            top = torch.empty(shape, device=self.like.device)
            if not top.is_meta:
                filler.fill(top)
            tops.append(top)
        return tuple(tops)


LAYERS: dict[str, type[Layer]] = {
    cls.__name__: cls
    for cls in (
        AbsVal, Accuracy, ArgMax, BatchNorm, Bias, BNLL, Clip, Concat, ContrastiveLoss, Convolution, Crop,
        Deconvolution, Dropout, DummyData, Eltwise, ELU, Embed, EuclideanLoss, Exp, Flatten, HingeLoss,
        InnerProduct, Log, LRN, LSTM, MultinomialLogisticLoss, MVN, Parameter, Pooling, Power, PReLU, Reduction,
        ReLU, Reshape, RNN, Scale, Sigmoid, SigmoidCrossEntropyLoss, Silence, Slice, Softmax, SoftmaxWithLoss,
        Split, Swish, TanH, Threshold, Tile,
    )
}  # fmt: skip
#: layers that have data from outside, whose tops are inputs of the net
SOURCES = ("Data", "ImageData", "HDF5Data", "MemoryData", "Input")
