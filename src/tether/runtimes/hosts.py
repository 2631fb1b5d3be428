"""Starts `tether worker` on the hosts of a cluster, by ssh, and starts it again where it has ended.

The key goes to the worker's standard input, so it is neither in a file there nor in the list of processes. A worker
ends with its lifeline, so a host that loses the driver is left as it was.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tether.errors import RunError, UsageError
from tether.runtimes.process.handshake import Keys

#: this machine, whose workers are started without ssh
HERE = "localhost"
#: how long until a worker that has ended is started again: at first, and at most
RETRY_SECONDS, RETRY_SECONDS_MAX = 1.0, 30.0
#: a host counts as failed after this many workers in a row ended there before they joined
FAILURES_MAX = 3
#: exit status of a worker that must not try again
REFUSED_STATUS = 2
#: how much of what a worker printed is shown
OUTPUT_BYTES = 600


def is_here(host: str) -> bool:
    """Whether a host is this machine, by its own name."""
    return host in (HERE, own := socket.gethostname(), own.partition(".")[0])


def own_address(hosts: Sequence[str]) -> str:
    """The address of this machine at which these hosts reach it."""
    names = [name.rpartition("@")[2] for name in hosts if not is_here(name)]
    if not names:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(names[0]), 9))  # finds the way there, and sends nothing
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise UsageError(
            f"no way to host {names[0]} is known ({error}): correct its name, or say with --listen HOST:PORT where "
            "workers reach this machine"
        ) from None


@dataclass
class _Place:
    """A host, and the process that has started the worker there."""

    host: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    #: how much of the log is of earlier workers
    logged: int = 0
    #: when the next worker is started, if the process has ended
    again_at: float = 0.0
    #: how many in a row have ended before one joined
    failures: int = 0
    refused: bool = False


@dataclass
class HostStarter:
    """The workers of one run on their hosts, one for each name; a host that is named twice has two."""

    hosts: Sequence[str]
    #: the command that runs another on a host
    ssh: str
    address: tuple[str, int]
    keys: Keys
    #: whether workers take the task from the driver
    accept_code: bool
    #: a file for the output of the workers in a place
    open_log: Callable[[int], IO[bytes]]
    note: Callable[[str], None]
    _places: list[_Place] = field(default_factory=list)

    def start(self) -> None:
        for number, host in enumerate(self.hosts):
            log = self.open_log(number)
            self._places.append(_Place(host, self._start(host, log), log))

    def check(self, joined: int, wanted: int) -> None:
        """Start workers again that have ended; RunError if fewer can come than are `wanted` and not yet `joined`."""
        now = time.monotonic()
        for place in self._places:
            status = place.process.poll()
            if status is None or place.refused:
                continue
            if not place.again_at:
                place.failures += 1
                place.refused = status == REFUSED_STATUS
                wait = min(RETRY_SECONDS * 2 ** min(place.failures - 1, 10), RETRY_SECONDS_MAX)
                place.again_at = now + wait
                if status or place.failures > 1:
                    self.note(f"the worker on {place.host} ended with status {status}: {self._said(place)}")
            elif now >= place.again_at:
                place.again_at = 0.0
                place.logged = os.fstat(place.log.fileno()).st_size
                place.process = self._start(place.host, place.log)
        failed = [place for place in self._places if place.refused or place.failures >= FAILURES_MAX]
        if failed and len(self._places) - len(failed) < wanted - joined:
            raise RunError(f"no worker could be started on {failed[0].host}: {self._said(failed[0])}")

    def has_joined(self) -> None:
        """A worker has joined, and it is not known which: hosts whose processes live are as good as new."""
        for place in self._places:
            if place.process.poll() is None:
                place.failures = 0

    def close(self, seconds: float) -> None:
        """Wait for the workers, which end when the run does; end those that take longer than this."""
        deadline = time.monotonic() + seconds
        for place in self._places:
            try:
                place.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                place.process.kill()
                place.process.wait()
            place.log.close()

    def _start(self, host: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
        host_name, port = self.address
        words = ["-m", "tether", "worker", f"{host_name}:{port}", "--key", "-"]
        words += ["--accept-code"] if self.accept_code else []
        if is_here(host):
            command = [sys.executable, *words]
        else:
            # as this program runs here, if the host has the same folder and the same Python there
            python, as_here = shlex.quote(sys.executable), shlex.join([sys.executable, *words])
            script = (
                f"cd {shlex.quote(os.getcwd())} 2>/dev/null; "
                f"if [ -x {python} ]; then exec {as_here}; else exec tether {shlex.join(words[2:])}; fi"
            )
            command = [*shlex.split(self.ssh), host, script]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the driver, which ends the run in good order
        )
        assert process.stdin is not None
        _give_key(process.stdin, self.keys)
        return process

    @staticmethod
    def _said(place: _Place) -> str:
        """The end of what the last worker in a place has printed."""
        try:
            with Path(place.log.name).open("rb") as file:
                file.seek(max(place.logged, os.fstat(file.fileno()).st_size - OUTPUT_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"what it printed cannot be read: {error}"
        return " / ".join(line.strip() for line in lines if line.strip()) or "it printed nothing"


def _give_key(stdin: IO[bytes], keys: Keys) -> None:
    with suppress(OSError):  # the process has already ended, which `check` will see
        stdin.write(keys.secret.hex().encode() + b"\n")
        stdin.close()
