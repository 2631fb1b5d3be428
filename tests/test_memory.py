"""What is lent stays as it was for as long as it is read, and is used again afterwards, whoever dies."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from torch import Tensor, nn

from tether.core.message import Message
from tether.core.vector import raw_bytes
from tether.core.wire import Codec
from tether.errors import WireError
from tether.learner.learner import Learner
from tether.runtimes.process.handshake import Keys
from tether.runtimes.process.link import Inbox, Outbox, address
from tether.runtimes.process.memory import LOANS_MAX, SHARED_BYTES_MIN, Loan, Memory, PeerMemory
from tether.testing.conformance import Blobs

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="regions are files that only Linux has"),
]

#: the fewest values that are lent
COUNT = SHARED_BYTES_MIN // 4


class Values(Message, frozen=True):
    """A number and tensors."""

    number: int
    tensors: tuple[Tensor, ...]


def full(memory: Memory, value: float, count: int = COUNT) -> Tensor:
    return memory.empty(count, dtype=torch.float32).fill_(value)


def lent(memory: Memory, to: str, tensor: Tensor) -> Loan:
    loan = memory.lend(to, raw_bytes(tensor))
    assert loan is not None
    return loan


def borrowed(peer: PeerMemory, loan: Loan) -> Tensor:
    return torch.frombuffer(peer.borrow("owner", loan), dtype=torch.float32)


# ---- one region -----------------------------------------------------------------------------------------------------


def test_a_tensor_in_the_region_is_lent_where_it_lies_and_another_is_copied_once(tmp_path: Path) -> None:
    memory, peer = Memory(tmp_path, "owner"), PeerMemory(tmp_path)
    tensor = full(memory, 1.0)
    view = borrowed(peer, lent(memory, "peer", tensor))
    tensor[0] = 5.0  # nobody may, but it shows where the view looks
    assert view[0] == 5.0
    elsewhere = torch.ones(COUNT)
    view = borrowed(peer, lent(memory, "peer", elsewhere))
    elsewhere[0] = 5.0
    assert view[0] == 1.0


def test_a_tensor_that_several_receive_lies_there_once(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "owner")
    tensor = full(memory, 1.0)
    loans = [lent(memory, f"peer-{index}", part) for index, part in enumerate([tensor, tensor[:100], tensor[50:]])]
    assert len({loan.number for loan in loans}) == 3
    assert [loan.start - loans[0].start for loan in loans] == [0, 0, 200]
    assert memory.used_bytes == SHARED_BYTES_MIN


def test_memory_is_used_again_when_views_are_released(tmp_path: Path) -> None:
    memory, peer = Memory(tmp_path, "owner", size=LOANS_MAX + 2 * SHARED_BYTES_MIN), PeerMemory(tmp_path)
    for number in range(1000):
        view = borrowed(peer, lent(memory, "peer", full(memory, number)))
        assert view[-1] == number


def test_a_gradient_is_lent_until_the_last_part_of_it_is_released(tmp_path: Path) -> None:
    memory, peer = Memory(tmp_path, "owner"), PeerMemory(tmp_path)
    gradient = full(memory, 1.0)
    assert not memory.is_lent(gradient)
    views = [borrowed(peer, lent(memory, "peer", part)) for part in gradient.tensor_split(3)]
    while views:
        assert memory.is_lent(gradient) and memory.is_lent(gradient[:5])
        views.pop()
    assert not memory.is_lent(gradient) and not memory.is_lent(torch.ones(3))


def test_a_view_of_a_view_keeps_the_loan(tmp_path: Path) -> None:
    memory, peer = Memory(tmp_path, "owner"), PeerMemory(tmp_path)
    tensor = full(memory, 1.0)
    part = borrowed(peer, lent(memory, "peer", tensor)).view(-1, 4)[7:9]
    assert memory.is_lent(tensor)
    del part
    assert not memory.is_lent(tensor)


def test_small_tensors_and_those_of_other_devices_are_ordinary(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "owner")
    memory.empty(COUNT - 1, dtype=torch.float32)
    assert memory.empty(COUNT, dtype=torch.float32, device=torch.device("meta")).is_meta
    assert memory.used_bytes == 0


def test_when_the_region_is_full_tensors_are_ordinary_and_nothing_is_lent(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "owner", size=LOANS_MAX + SHARED_BYTES_MIN)
    kept = full(memory, 1.0)
    assert torch.equal(full(memory, 2.0), torch.full((COUNT,), 2.0))
    assert memory.lend("peer", raw_bytes(torch.ones(COUNT))) is None
    assert memory.lend("peer", raw_bytes(kept)) is not None


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_FSIZE], ids=["addresses", "files"])
def test_where_the_system_sets_limits_nothing_is_lent(limit: int, tmp_path: Path) -> None:
    before = resource.getrlimit(limit)
    mapped = mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(limit, (mapped + 2**36, before[1]))
    try:
        memory = Memory(tmp_path, "owner", size=mapped + 2**37)
    finally:
        resource.setrlimit(limit, before)
    assert torch.equal(full(memory, 2.0), torch.full((COUNT,), 2.0))
    assert memory.lend("peer", raw_bytes(torch.ones(COUNT))) is None


def test_when_no_more_loans_can_be_made_nothing_is_lent_until_one_is_returned(tmp_path: Path) -> None:
    memory, peer = Memory(tmp_path, "owner"), PeerMemory(tmp_path)
    tensor = full(memory, 1.0)
    views = [borrowed(peer, lent(memory, "peer", tensor)) for _ in range(LOANS_MAX)]
    assert memory.lend("peer", raw_bytes(tensor)) is None
    views.pop(77)
    assert memory.lend("peer", raw_bytes(tensor)) is not None


def test_a_fork_of_the_borrower_returns_nothing(tmp_path: Path) -> None:
    """Data loaders fork, and drop in the child what the parent holds."""
    memory, peer = Memory(tmp_path, "owner"), PeerMemory(tmp_path)
    tensor = full(memory, 1.0)
    view = borrowed(peer, lent(memory, "peer", tensor))
    if (pid := os.fork()) == 0:
        del view
        os._exit(0)
    os.waitpid(pid, 0)
    assert memory.is_lent(tensor) and view[0] == 1.0


class LifeCycle(RuleBasedStateMachine):
    """An owner with little room and two peers, one of which may die; a reader of the contents is the oracle."""

    tensors = Bundle("tensors")
    views = Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.memory = Memory(Path(self.directory.name), "owner", size=LOANS_MAX + 12 * SHARED_BYTES_MIN)
        self.peer = PeerMemory(Path(self.directory.name))
        self.number = 0
        self.held: dict[int, tuple[Tensor, int]] = {}
        self.seen: dict[int, tuple[Tensor, int, str]] = {}
        self.graves: list[Tensor] = []
        self.dead: set[str] = set()

    @rule(target=tensors, count=st.sampled_from([COUNT, 2 * COUNT, 3 * COUNT]))
    def make(self, count: int) -> int:
        self.number += 1
        self.held[self.number] = full(self.memory, self.number, count), self.number
        return self.number

    @rule(tensor=consumes(tensors))
    def drop(self, tensor: int) -> None:
        del self.held[tensor]

    @rule(target=views, tensor=tensors, to=st.sampled_from(["a", "b"]), part=st.sampled_from([slice(None), slice(9)]))
    def send(self, tensor: int, to: str, part: slice) -> Any:
        return self.lend(*self.held[tensor], to, part)

    @rule(target=views, to=st.sampled_from(["a", "b"]))
    def send_from_elsewhere(self, to: str) -> Any:
        self.number += 1
        return self.lend(torch.full((COUNT,), float(self.number)), self.number, to, slice(None))

    def lend(self, tensor: Tensor, value: int, to: str, part: slice) -> Any:
        loan = None if to in self.dead else self.memory.lend(to, raw_bytes(tensor[part]))
        if loan is None:
            return multiple()
        self.number += 1
        self.seen[self.number] = borrowed(self.peer, loan), value, to
        return self.number

    @rule(view=consumes(views))
    def release(self, view: int) -> None:
        self.seen.pop(view, None)

    @rule()
    def die(self) -> None:
        """What a killed process had borrowed is never returned by it."""
        self.dead.add("b")
        for number in [number for number, (_, _, to) in self.seen.items() if to == "b"]:
            self.graves.append(self.seen.pop(number)[0])
        self.memory.forget("b")

    @invariant()
    def everything_is_as_it_was(self) -> None:
        for tensor, value in self.held.values():
            assert (tensor.numpy() == value).all()
        for tensor, value, _ in self.seen.values():
            assert (tensor.numpy() == value).all()

    def teardown(self) -> None:
        """When all who live have released all, everything is free."""
        self.held.clear()
        self.seen.clear()
        assert self.memory.used_bytes == 0
        self.directory.cleanup()


TestLifeCycle = LifeCycle.TestCase
TestLifeCycle.settings = settings(max_examples=60, stateful_step_count=40)


# ---- the link -------------------------------------------------------------------------------------------------------


class Pair:
    """Two ends of a link in one process."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.directory = directory
        self.inbox = Inbox(self.context, directory, "peer", [Values])
        self.memory = Memory(directory, "owner", **options)
        self.outbox = Outbox(self.context, directory, "owner", memory=self.memory)

    def send(self, number: int, *tensors: Tensor) -> None:
        self.outbox.send("peer", Values(number, tensors))

    def receive(self) -> Values:
        sender, message = self.inbox.receive()
        assert sender == "owner" and isinstance(message, Values)
        return message


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.context.destroy(linger=0)


