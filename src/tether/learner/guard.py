"""Which gradients must not be used: those that are not finite, and those that are far longer than usual."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from torch import Tensor

#: how many gradients determine what is usual; the first ones, up to this number, are never refused
GUARD_HISTORY = 16
#: a worker may have this many gradients that are not finite, or this share of its steps if that is more
SKIPPED_MIN, SKIPPED_SHARE = 10, 0.05


def too_many_skipped(skipped: int, steps: int) -> bool:
    """Whether too many of a worker's gradients were not finite, after this number of steps."""
    return skipped > max(SKIPPED_MIN, SKIPPED_SHARE * steps)


class Guard:
    """Recognizes gradients that are far longer than the median of the last ones that were not refused."""

    def __init__(self, times: float) -> None:
        """A gradient that is longer than `times` the median is refused; with 0 none ever is."""
        self._times = times
        self._norms: deque[float] = deque(maxlen=GUARD_HISTORY)

    def refuses(self, values: Iterable[Tensor]) -> bool:
        """Whether the gradient that consists of these values must not be used."""
        if not self._times:
            return False
        norm = math.sqrt(sum(float(part.square().sum()) for part in values))
        if len(self._norms) == GUARD_HISTORY and norm > self._times * statistics.median(self._norms) > 0:
            return True
        self._norms.append(norm)
        return False
