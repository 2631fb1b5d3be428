"""`tether launch`: run a script on several workers that stay tied to one joint model."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tether.errors import UsageError
from tether.execution.checkpoint import Restored
from tether.execution.directory import RunDirectory
from tether.execution.execute import Execution
from tether.execution.goals import Request
from tether.execution.interruption import Interruption
from tether.execution.progress import Progress
from tether.execution.result import Result
from tether.loops.plan import LoopPlan, Script, ScriptModel, default_protocol
from tether.loops.program import run_script
from tether.protocols import Options
from tether.protocols import make as make_protocol
from tether.runtimes.local import Local


class NotesOnly(Progress):
    """Leaves the terminal to the script, and prints only what a person should know."""

    def note(self, text: str) -> None:
        with suppress(OSError):  # a file on a full disk
            print(f"tether: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Settings:
    """How a script is to run; None where nobody has said it."""

    workers: int | None = None
    protocol: Options | None = None
    seed: int | None = None
    checkpoint_seconds: float | None = None
    threads: int | None = None
    hung_seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is wrong before anything is created."""
        if self.hung_seconds is not None and not self.hung_seconds >= 2:
            raise UsageError(f"--hung-seconds must be at least 2, not {self.hung_seconds:g}")
        self.on()
        self.request()

    def completed(self, config: dict[str, Any]) -> _Settings:
        """These settings, and where they say nothing, those of an earlier part of the run."""
        given = config["task"]["protocol_given"]
        earlier = _Settings(
            config["workers"],
            make_protocol(config["protocol"]) if given else None,
            config["seed"],
            config["request"]["checkpoint_seconds"],
            config["runtime"]["threads"],
            config["task"].get("hung_seconds"),
        )
        return _Settings(**{name: vars(earlier)[name] if own is None else own for name, own in vars(self).items()})

    def on(self) -> Local:
        workers = 2 if self.workers is None else self.workers
        share = max(1, torch.get_num_threads() // max(1, workers))
        return Local(workers=workers, threads=share if self.threads is None else self.threads)

    def request(self) -> Request:
        seconds = 30.0 if self.checkpoint_seconds is None else self.checkpoint_seconds
        return Request(seed=self.seed or 0, checkpoint_seconds=seconds)

    def shown_protocol(self) -> Options:
        """The protocol as far as it is known before the script has joined."""
        return self.protocol if self.protocol is not None else default_protocol(self.on().workers)


def launch(
    script: Path | str | None,
    arguments: tuple[str, ...] = (),
    *,
    is_module: bool = False,
    workers: int | None = None,
    protocol: Options | None = None,
    run_dir: Path | None = None,
    resume: Path | None = None,
    seed: int | None = None,
    checkpoint_seconds: float | None = None,
    threads: int | None = None,
    hung_seconds: float | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run a script in several processes until the loops of all of them have ended.

    `is_module`: `script` is the name of a module, as `python -m` takes it. With `resume`, continue that run: what is
    not given is as it was then. A process that goes without a step for `hung_seconds` is killed, and its script starts
    again.
    """
    asked_at = time.monotonic()
    settings = _Settings(workers, protocol, seed, checkpoint_seconds, threads, hung_seconds)
    found: Script | None = None
    if script is not None:
        found = Script.of_module(str(script), arguments) if is_module else Script.of_file(Path(script), arguments)
    if resume is None:
        if found is None:
            raise UsageError("name a script: tether launch -n 4 train.py")
        directory = RunDirectory.create(run_dir, f"{found.name}-{settings.shown_protocol().name}")
        with directory.lock():
            return _run(found, settings, directory, None, asked_at, progress)
    if run_dir is not None:
        raise UsageError("give either --run or --resume: a resumed run stays in its directory")
    directory = RunDirectory.open(resume)
    with directory.lock():
        config = directory.read_config()
        if "script" not in config["task"]:
            raise UsageError(f"{directory.path} is not a run of a script: continue it with 'tether resume'")
        restored = directory.load_checkpoint()
        if restored is None:
            raise UsageError(f"{directory.path} has no checkpoint to continue from: start the script again")
        found = found or _script_of(config["task"])
        return _run(found, settings.completed(config), directory, restored, asked_at, progress)


def _script_of(kept: dict[str, Any]) -> Script:
    """The script of a run that is resumed."""
    script = Script.of_file(Path(kept["script"]), tuple(kept["arguments"]))
    script.module = kept.get("module")
    return script


def _run(
    script: Script,
    settings: _Settings,
    directory: RunDirectory,
    restored: Restored | None,
    asked_at: float,
    progress: Progress | None,
) -> Result:
    on, request = settings.on(), settings.request()

    def plan(newest: Restored | None) -> LoopPlan:
        made = LoopPlan.of_script(
            script, settings.protocol, on, request.seed, request.checkpoint_seconds, newest or restored
        )
        made.run_script = run_script
        made.hung_seconds = math.inf if settings.hung_seconds is None else settings.hung_seconds
        return made

    spec = {
        "script": script.path,
        "module": script.module,
        "arguments": list(script.arguments),
        "protocol_given": settings.protocol is not None,
        "hung_seconds": settings.hung_seconds,
    }
    with Interruption() as interruption:
        return Execution(
            [plan],
            settings.shown_protocol(),
            on,
            request,
            directory,
            interruption,
            asked_at,
            progress or NotesOnly(),
            spec,
            joint=ScriptModel,
        ).run()
