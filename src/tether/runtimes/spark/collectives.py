"""Broadcasts and reductions by Spark's own means: jobs whose tasks talk to the agents of their executors.

In a reduction, each member offers its contribution and reports that to the driver. When all have offered, the driver
runs a treeAggregate whose tasks fetch the offers, and sends its result to the root. An offer that is larger than the
driver has room for is reduced in parts. A broadcast is a broadcast variable. A running task cannot be given one, so a
task on each executor tells the agent there in which file Spark has stored it. Tasks reach the agent at a socket in its
directory (`AgentServer`), and the agent lends them its offers in shared memory.

A task that runs on the wrong executor, or whose agent has died, returns nothing. The next job asks the members again
that are alive and missing.

In a run that compresses, agents encode their offers and the root encodes its broadcasts, as messages are encoded in
other runtimes. Sums are computed in full precision and encoded again to travel on. The process that sends a sum keeps
the rounding error, and adds it to the next sum that it sends.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, Union, cast

import torch
import zmq
from torch import Tensor

from tether.core.compress import Compressor, FeedbackKey, Packed, code_of, unpack
from tether.core.effects import Broadcast, Reduce
from tether.core.events import Broadcasted, Event, Reduced
from tether.core.message import Message, Stream, Tag
from tether.core.wire import Codec, Frame
from tether.errors import RunError, WireError
from tether.runtimes.collectives import CollectiveContext, CollectiveMessage, CompressibleMessage, weighted
from tether.runtimes.process.control import DRIVER
from tether.runtimes.process.link import Opener, enveloped
from tether.runtimes.process.node import NodeProcess

M = TypeVar("M")

#: how long a task waits for the answer of an agent
ANSWER_SECONDS = 20.0
#: the name of an agent's socket for tasks, in its directory
SOCKET = "tasks"


class Opened(Message, frozen=True):
    """Root to driver: a reduction can begin."""

    tag: Tag
    members: tuple[str, ...]


class Offered(Message, frozen=True):
    """Member to driver: its contribution to a reduction can be fetched, in this number of parts."""

    tag: Tag
    parts: int


class Contribution(CompressibleMessage, frozen=True):
    """Agent to task, and task to task: the sum of some members' contributions to a reduction, or one part of it."""

    tag: Tag
    values: Tensor
    weight: float
    #: the number of steps of each member in the sum
    steps: dict[str, int]
    part: int = 0

    @property
    def title(self) -> str:
        return f"reduction of {self.tag}"

    @property
    def lane(self) -> str:
        return f"reductions of {self.tag.stream} {self.part}"


class Total(CollectiveMessage, frozen=True):
    """Driver to root, in full precision: the result of a reduction. No member contributed if `steps` is empty."""

    tag: Tag
    values: Tensor
    weight: float
    steps: dict[str, int]

    @property
    def title(self) -> str:
        return f"reduction of {self.tag}"


class Announcement(CompressibleMessage, Generic[M], frozen=True):
    """Root to driver, and driver to all agents: a broadcast."""

    stream: Stream
    number: int
    members: tuple[str, ...]
    message: M

    @property
    def title(self) -> str:
        return f"broadcast of {self.stream}"

    @property
    def lane(self) -> str:
        return f"broadcasts of {self.stream}"


def message_types(types: tuple[type[Message], ...]) -> tuple[Any, ...]:
    """The messages that carry the collectives of a protocol whose own messages are of these types."""
    return Contribution, Total, Announcement[Union[types]]  # type: ignore[valid-type]  # noqa: UP007


class Fetch(Message, frozen=True):
    """Task to agent: a request for its contribution to this reduction. With `lend`, it may be lent in shared memory."""

    tag: Tag
    part: int
    lend: bool = True


class BroadcastFile(Message, frozen=True):
    """Task to agent: this file holds a broadcast."""

    path: str


class Acknowledged(Message, frozen=True):
    """Agent to task: it has received the broadcast."""


class NotFound(Message, frozen=True):
    """Agent to task: it has no such contribution."""


