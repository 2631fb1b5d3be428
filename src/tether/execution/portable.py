"""A plan made of the plain values and tensors that `RunPlan.portable` returns: it travels without being pickled.

The receiver has the code of the task. Before any of it is imported, its file is compared with the sender's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from tether.core.machine import Node, Schedule
from tether.core.wire import unpack_tree
from tether.errors import UsageError
from tether.execution.checkpoint import Restored
from tether.execution.plan import PLAIN_FIELDS, RunPlan
from tether.learner.learner import InitialWeights
from tether.protocols import make as make_protocol
from tether.task import Task, code_hash


def unpack(
    packed: Any, tensors: list[Tensor], find: Callable[[str], Path], load: Callable[[str, str, dict[str, str]], Task]
) -> RunPlan:
    """The plan on a machine that has the task; UsageError if its code or model is another.

    `find` is given the task's spec and returns the file that has it; `load` makes the task from spec, data and
    settings.
    """
    values = unpack_tree(packed, tensors)
    spec = values["task"]
    file = find(spec["spec"])
    if code_hash(file) != values["code"]:
        raise UsageError(f"the code of task {spec['spec']} differs: {file} is not the file that the driver has")
    restored, initial = values.get("restored"), values.get("initial")
    plan = RunPlan(
        task=load(spec["spec"], spec["data"], spec["settings"]),
        protocol=make_protocol(values["protocol"]),
        nodes=tuple(msgspec.convert(values["nodes"], tuple[Node, ...])),
        schedule=msgspec.convert(values["schedule"], Schedule),
        record=False,
        virtual=False,
        restored=_restored(*restored) if restored is not None else None,
        initial=InitialWeights(*initial) if initial is not None else None,
        task_spec=spec,
        **{name: values[name] for name in PLAIN_FIELDS},
    )
    if difference := _difference(plan.shapes(), values["shapes"]):
        raise UsageError(f"the model of task {spec['spec']} differs from the driver's: {difference}")
    return plan


def _restored(
    step: int, samples: int, weights: Tensor, state: dict[str, Any], protocol: str, others: dict[str, Tensor]
) -> Restored:
    return Restored(step, samples, weights, state, {}, protocol, others=others)


def _difference(own: dict[str, list[int]], expected: dict[str, list[int]]) -> str:
    """The first tensor in which two models differ, or ""."""
    for name in {**expected, **own}:
        if own.get(name) != expected.get(name):
            return f"{name} has shape {own.get(name)} instead of {expected.get(name)}"
    return ""
