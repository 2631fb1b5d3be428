"""Who holds the key of a run gets in; whatever anybody else does at its ports costs the run nothing. Real sockets."""

from __future__ import annotations

import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from tether.core.message import Message
from tether.errors import RunError, WireError
from tether.runtimes.process import handshake
from tether.runtimes.process.handshake import (
    MAC_BYTES,
    NONCE_BYTES,
    AuthenticatedConnection,
    Keys,
    Listener,
    authenticate,
    receive,
)
from tether.runtimes.process.link import Inbox, Outbox
from tether.runtimes.spark.feed import RowReceiver
from tether.runtimes.spark.store import Field

KEYS = Keys(b"the secret of this run")
HERE = "127.0.0.1"
#: far more than anything here takes
PATIENCE_SECONDS = 60.0
FIELDS = (Field("features", "float32", (2,)), Field("label", "int64"))


class Door:
    """A listener in a thread of its own, as a run has it."""

    def __init__(self) -> None:
        self.listener = Listener(KEYS, "test", HERE)
        self.visitors: list[AuthenticatedConnection] = []
        self.failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        try:
            while not self._over.is_set():
                for visitor in self.listener.accept(0.05):
                    self.visitors.append(visitor)
                    visitor.answer(b"welcome " + visitor.text)
        except BaseException as error:
            self.failure = error

    def knock(self) -> socket.socket:
        return socket.create_connection((HERE, self.listener.port), PATIENCE_SECONDS)

    def close(self) -> None:
        self._over.set()
        self.listener.interrupt()
        self._thread.join()
        self.listener.close()
        for visitor in self.visitors:
            visitor.connection.close()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door()) as made:
        yield made


def lets_friends_in(door: Door) -> bool:
    with door.knock() as friend:
        return authenticate(friend, KEYS, "test", b"friend") == b"welcome friend"


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def reset(connection: socket.socket) -> None:
    """Hang up as a port scanner does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def said(text: bytes, mac: bytes = bytes(MAC_BYTES)) -> bytes:
    return bytes(NONCE_BYTES) + mac + len(text).to_bytes(4, "big") + text


# ---- both ends ------------------------------------------------------------------------------------------------------


def test_who_holds_the_key_is_heard_and_answered(door: Door) -> None:
    assert lets_friends_in(door)
    assert [visitor.text for visitor in door.visitors] == [b"friend"]


@pytest.mark.parametrize(
    ("keys", "purpose"), [(Keys.make(), "test"), (KEYS, "another")], ids=["another run", "another purpose"]
)
def test_another_key_opens_nothing(door: Door, keys: Keys, purpose: str) -> None:
    with door.knock() as stranger, pytest.raises(ConnectionError):
        authenticate(stranger, keys, purpose, b"let me in")
    assert lets_friends_in(door) and len(door.visitors) == 1


def test_a_caller_does_not_believe_who_cannot_prove_that_it_holds_the_key() -> None:
    """An impostor that listens where the driver was may say what it likes, even what the caller itself has said."""
    for answer in (bytes(MAC_BYTES), None):
        with socket.create_server((HERE, 0)) as impostor, socket.create_connection(impostor.getsockname()) as caller:
            accepted, _ = impostor.accept()
            heard: list[bytes] = []

            def impersonate(to: socket.socket, mac: bytes | None, heard: list[bytes] = heard) -> None:
                to.sendall(bytes(NONCE_BYTES))
                heard.append(receive(to, NONCE_BYTES + MAC_BYTES + 4 + 5))
                to.sendall((mac or heard[0][NONCE_BYTES:-9]) + (5).to_bytes(4, "big") + b"hello")

            thread = threading.Thread(target=impersonate, args=(accepted, answer))
            thread.start()
            with accepted, pytest.raises(WireError, match="does not hold the key of this run"):
                authenticate(caller, KEYS, "test", b"hello")
            thread.join()


def test_what_was_said_once_cannot_be_said_again(door: Door) -> None:
    """Whoever has listened on the wire knows one handshake, and the next has another nonce."""
    words: list[bytes] = []
    with door.knock() as friend:
        spy = type(
            "Spy", (), {"recv": friend.recv, "sendall": lambda _, text: (words.append(text), friend.sendall(text))}
        )
        authenticate(spy(), KEYS, "test", b"friend")
    with door.knock() as replayer:
        receive(replayer, NONCE_BYTES)
        replayer.sendall(words[0])
        assert replayer.recv(1) == b""


def test_everything_is_derived_from_one_secret() -> None:
    again = Keys(KEYS.secret)
    assert KEYS.derive("feed") == again.derive("feed") != KEYS.derive("lifeline") != KEYS.secret
    assert KEYS._curve == again._curve != Keys.make()._curve
    assert "secret" not in repr(KEYS)


# ---- strangers ------------------------------------------------------------------------------------------------------


NESTED = b"\x91" * 4000
STRANGE = {
    "nothing": b"",
    "a request of a browser": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 10,
    "bad UTF-8": said(b"\x97\x00\xa1\xff\xa0\x00\xa0\x00\x00"),
    "arrays without end": said(NESTED),
    "a length that is none": bytes(NONCE_BYTES + MAC_BYTES) + b"\xff" * 4,
    "more than is taken": said(bytes(handshake.TEXT_BYTES_MAX)) + b"more",
    "an empty message": said(b""),
}


@pytest.mark.parametrize("words", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("abrupt", [False, True], ids=["politely", "abruptly"])
def test_whatever_a_stranger_says_the_next_friend_is_let_in(door: Door, words: bytes, abrupt: bool) -> None:
    stranger = door.knock()
    with suppress(ConnectionError):  # it may have been sent away before it has said all
        stranger.sendall(words)
    reset(stranger) if abrupt else stranger.close()
    assert lets_friends_in(door) and len(door.visitors) == 1


def test_a_reset_at_every_moment_of_the_greeting_is_survived(door: Door) -> None:
    for count in (0, 1, NONCE_BYTES, NONCE_BYTES + MAC_BYTES + 3):
        for _ in range(5):
            stranger = door.knock()
            stranger.sendall(bytes(count))
            reset(stranger)
        stranger = door.knock()
        receive(stranger, NONCE_BYTES)
        stranger.sendall(bytes(count))
        reset(stranger)
    assert lets_friends_in(door)


def test_who_says_nothing_is_sent_away_in_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
    silent = [door.knock() for _ in range(5)]
    for stranger in silent:
        assert len(receive(stranger, NONCE_BYTES)) == NONCE_BYTES
        assert stranger.recv(1) == b""
        stranger.close()
    assert not door.listener._pending


def test_strangers_that_keep_silent_keep_no_friend_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PENDING_SECONDS_MIN", 0.2)
    with ExitStack() as stack:
        for _ in range(handshake.PENDING_MAX + 50):
            stack.enter_context(door.knock())
        assert lets_friends_in(door)
        assert len(door.listener._pending) <= handshake.PENDING_MAX


def test_many_friends_at_once_are_all_let_in(door: Door) -> None:
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(lets_friends_in(door))) for _ in range(300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 300


FLOOD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5) for _ in range(int(sys.argv[2]))]
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def flood(port: int, count: int) -> Iterator[None]:
    """Another process that holds so many connections and says nothing."""
    command = [sys.executable, "-S", "-c", FLOOD, str(port), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        yield
        process.communicate()


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """This process may open only so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_connections_than_descriptors_are_survived(door: Door) -> None:
    with few_descriptors(20), flood(door.listener.port, 100):
        wait_until(lambda: door.listener._paused_until is not None)
        assert len(door.listener._pending) <= 20 and door.failure is None
    assert lets_friends_in(door)


