"""Messages between processes: each process has one inbox, and one outbox with a connection to every other process.

Messages go through sockets, in order; ZeroMQ's own threads move the bytes, so a send never blocks. Processes that share
a directory have their sockets there, and large tensors stay in shared memory: the envelope says where, so the codec
sees the same frames either way. Other processes are reached by TCP, at the address in `Outbox.addresses`. A run that
uses TCP has keys; without them a process can neither send to its nodes nor read what they send (CURVE).

A protocol limits the messages that it has under way, so queues are short; one that grows without end is an error.

An `Outbox` may be used by one thread at a time, under the node's lock; an `Inbox` by one thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Union

import msgspec
import zmq

from tether.core.compress import Packed
from tether.core.message import Message
from tether.core.wire import Codec, Frame
from tether.errors import RunError, WireError
from tether.runtimes.base import Plan
from tether.runtimes.collectives import MessageTypes
from tether.runtimes.process.handshake import Keys
from tether.runtimes.process.memory import SHARED_BYTES_MIN, Loan, Memory, PeerMemory

#: how many messages may wait at each end of a link. Rows of metrics for a stopped driver make the longest queue
QUEUE_MAX = 1_000_000
#: the largest frame that is received where the size of the model is not known
FRAME_BYTES_MAX = 1 << 34
#: the largest frame of a small model: other values of a message may be larger than the model
SMALL_FRAME_BYTES_MAX = 64 << 20


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of every message.

    If any tensor is lent, `loans` has an entry for each tensor, None for one that travels in the message.
    """

    sender: str
    loans: tuple[Loan | None, ...] = ()


class Inbox:
    """Where a process receives: in the directory and, given the keys, by TCP at this address of the machine."""

    def __init__(
        self,
        context: zmq.Context[Any],
        directory: Path,
        name: str,
        types: Iterable[type[Message]],
        *,
        keys: Keys | None = None,
        host: str = "",
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.maxmsgsize = frame_bytes_max  # who announces a larger frame is disconnected before it is read
        self.socket.set_hwm(QUEUE_MAX)
        #: where other machines reach it
        self.address = ""
        if keys is not None:
            keys.secure(self.socket, server=True)
            self.socket.bind(f"tcp://{host}:*")
            self.address = self.socket.last_endpoint.decode().rstrip("\0")
        self.socket.bind(address(directory, name))
        self._opener = Opener(types, directory)

    def receive(self) -> tuple[str, Message]:
        """The sender and the next message; `WireError` for one that must be refused."""
        return self._opener.open([frame.buffer for frame in self.socket.recv_multipart(copy=False)])

    def forget(self, sender: str) -> None:
        """Release a dead peer's memory."""
        self._opener.forget(sender)

    def close(self) -> None:
        """To be called by the thread that uses it."""
        self.socket.close(linger=0)


class Opener:
    """Takes messages out of their envelopes."""

    def __init__(self, types: Iterable[type[Message]], directory: Path) -> None:
        self._codec = Codec(types)
        self._memory = PeerMemory(directory)

    def open(self, frames: list[memoryview]) -> tuple[str, Message]:
        """The sender and the message."""
        first, *rest = frames
        try:
            envelope = msgspec.msgpack.decode(first, type=Envelope)
        except (msgspec.MsgspecError, ValueError) as error:
            raise WireError(f"malformed envelope: {error}") from error
        if envelope.loans:
            rest = self._with_loans(envelope, rest)
        return envelope.sender, self._codec.decode(rest)

    def forget(self, sender: str) -> None:
        self._memory.forget(sender)

    def _with_loans(self, envelope: Envelope, frames: list[memoryview]) -> list[memoryview]:
        """The frames as they would be if no tensor were lent."""
        if len(frames) != 1 + envelope.loans.count(None):
            raise WireError(f"{len(frames)} frames and {len(envelope.loans)} tensors, some of them lent")
        sent = iter(frames)
        borrow = self._memory.borrow
        return [next(sent), *(borrow(envelope.sender, loan) if loan else next(sent) for loan in envelope.loans)]


def enveloped(codec: Codec, sender: str, message: Message, lend: Callable[[Frame], Loan | None]) -> list[Frame]:
    """The frames of a message, for `Opener.open`; large tensors are lent if `lend` can."""
    header, *tensors = codec.encode(message)
    loans = [lend(frame) if len(frame) >= SHARED_BYTES_MIN else None for frame in tensors]
    envelope = Envelope(sender, tuple(loans) if any(loans) else ())
    not_lent = [frame for frame, loan in zip(tensors, loans, strict=True) if loan is None]
    return [msgspec.msgpack.encode(envelope), header, *not_lent]


class Outbox:
    """How a process sends. Without memory, all tensors go through the socket."""

    def __init__(
        self,
        context: zmq.Context[Any],
        directory: Path,
        name: str,
        *,
        memory: Memory | None = None,
        keys: Keys | None = None,
    ) -> None:
        self._context = context
        self._directory = directory
        self._name = name
        self._memory = memory
        self._keys = keys
        #: the addresses of processes that may not share the directory
        self.addresses: dict[str, str] = {}
        self._codec = Codec([Message])
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        #: the processes that are reached through the directory
        self._near: set[str] = set()
        self._closed = False

    def send(self, to: str, message: Message) -> None:
        if self._closed:
            return  # the node is over, and no other waits for its messages
        if to not in self._sockets:
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(QUEUE_MAX)
            socket.setsockopt(zmq.RECONNECT_IVL, 10)
            if self._keys is not None:
                self._keys.secure(socket, server=False)
            if to in self.addresses and not Path(self._directory, to).exists():
                socket.connect(self.addresses[to])
            else:
                socket.connect(address(self._directory, to))
                self._near.add(to)
            self._sockets[to] = socket
        frames = enveloped(self._codec, self._name, message, partial(self._lend, to))
        try:
            self._sockets[to].send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise RunError(
                f"{QUEUE_MAX:,} messages of {self._name} wait for {to}, which does not receive them: it is stopped, or "
                "too slow for the messages it is sent"
            ) from None

    def forget(self, to: str) -> None:
        """Drop the messages that are on their way to a dead peer, and take back its loans."""
        if to in self._sockets:
            self._sockets.pop(to).close(linger=0)
        self._near.discard(to)
        self.addresses.pop(to, None)
        if self._memory is not None:
            self._memory.forget(to)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Send nothing any more. Messages that are on their way may take this long to leave."""
        self._closed = True
        for socket in self._sockets.values():
            socket.close(linger=round(linger_seconds * 1000))
        self._sockets.clear()

    def _lend(self, to: str, frame: Frame) -> Loan | None:
        return self._memory.lend(to, frame) if self._memory is not None and to in self._near else None


def frame_bytes_max(plan: Plan) -> int:
    """The largest frame that a node of this plan may send: a vector in double precision, and room for the rest."""
    return max(SMALL_FRAME_BYTES_MAX, 4 * plan.vector_bytes)


def is_power_of_ten(count: int) -> bool:
    """Whether to report a count of refusals: a flood of them must not become a flood of reports."""
    return str(count).strip("0") == "1"


def address(directory: Path, name: str) -> str:
    """Where a process receives from others that share the directory."""
    return f"ipc://{directory}/{name}"


def message_types(plan: Plan, of_collectives: MessageTypes) -> list[Any]:
    """What the nodes of a run can send each other."""
    plain = (*plan.messages, *of_collectives(plan.messages))
    packed: Any = Packed[Union[plain]]  # type: ignore[valid-type]  # noqa: UP007
    return [*plain, packed] if plan.compress != "none" else [*plain]
