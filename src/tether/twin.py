"""A learner's model on a device of its own, such as a CUDA device.

The vector, the optimizer and all that is exchanged stay in the host's memory. The twin is the same model on the device:
it takes the weights before a pass, and while the backward pass goes on, each gradient that is done comes back. Both
pass through pinned buffers, and copies run on a stream beside the one that computes.

The same lines run with the CPU as the device, where torch's streams do nothing and no memory is pinned.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tether.vector import Vector


def own_device(index: int) -> torch.device | None:
    """The CUDA device of the learner with that number, in turns if there are more learners; None without any."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", index % count) if count else None


class Twin:
    """A copy of a model that computes its gradients."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """`model` is yet to be made flat."""
        runtime: Any = torch.cuda if device.type == "cuda" else torch.cpu
        runtime.set_device(device)
        self.device = device
        self.model = copy.deepcopy(model).to(device)
        self._vector = Vector(self.model)
        like = self._vector.weights
        self._weights, self._gradient = (
            torch.empty(len(like), dtype=like.dtype, pin_memory=device.type == "cuda") for _ in range(2)
        )
        self._runtime = runtime
        self._computing, self._copying = runtime.Stream(), runtime.Stream()
        self._computing.wait_stream(runtime.current_stream())  # which makes the model
        self._copied = runtime.Event()
        self._came: dict[int, Tensor] = {}
        for parameter, start in zip(self._vector.parameters, self._vector.positions, strict=False):
            self._came[id(parameter)] = self._gradient[start : start + parameter.numel()].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self._send_back)  # type: ignore[no-untyped-call]

    def follow(self, model: nn.Module) -> None:
        """Have the gradients of embeddings by rows where the model has."""
        for part, twin in zip(model.modules(), self.model.modules(), strict=True):
            if isinstance(part, nn.Embedding) and isinstance(twin, nn.Embedding):
                twin.sparse = part.sparse

    def computing(self) -> Any:
        """In this context the device works for this learner."""
        return self._runtime.stream(self._computing)

    def take(self, weights: Tensor) -> None:
        """Have these weights, and no gradients."""
        for parameter in self._vector.parameters:
            parameter.grad = None
        self._weights.copy_(weights)
        with self.computing():
            self._vector.weights.copy_(self._weights, non_blocking=True)

    def give(self, host: Vector) -> None:
        """Let the host's parameters have the gradients of the last pass, and its vector what became of buffers."""
        with self.computing():
            self._vector.gather_buffers()
        count = self._vector.parameter_count
        self._copying.wait_stream(self._computing)
        with self._runtime.stream(self._copying):
            self._weights[count:].copy_(self._vector.weights[count:], non_blocking=True)
            self._copied.record(self._copying)
        self._copied.synchronize()
        host.weights[count:].copy_(self._weights[count:])
        for parameter, twin in zip(host.parameters, self._vector.parameters, strict=True):
            if twin.grad is None or twin.grad.is_sparse:
                parameter.grad = None if twin.grad is None else twin.grad.coalesce().to(host.weights.device)
            else:
                parameter.grad = self._came[id(twin)]

    def _send_back(self, parameter: Tensor) -> None:
        """Called by the backward pass when a gradient is whole."""
        assert parameter.grad is not None
        if not parameter.grad.is_sparse:
            self._copying.wait_stream(self._computing)
            with self._runtime.stream(self._copying):
                self._came[id(parameter)].copy_(parameter.grad, non_blocking=True)


class Guest:
    """A copy of a model that is evaluated on a device.

    Whoever calls it may have inputs anywhere: they go to the device, and outputs come back to where the inputs were.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.model = copy.deepcopy(model).to(device)
        self._vector = Vector(self.model)
        self._from = device
        self.model.register_forward_pre_hook(self._fetch, with_kwargs=True)
        self.model.register_forward_hook(self._bring_back)

    def take(self, weights: Tensor) -> None:
        """Have these weights."""
        self._vector.weights.copy_(weights)

    def _fetch(self, module: nn.Module, inputs: Any, named: Any) -> Any:
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        self._from = tensors[0].device if tensors else self.device
        return to_device(inputs, self.device), to_device(named, self.device)

    def _bring_back(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return to_device(outputs, self._from)


def to_device(batch: Any, device: torch.device) -> Any:
    """What a batch may be, with its tensors on that device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
