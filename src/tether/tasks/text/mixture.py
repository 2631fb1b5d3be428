"""How the probabilities of the linear model and of the convolution are joined: learned from held-out rows.

The probability of a label is share x P(linear) + (1 - share) x P(network). Each P is a softmax of scores times a
factor; where rows may have several labels, it is a sigmoid of scores times a factor plus an offset. The likelihood of
the held-out rows decides. A prior, worth a few rows, keeps the defaults where held-out rows are too few to know better.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

#: how many held-out rows the prior is worth, for each parameter
_PRIOR_ROWS = 4.0


@dataclass(frozen=True)
class Mixture:
    """The parameters of the combination."""

    #: of the linear model; the network has the rest
    share: float
    linear_factor: float
    network_factor: float = 1.0
    linear_offset: float = 0.0
    network_offset: float = 0.0
    multilabel: bool = False

    @staticmethod
    def default(classes: int, multilabel: bool) -> Mixture:
        """What is right more often than not."""
        return Mixture(0.5, 2.0 if multilabel else 1.25 + math.log(classes), multilabel=multilabel)

    @staticmethod
    def learned(linear: Tensor, network: Tensor | None, targets: Tensor, multilabel: bool) -> Mixture:
        """From the scores of held-out rows; without scores of a network, for the linear model alone.

        `targets` are class numbers or, with `multilabel`, 1 or 0 of each class; they may be of no rows.
        """
        linear, network = linear.double(), None if network is None else network.double()
        start = Mixture.default(linear.shape[1], multilabel)
        begin = torch.tensor([0.0, math.log(start.linear_factor), 0.0, 0.0, 0.0], dtype=torch.float64)
        shift = torch.zeros_like(begin, requires_grad=True)

        def parameters() -> list[Tensor]:
            raw = begin + shift
            return [raw[0].sigmoid(), raw[1].exp(), raw[2].exp(), raw[3], raw[4]]

        def objective() -> Tensor:
            mixed = _mixed(linear, network, parameters(), multilabel)
            mixed = mixed.clamp(1e-9, 1 - 1e-9)
            if multilabel:
                loss = functional.binary_cross_entropy(mixed, targets.double(), reduction="sum")
            else:
                loss = functional.nll_loss(mixed.log(), targets, reduction="sum")
            return loss + _PRIOR_ROWS * (shift * shift).sum()

        optimizer = torch.optim.LBFGS([shift], max_iter=50, line_search_fn="strong_wolfe")

        def closure() -> float:
            optimizer.zero_grad()
            value = objective()
            torch.autograd.backward(value)
            return value.item()

        with torch.enable_grad():
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        share, linear_factor, network_factor, linear_offset, network_offset = (float(p.item()) for p in parameters())
        if network is None:
            share = 1.0
        return Mixture(share, linear_factor, network_factor, linear_offset, network_offset, multilabel)

    def probabilities(self, linear: Tensor, network: Tensor | None) -> Tensor:
        """Of each label of each row."""
        values = [self.share, self.linear_factor, self.network_factor, self.linear_offset, self.network_offset]
        return _mixed(linear, network, [torch.tensor(value) for value in values], self.multilabel)

    def described(self) -> dict[str, float | bool]:
        """As JSON can hold it."""
        return asdict(self)


def _mixed(linear: Tensor, network: Tensor | None, parameters: list[Tensor], multilabel: bool) -> Tensor:
    share, linear_factor, network_factor, linear_offset, network_offset = parameters
    if multilabel:
        first = (linear * linear_factor + linear_offset).sigmoid()
        second = None if network is None else (network * network_factor + network_offset).sigmoid()
    else:
        first = (linear * linear_factor).softmax(1)
        second = None if network is None else (network * network_factor).softmax(1)
    return first if second is None else share * first + (1 - share) * second
