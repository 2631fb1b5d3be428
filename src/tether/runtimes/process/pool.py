"""Threads for a node's unordered work.

Work runs without the node's lock; its continuation runs under the lock. When all threads are busy, work waits in a
queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Pool:
    """At most `threads` threads, started as they are needed."""

    def __init__(self, threads: int, lock: threading.Lock, on_error: Callable[[Exception], None]) -> None:
        """`on_error` is given any error of the work, in the thread that did it."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="pool")
        self._lock = lock
        self._on_error = on_error
        self._under_way = 0
        self._idle = threading.Condition()

    def submit(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
        """Do the work in a thread, then call `then` with its result under the lock."""
        with self._idle:
            self._under_way += 1
        self._executor.submit(self._run, work, then)

    def drain(self) -> None:
        """Wait until all work is done. Continuations may still be to come, so the caller may hold the lock."""
        with self._idle:
            self._idle.wait_for(lambda: self._under_way == 0)

    def close(self) -> None:
        """Begin no more work. Work that has begun ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Callable[[], T], then: Callable[[T], Any]) -> None:
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
            self._on_error(error)
