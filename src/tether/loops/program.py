"""What the process of a worker runs: the user's script, as if it had been started by itself."""

from __future__ import annotations

import atexit
import io
import random
import sys
import types
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from tether.core.machine import Node
from tether.errors import RunError, TaskError, TetherError, UsageError
from tether.loops import process
from tether.loops.loop import TiedLoop, current
from tether.loops.plan import LoopPlan, Script
from tether.runtimes.process.node import report_failure
from tether.runtimes.process.spec import NodeSpec
from tether.task import describe_error


def run_script(spec: NodeSpec, node: Node) -> bool:
    """Run the script to its end, and end its loop. False if an error ended it, which the driver has been told."""
    plan = spec.plan
    assert isinstance(plan, LoopPlan) and isinstance(plan.task, Script)
    process.take(process.Place(spec, node, plan))
    torch.set_num_threads(spec.threads)
    random.seed()  # otherwise all processes would have the generators of the fork server
    np.random.seed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        _execute(plan.task)
        loop = current()
        if loop is None:
            raise UsageError(
                f"{plan.task.path} ended without calling tether.join(model, optimizer): call it before the loop, or "
                "start the script with python alone"
            )
        loop.close()
        return True
    except KeyboardInterrupt as interrupt:
        if (loop := current()) is not None and loop.closed:
            return True  # the run was ended, and the script with it
        report_failure(spec, node, RunError(f"{type(interrupt).__name__} in the script"))
        return False
    except Exception as error:
        report_failure(spec, node, _as_seen_by_caller(plan.task, error))
        return False
    finally:
        _leave()


def _execute(script: Script) -> None:
    """Execute the file as `python file arguments...` would."""
    path = script.path
    sys.argv = [str(path), *script.arguments]
    sys.path.insert(0, str(path.parent))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            what = f"status {exit_.code}" if isinstance(exit_.code, int) else str(exit_.code)
            raise TaskError(f"the script exited with {what}") from exit_


def _as_seen_by_caller(script: Script, error: Exception) -> Exception:
    if isinstance(error, TetherError):
        return error
    return TaskError(f"{describe_error(script, error)}; the traceback is in its log or above")


def _leave() -> None:
    """Close the connections to the run, and do what Python does when a program ends."""
    with suppress(Exception):
        atexit._run_exitfuncs()
    loop: Any = current()
    if isinstance(loop, TiedLoop):
        with suppress(Exception):
            loop.disconnect()
