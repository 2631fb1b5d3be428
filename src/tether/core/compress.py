"""Compression of what is sent: codes for long tensors; what a code loses is added to the next message.

A run uses one code for everything that it sends:

- fp16, bf16: the nearest value of that precision; a finite value beyond its range becomes the largest within it.
- int8: blocks of `BLOCK` values, each with one scale, which is the largest magnitude in the block divided by 127; a
  value is the nearest multiple of the scale. If a block holds NaN or an infinity, all its values are decoded as NaN.

Encoding a decoded tensor again changes nothing, so a relay passes on exactly what it received. For int8 this requires
that every multiple of a scale is exact: a scale has 17 significant bits, which with the 7 bits of the multiple are the
24 of float32; for tensors of 16 bits it is a power of two.

Error feedback: what one message lost is added to the next one with the same `FeedbackKey`, before that is encoded, so
that over time the receiver gets the sum of the original values, to within one rounding (Seide et al. 2014; Karimireddy
et al. 2019).

Buffers, such as BatchNorm's running variance, are sent as they are: a variance that is rounded to zero ruins a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from tether.core.message import Message, tensors_of, with_tensors
from tether.core.wire import payload_bytes
from tether.errors import WireError

#: values that share a scale in int8
BLOCK = 1024
#: shorter tensors are not worth encoding
ELEMENTS_MIN = 256
M = TypeVar("M")

Compression = Literal["none", "fp16", "bf16", "int8"]
_CODED = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
_DECODED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MULTIPLE_MAX = 127


class Packed(Message, Generic[M], frozen=True):
    """A message in which the tensors at `places`, counted in the order of `tensors_of`, are encoded.

    In `message`, each of these tensors is cut down to the part that is not encoded. That part is usually empty, but it
    has the dtype.
    """

    message: M
    places: tuple[int, ...]
    values: tuple[Tensor, ...]
    #: one for each block of int8; empty in other codes
    scales: tuple[Tensor, ...]


class FeedbackKey(NamedTuple):
    """Names a sequence of messages in which the rounding error of one is added to the next.

    Without a `peer`, a message may go to several nodes.
    """

    peer: str
    lane: str


class Compressor:
    """Encodes the messages that one node sends."""

    def __init__(self, code: str, parameter_count: int = 0, length: int = 0) -> None:
        """`length` is that of the whole vector, in which buffers begin at `parameter_count`."""
        self.code = code
        self.raw_bytes = 0
        self.packed_bytes = 0
        #: the squares of what encoding has lost, and of the values that were encoded
        self.squared_error = 0.0
        self.squared_values = 0.0
        self._parameter_count = parameter_count
        self._length = length
        self._residuals: dict[tuple[FeedbackKey, str], Tensor] = {}
        self._last: dict[FeedbackKey, tuple[Message, Message]] = {}

    def pack(self, key: FeedbackKey, message: Message) -> Message:
        """The message as it is sent. A message that is sent again with a key without a peer is encoded only once."""
        before, packed = self._last.get(key, (None, message))
        if before is not message:
            packed = self._encode(key, message)
            if not key.peer:
                self._last[key] = message, packed
        self.raw_bytes += payload_bytes(tensors_of(message))
        self.packed_bytes += payload_bytes(tensors_of(packed))
        return packed

    def forget(self, peer: str) -> None:
        """Drop the rounding errors that are kept for a lost node."""
        self._residuals = {key: value for key, value in self._residuals.items() if key[0].peer != peer}

    def _encode(self, key: FeedbackKey, message: Message) -> Message:
        tensors = tensors_of(message)
        places, values, scales = [], [], []
        for place, (path, tensor) in enumerate(zip(_paths(message), tensors, strict=True)):
            if count := self._encoded_count(tensor):
                whole = count == tensor.numel()
                tensors[place] = tensor.new_empty(0) if whole else tensor[count:]
                coded, scale = self._encode_one((key, path), tensor if whole else tensor[:count])
                places.append(place)
                values.append(coded)
                scales.append(scale)
        if not places:
            return message
        return Packed(with_tensors(message, tensors), tuple(places), tuple(values), tuple(scales))

    def _encoded_count(self, tensor: Tensor) -> int:
        """How many of a tensor's first values are encoded: 0, all, or all but the buffers behind the parameters."""
        count, buffers = tensor.numel(), self._length - self._parameter_count
        if tensor.dtype not in _DECODED or tensor.dtype.itemsize <= _CODED[self.code].itemsize:
            return 0
        if tensor.ndim == 1 and count == self._length:
            count = self._parameter_count
        elif count == buffers != self._parameter_count:
            count = 0
        return count if count >= ELEMENTS_MIN else 0

    def _encode_one(self, key: tuple[FeedbackKey, str], tensor: Tensor) -> tuple[Tensor, Tensor]:
        wanted = tensor.detach().to(_wide(tensor.dtype))
        residual = self._residuals.pop(key, None)
        if residual is not None and residual.shape == wanted.shape:
            wanted = wanted + residual
        coded, scales = encode(self.code, wanted, tensor.dtype)
        lost = wanted - decode(coded, scales, tensor.dtype)
        squared_error = float(lost.square().sum())
        self.squared_error += squared_error
        self.squared_values += float(wanted.square().sum())
        if squared_error != 0:
            self._residuals[key] = self._rounding_error(lost)
        return coded, scales

    def _rounding_error(self, lost: Tensor) -> Tensor:
        """What rounding lost. Values beyond the range of the code, and NaN, would only add up and become zero."""
        coded = _CODED[self.code]
        rounding_max = torch.finfo(coded).max * torch.finfo(coded).eps if coded.is_floating_point else float("inf")
        return lost.masked_fill_(~(lost.abs() <= rounding_max), 0.0)


