"""The task's optimizer on the flat vector: on runs of it, on one part of it, and with other settings for one step.

An optimizer that treats every element alike gives the same result on one long tensor as on many short ones, and is
faster there: one fused step instead of one per parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tether.core.vector import Vector, shards
from tether.errors import TaskError

#: optimizers that treat every element alike, so that a flat vector gives the same result as separate parameters
ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
}
_FUSED_ON_CPU = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad}


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer treats every element alike: one of torch's, or one whose class says `elementwise = True`."""
    return type(optimizer) in ELEMENTWISE or vars(type(optimizer)).get("elementwise") is True


class FlatRun(nn.Parameter):
    """A run of the vector as an optimizer sees it: neighbouring parameters of one group, as one flat parameter."""

    start: int

    @staticmethod
    def of(vector: Vector, start: int, stop: int) -> FlatRun:
        run = FlatRun(vector.weights[start:stop])
        run.start = start
        return run


def flatten(
    optimizer: torch.optim.Optimizer, vector: Vector, separate: Iterable[tuple[int, int]] = ()
) -> list[FlatRun] | None:
    """Make an optimizer work on whole runs of the flat vector instead of on one parameter after another.

    The optimizer keeps its class, groups and settings. Parameters at the positions `separate` stay runs of their own.
    Returns the runs, each of which needs its gradient before a step. Returns None, and changes nothing, if the
    optimizer is not elementwise.
    """
    if not is_elementwise(optimizer):
        return None
    positions = {
        id(parameter): (start, start + parameter.numel())
        for parameter, start in zip(vector.parameters, vector.positions, strict=False)
    }
    edges = {edge for bounds in separate for edge in bounds}
    flat_runs: list[FlatRun] = []
    for group in optimizer.param_groups:
        if any(p.requires_grad and id(p) not in positions for p in group["params"]):
            raise TaskError(
                "the optimizer holds a parameter that is not the model's: make it part of what model() returns"
            )
        runs: list[list[int]] = []
        for start, stop in sorted(positions[id(p)] for p in group["params"] if id(p) in positions):
            if runs and runs[-1][1] == start and start not in edges:
                runs[-1][1] = stop
            else:
                runs.append([start, stop])
        group["params"] = [FlatRun.of(vector, start, stop) for start, stop in runs]
        flat_runs += group["params"]
        if type(optimizer) in _FUSED_ON_CPU and group.get("fused") is None and not group.get("foreach"):
            group["fused"] = not group.get("differentiable", False)
    optimizer.state.clear()
    return flat_runs


class OptimizerSplit:
    """How a flat optimizer is divided among several hubs, each of which steps one part of the vector.

    Runs are cut where a part ends, which makes no difference to an optimizer that treats every element alike. So the
    states of all parts join into the state of one optimizer over the whole vector, and a run with any number of hubs
    can resume from that.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter_count: int, index: int, count: int) -> None:
        """`optimizer` covers the whole vector; this hub steps part `index` of `count`."""
        self._parts = shards(parameter_count, count)
        self.own = self._parts[index]
        self._groups = [
            [(run.start, run.start + len(run)) for run in group["params"]] for group in optimizer.param_groups
        ]

    def restrict(self, optimizer: torch.optim.Optimizer, vector: Vector) -> list[FlatRun]:
        """Leave the optimizer only the runs of its own part, and return them."""
        for group, runs in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [
                FlatRun.of(vector, *piece) for run in runs if (piece := _overlap(run, self.own)) is not None
            ]
        return [run for group in optimizer.param_groups for run in group["params"]]

    def join_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of an optimizer over the whole vector, from the states of all parts in order."""
        pieces_of_run: dict[int, list[dict[str, Any]]] = {}
        for part, state in zip(self._parts, states, strict=True):
            for piece, number in enumerate(self._runs_in(part)):
                pieces_of_run.setdefault(number, []).append(state["state"].get(piece, {}))
        whole = {
            number: {
                name: torch.cat([piece[name] for piece in pieces])
                if isinstance(value, Tensor) and value.ndim
                else value
                for name, value in pieces[0].items()
            }
            for number, pieces in pieces_of_run.items()
            if all(pieces)  # a hub that has never stepped has no state
        }
        return {"state": whole, "param_groups": self._renumbered(states[0], [len(runs) for runs in self._groups])}

    def cut_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of this part, from the state of an optimizer over the whole vector."""
        runs = [run for group in self._groups for run in group]
        own: dict[int, dict[str, Any]] = {}
        for piece, number in enumerate(self._runs_in(self.own)):
            start, stop = _overlap(runs[number], self.own) or (0, 0)
            within = slice(start - runs[number][0], stop - runs[number][0])
            own[piece] = {  # copies, since other hubs may be given the same state
                name: (value[within] if value.ndim else value).clone() if isinstance(value, Tensor) else value
                for name, value in state["state"].get(number, {}).items()
            }
        counts = [sum(_overlap(run, self.own) is not None for run in runs) for runs in self._groups]
        return {"state": {k: v for k, v in own.items() if v}, "param_groups": self._renumbered(state, counts)}

    def _runs_in(self, part: slice) -> list[int]:
        """The numbers of those runs of the whole vector that overlap with a part."""
        runs = [run for group in self._groups for run in group]
        return [number for number, run in enumerate(runs) if _overlap(run, part) is not None]

    @staticmethod
    def _renumbered(state: dict[str, Any], counts: list[int]) -> list[dict[str, Any]]:
        """The settings of a state's groups, when group i has `counts[i]` runs."""
        numbers = iter(range(sum(counts)))
        groups = zip(state["param_groups"], counts, strict=True)
        return [{**group, "params": list(itertools.islice(numbers, count))} for group, count in groups]


def _overlap(run: tuple[int, int], part: slice) -> tuple[int, int] | None:
    start, stop = max(run[0], part.start), min(run[1], part.stop)
    return (start, stop) if start < stop else None


@contextmanager
def adjusted(optimizer: torch.optim.Optimizer, rate: float, staleness: float) -> Iterator[None]:
    """The optimizer with `rate` times its learning rate and with a momentum that suits stale gradients, for one step.

    A velocity decays as if the updates that a gradient has missed were steps of its own: staleness itself acts as
    momentum (Mitliagkas et al., "Asynchrony begets momentum"), and both together make training diverge. With less
    momentum, the learning rate that was chosen for it is too high as well: it is divided by the square root of
    1 + staleness. Without momentum the rate is left alone.
    """
    names: tuple[str, ...] = ("lr", "momentum")
    usual = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        change = rate
        if group.get("momentum"):
            group["momentum"] = group["momentum"] ** (1 + staleness)
            change /= math.sqrt(1 + staleness)
        if change != 1.0:
            group["lr"] = group["lr"] * change
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, usual, strict=True):
            group.update(own)
