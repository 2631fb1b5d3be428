"""A node as a task of a long Spark job.

Spark starts one agent on each executor, and another when an executor has died. An agent has a connection to the driver
for as long as it lives, its lifeline: there it is told which node it is, and whichever of the two finds it closed knows
that the other is gone, long before Spark's heartbeats tell. An orphan, whose driver has given it up, ends there as
well: whoever takes its place has another name, so nothing of it is mistaken for the other's.

What an agent is given to build comes with Spark's task, as the code of any task does. Nothing else that crosses the
network is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import socket
import tempfile
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import zmq

from tether.errors import RunError
from tether.machine import Node
from tether.runtimes.exchange import Desk, Offers
from tether.runtimes.process import Birth, NodeProcess, live, message_types

NONCE_BYTES = 32
#: how long the two ends of a lifeline wait for each other's first words
GREETING_SECONDS = 30.0


@dataclass(frozen=True)
class Meeting:
    """Where agents find the driver, and the secret that tells them from strangers."""

    host: str
    port: int
    secret: bytes

    def sign(self, nonce: bytes, text: bytes) -> bytes:
        return hmac.digest(self.secret, nonce + text, hashlib.sha256)


class Here(msgspec.Struct, frozen=True, array_like=True):
    """Agent to driver: which of the job's tasks it is, its process, and where it keeps its sockets."""

    index: int
    pid: int
    directory: str
    #: where it can be fed
    host: str
    port: int


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver to agent: the node that it is."""

    node: Node


class Fenced(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver to agent: there is no place for it."""

    reason: str


Answer = Welcome | Fenced


def be_agent(index: int, birth: Birth, meeting: Meeting) -> str:
    """Be the node that the driver says, until the run is over; the name it had."""
    directory = Path(tempfile.mkdtemp(prefix="tether-"))
    try:
        with socket.create_connection((meeting.host, meeting.port), GREETING_SECONDS) as lifeline:
            host = lifeline.getsockname()[0]
            birth = replace(birth, directory=directory, host=host)
            answer = _greet(lifeline, meeting, Here(index, os.getpid(), str(directory), host, 0))
            if isinstance(answer, Fenced):
                return ""
            lifeline.settimeout(None)
            given_up = threading.Event()
            with ExitStack() as at_the_end:

                def follow(process: NodeProcess) -> None:
                    threading.Thread(target=_follow, args=(lifeline, process, given_up), daemon=True).start()
                    if isinstance(process.exchange, Offers):
                        types = message_types(birth.plan.messages, compressed=False)
                        at_the_end.callback(Desk(process, process.exchange, directory, types).close)

                live(birth, answer.node, zmq.Context(), follow)
            if given_up.is_set():
                raise RunError(f"{answer.node.name} was given up by its driver")  # so that Spark starts another
            return answer.node.name
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _greet(lifeline: socket.socket, meeting: Meeting, here: Here) -> Answer:
    stream = lifeline.makefile("rb")
    nonce = stream.read(NONCE_BYTES)
    text = msgspec.msgpack.encode(here)
    lifeline.sendall(framed(meeting.sign(nonce, text) + text))
    length = int.from_bytes(stream.read(4), "big")
    answer: Answer = msgspec.msgpack.decode(stream.read(length), type=Answer)
    return answer


def _follow(lifeline: socket.socket, process: NodeProcess, given_up: threading.Event) -> None:
    with suppress(OSError):
        lifeline.recv(1)
    if not process.is_over:
        given_up.set()
        process.fail(RunError("the driver has given this agent up, or is gone"))


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text