def test_a_hundred_megabytes_pass_with_few_bytes_on_the_socket(pair: Pair) -> None:
    for number in range(10):
        pair.send(number, full(pair.memory, number, 2_500_000))
    sizes = [len(frame) for _ in range(10) for frame in pair.inbox.socket.recv_multipart()]
    assert sum(sizes) < 2000


def test_large_and_small_tensors_arrive_in_order_and_as_they_were(pair: Pair) -> None:
    lengths = [3, COUNT, 0, 2 * COUNT + 1, COUNT - 1]
    for number in range(20):
        pair.send(number, *(torch.full((length,), float(number)) for length in lengths))
    for number in range(20):
        message = pair.receive()
        assert message.number == number
        assert [len(tensor) for tensor in message.tensors] == lengths
        assert all((tensor == number).all() for tensor in message.tensors)


def test_a_view_stays_as_it_was_while_it_is_held_though_the_sender_sends_on(pair: Pair) -> None:
    pair.send(0, full(pair.memory, 0.5))
    kept = pair.receive()
    for number in range(1, 50):
        pair.send(number, full(pair.memory, number))
        assert (pair.receive().tensors[0] == number).all()
    assert (kept.tensors[0] == 0.5).all()
    assert pair.memory.used_bytes == SHARED_BYTES_MIN


