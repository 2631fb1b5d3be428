"""The connection of a script to its run: what `join` needs of it, and nothing of the user's."""

from __future__ import annotations

import time
from typing import Any

import zmq
from torch import Tensor

from tether.learner.loop import LoopReplica
from tether.loops.process import Place
from tether.protocols import Options
from tether.runtimes.process.script_node import ScriptNode


class Worker:
    """The worker that a script is."""

    def __init__(self, place: Place, replica: LoopReplica, protocol: Options | None) -> None:
        """Describe the model or compare it with that of the first process, and wait until the run begins."""
        plan = place.plan
        if place.node.index == 0 and place.node.life == 1:
            plan.describe(place.spec.directory, replica, protocol)
        while plan.complete(place.spec.directory) is None:
            time.sleep(0.01)
        plan.take_model(place.spec.directory, replica)
        # a successor is not in the plan
        node = next((node for node in plan.nodes if node.name == place.node.name), place.node)
        self.context: zmq.Context[Any] = zmq.Context()
        self._node = ScriptNode(place.spec, node, self.context)
        self._node.join()

    @property
    def steps(self) -> int:
        return self._node.steps

    @property
    def earlier_steps(self) -> int:
        """The steps of the process that this one replaces which count."""
        return self._node.earlier_steps

    def step(self) -> bool:
        """One optimizer step; False if the run is over."""
        return self._node.step()

    def end(self) -> None:
        """The loop has ended: wait for the others, and take over the joint model."""
        self._node.end()

    def joint_weights(self) -> Tensor:
        return self._node.joint_weights()

    def record(self, metrics: dict[str, float]) -> None:
        self._node.measured(metrics)

    def close(self) -> None:
        """Close all connections."""
        if self._node.close():
            self.context.destroy(linger=2000)