class SparkCollectives:
    """One node's side of broadcasts and reductions."""

    def __init__(self, context: CollectiveContext, *, part_bytes: float = math.inf) -> None:
        """Offers of more than `part_bytes` are cut into parts."""
        self.node = context.node
        self._send = context.send
        self._context = context
        self._part_bytes = part_bytes
        #: the newest of each stream: its tag, and its parts as they travel
        self._offers: dict[Stream, tuple[Tag, list[Message]]] = {}
        self._numbers: dict[Stream, int] = {}
        #: at the root: reductions without a result yet
        self._open: set[Tag] = set()

    def broadcast(self, effect: Broadcast) -> None:
        number = self._numbers[effect.stream] = self._numbers.get(effect.stream, -1) + 1
        self._send(DRIVER, Announcement(effect.stream, number, effect.members, effect.message))

    def reduce(self, effect: Reduce) -> list[Event]:
        if effect.members[0] == self.node:
            self._open.add(effect.tag)
            self._send(DRIVER, Opened(effect.tag, effect.members))
        elif effect.values is not None:
            values = weighted(effect.values, effect.weight, self._context.empty)
            weight, steps = effect.weight, {self.node: effect.steps}
            parts = [
                Contribution(effect.tag, piece, weight, steps, part) for part, piece in enumerate(self._cut(values))
            ]
            self._offers[effect.tag.stream] = effect.tag, [self._context.outgoing(DRIVER, part) for part in parts]
            self._send(DRIVER, Offered(effect.tag, len(parts)))
        return []

    def _cut(self, values: Tensor) -> list[Tensor]:
        size = values.numel() * values.element_size()
        if size <= self._part_bytes:
            return [values]
        parameter_count = self._context.parameter_count
        if 0 < parameter_count < self._context.length == values.numel():  # buffers are not encoded as parameters are
            return [*self._cut(values[:parameter_count]), values[parameter_count:]]
        return list(values.tensor_split(math.ceil(size / self._part_bytes)))

    def receive(self, message: Any) -> list[Event]:
        if isinstance(message, Total):
            if message.tag not in self._open:  # a root that gives up waiting opens it again: two results
                return []
            self._open.remove(message.tag)
            total = message.values if message.steps else None
            contributors = tuple(sorted(message.steps))
            steps = tuple(message.steps[name] for name in contributors)
            return [Reduced(message.tag, total, message.weight, contributors, steps)]
        if message.number <= self._numbers.get(message.stream, -1):
            return []
        self._numbers[message.stream] = message.number
        return [Broadcasted(message.stream, message.members, message.message)]

    def lost(self, peer: str) -> list[Event]:
        return []

    def offer(self, tag: Tag, part: int) -> Message | None:
        """A part of this node's newest contribution, for a task; None if it has no such part."""
        newest, parts = self._offers.get(tag.stream, (None, []))
        return parts[part] if newest == tag and part < len(parts) else None


