"""Codes, the envelope, error feedback, and whole runs whose messages are compressed."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tether import Averaging, Faults, Local, Server, Single, StepTime, UsageError
from tether.analysis.report import table
from tether.analysis.runs import load_run
from tether.api import replay_recorded
from tether.core import message
from tether.core.compress import BLOCK, Compressor, FeedbackKey, Packed, decode, encode, unpack
from tether.core.effects import Broadcast, Effect, Reduce, Send
from tether.core.events import Broadcasted, Event, PeerLost, Received, TimerFired
from tether.core.machine import Node, Replica
from tether.core.message import Message, Tag, Timer, tensors_of, with_tensors
from tether.core.trace import Meter
from tether.core.wire import Codec
from tether.errors import WireError
from tether.execution.plan import RunPlan
from tether.protocols import Options
from tether.protocols.averaging import ROUND, Effort, Joint
from tether.protocols.circulation import tag_of
from tether.protocols.server.messages import Mark, Push, Weights
from tether.runtimes.interpreter import Interpreter, Recorder, message_bytes
from tether.runtimes.spark.collectives import Total
from tether.runtimes.tree import Down, Up, message_types
from tether.tasks.digits import Digits
from tether.testing.conformance import Blobs, train_quietly
from tether.testing.conformance import CheckedSim as Sim

CODES = ("fp16", "bf16", "int8")
LENGTHS = (0, 1, 2, 255, 256, 1023, 1024, 1025, 2048, 5000)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TO_HUB = FeedbackKey("hub", "Push")
TO_ALL = FeedbackKey("", "broadcasts of joint")


class Wide(Blobs):
    """As many parameters as it takes to be encoded; with `norm`, as many buffers too."""

    def model(self) -> nn.Module:
        norm: nn.Module = nn.BatchNorm1d(160) if self.norm else nn.Identity()
        return nn.Sequential(nn.Linear(2, 160), norm, nn.ReLU(), nn.Linear(160, 2))


def vector(length: int, seed: int = 0, exponent: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values whose magnitude varies from block to block."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=random, dtype=torch.float64)
    blocks = 10 ** (torch.randn(length // BLOCK + 1, generator=random, dtype=torch.float64) + exponent)
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return (values * blocks.repeat_interleave(BLOCK)[:length]).clamp(-largest, largest).to(dtype)


vectors = st.builds(
    vector,
    st.sampled_from(LENGTHS) | st.integers(0, 4000),
    st.integers(0, 2**32),
    st.floats(-46, 37),
    st.sampled_from(DTYPES),
)


def block_peaks(values: Tensor) -> Tensor:
    """For every value, the largest magnitude in its block."""
    return torch.cat([block.abs().max().expand(len(block)) if len(block) else block for block in values.split(BLOCK)])


# ---- codes ----------------------------------------------------------------------------------------------------------


@given(vectors)
def test_int8_errs_by_at_most_half_a_127th_of_the_largest_in_the_block(values: Tensor) -> None:
    coded, scales = encode("int8", values)
    assert coded.dtype == torch.int8 and len(scales) == math.ceil(len(values) / BLOCK)
    decoded = decode(coded, scales, values.dtype)
    # in half precision a scale is the next power of two; below all normal numbers it is the smallest of them
    steps = block_peaks(values.double()) / 127 * (2.0 if values.dtype.itemsize == 2 else 1.0)
    smallest = 2.0**-24 if values.dtype == torch.float16 else 2.0**-126
    assert ((decoded.double() - values.double()).abs() <= steps.clamp(min=smallest) * 0.5001).all()


@given(vectors)
def test_half_precision_errs_by_at_most_half_of_its_last_bit(values: Tensor) -> None:
    for code, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        info = torch.finfo(dtype)
        decoded = decode(*encode(code, values), torch.float64)
        assert decoded.isfinite().all()
        within = values.double().clamp(-info.max, info.max)
        bound = (within.abs() * info.eps / 2).clamp(min=info.smallest_normal * info.eps)
        assert ((decoded - within).abs() <= bound).all()


@given(vectors, st.sampled_from(CODES))
def test_encoding_what_was_decoded_changes_nothing(values: Tensor, code: str) -> None:
    once = decode(*encode(code, values), values.dtype)
    again = decode(*encode(code, once), values.dtype)
    assert once.dtype == again.dtype == values.dtype and torch.equal(once, again)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", CODES)
def test_length_shape_and_dtype_come_back(code: str, dtype: torch.dtype, length: int) -> None:
    message = Weights(3, vector(length, dtype=dtype))
    compressor = Compressor(code)
    packed = compressor.pack(TO_HUB, message)
    encoded = length >= 256 and dtype.itemsize > (1 if code == "int8" else 2)
    assert isinstance(packed, Packed) == encoded
    back = unpack(packed) if isinstance(packed, Packed) else packed
    assert isinstance(back, Weights)
    assert (back.clock, back.values.dtype, back.values.shape) == (3, dtype, (length,))
    assert torch.allclose(back.values.double(), message.values.double(), atol=float(message.values.abs().sum()) / 100)


@pytest.mark.parametrize("code", CODES)
def test_a_tensor_of_several_dimensions_keeps_them(code: str) -> None:
    message = Weights(3, vector(1200).view(30, 40))
    back = unpack(pack(code, message)).values  # type: ignore[attr-defined]
    assert back.shape == (30, 40) and not torch.equal(back, message.values)


@pytest.mark.parametrize(("code", "share_max"), [("fp16", 0.5), ("bf16", 0.5), ("int8", 0.255)])
@pytest.mark.parametrize("length", [256, 1025, 5000, 100_000])
def test_what_is_sent_is_smaller_by_this_share(code: str, share_max: float, length: int) -> None:
    compressor = Compressor(code)
    packed = compressor.pack(TO_HUB, Weights(0, vector(length)))
    assert 0.25 * 4 * length < message_bytes(packed) <= share_max * 4 * length
    assert (compressor.raw_bytes, compressor.packed_bytes) == (4 * length, message_bytes(packed))


def test_only_long_floating_point_tensors_are_encoded() -> None:
    for values in (torch.ones(255), torch.ones(5000, dtype=torch.int64), torch.ones(5000, dtype=torch.uint8)):
        message = Weights(0, values)
        assert Compressor("int8").pack(TO_HUB, message) is message


def test_a_block_of_zeros_stays_one() -> None:
    values = torch.zeros(3 * BLOCK)
    values[:BLOCK] = 1.0
    decoded = decode(*encode("int8", values), torch.float32)
    assert torch.allclose(decoded[:BLOCK], values[:BLOCK], rtol=1e-4) and (decoded[BLOCK:] == 0).all()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_that_is_not_finite_comes_out_as_nan_and_no_other_block_does(odd: float, dtype: torch.dtype) -> None:
    values = vector(2 * BLOCK + 300, dtype=dtype)
    for place in (5, 2 * BLOCK + 7):
        values[place] = odd
    decoded = decode(*encode("int8", values), dtype)
    assert decoded[:BLOCK].isnan().all() and decoded[2 * BLOCK :].isnan().all()
    assert decoded[BLOCK : 2 * BLOCK].isfinite().all()


@pytest.mark.parametrize("code", ["fp16", "bf16"])
def test_half_precision_hides_neither_nan_nor_infinity_and_makes_none(code: str) -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38])
    decoded = decode(*encode(code, values), torch.float32)
    assert decoded[0].isnan() and decoded[1:3].tolist() == [float("inf"), -float("inf")]
    assert decoded[3:].isfinite().all() and decoded[3] > 60_000 and decoded[4] < -60_000


def test_float64_beyond_the_range_of_scales_is_nan_and_not_a_plausible_number() -> None:
    assert decode(*encode("int8", torch.full((300,), 1e300, dtype=torch.float64)), torch.float64).isnan().all()


# ---- error feedback -------------------------------------------------------------------------------------------------


def pack(code: str, message: Message) -> Packed[Any]:
    packed = Compressor(code).pack(TO_HUB, message)
    assert isinstance(packed, Packed)
    return packed


def sent(compressor: Compressor, key: FeedbackKey, values: Tensor) -> Tensor:
    """What the receiver gets."""
    packed = compressor.pack(key, Weights(0, values))
    assert isinstance(packed, Packed)
    (found,) = tensors_of(unpack(packed))
    return found


def step_size(code: str, values: Tensor) -> Tensor:
    """What one rounding can change, and what a residual adds to the magnitude."""
    if code == "int8":
        return block_peaks(values) / 127 * 1.01
    return values.abs() * torch.finfo(torch.float16 if code == "fp16" else torch.bfloat16).eps * 1.01 + 1e-7


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("constant", [True, False])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_the_sum_of_what_arrives_is_the_sum_of_what_was_sent_to_within_a_step(
    code: str, constant: bool, seed: int
) -> None:
    compressor, largest = Compressor(code), torch.zeros(1500)
    meant, arrived, alone = (torch.zeros(1500, dtype=torch.float64) for _ in range(3))
    random = torch.Generator().manual_seed(seed)
    for _ in range(40):
        values = vector(1500, seed) if constant else torch.randn(1500, generator=random)
        meant += values
        arrived += sent(compressor, TO_HUB, values)
        alone += decode(*encode(code, values), torch.float32)
        largest = torch.maximum(largest, step_size(code, values))
        assert ((arrived - meant).abs() <= largest).all()
    assert not ((alone - meant).abs() <= largest).all(), "the test could not tell feedback from none"


def test_lanes_and_peers_do_not_mix_their_losses() -> None:
    compressor, values = Compressor("int8"), vector(2000)
    first = sent(compressor, TO_HUB, values)
    assert torch.equal(sent(compressor, FeedbackKey("worker-1", "Push"), values), first)
    assert torch.equal(sent(compressor, FeedbackKey("hub", "Weights"), values), first)
    assert not torch.equal(sent(compressor, TO_HUB, values), first)


def test_fields_of_a_message_do_not_mix_their_losses() -> None:
    compressor, same = Compressor("int8"), vector(2000)
    push = Push((Mark("worker-0", 1, 0),), same, same, 1, None)
    for _ in range(3):
        packed = compressor.pack(TO_HUB, push)
        gradient, buffers = tensors_of(unpack(packed))  # type: ignore[arg-type]
        assert torch.equal(gradient, buffers)


def test_losses_of_a_lost_peer_are_dropped() -> None:
    compressor, values = Compressor("int8"), vector(2000)
    first = sent(compressor, TO_HUB, values)
    sent(compressor, FeedbackKey("worker-1", "Push"), values)
    compressor.forget("worker-1")
    assert not torch.equal(sent(compressor, TO_HUB, values), first)
    compressor.forget("hub")
    assert torch.equal(sent(compressor, TO_HUB, values), first)


def test_losses_of_another_length_are_dropped() -> None:
    compressor = Compressor("int8")
    sent(compressor, TO_HUB, vector(2000))
    assert torch.equal(sent(compressor, TO_HUB, vector(1999)), decode(*encode("int8", vector(1999)), torch.float32))


@pytest.mark.parametrize("code", CODES)
def test_what_was_nan_once_does_not_spoil_what_comes_later(code: str) -> None:
    compressor, values = Compressor(code), vector(2000)
    sent(compressor, TO_HUB, torch.full((2000,), float("nan")))
    assert torch.equal(sent(compressor, TO_HUB, values), decode(*encode(code, values), torch.float32))


def test_what_fp16_cannot_hold_does_not_pile_up() -> None:
    compressor = Compressor("fp16")
    for _ in range(20):
        assert (sent(compressor, TO_HUB, torch.full((300,), 1e6)) == 65504).all()
    assert (sent(compressor, TO_HUB, torch.ones(300)) - 1).abs().max() < 100


def test_what_is_sent_again_to_others_is_encoded_once() -> None:
    compressor = Compressor("int8")
    message = Weights(0, vector(2000))
    packed = compressor.pack(TO_ALL, message)
    error = compressor.squared_error
    assert compressor.pack(TO_ALL, message) is packed and compressor.squared_error == error
    assert compressor.raw_bytes == 2 * 8000 and compressor.packed_bytes == 2 * message_bytes(packed)
    assert compressor.pack(TO_ALL, Weights(0, message.values)) is not packed


def test_a_relay_passes_on_exactly_what_it_was_given() -> None:
    for code in CODES:
        hub, relay = Compressor(code), Compressor(code)
        for turn in range(5):
            got = sent(hub, TO_ALL, vector(3000, turn))
            assert torch.equal(sent(relay, TO_ALL, got), got)
        assert relay.squared_error == 0 < hub.squared_error


def test_buffers_are_sent_as_they_are() -> None:
    compressor = Compressor("int8", parameter_count=2000, length=2600)
    whole, buffers = vector(2600), vector(600, seed=1)
    got = sent(compressor, TO_HUB, whole)
    assert torch.equal(got[2000:], whole[2000:]) and not torch.equal(got[:2000], whole[:2000])
    push = compressor.pack(TO_HUB, Push((), whole[:2000], buffers, 1, None))
    assert isinstance(push, Packed) and push.places == (0,)
    assert torch.equal(tensors_of(unpack(push))[1], buffers)


def test_a_compressor_measures_what_it_lost() -> None:
    compressor, values = Compressor("int8"), vector(2000)
    lost = values - sent(compressor, TO_HUB, values)
    assert compressor.squared_error == pytest.approx(float(lost.square().sum()))
    assert compressor.squared_values == pytest.approx(float(values.square().sum()))
    meter = Meter("hub", squared_error=1.0, squared_values=16.0)
    assert meter.relative_error == 0.25 and Meter("hub").relative_error == 0.0


# ---- the envelope ---------------------------------------------------------------------------------------------------

NAMES = ("hub", "worker-0", "worker-1")
MESSAGES: list[Message] = [
    Joint(4, vector(3000), {}, 0),
    Up(Tag(ROUND, 4), NAMES, vector(3000), 1.0, {"worker-0": 0}),
    Down(message.Stream("joint"), 3, NAMES, (Tag(ROUND, 3),), Joint(4, vector(3000), {}, 0)),
]
TYPES = [Joint, Effort, *message_types((Joint, Effort))]
CODEC = Codec([*TYPES, Packed[Union[tuple(TYPES)]]])  # noqa: UP007


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_an_envelope_survives_the_wire(message: Message, code: str) -> None:
    packed = pack(code, message)
    frames = [bytes(frame) for frame in CODEC.encode(packed)]
    assert sum(map(len, frames[1:])) == message_bytes(packed) < 0.51 * message_bytes(message)
    back = CODEC.decode(frames)
    assert isinstance(back, Packed)
    found = unpack(back)
    assert type(found) is type(message)
    (there,) = tensors_of(message)
    (arrived,) = tensors_of(found)
    assert torch.equal(arrived, decode(*encode(code, there), torch.float32))
    empty = [torch.empty(0)]
    assert msgspec.to_builtins(with_tensors(found, empty), enc_hook=str) == msgspec.to_builtins(
        with_tensors(message, empty), enc_hook=str
    )


def test_an_uncompressed_run_takes_no_envelope() -> None:
    frames = [bytes(frame) for frame in CODEC.encode(pack("int8", MESSAGES[0]))]
    with pytest.raises(WireError, match="Packed"):
        Codec(TYPES).decode(frames)


def test_tensors_are_found_wherever_a_message_holds_them() -> None:
    ones, packed = torch.ones(1), pack("int8", MESSAGES[2])
    assert [len(tensor) for tensor in tensors_of(packed)] == [0, 3000, 3]
    assert tensors_of(Effort(None, 1.0)) == []
    renewed = with_tensors(packed, [ones, 2 * ones, 3 * ones])
    assert [float(tensor) for tensor in tensors_of(renewed)] == [1, 2, 3]
    assert renewed.message.members == NAMES and renewed.places == (0,)


GOOD = pack("int8", MESSAGES[0])
HALF = pack("fp16", MESSAGES[0])
MALFORMED = {
    "no values": (GOOD, {"values": ()}),
    "no scales": (GOOD, {"scales": ()}),
    "too few scales": (GOOD, {"scales": (torch.ones(2),)}),
    "too many scales": (GOOD, {"scales": (torch.ones(4),)}),
    "scales of another dtype": (GOOD, {"scales": (torch.ones(3, dtype=torch.float64),)}),
    "scales of two dimensions": (GOOD, {"scales": (torch.ones(3, 1),)}),
    "scales for half precision": (HALF, {"scales": (torch.ones(3),)}),
    "values of another dtype": (GOOD, {"values": (torch.ones(3000),)}),
    "whole numbers": (GOOD, {"values": (torch.ones(3000, dtype=torch.int64),)}),
    "a place too far": (GOOD, {"places": (1,)}),
    "a negative place": (GOOD, {"places": (-1,)}),
    "a place twice": (GOOD, {"places": (0, 0), "values": GOOD.values * 2, "scales": GOOD.scales * 2}),
    "whole numbers to be restored": (GOOD, {"message": Joint(4, torch.empty(0, dtype=torch.int64), {}, 0)}),
    "no wider than the code": (HALF, {"message": Joint(4, torch.empty(0, dtype=torch.float16), {}, 0)}),
    "a rest of two dimensions": (GOOD, {"message": Joint(4, torch.ones(2, 2), {}, 0)}),
    "values of two dimensions before a rest": (
        GOOD,
        {"message": Joint(4, torch.ones(2), {}, 0), "values": (GOOD.values[0].view(30, 100),)},
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_envelope_is_refused(name: str) -> None:
    packed, changes = MALFORMED[name]
    unpack(packed)
    with pytest.raises(WireError):
        unpack(msgspec.structs.replace(packed, **changes))


# ---- a node ---------------------------------------------------------------------------------------------------------


class Script:
    """A machine that returns the given effects."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.events: list[Event] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        effects, self.effects = self.effects, []
        return effects

    def check(self) -> None:
        pass