def test_a_slow_receiver_neither_stops_the_sender_nor_loses_anything(tmp_path: Path) -> None:
    pair = Pair(tmp_path, size=LOANS_MAX + 3 * SHARED_BYTES_MIN)
    for number in range(30):
        pair.send(number, torch.full((COUNT,), float(number)))
    for number in range(30):
        message = pair.receive()
        assert message.number == number and (message.tensors[0] == number).all()
    pair.context.destroy(linger=0)


def test_what_a_refused_message_was_lent_is_returned(pair: Pair) -> None:
    class Other(Message, frozen=True):
        tensor: Tensor

    tensor = full(pair.memory, 1.0)
    pair.outbox.send("peer", Other(tensor))
    assert pair.memory.is_lent(tensor)
    with pytest.raises(WireError):
        pair.inbox.receive()
    assert not pair.memory.is_lent(tensor)


def test_when_a_peer_is_forgotten_what_it_was_lent_is_taken_back(pair: Pair) -> None:
    tensor = full(pair.memory, 1.0)
    pair.send(0, tensor, tensor[5:])
    pair.outbox.forget("peer")
    assert not pair.memory.is_lent(tensor)


GOOD = Loan(0, LOANS_MAX, 4 * COUNT)
MALFORMED: dict[str, Any] = {
    "a byte that is none": (LOANS_MAX, LOANS_MAX, 4 * COUNT),
    "a negative byte": (-1, LOANS_MAX, 4 * COUNT),
    "a byte of a block": (2**40, LOANS_MAX, 4 * COUNT),
    "the bytes of the loans": (0, 0, 4 * COUNT),
    "a negative start": (0, -1, 4 * COUNT),
    "a start behind the end": (0, 2**62, 4 * COUNT),
    "an end behind the end": (0, LOANS_MAX, 2**62),
    "nothing": (0, LOANS_MAX, 0),
    "less than nothing": (0, LOANS_MAX, -4),
    "a start beyond all numbers": (0, 2**64 - 1, 4 * COUNT),
    "another length than the tensor": (0, LOANS_MAX, 4 * COUNT + 4),
    "a fraction": (0, LOANS_MAX, 0.5),
    "a text": "loan",
    "too little": (0, 1),
    "no loan and no frame either": None,
}


