"""Who belongs to a run: one secret, and how both ends of a connection prove that they hold it.

Everything that keeps others out of a run is derived from its secret: the CURVE keys of ZeroMQ's sockets, and a key for
each kind of plain connection. On a plain connection the side that accepts sends a nonce; the side that connects sends a
nonce of its own and its first message; the other side answers. Message and answer each come with an HMAC of both nonces
and the text, so neither can be replayed or reflected, and each end knows that the other holds the secret.

Until then the connection is pending. Nothing that comes from it is decoded, no error of it reaches the run, and there
are limits on how much it sends, how long it takes and how many pending connections there are.
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
#: how long a connection may take to authenticate
HANDSHAKE_SECONDS = 10.0
#: how many pending connections there may be; others wait in the system's queue
PENDING_MAX = 128
#: a connection that has been pending for this long gives way to one that waits
PENDING_SECONDS_MIN = 3.0
#: how long the listener accepts no connections when there is no room
ACCEPT_PAUSE_SECONDS = 0.1

_LENGTH_BYTES = 4
#: the name that goes with the password of sockets that do not encrypt
_USER = "tether"


@dataclass(frozen=True)
class Keys:
    """What all processes of a run have in common, and no other process has."""

    secret: bytes = field(repr=False)
    #: without encryption, sockets authenticate by a password that anyone on the network can read
    encrypted: bool = True

    @staticmethod
    def make() -> Keys:
        return Keys(secrets.token_bytes(32))

    def derive(self, purpose: str) -> bytes:
        """The key for one purpose. It reveals nothing about those for others."""
        return hmac.digest(self.secret, purpose.encode(), hashlib.sha256)

    # ---- ZeroMQ ----

    @property
    def _curve(self) -> tuple[bytes, bytes]:
        """The public and the secret key of CURVE."""
        secret = z85.encode(self.derive("curve"))
        return zmq.curve_public(secret), secret

    def start_authenticator(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        """Let only processes with these keys connect to the sockets of this context, until it is stopped."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        if self.encrypted:
            authenticator.configure_curve_callback("*", _SingleKeyProvider(self._curve[0]))
        else:
            authenticator.configure_plain("*", {_USER: self.derive("plain").hex()})
        return authenticator

    def secure(self, socket: zmq.Socket[bytes], *, server: bool) -> None:
        """Encrypt and authenticate a socket, before it is bound or connected."""
        socket.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
        if not self.encrypted:
            if server:
                socket.plain_server = True
            else:
                socket.plain_username, socket.plain_password = _USER.encode(), self.derive("plain").hex().encode()
            return
        public, socket.curve_secretkey = self._curve
        socket.curve_publickey = public
        if server:
            socket.curve_server = True
        else:
            socket.curve_serverkey = public


@dataclass(frozen=True)
class _SingleKeyProvider:
    """A credentials provider of pyzmq that knows one public key, which all processes of the run have."""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self.public)


# ---- plain connections ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Signer:
    """Signs the first message and the answer on one connection."""

    key: bytes
    nonces: bytes

    def sign_message(self, text: bytes) -> bytes:
        return hmac.digest(self.key, b"message" + self.nonces + text, hashlib.sha256)

    def sign_answer(self, text: bytes) -> bytes:
        return hmac.digest(self.key, b"answer" + self.nonces + text, hashlib.sha256)


