"""Noticing processes that have stopped: a node reports what it is doing and for how long, and the driver judges.

A process that still responds may have stopped making progress, in a loss that never returns or an optimizer step that
never ends. So a node has a `Pulse`, a thread that takes no lock: it tells the driver what is under way, for how long,
and the longest that it took before. The driver has a `Watchdog`, which knows from this which processes to kill. Waiting
for others is not work, so a node that waits is never overdue.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tether.runtimes.process.control import Alive, Work

#: how often a node reports that it is alive
ALIVE_SECONDS = 0.5
#: how long a node may take to become ready: it imports torch and loads the data
START_SECONDS = 300.0
#: what a user's own loop does between two steps
LOOP = "step of its loop"
#: how long the first piece of work of a kind may take: it may compile or fill caches
FIRST_WORK_SECONDS = 300.0
#: how many times longer than the longest piece of work of its kind another may take
SLACK = 5.0
#: a longer time between two ticks of a clock is time in which the process did not run
GAP_SECONDS = 1.0


class AwakeClock:
    """Counts the seconds in which this process ran.

    While a process is stopped, or its machine asleep, neither it nor the others make progress, and none is to blame.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ticked_at = time.monotonic()

    def tick(self) -> float:
        """Count the time since the last call, up to a second, so call it often. The seconds so far."""
        now = time.monotonic()
        self.seconds += min(now - self._ticked_at, GAP_SECONDS)
        self._ticked_at = now
        return self.seconds


class Watchdog:
    """The driver's side: when each process started and last responded, and what it was doing then."""

    def __init__(self, hung_seconds: float, start_seconds: float | None = None, loop_seconds: float = math.inf) -> None:
        """`hung_seconds`: the least time without a response or without progress after which a process has stopped.

        `start_seconds`: how long a process may take to become ready, by default `START_SECONDS`. `loop_seconds`: how
        long a user's own loop may go without a step. It may do anything there, so nothing follows from its usual time.
        """
        self._hung_seconds = hung_seconds
        self._loop_seconds = loop_seconds
        self._start_seconds = START_SECONDS if start_seconds is None else start_seconds
        self._clock = AwakeClock()
        #: all by that clock
        self._started: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._killed: dict[str, float] = {}
        self._work: dict[str, tuple[Work, ...]] = {}

    def tick(self) -> None:
        """Let time pass; to be called often."""
        self._clock.tick()

    def started(self, names: Iterable[str]) -> None:
        """These processes have just been started, or are still given what they need to become ready."""
        self._started |= dict.fromkeys(names, self._clock.seconds)

    def heard(self, name: str) -> None:
        """A process has sent something."""
        self._heard[name] = self._clock.seconds

    def reported(self, name: str, work: tuple[Work, ...]) -> None:
        """A process has reported what it is doing."""
        self._work[name] = work

    def killed(self, name: str) -> None:
        """A process has been sent a signal that kills it."""
        self._killed[name] = self._clock.seconds

    def seconds_since_kill(self, name: str) -> float | None:
        """How long ago a process was killed that may not have exited yet; None if it was not."""
        return self._clock.seconds - self._killed[name] if name in self._killed else None

    def why_overdue(self, name: str, *, ready: bool) -> str:
        """Why a process is to be killed, or "" if all is well. `ready`: it has said hello."""
        if not ready:
            late = self._clock.seconds - self._started[name] > self._start_seconds
            return f"did not become ready within {self._start_seconds:g} s" if late else ""
        if self._clock.seconds - self._heard.setdefault(name, self._clock.seconds) > self._hung_seconds:
            return f"has not responded for {self._hung_seconds:g} s"
        for work in self._work.get(name, ()):
            limit = self._loop_seconds if work.what == LOOP else _limit(work, self._hung_seconds)
            if work.seconds > limit:
                return f"has been at one {work.what} for {work.seconds:.0f} s, longer than the {limit:.0f} s allowed,"
        return ""

    def unusual_loop_seconds(self, name: str) -> float | None:
        """How long a user's own loop has gone without a step, if that is so long that the user should know."""
        for work in self._work.get(name, ()):
            if work.what == LOOP and work.seconds > _limit(work, self._hung_seconds):
                return work.seconds
        return None


def _limit(work: Work, hung_seconds: float) -> float:
    """How long a piece of work usually takes at most."""
    return max(hung_seconds, FIRST_WORK_SECONDS if work.longest_seconds is None else SLACK * work.longest_seconds)


class Pulse:
    """The node's side: a thread that regularly tells the driver what this node is doing."""

    def __init__(self, send: Callable[[Alive], None], close: Callable[[], None]) -> None:
        """Only the thread calls `send`, and `close` at its end."""
        self._send = send
        self._close = close
        self._clock = AwakeClock()
        self._numbers = itertools.count()
        #: the pieces of work that are under way, by number: their kind, and since when
        self._under_way: dict[int, tuple[str, float]] = {}
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
        """Report this kind of work while it is under way; a thread that waits may let another do some of its kind."""
        number, since = next(self._numbers), self._clock.seconds
        self._under_way[number] = what, since
        try:
            yield
        finally:
            del self._under_way[number]
            self._longest[what] = max(self._longest.get(what, 0.0), self._clock.seconds - since)

    def _beat(self) -> None:
        while not self._over.is_set():
            now = self._clock.tick()
            under_way = self._under_way.copy()  # other threads change it
            work = [Work(what, now - since, self._longest.get(what)) for what, since in under_way.values()]
            self._send(Alive(tuple(work)))
            self._over.wait(ALIVE_SECONDS)
        self._close()
