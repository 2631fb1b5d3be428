"""A lock on a run directory, which ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tether.errors import UsageError


@contextmanager
def exclusive(directory: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the directory alone; UsageError if another process does. `note` gets a warning where locks do not work.

    The system releases the lock when the process ends, however it ends. Programs that the process starts do not
    inherit it, and processes that it forks close it at once. Raises OSError if the directory cannot be used at all.
    """
    file = directory / "lock"
    descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _open_descriptors().add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read_text(errors="replace").strip() or "another process"
            raise UsageError(f"{directory} is in use by {holder}: wait until it ends, or stop it first") from None
        except OSError as error:
            note(f"{directory} cannot be locked ({error.strerror}): do not run it twice at once")
        with suppress(OSError):  # the text only tells others who holds the lock
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield
    finally:
        if descriptor in _open_descriptors():  # it is not in a process that was forked meanwhile
            _open_descriptors().remove(descriptor)
            os.close(descriptor)


@cache
def _open_descriptors() -> set[int]:
    """The descriptors of locks that this process holds. A forked process shares them, and so closes them."""
    descriptors: set[int] = set()

    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        descriptors.clear()

    os.register_at_fork(after_in_child=close)
    return descriptors
