"""Starting processes, which is not carrying messages.

Importing torch takes seconds. So the driver starts one process, the nursery, which imports everything once, runs none
of the user's code and starts no thread, and then forks itself for every node. It tells the driver of each birth and, at
once, of each death. A node's first file descriptors are its lifeline, a pipe from the driver, and its log.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, BinaryIO, NoReturn

from tether.errors import RunError

_NEWS = struct.Struct("<ci")  # b"b", process id: born; b"d", process id, followed by the status: died


class Nursery:
    """The driver's side."""

    def __init__(self, log: IO[bytes] | None) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tether.runtimes.launch"],
                stdin=theirs.fileno(),
                stdout=log or subprocess.DEVNULL,
                stderr=log or subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._deaths: list[tuple[int, int]] = []
        self._living: dict[int, BinaryIO] = {}

    def fileno(self) -> int:
        """Readable when somebody has died."""
        return self._socket.fileno()

    def bear(self, certificate: bytes, log: IO[bytes] | None) -> int:
        """Start a process that reads the certificate from its lifeline; its process id."""
        reading, writing = os.pipe()
        lifeline = os.fdopen(writing, "wb", buffering=0)
        with open(os.devnull, "wb") as nowhere:
            try:
                socket.send_fds(self._socket, [b"f"], [reading, (log or nowhere).fileno()])
            except OSError as error:
                raise RunError(f"no process can be started any more: {error}") from error
            finally:
                os.close(reading)
        while (pid := self._read_news()) is None:
            pass
        self._living[pid] = lifeline
        with contextlib.suppress(BrokenPipeError):  # it died at once; that will be told
            view = memoryview(certificate)
            while view:
                view = view[lifeline.write(view) :]
        return pid

    def deaths(self) -> list[tuple[int, int]]:
        """Who has died since the last call, and how: an exit status, or a signal as a negative number."""
        while select.select([self._socket], [], [], 0)[0]:
            self._read_news()
        deaths, self._deaths = self._deaths, []
        return deaths

    def _read_news(self) -> int | None:
        kind, pid = _NEWS.unpack(self._receive(_NEWS.size))
        if kind == b"b":
            return int(pid)
        status = struct.unpack("<i", self._receive(4))[0]
        self._living.pop(pid).close()
        self._deaths.append((pid, status))
        return None

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise RunError("the process that starts the others has ended; see logs/nursery.log of the run")
            data += more
        return data

    def close(self, grace_seconds: float) -> None:
        """Cut every lifeline; kill who has not ended after a while."""
        for lifeline in self._living.values():
            lifeline.close()
        deadline = time.monotonic() + grace_seconds
        with contextlib.suppress(RunError, OSError):
            while self._living and (left := deadline - time.monotonic()) > 0:
                if select.select([self._socket], [], [], left)[0]:
                    self._read_news()
        for pid in self._living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(RunError, OSError):
            while self._living:
                self._read_news()
        self._socket.close()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(driver: socket.socket, node_main: Callable[[BinaryIO], NoReturn]) -> None:
    """The nursery itself: fork when asked, tell of deaths, end with the driver."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready, _, _ = select.select([driver.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_deaths(driver)
        if driver.fileno() in ready:
            _, descriptors, _, _ = socket.recv_fds(driver, 1, 2)
            if not descriptors:
                return
            lifeline, log = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                driver.close()
                os.dup2(log, 1)
                os.dup2(log, 2)
                node_main(os.fdopen(lifeline, "rb"))
            os.close(lifeline)
            os.close(log)
            driver.sendall(_NEWS.pack(b"b", pid))


def _tell_deaths(driver: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        driver.sendall(_NEWS.pack(b"d", pid) + struct.pack("<i", os.waitstatus_to_exitcode(status)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    import torch._dynamo  # noqa: F401 (the first optimizer would import it, in every node)

    from tether.runtimes.process import main as node_main

    with contextlib.suppress(ConnectionError):
        serve(driver, node_main)
    os._exit(0)  # taking torch down again would take seconds on a busy machine, and who interrupts a run waits for it


if __name__ == "__main__":
    main()
