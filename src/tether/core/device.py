"""Devices: where a worker's vector lives, and how values get from there to the host's memory and back.

A worker whose model is on a device has its vector, its gradients and its optimizer there, and steps there. What is
exchanged crosses in two ways, both on a stream of its own, while the device goes on computing:

- To the host: the value is copied on the device first, in the order of the weights' changes, and this copy goes to
  pinned memory from which it is sent. `ToHost` is a copy under way.
- To the device: a received value goes into new memory on the device, and is used there when it has arrived. Only what
  was received crosses. It lies in memory of a peer, which may go with the peer, and is therefore not pinned.

A worker has several threads, and each has a stream of its own. Threads change the vector in turns, under the node's
lock. The device must keep the order of these turns, although it works later than the threads: each turn begins with a
wait, on the device, for the end of the turn before. A gradient is not part of a turn, so no turn waits for it.

Nodes whose weights are in memory that all of them share (`server` in GaDei's way) keep them on the host. A
`DeviceReplica` is the same model on the device: it receives the weights before a pass, and while the backward pass is
still running, each finished gradient is copied back.

All of this uses torch's own streams and events. It is tested with the CPU in the place of a device, and has not met a
CUDA device yet; `tether doctor` checks it where there is one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tether.core.vector import Empty, Vector
from tether.errors import UsageError

#: what `device` may be, besides a device with a number
AUTO, CPU = "auto", "cpu"


def check_device(name: object) -> None:
    """Refuse what is not the name of a device, or one that this torch cannot use."""
    if not isinstance(name, str):
        raise UsageError(f"device must be a name such as 'cuda:0', 'cpu' or 'auto', not {name!r}")
    if name == AUTO:
        return
    try:
        torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"device {name!r} is not known: use 'auto', 'cpu', 'cuda' for all CUDA devices in turns, or 'cuda:0'"
        ) from None


def choose_device(name: str, index: int) -> torch.device | None:
    """The device of the worker with that number; None: the CPU.

    Without a number in its name, workers take all devices of the kind in turns, so that several share one if there are
    fewer. "auto" is the kind that this machine has, or the CPU.
    """
    check_device(name)
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == CPU or (name == AUTO and found is None):
        return None
    asked = found if name == AUTO else torch.device(name)
    assert asked is not None
    count = torch.accelerator.device_count()
    if found is None or asked.type != found.type or (asked.index or 0) >= count:
        have = f"has {count} of the kind {found.type!r}" if found is not None else "has none besides the CPU"
        raise UsageError(f"there is no device {name!r}: this machine {have}; use device='auto' or 'cpu'")
    return torch.device(asked.type, index % count if asked.index is None else asked.index)


class Mark(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Wait until the device is there."""
        ...

    def query(self) -> bool:
        """Whether the device is there."""
        ...


@dataclass
class ToHost:
    """Copies of values that are on their way to the host's memory."""

    values: list[Tensor]
    arrived: Mark
    #: what is copied must stay until then
    sources: list[Tensor]


class Device:
    """A device of this process, and the streams that one node has on it."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        #: addresses of pinned memory: the first, and the one behind it
        self._pinned: list[tuple[int, int]] = []
        self._pins = True
        self._turn_end: Any = None
        #: whether memory of the host lives as long as this process, so that it may be pinned
        self.may_pin: Callable[[Tensor], bool] = lambda _: False
        self._open()

    # ---- what differs between devices ----

    def _open(self) -> None:
        torch.accelerator.set_device_index(self.where)
        self._copying = torch.Stream(device=self.where)

    def adopt_thread(self) -> None:
        """Give the calling thread a stream of its own on this device."""
        torch.accelerator.set_device_index(self.where)
        torch.accelerator.set_stream(torch.Stream(device=self.where))

    def mark(self) -> Any:
        """The point that the calling thread's stream has reached."""
        return torch.accelerator.current_stream(self.where).record_event()

    def follow(self, mark: Any) -> None:
        """Have the calling thread's stream wait for a point, without waiting here."""
        torch.accelerator.current_stream(self.where).wait_event(mark)

    @contextmanager
    def on_copying_stream(self, after: Any) -> Iterator[None]:
        """A context in which work goes to the stream for copies, after that point."""
        if after is not None:
            self._copying.wait_event(after)
        with self._copying:
            yield

    def empty(self, count: int, *, dtype: torch.dtype, device: Any = None) -> Tensor:
        """As `torch.empty`, in the memory of the device."""
        return torch.empty(count, dtype=dtype, device=self.where)

    def place(self, values: Any) -> Any:
        """A module or a batch, moved to the device."""
        return values.to(self.where) if isinstance(values, nn.Module) else to_device(values, self.where)

    def _pin(self, host: Tensor) -> None:
        """Let the device copy to this memory by itself. Memory that cannot be pinned is copied too, only slower.

        An address that stayed pinned after its memory was freed would lead the device to the wrong memory.
        """
        if self.where.type != "cuda" or not self._pins or not self.may_pin(host):
            return
        start, stop = host.data_ptr(), host.data_ptr() + host.nbytes
        # CUDA refuses to pin memory twice, also parts of it
        if all(stop <= first or end <= start for first, end in self._pinned):
            failed = int(torch.cuda.cudart().cudaHostRegister(start, host.nbytes, 0))  # type: ignore[no-untyped-call]
            if failed:
                self._pins = False  # the system allows no more of it
                print(f"memory cannot be pinned (CUDA error {failed}): copies to the host are slower", file=sys.stderr)
            else:
                self._pinned.append((start, stop))

    def close(self) -> None:
        """Give pinned memory back. No copy may be under way."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop()[0])  # type: ignore[no-untyped-call]

    # ---- turns ----

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context, under the node's lock, in which the calling thread may change the vector."""
        self.follow_turns()
        try:
            yield
        finally:
            self._turn_end = self.mark()

    def follow_turns(self) -> None:
        """Have the calling thread's stream see all changes of the vector so far."""
        if self._turn_end is not None:
            self.follow(self._turn_end)

    # ---- copies ----

    def to_host(self, values: Sequence[Tensor], empty: Empty) -> ToHost:
        """Copy values to memory of the host that `empty` allocates. The values must not change until they are there."""
        copies = []
        with self.on_copying_stream(self.mark()):
            for value in values:
                host = empty(value.numel(), dtype=value.dtype)
                self._pin(host)
                copies.append(host.view(value.shape).copy_(value.detach(), non_blocking=True))
                self.bytes_to_host += value.nbytes
            return ToHost(copies, self.mark(), list(values))

    def to_device(self, values: Sequence[Tensor]) -> tuple[list[Tensor], Mark]:
        """Copy values to new memory on the device; to be called under the node's lock.

        The memory may have been used by an earlier turn, so the copies begin when its last use has ended.
        """
        with self.on_copying_stream(self._turn_end):
            copies = []
            for value in values:
                copy_ = self.empty(value.numel(), dtype=value.dtype).view(value.shape)
                copies.append(copy_.copy_(value, non_blocking=True))
                self.bytes_to_device += value.nbytes
            return copies, self.mark()


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
