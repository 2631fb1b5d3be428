"""The fork server: a process that imports everything once and is forked for every node.

Importing torch takes seconds. So the driver starts one process, which imports it once, runs none of the user's code and
starts no thread, and forks itself for every node. It reports each start to the driver and, at once, each exit. A node's
first file descriptors are its lifeline, a connection to the driver, and where it prints.

Once the nodes run, a run can do without the fork server: a node's lifeline closes when it dies, so the driver notices
its death even if the fork server is stopped or gone, and only the exit status is lost then. When the driver is gone the
nodes end by themselves, and the fork server kills those that do not. A stopped process could not notice this, so the
system continues a process when its parent dies.
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

#: the name of the fork server's own log
LOG_NAME = "fork-server"
#: how long the fork server may take to report an exit that a closed lifeline has shown
STATUS_SECONDS = 1.0
#: how long nodes are given to end by themselves when the driver is gone
ORPHAN_SECONDS = 1.5

#: what the fork server reports: a kind and a process id; an exit is followed by the status
_REPORT = struct.Struct("<ci")
_STATUS = struct.Struct("<i")
_STARTED, _EXITED = b"s", b"e"
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The driver's side."""

    def __init__(self, log: IO[bytes] | None) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tether.runtimes.process.forkserver"],
                stdin=theirs.fileno(),
                stdout=log or subprocess.DEVNULL,
                stderr=log or subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._exits: list[tuple[int, int | None]] = []
        #: the lifelines of processes whose exit is not known yet
        self._lifelines: dict[int, socket.socket] = {}
        #: the processes whose lifelines have closed, and when; their status has not been reported yet
        self._status_pending: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Readable when a process has exited."""
        return self._selector.fileno()

    def spawn(
        self, spec: bytes, log: IO[bytes] | None, seconds: float, *, output: tuple[int, int] | None = None
    ) -> int:
        """Start a process that reads its spec from its lifeline; its process id. Each step may take this long.

        `output` are the descriptors of its standard output and standard error, if they do not go to the log.
        """
        lifeline, theirs = socket.socketpair()
        lifeline.settimeout(seconds)
        self._socket.settimeout(seconds)
        try:
            with theirs, open(os.devnull, "wb") as nowhere:
                kept = (log or nowhere).fileno()
                socket.send_fds(self._socket, [b"f"], [theirs.fileno(), *(output or (kept, kept))])
            while (pid := self._read_report()) is None:
                pass
        except TimeoutError:
            lifeline.close()
            raise NodesLost(f"the fork server has not responded for {seconds:g} s") from None
        except (EOFError, OSError):
            lifeline.close()
            raise self._fork_server_error() from None
        self._lifelines[pid] = lifeline
        self._selector.register(lifeline, selectors.EVENT_READ, pid)
        try:
            lifeline.sendall(spec)
        except TimeoutError:
            raise NodesLost(f"process {pid} has not read which node it is within {seconds:g} s") from None
        except OSError:
            pass  # it died at once; its exit will be reported
        return pid

    def poll_exits(self) -> list[tuple[int, int | None]]:
        """The processes that have exited since the last call, each with its status.

        The status of a process that was killed is the signal as a negative number; None if it is unknown.
        """
        self._poll(0.0)
        gone, now = self._process.poll() is not None, time.monotonic()
        for pid, since in list(self._status_pending.items()):
            if gone or now - since > STATUS_SECONDS:
                self._add_exit(pid, None)
        exits, self._exits = self._exits, []
        return exits

    def close(self, grace_seconds: float) -> None:
        """End all processes, kill those that have not after a while, and return even if some cannot be killed."""
        for lifeline in self._lifelines.values():
            with contextlib.suppress(OSError):
                lifeline.shutdown(socket.SHUT_WR)
        self._wait_for_all(grace_seconds)
        if self._lifelines.keys() - self._status_pending.keys():
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
        for lifeline in self._lifelines.values():
            lifeline.close()

    def _fork_server_error(self) -> RunError:
        """Why the fork server is gone. If it was killed, another may work; an error of its own would come again."""
        try:
            status = self._process.wait(STATUS_SECONDS)
        except subprocess.TimeoutExpired:
            return NodesLost("the fork server has closed its connection")
        if status < 0:
            return NodesLost(f"the fork server was killed by {signal.Signals(-status).name}")
        return RunError(f"the fork server exited with status {status}; see logs/{LOG_NAME}.log of the run")

    def _poll(self, seconds: float) -> None:
        """Take in everything that is there, or that comes within this time."""
        ready = self._selector.select(seconds)
        while ready:
            for key, _ in ready:
                if key.fileobj is not self._socket:
                    if key.data in self._lifelines:  # else its exit was reported in this look, and it is closed
                        self._selector.unregister(key.fileobj)
                        self._status_pending[key.data] = time.monotonic()
                    continue
                try:
                    self._read_report()
                except (EOFError, OSError):
                    self._selector.unregister(self._socket)
            ready = self._selector.select(0)

    def _read_report(self) -> int | None:
        """Read one report: the id of a process that has started, or None for an exit."""
        kind, pid = _REPORT.unpack(self._receive(_REPORT.size))
        if kind == _STARTED:
            return int(pid)
        self._add_exit(pid, _STATUS.unpack(self._receive(_STATUS.size))[0])
        return None

    def _add_exit(self, pid: int, status: int | None) -> None:
        if lifeline := self._lifelines.pop(pid, None):
            self._exits.append((pid, status))
            if self._status_pending.pop(pid, None) is None:
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

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._lifelines.keys() - self._status_pending.keys() and (left := deadline - time.monotonic()) > 0:
            self._poll(left)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the system does not reuse its id before it is waited for
            os.killpg(self._process.pid, signal.SIGKILL)


# ---- the fork server itself -----------------------------------------------------------------------------------------


def serve(driver: socket.socket, node_main: Callable[[BinaryIO], NoReturn]) -> None:
    """Fork when asked and report exits, until the driver is gone."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready, _, _ = select.select([driver.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_exits(driver)
        if driver.fileno() in ready:
            _, descriptors, _, _ = socket.recv_fds(driver, 1, 3)
            if not descriptors:
                return
            lifeline, output, errors = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                driver.close()
                os.dup2(output, 1)
                os.dup2(errors, 2)
                os.close(output)
                os.close(errors)
                os.set_inheritable(lifeline, False)
                _run_node(os.fdopen(lifeline, "rb"), node_main)
            for descriptor in descriptors:
                os.close(descriptor)
            driver.sendall(_REPORT.pack(_STARTED, pid))


def _run_node(lifeline: BinaryIO, node_main: Callable[[BinaryIO], NoReturn]) -> NoReturn:
    _continue_when_parent_dies()
    try:
        node_main(lifeline)
    finally:
        os._exit(1)  # whatever happened: the rest of this stack is the fork server's


def _continue_when_parent_dies() -> None:
    """Have the system send this process SIGCONT when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))


def _report_exits(driver: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        driver.sendall(_REPORT.pack(_EXITED, pid) + _STATUS.pack(os.waitstatus_to_exitcode(status)))


def _reap_orphans() -> None:
    """Wait for the nodes, which have lost the driver too, to end. Kill those that do not: they are stopped."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _continue_when_parent_dies()
    driver = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    import torch._dynamo  # noqa: F401 (the first optimizer would import it, in every node)

    from tether.runtimes.process.node import main as node_main

    with contextlib.suppress(ConnectionError):
        serve(driver, node_main)
    _reap_orphans()
    os._exit(0)  # unloading torch takes seconds on a busy machine, and a user who interrupts a run waits for it


if __name__ == "__main__":
    main()
