"""Sockets between processes: each has one inbox and one way out to every other.

ZeroMQ's own threads move the bytes, so a send never blocks and costs no copy. An `Outbox` may be used by one thread at
a time, under the node's lock; an `Inbox` by one thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tether.errors import WireError
from tether.machine import Message
from tether.runtimes.control import Envelope
from tether.wire import Codec


class Inbox:
    """Where a process receives."""

    def __init__(self, context: zmq.Context[Any], directory: Path, name: str, types: Iterable[type[Message]]) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(address(directory, name))
        self._codec = Codec(types)

    def receive(self) -> tuple[str, Message]:
        """The next message and who sent it; `WireError` for one that must be refused."""
        frames = self.socket.recv_multipart(copy=False)
        if len(frames) < 2:
            raise WireError("a message without an envelope")
        try:
            envelope = msgspec.msgpack.decode(frames[0].buffer, type=Envelope)
        except msgspec.MsgspecError as error:
            raise WireError(f"malformed envelope: {error}") from error
        return envelope.sender, self._codec.decode([frame.buffer for frame in frames[1:]])


class Outbox:
    """How a process sends."""

    def __init__(self, context: zmq.Context[Any], directory: Path, name: str) -> None:
        self._context = context
        self._directory = directory
        self._envelope = msgspec.msgpack.encode(Envelope(name))
        self._codec = Codec([Message])
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def send(self, to: str, message: Message) -> None:
        if to not in self._sockets:
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.setsockopt(zmq.RECONNECT_IVL, 10)
            socket.connect(address(self._directory, to))
            self._sockets[to] = socket
        self._sockets[to].send_multipart([self._envelope, *self._codec.encode(message)], copy=False)

    def forget(self, to: str) -> None:
        """Drop what is still on its way to a dead peer."""
        if to in self._sockets:
            self._sockets.pop(to).close(linger=0)


def address(directory: Path, name: str) -> str:
    return f"ipc://{directory}/{name}"
