"""Broadcasts and reductions as Spark's own: jobs whose tasks go to the agents of their executors.

A member offers what it gives to a reduction, and tells the driver so. When all have offered, the driver runs a
treeAggregate whose tasks fetch the offers; its result goes to the root. What is larger than the driver has room for is
offered and reduced in parts. A broadcast is a broadcast variable; a task on
each executor tells the agent there in which file Spark has put it, since a running task cannot be given one. Members
and tasks meet at the agent's desk, a socket in its directory, and what is offered is lent in shared memory.

A task that is sent to a wrong executor, or whose agent has died, comes back with nothing. Whoever lives and is missing
then is asked again by the next job.

In a run that compresses, agents encode their offers and the root its broadcasts, as messages are encoded elsewhere.
Sums are made in full precision and encoded again to travel on; the process that has sent a sum keeps what its code
lost, and adds it to the next that it sends.
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
from typing import Any, NamedTuple, cast

import torch
import zmq
from torch import Tensor

from tether.compress import Compressor, Packed, Stream, code_of, unpack
from tether.errors import RunError, WireError
from tether.machine import Broadcast, Broadcasted, Event, Message, Reduce, Reduced, stream_of
from tether.runtimes.collectives import Down, Up
from tether.runtimes.driver import DRIVER
from tether.runtimes.link import Opener, enveloped
from tether.runtimes.process import NodeProcess
from tether.vector import Empty
from tether.wire import Codec, Frame

#: how long a task waits at a desk
DESK_SECONDS = 20.0


class Opened(Message, frozen=True):
    """Root to driver: a reduction can begin."""

    tag: str
    members: tuple[str, ...]


class Offered(Message, frozen=True):
    """Member to driver: what it gives to a reduction can be fetched, in so many parts."""

    tag: str
    parts: int


class Fetch(Message, frozen=True):
    """Task to agent: what do you give to this reduction? If `lend`, it may stay where it is."""

    tag: str
    part: int
    lend: bool = True


class Lies(Message, frozen=True):
    """Task to agent: there is a broadcast in this file."""

    path: str


class Taken(Message, frozen=True):
    """Agent to task: it has the broadcast."""


class Nothing(Message, frozen=True):
    """Agent to task: it has nothing of that name."""


class Offers:
    """One node's part in the exchanges."""

    messages: tuple[type[Message], ...] = (Up, Down)

    def __init__(
        self,
        node: str,
        send: Callable[[str, Message], Any],
        bytes_scale: float = 1.0,
        parameter_count: int = 0,
        length: int = 0,
        empty: Empty = torch.empty,
        outgoing: Callable[[str, Message], Message] = lambda to, message: message,
        *,
        part_bytes: float = math.inf,
    ) -> None:
        """`empty` makes tensors that can be lent; `outgoing` gives a message as it travels.

        `length` is that of the vector, whose buffers begin at `parameter_count`. Offers of more than `part_bytes` are
        cut.
        """
        self.node = node
        self._send = send
        self._parameter_count = parameter_count
        self._length = length
        self._part_bytes = part_bytes
        self._empty = empty
        self._outgoing = outgoing
        #: the newest of each stream: its tag, and its parts as they travel
        self._offers: dict[str, tuple[str, list[Message]]] = {}
        self._numbers: dict[str, int] = {}
        #: at the root: reductions that were not answered yet
        self._open: set[str] = set()

    def broadcast(self, effect: Broadcast) -> None:
        number = self._numbers[effect.stream] = self._numbers.get(effect.stream, -1) + 1
        self._send(DRIVER, Down(effect.stream, number, effect.members, (), effect.message))

    def reduce(self, effect: Reduce) -> list[Event]:
        if effect.members[0] == self.node:
            self._open.add(effect.tag)
            self._send(DRIVER, Opened(effect.tag, effect.members))
        elif effect.values is not None:
            values = effect.values
            if effect.weight != 1.0:
                scaled = self._empty(len(values), dtype=values.dtype, device=values.device)
                values = torch.mul(values, effect.weight, out=scaled)
            pieces, told = self._cut(values), (effect.weight, {self.node: effect.steps})
            ups = [Up(effect.tag, effect.members, piece, *told, part, len(pieces)) for part, piece in enumerate(pieces)]
            self._offers[stream_of(effect.tag)] = effect.tag, [self._outgoing(DRIVER, up) for up in ups]
            self._send(DRIVER, Offered(effect.tag, len(ups)))
        return []

    def _cut(self, values: Tensor) -> list[Tensor]:
        size = values.numel() * values.element_size()
        if size <= self._part_bytes:
            return [values]
        if 0 < self._parameter_count < self._length == values.numel():  # buffers are not encoded as parameters are
            return [*self._cut(values[: self._parameter_count]), values[self._parameter_count :]]
        return list(values.tensor_split(math.ceil(size / self._part_bytes)))

    def receive(self, message: Any) -> list[Event]:
        if isinstance(message, Up):
            if message.tag not in self._open:  # one that was cut short is answered twice if its job had begun
                return []
            self._open.remove(message.tag)
            total = message.values if message.covers else None
            contributors = tuple(sorted(message.covers))
            steps = tuple(message.covers[name] for name in contributors)
            return [Reduced(message.tag, total, message.weight, contributors, steps)]
        if message.number <= self._numbers.get(message.stream, -1):
            return []
        self._numbers[message.stream] = message.number
        return [Broadcasted(message.stream, message.members, message.message)]

    def lost(self, peer: str) -> list[Event]:
        return []

    def offer(self, tag: str, part: int) -> Message | None:
        """What a task shall be given."""
        newest, parts = self._offers.get(stream_of(tag), ("", []))
        return parts[part] if newest == tag and part < len(parts) else None


