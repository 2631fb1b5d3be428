"""What the caller gives a node process when it starts: which node it is and what to build."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import cloudpickle

from tether.core.machine import Node
from tether.runtimes import tree
from tether.runtimes.base import Plan
from tether.runtimes.collectives import MakeCollectives, MessageTypes
from tether.runtimes.process.handshake import Keys

#: the name of the memory of a vector that all nodes share
SHARED_VECTOR = "shared"
#: exit status of a process that has reported its error to the driver
ERROR_REPORTED_STATUS = 3


@dataclass
class NodeSpec:
    """What all processes of a run are given, besides which node each is."""

    plan: Plan
    #: where the run's sockets and memory regions are
    directory: Path
    #: intra-operation threads of torch
    threads: int
    #: in a run across machines: the keys of all its processes, the address at which the driver receives, and the host
    #: at which others reach this process
    keys: Keys | None = None
    driver: str = ""
    host: str = ""
    #: how nodes broadcast and reduce, and the types of what they send for that
    collectives: MakeCollectives = tree.TreeCollectives
    collective_types: MessageTypes = tree.message_types
    #: the number of the device that this process was given; without one, nodes take devices in turns
    device: int | None = None


def encode_spec(spec: NodeSpec, node: Node, path: list[str]) -> bytes:
    """The bytes that `decode_spec` reads; `path` is the module path that the process needs to import the task.

    They go through a socket pair to a child of this process. On Spark they are part of the task, as its code is. No
    pickle is read from any other connection.
    """
    parts = (cloudpickle.dumps(path), cloudpickle.dumps((spec, node)))
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def decode_spec(stream: BinaryIO) -> tuple[NodeSpec, Node]:
    """Read the spec and set the module path, which comes first so that the rest can be imported."""
    path, rest = (stream.read(struct.unpack("<Q", stream.read(8))[0]) for _ in range(2))
    sys.path[:] = cloudpickle.loads(path)
    spec, node = cloudpickle.loads(rest)
    return spec, node
