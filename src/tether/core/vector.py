"""All trainable parameters of a module as one flat tensor that they are views of.

Layout: first the trainable parameters in the order of `named_parameters` (a tied weight once, frozen ones left out),
then the persistent floating-point buffers, such as BatchNorm's running mean. Integer buffers and buffers of
another precision stay with their module. Gradients have a flat tensor of their own, as long as the parameters.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tether.errors import TaskError

#: makes a tensor of a given length: `torch.empty`, or a function that puts it where other processes can see it
Empty = Callable[..., Tensor]


@dataclass(frozen=True)
class Shared:
    """The memory of a vector that several nodes share; the node that is `first` initializes it."""

    memory: Tensor
    first: bool = False

    def vector(self, values: Tensor) -> Tensor:
        """The shared vector, after the node that is `first` has copied these values there."""
        vector = self.memory[: values.numel() * values.element_size()].view(values.dtype)
        return vector.copy_(values) if self.first else vector


class Vector:
    """A module's parameters and buffers, flat. Changing `weights` changes the module, and vice versa."""

    def __init__(self, module: nn.Module, empty: Empty = torch.empty, shared: Shared | None = None) -> None:
        """`empty` allocates the gradients; with `shared`, the weights are in that memory."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise TaskError(
                f"the model {type(module).__name__} has no trainable parameter: "
                "return a module from model() in which some parameter has requires_grad=True"
            )
        self.parameters: list[nn.Parameter] = [p for _, p in named]
        _require_one_dtype_and_device(named)
        first = self.parameters[0]
        places = _persistent_buffers(module, first)
        buffers = [getattr(part, name) for part, name in places]
        sizes = [p.numel() for p in self.parameters]
        self.parameter_count = sum(sizes)
        values = torch.cat([t.detach().reshape(-1) for t in [*self.parameters, *buffers]])
        self.weights: Tensor = values if shared is None else shared.vector(values)
        self.positions: list[int] = []
        position = 0
        for tensor in [*self.parameters, *buffers]:
            self.positions.append(position)
            end = position + tensor.numel()
            tensor.data = self.weights[position:end].view(tensor.shape)
            position = end
        self._empty = empty
        self._buffers = [(part, name, buffer) for (part, name), buffer in zip(places, buffers, strict=True)]
        self._gradient_views: list[Tensor] = []
        self.renew_gradient()

    def renew_gradient(self) -> None:
        """Use a new buffer for the next gradients; the old one keeps its values for its other users."""
        for parameter, view in zip(self.parameters, self._gradient_views, strict=False):
            if parameter.grad is view:
                parameter.grad = None
        self.gradient = self._empty(self.parameter_count, dtype=self.weights.dtype, device=self.weights.device)
        self._gradient_views = [
            self.gradient[start : start + parameter.numel()].view(parameter.shape)
            for parameter, start in zip(self.parameters, self.positions, strict=False)
        ]

    def gather_gradient(self, skipped: Collection[int] = ()) -> Tensor:
        """The flat gradient after a backward pass, even if the pass replaced `parameter.grad` or buffers.

        Gradients of the parameters at the positions `skipped` stay where they are.
        """
        for parameter, view, start in zip(self.parameters, self._gradient_views, self.positions, strict=False):
            if parameter.grad is not view and start not in skipped:
                copy_gradient(parameter, view)
                parameter.grad = view
        self.gather_buffers()
        return self.gradient

    def gather_buffers(self) -> None:
        """Copy buffers into the vector that a pass has replaced instead of writing into them."""
        for part, name, view in self._buffers:
            if (buffer := getattr(part, name)) is not view:
                view.copy_(buffer)
                setattr(part, name, view)


def copy_gradient(parameter: Tensor, destination: Tensor) -> None:
    """Copy the gradient of a parameter, or zeros if backward made none."""
    gradient = parameter.grad
    if gradient is not None and not gradient.is_sparse:
        destination.copy_(gradient)
        return
    destination.zero_()
    if gradient is not None:
        destination.index_add_(0, gradient._indices()[0], gradient._values())


def is_finite(values: Tensor) -> bool:
    """Whether every value is finite. A finite sum proves it in one pass; only otherwise is every value checked."""
    wide = torch.float32 if values.dtype == torch.float16 else None
    return math.isfinite(float(values.sum(dtype=wide))) or bool(values.isfinite().all())


def shards(length: int, count: int) -> list[slice]:
    """Cut a vector into `count` shards whose lengths differ by at most one, regardless of layers."""
    edges = [length * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def digest(values: Tensor) -> str:
    """SHA-256 of the bytes."""
    return hashlib.sha256(raw_bytes(values)).hexdigest()


def raw_bytes(values: Tensor) -> memoryview:
    """The tensor's memory, copied only if it is not contiguous or not on the CPU."""
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _persistent_buffers(module: nn.Module, like: Tensor) -> list[tuple[nn.Module, str]]:
    """Where each buffer is that `state_dict` keeps and that has the dtype and device of the parameters."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            kept = name not in part._non_persistent_buffers_set
            if kept and buffer.dtype == like.dtype and buffer.device == like.device:
                found.setdefault(id(buffer), (part, name))
    return list(found.values())


def _require_one_dtype_and_device(named: list[tuple[str, nn.Parameter]]) -> None:
    first_name, first = named[0]
    for name, parameter in named:
        if nn.parameter.is_lazy(parameter):
            raise TaskError(f"parameter {name!r} has no shape yet: call the lazy module on a sample in model() first")
    for name, parameter in named:
        if parameter.dtype != first.dtype or parameter.device != first.device:
            raise TaskError(
                f"parameter {name!r} is {parameter.dtype} on {parameter.device} but {first_name!r} is {first.dtype} on "
                f"{first.device}; Tether keeps all trainable parameters in one flat tensor: convert the model with "
                ".to(dtype) or .to(device), or freeze the odd ones with requires_grad_(False)"
            )
        if not parameter.is_floating_point():
            raise TaskError(f"parameter {name!r} is {parameter.dtype}; trainable parameters must be floating-point")
