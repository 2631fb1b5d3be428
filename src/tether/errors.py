"""Every error that Tether raises on purpose.

TetherError
+-- UsageError          what was asked for cannot be: an unknown name, a bad value, a missing extra
|   +-- TaskError       the task itself is wrong: a missing method, a loss that is no scalar
|       +-- Diverged    losses, gradients or weights are not finite any more
+-- RunError            a run that started properly ended badly
|   +-- NodesLost       no worker is left, or the hub has died: it can resume from its last checkpoint
|   +-- Stalled         nothing can happen any more although the run is not finished
+-- InvariantBroken     a protocol's own check failed, or a tensor changed after it was sent
+-- WireError           a message that is malformed, too large or of an unknown type
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TetherError(Exception):
    """The root of the tree above."""


class UsageError(TetherError):
    """The message says what was wrong, what was expected and what to do."""


class TaskError(UsageError):
    """The user's task cannot be trained as it is."""


class Diverged(TaskError):
    """Losses, gradients or weights became infinite or NaN: with these settings the task cannot be trained."""


class RunError(TetherError):
    """A run ended before it was finished, through no fault of its task."""


class NodesLost(RunError):
    """Nodes have died without which the run cannot go on."""

    #: when that was, as the simulator tells
    seconds = 0.0
    events = 0


class Stalled(RunError):
    """No event is left and the run is not finished: a protocol waits for something that cannot come."""


class InvariantBroken(TetherError):
    """A protocol's invariant does not hold."""


class WireError(TetherError):
    """A message that must be refused."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name nobody knows: it lists the known ones and guesses what was meant."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return UsageError(f"unknown {kind} {name!r}; known: {', '.join(names)}.{guess}")


def missing_extra(package: str, extra: str) -> UsageError:
    """The error for an optional dependency that is not installed."""
    return UsageError(f"this needs {package}, which is not installed: pip install 'tether[{extra}]'")