def put(pair: Pair, sender: str, loans: Any, frames: list[bytes]) -> None:
    with pair.context.socket(zmq.PUSH) as socket:
        socket.connect(address(pair.directory, "peer"))
        socket.send_multipart([msgspec.msgpack.encode([sender, loans]), *frames])


def header() -> bytes:
    """The first frame of a message with one tensor."""
    return bytes(Codec([Values]).encode(Values(1, (torch.ones(COUNT),)))[0])


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_loan_is_refused_and_the_next_message_is_taken(what: str, pair: Pair) -> None:
    put(pair, "owner", [MALFORMED[what]], [header()])
    with pytest.raises(WireError):
        pair.inbox.receive()
    pair.send(7, torch.ones(COUNT))
    assert pair.receive().number == 7


@pytest.mark.parametrize("sender", ["nobody", "", "../owner", "x\0y", "a" * 5000], ids=lambda name: repr(name[:9]))
def test_a_loan_of_somebody_who_has_no_memory_is_refused(sender: str, pair: Pair) -> None:
    put(pair, sender, [GOOD], [header()])
    with pytest.raises(WireError):
        pair.inbox.receive()


def test_another_file_than_the_memory_of_its_owner_is_not_touched(pair: Pair) -> None:
    other = pair.directory / "file"
    other.write_bytes(b"x" * 100_000)
    (pair.directory / "other.memory").symlink_to(other)
    (pair.directory / "second.memory").symlink_to(os.readlink(pair.directory / "owner.memory"))
    for sender in ("other", "second"):
        put(pair, sender, [GOOD], [header()])
        with pytest.raises(WireError, match="is gone"):
            pair.inbox.receive()
    assert other.read_bytes() == b"x" * 100_000


@pytest.mark.parametrize("frames", [[], [header(), b"more"], [b"\xc1"]], ids=["none", "one too many", "no message"])
def test_frames_that_do_not_fit_the_loans_are_refused(frames: list[bytes], pair: Pair) -> None:
    put(pair, "owner", [GOOD], frames)
    with pytest.raises(WireError):
        pair.inbox.receive()


# ---- processes that are killed --------------------------------------------------------------------------------------

PEER = """
import sys, zmq
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from test_memory import COUNT, Values
from tether.runtimes.process.link import Inbox, Outbox
from tether.runtimes.process.memory import Memory
from tether.testing.conformance import Blobs
directory = Path(sys.argv[1])
context = zmq.Context()
inbox = Inbox(context, directory, "child", [Values])
memory = Memory(directory, "child")
outbox = Outbox(context, directory, "child", memory=memory)
outbox.send("parent", Values(0, tuple(torch.full((COUNT,), float(n)) for n in range(5))))
kept = []
while True:
    kept.append(inbox.receive()[1])
    outbox.send("parent", Values(len(kept), kept[-1].tensors))
"""


