"""Who asks: keys, tokens, and how many requests they may send."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from collections import deque
from collections.abc import Mapping
from threading import Lock
from typing import Any

from tether.service.problems import Problem
from tether.service.settings import Settings
from tether.service.store import Store

#: the owner of everything without authentication, and the owner of the first key
FIRST_OWNER = "first"
_WINDOW_SECONDS = 60.0


class Access:
    """Knows all keys. Only this process revokes; keys that the command line has added are found in the tables."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._secret = bytes.fromhex(store.secret("token"))
        self._keys = {key["id"]: key for key in store.keys(None)}
        self._requests = Rate(settings.requests_per_minute)
        self._failures = Rate(settings.failures_per_minute)

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def make_key(self, owner: str, name: str) -> tuple[str, dict[str, Any]]:
        """A new key, which is shown once and kept only as a hash, and what is known of it."""
        key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        # a random secret of 256 bits cannot be guessed from its hash, so a slow hash would add nothing
        record = self._store.add_key(key_id, owner, name, _digest(secret))
        self._keys[key_id] = {**record, "owner": owner, "digest": _digest(secret)}
        return f"tk-{key_id}-{secret}", record

    def revoke(self, headers: Mapping[str, str], address: str, key_id: str) -> None:
        """Revoke a key of the caller, except the one that authenticates this request."""
        owner = self.caller(headers, address)
        used = self._found(headers.get("authorization", ""), address) if self._settings.authenticate else None
        if used is not None and used["id"] == key_id:
            raise Problem(409, "This is the key that you use: revoke it with another one")
        self._store.remove_key(owner, key_id)
        self._keys.pop(key_id, None)

    def caller(self, headers: Mapping[str, str], address: str) -> str:
        """The owner that a request acts for; 401 or 429 if it may not."""
        if not self._settings.authenticate:
            owner = FIRST_OWNER
        else:
            given = headers.get("authorization", "")
            if not given:  # guesses nothing
                raise Problem(401, "Not Authorized")
            found = self._found(given, address)
            if found is None:
                raise self._refused(address)
            owner = found["owner"]
        if not self._requests.admit(owner):
            limit = self._settings.requests_per_minute
            raise Problem(429, f"Too many requests: at most {limit:,} a minute are allowed", retry_after=60)
        return owner

    def _refused(self, address: str) -> Problem:
        if not self._failures.admit(address):
            return Problem(429, "Too many wrong keys: try again in a minute", retry_after=60)
        return Problem(401, "Not Authorized")

    def _found(self, authorization: str, address: str) -> dict[str, Any] | None:
        scheme, _, given = authorization.partition(" ")
        given = given.strip()
        match scheme.lower():
            case "basic":
                try:
                    user, _, key = base64.b64decode(given, validate=True).decode().partition(":")
                except (binascii.Error, ValueError):
                    return None
                return self._key(key, address) if user == "apikey" else None
            case "bearer":
                return self._key(given, address) if given.startswith("tk-") else self._of_token(given, address)
        return None

    def _record(self, key_id: str, address: str) -> dict[str, Any] | None:
        record = self._keys.get(key_id)
        # an address that guesses is not let through to the tables
        if record is None and key_id.isalnum() and not self._failures.is_used_up(address):
            record = self._store.key(key_id)
            if record is not None:
                self._keys[key_id] = record
        return record

    def _key(self, key: str, address: str) -> dict[str, Any] | None:
        prefix, _, rest = key.partition("-")
        key_id, _, secret = rest.partition("-")
        record = self._record(key_id, address)
        expected = record["digest"] if record is not None else _digest("")
        same = hmac.compare_digest(_digest(secret), expected)
        return record if same and prefix == "tk" else None

    # ---- tokens, as IBM's identity service gives them ---------------------------------------------------------------

    def token(self, key: str, address: str) -> dict[str, Any]:
        """What the token endpoint answers for a key: a signed JSON web token that stands for it for an hour."""
        if self._settings.authenticate:
            record = self._key(key, address)
            if record is None:
                raise self._refused(address)
            subject = record["id"]
        else:
            subject = FIRST_OWNER
        now = int(time.time())
        expires = now + self._settings.token_seconds
        claims = {"iss": "tether", "sub": subject, "iat": now, "exp": expires, "jti": secrets.token_hex(8)}
        signed = f"{_encoded({'alg': 'HS256', 'typ': 'JWT'})}.{_encoded(claims)}"
        token = f"{signed}.{self._signature(signed)}"
        return {
            "access_token": token,
            "refresh_token": "not_supported",
            "token_type": "Bearer",
            "expires_in": self._settings.token_seconds,
            "expiration": expires,
            "scope": "ibm openid",
        }

    def _signature(self, signed: str) -> str:
        return _base64(hmac.digest(self._secret, signed.encode(), "sha256"))

    def _of_token(self, token: str, address: str) -> dict[str, Any] | None:
        signed, _, signature = token.rpartition(".")
        if not hmac.compare_digest(self._signature(signed).encode(), signature.encode()):
            return None
        claims = json.loads(base64.urlsafe_b64decode(signed.partition(".")[2] + "=="))
        record = self._record(claims["sub"], address)
        return record if record is not None and claims["exp"] > time.time() else None


class Rate:
    """Admits a limited number of events a minute for each name."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._counts: dict[str, tuple[float, int]] = {}
        self._order: deque[str] = deque()

    def admit(self, name: str) -> bool:
        now = time.monotonic()
        with self._lock:
            began, count = self._counts.get(name, (now, 0))
            if now - began >= _WINDOW_SECONDS:
                began, count = now, 0
            if name not in self._counts:
                self._order.append(name)
                if len(self._order) > 10_000:  # addresses come without end
                    self._counts.pop(self._order.popleft(), None)
            self._counts[name] = began, count + 1
        return count < self._limit

    def is_used_up(self, name: str) -> bool:
        """Whether the next event would not be admitted."""
        with self._lock:
            began, count = self._counts.get(name, (0.0, 0))
        return count >= self._limit and time.monotonic() - began < _WINDOW_SECONDS


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _encoded(claims: dict[str, Any]) -> str:
    return _base64(json.dumps(claims).encode())
