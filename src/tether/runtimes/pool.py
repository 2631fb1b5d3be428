"""Threads that a node's loose work is given to.

Work runs without the node's lock; what follows from it runs under it. More work than threads waits in a queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Pool:
    """At most `threads` threads, started as they are needed."""

    def __init__(self, threads: int, lock: threading.Lock, failed: Callable[[Exception], None]) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="beside")
        self._lock = lock
        self._failed = failed
        self._under_way = 0
        self._idle = threading.Condition()

    def submit(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
        """Do the work in a thread, then hand its result on under the lock."""
        with self._idle:
            self._under_way += 1
        self._executor.submit(self._do, work, then)

    def settle(self) -> None:
        """Wait until all work is done; what follows from it may be yet to come, so the lock may be held."""
        with self._idle:
            self._idle.wait_for(lambda: self._under_way == 0)

    def close(self) -> None:
        """Begin nothing more; what has begun ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _do(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
        try:
            try:
                result = work()
            finally:
                with self._idle:
                    self._under_way -= 1
                    self._idle.notify_all()
            with self._lock:
                then(result)
        except Exception as error:
            self._failed(error)