class FakeHost:
    """A host that keeps what is sent, and as much of a replica as a script needs."""

    bytes_scale = 2.0
    virtual = True
    parameter_count = 3000
    weights = torch.zeros(3000)

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def now(self) -> float:
        return 0.0

    def send(self, to: str, message: Message) -> None:
        self.sent.append((to, message))


class Told:
    """A node that compresses to int8."""

    def __init__(self, name: str) -> None:
        self.script, self.desk = Script(), FakeHost()
        self.node = Interpreter(name, self.script, self.desk, self.desk, compress="int8")  # type: ignore[arg-type]

    def perform(self, *effects: Effect) -> list[tuple[str, Message]]:
        """What is sent because of these."""
        self.script.effects = list(effects)
        return self.feed(TimerFired(Timer("now")))

    def feed(self, event: Event) -> list[tuple[str, Message]]:
        before = len(self.desk.sent)
        self.node.feed(event)
        return self.desk.sent[before:]


def values_in(message: Message) -> Tensor:
    assert isinstance(message, Packed)
    (found,) = tensors_of(unpack(message))
    return found


def test_a_broadcast_is_encoded_once_also_for_an_orphan() -> None:
    hub, members = Told("hub"), ("hub", *(f"worker-{i}" for i in range(6)))
    one, other = hub.perform(Broadcast(message.Stream("joint"), members, Joint(0, vector(3000), {}, 0)))
    assert (one[0], other[0]) == ("worker-0", "worker-1") and one[1] is other[1]
    orphans = hub.feed(PeerLost("worker-0"))
    assert [to for to, _ in orphans] == ["worker-2"] and all(told is one[1] for _, told in orphans)
    meter = hub.node.meter
    assert meter.bytes_sent == 3 * 2 * (3000 + 12) and meter.bytes_sent + meter.bytes_saved == 3 * 2 * 12_000
    assert 0 < meter.relative_error < 0.02
    (_, again), *_ = hub.perform(Broadcast(message.Stream("joint"), members, Joint(1, vector(3000), {}, 0)))
    assert not torch.equal(values_in(again), values_in(one[1])), "the second makes up for what the first lost"


