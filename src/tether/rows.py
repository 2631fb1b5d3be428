"""Embeddings whose gradients are the rows that a batch has touched.

A batch of a few sentences touches a few rows of an embedding of many thousands. torch can tell which (`sparse=True`);
the gradient's other rows are zero already and stay so, and the optimizer's step needs to look at the touched rows only.
Then a step costs what the batch costs, and not what the vocabulary does.

- An embedding that was made with `sparse=True` has its rows stepped by SGD, momentum or Adam. Momentum and Adam are
  lazy: the moments of a row that is not touched rest until it is.
- An ordinary `nn.Embedding` is treated so with plain SGD, where it makes no difference to the result.
- A gradient that comes from elsewhere, or that is dense because the weight is also used otherwise, touches all rows.

Moments are kept where the optimizer keeps them, so dense and sparse steps may take turns.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from tether.vector import Vector


class Rows:
    """One embedding's part of the vector."""

    def __init__(self, vector: Vector, parameter: Tensor) -> None:
        self._vector = vector
        self._parameter = parameter
        self.start = vector.positions[next(i for i, p in enumerate(vector.parameters) if p is parameter)]
        self.stop = self.start + parameter.numel()
        #: the rows that have a gradient; None: all, or not known
        self.touched: Tensor | None = None
        self._seen: list[Tensor] = []
        self._dense = False
        parameter.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, gradient: Tensor) -> None:
        if gradient.is_sparse:
            self._seen.append(gradient._indices()[0])
        else:
            self._dense = True

    def gather(self) -> None:
        """After a backward pass: know the rows that it touched."""
        self.touched = None
        if not self._dense:
            self.touched = torch.unique(torch.cat(self._seen)) if self._seen else torch.empty(0, dtype=torch.long)
        self._seen, self._dense = [], False

    def zero(self) -> None:
        """Make the gradient zero again."""
        gradient = self._of(self._vector.gradient)
        if self.touched is None:
            gradient.zero_()
        else:
            gradient.index_fill_(0, self.touched, 0.0)
        self.touched = None

    def step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], run: Tensor, rate: float) -> None:
        """What the optimizer would do to the touched rows."""
        assert self.touched is not None
        rows, weights = self.touched, self._of(self._vector.weights)
        change = self._of(self._vector.gradient).index_select(0, rows)
        state = optimizer.state[run]
        if isinstance(optimizer, torch.optim.Adam):
            if not state:
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(run), exp_avg_sq=torch.zeros_like(run))
            state["step"] += 1
            (first, second), steps, averages = group["betas"], float(state["step"]), []
            for name, beta, term in (("exp_avg", first, change), ("exp_avg_sq", second, change.square())):
                kept = self._of(state[name])
                average = kept.index_select(0, rows).lerp_(term, 1 - beta)
                kept.index_copy_(0, rows, average)
                averages.append(average / (1 - beta**steps))
            change = averages[0] / averages[1].sqrt_().add_(group["eps"])
        elif group["momentum"]:
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(run)
            kept = self._of(state["momentum_buffer"])
            change += kept.index_select(0, rows).mul_(group["momentum"])
            kept.index_copy_(0, rows, change)
        weights.index_add_(0, rows, change, alpha=-float(group["lr"]) * rate)

    def _of(self, values: Tensor) -> Tensor:
        """The embedding's part of the vector, or the whole of a tensor that is as long as that, as rows."""
        part = values if values.numel() == self._parameter.numel() else values[self.start : self.stop]
        return part.view(self._parameter.shape)


def rows_of(model: nn.Module, vector: Vector, optimizer: torch.optim.Optimizer) -> list[Rows]:
    """The embeddings whose rows can be stepped one by one, made so that torch tells which those are."""
    owners = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = []
    for part in model.modules():
        if type(part) is not nn.Embedding or owners[id(part.weight)] > 1 or id(part.weight) not in groups:
            continue
        group = groups[id(part.weight)]
        plain = isinstance(optimizer, torch.optim.SGD) and not group["momentum"]
        if part.max_norm is None and not part.scale_grad_by_freq and (part.sparse or plain) and _able(optimizer, group):
            part.sparse = True
            found.append(Rows(vector, part.weight))
    return sorted(found, key=lambda part: part.start)


def _able(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer's settings are those that `Rows.step` knows."""
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam):
        return False
    unknown = ("weight_decay", "maximize", "amsgrad", "dampening", "nesterov", "differentiable")
    return not any(group.get(name) for name in unknown)
