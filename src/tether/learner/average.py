"""The exponential moving average of a node's weights."""

from __future__ import annotations

from torch import Tensor


class MovingAverage:
    """An average in which recent weights count most. It begins with the first weights that it is given."""

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def update(self, weights: Tensor, decay: float) -> None:
        """Keep `decay` of the average, and take the rest from these weights."""
        if self.values is None:
            self.values = weights.detach().clone()
        else:
            self.values.lerp_(weights, 1 - decay)
