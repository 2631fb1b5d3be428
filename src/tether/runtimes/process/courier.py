"""What carries values between a node's device and the host's memory.

Machines see only values on the device of their node, and peers only values in the host's memory. A message with values
leaves when its copies have arrived at the host; only the thread of the courier waits for that.
Messages leave in the order in which the machine sent them. Values that were received are copied to the device before
the machine is given them; the thread that received them waits without the node's lock, so that training continues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from tether.core.device import Device, ToHost
from tether.core.effects import Reduce
from tether.core.events import Broadcasted, Event, Received, Reduced
from tether.core.message import Message, tensors_of, with_tensors
from tether.core.vector import Empty

M = TypeVar("M", bound=Message | Reduce)


class Courier:
    """Carries the values of one node. All methods but `close` are called under the node's lock."""

    def __init__(self, device: Device, empty: Empty, lock: threading.Lock, fail: Callable[[Exception], Any]) -> None:
        """`empty` allocates memory of the host that can be sent; `fail` is called with an error, without the lock."""
        self.device = device
        self._empty = empty
        self._lock = lock
        self._fail = fail
        self._changed = threading.Condition(lock)
        self._leaving: deque[tuple[ToHost | None, Any, Callable[[Any], Any]]] = deque()
        #: copies of values that have been asked for in this event, so that equal values cross once
        self._known: dict[int, tuple[Tensor, ToHost]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._carry, name="courier", daemon=True)
        self._thread.start()

    def begin_event(self) -> None:
        """The values of earlier events may change from now on."""
        self._known.clear()

    def leave(self, message: M, then: Callable[[M], Any]) -> None:
        """Call `then` with the message when its values are in the host's memory, after all earlier messages."""
        values = _values(message)
        if not values and not self._leaving:
            then(message)
            return
        self._leaving.append((self._to_host(values) if values else None, message, then))
        self._changed.notify()

    def _to_host(self, values: list[Tensor]) -> ToHost:
        key = id(values[0])
        if len(values) == 1 and key in self._known:
            return self._known[key][1]
        copies = self.device.to_host(values, self._empty)
        if len(values) == 1:
            self._known[key] = values[0], copies
        return copies

    def arrive(self, event: Event) -> Event:
        """The event with its values on the device."""
        match event:
            case Received(message=message) | Broadcasted(message=message) if values := tensors_of(message):
                return msgspec.structs.replace(event, message=with_tensors(message, self._to_device(values)))
            case Reduced(total=Tensor() as total):
                return msgspec.structs.replace(event, total=self._to_device([total])[0])
        return event

    def _to_device(self, values: list[Tensor]) -> list[Tensor]:
        copies, arrived = self.device.to_device(values)
        if not arrived.query():
            with self.device.turn():  # others see what this thread has changed so far, and it sees their changes after
                pass
            self._lock.release()
            try:
                arrived.synchronize()
            finally:
                self._lock.acquire()
            self.device.follow_turns()
        return copies

    def close(self) -> None:
        """Let everything leave, and end the thread."""
        with self._lock:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _carry(self) -> None:
        self.device.adopt_thread()
        try:
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: bool(self._leaving) or self._closing)
                    if not self._leaving:
                        return
                    copies, message, then = self._leaving[0]
                if copies is not None:
                    copies.arrived.synchronize()
                with self._lock, self.device.turn():
                    self._leaving.popleft()
                    then(message if copies is None else _with_values(message, copies.values))
        except Exception as error:
            self._fail(error)


def _values(message: Message | Reduce) -> list[Tensor]:
    if isinstance(message, Reduce):
        return [message.values] if isinstance(message.values, Tensor) else []
    return tensors_of(message)


def _with_values(message: Any, values: list[Tensor]) -> Any:
    if isinstance(message, Reduce):
        return msgspec.structs.replace(message, values=values[0])
    return with_tensors(message, values)
