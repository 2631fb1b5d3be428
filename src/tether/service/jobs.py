"""The queue of trainings: a bounded number runs at once, each in its own process, and one process waits warmed up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tether.service.settings import Settings
from tether.service.store import AVAILABLE, FAILED, Store
from tether.service.table import Row
from tether.service.training import DATA, PROGRESS, RESULT, STOP, write_rows

#: a training that does not end by itself when its time is up is killed after this much more
_GRACE_SECONDS = 120.0
CANCELLED = "Cancelled by its owner"


class Jobs:
    """Starts trainings in the order in which they were asked for, and writes down how they end."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._folder = settings.data / "classifiers"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._changed = threading.Condition()
        self._queue: list[str] = []
        self._running: dict[str, subprocess.Popen[str]] = {}
        #: why a running training is to end, by its id
        self._ending: dict[str, str] = {}
        self._spare: subprocess.Popen[str] | None = None
        self._closed = False

    def start(self) -> None:
        """Take up what an earlier service has left, and begin."""
        known = self._store.ids()
        for folder in self._folder.iterdir():
            if folder.name not in known:  # its upload was never acknowledged, or it was deleted
                shutil.rmtree(folder)
        self._queue = [row["id"] for row in self._store.unfinished()]
        threading.Thread(target=self._dispatch, name="jobs", daemon=True).start()

    def folder(self, classifier_id: str) -> Path:
        return self._folder / classifier_id

    def prepare(self, classifier_id: str, data: bytes | bytearray, rows: Sequence[Row]) -> None:
        """Write the files of a job, before it is acknowledged."""
        folder = self.folder(classifier_id)
        folder.mkdir()
        with (folder / DATA).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        write_rows(folder, rows)

    def enqueue(self, classifier_id: str) -> None:
        with self._changed:
            self._queue.append(classifier_id)
            self._changed.notify_all()

    def position(self, classifier_id: str) -> int | None:
        """0 while it runs, 1 if it is the next one, and so on; None if it is neither queued nor running."""
        with self._changed:
            if classifier_id in self._running:
                return 0
            return self._queue.index(classifier_id) + 1 if classifier_id in self._queue else None

    def progress(self, classifier_id: str, after: int = 0) -> list[dict[str, Any]]:
        """The lines of progress from this number on."""
        try:
            lines = (self.folder(classifier_id) / PROGRESS).read_text().splitlines(keepends=True)
        except OSError:
            return []
        return [json.loads(line) for line in lines[after:] if line.endswith("\n")]

    def stop(self, classifier_id: str) -> bool:
        """Ask a running training to end with the best model so far; whether it is running."""
        if self.position(classifier_id) != 0:
            return False
        (self.folder(classifier_id) / STOP).touch()
        return True

    def cancel(self, classifier_id: str) -> None:
        """End a training, or take it off the queue; it is written down as failed."""
        with self._changed:
            if classifier_id in self._queue:
                self._queue.remove(classifier_id)
                self._store.finish(classifier_id, FAILED, CANCELLED, {})
                return
            process = self._running.get(classifier_id)
            if process is None:
                return
            self._ending[classifier_id] = CANCELLED
        _kill(process)
        with self._changed:
            self._changed.wait_for(lambda: classifier_id not in self._running, timeout=30)

    def remove(self, classifier_id: str) -> None:
        """Delete the files of a classifier that is no longer in the tables."""
        self.cancel(classifier_id)
        shutil.rmtree(self.folder(classifier_id), ignore_errors=True)

    def close(self) -> None:
        """End all processes. Trainings that ran begin again with the next service."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            processes = [*self._running.values(), *([self._spare] if self._spare is not None else [])]
        for process in processes:
            _kill(process)
            process.wait()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while True:
            with self._changed:
                if self._spare is None and not self._closed and not (self._queue or self._running):
                    self._spare = _spawn()
                self._changed.wait_for(
                    lambda: self._closed or (self._queue and len(self._running) < self._settings.jobs_at_once)
                )
                if self._closed:
                    return
                classifier_id = self._queue.pop(0)
                process, self._spare = self._spare, None
                if process is None or process.poll() is not None:
                    process = _spawn()
                self._running[classifier_id] = process
            threading.Thread(target=self._follow, args=(classifier_id, process), daemon=True).start()

    def _follow(self, classifier_id: str, process: subprocess.Popen[str]) -> None:
        """One training from its start to its end."""
        folder, settings = self.folder(classifier_id), self._settings
        again = False
        try:
            # a result without an end in the tables: the service was killed between the two
            if not (folder / RESULT).exists():
                (folder / STOP).unlink(missing_ok=True)
                job = {
                    "folder": str(folder),
                    "workers": settings.workers,
                    "encoder": str(settings.encoder) if settings.encoder is not None else None,
                    "seconds_max": settings.training_seconds_max,
                    "bytes_max": settings.training_bytes_max,
                }
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(job) + "\n")
                    process.stdin.flush()
                try:
                    process.wait(settings.training_seconds_max + _GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    self._ending[classifier_id] = "The training took too long"
                    _kill(process)
                    process.wait()
            if self._closed:
                return
            if (why := self._ending.pop(classifier_id, "")) != "":
                self._store.finish(classifier_id, FAILED, why, {})
            elif (folder / RESULT).exists():
                result = json.loads((folder / RESULT).read_text())
                kept = {name: result["figures"].get(name) for name in ("accuracy", "macro_f1", "seconds", "reason")}
                kept["held_out_rows"] = result["figures"].get("held_out_rows")
                available = result["status"] == AVAILABLE
                self._store.finish(classifier_id, result["status"], result["description"], kept if available else {})
                if not available:
                    (folder / RESULT).unlink()
            else:  # it was killed, or crashed; how often the service itself was killed does not count
                crashes = self._store.count_crash(classifier_id)
                again = 0 < crashes < settings.crashes_max
                if crashes >= settings.crashes_max:
                    why = f"The training ended {crashes} times without a result"
                    self._store.finish(classifier_id, FAILED, why, {})
        finally:
            _kill(process)
            process.wait()
            with self._changed:
                self._running.pop(classifier_id, None)
                if again:
                    self._queue.append(classifier_id)
                self._changed.notify_all()


def _spawn() -> subprocess.Popen[str]:
    """A process that imports torch and then waits for a job."""
    return subprocess.Popen(
        [sys.executable, "-m", "tether.service.training"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Flusher:
    """Writes counted usage down every few seconds."""

    def __init__(self, store: Store, seconds: float = 5.0) -> None:
        self._store, self._seconds = store, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self._store.flush()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._store.flush()