def unpack(packed: Packed[Any]) -> Message:
    """The message that was packed, except for what its code has lost."""
    message: Message = packed.message
    tensors = tensors_of(message)
    places = packed.places
    if not len(places) == len(packed.values) == len(packed.scales):
        raise WireError(f"{len(packed.values)} values and {len(packed.scales)} scales for {len(places)} places")
    if sorted({*places}) != [*places] or not all(0 <= place < len(tensors) for place in places):
        raise WireError(f"places {places} in a message with {len(tensors)} tensors")
    for place, values, scales in zip(places, packed.values, packed.scales, strict=True):
        tensors[place] = _decoded(values, scales, tensors[place])
    return with_tensors(message, tensors)


def _decoded(values: Tensor, scales: Tensor, rest: Tensor) -> Tensor:
    """A tensor of a received message, checked: its encoded values, and the rest that was not encoded."""
    known = values.dtype in _CODED.values() and rest.dtype in _DECODED
    if not known or values.dtype.itemsize >= rest.dtype.itemsize:
        raise WireError(f"{values.dtype} does not encode {rest.dtype}")
    blocks = -(-values.numel() // BLOCK) if values.dtype == torch.int8 else 0
    if scales.dtype != torch.float32 or scales.shape != (blocks,):
        raise WireError(f"{tuple(scales.shape)} scales of {scales.dtype} for {values.numel()} {values.dtype}")
    if rest.ndim != 1 or (len(rest) and values.ndim != 1):
        raise WireError(f"a rest of shape {tuple(rest.shape)} behind values of shape {tuple(values.shape)}")
    decoded = decode(values, scales, rest.dtype)
    return torch.cat([decoded, rest]) if len(rest) else decoded


def code_of(coded: Tensor) -> str:
    """The code of these encoded values."""
    return next(code for code, dtype in _CODED.items() if dtype == coded.dtype)


def encode(code: str, values: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The encoded values and the scales of their blocks. `dtype`: that of the decoded values, if it is another one."""
    if code != "int8":
        return _narrowed(values, _CODED[code]), torch.empty(0, device=values.device)
    flat = values.reshape(-1).to(_wide(values.dtype))
    coded = torch.empty(flat.shape, dtype=torch.int8, device=flat.device)
    scales = torch.empty(-(-len(flat) // BLOCK), device=flat.device)
    for rows, multiples, scale in zip(_rows(flat), _rows(coded), _row_scales(scales, len(flat)), strict=True):
        low, high = torch.aminmax(rows, dim=1)
        scale.copy_(_scales(torch.maximum(high, -low), dtype or values.dtype))
        # at most 127: a scale is smaller than the exact one by less than one part in 65,536
        multiple = rows.div(scale.to(rows.dtype).unsqueeze(1)).round_()
        if not scale.isfinite().all():
            multiple.nan_to_num_(0.0)
        multiples.copy_(multiple)
    return coded.view(values.shape), scales


def decode(coded: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that were encoded, except for what the code has lost."""
    if coded.dtype != torch.int8:
        return _narrowed(coded, dtype)
    flat = coded.reshape(-1).to(_wide(dtype))
    for rows, scale in zip(_rows(flat), _row_scales(scales, len(flat)), strict=True):
        rows.mul_(scale.unsqueeze(1))
    return _narrowed(flat.view(coded.shape), dtype)


def _scales(peaks: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each block, from its largest magnitude, such that its multiples are exact in `dtype`."""
    scales = (peaks / _MULTIPLE_MAX).to(torch.float32)
    broken = ~scales.isfinite()
    bits = scales.view(torch.int32)
    if dtype.itemsize > 2:
        bits.bitwise_and_(-(1 << 7))  # 17 significant bits are left of 24
        smallest = torch.finfo(torch.float32).tiny
    else:
        bits.add_((1 << 23) - 1).bitwise_and_(-(1 << 23))  # the next power of two
        smallest = max(torch.finfo(torch.float32).tiny, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    return scales.clamp_(min=smallest).masked_fill_(broken, float("nan"))


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest values of a dtype; finite values stay finite."""
    narrow = values.to(dtype)
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(values.dtype).max and not narrow.isfinite().all():
        wide = values.to(_wide(values.dtype))
        narrow = torch.where(wide.isfinite(), wide.clamp(-largest, largest), wide).to(dtype)
    return narrow


def _rows(flat: Tensor) -> list[Tensor]:
    """The blocks as rows: the full ones in one tensor, and then the last one if it is shorter."""
    full = len(flat) // BLOCK * BLOCK
    rows = [flat[:full].view(-1, BLOCK)] if full else []
    return rows + ([flat[full:].unsqueeze(0)] if full < len(flat) else [])


def _row_scales(scales: Tensor, count: int) -> list[Tensor]:
    """The scales that belong to each tensor of `_rows`."""
    return [part for part in (scales[: count // BLOCK], scales[count // BLOCK :]) if len(part)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The precision to compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """The path to each tensor of a message, in the order of `tensors_of`."""
    match value:
        case Tensor():
            yield path
        case Message():
            for name in value.__struct_fields__:
                yield from _paths(getattr(value, name), f"{path}.{name}")
        case tuple() | list():
            for index, item in enumerate(value):
                yield from _paths(item, f"{path}[{index}]")
