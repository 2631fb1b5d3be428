"""Everything that decodes, given damaged bytes: a value or a clear error, within the time and memory of the input.

`pytest tests/test_fuzz.py --mutations 20000` tries as many inputs on each decoder.
"""

from __future__ import annotations

import pickle
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Union

import msgspec
import pytest
import torch

from mutate import mutations
from test_conformance import EXAMPLES
from tether.core import settings
from tether.core.compress import Compressor, FeedbackKey, Packed, unpack
from tether.core.machine import Node
from tether.core.message import Message, Tag
from tether.core.trace import Meter
from tether.core.wire import Codec, pack_tree, unpack_tree
from tether.errors import TetherError, UsageError, WireError
from tether.protocols import known as known_protocols
from tether.protocols.averaging import ROUND, Joint
from tether.runtimes.process import control
from tether.runtimes.process.agent import Answer, Assignment, Refusal, decode
from tether.runtimes.process.handshake import AuthenticatedConnection, Keys, _PendingConnection, _Signer, receive
from tether.runtimes.process.link import Opener, enveloped
from tether.runtimes.process.memory import Memory
from tether.runtimes.sim.faults import Faults
from tether.runtimes.spark.agent import Greeting
from tether.runtimes.spark.collectives import Announcement, BroadcastFile, Fetch, _read
from tether.runtimes.spark.feed import NO_COUNT, RowReceiver, _wire_schema
from tether.runtimes.spark.store import Field
from tether.runtimes.tree import Down, Up, message_types
from tether.tasks import known as known_tasks
from tether.tasks import load

#: no input here is larger than a few kilobytes
MEMORY_BYTES = 256 * 2**20
INPUT_SECONDS = 10.0
KEYS = Keys(b"the secret of this run")


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--mutations"))


