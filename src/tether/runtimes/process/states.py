"""Collecting the states of workers, for checkpoints and for workers that join while the run goes on.

A worker's state is that of its optimizer and its random generators. It may be larger than the model, so the driver asks
for states rarely.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from tether.core.effects import Checkpoint
from tether.core.machine import Node
from tether.core.wire import unpack_tree
from tether.runtimes.base import NodeStates, Observer
from tether.runtimes.process import control

#: the share of the time that the states of workers may take on their way to the driver
STATES_SHARE = 0.02
#: how long the driver waits for states at first
STATES_SECONDS = 10.0


class StateCollection:
    """Keeps track of one request at a time for the states of some nodes.

    The next request is due when every node has answered the last one, and that took no more than `share` of the time
    since. A node is left out if its answer takes longer than `timeout_seconds`, or than twice what the last answers
    took if that is longer.
    """

    _numbers = itertools.count(1)

    def __init__(self, share: float = STATES_SHARE, timeout_seconds: float = STATES_SECONDS) -> None:
        self._share = share
        self._timeout_seconds = timeout_seconds
        #: by node: what has come in time
        self.states: dict[str, Any] = {}
        self._missing: set[str] = set()
        self._number = 0
        self._requested_at = -math.inf
        self._took_seconds = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next request."""
        return not self._missing and (now - self._requested_at) * self._share >= self._took_seconds

    def request(self, names: set[str], now: float) -> int:
        """Begin to wait for the states of these nodes. The number of the request, which the answers carry."""
        self.states, self._missing = {}, set(names)
        self._number, self._requested_at = next(self._numbers), now
        return self._number

    def add(self, name: str, number: int, state: Any, now: float) -> None:
        """Take in an answer. One to an earlier request is ignored, and one that is too late only ends the wait."""
        if number == self._number and name in self._missing:
            if not self.is_done(now):
                self.states[name] = state
            self.forget(name, now)

    def forget(self, name: str, now: float) -> None:
        """Stop waiting for a node."""
        if name in self._missing:
            self._missing.remove(name)
            if not self._missing:
                self._took_seconds = now - self._requested_at

    def is_done(self, now: float) -> bool:
        """Whether every node has answered, or has had its time."""
        timeout_seconds = max(self._timeout_seconds, 2 * self._took_seconds)
        return not self._missing or now - self._requested_at >= timeout_seconds


class CheckpointAssembly:
    """Puts a checkpoint of the joint model together with the states of the workers, and gives both to the observer."""

    def __init__(
        self, nodes: Mapping[str, Node], observer: Observer, request: Callable[[StateCollection, set[str]], None]
    ) -> None:
        """`request` asks these nodes for their states, for this collection. `nodes` may grow."""
        self._nodes = nodes
        self._observer = observer
        self._request = request
        self.collection = StateCollection()
        #: the checkpoint that waits for states, and the node that sent it
        self._pending: tuple[str, control.Checkpoint] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint waits for states."""
        return self._pending is not None

    def add(self, sender: str, checkpoint: control.Checkpoint, workers: set[str], now: float) -> None:
        """Save a checkpoint once the workers have sent their states, or at once if it is too early to ask for them.

        A checkpoint that still waits gives way to a newer one.
        """
        waits = self.is_pending
        self._pending = sender, checkpoint
        if checkpoint.final or (not waits and self.collection.is_due(now)):
            self._request(self.collection, workers - {sender})
        elif not waits:
            self._save(with_states=False)

    def save_if_done(self, now: float) -> None:
        """Save the checkpoint that waits if there is nothing to wait for any more."""
        if self.is_pending and self.collection.is_done(now):
            self.save_pending()

    def save_pending(self) -> None:
        """Save the checkpoint that waits, if there is one, with the states that have come."""
        if self.is_pending:
            self._save(with_states=True)

    def _save(self, with_states: bool) -> None:
        assert self._pending is not None
        (sender, saved), self._pending = self._pending, None
        effect = Checkpoint(saved.step, saved.samples, unpack_tree(saved.state, saved.tensors), saved.final)
        hub, workers = unpack_tree(saved.replica_state, saved.tensors), None
        if with_states:
            states, self.collection.states = self.collection.states, {}
            if self._nodes[sender].computes:
                states, hub = {**states, sender: hub}, {}
            workers = {self._nodes[name].index: state for name, state in states.items()} or None
        self._observer.checkpoint(effect, saved.weights, NodeStates(hub, workers), saved.now)
