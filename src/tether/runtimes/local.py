"""Processes on one machine, linked by ZeroMQ and shared memory.

The driver, which is the caller's process, launches a process per node, tells all of them when one has died, and takes
in what they report. Protocol messages go straight from process to process.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zmq

from tether import errors
from tether.errors import NodesLost, RunError, TaskError, TetherError, UsageError, WireError
from tether.machine import Checkpoint, Evaluate
from tether.runtimes import control
from tether.runtimes.base import Observer, Outcome, Plan
from tether.runtimes.launch import Nursery
from tether.runtimes.link import Inbox, Outbox
from tether.runtimes.memory import create
from tether.runtimes.process import DRIVER, SHARED, TOLD, Birth, birth_certificate
from tether.wire import unpack_tree

#: how long processes are given to end by themselves
GRACE_SECONDS = 1.5
#: how long a process may take to come up: importing torch and loading the data
START_SECONDS = 300.0


@dataclass(frozen=True)
class Local:
    """Where to run: this machine, one process per worker and one for the hub."""

    workers: int = 2
    #: intra-operation threads of torch in each process
    threads: int = 1
    #: how often a run that has lost its hub or all its workers goes on by itself, from its last backup
    restarts: int = 3
    #: a process that has shown no sign of life for so long is ended
    hung_seconds: float = 60.0

    name = "local"
    virtual = False

    @property
    def processors(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.threads < 1:
            raise UsageError(f"workers and threads must be at least 1, not {self.workers} and {self.threads}")
        if self.restarts < 0 or not self.hung_seconds >= 2:
            raise UsageError(
                f"restarts must be at least 0 and hung_seconds at least 2, not {self.restarts} and {self.hung_seconds}"
            )

    def execute(self, plan: Plan, observer: Observer) -> Outcome:
        driver = Driver(self, plan, observer)
        try:
            return driver.run()
        finally:
            driver.close()

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "threads": self.threads,
            "restarts": self.restarts,
            "hung_seconds": self.hung_seconds,
        }


class Driver:
    """The caller's side of one run."""

    def __init__(self, settings: Local, plan: Plan, observer: Observer) -> None:
        self._settings = settings
        self._plan = plan
        self._observer = observer
        self._directory = Path(tempfile.mkdtemp(prefix="tether-"))
        #: the vector of all nodes, if they have one; it outlives each of them
        self._shared = self._share() if plan.shares else None
        self._context: zmq.Context[Any] = zmq.Context()
        self._inbox = Inbox(self._context, self._directory, DRIVER, control.FROM_NODE)
        self._outbox = Outbox(self._context, self._directory, DRIVER)
        self._nodes = {node.name: node for node in plan.nodes}
        self._logs: dict[str, IO[bytes] | None] = {}
        self._nursery = Nursery(self._log("nursery"))
        self._pids: dict[int, str] = {}
        self._living: set[str] = set()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._nursery.fileno(), zmq.POLLIN)
        self._outcome: Outcome | None = None
        self._said_hello: set[str] = set()
        self._said_bye: set[str] = set()
        self._meters: dict[str, Any] = {}
        self._spans: dict[str, Any] = {}
        self._stopping = False
        #: who died last when no worker was left, and until when the joint node may save what it has
        self._bereft = ""
        self._bereft_until = math.inf
        #: when each process was last heard of, and when that was last looked at
        self._heard: dict[str, float] = {}
        self._watched_at = time.monotonic()

    def _share(self) -> mmap.mmap:
        try:
            return create(self._directory, SHARED, self._plan.vector_bytes)
        except OSError as error:
            raise RunError(f"processes cannot share memory here ({error}): use apply='server'") from error

    def run(self) -> Outcome:
        for node in self._plan.nodes:
            birth = Birth(list(sys.path), node, self._directory, self._settings.threads, self._plan)
            self._pids[self._nursery.bear(birth_certificate(birth), self._log(node.name))] = node.name
            self._living.add(node.name)
        self._await(lambda: self._living <= self._said_hello, START_SECONDS, "coming up")
        members = tuple(node.name for node in self._plan.nodes if node.name in self._living)
        for name in members:
            self._outbox.send(name, control.Begin(members))
        limit = self._plan.seconds
        deadline = math.inf if limit is None else time.monotonic() + limit
        while self._outcome is None and time.monotonic() < self._bereft_until:
            self._turn(0.1)
            self._watch()
            late = f"{limit:g} s have passed" if time.monotonic() > deadline else None
            if not self._stopping and (reason := self._observer.stop_requested() or late):
                self._stopping = True
                for name in [self._plan.joint] if self._plan.joint else sorted(self._living):
                    self._outbox.send(name, control.Stop(reason))
        if self._bereft:
            raise NodesLost(self._bereft)
        assert self._outcome is not None
        ending = frozenset(self._living)  # who ends from now on has not died of anything
        for name in ending:
            self._outbox.send(name, control.End())
        deadline = time.monotonic() + 4 * GRACE_SECONDS
        while not ending <= self._said_bye and time.monotonic() < deadline:
            self._turn(0.1)
        self._outcome.lost = frozenset(self._nodes) - ending
        self._outcome.meters = self._meters
        self._outcome.spans = self._spans
        return self._outcome

    def close(self) -> None:
        """End every process, however the run ended, and leave nothing behind."""
        self._nursery.close(GRACE_SECONDS)
        self._context.destroy(linger=0)
        for log in filter(None, self._logs.values()):
            log.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _log(self, name: str) -> IO[bytes] | None:
        self._logs[name] = self._plan.log(name)
        return self._logs[name]

    def _await(self, done: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                missing = sorted(self._living - self._said_hello)
                raise RunError(
                    f"{', '.join(missing)} did not finish {what} within {seconds:g} s{self._log_of(missing[0])}"
                )
            self._turn(0.1)

    def _turn(self, seconds: float) -> None:
        """Wait for something to happen and take it in."""
        ready = dict(self._poller.poll(round(seconds * 1000)))
        while self._inbox.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._take_message()
        if self._nursery.fileno() in ready:
            for pid, status in self._nursery.deaths():
                self._take_death(self._pids[pid], status)

    def _watch(self) -> None:
        """End who shows no sign of life; what follows from that is what follows from any death."""
        now, limit = time.monotonic(), self._settings.hung_seconds
        if now - self._watched_at > limit / 2:  # it was this process that stood still
            self._heard = dict.fromkeys(self._living, now)
        self._watched_at = now
        for pid, name in self._pids.items():
            if name in self._living and now - self._heard.setdefault(name, now) > limit:
                self._observer.note(f"{name} has shown no sign of life for {limit:g} s and is ended")
                self._heard[name] = math.inf
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _take_message(self) -> None:
        try:
            sender, message = self._inbox.receive()
        except WireError as error:
            self._observer.note(f"a message was refused: {error}")
            return
        observer = self._observer
        if sender in self._living and self._heard.get(sender) != math.inf:
            self._heard[sender] = time.monotonic()
        match message:
            case control.Hello():
                self._said_hello.add(sender)
            case control.Report(meter=meter, now=now):
                self._meters[sender] = meter
                observer.meter(meter, now)
            case control.Row(values=values, now=now):
                observer.record(sender, values, now)
            case control.Evaluation(step=step, samples=samples, final=final, weights=weights, now=now):
                observer.evaluate(Evaluate(step, samples, final), weights, now)
            case control.Saved() as saved:
                state = unpack_tree(saved.state, saved.tensors)
                replica_state = unpack_tree(saved.replica_state, saved.tensors)
                effect = Checkpoint(saved.step, saved.samples, state, saved.final)
                observer.checkpoint(effect, saved.weights, replica_state, saved.now)
            case control.Finished(reason=reason, weights=weights, now=now):
                if self._plan.joint in ("", sender) and self._outcome is None:
                    # a copy, for what is lent would keep all of the node's memory
                    self._outcome = Outcome(weights.clone(), now, reason)
            case control.Bye(meter=meter, spans=spans):
                self._said_bye.add(sender)
                self._meters[sender] = meter
                self._spans[sender] = spans
            case control.Failed(kind=kind, text=text, traceback=told):
                raise _error(sender, kind, text, told)

    def _take_death(self, name: str, status: int) -> None:
        self._living.discard(name)
        if status == TOLD:
            deadline = time.monotonic() + 2.0
            while time.monotonic() < deadline and self._inbox.socket.poll(100):
                self._take_message()  # raises what it told
        if self._outcome is not None or name in self._said_bye:
            return
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        if name not in self._said_hello:
            raise RunError(f"{name} {how} before it was ready{self._log_of(name)}")
        if name == self._plan.joint:
            raise NodesLost(f"{name}, which holds the joint model, {how}{self._log_of(name)}")
        if any(self._nodes[other].computes for other in self._living):
            self._observer.note(f"{name} {how}; the others go on")
        else:
            self._bereft = f"no worker is left: {name} was the last and {how}{self._log_of(name)}"
            if self._plan.joint not in self._living:
                raise NodesLost(self._bereft)
            self._bereft_until = time.monotonic() + GRACE_SECONDS
        self._outbox.forget(name)
        for other in self._living:
            self._outbox.send(other, control.Lost(name))
        if self._bereft:
            self._outbox.send(self._plan.joint, control.Stop("no worker is left"))

    def _log_of(self, name: str) -> str:
        """The end of what a process printed, for an error message."""
        log = self._logs.get(name)
        if log is None:
            return ""
        text = Path(log.name).read_text(errors="replace").strip()
        return f"; it printed: {text[-1000:]}" if text else ""


def _error(node: str, kind: str, text: str, told: str) -> TetherError:
    """The error of a node, as the caller sees it."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, TetherError):
        return known(text if text.startswith(node) else f"{node}: {text}")
    return TaskError(f"{node}: {kind}: {text}\n{told}")
