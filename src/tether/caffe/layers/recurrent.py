"""Recurrent layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tether.caffe.fillers import Filler
from tether.caffe.layers.base import Layer, check_count, positive, shapes
from tether.errors import UsageError


class Recurrent(Layer):
    """A recurrent layer over time steps: bottoms are x (T, N, ...), cont (T, N) and perhaps a static input.

    cont is 0 where a sequence begins. What a sequence has left behind is kept for the next mini-batch, as in Caffe.
    """

    bottoms_range, tops_range = (2, 5), (1, 3)
    states = 1
    gates = 1

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        param = spec.recurrent_param
        self.size = positive(param.num_output, "num_output")
        self.exposes = bool(param.expose_hidden)
        hidden = self.states if self.exposes else 0
        if bottoms[0].ndim < 3 or bottoms[1].shape != bottoms[0].shape[:2]:
            raise UsageError("bottoms must be x with the axes time, sequence and values, and cont with the first two")
        if len(bottoms) - hidden not in (2, 3) or self.top_count != 1 + hidden:
            raise UsageError(f"with {hidden} exposed states there are {2 + hidden} or {3 + hidden} bottoms")
        self.static = len(bottoms) - hidden == 3
        weight, bias = Filler.of(param, "weight_filler"), Filler.of(param, "bias_filler")
        rows = self.gates * self.size
        self.add_parameter("input_weight", (rows, math.prod(bottoms[0].shape[2:])), weight)
        self.add_parameter("input_bias", (rows,), bias)
        if self.static:
            self.add_parameter("static_weight", (rows, math.prod(bottoms[2].shape[1:])), weight)
        self.add_parameter("hidden_weight", (rows, self.size), weight)
        self.more_parameters(weight, bias)
        self._carried: tuple[Tensor, ...] | None = None

    def more_parameters(self, weight: Filler, bias: Filler) -> None:
        pass

    def infer(self, bottoms: list[Tensor]) -> tuple[Tensor, ...]:
        steps, count = bottoms[0].shape[:2]
        top = torch.empty(check_count((steps, count, self.size), "the top"), device="meta")
        state = torch.empty((1, count, self.size), device="meta")
        return (top, *[state] * (self.states if self.exposes else 0))

    def forward(self, inputs: Tensor, cont: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        projected = functional.linear(inputs.flatten(2), self.input_weight, self.input_bias)
        if self.static:
            projected = projected + functional.linear(more[0].flatten(1), self.static_weight)
            more = more[1:]
        count = inputs.shape[1]
        # as in Caffe, no gradient passes through states that are bottoms or tops
        states = tuple(state[0].detach() for state in more)
        if not states:
            kept = self._carried
            fits = kept is not None and kept[0].shape[0] == count and kept[0].device == inputs.device
            states = (
                kept
                if fits and kept is not None
                else tuple(inputs.new_zeros(count, self.size) for _ in range(self.states))
            )
        outputs = []
        for step in range(inputs.shape[0]):
            output, states = self.one_step(projected[step], cont[step].unsqueeze(1), states)
            outputs.append(output)
        self._carried = tuple(state.detach() for state in states)
        return (torch.stack(outputs), *([state.unsqueeze(0) for state in self._carried] if self.exposes else []))

    def one_step(self, given: Tensor, cont: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output and the states after one step; each kind of layer has its own."""
        raise NotImplementedError


class LSTM(Recurrent):
    states, gates = 2, 4

    def one_step(self, given: Tensor, cont: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden, cell = states
        gates = given + functional.linear(hidden * cont, self.hidden_weight)
        cell, hidden = lstm_step(cell, gates, cont)
        return hidden, (hidden, cell)


class RNN(Recurrent):
    def more_parameters(self, weight: Filler, bias: Filler) -> None:
        self.add_parameter("output_weight", (self.size, self.size), weight)
        self.add_parameter("output_bias", (self.size,), bias)

    def one_step(self, given: Tensor, cont: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden = (given + functional.linear(states[0] * cont, self.hidden_weight)).tanh()
        return functional.linear(hidden, self.output_weight, self.output_bias).tanh(), (hidden,)


class LSTMUnit(Layer):
    """One step of an LSTM: bottoms are the cell (1, N, D), the gates (1, N, 4 D) and cont (1, N)."""

    bottoms_range, tops_range = (3, 3), (2, 2)

    def set_up(self, spec: Any, bottoms: list[Tensor]) -> None:
        cell, gates, cont = (tuple(bottom.shape) for bottom in bottoms)
        if len(cell) != 3 or cell[0] != 1 or gates != (1, cell[1], 4 * cell[2]) or cont != (1, cell[1]):
            raise UsageError(
                f"bottoms must have the shapes (1, N, D), (1, N, 4 D) and (1, N), and not {shapes(bottoms)}"
            )

    def forward(self, cell: Tensor, gates: Tensor, cont: Tensor) -> tuple[Tensor, ...]:
        cell, hidden = lstm_step(cell, gates, cont.unsqueeze(2))
        return cell, hidden


def lstm_step(cell: Tensor, gates: Tensor, cont: Tensor) -> tuple[Tensor, Tensor]:
    """The next cell and hidden state."""
    into, forget, out, new = gates.chunk(4, dim=-1)
    cell = cont * forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return cell, out.sigmoid() * cell.tanh()
