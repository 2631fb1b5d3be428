"""One training in a process of its own: `python -m tether.service.training` imports torch, then waits for its job.

The job is a line of JSON on standard input, which stays open: when it closes, the service is gone, and this process
ends too. Everything else is files in the classifier's folder, which are complete or not there:

train.csv, test.csv   the rows to train on and those held out
run/                  the run directory
progress.jsonl        an evaluation a line
stop                  its presence asks for an end with the best model so far
result.json           how it ended, the figures on the held-out rows, and the rows that were classified wrongly
"""

from __future__ import annotations

import csv
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tether import api
from tether.errors import TetherError, UsageError
from tether.execution.checkpoint import replacing
from tether.service.model import Model, make_task
from tether.service.table import Row
from tether.task import Callback

DATA, TRAIN, TEST, ROWS, RUN, PROGRESS, STOP, RESULT = (
    "data.csv",
    "train.csv",
    "test.csv",
    "rows.json",
    "run",
    "progress.jsonl",
    "stop",
    "result.json",
)
#: of the rows, held out to measure the classifier
_HELD_OUT = 0.1
#: wrongly classified rows and confidences that are kept
_KEPT_MAX = 5_000
_NICENESS = 5


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Write the rows of a job: to train on, held out, and held out with all their classes."""
    train, held_out = split(rows)
    for name, part in ((TRAIN, train), (TEST, held_out or train)):
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows((row.text, *row.classes) for row in part)
            file.flush()
            os.fsync(file.fileno())
    with (folder / ROWS).open("w", encoding="utf-8") as file:
        json.dump([[row.line, row.text, row.classes] for row in held_out], file)
        file.flush()
        os.fsync(file.fileno())
    for place in (folder, folder.parent):  # the names of the files, too
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A tenth of the rows of every class is held out, always the same; a text is never on both sides.

    A class of which all other rows would be gone keeps its row.
    """
    by_text: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_text[row.text].append(row)
    left = Counter(label for row in rows for label in row.classes)
    order = np.random.default_rng(0).permutation(len(by_text))
    texts = list(by_text.values())
    by_class: dict[str, list[list[Row]]] = defaultdict(list)
    for index in order:
        by_class[texts[index][0].classes[0]].append(texts[index])
    aside: set[int] = set()
    owed = 0.0
    for label in sorted(by_class):
        owed += _HELD_OUT * len(by_class[label])
        for same in by_class[label]:
            taken = Counter(name for row in same for name in row.classes)
            if owed < 1:
                break
            if all(left[name] > count for name, count in taken.items()):
                left -= taken
                owed -= len(same)
                aside.update(row.line for row in same)
    return [row for row in rows if row.line not in aside], [row for row in rows if row.line in aside]


class _Progress(Callback):
    """Writes every evaluation, at most a few a second, and the first and last of all."""

    def __init__(self, file: Path) -> None:
        self._file = file
        #: samples of the longest training; most end sooner
        self.samples_max = 0.0
        self._began = time.monotonic()
        self._written = 0.0
        self._loss: float | None = None

    def write(self, **row: Any) -> None:
        row["seconds"] = round(time.monotonic() - self._began, 3)
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def on_progress(self, figures: dict[str, Any]) -> None:
        if figures.get("loss") is not None:
            self._loss = figures["loss"]

    def on_evaluation(self, step: int, samples: int, metrics: dict[str, float]) -> None:
        if time.monotonic() - self._written < 0.1:
            return
        self._written = time.monotonic()
        share = min(1.0, samples / self.samples_max) if self.samples_max else None
        seconds = time.monotonic() - self._began
        left = seconds * (1 - share) / share if share else None
        self.write(
            phase="training",
            share=share,
            seconds_left=left,
            step=step,
            samples=samples,
            metrics=metrics,
            training_loss=self._loss,
        )


