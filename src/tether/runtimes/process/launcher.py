"""Starting the processes of nodes and noticing when they exit, behind one interface.

Starting processes is not carrying messages: a launcher knows nothing of links, and the driver nothing of how processes
come to be. On this machine they are forked (`local_launcher`); on a cluster a scheduler places them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tether.core.machine import Node


@dataclass(frozen=True)
class NodeStarted:
    """A process has started that becomes this node, the successor of one that exited."""

    node: Node


@dataclass(frozen=True)
class NodeExited:
    """The process of a node has exited."""

    name: str
    #: what happened, in words that follow the name: "was killed by SIGKILL"
    how: str
    #: it has, or may have, sent its error to the driver first
    error_reported: bool = False
    #: the run need not fail: a successor will start, or it can begin without this node
    replaced: bool = False


class Launcher(Protocol):
    """Starts the processes of some nodes and knows when they exit."""

    def start(self, nodes: Iterable[Node]) -> None:
        """Begin to start a process for each node."""
        ...

    def fileno(self) -> int:
        """Readable when `poll_events` has something to return."""
        ...

    def poll_events(self) -> list[NodeStarted | NodeExited]:
        """What has happened since the last call. Returns at once."""
        ...

    def kill(self, name: str) -> None:
        """End a process that no longer responds; its exit is an event."""
        ...

    def output(self, name: str) -> str:
        """What a process has printed, if that is known, or why there is no output yet; perhaps ""."""
        ...

    def close(self, seconds: float) -> None:
        """End every process, after this time by force."""
        ...