def test_a_collective_message_without_a_lane_travels_as_it_is() -> None:
    total = Total(Tag(ROUND, 0), vector(3000), 1.0, {"worker-0": 1})
    ((_, sent),) = Told("hub").perform(Send("worker-0", total))
    assert sent is total


def test_a_partial_sum_is_encoded_once_also_for_a_new_parent() -> None:
    worker, members = Told("worker-2"), ("hub", "worker-0", "worker-1", "worker-2")
    ((to, first),) = worker.perform(Reduce(Tag(ROUND, 0), members, vector(3000), 1.0))
    ((then, again),) = worker.feed(PeerLost("worker-0"))
    assert (to, then) == ("worker-0", "hub") and first is again


def test_losses_carry_over_between_reductions_of_the_same_stream() -> None:
    worker = Told("worker-0")
    first, same, other = (
        values_in(worker.perform(Reduce(tag, ("hub", "worker-0"), vector(3000), 1.0))[0][1])
        for tag in (tag_of(1, 0), tag_of(1, 1), tag_of(2, 1))
    )
    assert torch.equal(first, other) and not torch.equal(first, same)


def test_messages_to_different_nodes_are_encoded_apart_and_forgotten_with_the_node() -> None:
    hub = Told("hub")
    tell = [Send(to, Weights(0, vector(3000))) for to in ("worker-0", "worker-1", "worker-0")]
    first, other, second = (values_in(told) for _, told in hub.perform(*tell))
    assert torch.equal(first, other) and not torch.equal(first, second)
    hub.feed(PeerLost("worker-0"))
    assert hub.node._compressor is not None
    assert {key[0].peer for key in hub.node._compressor._residuals} == {"worker-1"}


