"""Virtual time: a heap of actions in the order of (time, sequence number)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any


class Timeline:
    """Actions to come. Those due at the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def __bool__(self) -> bool:
        """Whether there is anything to come."""
        return bool(self._heap)

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` at this time."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, action, arguments))

    def advance(self) -> None:
        """Move to the time of the next action and run it."""
        self.now, _, action, arguments = heapq.heappop(self._heap)
        action(*arguments)


class Gate:
    """Holds actions back, in order, while a node is paused or a link is cut."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        #: when it opens
        self.until = 0.0
        #: the time of the last release that was scheduled
        self._release_at = 0.0
        self._releasing = False

    def is_closed(self) -> bool:
        """Whether an action that comes now must wait: for the time, or behind others that wait already."""
        return not self._releasing and (self._timeline.now < self.until or bool(self._waiting))

    def hold(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run the action once the gate opens."""
        self._waiting.append((action, arguments))
        self._schedule_release()

    def close(self, seconds: float) -> None:
        """Stay closed for this long from now on, or as long as it is closed already, whichever is longer."""
        self.until = max(self.until, self._timeline.now + seconds)
        self._schedule_release()

    def _schedule_release(self) -> None:
        if self._waiting and self.until > self._release_at:
            self._release_at = self.until
            self._timeline.at(self.until, self._release)

    def _release(self) -> None:
        if self._timeline.now < self._release_at:
            return  # a later release is scheduled
        self._releasing = True
        while self._waiting:
            action, arguments = self._waiting.popleft()
            action(*arguments)
        self._releasing = False
