"""Typed messages as frames of bytes, and back.

The first frame is a struct of a known type in msgpack; every tensor in it is a frame of its own, sent without a copy.
Received bytes are checked against types and sizes before anything is built from them; nothing is ever unpickled.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, Union

import msgspec
import torch
from torch import Tensor

from tether.core.vector import raw_bytes
from tether.errors import WireError

Frame = bytes | memoryview
Struct = TypeVar("Struct", bound=msgspec.Struct)

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64)
}


class Codec:
    """Encodes and decodes the given message types. Not thread-safe: use one for each direction and thread."""

    def __init__(self, types: Iterable[type[msgspec.Struct]], *, frame_bytes_max: int = 1 << 34) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._frames: Sequence[Frame] = ()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_tensor)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            Union[tuple(types)],  # noqa: UP007 (built at run time)
            dec_hook=self._decode_tensor,
        )

    def encode(self, message: msgspec.Struct) -> list[Frame]:
        """The message's frames. Its tensors must not change while the frames are in use."""
        frames: list[Frame] = [b""]
        self._frames = frames
        try:
            frames[0] = self._encoder.encode(message)
        finally:
            self._frames = ()
        return frames

    def decode(self, frames: Sequence[Frame]) -> Any:
        """The message in the frames. Its tensors are views of them."""
        if not frames:
            raise WireError("a message without frames")
        for frame in frames:
            if len(frame) > self._frame_bytes_max:
                raise WireError(f"a frame of {len(frame)} bytes; at most {self._frame_bytes_max} are accepted")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except WireError:
            raise
        except (msgspec.MsgspecError, ValueError, RuntimeError, OverflowError) as error:
            # also bad UTF-8, unbounded nesting, and shapes beyond what torch can hold
            raise WireError(f"malformed message: {error}") from error
        finally:
            self._frames = ()

    def _encode_tensor(self, value: Any) -> tuple[int, str, list[int]]:
        if not isinstance(value, Tensor):
            raise WireError(f"a {type(value).__name__} cannot be sent in a message")
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise WireError(f"a tensor of type {name} cannot be sent; known types: {', '.join(_DTYPES)}")
        assert isinstance(self._frames, list)
        self._frames.append(raw_bytes(value))
        return len(self._frames) - 1, name, list(value.shape)

    def _decode_tensor(self, kind: type, header: Any) -> Tensor:
        if kind is not Tensor:
            raise WireError(f"no decoder for {kind}")
        index, name, shape = msgspec.convert(header, tuple[int, str, list[int]])
        if not 1 <= index < len(self._frames) or name not in _DTYPES or any(n < 0 for n in shape):
            raise WireError(f"malformed tensor header {header!r}")
        dtype, frame = _DTYPES[name], self._frames[index]
        if math.prod(shape) * dtype.itemsize != len(frame):
            raise WireError(f"a tensor of shape {shape} and type {name} in a frame of {len(frame)} bytes")
        if not len(frame):
            return torch.empty(shape, dtype=dtype)
        writable = bytearray(frame) if memoryview(frame).readonly else frame
        return torch.frombuffer(writable, dtype=dtype).view(shape)


def payload_bytes(tensors: Iterable[Tensor]) -> int:
    """The size of these tensors in a message."""
    return sum(tensor.nbytes for tensor in tensors)


def pack_tree(value: Any, tensors: list[Tensor]) -> Any:
    """Nested dictionaries and lists as plain values, with the tensors moved to the list `tensors`."""
    match value:
        case Tensor():
            tensors.append(value)
            return {"$": "tensor", "at": len(tensors) - 1}
        case dict() if all(key is None or isinstance(key, str | int | float) for key in value):
            return {"$": "dict", "items": [[key, pack_tree(item, tensors)] for key, item in value.items()]}
        case tuple():
            return {"$": "tuple", "items": [pack_tree(item, tensors) for item in value]}
        case list():
            return [pack_tree(item, tensors) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise WireError(f"a {type(value).__name__} cannot be saved: {value!r}")


def can_be_packed(value: Any) -> bool:
    """Whether `pack_tree` accepts it and all its tensors have types that can be sent."""
    tensors: list[Tensor] = []
    try:
        pack_tree(value, tensors)
    except WireError:
        return False
    return all(str(tensor.dtype).removeprefix("torch.") in _DTYPES for tensor in tensors)


def unpack_tree(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `pack_tree`; WireError if `pack_tree` never returns such a value."""
    match value:
        case {"$": "tensor", "at": int(position)} if 0 <= position < len(tensors):
            return tensors[position]
        case {"$": "dict", "items": list(items)}:
            return dict(_unpack_item(item, tensors) for item in items)
        case {"$": "tuple", "items": list(items)}:
            return tuple(unpack_tree(item, tensors) for item in items)
        case list():
            return [unpack_tree(item, tensors) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise WireError(f"a {type(value).__name__} that is neither a tensor nor a tree of values: {reprlib.repr(value)}")


def _unpack_item(item: Any, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    match item:
        case [None | str() | int() | float() as key, value]:
            return key, unpack_tree(value, tensors)
    raise WireError(f"not a key and a value: {reprlib.repr(item)}")
