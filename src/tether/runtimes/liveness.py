"""Noticing what has stopped: a node tells what it is doing and for how long, and the driver judges.

A process that still responds may have stopped all the same, in a loss that never returns or an optimizer step that
never ends. So a node has a `Pulse`, a thread that takes no lock: it tells the driver what is under way, for how long,
and how long that took at most before. Waiting for others is not work, so whoever waits is never overdue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tether.runtimes.control import Alive, Work

#: how often a node tells that it is alive
ALIVE_SECONDS = 0.5
#: how long the first piece of work of a kind may take, which may compile or fill caches, and how long a node may take
#: to come up, which imports torch and loads the data
START_SECONDS = 300.0
#: how much longer than the longest piece of work of its kind another may take
SLACK = 5.0
#: more time than this between two looks at a clock was no time of the process
GAP_SECONDS = 1.0


class AwakeClock:
    """Counts the seconds in which this process ran.

    While a process is stopped, or its machine asleep, neither it nor the others made progress, and nobody is to blame.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at = time.monotonic()

    def tick(self) -> float:
        """To be called often: what passes between two calls counts up to a second."""
        now = time.monotonic()
        self.seconds += min(now - self._looked_at, GAP_SECONDS)
        self._looked_at = now
        return self.seconds


def overdue_seconds(work: Work, hung_seconds: float) -> float | None:
    """The time that a piece of work may take, if it has taken longer."""
    usual = START_SECONDS if work.longest_seconds is None else SLACK * work.longest_seconds
    limit = max(hung_seconds, usual)
    return limit if work.seconds > limit else None


class Pulse:
    """A thread that tells the driver what this node is doing, every now and then."""

    def __init__(self, tell: Callable[[Alive], None], close: Callable[[], None]) -> None:
        """`tell` and then `close` are called in the thread alone."""
        self._tell = tell
        self._close = close
        self._clock = AwakeClock()
        self._since: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While this is under way, it is told; there is one of a kind at a time."""
        since = self._since[what] = self._clock.seconds
        try:
            yield
        finally:
            del self._since[what]
            self._longest[what] = max(self._longest.get(what, 0.0), self._clock.seconds - since)

    def _beat(self) -> None:
        while not self._over.is_set():
            now = self._clock.tick()
            under_way = self._since.copy()  # other threads change it
            work = [Work(what, now - since, self._longest.get(what)) for what, since in under_way.items()]
            self._tell(Alive(tuple(work)))
            self._over.wait(ALIVE_SECONDS)
        self._close()
