"""Ctrl-C during a run.

The first Ctrl-C asks the run to end in good order, with the joint model as it is. The second one, or one before
anything was learned, ends it at once. So does a deadline: a person who interrupts a run does not want to wait.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from queue import Empty, SimpleQueue
from types import FrameType

#: how long a run may take to end in good order, and when it is ended by force; all must be over within 3 seconds
SECONDS, FORCE_SECONDS = 1.5, 2.2


class Interruption:
    """Replaces Python's own handler, which raises KeyboardInterrupt wherever the program is.

    A signal is left alone if another handler is installed, or if it is ignored, as Ctrl-C is for a program that a shell
    has started in the background. Outside the main thread all signals are left alone.
    """

    def __init__(self) -> None:
        #: something was learned, so that an end in good order is worth the time
        self.worthwhile = False
        self._deadline = math.inf
        self._replaced: list[signal.Signals] = []
        self._over = False
        # unlike a Condition or an Event, it may be used by a handler that has interrupted a `put`
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
        """How long the run may still take to end; infinite unless it was interrupted."""
        return self._deadline - time.monotonic()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM)
            self._replaced = [number for number in numbers if signal.getsignal(number) is signal.default_int_handler]
        if self._replaced:
            self._watcher.start()
        for number in self._replaced:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        if self._replaced:
            self._signals.put(None)
            self._watcher.join()
        for number in self._replaced:
            signal.signal(number, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over and self.happened:
            return  # the run has ended meanwhile, as it was asked to
        if self.happened or self._over or not self.worthwhile:
            raise KeyboardInterrupt
        self._deadline = time.monotonic() + SECONDS
        self._signals.put(number)

    def _watch(self) -> None:
        """Interrupt again if the run has not ended in time: the main thread may be anywhere, also in user code."""
        if (number := self._signals.get()) is None:
            return
        try:
            self._signals.get(timeout=FORCE_SECONDS)
        except Empty:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
