"""Who belongs to a run: one secret, and how both ends of a connection prove that they hold it.

Everything that a run keeps strangers out with is derived from its secret: the CURVE keys of ZeroMQ's sockets, and a key
for each kind of plain connection. On a plain connection the side that accepts sends a nonce; the side that calls sends
a nonce of its own and its first message; the other side answers. Message and answer each come with an HMAC of both
nonces and the text, so neither can be replayed or sent back, and each end knows that the other holds the secret.

Until then the other end is a stranger. Of a stranger nothing is decoded, no error reaches the run, and there are limits
on how much it sends, how long it takes and how many others there are beside it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from tether.errors import WireError

NONCE_BYTES = 32
MAC_BYTES = 32
#: the largest first message and answer
TEXT_BYTES_MAX = 16 * 1024
#: how long a stranger may take to prove itself
HANDSHAKE_SECONDS = 10.0
#: how many strangers are listened to at a time; others wait in the system's queue
STRANGERS_MAX = 128
#: a stranger that has had this long gives way to one that waits
TURN_SECONDS = 3.0
#: for how long nobody is let in when there is no room
SHUT_SECONDS = 0.1

_LENGTH_BYTES = 4


@dataclass(frozen=True)
class Keys:
    """What all processes of a run have in common and nobody else has."""

    secret: bytes = field(repr=False)

    @staticmethod
    def make() -> Keys:
        return Keys(secrets.token_bytes(32))

    def derive(self, purpose: str) -> bytes:
        """The key for one purpose. It tells nothing about those for others."""
        return hmac.digest(self.secret, purpose.encode(), hashlib.sha256)

    # ---- ZeroMQ ----

    @property
    def _curve(self) -> tuple[bytes, bytes]:
        """The public and the secret key of CURVE."""
        secret = z85.encode(self.derive("curve"))
        return zmq.curve_public(secret), secret

    def guard(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        """Let nobody connect to a socket of this context but who holds the keys, until it is stopped."""
        doorman = ThreadAuthenticator(context)
        doorman.start()
        doorman.configure_curve_callback("*", _Only(self._curve[0]))
        return doorman

    def lock(self, socket: zmq.Socket[bytes], *, server: bool) -> None:
        """Make a socket one of the run's, before it is bound or connected."""
        public, socket.curve_secretkey = self._curve
        socket.curve_publickey = public
        socket.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
        if server:
            socket.curve_server = True
        else:
            socket.curve_serverkey = public


@dataclass(frozen=True)
class _Only:
    """What an authenticator asks: is this the one public key of the run?"""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self.public)


# ---- plain connections ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Proof:
    """Signs what the two ends of one connection say first."""

    key: bytes
    nonces: bytes

    def message(self, text: bytes) -> bytes:
        return hmac.digest(self.key, b"message" + self.nonces + text, hashlib.sha256)

    def answer(self, text: bytes) -> bytes:
        return hmac.digest(self.key, b"answer" + self.nonces + text, hashlib.sha256)


