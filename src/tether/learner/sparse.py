"""Embeddings whose gradients are the rows that a batch has touched.

A batch of a few sentences touches a few rows of an embedding of many thousands. torch can report which (`sparse=True`).
The gradient's other rows are zero already and stay zero, and the optimizer's step needs to look at the touched rows
only. Then the time of a step depends on the batch and not on the vocabulary.

- If an embedding was made with `sparse=True`, its touched rows alone are stepped, by SGD, momentum or Adam. Momentum
  and Adam are lazy: the moments of a row stay as they are until the row is touched.
- An ordinary `nn.Embedding` is treated the same way with plain SGD, where it makes no difference to the result.
- For any other large embedding, torch is asked for the touched rows too, since a whole gradient would have to be filled
  with zeros, copied and sent. All its rows are stepped: the touched ones are scattered into a gradient that is zero
  elsewhere.
- A gradient that is dense, because the weight is also used otherwise or because it was averaged, touches all rows.

A gradient that is sent by rows has the dense parameters first, without gaps, and behind them the touched rows of one
embedding after the other; the numbers of those rows are sent with it.

Moments are kept where the optimizer keeps them, so dense and sparse steps may take turns.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from tether.core.vector import Vector

#: a parameter with at least this many values is a run of its own
LARGE = 1 << 16


class SparseEmbedding:
    """One embedding's part of the vector, and the rows of it that the last gradient touched."""

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
        self.nonzero_rows: Tensor | None = None
        #: a gradient of the whole embedding, for steps of all rows, and which of its rows are not zero
        self._dense: Tensor | None = None
        self._dense_nonzero_rows: Tensor | None = None

    def collect(self) -> None:
        """After a backward pass: note the rows that it touched and their gradients."""
        gradient = self._parameter.grad
        if gradient is None:
            self.touched = torch.empty(0, dtype=torch.long, device=self._parameter.device)
            self.values = self._parameter.new_empty(0, self._parameter.shape[1])
        elif gradient.is_sparse:
            rows = gradient.coalesce()
            self.touched, self.values = rows.indices()[0], rows.values()
        else:
            self.clear()

    def load(self, rows: Tensor, gradient: Tensor, position: int) -> int:
        """Read the gradients of these rows from a gradient that was sent by rows; returns where the next ones begin."""
        end = position + len(rows) * self._parameter.shape[1]
        self.touched, self.values = rows, gradient[position:end].view(len(rows), -1)
        return end

    def clear(self) -> None:
        """Forget the touched rows."""
        self.touched = self.values = None

    def scatter(self) -> None:
        """Write the touched rows, if they are known, into the flat gradient."""
        if self.touched is not None:
            self._scatter_into(self._as_rows(self._vector.gradient), self.nonzero_rows)
        self.nonzero_rows = self.touched

    def dense_gradient(self) -> Tensor:
        """The gradient of all rows, flat; valid until the next call."""
        if self._dense is None:
            self._dense = torch.empty_like(self._parameter)
        self._scatter_into(self._dense, self._dense_nonzero_rows)
        self._dense_nonzero_rows = self.touched
        return self._dense.view(-1)

    def _scatter_into(self, gradient: Tensor, nonzero_rows: Tensor | None) -> None:
        assert self.touched is not None and self.values is not None
        if nonzero_rows is None:
            gradient.zero_()
        else:
            gradient.index_fill_(0, nonzero_rows, 0.0)
        gradient.index_copy_(0, self.touched, self.values)

    def step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], run: Tensor) -> None:
        """Do to the touched rows what the optimizer would do."""
        assert self.touched is not None and self.values is not None
        rows, change = self.touched, self.values
        state = optimizer.state[run]
        if isinstance(optimizer, torch.optim.Adam):
            if not state:
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(run), exp_avg_sq=torch.zeros_like(run))
            state["step"] += 1
            (first, second), steps, averages = group["betas"], float(state["step"]), []
            for name, beta, term in (("exp_avg", first, change), ("exp_avg_sq", second, change.square())):
                moments = self._as_rows(state[name])
                average = moments.index_select(0, rows).lerp_(term, 1 - beta)
                moments.index_copy_(0, rows, average)
                averages.append(average / (1 - beta**steps))
            change = averages[0] / averages[1].sqrt_().add_(group["eps"])
        elif group["momentum"]:
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(run)
            moments = self._as_rows(state["momentum_buffer"])
            change = moments.index_select(0, rows).mul_(group["momentum"]).add_(change)
            moments.index_copy_(0, rows, change)
        self._as_rows(self._vector.weights).index_add_(0, rows, change, alpha=-float(group["lr"]))

    def _as_rows(self, values: Tensor) -> Tensor:
        """The embedding's part of a vector, or the whole of a tensor that has just its length, as rows."""
        part = values if values.numel() == self._parameter.numel() else values[self.start : self.stop]
        return part.view(self._parameter.shape)


def sparse_embeddings(
    model: nn.Module, vector: Vector, optimizer: torch.optim.Optimizer, *, flat: bool
) -> list[SparseEmbedding]:
    """The embeddings whose gradients are handled by rows; sets their `sparse`, so that torch reports the rows.

    flat: whether the optimizer can be given other gradients than those that torch has made.
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
        lazy = type(part) is nn.Embedding and (part.sparse or plain) and _steps_rows(optimizer, group)
        if lazy or (flat and part.weight.requires_grad and part.weight.numel() >= LARGE):
            part.sparse = True
            found.append(SparseEmbedding(vector, part.weight, lazy=lazy))
    return sorted(found, key=lambda embedding: embedding.start)


def _steps_rows(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether `SparseEmbedding.step` can do what an optimizer with these settings does."""
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam):
        return False
    unknown = ("weight_decay", "maximize", "amsgrad", "dampening", "nesterov", "differentiable")
    return not any(group.get(name) for name in unknown)
