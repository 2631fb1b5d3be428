"""Embeddings whose gradients are the rows that a batch has touched.

A batch of a few sentences touches a few rows of an embedding of many thousands. torch can tell which (`sparse=True`);
the gradient's other rows are zero already and stay so, and the optimizer's step needs to look at the touched rows only.
Then a step costs what the batch costs, and not what the vocabulary does.

- An embedding that was made with `sparse=True` has its rows stepped by SGD, momentum or Adam. Momentum and Adam are
  lazy: the moments of a row that is not touched rest until it is.
- An ordinary `nn.Embedding` is treated so with plain SGD, where it makes no difference to the result.
- Of any other large embedding torch is asked for the touched rows as well, since a whole gradient would have to be
  filled with zeros, copied and sent. All its rows are stepped: who steps lays the touched ones into a gradient that is
  zero elsewhere.
- A gradient that is dense, because the weight is also used otherwise or because it was averaged, touches all rows.

A gradient that travels as it is has the dense parameters first, without gaps, and behind them the touched rows of one
embedding after the other; which those are goes along.

Moments are kept where the optimizer keeps them, so dense and sparse steps may take turns.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from tether.vector import Vector

#: a parameter of so many values is handled by itself
LARGE = 1 << 16


class Rows:
    """One embedding's part of the vector."""

    def __init__(self, vector: Vector, parameter: Tensor, *, lazy: bool) -> None:
        self._vector = vector
        self._parameter = parameter
        #: whether rows that are not touched stay as they are
        self.lazy = lazy
        self.start = vector.positions[next(i for i, p in enumerate(vector.parameters) if p is parameter)]
        self.stop = self.start + parameter.numel()
        #: the rows that have a gradient; None: all, or not known
        self.touched: Tensor | None = None
        #: the gradient of each of those
        self.values: Tensor | None = None
        #: the rows of the flat gradient that are not zero; None: not known
        self.laid: Tensor | None = None
        #: a gradient of the whole embedding, for steps of all rows, and which of its rows are not zero
        self._whole: Tensor | None = None
        self._whole_laid: Tensor | None = None

    def take(self) -> None:
        """After a backward pass: know the rows that it touched."""
        gradient = self._parameter.grad
        if gradient is None:
            self.touched = torch.empty(0, dtype=torch.long, device=self._parameter.device)
            self.values = self._parameter.new_empty(0, self._parameter.shape[1])
        elif gradient.is_sparse:
            rows = gradient.coalesce()
            self.touched, self.values = rows.indices()[0], rows.values()
        else:
            self.drop()

    def put(self, rows: Tensor, gradient: Tensor, position: int) -> int:
        """Take these rows' gradients from a position of one that has travelled; where the next begin."""
        end = position + len(rows) * self._parameter.shape[1]
        self.touched, self.values = rows, gradient[position:end].view(len(rows), -1)
        return end

    def drop(self) -> None:
        """Know of no rows any more."""
        self.touched = self.values = None

    def lay(self) -> None:
        """Put the touched rows, if they are known, into the flat gradient."""
        if self.touched is not None:
            self._lay_into(self._of(self._vector.gradient), self.laid)
        self.laid = self.touched

    def whole(self) -> Tensor:
        """The gradient of all rows, flat; good until the next one."""
        if self._whole is None:
            self._whole = torch.empty_like(self._parameter)
        self._lay_into(self._whole, self._whole_laid)
        self._whole_laid = self.touched
        return self._whole.view(-1)

    def _lay_into(self, place: Tensor, laid: Tensor | None) -> None:
        assert self.touched is not None and self.values is not None
        if laid is None:
            place.zero_()
        else:
            place.index_fill_(0, laid, 0.0)
        place.index_copy_(0, self.touched, self.values)

    def step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], run: Tensor) -> None:
        """What the optimizer would do to the touched rows."""
        assert self.touched is not None and self.values is not None
        rows, change = self.touched, self.values
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
            change = kept.index_select(0, rows).mul_(group["momentum"]).add_(change)
            kept.index_copy_(0, rows, change)
        self._of(self._vector.weights).index_add_(0, rows, change, alpha=-float(group["lr"]))

    def _of(self, values: Tensor) -> Tensor:
        """The embedding's part of the vector, or the whole of a tensor that is as long as that, as rows."""
        part = values if values.numel() == self._parameter.numel() else values[self.start : self.stop]
        return part.view(self._parameter.shape)


def rows_of(model: nn.Module, vector: Vector, optimizer: torch.optim.Optimizer, *, flat: bool) -> list[Rows]:
    """The embeddings whose gradients are rows, made so that torch tells which those are.

    flat: whether the optimizer can be given gradients in place of those that torch has made.
    """
    owners = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = []
    for part in model.modules():
        if not isinstance(part, nn.Embedding) or type(part).forward is not nn.Embedding.forward:
            continue
        group = groups.get(id(part.weight))
        if group is None or owners[id(part.weight)] > 1 or part.max_norm is not None or part.scale_grad_by_freq:
            continue
        plain = isinstance(optimizer, torch.optim.SGD) and not group["momentum"]
        lazy = type(part) is nn.Embedding and (part.sparse or plain) and _able(optimizer, group)
        if lazy or (flat and part.weight.requires_grad and part.weight.numel() >= LARGE):
            part.sparse = True
            found.append(Rows(vector, part.weight, lazy=lazy))
    return sorted(found, key=lambda part: part.start)


def _able(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer's settings are those that `Rows.step` knows."""
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam):
        return False
    unknown = ("weight_decay", "maximize", "amsgrad", "dampening", "nesterov", "differentiable")
    return not any(group.get(name) for name in unknown)