class Desk:
    """Where the tasks of an executor meet its agent."""

    def __init__(self, process: NodeProcess, offers: Offers, directory: Path, types: Iterable[Any]) -> None:
        self._process = process
        self._offers = offers
        self._directory = directory
        self._questions = Codec([Fetch, Lies, *types])
        self._answers = Codec([Message])
        self._over = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(_desk(directory))
        self._thread = threading.Thread(target=self._serve, name="desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._context.destroy(linger=1000)
        Path(self._directory, "desk").unlink(missing_ok=True)  # so that whoever comes now need not wait

    def _serve(self) -> None:
        try:
            while not self._over.is_set():
                if self._socket.poll(100):
                    task, *frames = (frame.buffer for frame in self._socket.recv_multipart(copy=False))
                    with suppress(WireError, FileNotFoundError):  # of who has no answer, or is late
                        answer = self._answer(self._questions.decode(frames))
                        self._socket.send_multipart([bytes(task), *answer], copy=False)
        except Exception as error:
            self._process.fail(error)

    def _answer(self, message: Message) -> list[Frame]:
        if isinstance(message, Fetch):
            return self._offer(message)
        if isinstance(message, Lies):
            message = self._questions.decode(_read(message.path))
        with self._process.lock:
            self._process.receive(DRIVER, message)
        return enveloped(self._answers, self._offers.node, Taken(), _lend_nothing)

    def _offer(self, fetch: Fetch) -> list[Frame]:
        with self._process.lock:
            offer = self._offers.offer(fetch.tag, fetch.part) or Nothing()
        memory, to = self._process.memory, f"tasks of {stream_of(fetch.tag)} {fetch.part}"
        memory.forget(to)  # a task that was killed has returned nothing
        lend = partial(memory.lend, to) if fetch.lend else _lend_nothing
        return enveloped(self._answers, self._offers.node, offer, lend)


def _lend_nothing(_: Frame) -> None:
    return None


#: how pickle writes bytes: what comes before them, and of how many bytes the number is that says how many they are
_BYTES = {pickle.SHORT_BINBYTES: 1, pickle.BINBYTES: 4, pickle.BINBYTES8: 8, pickle.BYTEARRAY8: 8}
#: what pickle writes around bytes in a list, and how many bytes come with it
_AROUND = {
    pickle.PROTO: 1,
    pickle.FRAME: 8,
    **dict.fromkeys((pickle.EMPTY_LIST, pickle.MARK, pickle.MEMOIZE, pickle.APPEND, pickle.APPENDS), 0),
}


def _read(path: str) -> list[Frame]:
    """The bytes in a list that Spark has pickled; a file with anything else in it is refused, and nothing unpickled."""
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


def _desk(directory: Path) -> str:
    return f"ipc://{directory}/desk"


# ---- what tasks do ---------------------------------------------------------------------------------------------------


def ask(directory: str, question: Message | list[Frame]) -> Message | None:
    """A question at a desk and the answer to it, if there is one."""
    _have_less_collected()
    if not Path(directory, "desk").exists():
        return None
    frames = Codec([Message]).encode(question) if isinstance(question, Message) else question
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.set_hwm(0)
        socket.connect(_desk(Path(directory)))
        socket.send_multipart(frames, copy=False)
        if not socket.poll(round(DESK_SECONDS * 1000)):
            return None
        opener = Opener([Up, Packed[Up], Taken, Nothing], Path(directory))
        return opener.open([frame.buffer for frame in socket.recv_multipart(copy=False)])[1]


@cache
def _have_less_collected() -> None:
    """Workers look for garbage after every task, for 0.2 s where torch is imported. What is imported is none."""
    gc.collect()
    gc.freeze()


class Sum:
    """The sum of what some members give to a reduction, or the offer of one as it came."""

    def __init__(self, message: Up | Packed[Up], run: str, code: _Code | None = None, *, owned: bool = False) -> None:
        """`code` is how it shall travel, if not as it is; `owned`, that its values may be overwritten."""
        self._message = message
        self._run = run
        self._code = code if isinstance(message, Up) else _Code.of(message)
        self._owned = owned

    @property
    def up(self) -> Up:
        """The sum in full precision."""
        if isinstance(self._message, Packed):
            self._message, self._owned = cast(Up, unpack(self._message)), True
        return self._message

    def plus(self, other: Sum) -> Sum:
        """The sum of two; both are used up."""
        one, more = self.up, other.up
        values = one.values.add_(more.values) if self._owned else one.values + more.values
        total = Up(one.tag, (), values, one.weight + more.weight, one.covers | more.covers, one.part)
        return Sum(total, self._run, self._code or other._code, owned=True)

    def __reduce__(self) -> Any:
        if isinstance(self._message, Up) and self._code is not None:
            self._message = _encoded(self._run, self._code, self._message)  # once, since it takes what was lost before
        message = self._message
        up = message.message if isinstance(message, Packed) else message
        coded = (*message.values, *message.scales) if isinstance(message, Packed) else ()
        arrays = [_array(tensor) for tensor in (up.values, *coded)]
        return _revived, (self._run, (up.tag, up.weight, up.covers, up.part), arrays)


class _Code(NamedTuple):
    """How a tensor of a sum is encoded: its code, and how many of its values are."""

    name: str
    encoded: int
    length: int

    @staticmethod
    def of(packed: Packed[Up]) -> _Code:
        (values,) = packed.values
        return _Code(code_of(values), values.numel(), values.numel() + packed.message.values.numel())


#: of the run that this process works for: what encodes its sums, by stream, with what they have lost
_compressors: dict[str, dict[tuple[str, _Code], Compressor]] = {}


def _encoded(run: str, code: _Code, total: Up) -> Up | Packed[Up]:
    if run not in _compressors:
        _compressors.clear()
        _compressors[run] = {}
    stream = f"{stream_of(total.tag)} {total.part}"
    made = _compressors[run].setdefault((stream, code), Compressor(code.name, code.encoded, code.length))
    return cast(Up | Packed[Up], made.pack(Stream("the next of the tree", stream), total))


def _revived(run: str, told: tuple[str, float, dict[str, int], int], arrays: list[tuple[str, Any]]) -> Sum:
    """What `Sum.__reduce__` has taken apart."""
    values, *coded = (_tensor(array) for array in arrays)
    tag, weight, covers, part = told
    up = Up(tag, (), values, weight, covers, part)
    return Sum(Packed(up, (0,), (coded[0],), (coded[1],)) if coded else up, run, owned=True)


def _array(values: Tensor) -> tuple[str, Any]:
    """As Spark carries it with the fewest copies: an array, of a type that there are arrays of."""
    return str(values.dtype).removeprefix("torch."), values.detach().contiguous().view(torch.uint8).numpy()


def _tensor(array: tuple[str, Any]) -> Tensor:
    dtype, values = array
    return torch.from_numpy(values).view(getattr(torch, dtype))


def fetched(tag: str, part: int, run: str) -> Callable[[Iterator[tuple[str, str]]], Iterator[Sum | None]]:
    """For the agents of a partition, with their directories: what they offer as that part."""

    def fetch(agents: Iterator[tuple[str, str]]) -> Iterator[Sum | None]:
        for _, directory in agents:
            try:
                offer = ask(directory, Fetch(tag, part))
            except (RunError, WireError):  # where one process may not see the memory of another
                offer = ask(directory, Fetch(tag, part, lend=False))
            yield Sum(offer, run) if isinstance(offer, Up | Packed) else None

    return fetch


def delivered(broadcast: Any) -> Callable[[Iterator[tuple[str, str]]], Iterator[str]]:
    """For the agents of a partition: those that have taken the frames of a broadcast variable."""

    def deliver(agents: Iterator[tuple[str, str]]) -> Iterator[str]:
        path = getattr(broadcast, "_path", None)  # none, if Spark encrypts its files
        for name, directory in agents:
            if isinstance(ask(directory, Lies(path) if path else broadcast.value), Taken):
                yield name

    return deliver


def add(one: Sum | None, other: Sum | None) -> Sum | None:
    """The sum of two sums, which are used up."""
    if one is None or other is None:
        return one or other
    return one.plus(other)
