"""Copies of a model on a device of their own, such as a CUDA device: one to train, one to evaluate.

The vector, the optimizer and everything that is exchanged stay in the host's memory. A `DeviceReplica` is the same
model on the device: it receives the weights before a pass, and while the backward pass is still running, each finished
gradient is copied back. Both pass through pinned buffers, and copies run on another stream than the computation.

The same code runs with the CPU as the device, where torch's streams do nothing and no memory is pinned.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tether.core.vector import Vector


def own_device(index: int) -> torch.device | None:
    """The CUDA device of the worker with that number; workers share devices in turn. None if there is no device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", index % count) if count else None


class DeviceReplica:
    """A copy of a model that computes gradients on a device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """`model` must not be flat yet."""
        runtime: Any = torch.cuda if device.type == "cuda" else torch.cpu
        runtime.set_device(device)
        self.device = device
        self.model = copy.deepcopy(model).to(device)
        self._vector = Vector(self.model)
        like = self._vector.weights
        self._host_weights, self._host_gradient = (
            torch.empty(len(like), dtype=like.dtype, pin_memory=device.type == "cuda") for _ in range(2)
        )
        self._runtime = runtime
        self._compute_stream, self._copy_stream = runtime.Stream(), runtime.Stream()
        self._compute_stream.wait_stream(runtime.current_stream())  # the stream on which the model was made
        self._copied = runtime.Event()
        #: the part of the host's gradient that belongs to each parameter
        self._host_gradients: dict[int, Tensor] = {}
        for parameter, start in zip(self._vector.parameters, self._vector.positions, strict=False):
            place = self._host_gradient[start : start + parameter.numel()].view(parameter.shape)
            self._host_gradients[id(parameter)] = place
            parameter.register_post_accumulate_grad_hook(self._copy_to_host)  # type: ignore[no-untyped-call]

    def copy_sparse_flags(self, model: nn.Module) -> None:
        """Compute the gradients of embeddings by rows wherever `model` does."""
        for part, replica in zip(model.modules(), self.model.modules(), strict=True):
            if isinstance(part, nn.Embedding) and isinstance(replica, nn.Embedding):
                replica.sparse = part.sparse

    def on_stream(self) -> Any:
        """A context in which the device's work goes to this replica's stream."""
        return self._runtime.stream(self._compute_stream)

    def load_weights(self, weights: Tensor) -> None:
        """Copy the weights to the device and drop the gradients."""
        for parameter in self._vector.parameters:
            parameter.grad = None
        self._host_weights.copy_(weights)
        with self.on_stream():
            self._vector.weights.copy_(self._host_weights, non_blocking=True)

    def write_back(self, host: Vector) -> None:
        """After a pass: give the host's parameters their gradients, and copy the buffers into the host's vector."""
        with self.on_stream():
            self._vector.gather_buffers()
        count = self._vector.parameter_count
        self._copy_stream.wait_stream(self._compute_stream)
        with self._runtime.stream(self._copy_stream):
            self._host_weights[count:].copy_(self._vector.weights[count:], non_blocking=True)
            self._copied.record(self._copy_stream)
        self._copied.synchronize()
        host.weights[count:].copy_(self._host_weights[count:])
        for parameter, computed in zip(host.parameters, self._vector.parameters, strict=True):
            if computed.grad is None or computed.grad.is_sparse:
                parameter.grad = None if computed.grad is None else computed.grad.coalesce().to(host.weights.device)
            else:
                parameter.grad = self._host_gradients[id(computed)]

    def _copy_to_host(self, parameter: Tensor) -> None:
        """Called by the backward pass when the gradient of a parameter is complete."""
        assert parameter.grad is not None
        if not parameter.grad.is_sparse:
            self._copy_stream.wait_stream(self._compute_stream)
            with self._runtime.stream(self._copy_stream):
                self._host_gradients[id(parameter)].copy_(parameter.grad, non_blocking=True)


class EvaluationReplica:
    """A copy of a model that is evaluated on a device.

    Callers may have their inputs anywhere: inputs are moved to the device, and outputs back to where the inputs were.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.model = copy.deepcopy(model).to(device)
        self._vector = Vector(self.model)
        self._caller_device = device
        self.model.register_forward_pre_hook(self._move_inputs, with_kwargs=True)
        self.model.register_forward_hook(self._move_outputs)

    def load_weights(self, weights: Tensor) -> None:
        """Copy the weights to the device."""
        self._vector.weights.copy_(weights)

    def _move_inputs(self, module: nn.Module, inputs: Any, named: Any) -> Any:
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        self._caller_device = tensors[0].device if tensors else self.device
        return to_device(inputs, self.device), to_device(named, self.device)

    def _move_outputs(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return to_device(outputs, self._caller_device)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on that device: a tensor, or dicts, lists, tuples and named tuples of them."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
