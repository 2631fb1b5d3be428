"""A worker whose gradients a script of the user's computes.

Where the training thread of another worker computes gradients when the machine asks for them, here the user's own
thread calls `step` when it has one. `step` returns when the machine wants the next gradient, so that it is taken at the
weights that the protocol has left: under most protocols at once, under averaging at the end of a round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq
from torch import Tensor

from tether.core.events import DataEnded, GradientReady
from tether.core.machine import Node, Replica
from tether.errors import RunError
from tether.runtimes.process import control
from tether.runtimes.process.liveness import LOOP
from tether.runtimes.process.node import REPORT_SECONDS, NodeProcess
from tether.runtimes.process.spec import NodeSpec

#: how long a worker waits for the hub to send the joint model
JOINT_SECONDS = 60.0


class ScriptNode(NodeProcess):
    """The host of a worker that a script of the user's drives."""

    def __init__(self, spec: NodeSpec, node: Node, context: zmq.Context[Any]) -> None:
        super().__init__(spec, node, context)
        self._hub = spec.plan.hub
        self._joint: Tensor | None = None
        #: when the user's thread began to work on the next gradient, and the link's processor time by then
        self._working_since = 0.0
        self._exchange_seconds = 0.0
        self.steps = 0
        #: the steps of the process that this one replaces which count, and how many places the run has
        self.earlier_steps = 0
        self._replaces = node.life > 1
        self._world = sum(other.computes for other in spec.plan.nodes)
        #: as many mini-batches of each place counted when the run was resumed
        self._first_round = spec.plan.first_round
        self._said_bye = False
        #: open while the user's thread works on the next gradient
        self._looping = ExitStack()

    @property
    def replica(self) -> Replica:
        """The user's model, its optimizer, and what is exchanged of them."""
        return self._interpreter.replica

    def join(self) -> None:
        """Wait until the run begins and the first gradient is wanted."""
        self._report(control.Hello(self._inbox.address))
        self._link.start()
        self._pulse.start()
        with self.lock:
            if self._wait_for_request() and self._replaces and self._compute is not None:
                # the mini-batches of a place are numbered, and those that count are not dealt again
                self.earlier_steps = max(0, self._compute.batch // self._world - self._first_round)

    def step(self) -> bool:
        """The user has a gradient: step, exchange, and wait until the next one is wanted. False if the run is over."""
        self._looping.close()
        with self.lock:
            if self._over:
                return self._raise_failure()
            assert self._compute is not None
            effect, self._compute = self._compute, None
            self.steps += 1
            self.replica.seek(effect.batch, effect.upcoming, effect.position)
            result = self.replica.compute(effect.form, effect.fresh)
            seconds = time.monotonic() - self._working_since
            before, self._exchange_seconds = self._exchange_seconds, self._link_seconds
            exchange_seconds = self._exchange_seconds - before
            self._feed(GradientReady(result.gradient, result.loss, result.samples, seconds, exchange_seconds))
            if (now := self.now()) - self._reported_at >= REPORT_SECONDS:
                self._reported_at = now
                self._report(control.Report(self._interpreter.meter, now))
            return self._wait_for_request()

    def end(self) -> None:
        """The user's loop has ended: wait for the others and take over the joint model."""
        self._looping.close()
        with self.lock:
            if not self._over:
                self._compute = None
                self._feed(DataEnded())
            self._wait(lambda: self._over)
            self._raise_failure()
            if not self._said_bye:
                self._said_bye = True
                if self._joint is not None:
                    self.replica.weights.copy_(self._joint)
                self._report(control.Bye(self._interpreter.meter, self._interpreter.tracer.spans))

    def joint_weights(self) -> Tensor:
        """A copy of the joint model's weights as they are now; without a hub, those of this worker."""
        with self.lock:
            if self._over or self._hub in ("", self.name):
                return self.replica.weights.clone()
            self._joint = None
            self._outbox.send(self._hub, control.JointRequest())
            self._wait(lambda: self._joint is not None or self._over, JOINT_SECONDS)
            self._raise_failure()
            if self._joint is None:
                raise RunError(f"the hub has not sent the joint model within {JOINT_SECONDS:g} s")
            return self._joint.clone()

    def measured(self, metrics: dict[str, float]) -> None:
        """Put metrics of the joint model into the run's metrics."""
        with self.lock:
            self._report(control.Measured(self.earlier_steps + self.steps, metrics, self._over, self.now()))

    def _take_joint(self, weights: Tensor | None) -> None:
        self._joint = weights
        self._training_wakeup.notify()

    def _wait_for_request(self) -> bool:
        """Wait until the machine wants a gradient. False if the run is over."""
        self._wait(lambda: self._compute is not None or self._over)
        if self._over:
            return self._raise_failure()
        self._working_since = time.monotonic()
        self._looping.enter_context(self._pulse.doing(LOOP))
        return True

    def _wait(self, until: Callable[[], bool], seconds: float = math.inf) -> None:
        self._training_wakeup.wait_for(until, None if seconds == math.inf else seconds)

    def _raise_failure(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return False
