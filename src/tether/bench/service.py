"""`tether serve` under load: how fast it answers while it trains, and what it loses when it is killed.

The service and the generator of requests are processes of their own. A kill is SIGKILL at a random moment, in turns of
the service and of one process of a training; what was acknowledged before is then compared with what is there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from tether.bench.common import Report, Row
from tether.errors import TetherError

_QUESTIONS = {
    "temperature": ("hot", "cold", "warm", "chilly", "mild"),
    "conditions": ("windy", "rainy", "snowy", "sunny", "cloudy"),
}
_FRAMES = (
    "Is it {} today?",
    "Will it be {}?",
    "How {} is it outside?",
    "Is {} weather coming?",
    "Should I expect a {} day?",
)


def service(
    data: Annotated[Path | None, typer.Option(help="The CSV to upload; by default 50 questions made up.")] = None,
    rate: Annotated[float, typer.Option(min=1, help="Requests of classify a second.")] = 200.0,
    seconds: Annotated[float, typer.Option(min=0, help="How long to send them; 0 for no load.")] = 60.0,
    kills: Annotated[int, typer.Option(min=0, help="How often to kill the service or a training.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 0,
) -> Report:
    """Seconds until an upload answers, milliseconds of classify while a training runs, and losses after kills."""
    upload = data.read_bytes() if data is not None else _made_up()
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        served = _Served(Path(place, "first"))
        try:
            began = time.monotonic()
            made = served.create(upload)
            served.wait(made)
            ratios["seconds until available"] = time.monotonic() - began
            if seconds:
                rows.append({"measured": "load", **_under_load(served, made, rate, seconds)})
                ratios |= {f"{name} of classify": rows[-1][name] for name in ("p50_ms", "p99_ms", "failed")}
        finally:
            served.end()
        if kills:
            rows.append({"measured": "kills", **_killed(Path(place, "second"), upload, kills, random.Random(seed))})
            ratios["acknowledged and lost"] = rows[-1]["lost"]
    return {"benchmark": "service", "rate": rate, "seconds": seconds, "kills": kills, "rows": rows, "ratios": ratios}


def _made_up() -> bytes:
    rows = [(frame.format(word), label) for label, words in _QUESTIONS.items() for word in words for frame in _FRAMES]
    return "".join(f"{text},{label}\n" for text, label in rows).encode()


def _training_rows(seed: int) -> bytes:
    """Rows that take a while: 4,000 of 40 classes, of which each has words of its own."""
    draw = random.Random(seed)
    rows = []
    for number in range(4_000):
        label = number % 40
        words = [f"w{draw.randrange(2_000)}" for _ in range(10)] + [f"c{label}x{draw.randrange(5)}"]
        draw.shuffle(words)
        rows.append(f"{' '.join(words)},class {label}\n")
    return "".join(rows).encode()


class _Served:
    """A service in a process of its own."""

    def __init__(self, data: Path, key: str = "") -> None:
        command = [sys.executable, "-m", "tether", "serve", "--port", "0", "--data", str(data)]
        environment = {**os.environ, "NO_COLOR": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        self.key = key or self.process.stdout.readline().split()[1]

    def ask(self, path: str, body: bytes | None = None, method: str | None = None, kind: str = "") -> bytes:
        request = urllib.request.Request(self.url + path, body, method=method)
        request.add_header("Authorization", f"Bearer {self.key}")
        request.add_header("Content-Type", kind or "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: bytes = answer.read()
        return found

    def create(self, data: bytes, name: str = "bench") -> str:
        opening = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
        metadata = json.dumps({"language": "en", "name": name})
        body = (
            f"{opening.format('training_metadata')}{metadata}\r\n{opening.format('training_data')}".encode()
            + data
            + b"\r\n--b--\r\n"
        )
        made: str = json.loads(self.ask("/v1/classifiers", body, kind="multipart/form-data; boundary=b"))[
            "classifier_id"
        ]
        return made

    def about(self, classifier_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask(f"/v1/classifiers/{classifier_id}"))
        return found

    def wait(self, classifier_id: str) -> None:
        while (about := self.about(classifier_id))["status"] == "Training":
            time.sleep(0.05)
        if about["status"] != "Available":
            raise TetherError(f"the training of the benchmark has failed: {about['status_description']}")

    def training_processes(self) -> list[int]:
        """The processes below the service."""
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:  # it has just ended
                    continue
                parents.setdefault(parent, []).append(int(entry.name))
        found, queue = [], [self.process.pid]
        while queue:
            children = parents.get(queue.pop(), [])
            found += children
            queue += children
        return found

    def kill(self) -> None:
        self.process.kill()
        self._close()

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self._close()

    def _close(self) -> None:
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _under_load(served: _Served, classifier_id: str, rate: float, seconds: float) -> Row:
    """Requests while trainings follow each other."""
    ended = threading.Event()
    trainings = 0

    def train() -> None:
        nonlocal trainings
        while not ended.is_set():
            made = served.create(_training_rows(trainings), "beside")
            while served.about(made)["status"] == "Training" and not ended.wait(0.5):
                pass
            trainings += 1

    trainer = threading.Thread(target=train)
    trainer.start()
    settings = {
        "url": f"{served.url}/v1/classifiers/{classifier_id}/classify",
        "headers": {"Authorization": f"Bearer {served.key}", "Content-Type": "application/json"},
        "body": json.dumps({"text": "How hot is it today?"}),
        "rate": rate,
        "seconds": seconds,
    }
    try:
        command = [sys.executable, "-m", "tether.bench.load"]
        done = subprocess.run(command, input=json.dumps(settings), capture_output=True, text=True, check=True)
    finally:
        ended.set()
        trainer.join()
    return {**json.loads(done.stdout), "trainings": trainings, "load_average": os.getloadavg()[0]}


def _killed(data: Path, upload: bytes, kills: int, draw: random.Random) -> Row:
    """Kill at random moments, start again, and compare."""
    served = _Served(data)
    kept: dict[str, bytes] = {}
    deleted: set[str] = set()
    keys = [served.key]
    lost: list[str] = []
    for number in range(kills):
        content = (
            upload + f"one more question number {number},{'temperature' if number % 2 else 'conditions'}\n".encode()
        )

        def write(served: _Served = served, number: int = number, content: bytes = content) -> None:
            """What is acknowledged until the kill; what is under way then may or may not be there."""
            with suppress(OSError, ValueError, HTTPException):  # the service was killed meanwhile
                kept[served.create(content, f"kill {number}")] = content
                keys.append(json.loads(served.ask("/api/keys", b'{"name": "bench"}'))["key"])
                if number % 5 == 4:
                    gone = next(iter(kept))
                    kept.pop(gone)
                    served.ask(f"/v1/classifiers/{gone}", method="DELETE")
                    deleted.add(gone)

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(draw.uniform(0, 4.0) if number % 3 else draw.uniform(0, 0.05))
        if number % 2:
            processes = served.training_processes()
            if processes:
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(processes), signal.SIGKILL)
            writer.join()
        else:
            served.kill()
            writer.join()
            served = _Served(data, keys[0])
    for classifier_id, content in kept.items():
        try:
            served.wait(classifier_id)
            if served.ask(f"/api/classifiers/{classifier_id}/data") != content:
                lost.append(classifier_id)
        except (urllib.error.HTTPError, TetherError) as error:
            lost.append(f"{classifier_id}: {error}")
    for classifier_id in deleted:
        try:
            served.about(classifier_id)
            lost.append(f"{classifier_id} was deleted")
        except urllib.error.HTTPError:
            pass
    for key in keys:
        served.key = key
        try:
            served.ask("/v1/classifiers")
        except urllib.error.HTTPError:
            lost.append("a key")
    served.end()
    return {
        "kills": kills,
        "classifiers": len(kept),
        "deleted": len(deleted),
        "keys": len(keys),
        "lost": len(lost),
        "which": "; ".join(lost),
    }