def authenticate(connection: socket.socket, keys: Keys, purpose: str, text: bytes = b"") -> bytes:
    """On a new connection to a `Listener`: send a first message and return the answer.

    `OSError` if there is no answer, `WireError` if the other end does not hold the key.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    signer = _Signer(keys.derive(purpose), receive(connection, NONCE_BYTES) + own)
    connection.sendall(own + signer.sign_message(text) + _framed(text))
    mac = receive(connection, MAC_BYTES)
    length = int.from_bytes(receive(connection, _LENGTH_BYTES), "big")
    answer = receive(connection, length) if length <= TEXT_BYTES_MAX else b""
    if not hmac.compare_digest(mac, signer.sign_answer(answer)):
        host, port = connection.getpeername()[:2]
        raise WireError(f"the process that listens at {host}:{port} does not hold the key of this run")
    return answer


class AuthenticatedConnection:
    """A connection whose other end has proved that it holds the key, and its first message."""

    def __init__(self, connection: socket.socket, text: bytes, signer: _Signer) -> None:
        """The connection does not block."""
        self.connection = connection
        self.text = text
        self._signer = signer

    def answer(self, text: bytes) -> None:
        """Answer once; an `OSError` if the other end is gone."""
        self.connection.sendall(self._signer.sign_answer(text) + _framed(text))


class _PendingConnection:
    """A connection whose other end has proved nothing yet."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection = connection
        self.accepted_at = time.monotonic()
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._received = bytearray()

    def send_nonce(self) -> None:
        self.connection.setblocking(False)
        self.connection.sendall(self._nonce)

    def receive(self) -> AuthenticatedConnection | None:
        """The authenticated connection, once the whole proof is there; `WireError` or `OSError` to reject it."""
        try:
            more = self.connection.recv(TEXT_BYTES_MAX)
        except BlockingIOError:
            return None
        self._received += more
        head = NONCE_BYTES + MAC_BYTES
        length = int.from_bytes(self._received[head : head + _LENGTH_BYTES], "big")
        if not more or length > TEXT_BYTES_MAX:
            raise WireError("the other end closed the connection, or sends too much")
        if len(self._received) < head + _LENGTH_BYTES + length:
            return None
        nonce, mac, text = (
            bytes(self._received[a:b]) for a, b in ((0, NONCE_BYTES), (NONCE_BYTES, head), (head + _LENGTH_BYTES, None))
        )
        signer = _Signer(self._key, self._nonce + nonce)
        if len(text) != length or not hmac.compare_digest(mac, signer.sign_message(text)):
            raise WireError("the other end does not hold the key")
        return AuthenticatedConnection(self.connection, text, signer)


class Listener:
    """A TCP port that admits only connections whose other end holds the key. Nothing others do there is an error."""

    def __init__(self, keys: Keys, purpose: str, host: str, port: int = 0) -> None:
        self._key = keys.derive(purpose)
        self._server = socket.create_server((host, port), backlog=1024)
        self._server.setblocking(False)
        #: where it listens
        self.port: int = self._server.getsockname()[1]
        #: how many connections were rejected
        self.rejected = 0
        #: the oldest first
        self._pending: dict[socket.socket, _PendingConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        #: until when it accepts no connections, while there is no room or no descriptor left
        self._paused_until: float | None = None

    def fileno(self) -> int:
        """Readable when `accept` has something to do."""
        return self._selector.fileno()

    def accept(self, seconds: float = 0.0) -> list[AuthenticatedConnection]:
        """Wait up to this long for something to happen; the connections that have authenticated.

        It must be called regularly even if nothing happens, to reject connections that take too long.
        """
        found: list[AuthenticatedConnection] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._accept_waiting()
            elif (pending := self._pending.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                try:
                    authenticated = pending.receive()
                except (OSError, WireError):
                    self._reject(pending)
                else:
                    if authenticated is not None:
                        self._remove(pending)
                        found.append(authenticated)
        self._reject_expired()
        self._resume_accepting()
        return found

    def interrupt(self) -> None:
        """Stop listening, and wake up a thread that waits in `accept`."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for pending in list(self._pending.values()):
            self._reject(pending)
        self._selector.close()
        self._server.close()

    def _accept_waiting(self) -> None:
        """Accept the connections that wait, while there is room."""
        while len(self._pending) < PENDING_MAX or self._reject_oldest():
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it is gone already
            except OSError:  # there are no descriptors left
                if self._pending:
                    self._reject(next(iter(self._pending.values())))
                break
            pending = _PendingConnection(connection, self._key)
            self._pending[connection] = pending
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                pending.send_nonce()
            except OSError:
                self._reject(pending)
        self._pause_accepting()

    def _reject_oldest(self) -> bool:
        """Make room by rejecting the oldest pending connection, if it has had its time."""
        oldest = next(iter(self._pending.values()))
        if time.monotonic() - oldest.accepted_at < PENDING_SECONDS_MIN:
            return False
        self._reject(oldest)
        return True

    def _reject_expired(self) -> None:
        now = time.monotonic()
        for pending in list(self._pending.values()):
            if now - pending.accepted_at > HANDSHAKE_SECONDS:
                self._reject(pending)

    def _pause_accepting(self) -> None:
        """Accept nothing for a moment: connections that wait would otherwise keep `fileno` readable."""
        self._selector.unregister(self._server)
        self._paused_until = time.monotonic() + ACCEPT_PAUSE_SECONDS

    def _resume_accepting(self) -> None:
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._server, selectors.EVENT_READ)

    def _reject(self, pending: _PendingConnection) -> None:
        self._remove(pending)
        pending.connection.close()
        self.rejected += 1

    def _remove(self, pending: _PendingConnection) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection]


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly this many bytes, or a `ConnectionError`."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        data += more
    return data


def _framed(text: bytes) -> bytes:
    return len(text).to_bytes(_LENGTH_BYTES, "big") + text
