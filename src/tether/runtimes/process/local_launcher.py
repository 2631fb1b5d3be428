"""A launcher of processes on this machine, forked from a fork server."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from tether.core.machine import Node
from tether.runtimes.process.forkserver import LOG_NAME, ForkServer
from tether.runtimes.process.launcher import NodeExited, NodeStarted
from tether.runtimes.process.liveness import START_SECONDS
from tether.runtimes.process.spec import ERROR_REPORTED_STATUS, NodeSpec, encode_spec


class LocalLauncher:
    """Starts each node as a child of this process's fork server, with a log of its own."""

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec
        self._logs: dict[str, IO[bytes] | None] = {}
        self._fork_server = ForkServer(self._open_log(LOG_NAME))
        self._names: dict[int, str] = {}

    def start(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            spec = encode_spec(self._spec, node, list(sys.path))
            output = (1, 2) if self._spec.plan.is_shown(node) else None
            log = self._open_log(node.name) if output is None else None
            pid = self._fork_server.spawn(spec, log, START_SECONDS, output=output)
            self._names[pid] = node.name

    def fileno(self) -> int:
        return self._fork_server.fileno()

    def poll_events(self) -> list[NodeStarted | NodeExited]:
        # a process whose status is unknown may have reported its error
        return [
            NodeExited(self._names[pid], _describe_exit(status), status in (ERROR_REPORTED_STATUS, None))
            for pid, status in self._fork_server.poll_exits()
        ]

    def kill(self, name: str) -> None:
        for pid, other in self._names.items():
            if other == name:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def output(self, name: str) -> str:
        log = self._logs.get(name)
        text = Path(log.name).read_text(errors="replace").strip() if log is not None else ""
        return f"it printed: {text[-1000:]}" if text else ""

    def close(self, seconds: float) -> None:
        self._fork_server.close(seconds)
        for log in filter(None, self._logs.values()):
            log.close()

    def _open_log(self, name: str) -> IO[bytes] | None:
        self._logs[name] = self._spec.plan.log(name)
        return self._logs[name]


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "died, and the fork server did not report how"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
