"""Start the service: one process that answers, and processes that train."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import torch
import uvicorn

from tether.errors import UsageError
from tether.service.access import FIRST_OWNER, Access
from tether.service.app import make_app
from tether.service.database import Database
from tether.service.jobs import Flusher, Jobs
from tether.service.settings import Settings
from tether.service.store import Store
from tether.tasks.text import Encoder


def open_store(settings: Settings) -> Store:
    """The data directory with its tables; both are made where they are missing."""
    try:
        settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot make the data directory {settings.data}: {error.strerror}; choose --data") from None
    return Store(Database(settings.data / "service.sqlite", settings.database))


def add_key(settings: Settings, owner: str) -> str:
    """A new key for an owner, who sees only what belongs to that owner."""
    return Access(open_store(settings), settings).make_key(owner, "command line")[0]


def serve(settings: Settings, host: str, port: int, announce: Callable[[str, str], None]) -> None:
    """Answer until interrupted. `announce` is given the address and, at the first start, a key, else ""."""
    if not settings.authenticate and host not in ("127.0.0.1", "localhost", "::1"):
        raise UsageError(f"--no-auth with --host {host} would let everybody in: leave one of them out")
    if settings.encoder is not None:
        Encoder.open(settings.encoder)  # says now what is wrong with it
    store = open_store(settings)
    lock = _lock(settings.data)
    torch.set_num_threads(1)  # answers are small: threads would only wait for each other
    access = Access(store, settings)
    key = ""
    if settings.authenticate and not access.has_keys:
        key, _ = access.make_key(FIRST_OWNER, "first")
    jobs = Jobs(store, settings)
    config = uvicorn.Config(
        make_app(settings, store, access, jobs), host, port, log_level="warning", access_log=False, server_header=False
    )
    try:
        socket = config.bind_socket()
    except SystemExit:
        raise UsageError(f"cannot listen on {host}:{port}: choose another --host or --port") from None
    socket.listen()  # before the address is printed, so that its reader can connect
    jobs.start()
    usage = Flusher(store)
    shown = f"[{host}]" if ":" in host else host
    announce(f"http://{shown}:{socket.getsockname()[1]}", key)
    try:
        uvicorn.Server(config).run([socket])
    finally:
        jobs.close()
        usage.close()
        os.close(lock)


def _lock(data: Path) -> int:
    descriptor = os.open(data / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise UsageError(f"another service uses {data}: stop it, or choose another --data") from None
    return descriptor
