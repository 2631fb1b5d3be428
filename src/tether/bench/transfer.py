"""What Tether's links make of a connection, beside a plain socket: bytes per second, and processor time.

A process sends messages with one large tensor each, another receives and decodes them. Both count their processor time,
that of ZeroMQ's threads included.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import zmq
from torch import Tensor

from tether.bench.common import Report, Rounds, Row, median_ratio
from tether.core.message import Message
from tether.runtimes.process.handshake import Keys
from tether.runtimes.process.link import Inbox, Outbox

RAW, PLAIN, ENCRYPTED = "raw socket", "without encryption", "encrypted"
ADDRESS = "127.0.0.1"
#: how much a socket is given or asked for at once
PART_BYTES = 1 << 20


class Load(Message, frozen=True):
    """What is sent."""

    number: int
    values: Tensor


def transfer(
    megabytes: Annotated[float, typer.Option(min=0.1, help="Size of a message.")] = 30.0,
    messages: Annotated[int, typer.Option(min=2, help="How many are sent in a turn.")] = 40,
    rounds: Rounds = 5,
) -> Report:
    """Messages over loopback with and without encryption against a raw socket, in turns, and their processor time."""
    ways: dict[str, Callable[..., tuple[float, float]]] = {
        RAW: _raw,
        PLAIN: lambda *given: _tether(False, *given),
        ENCRYPTED: lambda *given: _tether(True, *given),
    }
    gigabytes = megabytes * messages / 1e3
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            found[name].append(measure(megabytes, messages))
    rows: list[Row] = []
    for name, turns in found.items():
        rows.append(
            {
                "what": name,
                "GB_per_second": statistics.median(gigabytes / seconds for seconds, _ in turns),
                "cpu_seconds_per_GB": statistics.median(cpu / gigabytes for _, cpu in turns),
            }
        )
    raw = [1 / seconds for seconds, _ in found[RAW]]
    ratios = {
        f"speed {name}, over a raw socket": median_ratio([1 / seconds for seconds, _ in found[name]], raw)
        for name in (PLAIN, ENCRYPTED)
    }
    return {"bench": "transfer", "MB": megabytes, "rounds": rounds, "rows": rows, "ratios": ratios}


def _measure(send: Any, receive: Any, *arguments: Any) -> tuple[float, float]:
    """Seconds and processor seconds of two processes; each sends what it needed, and the receiver first its address."""
    context = get_context("spawn")
    (ours, theirs), (to_sender, from_us) = context.Pipe(), context.Pipe()
    processes = [
        context.Process(target=receive, args=(theirs, *arguments), daemon=True),
        context.Process(target=send, args=(from_us, *arguments), daemon=True),
    ]
    for process in processes:
        process.start()
    to_sender.send(ours.recv())
    seconds, received_cpu = ours.recv()
    to_sender.send(None)
    sent_cpu = to_sender.recv()
    ours.send(None)
    to_sender.send(None)
    for process in processes:
        process.join()
    return seconds, received_cpu + sent_cpu


# ---- a raw socket ---------------------------------------------------------------------------------------------------


def _raw(megabytes: float, messages: int) -> tuple[float, float]:
    return _measure(_raw_send, _raw_receive, megabytes, messages)


def _raw_send(pipe: Connection, megabytes: float, messages: int) -> None:
    values = memoryview(bytearray(round(megabytes * 1e6)))
    with socket.create_connection((ADDRESS, pipe.recv())) as connection:
        begun = time.process_time()
        for _ in range(messages):
            connection.sendall(values)
        pipe.recv()  # everything has arrived
        pipe.send(time.process_time() - begun)
        pipe.recv()


def _raw_receive(pipe: Connection, megabytes: float, messages: int) -> None:
    size = round(megabytes * 1e6)
    values = memoryview(bytearray(size))
    with socket.create_server((ADDRESS, 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.recv_into(values[:1], 1, socket.MSG_PEEK)
            begun, cpu = time.perf_counter(), time.process_time()
            for _ in range(messages):
                got = 0
                while got < size:
                    got += connection.recv_into(values[got : got + PART_BYTES])
            pipe.send((time.perf_counter() - begun, time.process_time() - cpu))
            pipe.recv()


# ---- Tether's links -------------------------------------------------------------------------------------------------


def _tether(encrypted: bool, megabytes: float, messages: int) -> tuple[float, float]:
    return _measure(_tether_send, _tether_receive, megabytes, messages, Keys(Keys.make().secret, encrypted))


def _tether_send(pipe: Connection, megabytes: float, messages: int, keys: Keys) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        outbox = Outbox(context, Path(folder), "sender", keys=keys)
        outbox.addresses["receiver"] = pipe.recv()
        values = torch.ones(round(megabytes * 1e6 / 4))
        outbox.send("receiver", Load(0, values[:1]))  # connects
        cpu = time.process_time()
        for number in range(1, messages + 1):
            outbox.send("receiver", Load(number, values))
        pipe.recv()  # everything has arrived
        pipe.send(time.process_time() - cpu)
        pipe.recv()
        outbox.close()
        context.destroy(linger=0)


def _tether_receive(pipe: Connection, megabytes: float, messages: int, keys: Keys) -> None:
    context: zmq.Context[Any] = zmq.Context()
    authenticator = keys.start_authenticator(context)
    with tempfile.TemporaryDirectory() as folder:
        inbox = Inbox(context, Path(folder), "receiver", [Load], keys=keys, host=ADDRESS)
        pipe.send(inbox.address)
        inbox.receive()
        begun, cpu = time.perf_counter(), time.process_time()
        for number in range(1, messages + 1):
            _, message = inbox.receive()
            assert isinstance(message, Load) and message.number == number
        pipe.send((time.perf_counter() - begun, time.process_time() - cpu))
        pipe.recv()
        inbox.close()
        authenticator.stop()
        context.destroy(linger=0)