def test_a_machine_never_sees_an_envelope_and_bytes_are_counted_as_sent() -> None:
    hub = Told("hub")
    hub.feed(Received("worker-0", GOOD))
    (event,) = hub.script.events
    assert isinstance(event, Received) and isinstance(event.message, Joint)
    assert hub.node.meter.bytes_received == 2 * (3000 + 12)


def test_a_malformed_envelope_is_counted_and_never_reaches_the_machine() -> None:
    hub = Told("hub")
    hub.feed(Received("worker-0", msgspec.structs.replace(GOOD, scales=())))
    assert hub.script.events == [] and hub.node.meter.messages_refused == 1


# ---- runs -----------------------------------------------------------------------------------------------------------

UNEVEN = Sim(workers=3, step_seconds=StepTime(0.1, spread=0.5), link="10mbit")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("options", [Averaging(tau=2), Server(sync="hard")], ids=str)
def test_compressed_runs_learn_repeat_and_replay(options: Options, code: str, tmp_path: Path) -> None:
    options = replace(options, compress=code)
    first = train_quietly(Wide(norm=False), options, UNEVEN, tmp_path / "first", steps=30, record=True)
    assert first.metrics["error"] < 0.1
    again = train_quietly(Wide(norm=False), options, UNEVEN, tmp_path / "again", steps=30)
    plain = train_quietly(Wide(norm=False), replace(options, compress="none"), UNEVEN, tmp_path / "plain", steps=30)
    assert again.figures["digest"] == first.figures["digest"] != plain.figures["digest"]
    assert again.figures["compression"] == first.figures["compression"]
    assert all(events > 5 for events in replay_recorded(tmp_path / "first", Wide(norm=False)).values())

    figures = first.figures
    saved = figures["compression"]["bytes_saved"]
    assert figures["bytes_sent"] + saved == plain.figures["bytes_sent"] and "compression" not in plain.figures
    assert figures["compression"]["share"] == pytest.approx(0.25 if code == "int8" else 0.5, abs=0.01)
    assert 0 < figures["compression"]["relative_error"] < 0.02
    assert figures["bytes_sent"] >= figures["bytes_received"] > 0
    assert figures["seconds"] < plain.figures["seconds"], "what weighs less arrives sooner"


