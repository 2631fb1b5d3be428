"""Clipping of gradients, and the scale that keeps gradients in half precision from vanishing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: where the scale begins, and after how many gradients without an overflow it doubles; those of torch's GradScaler
SCALE_FIRST, SCALE_GROWS_AFTER = 2.0**16, 2000
#: torch's autocast for each precision of a task that needs it
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Clip:
    """Limits every value of a gradient, and then its Euclidean norm."""

    norm: float | None = None
    value: float | None = None

    @property
    def is_set(self) -> bool:
        return self.norm is not None or self.value is not None

    def apply(self, whole: Sequence[Tensor], copies: Sequence[Tensor] = ()) -> None:
        """Clip the gradient that consists of the tensors in `whole`, in place, and tensors that hold parts of it again.

        The norm is that of the gradient in `whole`.
        """
        if self.value is not None:
            for part in (*whole, *copies):
                part.clamp_(-self.value, self.value)
        if (factor := self._factor(whole)) != 1.0:
            for part in (*whole, *copies):
                part.mul_(factor)

    def applied(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """The gradient that consists of these tensors after clipping; the tensors themselves stay as they are."""
        if self.value is not None:
            whole = [part.clamp(-self.value, self.value) for part in whole]
        factor = self._factor(whole)
        return [part if factor == 1.0 else part * factor for part in whole]

    def _factor(self, whole: Sequence[Tensor]) -> float:
        if self.norm is None:
            return 1.0
        length = math.sqrt(sum(float(part.norm(dtype=torch.float32)) ** 2 for part in whole))
        return min(1.0, self.norm / length) if length > 0 else 1.0


class Scale:
    """The factor of the loss under fp16: a power of two, so that multiplying and dividing by it changes no digit.

    Without it, small gradients would be rounded to zero. A gradient that overflows halves it, and many without an
    overflow double it.
    """

    def __init__(self, precision: str) -> None:
        self.factor = SCALE_FIRST if precision == "fp16" else 1.0
        self._grows = precision == "fp16"
        self._good = 0

    def unscale(self, values: Sequence[Tensor]) -> None:
        """Divide a gradient by the factor, in place."""
        if self.factor != 1.0:
            for part in values:
                part.div_(self.factor)

    def good(self) -> None:
        """A gradient did not overflow."""
        self._good += 1
        if self._grows and self._good % SCALE_GROWS_AFTER == 0:
            self.factor *= 2

    def reduce(self) -> bool:
        """A gradient has overflowed: halve the factor. False if it was 1, and the scale is not the reason."""
        if self.factor <= 1.0:
            return False
        self.factor /= 2
        self._good = 0
        return True
