"""What is sent comes out the same, and what is malformed is refused with a WireError and nothing else."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tether.core.message import Message
from tether.core.vector import raw_bytes
from tether.core.wire import Codec, Frame, pack_tree, payload_bytes, unpack_tree
from tether.errors import WireError

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
]


class Pair(Message, frozen=True):
    """Two tensors and some plain values."""

    number: int
    first: Tensor
    note: str
    second: Tensor


class Word(Message, frozen=True):
    """No tensor at all."""

    text: str


CODEC = Codec([Pair, Word])


def sent(message: Message) -> list[Frame]:
    """The frames as another process gets them: copies."""
    return [bytes(frame) for frame in CODEC.encode(message)]


def equal(one: Tensor, other: Tensor) -> bool:
    """The same bits, so that NaN equals NaN."""
    return one.dtype == other.dtype and one.shape == other.shape and bytes(raw_bytes(one)) == bytes(raw_bytes(other))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    size = torch.Size(shape).numel() * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    return torch.frombuffer(data, dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


# ---- round trips ----------------------------------------------------------------------------------------------------


@given(number=st.integers(-(2**63), 2**63 - 1), first=tensors(), note=st.text(), second=tensors())
def test_every_type_and_shape_comes_back_bit_for_bit(number: int, first: Tensor, note: str, second: Tensor) -> None:
    frames = sent(Pair(number, first, note, second))
    assert len(frames) == 3
    assert [len(frame) for frame in frames[1:]] == [payload_bytes([first]), payload_bytes([second])]
    back = CODEC.decode(frames)
    assert (back.number, back.note) == (number, note)
    assert equal(back.first, first) and equal(back.second, second)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3, 0), (1, 1, 1)])
def test_empty_and_zero_dimensional_tensors_can_be_sent(shape: tuple[int, ...]) -> None:
    back = CODEC.decode(sent(Pair(0, torch.ones(shape), "", torch.ones(()))))
    assert torch.equal(back.first, torch.ones(shape)) and back.second.shape == ()


def test_strided_and_differentiable_tensors_are_sent_as_their_values() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    back = CODEC.decode(sent(Pair(0, table.t()[1:3], "", (table * 2).requires_grad_())))
    assert back.first.tolist() == [[1.0, 5.0, 9.0], [2.0, 6.0, 10.0]]
    assert torch.equal(back.second, table * 2) and not back.second.requires_grad


def test_a_contiguous_tensor_is_sent_without_a_copy_and_received_into_memory_that_may_be_written() -> None:
    values = torch.zeros(4)
    frames = CODEC.encode(Pair(0, values, "", values))
    values[0] = 5.0
    received = CODEC.decode([bytes(frame) for frame in frames]).first
    assert received[0] == 5.0
    received.add_(1.0)
    assert received.tolist() == [6.0, 1.0, 1.0, 1.0]


def test_a_writable_frame_is_used_as_it_is() -> None:
    frames = [bytearray(frame) for frame in sent(Pair(0, torch.zeros(2), "", torch.zeros(2)))]
    back = CODEC.decode([memoryview(frame) for frame in frames])
    frames[1][:4] = bytes(raw_bytes(torch.ones(1)))
    assert back.first.tolist() == [1.0, 0.0]


# ---- what is refused ------------------------------------------------------------------------------------------------


def header(index: Any = 1, dtype: Any = "float32", shape: Any = (2,), tag: str = "Pair") -> bytes:
    """The first frame of a Pair whose first tensor is described like this; frame 2 holds two good values."""
    fields = {"number": 1, "first": [index, dtype, shape], "note": "", "second": [2, "float32", [2]]}
    return msgspec.msgpack.encode({"type": tag, **fields})


GOOD = bytes(8)

MALFORMED: dict[str, list[bytes]] = {
    "no frames": [],
    "an empty frame": [b""],
    "a map of nothing": [msgspec.msgpack.encode({}), GOOD, GOOD],
    "no map": [msgspec.msgpack.encode([1, 2, 3]), GOOD, GOOD],
    "an unknown type": [header(tag="Pears"), GOOD, GOOD],
    "a type that is no text": [msgspec.msgpack.encode({"type": 3, "text": ""})],
    "a missing field": [msgspec.msgpack.encode({"type": "Word"})],
    "a field of another type": [msgspec.msgpack.encode({"type": "Word", "text": 5})],
    "bytes behind the end": [header() + b"\0", GOOD, GOOD],
    "a frame too few": [header(), GOOD],
    "a frame that is too short": [header(), GOOD[:-1], GOOD],
    "a frame that is too long": [header(), GOOD + b"\0", GOOD],
    "a frame with a value too many": [header(shape=[1]), GOOD, GOOD],
    "another shape than the frame": [header(shape=[3]), GOOD, GOOD],
    "another type than the frame": [header(dtype="float64"), GOOD, GOOD],
    "the first frame as a tensor": [header(0, "uint8", [len(header(0, "uint8", [1]))]), GOOD, GOOD],
    "a frame that is not there": [header(index=3), GOOD, GOOD],
    "a negative frame": [header(index=-1), GOOD, GOOD],
    "an index that is no integer": [header(index="1"), GOOD, GOOD],
    "a type nobody sends": [header(dtype="complex64"), GOOD, GOOD],
    "a type that is a name of torch": [header(dtype="load"), GOOD, GOOD],
    "a negative shape": [header(shape=[-1, -2]), GOOD, GOOD],
    "a shape that is no list": [header(shape=2), GOOD, GOOD],
    "a shape beyond all memory": [header(shape=[2**62, 2**62]), GOOD, GOOD],
    "a tensor that is a number": [msgspec.msgpack.encode({"type": "Pair", "number": 1, "first": 7, "note": ""}), GOOD],
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_message_is_refused(what: str) -> None:
    with pytest.raises(WireError):
        CODEC.decode(MALFORMED[what])


def test_the_good_header_that_the_malformed_ones_are_made_from_is_taken() -> None:
    assert torch.equal(CODEC.decode([header(), GOOD, GOOD]).first, torch.zeros(2))


def field(name: str, value: bytes) -> bytes:
    """The first frame of a Pair with a single field of these bytes."""
    return b"\x82" + b"".join(map(msgspec.msgpack.encode, ("type", "Pair", name))) + value


def test_deeply_nested_values_are_refused() -> None:
    for name in ("unknown", "first"):
        with pytest.raises(WireError):
            CODEC.decode([field(name, b"\x91" * 100_000 + b"\x01")])


def test_text_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(WireError):
        CODEC.decode([field("note", b"\xa2\xff\xff")])


def test_an_empty_tensor_of_impossible_shape_is_refused() -> None:
    for shape in ([0, 2**62, 4], [0, 2**63], [0, 2**64 - 1]):
        with pytest.raises(WireError):
            CODEC.decode([header(shape=shape), b"", GOOD])


@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_a_message_with_one_changed_byte_is_a_message_or_refused(position: int, value: int) -> None:
    frames = sent(Pair(300, torch.ones(3), "a note", torch.ones(2, 2)))
    first = bytearray(frames[0])
    first[position % len(first)] = value
    with contextlib.suppress(WireError):
        assert isinstance(CODEC.decode([bytes(first), *frames[1:]]), Pair)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_random_bytes_are_a_message_or_refused(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(CODEC.decode(frames), Pair | Word)


def test_every_truncation_of_a_message_is_refused() -> None:
    frames = sent(Pair(300, torch.ones(3), "a note", torch.ones(2, 2)))
    for position, frame in enumerate(frames):
        for length in range(len(frame)):
            with pytest.raises(WireError):
                CODEC.decode([*frames[:position], frame[:length], *frames[position + 1 :]])
        with pytest.raises(WireError):
            CODEC.decode(frames[:position])


def test_an_oversized_frame_is_refused_whichever_it_is() -> None:
    codec = Codec([Pair, Word], frame_bytes_max=100)
    assert codec.decode(codec.encode(Word("x" * 50))).text == "x" * 50
    with pytest.raises(WireError, match="at most 100 are accepted"):
        codec.decode(codec.encode(Word("x" * 100)))
    with pytest.raises(WireError, match="a frame of 104 bytes"):
        codec.decode([header(shape=[26]), bytes(104), GOOD])
    with pytest.raises(WireError, match="a frame of 101 bytes"):
        codec.decode([header(), GOOD, GOOD, bytes(101)])


def test_a_refused_message_leaves_the_codec_as_it_was() -> None:
    with pytest.raises(WireError):
        CODEC.decode([header(index=3), GOOD, GOOD])
    assert CODEC.decode([header(), GOOD, GOOD]).number == 1


def test_what_is_neither_plain_nor_a_tensor_cannot_be_sent() -> None:
    with pytest.raises(WireError, match="a Codec cannot be sent"):
        CODEC.encode(Word(CODEC))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_a_tensor_that_no_receiver_would_accept_is_refused_by_its_sender(dtype: torch.dtype) -> None:
    with pytest.raises(WireError, match=r"cannot be sent; known types: .*float32"):
        CODEC.encode(Pair(0, torch.ones(2, dtype=dtype), "", torch.ones(1)))


# ---- trees ----------------------------------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text()
trees = st.recursive(
    plain | tensors(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type too: 1, 1.0 and True differ, and so do lists and tuples."""
    if type(one) is not type(other):
        return False
    match one:
        case Tensor():
            return equal(one, other)
        case dict():
            pairs = zip(one.items(), other.items(), strict=True)
            return len(one) == len(other) and all(same(a, b) and same(x, y) for (a, x), (b, y) in pairs)
        case list() | tuple():
            return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@given(trees)
def test_a_tree_comes_back_from_json_and_its_tensors(tree: Any) -> None:
    taken: list[Tensor] = []
    assert same(unpack_tree(json.loads(json.dumps(pack_tree(tree, taken))), taken), tree)


def test_trees_that_look_like_packed_ones_come_back_too() -> None:
    tree = {"$": "tensor", "at": 0, "items": [{"$": "dict", "items": []}, {0: torch.ones(2)}, ()]}
    taken: list[Tensor] = []
    assert same(unpack_tree(json.loads(json.dumps(pack_tree(tree, taken))), taken), tree)
    assert len(taken) == 1


def test_a_key_that_could_not_come_back_is_refused() -> None:
    with pytest.raises(WireError, match="a dict cannot be saved"):
        pack_tree({"by pair": {(1, 2): 3}}, [])


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j, torch.float32], ids=lambda v: type(v).__name__)
def test_what_cannot_be_saved_is_refused_wherever_it_hides(value: Any) -> None:
    for tree in (value, [value], {"a": (1, {"b": value})}):
        with pytest.raises(WireError, match=f"a {type(value).__name__} cannot be saved"):
            pack_tree(tree, [])
