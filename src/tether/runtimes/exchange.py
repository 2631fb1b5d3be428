"""Broadcasts and reductions as Spark's own: jobs whose tasks go to the agents of their executors.

A member offers what it gives to a reduction, and tells the driver so. When all have offered, the driver runs a
treeAggregate whose tasks fetch the offers; its result goes to the root. A broadcast is a broadcast variable; a task on
each executor tells the agent there in which file Spark has put it, since a running task cannot be given one. Members
and tasks meet at the agent's desk, a socket in its directory, and what is offered is lent in shared memory.

A task that is sent to a wrong executor, or whose agent has died, comes back with nothing. Whoever lives and is missing
then is asked again by the next job.
"""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from torch import Tensor

from tether.errors import RunError, WireError
from tether.machine import Broadcast, Broadcasted, Event, Message, Reduce, Reduced, stream_of
from tether.runtimes.collectives import Down, Up
from tether.runtimes.driver import DRIVER
from tether.runtimes.link import Opener, enveloped
from tether.runtimes.process import NodeProcess
from tether.wire import Codec, Frame

#: how long a task waits at a desk
DESK_SECONDS = 20.0

#: a sum: values, weight, and who is in it with the steps it told
Sum = tuple[Any, float, dict[str, int]]


class Opened(Message, frozen=True):
    """Root to driver: a reduction can begin."""

    tag: str
    members: tuple[str, ...]


class Offered(Message, frozen=True):
    """Member to driver: its part of a reduction can be fetched."""

    tag: str


class Fetch(Message, frozen=True):
    """Task to agent: what do you give to this reduction? If `lend`, it may stay where it is."""

    tag: str
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

    def __init__(self, node: str, send: Callable[[str, Message], Any], *_: Any) -> None:
        self.node = node
        self._send = send
        #: the newest of each stream
        self._offers: dict[str, Up] = {}
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
            covers = {self.node: effect.steps}
            offer = Up(effect.tag, effect.members, effect.values, effect.weight, covers)
            self._offers[stream_of(effect.tag)] = offer
            self._send(DRIVER, Offered(effect.tag))
        return []

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

    def offer(self, tag: str) -> Up | None:
        """What a task shall be given."""
        offer = self._offers.get(stream_of(tag))
        return offer if offer is not None and offer.tag == tag else None


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
            offer = self._offers.offer(fetch.tag) or Nothing()
        memory, to = self._process.memory, f"tasks of {stream_of(fetch.tag)}"
        memory.forget(to)  # a task that was killed has returned nothing
        lend = partial(memory.lend, to) if fetch.lend else _lend_nothing
        return enveloped(self._answers, self._offers.node, offer, lend)


def _lend_nothing(_: Frame) -> None:
    return None


class _Plain(pickle.Unpickler):
    """Reads what Spark has written, if it is nothing but bytes in a list."""

    def find_class(self, module: str, name: str) -> Any:
        raise WireError(f"a broadcast with a {module}.{name}")


def _read(path: str) -> list[Frame]:
    with open(path, "rb") as file:
        frames: list[Frame] = _Plain(file).load()
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
        opener = Opener([Up, Taken, Nothing], Path(directory))
        return opener.open([frame.buffer for frame in socket.recv_multipart(copy=False)])[1]


@cache
def _have_less_collected() -> None:
    """Workers look for garbage after every task, for 0.2 s where torch is imported. What is imported is none."""
    gc.collect()
    gc.freeze()


def fetched(tag: str) -> Callable[[Iterator[tuple[str, str]]], Iterator[Sum | None]]:
    """For the agents of a partition, with their directories: what they offer, times its weight."""

    def fetch(agents: Iterator[tuple[str, str]]) -> Iterator[Sum | None]:
        for _, directory in agents:
            try:
                offer = ask(directory, Fetch(tag))
            except (RunError, WireError):  # where one process may not see the memory of another
                offer = ask(directory, Fetch(tag, lend=False))
            yield (
                (_portable(offer.values * offer.weight), offer.weight, offer.covers) if isinstance(offer, Up) else None
            )

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
    """The sum of two sums; the first is used up."""
    if one is None or other is None:
        return one or other
    values = one[0]
    values += other[0]
    return values, one[1] + other[1], one[2] | other[2]


def _portable(values: Tensor) -> Any:
    """As Spark carries it with the fewest copies: an array, for the types that there are arrays of."""
    return values if values.dtype is torch.bfloat16 else values.numpy()


def tensor(values: Any) -> Tensor:
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values