class AgentServer:
    """Answers the tasks of an agent's executor: lends them offers, and accepts broadcasts from them."""

    def __init__(
        self, process: NodeProcess, collectives: SparkCollectives, directory: Path, types: Iterable[Any]
    ) -> None:
        self._process = process
        self._collectives = collectives
        self._directory = directory
        self._requests = Codec([Fetch, BroadcastFile, *types])
        self._answers = Codec([Message])
        self._closing = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(_address(directory))
        self._thread = threading.Thread(target=self._serve, name="tasks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=1000)
        Path(self._directory, SOCKET).unlink(missing_ok=True)  # so that later tasks do not wait for an answer

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                if self._socket.poll(100):
                    task, *frames = (frame.buffer for frame in self._socket.recv_multipart(copy=False))
                    with suppress(
                        WireError, FileNotFoundError
                    ):  # a malformed request, or a file that Spark has removed
                        answer = self._answer(self._requests.decode(frames))
                        self._socket.send_multipart([bytes(task), *answer], copy=False)
        except Exception as error:
            self._process.fail(error)

    def _answer(self, message: Message) -> list[Frame]:
        if isinstance(message, Fetch):
            return self._offer(message)
        if isinstance(message, BroadcastFile):
            message = self._requests.decode(_read(message.path))
        with self._process.lock:
            self._process.handle(DRIVER, message)
        return enveloped(self._answers, self._collectives.node, Acknowledged(), _lend_nothing)

    def _offer(self, fetch: Fetch) -> list[Frame]:
        with self._process.lock:
            offer = self._collectives.offer(fetch.tag, fetch.part) or NotFound()
        memory, to = self._process.memory, f"tasks of {fetch.tag.stream} {fetch.part}"
        memory.forget(to)  # a task that was killed has not returned its loan
        lend = partial(memory.lend, to) if fetch.lend else _lend_nothing
        return enveloped(self._answers, self._collectives.node, offer, lend)


def _lend_nothing(_: Frame) -> None:
    return None


#: pickle's opcodes for bytes, and the size of the length that follows each
_BYTES = {pickle.SHORT_BINBYTES: 1, pickle.BINBYTES: 4, pickle.BINBYTES8: 8, pickle.BYTEARRAY8: 8}
#: the opcodes that pickle writes around bytes in a list, and the size of what follows each
_AROUND = {
    pickle.PROTO: 1,
    pickle.FRAME: 8,
    **dict.fromkeys((pickle.EMPTY_LIST, pickle.MARK, pickle.MEMOIZE, pickle.APPEND, pickle.APPENDS), 0),
}


def _read(path: str) -> list[Frame]:
    """The bytes in a list that Spark has pickled. Nothing is unpickled; a file with anything else is refused."""
    frames: list[Frame] = []
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while (code := file.read(1)) != pickle.STOP:
            if code in _AROUND:
                file.read(_AROUND[code])
                continue
            length = int.from_bytes(file.read(_BYTES.get(code, 0)), "little")
            if code not in _BYTES or length > size - file.tell():
                raise WireError(
                    f"a broadcast that is not a list of bytes: {code!r} before byte {file.tell()} of {size}"
                )
            file.readinto(frame := bytearray(length))
            frames.append(memoryview(frame))
    return frames


def _address(directory: Path) -> str:
    return f"ipc://{directory}/{SOCKET}"


# ---- in tasks --------------------------------------------------------------------------------------------------------


def ask(directory: str, request: Message | list[Frame]) -> Message | None:
    """Send a request to the agent with this directory; its answer, or None if there is none in time."""
    _freeze_garbage_collector()
    if not Path(directory, SOCKET).exists():
        return None
    frames = Codec([Message]).encode(request) if isinstance(request, Message) else request
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.set_hwm(0)
        socket.connect(_address(Path(directory)))
        socket.send_multipart(frames, copy=False)
        if not socket.poll(round(ANSWER_SECONDS * 1000)):
            return None
        opener = Opener([Contribution, Packed[Contribution], Acknowledged, NotFound], Path(directory))
        return opener.open([frame.buffer for frame in socket.recv_multipart(copy=False)])[1]


@cache
def _freeze_garbage_collector() -> None:
    """Exempt imported modules from garbage collection: Spark collects after every task, for 0.2 s with torch."""
    gc.collect()
    gc.freeze()


class Sum:
    """The sum of some members' contributions to a reduction, or one member's offer as it was fetched."""

    def __init__(
        self, message: Contribution | Packed[Contribution], run: str, code: _Code | None = None, *, owned: bool = False
    ) -> None:
        """`code`: encode it so when it travels. `owned`: its values may be overwritten."""
        self._message = message
        self._run = run
        self._code = code if isinstance(message, Contribution) else _Code.of(message)
        self._owned = owned

    @property
    def contribution(self) -> Contribution:
        """The sum in full precision."""
        if isinstance(self._message, Packed):
            self._message, self._owned = cast(Contribution, unpack(self._message)), True
        return self._message

    def plus(self, other: Sum) -> Sum:
        """The sum of both, which may overwrite either."""
        one, more = self.contribution, other.contribution
        values = one.values.add_(more.values) if self._owned else one.values + more.values
        total = Contribution(one.tag, values, one.weight + more.weight, one.steps | more.steps, one.part)
        return Sum(total, self._run, self._code or other._code, owned=True)

    def __reduce__(self) -> Any:
        if isinstance(self._message, Contribution) and self._code is not None:
            self._message = _encoded(self._run, self._code, self._message)  # once: it uses up the last rounding error
        message = self._message
        plain = message.message if isinstance(message, Packed) else message
        coded = (*message.values, *message.scales) if isinstance(message, Packed) else ()
        arrays = [_array(tensor) for tensor in (plain.values, *coded)]
        return _unpickled_sum, (self._run, (plain.tag, plain.weight, plain.steps, plain.part), arrays)


class _Code(NamedTuple):
    """How the tensor of a sum is encoded: the name of the code, and how many of its values are encoded."""

    name: str
    encoded: int
    length: int

    @staticmethod
    def of(packed: Packed[Contribution]) -> _Code:
        (values,) = packed.values
        return _Code(code_of(values), values.numel(), values.numel() + packed.message.values.numel())


#: by run, of which there is one at a time: the compressors of this process, which keep the rounding errors
_compressors: dict[str, dict[tuple[str, _Code], Compressor]] = {}


def _encoded(run: str, code: _Code, total: Contribution) -> Contribution | Packed[Contribution]:
    if run not in _compressors:
        _compressors.clear()
        _compressors[run] = {}
    lane = f"{total.tag.stream} {total.part}"
    compressor = _compressors[run].setdefault((lane, code), Compressor(code.name, code.encoded, code.length))
    key = FeedbackKey("the next of the tree", lane)
    return cast(Contribution | Packed[Contribution], compressor.pack(key, total))


def _unpickled_sum(run: str, fields: tuple[Tag, float, dict[str, int], int], arrays: list[tuple[str, Any]]) -> Sum:
    """The inverse of `Sum.__reduce__`."""
    values, *coded = (_tensor(array) for array in arrays)
    tag, weight, steps, part = fields
    plain = Contribution(tag, values, weight, steps, part)
    return Sum(Packed(plain, (0,), (coded[0],), (coded[1],)) if coded else plain, run, owned=True)


def _array(values: Tensor) -> tuple[str, Any]:
    """The type and the bytes of a tensor, as a numpy array, which Spark carries with the fewest copies."""
    return str(values.dtype).removeprefix("torch."), values.detach().contiguous().view(torch.uint8).numpy()


def _tensor(array: tuple[str, Any]) -> Tensor:
    dtype, values = array
    return torch.from_numpy(values).view(getattr(torch, dtype))


def fetch_task(tag: Tag, part: int, run: str) -> Callable[[Iterator[tuple[str, str]]], Iterator[Sum | None]]:
    """A function for `mapPartitions` that fetches this part from each agent, given by its name and directory."""

    def fetch(agents: Iterator[tuple[str, str]]) -> Iterator[Sum | None]:
        for _, directory in agents:
            try:
                offer = ask(directory, Fetch(tag, part))
            except (RunError, WireError):  # this process may not attach the agent's memory
                offer = ask(directory, Fetch(tag, part, lend=False))
            yield Sum(offer, run) if isinstance(offer, Contribution | Packed) else None

    return fetch


def deliver_task(broadcast: Any) -> Callable[[Iterator[tuple[str, str]]], Iterator[str]]:
    """A function for `mapPartitions` that hands each agent a broadcast variable; it yields those that received it."""

    def deliver(agents: Iterator[tuple[str, str]]) -> Iterator[str]:
        path = getattr(broadcast, "_path", None)  # there is none if Spark encrypts its files
        for name, directory in agents:
            if isinstance(ask(directory, BroadcastFile(path) if path else broadcast.value), Acknowledged):
                yield name

    return deliver


def add(one: Sum | None, other: Sum | None) -> Sum | None:
    """The sum of two sums, which may overwrite either."""
    if one is None or other is None:
        return one or other
    return one.plus(other)
