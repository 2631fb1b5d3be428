"""A node as an actor of Ray.

Ray runs an actor on one machine of the cluster, and starts it again if it has died, on another machine if that one is
gone. It then calls `RayAgent.run` again, so the agent greets anew and becomes the successor of the node that has died.

The spec of its node comes as an argument of that call, as the code of any actor does. Nothing else that crosses the
network is unpickled.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec

from tether.runtimes.process.agent import GREETING_SECONDS, Lifeline, Refusal, greet, host_nodes
from tether.runtimes.process.spec import NodeSpec


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """Agent to driver: which place it is for."""

    index: int


class RayAgent:
    """The actor."""

    def run(self, index: int, arguments: bytes) -> str:
        """Run the node that the driver assigns until the run is over; its name, or "" if the driver refuses it."""
        return run_agent(index, *cloudpickle.loads(arguments))


def run_agent(index: int, spec: NodeSpec, driver: tuple[str, int]) -> str:
    """The agent of one place, as `RayAgent.run`."""
    keys = spec.keys
    assert keys is not None, "a run across machines has keys"
    with ExitStack() as at_the_end:
        directory = Path(tempfile.mkdtemp(prefix="tether-"))
        at_the_end.callback(shutil.rmtree, directory, ignore_errors=True)
        lifeline = at_the_end.enter_context(socket.create_connection(driver, GREETING_SECONDS))
        spec = replace(spec, directory=directory, host=lifeline.getsockname()[0], device=_gpu())
        answer = greet(lifeline, keys, Greeting(index))
        if isinstance(answer, Refusal):
            return ""
        watched = at_the_end.enter_context(Lifeline(lifeline, directory))
        host_nodes(spec, answer, watched)
        return answer.node.name


def _gpu() -> int | None:
    """The GPU that Ray assigns to this actor, if any: it is the only one that the process sees."""
    import ray

    assigned: dict[str, Any] = ray.get_runtime_context().get_accelerator_ids()
    return 0 if assigned.get("GPU") else None
