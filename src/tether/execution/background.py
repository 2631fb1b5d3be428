"""Jobs that one thread does while training goes on, in bounded memory."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable


class BackgroundQueue:
    """A thread that does one job at a time. If it falls behind, waiting jobs are dropped, but never the last one.

    Each job has a position, its number of samples, and runs after those with lower positions. When more than `room`
    jobs wait, the queue drops the one whose neighbours are nearest to each other, so that the jobs it does are spread
    evenly. A job at position 0 is never dropped.
    """

    def __init__(self, name: str, room: int = 1, *, newest_first: bool = False) -> None:
        self._room = room
        self._newest_first = newest_first
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        #: the positions of jobs that were begun
        self._begun = [0]
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, position: int, job: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.append((position, job))
            if len(self._waiting) > self._room:
                self._drop_one()
            self._changed.notify()

    def _drop_one(self) -> None:
        positions = sorted([*self._begun, *(position for position, _ in self._waiting)])
        gaps = {}
        for i, (position, _) in enumerate(self._waiting[:-1]):
            if position > 0:
                at = bisect.bisect_left(positions, position)
                gaps[i] = positions[at + 1] - positions[at - 1]
        if gaps:
            del self._waiting[min(gaps, key=gaps.__getitem__)]
            self.dropped += 1

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def first_position(self) -> float:
        """The lowest position of a job that waits; infinity if none does."""
        with self._changed:
            return min((position for position, _ in self._waiting), default=math.inf)

    def keep_only_last(self) -> None:
        """Drop all jobs that wait but the last."""
        with self._changed:
            self._waiting = self._waiting[-1:]

    def close(self, seconds_left: Callable[[], float] = lambda: math.inf) -> None:
        """Do the jobs that wait until no time is left, then end. Raises what went wrong in a job."""
        self._refuse_more()
        while self._thread.is_alive() and seconds_left() > 0:
            self._thread.join(0.1)
        self.abandon(0.0)
        self.raise_failure()

    def abandon(self, seconds: float) -> None:
        """Do the jobs that wait for this long, then drop the others and end."""
        self._refuse_more()
        self._thread.join(seconds)
        with self._changed:
            self._waiting.clear()

    def _refuse_more(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def raise_failure(self) -> None:
        """Raise what went wrong in a job, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                position, job = self._waiting.pop(-1 if self._newest_first else 0)
                self._begun.append(position)
            if self._failure is None:
                try:
                    job()
                except Exception as error:
                    self._failure = error
            del job  # and the weights that it holds
