"""Layers that arrange, choose and combine values."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from tether.caffe.layers.base import Layer, canonical, check_count, positive, shapes
from tether.caffe.schema import enum_name
from tether.errors import UsageError


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
        self.tiles = positive(spec.tile_param.tiles, "tiles")
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
        if self.operation == "MAX":
            # of equal values, that of the second bottom has the gradient, else that of the first of them
            result = torch.where(bottoms[0] > bottoms[1], bottoms[0], bottoms[1])
            for bottom in bottoms[2:]:
                result = torch.where(bottom > result, bottom, result)
            return result
        return functools.reduce(torch.add if self.operation == "SUM" else torch.mul, bottoms)


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


class BatchReindex(Layer):
    """The samples of the first bottom that the second one numbers."""

    bottoms_range = (2, 2)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        if bottoms[1].ndim != 1 or not bottoms[0].ndim:
            raise UsageError(f"bottoms must be samples and a list of their numbers, and not {shapes(bottoms)}")

    def forward(self, bottom: Tensor, numbers: Tensor) -> Tensor:
        return bottom.index_select(0, numbers.long())


class Filter(Layer):
    """The samples of every bottom for which the last one is not 0."""

    bottoms_range, tops_range = (2, 1 << 20), (1, 1 << 20)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        if len(bottoms) != self.top_count + 1:
            raise UsageError(f"it has {len(bottoms)} bottoms for {self.top_count} tops: the last bottom chooses")
        lengths = {bottom.shape[0] if bottom.ndim else 1 for bottom in bottoms}
        if len(lengths) > 1 or bottoms[-1].numel() != bottoms[0].shape[0]:
            raise UsageError(
                f"bottoms must have as many samples each, and the last one value for each, and not {shapes(bottoms)}"
            )

    def infer(self, bottoms: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(bottoms[:-1])

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:
        chosen = bottoms[-1].flatten() != 0
        return tuple(bottom[chosen] for bottom in bottoms[:-1])
