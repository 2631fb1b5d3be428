"""What the process of a worker runs: the user's script, as if it had been started by itself."""

from __future__ import annotations

import atexit
import importlib
import os
import random
import sys
import threading
import types
from contextlib import suppress
from importlib.machinery import ModuleSpec
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
    try:
        _execute(plan.task, node)
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
        error.__traceback__ = _of_script(plan.task, error.__traceback__)
        report_failure(spec, node, _as_seen_by_caller(plan.task, node, error))
        return False
    finally:
        _leave()


def _execute(script: Script, node: Node) -> None:
    """Execute the script as `python file arguments...` or `python -m module arguments...` would."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(script.path), __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    sys.argv = [str(script.path), *script.arguments]
    if script.module is None:
        sys.path.insert(0, str(script.path.parent))
    else:
        root = str(script.path.parents[script.module.count(".")])
        sys.path[:0] = [os.getcwd(), *([] if root in sys.path else [root])]
        main.__package__ = script.module.rpartition(".")[0]
        main.__spec__ = ModuleSpec(script.module, None, origin=str(script.path))
        if main.__package__:
            importlib.import_module(main.__package__)
    try:
        exec(script.compile(), main.__dict__)
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            what = f"status {exit_.code}" if isinstance(exit_.code, int) else str(exit_.code)
            raise TaskError(f"the script exited with {what}; what it printed is {_printed(node)}") from None


def _of_script(script: Script, traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback from the first line of the script on, which is what Python would print without Tether."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename != str(script.path):
        traceback = traceback.tb_next
    return traceback


def _as_seen_by_caller(script: Script, node: Node, error: Exception) -> Exception:
    if isinstance(error, TetherError):
        return error
    return TaskError(f"{describe_error(script, error)}; the traceback is {_printed(node)}")


def _printed(node: Node) -> str:
    """Where the output of this process is."""
    return "above" if node.index == 0 else f"in logs/{node.name}.log of the run directory"


def _leave() -> None:
    """Close the connections to the run, and do what Python does when a program ends."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    with suppress(Exception):
        atexit._run_exitfuncs()
    loop: Any = current()
    if isinstance(loop, TiedLoop):
        with suppress(Exception):
            loop.disconnect()
