"""Layers without bottoms, whose values are their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tether.caffe.fillers import Filler
from tether.caffe.layers.base import Layer, check_count
from tether.errors import UsageError


class Parameter(Layer):
    bottoms_range = (0, 0)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        self.add_parameter("weight", tuple(spec.parameter_param.shape.dim), Filler())

    def forward(self) -> Tensor:
        return self.weight


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