def train(folder: Path, *, workers: int, seconds_max: float, encoder: Path | None = None) -> dict[str, Any]:
    """Train on the rows in a folder, measure on those held out, and return what result.json gets."""
    (folder / PROGRESS).unlink(missing_ok=True)
    progress = _Progress(folder / PROGRESS)
    progress.write(phase="reading")
    began = time.monotonic()
    stop_file = folder / STOP

    def stop() -> str | None:
        if stop_file.exists():
            return "stopped by its owner"
        return "time is up" if time.monotonic() - began > seconds_max else None

    task = make_task(folder / TRAIN, folder / TEST, encoder)
    task.on_linear = lambda _: progress.write(phase="linear")
    progress.samples_max = float(task.epochs * len(task.train_data()))
    run_dir = folder / RUN
    result = _resumed(run_dir, task, progress, stop) if (run_dir / "checkpoints").is_dir() else None
    if result is None:
        shutil.rmtree(run_dir, ignore_errors=True)
        result = api.run(task, workers=workers, run_dir=run_dir, callbacks=[progress], stop=stop, trace=False)
    progress.write(phase="measuring")
    model = Model(run_dir, encoder)
    held_out = [(line, text, classes) for line, text, classes in json.loads((folder / ROWS).read_text("utf-8"))]
    figures = measure(held_out, model.classify)
    for checkpoint in sorted((run_dir / "checkpoints").glob("*"))[:-1]:
        shutil.rmtree(checkpoint)
    return {
        **figures,
        "labels": len(model.labels),
        "reason": result.figures["reason"],
        "seconds": time.monotonic() - began,
    }


def _resumed(run_dir: Path, task: Any, progress: Callback, stop: Callable[[], str | None]) -> Any:
    """The result of a run that was interrupted, continued; None if it must begin anew."""
    try:
        return api.resume(run_dir, task, callbacks=[progress], stop=stop)
    except UsageError:
        return None


def measure(
    rows: Sequence[tuple[int, str, Sequence[str]]],
    classify: Callable[[Sequence[str], int], list[list[tuple[str, float]]]],
) -> dict[str, Any]:
    """Figures on held-out rows. An answer is right if it is any class of its row."""
    answers = [answer for at in range(0, len(rows), 256) for answer in classify([r[1] for r in rows[at : at + 256]], 1)]
    counts: Counter[tuple[str, str]] = Counter()
    wrong: list[dict[str, Any]] = []
    confidences: list[tuple[float, bool]] = []
    for (line, text, classes), [(found, confidence)] in zip(rows, answers, strict=True):
        right = found in classes
        actual = found if right else classes[0]
        counts[actual, found] += 1
        confidences.append((round(confidence, 4), right))
        if not right and len(wrong) < _KEPT_MAX:
            wrong.append(
                {"line": line, "text": text, "classes": list(classes), "found": found, "confidence": confidence}
            )
    names = sorted({name for pair in counts for name in pair})
    actual_rows, found_rows = Counter[str](), Counter[str]()
    for (actual, found), number in counts.items():
        actual_rows[actual] += number
        found_rows[found] += number
    classes_figures: list[dict[str, Any]] = []
    for name in names:
        hits = counts[name, name]
        precision = hits / found_rows[name] if found_rows[name] else 0.0
        recall = hits / actual_rows[name] if actual_rows[name] else 0.0
        f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
        classes_figures.append(
            {"class_name": name, "precision": precision, "recall": recall, "f1": f1, "rows": actual_rows[name]}
        )
    measured = [float(entry["f1"]) for entry in classes_figures if entry["rows"]]
    return {
        "held_out_rows": len(rows),
        "accuracy": sum(right for _, right in confidences) / len(rows) if rows else None,
        "macro_f1": sum(measured) / len(measured) if measured else None,
        "classes": classes_figures,
        "confusion": [
            {"actual": actual, "found": found, "rows": number} for (actual, found), number in sorted(counts.items())
        ],
        "confidences": confidences[:_KEPT_MAX],
        "misclassified": wrong,
    }


def write_json(file: Path, content: Any) -> None:
    """Complete and on disk, or not there."""
    with replacing(file) as made:
        made.write_text(json.dumps(content))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when its trainings end
    os.nice(_NICENESS)  # answers go first
    with suppress(OSError):  # where memory is short, the service stays
        Path("/proc/self/oom_score_adj").write_text("1000")
    line = sys.stdin.readline()
    if not line:
        return
    job = json.loads(line)
    threading.Thread(target=_end_with_the_service, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_DATA, (job["bytes_max"], job["bytes_max"]))
    folder = Path(job["folder"])
    try:
        encoder = Path(job["encoder"]) if job["encoder"] else None
        figures = train(folder, workers=job["workers"], seconds_max=job["seconds_max"], encoder=encoder)
        outcome = {"status": "Available", "description": "", "figures": figures}
    except (TetherError, MemoryError) as error:
        outcome = {"status": "Failed", "description": str(error).replace(str(folder), "data"), "figures": {}}
    write_json(folder / RESULT, outcome)


def _end_with_the_service() -> None:
    sys.stdin.read()
    os._exit(1)  # the processes of the run notice, and end


if __name__ == "__main__":
    main()
