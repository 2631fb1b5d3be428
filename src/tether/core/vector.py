"""All trainable parameters of a module as one flat tensor that they are views of.

Layout: first the trainable parameters in the order of `named_parameters` (a tied weight once, frozen ones left out),
then the persistent floating-point buffers, such as BatchNorm's running mean. Integer buffers and buffers of
another precision stay with their module. Gradients have a flat tensor of their own, as long as the parameters.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Layout:
    """Which tensors the values of a vector are, by the names that the module's `state_dict` has for them."""

    #: in the order of the vector
    shapes: dict[str, tuple[int, ...]]
    #: second names of tensors in the vector, as of tied weights, with the first names
    aliases: dict[str, str] = field(default_factory=dict)
    #: tensors of the state_dict that no vector holds: frozen parameters, and buffers of another type
    others: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def flat(weights: Tensor) -> Layout:
        """One tensor, for a vector that belongs to no module."""
        return Layout({"weights": (weights.numel(),)})

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """A whole state_dict with the values of this vector. No two of its tensors overlap."""
        tensors: dict[str, Tensor] = {}
        position = 0
        for name, shape in self.shapes.items():
            end = position + math.prod(shape)
            tensors[name] = weights[position:end].view(shape)
            position = end
        copies = {name: tensors[first].clone() for name, first in self.aliases.items()}
        return tensors | copies | {name: value.detach().clone() for name, value in self.others.items()}


def joined(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """The vector of which a state_dict holds these tensors, in this order."""
    return torch.cat([tensors[name].reshape(-1) for name in names])


class Vector:
    """A module's parameters and buffers, flat. Changing `weights` changes the module, and vice versa."""

    def __init__(
        self,
        module: nn.Module,
        empty: Empty = torch.empty,
        shared: Shared | None = None,
        frozen: Iterable[Tensor] = (),
    ) -> None:
        """`empty` allocates the gradients; with `shared`, the weights are in that memory.

        Of the parameters that are `frozen`, those named here are in the vector too: they may be trained later.
        """
        kept = {id(parameter) for parameter in frozen}
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad or id(p) in kept]
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
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._empty = empty
        self._tensors = [*self.parameters, *buffers]
        self._buffers = [(part, name, buffer) for (part, name), buffer in zip(places, buffers, strict=True)]
        self._gradient_views: list[Tensor] = []
        self._module = module
        self._names = [name for name, _ in named]
        self.renew_gradient()

    @property
    def layout(self) -> Layout:
        """Which tensors of the module's state_dict the vector holds."""
        prefixes = {id(part): f"{prefix}." if prefix else "" for prefix, part in self._module.named_modules()}
        buffers = {prefixes[id(part)] + name: buffer for part, name, buffer in self._buffers}
        held = dict(zip(self._names, self.parameters, strict=True)) | buffers
        first_names = {(tensor.data_ptr(), tensor.shape): name for name, tensor in held.items()}
        state = {name: value for name, value in self._module.state_dict().items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in state.items() if name not in held}
        places = {name: first_names.get((value.data_ptr(), value.shape)) for name, value in rest.items()}
        return Layout(
            {name: tuple(tensor.shape) for name, tensor in held.items()},
            {name: first for name, first in places.items() if first is not None},
            {name: value for name, value in rest.items() if places[name] is None},
        )

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

    def bind(self) -> None:
        """Make the module's parameters and buffers views of the vector again."""
        for tensor, start in zip(self._tensors, self.positions, strict=True):
            tensor.data = self.weights[start : start + tensor.numel()].view(tensor.shape)

    def unbind(self, weights: Tensor) -> None:
        """Give the module's parameters and buffers these values, in memory of their own, and leave the vector as it is.

        Some file formats refuse tensors that are views of one another's memory.
        """
        for tensor, start in zip(self._tensors, self.positions, strict=True):
            tensor.data = weights[start : start + tensor.numel()].view(tensor.shape).clone()

    def bind_replaced(self) -> None:
        """Take over the values of parameters whose `data` was replaced by a tensor of the same kind, and bind them."""
        if self.is_bound():
            return
        for parameter, start in zip(self.parameters, self.positions, strict=False):
            view = self.weights[start : start + parameter.numel()].view(parameter.shape)
            if parameter.dtype == view.dtype and parameter.device == view.device:
                view.copy_(parameter.detach())
                parameter.data = view

    def is_bound(self) -> bool:
        """Whether the module's parameters are views of the vector: a user may have replaced them."""
        return [parameter.data_ptr() for parameter in self.parameters] == self._addresses

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