def test_after_a_kill_views_of_the_dead_stay_and_what_it_had_borrowed_is_used_again(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    inbox = Inbox(context, tmp_path, "parent", [Values])
    inbox.socket.setsockopt(zmq.RCVTIMEO, 60_000)
    memory = Memory(tmp_path, "parent")
    outbox = Outbox(context, tmp_path, "parent", memory=memory)
    command = [sys.executable, "-c", textwrap.dedent(PEER), str(tmp_path), str(Path(__file__).parent)]
    child = subprocess.Popen(command)
    try:
        _, first = inbox.receive()
        for number in range(4):
            outbox.send("child", Values(number, (full(memory, number),)))
            assert inbox.receive()[1].number == number + 1
        assert memory.used_bytes == 4 * SHARED_BYTES_MIN
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    outbox.forget("child")
    inbox.forget("child")
    assert memory.used_bytes == 0
    assert [float(tensor[-1]) for tensor in first.tensors] == [0.0, 1.0, 2.0, 3.0, 4.0]
    context.destroy(linger=0)


def test_a_region_has_no_name_and_goes_with_its_last_user(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    assert maps(tmp_path.name) == 1
    pair.send(0, torch.ones(COUNT))
    message = pair.receive()
    assert maps(tmp_path.name) == 2
    assert not [path for path in Path("/dev/shm").glob("*") if tmp_path.name in path.name]
    pair.context.destroy(linger=0)
    del pair
    assert maps(tmp_path.name) == 1 and float(message.tensors[0].sum()) == COUNT
    del message
    assert maps(tmp_path.name) == 0


def maps(title: str) -> int:
    """How many regions of that run are mapped by this process."""
    return sum(f"/memfd:{title} " in line for line in Path("/proc/self/maps").read_text().splitlines())


@contextmanager
def guarded() -> Iterator[tuple[zmq.Context[Any], Keys]]:
    """A context in which only who holds the keys can connect."""
    context: zmq.Context[Any] = zmq.Context()
    keys = Keys.make()
    authenticator = keys.start_authenticator(context)
    try:
        yield context, keys
    finally:
        authenticator.stop()
        context.destroy(linger=0)


def test_by_tcp_a_message_arrives_only_with_the_keys_of_the_run(tmp_path: Path) -> None:
    with guarded() as (context, keys):
        here, there = tmp_path / "here", tmp_path / "there"
        here.mkdir()
        there.mkdir()
        inbox = Inbox(context, there, "peer", [Values], keys=keys, host="127.0.0.1")
        memory = Memory(here, "owner")
        outboxes = [Outbox(context, here, "stranger", keys=stranger) for stranger in (None, Keys.make())]
        outboxes.append(Outbox(context, here, "owner", memory=memory, keys=keys))
        for number, outbox in enumerate(outboxes):
            outbox.addresses["peer"] = inbox.address
            outbox.send("peer", Values(number, (full(memory, 7.0),)))
        sender, message = inbox.receive()
        assert sender == "owner" and isinstance(message, Values) and message.number == 2
        assert bool((message.tensors[0] == 7.0).all()) and not memory.is_lent(message.tensors[0])
        assert not inbox.socket.poll(300)


def test_who_shares_the_directory_is_lent_memory_although_it_has_an_address(tmp_path: Path) -> None:
    with guarded() as (context, keys):
        inbox = Inbox(context, tmp_path, "peer", [Values], keys=keys, host="127.0.0.1")
        memory = Memory(tmp_path, "owner")
        outbox = Outbox(context, tmp_path, "owner", memory=memory, keys=keys)
        outbox.addresses["peer"] = inbox.address
        values = full(memory, 7.0)
        outbox.send("peer", Values(0, (values,)))
        _, message = inbox.receive()
        assert isinstance(message, Values) and memory.is_lent(values)


class Square(Blobs):
    """One layer that is large enough to be lent, with momentum."""

    def model(self) -> nn.Module:
        return nn.Linear(2, COUNT)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_the_state_of_an_optimizer_is_copied_once_to_where_it_can_be_lent(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "owner")
    learner = Learner(Square(), iter(()), node="worker-0", seed=0, empty=memory.empty)
    learner.step(torch.ones(learner.parameter_count), 1.0)
    (momentum,) = (kept["momentum_buffer"] for kept in learner.state()["optimizer"]["state"].values())
    before = memory.used_bytes
    lent(memory, "reader", momentum)
    assert memory.used_bytes == before, "sending it has copied it again"
    learner.step(torch.ones(learner.parameter_count), 1.0)
    assert torch.equal(momentum, torch.ones_like(momentum)), "a later step has changed it"
