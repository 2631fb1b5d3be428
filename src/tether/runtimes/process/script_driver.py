"""The caller's side of a run whose workers are processes that run a script of the user's.

It differs from the driver of other runs in five ways. The hub starts when the first worker has joined and has described
its model. The run ends when the loops of all workers have ended. Every worker is then given the joint model. A
script may go on after the end of the run, for as long as it likes. And a script that dies is started again: its
successor has its rank, and begins with the joint model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from tether.core.machine import Node
from tether.core.message import Message
from tether.errors import RunError
from tether.runtimes.base import Observer, Outcome, Plan
from tether.runtimes.process import control
from tether.runtimes.process.driver import Driver
from tether.runtimes.process.launcher import Launcher, NodeExited
from tether.runtimes.process.liveness import Watchdog

#: why a run ends whose scripts have done all their steps
LOOPS_ENDED = "all loops have ended"


class ScriptDriver(Driver):
    """One run."""

    def __init__(self, plan: Plan, observer: Observer, hung_seconds: float, restarts: int) -> None:
        """The script of each rank is started again up to `restarts` times."""
        super().__init__(plan, observer, hung_seconds, types=control.FROM_SCRIPT)
        # a script may prepare its data for as long as it likes before it joins
        self._watchdog = Watchdog(hung_seconds, start_seconds=math.inf, loop_seconds=plan.loop_seconds)
        #: the workers of which the user knows that they make no step
        self._stuck: set[str] = set()
        self._restarts = restarts
        self._contributed: set[str] = set()
        self._exits: dict[str, NodeExited] = {}

    def run(self, launchers: Iterable[tuple[Launcher, list[Node]]]) -> Outcome:
        outcome = super().run(launchers)
        # a script that goes on after the run may evaluate the joint model or save it
        scripts = {name for name in self._living if self._nodes[name].computes}
        while scripts - self._exits.keys() and self._observer.seconds_left() > 0:
            self._poll(0.1)
        for name in sorted(scripts & self._exits.keys()):
            exited = self._exits[name]
            if exited.how != "exited with status 0":
                raise RunError(f"{name} {exited.how} after the run had ended; the last checkpoint has its result")
        return outcome

    def _wait_until_ready(self) -> None:
        while (others := self._plan.complete(self.directory)) is None:
            self._poll(0.05)
        self._nodes |= {node.name: node for node in self._plan.nodes}
        launcher = next(iter(self._launchers.values()))
        self._launchers |= {node.name: launcher for node in others}
        self._living |= {node.name for node in others}
        launcher.start(others)
        self._watchdog.started(node.name for node in others)
        super()._wait_until_ready()

    def _kill_overdue(self) -> None:
        super()._kill_overdue()
        for name in sorted(self._living):
            seconds = self._watchdog.unusual_loop_seconds(name)
            if seconds is None:
                self._stuck.discard(name)
            elif name not in self._stuck:
                self._stuck.add(name)
                self._observer.note(
                    f"{name} has not made a step for {seconds:.0f} s, and others may be waiting for it; with "
                    "--hung-seconds such a process is killed, and its script starts again"
                )

    def _handle_other(self, sender: str, message: Message) -> None:
        match message:
            case control.Contributed():
                self._contributed.add(sender)
                self._stop_if_all_have_ended()
            case control.Measured(step=step, metrics=metrics, final=final, now=now):
                self._observer.measured(step, metrics, now, final=final)

    def _handle_exit(self, exited: NodeExited) -> None:
        node, lived = self._nodes[exited.name], exited.name in self._living
        self._exits[node.name] = exited
        # the run goes on without a successor that dies before it has joined
        super()._handle_exit(replace(exited, replaced=exited.replaced or node.life > 1))
        if not self._began:
            return
        died = lived and node.name not in self._living and node.computes and exited.how != "exited with status 0"
        if died and not self._stopping and not self._no_workers_error and node.name not in self._contributed:
            self._replace(node)
        self._stop_if_all_have_ended()

    def _replace(self, node: Node) -> None:
        if node.life > self._restarts:
            self._observer.note(f"{node.name} is left out: its script was started {node.life} times")
            return
        successor = node.successor()
        self._nodes[successor.name] = successor
        self._launchers[successor.name] = launcher = self._launchers[node.name]
        self._living.add(successor.name)
        launcher.start([successor])
        self._watchdog.started([successor.name])
        self._observer.note(f"{node.name} is replaced: its script starts again as {successor.name}")

    def _stop_if_all_have_ended(self) -> None:
        starting = any(self._nodes[name].computes for name in self._living - self._ready)
        if not self._stopping and not starting and self._workers() and self._workers() <= self._contributed:
            self._stopping = True
            for name in [self._plan.hub] if self._plan.hub else sorted(self._workers()):
                self._outbox.send(name, control.Stop(LOOPS_ENDED))

    def _end_message(self, name: str) -> control.End:
        assert self._outcome is not None
        return control.End((self._outcome.weights,) if self._nodes[name].computes else ())