def test_progress_and_report_show_what_compression_saved(tmp_path: Path) -> None:
    train_quietly(Wide(norm=False), Averaging(tau=2, compress="int8"), UNEVEN, tmp_path / "int8", steps=6)
    train_quietly(Wide(norm=False), Averaging(tau=2), UNEVEN, tmp_path / "plain", steps=6)
    packed, plain = load_run(tmp_path / "int8"), load_run(tmp_path / "plain")
    assert all(row["bytes_saved"] > 2 * row["bytes_sent"] for row in packed.nodes.values())
    assert all(row["bytes_saved"] == 0 for row in plain.nodes.values())
    headings, *rows = table([plain, packed]).grid
    assert [row[headings.index("compressed to")] for row in rows] == ["-", "25.1%"]
    assert "compressed to" not in table([plain]).grid[0]
    unfinished = replace(packed, config={**packed.config, "result": None})
    assert unfinished.figures["compression"]["share"] == pytest.approx(packed.figures["compression"]["share"])


@pytest.mark.parametrize("faults", [Faults(), Faults().crash("worker-0", step=7)], ids=["well", "relay dies"])
def test_all_members_get_the_same_broadcast(faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 and 1 are children of the hub and relay to the others."""
    joint: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def recorder(plan: RunPlan, node: Node, replica: Replica) -> Recorder:
        def listen(event: Event, now: float, effects: list[Effect]) -> None:
            if isinstance(event, Broadcasted) and isinstance(event.message, Joint):
                joint[event.message.round][node.name] = event.message.values

        return listen

    monkeypatch.setattr(RunPlan, "recorder", recorder)
    sim = Sim(workers=6, faults=faults)
    train_quietly(Wide(norm=False), Averaging(tau=3, compress="int8"), sim, tmp_path / "run", steps=15)
    assert len(joint) == 5 and len(joint[0]) == 6 and len(joint[4]) == 6 - len(faults.schedule)
    for received in joint.values():
        one, *others = received.values()
        assert all(torch.equal(one, other) for other in others)
        assert len(one.unique()) <= 255, "this was not compressed"


class Uneven(Wide):
    """Its hidden units differ in scale by three orders of magnitude, which BatchNorm evens out."""

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            for parameter in model[0].parameters():  # type: ignore[index, operator]
                parameter.mul_(torch.logspace(-1.5, 1.5, 160).view(-1, *[1] * (parameter.ndim - 1)))
        return model


@pytest.mark.parametrize("options", [Averaging(tau=1), Server()], ids=str)
def test_a_batch_norm_survives_int8(options: Options, tmp_path: Path) -> None:
    result = train_quietly(Uneven(), replace(options, compress="int8"), Sim(2), tmp_path / "run", steps=60)
    variances = result.model.state_dict()["1.running_var"]
    assert (variances > 0).all() and variances.max() > 1000 * variances.min(), "the smallest would be rounded to zero"
    assert result.metrics["error"] < 0.1


def test_digits_in_int8_take_a_quarter_of_the_bytes_and_err_as_seldom(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    plain = train_quietly(Digits(), Averaging(tau=4), Sim(4), tmp_path / "plain", epochs=3)
    packed = train_quietly(Digits(), Averaging(tau=4, compress="int8"), Sim(4), tmp_path / "int8", epochs=3)
    assert packed.figures["bytes_sent"] <= 0.27 * plain.figures["bytes_sent"]
    assert packed.figures["compression"]["share"] <= 0.27
    assert packed.metrics["error"] < plain.metrics["error"] + 0.02


def test_processes_compress(tmp_path: Path) -> None:
    result = train_quietly(
        Wide(norm=False), Averaging(tau=5, compress="int8"), Local(2), tmp_path / "run", steps=40, record=True
    )
    assert result.metrics["error"] < 0.1
    figures = result.figures
    assert figures["bytes_sent"] == figures["bytes_received"] > 0
    assert figures["compression"]["share"] < 0.27 and figures["compression"]["relative_error"] > 0
    replay_recorded(tmp_path / "run", Wide(norm=False))


def test_an_option_that_would_do_nothing_or_is_unknown_is_refused() -> None:
    with pytest.raises(UsageError, match="single sends nothing"):
        Single(compress="int8")
    with pytest.raises(UsageError, match=r"option compress .* expected none \| fp16 \| bf16 \| int8"):
        Averaging(compress="zip")  # type: ignore[arg-type]
    assert Server("soft", 2, compress="bf16").compress == "bf16", "positions of other options are as before"
