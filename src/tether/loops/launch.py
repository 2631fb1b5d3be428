"""`tether launch`: run a script on several workers that stay tied to one joint model."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from pathlib import Path

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


def launch(
    script: Path | None,
    arguments: tuple[str, ...] = (),
    *,
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

    With `resume`, continue that run: what is not given is as it was then. A process that goes without a step for
    `hung_seconds` is killed, and its script starts again.
    """
    if hung_seconds is not None and not hung_seconds >= 2:
        raise UsageError(f"--hung-seconds must be at least 2, not {hung_seconds:g}")
    asked_at = time.monotonic()
    if resume is None:
        if script is None:
            raise UsageError("name a script: tether launch -n 4 train.py")
        _check_script(script)
        directory = RunDirectory.create(run_dir, f"{script.stem}-{(protocol or default_protocol(workers or 2)).name}")
    else:
        if run_dir is not None:
            raise UsageError("give either --run or --resume: a resumed run stays in its directory")
        directory = RunDirectory.open(resume)
    with directory.lock():
        restored: Restored | None = None
        if resume is not None:
            config = directory.read_config()
            kept = config["task"]
            if "script" not in kept:
                raise UsageError(f"{directory.path} is not a run of a script: continue it with 'tether resume'")
            restored = directory.load_checkpoint()
            if restored is None:
                raise UsageError(f"{directory.path} has no checkpoint to continue from: start the script again")
            if script is None:
                script, arguments = Path(kept["script"]), tuple(kept["arguments"])
                _check_script(script)
            workers = workers if workers is not None else config["workers"]
            if protocol is None and kept["protocol_given"]:
                protocol = make_protocol(config["protocol"])
            seed = config["seed"] if seed is None else seed
            if checkpoint_seconds is None:
                checkpoint_seconds = config["request"]["checkpoint_seconds"]
            threads = config["runtime"]["threads"] if threads is None else threads
            hung_seconds = kept.get("hung_seconds") if hung_seconds is None else hung_seconds
        assert script is not None
        count = workers if workers is not None else 2
        on = Local(workers=count, threads=threads if threads is not None else max(1, torch.get_num_threads() // count))
        request = Request(seed=seed or 0, checkpoint_seconds=30.0 if checkpoint_seconds is None else checkpoint_seconds)
        task = Script(script.absolute(), arguments)

        def plan(newest: Restored | None) -> LoopPlan:
            made = LoopPlan.of_script(
                task, protocol, on, request.seed, request.checkpoint_seconds, newest if newest is not None else restored
            )
            made.run_script = run_script
            made.hung_seconds = math.inf if hung_seconds is None else hung_seconds
            return made

        spec = {
            "script": task.path,
            "arguments": list(arguments),
            "protocol_given": protocol is not None,
            "hung_seconds": hung_seconds,
        }
        shown = protocol if protocol is not None else default_protocol(count)
        with Interruption() as interruption:
            return Execution(
                [plan],
                shown,
                on,
                request,
                directory,
                interruption,
                asked_at,
                progress or NotesOnly(),
                spec,
                joint=ScriptModel,
            ).run()


def _check_script(script: Path) -> None:
    if not script.is_file():
        raise UsageError(f"there is no script {script}: name a Python file, after all options of 'tether launch'")