def introduce(connection: socket.socket, keys: Keys, purpose: str, text: bytes = b"") -> bytes:
    """On a new connection to a `Listener`: say something and hear the answer.

    `OSError` if nobody answers, `WireError` if whoever answers does not hold the key.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    proof = _Proof(keys.derive(purpose), receive(connection, NONCE_BYTES) + own)
    connection.sendall(own + proof.message(text) + _framed(text))
    mac = receive(connection, MAC_BYTES)
    length = int.from_bytes(receive(connection, _LENGTH_BYTES), "big")
    answer = receive(connection, length) if length <= TEXT_BYTES_MAX else b""
    if not hmac.compare_digest(mac, proof.answer(answer)):
        host, port = connection.getpeername()[:2]
        raise WireError(f"whoever listens at {host}:{port} does not hold the key of this run")
    return answer


class Visitor:
    """A connection whose other end has proved that it holds the key, and what it said."""

    def __init__(self, connection: socket.socket, text: bytes, proof: _Proof) -> None:
        """The connection does not block."""
        self.connection = connection
        self.text = text
        self._proof = proof

    def answer(self, text: bytes) -> None:
        """Answer once; an `OSError` if the other end is gone."""
        self.connection.sendall(self._proof.answer(text) + _framed(text))


class _Stranger:
    """A connection whose other end has proved nothing yet."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection = connection
        self.came_at = time.monotonic()
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._said = bytearray()

    def greet(self) -> None:
        self.connection.setblocking(False)
        self.connection.sendall(self._nonce)

    def hear(self) -> Visitor | None:
        """What it turns out to be, if it has said enough; `WireError` or `OSError` if it must go."""
        try:
            more = self.connection.recv(TEXT_BYTES_MAX)
        except BlockingIOError:
            return None
        self._said += more
        head = NONCE_BYTES + MAC_BYTES
        length = int.from_bytes(self._said[head : head + _LENGTH_BYTES], "big")
        if not more or length > TEXT_BYTES_MAX:
            raise WireError("a stranger hung up, or says too much")
        if len(self._said) < head + _LENGTH_BYTES + length:
            return None
        nonce, mac, text = (
            bytes(self._said[a:b]) for a, b in ((0, NONCE_BYTES), (NONCE_BYTES, head), (head + 4, None))
        )
        proof = _Proof(self._key, self._nonce + nonce)
        if len(text) != length or not hmac.compare_digest(mac, proof.message(text)):
            raise WireError("a stranger does not hold the key")
        return Visitor(self.connection, text, proof)


class Listener:
    """A TCP port at which those are let in who hold the key. Nothing that others do there is ever an error here."""

    def __init__(self, keys: Keys, purpose: str, host: str) -> None:
        self._key = keys.derive(purpose)
        self._server = socket.create_server((host, 0), backlog=1024)
        self._server.setblocking(False)
        #: where it listens
        self.port: int = self._server.getsockname()[1]
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        #: until when nobody is let in, while there is no room or no descriptor left
        self._shut_until: float | None = None

    def fileno(self) -> int:
        """Readable when `accept` has something to do."""
        return self._selector.fileno()

    def accept(self, seconds: float = 0.0) -> list[Visitor]:
        """Wait that long for something to happen; those who have proved themselves.

        It must be called now and then even if nothing happens, to send away who takes too long.
        """
        found: list[Visitor] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._let_in()
            elif (stranger := self._strangers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                try:
                    visitor = stranger.hear()
                except (OSError, WireError):
                    self._send_away(stranger)
                else:
                    if visitor is not None:
                        self._forget(stranger)
                        found.append(visitor)
        self._tidy()
        return found

    def interrupt(self) -> None:
        """Listen no longer; whoever waits in `accept`, in another thread, is woken up."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for stranger in list(self._strangers.values()):
            self._send_away(stranger)
        self._selector.close()
        self._server.close()

    def _let_in(self) -> None:
        """Take in whoever waits, as long as there is room."""
        while len(self._strangers) < STRANGERS_MAX or self._make_room():
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it has gone already
            except OSError:  # there are no descriptors left
                if self._strangers:
                    self._send_away(next(iter(self._strangers.values())))
                break
            stranger = _Stranger(connection, self._key)
            self._strangers[connection] = stranger
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                stranger.greet()
            except OSError:
                self._send_away(stranger)
        self._shut()

    def _make_room(self) -> bool:
        """Send away the oldest stranger, if it has had its turn."""
        oldest = next(iter(self._strangers.values()))
        if time.monotonic() - oldest.came_at < TURN_SECONDS:
            return False
        self._send_away(oldest)
        return True

    def _shut(self) -> None:
        """Let nobody in for a moment; who waits would otherwise keep `fileno` readable."""
        self._selector.unregister(self._server)
        self._shut_until = time.monotonic() + SHUT_SECONDS

    def _tidy(self) -> None:
        now = time.monotonic()
        for stranger in list(self._strangers.values()):
            if now - stranger.came_at > HANDSHAKE_SECONDS:
                self._send_away(stranger)
        if self._shut_until is not None and now >= self._shut_until:
            self._shut_until = None
            self._selector.register(self._server, selectors.EVENT_READ)

    def _send_away(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]


def receive(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or a `ConnectionError`."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the other side has hung up")
        data += more
    return data


def _framed(text: bytes) -> bytes:
    return len(text).to_bytes(_LENGTH_BYTES, "big") + text