# ---- the run's ports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", STRANGE.values(), ids=STRANGE)
def test_the_intake_of_an_agent_is_deaf_to_strangers(words: bytes) -> None:
    with closing(RowReceiver(FIELDS, KEYS, host=HERE)) as intake:
        stranger = socket.create_connection((HERE, intake.port))
        stranger.sendall(words)
        reset(stranger)
        with socket.create_connection((HERE, intake.port), PATIENCE_SECONDS) as friend:
            assert struct.unpack("<q", authenticate(friend, KEYS, "feed")) == (-1,), "it has no rows yet"
        with pytest.raises(RunError, match="no data has arrived within 0 s"):
            intake.wait(0.0)


class Word(Message, frozen=True):
    """Something to send."""

    text: str


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[tuple[Inbox, Outbox]]:
    """A node's inbox by TCP, and somebody of the run who can reach it by TCP only."""
    context: zmq.Context[Any] = zmq.Context()
    authenticator = KEYS.start_authenticator(context)
    made = Inbox(context, tmp_path, "node", [Word], keys=KEYS, host=HERE)
    outbox = Outbox(context, tmp_path / "elsewhere", "friend", keys=KEYS)
    outbox.addresses["node"] = made.address
    yield made, outbox
    authenticator.stop()
    context.destroy(linger=0)


def hears_friends(inbox: Inbox, outbox: Outbox) -> bool:
    outbox.send("node", Word("hello"))
    return bool(inbox.socket.poll(PATIENCE_SECONDS * 1000)) and inbox.receive() == ("friend", Word("hello"))


def knock(inbox: Inbox) -> socket.socket:
    return socket.create_connection((HERE, int(inbox.address.rpartition(":")[2])), PATIENCE_SECONDS)


@pytest.mark.parametrize("words", [*STRANGE.values(), b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(200)])
def test_the_inbox_of_a_node_is_deaf_to_strangers(inbox: tuple[Inbox, Outbox], words: bytes) -> None:
    stranger = knock(inbox[0])
    stranger.sendall(words)
    reset(stranger)
    assert hears_friends(*inbox)


def test_an_inbox_sends_away_who_does_not_finish_the_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
    context: zmq.Context[Any] = zmq.Context()
    made = Inbox(context, tmp_path, "node", [Word], keys=KEYS, host=HERE)
    with knock(made) as silent:
        greeting = b"".join(iter(lambda: silent.recv(4096), b""))
    assert greeting, "ZeroMQ says what it is, and then hangs up"
    context.destroy(linger=0)


def test_an_inbox_survives_more_connections_than_descriptors(inbox: tuple[Inbox, Outbox]) -> None:
    with few_descriptors(20), flood(int(inbox[0].address.rpartition(":")[2]), 100):
        wait_until(no_descriptor_is_left)
    assert hears_friends(*inbox)


def no_descriptor_is_left() -> bool:
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return True
    return False
