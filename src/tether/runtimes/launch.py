"""Starting processes, which is not carrying messages.

Importing torch takes seconds. So the driver starts one process, the nursery, which imports everything once, runs none
of the user's code and starts no thread, and then forks itself for every node. It tells the driver of each birth and, at
once, of each death. A node's first file descriptors are its lifeline, a connection to the driver, and its log.

Once the nodes are there a run can do without the nursery: their lifelines close when they die, so their deaths are
noticed even if it is stopped or gone, and only their exit status is lost then. When the driver is gone the nodes end,
and the nursery kills those that do not. Whoever is stopped could not notice that, so the system continues a process
when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, BinaryIO, NoReturn

from tether.errors import NodesLost, RunError

_NEWS = struct.Struct("<ci")  # b"b", process id: born; b"d", process id, followed by the status: died
#: how long the nursery may take to tell of a death that a lifeline has shown
STATUS_SECONDS = 1.0
#: how long nodes are given to end by themselves when the driver is gone
ORPHAN_SECONDS = 1.5
_PR_SET_PDEATHSIG = 1


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
        self._deaths: list[tuple[int, int | None]] = []
        self._living: dict[int, socket.socket] = {}
        #: whose lifelines have closed, and when; the nursery has not told yet how they died
        self._unexplained: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Readable when somebody has died."""
        return self._selector.fileno()

    def bear(self, certificate: bytes, log: IO[bytes] | None, seconds: float) -> int:
        """Start a process that reads the certificate from its lifeline; its process id."""
        lifeline, theirs = socket.socketpair()
        lifeline.settimeout(seconds)
        self._socket.settimeout(seconds)
        try:
            with theirs, open(os.devnull, "wb") as nowhere:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno(), (log or nowhere).fileno()])
            while (pid := self._read_news()) is None:
                pass
        except TimeoutError:
            lifeline.close()
            raise NodesLost(f"the fork server has not responded for {seconds:g} s") from None
        except (EOFError, OSError):
            lifeline.close()
            raise self._fork_server_error() from None
        self._living[pid] = lifeline
        self._selector.register(lifeline, selectors.EVENT_READ, pid)
        try:
            lifeline.sendall(certificate)
        except TimeoutError:
            raise NodesLost(f"process {pid} has not read within {seconds:g} s which node it is") from None
        except OSError:
            pass  # it died at once; that will be told
        return pid

    def deaths(self) -> list[tuple[int, int | None]]:
        """Who has died since the last call, and how: an exit status, a signal as a negative number, None if unknown."""
        self._look(0.0)
        gone, now = self._process.poll() is not None, time.monotonic()
        for pid, since in list(self._unexplained.items()):
            if gone or now - since > STATUS_SECONDS:
                self._bury(pid, None)
        deaths, self._deaths = self._deaths, []
        return deaths

    def _fork_server_error(self) -> RunError:
        """Why the fork server is gone: if it was killed another may serve, but an error would come again."""
        try:
            status = self._process.wait(STATUS_SECONDS)
        except subprocess.TimeoutExpired:
            return NodesLost("the fork server has closed its connection")
        if status < 0:
            return NodesLost(f"the fork server was killed by {signal.Signals(-status).name}")
        return RunError(f"the fork server has ended with status {status}; see logs/nursery.log of the run")

    def _look(self, seconds: float) -> None:
        """Take in what there is, or comes within that time."""
        ready = self._selector.select(seconds)
        while ready:
            for key, _ in ready:
                if key.fileobj is not self._socket:
                    self._selector.unregister(key.fileobj)
                    self._unexplained[key.data] = time.monotonic()
                    continue
                try:
                    self._read_news()
                except (EOFError, OSError):
                    self._selector.unregister(self._socket)
            ready = self._selector.select(0)

    def _read_news(self) -> int | None:
        kind, pid = _NEWS.unpack(self._receive(_NEWS.size))
        if kind == b"b":
            return int(pid)
        self._bury(pid, struct.unpack("<i", self._receive(4))[0])
        return None

    def _bury(self, pid: int, status: int | None) -> None:
        if lifeline := self._living.pop(pid, None):
            self._deaths.append((pid, status))
            if self._unexplained.pop(pid, None) is None:
                self._selector.unregister(lifeline)
            lifeline.close()

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def close(self, grace_seconds: float) -> None:
        """Have all processes end, kill those that have not after a while, and return even if some cannot be killed."""
        for lifeline in self._living.values():
            with contextlib.suppress(OSError):
                lifeline.shutdown(socket.SHUT_WR)
        self._wait_for_all(grace_seconds)
        if self._living.keys() - self._unexplained.keys():
            self._kill_session()
            self._wait_for_all(grace_seconds)
        self._socket.close()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._kill_session()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        self._selector.close()
        for lifeline in self._living.values():
            lifeline.close()

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._living.keys() - self._unexplained.keys() and (left := deadline - time.monotonic()) > 0:
            self._look(left)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # its number is not given away before it is waited for
            os.killpg(self._process.pid, signal.SIGKILL)


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
                _be_node(os.fdopen(lifeline, "rb"), node_main)
            os.close(lifeline)
            os.close(log)
            driver.sendall(_NEWS.pack(b"b", pid))


def _be_node(lifeline: BinaryIO, node_main: Callable[[BinaryIO], NoReturn]) -> NoReturn:
    _wake_up_when_parent_dies()
    try:
        node_main(lifeline)
    finally:
        os._exit(1)  # whatever happened: the rest of this stack is the nursery's


def _wake_up_when_parent_dies() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))


def _tell_deaths(driver: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        driver.sendall(_NEWS.pack(b"d", pid) + struct.pack("<i", os.waitstatus_to_exitcode(status)))


def _outlive_children() -> None:
    """Wait for the nodes to end, which have lost the driver too; kill those that do not, for they are stopped."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _wake_up_when_parent_dies()
    driver = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    import torch._dynamo  # noqa: F401 (the first optimizer would import it, in every node)

    from tether.runtimes.process import main as node_main

    with contextlib.suppress(ConnectionError):
        serve(driver, node_main)
    _outlive_children()
    os._exit(0)  # taking torch down again would take seconds on a busy machine, and who interrupts a run waits for it


if __name__ == "__main__":
    main()
