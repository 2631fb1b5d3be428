"""Every error that Tether raises on purpose.

TetherError
+-- UsageError          the request cannot be met: an unknown name, a bad value, a missing extra
|   +-- TaskError       the task itself is wrong: a missing method, a loss that is not a scalar
|       +-- Diverged    losses, gradients or weights are no longer finite
|   +-- Damaged         a file of a run is damaged
+-- RunError            a run that started properly ended badly
|   +-- NodesLost       no worker is left, or the hub has died: the run can resume from its last checkpoint
|   +-- Stalled         no event is left, but the run is not finished
+-- InvariantBroken     a protocol's own check failed, or a tensor changed after it was sent
+-- InternalError       Tether itself is at fault: an unexpected exception outside the user's code
+-- WireError           a message that is malformed, too large or of an unknown type

KeyboardInterrupt
+-- Interrupted         the user ended a run; it carries the run's result so far
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class TetherError(Exception):
    """The root of the tree above."""


class UsageError(TetherError):
    """The message says what was wrong, what was expected and what to do."""


class TaskError(UsageError):
    """The user's task cannot be trained as it is."""


class Diverged(TaskError):
    """Losses, gradients or weights became infinite or NaN: with these settings the task cannot be trained."""


class Damaged(UsageError):
    """A file of a run cannot be used; the message begins with its name."""


class RunError(TetherError):
    """A run ended before it was finished, through no fault of its task."""


class NodesLost(RunError):
    """The run lost nodes that it cannot continue without."""

    #: when they died, and after how many events, if the simulator says so
    seconds = 0.0
    events = 0


class Stalled(RunError):
    """No event is left and the run is not finished: a protocol waits for something that cannot happen."""


class InvariantBroken(TetherError):
    """A protocol's invariant does not hold."""


class InternalError(TetherError):
    """A fault in Tether. The traceback is in `__cause__` or, if another process failed, in a note."""


class WireError(TetherError):
    """A message that must be refused."""


class Interrupted(KeyboardInterrupt):
    """The user has interrupted a run.

    `result` is what `run` would have returned: the current joint model, metrics and figures. It is None if nothing was
    learned yet or if the run could not shut down in time. `directory` is the run directory.
    """

    def __init__(self, directory: Path, result: Any = None, *, command: str = "") -> None:
        """`command` continues the run, if that is possible."""
        self.directory = directory
        self.result = result
        when = f"after step {result.figures['steps']}" if result is not None else "without a result"
        how = f"; continue with '{command}'" if command else ""
        if result is None and not command:
            how = f" and without a checkpoint: start the run again; --run {directory} (run_dir) reuses its directory"
        super().__init__(f"interrupted {when}{how}")


def internal(error: Exception | str, node: str = "") -> InternalError:
    """The error for an unexpected exception in a node or in the caller's own process."""
    what = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    where = f" in {node}" if node else ""
    return InternalError(
        f"internal error{where}: {what}. This is a fault in Tether, not in your task: please report it, with the "
        "traceback"
    )


@contextmanager
def own_faults() -> Iterator[None]:
    """Turn every exception that is not in the tree above into an internal error."""
    try:
        yield
    except TetherError:
        raise
    except Exception as error:
        raise internal(error) from error


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for an unknown name: it lists the known ones and guesses which was meant."""
    names = sorted(known)
    return UsageError(f"unknown {kind} {name!r}; known: {', '.join(names)}.{guess(name, names)}")


def guess(name: str, known: Iterable[str]) -> str:
    """ " Did you mean NAME?" for the known name that is most similar; "" if none is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def missing_extra(package: str, extra: str) -> UsageError:
    """The error for an optional dependency that is not installed."""
    return UsageError(f"this needs {package}, which is not installed: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """What to type for the packages of an extra. No package index has Tether itself."""
    return f"in Tether's folder, pip install -c constraints.txt '.[{extra}]'"