@contextmanager
def little_memory() -> Iterator[None]:
    """Limit the memory, so that a decoder that believes a false length gets a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def try_damaged(
    examples: list[list[bytes]], decode: Callable[[list[bytes]], Any], count: int, errors: type[Exception]
) -> None:
    """Decode `count` damaged examples; each is a list of frames, with damage in one or more of them."""
    rng = random.Random(17)
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for example in examples:
        decode(list(example))  # undamaged, it is accepted
    with little_memory():
        for _ in range(count):
            frames = list(rng.choice(examples))
            for _ in range(rng.choice((1, 1, 1, 2))):
                place = rng.randrange(len(frames))
                frames[place] = mutations(frames[place], rng)
            start = time.monotonic()
            try:
                decode(frames)
                outcomes["taken"] += 1
            except errors as error:
                assert str(error), "an error that says nothing"
                outcomes["refused"] += 1
            slowest = max(slowest, time.monotonic() - start)
    print(f"{count} inputs: {dict(outcomes)}, the slowest took {slowest * 1000:.1f} ms")
    assert outcomes["refused"] > count / 20, "hardly anything was refused: is this damage at all?"
    assert slowest < INPUT_SECONDS


def frames_of(codec: Codec, message: Message) -> list[bytes]:
    return [bytes(frame) for frame in codec.encode(message)]


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, cls in known_protocols().items() if cls.messages])
def test_damaged_messages_of_a_protocol_are_refused(name: str, count: int) -> None:
    cls = known_protocols()[name]
    plain = (*cls.messages, *message_types(tuple(cls.messages)))
    types = [*plain, Packed[Union[plain]]]  # noqa: UP007
    examples: list[Message] = list(EXAMPLES[cls])
    examples += [Down(ROUND, 3, ("hub", "worker-0"), (Tag(ROUND, 2),), message) for message in EXAMPLES[cls]]
    examples.append(Up(Tag(ROUND, 3), ("hub", "worker-0"), torch.ones(3), 1.0, {"worker-0": 3}))
    codec = Codec(types)
    try_damaged([frames_of(codec, message) for message in examples], codec.decode, count, WireError)


TREE = {"step": 3, 4: (torch.ones(3), [None, "text", 1.5]), "deep": {"deeper": torch.zeros(2, 2)}}


def with_tree(make: Callable[[Any, list[torch.Tensor]], Message]) -> Message:
    tensors: list[torch.Tensor] = []
    return make(pack_tree(TREE, tensors), tensors)


CONTROL: list[Message] = [
    control.Hello("tcp://127.0.0.1:1234"),
    control.Note("words"),
    control.Report(Meter("worker-0"), 1.0),
    control.Row({"tau": 3, "loss": 0.5}, 1.0),
    control.Evaluation(3, 96, False, torch.ones(4), 1.0),
    with_tree(lambda tree, tensors: control.Checkpoint(3, 96, False, torch.ones(4), tree, tree, tensors, 1.0)),
    with_tree(lambda tree, tensors: control.State(3, tree, tensors)),
    with_tree(lambda tree, tensors: control.Restore(tree, tensors)),
    control.Begin(("hub", "worker-0"), {"hub": "tcp://127.0.0.1:1234"}),
    control.Observed([{"error": 0.5}]),
    control.Bye(Meter("worker-0"), []),
    Fetch(Tag(ROUND, 3), 0),
    BroadcastFile("/tmp/somewhere"),
]


def test_damaged_words_between_driver_and_nodes_are_refused(count: int) -> None:
    codec = Codec([*control.FROM_NODE, *control.FROM_DRIVER, Fetch, BroadcastFile])

    def decode(frames: list[bytes]) -> None:
        message = codec.decode(frames)
        match message:
            case control.State(state=tree, tensors=tensors) | control.Restore(state=tree, tensors=tensors):
                unpack_tree(tree, tensors)

    try_damaged([frames_of(codec, message) for message in CONTROL], decode, count, WireError)


def test_damaged_broadcasts_of_spark_are_refused(tmp_path: Path, count: int) -> None:
    codec = Codec([Announcement[Joint]])
    joint = Joint(1, torch.arange(300.0), {"worker-0": (4, 6)}, 4)
    frames = codec.encode(Announcement(ROUND, 0, ("hub", "worker-0"), joint))
    file = tmp_path / "broadcast"

    def read(damaged: list[bytes]) -> None:
        file.write_bytes(damaged[0])
        codec.decode(_read(str(file)))

    whole = pickle.dumps([pickle.PickleBuffer(frame) for frame in frames], protocol=5)
    try_damaged([[whole]], read, count, WireError)


@pytest.mark.parametrize("code", ["fp16", "int8"])
def test_damaged_messages_that_are_compressed_are_refused(code: str, count: int) -> None:
    compressor = Compressor(code, 3000, 3100)
    draw = torch.Generator().manual_seed(1)
    sizes = (300, 3000, 3100)
    packed = [
        compressor.pack(
            FeedbackKey("hub", f"{size}"), Up(Tag(ROUND, 3), (), torch.randn(size, generator=draw), 1.0, {"a": 3})
        )
        for size in sizes
    ]
    codec = Codec([Packed[Up]])
    try_damaged([frames_of(codec, message) for message in packed], lambda f: unpack(codec.decode(f)), count, WireError)


def test_damaged_envelopes_and_loans_are_refused(tmp_path: Path, count: int) -> None:
    memory = Memory(tmp_path, "owner", size=2**22)
    codec = Codec([Up])
    opener = Opener([Up], tmp_path)
    values = memory.empty(30_000, dtype=torch.float32).fill_(1.0)
    examples = []
    for tensor in (values, torch.ones(5)):
        message = Up(Tag(ROUND, 3), (), tensor, 1.0, {"a": 3})
        frames = enveloped(codec, "owner", message, lambda frame: memory.lend("peer", frame))
        examples.append([bytes(frame) for frame in frames])
    try_damaged(examples, lambda frames: opener.open([memoryview(frame) for frame in frames]), count, WireError)


# ---- what strangers and agents say ----------------------------------------------------------------------------------


def test_a_damaged_greeting_opens_nothing(count: int) -> None:
    """Every byte of it counts: no damaged greeting is accepted."""
    key = KEYS.derive("test")
    text = msgspec.msgpack.encode(Greeting(1, "/tmp/tether-1", "127.0.0.1", 4321, "/local", 3, 7))
    nonce = bytes(range(32))

    def greet(damage: Callable[[bytes], bytes]) -> AuthenticatedConnection | None:
        with ExitStack() as stack:
            here, there = (stack.enter_context(end) for end in socket.socketpair())
            pending = _PendingConnection(here, key)
            pending.send_nonce()
            mac = _Signer(key, receive(there, 32) + nonce).sign_message(text)
            with suppress(BrokenPipeError):
                there.sendall(damage(nonce + mac + len(text).to_bytes(4, "big") + text))
            there.shutdown(socket.SHUT_WR)
            for _ in range(10):
                if (visitor := pending.receive()) is not None:
                    return visitor
            raise AssertionError("it neither ended nor went on")

    assert greet(lambda said: said) is not None
    rng = random.Random(17)
    with little_memory():
        for _ in range(count):
            with pytest.raises(WireError):
                greet(lambda said: mutations(said, rng))


def test_damaged_words_on_a_lifeline_are_refused(count: int) -> None:
    greeting = Greeting(1, "/tmp/tether-1", "127.0.0.1", 4321, "/local", 3, 7)
    node = Node("worker-1", "worker", True, 1)
    for kind, said in (
        (Greeting, [greeting]),
        (Answer, [Assignment(node, (node, node)), Refusal("its place is taken")]),
    ):
        examples = [[msgspec.msgpack.encode(word)] for word in said]
        try_damaged(examples, lambda frames, kind=kind: decode(frames[0], kind), count, WireError)  # type: ignore[misc]


def test_a_damaged_stream_of_rows_is_forgotten_or_refused(count: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    fields = (Field("features", "float32", (2,)), Field("label", "int64"))
    schema = _wire_schema(fields)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, schema) as writer:
        for rows in (5, 3):
            arrays = [
                pyarrow.FixedSizeBinaryArray.from_buffers(kind.type, rows, [None, pyarrow.py_buffer(bytes(8 * rows))])
                for kind in schema
            ]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
    whole = sink.getvalue().to_pybytes() + (8).to_bytes(8, "little")

    def serve(stream: bytes) -> None:
        """Receive the stream as a task of the run sends it."""
        with closing(RowReceiver(fields, KEYS, host="127.0.0.1")) as receiver, ExitStack() as stack:
            here, there = (stack.enter_context(end) for end in socket.socketpair())
            there.sendall(stream)
            there.shutdown(socket.SHUT_WR)
            receiver._serve(AuthenticatedConnection(here, b"", _Signer(b"", b"")))
            if len(receiver.wait(0.0)) == NO_COUNT:
                raise WireError("nothing has come")

    try_damaged([[whole]], lambda frames: serve(frames[0]), count, TetherError)


# ---- files and settings ---------------------------------------------------------------------------------------------


CSV = "text,label\n" + "".join(f'"what is it, {i}?",{"one" if i % 2 else "other"}\n' for i in range(12))


def test_damaged_csv_files_are_read_or_refused(tmp_path: Path, count: int) -> None:
    path = tmp_path / "rows.csv"

    def read(frames: list[bytes]) -> None:
        path.write_bytes(frames[0])
        load("text", data=path).train_data()

    try_damaged([[CSV.encode()], [CSV.replace("\n", "\r\n").encode("utf-8-sig")]], read, count, UsageError)


FAULTS = [
    {"kind": "crash", "node": "worker-2", "step": 5},
    {"kind": "cut", "node": "worker-1", "peer": "hub", "at": 1.5, "seconds": 2.0},
    {"kind": "slow", "node": "worker-0", "factor": 10.0, "at": 0.0, "seconds": 3},
]


def test_damaged_files_of_faults_are_read_or_refused(tmp_path: Path, count: int) -> None:
    path = tmp_path / "faults.json"

    def read(frames: list[bytes]) -> None:
        path.write_bytes(frames[0])
        Faults.load(path).check({"hub", "worker-0", "worker-1", "worker-2"})

    try_damaged([[msgspec.json.encode(FAULTS)]], read, count, UsageError)


@pytest.mark.parametrize("kind", ["task", "protocol"])
def test_damaged_settings_are_taken_or_refused(kind: str, tmp_path: Path, count: int) -> None:
    (tmp_path / "rows.csv").write_text(CSV)
    data = {"text": tmp_path / "rows.csv"}
    choices = {
        (name, option.name): option.default
        for name, cls in (known_tasks() if kind == "task" else known_protocols()).items()
        for option in settings.options(cls, {})
        if option.name != "data" and name not in ("fashion", "cifar", "chars")
    }
    examples = [[f"{name}\0{option}={default}".encode()] for (name, option), default in choices.items()]

    def make(frames: list[bytes]) -> None:
        name, _, setting = frames[0].decode("utf-8", "replace").partition("\0")
        option, _, text = setting.partition("=")
        if kind == "task":
            load(name, data=data.get(name), settings={option: text})
        elif name in known_protocols():
            cls = known_protocols()[name]
            cls(**settings.arguments(cls, f"protocol {name}", {option: text}))
        else:
            raise UsageError("an unknown protocol")

    def is_taken(frames: list[bytes]) -> bool:
        """Some defaults are not values that can be set."""
        with suppress(UsageError):
            make(frames)
            return True
        return False

    try_damaged(list(filter(is_taken, examples)), make, count, UsageError)
