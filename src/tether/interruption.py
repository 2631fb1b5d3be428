"""Ctrl-C during a run.

The first one asks the run to end in good order, with the joint model as it is; the second one, or one before anything
was learned, ends it at once. So does time: a person who interrupts a run does not wait for it.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from queue import Empty, SimpleQueue
from types import FrameType

#: how long a run may take to end in good order, and when it is ended otherwise; all is to be over within 3 seconds
SECONDS, AT_LAST_SECONDS = 1.5, 2.2


class Interruption:
    """Takes the place of Python's own handler, which raises KeyboardInterrupt wherever the program is.

    A signal is left alone if somebody else handles it or it is ignored, as Ctrl-C is for a program that a shell has
    started in the background; so are all signals outside of the main thread.
    """

    def __init__(self) -> None:
        #: something was learned, so an end in good order is worth its time
        self.worthwhile = False
        self._deadline = math.inf
        self._taken: list[signal.Signals] = []
        self._over = False
        # may be put into by a handler that has interrupted a `put`, unlike a Condition or an Event
        self._signals: SimpleQueue[int | None] = SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name="interruption", daemon=True)

    @property
    def happened(self) -> bool:
        """Whether the run was asked to end in good order."""
        return self._deadline < math.inf

    @property
    def reason(self) -> str | None:
        """Why the run is to end; None if it goes on."""
        return "interrupted by the user" if self.happened else None

    def seconds_left(self) -> float:
        """How long the run may still take to end: without limit unless it was interrupted."""
        return self._deadline - time.monotonic()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM)
            self._taken = [number for number in numbers if signal.getsignal(number) is signal.default_int_handler]
        if self._taken:
            self._watcher.start()
        for number in self._taken:
            signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        if self._taken:
            self._signals.put(None)
            self._watcher.join()
        for number in self._taken:
            signal.signal(number, signal.default_int_handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._over and self.happened:
            return  # the run has ended meanwhile, as was asked
        if self.happened or self._over or not self.worthwhile:
            raise KeyboardInterrupt
        self._deadline = time.monotonic() + SECONDS
        self._signals.put(number)

    def _watch(self) -> None:
        """Interrupt again if the run has not ended in time: the main thread may be anywhere, in the user's code too."""
        if (number := self._signals.get()) is None:
            return
        try:
            self._signals.get(timeout=AT_LAST_SECONDS)
        except Empty:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
