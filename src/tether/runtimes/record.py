"""A file with every event of a node and a digest of the effects, so that a run can be replayed into fresh machines.

An entry holds the event with its tensors, its time, a digest of the effects that the machine returned, and a checksum
of the weights before the event. A replay feeds the events to a new machine, performs only the effects that change the
node's own vector, and compares digests and checksums.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar, Union

import msgspec
from torch import Tensor

from tether.core.effects import Compute, Effect
from tether.core.events import (
    Broadcasted,
    Event,
    GradientReady,
    PeerJoined,
    PeerLost,
    Received,
    Reduced,
    Started,
    StopRequested,
    TimerFired,
)
from tether.core.machine import Machine, Replica
from tether.core.message import Message, Stream
from tether.core.vector import raw_bytes
from tether.core.wire import Codec
from tether.errors import InvariantBroken, RunError, UsageError, WireError
from tether.runtimes.interpreter import change_weights

M = TypeVar("M")


class _Received(msgspec.Struct, Generic[M], frozen=True, tag="Received"):
    sender: str
    message: M


class _Broadcasted(msgspec.Struct, Generic[M], frozen=True, tag="Broadcasted"):
    stream: Stream
    members: tuple[str, ...]
    message: M


class _GradientReady(msgspec.Struct, frozen=True, tag="GradientReady"):
    """Also holds the buffers, which the forward pass may have changed."""

    gradient: Tensor
    loss: float
    samples: int
    seconds: float
    exchange_seconds: float
    touched: tuple[Tensor, ...]
    buffers: Tensor


class EventLog:
    """Writes the entries of one node."""

    def __init__(self, path: Path, replica: Replica) -> None:
        self._path = path
        self._write("wb", b"")
        self._replica = replica
        self._codec = Codec([Event])

    def __call__(self, event: Event, now: float, effects: list[Effect]) -> None:
        written: msgspec.Struct = event
        if isinstance(event, GradientReady):
            buffers = self._replica.weights[self._replica.parameter_count :]
            written = _GradientReady(**msgspec.structs.asdict(event), buffers=buffers)
        frames = [bytes(frame) for frame in self._codec.encode(written)]
        entry = msgspec.msgpack.encode((now, effects_digest(effects), _checksum(self._replica), frames))
        self._write("ab", struct.pack("<Q", len(entry)) + entry)

    def _write(self, mode: str, data: bytes) -> None:
        """A record with gaps is useless, so the run ends if it cannot be written."""
        try:
            with self._path.open(mode) as file:
                file.write(data)
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be written: {error.strerror}; free some space, or do not record the run"
            ) from error


def replay(path: Path, messages: tuple[type[Message], ...], machine: Machine, replica: Replica) -> int:
    """Feed the recorded events of a node to a fresh machine; returns their number, or raises where the two differ."""
    position = 0
    for position, (now, digest, checksum, event, buffers) in enumerate(_entries(path, messages), start=1):
        place = f"{path.stem}: event {position}, {type(event).__name__} at {now:.6g} s"
        if isinstance(event, GradientReady):
            replica.load_gradient(event.gradient)
            replica.weights[replica.parameter_count :].copy_(buffers)
        if _checksum(replica) != checksum:
            raise RunError(f"{place}, found other weights")
        try:
            effects = machine.handle(event, now)
        except InvariantBroken as error:
            raise RunError(f"{place}, broke an invariant: {error}") from error
        if effects_digest(effects) != digest:
            raise RunError(f"{place}, had other effects")
        for effect in effects:
            if isinstance(effect, Compute):
                replica.seek(effect.batch, (), effect.position)
            change_weights(replica, effect)
    return position


def effects_digest(effects: list[Effect]) -> str:
    """Equal for equal effects, the tensors in them included."""
    encoder = msgspec.msgpack.Encoder(enc_hook=_digest_tensor)
    return hashlib.sha256(encoder.encode(effects)).hexdigest()


def _checksum(replica: Replica) -> int:
    """Covers the parameters alone, since a forward pass may be changing the buffers at this moment."""
    return zlib.crc32(raw_bytes(replica.weights[: replica.parameter_count]))


def _digest_tensor(value: Any) -> str:
    if not isinstance(value, Tensor):
        raise TypeError(f"no digest of a {type(value).__name__}")
    return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(raw_bytes(value)).hexdigest()}"


def _entries(path: Path, messages: tuple[type[Message], ...]) -> Iterator[tuple[float, str, int, Event, Tensor]]:
    union: Any = Union[messages] if messages else None  # noqa: UP007 (built at run time)
    plain = (Started, Reduced, TimerFired, PeerJoined, PeerLost, StopRequested)
    codec = Codec([*plain, _GradientReady, _Received[union], _Broadcasted[union]])
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    position = 0
    while position + 8 <= len(data):
        length = struct.unpack_from("<Q", data, position)[0]
        entry = data[position + 8 : position + 8 + length]
        if len(entry) < length:
            break  # the process was killed while it wrote
        try:
            now, digest, checksum, frames = msgspec.msgpack.decode(entry, type=tuple[float, str, int, list[bytes]])
            event, buffers = codec.decode(frames), Tensor()
        except (
            msgspec.MsgspecError,
            ValueError,
            RecursionError,
            WireError,
        ) as error:  # also bad UTF-8 and deep nesting
            raise RunError(f"{path} is damaged: {error}") from error
        position += 8 + length
        match event:
            case _GradientReady():
                buffers = event.buffers
                event = GradientReady(*msgspec.structs.astuple(event)[:-1])
            case _Received():
                event = Received(event.sender, event.message)
            case _Broadcasted():
                event = Broadcasted(event.stream, event.members, event.message)
        yield now, digest, checksum, event, buffers
